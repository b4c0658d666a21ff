"""Defines the measurements: cases (a method with its parameters) in configurations (a process with its settings)."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from grace.core import name_of
from grace.core.method import Method
from grace.core.registry import compressors
from grace.engine.codecs import TensorCodec
from grace.factory import grace_from_params
from grace.planner import models

UNSHAPED = "unshaped"  # links without a limit on their rate
WORKERS = 4  # number of payloads to decode
SCALE = 1e-3  # scale of the Laplace distribution of the gradients
SEVERAL = 4  # number of different gradients, so that error feedback sees new ones
SETTINGS = {"threshold": "threshold:threshold=0.0046"}
"""By method, the case to measure if the default does not suit these gradients: 1% of them exceed this threshold."""

HOWS = ("native", "plain")
"""How to run a method: with native kernels, or without."""
BACKENDS = ("torch", "numpy", "tensorflow")
ALLOCATORS = ("asis", "tuned")
DEVICES = {"cuda": "cuda"}
"""Optional backends, each PyTorch on a device."""
MODES = {
    "torch": ("eager",),
    "numpy": ("eager",),
    "tensorflow": ("eager", "graph"),
    "cuda": ("eager",),
    "jax": ("graph",),
}


@dataclass(frozen=True)
class Case:
    """A case to measure in every configuration."""

    label: str
    params: dict[str, Any] = field(default_factory=dict)
    """For `grace_from_params`; for a peer, its name and its memory."""
    source: str = "grace"
    """"grace", "upstream", or "torch" for torch's PowerSGD hook."""
    form: str = ""
    """Scope of its statistics: "per tensor" or "blockwise"; empty if irrelevant."""
    against: tuple[str, ...] = ()
    """Labels of peers to compare with."""
    how: str = ""
    """One of `HOWS`; empty: the process's default."""


@dataclass(frozen=True)
class Config:
    """One process, with its start-up settings."""

    backend: str
    threads: int
    allocator: str
    size: int
    tensors: str = "flat"
    """"flat", one tensor of ``size`` elements, or "resnet50"."""
    kernels: str = "on"

    @property
    def toolkit(self) -> str:
        """The backend's toolkit."""
        return "torch" if self.backend in DEVICES else self.backend

    def __str__(self) -> str:
        what = "ResNet-50" if self.tensors == "resnet50" else f"n = {self.size:,}"
        off = "" if self.kernels == "on" else ", kernels off"
        return f"{self.backend}, {self.threads} thread{'s'[: self.threads > 1]}, {what}, {self.allocator}{off}"


@dataclass(frozen=True)
class Limits:
    """Time limits of a measurement."""

    rounds: int = 0
    """Maximum number of interleaved rounds; 0: by size."""
    budget: float = 6.0
    """Seconds per case and configuration."""
    call: float = 60.0
    """Seconds after which a call is abandoned and its process is ended."""

    def rounds_of(self, config: Config) -> int:
        """The number of rounds, if the budget allows: more for small tensors."""
        return self.rounds or (7 if config.size >= 10**7 else 15 if config.size >= 10**6 else 21)

    @property
    def long(self) -> float:
        """Seconds from which a call is not repeated: three rounds of it would exceed the budget."""
        return self.budget / LEAST


LEAST = 3  # fewest rounds of a case, unless it is marked as measured once


def parse(spec: str) -> Case:
    """Parse ``topk:compress_ratio=0.001,memory=none`` as a case. Raises ValueError, naming the remedy."""
    name, given = words(spec)
    params = {"compressor": name, **given}
    try:
        method = method_of(params)
    except TypeError as error:  # a third-party compressor with required fields
        raise ValueError(f"{spec!r}: {error}. Give the missing parameters as {name}:key=value") from error
    except ValueError as error:
        raise ValueError(f"{error}. `grace methods` lists all methods and their parameters") from error
    registered = name_of(method.compressor)
    return Case(registered + spec[len(name) :], {**params, "compressor": registered}, form=form_of(method))


def words(spec: str) -> tuple[str, dict[str, Any]]:
    """The name and the parameters in ``topk:compress_ratio=0.001,memory=none``. ValueError for an invalid parameter."""
    name, _, rest = spec.partition(":")
    found = {}
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{spec!r}: write a parameter as key=value, such as {name}:{key}=0.01")
        found[key] = _value(value)
    return name, found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (ValueError, SyntaxError):
        return text


