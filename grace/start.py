"""`grace.init`: joins the workers that a launcher started."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import socket
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from grace.backends import get_backend
from grace.core import Transport
from grace.transports import get_transport
from grace.transports.jobs import Job, detect
from grace.transports.launched import initialised, refuse_launched


def init(backend: str | None = None, timeout: float = 1800) -> Transport:
    """Join the workers that a launcher started; returns the transport for `grace_from_params(params, transport)`.

    Uses the first that it finds of: an initialised torch.distributed or Horovod; variables of torchrun; of horovodrun;
    Ray Train; Open MPI; MVAPICH2; PALS; PMI (MPICH, Intel MPI); SLURM (srun); else this worker is alone. So torchrun
    takes precedence over an srun that started it. Without an initialised group it calls
    ``torch.distributed.init_process_group`` (under horovodrun: ``hvd.init()``) and sets torchrun's variables, of which
    ``LOCAL_RANK`` is this worker's number on its machine; when Python exits, it destroys that group unless the script
    has done so. With CUDA it selects the GPU of the local rank. Worker 0 prints one line to stderr: the launcher, and
    why.

    ``backend``: of torch.distributed; default "gloo", with CUDA "cpu:gloo,cuda:nccl". ``timeout``: seconds to wait for
    the other workers, and the group's timeout. Rank 0 listens on ``MASTER_ADDR``, by default the first host of SLURM's
    node list, and on ``MASTER_PORT``, by default 10000 + job ID mod 20000.

    Raises RuntimeError, naming the remedy, if a launcher's variables ask for several workers that cannot be joined;
    it never returns a world of one worker instead.
    """
    if (name := initialised()) is not None:
        transport = get_transport(name)
        if transport.size == 1:
            _refuse_alone(f"{name} is initialised with one worker")
        return _told(transport, f"{'torch.distributed' if name == 'torch' else 'Horovod'} is initialised already")
    job = detect(os.environ)
    if (ray := _ray()) is not None and (job is None or job.launcher not in ("torchrun", "horovodrun")):
        if ray > 1:
            raise RuntimeError(
                f"Ray Train started {ray} workers without a process group: use ray.train.torch.TorchTrainer, and call "
                "grace.init() inside its training function"
            )
        return _told(get_transport("local"), "Ray Train has one worker")
    if job is None:
        refuse_launched()
        return _told(get_transport("local"), "no launcher's variables are set")
    if job.launcher == "horovodrun":
        importlib.import_module("horovod.tensorflow" if "tensorflow" in sys.modules else "horovod.torch").init()
        _set_local_rank(job.local_rank)
        return _told(get_transport("horovod"), f"{job.launcher} ({', '.join(job.variables)})")
    if job.size == 1 and job.launcher != "torchrun":  # scripts for torchrun may need a group, as DDP does
        _set_local_rank(job.local_rank)
        return _told(get_transport("local"), f"{job.launcher} started one worker ({', '.join(job.variables)})")
    return _join(job, backend, timeout)


def _join(job: Job, backend: str | None, timeout: float) -> Transport:
    import torch
    import torch.distributed as dist

    _set_local_rank(job.local_rank)
    own = {"RANK": job.rank, "WORLD_SIZE": job.size, "MASTER_ADDR": job.address, "MASTER_PORT": job.port}
    os.environ.update({key: str(value) for key, value in own.items()})
    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{job.address}:{job.port}" if job.launcher != "torchrun" else "env://",
            rank=job.rank,
            world_size=job.size,
            timeout=timedelta(seconds=timeout),
        )
    except Exception as error:
        raise RuntimeError(
            f"{job}: the workers did not meet at {job.address}:{job.port} ({error}). Check that all of them can reach "
            "it, or set MASTER_ADDR and MASTER_PORT; GLOO_SOCKET_IFNAME names the network interface"
        ) from error
    atexit.register(_leave, weakref.ref(dist.group.WORLD))
    _lay_out(job, get_transport("torch"))
    return _told(
        get_transport("torch"), f"{job.launcher} ({', '.join(job.variables)}), met at {job.address}:{job.port}"
    )


def _leave(group: Callable[[], Any]) -> None:
    import torch.distributed as dist

    if dist.is_initialized() and dist.group.WORLD is group():
        dist.destroy_process_group()


def _set_local_rank(rank: int) -> None:
    # Sets the variable, even if a batch script exported another value, and selects the GPU. Does nothing if the rank is
    # -1, which means unknown.
    if rank < 0:
        return
    os.environ["LOCAL_RANK"] = str(rank)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and rank < torch.cuda.device_count():
        torch.cuda.set_device(rank)


def _lay_out(job: Job, transport: Transport) -> None:
    # Set torchrun's variables that say which workers share a machine. Other launchers may assign ranks to machines in
    # another order than torchrun, as srun does with --distribution=cyclic: then GRACE treats all workers as if they
    # were on one machine. If a launcher sets no local ranks, they are derived from the hosts.
    if job.launcher == "torchrun" and job.local_rank >= 0 and job.local_size > 0:
        return
    mine = [job.local_rank, job.local_size, socket.gethostname()]
    told = [json.loads(text) for text in exchange(transport, json.dumps(mine))]
    hosts = [host for *_, host in told]
    if any(rank < 0 or not size for rank, size, _ in told):
        told = [[hosts[:rank].count(host), hosts.count(host), host] for rank, host in enumerate(hosts)]
        _set_local_rank(told[job.rank][0])
    size = told[0][1]
    blocks = job.size % size == 0 and [each[:2] for each in told] == [[rank % size, size] for rank in range(job.size)]
    os.environ["LOCAL_WORLD_SIZE"] = str(size if blocks else job.size)
    os.environ["GROUP_WORLD_SIZE"] = str(job.size // size if blocks else 1)


def exchange(transport: Transport, text: str) -> list[str]:
    """Return every worker's text, in rank order; usable before any tensor is known."""
    if transport.size == 1:
        return [text]
    import torch

    gloo = torch.distributed.is_initialized() and "gloo" in torch.distributed.get_backend_config()
    cpu = gloo or not torch.cuda.is_available()
    device = "cpu" if cpu else f"cuda:{torch.cuda.current_device()}"
    return transport.bind(get_backend("torch", device)).exchange(text)


def _ray() -> int | None:
    """The number of workers of the Ray Train job that this process belongs to; None outside such a job."""
    if (train := sys.modules.get("ray.train")) is None:
        return None
    try:
        return int(train.get_context().get_world_size())
    except Exception:  # outside a training function; the error's type depends on Ray's version
        return None


def _refuse_alone(what: str) -> None:
    job = detect(os.environ)
    if job is not None and job.size > 1:
        raise RuntimeError(
            f"{what}, but {job.variables[1]}={job.size} asks for {job.size}: initialise it with all workers, or leave "
            "it to grace.init()"
        )


def _told(transport: Transport, why: str) -> Transport:
    rank: Any = transport.rank
    if rank == 0:
        print(f"grace.init: worker 0 of {transport.size}: {why}", file=sys.stderr, flush=True)
    return transport
