"""The noise that an exchange adds to means, measured on a sample of each tensor's elements."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from grace.backends.base import Backend
from grace.core import Array
from grace.core.policy import Noise

WHOLE, LEAST = 4096, 256
"""A sample has all of a tensor of at most ``WHOLE`` elements, since a few may have most of the norm, as those of
frequent words in the bias of a softmax. Of a larger one it has one element in 128, at least ``LEAST`` and at most 2048,
or one in 512 if that is more."""


def positions(name: str, size: int) -> list[int]:
    """Positions of the sampled elements: all of a small tensor, else a random one in each of equally long parts.

    They are the same on all workers and toolkits.
    """
    count = size if size <= WHOLE else max(LEAST, min(size // 128, 2048), size // 512)
    draw = random.Random(name)  # a separate generator, so that the global one stays as it is
    return [min(int((part + draw.random()) * size / count), size - 1) for part in range(count)]


class NoiseProbe:
    """Compares exchanged means with exact means on sampled elements; their exact averaging costs a message per step.

    The probe computes the held error, which error feedback sends in later steps, from the means, without reading
    residuals. The wanted mean is the exact one plus the held error; the held error of the next step is the wanted mean
    minus the exchanged one. Like all means, these are equal on all workers.
    """

    def __init__(self) -> None:
        self._xp: Any = None
        self._on: Any = None  # the backend that computes
        self._positions: dict[str, Array] = {}
        self._sizes: dict[str, int] = {}
        self._held: dict[str, Any] = {}  # held errors by tensor, float32[sample]
        self._sums: dict[str, Any] = {}  # squared norms by tensor, float32[2]: of the error and the wanted mean
        self.wanted: Any = None
        """A cell that graphs read: 1 if the next step is measured, else 0; equal on all workers."""
        self._announced: bool | None = None  # what the cell holds; None: unknown

    def extend(self, sizes: Mapping[str, int], xp: Backend) -> None:
        """Add tensors, by their numbers of elements."""
        self._xp, self._on = xp, xp.host or xp
        if xp.traced:
            self.wanted = self.wanted or xp.cell(xp.asarray(1, "int32"))
        for name, size in sizes.items():
            chosen = positions(name, size)
            self._positions[name] = self._on.asarray(chosen, "int32")
            self._sizes[name] = size
            self._held[name] = xp.cell(xp.zeros(len(chosen)))
            self._sums[name] = xp.cell(xp.zeros(2))

    def announce(self, wanted: bool) -> None:
        """Tell graphs whether the next step is measured."""
        if self.wanted is not None and wanted is not self._announced:
            self.wanted.assign(self._xp.asarray(int(wanted), "int32"))
            self._announced = wanted

    def forget(self, names: Iterable[str]) -> None:
        """Drop the probes of these tensors."""
        for name in names:
            for book in (self._positions, self._sizes, self._held, self._sums):
                book.pop(name, None)

    def cells(self, name: str) -> list[Any]:
        """The cells of a tensor that a step changes."""
        return [book[name] for book in (self._held, self._sums) if name in book]

    def count(self, name: str) -> int:
        """Number of elements of a tensor's sample."""
        return int(self._on.shape(self._positions[name])[0])

    def sample(self, tensors: Mapping[str, Array]) -> Array:
        """The samples of tensors of any float dtype and shape, as one float32 vector."""
        names = list(tensors)

        def work(*arrays: Array) -> list[Array]:
            return [self._on.concat([self._sample(name, x) for name, x in zip(names, arrays, strict=True)])]

        (found,) = self._run(work, list(tensors.values()), [("float32", (sum(map(self.count, names)),))])
        return found

    def observe(self, exact: Array, means: Mapping[str, Array], feeds_back: Sequence[float] | Array) -> None:
        """Compare one step's means with the exact ones. A mean that is not finite changes nothing.

        ``exact``: the `sample` of the exact means. ``means``: the exchanged means, of any shape. ``feeds_back``: 1 if
        error feedback holds a tensor's error for later steps, else 0; or float32[1] for all of them, as in graphs.
        """
        xp, names, count = self._on, list(means), len(means)
        cells = [book[name] for book in (self._held, self._sums) for name in names]

        def work(exact: Array, *arrays: Array) -> list[Array]:
            factors = feeds_back if isinstance(feeds_back, list) else [arrays[-1]] * count
            parts = xp.split(exact, [self.count(name) for name in names])
            new: list[list[Array]] = [[], []]
            for number, (name, part) in enumerate(zip(names, parts, strict=True)):
                mean, held, sums = arrays[number : 3 * count : count]
                wanted = part + held
                error = wanted - self._sample(name, mean)
                rows = xp.reshape(xp.concat([error, wanted]), (2, -1))
                row = xp.sum(rows * rows, 1)
                ok = xp.finite(row)
                new[0].append(xp.choose(ok, error * factors[number], held))
                new[1].append(xp.choose(ok, sums + row, sums))
            return [*new[0], *new[1]]

        state = [cell.read() for cell in cells]
        made = [("float32", self._xp.shape(array)) for array in state]
        given = [exact, *means.values(), *state, *([] if isinstance(feeds_back, list) else [feeds_back])]
        for cell, array in zip(cells, self._run(work, given, made), strict=True):
            cell.assign(array)

    def _sample(self, name: str, x: Array) -> Array:
        xp = self._on
        return xp.cast(xp.take(xp.reshape(x, (-1,)), self._positions[name]), "float32")

    def _run(self, work: Callable[..., list[Array]], arrays: list[Array], made: list[Any]) -> list[Array]:
        # Runs ``work``; in a graph, as a single operation on the host.
        found: list[Array] = work(*arrays) if self._on is self._xp else self._xp.hosted(work, arrays, made)
        return found

    def reset(self) -> None:
        """Zero the sums; keep the held errors."""
        for cell in self._sums.values():
            cell.assign(self._xp.zeros(2))

    def noise(self) -> dict[str, Noise]:
        """The noise of each tensor, summed over steps and scaled from the sample to the whole tensor."""
        if not self._sums:
            return {}
        numbers = self._xp.to_numpy(self._xp.concat([cell.read() for cell in self._sums.values()])).tolist()
        pairs = zip(self._sums, numbers[::2], numbers[1::2], strict=True)
        scales = {name: self._sizes[name] / self.count(name) for name in self._sums}
        return {name: Noise(scales[name] * error, scales[name] * wanted) for name, error, wanted in pairs}

    # -- state -------------------------------------------------------------------------------------------------------
    @property
    def held(self) -> dict[str, Array]:
        """The held error of each tensor's sample, for a checkpoint."""
        return {name: cell.read() for name, cell in self._held.items()}

    def load(self, held: Mapping[str, Any]) -> None:
        """Restore held errors from a checkpoint; errors of another shape start at zero."""
        xp = self._xp
        for name, cell in self._held.items():
            saved, shape = held.get(name), xp.shape(cell.read())
            fits = tuple(getattr(saved, "shape", (None,))) == shape
            cell.assign(xp.buffers.copy(xp.asarray(saved, "float32")) if fits else xp.zeros(shape))
        self.reset()
        self.announce(True)  # as in a new process
