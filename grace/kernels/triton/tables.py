"""Triton's kernels of groups, launched over tables of addresses that only go to the device when they change."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from grace.kernels.triton import groups as kernels
from grace.kernels.triton.launcher import LARGE, TILE, Launcher, rows_of
from grace.kernels.triton.transforms import form_of, warps_of

Array = Any


class Points(NamedTuple):
    """What launches need to know of their points, int64[points] each."""

    sizes: Any
    starts: Any
    """The positions of their first elements in their tensors."""
    counts: Any
    """Their numbers of scales."""
    flags: Any
    """The numbers of their flags."""
    offsets: Sequence[Any]
    """The byte offsets of the arrays of their payloads in a message."""


class Table:
    """The columns of some points, with ``more`` addresses, and their copy on the device, renewed when they change."""

    def __init__(self, xp: Any, points: Points, more: int = 0):
        self._xp, self.many = xp, len(points.sizes)
        self._words = np.zeros(int(kernels.COLUMNS) * self.many + more, np.int64)
        self._columns = self._words[: int(kernels.COLUMNS) * self.many].reshape(int(kernels.COLUMNS), self.many)
        self._sent = self._words[:0]
        self._copy: Array = None
        self.set({kernels.N: points.sizes, kernels.START: points.starts, kernels.FLAG: points.flags})
        self.set({int(kernels.CODES) + number: offsets for number, offsets in enumerate(points.offsets)})

    def set(self, columns: dict[Any, Any]) -> None:
        """Set columns, each to one number or to one per point."""
        for column, values in columns.items():
            self._columns[int(column)] = values

    def set_messages(self, addresses: Any) -> None:
        """Set the addresses of received messages."""
        self._words[int(kernels.COLUMNS) * self.many :] = addresses

    def on_device(self) -> Array:
        """The table, int64[n], copied asynchronously if it has changed."""
        if not np.array_equal(self._words, self._sent):
            self._sent = self._words.copy()
            self._copy = uploaded(self._xp, self._sent)
        return self._copy


class _Memory:
    # An array of a device, by its address, for PyTorch to view.
    def __init__(self, address: int, n: int, kind: str):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (n,), "typestr": kind, "version": 3}


class TritonGroups(Launcher):
    """Launches for groups; ``failed`` once a kernel could not be compiled or launched."""

    def __init__(self, xp: Any, give_up: Callable[[Exception], None]):
        super().__init__(xp, self._fail)
        self._warn, self.failed = give_up, False

    def _fail(self, error: Exception) -> None:
        if not self.failed:
            self.failed = True
            self._warn(error)

    def restorer(self, sizes: Any, flags: Any) -> Callable[[Any, Any, Any, Array], None]:
        """A function of the addresses of x, old and new residuals, and flags: `group_restore`."""
        table = Table(self._xp, Points(sizes, 0, 0, flags, ()))
        tiles = self.tiles(sizes, 0, TILE)

        def restore(x: Any, old: Any, new: Any, kept: Array) -> None:
            table.set({kernels.X: x, kernels.OLD: old, kernels.NEW: new})
            self._launch(kernels.group_restore, len(tiles), tiles, table.on_device(), table.many, kept, TILE=TILE)

        return restore

    def encoder(
        self, name: str, how: Mapping[str, int], more: Mapping[str, Any], random: bool, points: Mapping[str, Any]
    ) -> Any:
        """The encoder of `Points` with equal settings, for the method of this name; see `recipes.Recipe`."""
        if name == "eden":
            return Rotated(self, Points(**points), how, more)
        return Blocks(self, name, Points(**points), how["block"], how.get("bits", 1), random)

    def decoder(
        self, name: str, how: Mapping[str, int], more: Mapping[str, Any], points: Mapping[str, Any], senders: Any
    ) -> Any:
        """The decoder of `Points` with equal settings. ``senders``: int64[points, count], the workers of each."""
        if name == "eden":
            levels = tuple(more["levels"].tolist())
            form = form_of(how["width"], levels)
            given, step = (levels, how["width"] ** 0.5), form["ROWS"] * how["width"]
            form["num_warps"] = warps_of(how["width"])
            return Mean(self, kernels.eden_group_mean, Points(**points), senders, (how["width"], step), given, form)
        form = {"BLOCK": how["block"], "TILE": TILE} | ({} if name == "efsignsgd" else {"BITS": how["bits"]})
        kernel = kernels.efsignsgd_group_mean if name == "efsignsgd" else kernels.blockint_group_mean
        return Mean(self, kernel, Points(**points), senders, (0, TILE), (), form)

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
        """int64[tiles, 4] on the device: see `_tile`; no tile lies in two blocks of ``block`` elements (0: any)."""
        return uploaded(self._xp, _tiles(sizes, block, tile))


class Blocks:
    """Encodes points in blocks that share a scale: signs, and integers of ``bits``."""

    def __init__(self, groups: TritonGroups, name: str, points: Points, block: int, bits: int, random: bool):
        self._groups, self._table = groups, Table(groups.xp, points)
        self._signs, whole = name == "efsignsgd", 0 < block <= LARGE
        rows, width = rows_of(block) if whole else (1, TILE)
        self._form = {"BLOCK": block if whole else TILE, "ROWS": rows, "WIDTH": width, "WHOLE": whole}
        if not self._signs:
            self._form |= {"BITS": bits, "RANDOM": random}
        tiles = _tiles(points.sizes, block, rows * block if whole else TILE)
        self._tiles, self._programs = uploaded(groups.xp, tiles), len(tiles)
        self._blocks: Array = None
        if not whole:
            blocks = _blocks(tiles)
            self._blocks, self._block_count = uploaded(groups.xp, blocks), len(blocks)

    def encode(self, x: Any, old: Any, new: Any, out: int, keys: Any, shared: tuple[int, int]) -> None:
        """See `grace.engine.groups.native.Encoder`. ``keys``: int64[2, points]; ``shared``: the noise table's."""
        table, add = self._table, bool(np.any(new))
        table.set({kernels.X: x, kernels.OLD: old, kernels.NEW: new, kernels.KEY0: keys[0], kernels.KEY1: keys[1]})
        where, launch = (table.on_device(), table.many), self._groups.launch
        if self._blocks is not None:
            partials = self._groups.xp.buffers.empty(self._programs, "float64")
            form = {"TILE": TILE, "SUM": self._signs}
            launch(kernels.group_partials, self._programs, self._tiles, *where, partials, **form, ADD=add)
            launch(
                kernels.group_scales, self._block_count, self._blocks, partials, *where, out, **form | {"TILE": 1024}
            )
        kernel, more = (kernels.efsignsgd_group, ()) if self._signs else (kernels.blockint_group, shared)
        launch(kernel, self._programs, self._tiles, *where, out, *more, **self._form, ADD=add)


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
        table.set({kernels.X: x, kernels.OLD: old, kernels.NEW: new, kernels.KEY0: keys[0], kernels.KEY1: keys[1]})
        where = self._tiles, table.on_device(), table.many, out
        self._groups.launch(
            kernels.eden_group, len(self._tiles), *where, *self._given, **self._form, ADD=bool(np.any(new))
        )


