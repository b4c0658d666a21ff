"""Clusters and troubleshooting: launchers work as the pages show, and quoted messages are in the source."""

import ast
import os
import random
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from launch import free_port, launcher, run

from grace.transports.jobs import VARIABLES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


# -- troubleshooting ---------------------------------------------------------------------------------------------------
def text_of(node):
    """A string of the source, with "…" in place of each inserted value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "…" for part in node.values)
    return ""


def messages():
    trees = [ast.parse(path.read_text()) for path in (ROOT / "grace").rglob("*.py")]
    return {text_of(node) for tree in trees for node in ast.walk(tree)} - {""}


@pytest.mark.slow
def test_every_message_of_the_page_is_in_the_source():
    rows = re.findall(r"^\| `(.+?)` \| ", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 50
    texts = "\n".join(text.replace("\n", " ") for text in messages())
    absent = [row for row in rows if not re.search(".*".join(map(re.escape, row.split("..."))), texts)]
    assert absent == []


# -- clusters ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("language", ["bash", "sh"])
def test_bash_reads_the_scripts(language):
    found = blocks(DOCS / "clusters.md", language)
    assert found
    for script in found:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_jobs_names_fit_together():
    yaml = pytest.importorskip("yaml")
    (text,) = blocks(DOCS / "clusters.md", "yaml")
    service, job = yaml.safe_load_all(text)
    spec = job["spec"]["template"]["spec"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    assert spec["subdomain"] == service["metadata"]["name"]
    (command,) = spec["containers"][0]["args"]
    assert f"--master-addr {job['metadata']['name']}-0.{spec['subdomain']} " in command
    assert f"--nnodes {job['spec']['completions']} " in command
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == int(
        re.search(r"--nproc-per-node (\d+)", command)[1]
    )


STEP = """
import torch
import torch.distributed as dist
grc.build({"w": torch.ones(64, 64)})
grc.step({"w": torch.randn(64, 64)})
if grc.rank == 0:
    print(grc.report())
dist.destroy_process_group()
"""
GRACE = """
import grace
grc = grace.grace_from_params({"compressor": "topk", "min_numel": 0})
"""
# Run in the same processes as if mpirun had started them: all four on one machine.
AGAIN = """
import os
rank = os.environ["SLURM_PROCID"]
for key in list(os.environ):
    if key.startswith("SLURM_") or key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[key]
os.environ |= {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": rank}
os.environ |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": os.environ["MPI_JOB"]}
grc = grace.grace_from_params({"compressor": "topk", "min_numel": 0}, grace.init())
"""
# Then run `grace doctor --cluster` in them; one local rank occurs twice.
DOCTOR = """
for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(key, None)
os.environ |= {"PMIX_NAMESPACE": os.environ["DOCTORS_JOB"], "OMPI_COMM_WORLD_LOCAL_RANK": str(min(int(rank), 2))}
from typer.testing import CliRunner
from grace.cli.app import app
done = CliRunner().invoke(app, ["doctor", "--cluster"], env={"COLUMNS": "200"})
print(f"doctor ended with {done.exit_code}: {done.output}")
"""


def free_job():
    """A job ID whose port is free."""
    while True:
        job = random.randrange(20000)
        with socket.socket() as place, suppress(OSError):
            place.bind(("127.0.0.1", 10000 + job))
            return job


@pytest.mark.processes
def test_torchrun_on_two_machines_and_the_exchange_between_them(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(
        'import torch.distributed as dist\ndist.init_process_group("gloo")\n' + GRACE + STEP
    )
    block = next(block for block in blocks(DOCS / "clusters.md", "bash") if "--node-rank 1" in block)
    script = block.replace("host0", "127.0.0.1").replace("29500", str(free_port()))
    script = script.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    assert script.count("train.py\n") == 2
    script = script.replace("train.py\n", f"{tmp_path / 'train.py'} &\n") + "wait\n"
    printed = run("bash", "-c", script, log=tmp_path / "log")
    assert printed.count("worker 0 of 4 | 1 steps") == 1, printed
    assert "hierarchical" in printed


@pytest.mark.processes
def test_a_task_for_each_worker_under_slurms_and_open_mpis_variables(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("typer", reason="the command line")
    (lines,) = [block for block in blocks(DOCS / "clusters.md", "python") if "srun's tasks" in block]
    (tmp_path / "train.py").write_text(lines + STEP + AGAIN + STEP + DOCTOR)
    taken = {name for names in VARIABLES.values() for name in names}
    env = {key: value for key, value in os.environ.items() if key not in taken}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPI_JOB": str(free_job()), "DOCTORS_JOB": str(free_job())}
    env |= {"SLURM_JOB_ID": str(free_job()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
    env |= {"SLURM_STEP_NODELIST": "127.0.0.[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    workers = [
        subprocess.Popen(
            [sys.executable, tmp_path / "train.py"],
            env={
                **env,
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank % 2),
                "SLURM_NODEID": str(rank // 2),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        printed = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * 4, printed
    slurm, mpi = printed[0].split("grace.init: ")[1:3]
    assert slurm.startswith("worker 0 of 4: SLURM (SLURM_PROCID, SLURM_STEP_NUM_TASKS), met at 127.0.0.1:")
    assert mpi.startswith("worker 0 of 4: Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE), met at 127.0.0.1:")
    for text in (slurm, mpi):
        assert "worker 0 of 4 | 1 steps" in text
    assert "hierarchical" in slurm
    assert "hierarchical" not in mpi
    assert all("grace.init" not in text for text in printed[1:])
    assert all("doctor ended with 1: " in text for text in printed), printed
    assert printed[0].count("workers 2 and 3 have local rank 2 on") == 1
    assert all("local rank" not in text for text in printed[1:]), "worker 0 speaks for all"


@pytest.mark.processes
def test_doctor_compares_the_processes_of_a_launcher(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("typer", reason="the command line")
    printed = run(*launcher("torchrun", 2), "-m", "grace", "doctor", "--cluster", log=tmp_path / "log")
    assert printed.count("grace.init: worker 0 of 2: torchrun (RANK, WORLD_SIZE)") == 1
    assert printed.count("All workers agree.") == 1, "worker 0 speaks for all"
    for rank in range(2):
        assert (
            len(re.findall(rf"^worker {rank} of 2 on .*, torchrun local rank {rank}: grace", printed, re.MULTILINE))
            == 1
        )
    assert re.search(r"^torchrun +MASTER_PORT +\d+", printed, re.MULTILINE)
