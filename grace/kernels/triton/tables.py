"""Launches Triton's kernels for groups. Tables of addresses are copied to the device only when they change."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from grace.kernels.triton import groups as kernels
from grace.kernels.triton import points as columns
from grace.kernels.triton import selections
from grace.kernels.triton.launcher import LARGE, TILE, Launcher, rows_of
from grace.kernels.triton.rotations import form_of, warps_of

Array = Any


CHECKED = 8192
"""Number of elements that share a flag, for methods without a block size."""
SELECTING = ("topk", "randomk")
"""The methods that send only some elements."""
BITS = {"efsignsgd": 1, "signsgd": 1, "codes": 8}
"""Bits per code, for methods without a setting for it."""


class Points(NamedTuple):
    """Properties of the points of a launch, int64[points] each."""

    sizes: Any
    starts: Any
    """The position of each point's first element in its tensor."""
    counts: Any
    """The number of scales, or of sent elements."""
    flags: Any
    """The index of each point's flag."""
    offsets: Sequence[Any]
    """For each payload array, its byte offsets in a message."""


class Table:
    """A table of points, followed by ``more`` addresses, with a copy on the device that is renewed after changes."""

    def __init__(self, xp: Any, points: Points, more: int = 0):
        self._xp, self.many = xp, len(points.sizes)
        self._words = np.zeros(int(columns.COLUMNS) * self.many + more, np.int64)
        self._columns = self._words[: int(columns.COLUMNS) * self.many].reshape(int(columns.COLUMNS), self.many)
        self._sent = self._words[:0]
        self._copy: Array = None
        self.set({columns.N: points.sizes, columns.START: points.starts, columns.FLAG: points.flags})
        self.set({columns.COUNT: points.counts})
        self.set({int(columns.CODES) + number: offsets for number, offsets in enumerate(points.offsets)})

    def set(self, columns: dict[Any, Any]) -> None:
        """Set columns, each to one number or to one per point."""
        for column, values in columns.items():
            self._columns[int(column)] = values

    def set_messages(self, addresses: Any) -> None:
        """Set the addresses of received messages."""
        self._words[int(columns.COLUMNS) * self.many :] = addresses

    def on_device(self) -> Array:
        """The table, int64[n], copied asynchronously if it has changed."""
        if not np.array_equal(self._words, self._sent):
            self._sent = self._words.copy()
            self._copy = uploaded(self._xp, self._sent)
        return self._copy


class _Memory:
    # Describes an array at a device address, so that PyTorch can view it.
    def __init__(self, address: int, n: int, kind: str):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (n,), "typestr": kind, "version": 3}


class TritonGroups(Launcher):
    """Launches for groups. ``failed``: whether a kernel could not be compiled or launched."""

    def __init__(self, xp: Any, give_up: Callable[[Exception], None]):
        super().__init__(xp, self._fail)
        self._warn, self.failed = give_up, False

    def _fail(self, error: Exception) -> None:
        if not self.failed:
            self.failed = True
            self._warn(error)

    def restorer(self, sizes: Any, flags: Any) -> Callable[[Any, Any, Any, Array], None]:
        """Return a function of the addresses of x, old and new residuals, and of the flags: `group_restore`."""
        table = Table(self._xp, Points(sizes, 0, 0, flags, ()))
        tiles = self.tiles(sizes, 0, TILE)

        def restore(x: Any, old: Any, new: Any, kept: Array) -> None:
            table.set({columns.X: x, columns.OLD: old, columns.NEW: new})
            self._launch(kernels.group_restore, len(tiles), tiles, table.on_device(), table.many, kept, TILE=TILE)

        return restore

    def encoder(
        self, name: str, how: Mapping[str, int], more: Mapping[str, Any], random: bool, points: Mapping[str, Any]
    ) -> Any:
        """Return an encoder of `Points` with equal settings, for the method of this name; see `recipes.Recipe`."""
        if name == "eden":
            return Rotated(self, Points(**points), how, more)
        if name in SELECTING:
            return Selected(self, Points(**points), name == "randomk")
        return Blocks(self, Points(**points), form_of_blocks(name, how), random)

    def decoder(
        self, name: str, how: Mapping[str, int], more: Mapping[str, Any], points: Mapping[str, Any], senders: Any
    ) -> Any:
        """Return a decoder of `Points` with equal settings. ``senders``: int64[points, count], each point's workers."""
        if name == "eden":
            levels = tuple(more["levels"].tolist())
            form = form_of(how["width"], levels)
            given, step = (levels, how["width"] ** 0.5), form["ROWS"] * how["width"]
            form["num_warps"] = warps_of(how["width"])
            return Mean(self, kernels.eden_group_mean, Points(**points), senders, (how["width"], step), given, form)
        if name in SELECTING:
            form = {"TILE": TILE, "SOME": 256}
            return Mean(self, selections.group_scatter, Points(**points), senders, (0, TILE), (0,), form)
        form = form_of_blocks(name, how) | {"TILE": TILE}
        return Mean(self, kernels.group_mean, Points(**points), senders, (0, TILE), (), form)

    def view(self, address: int, n: int, dtype: str) -> Array:
        """The array of n elements at an address."""
        kind = getattr(torch, dtype)
        if n == 0:
            return torch.empty(0, dtype=kind, device=self._xp.device)
        if self._xp.device.type == "cuda":
            return torch.as_tensor(_Memory(address, n, np.dtype(dtype).str), device=self._xp.device)
        return torch.frombuffer((ctypes.c_char * (n * kind.itemsize)).from_address(address), dtype=kind)

    def launch(self, kernel: Any, programs: int, *arguments: Any, **form: Any) -> None:
        """Launch a kernel. Raises `Unavailable` if that fails."""
        self._launch(kernel, programs, *arguments, **form)

    @property
    def xp(self) -> Any:
        """The backend."""
        return self._xp

    def tiles(self, sizes: Any, block: int, tile: int) -> Array:
        """Return `_tiles`, int64[tiles, 4], on the device."""
        return uploaded(self._xp, _tiles(sizes, block, tile))


