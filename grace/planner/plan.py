"""Plans: each tensor's strategy and compressor, as JSON that other processes read and check."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grace.communicators.planned.runner import GATHERED, check
from grace.communicators.planned.strategy import DEVICES, Device, Option, parse
from grace.core.registry import triple
from grace.planner import ways
from grace.planner.costs import MIN_NUMEL, Cluster, Codec, Costs
from grace.planner.costs import cluster as cluster_of
from grace.planner.costs import codec as codec_of
from grace.planner.profile import Profile, read_json
from grace.planner.profile import from_dict as profile_of
from grace.planner.profile import seconds as checked
from grace.planner.search import GAIN, MODES, Mode, Problem, Selection, select
from grace.planner.timeline import Timeline, overheads, save_trace
from grace.planner.ways import Play, Way

if TYPE_CHECKING:
    from grace.core import Compressor

FORMAT = 1
ONE_EACH_MB = 1e-6
"""Bucket size that gives each tensor its own message, as a search assumes."""

PLAIN_GAIN = 0.01
"""Minimum gain, as a share of a step, for which a plan without compression replaces a communicator."""


@dataclass(frozen=True)
class Prediction:
    """The simulated step, in seconds."""

    step: float
    """From the start of the forward pass to the last gradient's mean."""
    dense: float
    """The same time for dense gradients in buckets, at their best overlap."""
    backward: float
    communication: float
    """Communication that the backward pass does not hide."""
    compression: float
    """Compression that neither the backward pass nor messages hide."""


