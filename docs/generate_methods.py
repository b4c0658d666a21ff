"""Writes docs/methods.md, docs/methods/*.md, docs/memories.md and docs/communicators.md from the registry.

python docs/generate_methods.py            # write the pages
python docs/generate_methods.py --check    # fail if they are not what would be written

From docstrings, fields and declarations; bits are counted by `grace.simulate`.
"""

from __future__ import annotations

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

DOCS = Path(__file__).parent
NOTES = {
    "threshold": "measured with `threshold=2.5758`, which 1% of such numbers reach",
    "sidco": "of the first step, whose one stage lets more than 1% of such numbers through; later about 0.64",
    "powersgd": "measured on a matrix of 1024 x 1024; 32 r (a + b) / (a b) in general",
}

WHEN = {
    "3lc": "Below two bits per element with a residual, and the fewer, the more elements are near zero. With "
    "`zero_run=False` and a `block_size` it works in two stages.",
    "acpsgd": "As `powersgd` with half of its bytes and one round instead of two: shorter steps where a network's "
    "latency or the processors are the limit. In short trainings the loss may fall later.",
    "adacomp": "Convolutional networks, where it sends few elements without a ratio to tune: it adapts to each bin. "
    "Lower `bin_size` for layers that lose accuracy.",
    "adaq": "As `topk`, with positions alone: two means stand for all values, half the bytes. Means blur large "
    "elements, which the residual makes up for.",
    "arctopk": "Many workers, and gradients whose large elements come in groups, as the rows of a matrix do: "
    "traffic does not grow with the number of workers, and no position travels.",
    "atomo": "Low rank and unbiased: where errors must not add up and no residual may be kept. `powersgd` with its "
    "residual sends as much, in less time, and loses less.",
    "bf16": "A safe first step: half the bytes, nearly no loss, and no overflow, for few workers or in two stages.",
    "blockint": "The plain choice for few bits in two stages: 4 bits with a scale per block, cheap to compute. With "
    '`rounding="stochastic"` no residual is kept.',
    "chain": "When the values of a sparsifier should take fewer bits as well, and `qsparse` or `stc` is not the "
    "pair you want.",
    "chunktopk": "Large models that communicate seldom: a quarter of a bit per element, largest elements "
    "found chunk by chunk.",
    "cltk": "Top-k for many workers whose gradients resemble each other: one of them chooses for all.",
    "demo": "Few bits for matrices whose neighbouring elements belong together. It transforms each chunk by two small "
    "matrix products.",
    "dettmers8": "Four times fewer bytes with small relative errors, also of elements far below the largest; with "
    "`nf4` eight times fewer.",
    "dgc": "Ratios around 0.001 of large tensors: a sample finds the threshold, so that nothing large is sorted.",
    "eden": "The smallest error for 1 to 4 bits without a residual, however elements are distributed, for the price "
    "of a transform of each block.",
    "efsignsgd": "32 times fewer bits. Set `block_size` (512, say) when a tensor holds parts of different magnitude.",
    "fp16": "Half the bytes through a plain allreduce, for any number of workers. Scale the loss if gradients are "
    "tiny or huge.",
    "fp8": "Eight bits with small relative errors over a wide range of magnitudes, in a format that accelerators have.",
    "gradzip": "As `powersgd`, with small solves where an orthogonalisation is slow.",
    "gtopk": "When the mean itself must be sparse, with k elements whatever the number of workers: no optimizer "
    "step touches the rest.",
    "inceptionn": "When an absolute error is asked for and the scale of the gradients is known. What it sends varies "
    "with the step.",
    "natural": "Eight bits, unbiased, without a residual or a norm: the error is small for every element, large or "
    "tiny.",
    "natural_dithering": "Unbiased as `qsgd`, with finer levels near zero: better where most elements are far below "
    "the largest of their block.",
    "none": "The baseline to compare with; also what every tensor below `min_numel` gets.",
    "onebit": "As `efsignsgd`, with a level of its own for each sign: better where a tensor's mean is far from zero.",
    "powersgd": "Large matrices (linear layers, convolutions, attention) and many workers: it needs only allreduces. "
    "Vectors go dense.",
    "qsgd": "When no memory may be spent on a residual, or when an unbiased gradient is asked for. Fewer levels send "
    "fewer bits and add more noise.",
    "qsparse": "As `topk` with fewer bits for the values, above all where positions are cheap "
    '(`index_coding="elias_fano"`). Works with the gradients of several local steps too.',
    "randomk": "As cheap on the wire as top-k at half the ratio, and summable, but it does not choose large elements. "
    "A baseline for top-k, or for very many workers.",
    "shared_int": "Quantisation through a plain allreduce, for many workers: integers are summed on the wire and no "
    "residual is kept. `levels=1` is TernGrad.",
    "sidco": "In the place of `topk` where sorting or sampling is slow (TensorFlow, accelerators): thresholds in a few "
    'passes. Set `fuse="bucket"`, so that small layers share one fit. See [SIDCo](sidco.md).',
    "signsgd": "One bit per element and no residual to keep. Every element moves by the learning rate in every step, "
    "so lower it; `efsignsgd` needs no such change.",
    "signum": "As `signsgd` with noisy gradients: the momentum is voted on. Use an optimizer without momentum.",
    "sketch": "Six bits that follow the distribution of the elements, whatever it is, for the price of sorting them. "
    "Their sum is exact.",
    "sketch_sgd": "Many workers, and gradients with a few outstanding elements: sketches add up on the wire. The "
    "table must have many more columns than elements are kept, so use it with small ratios.",
    "stc": "The fewest bits at a given ratio: about 2 + log2(n / k) for each position and one for the sign. For slow "
    "links, with the residual.",
    "terngrad": "Two bits and unbiased, without a residual. Set `block_size` to lower the noise, or `clip` for large "
    "tensors.",
    "thc": "As `shared_int` where a tensor's elements are of very different sizes: they are rotated first, so that a "
    "few large ones do not coarsen all steps.",
    "threshold": "When the scale of the gradients is known and steady. What it sends varies with the step: look at the "
    "report, since a low threshold sends more than the dense gradient.",
    "topk": "A few large elements carry most of the gradient. The simplest sparse method, and the usual baseline.",
    "wangni": "When sparse gradients must be unbiased, or no memory may be spent on a residual: large elements are "
    "always sent, small ones with a probability.",
    "decoupled_momentum": "With `demo`, whose default it is. Use an optimizer without momentum.",
    "diana": "With unbiased methods, when the noise of compression and not that of the gradients is the limit.",
    "ef21": "In the place of `residual` when gradients differ much between workers, or a residual grows too large.",
    "lowpass": "In the place of `residual` with `cltk`, whose default it is, and with large batches.",
    "momentum": "With `signum`, whose default it is. Use an optimizer without momentum of its own.",
    "onebit_adam": "Adam over slow links: `efsignsgd` with `block_size`, `twostage`, and SGD as the optimizer.",
    "residual": "With every method that is neither unbiased nor a vote; it is their default.",
    "allgather": "Any method between two workers; one round and one compression between more.",
    "auto": "Always, unless you have a reason: it is the default.",
    "allreduce": "Methods whose payloads may be summed, or are agreed on while compressing: it is their default.",
    "broadcast": "Where gathering is slow or absent; otherwise `allgather`: one message where this is one per worker.",
    "hierarchical": "Several workers on each machine and a slow network between machines.",
    "planned": "Where `grace plan` says that tensors should travel in different ways.",
    "reducescatter": "Sharded training: `grace.torch.fsdp`.",
    "twostage": "Three workers and more: it is the default there for payloads that may not be summed.",
}
"""When to use what. A method that is not named here cannot be documented. Memory "none" needs no advice."""

