"""Plans as files, and the commands `grace plan` and `grace advise`; U3 and U4."""

import copy
import json
import math
import subprocess
import sys

import pytest
from support.commands import run
from support.costs import FAST, codec

from grace.communicators.planned.strategy import parse
from grace.planner import advise, measured, models, plan, ways
from grace.planner.costs import Cluster, Codec, Costs, Curve, Link, Speed, cluster
from grace.planner.profile import Profile, TensorProfile

SLOW = Speed(*(Curve((1e3, 1e8), (seconds, seconds * 1e5)) for seconds in (1e-5, 1e-5, 1e-5)))


def eight(gbit=10.0, latency=5e-5):
    return Cluster(8, 1, Link(latency, gbit / 8e-9))


def made(gbit=10.0, model="vgg16", **rest):
    return plan.make(models.profile(model), Costs(eight(gbit), codec(**rest)))


# -- plans -------------------------------------------------------------------------------------------------------------
def test_a_plan_is_read_as_it_was_written(tmp_path):
    planned = made()
    planned.plan.save(tmp_path / "plan.json")
    again = plan.load(tmp_path / "plan.json")
    assert again == planned.plan
    assert again.hash == planned.plan.hash
    assert again.compressed
    again.check({tensor.name: tensor.size for tensor in models.profile("vgg16").tensors}, 8)
    with pytest.raises(ValueError, match="for 8 workers, but there are 4"):
        again.check(workers=4)
    with pytest.raises(ValueError, match="differ in"):
        again.check({"w": 1})


def test_what_is_predicted_adds_up(tmp_path):
    planned = made()
    now, profile = planned.plan.predicted, models.profile("vgg16")
    assert now.step == pytest.approx(profile.forward + now.backward + now.communication + now.compression)
    assert now.step == plan.predict(profile, Costs(eight(), codec()), planned.plan.tensors)
    assert now.dense == advise.step(profile, eight())
    planned.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") == pytest.approx(
        (now.step - profile.forward) * 1e6
    )


def test_dense_is_an_answer():
    # On a fast link nothing is compressed, and the predicted step is that of dense gradients in buckets.
    fast = made(1e4, speed=SLOW).plan
    assert fast.compressed == []
    assert fast.predicted.step <= fast.predicted.dense
    slow = made(0.1).plan
    assert slow.compressed
    assert slow.predicted.step < slow.predicted.dense / 5


def test_many_small_messages_are_no_plan():
    # A message per tensor takes longer than buckets: the plan is dense, and predicts the step with buckets.
    tensors = tuple(TensorProfile(f"t{i}", (2000,), 1e-6) for i in range(200))
    found = plan.make(Profile(tensors, "given"), Costs(eight(10, 1e-3), codec(speed=SLOW))).plan
    assert found.compressed == []
    assert set(found.strategies.values()) == {"allreduce(flat)"}
    assert found.predicted.step == found.predicted.dense


@pytest.mark.parametrize("latency", [5e-5, 5e-3])
@pytest.mark.parametrize(
    "shapes, min_numel",
    [
        ([()], 1024),  # a scalar
        ([(100,), (7,)] * 30, 1024),
        ([(3000,)] * 4, 4096),
        ([(1000, 1000), (1000,), (10,)], 1024),  # a small tensor after a large one
        ([(1000,), (1000, 1000)], 1024),
    ],
)
def test_the_last_gradient_needs_a_message_of_at_least_one_latency(shapes, min_numel, latency):
    tensors = tuple(TensorProfile(f"t{i}", shape, 1e-3) for i, shape in enumerate(shapes))
    profile = Profile(tensors, "given")
    least = profile.backward + latency
    costs = Costs(eight(10, latency), codec(), min_numel=min_numel)
    found = plan.make(profile, costs)
    for seconds in (found.plan.predicted.step, *found.seconds.values()):
        assert seconds >= least
    assert plan.predict(profile, costs, found.plan.tensors) >= least
    if max(tensor.size for tensor in tensors) < min_numel:  # all tensors are sent in one dense message
        assert found.plan.predicted.step == found.plan.predicted.dense
        assert found.plan.compressed == []
    if min_numel == 1024:
        advice = advise.advise(profile, eight(10, latency), methods())
        for verdict in advice.verdicts:
            assert min(verdict.ways.values()) >= least
        if max(tensor.size for tensor in tensors) < min_numel:
            assert advice.fastest == "dense"


