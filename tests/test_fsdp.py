"""Sharded training: the reduce-scatter of rows on every backend, and FSDP2 over real gloo workers."""

import math

import numpy as np
import pytest
from launch import launch

from grace import grace_from_params
from grace.core.registry import compressors
from grace.engine.handshake import HEADER
from grace.testing.cases import lockstep, workers
from grace.transports.local import LocalTransport, World

ROWS = {
    "none": {},
    "fp16": {},
    "topk": {"compress_ratio": 0.1},
    "blockint": {"bits": 4, "block_size": 64},
    "qsgd": {},
    "efsignsgd": {"block_size": 64},
    "chunktopk": {"chunk_size": 64, "chunk_k": 8},
    "randomk": {"compress_ratio": 0.2},
}


def scattered(name, size, **settings):
    return [
        grace_from_params(
            {"compressor": name, "communicator": "reducescatter", "min_numel": 0, **ROWS[name], **settings},
            LocalTransport(world, rank),
        )
        for world in [World(size)]
        for rank in range(size)
    ]


def gradients(size, row=300, seed=0):
    return [np.random.default_rng([seed, rank]).standard_t(3, (size, row)).astype(np.float32) for rank in range(size)]


@pytest.mark.parametrize("name", ROWS)
def test_what_is_handed_out_and_what_is_kept_add_up(xp, name):
    """Over the steps, means plus mean residuals equal the mean of all gradients, in every row."""
    size, steps = 3, 4
    graces = scattered(name, size)
    for grace in graces:
        grace.build({"w": xp.zeros((size, 300))})
    total, handed = np.zeros((size, 300)), np.zeros((size, 300))
    for step in range(steps):
        mine = gradients(size, seed=step)
        means = lockstep(graces, [{"w": xp.asarray(g.copy(), "float32")} for g in mine])
        total += np.mean(mine, 0)
        for rank, mean in enumerate(means):
            assert xp.shape(mean["w"]) == (300,)
            handed[rank] += xp.to_numpy(mean["w"])
    kept = np.zeros((size, 300))
    states = [grace.state_dict()["tensors"].get("w", {}) for grace in graces]
    for state in states:
        for row in range(size):
            if (residual := state.get(f"{row}/memory/residual")) is not None:
                kept[row] += np.asarray(residual) / size
    if graces[0].method.memory.feedback or name == "none":
        np.testing.assert_allclose(handed + kept, total, atol=2e-4)
    else:
        assert name in ("fp16", "qsgd", "randomk"), name
        if name == "fp16":
            np.testing.assert_allclose(handed, total, rtol=2e-3, atol=2e-3)


def largest(x, k):
    return np.where(np.abs(x) >= np.sort(np.abs(x))[-k], x, 0)


def signs(x):
    return np.where(x >= 0, 1, -1) * np.abs(x).mean()


def ints(x):
    top = np.abs(x).max()
    return np.round(x / top * 7) / 7 * top


def blocks(of, row):
    return np.concatenate([of(row[i : i + 64]) for i in range(0, len(row), 64)])


SENT = {
    "none": lambda row: row,
    "fp16": lambda row: row,
    "topk": lambda row: largest(row, len(row) // 10),
    "efsignsgd": lambda row: blocks(signs, row),
    "blockint": lambda row: blocks(ints, row),
}


@pytest.mark.parametrize("name", SENT)
def test_a_worker_gets_the_mean_of_what_the_others_send_of_its_row(name):
    graces = scattered(name, 2)  # the first step has no residual yet
    mine = gradients(2, 320)
    for grace in graces:
        grace.build({"w": mine[0]})
    means = lockstep(graces, [{"w": g.copy()} for g in mine])
    for rank, mean in enumerate(means):
        wanted = np.mean([SENT[name](g[rank]) for g in mine], 0)
        np.testing.assert_allclose(mean["w"], wanted, rtol=2e-3, atol=1e-3)


def test_bad_numbers_on_one_worker_reach_all_rows_and_no_memory(xp):
    size = 3
    graces = scattered("topk", size)
    for grace in graces:
        grace.build({"w": xp.zeros((size, 300))})
    lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients(size)])
    before = [grace.state_dict()["tensors"]["w"] for grace in graces]
    bad = gradients(size, seed=1)
    bad[1][2, 7] = np.inf
    means = lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in bad])
    assert all(np.isnan(xp.to_numpy(mean["w"])).all() for mean in means)
    after = [grace.state_dict()["tensors"]["w"] for grace in graces]
    for one, other in zip(before, after, strict=True):
        assert all(np.array_equal(one[key], other[key]) for key in one)


