"""`grace.init`: which workers a launcher's variables describe. Environments as they were recorded, shortened."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch import free_port

import grace
from grace import start
from grace.transports.jobs import VARIABLES, detect, expand_nodes, promised, tasks_per_node
from grace.transports.launched import LAUNCHED, refuse_launched

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29501",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_JOB_ID": "4123457",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "gpu[007-009]",
    "SLURM_STEP_NODELIST": "gpu[007-009]",
    "SLURM_TASKS_PER_NODE": "2(x3)",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
}
BATCH = {key: SRUN[key] for key in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE")}
BATCH |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "2871721985",
}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "8", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
PALS = {
    "PALS_RANKID": "5",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "4",
    "PALS_APID": "b2a5f6c8-0de5-4d3d-b24f-5a4f4d5d9f52",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PBS_JOBID": "3108.polaris-pbs-01",
}
# Variables that srun sets for Open MPI's daemons (one per further machine), and for Hydra's proxies (one per machine).
DAEMON = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "gpu008"}
PROXY = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0"}
ON_TWO = {**MPIRUN, "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
SHELL = {**SRUN, "SLURM_PROCID": "0", "SLURM_PTY_PORT": "41021", "SLURM_PTY_WIN_COL": "120", "SLURM_PTY_WIN_ROW": "40"}
HOROVODRUN = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}


@pytest.fixture
def environ(monkeypatch):
    """No launcher's variables are set; returns a function that sets some."""
    for name in (*(name for names in VARIABLES.values() for name in names), *LAUNCHED):
        monkeypatch.setenv(name, "")  # so that changes by `grace.init` are undone, too
        monkeypatch.delenv(name)
    return lambda found: [monkeypatch.setenv(key, value) for key, value in found.items()]


@pytest.mark.parametrize(
    "text, nodes",
    [
        ("n[001-003,7],m1", ["n001", "n002", "n003", "n7", "m1"]),
        ("host", ["host"]),
        ("a,b", ["a", "b"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[08,09]-ib", ["r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
    ],
)
def test_a_node_list_is_expanded_in_order(text, nodes):
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "n[3-1]", "n[1-", "n[a-b]", "n[1],,m", "n[]"])
def test_what_is_no_node_list_is_refused(text):
    with pytest.raises(ValueError, match=r"is no (list|range) of nodes"):
        expand_nodes(text)


def test_tasks_per_node():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="no list of tasks per node"):
        tasks_per_node("2x3")