def wrong(change):
    data = copy.deepcopy(made().plan.to_dict())
    change(data)
    return data


def set_option(data, text, name="fc7.weight"):
    data["tensors"][name]["option"] = text


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda d: d.pop("tensors"), "no plan"),
        (lambda d: d.update(version=2), "version 2"),
        (lambda d: d.update(workers="8"), "whole machines"),
        (lambda d: d.update(workers_per_node=3), "whole machines"),
        (lambda d: d.update(params=None), "name a"),
        (lambda d: d["params"].update(compressor="topkk"), "did you mean 'topk'"),
        (lambda d: d["params"].update(compress_ratio=[1]), "names and numbers"),
        (lambda d: d["params"].update(compress_ratios=0.1), "compress_ratios"),
        (lambda d: d["tensors"].update(w=3), "'w' of the plan has no option"),
        (lambda d: set_option(d, "allreduce(moon)"), r"'fc7\.weight' of the plan: 'allreduce\(moon\)' is no action"),
        (lambda d: set_option(d, "reduce_scatter(flat)"), "does not end"),
        (lambda d: set_option(d, "reduce_scatter(intra) allreduce(inter) allgather(intra)"), "has levels"),
        (lambda d: set_option(d, 5), "is a text such as"),
        (lambda d: d["tensors"]["fc7.weight"].update(compress_ratio=0.5), "but the plan's params"),
        (lambda d: set_option(d, "allreduce(flat)", "conv1_1.bias") or d["tensors"].pop("fc7.weight"), "hash"),
        (lambda d: d["predicted"].update(step=-1), "predicted step"),
        (lambda d: d.pop("predicted"), "predicts nothing"),
        (lambda d: d.update(mode="guess"), "mode is 'guess'"),
    ],
)
def test_a_plan_is_not_trusted(change, match):
    with pytest.raises(ValueError, match=match):
        plan.from_dict(wrong(change))
    with pytest.raises(ValueError, match="no plan"):
        plan.from_dict([])


def test_methods_that_agree_inside_compress_are_refused():
    with pytest.raises(ValueError, match="`grace advise` compares"):
        made(params={"compressor": "powersgd"})


# -- advice ------------------------------------------------------------------------------------------------------------
def methods(speed=FAST):
    return [
        advise.candidate("topk", codec(speed=speed)),
        advise.candidate("fp16", codec({"compressor": "fp16"}, 0.5, speed)),
        advise.candidate("powersgd", codec({"compressor": "powersgd"}, 0.005, speed)),
    ]


def test_a_step_worked_out_by_hand():
    # Buckets of 4 MB: the first has 1 MB at most, so one tensor each. 2 workers at 1 GB/s, no latency.
    tensors = [TensorProfile(f"t{i}", (2**20,), 0.010) for i in range(3)]
    profile, link = Profile(tuple(tensors), "given", 0.005), Cluster(2, 1, Link(0.0, 2**20 * 4 / 0.020))
    # A message takes 20 ms. Gradients at 10, 20, 30; messages 10-30, 30-50, 50-70.
    assert advise.step(profile, link, None, 4.0) == pytest.approx(0.075)
    assert advise.step(profile, link, None, 4.0, shrink=4) == pytest.approx(0.005 + 0.030 + 0.005)
    one = Speed(Curve((1.0,), (0.001 / 2**20,)), Curve((1.0,), (0.002 / 2**20,)), Curve((1.0,), (0.001 / 2**20,)))
    half = Codec({"compressor": "topk"}, Curve((1.0,), (2.0,)), {"gpu": one})
    # Encoding takes 1 ms, the other worker's payload 10 ms on the wire, decoding of both 3 ms, at the end:
    # gradients at 10, 21, 32; messages 11-21, 22-32, 33-43; decoding 33-39 and 43-46.
    assert advise.step(profile, link, advise.candidate("topk", half), 4.0) == pytest.approx(0.005 + 0.046)


