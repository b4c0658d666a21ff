"""Costs computed by hand, fits, curves, invalid files, and measurements."""

import json
import random

import numpy as np
import pytest
from methods import backend

from grace.backends import get_backend
from grace.bench import costs as measure
from grace.communicators.planned.strategy import Action, options, parse
from grace.engine.codecs import TensorCodec
from grace.engine.groups.native import Decoder, Encoder
from grace.planner import models
from grace.planner.advise import step
from grace.planner.costs import COEFFICIENTS, Cluster, Codec, Costs, Curve, Link, Rate, Speed, cluster, codec, fitted
from grace.planner.profile import Profile, TensorProfile, apportioned, from_dict, load, medians
from grace.planner.timeline import CPU, DEVICE, INTER, INTRA
from grace.transports.local import LocalTransport

TWO = Cluster(4, 2, Link(1e-3, 1e6), Link(1e-4, 1e8))
"""4 machines with 2 workers: 1 ms and 1 MB/s between, 0.1 ms and 100 MB/s within."""
SPEED = Speed(Curve((1.0,), (1e-6,)), Curve((1.0,), (2e-6,)), Curve((1.0,), (5e-7,)))
TENTH = Codec({"compressor": "topk"}, Curve((1.0,), (0.4,)), {"gpu": SPEED, "cpu": SPEED})


def seconds(text, size=10_000, cluster=TWO):
    return [pytest.approx(s) for _, s in Costs(cluster, TENTH, min_numel=0).chain(parse(text), size)]


def test_chains_worked_out_by_hand():
    flat = Cluster(4, 1, Link(1e-3, 1e6))
    # 40 kB on 4 workers: 6 latencies, and 1.5 times the bytes.
    assert seconds("allreduce(flat)", cluster=flat) == [0.006 + 0.060]
    assert seconds("reduce_scatter(flat) allgather(flat)", cluster=flat) == [0.003 + 0.030, 0.003 + 0.030]
    assert seconds("reduce(flat) broadcast(flat)", cluster=flat) == [0.002 + 0.040] * 2
    # 4 kB of payload; 4 payloads are decoded: the first in 2 us per element, others in 0.5 us.
    compressed = seconds("compress(gpu) allgather*(flat) decompress(gpu)", cluster=flat)
    assert compressed == [0.01, 0.003 + 0.012, 0.02 + 3 * 0.005]
    # Shards of a quarter: 3/4 of 4 kB are sent; decodes 4 pieces of 2500, encodes 2500, sends them, decodes 10000.
    text = "compress(cpu) alltoall*(flat) decompress(gpu) compress(gpu) allgather*(flat) decompress(cpu)"
    assert seconds(text, cluster=flat) == [0.01, 0.006, 0.00875, 0.0025, 0.003 + 0.003, 0.02]
    found = Costs(flat, TENTH).chain(parse(text), 10_000)
    assert [resource for resource, _ in found] == [CPU, INTER, DEVICE, DEVICE, INTER, CPU]
    # Without decoding in between: 4 pieces of a quarter are forwarded, and 4 whole payloads decoded.
    text = "compress(gpu) alltoall*(flat) allgather*(flat) decompress(gpu)"
    assert seconds(text, cluster=flat) == [0.01, 0.006, 0.003 + 0.012, 0.02 + 3 * 0.005]


def test_levels_worked_out_by_hand():
    # Within: half of 40 kB at 100 MB/s. Between: 20 kB for each of 2 workers share a link at 1 MB/s, 1.5 times.
    text = "reduce_scatter(intra) allreduce(inter) allgather(intra)"
    assert seconds(text) == [1e-4 + 0.0002, 0.006 + 0.060, 1e-4 + 0.0002]
    # One root per machine: it has the link to itself, but sends all bytes.
    text = "reduce(intra) allreduce(inter) broadcast(intra)"
    assert seconds(text) == [1e-4 + 0.0004, 0.006 + 0.060, 1e-4 + 0.0004]
    text = "compress(gpu) gather*(intra) allgather*(inter) broadcast*(intra) decompress(gpu)"
    assert seconds(text) == [0.01, 1e-4 + 4e-5, 0.003 + 0.024, 1e-4 + 8 * 4e-5, 0.02 + 7 * 0.005]
    found = Costs(TWO, TENTH).chain(parse(text), 10_000)
    assert [resource for resource, _ in found] == [DEVICE, INTRA, INTER, INTRA, DEVICE]
    # All workers exchange with all: both workers of a machine share its link.
    assert TWO.seconds(Action("alltoall"), 8e3, 2) == pytest.approx(0.007 + 0.014)


