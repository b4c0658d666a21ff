"""Writes docs/methods.md, docs/methods/*.md, docs/memories.md and docs/communicators.md from the registry.

python docs/generate_methods.py            # write the pages
python docs/generate_methods.py --check    # fail if a page is out of date

Contents come from docstrings, fields and traits; `grace.simulate` counts the bits.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from grace import Combine
from grace.cli.catalog import (
    KINDS,
    SHAPE,
    bits,
    classes,
    describe,
    docstring,
    example,
    guarantee,
    keys,
    literal,
    meanings,
    sent,
    split,
    usual,
)
from grace.core.registry import communicators, compressors
from grace.planner.measured import RECOMMENDED

DOCS = Path(__file__).parent
NOTES = {
    "variance": "a first step sends nothing else than a scale; later ones what passes the test",
    "threshold": "measured with `threshold=2.5758`, which 1% of these numbers reach",
    "sidco": "in the first step, whose single stage selects more than 1% of these numbers; later about 0.64",
    "oktopk": "in a step that finds its thresholds, as the first; otherwise 0.64",
    "gradiveq": "in the training steps; 4 in the compressed ones, 9.6 on average over a cycle",
    "powersgd": "measured on a matrix of 1024 x 1024; in general 32 r (a + b) / (a b)",
}

TABLED = {"sign": "efsignsgd", "int8": "blockint", "int4": "blockint"}
"""Names in tables of measurements that are not the method's own."""

