"""Compression between pipeline stages: feedback, ends of an edge, PyTorch's stages, Boundary, and predictions."""

import collections
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import launch
from methods import BACKENDS, backend

from grace.core import Context
from grace.core.registry import compressors
from grace.stages import Codec, End, directions
from grace.testing import check_compressor

ROOT = Path(__file__).parent.parent
B4 = {"compressor": "blockint", "bits": 4}
TOPK = {"compressor": "topk", "compress_ratio": 0.1}


def arrays(name, x):
    xp = backend(name)
    return xp, xp.asarray(x, "float32")


def ends(forward, feedback="none", **settings):
    """The two ends of an edge."""
    how, _ = directions(forward, None, feedback, **settings)
    return [End(how, "0-1", "forward", sender) for sender in (True, False)]


def cross(pair, h, name="numpy", ids=None, **places):
    """Send a batch and return it as received; checks that both ends have equal values, and the message's length."""
    xp, x = arrays(name, h)
    sender, receiver = pair
    message, value = sender.send(x, ids=ids, **places)
    training = places.get("training", True)
    size = receiver.size(xp, h.shape, "float32", places.get("number", 0), ids, training)
    assert xp.shape(message) == (size,)
    found = receiver.receive(message, h.shape, "float32", ids=ids, **places)
    assert np.array_equal(xp.to_numpy(found), xp.to_numpy(value), equal_nan=True)
    return np.array(xp.to_numpy(found)).reshape(h.shape)


def drifts(pair, epochs, shape=(4, 8192), name="numpy", ids=None):
    """The relative errors of received activations that change by 2 % in each epoch."""
    rng = np.random.default_rng(0)
    h, errors = rng.standard_normal(shape).astype("f"), []
    for _ in range(epochs):
        errors.append(float(np.linalg.norm(cross(pair, h, name, ids) - h) / np.linalg.norm(h)))
        h = (h + 0.02 * rng.standard_normal(shape)).astype("f")
    return errors


# -- feedback ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", BACKENDS)
def test_feedback_by_its_formulas(name):
    # One example of eight elements; top-k keeps two of them.
    pair = ends({"compressor": "topk", "compress_ratio": 0.25}, "ef")
    h = np.array([[8, 1, 2, 7, 3, 4, 5, 6]], "f")
    assert cross(pair, h, name).tolist() == [[8, 0, 0, 7, 0, 0, 0, 0]]
    assert cross(pair, h, name).tolist() == [[0, 0, 0, 0, 0, 0, 10, 12]]  # top-k of h + e; e: the error so far
    pair = ends({"compressor": "topk", "compress_ratio": 0.25}, "ef21")
    assert cross(pair, h, name).tolist() == [[8, 0, 0, 7, 0, 0, 0, 0]]
    assert cross(pair, h, name).tolist() == [[8, 0, 0, 7, 0, 0, 5, 6]]  # top-k of h - A, added to A on both ends
    assert cross(pair, h * 2, name).tolist() == [[16, 0, 0, 7, 0, 8, 5, 6]]


def test_ef21_and_aq_follow_a_drift():
    # The specification's numbers, for blocks of 8192 elements.
    whole = {**B4, "block_size": 0}
    assert drifts(ends(whole), 3) == pytest.approx([0.17, 0.17, 0.17], rel=0.05)
    expected = [0.17, 0.0146, 0.0039, 0.0034, 0.0034]
    assert drifts(ends(whole, "ef21"), 5) == pytest.approx(expected, rel=0.06)
    assert drifts(ends(TOPK, "ef21"), 6) == pytest.approx([0.748, 0.590, 0.464, 0.359, 0.270, 0.197], rel=0.05)
    aq = drifts(ends(whole, "aq", samples=4), 4, ids=np.arange(4))
    assert aq[0] < 1e-3  # a first visit, in 16 bits
    assert aq[1:] == pytest.approx([0.0034] * 3, rel=0.06)


