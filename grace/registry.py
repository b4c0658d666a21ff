"""Names: `register` puts a class under one, `grace_from_params` builds a Grace from a dictionary of them.

Keys and defaults are the dataclass fields of the classes. Nothing is listed a second time.
"""

from __future__ import annotations

import difflib
import importlib
import json
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from grace.communicators.base import Communicator
from grace.core import Combine, Compressor, Memory, Transport, name_of
from grace.method import Method
from grace.pipeline import Grace, Options
from grace.policies.base import Policy
from grace.transports import get_transport, known_transport
from grace.values import checked

C = TypeVar("C", bound=type)


class Registry(Mapping[str, type]):
    """Classes of one kind by name, in the order of their names. Aliases find them too but are not listed."""

    def __init__(self, kind: str, package: str):
        self.kind = kind
        self._package = package
        self._loaded = False
        self._classes: dict[str, type] = {}
        self._aliases: dict[str, str] = {}

    def add(self, cls: type, name: str, *aliases: str) -> None:
        """Put a class under a name; raises ValueError if another class has it."""
        for each in (name, *aliases):
            known = self._classes.get(each) or self._classes.get(self._aliases.get(each, ""))
            if known is not None and known.__qualname__ != cls.__qualname__:
                raise ValueError(
                    f"{self.kind} {each!r} is already registered by {known.__module__}.{known.__qualname__}"
                )
        self._classes[name] = cls
        self._aliases.update(dict.fromkeys(aliases, name))

    def aliases(self, name: str) -> list[str]:
        """The other names of a class."""
        self._load()
        return sorted(alias for alias, target in self._aliases.items() if target == name)

    def _load(self) -> None:
        if not self._loaded:
            self._loaded = True
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):  # each registers what it holds
                importlib.import_module(f"{self._package}.{module.name}")
            for entry in entry_points(group=self._package):
                try:
                    entry.load()
                except Exception as error:  # other people's code: what is left still works
                    owner = entry.dist.name if entry.dist else "a package"
                    warnings.warn(
                        f"{owner} offers the {self.kind} {entry.name!r}, but {entry.value!r} failed: {error!r}. "
                        f"Upgrade or uninstall {owner}",
                        stacklevel=2,
                    )

    def __getitem__(self, name: str) -> type:
        self._load()
        found = self._classes.get(self._aliases.get(name, name))
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._classes))

    def __len__(self) -> int:
        self._load()
        return len(self._classes)

    def find(self, name: Any) -> type:
        """The class of that name; raises ValueError with the nearest right name."""
        if isinstance(name, str) and name in self:
            return self[name]
        known = [*self, *self._aliases]
        raise ValueError(f"unknown {self.kind} {name!r}{nearest(str(name), known)}. Known: {', '.join(self)}")


compressors = Registry("compressor", "grace.compressors")
memories = Registry("memory", "grace.memories")
communicators = Registry("communicator", "grace.communicators")
policies = Registry("policy", "grace.policies")
REGISTRIES: dict[type, Registry] = {
    Compressor: compressors,
    Memory: memories,
    Communicator: communicators,
    Policy: policies,
}


def register(name: str, *aliases: str) -> Callable[[C], C]:
    """Class decorator: make a compressor, memory, communicator or policy known by name (and by other names)."""

    def decorate(cls: C) -> C:
        for kind, registry in REGISTRIES.items():
            if issubclass(cls, kind):
                registry.add(cls, name, *aliases)
                cls.registered_name = name  # type: ignore[attr-defined]
                return cls
        raise TypeError(
            f"{cls.__qualname__} is no Compressor, Memory, Communicator or Policy, so it cannot be registered"
        )

    return decorate


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean ...?)", or nothing if no known name is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def grace_from_params(params: Mapping[str, Any], transport: str | Transport | None = None) -> Grace:
    """Build a Grace from names and numbers.

    ``params``: ``compressor``, ``memory``, ``communicator``, and ``policy`` for what changes over time (names, or
    instances); the fields of these classes (such as ``compress_ratio``); the fields of `grace.pipeline.Options` (such
    as ``min_numel``); ``world_size``, if given, must be the transport's. What is left out has the default that a user
    should have: the memory that the method names, and allreduce for what can be summed on the wire, else allgather.

    ``compressor="auto"``: the first steps try dense gradients and several methods (``candidates``), and training goes
    on with what was fastest; see `grace.policies.auto.Auto`.

    ``plan``: a strategy for each tensor, and perhaps a method, instead of a communicator: the file that `grace plan`
    wrote, or what it holds. Worker 0's holds for all; only with a policy every worker needs it. It is made anew for
    other workers than it was made for, and for the levels of a policy, if it holds what it was made from.

    ``transport``: "horovod", "torch", "local" or a Transport; default: the one that is initialised. Where none is yet,
    the Grace looks for its workers when it is built or its ``world_size`` is read, and raises RuntimeError then if the
    launcher asks for several and there is still no group.

    Raises ValueError for an unknown name, key or value and for a combination that cannot work, naming one that does.
    """
    _check_params(params)
    rest = dict(params)
    carrier = known_transport(transport)
    if "world_size" in rest:
        carrier = carrier or get_transport()  # whoever says how many workers there are has made them
    size = rest.pop("world_size", None)
    if carrier is not None and size not in (None, carrier.size):
        raise ValueError(
            f"world_size={size!r}, but the transport has {carrier.size} worker(s): initialise Horovod or "
            "torch.distributed before grace_from_params, launch with horovodrun or torchrun, or leave world_size out"
        )
    if "plan" in rest:
        communicator = _planned(rest)
        rest = {"min_numel": 0, **rest, "communicator": communicator}
    if rest.get("compressor") == "auto":
        rest = _automatic(rest)
    compressor, memory, communicator = _three(rest)
    policy = rest.pop("policy", None)
    policy = None if policy is None else _take(policies, policy, rest)
    options = Options(**_values(Options, rest))
    if rest:
        parts = [part for part in (compressor, memory, communicator, policy) if part is not None]
        raise ValueError(_unknown_key(next(iter(rest)), *parts))
    return Grace(Method(compressor, memory), communicator, carrier, options, policy)


