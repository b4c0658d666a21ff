"""Small sums share the message of other collectives, which saves a message and its wait."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grace.core import Array
from grace.core.collectives import AllToAll, Collective, Gather, Reduce, arrays_of

LARGEST = 2**18
"""Maximum number of bytes of the small sums of a message."""
GATHERED = 4
"""Minimum ratio of the bytes of gathers, or of all-to-alls, to the bytes that small sums add to them."""
HALVES = 32
"""Minimum ratio of the bytes of sums in half precision to the bytes that small sums add to them."""


def small_sums(
    collectives: Sequence[Collective], xp: Any, rank: int, size: int
) -> tuple[dict[int, Reduce], list[Collective]]:
    """The float32 sums and means that share the message of a round's other collectives, and what sends them.

    It sends the terms of each worker to all, which add them up in rank order. The sums are given by index. Both results
    are empty if no sums share a message.
    """
    if not xp.mutable:
        return {}, []
    found: dict[int, Reduce] = {}
    for index, each in enumerate(collectives):
        if not isinstance(each, Reduce) or each.op not in ("sum", "mean"):
            continue
        if all(xp.dtype(array) == "float32" for array in each.arrays):
            found[index] = each
    carriers = _carriers(collectives, xp, size) if found else []
    if not carriers:
        return {}, []
    room = sum(xp.nbytes(array) for each in carriers for array in arrays_of(each))
    nbytes = sum(xp.nbytes(array) for each in found.values() for array in each.arrays)
    added = HALVES * 2 * size * nbytes if isinstance(carriers[0], Reduce) else GATHERED * (size - 2) * nbytes
    if nbytes > LARGEST or added > room:
        return {}, []
    return found, [_terms(found, carriers[0], xp, rank, size)]


def _carriers(collectives: Sequence[Collective], xp: Any, size: int) -> Sequence[Collective]:
    # Returns the collectives whose message small sums may share: gathers, all-to-alls, or a host's half-precision sums.
    gathers = [each for each in collectives if isinstance(each, Gather) and not each.ragged and not each.shapes]
    exchanges = [each for each in collectives if isinstance(each, AllToAll) and not each.ragged and not each.mutual]
    if gathers or exchanges or size == 1 or not xp.can_read_values:
        return gathers or exchanges
    sums = [each for each in collectives if isinstance(each, Reduce) and each.op in ("sum", "mean") and each.arrays]
    return [each for each in sums if all(xp.dtype(array) in ("float16", "bfloat16") for array in each.arrays)]


def _terms(sums: Mapping[int, Reduce], first: Collective, xp: Any, rank: int, size: int) -> Collective:
    # A collective like ``first`` that sends the terms to all workers.
    terms = xp.concat([xp.reshape(array, (-1,)) for each in sums.values() for array in each.arrays])
    if isinstance(first, Gather):
        return Gather((terms,))
    if isinstance(first, AllToAll):
        return AllToAll(((terms,),) * size)
    # In a sum, each worker has its own places, where all others add zeros. Bytes are exact in half precision.
    dtype = xp.dtype(arrays_of(first)[0])
    own = xp.cast(xp.buffers.to_bytes(terms), dtype)
    return Reduce((xp.concat([own if w == rank else xp.zeros(xp.shape(own), dtype) for w in range(size)]),), "sum")


def added_up(terms: Sequence[Any], sums: Mapping[int, Reduce], xp: Any, size: int) -> dict[int, tuple[Array, ...]]:
    """The results of `small_sums`, by index. ``terms``: the result of their collective."""
    if len(terms) == 1 < size:
        rows = xp.buffers.from_bytes(xp.cast(terms[0], "uint8"), "float32", (size, -1))
        terms = [(rows[worker],) for worker in range(size)]
    (total,), *others = terms
    total = xp.buffers.copy(total)
    for (other,) in others:
        total = xp.inplace.add(total, other)
    shapes = {index: [xp.shape(array) for array in each.arrays] for index, each in sums.items()}
    parts = iter(xp.split(total, [math.prod(shape) for each in shapes.values() for shape in each]))
    found: dict[int, tuple[Array, ...]] = {}
    for index, each in sums.items():
        result = [xp.reshape(next(parts), shape) for shape in shapes[index]]
        found[index] = tuple(xp.inplace.divide(x, size) for x in result) if each.op == "mean" else tuple(result)
    return found