def test_a_dense_tensor_hands_out_its_row_too():
    graces = scattered("topk", 2, min_numel=10_000)
    mine = gradients(2)
    for grace in graces:
        grace.build({"w": mine[0]})
    means = lockstep(graces, [{"w": g} for g in mine])
    for rank, mean in enumerate(means):
        np.testing.assert_allclose(mean["w"], np.mean(mine, 0)[rank], rtol=1e-6)
    assert graces[0].report().tensors[0].method == "dense"


REFUSED = [
    ({"compressor": "threshold"}, "payloads differ in length.*Use a method with a fixed length"),
    ({"compressor": "powersgd"}, "Use communicator 'allreduce'"),
    ({"compressor": "topk", "memory": "ef21"}, "tracks the mean.*Use memory 'residual'"),
    ({"compressor": "topk", "fuse": "bucket"}, "use fuse='tensor'"),
]


@pytest.mark.parametrize(("params", "message"), REFUSED)
def test_what_cannot_be_scattered_is_refused(params, message):
    with pytest.raises(ValueError, match=message):
        grace_from_params({**params, "communicator": "reducescatter"}, LocalTransport(World(2), 0))


def test_whole_gradients_and_hierarchies_are_refused():
    with pytest.raises(ValueError, match=r"its own row of a tensor, but 'w' has shape \[7\]"):
        grace_from_params({"communicator": "reducescatter"}, LocalTransport(World(2), 0)).build({"w": np.zeros(7)})
    with pytest.raises(ValueError, match="'reducescatter' between machines"):
        grace_from_params({"communicator": "hierarchical", "outer": "reducescatter"}, LocalTransport(World(4), 0))


def test_every_method_of_fixed_length_fits():
    for name in compressors:
        compressor = compressors[name]()
        traits = compressor.traits
        if traits.variable_length or traits.combine.value == "agreed" or traits.memory not in ("none", "residual"):
            continue
        graces = workers(compressor, None, grace_from_params({"communicator": "reducescatter"}).communicator, 2)
        x = np.ones((2, 2048), np.float32)
        for grace in graces:
            grace.build({"w": x})
        for mean in lockstep(graces, [{"w": x.copy()} for _ in graces]):
            assert mean["w"].shape == (2048,), name


# -- FSDP2 over real workers -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    pytest.importorskip("torch")
    return launch("torchrun", request.param, "fsdp.py", tmp_path_factory.mktemp("out"))


processes = pytest.mark.processes


@processes
@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance"),
    [
        ("none", "dense", 1e-3),
        ("none accumulated", "dense accumulated", 1e-3),
        ("bf16", "dense bf16", 2e-2),
        ("fp16", "dense fp16", 2e-2),
        ("hybrid none", "hybrid dense", 1e-3),
        ("hybrid both", "hybrid dense", 1e-3),
    ],
)
def test_exact_reductions_equal_fsdps_own(found, ours, theirs, tolerance):
    if ours.startswith("hybrid") and len(found) < 4:
        assert ours not in found[0]
        return
    for worker in found:
        # Sums of two workers have one order, so they are bit-identical; with four, Adam amplifies the last bits.
        np.testing.assert_allclose(worker[ours], worker[theirs], atol=0 if len(found) == 2 else tolerance)
    assert found[0]["steps"] == 5
    assert found[0]["accumulated steps"] == 3


@processes
def test_four_bits_with_feedback_train_within_a_hundredth_of_dense(found):
    if len(found) == 2:
        start, dense, ours = found[0]["losses"]
        assert dense < 0.6 * start
        assert abs(ours - dense) <= 0.01 * dense
        assert found[0]["topk loss"] < 0.7 * start


@processes
def test_bytes_on_the_wire_are_those_of_the_formula(found):
    size = len(found)
    for worker in found:
        total = 0.0
        for (rows, row), method, sent in worker["bytes"].values():
            assert (rows, method) == (size, "blockint")
            assert sent == (size - 1) * (math.ceil(row / 2) + 4 * math.ceil(row / 512) + 1)
            total += sent
        headers = 4 * HEADER * len(worker["bytes"])
        steps = 100 if size == 2 else 10
        assert worker["summary"] == ((total + headers) * steps, steps)


@processes
def test_small_groups_go_dense_and_say_so(found):
    assert dict(found[0]["topk report"]) == {"(root)": "dense", "blocks.0": "topk", "blocks.1": "topk"}


@processes
def test_an_overflow_on_one_worker_shows_on_all_and_leaves_every_memory(found):
    for worker in found:
        assert not any(worker["overflow"].values()), "some gradient looks finite"
        before, after = worker["overflow memory"]
        assert before
        assert all(np.array_equal(before[key], after[key]) for key in before)


