"""Registries: compressors, memories, communicators and policies by name.

The keys of a class, and their defaults, are its dataclass fields; they are defined nowhere else.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from importlib.metadata import entry_points
from typing import Any, TypeVar

from grace.core import Combine, Compressor, Memory, name_of
from grace.core.communicator import Communicator
from grace.core.fields import checked
from grace.core.method import Method
from grace.core.policy import Policy

C = TypeVar("C", bound=type)


class Registry(Mapping[str, type]):
    """Classes of one kind by name, sorted. Lookup accepts aliases; iteration omits them."""

    def __init__(self, kind: str, package: str):
        self.kind = kind
        self._package = package
        self._loaded = False
        self._classes: dict[str, type] = {}
        self._aliases: dict[str, str] = {}

    def add(self, cls: type, name: str, *aliases: str) -> None:
        """Register a class under a name; raises ValueError if the name is taken."""
        for each in (name, *aliases):
            known = self._classes.get(each) or self._classes.get(self._aliases.get(each, ""))
            if known is not None and known.__qualname__ != cls.__qualname__:
                raise ValueError(
                    f"{self.kind} {each!r} is already registered by {known.__module__}.{known.__qualname__}"
                )
        self._classes[name] = cls
        self._aliases.update(dict.fromkeys(aliases, name))

    def aliases(self, name: str) -> list[str]:
        """A class's other names."""
        self._load()
        return sorted(alias for alias, target in self._aliases.items() if target == name)

    def _load(self) -> None:
        if not self._loaded:
            self._loaded = True
            package = importlib.import_module(self._package)
            for module in pkgutil.walk_packages(package.__path__, f"{self._package}."):
                importlib.import_module(module.name)
            offered(self._package, self.kind)  # imports modules that register their classes

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
        """Look a class up by name; raises ValueError with the nearest known name."""
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


def offered(group: str, kind: str, cls: type = object) -> list[Any]:
    """Load the entry points of a group from installed packages; warn about those that fail or are not a ``cls``."""
    found = []
    for entry in entry_points(group=group):
        try:
            if not isinstance(value := entry.load(), cls):
                raise TypeError(f"{value!r} is no {cls.__qualname__}")
            found.append(value)
        except Exception as error:  # third-party code: continue without it
            owner = entry.dist.name if entry.dist else "a package"
            warnings.warn(
                f"{owner} offers the {kind} {entry.name!r}, but {entry.value!r} failed: {error!r}. "
                f"Upgrade or uninstall {owner}",
                stacklevel=3,
            )
    return found


def register(name: str, *aliases: str) -> Callable[[C], C]:
    """Class decorator: register a compressor, memory, communicator or policy under a name and its aliases."""

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
    """The text " (did you mean ...?)" with the known name nearest to ``name``; empty if none is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def method_from_params(params: Mapping[str, Any]) -> Method:
    """Build a compressor with its memory from their `grace_from_params` keys. ValueError for other keys."""
    rest = dict(params)
    compressor, memory = pair(rest)
    if rest:
        raise ValueError(unknown_key(next(iter(rest)), compressor, memory))
    return Method(compressor, memory)


def triple(params: str | Mapping[str, Any]) -> tuple[Method, Communicator]:
    """Build a method and its communicator from their `grace_from_params` keys, or from a compressor's name alone.

    ValueError for other keys.
    """
    rest = {"compressor": params} if isinstance(params, str) else dict(params)
    compressor, memory, communicator = three(rest)
    if rest:
        raise ValueError(unknown_key(next(iter(rest)), compressor, memory, communicator))
    return Method(compressor, memory), communicator


def pair(rest: dict[str, Any]) -> tuple[Compressor, Memory]:
    """Build a compressor and its memory; removes their keys from ``rest``."""
    compressor = take(compressors, rest.pop("compressor", "none"), rest)
    return compressor, take(memories, rest.pop("memory", compressor.traits.memory), rest)


def three(rest: dict[str, Any]) -> tuple[Compressor, Memory, Communicator]:
    """As `pair`, with the communicator."""
    compressor, memory = pair(rest)
    return compressor, memory, take(communicators, rest.pop("communicator", "auto"), rest)


def usual_communicator(compressor: Compressor) -> str:
    """The communicator that exchanges a compressor's payloads in one round."""
    return "allgather" if compressor.traits.combine is Combine.GATHER else "allreduce"


def take(registry: Registry, name: Any, rest: dict[str, Any]) -> Any:
    """Return an instance unchanged, or build one by name; removes its keys from ``rest``."""
    if not isinstance(name, str):
        for kind, known in REGISTRIES.items():
            if known is registry and isinstance(name, kind):
                return name
    cls = registry.find(name)
    return cls(**values(cls, rest))


def values(cls: type, rest: dict[str, Any]) -> dict[str, Any]:
    """The values in ``rest`` of a class's fields, checked. Removes them from ``rest``."""
    found = {}
    for field in fields(cls):
        default: Any = field.default
        part = next((known for kind, known in REGISTRIES.items() if isinstance(default, kind)), None)
        if part is not None:  # a nested part: take its keys as well
            chosen = rest.pop(field.name, None)
            if chosen is None:
                found[field.name] = replace(default, **values(type(default), rest))
            else:
                found[field.name] = take(part, chosen, rest)
        elif field.name in rest:
            value = rest.pop(field.name)
            found[field.name] = checked(field.name, value, value if default is MISSING else default)
    return found


def unknown_key(key: str, *parts: Any, others: Iterable[str] = ()) -> str:
    """The error text for a key that none of the ``parts`` has. ``others``: further known keys."""
    owners = [
        f"{registry.kind} {name!r}"
        for registry in REGISTRIES.values()
        for name, cls in registry.items()
        if key in {field.name for field in fields(cls)}
    ]
    if owners:
        chosen = ", ".join(repr(name_of(part)) for part in parts)
        return f"key {key!r} belongs to {' and '.join(owners)}, not to {chosen}; leave it out"
    known = {"compressor", "memory", "communicator", "policy", *others}
    for part in parts:
        known |= {field.name for field in fields(part)}
    return f"unknown key {key!r}{nearest(key, known)}. Known here: {', '.join(sorted(known))}"