@pytest.mark.parametrize("feedback", ["ef", "ef21", "aq"])
def test_what_is_not_finite_arrives_and_is_forgotten(feedback):
    ids = np.arange(2) if feedback == "aq" else None
    pair = ends({**B4, "block_size": 8}, feedback, **({"samples": 2} if feedback == "aq" else {}))
    h = np.random.default_rng(0).standard_normal((2, 16)).astype("f")
    broken = h.copy()
    broken[0, 3] = np.nan
    for _ in range(2):
        assert np.isnan(cross(pair, broken, ids=ids)[0, 3])
    for _ in range(3):
        found = cross(pair, h, ids=ids)
    assert np.isfinite(found).all()
    assert np.abs(found - h).max() < 0.5


def test_examples_are_compressed_by_themselves():
    # A large example does not change the others, for any method and block size.
    h = np.random.default_rng(0).standard_normal((3, 24)).astype("f")
    louder = h * np.array([[1], [1000], [1]], "f")
    for forward in (TOPK, B4, {**B4, "block_size": 8}, {**B4, "block_size": 0}, "qsgd", "natural", "fp8"):
        one, other = (cross(ends(forward), x) for x in (h, louder))
        assert np.array_equal(one[[0, 2]], other[[0, 2]]), forward
    k = [np.count_nonzero(row) for row in cross(ends(TOPK), louder)]
    assert k == [2, 2, 2]


def test_whole_blocks_of_a_batch_are_those_of_its_examples():
    x = np.random.default_rng(0).standard_normal((4, 64)).astype("f")
    xp, _ = arrays("numpy", x)
    how, _ = directions({**B4, "block_size": 32, "rounding": "stochastic"}, None)
    codec, ctx = Codec(how.compressor), End(how, "0-1", "forward", True)._context(xp, x.shape, "float32", "0/0")
    assert len(codec.pieces(ctx)) == 1
    whole = codec.decompress(codec.compress(x.reshape(-1), ctx), ctx)
    parts = [ctx.piece(row * 64, 64) for row in range(4)]
    each = [
        how.compressor.decompress(how.compressor.compress(x[row], {}, part)[0], part) for row, part in enumerate(parts)
    ]
    assert np.array_equal(whole, np.concatenate(each))


# -- by sample ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("storage", [True, False])
def test_aq_keeps_activations_by_sample(storage, tmp_path):
    pair = ends(B4, "aq", samples=6, stored="float32", storage=tmp_path if storage else None)
    h = np.random.default_rng(0).standard_normal((6, 32)).astype("f")
    assert np.array_equal(cross(pair, h[:4], ids=np.arange(4)), h[:4])  # first visits are exact
    mixed = np.array([5, 2, 0])
    found = cross(pair, h[mixed] + np.array([[1], [0], [0]], "f"), ids=mixed)
    assert np.array_equal(found[0], h[5] + 1)
    assert np.abs(found[1:] - h[[2, 0]]).max() < 1e-6
    sent = pair[0].report()
    assert (sent.messages, sent.dense) == (2, 4 * 32 * 7)
    assert sent.nbytes == 4 * 32 * 5 + 3 * (16 + 4) + 2 * 8  # five first visits, codes with scales, two digests
    # A new pair continues from the state; one with other settings refuses it.
    again = ends(B4, "aq", samples=6, stored="float32", storage=tmp_path if storage else None)
    for old, new in zip(pair, again, strict=True):
        new.load_state_dict(old.state_dict())
    found = cross(again, h[mixed], ids=mixed)
    assert again[0].report().nbytes == 3 * (16 + 4) + 8
    assert np.abs(found[1:] - h[[2, 0]]).max() < 1e-6
    if not storage:  # with storage, both pairs share the files
        assert np.array_equal(found, cross(pair, h[mixed], ids=mixed))
    with pytest.raises(ValueError, match="not of feedback='none'"):
        ends(B4)[0].load_state_dict(pair[0].state_dict())


