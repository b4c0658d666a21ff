"""Settings of an edge, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grace.backends import get_backend
from grace.compressors.measured.blockint import BlockInt
from grace.compressors.measured.topk import TopK
from grace.core import Combine, Compressor, Context, name_of
from grace.core.program import as_program
from grace.core.registry import compressors, take, unknown_key
from grace.stages.codec import FEEDBACKS, AllLevels, Codec, ExampleTopK

INT8: Mapping[str, Any] = {"compressor": "blockint", "bits": 8}
"""The default compression of both directions."""
Choice = str | Mapping[str, Any] | Compressor | None
STORED = ("float16", "float32")


@dataclass(frozen=True)
class Direction:
    """How one direction of an edge is compressed."""

    compressor: Compressor
    feedback: str = "none"
    masked: bool = False
    """Whether only elements that were sent forward are sent. True for the backward direction with same_mask, which then
    uses the compressor of the forward direction.
    """
    seed: int = 0
    debug: bool = False
    samples: int = 0
    """For "aq": IDs are 0 .. samples - 1."""
    stored: str = "float16"
    """For "aq": the dtype of stored activations, and of an example's first visit on the wire."""
    storage: Path | None = field(default=None, compare=False)
    """For "aq": the folder of memory-mapped files; None: in memory."""

    @property
    def plain(self) -> bool:
        """Whether tensors cross uncompressed."""
        return self.compressor.traits.lossless and not self.masked

    @property
    def codec(self) -> Codec:
        return Codec(self.compressor)


def compressor_of(choice: Choice, what: str) -> Compressor:
    """A compressor from a dictionary, name or instance; ``what``: "forward" or "backward". None: no compression.

    `blockint` also takes ``levels``: 2**bits - 1, symmetric about 0, or 2**bits, those of AQ-SGD (`AllLevels`).
    ValueError for a method that needs other workers, or a state of its own.
    """
    rest: dict[str, Any] = dict(choice) if isinstance(choice, Mapping) else {"compressor": choice or "none"}
    if "memory" in rest:
        raise ValueError(f"{what}: stages have no memory: leave it out, and choose feedback='ef' or 'ef21'")
    compressor: Compressor = take(compressors, rest.pop("compressor", "none"), rest)
    if type(compressor) is BlockInt and "levels" in rest:
        levels, most = rest.pop("levels"), 2**compressor.bits
        if levels not in (most - 1, most):
            raise ValueError(f"{what}: levels={levels!r}: bits={compressor.bits} have {most - 1} or {most}")
        compressor = (
            compressor if levels < most else AllLevels(compressor.block_size, compressor.rounding, compressor.bits)
        )
    if rest:
        raise ValueError(f"{what}: {unknown_key(next(iter(rest)), compressor)}")
    if isinstance(compressor, TopK) and compressor.selector == "exact":
        compressor = ExampleTopK(compressor.compress_ratio)
    name = name_of(compressor)
    xp = get_backend("numpy")
    ctx = Context(xp=xp, name="probe", shape=(1, 8, 8))
    usable = "choose one that does not, such as 'blockint', 'fp8' or 'topk'"
    if compressor.traits.combine is Combine.AGREED:
        raise ValueError(f"{what}: {name!r} agrees with other workers on what it sends: {usable}")
    if compressor.init(ctx):
        raise ValueError(f"{what}: {name!r} keeps a state of one tensor, but batches have other examples: {usable}")
    try:
        next(as_program(compressor.compress(xp.zeros(ctx.size), {}, ctx)))
    except StopIteration:
        return compressor
    raise ValueError(f"{what}: {name!r} asks other workers while it compresses: {usable}")


def directions(
    forward: Choice = INT8,
    backward: Choice = INT8,
    feedback: str = "none",
    same_mask: bool = False,
    seed: int = 0,
    debug: bool = False,
    samples: int = 0,
    storage: str | Path | None = None,
    stored: str = "float16",
) -> tuple[Direction, Direction]:
    """The forward and backward `Direction` of an edge. ValueError, with the remedy, for conflicting settings.

    ``forward``, ``backward``: a dictionary {"compressor": ..., its parameters}, a name, a Compressor, or None.
    ``feedback``: "none", "ef", "ef21", or "aq", which is for activations: gradients then have no feedback.
    ``same_mask``: gradients are sent only where the forward direction, a top-k, kept elements; ``backward`` has no
    effect. ``samples``, ``stored``, ``storage``: for "aq": the number of examples in the data set; the dtype of stored
    activations, "float16" or "float32"; a folder for memory-mapped files, or None for memory.
    ``seed``: for stochastic rounding; give data-parallel replicas different seeds.
    ``debug``: messages contain a digest of the values that the receiver must compute with.
    """
    if feedback not in FEEDBACKS:
        raise ValueError(f"feedback={feedback!r}: choose one of {', '.join(FEEDBACKS)}")
    ahead, back = compressor_of(forward, "forward"), compressor_of(backward, "backward")
    if same_mask:
        if not isinstance(ahead, ExampleTopK):
            raise ValueError(f"same_mask is of forward='topk' with selector 'exact', not of {name_of(ahead)!r}")
        if feedback != "none":
            raise ValueError(f"same_mask goes without feedback, since {feedback!r} sends differences: leave one out")
    for each, what in ((ahead, "forward"), (back, "backward")):
        fed = feedback not in ("none", "aq") or (feedback == "aq" and what == "forward")
        if fed and (each.traits.majority_vote or (each.variance(2**20) or 0) >= 1):
            raise ValueError(
                f"{what}: feedback={feedback!r} diverges with {name_of(each)!r} at these settings, since its error may "
                "exceed the input: use feedback='none'"
            )
    if feedback == "aq":
        if samples < 1:
            raise ValueError("feedback='aq' keeps activations of each example: give samples, the size of the data set")
        if stored not in STORED:
            raise ValueError(f"stored={stored!r}: choose 'float16' or 'float32'")
    where = None if storage is None else Path(storage)
    return (
        Direction(ahead, feedback, False, seed, debug, samples, stored, where),
        Direction(ahead if same_mask else back, "none" if feedback == "aq" else feedback, same_mask, seed, debug),
    )