@pytest.mark.parametrize(
    "found, launcher, numbers, address, port",
    [
        (TORCHRUN, "torchrun", (3, 4, 1, 2), "host0", 29501),
        (SRUN, "SLURM", (5, 6, 1, 2), "gpu007", 10000 + 4123457 % 20000),
        ({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}, "SLURM", (5, 6, 1, 2), "10.0.0.1", 5),
        (MPIRUN, "Open MPI", (1, 2, 1, 2), "127.0.0.1", 10000 + 2871721985 % 20000),
        ({**MPICH, "MASTER_ADDR": "host0"}, "PMI", (0, 8, 0, 4), "host0", 29500),
        (HOROVODRUN, "horovodrun", (1, 2, 1, 2), "", 0),
        ({**SRUN, **TORCHRUN}, "torchrun", (3, 4, 1, 2), "host0", 29501),  # srun torchrun
        ({**BATCH, **HOROVODRUN}, "horovodrun", (1, 2, 1, 2), "", 0),  # horovodrun in a batch script
        ({**BATCH, **MPIRUN, "SLURM_NTASKS": "1"}, "Open MPI", (1, 2, 1, 2), "127.0.0.1", 10000 + 2871721985 % 20000),
        ({**BATCH, **MPIRUN}, "Open MPI", (1, 2, 1, 2), "127.0.0.1", 10000 + 2871721985 % 20000),
        ({**DAEMON, **ON_TWO}, "Open MPI", (2, 4, 0, 2), "gpu007", 10000 + 2871721985 % 20000),
        ({**PROXY, **MPICH, "PMI_RANK": "5"}, "PMI", (5, 8, 0, 4), "gpu007", 10000 + 4123457 % 20000),
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "6"}, "SLURM", (5, 6, 1, 2), "gpu007", 10000 + 4123457 % 20000),  # pmi2
        ({**BATCH, **MVAPICH}, "MVAPICH2", (3, 4, 1, 2), "gpu007", 10000 + 4123457 % 20000),
        ({**PALS, "MASTER_ADDR": "x1", "MASTER_PORT": "5"}, "PALS", (5, 8, 1, 4), "x1", 5),
        ({**SRUN, **PALS}, "PALS", (5, 8, 1, 4), "gpu007", 10000 + zlib.crc32(PALS["PALS_APID"].encode()) % 20000),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "n"}, "PMI", (1, 2, -1, 0), "n", 29500),
        ({**SRUN, "WORLD_SIZE": "6"}, "SLURM", (5, 6, 1, 2), "gpu007", 10000 + 4123457 % 20000),
        ({**SHELL, **TORCHRUN}, "torchrun", (3, 4, 1, 2), "host0", 29501),
        ({**SRUN, **TORCHRUN, "WORLD_SIZE": "6"}, "torchrun", (3, 6, 1, 2), "host0", 29501),
    ],
)
def test_a_recorded_environment(found, launcher, numbers, address, port):
    job = detect(found)
    assert (job.launcher, (job.rank, job.size, job.local_rank, job.local_size)) == (launcher, numbers)
    assert (job.address, job.port) == (address, port)


def test_no_launcher():
    assert detect({}) is None
    assert detect({**BATCH, "SLURM_NTASKS": "1"}) is None


def test_an_interactive_shell_of_srun_is_known_by_its_terminal():
    # A shell, and a step started in it that inherits its variables: only the shell has a terminal.
    shell, terminal = pty.fork()
    if shell == 0:
        os.execvp("sleep", ["sleep", "60"])
    step = subprocess.Popen(["sleep", "60"], start_new_session=True)
    while b"sleep" not in Path(f"/proc/{shell}/cmdline").read_bytes():  # it runs sleep once it has its terminal
        time.sleep(0.01)
    try:
        with pytest.raises(RuntimeError, match=r"srun --pty` gives only task 0 a terminal"):
            detect({**SHELL, "SLURM_TASK_PID": str(shell)})
        assert detect({**SHELL, "SLURM_TASK_PID": str(step.pid)}).size == 6
        assert detect({**SHELL, "SLURM_STEP_NUM_TASKS": "1", "SLURM_TASK_PID": str(shell)}).size == 1
    finally:
        os.kill(shell, signal.SIGKILL)
        os.waitpid(shell, 0)
        os.close(terminal)
        step.kill()
        step.wait()


@pytest.mark.parametrize(
    "found, message",
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "set MASTER_ADDR on all workers"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 is no rank of WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "x"}, "RANK='x' is no number"),
        ({**SRUN, "WORLD_SIZE": "1", "RANK": "0"}, "each of 6 torchruns would train by itself"),
        (BATCH, "this process is none of srun's"),
        ({key: value for key, value in SRUN.items() if "NODELIST" not in key}, "no variable names the host of rank 0"),
        (MPICH, "mpirun -x MASTER_ADDR=host0"),
        ({**PALS, "PMI_SIZE": ""}, "PMI_SIZE is not set"),
        (SHELL, "SLURM_STEP_NUM_TASKS=6 asks for 6 workers, but `srun --pty` gives only task 0 a terminal"),
        (
            {**MPIRUN, "WORLD_SIZE": "1", "RANK": "0"},
            "OMPI_COMM_WORLD_SIZE=2: each of 2 torchruns would train by itself",
        ),
        (
            {**SRUN, "PMI_RANK": "0", "PMI_SIZE": "1"},
            "SLURM_STEP_NUM_TASKS=6: each of 6 processes would train by itself",
        ),
        ({**SRUN, "WORLD_SIZE": "3"}, "WORLD_SIZE=3, but SLURM_STEP_NUM_TASKS=6: unset the wrong one"),
        (
            {**SRUN, "WORLD_SIZE": "6", "RANK": "0", "MASTER_ADDR": "n"},
            "RANK=0, but SLURM_PROCID=5: a script that exports RANK",
        ),
        (
            {**MPIRUN, "WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "n"},
            "RANK=0, but OMPI_COMM_WORLD_RANK=1: a script that exports RANK",
        ),
    ],
)
def test_a_world_of_one_never_takes_the_place_of_several(found, message, environ):
    environ(found)
    with pytest.raises(RuntimeError, match=message):
        grace.init()