class Mean:
    """Decodes what encoders encode, and judges it. ``senders``: int64[points, count], as in a `Decoder`.

    ``cut``: the sizes of blocks, which tiles hold whole, and of tiles; 0: tiles hold parts of them.
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

    def mean(self, messages: Any, out: Any, keys: Any) -> None:
        """Write the mean of each point's payloads to the addresses ``out``."""
        self._table.set_messages(messages[: self._messages])
        self._table.set({kernels.X: out, kernels.KEY0: keys[0], kernels.KEY1: keys[1]})
        where = self._table.on_device(), self._table.many, self._senders, self._count
        self._groups.launch(self._kernel, len(self._tiles), self._tiles, *where, *self._given, **self._form)


def uploaded(xp: Any, words: Any) -> Array:
    """A copy of int64 numbers on the device, which later work there waits for, but not the host."""
    host = torch.from_numpy(np.ascontiguousarray(words, np.int64))
    return host.pin_memory().to(xp.device, non_blocking=True) if xp.device.type == "cuda" else host.clone()


def _tiles(sizes: Sequence[int], block: int, tile: int) -> Any:
    # Returns rows of a point, the number of its block, the place of the tile's first element, and its size. A tile of
    # several blocks has the number of the first one.
    rows = []
    for point, n in enumerate(np.asarray(sizes).tolist()):
        size = block or n
        step = max(size, tile // size * size) if size else 1
        for begin in range(0, n, step):
            end = min(begin + step, n)
            rows += [(point, at // size, at, min(tile, end - at)) for at in range(begin, end, tile)]
    return np.array(rows, np.int64).reshape(-1, 4)


def _blocks(tiles: Any) -> Any:
    # Returns rows of a point, the number of its block, its first tile, and its numbers of tiles and of elements.
    starts = np.flatnonzero(np.append(True, np.any(tiles[1:, :2] != tiles[:-1, :2], 1)))
    ends = np.append(starts[1:], len(tiles))
    elements = np.add.reduceat(tiles[:, 3], starts)
    return np.column_stack([tiles[starts, :2], starts, ends - starts, elements]).astype(np.int64)
