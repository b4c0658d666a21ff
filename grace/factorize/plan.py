"""Plans: which layers to factorise, at which ranks, and why not others. They depend only on shapes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MIN_NUMEL = 1024


@dataclass(frozen=True)
class Matrix:
    """``count`` weight matrices of one shape, each from ``cols`` inputs to ``rows`` outputs."""

    rows: int
    cols: int
    count: int = 1

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.count * self.rows * self.cols

    def factored(self, rank: int) -> int:
        """Number of elements of the factors."""
        return self.count * rank * (self.rows + self.cols)


@dataclass(frozen=True)
class Layer:
    """A layer as the toolkit reports it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    """Shape of its weight, in the toolkit's layout."""
    parameters: int
    """Number of trained parameters; shared ones count at their first layer."""
    matrices: tuple[Matrix, ...] = ()
    """Matrices that factors can replace; if empty, ``reason`` says why."""
    reason: str = ""


@dataclass(frozen=True)
class LayerPlan:
    """The plan for one layer."""

    name: str
    kind: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """One rank per weight matrix (all gates of an LSTM's matrix share one); empty: the layer stays unchanged."""
    parameters: int
    parameters_after: int
    macs: int | None
    """Multiply-adds with the weights for the given example; None if not counted."""
    macs_after: int | None
    reason: str
    """Why the layer stays unchanged; empty if it is factorised."""