WHEN = {
    "3lc": "Below two bits per element with a residual; the more elements are near zero, the fewer bits. With "
    "`zero_run=False` the payload has a fixed length.",
    "acpsgd": "As `powersgd`, with half the bytes and one round instead of two. Use it if latency or computation "
    "limits the step. In short trainings the loss may fall later.",
    "adacomp": "Convolutional networks. It sends few elements and adapts to each bin, with no ratio to tune. Lower "
    "`bin_size` for layers that lose accuracy.",
    "adaptive_random": "Between `randomk` and `topk`: it prefers large elements, but sorts none. With "
    "`unbiased=True` it needs no residual; `wangni` has less noise.",
    "adaq": "As `topk`, with half the bytes: it sends positions and only two means as values. Error feedback "
    "compensates for the blurred magnitudes.",
    "arctopk": "Gradients whose large elements come in groups, such as the rows of a matrix. No positions are sent.",
    "atomo": "Unbiased low rank, without a residual. `powersgd` with its residual sends as much, takes less time and "
    "loses less. What a worker receives grows with the number of workers.",
    "bf16": "A safe first step: half the bytes, almost no loss, no overflow.",
    "blockint": "The simplest choice for few bits: 4 bits and a scale per block, cheap to compute. "
    '`rounding="stochastic"` needs no residual.',
    "chain": "To quantise the values of a sparsifier with another pair than those of `qsparse` and `stc`.",
    "chunktopk": "Large models that communicate rarely: a quarter of a bit per element, with the largest elements "
    "selected in each chunk.",
    "cltk": "Top-k whose payloads are summed on the wire, for workers with similar gradients: one worker chooses the "
    "elements for all.",
    "damped": "To run an unbiased method of few levels or few elements with a residual, which without the factor would "
    "diverge.",
    "demo": "Few bits for matrices whose neighbouring elements are correlated. Two small matrix products transform "
    "each chunk.",
    "dion": "Orthonormal updates (as Muon's) of large hidden matrices, with two small sums per step. For SGD without "
    "momentum; vectors, embeddings and heads need another optimizer. Too small a `rank_fraction` costs accuracy.",
    "dettmers8": "Four times fewer bytes (with `nf4` eight), with small relative errors even for elements far below "
    "the largest.",
    "dgc": "Large tensors with ratios around 0.001. A sample sets the threshold, so large tensors are not sorted.",
    "eden": "The smallest error at 1 to 4 bits without a residual, for any distribution of elements. It transforms "
    "each block.",
    "efsignsgd": "32 times fewer bits. Set `block_size`, for example to 512, if magnitudes differ within a tensor.",
    "fp16": "Half the bytes, summed on the wire. Scale the loss if gradients are tiny or huge.",
    "fp8": "Eight bits with small relative errors over a wide range of magnitudes, in a format that accelerators "
    "support.",
    "geometric": "As `natural`, without randomness and with a residual: the relative error of every element is "
    "bounded. A smaller `beta` means a smaller error over a smaller range of magnitudes, at the same size.",
    "gradiveq": "Convolutional networks in long trainings whose gradients keep their correlations: coordinates are "
    "summed on the wire, in one round. It costs uncompressed steps in each cycle, and `slice_size`² numbers of state.",
    "gradzip": "As `powersgd`, if orthogonalisation is slow: it solves small linear systems instead.",
    "gtopk": "When the mean itself must be sparse: it has k elements for any number of workers, and the optimizer "
    "leaves all others alone. What a worker receives grows with the number of workers.",
    "inceptionn": "When you need an absolute error bound and know the scale of the gradients. Bytes vary from step to "
    "step.",
    "kashin": "Never instead of `eden`, whose error is far smaller with as many bits, except where a bound is wanted "
    "that does not depend on the distribution of elements. Of a normal vector, one bit per coefficient (2 bits per "
    "element) leaves 2.16 times its square (`eden` with 2 bits: 0.133), four bits (8 bits per element) 0.0077 (`eden` "
    "with 4 bits: 0.0096). The largest coefficient, in units of |x| / sqrt(d), is 3.38 with the rotation alone, 2.74 "
    "after 2 iterations with `eta=0.9` and 2.26 with the defaults; with `redundancy=4` it is 3.68, 2.58 and 2.02, "
    "with 1.02 hardly less than with the rotation alone (3.31 of 3.37).",
    "natural": "Eight bits, unbiased, without a residual or a norm. The relative error is small for every element, "
    "large or tiny.",
    "natural_dithering": "As `qsgd`, with finer levels near zero: better if most elements are far below the "
    'largest of their block. `norm="l2"` is NUQSGD.',
    "none": "The baseline, and what every tensor smaller than `min_numel` gets.",
    "oktopk": "As `topk`, with many workers: all of them together choose k elements of the whole tensor, and what a "
    'worker receives does not grow with their number. Set `fuse="bucket"`, so that k is much larger than the number of '
    "workers, and a step has few messages.",
    "onebit": "As `efsignsgd`, with a separate level for each sign: better if a tensor's mean is far from zero.",
    "powersgd": "Large matrices (linear layers, convolutions, attention), summed on the wire. Vectors are sent "
    "uncompressed.",
    "qsgd": "When gradients must be unbiased, or a residual needs too much memory. Fewer levels mean fewer bits and "
    "more noise.",
    "qsparse": "As `topk`, with fewer bits for the values; most useful with cheap positions "
    '(`index_coding="elias_fano"`). It also suits the accumulated gradients of several local steps.',
    "randomk": "A baseline for top-k. It sends values without positions, summed on the wire, but does not select "
    "large elements.",
    "shared_int": "Quantisation without a residual, with integers that are summed on the wire. `levels=1` is TernGrad.",
    "sidco": "Instead of `topk` where sorting or sampling is slow (TensorFlow, accelerators): it finds thresholds in "
    'a few passes. Set `fuse="bucket"`, so that small layers share one fit. See [SIDCo](sidco.md).',
    "signsgd": "One bit per element, without a residual. Every step moves every element by the learning rate, so "
    "lower it; `efsignsgd` needs no such change.",
    "signum": "As `signsgd`, for noisy gradients: workers vote on the momentum. Use an optimizer without momentum.",
    "sketch": "Six bits that adapt to any distribution of elements and preserve their sum. It sorts all elements.",
    "sketch_sgd": "Gradients with a few very large elements. Sketches are summed on the wire. The table must have many "
    "more columns than there are elements to keep, so use small ratios.",
    "stc": "The fewest bits at a given ratio: about 2 + log2(n / k) per position and one per sign. For slow links, "
    "with the residual.",
    "terngrad": "Two bits, unbiased, without a residual. Set `block_size` to reduce the noise, or `clip` for large "
    "tensors.",
    "thc": "As `shared_int`, if magnitudes differ widely within a tensor: it rotates the tensor first, so that a few "
    "large elements do not coarsen the steps.",
    "threshold": "When gradients have a known, steady scale. Bytes vary from step to step; check the report, since a "
    "low threshold sends more than the dense gradient.",
    "topk": "When a few large elements carry most of the gradient. The simplest sparse method and the usual baseline.",
    "variance": "Where most of a gradient is noise: an element waits until the gradients of several steps agree, with "
    "no ratio to tune. A larger `alpha` sends less. What a worker receives grows with the number of workers.",
    "wangni": "When sparse gradients must be unbiased, or a residual needs too much memory. Large elements are always "
    "sent, small ones with a probability.",
    "decoupled": "The default of `dion`, and for it alone. Use SGD without momentum.",
    "decoupled_momentum": "The default of `demo`. Use an optimizer without momentum.",
    "diana": "With unbiased methods, if compression noise, not gradient noise, limits convergence.",
    "econtrol": "As `ef21`, if its estimates lag too far behind, as with very sparse methods.",
    "ef21": "Instead of `residual`, if gradients differ much between workers or the residual grows too large. "
    "With small batches set `momentum`, for example to 0.1.",
    "lowpass": "The default of `cltk`. Instead of `residual` with large batches.",
    "momentum": "The default of `signum`. Use an optimizer without momentum.",
    "onebit_adam": "Adam over slow links: `efsignsgd` with `block_size`, and SGD as the optimizer.",
    "residual": "The default of most biased methods.",
    "allgather": "When you want one round and one compression. The default for two workers, if payloads cannot be "
    "summed.",
    "auto": "The default. Name another one only with a reason.",
    "allreduce": "The default for payloads that can be summed, or that workers agree on while compressing.",
    "broadcast": "Where an allgather is slow or missing. It sends one message per worker instead of one.",
    "hierarchical": "Several workers per machine and a slow network between machines.",
    "planned": "When `grace plan` recommends different strategies for different tensors.",
    "reducescatter": "Sharded training: `grace.torch.fsdp`.",
    "twostage": "The default for three or more workers, if payloads cannot be summed.",
}
"""When to use what. A method without an entry cannot be documented. Memory "none" needs no advice."""

