"""`grace advise` and `grace plan` agree, over models, methods, rates and machines."""

import itertools

import pytest

from grace.planner import advise, plan, ways
from grace.planner.costs import Cluster, Codec, Costs, Curve, Link, Speed
from grace.planner.profile import Profile, TensorProfile

SIZES = (1e3, 1e8)


def codec(params, ratio, seconds):
    """``ratio``: payload bytes per dense byte. ``seconds``: encoding time per million elements."""
    encode = Curve(SIZES, (2e-5, seconds * 100))
    decode = Curve(SIZES, (1e-5, seconds * 50))
    return Codec(params, Curve(SIZES, (4e3 * ratio, 4e8 * ratio)), {"gpu": Speed(encode, decode, decode)}, "made up")


def model(name, sizes, seconds):
    tensors = tuple(TensorProfile(f"{name}{i}", (size,), seconds / len(sizes)) for i, size in enumerate(sizes))
    return Profile(tensors, "made up", seconds / 2)


MODELS = {
    "large": model("large", [4_000_000, 4096, 16_000_000, 100_000_000], 0.08),
    "many": model("many", [768, 600_000, 768, 2_400_000] * 12, 0.07),
    "small": model("small", [500, 2000, 9000] * 8, 0.01),
}
METHODS = {
    "signs": codec({"compressor": "efsignsgd", "block_size": 512}, 1 / 31, 1.5e-4),
    "shared positions": codec({"compressor": "randomk", "compress_ratio": 0.01}, 0.01, 5e-5),
    "top-k": codec({"compressor": "topk", "compress_ratio": 0.01}, 0.02, 3e-4),
    "ragged": codec({"compressor": "dgc", "compress_ratio": 0.01}, 0.02, 3e-4),
    "half": codec({"compressor": "fp16"}, 0.5, 2e-5),
    "slow": codec({"compressor": "qsgd"}, 0.26, 2e-3),
}
MACHINES = [(8, 1), (8, 8), (1, 4)]
RATES = [1, 25, 400]


def cluster(machines, gbit):
    nodes, per_node = machines
    return Cluster(nodes, per_node, Link(50e-6, gbit / 8e-9), Link(10e-6, 800 / 8e-9))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_a_plan_is_never_slower_than_a_uniform_way_and_advice_says_the_same(name, method):
    profile, priced = MODELS[name], METHODS[method]
    for machines, gbit in itertools.product(MACHINES, RATES):
        where = f"{machines} machines and workers on each, {gbit} Gbit/s"
        there = cluster(machines, gbit)
        made = plan.make(profile, Costs(there, priced, ("gpu",)))
        advice = advise.advise(profile, there, [advise.candidate(method, priced)])
        (verdict,) = advice.verdicts
        step = made.plan.predicted.step
        rivals = {**advice.dense_ways, **verdict.ways, "dense": advice.dense}
        assert step <= min(rivals.values()) * (1 + 1e-8), (where, rivals)
        assert bool(made.plan.compressed) == (advice.fastest != "dense"), where
        same = set(made.seconds) & set(rivals) - {ways.PLAN}
        assert len(same) >= 2, where
        assert {way: made.seconds[way] for way in same} == {way: rivals[way] for way in same}, where
        if advice.fastest != "dense":
            assert (verdict.way, verdict.seconds) == (made.plan.way, step), where
            assert verdict.exchange == made.plan.exchange(), where
        now = made.plan.predicted
        assert now.step == pytest.approx(profile.forward + now.backward + now.communication + now.compression), where
        assert now.communication + now.compression <= now.step, where
        assert now.dense == advise.step(profile, there), where


def test_every_kind_of_answer_occurs():
    # Otherwise the test above could pass without cases.
    found = set()
    for name, method, machines, gbit in itertools.product(MODELS, METHODS, MACHINES[:2], RATES[:2]):
        made = plan.make(MODELS[name], Costs(cluster(machines, gbit), METHODS[method], ("gpu",)), "paper")
        found.add(made.plan.way)
    assert found >= {ways.PLAN, "dense", "allreduce", "twostage", "hierarchical, outer twostage"}, found


def test_two_stages_worked_out_by_hand():
    # 4 workers, 1 MB/s, 1 ms of latency; 10 kB of payload for 100,000 elements: 3/4 of it is sent, twice.
    profile, there = model("w", [100_000], 0.0), Cluster(4, 1, Link(1e-3, 1e6))
    rate = Curve((1.0,), (1e-6,))
    signs = Codec({"compressor": "efsignsgd", "block_size": 8}, Curve((1.0,), (0.1,)), {"gpu": Speed(rate, rate, rate)})
    shard = 25_000 * 1e-6  # four quarters are decoded, one is averaged and encoded, all are decoded at the end
    seconds = ways.play(profile, there, signs, ways.FLAT["twostage"]).seconds
    assert seconds == pytest.approx(0.1 + (0.003 + 0.0075) + 4 * shard + shard + (0.003 + 0.0075) + 0.1)


def test_what_cannot_carry_a_method_is_not_tried():
    there = cluster((8, 8), 25)
    names = {name: [way.name for way in ways.every(priced.params, there)] for name, priced in METHODS.items()}
    both = ["allgather", "twostage"]
    assert names["top-k"] == [*both, *(f"hierarchical, outer {name}" for name in both)]
    assert [way.name for way in ways.every({"compressor": "topk", "memory": "ef21"}, cluster((1, 4), 1))] == both[:1]
    assert "twostage" in names["signs"]
    assert "allreduce" in names["shared positions"]
    assert [way.name for way in ways.every({"compressor": "topk"}, cluster((1, 4), 1))] == both
    only = ways.every({"compressor": "fp16", "communicator": "alltoall"}, there)
    assert [way.name for way in only] == ["twostage"]
    with pytest.raises(ValueError, match="leave it out"):
        ways.every({"compressor": "topk", "communicator": "planned"}, there)
    with pytest.raises(ValueError, match="leave communicator out"):
        plan.refuse({"compressor": "topk", "communicator": "allgather"})


def test_thousands_of_workers_take_the_same_work():
    advice = advise.advise(MODELS["many"], cluster((512, 8), 100), [advise.candidate("s", METHODS["signs"])])
    assert next(iter(advice.verdicts[0].ways)) == advice.verdicts[0].way
    assert advice.verdicts[0].ways["twostage"] < advice.verdicts[0].ways["allgather"] / 4