def test_both_ends_must_have_the_same_ids():
    sender, receiver = ends(B4, "aq", samples=6)
    h = np.ones((2, 32), "f")
    message, _ = sender.send(h, ids=np.array([1, 2]))
    with pytest.raises(RuntimeError, match="other sample_ids"):
        receiver.receive(message, h.shape, "float32", ids=np.array([2, 1]))
    with pytest.raises(ValueError, match="needs the ids"):
        sender.send(h)
    with pytest.raises(ValueError, match=r"are 0 \.\. 5"):
        sender.send(h, ids=np.array([1, 6]))


def test_debug_finds_a_buffer_that_differs():
    sender, receiver = ends(B4, "ef21", debug=True)
    h = np.ones((2, 32), "f")
    cross((sender, receiver), h)
    receiver._state["0/0"]["estimate"][3] += 1
    message, _ = sender.send(h)
    with pytest.raises(RuntimeError, match=r"edge 0-1, forward, tensor 0, micro-batch 0: .* buffers differ"):
        receiver.receive(message, h.shape, "float32")


# -- settings ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"forward": "powersgd"}, "forward: 'powersgd' agrees with other workers"),
        ({"backward": "cltk"}, "backward: 'cltk' agrees with other workers"),
        ({"forward": "adacomp"}, "keeps a state of one tensor"),
        ({"forward": {"compressor": "topk", "memory": "residual"}}, "stages have no memory"),
        ({"forward": {"compressor": "topk", "bits": 4}}, "forward: key 'bits' belongs to"),
        ({"forward": {**B4, "levels": 4}}, "levels=4: bits=4 have 15 or 16"),
        ({"forward": {**B4, "levels": 16, "rounding": "stochastic"}}, "would be biased"),
        ({"forward": "topkk"}, "did you mean 'topk'"),
        ({"feedback": "ef22"}, "choose one of none, ef, ef21, aq"),
        ({"feedback": "aq"}, "give samples"),
        ({"feedback": "aq", "samples": 3, "stored": "int8"}, "choose 'float16' or 'float32'"),
        ({"same_mask": True}, "same_mask is of forward='topk'"),
        ({"forward": TOPK, "same_mask": True, "feedback": "ef21"}, "same_mask goes without feedback"),
        ({"forward": "signsgd", "feedback": "ef"}, "forward: feedback='ef' diverges"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message):
        directions(**settings)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_all_levels_are_those_of_aq_sgd(bits):
    top, blockint = 2 ** (bits - 1), {"compressor": "blockint", "bits": bits, "block_size": 64}
    x = np.random.default_rng(0).standard_normal((200, 64)).astype("f")
    ctx = Context(xp=backend("numpy"), name="edge", shape=x.shape)
    found, payloads = {}, {}
    for levels in (2 * top - 1, 2 * top):
        made = directions({**blockint, "levels": levels}, None)[0].compressor
        (payloads[levels],) = Codec(made).compress(x.reshape(-1), ctx)
        found[levels] = made.decompress(payloads[levels], ctx).reshape(x.shape)
    shapes = [[(array.shape, array.dtype) for array in each] for each in payloads.values()]
    assert shapes[0] == shapes[1], "the format on the wire"
    scale = abs(x).max(1, keepdims=True)
    expected = np.clip(np.round(x / scale * top), -top, top - 1) / top * scale
    np.testing.assert_allclose(found[2 * top], expected, atol=1e-6)
    plain = directions(blockint, None)[0].compressor
    assert directions({**blockint, "levels": 2 * top - 1}, None)[0].compressor == plain != made
    if bits == 2:
        errors = [np.linalg.norm(x - each) / np.linalg.norm(x) for each in found.values()]
        assert errors == pytest.approx([0.72, 0.41], abs=0.01)
    check_compressor(made, ["numpy"])