def test_every_strategy_has_a_finite_chain():
    for there in (TWO, Cluster(3, 3, Link(0.0, float("inf")))):
        costs = Costs(there, TENTH)
        for option in options():
            chain = costs.chain(option, 999_999)
            assert len(chain) == len(option.actions)
            assert all(0 <= each < float("inf") for _, each in chain)


def test_small_tensors_travel_with_others():
    costs = Costs(TWO, TENTH)
    ((option, ((resource, alone),)),) = costs.candidates(1023)
    assert (str(option), resource) == ("allreduce(flat)", INTER)
    assert alone == pytest.approx(2 * 7 / 8 * 4 * 1023 / 1e6)
    assert len(costs.candidates(1024)) > 1


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_fits_recover_what_made_the_numbers(kind):
    draw = random.Random(0)
    for workers in (2, 3, 8):
        latencies, times = COEFFICIENTS[kind](workers)
        for rate in (Rate(1e-4, 1e-8), Rate(0.0, 1e-9), Rate(1e-3, 0.0)):
            exact = [(size, latencies * rate.latency + times * size * rate.per_byte) for size in measure.BYTES]
            found = fitted(kind, workers, exact)
            assert found == pytest.approx(rate, rel=1e-6, abs=1e-12)
        noisy = [(size, (latencies * 1e-4 + times * size * 1e-8) * draw.uniform(0.9, 1.1)) for size in measure.BYTES]
        assert fitted(kind, workers, noisy) == pytest.approx(Rate(1e-4, 1e-8), rel=0.1)


def test_a_burst_does_not_bend_the_line():
    # A link of 4e-8 seconds per byte; the first 100 kB are free.
    measured = [(size, 1e-3 + 4e-8 * max(size - 1e5, 0)) for size in (2**12, 2**16, 2**19, 2**22)]
    found = fitted("broadcast", 2, measured)
    assert found.latency + found.per_byte * 2**22 == pytest.approx(measured[-1][1], rel=0.2)


def test_no_fit_is_negative():
    falling = fitted("allreduce", 4, [(1e3, 1.0), (1e6, 0.1)])
    steep = fitted("allreduce", 4, [(1e3, 1e-6), (1e6, 1.0)])
    assert min(*falling, *steep) >= 0
    with pytest.raises(ValueError, match="between at least 2 workers"):
        fitted("allreduce", 1, [(1e3, 1.0)])


def test_messages_take_their_time_of_the_device():
    flat = Cluster(4, 1, Link(1e-3, 1e6), message=Rate(1e-3, 1e-8))
    costs = Costs(flat, TENTH)
    text = "compress(gpu) allgather*(flat) decompress(gpu)"
    assert seconds(text, cluster=flat) == [0.01, 0.001 + 4e-5, 0.015, 0.035]
    assert [resource for resource, _ in costs.chain(parse(text), 10_000)] == [DEVICE, DEVICE, INTER, DEVICE]
    assert costs.labels(parse(text)) == [
        "compress(gpu)", "hand over allgather*(flat)", "allgather*(flat)", "decompress(gpu)"
    ]  # fmt: skip
    # A small tensor joins other messages, so it costs only its bytes.
    assert costs.chain(parse("allreduce(flat)"), 100)[0] == (DEVICE, pytest.approx(4e-6))
    again = cluster(json.loads(json.dumps(flat.to_dict())))
    assert again.message == flat.message
    # Two buckets of 40 MB make two allreduces. The backward pass waits while each one is handed over.
    found = Profile((TensorProfile("b", (10**7,), 0.1), TensorProfile("a", (10**7,), 0.1)), "given")
    free = Cluster(4, 1, Link(0.0, float("inf")), message=Rate(1e-3, 1e-9))
    assert step(found, free) == pytest.approx(0.2 + 2 * (0.001 + 0.04))


