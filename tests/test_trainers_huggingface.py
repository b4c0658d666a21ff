"""grace.torch.trainer: transformers.Trainer and TRL's SFTTrainer on two gloo workers, against their own runs."""

import re

import pytest
import torch
from launch import TESTS, command_of, launch, run
from support.sharding import ON_CPUS

pytestmark = pytest.mark.processes
WORKER = "trainer_huggingface.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("trl")
    out = tmp_path_factory.mktemp("out")
    command = command_of("torchrun", 2, TESTS / "workers" / WORKER, out, "kill")
    printed = run(*command, log=out / "killed.txt", fails=True)
    assert "exitcode  : -9" in printed
    return launch("torchrun", 2, WORKER, out)


def test_without_compression_training_equals_the_trainers_own(found):
    for worker in found:
        assert worker["none"] == (True, 6), "accumulated passes are one exchange; weights equal to the bit"
        assert worker["names"], "the model's own names"


def test_blockint_learns_and_the_logs_say_what_was_sent(found):
    losses, logged, sent, dense = found[0]["int4"]
    assert losses[-1] < 0.5 * losses[0]
    assert 7 < dense / sent < 8  # 4 bits and a scale per block
    assert len(logged) == len(losses) + 1, "each step's line, and the last"
    assert logged[-1]["grace_bytes_sent"] == sent
    assert logged[-1]["grace_ratio"] == pytest.approx(dense / sent)
    assert logged[0]["grace_bytes_sent"] == pytest.approx(sent / 20)


def test_a_resumed_training_equals_the_uninterrupted_one(found):
    for worker in found:
        assert worker["resumed"] == (True, 6, worker["residuals"])
        assert worker["killed"][:2] == (True, 6), "three steps before the checkpoint, three after it"
        assert worker["files matter"]
    assert found[0]["residuals"] != found[1]["residuals"], "each worker has its own"


def test_local_training_by_the_same_line(found):
    for worker in found:
        landed, ratio, losses, logged = worker["local"]
        assert landed == 3, "after steps 2 and 4, and at the end"
        assert 8 < ratio < 9  # three exchanges of a fifth of the bytes, in five steps
        assert len(logged) == len(losses) == 5
        assert losses[-1] < losses[0]
        assert worker["local resumed"] == (True, 3, 5), "from a checkpoint within a round"
    weights = [worker["local weights"] for worker in found]
    assert all(torch.equal(p, weights[1][name]) for name, p in weights[0].items()), "one model at the end"


def test_trl_trains_as_without_compression_learns_and_resumes(found):
    for worker in found:
        assert worker["sft none"] == (True, 4)
        assert worker["sft resumed"] == (True, 4)
        losses, ratio, logged = worker["sft int4"]
        assert losses[-1] < 0.7 * losses[0]
        assert 7 < ratio < 8
        assert logged == [pytest.approx(ratio)] * 12


@pytest.mark.skipif(not ON_CPUS, reason="FSDP2 of this PyTorch needs a GPU")
def test_fsdp2_by_the_same_line(found):
    for worker in found:
        assert worker["fsdp none"] == (True, 6)
        equal, steps, gradients, parameters = worker["fsdp resumed"]
        assert equal
        assert steps == 6
        assert gradients > 9, "a tenth of the gradients, and half of the float32's reduce-scatter"
        assert 2 < parameters < 4, "8 bits; vectors are exact"


def test_a_step_without_an_exchange_is_an_error_on_all_workers(found):
    for worker in found:
        error, steps = worker["bypass"]
        assert error.startswith("RuntimeError: no gradient went through GRACE")
        assert steps == 0, "in the first step"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("missing", "FileNotFoundError: .*checkpoint-6/grace has no checkpoint .* resume from an earlier one"),
        ("twice", "ValueError: .* it has a Grace already"),
        ("no trainer", "TypeError: a transformers.Trainer is needed, not GPT2LMHeadModel"),
        ("deepspeed", "ValueError: .* DeepSpeed averages gradients itself"),
        ("parts", "ValueError: .* transformers loaded the model in parts"),
        ("tensor parallel", "ValueError: .* transformers loaded the model in parts"),
        ("device map", r"ValueError: .* the model lies on several devices \(device_map\)"),
        ("data parallel", r"ValueError: .* one process drives several GPUs \(DataParallel\)"),
        ("fsdp1", "ValueError: .* FSDP1 offers no hook"),
        ("fsdp local", "ValueError: local training steps a plain model"),
        ("batch size", "ValueError: .* auto_find_batch_size"),
    ],
)
def test_what_cannot_work_is_refused_before_training(found, what, text):
    for worker in found:
        assert re.match(text, worker[what])
