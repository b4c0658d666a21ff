"""Predictions of local training, worked out by hand, and `grace advise --sync-every`."""

import json

import pytest

import grace
from grace.core.local_training import Settings
from grace.planner import local
from grace.planner.advise import faster
from grace.planner.costs import Cluster, Codec, Curve, Link, Speed
from grace.planner.profile import Profile, TensorProfile

MS = 1e-3
# Forward pass 5 ms, backward pass 3 x 10 ms, one bucket per tensor: a dense message takes 20 ms, one of top-k 10 ms.
PROFILE = Profile(tuple(TensorProfile(f"t{i}", (2**20,), 10 * MS) for i in range(3)), "given", 5 * MS)
TWO = Cluster(2, 1, Link(0.0, 2**20 * 4 / (20 * MS)))
PER = 1 / 2**20  # per element
SPEED = Speed(Curve((1.0,), (MS * PER,)), Curve((1.0,), (2 * MS * PER,)), Curve((1.0,), (MS * PER,)))
TOPK = Codec({"compressor": "topk", "communicator": "allgather"}, Curve((1.0,), (2.0,)), {"gpu": SPEED})


def compare(*schedule, cluster=TWO, **settings):
    found = local.compare(PROFILE, cluster, {"topk": TOPK}, Settings(*schedule, **settings), 4.0)
    return found, {verdict.label: verdict for verdict in found.verdicts}


def test_ten_steps_and_one_exchange_worked_out_by_hand():
    found, by = compare(10, fragment_sync_delay=1)
    assert found.computation == pytest.approx(35 * MS)
    dense, topk = by["dense"], by["topk"]
    # Synchronous: tests/test_planner_plan.py. An exchange takes three messages of 20 ms; a step hides 35 ms of them.
    assert dense.synchronous == pytest.approx(75 * MS)
    assert dense.seconds == pytest.approx((35 + 60 / 10) * MS)
    assert dense.delayed == pytest.approx((35 + 25 / 10) * MS)
    assert dense.nbytes == pytest.approx(4 * 3 * 2**20 / 10)
    assert dense.hiding_delay == 2
    # Encoding 0-1, 1-2, 2-3; messages 1-11, 11-21, 21-31; decoding 11-14, 21-24, 31-34. Device busy for 12 of 34 ms.
    assert topk.synchronous == pytest.approx(51 * MS)
    assert topk.seconds == pytest.approx((35 + 34 / 10) * MS)
    assert topk.delayed == pytest.approx((35 + 12 / 10) * MS)
    assert topk.nbytes == pytest.approx(2 * 3 * 2**20 / 10)
    assert topk.hiding_delay == 1
    assert topk.speedup == pytest.approx(51 / 36.2)
    assert (found.best, found.synchronous) == (topk, ("topk", topk.synchronous))
    # A synchronous dense step takes 35 ms and one message. At break-even a message takes 1.2 ms: the rate is 20 / 1.2.
    assert topk.break_even == pytest.approx(TWO.inter.bandwidth * 20 / 1.2, rel=1e-4)
    assert dense.break_even == float("inf"), "three messages in ten steps cost less than one in each"


def test_an_exchange_in_every_step_loses_the_overlap_with_the_backward_pass():
    found, by = compare(1)
    assert by["dense"].seconds == by["dense"].delayed == pytest.approx((35 + 60) * MS)
    assert by["topk"].seconds == pytest.approx((35 + 34) * MS)
    assert found.best is None
    assert not any(verdict.pays for verdict in found.verdicts)
    assert by["dense"].break_even is None
    assert found.to_dict()["best"] == "synchronous"


