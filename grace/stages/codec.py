"""The payloads that cross an edge, as pure functions over a compressor and a backend's arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from grace.compressors.measured.blockint import BlockInt
from grace.compressors.sparse import EXACT, Placed, kept
from grace.core import Array, Compressor, Context, MaybeProgram, Payload, State, Traits
from grace.core.gathered import Layout
from grace.core.program import run_local
from grace.ops.index_coding import narrow, widen
from grace.ops.validate import fitting, placed

FEEDBACKS = ("none", "ef", "ef21", "aq")
SHAPED = replace(EXACT, needs_shape=True)
NARROW = 2**16
"""Up to this many elements per example, a position within the example takes fewer than 32 bits."""


@dataclass(frozen=True)
class ExampleTopK(Placed):
    """Send the elements of largest magnitude of each example: `topk`, for all examples of a batch at once.

    The context's first dimension counts the examples. Payload: values float32[m k]; positions in the example, as
    uint8[m k] and packed higher bits, or int32[m k] if an example has more than 65536 elements.
    k = floor(compress_ratio * n), at least 1.
    Rudakov et al., arXiv:2401.07788, section 3.
    """

    compress_ratio: float

    @property
    def traits(self) -> Traits:
        return SHAPED

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp, (m, n, k) = ctx.xp, self._sizes(ctx)
        places = xp.topk_abs(xp.reshape(x, (m, n)), k)
        values = xp.take(x, xp.reshape(places + xp.reshape(xp.arange(m) * n, (-1, 1)), (-1,)))
        places = xp.reshape(places, (-1,))
        return (values, *(narrow(xp, places, n) if n <= NARROW else (places,))), state

    def parts(self, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        xp, (m, n, k) = ctx.xp, self._sizes(ctx)
        values = fitting(xp, payload[0], "float32", m * k, "values")
        places = widen(xp, payload[1:], n, m * k) if n <= NARROW else fitting(xp, payload[1], "int32", m * k, "places")
        positions = xp.reshape(places, (m, k)) + xp.reshape(xp.arange(m) * n, (-1, 1))
        return values, placed(xp, xp.reshape(positions, (-1,)), m * n)

    def _sizes(self, ctx: Context) -> tuple[int, int, int]:
        # Returns the number of examples, of elements per example, and of sent elements per example.
        n = math.prod(ctx.shape[1:])
        return ctx.shape[0], n, kept(self.compress_ratio, n)


@dataclass(frozen=True)
class AllLevels(BlockInt):
    """Round as `blockint`, but to all 2**bits levels of AQ-SGD, which include 0, but not the largest magnitude.

    Payload: codes uint8[ceil(bits * n / 8)], two's complement, -L .. L - 1 with L = 2**(bits - 1); scales float32[m]. A
    code stands for code * (scale / L), so an element of scale itself becomes (1 - 1 / L) * scale.
    Wang et al., "Fine-tuning Language Models over Slow Networks using Activation Quantization with Guarantees", 2022,
    arXiv:2206.01299, by the code of its authors.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding != "nearest":
            raise ValueError(f"levels={2**self.bits}: rounding={self.rounding!r} would be biased: leave it out")

    @property
    def top(self) -> int:
        return 1 << (self.bits - 1)

    def contraction(self, n: int) -> float | None:
        # No error exceeds its element, and the largest element's error is at most 1 / L of that element.
        return (1 - 1 / self.top**2) / max(1, min(n, self.traits.block_size or n))

    def _codes(self, steps: Array, ctx: Context) -> Array:
        return ctx.xp.minimum(super()._codes(steps, ctx), float(self.top - 1))


