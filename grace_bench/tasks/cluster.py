"""Jobs for a cluster: writes a folder of them, scripts for torchrun, horovodrun and SLURM, and reads their results."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from grace_bench.tasks.plan import Job
from grace_bench.tasks.run import Row, events, rows_of

HEAD = """#!/usr/bin/env bash
# {what}
# Start it in this folder, which all hosts must see. What is done already is not done again; a job that fails is kept
# with its output. Afterwards: grace bench tasks --full --collect --out .
set -u
PYTHON=${{PYTHON:-python}}
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
"""

TORCHRUN = """# On every host: NNODES, NODE_RANK and MASTER_ADDR say which one it is, NPROC how many workers it has.
NNODES=${{NNODES:-1}}; NODE_RANK=${{NODE_RANK:-0}}; MASTER_ADDR=${{MASTER_ADDR:-127.0.0.1}}
NPROC=${{NPROC:-{workers}}}; PORT=${{MASTER_PORT:-29500}}
for job in jobs/torch-*.json; do
  out=results/$(basename "$job" .json); mkdir -p "$out"
  grep -q '"done"' "$out/0.jsonl" 2>/dev/null && continue
  rm -f "$out"/*.jsonl
  timeout "${{LIMIT:-7200}}" "$PYTHON" -m torch.distributed.run --nnodes "$NNODES" --node-rank "$NODE_RANK" \\
    --nproc-per-node "$NPROC" --master-addr "$MASTER_ADDR" --master-port "$PORT" \\
    -m grace_bench.tasks.worker "$job" "$out" >"$out/output-$NODE_RANK.txt" 2>&1 || echo "$job failed: $out" >&2
  PORT=$((PORT + 1))
done
"""

HOROVODRUN = """# On one host. HOSTS: as horovodrun's -H, such as host1:4,host2:4; NP: workers in all.
HOSTS=${{HOSTS:-localhost:{workers}}}; NP=${{NP:-{workers}}}
for job in jobs/keras-*.json; do
  out=results/$(basename "$job" .json); mkdir -p "$out"
  grep -q '"done"' "$out/0.jsonl" 2>/dev/null && continue
  rm -f "$out"/*.jsonl
  timeout "${{LIMIT:-7200}}" horovodrun --gloo -np "$NP" -H "$HOSTS" ${{OPTIONS:-}} \\
    "$PYTHON" -m grace_bench.tasks.worker "$job" "$out" >"$out/output.txt" 2>&1 || echo "$job failed: $out" >&2
done
"""

SLURM = """#!/usr/bin/env bash
#SBATCH --job-name=grace-tasks
#SBATCH --nodes={workers}
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
# One worker on each host; NPROC=4 sbatch --nodes={quarter} tasks.slurm for four. PyTorch's jobs first, then Keras's.
set -u
export NNODES=$SLURM_JOB_NUM_NODES NPROC=${{NPROC:-1}} MASTER_ADDR=$(scontrol show hostnames | head -n 1)
export NP=$((NNODES * NPROC)) HOSTS=$(scontrol show hostnames | sed "s/$/:$NPROC/" | paste -sd,)
srun bash -c 'NODE_RANK=$SLURM_NODEID bash torchrun.sh'
bash horovodrun.sh
"""


def write(jobs: Sequence[Job], folder: Path, workers: int) -> list[Path]:
    """Write ``jobs/`` and the scripts, replacing older ones; ``results/`` is kept. Returns the paths of the scripts."""
    shutil.rmtree(folder / "jobs", ignore_errors=True)
    (folder / "jobs").mkdir(parents=True)
    for number, job in enumerate(jobs):
        words = "".join(c if c.isalnum() else "-" for c in f"{job.task}-{job.method}")
        job.write(folder / "jobs" / f"{job.toolkit}-{number:03}-{words}.json")
    what = {"torchrun.sh": ("All of PyTorch's jobs.", TORCHRUN), "horovodrun.sh": ("All of Keras's jobs.", HOROVODRUN)}
    paths = []
    for name, (about, text) in what.items():
        paths.append(folder / name)
        paths[-1].write_text((HEAD + text).format(what=about, workers=workers))
    paths.append(folder / "tasks.slurm")
    paths[-1].write_text(SLURM.format(workers=workers, quarter=max(workers // 4, 1)))
    for path in paths:
        path.chmod(0o755)
    return paths


def collect(folder: Path) -> list[Row]:
    """The rows of all started jobs of a folder."""
    rows: list[Row] = []
    for file in sorted((folder / "jobs").glob("*.json")):
        job, out = Job.read(file), folder / "results" / file.stem
        if not out.exists():
            continue
        # The scripts may have run with another number of workers than planned.
        first = events(out / "0.jsonl")
        job = dataclasses.replace(job, workers=first[0]["size"] if first else job.workers)
        found = rows_of(job, [events(out / f"{rank}.jsonl") for rank in range(job.workers)])
        log = "".join(path.read_text(errors="replace")[-3000:] for path in sorted(out.glob("output*.txt")))
        rows += [{**row, "log": log} if "error" in row else row for row in found]
    return rows
