"""`grace.init`: which workers a launcher's variables describe. Environments as they were recorded, shortened."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from launch import free_port

import grace
from grace import start
from grace.transports.jobs import VARIABLES, detect, expand_nodes, tasks_per_node
from grace.transports.launched import LAUNCHED

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
HOROVODRUN = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}


@pytest.fixture
def environ(monkeypatch):
    """No launcher's variables are set; returns a function that sets some."""
    for name in (*(name for names in VARIABLES.values() for name in names), *LAUNCHED):
        monkeypatch.delenv(name, raising=False)
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
    ],
)
def test_a_recorded_environment(found, launcher, numbers, address, port):
    job = detect(found)
    assert (job.launcher, (job.rank, job.size, job.local_rank, job.local_size)) == (launcher, numbers)
    assert (job.address, job.port) == (address, port)


def test_no_launcher():
    assert detect({}) is None
    assert detect({**BATCH, "SLURM_NTASKS": "1"}) is None


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
        "atexit.register(lambda: print('initialised', dist.is_initialized()))\n"  # the last to run
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


def test_a_size_without_a_rank_is_refused(environ):
    environ({"PMI_SIZE": "2"})
    with pytest.raises(RuntimeError, match="PMI_SIZE=2 asks for 2 workers"):
        grace.init()


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
