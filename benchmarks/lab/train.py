"""The program of every worker of a launch: runs the jobs of a plan, and writes lines of JSON about each.

python -m benchmarks.lab.train PLAN FOLDER, by horovodrun or torchrun.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lab.doors import DOORS
from benchmarks.lab.tasks import TASKS

WARM_UP = 3  # DDP rebuilds its buckets after the first step, torch's PowerSGD hook begins with the third
LEAST = 3  # fewest timed steps


class World:
    """The workers of this launch, over Horovod or torch.distributed."""

    def __init__(self) -> None:
        self.hvd: Any = None
        if "HOROVOD_RANK" in os.environ:
            import horovod.torch as hvd

            hvd.init()
            self.hvd, self.rank, self.size = hvd, hvd.rank(), hvd.size()
        else:
            dist.init_process_group("gloo")
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def agree(self, number: int) -> int:
        """Return worker 0's number on all workers; also a barrier."""
        value = torch.tensor([number if self.rank == 0 else 0])
        if self.hvd is None:
            dist.all_reduce(value)
            return int(value)
        return int(self.hvd.allreduce(value, op=self.hvd.Sum, name="agree"))


def traffic() -> tuple[int, int]:
    """Bytes sent and received by this host so far."""
    folder = Path("/sys/class/net/eth0/statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


def train(world: World, job: dict[str, Any], peer: str) -> dict[str, Any]:
    """Train a new model in one case, and return the measurements."""
    task = TASKS[job["model"]]()
    torch.manual_seed(job["seed"])
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), task.lr, momentum=task.momentum)
    case = job["case"]
    joined = DOORS[case["door"]](model, optimizer, dict(case["params"]), peer)
    seconds: list[float] = []
    losses: list[tuple[int, float]] = []

    def step(index: int) -> None:
        batch = task.batch(world.rank, index, task.batch_size)
        began = time.perf_counter()
        joined.optimizer.zero_grad()
        loss = task.loss(joined.model, batch)
        loss.backward()
        if joined.exchange is not None:
            joined.exchange()
        joined.optimizer.step()
        seconds.append(time.perf_counter() - began)

    warm, period = 0, case["period"]
    while warm < max(WARM_UP, period) or (joined.grc is not None and joined.grc.trying):
        step(warm)
        warm += 1
    # Slow cases run fewer steps if only their time matters.
    fit = int(job["budget"] / statistics.median(seconds[1:])) if job["budget"] else job["steps"]
    steps = world.agree(max(min(job["steps"], fit), LEAST))
    steps += -steps % period
    seconds.clear()
    before, report = traffic(), joined.grc and joined.grc.report()
    usage, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    paused = 0.0
    for index in range(steps):
        if job["decay"]:
            for group in joined.optimizer.param_groups:
                group["lr"] = task.falling_rate(index / steps)
        step(warm + index)
        if job["losses"] and (index + 1) % max(steps // job["losses"], 1) == 0 and world.rank == 0:
            pause = time.perf_counter()
            losses.append((warm + index + 1, task.held_out_loss(model)))
            paused += time.perf_counter() - pause
    wall = time.perf_counter() - began - paused
    used = resource.getrusage(resource.RUSAGE_SELF)
    world.agree(0)
    after, now = traffic(), joined.grc and joined.grc.report()
    if joined.finish is not None:
        joined.finish()
    found = {
        "rank": world.rank,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "seconds": statistics.median(seconds) if period == 1 else wall / steps,
        "seconds_all": [round(s, 5) for s in seconds[:200]],
        "seconds_mean": wall / steps,
        "cpu": (used.ru_utime - usage.ru_utime + used.ru_stime - usage.ru_stime) / steps,
        "kernel": (used.ru_stime - usage.ru_stime) / steps,
        "faults": (used.ru_minflt - usage.ru_minflt) / steps,
        "tx": (after[0] - before[0]) / steps,
        "rx": (after[1] - before[1]) / steps,
        "losses": losses,
        "loss": task.held_out_loss(model) if world.rank == 0 else None,
        "complete": steps >= job["steps"],
        "peak_rss": used.ru_maxrss * 1024,
    }
    if joined.grc:
        found["method"], found["trials"] = now.method, now.trials
        found["sent"] = (now.bytes_sent - report.bytes_sent) / steps
        found["received"] = (now.bytes_received - report.bytes_received) / steps
        found["times"] = {key: (value - report.times.get(key, 0.0)) / steps for key, value in now.times.items()}
    return found


def main() -> None:
    plan, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    warnings.filterwarnings("ignore", message=".*register_backward_hook.*")
    world = World()
    with (folder / f"{world.rank}.jsonl").open("a") as out:
        for index, job in enumerate(plan["jobs"]):
            out.write(json.dumps({"begins": index}) + "\n")
            out.flush()
            found = train(world, job, plan["peer"])
            out.write(json.dumps({"job": index, **found}) + "\n")
            out.flush()
            gc.collect()  # a model and its hooks refer to each other
            world.agree(0)
    print("done", flush=True)
    if world.hvd is None:
        dist.destroy_process_group()
    else:
        world.hvd.shutdown()
    # gloo's threads may outlive the group and abort during Python's shutdown, so skip it.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
