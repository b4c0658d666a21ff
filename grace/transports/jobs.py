"""Reads from a launcher's environment variables which job this process belongs to. Opens no connection."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

PORT = 29500
"""The port if no variable names a port or a job: torchrun's default."""
VARIABLES = {
    "torchrun": (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    ),
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_HOSTNAME"),
    "SLURM": (
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_STEP_ID"),
        *("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
        "SLURM_TASKS_PER_NODE",
    ),
    "Open MPI": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        *("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    ),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "network": ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
}
"""Names of environment variables, by launcher: those that `detect` reads, and those of the network."""


@dataclass(frozen=True)
class Job:
    """The workers that a launcher started, and this one among them."""

    launcher: str
    variables: tuple[str, ...]
    """The names of the variables that gave rank and size."""
    rank: int
    size: int
    local_rank: int
    local_size: int
    """Number of workers on this machine; 0: unknown."""
    address: str
    """The host of rank 0; empty for Horovod, which connects by itself."""
    port: int

    def __str__(self) -> str:
        return f"worker {self.rank} of {self.size}, from {self.launcher} ({', '.join(self.variables)})"


def expand_nodes(nodes: str) -> list[str]:
    """The hosts in a SLURM node list, in order: for ``n[001-003,7],m1`` n001, n002, n003, n7 and m1.

    Raises ValueError for text that is no such list.
    """
    found: list[str] = []
    for part in _split(nodes):
        found += _expand(part, nodes)
    return found


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each of SLURM's nodes: for ``2(x3),1`` 2, 2, 2 and 1. ValueError for other text."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{text!r} is no list of tasks per node, such as '2(x3),1'")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def detect(environ: Mapping[str, str]) -> Job | None:
    """The job that the variables of the first launcher found describe: torchrun, horovodrun, SLURM, Open MPI, or PMI.

    None without a launcher. Raises RuntimeError, naming variable and remedy, if a variable is missing or contradicts
    another one.
    """
    for read in (_torchrun, _horovodrun, _slurm, _open_mpi, _pmi):
        if (job := read(environ)) is not None:
            if not 0 <= job.rank < job.size:
                raise RuntimeError(f"{job.variables[0]}={job.rank} is no rank of {job.variables[1]}={job.size} workers")
            return job
    return None


def _torchrun(environ: Mapping[str, str]) -> Job | None:
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    if size == 1 < tasks:
        raise RuntimeError(
            f"WORLD_SIZE=1, but SLURM_STEP_NUM_TASKS={tasks}: each of {tasks} torchruns would train by itself. Give "
            "torchrun --nnodes, --node-rank and --master-addr, or start the script by srun without torchrun"
        )
    local_size = _number(environ, "LOCAL_WORLD_SIZE", 0)
    return Job(
        *("torchrun", ("RANK", "WORLD_SIZE"), rank, size, _number(environ, "LOCAL_RANK", 0), local_size),
        _address(environ, "torchrun", size, ""),
        _number(environ, "MASTER_PORT", PORT),
    )


def _horovodrun(environ: Mapping[str, str]) -> Job | None:
    if "HOROVOD_RANK" not in environ:
        return None
    rank, size = _number(environ, "HOROVOD_RANK"), _number(environ, "HOROVOD_SIZE")
    local = _number(environ, "HOROVOD_LOCAL_RANK", 0), _number(environ, "HOROVOD_LOCAL_SIZE", 0)
    return Job("horovodrun", ("HOROVOD_RANK", "HOROVOD_SIZE"), rank, size, *local, "", 0)


def _slurm(environ: Mapping[str, str]) -> Job | None:
    if "SLURM_PROCID" not in environ:
        return None
    if "SLURM_STEP_NUM_TASKS" in environ:
        key = "SLURM_STEP_NUM_TASKS"
    else:
        key = "SLURM_NTASKS"
        tasks = _number(environ, key, 1)
        if "SLURM_STEP_ID" not in environ:  # a batch script or a shell, which is one process of the allocation
            if tasks > 1:
                raise RuntimeError(
                    f"{key}={tasks} asks for {tasks} workers, but this process is none of srun's: start the script by "
                    f"srun, as `srun python train.py`"
                )
            return None
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, key)
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID", 0)
    tasks_here = tasks_per_node(layout) if layout else []
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    return Job(
        *("SLURM", ("SLURM_PROCID", key), rank, size, _number(environ, "SLURM_LOCALID", 0)),
        tasks_here[node] if node < len(tasks_here) else 0,
        _address(environ, "SLURM", size, nodes),
        _port(environ, "SLURM_JOB_ID"),
    )


def _open_mpi(environ: Mapping[str, str]) -> Job | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    rank, size = (_number(environ, name) for name in names)
    local_size = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 0)
    return Job(
        *("Open MPI", names, rank, size, _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0), local_size),
        "127.0.0.1"
        if local_size == size and "MASTER_ADDR" not in environ
        else _address(environ, "mpirun", size, environ.get("SLURM_JOB_NODELIST", "")),
        _port(environ, "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "SLURM_JOB_ID"),
    )


