"""Espresso's comparison with HiPress, HiTopKComm and BytePS-Compress, predicted by GRACE's planner.

python -m benchmarks.espresso PROFILES -o benchmarks/results/espresso.json
python -m benchmarks.espresso --show benchmarks/results/espresso.json    # the table of docs/planner-model.md

PROFILES: a folder with the models' profiles, {model}.json as `grace.planner.profile.load` reads them, and costs.json, a
list of compression costs as `grace.planner.codecs.codec` reads them. Nothing is trained.

Each rival is the set of strategies that its paper allows, and its rule:

- BytePS-Compress (Zhong et al., "Compressed Communication for Distributed Training: Adaptive Methods and System", 2021,
  arXiv:2105.07829): every tensor is compressed on CPUs, and the servers compress the sum again.
- HiTopKComm (Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters", MLSys
  2021): every tensor is summed within a machine, and shards are compressed on GPUs and gathered between machines.
- HiPress (Bai et al., "Gradient Compression Supercharged High-Performance Data Parallel DNN Training", SOSP 2021):
  compression on GPUs, by servers or gathered, where it shortens the exchange of this tensor alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from grace.communicators.planned.strategy import DENSE_HIERARCHICAL, Option, options, parse
from grace.planner.codecs import Codec, Curve, Speed, codec
from grace.planner.costs import Costs
from grace.planner.links import Cluster, Link
from grace.planner.profile import Profile, load
from grace.planner.search import Choice, Problem, select
from grace.planner.timeline import Timeline

CPU_RATE = 20e9 / 8
"""Bytes of gradients that the CPUs compress in a second, as the authors' simulator assumes."""
LATENCY = 150e-6 / 7
"""Seconds of a round between 8 workers: 150 us for a collective, as the authors' simulator assumes."""
CLUSTERS = {
    "NVLink, 100 Gbit/s": Cluster(8, 8, Link(LATENCY, 10e9), Link(LATENCY, 50e9)),
    "PCIe, 25 Gbit/s": Cluster(8, 8, Link(LATENCY, 2.5e9), Link(LATENCY, 2.5e9)),
}
"""64 GPUs. Bandwidths in bytes per second: the authors' constants, times the 8 workers that share a link."""
SERVERS = "reduce_scatter(intra) compress({0}) alltoall*(inter) decompress({0}) compress({0}) allgather*(inter) "
SERVERS += "decompress({0}) allgather(intra)"
GATHERED = "reduce_scatter(intra) compress(gpu) allgather*(inter) decompress(gpu) allgather(intra)"


class Cell(NamedTuple):
    """A comparison of the paper (figures 12 and 13): Espresso's gain over each rival, as a share; None: not given."""

    model: str
    compressor: str
    cluster: str
    float32: float | None
    byteps: float | None
    hitopk: float | None
    hipress: float | None


CELLS = (
    Cell("bert", "randomk", "NVLink, 100 Gbit/s", None, 0.31, 0.54, 0.40),
    Cell("gpt2", "efsignsgd", "NVLink, 100 Gbit/s", None, 0.42, None, 0.33),
    Cell("ugatit", "dgc", "NVLink, 100 Gbit/s", 1.49, 2.05, 0.50, 0.35),
    Cell("lstm", "efsignsgd", "PCIe, 25 Gbit/s", None, 1.01, 0.73, 0.77),
    Cell("vgg16", "randomk", "PCIe, 25 Gbit/s", 2.69, 3.57, None, 0.55),
    Cell("resnet101", "dgc", "PCIe, 25 Gbit/s", 0.20, 0.18, None, 0.24),
)
RIVALS = ("float32", "byteps", "hitopk", "hipress")
NAMES = ("float32", "BytePS-Compress", "HiTopKComm", "HiPress", "best uniform")


def chosen(costs: Costs, texts: Sequence[str]) -> Callable[[int], Option]:
    """The rule of a rival: of its strategies, the one that exchanges a tensor of a size soonest if it is alone."""
    known = [parse(text) for text in texts]
    return lambda size: min(known, key=lambda option: sum(seconds for _, seconds in costs.chain(option, size)))


def rivals(costs: Costs) -> dict[str, Callable[[int], Option]]:
    """The strategy of a tensor, by its size, for each of `RIVALS`."""
    return {
        "float32": chosen(costs, [DENSE_HIERARCHICAL]),
        "byteps": chosen(costs, [SERVERS.format("cpu")]),
        "hitopk": chosen(costs, [GATHERED]),
        "hipress": chosen(costs, [DENSE_HIERARCHICAL, SERVERS.format("gpu"), GATHERED]),
    }


def seconds(profile: Profile, costs: Costs, rule: Callable[[int], Option]) -> float:
    """Seconds of a step in which every tensor is exchanged by the rule."""
    chains = [costs.chain(rule(tensor.size), tensor.size) for tensor in profile.tensors]
    return profile.forward + Timeline([tensor.backward for tensor in profile.tensors], chains).seconds


def measured(cell: Cell, profile: Profile, device: Codec) -> dict[str, Any]:
    """Predicted seconds of a step of each system."""
    total = profile.size
    cpu = Curve((1.0, float(total)), (4 / CPU_RATE, 4 * total / CPU_RATE))
    both = replace(device, speeds={**device.speeds, "cpu": Speed(cpu, cpu, cpu)})
    costs = Costs(CLUSTERS[cell.cluster], both, min_numel=0)
    problem = Problem.of(profile, costs)
    found = {name: seconds(profile, costs, rule) for name, rule in rivals(costs).items()}
    every = options(False, ("gpu",))
    found["uniform"] = min(seconds(profile, costs, lambda size, option=option: option) for option in every)  # type: ignore[misc]
    for mode in ("paper", "refined"):
        best: Sequence[Choice] = select(problem, mode).choices  # type: ignore[arg-type]
        found[mode] = profile.forward + problem.timeline(best).seconds
    found["limit"] = profile.forward + profile.backward
    return {"cell": cell._asdict(), "seconds": found}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Espresso's gain over each system as Markdown: as predicted, and in brackets as in the paper."""
    lines = [f"| model, compressor, links | {' | '.join(NAMES)} | limit |", "|---" * (len(NAMES) + 2) + "|"]
    for row in rows:
        cell, found = row["cell"], row["seconds"]
        cells = [", ".join(cell[key] for key in ("model", "compressor", "cluster"))]
        for name in (*RIVALS, "uniform"):
            gain = f"{found[name] / found['refined'] - 1:.0%}"
            paper = cell.get(name)
            cells.append(gain if paper is None else f"{gain} ({paper:.0%})")
        cells.append(f"{found['limit'] / found['refined']:.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Predict, or show what is stored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="?", type=Path, help="the folder with profiles and costs")
    parser.add_argument("-o", "--out", type=Path, help="a file for the results")
    parser.add_argument("--show", type=Path, help="print the table of this file")
    given = parser.parse_args()
    if given.show:
        print(table(json.loads(given.show.read_text())))
        return
    if given.profiles is None:
        parser.error("give the folder with profiles and costs, or --show FILE")
    known = {
        each["params"]["compressor"]: codec(each) for each in json.loads((given.profiles / "costs.json").read_text())
    }
    rows = [measured(cell, load(given.profiles / f"{cell.model}.json"), known[cell.compressor]) for cell in CELLS]
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
