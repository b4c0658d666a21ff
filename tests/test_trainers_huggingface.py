"""grace.torch.trainer: transformers.Trainer on two gloo workers, against its own run."""

import re

import pytest
from launch import TESTS, launch, launcher, run

pytestmark = pytest.mark.processes
WORKER = "trainer_huggingface.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("out")
    printed = run(*launcher("torchrun", 2), TESTS / "workers" / WORKER, out, "kill", log=out / "killed.txt", fails=True)
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
        ("data parallel", r"ValueError: .* one process drives several GPUs \(DataParallel\)"),
        ("batch size", "ValueError: .* auto_find_batch_size"),
    ],
)
def test_what_cannot_work_is_refused_before_training(found, what, text):
    for worker in found:
        assert re.match(text, worker[what])
