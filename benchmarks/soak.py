"""Thousands of steps on four workers over every communicator, with randomly killed and restarted workers.

    python -m benchmarks.soak [--minutes 5] [--json FILE] [--seed N]

Each worker exchanges the same gradients through one Grace per communicator and accumulates the means as its weights. It
saves everything every SAVE steps with `grace.checkpoint`. Some workers are killed (SIGKILL) at random points of an
exchange or a checkpoint. The others must end with an error by themselves; then all restart from the last common
checkpoint. The program fails unless:

- Weights are bit-identical on all workers at every checkpoint, also when steps are repeated.
- Nothing is lost: the sum of all gradients, averaged over the workers, equals the weights plus the residuals. Gradients
  are integers, so this is exact for methods that do not round elements.
- No worker waits for a dead one for longer than its time limit.
- A worker's memory does not grow.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SIZE = 4
SAVE = 10
"""Steps between two checkpoints."""
TIMEOUT = 20.0
"""Seconds that a worker waits for the others."""
SHAPES = {"matrix": (48, 64), "vector": (3000,)}
PLANNED = "reduce_scatter(intra) compress(gpu) allgather*(inter) decompress(gpu) allgather(intra)"
CASES: dict[str, dict[str, Any]] = {
    "auto": {"compressor": "topk", "compress_ratio": 0.05},
    "allgather": {"compressor": "topk", "compress_ratio": 0.05, "communicator": "allgather"},
    "broadcast": {"compressor": "threshold", "threshold": 20.0, "communicator": "broadcast"},
    "allreduce": {"compressor": "randomk", "compress_ratio": 0.1, "communicator": "allreduce"},
    "allreduce, agreed": {"compressor": "gtopk", "compress_ratio": 0.05},
    "hierarchical": {"compressor": "topk", "compress_ratio": 0.05, "communicator": "hierarchical", "node_size": 2},
    "planned": {"compressor": "topk", "communicator": "planned", "option": PLANNED, "node_size": 2},
    "reducescatter": {"compressor": "topk", "compress_ratio": 0.05, "communicator": "reducescatter"},
    "twostage": {"compressor": "blockint", "bits": 8, "block_size": 64, "communicator": "twostage"},
    "allreduce, low rank": {"compressor": "powersgd", "compress_rank": 2},
}
ROUNDED = {"twostage": 1e-4, "allreduce, low rank": 1e-4}
"""Cases that round, and the tolerance of the sum, relative to its largest element."""


SETTLED = 2000  # steps in which libraries, and pages shared with the parent process, reach their size
WINDOW = 20  # checkpoints between two readings of the memory
MEASURED = 300.0  # length of a run in seconds from which memory must be measured


@dataclass
class Found:
    """The results of a run."""

    seconds: float = 0.0
    steps: int = 0
    """Training steps; each is one exchange per case."""
    executed: int = 0
    """Training steps, including those repeated after a restart."""
    checkpoints: int = 0
    compared: int = 0
    """Number of compared digests of weights, over all workers and restarts."""
    different: int = 0
    kills: int = 0
    restarts: int = 0
    hangs: int = 0
    """Workers that had to be killed for hanging."""
    slowest_end: float = 0.0
    """Seconds from a kill until the last worker had ended."""
    unexpected: list[str] = field(default_factory=list)
    """Workers that ended in an unexpected way."""
    lost: dict[str, float] = field(default_factory=dict)
    """For each case, the largest error of the sums, relative to the largest element; 0: exact."""
    memory: float = 0.0
    """MiB of the largest worker."""
    growth: float = 0.0
    """Growth in KiB per 1000 steps after `SETTLED` steps in the longest life, the median over workers. The largest rise
    between two readings is left out: the allocator takes 2 MiB once in some 10,000 steps."""
    longest: int = 0
    """Steps of the longest life."""

    @property
    def failures(self) -> list[str]:
        """Problems found."""
        bad = [f"{name} has lost {off:g}" for name, off in self.lost.items() if off > ROUNDED.get(name, 0.0)]
        bad += [f"{name} was not compared" for name in CASES if name not in self.lost]
        if self.different:
            bad.append(f"{self.different} digests differ")
        if self.hangs:
            bad.append(f"{self.hangs} workers hung")
        if self.seconds > MEASURED and not self.longest:
            bad.append(
                f"no life had {SETTLED + (2 * WINDOW + 1) * SAVE} steps: memory was not measured; run it for longer"
            )
        if self.growth > 256:
            bad.append(f"memory grows by {self.growth:.0f} KiB in 1000 steps")
        return bad + self.unexpected


# -- a worker ----------------------------------------------------------------------------------------------------------
def work(folder: Path, rank: int, life: int, seed: int) -> None:
    """Run one worker's life, from the last checkpoint to its end."""
    import torch
    import torch.distributed as dist

    from grace import checkpoint, grace_from_params

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / f"store-{life}"), SIZE), rank=rank, world_size=SIZE
    )
    graces, weights, sums = {}, {}, {}
    for name, params in CASES.items():
        grace = graces[name] = grace_from_params({"min_numel": 0, "timeout": TIMEOUT, **params}, "torch")
        shapes = shapes_of(name)
        grace.build({key: torch.zeros(shape) for key, shape in shapes.items()})
        scattered = grace.communicator.reduce_scatters
        weights[name] = {
            key: torch.zeros(shape[1:] if scattered else shape, dtype=torch.float64) for key, shape in shapes.items()
        }
        sums[name] = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in shapes.items()}
    step = resume(folder, rank, graces, weights, sums)
    log = (folder / f"log-{life}-{rank}.jsonl").open("w", buffering=1)
    log.write(json.dumps({"begin": step}) + "\n")
    page = os.sysconf("SC_PAGE_SIZE")
    while True:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * SIZE + rank)
        whole = {key: torch.randint(-8, 9, shape, generator=generator).float() for key, shape in SHAPES.items()}
        # The messages of all cases are in flight at once.
        for name, grace in graces.items():
            grace.launch({key: whole[key].reshape(shape) for key, shape in shapes_of(name).items()})
        for name, grace in graces.items():
            grace.land()
            for key, shape in shapes_of(name).items():
                weights[name][key] += grace.mean(key)
                sums[name][key] += whole[key].reshape(shape)
        step += 1
        if step % SAVE:
            continue
        digests = {name: digest(weights[name], graces[name]) for name in graces}
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
        log.write(json.dumps({"step": step, "digests": digests, "resident": resident}) + "\n")
        keep(folder / f"weights-{rank}", step, weights, sums)
        for name, grace in graces.items():
            checkpoint.save(grace, folder / "state" / name)
        stop = torch.tensor([int((folder / "stop").exists())])
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        if stop.item():
            break
    log.write(json.dumps({"lost": {name: missing(graces[name], weights[name], sums[name]) for name in graces}}) + "\n")
    log.close()


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a case's tensors: one row per worker for reduce-scatter."""
    if name != "reducescatter":
        return SHAPES
    return {key: (SIZE, shape[0] // SIZE, *shape[1:]) for key, shape in SHAPES.items()}


def digest(weights: dict[str, Any], grace: Any) -> str:
    """Digest of all weights, which should be equal on all workers; scattered ones are gathered first."""
    import torch
    import torch.distributed as dist

    found = hashlib.sha256()
    for array in weights.values():
        if grace.communicator.reduce_scatters:
            rows = [torch.empty_like(array) for _ in range(SIZE)]
            dist.all_gather(rows, array)
            array = torch.cat(rows)
        found.update(array.numpy().tobytes())
    return found.hexdigest()[:16]


def keep(folder: Path, step: int, weights: dict[str, Any], sums: dict[str, Any]) -> None:
    """Save the weights, as a training does beside GRACE's state; keep the last three files."""
    from grace import checkpoint

    folder.mkdir(exist_ok=True)
    part = folder / "part"
    part.write_bytes(checkpoint.to_bytes({"weights": weights, "sums": sums}))
    part.replace(folder / f"{step:09}")
    for old in sorted(folder.glob("0*"))[:-3]:
        old.unlink()


def resume(folder: Path, rank: int, graces: dict[str, Any], weights: dict[str, Any], sums: dict[str, Any]) -> int:
    """Resume from the last step that all workers have for all cases; 0: none yet."""
    import torch

    from grace import checkpoint

    common = set.intersection(*(set(checkpoint.steps(folder / "state" / name)) for name in graces))
    if not common:
        return 0
    step = max(common)
    saved = checkpoint.from_bytes((folder / f"weights-{rank}" / f"{step:09}").read_bytes())
    for name, grace in graces.items():
        checkpoint.load(grace, folder / "state" / name, step)
        for mine, theirs in ((weights, saved["weights"]), (sums, saved["sums"])):
            for key in mine[name]:
                mine[name][key].copy_(torch.from_numpy(theirs[name][key]))
    return step


def missing(grace: Any, weights: dict[str, Any], sums: dict[str, Any]) -> float:
    """The difference between all gradients and weights plus residuals, relative to the largest element."""
    import torch
    import torch.distributed as dist

    from grace.engine.reshard import parsed

    state, worst = grace.state_dict(), 0.0
    for key, total in sums.items():
        total = total.clone().reshape(-1)
        dist.all_reduce(total)
        total /= SIZE
        kept = torch.zeros_like(total)
        for cell, array in state["tensors"].get(key, {}).items():
            point, _, name = parsed(cell)
            if name != "residual":
                continue
            start, count = state["points"][key][point]
            kept[start : start + count] += array.double() / holders(grace, point)
        dist.all_reduce(kept)
        applied = weights[key].reshape(-1)
        if grace.communicator.reduce_scatters:
            rows = [torch.empty_like(applied) for _ in range(SIZE)]
            dist.all_gather(rows, applied)
            applied = torch.cat(rows)
        worst = max(worst, float((total - applied - kept).abs().max() / total.abs().max()))
    return worst


def holders(grace: Any, point: str) -> int:
    """The number of workers averaged at the compression point of this residual; its weight is the inverse."""
    if point == "server":  # the residual of a mean
        return 1
    return SIZE // (getattr(grace.communicator, "node_size", 0) or 1)


# -- the run -----------------------------------------------------------------------------------------------------------
def _child(folder: Path, rank: int, life: int, seed: int) -> None:
    sys.stdout = sys.stderr = (folder / f"output-{life}-{rank}.txt").open("w", buffering=1)
    warnings.simplefilter("ignore")
    try:
        work(folder, rank, life, seed)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # gloo's threads may abort a regular shutdown


def soak(seconds: float, folder: Path, seed: int = 0, rest: float = 0.6) -> Found:
    """Run for a number of seconds. ``rest``: the share of this time, at its end, without kills."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch  # noqa: F401 - once, so that a restart is a fork; nothing is run here, so there are no threads

    import grace.torch
    from grace.core.registry import compressors

    list(compressors)
    assert grace.torch
    context, rng, found, begin = multiprocessing.get_context("fork"), random.Random(seed), Found(), time.monotonic()
    end, calm = begin + seconds, begin + seconds * (1 - rest)
    life = 0
    while True:
        workers = [context.Process(target=_child, args=(folder, rank, life, seed)) for rank in range(SIZE)]
        for worker in workers:
            worker.start()
        pause = rng.uniform(2, max(6.0, seconds / 12))
        last = time.monotonic() + pause >= calm
        stop = end if last else time.monotonic() + pause
        while time.monotonic() < stop and all(worker.is_alive() for worker in workers):
            time.sleep(0.05)
        killed = set()
        if last:
            (folder / "stop").touch()
        elif all(worker.is_alive() for worker in workers):
            killed = set(rng.sample(range(SIZE), rng.choice((1, 1, 1, 2, SIZE))))
            for rank in killed:
                os.kill(workers[rank].pid or 0, signal.SIGKILL)
            found.kills += len(killed)
        at = time.monotonic()
        for rank, worker in enumerate(workers):
            worker.join(max(0.1, at + TIMEOUT + 10 - time.monotonic()))
            if worker.is_alive():
                found.hangs += 1
                worker.kill()
                worker.join()
            wanted = -signal.SIGKILL if rank in killed else 0 if last else 1
            if worker.exitcode != wanted or (not last and not killed):
                said = (folder / f"output-{life}-{rank}.txt").read_text()[-600:]
                found.unexpected.append(f"worker {rank} of life {life} ended with {worker.exitcode}: {said}")
        if killed:
            found.slowest_end = max(found.slowest_end, time.monotonic() - at)
        if last or found.unexpected or found.hangs:
            break
        life += 1
    found.restarts, found.seconds = life, time.monotonic() - begin
    _read(folder, life + 1, found)
    return found


def _read(folder: Path, lives: int, found: Found) -> None:
    digests: dict[tuple[int, str], set[str]] = {}
    for life in range(lives):
        slopes, reached = [], 0
        for rank in range(SIZE):
            path = folder / f"log-{life}-{rank}.jsonl"
            # The last line may be incomplete.
            rows = (
                [json.loads(text) for text in path.read_text().splitlines(True) if text.endswith("\n")]
                if path.exists()
                else []
            )
            saves = [row for row in rows if "step" in row]
            for row in saves:
                for name, value in row["digests"].items():
                    digests.setdefault((row["step"], name), set()).add(value)
                    found.compared += 1
                found.memory = max(found.memory, row["resident"] / 2**20)
            for row in rows:
                for name, off in row.get("lost", {}).items():
                    found.lost[name] = max(found.lost.get(name, 0.0), off)
            if saves:
                reached = max(reached, saves[-1]["step"] - rows[0]["begin"])
                found.steps = max(found.steps, saves[-1]["step"])
                late = [row for row in saves if row["step"] - rows[0]["begin"] > SETTLED]
                readings = late[::WINDOW]
                if len(readings) > 2:
                    rises = [(b["resident"] - a["resident"]) / 1024 for a, b in itertools.pairwise(readings)]
                    kept = (sum(rises) - max(rises)) / (len(rises) - 1)
                    slopes.append(kept * 1000 / (WINDOW * SAVE))
        found.executed += reached
        if reached > found.longest and slopes:
            found.longest, found.growth = reached, statistics.median(slopes)
    found.checkpoints = len({step for step, _ in digests})
    found.different = sum(len(values) > 1 for values in digests.values())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    args = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="grace-soak-"))
    try:
        found = soak(60 * args.minutes, folder, args.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    stream = io.StringIO()
    for name, value in asdict(found).items():
        print(f"{name:<12} {value}", file=stream)
    print(stream.getvalue(), end="")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(asdict(found), indent=1) + "\n")
    for failure in found.failures:
        print(f"FAILED: {failure}")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
