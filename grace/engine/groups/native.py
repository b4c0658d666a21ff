"""Encodes all tensors of a group by one call of the native library, and decodes them by another."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grace.core import Context
from grace.core.dtypes import ITEMSIZE
from grace.core.rng import NOISE, stem
from grace.engine.groups.recipes import PLANES, Recipe
from grace.kernels import Library
from grace.kernels.rows import Refused, Rows

PAD = 16
"""Alignment in bytes of the parts of a message that go to different workers."""
ALONE = 2**18
"""Number of elements below which threads take longer to start than to work."""


class Point(NamedTuple):
    """A tensor or shard that a method compresses as one vector."""

    ctx: Context
    """Its context; the step is not used."""
    recipe: Recipe
    destination: int = 0
    """The number of the message part that contains its payload; there is one part per destination."""


class Message:
    """The layout of payloads in a message: one part per destination; within a part, wide dtypes come first."""

    def __init__(self, points: Sequence[Point], destinations: int = 1):
        arrays = [array for array, _, _ in points[0].recipe.arrays] if points else []
        self.places = {array: np.zeros(len(points), np.int64) for array in arrays}
        """By array name, int64[points]: byte offset of each point's array within its destination's part."""
        self.begins = np.zeros(len(points), np.int64)
        """int64[points]: byte offset of each point's part."""
        self.parts: list[tuple[int, int]] = []
        """Begin and end of each destination's part."""
        self.size = 0
        for destination in range(destinations):
            members = [number for number, point in enumerate(points) if point.destination == destination]
            begin, at = self.size + -self.size % PAD, 0
            self.begins[members] = begin
            for dtype in ("float32", "int32", "uint8"):
                for column, array in enumerate(arrays):
                    for number in members:
                        _, kind, length = points[number].recipe.arrays[column]
                        if kind == dtype:
                            self.places[array][number] = at
                            at += length * ITEMSIZE[kind]
            self.size = begin + at
            self.parts.append((begin, self.size))

    def at(self, members: Sequence[int]) -> dict[str, Any]:
        """Return `places` for these points only."""
        return {array: places[list(members)] for array, places in self.places.items()}


class Draws:
    """Writes the random numbers of a group's points, as keys or as noise, to the columns of a table of kernel calls."""

    def __init__(self, library: Library, points: Sequence[Point], rows: Rows):
        self._library, self._rows = library, rows
        recipe, ctx = points[0].recipe, points[0].ctx
        self._worker = 0 if recipe.shared else ctx.rank + 1
        self._stems = np.array([stem(ctx.seed, recipe.draws, point.ctx.name) for point in points], np.int64)
        self._table_stem = np.array([stem(ctx.seed, recipe.draws, "")], np.int64)
        starts = np.array([point.ctx.offset for point in points], np.int64)
        rows.set(start=starts)
        self._noise: Rows | None = None
        if recipe.noise:
            # Offsets are drawn for all noise rows from the tensor's first one on, even if the point starts later.
            ends = starts + np.array([point.ctx.size for point in points], np.int64)
            firsts, lasts = starts // NOISE, -(-ends // NOISE)
            self._table, self._offsets = np.zeros(NOISE, np.uint16), np.zeros(int(lasts.sum()), np.uint16)
            places = self._offsets.ctypes.data + 2 * np.concatenate([[0], np.cumsum(lasts)[:-1]])
            self._noise = Rows(library, "noise_table", len(points) + 1)
            self._noise.set(n=np.append(lasts, NOISE), out=np.append(places, self._table.ctypes.data))
            rows.set(table=self._table.ctypes.data, offsets=places + 2 * firsts)

    def at(self, step: int, codecs: _Codecs | None = None) -> None:
        """Set the columns for a step. With ``codecs``, the keys are set there instead."""
        keys = self._keys_of(self._stems, step)
        if codecs is not None:
            codecs.keys[:] = keys.T
        elif "key0" in self._rows:
            self._rows.set(key0=keys[0], key1=keys[1])
        if self._noise is not None:
            table = self._keys_of(self._table_stem, step)
            self._noise.set(key0=np.append(keys[0], table[0]), key1=np.append(keys[1], table[1]))
            self._noise.call()

    def _keys_of(self, stems: Any, step: int) -> Any:
        keys = np.zeros((2, len(stems)), np.int64)
        where = keys.ctypes.data
        self._library.stream_keys(stems.ctypes.data, len(stems), step, self._worker, where, where + 8 * len(stems))
        return keys