@dataclass(frozen=True)
class Codec:
    """Compresses each example of a batch by itself. ``ctx.shape`` is the batch's: its first dimension counts examples.

    A batch becomes one payload if this equals compressing each example alone: if each example fills whole blocks and
    bytes, for a single example, and for `ExampleTopK`.
    """

    compressor: Compressor

    def pieces(self, ctx: Context) -> list[Context]:
        """The contexts of the payloads, in order."""
        rows, width = ctx.shape[0], math.prod(ctx.shape[1:])
        block = self.compressor.traits.block_size
        whole = isinstance(self.compressor, ExampleTopK) or (block and width % math.lcm(block, 8) == 0)
        if whole or rows == 1:
            return [ctx]
        return [replace(ctx.stage(str(row)), shape=(1, *ctx.shape[1:])) for row in range(rows)]

    def compress(self, x: Array, ctx: Context) -> list[Payload]:
        """float32[n] -> a payload for each of the `pieces`. x is not changed."""
        parts = self.pieces(ctx)
        rows = [x] if len(parts) == 1 else ctx.xp.split(x, [part.size for part in parts])
        return [self._payload(row, part) for row, part in zip(rows, parts, strict=True)]

    def decompress(self, payloads: list[Payload], ctx: Context) -> Array:
        """Payloads -> float32[n], equal at both ends."""
        pairs = zip(payloads, self.pieces(ctx), strict=True)
        decoded = [self.compressor.decompress(payload, part) for payload, part in pairs]
        return decoded[0] if len(decoded) == 1 else ctx.xp.concat(decoded)

    def layout(self, ctx: Context) -> list[Layout]:
        """dtypes and shapes of each payload's arrays, which do not depend on values."""
        parts = self.pieces(ctx)
        payload = self._payload(ctx.xp.zeros(parts[0].size), parts[0])
        return [tuple((ctx.xp.dtype(array), ctx.xp.shape(array)) for array in payload)] * len(parts)

    def _payload(self, x: Array, ctx: Context) -> Payload:
        return run_local(self.compressor.compress(x, {}, ctx), self.compressor)[0]

    def positions(self, payloads: list[Payload], ctx: Context) -> Array:
        """int32[K]: the positions of the sent elements in the batch, ascending; only for `ExampleTopK`."""
        assert isinstance(self.compressor, ExampleTopK)
        return self.compressor.parts(payloads[0], ctx)[1]


def send(codec: Codec, feedback: str, x: Array, state: State, ctx: Context) -> tuple[list[Payload], Array, State]:
    """The sender's side: returns payloads, float32[n] that the receiver computes with, and the next state.

    x: float32[n], a batch; not changed. State float32[n]: the ``error`` ("ef"), or the ``estimate``, equal at both ends
    ("ef21", "aq").
    "none": the receiver computes with c = C(x). "ef": with c = C(x + e), and e becomes x + e - c. "ef21", "aq": c = C(x
    - A), and A becomes A + c, with which the receiver computes. A non-finite element reaches the receiver and leaves
    the state unchanged.
    """
    xp = ctx.xp
    if feedback == "none":
        payloads = codec.compress(x, ctx)
        return payloads, codec.decompress(payloads, ctx), state
    if feedback == "ef":
        x = x + state["error"]
        payloads = codec.compress(x, ctx)
        value = codec.decompress(payloads, ctx)
        return payloads, value, {"error": _finite(xp, x - value, 0.0)}
    payloads = codec.compress(x - state["estimate"], ctx)
    return payloads, *receive(codec, feedback, payloads, state, ctx)


def receive(codec: Codec, feedback: str, payloads: list[Payload], state: State, ctx: Context) -> tuple[Array, State]:
    """The receiver's side of `send`: returns float32[n] to compute with, and the next state."""
    value = codec.decompress(payloads, ctx)
    if feedback in ("none", "ef"):
        return value, state
    value = value + state["estimate"]
    return value, {"estimate": _finite(ctx.xp, value, state["estimate"])}


def init(feedback: str, ctx: Context, sender: bool) -> State:
    """The state before the first batch, for "none", "ef" and "ef21"; "aq" stores its rows in `Samples`."""
    if feedback == "ef" and sender:
        return {"error": ctx.xp.zeros(ctx.size)}
    return {"estimate": ctx.xp.zeros(ctx.size)} if feedback == "ef21" else {}


def _finite(xp: object, new: Array, old: Array | float) -> Array:
    return xp.where(xp.isfinite(new), new, old)  # type: ignore[attr-defined]