def form_of_blocks(name: str, how: Mapping[str, int]) -> dict[str, Any]:
    """Return the compile-time constants of kernels of methods with blocks; "levels" is natural's window."""
    block, bits, levels = how.get("block", CHECKED), how.get("bits", BITS.get(name, 0)), how.get("levels", 0)
    each = 8 if 32 % bits or block % (32 // bits) else 32 // bits
    method = "terngrad" if name == "qsgd" and not levels else "natural" if name == "codes" else name
    return {"METHOD": method, "BLOCK": block, "BITS": bits, "LEVELS": levels, "EACH": each}


class Blocks:
    """Encodes points in blocks that share a scale; see `grace.kernels.triton.parts`."""

    def __init__(self, groups: TritonGroups, points: Points, form: dict[str, Any], random: bool):
        self._groups, self._table = groups, Table(groups.xp, points)
        block, method = form["BLOCK"], form["METHOD"]
        whole = 0 < block <= LARGE
        rows, width = rows_of(block) if whole else (1, TILE)
        self._form = form | {"BLOCK": block if whole else TILE, "ROWS": rows, "WIDTH": width, "WHOLE": whole}
        self._form["RANDOM"] = random
        tiles = _tiles(points.sizes, block, rows * block if whole else TILE)
        self._tiles, self._programs = uploaded(groups.xp, tiles), len(tiles)
        self._statistics = () if whole else (False, True) if method == "qsgd" else (False,)  # a pass each: SQUARES
        if not whole:
            blocks = _blocks(tiles)
            self._blocks, self._block_count = uploaded(groups.xp, blocks), len(blocks)

    def encode(self, x: Any, old: Any, new: Any, out: int, keys: Any, shared: tuple[int, int]) -> None:
        """See `grace.engine.groups.native.Encoder`. ``keys``: int64[2, points]; ``shared``: the noise table's keys."""
        table, form, add = self._table, self._form, bool(np.any(new))
        table.set({columns.X: x, columns.OLD: old, columns.NEW: new, columns.KEY0: keys[0], columns.KEY1: keys[1]})
        where, launch = (table.on_device(), table.many, out), self._groups.launch
        for squares in self._statistics:
            partials = self._groups.xp.buffers.empty(self._programs, "float64")
            how = {"METHOD": form["METHOD"], "LEVELS": form["LEVELS"], "SQUARES": squares}
            more = how | {"TILE": TILE, "RANDOM": form["RANDOM"], "ADD": add}
            launch(kernels.group_partials, self._programs, self._tiles, *where, partials, **more)
            launch(kernels.group_scales, self._block_count, self._blocks, partials, *where, TILE=1024, **how)
        launch(kernels.group_encode, self._programs, self._tiles, *where, *shared, **form, ADD=add)


class Rotated:
    """Encodes points whose blocks are rotated."""

    def __init__(self, groups: TritonGroups, points: Points, how: Mapping[str, int], more: Mapping[str, Any]):
        self._groups, self._table, width = groups, Table(groups.xp, points), how["width"]
        levels = tuple(more["levels"].tolist())
        self._form = form_of(width, levels) | {"BIASED": more["divisor"] != 0, "num_warps": warps_of(width)}
        self._given = levels, tuple(more["middles"].tolist()), width**0.5, float(more["divisor"]), int(more["stream"])
        self._tiles = groups.tiles(points.sizes, width, self._form["ROWS"] * width)

    def encode(self, x: Any, old: Any, new: Any, out: int, keys: Any, shared: Any) -> None:
        """See `Blocks.encode`."""
        table = self._table
        table.set({columns.X: x, columns.OLD: old, columns.NEW: new, columns.KEY0: keys[0], columns.KEY1: keys[1]})
        where = self._tiles, table.on_device(), table.many, out
        self._groups.launch(
            kernels.eden_group, len(self._tiles), *where, *self._given, **self._form, ADD=bool(np.any(new))
        )


class Selected:
    """Encodes points by sending only some of their elements; see `grace.kernels.triton.selections`."""

    def __init__(self, groups: TritonGroups, points: Points, random: bool):
        self._groups, self._table, self._random = groups, Table(groups.xp, points), random
        rows: list[tuple[int, ...]] = []
        for point, n in enumerate(np.asarray(points.sizes).tolist()):
            size = max(selections.CHUNK, -(-n // (selections.CHUNKS * TILE)) * TILE)
            begins, first = range(0, n, size), len(rows)
            rows += [(point, first, len(begins), begin, min(size, n - begin)) for begin in begins]
        self._chunks, self._programs = uploaded(groups.xp, np.array(rows, np.int64)), len(rows)

    def encode(self, x: Any, old: Any, new: Any, out: int, keys: Any, shared: Any, positions: int = 0) -> None:
        """See `Blocks.encode`. ``positions``: the address where random positions are written."""
        table, xp, launch = self._table, self._groups.xp, self._groups.launch
        table.set({columns.X: x, columns.OLD: old, columns.NEW: new, columns.KEY0: keys[0], columns.KEY1: keys[1]})
        counts = xp.zeros((len(selections.SHIFTS), self._programs, selections.BINS), "int32")
        found, marks = xp.buffers.empty((table.many, 4), "int64"), xp.buffers.empty((2, self._programs), "int32")
        where = self._chunks, table.on_device(), table.many
        form = {"TILE": TILE, "RANDOM": self._random, "ADD": bool(np.any(new))}
        for number, shift in enumerate(selections.SHIFTS):
            given = counts[max(number - 1, 0)], counts[number], found, marks
            launch(selections.group_digits, self._programs, *where, *given, SHIFT=shift, **form)
        given = counts[-1], found, marks, positions
        launch(selections.group_take, self._programs, *where, out, *given, **form)


class Mean:
    """Decodes payloads, and checks that they are finite. ``senders``: int64[points, count], as in a `Decoder`.

    ``cut``: the sizes of blocks and of tiles. Tiles hold whole blocks; if the block size is 0, a tile may cut a block.
    """

    def __init__(
        self,
        groups: TritonGroups,
        kernel: Any,
        points: Points,
        senders: Any,
        cut: tuple[int, int],
        given: tuple[Any, ...],
        form: Mapping[str, Any],
    ):
        self._groups, self._kernel, self._given, self._form = groups, kernel, given, form
        self._messages, self._count = int(senders.max()) + 1, senders.shape[1]
        self._table, self._senders = Table(groups.xp, points, self._messages), uploaded(groups.xp, senders)
        self._tiles, self._judged = groups.tiles(points.sizes, *cut), groups.tiles(points.counts, 0, TILE)

    def judge(self, messages: Any, flags: Array) -> None:
        """Clear the flags, int32, of points whose payloads in the messages at these addresses are not finite."""
        self._table.set_messages(messages[: self._messages])
        where = self._table.on_device(), self._table.many, self._senders, self._count
        self._groups.launch(kernels.group_finite, len(self._judged), self._judged, *where, flags, TILE=TILE)

    def mean(self, messages: Any, out: Any, keys: Any, *given: Any) -> None:
        """Write the mean of each point's payloads to the addresses ``out``.

        ``given``: arguments of the kernel, in place of its usual ones.
        """
        self._table.set_messages(messages[: self._messages])
        self._table.set({columns.X: out, columns.KEY0: keys[0], columns.KEY1: keys[1]})
        where = self._table.on_device(), self._table.many, self._senders, self._count
        self._groups.launch(self._kernel, len(self._tiles), self._tiles, *where, *(given or self._given), **self._form)


def uploaded(xp: Any, words: Any) -> Array:
    """Return a copy of int64 numbers on the device. Later work on the device waits for the copy; the host does not."""
    host = torch.from_numpy(np.ascontiguousarray(words, np.int64))
    return host.pin_memory().to(xp.device, non_blocking=True) if xp.device.type == "cuda" else host.clone()


def _tiles(sizes: Sequence[int], block: int, tile: int) -> Any:
    # Returns a row per tile: point, number of its first block, offset of its first element, and size. A tile is several
    # whole blocks, or a part of one block. If ``block`` is 0, all elements of a point are one block.
    rows = []
    for point, n in enumerate(np.asarray(sizes).tolist()):
        size = block or n
        step = max(size, tile // size * size) if size else 1
        for begin in range(0, n, step):
            end = min(begin + step, n)
            rows += [(point, at // size, at, min(tile, end - at)) for at in range(begin, end, tile)]
    return np.array(rows, np.int64).reshape(-1, 4)


def _blocks(tiles: Any) -> Any:
    # Returns a row per block: point, block number, first tile, number of tiles, and number of elements.
    starts = np.flatnonzero(np.append(True, np.any(tiles[1:, :2] != tiles[:-1, :2], 1)))
    ends = np.append(starts[1:], len(tiles))
    elements = np.add.reduceat(tiles[:, 3], starts)
    return np.column_stack([tiles[starts, :2], starts, ends - starts, elements]).astype(np.int64)