class _Codecs:
    """One code description (`Codes`) per point, as a column of a table of kernel calls."""

    def __init__(self, points: Sequence[Point], rows: Rows):
        made = [
            point.recipe.codec.with_random((0, 0) if point.recipe.draws else None)
            for point in points
            if point.recipe.codec
        ]
        kind, count = type(made[0]), len(made)
        self._memory = (kind * count)(*made)
        size, at = ctypes.sizeof(kind), ctypes.addressof(self._memory)
        rows.set(codec=at + size * np.arange(count))
        memory = np.frombuffer(memoryview(self._memory).cast("B"), np.uint8)
        self.keys: Any = np.ndarray((count, 2), np.uint32, memory, kind.key0.offset, (size, 4))
        """uint32[points, 2]: the keys of each point's random stream."""


class _Coding:
    """Kernel calls that encode positions, or decode those of several senders; owns the positions' memory."""

    def __init__(self, library: Library, points: Sequence[Point], kernel: str, senders: int = 1):
        each = [point.recipe.coded or {} for point in points for _ in range(senders)]
        sizes = np.array([one["k"] for one in each], np.int64)
        self._sizes, self._shape = sizes, (len(points), senders)
        self._memory = np.zeros(int(sizes.sum()), np.int32)
        self.addresses = self._memory.ctypes.data + 4 * (np.cumsum(sizes) - sizes)
        """Address of the positions of each point and sender."""
        self._planes = np.zeros((len(each), PLANES), np.int64)
        self._rows = Rows(library, kernel, len(each))
        self._rows.set(positions=self.addresses, **{name: [one[name] for one in each] for name in each[0]})
        self._rows.keep("planes", list(self._planes))

    def call(self, places: Mapping[str, Any], bases: Any) -> None:
        """Make the calls. ``places``: as `Message.places`. ``bases``: addresses of messages, int64[points, senders].

        Raises `Refused`, with the point's number, if a payload has a wrong number of positions.
        """
        for number in range(PLANES):
            self._planes[:, number] = (bases + places[f"plane{number}"][:, None]).reshape(-1)
        self._rows.set(upper=(bases + places["upper"][:, None]).reshape(-1))
        found = self._rows.call()
        wrong = np.flatnonzero(found != self._sizes)
        if len(wrong):
            text = f"its payload has {found[wrong[0]]} coded positions, not {self._sizes[wrong[0]]}"
            raise Refused(int(wrong[0]) // self._shape[1], text)


class Encoder:
    """Encodes the points of a group to one message."""

    def __init__(self, library: Library, points: Sequence[Point], message: Message, threads: int):
        self.message, self._threads = message, _side_by_side(points, threads)
        recipe = points[0].recipe
        self._rows = rows = Rows(library, recipe.encode, len(points))
        _constants(rows, points, 1 if self._threads > 1 else threads)
        self._draws = Draws(library, points, rows) if recipe.draws else None
        self._codecs = _Codecs(points, rows) if recipe.codec is not None else None
        self._coding = _Coding(library, points, "positions_write") if recipe.coded else None

    def encode(self, x: Any, old: Any, new: Any, out: int, step: int) -> None:
        """Encode the sums of the vectors at the addresses ``x`` and ``old`` to the message at ``out``.

        New residuals are written to ``new``. If ``new`` is ``old``, x receives the old residual in exchange; otherwise
        x is unchanged. Without residuals, ``old`` and ``new`` are 0.
        """
        rows = self._rows
        if self._draws is not None:
            self._draws.at(step, self._codecs)
        given = {"x": x, "residual": old, "out": new, "swap": (old == new) & (new != 0)}
        rows.set(**{name: values for name, values in given.items() if name in rows})
        base, places = out + self.message.begins, self.message.places
        rows.set(**{array: base + at for array, at in places.items() if array in rows})
        if self._coding is not None:
            rows.set(positions=self._coding.addresses)
        rows.call(self._threads)
        if self._coding is not None:
            self._coding.call(places, base[:, None])


class Decoder:
    """Decodes a group's points: averages the payloads that each point has in the messages of several senders.

    ``places``: by array name, the byte offset of each point's array in a message. ``senders``: int64[points, count],
    the numbers of the messages that hold each point's payloads.
    """

    def __init__(
        self, library: Library, points: Sequence[Point], places: Mapping[str, Any], senders: Any, threads: int
    ):
        self._library, self.points, self._places, self._senders = library, points, places, senders
        self._threads = _side_by_side(points, threads)
        recipe, count = points[0].recipe, senders.shape[1]
        self._rows = rows = Rows(library, recipe.mean, len(points))
        _constants(rows, points, 1 if self._threads > 1 else threads)
        rows.set(workers=count)
        self._coding = _Coding(library, points, "positions_read", count) if recipe.coded else None
        self._pointers = {array: np.zeros(senders.shape, np.int64) for array in places if array in rows}
        if self._coding is not None:
            rows.keep("positions", list(self._coding.addresses.reshape(senders.shape)))
        for array, pointers in self._pointers.items():
            rows.keep(array, list(pointers))
        if recipe.counted:
            rows.keep("counts", [np.full(count, point.recipe.arrays[0][2], np.int64) for point in points])
        self._draws = Draws(library, points, rows) if recipe.draws and "key0" in rows else None
        self._codecs = _Codecs(points, rows) if recipe.codec is not None else None
        lengths = {
            array: [point.recipe.arrays[c][2] for point in points] for c, (array, *_) in enumerate(recipe.arrays)
        }
        self._floats = {array: np.array(lengths[array]) for array, dtype, _ in recipe.arrays if dtype == "float32"}
        self._regions = [region for sender in np.unique(senders).tolist() for region in self._regions_of(sender)]

    def _regions_of(self, sender: int) -> Iterator[tuple[int, int, int]]:
        # Yields (sender, offset, count) of the float32 values in a sender's message. They are contiguous unless the
        # sender forwards the messages of several workers.
        members = (self._senders == sender).any(1)
        runs = sorted(
            pair
            for array, lengths in self._floats.items()
            for pair in zip(self._places[array][members].tolist(), lengths[members].tolist(), strict=True)
        )
        begin = end = None
        for at, count in runs:
            if at != end:
                if begin is not None:
                    yield sender, begin, (end - begin) // ITEMSIZE["float32"]
                begin = at
            end = at + count * ITEMSIZE["float32"]
        if begin is not None:
            yield sender, begin, (end - begin) // ITEMSIZE["float32"]

    def finite(self, messages: Any) -> Any:
        """Return whether each point's payloads are finite, bool[points], in the messages at these addresses.

        None if all are finite: a single call of the library checks for this common case.
        """
        if self._all_finite([(int(messages[sender]) + begin, count) for sender, begin, count in self._regions]):
            return None
        found = np.ones(len(self.points), bool)
        for number, senders in enumerate(self._senders.tolist()):
            floats = [(int(self._places[array][number]), int(each[number])) for array, each in self._floats.items()]
            found[number] = self._all_finite([(int(messages[s]) + at, n) for s in senders for at, n in floats])
        return found

    def _all_finite(self, vectors: Sequence[tuple[int, int]]) -> bool:
        return bool(self._library.finite([at for at, _ in vectors], [n for _, n in vectors], len(vectors)))

    def payloads(self, number: int, messages: Any) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yield the sender and the NumPy arrays of each payload of a point."""
        arrays = self.points[number].recipe.arrays
        for sender in self._senders[number].tolist():
            base = int(messages[sender])
            yield (
                sender,
                tuple(
                    np.frombuffer(ctypes.string_at(base + int(self._places[array][number]), n * ITEMSIZE[dtype]), dtype)
                    for array, dtype, n in arrays
                ),
            )

    def mean(self, messages: Any, out: Any, step: int) -> None:
        """Write the mean of each point's payloads to the addresses ``out``.

        Raises `Refused`, with the point's number, for an invalid payload.
        """
        if self._draws is not None:
            self._draws.at(step)
        bases = messages[self._senders]
        for array, pointers in self._pointers.items():
            np.add(bases, self._places[array][:, None], out=pointers)
        if self._coding is not None:
            self._coding.call(self._places, bases)
        self._rows.set(out=out)
        self._rows.call(self._threads)


def _constants(rows: Rows, points: Sequence[Point], threads: int) -> None:
    rows.set(n=[point.ctx.size for point in points], threads=threads)
    for name in points[0].recipe.how:
        if name in rows:
            rows.set(**{name: [point.recipe.how[name] for point in points]})
    for name, value in points[0].recipe.more.items():
        if name not in rows:
            continue
        values = [point.recipe.more[name] for point in points]
        if isinstance(value, np.ndarray):
            rows.keep(name, values)
        else:
            rows.set(**{name: values})


def _side_by_side(points: Sequence[Point], threads: int) -> int:
    # Returns the number of threads that run different calls in parallel; 1: the threads share the work of each call.
    sizes = [point.ctx.size for point in points]
    return threads if sum(sizes) > ALONE and max(sizes) * threads <= sum(sizes) else 1