@dataclass(frozen=True)
class Plan:
    """Strategies by tensor, with their compressor."""

    tensors: Mapping[str, Option]
    params: Mapping[str, Any]
    """The compressor, its parameters and its memory, as for `grace.grace_from_params`."""
    workers: int
    per_node: int
    predicted: Prediction
    profile: Mapping[str, Any]
    """Facts about the profile: "source", "tensors", "elements"."""
    costs: Mapping[str, Any]
    """The costs that were assumed: "cluster", the source of the "compressor" costs, and "devices"."""
    mode: str = "refined"
    basis: Basis | None = field(default=None, compare=False)
    """All inputs, for replanning; None in plans of earlier versions."""
    way: str = ways.PLAN
    """One of `ways.NAMES`: `ways.PLAN`, or the communicator that exchanges all tensors in buckets instead."""

    def exchange(self, file: str | os.PathLike[str] = "plan.json") -> dict[str, Any]:
        """Keys of `grace.grace_from_params` for the predicted exchange. ``file``: path of the saved plan.

        A plan with strategies by tensor needs the file and one message per tensor; others need a communicator.
        """
        if self.way != ways.PLAN:
            return ways.exchange(self.way, self.params)
        return exchange(file, MIN_NUMEL if self.basis is None else self.basis.min_numel)

    @property
    def strategies(self) -> dict[str, str]:
        """The text of each tensor's strategy."""
        return {name: str(option) for name, option in self.tensors.items()}

    @property
    def compressed(self) -> list[str]:
        """Names of the tensors that are compressed anywhere."""
        return [name for name, option in self.tensors.items() if option.compressions]

    @cached_property
    def hash(self) -> str:
        """Hash of everything that workers must agree on: strategies, compressor and the shape of the cluster."""
        agreed = [sorted(self.strategies.items()), dict(self.params), self.workers, self.per_node]
        return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` is the inverse."""
        return {
            "version": FORMAT,
            "hash": self.hash,
            "workers": self.workers,
            "workers_per_node": self.per_node,
            "mode": self.mode,
            "way": self.way,
            "params": dict(self.params),
            "predicted": {name: getattr(self.predicted, name) for name in Prediction.__annotations__},
            "profile": dict(self.profile),
            "costs": dict(self.costs),
            "tensors": {
                name: {"option": str(option)} | (dict(self.params) if option.compressions else {})
                for name, option in self.tensors.items()
            },
        } | ({} if self.basis is None else {"basis": self.basis.to_dict()})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def check(self, sizes: Mapping[str, int] | None = None, workers: int | None = None) -> None:
        """Raise ValueError unless the plan was made for these tensors and this number of workers."""
        if workers is not None and workers != self.workers:
            raise ValueError(f"the plan is for {self.workers} workers, but there are {workers}: plan again")
        if sizes is not None and set(sizes) != set(self.tensors):
            odd = sorted(set(sizes) ^ set(self.tensors))[:3]
            raise ValueError(f"plan and model differ in {odd}: plan again, from this model's profile")


def exchange(file: str | os.PathLike[str] = "plan.json", min_numel: int = MIN_NUMEL) -> dict[str, Any]:
    """Keys of `grace.grace_from_params` for a plan in a file, as predicted: one message per tensor."""
    return {"plan": os.fspath(file), "bucket_mb": ONE_EACH_MB, "min_numel": min_numel}


def from_dict(data: Any) -> Plan:
    """A plan from untrusted JSON data. ValueError explains what is wrong."""
    if not isinstance(data, Mapping) or not isinstance(data.get("tensors"), Mapping):
        raise ValueError("this is no plan: it has no tensors. `grace plan` writes plans")
    if data.get("version") != FORMAT:
        raise ValueError(f"this plan has version {data.get('version')!r}, but this version of grace reads {FORMAT}")
    counts = [data.get("workers"), data.get("workers_per_node")]
    if not all(type(count) is int and count >= 1 for count in counts) or counts[0] % counts[1]:  # type: ignore[operator]
        raise ValueError(f"workers and workers_per_node of the plan are {counts}: whole machines are needed")
    workers, per_node = counts
    assert isinstance(workers, int)
    assert isinstance(per_node, int)
    params = _params(data.get("params"))
    options = {}
    for name, each in data["tensors"].items():
        if not isinstance(each, Mapping) or "option" not in each:
            raise ValueError(f"tensor {name!r} of the plan has no option")
        try:
            option = parse(each["option"])
        except ValueError as error:
            raise ValueError(f"tensor {name!r} of the plan: {error}") from error
        if not option.flat and per_node in (1, workers):
            raise ValueError(f"tensor {name!r} of the plan has levels, but {workers} workers by {per_node} have one")
        rest = {key: value for key, value in each.items() if key != "option"}
        if rest != (params if option.compressions else {}):
            raise ValueError(f"tensor {name!r} of the plan has {rest}, but the plan's params are {params}")
        options[name] = option
    predicted = data.get("predicted")
    if not isinstance(predicted, Mapping):
        raise ValueError("the plan predicts nothing: it was not written by `grace plan`")
    numbers = {name: checked(predicted.get(name), f"predicted {name}") for name in Prediction.__annotations__}
    about = [data.get(key) for key in ("profile", "costs")]
    profile, costs = (each if isinstance(each, Mapping) else {} for each in about)
    mode = data.get("mode")
    if mode not in MODES:
        raise ValueError(f"the plan's mode is {mode!r}: it is one of {', '.join(MODES)}")
    way = data.get("way", ways.PLAN)
    if way not in ways.NAMES:
        raise ValueError(f"the plan's way is {way!r}: it is one of {', '.join(ways.NAMES)}")
    basis = basis_of(data["basis"]) if "basis" in data else None
    plan = Plan(options, params, workers, per_node, Prediction(**numbers), profile, costs, mode, basis, way)
    if data.get("hash") != plan.hash:
        raise ValueError("the plan's hash does not fit its strategies: it was changed by hand. Plan again")
    return plan


@dataclass(frozen=True)
class Basis:
    """The inputs of a plan, to replan for other workers or for another setting of the compressor."""

    profile: Profile
    cluster: Cluster
    codecs: tuple[Codec, ...]
    """Costs of the plan's compressor, then of its other settings, such as the levels of a policy."""
    devices: tuple[Device, ...]
    """The allowed devices. ``devices``, ``max_compressions`` and ``min_numel``: as in `Costs`."""
    max_compressions: int | None = None
    min_numel: int = MIN_NUMEL
    mode: Mode = "refined"
    servers: int = 1
    deferred: bool = True
    """``mode``, ``servers`` and ``deferred``: as in `make`."""

    def codec(self, compressor: Compressor | None = None) -> Codec | None:
        """The costs of this compressor, by default the plan's; None if unknown."""
        from grace.core.registry import method_from_params

        if compressor is None:
            return self.codecs[0]
        same = (each for each in self.codecs if method_from_params(each.params).compressor == compressor)
        return next(same, None)

    def plan(
        self, workers: int = 0, per_node: int = 0, compressor: Compressor | None = None, rooted: bool = True
    ) -> Plan:
        """A plan for this number of workers (0: unchanged) and for a setting of the compressor with known costs.

        ``per_node``: as in `Cluster.among`. ``rooted``: as in `Costs`. ValueError for other settings, and as in `make`.
        """
        codec = self.codec(compressor)
        if codec is None:
            raise ValueError(f"costs of {compressor} are not known: `grace plan --level` measures them too")
        cluster = self.cluster.among(workers or self.cluster.workers, per_node)
        costs = Costs(cluster, codec, self.devices, self.max_compressions, self.min_numel, rooted)
        return replace(make(self.profile, costs, self.mode, self.servers, self.deferred).plan, basis=self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `basis_of` is the inverse."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        made = {"profile": self.profile.to_dict(), "cluster": self.cluster.to_dict()}
        return {**plain, **made, "codecs": [each.to_dict() for each in self.codecs], "devices": list(self.devices)}


def basis_of(data: Any) -> Basis:
    """A basis from JSON data; ValueError explains what is wrong."""
    if not isinstance(data, Mapping) or set(data) != {each.name for each in fields(Basis)}:
        raise ValueError(f"the basis of the plan has not {', '.join(each.name for each in fields(Basis))}")
    codecs, devices, most = data["codecs"], data["devices"], data["max_compressions"]
    if not isinstance(codecs, Sequence) or not codecs:
        raise ValueError("the basis of the plan has no costs of its compressor")
    if not isinstance(devices, Sequence) or not devices or any(each not in DEVICES for each in devices):
        raise ValueError(f"devices of the plan's basis are {devices!r}: choose from {', '.join(DEVICES)}")
    if most is not None and (type(most) is not int or most < 0):
        raise ValueError(f"max_compressions of the plan's basis is {most!r}: write a whole number, or null")
    for key, least, largest in (("min_numel", 0, 2**63), ("servers", 1, 1024)):
        if type(data[key]) is not int or not least <= data[key] <= largest:
            raise ValueError(f"{key} of the plan's basis is {data[key]!r}: write a whole number, {least} to {largest}")
    if data["mode"] not in MODES or type(data["deferred"]) is not bool:
        raise ValueError(f"the plan's basis has mode {data['mode']!r} and deferred {data['deferred']!r}")
    priced = tuple(map(codec_of, codecs))
    for each in priced:
        _params(each.params)
        if not set(devices) <= set(each.devices):
            raise ValueError(f"the plan's basis lacks costs of {each.params} on {', '.join(devices)}")
    known = {key: data[key] for key in ("max_compressions", "min_numel", "mode", "servers", "deferred")}
    return Basis(profile_of(data["profile"]), cluster_of(data["cluster"]), priced, tuple(devices), **known)


def _params(data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping) or not isinstance(data.get("compressor"), str):
        raise ValueError('params of a plan name a "compressor"')
    if odd := [key for key, value in data.items() if not isinstance(value, (str, int, float, bool, type(None)))]:
        raise ValueError(f"params of a plan are names and numbers, but {odd[0]!r} is neither")
    triple(data)[0].check()
    return dict(data)


def load(path: str | os.PathLike[str]) -> Plan:
    """A plan from a JSON file. ValueError as in `from_dict`."""
    return from_dict(read_json(path))


@dataclass(frozen=True)
class Planned:
    """A plan with the search and the timeline behind it."""

    plan: Plan
    selection: Selection
    """The result of the search, even if a communicator for all tensors is faster."""
    play: Play
    """The predicted step."""
    seconds: Mapping[str, float]
    """Seconds per step, by the name of each way that was compared."""

    @property
    def timeline(self) -> Timeline:
        return self.play.timeline

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted timeline in Chrome's trace format."""
        save_trace(path, self.timeline.spans(), self.play.names, self.play.labels)


def make(
    profile: Profile,
    costs: Costs,
    mode: Mode = "refined",
    servers: int = 1,
    deferred: bool = True,
    others: Iterable[Codec] = (),
    bucket_mb: float = ways.BUCKET_MB,
) -> Planned:
    """Plan a model: the strategies of all tensors, and their predicted time.

    ``servers``: threads of the CPU pool. ``deferred``: a tensor's operations after its first message wait for the end
    of the backward pass, as in GRACE; False: they start as early as possible, as in Espresso. ``others``: costs of the
    compressor's other settings, stored with the plan for policies that change them. ``bucket_mb``: size of GRACE's
    buckets. If a communicator for all tensors in buckets (one of `ways.NAMES`) is at least as fast as the strategies
    that the search finds, the plan uses it. ValueError for a method that no strategy of the tree supports.
    """
    refuse(costs.codec.params)
    problem = Problem.of(profile, costs, servers, deferred)
    selection = select(problem, mode)
    uniform = _uniform(profile, costs, bucket_mb, deferred)
    names = tuple(tensor.name for tensor in profile.tensors)
    tensors = {name: choice.option for name, choice in zip(names, selection.choices, strict=True)}
    labels = tuple(costs.labels(choice.option)[: len(choice.chain)] for choice in selection.choices)
    own = Play(problem.timeline(selection.choices), names, labels)
    # Dense ways come first, so they win ties: another way must be faster by more than rounding.
    way: Way | None
    way, play = uniform[0]
    for other, each in (*uniform[1:], (None, own)):
        compressing = other is not None or any(option.compressions for option in tensors.values())
        if each.seconds < play.seconds * (1 - (GAIN if compressing else PLAIN_GAIN)):
            way, play = other, each
    if way is not None:
        small = [tensor.name for tensor in profile.tensors if tensor.size < costs.min_numel]
        tensors = dict.fromkeys(tensors, way.option) | dict.fromkeys(small, ways.DENSE.option)
    seconds = {each.name: profile.forward + step.seconds for each, step in uniform}
    seconds[ways.PLAN] = profile.forward + own.seconds
    about = {"source": profile.source, "tensors": len(names), "elements": profile.size}
    cluster = costs.cluster.to_dict()
    priced = {"cluster": cluster, "compressor": costs.codec.source, "devices": list(costs.devices)}
    basis = Basis(
        profile,
        costs.cluster,
        (costs.codec, *others),
        costs.devices,
        costs.max_compressions,
        costs.min_numel,
        mode,
        servers,
        deferred,
    )
    plan = Plan(
        tensors,
        dict(costs.codec.params),
        costs.cluster.workers,
        costs.cluster.per_node,
        _prediction(profile, play, uniform[0][1]),
        about,
        priced,
        mode,
        basis,
        ways.PLAN if way is None else way.name,
    )
    return Planned(plan, selection, play, seconds)


def _uniform(profile: Profile, costs: Costs, bucket_mb: float, deferred: bool) -> list[tuple[Way, Play]]:
    # Returns every way that can exchange all tensors with one communicator, a plain allreduce first.
    cluster, codec, least, most = costs.cluster, costs.codec, costs.min_numel, costs.max_compressions
    found = ways.dense(cluster)
    if "gpu" in costs.devices:
        found += [way for way in ways.every(codec.params, cluster) if most is None or way.option.compressions <= most]
    return [(way, ways.play(profile, cluster, codec, way, bucket_mb, least, deferred=deferred)) for way in found]


def _prediction(profile: Profile, play: Play, dense: Play) -> Prediction:
    parts = overheads(play.spans())
    whole = parts.backward + parts.communication + parts.compression
    assert abs(whole - play.seconds) <= 1e-9 * play.seconds, f"parts of {whole} s in a step of {play.seconds} s"
    return Prediction(
        profile.forward + play.seconds,
        profile.forward + dense.seconds,
        parts.backward,
        parts.communication,
        parts.compression,
    )


def predict(
    profile: Profile, costs: Costs, tensors: Mapping[str, Option], servers: int = 1, deferred: bool = True
) -> float:
    """Seconds of a step under given strategies, including the forward pass, for comparison with measurements.

    Each tensor is assumed to have its own message; small ones (of fewer than ``costs.min_numel`` elements) share one.
    """
    backward = [tensor.backward for tensor in profile.tensors]
    chains = [costs.chain(tensors[tensor.name], tensor.size) for tensor in profile.tensors]
    for number, chain in costs.last([tensor.size for tensor in profile.tensors]).items():
        chains[number] = chain
    return profile.forward + Timeline(backward, chains, servers, deferred).seconds


def refuse(params: Mapping[str, Any]) -> None:
    """Raise ValueError for a method that no strategy of the tree supports."""
    from grace.core import Combine, name_of

    method, _ = triple(params)
    if method.compressor.traits.combine is Combine.AGREED:
        raise ValueError(
            f"{name_of(method.compressor)!r} exchanges inside compress, so no strategy of the tree carries it: plan "
            "with another compressor, such as topk or efsignsgd; `grace advise` compares it with them"
        )
    if "communicator" in params:
        raise ValueError("a plan says how tensors travel: leave communicator out")
    check(parse(GATHERED), method)