def test_allreduces_go_by_ring_or_tree():
    profile = Profile((TensorProfile("w", (2**20,), 0.0),), "given")
    far = Cluster(1024, 1, Link(1e-3, 1e9))
    assert advise.step(profile, far) == pytest.approx(2 * (10 * 1e-3 + 2**22 / 1e9))
    near = Cluster(1024, 1, Link(1e-9, 1e9))
    assert advise.step(profile, near) == pytest.approx(2 * 1023 * (1e-9 + 2**22 / 1e9 / 1024))


def test_buckets_are_those_of_the_scheduler():
    from grace.engine.buckets import Tensor, layout
    from grace.engine.options import Options

    profile = models.profile("resnet50")
    tensors = [Tensor(tensor.name, tensor.shape, "float32") for tensor in profile.tensors[::-1]]
    theirs = layout(tensors, "x", lambda ctx: True, Options(), None)
    ours = [[tensor.name for tensor in bucket] for bucket in advise.buckets(profile, Options().bucket_mb)]
    assert [[tensor.name for tensor in bucket.tensors] for bucket in theirs] == ours
    assert Options().bucket_mb == advise.BUCKET_MB
    assert Options().min_numel == advise.MIN_NUMEL


@pytest.mark.parametrize("model", models.MODELS)
def test_with_a_free_network_nothing_beats_dense(model):
    # U3: unlimited bandwidth, no latency.
    free = Cluster(8, 1, Link(0.0, math.inf))
    profile = models.profile(model)
    dense = advise.step(profile, free)
    assert dense == pytest.approx(profile.forward + profile.backward)
    for method in methods():
        assert advise.step(profile, free, method) >= dense


def test_advice_turns_where_it_says():
    profile = models.profile("resnet50")
    for verdict in advise.advise(profile, eight(), methods()).verdicts:
        costs = next(each for each in methods() if each.label == verdict.label).codec
        assert 0 < verdict.break_even < math.inf

        def seconds(there, costs=costs, verdict=verdict):
            if verdict.way == ways.PLAN:
                tensors = plan.make(profile, Costs(eight(), costs)).plan.tensors
                return plan.predict(profile, Costs(there, costs), tensors)
            return profile.forward + ways.play(profile, there, costs, ways.WAYS[verdict.way]).seconds

        below, above = (eight(verdict.break_even * 8e-9 * factor) for factor in (0.99, 1.01))
        assert seconds(below) < advise.step(profile, below)
        assert seconds(above) >= advise.step(profile, above)


def test_advice_on_slow_and_fast_links():
    profile = models.profile("vgg16")
    slow = advise.advise(profile, eight(0.1), methods())
    assert slow.fastest == "powersgd"
    assert slow.dense_limit == "bytes"
    assert slow.needed > 50
    assert [v.seconds for v in slow.verdicts] == sorted(v.seconds for v in slow.verdicts)
    fast = advise.advise(profile, eight(1e4, 0.0), methods(SLOW))
    assert fast.fastest == "dense"
    assert not any(verdict.pays for verdict in fast.verdicts)
    assert (fast.dense_limit, fast.needed) == ("computation", 1.0)
    assert fast.verdicts[-1].limit == "compression"
    far = advise.advise(profile, Cluster(4096, 1, Link(0.1, 1e12)), methods())
    assert (far.dense_limit, far.needed) == ("latency", None)


def test_what_is_needed_is_enough():
    profile, needed = models.profile("vgg16"), advise.advise(models.profile("vgg16"), eight(), []).needed
    limit = profile.forward + profile.backward * 1.05
    assert advise.step(profile, eight(), shrink=needed * 1.001) <= limit
    assert advise.step(profile, eight(), shrink=needed * 0.99) > limit


def test_gathering_loses_its_gain_with_more_workers_and_levels_keep_it():
    profile, counts = models.profile("resnet50"), (8, 512, 4096)
    clusters = [Cluster(count, 1, eight(1.0).inter) for count in counts]
    gathered = [
        advise.step(profile, there)
        / (
            profile.forward
            + ways.play(profile, there, codec(speed=FAST), ways.WAYS["allgather"], ways.BUCKET_MB).seconds
        )
        for there in clusters
    ]
    levels = advise.against_nodes(profile, eight(1.0), methods(), counts)["topk"]
    assert gathered[0] > 1
    assert gathered[2] < 0.1 * gathered[0]
    assert levels[2] > 0.5 * levels[0] > 1


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def costs(tmp_path):
    file = tmp_path / "costs.json"
    labels = ({"compressor": "topk"}, {"compressor": "fp16"}, {"compressor": "powersgd"})
    ratios = (0.02, 0.5, 0.005)
    found = [codec(params, ratio).to_dict() for params, ratio in zip(labels, ratios, strict=True)]
    file.write_text(json.dumps(found))
    return file