def method_of(params: dict[str, Any]) -> TensorCodec:
    """The compressor and memory for a dictionary of parameters, as the engine runs them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # timing a method without its memory is legitimate
        method = grace_from_params(params, "local").method
    return TensorCodec(method.compressor, method.memory)


def form_of(method: Method) -> str:
    """Whether a quantiser's statistics are per tensor or per block."""
    if method.compressor.traits.family != "quantisation" or method.compressor.traits.block_size == 1:
        return ""
    return "blockwise" if method.compressor.traits.block_size else "per tensor"


def everything() -> tuple[list[Case], dict[str, str]]:
    """A case for every registered compressor, with its default memory; and the reasons for omissions."""
    cases, left_out = [], {}
    for name in compressors:
        try:
            cases.append(parse(SETTINGS.get(name, name)))
        except Exception as error:  # third-party methods: measure the rest
            left_out[name] = str(error)
    return cases, left_out


# -- peers ---------------------------------------------------------------------------------------------------------
UPSTREAM: dict[str, tuple[str, str, dict[str, Any]]] = {
    "topk": ("topk", "TopKCompressor", {"compress_ratio": 0.01}),
    "randomk": ("randomk", "RandomKCompressor", {"compress_ratio": 0.01}),
    "dgc": ("dgc", "DgcCompressor", {"compress_ratio": 0.01}),
    "threshold": ("threshold", "ThresholdCompressor", {"threshold": 0.0046}),
    "qsgd": ("qsgd", "QSGDCompressor", {"quantum_num": 127, "bucket_size": 128}),
    "terngrad": ("terngrad", "TernGradCompressor", {}),
    "signsgd": ("signsgd", "SignSGDCompressor", {}),
    "efsignsgd": ("efsignsgd", "EFSignSGDCompressor", {"lr": 0.1}),
    "onebit": ("onebit", "OneBitCompressor", {}),
    "fp16": ("fp16", "FP16Compressor", {}),
    "powersgd": ("powersgd", "PowerSGDCompressor", {"rank": 4, "use_memory": True, "world_size": 1}),
}
"""Upstream's module, class and arguments, by method."""

HOOK = "torch powerSGD_hook"
PAIRS: dict[str, tuple[str, ...]] = {
    "topk": ("topk:compress_ratio=0.01", "chunktopk:chunk_size=4096,chunk_k=40"),
    "randomk": ("randomk:compress_ratio=0.01",),
    "dgc": ("dgc:compress_ratio=0.01,memory=residual",),
    "threshold": ("threshold:threshold=0.0046",),
    "qsgd": (
        "qsgd:bucket_size=128,memory=residual",
        "qsgd:bucket_size=512,memory=residual",
        "blockint:bits=8,rounding=stochastic,memory=residual",
        "blockint:bits=8,rounding=stochastic,block_size=0,memory=none",
    ),
    "terngrad": ("terngrad:clip=2.5", "terngrad:clip=2.5,block_size=512"),
    "signsgd": ("signsgd",),
    "efsignsgd": ("efsignsgd:block_size=0", "efsignsgd:block_size=512", "efsignsgd:block_size=4096"),
    "onebit": ("onebit:block_size=0", "onebit:block_size=512"),
    "fp16": ("fp16", "fp16:memory=residual"),
    "powersgd": ("powersgd:compress_rank=4",),
}
"""Our methods for each of upstream's: the same algorithm first, then blockwise variants."""


def upstream(name: str, memory: str) -> Case:
    """Upstream's method with its memory "residual" or "none"."""
    return Case(f"upstream {name} + {memory}", {"name": name, "memory": memory}, "upstream")


def pairs(names: Iterable[str]) -> tuple[list[Case], dict[str, str]]:
    """Upstream's methods, and our equivalents: with residual memory, or without memory if our method has none.

    Also returns why some of our methods cannot be configured that way.
    """
    cases: dict[str, Case] = {}
    left_out = {}
    for name in names:
        residual = upstream(name, "residual")
        cases[residual.label] = residual
        for spec in PAIRS[name]:
            try:
                ours = parse(spec)
            except ValueError as error:
                left_out[spec] = str(error)
                continue
            peer = upstream(name, "residual" if method_of(ours.params).memory.feedback else "none")
            cases[peer.label] = peer
            against: tuple[str, ...] = (peer.label,)
            if name == "powersgd":
                cases[HOOK] = Case(HOOK, {"name": "powersgd", "rank": 4}, "torch")
                against += (HOOK,)
            cases[ours.label] = Case(ours.label, ours.params, form=ours.form, against=against)
    return list(cases.values()), left_out