def test_fragments_take_turns():
    _, by = compare(9, fragments=3, fragment_sync_delay=1)
    dense, topk = by["dense"], by["topk"]
    assert dense.seconds == pytest.approx((35 + 3 * 20 / 9) * MS)
    assert dense.delayed == pytest.approx(35 * MS), "a step hides a fragment's message"
    assert (dense.hiding_delay, topk.hiding_delay) == (1, 1)
    assert topk.seconds == pytest.approx((35 + 3 * 14 / 9) * MS)
    assert topk.delayed == pytest.approx((35 + 3 * 4 / 9) * MS)
    _, slow = compare(9, fragments=3, fragment_sync_delay=1, cluster=faster(TWO, 0.1))
    assert slow["dense"].hiding_delay is None, "200 ms are longer than the slot of 105 ms"
    with pytest.raises(ValueError, match="only 3 parameters"):
        compare(8, fragments=4)


def test_a_delay_of_fewer_steps_than_rounds_hides_as_many_rounds():
    cost = local.Cost(busy=1.0, wait=10.0, rounds=2)
    assert [cost.hidden(4.0, delay) for delay in range(5)] == [0.0, 4.0, 8.0, 10.0, 10.0]
    assert cost.hidden(8.0, 1) == 5.0, "the second message is sent after the wait for the first"
    method = Codec({"compressor": "powersgd"}, Curve((1.0,), (0.1,)), {"gpu": SPEED})
    every = local.ways.every(method.params, TWO)
    found = {way.name: local.cost(PROFILE, TWO, method, way).rounds for way in every}
    assert found["allreduce"] == 2
    staged = {
        way.name: local.cost(PROFILE, TWO, TOPK, way).rounds for way in local.ways.every({"compressor": "topk"}, TWO)
    }
    assert staged == {"allgather": 1, "twostage": 2}


def test_advice_turns_where_it_says():
    found, by = compare(10, fragment_sync_delay=1)
    rate = by["topk"].break_even / TWO.inter.bandwidth
    assert compare(10, fragment_sync_delay=1, cluster=faster(TWO, rate * 0.99))[1]["topk"].pays
    assert not compare(10, fragment_sync_delay=1, cluster=faster(TWO, rate * 1.01))[1]["topk"].pays
    params = found.params(found.best)
    assert params["local"] == {"sync_every": 10, "fragment_sync_delay": 1}
    made = grace.local.from_params(params, "local")
    assert (made.settings, made.options.bucket_mb) == (found.settings, 4.0)
    _, free = compare(10, fragment_sync_delay=1, cluster=Cluster(2, 1, Link(0.0, float("inf"))))
    assert "fragment_sync_delay" not in found.params(free["dense"])["local"], "a delay that gains nothing is left out"


def test_the_command(tmp_path):
    pytest.importorskip("typer", reason="the command line")
    from typer.testing import CliRunner

    from grace.cli.app import app

    method = "topk:communicator=allgather"
    costs = tmp_path / "costs.json"

    def run(*words):
        words = ("advise", tmp_path / "model.json", method, "--costs", costs, *link, *words)
        done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "80", "TERM": "dumb"})
        assert done.exit_code == 0, done.output
        return done.stdout

    PROFILE.save(tmp_path / "model.json")
    costs.write_text(json.dumps(TOPK.to_dict()))
    link = ("--workers", 2, "--latency", 0, "--bandwidth", TWO.inter.bandwidth * 8e-9, "--bucket-mb", 4)
    data = json.loads(run("--sync-every", 10, "--json"))
    assert (data["best"], data["sync_every"], data["fragment_sync_delay"]) == (method, 10, 1)
    assert data["computation"] == pytest.approx(35 * MS)
    assert data["methods"]["dense"]["delayed"] == pytest.approx(37.5 * MS)
    assert data["methods"]["dense"]["break_even"] == "any"
    text = run("--sync-every", 10)
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines() if line.startswith(("topk", "dense"))]
    assert rows[:2] == [
        [method, "51.0", "38.4", "36.2", "1.41x", "629.1", "28"],
        ["dense", "75.0", "41.0", "37.5", "2.00x", "1,258.3", "always"],
    ]
    assert f"Exchange every 10 steps with {method}: 1.41 times as fast as" in " ".join(text.split())
    assert "Exchange every step" in run("--sync-every", 1)
