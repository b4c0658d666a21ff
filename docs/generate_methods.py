"""Writes docs/methods.md from the registry: docstrings, fields, declarations, and bits counted by `grace.simulate`.

python docs/generate_methods.py            # write the page
python docs/generate_methods.py --check    # fail if it is not what would be written
"""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from grace import Combine
from grace.cli.catalog import SHAPE, bits, describe, docstring, guarantee, sent, usual
from grace.core.registry import Registry, communicators, compressors, memories

PAGE = Path(__file__).with_name("methods.md")
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
    "found chunk by chunk, and `twostage` for many workers.",
    "cltk": "Top-k for many workers whose gradients resemble each other: one of them chooses, so the traffic does "
    "not grow with their number.",
    "demo": "Few bits for matrices whose neighbouring elements belong together. It transforms each chunk by two small "
    "matrix products.",
    "dettmers8": "Four times fewer bytes with small relative errors, also of elements far below the largest; with "
    "`nf4` eight times fewer. Works in two stages.",
    "dgc": "Ratios around 0.001 of large tensors: a sample finds the threshold, so that nothing large is sorted.",
    "eden": "The smallest error for 1 to 4 bits without a residual, however elements are distributed, for the price "
    "of a transform of each block. Works in two stages.",
    "efsignsgd": "32 times fewer bits. Set `block_size` (512, say) when a tensor holds parts of different magnitude, "
    "and to be able to use `twostage`.",
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
    "topk": "Few, large elements carry most of the gradient, and workers are few: traffic grows with their number.",
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

HEAD = f"""<!-- Written by docs/generate_methods.py: change the docstrings or that script, not this page. -->
# Methods

What is registered, as its source says it. `grace methods` prints the same names and parameters on your machine.

A method is a compressor with a memory; a communicator carries it. All parameters are keys of the dictionary that
`grace_from_params` takes. Everything here runs on NumPy, PyTorch and TensorFlow from one definition.

**Bits per element** are counted, not claimed: the bytes that one worker hands to the network for a float32
tensor of {SHAPE[0]} x {SHAPE[1]} = 2^20 numbers of variance 1, with default parameters, over the default communicator
(`grace.simulate`, 2 workers). Dense is 32.

**Guarantees** are the ones that the classes declare, for n = 2^20 elements x and what is decoded x̂, in the worst case:
*contraction d* means E‖x − x̂‖² ≤ (1 − d)‖x‖²; *variance w* means that the expectation of x̂ is x and
E‖x − x̂‖² ≤ w‖x‖². A small d does not mean a large error on real gradients: it is what no gradient exceeds.

In payloads, n is the number of elements and m the number of blocks.
"""

MOVED = """Bits per element that one worker hands to the library and gets from it (`efsignsgd` with `block_size=512`).
How often a byte then crosses a link is the library's choice: a ring allreduce sends and receives 2(N−1)/N times the
tensor.
"""

LIMIT = """What allgather and broadcast receive grows with the number of workers N, so they move fewer bytes than a
dense ring allreduce only for methods of fewer than 64/N bits per element. See the [guide](guide.md#which-communicator).
"""

COMBINE = {
    Combine.GATHER: "payloads of all workers are needed",
    Combine.MEAN: "payloads may be summed on the wire",
    Combine.AGREED: "the workers agree on one payload while they compress",
}


def split(statements: list[str], names: set[str]) -> tuple[list[str], dict[str, str]]:
    """Statements apart from what is said about parameters."""
    plain, about = [], {}
    for text in statements:
        for part in re.split(r"(?=`\w+`: )|(?=State: )", text):
            found = re.match(r"`(\w+)`: (.*)", part.strip())
            if found and found[1] in names:
                about[found[1]] = found[2].strip()
            elif part.strip():
                plain.append(part.strip())
    return plain, about


def linked(citation: str) -> str:
    """Links for arXiv's numbers."""
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", citation)


def section(name: str, registry: Registry) -> str:
    """One class."""
    cls: Any = registry[name]
    first, statements, citation = docstring(cls)
    plain, about = split(statements, {field.name for field in fields(cls)})
    lines = [f"### {name}", ""]
    if others := registry.aliases(name):
        lines += ["Also known as " + ", ".join(f"`{other}`" for other in others) + ".", ""]
    lines += [first, ""]
    for text in plain:
        start, colon, rest = text.partition(": ")
        lines += [f"**{start}**: {rest}" if colon and start in ("Payload", "State") else text, ""]
    if about.keys() or fields(cls):
        lines += ["| parameter | default | |", "|---|---|---|"]
        lines += [f"| `{f.name}` | `{f.default!r}` | {about.get(f.name, 'see above')} |" for f in fields(cls)]
        lines += [""]
    if registry is compressors:
        made, (memory, communicator) = cls(), usual(cls)
        note = f" ({NOTES[name]})" if name in NOTES else ""
        shown = "`, from 3 workers on `".join(communicator.split(", ")).join("``")
        cut = made.traits.block_size and not made.traits.variable_length and made.traits.combine is not Combine.AGREED
        block = f"blocks of {made.traits.block_size}" if made.traits.block_size else "the whole tensor"
        lines += [
            f"- **Bits per element**: {bits(name):.4g}{note}",
            f"- **Guarantee**: {guarantee(describe(name, compressors))}",
            f"- **Default memory and communicator**: `{memory}`, {shown} ({COMBINE[made.traits.combine]})",
            f"- **Statistics per**: {'element' if made.traits.block_size == 1 else block}"
            + ("; blockwise, so `twostage` cuts its payload" if cut else ""),
        ]
    if citation:
        lines.append(f"- **Paper**: {linked(citation)}")
    if (name, registry) == ("none", memories):
        pass
    elif name in WHEN:
        lines.append(f"- **When to use**: {WHEN[name]}")
    else:
        raise SystemExit(f"say in WHEN, in {Path(__file__).name}, when {name!r} is the right choice")
    return "\n".join(lines).rstrip() + "\n"


def overview() -> str:
    """The table of all compressors."""
    lines = [
        "| compressor | class | bits per element | allreduce | default memory | communicator: 2 workers, more |",
        "|---|---|---|---|---|---|",
    ]
    for name, cls in compressors.items():
        (memory, communicator), family = usual(cls), cls().traits.family
        summed = "yes" if communicator == "allreduce" else "no"
        lines.append(f"| [{name}](#{name}) | {family} | {bits(name):.4g} | {summed} | {memory} | {communicator} |")
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


def page() -> str:
    """All of docs/methods.md."""
    parts = [HEAD, "## Compressors\n", overview()]
    parts += [section(name, compressors) for name in compressors]
    parts += [
        "## Memories\n",
        *[section(name, memories).replace("### none", "### no memory (none)") for name in memories],
    ]
    parts += [
        "## Communicators\n",
        MOVED,
        traffic(),
        LIMIT,
        *[section(name, communicators) for name in communicators],
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        sys.exit("docs/methods.md is out of date: run python docs/generate_methods.py")