MEMORIES = {
    "dgc": "With sparse methods, in the place of the optimizer's momentum, which should then be 0.",
    "efsignsgd": "Where the learning rate changes: what was held back keeps the rate of its time.",
    "none": "With methods that are unbiased, exact, or votes; it is their default.",
}
"""The same of memories whose names are those of compressors, too."""


WRITTEN = "<!-- Written by docs/generate_methods.py: change the docstrings or that script, not this page. -->\n"

METHODS = f"""{WRITTEN}# Methods

One page for each compressor; [memories](memories.md) and [communicators](communicators.md) have a page of their own.
`grace methods` prints the same names on your machine, `grace methods topk` one of them with its parameters.

A method is a compressor with a memory; a communicator carries it. All parameters are keys of the dictionary that
`grace_from_params` takes. Everything here runs on NumPy, PyTorch and TensorFlow from one definition.
[Choose a method](choose.md) says where to begin.

{{table}}
**Bits per element** are counted: the bytes that one worker hands to the network for a float32 tensor of
{SHAPE[0]} x {SHAPE[1]} = 2^20 numbers of variance 1, with default parameters, over the default communicator
(`grace.simulate`, 2 workers). Dense is 32.

## Guarantees

Pages show what the classes declare, for n = 2^20 elements x and what is decoded x̂, in the worst case:
*contraction d* means E‖x − x̂‖² ≤ (1 − d)‖x‖²; *variance w* means that the expectation of x̂ is x and
E‖x − x̂‖² ≤ w‖x‖². A small d does not mean a large error on real gradients: it is what no gradient exceeds.

In payloads, n is the number of elements and m the number of blocks.
"""

