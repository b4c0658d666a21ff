"""Workers in one process: inputs, sequences, and the numbers of the report, counted by hand."""

import gc
import json
import warnings

import numpy as np
import pytest
from methods import BACKENDS, backend, normal

from grace import grace_from_params, simulate
from grace.engine.report import Report
from grace.engine.state_store import StateStore
from grace.engine.trace import Event
from grace.transports.local import LocalTransport

N = 2000


def gradients(size=3, seed=0, n=N):
    return [{"w": normal(n, seed=seed + rank)} for rank in range(size)]


def test_the_mean_of_one_step(xp):
    found = simulate({"compressor": "none"}, gradients(), backend=xp.name)
    expected = np.mean([g["w"] for g in gradients()], 0)
    assert len(found.means) == 3
    assert found.history == [found.means]
    for worker in found.means:
        assert list(worker) == ["w"]
        assert isinstance(worker["w"], np.ndarray)
        assert worker["w"].dtype == np.float32
        np.testing.assert_allclose(worker["w"], expected, rtol=1e-5, atol=1e-6)


def test_a_sequence_is_one_step_each_and_begins_again(xp):
    sequence = [gradients(2, seed=0), gradients(2, seed=10)]
    found = simulate({"compressor": "none"}, sequence, backend=xp.name)
    assert len(found.history) == 2
    for workers, step in zip(sequence, found.history, strict=True):
        expected = np.mean([g["w"] for g in workers], 0)
        np.testing.assert_allclose(step[1]["w"], expected, rtol=1e-5, atol=1e-6)
    longer = simulate({"compressor": "none"}, sequence, backend=xp.name, steps=5)
    assert [np.array_equal(step[0]["w"], found.history[i % 2][0]["w"]) for i, step in enumerate(longer.history)] == [
        True
    ] * 5
    assert longer.report.steps == 5
    assert np.array_equal(longer.means[0]["w"], longer.history[4][0]["w"])


def test_memory_lives_from_step_to_step(xp):
    x = gradients(1)[0]["w"]
    found = simulate({"compressor": "topk", "compress_ratio": 0.5}, [{"w": x}], backend=xp.name, steps=2)
    first, second = (step[0]["w"] for step in found.history)
    kept = np.where(first == 0, x, 0)
    again = x + kept
    top = np.argsort(-abs(again), kind="stable")[:1000]
    expected = np.zeros(N, np.float32)
    expected[top] = again[top]
    assert np.array_equal(second, expected)
    left = found.state[0]["tensors"]["w"]["memory/residual"]
    assert np.array_equal(np.asarray(left), again - expected)
    assert found.state[0]["step"] == 2


@pytest.mark.parametrize("source", [*BACKENDS, "lists"])
def test_gradients_may_come_from_any_toolkit(xp, source):
    made = gradients(2)
    given = [{"w": g["w"].tolist() if source == "lists" else backend(source).asarray(g["w"], "float32")} for g in made]
    found = simulate({"compressor": "none"}, given, backend=xp.name)
    np.testing.assert_allclose(found.means[0]["w"], (made[0]["w"] + made[1]["w"]) / 2, rtol=1e-6, atol=1e-7)
    assert np.array_equal(np.asarray(given[0]["w"], np.float32), made[0]["w"])


def test_gradients_of_torch_in_brain_floats():
    torch = backend("torch")
    made = torch.cast(torch.asarray(normal(N), "float32"), "bfloat16")
    for name in ("torch", "tensorflow"):
        backend(name)
        found = simulate({"compressor": "none"}, [{"w": made}] * 2, backend=name)
        assert np.array_equal(np.asarray(found.means[0]["w"], np.float32), torch.to_numpy(made))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes_are_kept(xp, dtype):
    given = [{"w": g["w"].astype(dtype)} for g in gradients(2)]
    found = simulate({"compressor": "topk", "compress_ratio": 1.0}, given, backend=xp.name)
    assert found.means[0]["w"].dtype == dtype


def test_wide_floats_that_go_dense_stay_wide(xp):
    given = [{"w": np.array([1 + 2.0**-40, 1.0])}, {"w": np.array([1 + 2.0**-40, 3.0])}]
    found = simulate({"compressor": "topk"}, given, backend=xp.name)
    assert found.means[0]["w"].tolist() == [1 + 2.0**-40, 2.0]


def test_absent_gradients(xp):
    one, two = normal(N), normal(N, seed=1)
    given = [{"a": one, "b": one}, {"a": None, "b": two}, {"b": two}]
    found = simulate({"compressor": "none"}, [given, [{"b": one}, {"b": one}, {"b": one}]], backend=xp.name)
    for worker in found.history[0]:
        np.testing.assert_allclose(worker["a"], one / 3, rtol=1e-6)
    assert [worker["a"] for worker in found.history[1]] == [None] * 3
    assert np.allclose(found.means[0]["b"], one)


