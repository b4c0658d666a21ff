"""The examples run under every launcher that they name, learn, and send less."""

import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

psutil = pytest.importorskip("psutil")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(find_spec("sklearn") is None, reason="the examples' data come with scikit-learn"),
]
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
BIN = Path(sys.executable).parent
HOROVODRUN = [str(BIN / "horovodrun"), "-np", "2", "--gloo", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PARAMETERS = 283_786
LIMIT = 120  # seconds for one command


def needs(*modules):
    missing = [name for name in modules if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{missing} not installed")


@pytest.fixture
def launch(tmp_path):
    """Run a command to its end, and leave none of its processes behind."""

    def run(*command):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
        log = tmp_path / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                list(command), stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
            try:
                process.wait(LIMIT)
            finally:
                end(process)
        assert process.returncode == 0, log.read_text()[-5000:]
        return log.read_text()

    return run


def end(process):
    # horovodrun puts its workers into sessions of their own, so a process group would not name them all.
    if process.poll() is not None:
        return
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def check(path, toolkit, workers, epochs, least_ratio):
    found = json.loads(path.read_text())
    assert found["toolkit"] == toolkit
    assert found["report"]["world_size"] == workers
    assert found["dense_bytes_per_step"] == 4 * PARAMETERS
    assert found["ratio"] >= least_ratio
    assert len(found["history"]) == epochs
    assert all(math.isfinite(epoch["loss"]) for epoch in found["history"])
    assert 0.2 < found["accuracy"] <= 1  # chance is 0.1


@needs("torch", "horovod")
def test_torch_over_horovod(launch, tmp_path):
    out = tmp_path / "result.json"
    log = launch(*HOROVODRUN, str(EXAMPLES / "digits_torch.py"), "--epochs", "2", "--json", str(out))
    check(out, "PyTorch", 2, 2, 35)
    assert "topk + residual + allgather | worker 0 of 2" in log


@needs("torch")
def test_torch_over_torch_distributed(launch, tmp_path):
    out = tmp_path / "result.json"
    script = str(EXAMPLES / "digits_torch.py")
    launch(*TORCHRUN, script, "--method", "efsignsgd", "--epochs", "2", "--json", str(out))
    check(out, "PyTorch", 2, 2, 25)


@needs("torch")
def test_torch_alone(launch, tmp_path):
    out = tmp_path / "result.json"
    options = ["--params", '{"compress_ratio": 0.05}', "--epochs", "1", "--json", str(out)]
    launch(sys.executable, str(EXAMPLES / "digits_torch.py"), *options)
    check(out, "PyTorch", 1, 1, 9)


@needs("tensorflow", "horovod")
def test_keras_over_horovod(launch, tmp_path):
    out = tmp_path / "result.json"
    script = str(EXAMPLES / "digits_keras.py")
    launch(*HOROVODRUN, script, "--method", "powersgd", "--epochs", "2", "--json", str(out))
    check(out, "Keras", 2, 2, 25)
