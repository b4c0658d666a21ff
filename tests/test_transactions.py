"""A step that raises, or whose means are discarded, leaves a Grace unchanged."""

import copy
import pickle

import numpy as np
import pytest

from grace import grace_from_params

METHODS = {
    "topk": {"compressor": "topk", "compress_ratio": 0.1},
    "efsignsgd": {"compressor": "efsignsgd", "block_size": 64},
    "powersgd": {"compressor": "powersgd", "compress_rank": 2},
    "dgc": {"compressor": "dgc", "compress_ratio": 0.1, "memory": "dgc"},
    "onebit_adam": {"compressor": "efsignsgd", "block_size": 64, "memory": "onebit_adam", "freeze_step": 2},
    "qsgd": {"compressor": "qsgd"},
}


def gradients(step, worst=None):
    rng = np.random.default_rng(step)
    made = {"a": rng.standard_normal((40, 50), dtype="float32"), "b": rng.standard_normal((30, 60), dtype="float32")}
    if worst is not None:
        made["b"][3, 4] = worst
    return made


def made(params, **options):
    grc = grace_from_params({"min_numel": 0, **params, **options}, transport="local")
    grc.build(gradients(0))
    return grc


def same(one, two):
    first, second = one.state_dict(), two.state_dict()
    assert first["step"] == second["step"]
    assert first["tensors"].keys() == second["tensors"].keys()
    for name, state in first["tensors"].items():
        for key, value in state.items():
            np.testing.assert_array_equal(value, second["tensors"][name][key], err_msg=f"{name}: {key}")


@pytest.fixture(params=METHODS)
def params(request):
    return METHODS[request.param]


def test_a_mean_that_is_refused_changes_no_tensor(params):
    grc, other = (made(params, nonfinite="raise") for _ in range(2))
    for each in (grc, other):
        each.step(gradients(1))
    with pytest.raises(FloatingPointError, match="'b'"):
        grc.step(gradients(2, np.inf))
    same(grc, other)
    one, two = grc.step(gradients(3)), other.step(gradients(3))
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


@pytest.mark.parametrize(
    "wrong, error",
    [
        ({"b": np.ones((3, 3), "float32")}, ValueError),
        ({"c": np.ones((3, 3), "float32")}, KeyError),
    ],
)
def test_a_step_with_a_wrong_tensor_is_none(params, wrong, error):
    grc, other = made(params), made(params)
    for each in (grc, other):
        each.step(gradients(1))
    with pytest.raises(error):
        grc.step({**gradients(2), **wrong})
    assert grc.started == set()
    same(grc, other)
    grc.step(gradients(2))
    other.step(gradients(2))
    same(grc, other)


def test_an_interrupt_in_the_middle_of_a_step_is_no_step(params, monkeypatch):
    grc, other = made(params), made(params)
    with monkeypatch.context() as patch:
        patch.setattr(type(grc.transport), "begin", interrupt)
        with pytest.raises(KeyboardInterrupt):
            grc.step(gradients(1))
    assert grc.started == set()
    same(grc, other)
    grc.step(gradients(1))
    other.step(gradients(1))
    same(grc, other)


def interrupt(*_):
    raise KeyboardInterrupt


def test_what_is_rolled_back_has_never_been(params):
    grc, other = made(params), made(params)
    grc.defer_commit = True
    for step in range(4):
        before = grc.state_dict()
        grc.step(gradients(100 + step))
        assert grc.provisional
        np.testing.assert_equal(grc.state_dict(), before, "provisional state is in no checkpoint")
        grc.rollback()
        means, expected = grc.step(gradients(step)), other.step(gradients(step))
        grc.commit()
        for name in means:
            np.testing.assert_array_equal(means[name], expected[name])
    same(grc, other)
    assert (grc.report().steps, grc.report().discarded) == (4, 4)


def test_some_tensors_may_be_rolled_back(params):
    grc, other = made(params), made(params)
    grc.defer_commit = True
    grc.step(gradients(1))
    grc.rollback(["b"])
    grc.commit()
    other.step({"a": gradients(1)["a"]})
    same(grc, other)


def test_the_sums_of_a_policy_are_rolled_back():
    policy = {"policy": "accordion", "k_low": 0.1, "k_high": 0.01}
    grc, other = (made({"compressor": "topk", **policy}) for _ in range(2))
    grc.defer_commit = True
    grc.step(gradients(100))
    grc.rollback()
    grc.step(gradients(1))
    grc.commit()
    other.step(gradients(1))
    for name, total in other.state_dict()["policy"]["sums"].items():
        np.testing.assert_array_equal(grc.state_dict()["policy"]["sums"][name], total)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_reset_keeps_whether_the_state_before_is_kept(keeps):
    grc = made(METHODS["topk"])
    grc.defer_commit, grc.setup.keeps_base = True, keeps
    grc.step(gradients(1))
    grc.commit()
    grc.reset("local")
    grc.step(gradients(2))
    grc.discard()
    assert grc.state_dict()["tensors"]["a"]["memory/residual"].any() == keeps


def test_no_sync_gives_gradients_back(params):
    grc, other = made(params), made(params)
    with grc.no_sync():
        given = gradients(1)
        assert all(mean is given[name] for name, mean in grc.step(given).items())
        assert grc.finish(grc.start("a", given["a"])) is given["a"]
        grc.start_all(given)
        assert all(mean is given[name] for name, mean in zip(given, grc.means(given), strict=True))
    same(grc, other)
    assert grc.report().steps == 0


def test_a_copy_has_the_state_and_goes_its_own_way(params):
    grc = made(params)
    grc.step(gradients(1))
    twin = copy.deepcopy(grc)
    twin.build(gradients(0))
    same(grc, twin)
    one, two = grc.step(gradients(2)), twin.step(gradients(2))
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])
    grc.step(gradients(3))
    assert twin.state_dict()["step"] == 2


def test_a_pickled_grace_has_the_settings(params):
    loaded = pickle.loads(pickle.dumps(made(params)))
    loaded.build(gradients(0))
    same(loaded, made(params))


def test_watches_see_a_step_in_the_order_in_which_they_were_made(monkeypatch):
    # Two Graces of one FSDP2 model each send a message after a step. All workers must use one order, or they hang.
    torch = pytest.importorskip("torch")
    from grace.torch.watch import Watch

    seen = []
    monkeypatch.setattr(Watch, "after", lambda watch, optimizer: seen.append(watch))
    graces = [grace_from_params({"compressor": "none"}, transport="local") for _ in range(50)]
    made = [Watch(graces[number], {}) for number in np.random.default_rng(0).permutation(50)]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    optimizer.step()
    assert [watch for watch in seen if watch in made] == made