def test_most_methods_cross_an_edge():
    h, refused = np.random.default_rng(0).standard_normal((2, 8, 8)).astype("f"), set()
    for name in compressors:
        try:
            pair = ends(name)
        except ValueError:
            refused.add(name)
            continue
        if pair[0].how.compressor.traits.variable_length:
            pair[0].send(h)
        else:
            cross(pair, h)
    # Methods in which workers must agree, and two with a state.
    agreed = {"acpsgd", "arctopk", "cltk", "dion", "gradzip", "gtopk", "powersgd", "shared_int", "sketch_sgd", "thc"}
    agreed |= {"gradiveq", "oktopk"}
    assert refused == agreed | {"adacomp", "variance"}


# -- PyTorch -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("torch")
    return launch("torchrun", 4, "stages.py", tmp_path_factory.mktemp("stages"))


SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.processes
def test_without_compression_a_stage_is_torchs_own(found):
    for each in found:
        assert each["equal"] == dict.fromkeys([(name, ranks) for ranks in (4, 2) for name in SCHEDULES], True)


@pytest.mark.processes
def test_eight_bits_both_ways(found):
    for name, (losses, edges) in found[1]["int8"].items():
        dense, mine = np.array(losses).T
        np.testing.assert_allclose(mine, dense, rtol=1e-4, err_msg=name)
        assert dense[-1] < dense[0]
        for edge in edges:
            assert edge["dense"] == 15 * 16 * 512 * 4
            assert edge["nbytes"] == 15 * 16 * (512 + 4)
            assert edge["dense"] > 3.9 * edge["nbytes"]
    # In an interleaved schedule of two ranks, rank 1 has stages 1 and 3.
    ends_ = {(e["edge"], e["direction"], e["end"]) for e in found[1]["int8"]["Interleaved1F1B"][1]}
    forward = {("0-1", "forward", "receives"), ("1-2", "forward", "sends"), ("2-3", "forward", "receives")}
    backward = {("0-1", "backward", "sends"), ("1-2", "backward", "receives"), ("2-3", "backward", "sends")}
    assert ends_ == forward | backward


@pytest.mark.processes
def test_gradients_of_the_first_stage_are_those_through_a_boundary(found):
    for each in (found[0], found[2]):
        assert len(each["first"]) == 11
        for name, (same, sent, alone) in each["first"].items():
            assert same == [True] * 4, name
            for edge, other in zip(sent, alone, strict=True):
                digests = edge["nbytes"] - other["nbytes"]
                assert digests in (0, 8 * edge["messages"]), name
                assert edge["dense"] == other["dense"], name


@pytest.mark.processes
def test_evaluation_and_state(found):
    for each in (found[1], found[3]):
        assert each["eval, compressed"]
        assert each["eval, plain"]
    for each in found:
        assert each["state after eval, compressed"]
        assert each["state after eval, plain"]
        assert each["resumed, ef21"]
        assert each["resumed, aq"]


@pytest.mark.processes
def test_several_outputs(found):
    (mine, dense), edges = found[1]["several"]
    np.testing.assert_allclose(mine, dense, rtol=1e-3)
    assert [edge["messages"] for edge in edges] == [36, 12]  # three outputs, one of them with a gradient


@pytest.mark.processes
def test_all_ranks_refuse(found):
    messages = {
        "settings": "stages 0 and 2 have other settings",
        "no ids": "set stage.sample_ids before schedule.step",
        "twice": "an id twice",
        "beyond": "samples=40, but 45",
        "floats": "are integers",
        "state": "of another stage",
        "variable length": "no fixed length",
        "DTensor": "returns a DTensor",
    }
    for each in found:
        assert each["refused"].keys() == messages.keys()
        for name, text in messages.items():
            assert text in each["refused"][name][1], each["refused"][name]
        assert each["refused"]["settings"] == found[0]["refused"]["settings"]


@pytest.mark.processes
def test_all_ranks_fail_where_one_does(found):
    assert "the receiver's buffers differ" in found[3]["disturbed"][1]
    for each in found:
        assert each["disturbed"][0] == "RuntimeError"
        assert each["seconds"] < 30


