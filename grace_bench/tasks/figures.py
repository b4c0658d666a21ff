"""Figures from the rows of trainings and times: quality, speed relative to dense, and methods that did not pay."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from grace.engine.report import leveled
from grace.local import PRESETS
from grace_bench.lab.network import bits_per_second
from grace_bench.tasks.plan import AS_IS, BASELINES, LIMIT, LOOPBACK, level, order
from grace_bench.tasks.results import interval
from grace_bench.tasks.run import PROBED, TIMED, TRAINED, Row, latest
from grace_bench.tasks.tasks import TOLERANCE, task_of, tasks

GROUP = ("task", "toolkit", "workers", "scale", "steps", "real")
NAMES = {"torch": "PyTorch", "keras": "Keras"}


def measured(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each training and each time."""
    return latest(row for row in rows if row["kind"] in (TRAINED, TIMED))


def lines(rows: Iterable[Row]) -> list[Row]:
    """One line for each method of each group (task, toolkit, workers, size): its training, and its times by bandwidth.

    Quality and seconds are means over the seeds. ``interval``: half the width of the quality's 95 % confidence
    interval. ``to_target``: steps until the mean quality over the seeds first reached the target; None if it never did,
    or a training diverged. ``relative``: the target derived from the dense run, even if the task has a fixed one.
    ``times[bandwidth]``: seconds of a step, examples per second, seconds to the targets, and throughput and
    times relative to dense (more is faster); ``share``: the limit's time to the target over the method's.
    The method `LIMIT` is not trained: it has dense's steps to the targets.
    A method that was trained at several bandwidths has a line for each (``trained_at``), with the measured seconds to
    the targets.
    """
    rows = measured(rows)
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in GROUP), []).append(row)
    found = []
    for group in sorted(groups, key=lambda key: ([*tasks()].index(key[0]), key[1] != "torch", *key[2:])):
        found += _group(dict(zip(GROUP, group, strict=True)), groups[group])
    return found


def _group(head: Row, rows: Sequence[Row]) -> list[Row]:
    task = task_of(head["task"])
    each: dict[tuple[str, str | None], list[Row]] = {}
    for row in rows:
        each.setdefault((row["method"], row.get("trained_at")), []).append(row)
    exact = _trained(each.get(("dense", None), []))
    dense = [_last(row) for row in exact]
    fixed = head["scale"] == "quick" and not head["real"] and head["steps"] == task.quick.steps
    relative: float | None = None
    if dense and None not in dense:
        relative = task.near(statistics.mean(dense))  # type: ignore[type-var, arg-type]
    target = task.target if fixed else relative
    found = []
    for method, at in sorted(each, key=lambda key: (order(key[0]), rate(key[1] or AS_IS))):
        mine = each[method, at]
        trained = _trained(mine)
        line = {**head, "method": method, "target": target, "fixed": fixed, "relative": relative, "trained_at": at}
        line |= {"metric": task.metric, "higher": task.higher, "seeds": len(trained)}
        line["errors"] = [(row.get("bandwidth", "training"), row["error"]) for row in mine if "error" in row]
        line |= {key: mine[0].get(key) for key in ("parameters", "source", "batch")}
        lasts = [_last(row) for row in trained]
        sound: list[float] = [] if None in lasts else lasts  # type: ignore[assignment]
        line["quality"] = statistics.mean(sound) if sound else None
        line["interval"] = interval(sound)
        line["diverged"] = None in lasts
        line["curves"] = [row["curve"] for row in trained]
        line["clocks"] = [row["clock"] for row in trained] if at else []
        line["chosen"] = [row["chosen"] for row in trained if "chosen" in row]
        line["predicted"] = [row["predicted"] for row in trained if "predicted" in row]
        clocks = {}
        curve = _mean([row["curve"] for row in exact] if method == LIMIT else line["curves"])
        for key, goal in (("to_target", target), ("to_relative", relative)):
            look = _look(curve, task, goal)
            line[key] = None if look is None else curve[look][0]
            if look is not None and at:
                clocks[key] = statistics.mean(clock[look] for clock in line["clocks"])
        timed = [row for row in mine if row["kind"] == TIMED and "seconds" in row]
        line["sent"] = statistics.median(r["sent"] for r in timed) if timed else None
        wires = [r["wire"] for r in timed if r["wire"] is not None]
        line["wire"] = statistics.median(wires) if wires else None
        line["times"] = {}
        for bandwidth in sorted({row["bandwidth"] for row in timed}, key=rate):
            here = [row for row in timed if row["bandwidth"] == bandwidth]
            seconds = statistics.fmean(row["seconds"] for row in here)
            examples = head["workers"] * here[0]["batch"] * task.unit_size
            line["times"][bandwidth] = {"seconds": seconds, "throughput": examples / seconds}
            for key, to in (("time", "to_target"), ("time_relative", "to_relative")):
                product = None if line[to] is None else line[to] * seconds
                line["times"][bandwidth][key] = clocks.get(to, product)
        found.append(line)
    base = next((line for line in found if line["method"] == "dense"), None)
    limit = next((line for line in found if line["method"] == LIMIT), None)
    for line in found:
        line["volume"] = base["sent"] / line["sent"] if base and base["sent"] and line["sent"] else None
        for bandwidth, times in line["times"].items():
            reference = base["times"].get(bandwidth, {}) if base else {}
            for key, more in (("throughput", True), ("time", False), ("time_relative", False)):
                a, b = times[key], reference.get(key)
                times[f"x_{key}"] = None if not a or not b else (a / b if more else b / a)
            least = limit["times"].get(bandwidth, {}).get("time") if limit else None
            times["share"] = least / times["time"] if least and times["time"] else None
    return found


