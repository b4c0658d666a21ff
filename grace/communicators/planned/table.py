"""The table of each tensor's strategy in a plan, for the current number of workers and policy level."""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grace.communicators.planned.strategy import DENSE_FLAT, Option, parse
from grace.core import Compressor, Transport, name_of
from grace.core.communicator import machine_size
from grace.core.method import Method
from grace.core.registry import method_from_params, nearest

Loader = Callable[[dict[str, Any]], Any]
"""A function that reads a plan made by the planner; ValueError if the plan is invalid."""


class TensorPlan(NamedTuple):
    """A tensor's entry in a plan."""

    option: str
    method: Method | None = None
    """The tensor's method; None: the method that all tensors share."""


class _Table(NamedTuple):
    # A plan for one number of workers, one machine size and one policy level.
    text: str
    ways: dict[str, TensorPlan]
    per_node: int
    threads: int
    origin: str


class _Given:
    # The plan as given (worker 0's, once the workers have agreed), and the tables made from it, by number of workers,
    # ``node_size`` and the compressor of the policy's level.
    def __init__(self, text: str):
        self.text = text
        self.tables: dict[tuple[int, int, Compressor | None], _Table] = {}


class PlanTable:
    """The strategies of a plan, by tensor. Worker 0's plan holds for all workers, so the others need none.

    If a plan was made for another number of workers, or for another level of a policy, it is planned again, provided
    that it includes its inputs (`grace.planner.plan.Basis`). Otherwise a warning says that other strategies may be
    faster.
    """

    def __init__(self, text: str, leveled: bool = False, *, load: Loader):
        """``text``: JSON as `grace.planner.plan` writes it; empty on a worker without a plan.

        ``leveled``: a policy sets the level of the method that all tensors share; every worker must know this method.
        ``load``: `grace.planner.plan.from_dict`, which checks a plan, and whose result can plan again.
        """
        self._given, self._leveled, self._load = _Given(text), leveled, load
        self._compressor: Compressor | None = None
        self._key: tuple[int, int, Compressor | None] | None = None
        self.node_size = 0
        """Workers per machine, once the workers have agreed."""

    def resolve(self, method: Method) -> PlanTable:
        """The same plan, not yet agreed on, with this method's compressor if a policy sets the level."""
        new = copy.copy(self)
        new._compressor = method.compressor if self._leveled else None
        new._key = None
        return new

    def adopt_local_plan(self, transport: Transport, node_size: int) -> None:
        """Adopt this worker's own plan, before messages are allowed; later `agree` compares it with worker 0's."""
        if not self._given.text:
            raise ValueError("in an elastic job every worker needs the plan: give it on all of them")
        self._take(self._replan(transport, node_size), transport, node_size)

    def agree(self, transport: Transport, node_size: int) -> None:
        """Adopt worker 0's plan. Every worker must make this call. ValueError if worker 0 has no valid plan.

        ``node_size``: workers per machine; 0: as the plan says, or else as launched. Warns if the plan was made for
        other workers, or another level, and cannot be replanned.
        """
        laid = None if self._key is None else self._text
        try:
            mine = self._replan(transport, node_size) if transport.rank == 0 else ""
        except ValueError:
            # an invalid plan becomes an empty text: all workers then raise the same error below, and none waits
            mine = ""
        given, text = json.loads(transport.exchange(json.dumps([self._given.text, mine]))[0])
        self._given.text = given
        text = text or self._replan(transport, node_size)  # workers that share a process receive only their own text
        if laid is not None and laid != text:
            raise ValueError("this worker's plan is not worker 0's: give the same one to all workers of an elastic job")
        self._take(text, transport, node_size)

    def _replan(self, transport: Transport, node_size: int) -> str:
        known = self._given.tables.get((transport.size, node_size, self._compressor))
        if known is not None:
            return known.text
        return replan(self._given.text, transport.size, node_size, self._compressor, transport.rooted, self._load)

    def _take(self, text: str, transport: Transport, node_size: int) -> None:
        self._key = (transport.size, node_size, self._compressor)
        self._given.tables[self._key] = table = _table(text, self._leveled, self._load)
        self.node_size = node_size or table.per_node
        if not all(option.flat for option in self.options):
            self.node_size = machine_size("planned", self.node_size, transport)

    @property
    def _table(self) -> _Table:
        assert self._key is not None, "agree first"
        return self._given.tables[self._key]

    @property
    def _text(self) -> str:
        return self._table.text

    @property
    def text(self) -> str:
        """The plan as given, as JSON: worker 0's, once the workers have agreed."""
        return self._given.text

    @property
    def options(self) -> list[Option]:
        """All distinct strategies."""
        return [parse(text) for text in dict.fromkeys(way.option for way in self._table.ways.values())]

    @property
    def threads(self) -> int:
        """Threads of the CPU pool that the plan assumes."""
        return self._table.threads

    @property
    def origin(self) -> str:
        """A description of the workers and data for which the strategies were made."""
        return self._table.origin

    def dense(self, name: str) -> bool:
        """Return whether a tensor is averaged uncompressed at every level of a policy."""
        assert self._key is not None
        levels = [table for key, table in self._given.tables.items() if key[:2] == self._key[:2]]
        return self[name].option == DENSE_FLAT and all(table.ways[name].option == DENSE_FLAT for table in levels)

    def __getitem__(self, name: str) -> TensorPlan:
        if name not in self._table.ways:
            raise ValueError(
                f"the plan has no strategy for {name!r}{nearest(name, self._table.ways)}: it was made for another "
                "model, or for other names. Make one for this model"
            )
        return self._table.ways[name]

    def __repr__(self) -> str:
        # Workers compare this text at the start.
        if self._key is None:
            return "PlanTable(not agreed)"
        digest = hashlib.sha256(self._text.encode()).hexdigest()[:16]
        return f"PlanTable({len(self._table.ways)} tensors, sha256 {digest})"


