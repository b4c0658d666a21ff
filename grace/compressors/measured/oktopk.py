"""Ok-Topk: top-k over all workers, with traffic that does not grow with their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from grace.compressors.agreed import AgreedSparsifier, put_back
from grace.compressors.sparse import beyond, largest, poisoned
from grace.core import Array, Context, Payload, Program, Resize, State
from grace.core.collectives import AllToAll, Gather, Reduce
from grace.core.errors import sent_by
from grace.core.registry import register
from grace.ops.validate import matching, placed

FAR = float(2**31 - 128)
"""The largest float32 that int32 holds."""


@register("oktopk")
@dataclass(frozen=True)
class OkTopK(AgreedSparsifier):
    """Use about the k largest elements of the sum of all workers' top k, with at most 6k numbers of traffic per worker.

    Each worker selects its elements above a threshold and sends each one to the owner of the region in which it lies.
    Owners add them up, keep those above a threshold that all workers share, divide them evenly and gather them.
    Thresholds and regions are reused for several steps: finding them takes a sort and a message of their own.
    Payload: values of the mean float32[K], positions int32[K], ascending, agreed on by all workers, K <= k; and the
    positions int32[m] that this worker has sent, m <= k. Elements that a worker has sent, but that are not in the mean,
    stay in its residual.
    A stale threshold may let more elements through. So a worker sends at most k elements, the largest; an owner
    receives at most 3k/2 from all workers, a fixed part from each; and at most k are gathered, or 3k/2 in steps that
    find the shared threshold. What is left out stays in the residuals. So a worker sends and receives at most 6k values
    and positions in any step, for any number of workers N. Beside them travel 8 bytes per worker for counts, and 4 per
    region when regions move. If 3k/2 is less than N, some of the fixed parts are empty, by turns.
    State: local float32[1], the threshold of this worker; all float32[1], the one that all workers share; bounds
    int32[N-1], the last element of each region but the last, equal on all workers.
    ``compress_ratio``: k as a share of the elements, in (0, 1].
    ``thresholds_every``: number of steps, at least 1, after which both thresholds are found anew.
    ``regions_every``: number of steps, at least 1, after which regions are moved so that workers send equally much to
    each.
    The paper gathers all sums to find the shared threshold, up to N k elements; here the largest 3k/2, an equal part
    from each region. It divides elements evenly only if a worker has four times the mean; here in all other steps.
    Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022, arXiv:2201.07598,
    algorithms 1 and 2.
    """

    thresholds_every: int = 32
    regions_every: int = 64

    traits = replace(
        AgreedSparsifier.traits,
        variable_length=True,
        reshard={"local": Resize.OWN, "all": Resize.SAME, "bounds": Resize.SAME},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("thresholds_every", "regions_every"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)!r} must be at least 1: 1 means in every step")

    def init(self, ctx: Context) -> State:
        xp, parts = ctx.xp, ctx.world_size
        ends = [ctx.size * part // parts - 1 for part in range(1, parts)]
        return {"local": xp.zeros(1), "all": xp.zeros(1), "bounds": xp.asarray(ends, "int32")}

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        xp, k = ctx.xp, self.count(ctx.size)
        if not k:  # Other workers' shards need not be empty, so join all rounds, with a single zero.
            _, state = yield from self.compress(xp.zeros(1), state, replace(ctx, shape=(1,)))
            return (x, xp.zeros(0, "int32"), xp.zeros(0, "int32")), state
        renew = ctx.step % self.thresholds_every == 0
        local = _either(xp, renew, lambda: _below(xp, xp.take(x, xp.topk_abs(x, k))), state["local"])
        own = beyond(xp, x, local)
        own = xp.take(own, largest(xp, xp.take(x, own), k))
        bounds = yield from self._bounds(own, state["bounds"], ctx)
        parts = self._split(x, own, bounds, ctx)
        received = yield AllToAll(tuple(parts), ragged=True)
        sums = self._sums(received, _either(xp, renew, lambda: xp.zeros(1), state["all"]), ctx)
        values, positions, flag = yield from self._gathered(sums, poisoned(xp, xp.zeros(1), x), renew, ctx)
        best = largest(xp, values, k)
        values, positions = xp.take(values, best), xp.take(positions, best)
        shared = _either(xp, renew, lambda: _below(xp, values), state["all"])
        sent = xp.concat([part for _, part in parts])
        payload = (values / ctx.world_size + flag, positions, sent)
        return payload, {"local": local, "all": shared, "bounds": bounds}

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        return put_back(x, payload[1], payload[2], ctx)

    def _pairs(self, payload: Payload, ctx: Context) -> list[tuple[Array, Array]]:
        return [(matching(ctx.xp, payload[0], "float32", payload[1], "values"), payload[1])]

    def part(self, index: Any, ctx: Context) -> Any:
        """One of N parts of 3k/2 elements, by number modulo N; in each step another part has that number."""
        most, workers = 3 * self.count(ctx.size) // 2, ctx.world_size
        i = (index + ctx.step) % workers
        return most * (i + 1) // workers - most * i // workers

    def _bounds(self, own: Array, old: Array, ctx: Context) -> Program[Array]:
        # Returns the regions: every ``regions_every`` steps, the means of bounds that divide each worker's elements
        # evenly.
        xp, cuts, renew = ctx.xp, ctx.world_size - 1, ctx.step % self.regions_every == 0
        if renew is False or not cuts:
            return old
        ends = xp.lengths([own]) * (xp.arange(cuts, "int64") + 1) // ctx.world_size - 1
        mine = xp.cast(xp.take(own, xp.cast(xp.maximum(ends, 0), "int32")), "float32")
        # In a graph the message is empty in all other steps.
        (length,) = [cuts] if renew is True else xp.integers(xp.reshape(xp.cast(renew, "int32") * cuts, (1,)))
        (mean,) = yield Reduce((mine[:length],), "mean")
        mean = xp.reshape(xp.concat([mean, xp.zeros(cuts)])[:cuts], (cuts,))
        return _either(xp, renew, lambda: xp.cast(xp.minimum(mean, FAR), "int32"), old)

    def _split(self, x: Array, own: Array, bounds: Array, ctx: Context) -> list[Payload]:
        # Returns values and positions for the owner of each region.
        xp, parts = ctx.xp, []
        cuts = xp.integers(xp.searchsorted(own, bounds + 1))
        for owner, (start, stop) in enumerate(pairwise([0, *cuts, None])):
            places = own[start:stop]
            values = xp.take(x, places)
            best = largest(xp, values, self.part(owner - ctx.rank, ctx))
            parts.append((xp.take(values, best), xp.take(places, best)))
        return parts

    def _checked(self, pairs: Sequence[Payload], ctx: Context) -> list[Payload]:
        # Returns the pairs of values and positions if other workers can have sent them.
        found = []
        for worker, (values, places) in enumerate(pairs):
            with sent_by(worker, self, ctx):
                places = placed(ctx.xp, places, ctx.size)
                found.append((matching(ctx.xp, values, "float32", places, "values"), places))
        return found

    def _sums(self, received: Sequence[Payload], bound: Array, ctx: Context) -> Payload:
        # Returns the sums whose magnitude exceeds a bound, and their positions.
        xp, total = ctx.xp, ctx.xp.zeros(ctx.size)
        for values, places in self._checked(received, ctx):
            total = xp.scatter_add(total, places, values)
        found = xp.beyond(total, bound)
        return xp.take(total, found), found

    def _gathered(self, sums: Payload, flag: Array, renew: Any, ctx: Context) -> Program[tuple[Array, Array, Array]]:
        # Returns the sums of all regions and their positions, at least one element; and the sum of all workers' flags.
        xp, k, workers = ctx.xp, self.count(ctx.size), ctx.world_size
        heads = yield Gather((xp.cast(xp.lengths(sums[:1]), "int32"), flag))
        counts, flags = (xp.concat(list(each)) for each in zip(*heads, strict=True))
        counts, start = xp.cast(counts, "int64"), xp.zeros(1, "int64")

        # All workers know how many elements each of them keeps, and the numbers of those that it gathers.
        def parts() -> Array:
            return xp.cumsum(xp.minimum(counts, self.part(xp.arange(workers, "int64"), ctx)))

        ends = xp.cumsum(counts)
        ends = ends * xp.minimum(ends[-1:], k) // xp.maximum(ends[-1:], 1)
        ends = xp.concat([start, _either(xp, renew, parts, ends)])
        even = xp.arange(workers + 1, "int64") * ends[-1:] // workers
        mine = start + ctx.rank
        first, after = xp.take(ends, mine), xp.take(ends, mine + 1)
        cuts = xp.minimum(xp.maximum(_either(xp, renew, lambda: ends, even), first), after) - first

        best = largest(xp, sums[0], xp.integers(after - first)[0])
        values, places = (xp.take(each, best) for each in sums)
        bounds = xp.integers(cuts)
        shares = yield AllToAll(tuple((values[a:b], places[a:b]) for a, b in pairwise(bounds)), ragged=True)
        pair = tuple(xp.concat(list(each)) for each in zip(*shares, strict=True))
        everything = self._checked((yield Gather(pair, ragged=True)), ctx)
        values, places = (xp.concat(list(each)) for each in zip(*everything, strict=True))
        (none,) = xp.integers(xp.cast(xp.lengths([values]) == 0, "int32"))  # a zero then carries the flag
        flag = xp.reshape(xp.sum(flags), (1,))
        return xp.concat([values, xp.zeros(1)[:none]]), xp.concat([places, xp.zeros(1, "int32")[:none]]), flag


def _either(xp: Any, renew: Any, new: Callable[[], Array], old: Array) -> Array:
    # Returns new() or old. ``renew``: a bool, or a bool scalar in a graph.
    if isinstance(renew, bool):
        return new() if renew else old
    return xp.mended(xp.invert(renew), old, new)


def _below(xp: Any, values: Array) -> Array:
    # Returns float32[1], just below the smallest magnitude, so that `beyond` finds it again; zero if that is zero.
    smallest = xp.ranked(xp.abs(values), xp.zeros(1, "int32"))
    return xp.bitcast(xp.maximum(xp.bitcast(smallest, "int32") - 1, 0), "float32")