def _pmi(environ: Mapping[str, str]) -> Job | None:
    if "PMI_RANK" not in environ:
        return None
    rank, size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
    local_size = _number(environ, "MPI_LOCALNRANKS", 0)
    return Job(
        *("PMI", ("PMI_RANK", "PMI_SIZE"), rank, size, _number(environ, "MPI_LOCALRANKID", 0), local_size),
        "127.0.0.1"
        if local_size == size and "MASTER_ADDR" not in environ
        else _address(environ, "mpiexec", size, environ.get("SLURM_JOB_NODELIST", "")),
        _port(environ, "SLURM_JOB_ID"),
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdigit():
        problem = f"{name}={text!r} is no number" if text else f"{name} is not set"
        raise RuntimeError(f"{problem}, though this launcher sets it: check how the script was started")
    return int(text)


def _address(environ: Mapping[str, str], launcher: str, size: int, nodes: str) -> str:
    # Without the address of rank 0 workers cannot find each other. This host is no fallback: each host would choose
    # itself.
    if address := environ.get("MASTER_ADDR", ""):
        return address
    if nodes:
        return expand_nodes(nodes)[0]
    if size > 1:
        raise RuntimeError(
            f"{launcher} started {size} workers, and no variable names the host of rank 0: set MASTER_ADDR on all "
            "workers, as `mpirun -x MASTER_ADDR=host0` or `export MASTER_ADDR=host0` before srun"
        )
    return "127.0.0.1"


def _port(environ: Mapping[str, str], *jobs: str) -> int:
    # Two jobs on one machine need different ports, and all workers of a job need the same one.
    if "MASTER_PORT" in environ:
        return _number(environ, "MASTER_PORT")
    job = next((environ[name] for name in jobs if environ.get(name)), None)
    if job is None:
        return PORT
    return 10000 + (int(job) if job.isdigit() else zlib.crc32(job.encode())) % 20000


def _split(nodes: str) -> list[str]:
    # Split at commas outside brackets.
    parts, depth = [""], 0
    for character in nodes:
        depth += (character == "[") - (character == "]")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _expand(part: str, whole: str) -> list[str]:
    match = re.fullmatch(r"([^\[\],\s]*)\[([0-9,-]+)\](.*)", part)
    if match is None:
        if not re.fullmatch(r"[^\[\],\s]+", part):
            raise ValueError(f"{whole!r} is no list of nodes, such as 'n[001-003,7],m1'")
        return [part]
    prefix, ranges, rest = match.groups()
    ends = _expand(rest, whole) if rest else [""]
    found = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) < int(first):
            raise ValueError(f"{each!r} in {whole!r} is no range of nodes, such as '001-003'")
        for number in range(int(first), int(last or first) + 1):
            found += [f"{prefix}{number:0{len(first)}}{end}" for end in ends]
    return found
