"""Exchanges of groups: one call encodes all units of a group, and one call decodes them."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from grace.backends import Backend
from grace.core import Array, Compressor, Context, Program
from grace.core.collectives import AllToAll, Collective, Gather
from grace.core.dtypes import ITEMSIZE
from grace.core.errors import sent_by
from grace.core.gathered import GatheredPayloads
from grace.core.method import Method
from grace.engine.groups.cells import RowCell
from grace.engine.groups.native import Decoder, Encoder, Message, Point
from grace.engine.groups.recipes import recipe
from grace.kernels import Library
from grace.kernels.rows import Refused

RESIDUAL = "memory/residual"
FLOAT = ITEMSIZE["float32"]


class Form(NamedTuple):
    """Dtype and shape of an array that does not exist yet."""

    dtype: str
    shape: tuple[int, ...]


NOTHING = Form("uint8", (0,))


def filled(asked: Collective, arrays: Sequence[Array]) -> Collective:
    """Return a collective with its `Form`s replaced by arrays; for an AllToAll, one array per destination."""
    if isinstance(asked, AllToAll):
        return replace(asked, parts=tuple((array,) for array in arrays))
    return replace(asked, arrays=tuple(arrays))


def each_finite(library: Library, addresses: Sequence[int], sizes: Sequence[int]) -> list[bool] | None:
    """Return whether each of the vectors at these addresses is finite, or None if all are."""
    if library.finite(addresses, sizes, len(sizes)):
        return None
    return [bool(library.finite([at], [n], 1)) for at, n in zip(addresses, sizes, strict=True)]


class Feedback:
    """The residuals of the points that are encoded together."""

    def __init__(self, xp: Backend, cells: Sequence[RowCell], points: Sequence[Point], starts: Sequence[int]):
        self._xp = xp
        self._table, self._which = cells[0].table, np.array([cell.number for cell in cells], np.int64)
        self._bytes = FLOAT * np.array(starts, np.int64)
        self._sizes = [FLOAT * point.ctx.size for point in points]
        self._x: Any = None  # addresses of the encoded vectors, until the exchange has ended
        self._old = self._new = self._bytes

    def hold(self) -> None:
        """Keep the current residuals until the next exchange is committed or discarded."""
        self._table.hold(self._which)

    def begin(self, x: Any) -> tuple[Any, Any]:
        """Begin an exchange of the vectors at the addresses ``x``; return the addresses of old and new residuals."""
        self._x = x
        self._old = self._table.old(self._which) + self._bytes
        self._new = self._table.new(self._which) + self._bytes
        self._table.flights.append(self)
        return self._old, self._new

    def encode(self, encoder: Encoder, x: Any, out: int, step: int) -> None:
        """Add the residuals to the vectors at the addresses ``x``, and encode the sums to the message at ``out``."""
        encoder.encode(x, *self.begin(x), out, step)

    def before(self, number: int, row: Array) -> Array | None:
        """Return a row as it was before this exchange if the exchange has swapped it with x, else None."""
        mine = np.flatnonzero((self._which == number) & (self._old == self._new)).tolist()
        if not mine:
            return None
        found = self._xp.buffers.copy(row)
        base = self._xp.buffers.address(found)
        for each in mine:
            self._copy(base + int(self._bytes[each]), int(self._x[each]), each)
        return found

    def end(self, ok: Any = None) -> None:
        """Keep the new residuals where ``ok``, bool[points]; None: all. x must be unchanged since the encoding."""
        if self._x is None:
            return
        x, self._x = self._x, None
        self._table.flights.remove(self)
        self._settle(x, ok)

    def undo(self) -> None:
        """Restore the old residuals."""
        self.end(np.zeros(len(self._which), bool))

    def _settle(self, x: Any, ok: Any) -> None:
        if ok is None:
            self._table.advance(self._which)
            return
        for number in np.flatnonzero(~ok & (self._old == self._new)).tolist():
            self._copy(int(self._old[number]), int(x[number]), number)
        self._table.advance(self._which[ok])

    def _copy(self, to: int, source: int, number: int) -> None:
        # Copies all elements of a point from one address to another.
        ctypes.memmove(to, source, self._sizes[number])


class Landed:
    """The received messages of an exchange, from which its means are decoded."""

    def __init__(self, received: Sequence[Any], addresses: Any, step: int):
        self.addresses, self.step = addresses, step
        self._received = received  # keeps the memory alive: decoders only have its addresses


class Coding:
    """Makes encoders and decoders that call the native library."""

    def __init__(self, xp: Backend, library: Library, compressor: Compressor):
        self.xp, self._library, self._compressor = xp, library, compressor

    def encoder(self, points: Sequence[Point], message: Message) -> Encoder:
        return Encoder(self._library, points, message, self.xp.threads)

    def decoder(self, points: Sequence[Point], places: Mapping[str, Any], senders: Any, units: Any = None) -> Decoder:
        """``units``: as in `feedback`, for a decoder that checks whether payloads are finite."""
        return Decoder(self._library, points, places, senders, self.xp.threads)

    def feedback(
        self, cells: Sequence[RowCell], points: Sequence[Point], starts: Sequence[int], units: Any
    ) -> Feedback:
        """``units``: int64[points], the number of each point's unit."""
        return Feedback(self.xp, cells, points, starts)

    def landed(self, received: Sequence[Any], step: int) -> Landed:
        """Return the received messages, one array from each worker, as a `Landed`."""
        return Landed(received, addresses(self.xp, received), step)


