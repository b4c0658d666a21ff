"""Accelerate, Lightning and Fabric with GRACE on two gloo workers, against their own runs."""

import re

import pytest
from launch import launch
from support.sharding import ON_CPUS

pytestmark = pytest.mark.processes
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    for trainer in ("accelerate", "lightning"):
        pytest.importorskip(trainer)
    return launch("torchrun", 2, "trainer_others.py", tmp_path_factory.mktemp("out"))


@pytest.mark.parametrize("trainer, prefix", [("accelerate", ""), ("lightning", "net."), ("fabric", "")])
def test_without_compression_training_equals_the_trainers_own(found, trainer, prefix):
    for worker in found:
        assert worker[f"{trainer} none"] == (True, 6, [prefix + name for name in NAMES])


@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
def test_blockint_learns_and_sends_less(found, trainer):
    for worker in found:
        first, last, ratio = worker[f"{trainer} int4"][:3]
        assert last < 0.5 * first
        assert 7 < ratio < 8


@pytest.mark.parametrize("trainer, more", [("accelerate", (True,)), ("lightning", (True, 6)), ("fabric", ())])
def test_a_resumed_training_equals_the_uninterrupted_one(found, trainer, more):
    for worker in found:
        assert worker[f"{trainer} resumed"] == (True, 6, *more)
    assert found[0]["accelerate norms"] != found[1]["accelerate norms"], "each worker has its own residuals"


def test_accelerate_saves_one_file_for_each_worker(found):
    for worker in found:
        assert worker["accelerate files"] == ["worker-00000-of-00002.grace", "worker-00001-of-00002.grace"]
        assert worker["accelerate bare"], "without the accelerator the same training, without checkpoints"


def test_fabric_sends_less(found):
    assert all(4.5 < worker["fabric ratio"] < 5.1 for worker in found)  # a tenth of the values and their positions


def test_a_checkpoint_of_one_worker_is_resharded_for_two(found):
    for worker in found:
        steps, norms = worker["accelerate one to two"]
        assert steps == 1
        assert norms[0] == pytest.approx((0.9 * 1280) ** 0.5 / 2), "nine tenths of the ones, a half for each"


def test_a_step_that_a_loss_scaler_skips_leaves_no_trace(found):
    for worker in found:
        assert worker["skipped"] == (True, True, 2)


def test_accelerate_keeps_the_options_of_ddp(found):
    assert all(worker["accelerate options"] for worker in found)


@pytest.mark.skipif(not ON_CPUS, reason="FSDP2 of this PyTorch needs a GPU")
def test_lightnings_fsdp2_by_the_same_line(found):
    for worker in found:
        assert worker["lightning fsdp none"] == (True, 6, ["net.0", "net.2"])
        *resumed, ratio = worker["lightning fsdp resumed"]
        assert resumed == [True, 6]
        assert ratio > 9


def test_lightning_fits_again(found):
    assert all(worker["lightning again"] == (True, 3) for worker in found)


def test_lightning_logs_what_was_sent(found):
    for worker in found:
        *_, sent, logged = worker["lightning int4"]
        assert [step for step, _, _ in logged] == list(range(1, 24, 2)), "every log_every_n_steps"
        assert logged[-1][2] == sent
        assert logged[0][2] == pytest.approx(sent / 12)
        assert all(7 < ratio < 8 for _, ratio, _ in logged)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("accelerate hook", "ValueError: the accelerator's handler has comm_hook='fp16'"),
        ("accelerate local", "ValueError: local training steps a plain model"),
        ("lightning foreign", "ValueError: this checkpoint was written without grace.torch.LightningCallback"),
        pytest.param(
            "lightning mesh",
            "ValueError: the model is sharded over 1 workers, but grace averages over 2",
            marks=pytest.mark.skipif(not ON_CPUS, reason="FSDP2 of this PyTorch needs a GPU"),
        ),
        ("plain", "ValueError: Sequential is neither DistributedDataParallel nor an FSDP2 model"),
        ("data parallel", "ValueError: DataParallel is neither DistributedDataParallel nor an FSDP2 model"),
        ("accelerate engine", "ValueError: Engine is neither DistributedDataParallel nor an FSDP2 model"),
        ("lightning engine", "ValueError: Engine is neither DistributedDataParallel nor an FSDP2 model"),
        ("no model", "TypeError: a model is needed, not list"),
        ("bypass", "RuntimeError: no gradient went through GRACE in this step"),
        ("another", "$"),  # an optimizer of another model may step
    ],
)
def test_what_cannot_work_is_an_error_on_all_workers(found, what, text):
    for worker in found:
        assert re.match(text, worker[what])