@processes
def test_a_checkpoint_continues_bit_for_bit(found):
    for worker in found:
        assert all(np.array_equal(straight, again) for straight, again in worker["resumed"])


@processes
def test_pytorchs_own_checkpoints_keep_every_workers_residuals(found):
    for worker in found:
        assert worker["dcp"]
        assert worker["dcp steps"] == 3
        assert all(np.array_equal(one, other) and np.any(one) for one, other in worker["dcp"])
    assert not np.array_equal(found[0]["dcp"][0][0], found[1]["dcp"][0][0])


@processes
def test_copies_of_shards_are_averaged_compressed(found):
    if len(found) < 4:
        assert "hybrid topk" not in found[0]
        return
    assert found[0]["hybrid topk steps"] == 5
    for one, other in ((0, 2), (1, 3)):  # pairs of workers that hold the same shard
        assert np.array_equal(found[one]["hybrid topk"], found[other]["hybrid topk"])
    assert not np.array_equal(found[0]["hybrid topk"], found[0]["hybrid none"])


@processes
@pytest.mark.parametrize("mode", ["unused", "by one", "frozen", "unfrozen", "unfrozen block"])
def test_parameters_that_a_step_does_not_use_are_as_in_one_process(found, mode):
    for worker in found:
        assert worker["branches"][mode]["off"] < 1e-6
        assert worker["branches"][mode]["steps"] == 5


@processes
@pytest.mark.parametrize("mode", ["unused", "by one", "frozen", "unfrozen", "unfrozen block"])
def test_with_error_feedback_nothing_is_lost_of_parameters_that_are_not_always_used(found, mode):
    """The sum of all gradients equals the sum of the means and the residuals."""
    for worker in found:
        assert abs(worker["sparse branches"][mode]["lost"]) < 1e-5
        assert abs(worker["sparse branches"][mode]["exact"]) > 0.1


@processes
def test_sums_of_float16_need_every_parameter_of_every_worker(found):
    for worker in found:
        assert "call model.set_reduce_scatter_unused_params(True)" in worker["missing half"]


@processes
def test_what_does_not_fit_says_what_does(found):
    refused = found[0]["refused"]
    assert "call torch.distributed.fsdp.fully_shard on it first" in refused["plain model"]
    assert "replicas=" in refused["nothing"]
    assert "use communicator 'reducescatter'" in refused["allgather"]
    assert "leave its communicator out" in refused["scattered copies"]
    assert "leave set_gradient_divide_factor alone" in refused["divide factor"]
    assert "set_requires_gradient_sync(False)" in refused["no_sync"]
    assert "give a Grace" in refused["no Grace"]
    assert "worker 1 has BlockInt" in refused["by worker"]
    assert "shard over a mesh of one dimension" in refused["two dimensions"]
    assert "something replaced the hook" in refused["replaced"]
    assert "sharded over several meshes" in refused["meshes"]


# -- compressed parameters ---------------------------------------------------------------------------------------------
UNSUITABLE = [
    ({"compressor": "powersgd"}, "all workers agree on one payload"),
    ({"compressor": "threshold"}, "the length of its payload depends on the values"),
    ({"compressor": "signsgd"}, "a majority vote"),
    ({"compressor": "demo"}, "compresses matrices"),
    ({"compressor": "topk"}, r"it loses 9\d% of the norm.*use .*blockint"),
    ({"compressor": "blockint", "bits": 2}, r"it loses 8\d% of the norm"),
    ({"compressor": "blockint", "memory": "residual"}, "no error to feed back: leave memory out"),
    ({"compressor": "blockint", "min_numel": 3}, "unknown key 'min_numel'"),
    ({"compressor": "blokint"}, "did you mean 'blockint'"),
]


@pytest.mark.parametrize(("given", "message"), UNSUITABLE)
def test_a_method_that_does_not_suit_parameters_is_refused(given, message):
    parameters = pytest.importorskip("grace.torch.parameters")
    with pytest.raises(ValueError, match=message):
        parameters.parameter_compressor(given)


def test_a_method_with_state_is_refused_for_parameters():
    parameters = pytest.importorskip("grace.torch.parameters")

    class Stateful(compressors["blockint"]):
        def init(self, ctx):
            return {"level": ctx.xp.zeros((1,))}

    with pytest.raises(ValueError, match="keeps state between steps"):
        parameters.parameter_compressor(Stateful(bits=8))
    with pytest.raises(TypeError, match="a dictionary or a compressor, not str"):
        parameters.parameter_compressor("blockint")


