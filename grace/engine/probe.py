"""The noise that an exchange adds to means, measured on a sample of each tensor's elements."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from grace.backends.base import Backend
from grace.core import Array
from grace.core.policy import Noise

LEAST, SHARE = 64, 512
"""A sample has one element in ``SHARE``, but at least ``LEAST`` elements; smaller tensors are sampled whole."""


def positions(name: str, size: int) -> list[int]:
    """Positions of the sampled elements: one at random in each of equally long parts; all of a small tensor.

    They are the same on all workers and toolkits.
    """
    count = min(size, max(LEAST, size // SHARE))
    draw = random.Random(name)  # a generator of its own: the global one stays as it is
    return [min(int((part + draw.random()) * size / count), size - 1) for part in range(count)]


class NoiseProbe:
    """Compares exchanged means with exact means, on sampled elements, whose exact averaging costs a message per step.

    The probe computes from the means what error feedback holds back, so it need not read residuals. The wanted mean is
    the exact one plus the held error; the held error of the next step is the wanted mean minus the exchanged one. Like
    all means, these are equal on all workers.
    """

    def __init__(self) -> None:
        self._xp: Any = None
        self._positions: dict[str, Array] = {}
        self._sizes: dict[str, int] = {}
        self._held: dict[str, Any] = {}  # held errors by tensor, float32[sample]
        self._sums: dict[str, Any] = {}  # squared norms by tensor, float32[2]: of the error and the wanted mean

    def extend(self, sizes: Mapping[str, int], xp: Backend) -> None:
        """Add tensors, by their numbers of elements."""
        self._xp = xp
        for name, size in sizes.items():
            chosen = positions(name, size)
            self._positions[name] = xp.asarray(chosen, "int32")
            self._sizes[name] = size
            self._held[name] = xp.cell(xp.zeros(len(chosen)))
            self._sums[name] = xp.cell(xp.zeros(2))

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
        return int(self._xp.shape(self._positions[name])[0])

    def sample(self, name: str, x: Array) -> Array:
        """The sample, float32, of a tensor of any float dtype."""
        return self._xp.cast(self._xp.take(x, self._positions[name]), "float32")

    def observe(self, name: str, exact: Array, mean: Array, feeds_back: Any) -> None:
        """Compare one step's mean with the exact one. A step whose mean is not finite changes nothing.

        ``exact``: the sample of the exact mean. ``mean``: the exchanged mean of the whole tensor. ``feeds_back``: 1 if
        error feedback holds the error for later steps, else 0; may be traced.
        """
        xp, held, sums = self._xp, self._held[name], self._sums[name]
        wanted = exact + held.read()
        error = wanted - self.sample(name, mean)
        rows = xp.reshape(xp.concat([error, wanted]), (2, -1))
        row = xp.sum(rows * rows, 1)
        ok = xp.finite(row)
        sums.assign(xp.choose(ok, sums.read() + row, sums.read()))
        held.assign(xp.choose(ok, error * feeds_back, held.read()))

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