def addresses(xp: Backend, received: Sequence[Any]) -> Any:
    """Return int64[workers], the address of the single array that each worker sent."""
    if isinstance(received, GatheredPayloads):
        return np.array(received.addresses()[0], np.int64)
    return np.array([xp.buffers.address(array) for (array,) in received], np.int64)


class Group(ABC):
    """Units with one method and communicator, encoded and decoded by the native library.

    ``cells``: for each unit, the state's cells by key. ``x``: the addresses of the units' vectors, float32[n].
    """

    rounds: int
    """Number of messages that an exchange sends, one after the other."""
    overwrites: ClassVar[bool] = False
    """Whether `exchange` or `finite` overwrites the vectors; `finish` then leaves the means in the same memory."""
    on_device: ClassVar[bool] = False
    """Whether `finite` returns int32[units] on the device, to be passed to `finish`."""

    def __init__(
        self,
        xp: Backend,
        library: Library,
        method: Method,
        communicator: Any,
        contexts: Sequence[Context],
        cells: Sequence[Mapping[str, RowCell]],
    ):
        self.xp, self.library, self.method, self.communicator = xp, library, method, communicator
        self.contexts, self.cells = contexts, cells
        self.feedback: list[Any] = []

    def places(self, vectors: Sequence[Array]) -> Sequence[int]:
        """The addresses of the units' vectors."""
        found = self.xp.buffers.addresses(vectors)
        assert found is not None, "the vectors are contiguous"
        return found

    @property
    @abstractmethod
    def asked(self) -> Sequence[Collective]:
        """The collectives that `exchange` yields, in order, with `Form`s in place of arrays."""

    @abstractmethod
    def exchange(self, x: Sequence[int], step: int) -> Program[Any]:
        """Encode and send the vectors at the addresses x; return the argument ``landed`` of `finite` and `finish`."""

    @abstractmethod
    def finite(self, landed: Any) -> list[bool] | None:
        """Return whether the mean of each unit is finite, or None if all are."""

    @abstractmethod
    def finish(self, landed: Any, x: Sequence[int], ok: Sequence[bool] | None) -> None:
        """Keep the new state of units where ``ok`` (None: of all), and write the means of all units to x."""

    @property
    @abstractmethod
    def traffic(self) -> list[tuple[int, int]]:
        """Bytes of payloads that each unit sends and receives in an exchange."""

    def counted(self, counts: dict[str, list[int]], landed: Any) -> dict[str, list[int]]:
        """What `Meter` counts for this exchange, the same object for each like it; ``counts``: by `traffic`."""
        return counts

    def hold(self) -> None:
        """Keep the current state until the next exchange is committed or discarded."""
        for each in self.feedback:
            each.hold()

    def undo(self) -> None:
        """Restore the state from before a failed exchange. State outside `feedback` is written by `finish` alone."""
        for each in self.feedback:
            each.undo()


