"""Broadcasts of PyTorch's parameters and optimizer state: every dtype, and states that differ between workers."""

import pytest
from launch import launch

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=["torch", "horovod"])
def found(request, tmp_path_factory):
    launcher = "torchrun" if request.param == "torch" else "horovodrun"
    return launch(launcher, 2, "broadcasts.py", tmp_path_factory.mktemp("out"), request.param)


def test_every_dtype_and_layout_arrives_in_place(found):
    for worker in found:
        assert worker["in place"]
        kinds = worker["kinds"]
        assert len(kinds) == 25
        assert str(kinds.pop("own nan")) == "[nan, inf]"
        assert kinds.pop("torch.bool") == [1.0, 1.0, 0.0]
        assert kinds.pop("scalar") == 1.0
        assert kinds.pop("empty") == []
        for name, values in kinds.items():
            while isinstance(values[0], list):
                values = [each for row in values for each in row]
            assert set(values) == {1.0}, name


@pytest.mark.parametrize(
    "key, words",
    [
        ("missing", ["worker 0 and worker 1 differ", "'extra' is missing on worker 0", "float32[3] on worker 1"]),
        ("shape", ["'s' is float32[3] on worker 0 and float32[4] on worker 1", "same model"]),
        ("dtype", ["'s' is float32[3] on worker 0 and float64[3] on worker 1"]),
        ("empty", ["'w' is float32[4] on worker 0 and missing on worker 1"]),
        ("expanded", ["'s' is float32[3] expanded on worker 0"]),
        ("sparse", ["worker 1: 's' is a tensor of layout torch.sparse_coo"]),
        ("quantised", ["'s' is a quantised tensor (torch.qint8)"]),
        ("meta", ["'s' is a tensor on the meta device"]),
        ("nested", ["'s' is a nested tensor"]),
        ("overlapping", ["'s' has elements that share memory: clone()"]),
    ],
)
def test_states_that_differ_or_cannot_be_carried_change_nothing_on_any_worker(found, key, words):
    for rank, worker in enumerate(found):
        message, (values,) = worker[f"differ {key}"]
        assert message.startswith("ValueError")
        for word in words:
            assert word in message
        assert values == [1.0 if rank == 0 else 5.0] * 4


@pytest.mark.parametrize(
    "key, words",
    [
        ("roots", "worker 0 gives root_rank=0 and worker 1 gives 1"),
        ("range", "root_rank=2 must be a worker's rank, 0 .. 1"),
        ("negative", "root_rank=-1 must be"),
        ("text", "root_rank='0' is str"),
    ],
)
def test_a_root_that_is_no_worker_is_refused_by_all(found, key, words):
    for rank, worker in enumerate(found):
        message, (values,) = worker[f"root {key}"]
        assert words in message
        assert values == [1.0 if rank == 0 else 5.0] * 4


@pytest.mark.parametrize(
    "key, words",
    [
        ("module", "params is a module, Linear: pass model.state_dict()"),
        ("parameters", "tensors without names, as model.parameters() gives"),
        ("generator", "tensors without names"),
        ("tensor", "params is torch.Tensor"),
        ("names twice", "two tensors are named 'w'"),
    ],
)
def test_what_has_no_names_is_refused_with_the_remedy(found, key, words):
    for worker in found:
        assert words in worker[f"wrong {key}"][0]


def test_extra_state_is_named_and_the_tensors_arrive(found):
    for worker in found:
        (message,), _ = worker["extra"]
        assert "'_extra_state' is no tensor and stays each worker's own" in message
    assert (found[0]["extra"][1] == found[1]["extra"][1]).all()


def test_contexts_and_defaults_of_the_process_do_not_matter(found):
    for worker in found:
        assert worker["inference"] == worker["defaults"] == [1.0, 1.0]


@pytest.mark.parametrize(
    "name",
    ["numpy", "numpy float32", "tensor", "adam", "capturable", "lbfgs", "rprop", "adafactor", "array"],
)
def test_optimizer_state_and_settings_arrive(found, name):
    for worker in found:
        message, state, settings, _ = worker[f"optimizer {name}"]
        assert message == ""
        assert state == found[0][f"optimizer {name}"][1]
        assert settings == found[0][f"optimizer {name}"][2]
    if name != "array":
        assert state, "worker 0 had state"


@pytest.mark.parametrize(
    "name, words",
    [
        ("tag", "worker 0: state_dict()['param_groups'][0]['tag'] is __main__.Tag, which cannot be broadcast"),
        ("function", "state_dict()['param_groups'][0]['decay'] is builtins.function"),
        ("groups", "'parameter group 1' is missing on worker 0"),
        ("shapes", "'parameter group 0' is torch.float32[5, 4] on worker 0 and torch.float32[2] on worker 1"),
        ("class", "'the optimizer' is SGD on worker 0 and Adam on worker 1"),
    ],
)
def test_optimizer_state_that_cannot_be_carried_changes_nothing(found, name, words):
    for rank, worker in enumerate(found):
        message, state, settings, old = worker[f"optimizer {name}"]
        assert message.startswith("ValueError")
        assert words in message
        assert settings == old
        assert rank == 0 or not state