def test_grace_plan(tmp_path, costs):
    out, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    done = run("plan", "vgg16", "--costs", costs, "-o", out, "--trace", trace)
    assert done.exit_code == 0, done.output
    assert "of 32 tensors are compressed, on 8 workers on 8 machines, 10 Gbit/s, 50 us (simulated)" in done.output
    assert "assumed: FLOPs of 32 samples" in done.output
    assert "timelines," in done.output
    assert plan.load(out).params == {"compressor": "topk"}
    assert json.loads(trace.read_text())["traceEvents"]
    assert f"'plan': '{out}'" in done.output
    data = json.loads(run("plan", "vgg16", "--costs", costs, "--json").stdout)
    assert data["exchange"] is None, "no file was written"
    assert "plan.json" not in run("plan", "vgg16", "--costs", costs).output
    assert plan.from_dict({k: v for k, v in data.items() if k != "search"}) == plan.load(out)
    assert data["search"]["simulations"] > 0


def test_grace_plan_moves_compression_to_the_cpu(costs):
    words = ("plan", "lstm", "--costs", costs, "--compress-speed", 0.2, "--json")
    found = [json.loads(run(*words, "--offload", threads).stdout) for threads in (0, 2)]
    on_cpu = ["(cpu)" in "".join(each["option"] for each in data["tensors"].values()) for data in found]
    assert on_cpu == [False, True]
    assert found[1]["predicted"]["step"] < found[0]["predicted"]["step"]


def test_grace_plan_of_a_file(tmp_path, costs):
    tensors = [{"name": "a", "size": 10**7}, {"name": "b", "shape": [1000, 1000]}]
    (tmp_path / "model.json").write_text(json.dumps({"tensors": tensors}))
    (tmp_path / "cluster.json").write_text(json.dumps(Cluster(2, 2, Link(1e-5, 1e8), source="measured").to_dict()))
    there = ("--cluster", tmp_path / "cluster.json", "--costs", costs)
    words = ("plan", tmp_path / "model.json", *there, "--backward", 0.1, "--mode", "exact", "--max-compressions", 1)
    data = json.loads(run(*words, "--json").stdout)
    assert data["predicted"]["backward"] == pytest.approx(0.1)
    assert "apportioned by elements" in data["profile"]["source"]
    assert (data["workers"], data["workers_per_node"]) == (4, 2)
    options = [parse(each["option"]) for each in data["tensors"].values()]
    assert max(option.compressions for option in options) == 1
    assert "(measured)" in run(*words).output


def test_grace_advise(tmp_path, costs):
    chosen = ("topk", "fp16", "powersgd")
    done = run("advise", "resnet50", *chosen, "--costs", costs, "--plot", tmp_path / "plot.png")
    assert done.exit_code == 0, done.output
    assert "(simulated)" in done.output
    assert "Use fp16" in done.output
    assert "topk is faster" in done.output, "no training of top-k of 1 % is stored, so it is not recommended"
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    data = json.loads(run("advise", "resnet50", *chosen, "--costs", costs, "--workers", 4096, "--json").stdout)
    assert data["simulated"] is True
    assert [verdict["label"] for verdict in data["verdicts"]]


def test_only_methods_that_kept_the_quality_are_recommended():
    words = ("advise", "gpt2", "--workers", 4, "--bandwidth", 10, "--costs", "epyc")
    named = ("topk:compress_ratio=0.001", "eden:bits=2,block_size=64", "blockint:bits=4")
    done = run(*words, *named)
    assert "Use blockint:bits=4" in done.output
    assert "topk:compress_ratio=0.001 is faster" in done.output
    data = json.loads(run(*words, *named, "--json").stdout)
    assert (data["best"], data["fastest"]) == ("blockint:bits=4", "topk:compress_ratio=0.001")
    quality = {verdict["label"]: verdict["quality"] for verdict in data["verdicts"]}
    assert quality["topk:compress_ratio=0.001"] is None
    assert quality["eden:bits=2,block_size=64"]["lost"] == {"ncf": pytest.approx(0.047, abs=0.001)}
    # without names: the methods that `grace methods` recommends
    data = json.loads(run(*words, "--json").stdout)
    labels = {verdict["label"] for verdict in data["verdicts"]}
    assert labels == {measured.label(params) for params in measured.RECOMMENDED}
    assert all(measured.quality(params).everywhere for params in measured.RECOMMENDED)
    printed = run("methods", "topk").output + run("methods").output
    assert all(f'{{"compressor": "{params["compressor"]}"' in printed for params in measured.RECOMMENDED)