def merged(*lists: Sequence[Case]) -> list[Case]:
    """Deduplicated cases; a later list takes precedence."""
    cases: dict[Any, Case] = {}
    for case in (case for each in lists for case in each):
        cases[method_of(case.params) if case.source == "grace" else case.label] = case
    return list(cases.values())


def in_forms(cases: Iterable[Case], hows: Sequence[str]) -> list[Case]:
    """GRACE's cases, once for each of ``hows``; peers are unchanged."""
    found = []
    for case in cases:
        ours = case.source == "grace"
        found += [replace(case, label=f"{case.label} [{how}]", how=how) for how in hows] if ours else [case]
    return found


# -- targets ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Target:
    """A row of the table of targets. Times are multiples of a memcpy of the gradient."""

    what: str
    spec: str
    operation: str
    """"encode" (with its commit), "decode" or "step"."""
    portable: float | None
    native: float | None
    peer: str = ""
    """Empty if no peer has this method."""
    speedup: tuple[float, ...] = ()
    """Minimum ratio of the peer's time to ours, with the default allocator and a tuned one; empty without a peer."""
    tensors: str = "flat"


SIGN, INT8 = "efsignsgd:block_size={}", "blockint:bits=8,rounding=stochastic,memory=residual"
EF, QSGD = "upstream efsignsgd + residual", "upstream qsgd + residual"
POWERSGD, EDEN = "powersgd:compress_rank=4", "eden:bits={}"
TARGETS = [
    *(Target("1-bit sign + scale", SIGN.format(block), "encode", 6, 1.8, EF, (30, 6)) for block in (512, 4096, 0)),
    Target("int8 stochastic", INT8, "encode", 6, 1.8, QSGD, (80, 40)),
    *(
        Target("decode 4 workers, 1-bit", SIGN.format(block), "decode", 5, 1.5, EF, (100, 100))
        for block in (512, 4096, 0)
    ),
    Target("decode 4 workers, int8", INT8, "decode", 5, 1.5, QSGD, (100, 100)),
    Target("eden, 1 bit", EDEN.format(1), "encode", None, 1.2),
    *(Target(f"decode 4 workers, eden, {bits} bits", EDEN.format(bits), "decode", None, 1.5) for bits in (1, 2, 3, 4)),
    Target("exact top-k 1%", "topk:compress_ratio=0.01", "encode", 8, 3, "upstream topk + residual", (30, 12)),
    Target("PowerSGD rank 4", POWERSGD, "encode", 6, None, "upstream powersgd + residual", (4, 4), "resnet50"),
    Target("PowerSGD rank 4, to the mean", POWERSGD, "step", None, None, HOOK, (4, 4), "resnet50"),
]


def target_cases(tensors: str, with_peers: bool) -> list[Case]:
    """The cases of the targets for these tensors."""
    cases: dict[str, Case] = {}
    for target in TARGETS:
        if target.tensors != tensors:
            continue
        ours = cases.get(target.spec) or parse(target.spec)
        peers = dict.fromkeys((*ours.against, *[target.peer] * bool(target.peer)))
        cases[target.spec] = Case(ours.label, ours.params, form=ours.form, against=tuple(peers) if with_peers else ())
        if with_peers and target.peer:
            name = target.peer.split()[1]
            peer = (
                Case(HOOK, {"name": "powersgd", "rank": 4}, "torch")
                if target.peer == HOOK
                else upstream(name, "residual")
            )
            cases[target.peer] = peer
    return list(cases.values())


# -- shapes ------------------------------------------------------------------------------------------------------
def shapes(config: Config, shaped: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a configuration's tensors; ``shaped``: the method needs a matrix."""
    if config.tensors == "resnet50":
        return resnet50()
    if not shaped:
        return {"w": (config.size,)}
    a = next(a for a in range(math.isqrt(config.size), 0, -1) if config.size % a == 0)
    return {"w": (a, config.size // a)}


def resnet50() -> dict[str, tuple[int, ...]]:
    """The 161 parameters of ResNet-50 (25,557,032 numbers), in the order of a forward pass."""
    return {layer.name: layer.shape for layer in models.resnet50()}


def to_dict(thing: Any) -> dict[str, Any]:
    """A case, configuration or set of limits as plain data."""
    return asdict(thing)