def rounded(shard, width=1024):
    """Integers of 8 bits, with a scale per block."""
    parts = [shard[i : i + width] for i in range(0, len(shard), width)]
    scales = [np.abs(part).max() for part in parts]
    return np.concatenate(
        [np.round(p / (s or 1) * np.float32(127)) * (s / np.float32(127)) for p, s in zip(parts, scales, strict=True)]
    )


def decoded(value, workers):
    """A parameter as all workers use it: matrices quantised by shards of rows, padded with zeros; vectors exact."""
    if value.ndim < 2:
        return value
    rows = -(-len(value) // workers)
    padded = np.zeros((rows * workers, *value.shape[1:]), np.float32)
    padded[: len(value)] = value
    shards = [rounded(shard.reshape(-1)) for shard in padded.reshape(workers, -1)]
    return np.concatenate(shards).reshape(padded.shape)[: len(value)]


@processes
def test_all_workers_compute_with_the_same_decoded_parameters_and_keep_exact_shards(found):
    size = len(found)
    for worker in found:
        one = worker["uneven"]
        for name, value in one["shards"].items():
            assert np.array_equal(one["seen"][name], found[0]["uneven"]["seen"][name]), name
            np.testing.assert_allclose(one["seen"][name], decoded(value, size), rtol=1e-6, atol=1e-7, err_msg=name)
            assert np.array_equal(one["kept"][name], value)
        assert not np.array_equal(one["seen"]["b.weight"], one["shards"]["b.weight"])


@processes
def test_passes_without_gradients_see_exact_parameters_unless_asked_otherwise(found):
    for worker in found:
        exact, asked, trained = (worker[key] for key in ("evaluated", "evaluated compressed", "uneven"))
        for name, value in exact["shards"].items():
            assert np.array_equal(exact["seen"][name], value)
            assert np.array_equal(asked["seen"][name], trained["seen"][name])
        assert exact["report"][0]["reason"] == "1 of 1 exact: passes without gradients"
        assert asked["report"][0]["reason"] == ""


@processes
def test_exact_gathers_equal_fsdps_own(found):
    for worker in found:
        assert np.array_equal(worker["parameters none"], worker["none"])
        assert np.array_equal(worker["parameters none bf16"], worker["bf16"])
        assert np.array_equal(*worker["mixed"])
        assert worker["mixed report"] == "1 of 1 exact: uint8 gathers"


@processes
@pytest.mark.parametrize("setting", ["plain", "drawn", "bf16", "accumulated"])
def test_backward_passes_see_the_parameters_of_forward_passes(found, setting):
    """Gathered again, kept, or gathered within a machine: the same bits."""
    for worker in found:
        first, *others = worker["again"][setting]
        assert len(others) == (1 if len(found) == 2 else 2)
        assert all(np.array_equal(first, other) for other in others)
        assert np.isfinite(first).all()


@processes
def test_a_model_from_the_meta_device_trains_once_it_is_on_its_device(found):
    for worker in found:
        assert "to_empty" in worker["meta"]
        assert np.array_equal(worker["from meta"], worker["again"]["plain"][0])


@processes
def test_parameters_of_eight_bits_and_gradients_of_four_end_at_most_a_hundredth_above_dense(found):
    if len(found) == 2:
        dense, ours = found[0]["parameters losses"]
        assert ours <= 1.01 * dense < 0.6 * found[0]["losses"][0]


@processes
def test_bytes_of_parameters_are_those_of_the_formula(found):
    if len(found) != 2:
        return
    rows, steps, text = found[0]["parameters bytes"]
    assert steps == 200
    for row in rows:
        shards = [math.prod([-(-shape[0] // 2), *shape[1:]]) for shape in found[0]["shapes"][row["name"]]]
        matrices = [len(shape) > 1 for shape in found[0]["shapes"][row["name"]]]
        each = sum(n + 4 * math.ceil(n / 1024) if matrix else 4 * n for n, matrix in zip(shards, matrices, strict=True))
        gathers = steps * (1 if row["name"] == "(root)" else 2)  # the root is gathered once for both passes
        assert (row["bytes_sent"], row["bytes_dense"]) == (each * gathers, 4 * sum(shards) * gathers)
        assert row["shape"] == (2, sum(shards))
    assert "parameters: blockint | per step" in text


@processes
def test_copies_of_shards_decode_the_same_parameters(found):
    if len(found) == 4:
        for one, other in ((0, 2), (1, 3)):
            assert np.array_equal(found[one]["hybrid parameters"][0], found[other]["hybrid parameters"][0])
        for worker in found:
            for name, value in worker["hybrid parameters"][1].items():
                assert np.array_equal(value, found[0]["hybrid parameters"][1][name])