def test_curves():
    curve = Curve((10.0, 100.0, 1000.0), (1.0, 10.0, 55.0))
    assert [curve(size) for size in (1, 10, 55, 100, 550)] == pytest.approx([1, 1, 5.5, 10, 32.5])
    assert Curve((10.0, 1000.0), (1.0, 10.0))(100_000.0) == pytest.approx(100.0)  # extrapolated as the square root
    assert Curve((10.0, 100.0), (1.0, 100.0))(1000.0) == pytest.approx(1000.0)  # at most linear in the elements
    assert Curve((10.0, 100.0), (0.0, 0.0))(1000.0) == 0.0


def test_files_and_back():
    one = Cluster(2, 4, Link(1e-5, 1e9, {"allreduce": Rate(1e-5, 2e-9)}), flat=Link(1e-4, 1e9))
    again = cluster(json.loads(json.dumps(one.to_dict())))
    assert again.inter.fits == one.inter.fits
    assert again.flat.bandwidth == pytest.approx(1e9)
    assert codec(json.loads(json.dumps(TENTH.to_dict()))) == TENTH
    made = models.profile("lstm")
    assert from_dict(json.loads(json.dumps(made.to_dict()))) == made


@pytest.mark.parametrize(
    "make, data, match",
    [
        (cluster, [], "a cluster is"),
        (cluster, {"inter": {}}, "gbit_per_s of inter=None"),
        (cluster, {"inter": {"gbit_per_s": 0}}, "is 0"),
        (cluster, {"inter": {"gbit_per_s": 1}, "nodes": 1.5}, "whole numbers"),
        (cluster, {"inter": {"gbit_per_s": 1}, "hosts": 2}, "a cluster has no 'hosts'"),
        (cluster, {"inter": {"gbit_per_s": 1, "fits": {"shout": [1, 2]}}}, "fits of inter"),
        (cluster, {"inter": {"gbit_per_s": float("nan")}}, "finite"),
        (cluster, {"inter": {"gbit_per_s": 1}, "message": 3}, "message is"),
        (cluster, {"inter": {"gbit_per_s": 1}, "message": [1, -1]}, "seconds per byte of message"),
        (codec, {}, "compression costs are"),
        (codec, {"params": {}, "wire": [], "speeds": {}}, "name a"),
        (codec, {**TENTH.to_dict(), "wire": [[2, 1], [1, 1]]}, "must rise"),
        (codec, {**TENTH.to_dict(), "wire": [[1, -1]]}, "finite number of at least 0"),
        (codec, {**TENTH.to_dict(), "wire": [1]}, r"is \[\[elements, value\]"),
        (codec, {**TENTH.to_dict(), "speeds": {"tpu": {}}}, "speeds of 'topk'"),
        (codec, {**TENTH.to_dict(), "speeds": {}}, "are empty"),
        (from_dict, {"tensors": []}, "a profile is"),
        (from_dict, {"tensors": [{}]}, "has no name"),
        (from_dict, {"tensors": [{"name": "w"}]}, "needs a"),
        (from_dict, {"tensors": [{"name": "w", "shape": [True]}]}, "needs a"),
        (from_dict, {"tensors": [{"name": "w", "size": 4, "backward": -1}]}, "backward of 'w'"),
        (from_dict, {"tensors": [{"name": "w", "size": 4}] * 2}, "two tensors of the name 'w'"),
        (from_dict, {"tensors": [{"name": "w", "size": 4}], "version": 9}, "version 9"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(make, data, match):
    with pytest.raises(ValueError, match=match):
        make(data)


def test_wrong_clusters_and_devices_are_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        Cluster(0, 1, Link(0, 1))
    with pytest.raises(ValueError, match="known for gpu, cpu"):
        Costs(TWO, TENTH, devices=("tpu",))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json"):
        load(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="choose from vgg16"):
        models.profile("vgg17")


@pytest.mark.parametrize(
    "name, tensors, elements",
    [
        ("vgg16", 32, 138_357_544),
        ("resnet50", 161, 25_557_032),
        ("resnet101", 314, 44_549_160),
        ("gpt2", 148, 124_439_808),
        ("ugatit", 148, 670_761_088),
        ("bert-base", 206, 110_106_428),
        ("lstm", 10, 85_974_278),
    ],
)
def test_models_have_their_tensors(name, tensors, elements):
    made = models.profile(name, backward=0.5)
    assert (len(made.tensors), made.size) == (tensors, elements)
    assert len({tensor.name for tensor in made.tensors}) == tensors
    assert made.backward == pytest.approx(0.5)
    assert "assumed" in models.profile(name).source


def test_profiles_are_medians_of_differences():
    steps = [[("b", 1.0), ("a", 3.0)], [("b", 2.0), ("a", 3.0)], [("b", 1.5), ("a", 9.0)]]
    made = medians(steps, {"a": (2, 2), "b": (3,)})
    assert made == Profile((TensorProfile("b", (3,), 1.5), TensorProfile("a", (2, 2), 2.0)), "measured")
    shared = apportioned([("a", (1,), 3.0), ("b", (1,), 1.0)], 8.0, "x")
    assert [tensor.backward for tensor in shared.tensors] == [6.0, 2.0]
    assert shared.scaled(2.0, "y").backward == 2.0


@pytest.mark.parametrize("name, bits", [("topk", 0.64), ("efsignsgd", 1.0), ("fp16", 16.0), ("none", 32.0)])
def test_measured_bytes_are_those_of_the_catalogue(name, bits):
    found = measure.compressor({"compressor": name}, sizes=(2**12, 2**16), budget=0.001)
    assert 8 * found.wire(2**16) / 2**16 == pytest.approx(bits, rel=0.01)
    assert found.encode(2**16) > 0
    assert found.decode(2**16, 4) >= found.decode(2**16, 1)
    assert found.devices == ("gpu",)


def test_low_rank_bytes_grow_as_the_square_root():
    found = measure.compressor({"compressor": "powersgd"}, sizes=(2**12, 2**16, 2**18), budget=0.001)
    assert found.wire(2**24) == pytest.approx(4 * 4 * 2 * 2**12)


class Steady(LocalTransport):
    """One process that acts as two workers; messages take the given time."""

    size = 2

    def __init__(self):
        super().__init__()
        self.size, self.clock = 2, 0.0

    @property
    def node_size(self):
        return 1

    def exchange(self, text):
        return [text] * 2

    def start(self, collectives, name):
        kind = name.rpartition(".")[2]
        latencies, times = COEFFICIENTS[kind](2)
        (asked,) = collectives
        arrays = [a for part in asked.parts for a in part] if hasattr(asked, "parts") else asked.arrays
        held = sum(a.nbytes for a in arrays)
        self.clock += latencies * 1e-4 + times * held * 1e-8
        return list


def test_a_pool_beside_the_device():
    both = codec({**TENTH.to_dict(), "speeds": {"gpu": TENTH.to_dict()["speeds"]["gpu"]}}).offloaded(0.1, 2.0)
    assert both.devices == ("gpu", "cpu")
    assert both.encode(1000) == pytest.approx(1e-4)
    assert both.encode(1000, "cpu") == pytest.approx(2e-3)
    assert both.decode(1000, 3, "cpu") == pytest.approx(2 * (2e-3 + 2 * 5e-4))
    ones = np.ones((64, 64))
    assert measure.contention(lambda: ones @ ones, {"compressor": "topk"}, 2**12, 0.01) >= 1


def test_measured_links_are_fitted(monkeypatch):
    transport = Steady().bind(get_backend("numpy"))
    monkeypatch.setattr("time.perf_counter", lambda: transport.clock)
    found = measure.links(transport, repeats=2)
    assert (found.nodes, found.per_node, found.source) == (2, 1, "measured")
    for kind in COEFFICIENTS:
        assert found.inter.rate(kind) == pytest.approx(Rate(1e-4, 1e-8), rel=1e-3)


def test_costs_at_work_are_those_of_whole_exchanges(monkeypatch):
    # A clock that advances only here: encoding takes 2 us per element, decoding 1 us. A message takes 50 us of the
    # thread, and arrives after 1 s, for which the thread waits.
    clock = [0.0]

    def taking(call, seconds):
        def slow(*args, **settings):
            clock[0] += seconds(args)
            return call(*args, **settings)

        return slow

    def started(self, collectives, name):
        clock[0] += 50e-6
        return taking(start(self, collectives, name), lambda _: 1.0)

    def elements(coder):  # ``coder``: an encoder or a decoder
        rows = coder._rows
        return int(rows.words[:, rows._columns["n"]].sum())

    start = LocalTransport.start
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(LocalTransport, "start", started)
    monkeypatch.setattr(TensorCodec, "_at_once", taking(TensorCodec._at_once, lambda args: 2e-6 * args[1].size))
    monkeypatch.setattr(TensorCodec, "mean", taking(TensorCodec.mean, lambda args: 1e-6 * args[2].size))
    monkeypatch.setattr(Encoder, "encode", taking(Encoder.encode, lambda args: 2e-6 * elements(args[0])))
    monkeypatch.setattr(Decoder, "mean", taking(Decoder.mean, lambda args: 1e-6 * elements(args[0])))
    given = Codec({"compressor": "topk"}, TENTH.wire, {"gpu": SPEED}, "idle")
    message, (found,) = measure.at_work(LocalTransport().bind(get_backend("numpy")), [given], (2**12, 2**14), 3)
    assert message == pytest.approx(Rate(50e-6, 0.0))
    for size in (2**12, 2**14):
        assert found.encode(size) == pytest.approx(2e-6 * size)
        assert found.decode(size) == pytest.approx(1e-6 * size)
        assert found.decode(size, 3) == pytest.approx(1e-6 * size * 1.5)  # further payloads cost as much as before
    assert found.wire is given.wire
    assert found.source == "measured in exchanges of 1 workers with numpy"


def test_links_need_workers():
    with pytest.raises(ValueError, match="at least 2 workers"):
        measure.links(LocalTransport().bind(get_backend("numpy")))


def test_a_torch_model_is_profiled():
    backend("torch")
    import torch

    from grace.planner.torch import profile

    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    model[2].bias.requires_grad_(False)
    x = torch.randn(256, 64)
    found = profile(model, lambda: model(x).square().mean(), steps=5)
    assert next(tensor.name for tensor in found.tensors) == "2.weight"
    assert {tensor.name: tensor.shape for tensor in found.tensors} == {
        "0.weight": (512, 64),
        "0.bias": (512,),
        "2.weight": (8, 512),
    }
    assert found.source == "measured"
    assert found.backward > 0
    assert found.forward > 0
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError, match="no parameters"):
        profile(torch.nn.ReLU(), lambda: x.sum())


def test_a_keras_model_is_profiled():
    backend("tensorflow")
    import keras

    from grace.planner.tensorflow import profile

    model = keras.Sequential(
        [keras.Input((16, 16, 3)), keras.layers.Conv2D(8, 3, name="c"), keras.layers.Flatten(), keras.layers.Dense(4)]
    )
    x = np.ones((8, 16, 16, 3), "float32")
    found = profile(model, lambda: keras.ops.mean(model(x) ** 2), steps=3)
    assert [tensor.shape for tensor in found.tensors] == [(4,), (1568, 4), (8,), (3, 3, 3, 8)]
    assert "apportioned by FLOPs" in found.source
    dense, convolution = found.tensors[1].backward, found.tensors[3].backward
    if found.backward:
        assert convolution / dense == pytest.approx(216 * 14 * 14 / 6272)
