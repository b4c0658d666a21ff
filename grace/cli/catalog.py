"""Registered classes, as documented in the source and as measured: for `grace methods` and the documentation."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from grace.communicators.auto import choose
from grace.core import Combine, Compressor, name_of
from grace.core.method import Method
from grace.core.registry import Registry, communicators, compressors, memories
from grace.ops import biased
from grace.simulate import simulate
from grace.testing.cases import carries

SHAPE = (1024, 1024)
N = 2**20
SETTINGS: dict[str, dict[str, Any]] = {"threshold": {"threshold": 2.5758}}
"""By method, settings for its measurement if its defaults do not suit numbers of variance 1."""
EXAMPLES: dict[str, dict[str, Any]] = {
    "chain": {"sparsifier": "topk", "quantizer": "qsgd", "compress_ratio": 0.01, "quantum_num": 127},
    "qsparse": {"compress_ratio": 0.01, "quantum_num": 15},
    "stc": {"compress_ratio": 0.01},
}
"""By method, the keys of its example, for methods that pass keys to their parts."""
PARTNERS: dict[str, dict[str, Any]] = {
    "allreduce": {"compressor": "powersgd"},
    "decoupled": {"compressor": "dion"},
    "decoupled_momentum": {"compressor": "demo"},
    "diana": {"compressor": "qsgd"},
    "efsignsgd": {"compressor": "efsignsgd"},
    "lowpass": {"compressor": "cltk"},
    "momentum": {"compressor": "signum"},
    "none": {"compressor": "qsgd"},
    "onebit_adam": {"compressor": "efsignsgd", "block_size": 512},
    "reducescatter": {"compressor": "blockint"},
}
"""By memory or communicator, the compressor of its example; default: top-k."""
KINDS = {"compressors": compressors, "memories": memories, "communicators": communicators}
REQUIRED = "required"


@dataclass(frozen=True)
class Entry:
    """One registered class. Fields that do not apply to its kind are None."""

    name: str
    aliases: list[str]
    summary: str
    citation: str
    parameters: dict[str, Any]
    meanings: dict[str, str] = dataclasses.field(default_factory=dict)
    """The meaning and the valid values of each parameter."""
    example: dict[str, Any] = dataclasses.field(default_factory=dict)
    """A dictionary for `grace_from_params`."""
    family: str | None = None
    bits_per_element: float | None = None
    """Counted by `simulate` on a float32 matrix of 2^20 numbers of variance 1."""
    allreduce: bool | None = None
    """Whether payloads can be summed on the wire, or workers agree on them while compressing."""
    unbiased: bool | None = None
    variance: float | None = None
    """The w of E|x - x̂|² <= w|x|² for every x of 2^20 elements, if the method is unbiased."""
    contraction: float | None = None
    """The d of E|x - x̂|² <= (1 - d)|x|² for every x of 2^20 elements."""
    vote: bool | None = None
    ragged: bool | None = None
    memory: str | None = None
    communicators: list[str] | None = None
    """Communicators that support the compressor with its default parameters."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. A compressor's entry has all fields, other entries only those that apply."""
        found = dataclasses.asdict(self)
        return found if self.family is not None else {k: v for k, v in found.items() if v is not None}


def collect(wanted: str = "") -> dict[str, list[Entry]]:
    """Entries of the registry by kind, sorted by name: all, or those named ``wanted``. Measures each compressor."""
    return {
        kind: [describe(name, registry) for name in registry if wanted in ("", name, *registry.aliases(name))]
        for kind, registry in KINDS.items()
    }


def describe(name: str, registry: Registry) -> Entry:
    """A class's documentation, and for a compressor its measurements with the defaults."""
    cls = registry[name]
    summary, _, citation = docstring(cls)
    parameters, kind = keys(cls), next(kind for kind, known in KINDS.items() if known is registry)
    entry = Entry(name, registry.aliases(name), summary, citation, parameters, meanings(cls), example(name, kind))
    if not issubclass(cls, Compressor) or REQUIRED in parameters.values():
        return entry
    made = cls()
    return dataclasses.replace(
        entry,
        family=made.traits.family,
        bits_per_element=bits(name),
        allreduce=made.traits.combine is not Combine.GATHER,
        unbiased=made.traits.unbiased,
        variance=made.variance(N),
        contraction=made.contraction(N),
        vote=made.traits.majority_vote,
        ragged=made.traits.variable_length,
        memory=made.traits.memory,
        communicators=[each for each in communicators if carries(communicators[each](), made)],
    )


@cache
def bits(name: str) -> float:
    """Bits per element that a worker sends, with default parameters."""
    return sent({"compressor": name, **SETTINGS.get(name, {})}, 2)[0]


