"""Compare the pages with the stored results, without any training: python -m docs.check.

The generators of tables run with --check, and `claims` recomputes each sentence and table that benchmarks/results
determines. A sentence that differs is printed as it should be; the status is 1.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT)]

import generate_choose as choose  # noqa: E402

STORE = ROOT / "benchmarks" / "results"
GPU = STORE / "gpu-nvidia-h100-80gb-hbm3.json"
GENERATORS = ("generate_choose", "generate_measured", "generate_methods")
Row = dict[str, Any]


def claims() -> Iterator[tuple[str, str]]:
    """Pairs of a page and a text that it must have."""
    for part in (trainings, noise, stages, overhead, gpu, jax, lab):
        yield from part()


def say(page: str, *parts: str) -> tuple[str, str]:
    """A claim whose text has several parts."""
    return page, " ".join(parts)


def fresh() -> Iterator[tuple[str, str]]:
    """What the seeds say of the trainings with PyTorch whose seeds tuned nothing."""
    run, *_ = choose.load(STORE, *choose.FRESH)
    time = {(row["bandwidth"], row["task"], row["method"]): row["seconds_to_relative"] for row in run["results"]}
    dense = {task: each for (rate, task, method), each in time.items() if (rate, method) == ("100mbit", "dense")}
    reached, means = [], []
    for method in ("blockint:bits=4", "eden:bits=3,block_size=64", "auto", "eden:bits=2,block_size=64"):
        took = {task: time["100mbit", task, method] for task in dense}
        shares = [dense[task] / each for task, each in took.items() if each is not None]
        reached.append(len(shares))
        means.append(statistics.geometric_mean(shares))
    yield say(
        "seeds",
        f"4-bit integers in {reached[0]}, eden of 3 bits in {reached[1]}, `auto` in {reached[2]}, eden of 2 bits in",
        f"{reached[3]}; at 100 Mbit/s {means[0]:.1f}, {means[1]:.1f} and {means[2]:.1f} times sooner",
    )


def trainings() -> Iterator[tuple[str, str]]:
    """What `grace bench tasks` stored."""
    rows = [row for run in choose.load() for row in run["results"]]
    later = [row for run in choose.load(STORE, *choose.FRESH) for row in run["results"]]
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    for part, each in (("earlier", rows), ("later", later)):
        for row in each:
            cells.setdefault((part, *choose._cell(row)), {})[row["method"]] = row
    losses = [
        (method, each["dense"]["seeds"], choose.loss(each[method], each["dense"]))
        for each in cells.values()
        for method in choose.FEW[1:]
        if method in each
    ]
    several = [(method, loss) for method, seeds, loss in losses if seeds > 1]
    worst = {name: max(loss for method, loss in several if method == name) for name in choose.FEW[1:]}
    alone = max(loss for method, seeds, loss in losses if method == "fp16" and seeds == 1)
    kept = {method: _reached(method, later if method == choose.AUTO else rows + later) for method in choose.FEW[1:]}
    yield say(
        "benchmarks",
        f"In {_word(len({cell[1] for cell in cells}))} short trainings over an **emulated network**, with two or four",
        "workers at two rates, `blockint` of 4 bits reached the quality of float32 less 3 % in",
        f"{kept['blockint:bits=4']}, `eden` of 3 bits in {kept['eden:bits=3,block_size=64']}, fp16 in {kept['fp16']},",
        f"`auto` in {kept[choose.AUTO]};",
    )
    lost = max(choose.loss(each["auto"], each["dense"]) for (part, *_), each in cells.items() if part == "later")
    yield say(
        "benchmarks-tasks",
        f"With predictions `auto` reached it in {kept[choose.AUTO]}, and ended at most {_percent(lost)} below float32.",
    )
    yield "auto", f"`auto` reached the quality of float32 less 3 % in {kept[choose.AUTO]} trainings."
    coarse = {
        row["task"]: choose.loss(row, base)
        for run in choose.load(STORE, choose.LOCAL)
        for row in run["results"]
        for base in run["results"]
        if row["method"] == "eden:bits=2" and base["method"] == "dense" and base["task"] == row["task"]
    }
    blocks = cells["earlier", "lstm", "torch", 2, "100mbit"]
    fine = choose.loss(blocks["eden:bits=2,block_size=64"], blocks["dense"])
    yield say(
        "benchmarks-tasks",
        f"fp16 ended at most {_percent(worst['fp16'])} below float32, which is the noise of three seeds",
        f"(with one {_percent(alone)});",
        f"int4 at most {_percent(worst['blockint:bits=4'])}, `eden` of 3 bits in blocks of 64",
        f"{_percent(worst['eden:bits=3,block_size=64'])}.",
        f"`eden` of 2 bits in blocks of 4096 ends {_percent(coarse['lstm'])} below in the LSTM,",
        f"in blocks of 64 {_percent(fine)}.",
    )
    yield from fresh()
    halves = [row["interval"] / row["quality"] for row in rows + later if row["interval"] and row["seeds"] == 3]
    yield say(
        "benchmarks-tasks",
        f"With three seeds half an interval is {_percent(statistics.median(halves))} of the quality (median),",
        f"at most {_percent(max(halves))}.",
    )
    ncf = cells["earlier", "ncf", "torch", 2, "100mbit"]
    lost = choose.loss(ncf["eden:bits=2,block_size=64"], ncf["dense"])
    yield "choose", f"at least 3 bits: 2 bits lost {_percent(lost)} in NCF"
    missed = _missed(choose.FEEDBACK) | _missed(choose.LOCAL)
    for page in ("choose", "benchmarks"):
        yield say(
            page,
            f"PowerSGD of rank 4 missed float32's quality less 3 % in {missed['powersgd:compress_rank=4']} of 5",
            "short trainings",
        )
    yield say(
        "choose",
        f"local training in {missed['localsgd:sync_every=4,compressor=blockint']} (every 4 steps) and",
        f"{missed['localsgd:sync_every=10,compressor=blockint']} (10)",
    )
    yield "choose", f"top-k of 1 % missed the quality in {missed['topk:compress_ratio=0.01']} of five trainings"
    yield "README.md", f"missed that quality in {missed['powersgd:compress_rank=4']} of 5 short trainings"
    yield say(
        "local-measured",
        f"loses more than 3 % in {_word(missed['localsgd:sync_every=4,compressor=blockint'])} (H = 4) to",
        f"{_word(missed['localsgd:sync_every=10,compressor=blockint'])} (H = 10) of these five short trainings",
    )
    yield say(
        "local",
        f"LocalSGD missed float32's less 3 % in {_word(missed['localsgd:sync_every=4,compressor=blockint'])} (H = 4)",
        f"to {_word(missed['localsgd:sync_every=10,compressor=blockint'])} (H = 10) of five short trainings",
    )
    common = choose.speeds(choose.common(later))
    trained = {choose.training(row) for row in later}
    yield say(
        "README.md",
        f"geometric mean of {len(common['dense']['1gbit'])} of {len(trained)} short trainings, those in which all",
        "methods reached float32's quality, less 3 %",
    )
    slow, fast = (sorted(choose._speed(common[m][rate]) for m in choose.FEW[2:]) for rate in ("100mbit", "1gbit"))
    yield say(
        "benchmarks",
        f"at 100 Mbit/s {slow[0]} to {slow[-1]} times sooner than float32, at 1 Gbit/s {fast[0]} to {fast[-1]} times",
    )


def _reached(method: str, rows: list[Row]) -> str:
    # In how many trainings and rates it reached dense's quality less the tolerance.
    mine = [row["steps_to_relative"] is not None for row in rows if row["method"] == method]
    return f"{sum(mine)} of {len(mine)}"


def _missed(name: str) -> dict[str, int]:
    # By method: in how many tasks it never reached dense's quality less the tolerance.
    (run,) = choose.load(STORE, name)
    found: dict[str, int] = {}
    for row in run["results"]:
        found[row["method"]] = found.get(row["method"], 0) + (row["steps_to_relative"] is None)
    return found


def noise() -> Iterator[tuple[str, str]]:
    """What `python -m benchmarks.noise` stored."""
    from benchmarks.noise import mean_curve, stored, table
    from grace_bench.tasks.tasks import task_of

    rows = stored(STORE / "noise.jsonl")
    yield "noise", table(rows)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["method"]), []).append(row)
    found = {}
    for (task, method), mine in groups.items():
        base = mean_curve([row for row in groups[task, "dense"] if row["seed"] in {each["seed"] for each in mine}])[-1][
            1
        ]
        sign = 1 if task_of(task).higher else -1
        loss = sign * (base - mean_curve(mine)[-1][1]) / base
        found[task, method] = (
            statistics.mean(statistics.mean(row["ratios"]) for row in mine),
            loss,
        )
    small = {key: loss for key, (ratio, loss) in found.items() if ratio < 0.1 and key[1] != "dense"}
    odd = ("lstm", "eden:bits=4,block_size=64")
    others = max(loss for key, loss in small.items() if key != odd)
    two = {task: pair for (task, method), pair in found.items() if method == "eden:bits=2,block_size=64"}
    calm = max(loss for task, (_, loss) in two.items() if task != "ncf")
    yield say(
        "noise",
        f"`eden` of 2 bits in blocks of 64 has ratios of {min(r for r, _ in two.values()):.2f} to",
        f"{max(r for r, _ in two.values()):.2f}; it ended at most {_percent(calm)} below dense in four tasks,",
        f"and {_percent(two['ncf'][1])} in NCF, whose embeddings Adam trains.",
        f"Of the {len(small)} rows with ratios below 0.1",
        f"all but one ended at most {_percent(others)} below dense;",
        f"`eden` of 4 bits ended {_percent(small[odd])} below in the LSTM.",
    )


def stages() -> Iterator[tuple[str, str]]:
    """What `python -m benchmarks.stages` stored."""
    from benchmarks.stages import stored, table

    rows = stored(STORE / "stages.jsonl")
    yield "stages-measured", table(rows)

    def mean(task: str, method: str, use: str = "compressed") -> str:
        found = [row[use] for row in rows if (row["task"], row["method"]) == (task, method)]
        return f"{statistics.mean(found):.1f}"

    both = (
        mean("text", "8 bits, gradients 2 of 4 levels"),
        mean("text", "2 bits of 4 levels, gradients 8"),
    )
    yield "stages-measured", f"the text is much worse (perplexity {both[0]} against {both[1]}), as in the paper"
    masks = [mean(task, f"top 10 %{more}") for task in ("digits", "text") for more in (", same mask", "")]
    yield (
        "stages-measured",
        (f"`same_mask` is much better (digits {masks[0]} against {masks[1]} %, text {masks[2]} against {masks[3]})"),
    )


def overhead() -> Iterator[tuple[str, str]]:
    """What `python -m benchmarks.overhead` stored."""
    names = {
        "none": "none",
        "int4": "blockint, 4 bits",
        "eden3": "eden, 3 bits",
        "topk": "top-k, 1 %",
        "powersgd": "PowerSGD, rank 4",
    }
    records = {
        (row["integration"], row["method"]): row
        for row in json.loads((STORE / "overhead-xeon.json").read_text())
        if row["checkout"] == "this"
    }
    cases = {
        key: next(case for case in row["cases"] if (case["tensors"], case["buckets"]) == (148, 1))
        for key, row in records.items()
    }
    kinds = ("ddp", "optimizer", "step")
    for method, name in names.items():
        cells = [f"{cases[k, method]['ms']:.1f} ms; {records[k, method]['fits']['calls'][2]:.0f}" for k in kinds]
        yield "benchmarks-kernels", f"| {name} | {' | '.join(cells)} |"
    took = [cases["ddp", method]["ms"] for method in names]
    calls = [records["ddp", method]["fits"]["calls"][2] for method in names]
    yield say(
        "benchmarks",
        f"148 tensors of 1,024 elements add {min(took):.0f} to {max(took):.0f} ms to a step,",
        f"and {min(calls):.0f} to {max(calls):.0f} Python calls for each tensor with DDP's hook",
    )


def gpu() -> Iterator[tuple[str, str]]:
    """What `grace bench gpu` stored."""
    found = json.loads(GPU.read_text())
    cases, loops = found["kernels"]["cases"], found["trainings"]["rows"]
    equal = sum(case["equal"] for case in cases)
    yield "benchmarks-gpu", f"all {found['laws']['held']} laws hold"
    yield "benchmarks-gpu", f"Triton's kernels equal the plain functions in {equal} of {len(cases)} cases"
    most = max(row["difference"] for row in loops)
    yield say(
        "benchmarks-gpu",
        f"All {len(loops)} trainings end as on the CPU, with relative differences of at most {_at_most(most)}",
    )
    steps = {(row["model"], row["method"]): row["ms"] for row in found["exchange"]["rows"] if row["network"] == "gloo"}
    names = {
        "bf16 allreduce": "bfloat16 allreduce",
        "eden, 3 bits": "eden, 3 bits, blocks of 64",
    }
    for method in dict.fromkeys(method for _, method in steps):
        first, second = (f"{steps[model, method]:.0f}" for model in ("ResNet-50", "GPT-2 124M"))
        name = names.get(method, method.replace("powersgd", "PowerSGD"))
        yield "benchmarks-gpu", _columns(name, {1: first, 3: second})
    records = {record["label"]: record for record in found["times"]["records"]}
    sidco = records["sidco"]["encode"]["x"] + records["sidco"]["commit"]["x"]
    yield "sidco", f"On an H100 sidco takes {sidco:.0f} copies to encode 25 million elements and commit"


def jax() -> Iterator[tuple[str, str]]:
    """What `grace bench kernels --backend torch,jax` stored."""
    names = {
        "fp16": "fp16",
        "qsgd": "int8, random rounding (`qsgd`)",
        "blockint": "int4, random rounding (`blockint`)",
        "eden:bits=3,block_size=64": "`eden`, 3 bits, blocks of 64",
        "efsignsgd": "1-bit sign, one scale",
        "topk": "exact top-k, 1 %",
        "powersgd": "PowerSGD, rank 4",
    }
    rows = json.loads((STORE / "kernels-jax.json").read_text())["records"]
    found = {(row["label"], row["backend"]): row for row in rows}
    for label, name in names.items():
        took = [
            sum(found[label, backend][part]["x"] for part in parts)
            for parts in (("encode", "commit"), ("decode",))
            for backend in ("jax", "torch")
        ]
        cells = [f"{each:.0f}" if each >= 100 else f"{each:.2g}" for each in took]
        yield "benchmarks-kernels", f"| {name} | {' | '.join(cells)} |"


def lab() -> Iterator[tuple[str, str]]:
    """What `benchmarks.lab --delay` stored."""
    names = {
        "alone": "no exchange",
        "ddp-fp16": "DDP, fp16",
        "ddp-powersgd-1bucket": "DDP, PowerSGD rank 4",
        "grace-torch-int4-2stage": "int4, `twostage`",
        "grace-torch-int4-2levels": "int4, `twostage` of two levels",
        "grace-torch-int4-default": "int4, default",
        "grace-torch-eden3": "`eden` of 3 bits, default",
        "grace-torch-eden3-2levels": "`eden` of 3 bits, two levels",
    }
    rows = [json.loads(line) for line in (STORE / "lab-delay.jsonl").read_text().splitlines()]
    found = {(row["case"]["name"], (row["workers"], row["delay"])): row for row in rows}
    links = sorted({link for _, link in found})
    for case, name in names.items():
        cells = [f"{found[case, link]['seconds']:.2f}" if (case, link) in found else "" for link in links]
        eight = found[case, (8, 0.0)]
        yield "benchmarks-lab", f"| {name} | {' | '.join(cells)} | {max(eight['tx'], eight['rx']) / 1e6:.2f} |"
    half, int4, int4_two = "ddp-fp16", "grace-torch-int4-2stage", "grace-torch-int4-2levels"
    eden, eden_two = "grace-torch-eden3", "grace-torch-eden3-2levels"
    grown = [found[case, (16, 0.0)]["tx"] / found[case, (8, 0.0)]["tx"] - 1 for case in (int4, eden, half)]
    yield say(
        "benchmarks-lab",
        f"From 8 to 16 hosts the bytes of int4 grow by {grown[0] * 100:.0f} %, those of `eden` by",
        f"{grown[1] * 100:.0f} %, those of DDP's fp16 by {grown[2] * 100:.0f} %.",
    )
    ours = [row["seconds"] / found[half, link]["seconds"] for (case, link), row in found.items() if "grace" in case]
    yield say("benchmarks-lab", f"take {min(ours):.2f} to {max(ours):.2f} of the time of DDP's fp16")
    took = [
        [row["times"]["compress"] for (case, link), row in found.items() if "grace" in case and link[0] == hosts]
        for hosts in (8, 16)
    ]
    spans = [f"{min(each):.2f} to {max(each):.2f} s" for each in took]
    yield say("benchmarks-lab", f"compression takes {spans[0]} of a step with 8 hosts, {spans[1]} with 16.")
    cases = (int4, int4_two, eden, eden_two)
    times = [[found[case, (16, delay)]["seconds"] for delay in (0.0, 5.0, 20.0)] for case in cases]
    saved = [[1 - two / one for one, two in zip(*times[pair : pair + 2], strict=True)] for pair in (0, 2)]
    gains = [f"{each * 100:.0f} %".replace("-", "−") for both in saved for each in both]
    yield say(
        "benchmarks-lab",
        f"Two levels of int4 saved {gains[0]} without delay, {gains[1]} with 5 ms, {gains[2]} with 20 ms; of `eden`",
        f"{gains[3]}, {gains[4]} and {gains[5]}.",
    )
    run = json.loads((STORE / "auto-torch-8.json").read_text())
    reached = {row["method"]: f"{row['seconds_to_relative']:.0f} s" for row in run["results"]}
    yield say(
        "benchmarks-lab",
        f"after {reached['dense']} in float32, {reached['fp16']} with DDP's fp16, {reached['auto']} with `auto`,",
        f"{reached['blockint:bits=4']} with int4 (`auto-torch-8.json`):\n`{run['command']}`.",
    )


COLUMN = "\x00"


def _columns(name: str, values: dict[int, str]) -> str:
    # Returns a row of a table; COLUMN stands for a cell that is not stored.
    return f"| {name} | {' | '.join(values.get(index, COLUMN) for index in range(1, 5))} |"


def has(page: str, claim: str) -> bool:
    """Whether a page has a text, however its lines are broken."""
    text, wanted = " ".join(page.split()), " ".join(claim.split())
    if COLUMN not in wanted:
        return wanted in text
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.startswith("|")]
    cells = [cell.strip() for cell in wanted.split("|")]
    return any(
        len(row) == len(cells) and all(a in (COLUMN, b) for a, b in zip(cells, row, strict=True)) for row in rows
    )


def file_of(page: str) -> Path:
    """The file of a page, by its name in docs or from the root."""
    return ROOT / page if page.endswith(".md") else ROOT / "docs" / f"{page}.md"


def problems(
    read: Callable[[str], str] = lambda page: file_of(page).read_text(encoding="utf-8"),
) -> list[str]:
    """The claims that a page lacks. ``read``: the text of a page."""
    return [
        f"{page} should say: {claim.replace(COLUMN, '...')}" for page, claim in claims() if not has(read(page), claim)
    ]


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _at_most(value: float) -> str:
    """One digit, rounded up."""
    power = math.floor(math.log10(value))
    return f"{math.ceil(value / 10**power)}e{power}"


def _word(number: int) -> str:
    return ("none", "one", "two", "three", "four", "five")[number]


if __name__ == "__main__":
    found = problems()
    for name in GENERATORS:
        command = [sys.executable, str(ROOT / "docs" / f"{name}.py"), "--check"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        found += [done.stderr.strip()] if done.returncode else []
    print(*found or [f"{len(list(claims()))} claims hold"], sep="\n")
    sys.exit(bool(found))
