"""torch.distributed, with any process group of gloo or NCCL."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from grace.core import Array, Transport
from grace.transports import events
from grace.transports.messages import MessageTransport, Wait

# The older name is deprecated, and not all versions have the newer one.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
LARGE = 2**20
"""Message size in bytes above which CPU workers gather by `_gather_around` instead of gloo's own gather."""
BETWEEN_TWO = 2**14
"""As `LARGE`, but between two workers, where gloo's gather is half-duplex: a receiver's ready message queues behind its
data."""
TAGS = 2**20
"""Number of tags of direct messages, after which they repeat; torch.distributed's own collectives use tag 0."""
SMALL = 2**18
"""Maximum size in bytes of a buffer that CPU workers reduce directly: larger messages would flood a slow link."""
AT_ONCE = 2**14
"""Maximum number of bytes that a CPU worker receives to reduce a buffer in one message instead of two."""
OPS = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "max": (dist.ReduceOp.MAX, torch.maximum),
}

ENDING = 5.0
"""Seconds for which a worker that ends waits for its pending collectives; then it closes its connections."""

PASSES: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()
"""A counter of direct collectives for each process group, since several optimizers may share a group."""
PENDING: dict[int, tuple[Any, TorchDistributedTransport]] = {}
"""gloo's collectives that nobody has waited for, by id: Python cannot end while gloo's threads carry them out."""


def _delta(seconds: float) -> timedelta:
    return timedelta(seconds=min(seconds, 1e8))  # gloo has no infinite timeout


@functools.cache
def _close_at_exit() -> None:
    atexit.register(_close)


def _close() -> None:
    # Without this, a worker that raised in the middle of an exchange could end only after the group's timeout.
    end = time.monotonic() + ENDING
    for work, transport in PENDING.values():
        try:
            work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
        except RuntimeError:
            transport.disconnect()


