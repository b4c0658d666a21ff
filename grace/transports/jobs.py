"""Reads from a launcher's environment variables which job this process belongs to. Opens no connection."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
        *("SLURM_TASKS_PER_NODE", "SLURM_PTY_PORT", "SLURM_TASK_PID"),
    ),
    "Open MPI": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        *("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    ),
    "MVAPICH2": (
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
    "PALS": ("PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_APID"),
    "PMI": (
        *("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        "PBS_JOBID",
    ),
    "network": ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
}
"""Names of environment variables, by launcher: those that `detect` reads, and those of the network."""


@dataclass(frozen=True)
class Job:
    """The workers that a launcher started, and the place of this process among them."""

    launcher: str
    variables: tuple[str, ...]
    """The names of the variables that gave rank and size."""
    rank: int
    size: int
    local_rank: int
    """This worker's number on its machine; -1: unknown."""
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
    """The job that the variables of the innermost launcher describe; None without a launcher.

    One launcher may start another, whose workers inherit all variables: mpirun in a SLURM batch script, torchrun in a
    step of srun. So SLURM is read last. Raises RuntimeError, naming variable and remedy, if a variable is missing
    or contradicts another one, or if several processes of a launcher are each a world of one.
    """
    job = next((job for read in _READERS if (job := read(environ)) is not None), None)
    if job is None:
        if "WORLD_SIZE" in environ:
            _number(environ, "RANK")  # raises
        return None
    rank, size = job.variables
    if not 0 <= job.rank < job.size:
        raise RuntimeError(f"{rank}={job.rank} is no rank of {size}={job.size} workers")
    if job.launcher != "torchrun" and _number(environ, "WORLD_SIZE", job.size) != job.size:
        raise RuntimeError(f"WORLD_SIZE={environ['WORLD_SIZE']}, but {size}={job.size}: unset the wrong one")
    for outer_rank, outer_size in _OUTER:
        workers, torchrun = _number(environ, outer_size, 1), job.launcher == "torchrun"
        if job.size == 1 < workers:
            what, remedy = "processes", "Start all workers by a single one"
            if torchrun:
                what = "torchruns"
                remedy = "Give torchrun --nnodes, --node-rank and --master-addr, or start the script without torchrun"
            raise RuntimeError(
                f"{size}=1, but {outer_size}={workers}: each of {workers} {what} would train by itself. {remedy}"
            )
        own = torchrun and not environ.keys() & {"TORCHELASTIC_RUN_ID", "GROUP_RANK"} and job.size == workers > 1
        if own and environ.get(outer_rank, environ["RANK"]) != environ["RANK"]:
            raise RuntimeError(
                f"RANK={job.rank}, but {outer_rank}={environ[outer_rank]}: a script that exports RANK before it starts "
                "the workers gives all of them the same one. Unset RANK, WORLD_SIZE and LOCAL_RANK"
            )
    return job


def promised(environ: Mapping[str, str]) -> dict[str, int]:
    """The numbers of workers that launchers state, by environment variable."""
    names = ["WORLD_SIZE", "HOROVOD_SIZE", *(size for _, size in _OUTER)]
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" not in environ:
        names.append("SLURM_NTASKS")
    return {name: int(environ[name]) for name in names if environ.get(name, "").isdigit()}


_OUTER = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
# Rank and size of launchers whose processes may be launchers themselves.


def _torchrun(environ: Mapping[str, str]) -> Job | None:
    if "RANK" not in environ:  # WORLD_SIZE alone is often exported for a script that reads SLURM_PROCID
        return None
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_size = _number(environ, "LOCAL_WORLD_SIZE", 0)
    return Job(
        *("torchrun", ("RANK", "WORLD_SIZE"), rank, size, _number(environ, "LOCAL_RANK", -1), local_size),
        _address(environ, "torchrun", size, ""),
        _number(environ, "MASTER_PORT", PORT),
    )


def _horovodrun(environ: Mapping[str, str]) -> Job | None:
    if "HOROVOD_RANK" not in environ:
        return None
    rank, size = _number(environ, "HOROVOD_RANK"), _number(environ, "HOROVOD_SIZE")
    local = _number(environ, "HOROVOD_LOCAL_RANK", -1), _number(environ, "HOROVOD_LOCAL_SIZE", 0)
    return Job("horovodrun", ("HOROVOD_RANK", "HOROVOD_SIZE"), rank, size, *local, "", 0)