def test_a_torch_with_other_stages_is_refused():
    pytest.importorskip("torch")
    from grace.torch.stages import check_torch

    check_torch()
    with pytest.raises(RuntimeError, match=r"no get_fwd_send_ops, .*_retrieve_recv_grads, which .* torch 2.13 has"):
        check_torch(int)
    with pytest.raises(RuntimeError, match=r"torch 2.12.1\+cpu is too old .* torch 2.13 has"):
        check_torch(version="2.12.1+cpu")


def test_a_boundary_in_torch():
    torch = pytest.importorskip("torch")
    from grace.torch import Boundary

    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(0), requires_grad=True)
    g = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    layer = Boundary(TOPK, TOPK)
    y = layer(x)
    (dx,) = torch.autograd.grad(y, x, g)
    assert (y != 0).sum(1).tolist() == (dx != 0).sum(1).tolist() == [2] * 4
    assert not torch.equal(y != 0, dx != 0)  # each direction has its own mask
    masked = Boundary(TOPK, same_mask=True)
    y = masked(x)
    (dx,) = torch.autograd.grad(y, x, g)
    assert torch.equal(dx, torch.where(y != 0, g, 0))
    assert torch.equal(layer.eval()(x), y)
    assert torch.equal(Boundary(TOPK, compress_in_eval=False).eval()(x), x)
    whole = Boundary(None, None)
    assert torch.equal(whole(x), x)
    half = Boundary()(x.half())
    assert half.dtype is torch.float16
    marks = torch.ones(3, dtype=torch.int64)
    Pair = collections.namedtuple("Pair", "found same")
    pair = Boundary()(Pair(x, marks))
    found, same = Boundary()((x, marks))
    assert type(pair) is Pair
    assert torch.equal(pair.found, found)
    assert same is marks
    assert found.shape == x.shape
    ef = Boundary(TOPK, feedback="ef21")
    ef(x)
    with pytest.raises(ValueError, match="drop_last=True"):
        ef(x[:3])
    with pytest.raises(TypeError, match="compresses tensors, not dict"):
        layer({"x": x})
    other = Boundary(TOPK, feedback="ef21")
    other.load_state_dict(ef.state_dict())
    assert torch.equal(other(x), ef(x))
    assert "forward" in str(ef.report())


# -- Keras -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings",
    [
        {"forward": B4, "backward": TOPK},
        {"forward": TOPK, "same_mask": True},
        {"forward": B4, "backward": TOPK, "feedback": "ef"},
        {"forward": TOPK, "backward": B4, "feedback": "ef21"},
        {"forward": B4, "feedback": "aq", "samples": 8},
    ],
    ids=str,
)
def test_keras_computes_as_torch(settings):
    torch = pytest.importorskip("torch")
    tf = pytest.importorskip("tensorflow")
    import grace

    feedback = settings.get("feedback", "none")
    rng = np.random.default_rng(0)
    g = rng.standard_normal((6, 5, 8)).astype("f")
    layer = grace.tensorflow.Boundary(**settings, batch_size=8)
    other = grace.torch.Boundary(**settings, stored="float32")

    @tf.function(input_signature=[tf.TensorSpec((None, 5, 8)), tf.TensorSpec((None,), tf.int64)])
    def run(x, ids):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer([x, ids] if feedback == "aq" else x, training=True)
        return y, tape.gradient(y, x, tf.constant(g))

    for ids in (np.arange(6), np.arange(2, 8), np.arange(6)):
        h = rng.standard_normal((6, 5, 8)).astype("f")
        y, dx = run(h, ids)
        x = torch.tensor(h, requires_grad=True)
        other.sample_ids = ids
        z = other(x)
        z.backward(torch.tensor(g))
        np.testing.assert_allclose(y.numpy(), z.detach().numpy(), atol=1e-6)
        np.testing.assert_allclose(dx.numpy(), x.grad.numpy(), atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Keras with NumPy 2, when it saves
def test_a_keras_layer_is_saved_and_trained(tmp_path):
    keras = pytest.importorskip("keras")
    import grace
    from grace.compressors.measured.blockint import BlockInt

    x = np.random.default_rng(0).standard_normal((70, 12)).astype("f")
    layers = [grace.tensorflow.Boundary(B4, feedback="ef21", batch_size=32), grace.tensorflow.Boundary(BlockInt(8))]
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(16), *layers, keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.fit(x, x[:, :2], batch_size=32, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))
    assert again.layers[1].get_config() == model.layers[1].get_config()
    assert not np.array_equal(layers[0](x, training=False), x)
    plain = grace.tensorflow.Boundary(B4, compress_in_eval=False)
    assert np.array_equal(plain(x), x)
    with pytest.raises(ValueError, match="give batch_size"):
        grace.tensorflow.Boundary(B4, feedback="ef")
    with pytest.raises(Exception, match="more examples than batch_size=32"):
        layers[0](x, training=True)