MEMORIES = {
    "dgc": "With sparse methods, instead of the optimizer's momentum: set that to 0.",
    "efsignsgd": "When the learning rate changes: it scales the residual by the ratio of the two rates.",
    "none": "The default of methods that are unbiased, almost exact, majority votes, or have a residual of their own.",
}
"""The same for memories that share their name with a compressor."""


WRITTEN = "<!-- Written by docs/generate_methods.py: change the docstrings or that script, not this page. -->\n"

METHODS = f"""{WRITTEN}# Methods

For looking up one method; to find one, go to [Choose a method](choose.md).

Each compressor has a page; [memories](memories.md) and [communicators](communicators.md) share one page each.
`grace methods` lists the same names, `grace methods topk` the parameters of one.

A method is a compressor with a memory; a communicator carries its payloads. All parameters are keys of the dictionary
for `grace_from_params`. Every method is defined once and runs on NumPy, PyTorch and TensorFlow.

{{table}}
**Bits per element**: what one worker sends for a float32 tensor of {SHAPE[0]} x {SHAPE[1]} = 2^20 numbers of
variance 1, with default parameters and the default communicator, as counted by `grace.simulate` with 2 workers. Dense
gradients have 32.

## Guarantees

The pages show each class's worst-case bound for a tensor x of n = 2^20 elements and its decoded payload x̂:
*contraction d* means E‖x − x̂‖² ≤ (1 − d)‖x‖²; *variance w* means E x̂ = x and E‖x − x̂‖² ≤ w‖x‖². A small d is
only a bound: the error on real gradients may be much smaller.

In payloads, n is the number of elements and m the number of blocks.
"""