class TorchDistributedTransport(MessageTransport):
    """Workers of a process group (``group`` None: the default group).

    torch.distributed matches collectives by order, not by name. The scheduler keeps one order on all workers; your own
    collectives in the same group must not be called from another thread during a backward pass.

    The group keeps its own timeout, which also limits waits unless `timeout` is set. Setting it affects CPU tensors
    only; before PyTorch 2.9 gloo's collectives still end at the group's timeout if that is shorter.
    """

    def __init__(self, group: Any = None):
        if not dist.is_initialized():
            raise RuntimeError("transport 'torch' needs torch.distributed.init_process_group() first")
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this worker is not in the process group that it was given")
        self._world = weakref.ref(dist.group.WORLD)
        self._process = os.getpid()
        self._passes = PASSES.setdefault(self._own_group, itertools.count())
        if self._gloo:
            events.settle()
            events.release_at_exit()
            _close_at_exit()

    def check_workers(self) -> None:
        world = dist.group.WORLD
        if world is None or world is not self._world():
            raise RuntimeError(
                "the process group that this Grace was made for is gone: after destroy_process_group() and "
                "init_process_group() call grc.reset(), or make a new Grace"
            )
        if os.getpid() != self._process:
            raise RuntimeError(
                "this Grace was made for the process group of another process, from which this one was forked: "
                "initialise torch.distributed and make the Grace in this process"
            )

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the group's workers."""
        return dist.get_process_group_ranks(self._own_group)

    def bind(self, xp: Any) -> Transport:
        self.check_workers()
        if xp.name != "torch":
            raise TypeError(
                f"transport 'torch' carries PyTorch tensors, not {xp.name} arrays; use 'horovod' or 'local'"
            )
        self.xp = xp
        return self

    @property
    def usual_timeout(self) -> float:
        """The process group's timeout."""
        for device in ("cpu", "cuda"):
            with suppress(RuntimeError, AttributeError):  # no backend for this device, or one without options
                backend = self._own_group._get_backend(torch.device(device))
                backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
                return float(backend.options._timeout.total_seconds())
        return float(dist.default_pg_timeout.total_seconds())

    @property
    def _own_group(self) -> Any:
        return dist.group.WORLD if self._group is None else self._group

    @property
    def _gloo(self) -> bool:
        # Whether gloo carries CPU tensors.
        return "cpu:gloo" in dist.get_backend_config(self._own_group)

    @property
    def node_size(self) -> int:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))  # set by torchrun
        return local if self._group is None else self.size

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", 0))  # set by torchrun and grace.init

    @property
    def divides(self) -> bool:
        return self._group is None  # all workers of the job must create a group together

    @property
    def splits(self) -> bool:
        machines = int(os.environ.get("GROUP_WORLD_SIZE", 0))  # also set by torchrun
        return self.divides and machines * self.node_size == self.size

    def among(self, ranks: list[int]) -> TorchDistributedTransport:
        # All workers must create every group together, so each one sends the ranks of its own group to all.
        groups = [json.loads(text) for text in self.exchange(json.dumps(ranks))]
        mine = None
        for group in sorted({tuple(group) for group in groups}):
            made = dist.new_group([self._global(rank) for rank in group], timeout=_delta(self.usual_timeout))
            mine = made if self.rank in group else mine
        part = TorchDistributedTransport(mine)
        part.xp = self.xp
        return part

    def reduce(self, buffer: Array, op: str, name: str) -> Wait:
        if self.size > 1 and buffer.device.type == "cpu" and buffer.nbytes <= SMALL:
            return self._reduce_directly(buffer, op, name)
        if (limit := self._limit(buffer)) is None:
            work = dist.all_reduce(buffer, OPS[op][0], self._group, async_op=True)
        else:
            options = dist.AllreduceOptions()
            options.reduceOp, options.timeout = OPS[op][0], limit
            work = self._own_group.allreduce([buffer], options)
        return self._begun(name, buffer, work)

    def gather(self, buffer: Array, name: str) -> Wait:
        buffer = buffer.contiguous()
        large = BETWEEN_TWO if self.size == 2 else LARGE
        if self.size > 1 and buffer.device.type == "cpu" and buffer.shape[0] > large:
            return self._gather_around(buffer, [buffer.shape[0]] * self.size, name)
        gathered = self.xp.buffers.empty(self.size * buffer.shape[0], "uint8")
        if (limit := self._limit(buffer)) is None:
            work = ALL_GATHER(gathered, buffer, self._group, async_op=True)
        else:
            options = distributed_c10d.AllgatherOptions()
            options.timeout = limit
            work = self._own_group._allgather_base(gathered, buffer, options)
        arrived = self._begun(name, buffer, work)

        def finish() -> list[Array]:
            arrived()
            return list(gathered.view(self.size, -1))

        return finish

    def _limit(self, buffer: Array) -> timedelta | None:
        # Returns the timeout of a message, or None to use the group's timeout. For a buffer on a device it is always
        # None, because a timeout would make the host wait.
        return None if self._timeout is None or buffer.device.type != "cpu" else _delta(self._timeout)

    def _begun(self, name: str, buffer: Array, work: Any) -> Wait:
        # Returns a `Wait`, whose result is the buffer.
        while PENDING and (first := next(iter(PENDING.values()))[0]).is_completed():
            del PENDING[id(first)]
        if buffer.device.type == "cpu":
            PENDING[id(work)] = work, self

        def finish() -> Array:
            self._wait(name, buffer, work)
            return buffer

        return finish

    def disconnect(self) -> None:
        """End all transfers of the group's CPU tensors: gloo does so when a receive times out."""
        with suppress(RuntimeError, ConnectionError, ValueError):  # ValueError: the group is gone
            self._receive(torch.empty(1), self.rank + 1, TAGS + 1, "").wait(timedelta(milliseconds=1))

    def _wait(self, name: str, buffer: Array, *works: Any, workers: Sequence[int] = ()) -> None:
        # ``workers``: the other end of each work, if it has one.
        limit = self._limit(buffer)
        for number, work in enumerate(works):
            try:
                work.wait(*([] if limit is None else [limit]))
            except RuntimeError as error:
                if buffer.device.type != "cpu":
                    raise
                raise self._lost(name, error, workers[number] if workers else None) from error
            PENDING.pop(id(work), None)

    def _lost(self, name: str, error: RuntimeError, worker: int | None = None) -> Exception:
        # The exception for a failed transfer. gloo's own message names no worker. Sends fail, too, if a worker is lost.
        if "imed out" in str(error):
            return self.late(name, worker)
        return ConnectionError(f"worker {self.rank} of {self.size} has lost another one at {self.told(name)}: {error}")

    def gather_sized(self, buffer: Array, sizes: list[int], name: str) -> Wait:
        if buffer.device.type == "cpu" and min(sizes) > LARGE:
            return self._gather_around(buffer.contiguous(), sizes, name)
        return super().gather_sized(buffer, sizes, name)

    def _gather_around(self, buffer: Array, sizes: list[int], name: str) -> Wait:
        # Gather around a ring: each worker forwards what it receives. gloo's own gather does the same, but takes about
        # three times as long on a fast network. Sending to all workers at once takes a seventh longer on a slow
        # network, since streams that share a link leave it partly idle. Parts are forwarded in the wait; all workers
        # enter their waits in the same order.
        parts = self._places(buffer, sizes)
        parts = [parts[(self.rank - step) % self.size] for step in range(self.size)]  # in order of arrival
        tag = self._next_tag(name)
        coming = [self._receive(part, self.rank - 1, tag, name) for part in parts[1:]]
        leaving = [self._send(buffer, self.rank + 1, tag, name)]

        def finish() -> list[Array]:
            for part, work in zip(parts[1:], coming, strict=True):
                self._wait(name, part, work)
                if len(leaving) < len(coming):
                    leaving.append(self._send(part, self.rank + 1, tag, name))
            self._wait(name, buffer, *leaving)
            return [parts[(self.rank - worker) % self.size] for worker in range(self.size)]

        return finish

    def _reduce_directly(self, buffer: Array, op: str, name: str) -> Wait:
        # gloo's allreduce takes 2 (W - 1) successive messages. Here each worker reduces its share of the buffer in rank
        # order and sends it to all: two. If the buffer is tiny, or there are two workers, each reduces the whole: one.
        if self._lines:
            return self.along_lines(buffer, op, name)
        whole = self.size == 2 or (self.size - 1) * buffer.nbytes <= AT_ONCE
        shares = [buffer] * self.size if whole else list(buffer.tensor_split(self.size))
        mine = shares[self.rank]
        places = [mine if w == self.rank else torch.empty_like(mine) for w in range(self.size)]
        tags = self._next_tag(name), self._next_tag(name)
        wait = self._directly(shares, places, tags[0], name)

        def finish() -> Array:
            total, *others = wait()
            for other in others:
                OPS[op][1](total, other, out=total)
            if total is not mine:
                mine.copy_(total)
            if not whole:
                self._directly([mine] * self.size, shares, tags[1], name)()
            return buffer

        return finish

    def _directly(self, buffers: list[Array], places: list[Array], tag: int, name: str) -> Wait:
        # All workers send to all others at once, except empty buffers, which the receiver does not expect either.
        # ``places[w]`` receives the data of worker w; this worker's place has its data already. Receives are posted
        # first: on a slow link, data that arrives before its receive delays all other data.
        sources = [(self.rank - distance) % self.size for distance in range(1, self.size)]
        targets = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        sources = [source for source in sources if len(places[source])]
        targets = [to for to in targets if len(buffers[to])]
        works = [self._receive(places[source], source, tag, name) for source in sources]
        works += [self._send(buffers[to], to, tag, name) for to in targets]

        def finish() -> list[Array]:
            self._wait(name, buffers[self.rank], *works, workers=[*sources, *targets])
            return places

        return finish

    def _send(self, buffer: Array, rank: int, tag: int, name: str) -> Any:
        try:
            return self._own_group.send([buffer], rank % self.size, tag)
        except RuntimeError as error:
            raise self._lost(name, error) from error

    def _receive(self, place: Array, rank: int, tag: int, name: str) -> Any:
        try:
            return self._own_group.recv([place], rank % self.size, tag)
        except RuntimeError as error:
            raise self._lost(name, error) from error

    def _next_tag(self, name: str) -> int:
        # One tag for all direct messages of a collective: several collectives are in flight together, and some parts
        # are sent late. The tag depends on the name, so that workers whose collectives differ run into the timeout:
        # with the same tag, gloo would abort the process if a message were larger than expected.
        return (next(self._passes) ^ zlib.crc32(name.encode())) % TAGS + 1

    def _places(self, own: Array, sizes: list[int]) -> list[Array]:
        # A receive buffer for each other worker, and ``own``, this worker's data, in its place.
        return [own if w == self.rank else self.xp.buffers.empty(size, "uint8") for w, size in enumerate(sizes)]

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def gather_ragged(self, buffer: Array, name: str) -> Wait:
        # Exchange sizes first: all_gather needs buffers of equal size, so all workers pad theirs to the largest.
        sizes = self.gather(self.xp.buffers.to_bytes(self.xp.lengths([buffer])), name)

        def finish() -> list[Array]:
            lengths = [int(size.view(torch.int64)) for size in sizes()]
            rows = self.gather(self.xp.pad(buffer, max(lengths)), name)()
            return [row[:length] for row, length in zip(rows, lengths, strict=True)]

        return finish

    def broadcast(self, buffer: Array, root: int, name: str) -> Wait:
        buffer = buffer.clone()
        if (limit := self._limit(buffer)) is None:
            work = dist.broadcast(buffer, self._global(root), self._group, async_op=True)
        else:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.timeout = root, 0, limit
            work = self._own_group.broadcast([buffer], options)
        return self._begun(name, buffer, work)

    def all_to_all(self, buffers: list[Array], sizes: list[int], name: str) -> Wait:
        if buffers[0].device.type == "cpu":
            # Send the parts as they are: all_to_all_single would need a copy of them in one contiguous tensor.
            buffers = [buffer.contiguous() for buffer in buffers]
            return self._directly(buffers, self._places(buffers[self.rank], sizes), self._next_tag(name), name)
        received = buffers[0].new_empty(sum(sizes))
        work = dist.all_to_all_single(
            received, torch.cat(buffers), sizes, [len(b) for b in buffers], self._group, async_op=True
        )

        def finish() -> list[Array]:
            self._wait(name, received, work)
            return list(received.split(sizes))

        return finish