@dataclass(frozen=True)
class Plan:
    """The effect of `factorize` on a model. Prints as a table. Only trained parameters are counted."""

    layers: tuple[LayerPlan, ...]

    @property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        """By name, the ranks of the factorised layers."""
        return {layer.name: layer.ranks for layer in self.layers if layer.ranks}

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def parameters_after(self) -> int:
        return sum(layer.parameters_after for layer in self.layers)

    @property
    def macs(self) -> int | None:
        """None if no example was given."""
        return _total(layer.macs for layer in self.layers)

    @property
    def macs_after(self) -> int | None:
        return _total(layer.macs_after for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dictionaries, for JSON."""
        totals = {key: getattr(self, key) for key in ("parameters", "parameters_after", "macs", "macs_after")}
        return {"layers": [asdict(layer) for layer in self.layers], **totals}

    def __str__(self) -> str:
        counted = self.macs is not None
        rows = [["layer", "kind", "shape", "rank", "parameters", "after", "MACs", "after", ""]]
        for layer in (*self.layers, self._sum()):
            rank = "/".join(map(str, dict.fromkeys(layer.ranks)))
            numbers = (layer.parameters, layer.parameters_after, layer.macs, layer.macs_after)
            shown = ["" if number is None else f"{number:,}" for number in numbers]
            rows.append([layer.name, layer.kind, "x".join(map(str, layer.shape)), rank, *shown, layer.reason])
        if not counted:
            rows = [[*row[:6], row[8]] for row in rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        right = range(3, len(rows[0]) - 1)
        return "\n".join(
            "  ".join(
                cell.rjust(width) if column in right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def _sum(self) -> LayerPlan:
        share = f"{self.parameters_after / max(self.parameters, 1):.1%} of the parameters"
        totals = (self.parameters, self.parameters_after, self.macs, self.macs_after)
        return LayerPlan("total", "", (), (), *totals, share)


class NameMap(dict[str, tuple[str, ...]]):
    """Maps old parameter names to their replacements. Omits unchanged names."""

    @property
    def removed(self) -> list[str]:
        return list(self)

    @property
    def added(self) -> list[str]:
        return [name for names in self.values() for name in names]

    def inverse(self) -> NameMap:
        """Return the map from new names to old ones."""
        sources: dict[str, list[str]] = {}
        for old, names in self.items():
            for name in names:
                sources.setdefault(name, []).append(old)
        return NameMap({name: tuple(old) for name, old in sources.items()})


def decide(
    layers: Sequence[Layer],
    positions: Mapping[str, Sequence[int]] | None = None,
    *,
    rank_ratio: float = 0.25,
    keep_first: int | Sequence[str] = 1,
    keep_last: bool = True,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    ranks: Mapping[str, int | Sequence[int]] | None = None,
    min_numel: int = MIN_NUMEL,
) -> Plan:
    """The plan for these layers; `grace.factorize.plan` explains the settings.

    ``positions``: by layer, how many vectors each of its matrices multiplies in an example.
    """
    if not 0 < rank_ratio <= 1:
        raise ValueError(f"rank_ratio={rank_ratio!r} must be more than 0 and at most 1")
    if min_numel < 0:
        raise ValueError(f"min_numel={min_numel!r} must be 0 or more")
    if isinstance(keep_first, int) and keep_first < 0:
        raise ValueError(f"keep_first={keep_first!r} must be 0 or more")
    names = [layer.name for layer in layers]
    weighted = [layer.name for layer in layers if len(layer.shape) > 1]
    first = set(weighted[:keep_first]) if isinstance(keep_first, int) else _matching(names, keep_first, "keep_first")
    last = set(weighted[-1:]) if keep_last else set()
    excluded = _matching(names, exclude, "exclude")
    included = set(names) if include is None else _matching(names, include, "include")
    forced: dict[str, int | Sequence[int]] = {}
    for pattern, rank in (ranks or {}).items():
        forced.update(dict.fromkeys(_matching(names, pattern, "ranks"), rank))

    def reason_to_leave(layer: Layer, chosen: Sequence[int]) -> str:
        size = sum(matrix.size for matrix in layer.matrices)
        if layer.name in first:
            return "kept: one of the first layers"
        if layer.name in last:
            return "kept: the last layer"
        if layer.name in excluded or layer.name not in included:
            return "excluded by name"
        if size < min_numel:
            return f"fewer than min_numel={min_numel} weights"
        if sum(m.factored(r) for m, r in zip(layer.matrices, chosen, strict=True)) >= size:
            return f"factors of rank {'/'.join(map(str, dict.fromkeys(chosen)))} would not be smaller"
        return ""

    plans = []
    for layer in layers:
        chosen = tuple(max(1, int(rank_ratio * min(m.rows, m.cols))) for m in layer.matrices)
        reason = layer.reason
        if layer.name in forced and layer.matrices:
            chosen = _forced(layer, forced[layer.name])
        elif not reason:
            reason = reason_to_leave(layer, chosen)
        plans.append(_planned(layer, () if reason else chosen, reason, (positions or {}).get(layer.name)))
    exact = [name for name in ranks or () if name in names]
    if refused := [p for p in plans if p.name in exact and p.reason]:
        raise ValueError(f"ranks names {refused[0].name!r}, which cannot be factorised: {refused[0].reason}")
    return Plan(tuple(plans))


def _forced(layer: Layer, rank: int | Sequence[int]) -> tuple[int, ...]:
    most = tuple(min(m.rows, m.cols) for m in layer.matrices)
    if not isinstance(rank, int):
        if len(rank) != len(most) or not all(1 <= r <= m for r, m in zip(rank, most, strict=True)):
            raise ValueError(f"ranks gives {layer.name!r} ranks {tuple(rank)}, but its matrices have up to {most}")
        return tuple(rank)
    largest = max(most)
    if not 1 <= rank <= largest:
        raise ValueError(f"ranks gives {layer.name!r} rank {rank}, but its ranks are 1 to {largest}")
    return tuple(min(rank, m) for m in most)


def _planned(layer: Layer, ranks: tuple[int, ...], reason: str, positions: Sequence[int] | None) -> LayerPlan:
    after = layer.parameters
    macs = macs_after = None
    if positions is not None:
        macs = macs_after = sum(m.size * n for m, n in zip(layer.matrices, positions, strict=True))
    for number, rank in enumerate(ranks):
        matrix = layer.matrices[number]
        saved = matrix.size - matrix.factored(rank)
        after -= saved
        if positions is not None and macs_after is not None:
            macs_after -= saved * positions[number]
    return LayerPlan(layer.name, layer.kind, layer.shape, ranks, layer.parameters, after, macs, macs_after, reason)


def _matching(names: Sequence[str], patterns: str | Iterable[str], key: str) -> set[str]:
    # Returns the layers that match. A pattern is a layer's name, the name of a parent, or an fnmatch pattern.
    found: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        below = (f"{pattern}.", f"{pattern}/")
        matched = {n for n in names if n == pattern or n.startswith(below) or fnmatch.fnmatchcase(n, pattern)}
        if not matched:
            raise ValueError(f"{key} names {pattern!r}, but no layer matches it; print(plan(model)) lists the layers")
        found |= matched
    return found


def _total(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None