class CodedGroup(Group):
    """A group whose payloads are gathered, and whose decoding does not read the state."""

    coding_of: ClassVar[Callable[..., Coding]] = Coding

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.coding = self.coding_of(self.xp, self.library, self.method.compressor)

    def _state(
        self, method: Method, prefixes: Sequence[str], points: Sequence[Point], starts: Sequence[int], units: Any
    ) -> Any:
        # Returns the state of these points; None if they have none. For each point: the prefix of its cells' keys, its
        # first element within its unit's state, and the number of its unit.
        cells = [
            {key.removeprefix(prefix): cell for key, cell in self.cells[unit].items() if key.startswith(prefix)}
            for unit, prefix in zip(units.tolist(), prefixes, strict=True)
        ]
        return self._feedback(method, cells, points, starts, units) if cells and cells[0] else None

    def _feedback(
        self,
        method: Method,
        cells: Sequence[Mapping[str, RowCell]],
        points: Sequence[Point],
        starts: Sequence[int],
        units: Any,
    ) -> Any:
        return self.coding.feedback([each["residual"] for each in cells], points, starts, units)

    @abstractmethod
    def settle(self, ok: Sequence[bool] | None) -> None:
        """Keep the new state of units where ``ok`` (None: of all). x must be unchanged since `exchange`."""

    @abstractmethod
    def decode(self, landed: Any, out: Sequence[int]) -> None:
        """Write the means to the addresses ``out``. They may overwrite x only after `settle`, which reads x."""

    @staticmethod
    @abstractmethod
    def idle(communicator: Any, workers: int) -> Sequence[Collective]:
        """`asked` for one of several workers of ``communicator`` that has no units."""

    def finish(self, landed: Any, x: Sequence[int], ok: Sequence[bool] | None) -> None:
        self.settle(ok)
        self.decode(landed, x)

    def _encoded(self, encoder: Encoder, feedback: Feedback | None, x: Any, step: int) -> Array:
        message = self.xp.buffers.empty((encoder.message.size,), "uint8")
        out = self.xp.buffers.address(message)
        if feedback is None:
            encoder.encode(x, 0, 0, out, step)
        else:
            feedback.encode(encoder, x, out, step)
        return message

    def _decoded(self, decoder: Decoder, addresses: Any, out: Any, step: int) -> None:
        try:
            decoder.mean(addresses, out, step)
        except Refused as error:
            self._name_sender(decoder, error.row, addresses, step)
            raise

    def _name_sender(self, decoder: Decoder, number: int, addresses: Any, step: int) -> None:
        # Decode the payloads of a point one by one: an invalid one raises a ValueError that names its sender.
        compressor, ctx = self.method.compressor, decoder.points[number].ctx._with(step=step)
        for worker, arrays in decoder.payloads(number, addresses):
            payload = tuple(self.xp.asarray(array, array.dtype.name) for array in arrays)
            with sent_by(worker, compressor, ctx):
                compressor.decompress(payload, ctx)


class GatheredGroup(CodedGroup):
    """The exchange of communicator "allgather"."""

    rounds = 1

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        compressor = self.method.compressor
        self._points = [point_of(compressor, ctx) for ctx in self.contexts]
        self._message, workers = Message(self._points), self.contexts[0].world_size
        self._encoder = self.coding.encoder(self._points, self._message)
        senders, units = np.tile(np.arange(workers), (len(self._points), 1)), np.arange(len(self._points))
        self._decoder = self.coding.decoder(self._points, self._message.places, senders, units)
        prefixes, starts = ["memory/"] * len(self._points), [0] * len(self._points)
        state = self._state(self.method, prefixes, self._points, starts, units)
        self.feedback = [] if state is None else [state]

    @property
    def asked(self) -> Sequence[Collective]:
        return (Gather((Form("uint8", (self._message.size,)),)),)

    def exchange(self, x: Sequence[int], step: int) -> Program[Landed]:
        places = np.array(x, np.int64)
        message = self._encoded(self._encoder, self.feedback[0] if self.feedback else None, places, step)
        received = yield Gather((message,))
        return self.coding.landed(received, step)

    def finite(self, landed: Landed) -> list[bool] | None:
        found = self._decoder.finite(landed.addresses)
        return None if found is None else found.tolist()

    @staticmethod
    def idle(communicator: Any, workers: int) -> Sequence[Collective]:
        return (Gather((NOTHING,)),)

    def settle(self, ok: Sequence[bool] | None) -> None:
        for each in self.feedback:
            each.end(None if ok is None else np.array(ok))

    def decode(self, landed: Landed, out: Sequence[int]) -> None:
        self._decoded(self._decoder, landed.addresses, np.array(out, np.int64), landed.step)

    @property
    def traffic(self) -> list[tuple[int, int]]:
        others = self.contexts[0].world_size - 1
        return [(size, size * others) for size in map(bytes_of, self._points)]


def point_of(compressor: Compressor, ctx: Context, destination: int = 0) -> Point:
    """The point that compresses the elements of a context."""
    found = recipe(compressor, ctx)
    assert found is not None
    return Point(ctx, found, destination)


def bytes_of(point: Point) -> int:
    """Bytes of a point's payload."""
    return sum(ITEMSIZE[dtype] * length for _, dtype, length in point.recipe.arrays)