def test_what_is_no_gradient_is_refused():
    with pytest.raises(TypeError, match="'w' has dtype int32"):
        simulate({"compressor": "none"}, [{"w": np.arange(5, dtype=np.int32)}])
    with pytest.raises(ValueError, match="unknown backend 'mxnet'"):
        simulate({"compressor": "none"}, gradients(1), backend="mxnet")


# -- report ---------------------------------------------------------------------------------------------------------
def numbers(report):
    return report.bytes_sent, report.bytes_received, report.bytes_dense


K = 20  # of N elements, at a ratio of 1%
BLOCKS = 4  # of 512 elements: N = 3 * 512 + 464
QSGD = N + 4 * BLOCKS
# One step of three workers: the bytes that worker 0 sends and receives.
TRAFFIC = [
    ({"compressor": "none"}, "allreduce", 4 * N, 4 * N),
    ({"compressor": "fp16"}, "allreduce", 2 * N, 2 * N),
    ({"compressor": "randomk"}, "allreduce", 4 * K, 4 * K),
    ({"compressor": "signsgd", "packed": False}, "allreduce", N + 1, N + 1),
    ({"compressor": "topk"}, "allgather", 8 * K, 2 * 8 * K),
    ({"compressor": "topk"}, "broadcast", 8 * K, 2 * 8 * K),
    ({"compressor": "efsignsgd"}, "allgather", N // 8 + 4, 2 * (N // 8 + 4)),
    ({"compressor": "qsgd"}, "broadcast", QSGD, 2 * QSGD),
    # Shards of ceil(4 blocks / 3) = 2 blocks: 1024, 976 and 0 elements. Worker 0 sends worker 1's shard (976 codes,
    # 2 norms), then the mean of its own (1024 codes, 2 norms) to all. It receives its own shard from both others,
    # and the means of their shards.
    ({"compressor": "qsgd"}, "twostage", 976 + 8 + 1024 + 8, 2 * (1024 + 8) + 976 + 8),
]


@pytest.mark.parametrize("params, communicator, sent, received", TRAFFIC, ids=lambda value: str(value)[:40])
def test_bytes_are_counted(xp, params, communicator, sent, received):
    report = simulate({**params, "communicator": communicator}, gradients(), backend=xp.name, steps=2).report
    assert numbers(report) == (2 * sent, 2 * received, 2 * 4 * N)
    assert report.ratio == pytest.approx(4 * N / sent)
    (tensor,) = report.tensors
    assert (tensor.name, tensor.shape, tensor.method, tensor.reason) == ("w", (N,), params["compressor"], "")
    assert (tensor.bytes_sent, tensor.bytes_dense) == (2 * sent, 2 * 4 * N)


def test_gathers_that_bring_more_than_a_dense_allreduce_say_so(xp):
    params = {"compressor": "natural", "communicator": "allgather"}  # 8 bits: too many from nine workers on
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert simulate(params, gradients(8), backend=xp.name).report.heavier == ""
        twice = {"compressor": "blockint", "bits": 8, "communicator": "twostage"}
        assert simulate(twice, gradients(12), backend=xp.name).report.heavier == ""
    with pytest.warns(UserWarning, match=r"each of 12 workers 1\.5 times the bytes of a dense.*'twostage'") as told:
        report = simulate(params, gradients(12), backend=xp.name, steps=3).report
    assert len(told) == 1
    assert report.heavier == str(told[0].message)
    assert report.heavier in str(report)


def test_no_step_looks_at_residuals(xp, monkeypatch):
    # Norms of residuals, which reports contain, need a pass over the data; on a device the host would also wait.
    grc, w = grace_from_params({"compressor": "topk"}, LocalTransport()), xp.asarray(normal(N), "float32")
    grc.build({"w": w})
    monkeypatch.setattr(StateStore, "norms", lambda *_: pytest.fail("a step asked for norms"))
    for _ in range(2):
        grc.step({"w": w})
    monkeypatch.undo()
    assert grc.report().tensors[0].residual_norm > 0


def test_bytes_of_payloads_whose_length_varies(xp):
    given = [{"w": np.where(np.arange(N) < 100 * (rank + 1), 1, 0).astype(np.float32)} for rank in range(3)]
    for communicator in ("allgather", "broadcast"):
        params = {"compressor": "threshold", "threshold": 0.5, "communicator": communicator}
        report = simulate(params, given, backend=xp.name).report
        assert numbers(report) == (8 * 100, 8 * (200 + 300), 4 * N)


def test_bytes_of_low_rank_factors(xp):
    given = [{"w": normal(50, 40, seed=rank)} for rank in range(2)]
    report = simulate({"compressor": "powersgd"}, given, backend=xp.name).report
    assert numbers(report) == (4 * 4 * (50 + 40), 4 * 4 * (50 + 40), 4 * N)


def test_dense_tensors_are_counted_too(xp):
    given = [{"w": normal(N), "bias": normal(10).astype(np.float16), "none": normal(0)} for _ in range(2)]
    report = simulate({"compressor": "topk"}, given, backend=xp.name).report
    rows = {tensor.name: tensor for tensor in report.tensors}
    # A half-precision gradient is averaged in single precision.
    assert {name: tensor.bytes_sent for name, tensor in rows.items()} == {"w": 8 * K, "bias": 40, "none": 0}
    assert {name: tensor.bytes_dense for name, tensor in rows.items()} == {"w": 4 * N, "bias": 20, "none": 0}
    assert rows["bias"].method == "dense"
    assert rows["bias"].reason == "fewer than min_numel=1024 elements"
    assert rows["none"].reason == "empty"
    assert report.bytes_sent == 8 * K + 40
    assert list(rows) == ["w", "bias", "none"]


def test_the_norm_of_what_is_kept(xp):
    x = normal(N)
    found = simulate({"compressor": "topk"}, [{"w": x}], backend=xp.name)
    left = x - found.means[0]["w"]
    assert found.report.tensors[0].residual_norm == pytest.approx(np.linalg.norm(left.astype(np.float64)), rel=1e-5)
    assert simulate({"compressor": "qsgd"}, [{"w": x}], backend=xp.name).report.tensors[0].residual_norm is None


def test_a_report_can_be_read(xp):
    given = [{"conv": normal(64, 32), "bias": normal(3)} for _ in range(2)]
    report = simulate({"compressor": "topk"}, given, backend=xp.name, steps=2).report
    assert report.method == "topk + residual + allgather"
    head, titles, *rows = str(report).splitlines()
    assert "worker 0 of 2 | 2 steps" in head
    assert "172 bytes sent, dense 8,204" in head
    assert "ratio 47.7" in head
    assert titles.split() == ["tensor", "shape", "method", "bytes/step", "ratio", "residual"]
    assert rows[0].split()[:5] == ["conv", "64x32", "topk", "160", "51.2"]
    assert rows[1].split()[:5] == ["bias", "3", "dense", "12", "1.0"]
    assert rows[1].endswith("fewer than min_numel=1024 elements")


def test_a_report_is_plain_data(xp):
    report = simulate({"compressor": "topk"}, gradients(2), backend=xp.name).report
    found = json.loads(json.dumps(report.to_dict()))
    assert found["ratio"] == report.ratio == 4 * N / (8 * K)
    assert (found["steps"], found["rank"], found["world_size"], found["skipped"]) == (1, 0, 2, 0)
    assert (found["bytes_sent"], found["bytes_received"], found["bytes_dense"]) == numbers(report)
    assert found["tensors"][0]["shape"] == [N]
    assert set(found["times"]) == (set() if xp.traced else {"compress", "wait", "decompress"})
    assert all(seconds >= 0 for seconds in found["times"].values())


def test_a_report_before_the_first_step():
    report = Report(0, 0, 1, "none + none + allreduce", 0, 0, 0)
    assert report.ratio == 1
    assert "0 steps" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["tensors"] == []


def test_steps_that_were_skipped_are_counted():
    bad = gradients(2)
    bad[1]["w"] = np.where(np.arange(N) == 7, np.nan, bad[1]["w"]).astype(np.float32)
    for name in ("numpy", "torch"):
        backend(name)
        assert simulate({"compressor": "topk"}, [gradients(2), bad, gradients(2)], backend=name).report.skipped == 1


def test_a_timeline_is_kept_only_if_it_is_asked_for_and_of_that_many_steps(tmp_path):
    given = {"w": np.ones(2000, np.float32)}

    def made(**options):
        grace = grace_from_params({"compressor": "topk", **options}, "local")
        grace.build(given)
        for _ in range(12):
            grace.step({"w": given["w"].copy()})
        return grace

    without = made()
    with pytest.raises(ValueError, match=r"no trace was kept.*'trace': 20"):
        without.report(trace=tmp_path / "none.json")
    assert without.report().times["compress"] > 0
    assert not any(type(each) is Event for each in gc.get_objects())
    counts = []
    for steps in (1, 3, 50):
        made(trace=steps).report(trace=tmp_path / f"{steps}.json")
        events = json.loads((tmp_path / f"{steps}.json").read_text())["traceEvents"]
        counts.append(sum(event["ph"] == "X" and event["cat"] == "compress" for event in events))
    assert counts == [counts[0], 3 * counts[0], 12 * counts[0]]
    assert counts[0] > 0
    with pytest.raises(ValueError, match="trace=-1 must be 0 or more"):
        made(trace=-1)
