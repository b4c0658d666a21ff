"""Horovod for PyTorch and TensorFlow.

Horovod matches collectives by name, so an exchange cannot mix tensors of the two toolkits.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import threading
import time
import weakref
from abc import abstractmethod
from functools import cached_property
from itertools import accumulate, pairwise
from queue import Empty, SimpleQueue
from typing import Any

from grace.core import Array, Transport
from grace.transports import events
from grace.transports.launched import JOINED
from grace.transports.messages import MessageTransport, Wait


class HorovodTransport(Transport):
    """The workers of a Horovod job; `bind` returns the transport of one toolkit.

    ``process_set``: a horovod ProcessSet that includes this worker; None: all workers.
    """

    def __init__(self, process_set: Any = None):
        from grace.transports.launched import loaded_horovod

        initialised = [module for module in loaded_horovod() if module.is_initialized()]
        if not initialised:
            raise RuntimeError(
                "transport 'horovod' needs hvd.init() first, from horovod.torch or horovod.tensorflow (as hvd)"
            )
        self._process_set = process_set
        if process_set is not None and not process_set.included():
            raise ValueError("this worker is not in the process set that it was given")
        self.elastic = elastic()
        self._process, self._workers = os.getpid(), initialised[0].size()
        self.rank = initialised[0].rank() if process_set is None else process_set.rank()
        self.size = initialised[0].size() if process_set is None else process_set.size()

    @property
    def node_size(self) -> int:
        from grace.transports.launched import loaded_horovod

        return loaded_horovod()[0].local_size() if self._process_set is None else self.size

    @property
    def local_rank(self) -> int:
        from grace.transports.launched import loaded_horovod

        return int(loaded_horovod()[0].local_rank())

    @property
    def splits(self) -> bool:
        from grace.transports.launched import loaded_horovod

        allowed = dynamic() and not self.elastic and self._process_set is None
        return bool(allowed and loaded_horovod()[0].mpi_ops.is_homogeneous())

    def bind(self, xp: Any) -> Transport:
        kinds = {"torch": TorchHorovod, "tensorflow": TensorflowHorovod}
        if xp.name not in kinds:
            raise TypeError(
                f"transport 'horovod' carries PyTorch and TensorFlow tensors, not {xp.name} arrays; use 'local'"
            )
        hvd = importlib.import_module(f"horovod.{xp.name}")
        if not hvd.is_initialized():
            raise RuntimeError(f"Horovod is initialised for another toolkit: call horovod.{xp.name}.init() too")
        bound = kinds[xp.name](xp, hvd, self._process_set or hvd.global_process_set, self.rank, self.size)
        bound._process, bound._workers, bound._origin = self._process, self._workers, self
        bound.check_workers()
        return bound

    def start(self, collectives: Any, name: str) -> Any:
        raise RuntimeError("bind the transport to a backend first: HorovodTransport().bind(xp)")


def elastic() -> bool:
    """Whether horovodrun started this job with a host discovery script."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def dynamic() -> bool:
    """Whether Horovod lets workers create process sets after its start."""
    return os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"


POLL_SECONDS = 0.0005
"""Seconds between two checks of whether an operation has ended."""
SWAPPED = 2**14
"""Message size in bytes from which two workers gather by an allreduce (`_BoundHorovod._swap`)."""
SETS: dict[tuple[int, ...], Any] = {}
"""Process sets created here, by their workers' ranks. They are used again, since Horovod rejects duplicates."""