MEMORY = f"""{WRITTEN}# Memories

For looking up what a method keeps between steps.

A memory holds error feedback, momentum or other state beside a compressor. By default it is the one that the
[compressor](methods.md) names.

"""

COMMUNICATOR = f"""{WRITTEN}# Communicators

For looking up how payloads travel.

A communicator averages a gradient over all workers. By default, [`auto`](#auto)
[chooses it](settings.md#which-communicator) from the method and the workers.

The table shows the bits per element that one worker hands to the communication library and gets back (`efsignsgd` with
`block_size=512`). The traffic on links depends on that library: a ring allreduce sends and receives 2(N−1)/N times the
tensor.

{{traffic}}
With allgather and broadcast, a worker receives more with every further worker: for N workers they move fewer bytes than
a dense ring allreduce only below 64/N bits per element. `auto` avoids both where it can.

"""

COMBINE = {
    Combine.GATHER: "payloads cannot be summed: each is decoded",
    Combine.MEAN: "payloads can be summed",
    Combine.AGREED: "workers agree on one payload while they compress",
}


def linked(citation: str) -> str:
    """Link arXiv numbers."""
    return re.sub(
        r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", citation
    )


def advice(name: str, kind: str) -> str:
    """When to use a part."""
    found = (MEMORIES.get(name) if kind == "memories" else None) or WHEN.get(name)
    if found is None:
        raise SystemExit(
            f"say in WHEN, in {Path(__file__).name}, when {name!r} is the right choice"
        )
    return found


def described(name: str, kind: str) -> tuple[str, list[str], str]:
    """The summary, the statements and the citation of a docstring."""
    first, statements, citation = docstring(KINDS[kind][name])
    plain, _ = split(statements, keys(KINDS[kind][name]))
    said = []
    for text in plain:
        start, colon, rest = text.partition(": ")
        said.append(
            f"**{start}**: {rest}" if colon and start in ("Payload", "State") else text
        )
    return first, said, linked(citation)


def settings(name: str, kind: str) -> list[str]:
    """An example dictionary, and a table of its keys."""
    cls = KINDS[kind][name]
    shown, known, about = example(name, kind), keys(cls), meanings(cls)
    lines = [
        "```python",
        "params = {",
        *(f'    "{key}": {literal(value)},' for key, value in shown.items()),
        "}",
        "```",
        "",
    ]
    own = [key for key in about if key in known]
    own += [field.name for field in fields(cls) if field.init and field.name not in own]
    if own:
        lines += ["| parameter | default | meaning |", "|---|---|---|"]
        lines += [
            f"| `{key}` | `{literal(known[key])}` | {about.get(key, '')} |"
            for key in own
        ] + [""]
    return lines


def traits(name: str) -> list[str]:
    """The table of a compressor's traits."""
    cls: Any = compressors[name]
    made, entry, (memory, communicator) = cls(), describe(name, compressors), usual(cls)
    note = f" ({NOTES[name]})" if name in NOTES else ""
    block = (
        f"blocks of {made.traits.block_size}"
        if made.traits.block_size
        else "the whole tensor"
    )
    cut = (
        made.traits.block_size
        and not made.traits.variable_length
        and made.traits.combine is not Combine.AGREED
    )
    rows = [
        ("class", made.traits.family),
        ("bits per element", f"{bits(name):.4g}{note}"),
        ("[guarantee](../methods.md#guarantees)", guarantee(entry)),
        ("[classes](../write-a-method.md#classes-of-biased-methods)", classes(entry)),
        ("on the wire", COMBINE[made.traits.combine]),
        (
            "length of the payload",
            "depends on the values" if made.traits.variable_length else "fixed",
        ),
        (
            "statistics per",
            "element"
            if made.traits.block_size == 1
            else block + "; `twostage` may cut the payload" * bool(cut),
        ),
        ("memory by default", f"[`{memory}`](../memories.md#{anchor(memory)})"),
        (
            "communicator by default",
            ", from 3 workers on ".join(
                f"[`{c}`](../communicators.md#{c})" for c in communicator.split(", ")
            ),
        ),
        (
            "compatible communicators",
            ", ".join(f"`{each}`" for each in entry.communicators or []),
        ),
        ("measured", ", ".join(f"[{title}](../benchmarks-methods.md#{place})" for title, place in tables(name))),
    ]
    lines = [f"| {key} | {value} |" for key, value in rows if value]
    return ["| | |", "|---|---|", *lines, ""]


