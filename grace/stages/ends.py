"""The ends of an edge: buffers, messages and counts of one direction."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grace.backends import Backend, backend_of
from grace.compressors.sparse import kept
from grace.core import Array, Context, Payload, State
from grace.core.dtypes import ITEMSIZE
from grace.core.gathered import Layout, nbytes
from grace.stages import codec as codecs
from grace.stages.settings import Direction

DIGEST = 8
"""Number of bytes of the digest that ends a message: of the IDs ("aq"), of the values that the receiver computes with
(debug), or of both.
"""
LARGEST16 = 65504.0
"""The largest number of float16."""


# -- what crossed ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class EdgeBytes:
    """The traffic of an edge in one direction, counted at one end."""

    edge: str
    """"0-1" joins stages 0 and 1."""
    direction: str
    """"forward" or "backward"."""
    end: str
    """"sends" or "receives"."""
    messages: int
    nbytes: int
    """Bytes of all messages."""
    dense: int
    """Bytes that torch's own stage would send for the same tensors."""

    @property
    def ratio(self) -> float:
        """``dense`` over ``nbytes``."""
        return self.dense / self.nbytes if self.nbytes else 1.0


@dataclass(frozen=True)
class Report:
    """Bytes per edge and direction; ``str()`` makes a table."""

    edges: tuple[EdgeBytes, ...]

    def __str__(self) -> str:
        lines = [f"{'edge':<8}{'direction':<11}{'end':<10}{'messages':>9}{'bytes':>14}{'dense':>14}{'fewer':>8}"]
        lines += [
            f"{e.edge:<8}{e.direction:<11}{e.end:<10}{e.messages:>9}{e.nbytes:>14,}{e.dense:>14,}{e.ratio:>7.2f}x"
            for e in self.edges
        ]
        return "\n".join(lines)


# -- activations by sample ---------------------------------------------------------------------------------------------
class Samples:
    """For "aq": the activations that both ends know, by sample ID.

    They are in memory or in a memory-mapped file; only rows marked in ``seen`` are valid.
    """

    def __init__(self, count: int, width: int, dtype: str, path: Path | None):
        self.seen = np.zeros(count, bool)
        self.path = path
        if path is None:
            self.rows: Any = np.zeros((count, width), dtype)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.exists() and path.stat().st_size == count * width * np.dtype(dtype).itemsize
        self.rows = np.memmap(path, dtype, "r+" if whole else "w+", shape=(count, width))

    def read(self, ids: Any) -> tuple[Any, Any]:
        """IDs int64[m] -> activations float32[m, width], and bool[m]: whether this is a sample's first visit."""
        return self.rows[ids].astype(np.float32), ~self.seen[ids]

    def write(self, ids: Any, rows: Any) -> None:
        """Store activations float32[m, width]; a row that is not finite leaves its sample unchanged."""
        ok = np.isfinite(rows).all(1)
        self.rows[ids[ok]] = rows[ok]
        self.seen[ids[ok]] = True