class _BoundHorovod(MessageTransport):
    _origin: HorovodTransport | None = None  # None: a group of workers

    def __init__(self, xp: Any, hvd: Any, process_set: Any, rank: int, size: int):
        self.xp, self.rank, self.size, self.elastic = xp, rank, size, elastic()
        self._hvd, self._process_set = hvd, process_set
        self._process, self._workers = os.getpid(), hvd.size()
        self._ops = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
        events.settle(polling=True)

    def check_workers(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "this Grace was made for the Horovod job of another process, from which this one was forked: call "
                "hvd.init() and make the Grace in this process"
            )
        size = self._hvd.size() if self._hvd.is_initialized() else 0
        if size != self._workers:
            raise RuntimeError(
                f"this Grace was made for {self._workers} workers of Horovod, and now there are {size}: after "
                "hvd.shutdown() and hvd.init() call grc.reset(), or make a new Grace"
            )

    @property
    def node_size(self) -> int:
        return self.size if self._origin is None else self._origin.node_size

    @property
    def divides(self) -> bool:
        return dynamic() and self.size == self._workers

    @property
    def splits(self) -> bool:
        return self._origin is not None and self._origin.splits

    def root(self, rank: int) -> int:
        """The rank among all workers, which Horovod requires even within a process set."""
        ranks = self._process_set.ranks
        return rank if ranks is None else ranks[rank]

    def among(self, ranks: list[int]) -> MessageTransport:
        # All workers must create every process set together, so each one sends the ranks of its own set to all.
        groups = {tuple(json.loads(text)) for text in self.exchange(json.dumps(ranks))}
        for group in sorted(groups):
            world = tuple(self.root(rank) for rank in group)
            if world not in SETS:
                try:
                    SETS[world] = self._hvd.add_process_set(self._hvd.ProcessSet(list(world)))
                except ValueError as error:
                    raise RuntimeError(
                        f"Horovod could not make a process set of workers {list(world)} ({error}): set "
                        "HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init(), and make no process set of the same workers"
                    ) from error
        mine = SETS[tuple(self.root(rank) for rank in ranks)]
        return type(self)(self.xp, self._hvd, mine, mine.rank(), mine.size())

    def gather(self, buffer: Array, name: str) -> Wait:
        n = self.xp.shape(buffer)[0]
        swaps = self.size == 2 and n >= SWAPPED and self._over_gloo and self.on_cpu(buffer)
        return self._swap(buffer, n, name) if swaps else self.gather_all(buffer, name)

    @abstractmethod
    def gather_all(self, buffer: Array, name: str) -> Wait:
        """`gather`, by Horovod's allgather."""

    @abstractmethod
    def on_cpu(self, buffer: Array) -> bool:
        """Whether Horovod exchanges this buffer on the CPU."""

    @cached_property
    def _over_gloo(self) -> bool:
        return bool(self._hvd.gloo_enabled()) and not self._hvd.mpi_enabled()

    def _swap(self, buffer: Array, n: int, name: str) -> Wait:
        # Between two workers gloo's allgather is half-duplex: a receiver's ready message queues behind its own data.
        # An allreduce is full-duplex at the same volume: sum the buffers as int32 that wrap around, and subtract this
        # worker's buffer to recover the other one.
        xp = self.xp
        mine = xp.bitcast(xp.buffers.copy(xp.pad(buffer, -(-n // 4) * 4)), "int32")  # aligned
        wait = self.reduce_wide(xp.buffers.copy(mine), "sum", name)  # in PyTorch the copy becomes the sum

        def finish() -> list[Array]:
            other = xp.bitcast(wait() - mine, "uint8")[:n]
            return [buffer, other] if self.rank == 0 else [other, buffer]

        return finish

    @abstractmethod
    def reduce_wide(self, buffer: Array, op: str, name: str) -> Wait:
        """`reduce`, for dtypes and operations that Horovod supports."""

    def reduce(self, buffer: Array, op: str, name: str) -> Wait:
        dtype = self.xp.dtype(buffer)
        if dtype == "bfloat16" and op == "sum":
            return self._reduce_in_two(buffer, name)
        if dtype not in ("int8", "uint8") or op != "sum":
            return self.reduce_wide(buffer, op, name)
        # Horovod cannot sum 8-bit integers, so pack four 8-bit lanes into an int32: still one byte per element on the
        # wire. Lanes never carry into each other: int8 sums have magnitudes up to 127, so shifted sums are 0 .. 254.
        xp, n, shift = self.xp, self.xp.shape(buffer)[0], 127 // self.size if dtype == "int8" else 0
        lanes = xp.cast(xp.cast(buffer, "int32") + shift, "uint8")
        wait = self.reduce_wide(xp.bitcast(xp.pad(lanes, -(-n // 4) * 4), "int32"), op, name)

        def finish() -> Array:
            lanes = xp.cast(xp.bitcast(wait(), "uint8")[:n], "int32")
            return xp.cast(lanes - shift * self.size, dtype)

        return finish

    def _reduce_in_two(self, buffer: Array, name: str) -> Wait:
        # Horovod has no bfloat16: each worker sums one part of the buffer in float32 and sends the sum to all workers
        # as bytes. The volume is that of an allreduce.
        xp, n = self.xp, self.xp.shape(buffer)[0]
        each = -(-n // self.size)
        shares = xp.split(xp.pad(buffer, each * self.size), [each] * self.size)
        wait = self.all_to_all([xp.buffers.to_bytes(share) for share in shares], [2 * each] * self.size, name)

        def finish() -> Array:
            total, *others = (xp.cast(xp.buffers.from_bytes(part, "bfloat16", (each,)), "float32") for part in wait())
            for other in others:
                total = total + other
            parts = self.gather(xp.buffers.to_bytes(xp.cast(total, "bfloat16")), f"{name}.sums")()
            return xp.concat([xp.buffers.from_bytes(part, "bfloat16", (each,)) for part in parts])[:n]

        return finish


class TorchHorovod(_BoundHorovod):
    """PyTorch tensors through Horovod's asynchronous handles."""

    def _begin(self, operation: Any, *args: Any, name: str, **options: Any) -> Wait:
        handle = operation(*args, name=name, process_set=self._process_set, **options)

        def wait() -> Any:
            # synchronize spins; sleeping leaves the cores to Horovod's own threads and to the other workers.
            end = time.monotonic() + self.timeout
            while not self._hvd.poll(handle):
                if time.monotonic() > end:
                    raise self.late(name)
                time.sleep(POLL_SECONDS)
            try:
                return self._hvd.synchronize(handle)
            except RuntimeError as error:
                if "with Join" in str(error):  # Horovod's allgather needs all workers
                    raise RuntimeError(JOINED) from error
                raise

        return wait

    def reduce_wide(self, buffer: Array, op: str, name: str) -> Wait:
        return self._begin(self._hvd.allreduce_async_, buffer, name=name, op=self._ops[op])

    def gather_all(self, buffer: Array, name: str) -> Wait:
        wait = self._begin(self._hvd.allgather_async, buffer, name=name)
        return lambda: list(wait().view(self.size, -1))

    def on_cpu(self, buffer: Array) -> bool:
        return bool(buffer.device.type == "cpu")

    def gather_ragged(self, buffer: Array, name: str) -> Wait:
        sizes = self._begin(self._hvd.allgather_async, self.xp.lengths([buffer]), name=f"{name}.sizes")
        wait = self._begin(self._hvd.allgather_async, buffer, name=name)
        return lambda: list(wait().split(sizes().tolist()))

    def broadcast(self, buffer: Array, root: int, name: str) -> Wait:
        return self._begin(self._hvd.broadcast_async, buffer, self.root(root), name=name)

    def all_to_all(self, buffers: list[Array], sizes: list[int], name: str) -> Wait:
        wait = self._all_to_all(buffers, name)
        return lambda: list(wait()[0].split(sizes))

    def all_to_all_ragged(self, buffers: list[Array], name: str) -> Wait:
        wait = self._all_to_all(buffers, name)

        def finish() -> list[Array]:
            received, sizes = wait()
            return list(received.split(sizes.tolist()))

        return finish

    def _all_to_all(self, buffers: list[Array], name: str) -> Wait:
        splits = self.xp.asarray([len(buffer) for buffer in buffers], "int32")
        return self._begin(self._hvd.alltoall_async, self.xp.concat(buffers), splits, name=name)


class TensorflowHorovod(_BoundHorovod):
    """TensorFlow tensors through Horovod's ops, which the executor overlaps in a graph; eagerly, each op blocks."""

    rooted = False  # a graph that mixes rooted strategies has been seen to hang

    def __init__(self, xp: Any, hvd: Any, process_set: Any, rank: int, size: int):
        super().__init__(xp, hvd, process_set, rank, size)
        self._unseen: list[Any] = []  # empty slices of results that may be unused on this worker
        self._caller: _Caller | None = None

    @property
    def _options(self) -> dict[str, Any]:
        # Horovod matches messages by node names. When a graph is optimised, nodes inside a switch get a prefix that may
        # differ between workers; ignore_name_scope keeps the name given here.
        return {"process_set": self._process_set, "ignore_name_scope": self.xp.switching}

    def _run(self, operation: Any, *args: Any, name: str, **options: Any) -> Any:
        import tensorflow as tf

        call = functools.partial(operation, *args, name=name, **options, **self._options)
        if self.timeout == math.inf or not tf.executing_eagerly():
            return call()
        # Eagerly, Horovod's operations block, so another thread calls them.
        self._caller = self._caller or _Caller()
        try:
            return self._caller.call(call, self.timeout)
        except TimeoutError:
            self._caller = None  # drop the caller: its thread waits forever
            raise self.late(name) from None

    def reduce_wide(self, buffer: Array, op: str, name: str) -> Wait:
        result = self._run(self._hvd.allreduce, buffer, op=self._ops[op], name=name)
        return lambda: result

    def gather_all(self, buffer: Array, name: str) -> Wait:
        result = self._run(self._hvd.allgather, buffer, name=name)
        size = self.xp.shape(buffer)[0]
        return lambda: [result[w * size : (w + 1) * size] for w in range(self.size)]

    def on_cpu(self, buffer: Array) -> bool:
        return not self._hvd.nccl_built()  # a graph does not know yet where its tensors will be

    def gather_ragged(self, buffer: Array, name: str) -> Wait:
        import tensorflow as tf

        sizes = self._run(self._hvd.allgather, self.xp.lengths([buffer]), name=f"{name}.sizes")
        result = self._run(self._hvd.allgather, self._with_unseen(buffer), name=name)
        return lambda: tf.split(result, tf.reshape(sizes, (self.size,)), num=self.size)

    def broadcast(self, buffer: Array, root: int, name: str) -> Wait:
        result = self._run(self._hvd.broadcast, self._with_unseen(buffer), self.root(root), name=name)
        return lambda: result

    def _with_unseen(self, buffer: Array) -> Array:
        # A graph drops operations whose results this worker does not use, even with control dependencies, while the
        # other workers wait for its messages. So append empty slices of such results to the next message.
        import tensorflow as tf

        unseen, self._unseen = self._unseen, []
        if tf.executing_eagerly():
            return buffer
        here = tf.compat.v1.get_default_graph()
        nothing = [x for x in unseen if tf.is_symbolic_tensor(x) and x.graph is here]
        if not nothing:
            return buffer
        found = tf.concat([buffer, *nothing], 0)
        found.set_shape(buffer.shape)
        return found

    def all_to_all(self, buffers: list[Array], sizes: list[int], name: str) -> Wait:
        splits = self.xp.asarray([self.xp.shape(buffer)[0] for buffer in buffers], "int32")
        received, _ = self._run(self._hvd.alltoall, self._with_unseen(self.xp.concat(buffers)), splits, name=name)
        if sum(sizes) == 0:
            self._unseen.append(received)
        ends = list(accumulate(sizes, initial=0))
        return lambda: [received[start:end] for start, end in pairwise(ends)]

    def all_to_all_ragged(self, buffers: list[Array], name: str) -> Wait:
        import tensorflow as tf

        splits = self.xp.cast(self.xp.lengths(buffers), "int32")
        buffer = self._with_unseen(self.xp.concat(buffers))
        received, sizes = self._run(self._hvd.alltoall, buffer, splits, name=name)
        self._unseen.append(received[tf.size(received) :])  # unused if this worker has no shard
        return lambda: tf.split(received, tf.reshape(sizes, (self.size,)), num=self.size)


class _Caller:
    """A thread that makes blocking calls for other threads, which wait with a timeout."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._results: SimpleQueue[Any] = SimpleQueue()
        weakref.finalize(self, self._calls.put, None)
        threading.Thread(target=_serve, args=(self._calls, self._results), daemon=True, name="grace").start()

    def call(self, function: Any, timeout: float) -> Any:
        """Return the function's result, or raise its exception. After a TimeoutError do not use this object again."""
        self._calls.put(function)
        try:
            result, error = self._results.get(timeout=min(timeout, threading.TIMEOUT_MAX))
        except Empty:
            raise TimeoutError from None
        if error is not None:
            raise error
        return result


def _serve(calls: Any, results: Any) -> None:
    while (function := calls.get()) is not None:
        try:
            results.put((function(), None))
        except BaseException as error:
            results.put((None, error))
        del function