def rate(bandwidth: str) -> float:
    """A bandwidth in bits per second, for sorting; 0 without emulated links."""
    return 0.0 if bandwidth in (LOOPBACK, AS_IS) else bits_per_second(bandwidth)


def _trained(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] == TRAINED and "curve" in row]


def _last(row: Row) -> float | None:
    return row["curve"][-1][1]


def _mean(curves: Sequence[Sequence[Sequence[Any]]]) -> list[tuple[int, float | None]]:
    # Returns the mean quality over the seeds at each evaluation.
    found: list[tuple[int, float | None]] = []
    for looks in zip(*curves, strict=False):
        qualities = [quality for _, quality in looks]
        found.append((looks[0][0], None if None in qualities else statistics.mean(qualities)))
    return found


def _look(curve: Sequence[Sequence[Any]], task: Any, target: float | None) -> int | None:
    # Returns the index of the first evaluation that reached the target; None if there is none.
    if target is None:
        return None
    return next((i for i, (_, q) in enumerate(curve) if q is not None and task.reached(q, target)), None)


def named(line: Row) -> str:
    """The method, and the bandwidth at which it was trained if it depends on that."""
    return line["method"] + (f" at {line['trained_at']}" if line["trained_at"] else "")


def lost(found: Sequence[Row]) -> list[str]:
    """Methods that did not pay, a line per group: those that missed the target or reached it later than a baseline."""
    texts = []
    for group in grouped(found):
        missed, late = [], []
        bests: dict[str, tuple[float, str]] = {}
        for line in group:
            for bandwidth, times in line["times"].items():
                if line["method"] in BASELINES and times["time"]:
                    bests[bandwidth] = min(bests.get(bandwidth, (float("inf"), "")), (times["time"], line["method"]))
        for line in group:
            if line["errors"]:
                missed.append(f"{named(line)} failed ({line['errors'][0][1][:60]})")
            elif line["target"] is not None and line["to_target"] is None and line["curves"]:
                value = "it diverged" if line["diverged"] else f"{line['quality']:.3g}"
                missed.append(f"{named(line)} missed it ({value})")
            if line["method"] in (LIMIT, *BASELINES):
                continue
            for bandwidth, times in line["times"].items():
                best, name = bests.get(bandwidth, (0.0, ""))
                if name and times["time"] and times["time"] > best:
                    late.append(f"{line['method']} at {bandwidth} ({times['time'] / best:.2f}x the time of {name})")
        parts = [", ".join(missed)] * bool(missed) + ["slower to it: " + ", ".join(late)] * bool(late)
        if parts:
            head = group[0]
            goal = "" if head["target"] is None else f", target {head['target']:.3g}"
            texts.append(f"{title(head)}{goal}: " + "; ".join(parts) + ".")
    return texts


def choices(found: Sequence[Row]) -> list[str]:
    """What method "auto" chose in each training."""
    return [
        f"{title(line)}, {named(line)}{f', training {number}' if len(line['chosen']) > 1 else ''}: {text}."
        for line in found
        for number, text in enumerate(line["chosen"], 1)
    ]


def predictions(found: Sequence[Row]) -> list[dict[str, tuple[float, float | None]]]:
    """Predicted and measured seconds to the quality of dense less the tolerance, for each training of "auto".

    Keys: the candidates that auto tried and that were also trained on their own, among them "dense". Predicted: dense's
    steps times the candidate's seconds per effective step, averaged over seeds. Measured: None if the candidate did not
    reach that quality.
    """
    out = []
    for group in grouped(found):
        trained = [line for line in group if not line["trained_at"] and line["method"] != LIMIT]
        alone = {leveled(level(line["method"])): line for line in trained}
        steps = alone["none"]["to_relative"] if "none" in alone else None
        for auto in group if steps else ():
            pairs = {}
            for name, line in alone.items():
                times = line["times"].get(auto["trained_at"])
                each = [predicted[name] for predicted in auto["predicted"] if name in predicted]
                if times and each:
                    pairs[line["method"]] = steps * statistics.mean(each), times["time_relative"]
            if "dense" in pairs:
                out.append(pairs)
    return out


