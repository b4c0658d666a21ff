"""A compressor's promises: the framework relies on them, and `grace.testing` verifies them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from grace.core.state import Resize


class Combine(Enum):
    """How the payloads of all workers become one gradient."""

    GATHER = "gather"
    """All payloads are needed: each is decoded, then averaged (or voted on)."""
    MEAN = "mean"
    """Payloads are linear in the gradient: they may be averaged on the wire."""
    AGREED = "agreed"
    """The workers agreed on one payload inside ``compress``, so no exchange is left."""


@dataclass(frozen=True)
class Traits:
    """A compressor's promises, given its hyper-parameters."""

    family: str = ""
    """The kind of method: "quantisation", "sparsification", "hybrid" or "low rank"."""
    combine: Combine = Combine.GATHER
    """How the payloads of all workers become one gradient."""
    block_size: int | None = None
    """Elements per block, if statistics are per block; None: per tensor.

    The payloads of chunks, cut at whole blocks and bytes, concatenate to the payload of the whole tensor.
    """
    unbiased: bool = False
    """The expectation of ``decompress(compress(x))`` is x."""
    variable_length: bool = False
    """The payload's length depends on the values."""
    needs_shape: bool = False
    """The method uses the tensor's shape, not only its size."""
    sends_exact_values: bool = False
    """Elements are sent unchanged or not at all: `residual` is x with zeros where elements were sent."""
    majority_vote: bool = False
    """The result is a majority vote, so there is no residual."""
    update_direction: bool = False
    """The result is not an estimate of the gradient but an update with its own scale, for SGD without momentum."""
    nonfinite_in_payload: bool = False
    """NaN and infinity in x appear in the payload's float32 arrays."""
    internal_feedback: bool = False
    """The compressor has its own error feedback, in its state."""
    waits_for_steps: bool = False
    """An element is sent once several gradients agree on it, so a mean, compressed again, would wait a second time."""
    lossless: bool = False
    """The payload is x itself, in ``ctx.wire``: float64 stays float64."""
    max_magnitude: float = 1e30
    """The largest magnitude of an element for which the result is guaranteed to be finite."""
    memory: str = "residual"
    """The name of the default memory."""
    wire_sum: tuple[str, int] | None = None
    """dtype and largest magnitude of the integers that are summed on the wire; None for floats."""
    reshard: Mapping[str, Resize] = field(default_factory=dict, hash=False)
    """Reshard rule of each state array, by key; the default is `Resize.SAME`."""


FORMER = {
    "block": "block_size",
    "combine": "combine",
    "family": "family",
    "feedback": "internal_feedback",
    "largest": "max_magnitude",
    "lossless": "lossless",
    "marked": "nonfinite_in_payload",
    "mask": "sends_exact_values",
    "memory": "memory",
    "ragged": "variable_length",
    "resize": "reshard",
    "shaped": "needs_shape",
    "summed": "wire_sum",
    "unbiased": "unbiased",
    "vote": "majority_vote",
}
"""Former attributes of `Compressor`, deprecated, and the fields of `Traits` that replaced them."""