# -- predictions -------------------------------------------------------------------------------------------------------
def test_the_step_of_a_pipeline_by_hand():
    from grace.planner.costs import Codec, Curve, Link, Speed
    from grace.planner.profile import Profile, TensorProfile
    from grace.planner.stages import edge_seconds, step_seconds

    # Four stages of 1 s forward and 2 s backward for each of two micro-batches.
    profile = Profile((TensorProfile("w", (4,), 16.0),), "given", forward=8.0)
    link = Link(latency=0.5, bandwidth=1e6)
    dense = edge_seconds(4e6, link)
    assert (dense.nbytes, dense.wire, dense.codec) == (4e6, 4.5, 0.0)
    assert step_seconds(profile, 4, 2, dense) == pytest.approx(4 * (1 + 2) + 2 * 3 * 4.5 + 2 * 4.5)
    assert step_seconds(profile, 1, 2, dense) == 24
    curve = lambda value: Curve((1e6,), (value,))  # noqa: E731
    quarter = Codec({"compressor": "blockint"}, curve(1e6), {"gpu": Speed(curve(0.25), curve(0.5), curve(0.5))})
    small = edge_seconds(4e6, link, quarter)
    assert (small.nbytes, small.wire, small.codec) == (1e6, 1.5, 0.75)
    # Forward an edge takes 1.5 s and a stage 1.75 s; backward a stage takes 2.75 s.
    assert step_seconds(profile, 4, 2, small) == pytest.approx(5 * (1.75 + 2.75) + 2 * 3 * 1.5)


def test_advise_knows_edges():
    import json

    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from grace.cli.app import app

    words = ["advise", "gpt2", "blockint:bits=8", "--stage-bytes", "3e6", "--workers", "4", "--backend", "numpy"]
    run = lambda *more: CliRunner().invoke(app, [*words, *more])  # noqa: E731
    slow = json.loads(run("--bandwidth", "0.1", "--json").stdout)
    assert slow["best"] == "blockint:bits=8"
    assert slow["methods"]["dense"]["wire"] == pytest.approx(3e6 * 8 / 1e8 + 50e-6)
    assert slow["methods"]["dense"]["nbytes"] > 3.9 * slow["methods"]["blockint:bits=8"]["nbytes"]
    assert "GPipe with 4 stages and 8 micro-batches" in run("--bandwidth", "0.1").stdout.replace("\n", " ")
    refused = run("powersgd")
    assert refused.exit_code == 2
    assert "agrees with other" in refused.output


def test_the_table_of_the_docs_is_that_of_the_stored_rows(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    from benchmarks import stages

    rows = stages.stored(ROOT / "benchmarks" / "results" / "stages.jsonl")
    assert {row["seed"] for row in rows} == set(range(5))
    assert stages.table(rows) in (ROOT / "docs" / "stages-measured.md").read_text()
