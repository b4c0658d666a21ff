"""Thousands of events of local training on four workers, in PyTorch; weights also change outside its steps.

    python -m benchmarks.loops_local [--steps 2000] [--json FILE] [--seed N]

Each event is of a random kind, the same on all workers: inner steps; `finish`; weights written by all workers or one,
as averaged weights, the best ones or a loaded model, before a `finish` or between steps; buffers that move alone; and,
with a local training of its own, a worker that makes more steps than the others. One local training has a delay and two
fragments. The program fails unless:

- After each `finish` parameters, buffers, bases and momenta are bit-identical on all workers.
- Nothing is lost: the base less the mean residual equals the start plus all movements and writes, averaged over the
  workers. These are integers, so the sums are exact.
- Workers that do different things raise OutOfStep, all of them, within the time limit; and there are no other errors.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.loops import SIZE, TIMEOUT, differ, main

KINDS = {
    "steps": 10,
    "finish": 2,
    "written": 2,
    "written by one": 2,
    "written between steps": 1,
    "buffers": 1,
    "different": 1,
}
"""Relative frequency of each kind of event."""
SYNC = 4
CASES: dict[str, dict[str, Any]] = {
    "at once": {},
    "with a delay": {"fragments": 2, "fragment_sync_delay": 1},
}
"""By name: settings of local training. Its outer optimizer keeps what it gets: rate 1, no momentum."""
METHOD = {"compressor": "topk", "compress_ratio": 0.05, "min_numel": 0, "communicator": "allgather"}
SHAPES = {"matrix": (48, 64), "vector": (700,), "tail": (20,)}


class Trained:
    """Parameters and a buffer whose steps subtract integers; ``added`` sums this worker's changes."""

    def __init__(self, settings: dict[str, Any]):
        import torch

        import grace
        import grace.torch
        from grace.local import LocalSGD

        self.named = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        self.buffer = torch.zeros(5)
        self.optimizer = torch.optim.SGD(self.named.values(), 1.0)
        self.local = LocalSGD(grace.grace_from_params({**METHOD, "timeout": TIMEOUT}), SYNC, **settings)
        grace.torch.local(self.optimizer, self.local, self.named.items(), {"buffer": self.buffer}.items())
        self.local.settle()  # before anything is written
        self.added = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}

    def drawn(self, data: Any) -> dict[str, Any]:
        """An integer movement of each parameter."""
        import torch

        return {name: torch.randint(-8, 9, p.shape, generator=data).float() for name, p in self.named.items()}

    def step(self, data: Any) -> None:
        """An inner step. Without movements while an exchange is in flight: they would be dropped when it lands."""
        moves = self.drawn(data)
        for name, p in self.named.items():
            p.grad = moves[name] * (not self.local.in_flight)
            self.added[name] -= p.grad
        self.optimizer.step()

    def write(self, data: Any, here: bool) -> None:
        """Add integers to the parameters by hand, ``here`` or on other workers only."""
        moves = self.drawn(data)
        for name, p in self.named.items() if here else ():
            p.data += moves[name]
            self.added[name] += moves[name]


def lost(trained: Trained) -> float:
    """The largest difference between the base less the mean residual, and the workers' mean of ``added``."""
    import torch.distributed as dist

    state, worst = trained.local.state_dict(), 0.0
    for name, base in state["base"].items():
        total = trained.added[name].clone()
        for cell, residual in state["grace"]["tensors"].get(name, {}).items():
            if cell.endswith("residual"):
                total += residual.reshape(total.shape).double()
        dist.all_reduce(total)
        worst = max(worst, float((total / SIZE - base.double()).abs().max()))
    return worst


def work(folder: Path, rank: int, steps: int, seed: int) -> None:
    """Train as one worker, and write the findings."""
    import torch
    import torch.distributed as dist

    from grace.engine.handshake import OutOfStep

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), SIZE), rank=rank, world_size=SIZE)
    found: dict[str, Any] = {"different": 0, "lost": 0.0, "unexpected": [], "slowest": 0.0}
    cases = {name: Trained(settings) for name, settings in CASES.items()}
    draw = random.Random(seed)
    data = torch.Generator().manual_seed(seed * SIZE + rank)
    kinds: Counter[str] = Counter()
    for event in range(steps):
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
        name, victim, count, more = (
            draw.choice(list(CASES)),
            draw.randrange(SIZE),
            draw.randint(1, 6),
            draw.randint(1, 5),
        )
        trained = cases[name]
        kinds[kind] += 1
        begin = time.monotonic()
        try:
            if kind == "different":
                trained = Trained({})  # no delay: it would leave messages that nobody receives in the group
                for _ in range(count + more * (rank == victim)):
                    trained.step(data)
                trained.local.finish()
            elif kind == "steps":
                for _ in range(count):
                    trained.step(data)
                    trained.buffer += float(rank)
            elif kind == "written between steps":
                trained.write(data, here=not trained.local.in_flight)
            else:
                if kind == "buffers":
                    trained.local.finish()
                    trained.buffer += float(rank)
                elif kind != "finish":
                    trained.write(data, here=kind == "written" or rank == victim)
                trained.local.finish()
                state = trained.local.state_dict()
                arrays = [*trained.named.values(), trained.buffer, *state["base"].values(), *state["momentum"].values()]
                found["different"] += differ([each.detach() for each in arrays])
                found["lost"] = max(found["lost"], lost(trained))
        except OutOfStep as error:
            if kind != "different":
                found["unexpected"].append(f"event {event}, {kind}, {name}: {error}")
        else:
            if kind == "different":
                found["unexpected"].append(
                    f"event {event}: worker {victim} did something else, and {rank} has no error"
                )
        found["slowest"] = max(found["slowest"], time.monotonic() - begin)
    found["steps"] = dict(kinds)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main(work, __doc__ or "", 2000))