def sent(params: dict[str, Any], workers: int) -> tuple[float, float]:
    """Bits per element that worker 0 sends and receives in an exchange."""
    import numpy as np

    draw = [np.random.default_rng(worker).standard_normal(SHAPE, dtype=np.float32) for worker in range(workers)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*without error feedback")
        report = simulate(params, [{"w": gradient} for gradient in draw]).report
    return 8 * report.bytes_sent / N, 8 * report.bytes_received / N


def usual(cls: Any) -> tuple[str, str]:
    """A compressor's default memory, and its default communicators for two and for more workers."""
    made = cls()
    method = Method(made, memories[made.traits.memory]())
    return made.traits.memory, ", ".join(dict.fromkeys(name_of(choose(method, workers, 1)[0]) for workers in (2, 8)))


def docstring(cls: type) -> tuple[str, list[str], str]:
    """First line, statements and citation of a docstring."""
    first, *rest = inspect.cleandoc(cls.__doc__ or "").replace("``", "`").split("\n")
    statements: list[str] = []
    for line in filter(None, rest):  # a statement ends with a line that ends in a full stop
        if statements and not statements[-1].endswith("."):
            statements[-1] += f" {line}"
        else:
            statements.append(line)
    cited = [text for text in statements if re.match(r"[A-Z]\w+(,| and| et al)", text) and re.search(r"\d{4}", text)]
    return first, [text for text in statements if text not in cited], " ".join(cited)


def split(statements: list[str], names: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Separate statements about parameters from all others."""
    plain, about = [], {}
    one = f"`(?:{'|'.join(map(re.escape, names)) or '(?!)'})`"
    for text in statements:
        for part in re.split(rf"(?<!, )(?={one}(?:, {one})*: )|(?=State: )", text):
            if found := re.match(rf"({one}(?:, {one})*): (.*)", part.strip()):
                about.update(dict.fromkeys(re.findall(r"\w+", found[1]), found[2].strip()))
            elif part.strip():
                plain.append(part.strip())
    return plain, about


def keys(cls: Any) -> dict[str, Any]:
    """All keys that a class takes, for itself and its parts, with their defaults."""
    fields = [field for field in dataclasses.fields(cls) if field.init]
    parts = [field.default for field in fields if dataclasses.is_dataclass(field.default)]
    passed = {field.name: getattr(part, field.name) for part in reversed(parts) for field in dataclasses.fields(part)}
    own = {f.name: name_of(f.default) if f.default in parts else _default(f) for f in fields}
    return {**passed, **own}


def meanings(cls: Any) -> dict[str, str]:
    """By key, its description in the docstrings of a class, its bases and its parts, in order of appearance."""
    found: dict[str, str] = {}
    parts = [type(field.default) for field in dataclasses.fields(cls) if dataclasses.is_dataclass(field.default)]
    for each in (base for known in (cls, *parts) for base in known.__mro__ if "__doc__" in vars(base)):
        for key, text in split(docstring(each)[1], keys(cls))[1].items():
            found.setdefault(key, text)
    return found


def example(name: str, kind: str) -> dict[str, Any]:
    """A dictionary for `grace_from_params` that names a class and its parameters."""
    registry = KINDS[kind]
    known = keys(registry[name])
    order = [*(key for key in meanings(registry[name]) if key in known), *known]
    usual = {key: known[key] for key in dict.fromkeys(order) if known[key] not in (REQUIRED, None)}
    if kind == "compressors":
        return {"compressor": name, **EXAMPLES.get(name, usual)}
    return {**PARTNERS.get(name, {"compressor": "topk"}), registry.kind: name, **usual}


def guarantee(entry: Entry) -> str:
    """A compressor's declared error bound, in words."""
    if entry.vote:
        return "a vote: the result has the majority's signs, not the mean's magnitudes"
    found = []
    if entry.unbiased:
        found.append(f"unbiased, variance w = {entry.variance:.3g}" if entry.variance else "unbiased")
    if (d := entry.contraction) is not None:
        found.append(
            "exact" if d == 1 else f"contraction d = {d:.3g}" if d < 0.9 else f"contraction 1 − d = {1 - d:.3g}"
        )
    return "; ".join(found) or "none declared"


def classes(entry: Entry) -> str:
    """The classes of biased compressors that a compressor's bound implies (`grace.ops.biased`)."""
    if entry.contraction is not None:
        b1, b2, b3 = biased.of_contraction(entry.contraction)
    elif entry.variance is not None:
        b1, b2, b3 = biased.of_variance(entry.variance)
    else:
        return ""
    scaled = f" times {b3.scale:.3g}" if b3.scale != 1 else ""
    return f"B1({b1.alpha:.3g}, {b1.beta:.3g}), B2({b2.gamma:.3g}, {b2.beta:.3g}),{scaled} B3({b3.delta:.3g})"


def literal(value: Any) -> str:
    """A value as a Python literal, with double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _default(field: dataclasses.Field[Any]) -> Any:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if value is dataclasses.MISSING:
        return REQUIRED
    if isinstance(value, Enum):
        return value.value
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)