def _predicted(found: Sequence[Row]) -> list[str]:
    # Returns a note on how well "auto" predicts.
    both, relative, missed = [], [], 0
    for pairs in predictions(found):
        base = pairs["dense"]
        for method, (predicted, real) in pairs.items():
            if real is None:
                missed += 1
                continue
            both.append((predicted, real))
            if method != "dense" and base[1]:
                relative.append((predicted / base[0], real / base[1]))
    if len(relative) < 3:
        return []
    text = (
        f"Seconds to the quality of dense less {TOLERANCE:.0%}, as auto predicts them from its trials and the noise "
        f"that it measured last, and as measured: rank correlation {rank_correlation(both):.2f} over {len(both)} pairs "
        f"of a candidate and a training; relative to dense's {rank_correlation(relative):.2f} over {len(relative)}. "
        f"{missed} candidates did not get there."
    )
    return [text]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks. NaN if all are equal."""
    columns: list[list[float]] = []
    for values in zip(*pairs, strict=True):
        columns.append(
            [sum(other < value for other in values) + sum(other <= value for other in values) for value in values]
        )
    if any(len(set(column)) < 2 for column in columns):
        return math.nan
    return statistics.correlation(*columns)


def grouped(found: Sequence[Row]) -> list[list[Row]]:
    """The lines, grouped by table."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for line in found:
        groups.setdefault(tuple(line[key] for key in GROUP), []).append(line)
    return list(groups.values())


def title(head: Row) -> str:
    """The title of a table."""
    size = "" if head["scale"] == "quick" else ", full"
    return f"{task_of(head['task']).title}, {NAMES[head['toolkit']]}, {head['workers']} workers{size}"


def notes(rows: Sequence[Row], found: Sequence[Row]) -> list[str]:
    """Notes on how the figures were measured."""
    bandwidths = {bandwidth for line in found for bandwidth in line["times"]}
    texts = []
    if bandwidths - {LOOPBACK, AS_IS}:
        reached = {row["bandwidth"]: row["reached"] / 1e6 for row in rows if row["kind"] == PROBED}
        probes = ", ".join(f"{key}: {value:.0f} Mbit/s" for key, value in sorted(reached.items(), key=lambda p: p[1]))
        texts.append(
            "Emulated network: hosts are network namespaces of one machine, one worker on each, links are shaped "
            f"both ways; the workers share the machine's cores. One TCP connection was seen to carry {probes or '?'}."
        )
    if LOOPBACK in bandwidths:
        texts.append(
            "Plain loopback, no network: the workers share one machine (root and iproute2 would give shaped links), so "
            "bytes cost next to nothing and most methods lose time."
        )
    texts.append(
        "Steps to the target were measured once for each method, without a limit on the links; the time of a step was "
        "measured at each bandwidth, over a few steps that follow. Time to the target is their product. Quality is "
        "looked at every so many steps, which is how finely steps to the target are known."
    )
    if any(line["method"] == LIMIT for line in found):
        texts.append(
            "Limit: an exchange that costs nothing. Its steps to the target are dense's; its time of a step is that of "
            "workers that exchange nothing, side by side. Of limit: the limit's time to the target over the method's."
        )
    if any(line["trained_at"] for line in found):
        texts.append(
            "Method auto measures the links, so it was trained at each bandwidth; its time to the target is that of "
            "all steps until then, trials included."
        )
    if any(row.get("in_turn") for row in measured(rows)):
        texts.append(
            "In turn: while auto trains, each other method takes a few timed steps after every evaluation, in the same "
            "processes, so that a machine whose speed drifts is fair to all. Their mean is the time of a step."
        )
    texts += _predicted(found)
    spans = [(r["quartiles"][1] - r["quartiles"][0]) / r["seconds"] for r in measured(rows) if "quartiles" in r]
    if spans:
        texts.append(
            f"The middle half of a cell's timed steps spans {statistics.median(spans):.0%} of their median in a usual "
            f"cell, {max(spans):.0%} in the worst."
        )
    seeds = len({row["seed"] for row in rows if row["kind"] == TRAINED})
    several = f"{seeds} seeds, means, with 95 % intervals (Student's t) of the quality"
    texts.append(
        f"{'One seed' if seeds == 1 else several}; the same data, batches, learning rate and number of steps for all "
        "methods, none of them tuned."
    )
    if any(line["method"].partition(":")[0] in PRESETS for line in found):
        texts.append(
            "Local training: time and bytes of a step are means over the steps between two exchanges. The last quality "
            "follows a final exchange; those before are of worker 0's own model."
        )
    if {line["toolkit"] for line in found} >= {"torch"}:
        texts.append(
            "PyTorch: DistributedDataParallel over gloo; dense and fp16 are its own hooks, a method is GRACE's hook."
        )
    if {line["toolkit"] for line in found} >= {"keras"}:
        texts.append(
            "Keras: train_on_batch over Horovod with GRACE's optimizer; dense and fp16 are one allreduce (compressors "
            "none and fp16), since Horovod's own optimizer does not work with Keras 3."
        )
    if any(not line["fixed"] for line in found):
        texts.append(
            f"Where the target is not the task's own, it is the dense run's last quality less {TOLERANCE:.0%}."
        )
    return texts