def _open_mpi(environ: Mapping[str, str]) -> Job | None:
    return _mpi(
        *(environ, "Open MPI", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
        *(("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
        ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    )


def _mvapich2(environ: Mapping[str, str]) -> Job | None:
    return _mpi(
        *(environ, "MVAPICH2", ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")),
        *(("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    )


def _pals(environ: Mapping[str, str]) -> Job | None:
    return _mpi(environ, "PALS", ("PALS_RANKID", "PMI_SIZE"), _PMI_LOCAL_RANK, _PMI_LOCAL_SIZE, ("PALS_APID",))


def _pmi(environ: Mapping[str, str]) -> Job | None:
    # srun --mpi=pmi2 sets these variables, too, but SLURM's own variables tell more.
    if environ.get("PMI_RANK") == environ.get("SLURM_PROCID") and environ.get("PMI_SIZE") == environ.get(
        "SLURM_STEP_NUM_TASKS"
    ):
        return None
    return _mpi(environ, "PMI", ("PMI_RANK", "PMI_SIZE"), _PMI_LOCAL_RANK, _PMI_LOCAL_SIZE)


_PMI_LOCAL_RANK = ("PALS_LOCAL_RANKID", "MPI_LOCALRANKID", "PMI_LOCAL_RANK")
_PMI_LOCAL_SIZE = ("PALS_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")


def _mpi(
    environ: Mapping[str, str],
    launcher: str,
    names: tuple[str, str],
    local_ranks: Sequence[str],
    local_sizes: Sequence[str],
    jobs: Sequence[str] = (),
) -> Job | None:
    # Reads the job of an MPI launcher. ``local_ranks``, ``local_sizes``, ``jobs``: names of variables, of which any may
    # be set; the first that is set counts.
    if names[0] not in environ:
        return None
    rank, size = (_number(environ, name) for name in names)
    local_rank = next((_number(environ, name) for name in local_ranks if name in environ), -1)
    local_size = next((_number(environ, name) for name in local_sizes if name in environ), 0)
    return Job(
        *(launcher, names, rank, size, local_rank, local_size),
        "127.0.0.1"
        if local_size == size and "MASTER_ADDR" not in environ
        else _address(environ, "mpirun", size, environ.get("SLURM_JOB_NODELIST", "")),
        _port(environ, *jobs, "SLURM_JOB_ID", "PBS_JOBID"),
    )


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
    if size > 1 and environ.get("SLURM_PTY_PORT") and _has_terminal(environ.get("SLURM_TASK_PID", "")):
        raise RuntimeError(
            f"{key}={size} asks for {size} workers, but `srun --pty` gives only task 0 a terminal, and the shells of "
            "other tasks end at once: start the script by `srun python train.py` without --pty, or ask for one task, "
            "`srun --pty --ntasks=1`"
        )
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID", 0)
    tasks_here = tasks_per_node(layout) if layout else []
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    return Job(
        *("SLURM", ("SLURM_PROCID", key), rank, size, _number(environ, "SLURM_LOCALID", -1)),
        tasks_here[node] if node < len(tasks_here) else 0,
        _address(environ, "SLURM", size, nodes),
        _port(environ, "SLURM_JOB_ID"),
    )


_READERS = (_torchrun, _horovodrun, _open_mpi, _mvapich2, _pals, _pmi, _slurm)


def _has_terminal(task: str) -> bool:
    # Returns whether srun's task may have a terminal. SLURM_PTY_PORT does not tell: tasks that are started in a shell
    # with a terminal inherit it.
    try:
        return Path(f"/proc/{int(task)}/stat").read_text().rpartition(")")[2].split()[4] != "0"
    except (OSError, ValueError, IndexError):
        return True


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdigit():
        problem = f"{name}={text!r} is no number" if text else f"{name} is not set"
        raise RuntimeError(f"{problem}, though this launcher sets it: check how the script was started")
    return int(text)


def _address(environ: Mapping[str, str], launcher: str, size: int, nodes: str) -> str:
    # Without the address of rank 0 workers cannot find each other. This host is no fallback, because each host would
    # choose itself.
    if address := environ.get("MASTER_ADDR", ""):
        return address
    if nodes:
        return expand_nodes(nodes)[0]
    if size > 1:
        raise RuntimeError(
            f"{launcher} started {size} workers, and no variable names the host of rank 0: set MASTER_ADDR on all "
            "workers, as `mpirun -x MASTER_ADDR=host0`, `mpiexec -genv MASTER_ADDR host0` (MPICH) or `export "
            "MASTER_ADDR=host0` before srun"
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