def test_a_group_of_one_where_srun_started_six(environ, monkeypatch):
    environ(SRUN)
    monkeypatch.setattr(start, "initialised", lambda: "local")
    with pytest.raises(RuntimeError, match="initialised with one worker, but SLURM_STEP_NUM_TASKS=6 asks for 6"):
        grace.init()


@pytest.mark.parametrize("ends", ["", "dist.destroy_process_group()"], ids=["left", "destroyed"])
def test_a_group_that_init_made_is_gone_when_python_exits(ends):
    pytest.importorskip("torch")
    script = (
        "import atexit, weakref, torch.distributed as dist\n"
        "atexit.register(lambda: print('initialised', dist.is_initialized()))\n"  # runs last
        "import grace; print('workers', grace.init().size)\n"
        f"group = weakref.ref(dist.group.WORLD)\n{ends}\n"
        "print('held', group() is not None)\n"
    )
    environ = {**os.environ, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environ["MASTER_PORT"] = str(free_port())
    ended = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n") == ["workers 1", f"held {not ends}", "initialised False", ""], ended


def test_one_worker_says_why(environ, capsys):
    transport = grace.init()
    assert transport.size == 1
    assert capsys.readouterr().err == "grace.init: worker 0 of 1: no launcher's variables are set\n"
    environ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    assert grace.init().size == 1
    assert "SLURM started one worker (SLURM_PROCID, SLURM_STEP_NUM_TASKS)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "found, message",
    [
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2 asks for 2 workers"),
        ({"MV2_COMM_WORLD_SIZE": "4"}, "MV2_COMM_WORLD_SIZE=4 asks for 4 workers"),
        ({**BATCH, "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2 asks for 2 workers"),
        (BATCH, "SLURM_NTASKS=6 asks for 6 workers"),
    ],
)
def test_a_size_without_a_group_is_refused(found, message, environ):
    environ(found)
    with pytest.raises(RuntimeError, match=message):
        refuse_launched()


@pytest.mark.parametrize("inner", [{"OMPI_COMM_WORLD_SIZE": "1"}, {"SLURM_STEP_NUM_TASKS": "1"}, {"WORLD_SIZE": "1"}])
def test_one_worker_in_a_batch_script_of_several_tasks_may_be_alone(inner, environ):
    environ({**BATCH, **inner})
    refuse_launched()


@pytest.mark.parametrize("size", [1, 2])
def test_ray_train_by_a_stand_in(size, environ, monkeypatch, capsys):
    context = SimpleNamespace(get_world_size=lambda: size)
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: context))
    if size == 1:
        assert grace.init().size == 1
        assert "Ray Train has one worker" in capsys.readouterr().err
    else:
        with pytest.raises(RuntimeError, match=r"use ray\.train\.torch\.TorchTrainer"):
            grace.init()