MEMORY = f"""{WRITTEN}# Memories

A memory adds to each gradient what earlier payloads did not carry, or keeps other state beside a compressor. Leave
`memory` out, and it is the one that the [compressor](methods.md) names.

"""

COMMUNICATOR = f"""{WRITTEN}# Communicators

A communicator takes a gradient to its mean over all workers. Leave `communicator` out, and
[the choice](guide.md#which-communicator) follows from the method and the workers.

Bits per element that one worker hands to the library and gets from it (`efsignsgd` with `block_size=512`).
How often a byte then crosses a link is the library's choice: a ring allreduce sends and receives 2(N−1)/N times the
tensor.

{{traffic}}
What allgather and broadcast receive grows with the number of workers N, so they move fewer bytes than a
dense ring allreduce only for methods of fewer than 64/N bits per element.

"""

COMBINE = {
    Combine.GATHER: "payloads of all workers are needed",
    Combine.MEAN: "payloads may be summed",
    Combine.AGREED: "the workers agree on one payload while they compress, so that it may be summed",
}


def linked(citation: str) -> str:
    """Links for arXiv's numbers."""
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", citation)


def advice(name: str, kind: str) -> str:
    """When to use it."""
    found = (MEMORIES.get(name) if kind == "memories" else None) or WHEN.get(name)
    if found is None:
        raise SystemExit(f"say in WHEN, in {Path(__file__).name}, when {name!r} is the right choice")
    return found


def described(name: str, kind: str) -> tuple[str, list[str], str]:
    """What it does, what it sends and keeps, and its paper."""
    first, statements, citation = docstring(KINDS[kind][name])
    plain, _ = split(statements, keys(KINDS[kind][name]))
    said = []
    for text in plain:
        start, colon, rest = text.partition(": ")
        said.append(f"**{start}**: {rest}" if colon and start in ("Payload", "State") else text)
    return first, said, linked(citation)


def settings(name: str, kind: str) -> list[str]:
    """A dictionary to copy, and what its keys mean."""
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
        lines += [f"| `{key}` | `{literal(known[key])}` | {about.get(key, '')} |" for key in own] + [""]
    return lines


