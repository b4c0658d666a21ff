"""Packs one round of many tensors' collectives into few messages.

Gathers, broadcasts and all-to-alls travel as bytes: all arrays of all tensors in one buffer. Reductions travel as one
buffer per dtype and operation. A transport only needs to move such buffers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from grace.core import Array, Transport
from grace.core.collectives import AllToAll, Broadcast, Collective, Gather, Reduce
from grace.core.dtypes import ITEMSIZE
from grace.core.gathered import GatheredBuffers, GatheredPayloads, Layout, offsets
from grace.core.grid import Grid
from grace.transports.carried import added_up, small_sums
from grace.transports.packer import Packer

Wait = Callable[[], Any]
"""A function that waits for a transfer to end and returns its result."""


class Divided(Transport):
    """Workers that may form groups, each with a transport of its own."""

    xp: Any = None
    _groups: dict[str, MessageTransport] = {}  # noqa: RUF012 - replaced, never mutated

    _lines: Sequence[MessageTransport] = ()
    # Groups of which each worker is in one for each axis of a grid of all workers, if it has several axes.

    def split(self, node_size: int) -> None:
        if "node" not in self._groups or self._groups["node"].size != node_size:
            first = self.rank - self.rank % node_size
            node, cross = range(first, first + node_size), range(self.rank % node_size, self.size, node_size)
            others = {name: group for name, group in self._groups.items() if not name.startswith("cross")}
            self._groups = {**others, "node": self._part(list(node)), "cross": self._part(list(cross))}

    def split_grid(self, grid: Grid, node_size: int = 0) -> None:
        first, step, prefix = (self.rank % node_size, node_size, "cross.") if node_size else (0, 1, "")
        axes = range(len(grid.dims) if len(grid.dims) > 1 else 0)
        lines = {prefix + grid.group(axis): grid.line(self.rank // step, axis) for axis in axes}
        made = {
            name: self._part([first + step * each for each in line])
            for name, line in lines.items()
            if name not in self._groups
        }
        self._groups = {**self._groups, **made}
        if axes:
            self._lines = [self._groups[name] for name in (*["node"] * bool(node_size), *lines)]

    def _part(self, ranks: list[int]) -> MessageTransport:
        assert isinstance(self, MessageTransport)
        if len(ranks) == self.size:
            return self
        part = Alone(self.xp) if len(ranks) == 1 else self.among(ranks)
        part.timeout, part.contents = self._timeout, self.contents
        return part

    @abstractmethod
    def among(self, ranks: list[int]) -> MessageTransport:
        """The transport of a group that includes this worker. All workers call it together, each for its own group."""

    def group_rank(self, group: str) -> int:
        return self.rank if group == "world" else self._groups[group].rank

    def along_lines(self, buffer: Array, op: str, name: str) -> Wait:
        """As `MessageTransport.reduce`, along one axis of the grid after the other: to the workers of a line alone."""
        first, *others = self._lines
        begun = first.reduce(buffer, op, name)

        def finish() -> Array:
            found = begun()
            for line in others:
                found = line.reduce(found, op, name)()
            return found

        return finish


class MessageTransport(Divided):
    """Packs collectives into buffers. A subclass moves them: its methods start a transfer and return a `Wait`."""

    def late(self, name: str, worker: int | None = None) -> TimeoutError:
        """The error to raise if workers do not answer in time. ``name``: of the message; ``worker``: who, if known."""
        who = "one of them" if worker is None else f"worker {worker}"
        return TimeoutError(
            f"worker {self.rank} of {self.size} has waited {self.timeout:g} s for the others' {self.told(name)}: {who} "
            "is gone, stuck, or does something else. Its own output says why; if steps may take longer, give "
            "grace_from_params a longer timeout"
        )

    @abstractmethod
    def reduce(self, buffer: Array, op: str, name: str) -> Wait:
        """Wait returns the elementwise "sum", "min" or "max" over the workers. The buffer is donated."""

    @abstractmethod
    def gather(self, buffer: Array, name: str) -> Wait:
        """Wait returns a list of every worker's uint8 buffer; all have the same size."""

    @abstractmethod
    def gather_ragged(self, buffer: Array, name: str) -> Wait:
        """As `gather`, for buffers of different sizes."""

    def gather_sized(self, buffer: Array, sizes: list[int], name: str) -> Wait:
        """As `gather`, for buffers of different ``sizes``, by worker, which all workers know."""
        return self.all_to_all([buffer] * self.size, sizes, name)

    @abstractmethod
    def broadcast(self, buffer: Array, root: int, name: str) -> Wait:
        """Wait returns the buffer of worker ``root``; all have the same size."""

    def broadcast_ragged(self, buffer: Array, root: int, name: str) -> Wait:
        """As `broadcast`, for buffers of different sizes."""
        size = self.broadcast(self.xp.lengths([buffer]), root, f"{name}.size")

        def finish() -> Array:
            (length,) = self.xp.integers(size())
            # The root takes a slice of this length: a graph that does not use the length would drop the first message.
            room = buffer[:length] if self.rank == root else self.xp.zeros((length,), "uint8")
            return self.broadcast(room, root, name)()

        return finish

    @abstractmethod
    def all_to_all(self, buffers: list[Array], sizes: list[int], name: str) -> Wait:
        """``buffers[d]`` goes to worker d. Wait returns the received buffers, ``sizes[w]`` bytes from worker w."""

    def all_to_all_ragged(self, buffers: list[Array], name: str) -> Wait:
        """As `all_to_all`, for buffers whose sizes only their senders know."""
        heads = [self.xp.buffers.to_bytes(self.xp.lengths([buffer])) for buffer in buffers]
        sizes = self.all_to_all(heads, [8] * self.size, f"{name}.sizes")

        def finish() -> list[Array]:
            lengths = [int(self.xp.integers(self.xp.buffers.from_bytes(size, "int64", (1,)))[0]) for size in sizes()]
            received: list[Array] = self.all_to_all(buffers, lengths, name)()
            return received

        return finish

    def check_workers(self) -> None:
        """Raise RuntimeError if the workers have changed since this transport was made. Called in each round."""

    def start(self, collectives: Sequence[Collective], name: str) -> Callable[[], list[Any]]:
        self.check_workers()
        groups: dict[str, list[int]] = {}
        for index, collective in enumerate(collectives):
            groups.setdefault(collective.group, []).append(index)
        waits: list[tuple[list[int], Wait]] = []
        for group, members in groups.items():
            carrier = self if group == "world" else self._groups[group]
            waits.append((members, carrier.begin([collectives[i] for i in members], name)))
        return _collect(len(collectives), waits)

    def begin(self, collectives: Sequence[Collective], name: str) -> Wait:
        """`start`, for collectives among this transport's own workers."""
        carried, shared = small_sums(collectives, self.xp, self.rank, self.size)
        others = [index for index in range(len(collectives)) if index not in carried]
        sent = [*(collectives[index] for index in others), *shared]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, collective in enumerate(sent):
            groups.setdefault(_kind(collective), []).append(index)
        waits: list[tuple[list[int], Wait]] = []
        for (kind, *details), members in groups.items():
            tag = ".".join(["grace", name, kind, *map(str, details)])
            start = getattr(self, f"_start_{kind}")
            waits.append((members, start([sent[i] for i in members], tag)))
        wait = _collect(len(sent), waits)
        if not carried:
            return wait

        def finish() -> list[Any]:
            *found, terms = wait()
            results = dict(zip(others, found, strict=True)) | added_up(terms, carried, self.xp, self.size)
            return [results[index] for index in range(len(results))]

        return finish

    def exchange(self, text: str) -> list[str]:
        data = self.xp.asarray(list(text.encode()), "uint8")
        (texts,) = self.start([Gather((data,), ragged=True)], "exchange")()
        return [bytes(self.xp.to_numpy(data)).decode() for (data,) in texts]

    @property
    def _packer(self) -> Packer:
        return Packer(self.xp, self.rank, self.size)

    # -- a method for each kind of collective: packs the items, starts a transfer; wait returns each item's result -----
    def _start_reduce(self, items: list[Reduce], tag: str) -> Wait:
        # One message per dtype: sums and means share it, since a mean is a sum divided by the number of workers.
        xp = self.xp
        arrays = [array for item in items for array in item.arrays]
        means = [item.op == "mean" for item in items for _ in item.arrays]
        dtypes = [xp.dtype(array) for array in arrays]
        op = "sum" if items[0].op == "mean" else items[0].op
        waits: dict[str, Callable[[], Sequence[Array]]] = {}
        for dtype in dict.fromkeys(dtypes):
            members = [index for index, other in enumerate(dtypes) if other == dtype]
            parts = [xp.reshape(arrays[index], (-1,)) for index in members]
            averaged = [means[index] for index in members]
            sizes = [self._length(part) for part in parts]
            spent = len(parts) > 1 or all(item.donated for item in items)
            if ITEMSIZE[dtype] == 2:  # a sum in half precision may overflow: divide first
                parts = [part / self.size if mean else part for part, mean in zip(parts, averaged, strict=True)]
                spent, averaged = spent or averaged[0], [False] * len(parts)
            buffer = xp.concat(parts) if spent else xp.buffers.copy(parts[0])
            waits[dtype] = self._reduce_buffer(buffer, op, sizes, averaged, f"{tag}.{dtype}")

        def finish() -> list[Any]:
            found = {dtype: iter(wait()) for dtype, wait in waits.items()}
            reduced = []
            for array, dtype in zip(arrays, dtypes, strict=True):
                shape = xp.shape(array)
                reduced.append(xp.reshape(next(found[dtype]), (-1,) if None in shape else shape))
            return [tuple(reduced[part]) for part in _slices(items)]

        return finish

    def _length(self, x: Array) -> Any:
        # The length of a vector, equal on all workers; a graph may know it only at run time.
        (n,) = self.xp.shape(x)
        return self.xp.integers(self.xp.lengths([x]))[0] if n is None else n

    def _reduce_buffer(
        self, buffer: Array, op: str, sizes: list[Any], means: list[bool], tag: str
    ) -> Callable[[], Sequence[Array]]:
        # Reduce a buffer; the wait returns its parts, of these sizes. Adjacent means are divided by one call.
        xp = self.xp
        wait = self.reduce(buffer, op, tag) if xp.shape(buffer)[0] != 0 else lambda: buffer
        runs = [
            (mean, [size for _, size in run]) for mean, run in groupby(zip(means, sizes, strict=True), itemgetter(0))
        ]

        def finish() -> Sequence[Array]:
            whole = wait()
            found: list[Array] = []
            pieces = xp.split(whole, [sum(run) for _, run in runs]) if len(runs) > 1 else [whole]
            for (mean, run), piece in zip(runs, pieces, strict=True):
                found += xp.split(xp.inplace.divide(piece, self.size) if mean else piece, run)
            return found

        return finish

    def _start_gather(self, items: list[Gather], tag: str) -> Wait:
        buffer, layout = self._packer.pack(_arrays(items))
        wait = self._skip_empty(buffer, lambda: self.gather(buffer, tag), [buffer] * self.size)
        return lambda: self._received(items, layout, wait())

    def _start_gather_shaped(self, items: list[Gather], tag: str) -> Wait:
        packer = self._packer
        buffer, own = packer.pack(_arrays(items))
        shapes = [[shape for item in items for shape in (item.shapes or ())[worker]] for worker in range(self.size)]
        layouts = [tuple((dtype, shape) for (dtype, _), shape in zip(own, each, strict=True)) for each in shapes]
        wait = self.gather_sized(buffer, [offsets(layout)[-1] for layout in layouts], tag)
        return lambda: _deal(items, [packer.unpack(each, layouts[w], w) for w, each in enumerate(wait())])

    def _received(self, items: list[Gather], layout: Layout, buffers: list[Array]) -> list[Any]:
        packer = self._packer
        # In graphs unpack immediately: views made later could belong to one branch of the graph, and other branches
        # cannot use its tensors.
        if not self.xp.mutable:
            return _deal(items, [packer.unpack(buffer, layout, w) for w, buffer in enumerate(buffers)])
        for sender, buffer in enumerate(buffers):
            packer.check_size(buffer, layout, sender)
        messages = GatheredBuffers(self.xp, buffers, layout, packer.cut)
        return [GatheredPayloads(messages, part) for part in _slices(items)]

    def _start_gather_ragged(self, items: list[Gather], tag: str) -> Wait:
        packer = self._packer
        buffer, layout = packer.pack_ragged(_arrays(items))
        wait = self.gather_ragged(buffer, tag)
        return lambda: _deal(items, [packer.unpack_ragged(each, layout, w) for w, each in enumerate(wait())])

    def _start_broadcast(self, items: list[Broadcast], tag: str) -> Wait:
        packer, root = self._packer, items[0].root
        buffer, layout = packer.pack(_arrays(items))
        wait = self._skip_empty(buffer, lambda: self.broadcast(buffer, root, tag), buffer)
        return lambda: [arrays for (arrays,) in _deal(items, [packer.unpack(wait(), layout, root)])]

    def _start_broadcast_ragged(self, items: list[Broadcast], tag: str) -> Wait:
        packer, root = self._packer, items[0].root
        buffer, layout = packer.pack_ragged(_arrays(items))
        wait = self.broadcast_ragged(buffer, root, tag)
        return lambda: [arrays for (arrays,) in _deal(items, [packer.unpack_ragged(wait(), layout, root)])]

    def _start_alltoall(self, items: list[AllToAll], tag: str) -> Wait:
        xp, packer, mutual = self.xp, self._packer, items[0].mutual
        # ``like[sender]``: the index in ``parts`` of arrays shaped like those that ``sender`` sends here: this
        # worker's own part, or, if ``mutual``, the part that goes to ``sender``.
        like = [worker if mutual else self.rank for worker in range(self.size)]
        parts = [[array for item in items for array in item.parts[worker]] for worker in range(self.size)]
        layouts = {worker: packer.layout(parts[worker]) for worker in set(like)}
        buffers = [packer.joined(arrays) for arrays in parts]
        wait = self.all_to_all(buffers, [xp.shape(buffers[worker])[0] for worker in like], tag)

        def finish() -> list[Any]:
            if not mutual:
                kept = [Gather(item.parts[self.rank]) for item in items]
                return self._received(kept, layouts[self.rank], wait())
            results: list[Any] = [[] for _ in items]
            for sender, (worker, received) in enumerate(zip(like, wait(), strict=True)):
                arrays = packer.unpack(received, layouts[worker], sender)
                dealt = _deal([Gather(item.parts[worker]) for item in items], [arrays])
                for result, part in zip(results, dealt, strict=True):
                    result += part
            return results

        return finish

    _start_alltoall_mutual = _start_alltoall

    def _start_alltoall_ragged(self, items: list[AllToAll], tag: str) -> Wait:
        packer = self._packer
        parts = [[array for item in items for array in item.parts[worker]] for worker in range(self.size)]
        packed = [packer.pack_ragged(arrays) for arrays in parts]
        layout = packed[self.rank][1]
        wait = self.all_to_all_ragged([buffer for buffer, _ in packed], tag)
        kept = [Gather(item.parts[self.rank]) for item in items]
        return lambda: _deal(kept, [packer.unpack_ragged(each, layout, w) for w, each in enumerate(wait())])

    def _skip_empty(self, buffer: Array, begin: Callable[[], Wait], result: Any) -> Wait:
        # All workers' messages have the same size: if this one is empty, all are, and none is sent.
        return (lambda: result) if self.xp.shape(buffer)[0] == 0 else begin()