def measured() -> str:
    """What was counted and trained with `oktopk`, from benchmarks/results."""
    counted, trained = (
        json.loads((DOCS.parent / "benchmarks" / "results" / file).read_text())
        for file in ("scale-sparse.json", "oktopk-2026-11-29.json")
    )
    sizes = list(counted["received"]["oktopk"])
    lines = [f"| | {' | '.join(sizes)} |", "|---|" + "---|" * len(sizes)]
    for label, found in counted["received"].items():
        method, _, communicator = label.partition(", ")
        cells = " | ".join(f"{mean:.1f}" for mean, _ in found.values())
        lines.append(f"| `{method}`{f' by `{communicator}`' if communicator else ''} | {cells} |")
    most = max(most for _, most in counted["received"]["oktopk"].values())
    quality = {row["method"].replace("compress_ratio", "ratio"): row["quality"] for row in trained["results"]}
    table = "\n".join(lines)
    return f"""Numbers of 4 bytes (values, positions, counts) that a worker receives in a step, divided by k = \
{counted["elements"] // 100:,}, by number of workers; means over 32 steps of normal gradients (`{counted["command"]}`):

{table}

`oktopk` received at most {most:.1f} k in a step, one that finds its thresholds. It saves bytes against methods
that gather, more with more workers. Against `topk` by `twostage`, the default of `topk`, it saves none, and takes two
rounds more per step.

What thresholds do between two searches: while residuals grow, as in the first steps of a training, more than k elements
exceed both, and the limits above take effect. When gradients shrink, fewer do, and the mean has fewer than k elements,
in the extreme none, until residuals have grown or thresholds are found anew.

One short training, {trained["results"][0]["steps"]} steps of an LSTM, 2 workers, one seed; perplexity \
(`{trained["command"].partition(";")[0]}`):

| method | perplexity (lower is better) |
|---|---|
{chr(10).join(f"| `{method}` | {value:.1f} |" for method, value in quality.items())}

With new thresholds in every step it selects nearly as `gtopk` does; reusing them for 32 steps costs quality in a
training as short as this. The mean has k elements, with `topk` up to 2k of two workers: `oktopk` needs twice the ratio
to apply as many."""