def test_doctor_shows_variables_and_compares_workers(environ, capsys):
    pytest.importorskip("typer", reason="the grace command needs the extra [cli]")
    from typer.testing import CliRunner

    from grace.cli import cluster
    from grace.cli.app import app

    environ({"GLOO_SOCKET_IFNAME": "eth0"})
    shown = CliRunner().invoke(app, ["doctor", "--cluster"], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "GLOO_SOCKET_IFNAME" in shown.stdout
    assert "worker 0 of 1" in shown.stdout
    environ(BATCH)
    shown = CliRunner().invoke(app, ["doctor", "--cluster", "--json"], catch_exceptions=False)
    assert shown.exit_code == 1
    found = json.loads(shown.stdout[shown.stdout.index("{") :])
    assert found["variables"]["SLURM"]["SLURM_NTASKS"] == "6"
    assert "none of srun's" in found["problems"][0]
    one = cluster.Worker(0, 2, "host0", "0", "SLURM", "1", "3.12", "2.9")
    assert cluster.compared([one, cluster.Worker(1, 2, "host1", "0", "SLURM", "1", "3.12", "2.9")]) == []
    two = cluster.Worker(1, 2, "host0", "0", "SLURM", "2", "3.12", "2.9")
    assert cluster.compared([one, two]) == [
        "workers differ in grace: '1', '2'",
        "workers 0 and 1 have local rank 0 on host0: both would take the same GPU",
    ]
    others = [
        replace(one, rank=rank, local_rank=str(rank), promised={"SLURM_NTASKS": 1 + 3 * rank}) for rank in range(2)
    ]
    assert cluster.compared(others) == ["2 of 4 workers came: SLURM_NTASKS=4 on worker 1"]


@pytest.mark.parametrize(
    "found, count",
    [
        ({**BATCH, **MPIRUN}, {"OMPI_COMM_WORLD_SIZE": 2, "SLURM_NTASKS": 6}),
        ({**DAEMON, **ON_TWO}, {"OMPI_COMM_WORLD_SIZE": 4, "SLURM_STEP_NUM_TASKS": 1}),
        ({**BATCH, **TORCHRUN}, {"WORLD_SIZE": 4, "SLURM_NTASKS": 6}),
        ({"SLURM_NTASKS": "6", "PMI_SIZE": "x"}, {}),  # a shell of salloc
    ],
)
def test_what_the_variables_promise(found, count):
    assert promised(found) == count


# Two processes on this machine, with the variables of one launcher nested in another.
WORK = """
import os, grace
transport = grace.init()
import torch
x = torch.ones(1) * (transport.rank + 1)
torch.distributed.all_reduce(x)
machine = os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_WORLD_SIZE"]
print(transport.rank, transport.size, x.item(), os.environ["LOCAL_RANK"], transport.local_rank, *machine)
"""
NESTED = {
    "mpirun in sbatch": lambda rank: (
        {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2}
        | {"OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_LOCAL_SIZE": 2}
    ),
    "mpirun_rsh in sbatch": lambda rank: (
        {"MV2_COMM_WORLD_RANK": rank, "MV2_COMM_WORLD_SIZE": 2}
        | {"MV2_COMM_WORLD_LOCAL_RANK": rank, "MV2_COMM_WORLD_LOCAL_SIZE": 2}
    ),
    "PALS, one task of srun": lambda rank: (
        {"PALS_RANKID": rank, "PALS_LOCAL_RANKID": rank, "PMI_SIZE": 2}
        | {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 1, "SLURM_STEP_NODELIST": "127.0.0.1"}
    ),
    "MPICH without local ranks": lambda rank: {"PMI_RANK": rank, "PMI_SIZE": 2, "LOCAL_RANK": 0},
}


@pytest.mark.processes
@pytest.mark.parametrize("name", NESTED)
def test_workers_of_a_launcher_inside_another_one_meet(name):
    pytest.importorskip("torch")
    taken = {name for names in VARIABLES.values() for name in names}
    outer = {**BATCH, "SLURM_JOB_NODELIST": "127.0.0.[1-2]", "MASTER_PORT": str(free_port())}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORK],
            env={key: value for key, value in os.environ.items() if key not in taken}
            | {**outer, "OMP_NUM_THREADS": "1"}
            | {key: str(value) for key, value in NESTED[name](rank).items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [worker.communicate(timeout=60)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for rank, text in enumerate(printed):
        assert text.splitlines()[-1] == f"{rank} 2 3.0 {rank} {rank} 2 1", text