# -- reading -----------------------------------------------------------------------------------------------------------
def read(text: str) -> dict[str, Any]:
    """Parse the JSON text of a plan, {"tensors": {name: {"option": ...}}}; ValueError if it is invalid."""
    try:
        data = json.loads(text)
        tensors = {name: dict(entry) for name, entry in data["tensors"].items()}
        return {**data, "params": dict(data.get("params") or {}), "tensors": tensors}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"this is no plan, which is JSON with an object 'tensors': {error!r}") from error


def ways(text: str, leveled: bool = False, *, load: Loader) -> dict[str, TensorPlan]:
    """The tensors' entries in the JSON text of a plan: {"tensors": {name: {"option": ...}}}, with optional methods.

    A method is given by keys of `grace.grace_from_params`: under "params" for all tensors, or next to a tensor's
    "option" for this tensor; a tensor's own keys override those for all. ``leveled``: a policy sets the level of the
    method under "params". ValueError, naming the tensor, for an invalid plan.
    """
    data = read(text)
    if "basis" in data:
        load(json.loads(text))  # the planner checks its own plans, hash included
    common = data["params"]
    found, known = {}, {}
    for name, entry in data["tensors"].items():
        try:
            option = str(parse(entry.pop("option", None)))
            settings = json.dumps(entry if "compressor" in entry else {**common, **entry}, sort_keys=True)
            if settings not in known:
                known[settings] = method_from_params(json.loads(settings)) if settings != "{}" else None
        except ValueError as error:
            raise ValueError(f"plan, tensor {name!r}: {error}") from error
        found[name] = TensorPlan(option, known[settings])
    if leveled and common:
        of_all = method_from_params(common)
        found = {name: way._replace(method=None) if way.method == of_all else way for name, way in found.items()}
    return found


def _table(text: str, leveled: bool, load: Loader) -> _Table:
    found, data = ways(text, leveled, load=load), read(text)
    threads = data["basis"]["servers"] if "basis" in data else 1
    return _Table(text, found, _count(data, "workers_per_node", 0), threads, _origin(data))


def _count(data: Mapping[str, Any], key: str, default: int) -> int:
    value = data.get(key, default)
    if type(value) is not int or value < 0:
        raise ValueError(f"{key}={value!r} of the plan is no number of workers")
    return value


def _origin(data: Mapping[str, Any]) -> str:
    if "basis" not in data:
        return ""
    costs, profile = data["costs"], data["profile"]
    return (
        f"for {data['workers']} workers, {data['workers_per_node']} on each machine; links: "
        f"{costs['cluster']['source']}; compression: {costs['compressor']}; backward pass: {profile['source']}"
    )


# -- replanning --------------------------------------------------------------------------------------------------------
def replan(text: str, workers: int, node_size: int, compressor: Compressor | None, rooted: bool, load: Loader) -> str:
    """The text of a plan for this number of workers and this compressor; unchanged if it was made for them.

    ``compressor``: None means the plan's own. ``rooted``: as in `grace.core.Transport`. If the plan cannot be made
    again, for example because it does not include its inputs, warns and returns the text unchanged.
    """
    data = read(text)
    made_for = _count(data, "workers", workers)
    moved, own = made_for != workers, data["params"] and method_from_params(data["params"])
    level = bool(own) and compressor not in (None, own.compressor)
    if not moved and not level:
        return text
    basis = load(json.loads(text)).basis if "basis" in data else None
    if basis is not None and own.memory.standard_feedback:
        if level and basis.codec(compressor) is None:
            _warn(f"{own.compressor}, without costs of {compressor}: the strategies stay. Add `grace plan --level ...`")
            compressor = None
        if moved or compressor is not None:
            return json.dumps(basis.plan(workers, node_size, compressor, rooted).to_dict())
    elif moved:
        why = "" if basis is None else f": memory {name_of(own.memory)!r} cannot follow other strategies"
        _warn(f"{made_for} workers, but there are {workers}: it works, but others may be faster. Plan anew{why}")
    else:
        why = "it does not hold what it was made from" if basis is None else f"its memory is {name_of(own.memory)!r}"
        _warn(f"{own.compressor}, not for {compressor}: {why}, and the strategies stay")
    return text


def _warn(text: str) -> None:
    warnings.warn(f"the plan was made for {text}", stacklevel=2)


def leveled_params(text: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's method, which a policy is to change, as keys of `grace.grace_from_params`, merged with ``given``.

    ValueError if this worker has no plan, or if ``given`` contradicts it.
    """
    if not text:
        raise ValueError("with a policy every worker needs the plan, which says what method changes: give it on all")
    params = read(text)["params"]
    for key, value in params.items():
        if given.get(key, value) != value:
            raise ValueError(f"{key}={given[key]!r}, but the plan says {value!r}: leave {key} out, or plan anew")
    return {**params, **given}