def _check_params(params: Any) -> None:
    if isinstance(params, Mapping):
        if odd := [key for key in params if not isinstance(key, str)]:
            raise TypeError(f"the keys of params are names, but {odd[0]!r} is {type(odd[0]).__name__}")
        return
    example = {"compressor": params if isinstance(params, str) else "topk"}
    raise TypeError(f"params is a dictionary, not {params!r:.80}: grace_from_params({example!r})")


def method_from_params(params: Mapping[str, Any]) -> Method:
    """A compressor with its memory from the keys that `grace_from_params` takes for them. ValueError for others."""
    rest = dict(params)
    compressor, memory = _pair(rest)
    if rest:
        raise ValueError(_unknown_key(next(iter(rest)), compressor, memory))
    return Method(compressor, memory)


def triple(params: str | Mapping[str, Any]) -> tuple[Method, Communicator]:
    """A method and its communicator: from the keys of `grace_from_params` for them, or from a compressor's name alone.

    ValueError for other keys.
    """
    rest = {"compressor": params} if isinstance(params, str) else dict(params)
    compressor, memory, communicator = _three(rest)
    if rest:
        raise ValueError(_unknown_key(next(iter(rest)), compressor, memory, communicator))
    return Method(compressor, memory), communicator


def _pair(rest: dict[str, Any]) -> tuple[Compressor, Memory]:
    # What is meant for them is taken out of ``rest``.
    compressor = _take(compressors, rest.pop("compressor", "none"), rest)
    return compressor, _take(memories, rest.pop("memory", compressor.memory), rest)


def _three(rest: dict[str, Any]) -> tuple[Compressor, Memory, Communicator]:
    compressor, memory = _pair(rest)
    return compressor, memory, _take(communicators, rest.pop("communicator", usual_communicator(compressor)), rest)


def _automatic(rest: dict[str, Any]) -> dict[str, Any]:
    # "auto" is a policy over whole methods.
    if odd := sorted({"memory", "communicator", "policy", "plan"} & rest.keys()):
        raise ValueError(f"compressor 'auto' chooses whole methods: give {odd[0]!r} to its candidates, as in "
                         f"candidates=[{{'compressor': 'topk', {odd[0]!r}: {rest[odd[0]]!r}}}]")  # fmt: skip
    return {**rest, "compressor": "none", "policy": "auto"}


def _planned(rest: dict[str, Any]) -> Communicator:
    # The communicator of a plan, which is a file's name, or its content; the file need be on worker 0 alone.
    from grace.communicators.planned import Planned
    from grace.planner.ways import Ways, leveled_params

    if "communicator" in rest:
        raise ValueError("a plan says how tensors travel: leave communicator out, or plan")
    if rest.get("fuse", "tensor") != "tensor":
        raise ValueError(f"a plan names tensors, but fuse={rest['fuse']!r} makes one of several: use fuse='tensor'")
    plan, policy = rest.pop("plan"), rest.get("policy")
    if isinstance(plan, Mapping):
        text = json.dumps(plan)
    else:
        text = Path(plan).read_text() if Path(plan).exists() else ""
    if policy is not None:
        kind: Any = policies.find(policy) if isinstance(policy, str) else policy
        if kind.switches_methods:
            raise ValueError(f"a plan has one method, and policy {policy!r} changes methods: leave out one of them")
        rest |= leveled_params(text, rest)
    return Planned(ways=Ways(text, leveled=policy is not None), node_size=rest.pop("node_size", 0))


def usual_communicator(compressor: Compressor) -> str:
    """The communicator that a compressor has where none is named."""
    return "allgather" if compressor.combine is Combine.GATHER else "allreduce"


def _take(registry: Registry, name: Any, rest: dict[str, Any]) -> Any:
    # An instance as it is; or the class of that name, with the values meant for it taken out of ``rest``.
    if not isinstance(name, str):
        for kind, known in REGISTRIES.items():
            if known is registry and isinstance(name, kind):
                return name
    cls = registry.find(name)
    return cls(**_values(cls, rest))


def _values(cls: type, rest: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for field in fields(cls):
        default: Any = field.default
        part = next((known for kind, known in REGISTRIES.items() if isinstance(default, kind)), None)
        if part is not None:  # made of parts, whose own keys are taken too
            chosen = rest.pop(field.name, None)
            if chosen is None:
                values[field.name] = replace(default, **_values(type(default), rest))
            else:
                values[field.name] = _take(part, chosen, rest)
        elif field.name in rest:
            value = rest.pop(field.name)
            values[field.name] = checked(field.name, value, value if default is MISSING else default)
    return values


def _unknown_key(key: str, *parts: Any) -> str:
    owners = [
        f"{registry.kind} {name!r}"
        for registry in REGISTRIES.values()
        for name, cls in registry.items()
        if key in {field.name for field in fields(cls)}
    ]
    if owners:
        chosen = ", ".join(repr(name_of(part)) for part in parts)
        return f"key {key!r} belongs to {' and '.join(owners)}, not to {chosen}; leave it out"
    known = {"compressor", "memory", "communicator", "policy", "world_size"}
    for cls in (Options, *map(type, parts)):
        known |= {field.name for field in fields(cls)}
    return f"unknown key {key!r}{nearest(key, known)}. Known here: {', '.join(sorted(known))}"
