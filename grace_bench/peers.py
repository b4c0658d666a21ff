"""Other implementations to time: a checkout of upstream GRACE, and torch's PowerSGD hook. PyTorch only."""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

import torch
from torch import distributed

from grace.bench.plan import UPSTREAM, WORKERS, Case, shapes
from grace.bench.subjects import Bench, Part, Subject
from grace.engine.options import Options


def subject(case: Case, bench: Bench, peer: str) -> Subject:
    """The measured object for another implementation. ``peer``: the checkout of upstream GRACE."""
    if not distributed.is_initialized():  # both peers' PowerSGD reduces inside compress
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    return Upstream(case, bench, peer) if case.source == "upstream" else Hook(case, bench)


class Upstream:
    """A compressor and memory of upstream GRACE, `grace_dl.dist`, called as by its communicator."""

    state_bytes = 0

    def __init__(self, case: Case, bench: Bench, peer: str):
        if peer not in sys.path:
            sys.path.append(peer)
        module, name, arguments = UPSTREAM[case.params["name"]]
        try:
            compressor = getattr(importlib.import_module(f"grace_dl.dist.compressor.{module}"), name)
            memory = importlib.import_module(f"grace_dl.dist.memory.{case.params['memory']}")
        except ModuleNotFoundError as error:
            raise ValueError(f"{error}: --peer must name a checkout of upstream GRACE, which has grace_dl/") from error
        self.label, self.bench = case.label, bench
        self.compressor = compressor(**arguments)
        self.memory = getattr(memory, f"{case.params['memory'].capitalize()}Memory")()
        agreed = case.params["name"] == "powersgd"
        self.workers = 1 if agreed else WORKERS
        self.note = "its decode is wrong (~ of a uint8): only its time counts" if module == "onebit" else ""
        self.parts, self._dense, start = [], 0, 0
        for tensor, shape in shapes(bench.config, agreed).items():
            part = Part(tensor, shape, start)
            start += part.size
            # Upstream has no minimum size; with PowerSGD, a model's vectors are sent uncompressed.
            if bench.config.tensors == "flat" or part.size >= Options().min_numel:
                self.parts.append(part)
            else:
                self._dense += 4 * part.size
        self.turn = 0
        self._results: list[tuple[Any, Any]] = []
        self._decoded: list[list[tuple[Any, Any]]] = [[] for _ in self.parts]
        self.bytes = 0

    def several(self, repeated: bool) -> None:
        """Make all workers' payloads."""
        for rank in range(self.workers):
            if rank == 0 or not repeated:
                self.bench.refill(rank)
                self.encode()
            for kept, (payload, ctx) in zip(self._decoded, self._results, strict=True):
                kept.append(([array.clone() for array in payload], ctx))
        if repeated and self.workers > 1:
            self.note += "one payload stands for those of all workers"
        agreed = self.workers == 1
        for kept in self._decoded:
            payload, ctx = kept[0]
            sent = ctx[:2] if agreed and ctx is not None else payload
            self.bytes += sum(array.nbytes for array in sent)
        self.bytes += self._dense

    def refill(self) -> None:
        self.turn += 1
        self.bench.refill(self.turn)

    def encode(self) -> None:
        self._results = []
        for part in self.parts:
            x = part.of(self.bench.staging).view(part.shape)
            x = self.memory.compensate(x, part.name)
            payload, ctx = self.compressor.compress(x, part.name)
            self.memory.update(x, part.name, self.compressor, payload, ctx)
            self._results.append((payload, ctx))

    def release(self) -> None:
        pass  # encode updates its memory, and `several` takes the payload

    def look(self) -> None:
        pass

    commit = look  # its memory commits by itself

    def decode(self) -> None:
        for kept in self._decoded:
            self._mean(kept)

    def _mean(self, kept: list[tuple[Any, Any]]) -> Any:
        total = self.compressor.aggregate([self.compressor.decompress(payload, ctx) for payload, ctx in kept])
        return total / len(kept) if self.compressor.average else total

    def step(self) -> None:
        self.encode()
        for part, result in zip(self.parts, self._results, strict=True):
            part.of(self.bench.staging).view(part.shape).copy_(self._mean([result]))


class Hook:
    """torch's PowerSGD with error feedback and warm start. One call compresses and decodes: only `step` is timed."""

    workers, state_bytes, note = 1, 0, "compresses and decodes in one call"

    def __init__(self, case: Case, bench: Bench):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as module

        self.label, self.bench, self._hook = case.label, bench, module.powerSGD_hook
        rank = case.params["rank"]
        self._state = module.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        self._shapes = list(shapes(bench.config, True).values())
        self.turn = 0
        self.bytes = 0

    def several(self, repeated: bool) -> None:
        """Skip the steps that the hook sends uncompressed; count bytes as the hook does."""
        for _ in range(4):
            self.refill()
            self.step()
        self.bytes = 4 * int(self._state.compression_stats()[2])

    def refill(self) -> None:
        self.turn += 1
        self.bench.refill(self.turn)

    def step(self) -> None:
        self._hook(self._state, Bucket(self.bench.staging, self._shapes)).wait()

    def release(self) -> None:
        pass

    encode = decode = commit = look = step


class Bucket:
    """A stand-in for DDP's bucket, with what the hook uses: one bucket for the whole model."""

    def __init__(self, flat: torch.Tensor, shapes: list[tuple[int, ...]]):
        self._flat, self._shapes = flat, shapes

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        sizes = [math.prod(shape) for shape in self._shapes]
        return [part.view(shape) for part, shape in zip(self._flat.split(sizes), self._shapes, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True