# -- an end ------------------------------------------------------------------------------------------------------------
class End:
    """One end of one direction of an edge.

    ``edge``: such as "0-1"; ``direction``: "forward" or "backward"; ``sender``: whether this is the sending end.
    ``masks``: for same_mask, the positions sent forward, shared by both directions at the same end. Both ends must make
    the same calls.

    Arguments of the methods: ``number``: the index of a tensor among a stage's outputs; ``microbatch``: the index of
    the micro-batch in a step; ``ids``: NumPy's int64[m], IDs for "aq"; ``training``: False: no feedback, no new state.
    """

    def __init__(
        self, how: Direction, edge: str, direction: str, sender: bool, masks: dict[str, Array] | None = None
    ) -> None:
        self.how, self.edge, self.direction, self.sender = how, edge, direction, sender
        self._masks = masks
        self._codec = how.codec
        self._steps: dict[str, int] = {}
        self._state: dict[str, State] = {}
        self._samples: dict[int, Samples] = {}
        self._layouts: dict[Any, list[Layout]] = {}
        self._messages = self._nbytes = self._dense = 0

    def send(
        self, x: Array, number: int = 0, microbatch: int = 0, ids: Any = None, training: bool = True
    ) -> tuple[Array, Array]:
        """A batch [m, ...] -> its message uint8[:], and float32[n] that the receiver computes with."""
        xp = backend_of(x)
        shape, dtype = _batch(xp.shape(x)), xp.dtype(x)
        parts, value = self._transmit(xp, x, number, microbatch, ids, training)
        message = xp.buffers.concat_bytes([array for payload in parts for array in payload])
        if (digest := self._digest(xp, value, ids, training)) is not None:
            message = xp.concat([message, digest])
        self.count(xp.shape(message)[0], math.prod(shape) * ITEMSIZE[dtype])
        return message, value

    def through(self, x: Array, number: int = 0, microbatch: int = 0, ids: Any = None, training: bool = True) -> Array:
        """A batch -> float32[n] that the receiver computes with, if both ends are in one process."""
        xp = backend_of(x)
        parts, value = self._transmit(xp, x, number, microbatch, ids, training)
        sent = sum(xp.nbytes(array) for payload in parts for array in payload)
        self.count(sent, math.prod(xp.shape(x)) * ITEMSIZE[xp.dtype(x)])
        return value

    def size(
        self, xp: Backend, shape: Sequence[int], dtype: str, number: int = 0, ids: Any = None, training: bool = True
    ) -> int:
        """Bytes of the next message for a batch of this shape and dtype."""
        layouts = self._layout(xp, _batch(shape), dtype, number, ids, training)
        return sum(nbytes(*form) for layout in layouts for form in layout) + self._tail(training)

    def receive(
        self,
        message: Array,
        shape: Sequence[int],
        dtype: str,
        number: int = 0,
        microbatch: int = 0,
        ids: Any = None,
        training: bool = True,
    ) -> Array:
        """A message -> float32[n] to compute with. RuntimeError if a digest says that the ends differ."""
        xp = backend_of(message)
        shape = _batch(shape)
        layouts = self._layout(xp, shape, dtype, number, ids, training)
        parts, start = [], 0
        for layout in layouts:
            arrays = []
            for form in layout:
                stop = start + nbytes(*form)
                arrays.append(xp.buffers.from_bytes(message[start:stop], *form))
                start = stop
            parts.append(tuple(arrays))
        value = self._accept(xp, parts, shape, dtype, number, microbatch, ids, training)
        digest = self._digest(xp, value, ids, training)
        if digest is not None and xp.to_numpy(message[start:]).tobytes() != xp.to_numpy(digest).tobytes():
            what = "the receiver's buffers differ from the sender's" if self.how.debug else "other sample_ids"
            raise RuntimeError(
                f"edge {self.edge}, {self.direction}, tensor {number}, micro-batch {microbatch}: {what}. Give all "
                "stages the same sample_ids, and load the state of the same step on all of them"
            )
        self.count(xp.shape(message)[0], math.prod(shape) * ITEMSIZE[dtype])
        return value

    def count(self, sent: int, dense: int) -> None:
        """Count a message."""
        self._messages, self._nbytes, self._dense = self._messages + 1, self._nbytes + sent, self._dense + dense

    def report(self) -> EdgeBytes:
        """The traffic so far."""
        end = "sends" if self.sender else "receives"
        return EdgeBytes(self.edge, self.direction, end, self._messages, self._nbytes, self._dense)

    def state_dict(self) -> dict[str, Any]:
        """The state as arrays and numbers. It excludes rows in files: keep their folder with it."""
        samples = {}
        for number, store in self._samples.items():
            samples[str(number)] = {"seen": store.seen.copy()}
            if store.path is None:
                samples[str(number)]["rows"] = store.rows.copy()
            else:
                store.rows.flush()
                samples[str(number)]["width"] = store.rows.shape[1]
        buffers = {
            key: {name: backend_of(array).buffers.copy(array) for name, array in state.items()}
            for key, state in self._state.items()
            if state
        }
        return {"steps": dict(self._steps), "buffers": buffers, "samples": samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. ValueError for a state of another feedback."""
        names = {name for buffers in state["buffers"].values() for name in buffers}
        wanted = {"ef": {"error"}, "ef21": {"estimate"}}.get(self.how.feedback, set())
        if not names <= wanted or (state["samples"] and self.how.feedback != "aq"):
            raise ValueError(
                f"edge {self.edge}, {self.direction}: this state is not of feedback={self.how.feedback!r}: make the "
                "stage with the settings that it was saved with"
            )
        self._steps = dict(state["steps"])
        self._state = {
            key: {name: backend_of(array).buffers.copy(array) for name, array in buffers.items()}
            for key, buffers in state["buffers"].items()
        }
        self._samples = {}
        for number, saved in state["samples"].items():
            width = saved["rows"].shape[1] if "rows" in saved else int(saved["width"])
            store = self._store(int(number), width)
            if ("rows" in saved) != (store.path is None) or len(saved["seen"]) != len(store.seen):
                raise ValueError(
                    f"edge {self.edge}: the state is of other samples or another storage: use those that it had"
                )
            store.seen[:] = np.asarray(saved["seen"])
            if store.path is None:
                store.rows[:] = np.asarray(saved["rows"])

    # -- inside --------------------------------------------------------------------------------------------------------
    def _context(self, xp: Backend, shape: tuple[int, ...], dtype: str, key: str) -> Context:
        return Context(
            xp=xp,
            name=f"{self.edge}/{self.direction}/{key}",
            shape=shape,
            step=self._steps.get(key, 0),
            seed=self.how.seed,
            wire="float32" if dtype == "float64" else dtype,
        )

    def _transmit(
        self, xp: Backend, x: Array, number: int, microbatch: int, ids: Any, training: bool
    ) -> tuple[list[Payload], Array]:
        key = f"{number}/{microbatch}"
        shape, dtype = _batch(xp.shape(x)), xp.dtype(x)
        ctx = self._context(xp, shape, dtype, key)
        x = xp.reshape(xp.cast(x, "float32"), (-1,))
        if self.how.masked and training:
            positions = self._mask(key)
            values = xp.take(x, positions)
            return [(values,)], xp.scatter(xp.zeros(ctx.size), positions, values)
        if not training or self.how.feedback == "none":
            payloads, value, _ = codecs.send(self._codec, "none", x, {}, ctx)
            self._remember(key, payloads, ctx, training)
        elif self.how.feedback == "aq":
            store, known, fresh = self._known(xp, shape, number, ids)
            payloads = []
            if fresh.any():
                rows = self._rounded(xp, xp.take(xp.reshape(x, (shape[0], -1)), _places(xp, fresh)))
                payloads.append((xp.cast(rows, self.how.stored),))
                known = _placed(xp, known, fresh, rows)
            value = xp.reshape(known, (-1,))
            if not fresh.all():
                more, value, _ = codecs.send(self._codec, "aq", x, {"estimate": value}, ctx)
                payloads += more
            value = self._kept(xp, store, ids, value, shape[0])
        else:
            state = self._buffers(key, ctx)
            payloads, value, self._state[key] = codecs.send(self._codec, self.how.feedback, x, state, ctx)
        if training:
            self._steps[key] = self._steps.get(key, 0) + 1
        return payloads, value

    def _accept(
        self,
        xp: Backend,
        payloads: list[Payload],
        shape: tuple[int, ...],
        dtype: str,
        number: int,
        microbatch: int,
        ids: Any,
        training: bool,
    ) -> Array:
        key = f"{number}/{microbatch}"
        ctx = self._context(xp, shape, dtype, key)
        if self.how.masked and training:
            return xp.scatter(xp.zeros(ctx.size), self._mask(key), payloads[0][0])
        if not training or self.how.feedback == "none":
            value, _ = codecs.receive(self._codec, "none", payloads, {}, ctx)
            self._remember(key, payloads, ctx, training)
        elif self.how.feedback == "aq":
            store, known, fresh = self._known(xp, shape, number, ids)
            if fresh.any():
                known = _placed(xp, known, fresh, xp.cast(payloads[0][0], "float32"))
                payloads = payloads[1:]
            value = xp.reshape(known, (-1,))
            if not fresh.all():
                value, _ = codecs.receive(self._codec, "aq", payloads, {"estimate": value}, ctx)
            value = self._kept(xp, store, ids, value, shape[0])
        else:
            value, self._state[key] = codecs.receive(
                self._codec, self.how.feedback, payloads, self._buffers(key, ctx), ctx
            )
        if training:
            self._steps[key] = self._steps.get(key, 0) + 1
        return value

    def _layout(
        self, xp: Backend, shape: tuple[int, ...], dtype: str, number: int, ids: Any, training: bool
    ) -> list[Layout]:
        ctx = self._context(xp, shape, dtype, "layout")
        if self.how.masked and training:
            assert isinstance(self.how.compressor, codecs.ExampleTopK)
            k = kept(self.how.compressor.compress_ratio, math.prod(shape[1:]))
            return [(("float32", (shape[0] * k,)),)]
        if (shape, dtype) not in self._layouts:
            self._layouts[shape, dtype] = self._codec.layout(ctx)
        layout = self._layouts[shape, dtype]
        if self.how.feedback != "aq" or not training:
            return layout
        fresh = self._known(xp, shape, number, ids)[2]
        first: list[Layout] = [((self.how.stored, (int(fresh.sum()), math.prod(shape[1:]))),)]
        return (first if fresh.any() else []) + ([] if fresh.all() else layout)

    def _buffers(self, key: str, ctx: Context) -> State:
        state = self._state.get(key)
        if state is None:
            state = codecs.init(self.how.feedback, ctx, self.sender)
        state = {name: ctx.xp.asarray(array, "float32") for name, array in state.items()}  # loaded state is on the host
        for array in state.values():
            if ctx.xp.shape(array) != (ctx.size,):
                raise ValueError(
                    f"edge {self.edge}, {self.direction}: this batch has {ctx.size} elements, but the buffer of "
                    f"feedback={self.how.feedback!r} has {ctx.xp.shape(array)[0]}: it needs batches of one shape "
                    "(drop_last=True), or use feedback='none'"
                )
        return state

    def _remember(self, key: str, payloads: list[Payload], ctx: Context, training: bool) -> None:
        if self._masks is not None and training and self.direction == "forward":
            self._masks[key] = self._codec.positions(payloads, ctx)

    def _mask(self, key: str) -> Array:
        if self._masks is None or key not in self._masks:
            raise RuntimeError(f"edge {self.edge}: a gradient came before its activation, so same_mask has no mask")
        return self._masks.pop(key)

    def _tail(self, training: bool) -> int:
        return DIGEST if self.how.debug or (self.how.feedback == "aq" and training) else 0

    def _digest(self, xp: Backend, value: Array, ids: Any, training: bool) -> Array | None:
        if not self._tail(training):
            return None
        digest = hashlib.blake2b(digest_size=DIGEST)
        if ids is not None and training:
            digest.update(np.ascontiguousarray(ids, np.int64).tobytes())
        if self.how.debug:
            digest.update(xp.to_numpy(value).tobytes())
        return xp.asarray(np.frombuffer(digest.digest(), np.uint8), "uint8")

    def _store(self, number: int, width: int) -> Samples:
        if number not in self._samples:
            end = "sender" if self.sender else "receiver"
            path = self.how.storage and self.how.storage / f"edge{self.edge}-{self.direction}-{end}-{number}.bin"
            self._samples[number] = Samples(self.how.samples, width, self.how.stored, path)
        return self._samples[number]

    def _known(self, xp: Backend, shape: tuple[int, ...], number: int, ids: Any) -> tuple[Samples, Array, Any]:
        # Returns the store; a batch's activations that both ends know, float32[m, width]; and which are new, bool[m].
        if ids is None or len(ids) != shape[0]:
            found = "none" if ids is None else len(ids)
            raise ValueError(
                f"edge {self.edge}: feedback='aq' needs the ids of a batch's {shape[0]} examples, but has {found}: set "
                "sample_ids before each step"
            )
        store = self._store(number, math.prod(shape[1:]))
        if not 0 <= ids.min() <= ids.max() < self.how.samples:
            raise ValueError(f"sample_ids are 0 .. {self.how.samples - 1}, the samples given, not {ids.max()}")
        rows, fresh = store.read(ids)
        return store, xp.asarray(rows, "float32"), fresh

    def _kept(self, xp: Backend, store: Samples, ids: Any, value: Array, rows: int) -> Array:
        # Both ends store the values rounded to the storage's dtype, and the receiver computes with these.
        value = self._rounded(xp, value)
        store.write(ids, xp.to_numpy(xp.reshape(value, (rows, -1))))
        return value

    def _rounded(self, xp: Backend, x: Array) -> Array:
        if self.how.stored == "float32":
            return x
        near = xp.where(xp.isfinite(x), xp.minimum(xp.maximum(x, -LARGEST16), LARGEST16), x)
        return xp.cast(xp.cast(near, "float16"), "float32")


def _batch(shape: Sequence[int]) -> tuple[int, ...]:
    # Returns the shape of a batch; a vector is one example.
    return tuple(shape) if len(shape) > 1 else (1, *shape)


def _places(xp: Backend, fresh: Any) -> Array:
    return xp.asarray(np.flatnonzero(fresh).astype(np.int32), "int32")


def _placed(xp: Backend, known: Array, fresh: Any, rows: Array) -> Array:
    # Returns float32[m, width]: ``rows`` for first visits, and the known activations otherwise.
    which = xp.asarray(np.maximum(np.cumsum(fresh) - 1, 0).astype(np.int32), "int32")
    return xp.where(xp.reshape(xp.asarray(fresh, "bool"), (-1, 1)), xp.take(rows, which), known)
