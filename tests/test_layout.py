"""Units, buckets, and the order in which gradients may arrive."""

import numpy as np
import pytest
from methods import lockstep, normal, same, workers

from grace import grace_from_params
from grace.core.registry import compressors
from grace.engine.buckets import Tensor, layout
from grace.engine.options import Options
from grace.transports.local import LocalTransport

MB = 2**18  # float32 elements


def tensors(**sizes):
    return [Tensor(name, shape if isinstance(shape, tuple) else (shape,), "float32") for name, shape in sizes.items()]


def refusal(compressor):
    return lambda ctx: "" if compressors[compressor]().applies(ctx) else f"does not apply to shape {list(ctx.shape)}"


def buckets(named, compressor="topk", **options):
    return layout(named, compressor, refusal(compressor), Options(**options), xp=None)


def names(found):
    return [[tensor.name for tensor in bucket.tensors] for bucket in found]


def test_buckets_go_backwards_and_the_first_is_small():
    named = tensors(a=MB, b=20 * MB, c=10 * MB, d=3 * MB, e=MB // 2, f=MB // 4)
    # In reverse order: the first bucket is closed once it holds 1 MiB, the others once they hold 25 MiB.
    assert names(buckets(named)) == [["f", "e", "d"], ["c", "b"], ["a"]]
    assert [bucket.name for bucket in buckets(named)] == ["bucket0", "bucket1", "bucket2"]
    more = layout(named[:2], "topk", refusal("topk"), Options(), None, first=7)
    assert [bucket.name for bucket in more] == ["bucket7", "bucket8"]


def test_a_bucket_holds_at_least_one_tensor():
    assert names(buckets(tensors(a=40 * MB, b=40 * MB, c=3 * MB))) == [["c"], ["b"], ["a"]]
    assert names(buckets([])) == []


def test_the_size_of_buckets_can_be_set():
    named = tensors(a=MB, b=MB, c=MB, d=MB)
    assert names(buckets(named, bucket_mb=2.0)) == [["d"], ["c", "b"], ["a"]]
    assert names(buckets(named, bucket_mb=0.1)) == [["d"], ["c"], ["b"], ["a"]]
    assert names(buckets(named, bucket_mb=100.0)) == [["d"], ["c", "b", "a"]]


def test_small_tensors_travel_with_the_last_bucket():
    # Small tensors make one dense message per step. Large dense tensors stay in their buckets.
    named = tensors(a=MB, bias=10, b=MB, offset=1023, c=(2 * MB, 1), d=0)
    assert names(buckets(named, "powersgd", bucket_mb=4.0)) == [["c"], ["b", "a", "d", "offset", "bias"]]
    assert names(buckets(named, min_numel=0, bucket_mb=4.0)) == [["d", "c"], ["offset", "b", "bias", "a"]]
    assert names(buckets(named, fuse="model")) == [["c", "b", "a", "d", "offset", "bias"]]
    assert names(buckets(tensors(bias=10, offset=1023))) == [["offset", "bias"]]


def test_bytes_count_not_elements():
    named = [Tensor(name, (MB,), "float64") for name in "abc"]
    assert names(buckets(named, bucket_mb=4.0)) == [["c"], ["b", "a"]]


@pytest.mark.parametrize("fuse", ["tensor", "bucket", "model"])
def test_units(fuse):
    named = tensors(a=(3 * MB,), small=10, b=(MB, 4), c=MB // 2, d=(MB // 4, 2))
    found = buckets(named, fuse=fuse, bucket_mb=8.0)
    units = [[(unit.name, unit.shape, bool(unit.dense)) for unit in bucket.units] for bucket in found]
    if fuse == "tensor":
        first, second = units
        assert first == [("d", (MB // 4, 2), False), ("c", (MB // 2,), False)]
        assert second == [("b", (MB, 4), False), ("a", (3 * MB,), False), ("small", (10,), True)]
    elif fuse == "bucket":
        first, second = units
        assert first == [("d..c", (MB,), False)]
        assert second == [("b..a", (7 * MB,), False), ("small", (10,), True)]
    else:
        assert units == [[("d..a", (8 * MB,), False), ("small", (10,), True)]]


def test_small_tensors_go_dense():
    (bucket,) = buckets(tensors(a=1023, b=1024, c=0, d=()))
    reason = "fewer than min_numel=1024 elements"
    assert {unit.name: unit.dense for unit in bucket.units} == {"a": reason, "b": "", "c": "empty", "d": reason}
    (bucket,) = buckets(tensors(a=1023, b=1024, c=0, d=()), min_numel=0)
    assert {unit.name: unit.dense for unit in bucket.units} == {"a": "", "b": "", "c": "empty", "d": ""}


def test_what_a_method_does_not_apply_to_goes_dense():
    named = tensors(vector=5000, matrix=(100, 50), flat=(1, 5000), square=(40, 40))
    (bucket,) = buckets(named, "powersgd")
    reasons = {unit.name: unit.dense for unit in bucket.units}
    assert reasons["matrix"] == reasons["square"] == ""
    assert "does not apply to shape [5000]" in reasons["vector"]
    assert "does not apply to shape [1, 5000]" in reasons["flat"]


def test_reasons_are_in_the_report(xp):
    (grace,) = workers({"compressor": "powersgd", "min_numel": 100}, 1)
    given = {"w": normal(40, 30), "bias": normal(40), "vector": normal(500), "nothing": normal(0)}
    grace.build({name: xp.asarray(x, "float32") for name, x in given.items()})
    report = grace.report()
    assert {tensor.name: tensor.method for tensor in report.tensors} == {
        "w": "powersgd",
        "bias": "dense",
        "vector": "dense",
        "nothing": "dense",
    }
    reasons = {tensor.name: tensor.reason for tensor in report.tensors}
    assert reasons["w"] == ""
    assert reasons["bias"] == "fewer than min_numel=100 elements"
    assert reasons["vector"].endswith("does not apply to shape [500]")
    assert reasons["nothing"] == "empty"
    assert all(reason in str(report) for reason in reasons.values())


@pytest.mark.parametrize("fuse", ["bucket", "model"])
def test_fused_is_the_same_as_concatenated(xp, fuse):
    shapes = {"a": (50, 7), "b": (300,), "c": (2, 3, 50)}
    fused = workers({"compressor": "topk", "compress_ratio": 0.1, "fuse": fuse}, 2)
    plain = workers({"compressor": "topk", "compress_ratio": 0.1}, 2)
    made = [
        {name: normal(*shape, seed=10 * rank + i) for i, (name, shape) in enumerate(shapes.items())}
        for rank in range(2)
    ]
    # The model's tensors, last first.
    flat = [{"all": np.concatenate([g[name].reshape(-1) for name in ("c", "b", "a")])} for g in made]

    def as_arrays(given):
        return [{name: xp.asarray(x, "float32") for name, x in worker.items()} for worker in given]

    for graces, given in ((fused, made), (plain, flat)):
        for grace in graces:
            grace.build(as_arrays(given)[0])
    for _ in range(3):
        for mine, theirs in zip(lockstep(fused, as_arrays(made)), lockstep(plain, as_arrays(flat)), strict=True):
            found = np.concatenate([np.array(xp.to_numpy(mine[name])).reshape(-1) for name in ("c", "b", "a")])
            assert np.array_equal(found, xp.to_numpy(theirs["all"]))
            assert {name: tuple(mine[name].shape) for name in shapes} == shapes


def test_fused_gradients_keep_their_own_dtypes(xp):
    graces = workers({"compressor": "none", "fuse": "model"}, 2)
    given = {name: xp.cast(xp.asarray(normal(50), "float32"), name) for name in ("float16", "float32", "float64")}
    for grace in graces:
        grace.build(given)
    for worker in lockstep(graces, [given, given]):
        for name in given:
            assert xp.dtype(worker[name]) == name
            np.testing.assert_allclose(xp.to_numpy(worker[name]), xp.to_numpy(given[name]), rtol=1e-6)


# -- what is refused ------------------------------------------------------------------------------------------------
def one(xp, **shapes):
    grace = grace_from_params({"compressor": "topk", "min_numel": 0}, LocalTransport())
    grace.build({name: xp.zeros(shape) for name, shape in shapes.items()})
    return grace


def test_two_tensors_of_one_name_are_refused(xp):
    grace = grace_from_params({"compressor": "topk"}, LocalTransport())
    with pytest.raises(ValueError, match="two tensors are named 'w'"):
        grace.build([("w", xp.zeros(3)), ("w", xp.zeros(3))])
    grace.build({"w": xp.zeros(3)})
    grace.build({"w": xp.zeros(3)})  # building the same tensors again changes nothing
    with pytest.raises(ValueError, match=r"'w'.*shapes must not change"):
        grace.build({"w": xp.zeros(4)})
    assert grace.names == ["w"]


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool"])
def test_gradients_that_cannot_be_averaged_are_refused(xp, dtype):
    grace = grace_from_params({"compressor": "topk"}, LocalTransport())
    with pytest.raises(TypeError, match=rf"'counts' has dtype {dtype}: only float16"):
        grace.build({"counts": xp.zeros(3, dtype)})


def test_unknown_names_and_wrong_shapes_are_refused(xp):
    grace = one(xp, w=(3, 5))
    with pytest.raises(KeyError, match="'v' was not built"):
        grace.start("v", xp.zeros(3))
    with pytest.raises(KeyError, match="'v' was not built"):
        grace.step({"v": xp.zeros(3)})
    with pytest.raises(ValueError, match=r"gradient of 'w' has shape \(15,\), but \(3, 5\) was built"):
        grace.start("w", xp.zeros(15))
    assert xp.shape(grace.step({"w": xp.zeros((3, 5))})["w"]) == (3, 5)


def test_a_second_gradient_before_finish_is_refused(xp):
    grace = one(xp, w=9, v=9)
    grace.start("w", xp.zeros(9))
    with pytest.raises(RuntimeError, match="'w' has a gradient in this step already"):
        grace.start("w", xp.zeros(9))
    job = grace.start("v", xp.zeros(9))
    assert xp.shape(grace.finish(job)) == (9,)


def test_nothing_is_known_before_build():
    grace = grace_from_params({"compressor": "topk"}, LocalTransport())
    with pytest.raises(RuntimeError, match=r"call build\(named_tensors\) first"):
        grace.xp  # noqa: B018 - the access is what is tested
    with pytest.raises(KeyError, match="was not built"):
        grace.start("w", np.zeros(3, np.float32))


# -- order ----------------------------------------------------------------------------------------------------------
SHAPES = {"a": (300,), "b": (20, 30), "small": (3,), "c": (1500,), "d": (40,)}
ORDERS = [list(SHAPES), list(SHAPES)[::-1], ["c", "a", "d", "small", "b"]]


@pytest.mark.parametrize("start", ORDERS, ids=str)
@pytest.mark.parametrize("finish", ORDERS, ids=str)
@pytest.mark.parametrize("compressor", ["topk", "qsgd", "powersgd"])
def test_any_order_gives_what_a_step_gives(xp, compressor, start, finish):
    params = {"compressor": compressor, "min_numel": 10, "bucket_mb": 0.002}
    ordered, stepped = (workers(params, 1)[0] for _ in range(2))
    for grace in (ordered, stepped):
        grace.build({name: xp.zeros(shape) for name, shape in SHAPES.items()})
    for seed in range(2):
        given = {name: xp.asarray(normal(*shape, seed=seed), "float32") for name, shape in SHAPES.items()}
        expected = stepped.step(given)
        jobs = {name: ordered.start(name, given[name]) for name in start}
        assert ordered.started == set(SHAPES)
        found = {name: ordered.finish(jobs[name]) for name in finish}
        for name in SHAPES:
            assert same([np.array(xp.to_numpy(found[name]))], [np.array(xp.to_numpy(expected[name]))])
        assert ordered.started == set()
    assert ordered.report().bytes_sent == stepped.report().bytes_sent
    assert ordered.state_dict()["step"] == stepped.state_dict()["step"] == 2


def test_workers_may_hand_in_in_different_orders(xp):
    graces = workers({"compressor": "topk", "compress_ratio": 0.1, "bucket_mb": 0.002}, 2)
    given = [
        {name: xp.asarray(normal(*shape, seed=rank), "float32") for name, shape in SHAPES.items()} for rank in range(2)
    ]
    for grace in graces:
        grace.build(given[0])
    jobs = [
        {name: grace.start(name, mine[name]) for name in order}
        for grace, mine, order in zip(graces, given, ORDERS, strict=False)
    ]
    while [grace for grace in graces if not grace.advance()]:
        pass
    found = [{name: grace.finish(job) for name, job in mine.items()} for grace, mine in zip(graces, jobs, strict=True)]
    for name in SHAPES:
        assert np.array_equal(xp.to_numpy(found[0][name]), xp.to_numpy(found[1][name]))


def test_a_gradient_that_never_came_is_absent(xp):
    grace = one(xp, w=9, v=9)
    grace.track_missing = True
    job = grace.start("w", xp.full(9, 2.0))
    assert (xp.to_numpy(grace.finish(job)) != 0).any()
    assert grace.mean("v") is None
    assert grace.report().steps == 1


def test_a_step_may_leave_tensors_out(xp):
    grace = one(xp, w=9, v=9)
    assert grace.step({}) == {}
    assert list(grace.step({"w": xp.full(9, 2.0)})) == ["w"]
    assert list(grace.step({"v": xp.full(9, 2.0)})) == ["v"]
    report = grace.report()
    assert report.steps == 2
    assert {tensor.name: tensor.bytes_sent for tensor in report.tensors} == {"w": 8, "v": 8}


def test_tensors_may_be_added(xp):
    grace = one(xp, w=900)
    grace.step({"w": xp.asarray(normal(900), "float32")})
    before = np.asarray(grace.state_dict()["tensors"]["w"]["memory/residual"])
    grace.build({"w": xp.zeros(900), "v": xp.zeros(30)})
    after = grace.state_dict()
    assert set(after["tensors"]) == {"w", "v"}
    assert np.array_equal(np.asarray(after["tensors"]["w"]["memory/residual"]), before)
    assert after["step"] == 1
    assert grace.report().bytes_sent == 8 * 9
    assert set(grace.step({"w": xp.zeros(900), "v": xp.zeros(30)})) == {"w", "v"}
    assert grace.report().bytes_sent == 8 * 9 + 8 * 9 + 8