def test_gradients_of_16_bits_halve_dense_messages_only(costs):
    words = ("advise", "vgg16", "topk", "fp16", "--costs", costs, "--bandwidth", 1, "--json")
    full, half = (json.loads(run(*words, "--gradients", dtype).stdout) for dtype in ("float32", "bf16"))
    assert half["dense"] == pytest.approx(advise.step(models.profile("vgg16"), eight(1.0), shrink=2))
    assert full["dense"] == pytest.approx(advise.step(models.profile("vgg16"), eight(1.0)))
    ratios = [{verdict["label"]: verdict["ratio"] for verdict in data["verdicts"]} for data in (full, half)]
    assert ratios[0]["topk"] == pytest.approx(2 * ratios[1]["topk"], rel=0.01)
    assert ratios[1]["fp16"] == pytest.approx(1, rel=0.01)
    assert half["cluster"]["element"] == 2
    assert cluster(half["cluster"]).element == 2
    assert "float32, bf16, fp16" in run("advise", "vgg16", "--gradients", "int8").output


def test_stored_costs_of_a_device():
    data = json.loads(run("advise", "resnet50", "--costs", "h100", "--json").stdout)
    assert all("H100" in source for source in data["costs"])
    assert "no costs of qsgd are stored of h100" in " ".join(
        run("advise", "resnet50", "qsgd", "--costs", "h100").output.split()
    )
    for name in measured.devices():
        assert {each.params["compressor"] for each in measured.costs(name)} >= {"fp16", "blockint", "eden"}


def test_losing_is_printed(costs):
    # U4: the table contains methods that lose, and the advice is not to compress.
    words = ("advise", "resnet50", "topk", "fp16", "--costs", costs, "--bandwidth", 1e5, "--latency", 0)
    done = run(*words, "--compress-speed", 0.01)
    assert "Do not compress" in done.output
    rows = [line.split() for line in done.output.splitlines() if line.startswith(("dense", "topk", "fp16"))]
    assert next(row[0] for row in rows) == "dense"
    assert all(float(row[2].rstrip("x")) < 1 for row in rows[1:])


@pytest.mark.parametrize(
    "words, match",
    [
        (("plan", "vgg17"), "choose from vgg16"),
        (("plan", "vgg16", "--compressor", "topkk"), "did you mean"),
        (("plan", "vgg16", "--compressor", "powersgd"), "exchanges inside compress"),
        (("plan", "vgg16", "--workers", "9", "--per-node", "2"), "does not divide"),
        (("plan", "vgg16", "--bandwidth", "0"), "positive bandwidth"),
        (("plan", "vgg16", "--backward", "0"), "positive number of seconds"),
        (("plan", "vgg16", "--cluster", "nowhere.json"), "nowhere.json"),
        (("advise", "vgg16", "topk:ratio"), "key=value"),
        (("advise", "vgg16", "topk", "--compress-speed", "0"), "as fast"),
    ],
)
def test_wrong_options_are_refused(words, match):
    done = run(*words)
    assert done.exit_code == 2, done.output
    assert match in " ".join(done.output.replace("│", " ").split())


def test_exact_search_of_many_tensors_is_refused(costs):
    done = run("plan", "vgg16", "--costs", costs, "--mode", "exact")
    assert "too many to try" in " ".join(done.output.replace("│", " ").split())


def test_the_planner_imports_no_toolkit():
    code = (
        "import sys; from grace.planner import advise, costs, local, measure, models, plan, profile, search, timeline;"
        "print(*[name for name in ('torch', 'tensorflow', 'keras', 'horovod', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