class Alone(MessageTransport):
    """A group of one worker, which receives its own messages."""

    def __init__(self, xp: Any):
        self.xp = xp

    def among(self, ranks: list[int]) -> MessageTransport:
        return self

    def reduce(self, buffer: Array, op: str, name: str) -> Wait:
        return lambda: buffer

    def gather(self, buffer: Array, name: str) -> Wait:
        return lambda: [buffer]

    gather_ragged = gather

    def broadcast(self, buffer: Array, root: int, name: str) -> Wait:
        return lambda: buffer

    broadcast_ragged = broadcast

    def all_to_all(self, buffers: list[Array], sizes: list[int], name: str) -> Wait:
        return lambda: buffers

    def all_to_all_ragged(self, buffers: list[Array], name: str) -> Wait:
        return lambda: buffers


def _kind(collective: Collective) -> tuple[Any, ...]:
    # Collectives with the same key share a message: the name of the _start_ method, then the fields that must be equal.
    if isinstance(collective, Reduce):
        return ("reduce", "sum" if collective.op == "mean" else collective.op)
    if isinstance(collective, Gather):
        return (f"gather{'_ragged' * collective.ragged}{'_shaped' * (collective.shapes is not None)}",)
    if isinstance(collective, Broadcast):
        return ("broadcast_ragged" if collective.ragged else "broadcast", collective.root)
    if isinstance(collective, AllToAll):
        return (f"alltoall{'_mutual' * collective.mutual}{'_ragged' * collective.ragged}",)
    raise TypeError(f"{collective!r} is not a collective; yield Reduce, Gather, Broadcast or AllToAll")


def _collect(count: int, waits: list[tuple[list[int], Wait]]) -> Callable[[], list[Any]]:
    # Merge several waits into one that returns ``count`` results; each wait has the results of some positions.
    def wait() -> list[Any]:
        results: list[Any] = [None] * count
        for members, finish in waits:
            for index, result in zip(members, finish(), strict=True):
                results[index] = result
        return results

    return wait


def _arrays(items: Sequence[Gather | Broadcast]) -> Iterator[Array]:
    return (array for item in items for array in item.arrays)


def _slices(items: Sequence[Any]) -> Iterator[slice]:
    # Each item's slice of the message's arrays.
    start = 0
    for item in items:
        yield slice(start, start + len(item.arrays))
        start += len(item.arrays)


def _deal(items: Sequence[Any], senders: list[tuple[Array, ...]]) -> list[list[tuple[Array, ...]]]:
    # For each item, its arrays from every sender.
    return [[arrays[part] for arrays in senders] for part in _slices(items)]