def tables(name: str) -> list[tuple[str, str]]:
    """The tables of benchmarks-methods.md with a row of this method: what they show, and their anchors."""
    rows, found = r"^\| `?(?:grace-torch-)?([\w-]+?)(?:-2stage|-ef|-unmasked| \d bits| rank \d+)?`? \|", []
    for section in (DOCS / "benchmarks-methods.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        cells = map(str.lower, re.findall(rows, section, re.MULTILINE))
        if name in {TABLED.get(cell, cell) for cell in cells}:
            found.append((heading[0].lower() + heading[1:], heading.lower().replace(" ", "-")))
    return found


def anchor(memory: str) -> str:
    """The anchor of a memory's heading."""
    return "no-memory-none" if memory == "none" else memory


def method(name: str) -> str:
    """The page of one compressor."""
    first, said, citation = described(name, "compressors")
    also = compressors.aliases(name)
    lines = [f"{WRITTEN}# {name}", "", first, ""]
    if also:
        lines += ["Also known as " + ", ".join(f"`{each}`" for each in also) + ".", ""]
    when = re.sub(r"\]\((\w+\.md)", r"](../\1", advice(name, "compressors"))
    lines += [f"**When to use it.** {when}", "", "## What it sends", ""]
    for text in said:
        lines += [text, ""]
    lines += ["## Measured", "", measured(), ""] if name == "oktopk" else []
    lines += [
        "## Settings",
        "",
        *settings(name, "compressors"),
        "## Traits",
        "",
        *traits(name),
    ]
    if citation:
        lines += ["## Paper", "", citation, ""]
    return "\n".join(lines).rstrip() + "\n"


def section(name: str, kind: str) -> str:
    """A memory or a communicator."""
    first, said, citation = described(name, kind)
    heading = "no memory (none)" if (name, kind) == ("none", "memories") else name
    lines = [
        f"## {heading}",
        "",
        first,
        "",
        f"**When to use it.** {advice(name, kind)}",
        "",
    ]
    for text in said:
        lines += [text, ""]
    lines += settings(name, kind)
    if citation:
        lines += [f"**Paper**: {citation}", ""]
    return "\n".join(lines).rstrip() + "\n"


def overview() -> str:
    """The tables of the two shelves."""
    shelves: dict[str, list[str]] = {}
    for name, cls in compressors.items():
        shelves.setdefault(cls.__module__.rpartition(".")[0], []).append(name)
    return f"""## Measured

In `grace/compressors/measured`. Kernels encode and decode a whole bucket at once (`oktopk` has none), and what they
cost is measured.
{_recommended()}

{_table(shelves["grace.compressors.measured"])}

## For studies

In `grace/compressors/studies`. The same laws hold, and each runs in every integration, tensor by tensor: some by
kernels, others as plain functions, without a promise of speed.

{_table(shelves["grace.compressors.studies"])}
"""


def _recommended() -> str:
    names = dict.fromkeys(str(params["compressor"]) for params in RECOMMENDED)
    return f"Begin with {', '.join(f'`{name}`' for name in names)}: these kept the quality in [trainings](choose.md)."


def _table(names: list[str]) -> str:
    lines = [
        "| compressor | class | bits per element | unbiased | memory | communicator: 2 workers, more |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        cls = compressors[name]
        (memory, communicator), made = usual(cls), cls()
        unbiased = "yes" if made.traits.unbiased else "no"
        cells = (
            f"[{name}](methods/{name}.md)",
            made.traits.family,
            f"{bits(name):.4g}",
            unbiased,
            memory,
            communicator,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def traffic() -> str:
    """The traffic of each communicator, for a method that all of them except allreduce carry."""
    method = {"compressor": "efsignsgd", "block_size": 512}
    rows = [({"compressor": "none"}, "none over allreduce (dense)")]
    rows += [
        ({**method, "communicator": c}, f"efsignsgd over {c}")
        for c in ("allgather", "broadcast", "twostage")
    ]
    lines = [
        "| | sent, 4 workers | received, 4 workers | sent, 8 workers | received, 8 workers |",
        "|---|---|---|---|---|",
    ]
    for params, label in rows:
        numbers = [
            f"{number:.3g}" for workers in (4, 8) for number in sent(params, workers)
        ]
        lines.append(f"| {label} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """All pages."""
    found = {DOCS / "methods" / f"{name}.md": method(name) for name in compressors}
    found[DOCS / "methods.md"] = METHODS.format(table=overview())
    found[DOCS / "memories.md"] = MEMORY + "\n".join(
        section(name, "memories") for name in KINDS["memories"]
    )
    parts = "\n".join(section(name, "communicators") for name in communicators)
    found[DOCS / "communicators.md"] = COMMUNICATOR.format(traffic=traffic()) + parts
    return found


if __name__ == "__main__":
    wanted, there = pages(), set((DOCS / "methods").glob("*.md"))
    stale = [
        page
        for page, text in wanted.items()
        if not page.exists() or page.read_text(encoding="utf-8") != text
    ]
    stale += sorted(there - wanted.keys())
    if "--check" not in sys.argv:
        (DOCS / "methods").mkdir(exist_ok=True)
        for page in stale:
            page.write_text(
                wanted[page], encoding="utf-8"
            ) if page in wanted else page.unlink()
    elif stale:
        names = ", ".join(str(page.relative_to(DOCS)) for page in stale)
        sys.exit(f"out of date: {names}: run python docs/generate_methods.py")