def traits(name: str) -> list[str]:
    """The table of what a compressor promises."""
    cls: Any = compressors[name]
    made, entry, (memory, communicator) = cls(), describe(name, compressors), usual(cls)
    note = f" ({NOTES[name]})" if name in NOTES else ""
    block = f"blocks of {made.traits.block_size}" if made.traits.block_size else "the whole tensor"
    cut = made.traits.block_size and not made.traits.variable_length and made.traits.combine is not Combine.AGREED
    rows = [
        ("class", made.traits.family),
        ("bits per element", f"{bits(name):.4g}{note}"),
        ("[guarantee](../methods.md#guarantees)", guarantee(entry)),
        ("on the wire", COMBINE[made.traits.combine]),
        ("length of the payload", "depends on the values" if made.traits.variable_length else "known beforehand"),
        (
            "statistics per",
            "element" if made.traits.block_size == 1 else block + "; `twostage` may cut the payload" * bool(cut),
        ),
        ("memory by default", f"[`{memory}`](../memories.md#{anchor(memory)})"),
        (
            "communicator by default",
            ", from 3 workers on ".join(f"[`{c}`](../communicators.md#{c})" for c in communicator.split(", ")),
        ),
        ("communicators that carry it", ", ".join(f"`{each}`" for each in entry.communicators or [])),
        ("measured", "[kernels](../benchmarks.md#all-methods), [network lab](../benchmarks.md#every-method)"),
    ]
    return ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows), ""]


def anchor(memory: str) -> str:
    """The name of a memory's heading in a link."""
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
    lines += ["## Settings", "", *settings(name, "compressors"), "## Traits", "", *traits(name)]
    if citation:
        lines += ["## Paper", "", citation, ""]
    return "\n".join(lines).rstrip() + "\n"


def section(name: str, kind: str) -> str:
    """A memory or a communicator."""
    first, said, citation = described(name, kind)
    heading = "no memory (none)" if (name, kind) == ("none", "memories") else name
    lines = [f"## {heading}", "", first, "", f"**When to use it.** {advice(name, kind)}", ""]
    for text in said:
        lines += [text, ""]
    lines += settings(name, kind)
    if citation:
        lines += [f"**Paper**: {citation}", ""]
    return "\n".join(lines).rstrip() + "\n"


def overview() -> str:
    """The table of all compressors."""
    lines = [
        "| compressor | class | bits per element | unbiased | memory | communicator: 2 workers, more |",
        "|---|---|---|---|---|---|",
    ]
    for name, cls in compressors.items():
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
    return "\n".join(lines) + "\n"


def traffic() -> str:
    """What the communicators move, for one method that all of them but allreduce can carry."""
    method = {"compressor": "efsignsgd", "block_size": 512}
    rows = [({"compressor": "none"}, "none over allreduce (dense)")]
    rows += [({**method, "communicator": c}, f"efsignsgd over {c}") for c in ("allgather", "broadcast", "twostage")]
    lines = [
        "| | sent, 4 workers | received, 4 workers | sent, 8 workers | received, 8 workers |",
        "|---|---|---|---|---|",
    ]
    for params, label in rows:
        numbers = [f"{number:.3g}" for workers in (4, 8) for number in sent(params, workers)]
        lines.append(f"| {label} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """All pages."""
    found = {DOCS / "methods" / f"{name}.md": method(name) for name in compressors}
    found[DOCS / "methods.md"] = METHODS.format(table=overview())
    found[DOCS / "memories.md"] = MEMORY + "\n".join(section(name, "memories") for name in KINDS["memories"])
    parts = "\n".join(section(name, "communicators") for name in communicators)
    found[DOCS / "communicators.md"] = COMMUNICATOR.format(traffic=traffic()) + parts
    return found


if __name__ == "__main__":
    wanted, there = pages(), set((DOCS / "methods").glob("*.md"))
    stale = [page for page, text in wanted.items() if not page.exists() or page.read_text(encoding="utf-8") != text]
    stale += sorted(there - wanted.keys())
    if "--check" not in sys.argv:
        (DOCS / "methods").mkdir(exist_ok=True)
        for page in stale:
            page.write_text(wanted[page], encoding="utf-8") if page in wanted else page.unlink()
    elif stale:
        names = ", ".join(str(page.relative_to(DOCS)) for page in stale)
        sys.exit(f"out of date: {names}: run python docs/generate_methods.py")
