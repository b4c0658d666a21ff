"""Results as tables, as a check of targets and as a chart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from grace.bench.kernels import Results, multiple, share_of_copy
from grace.bench.plan import ALLOCATORS, TARGETS, Target, parse

if TYPE_CHECKING:
    from rich.console import Console

    from grace.engine.report import Report

Record = dict[str, Any]
NAMES = {"asis": "as it comes", "tuned": "tuned"}


def render(results: Results, console: Console) -> None:
    """Print one table per backend, number of threads and size, and what was omitted."""
    from rich.markup import escape
    from rich.table import Table

    def group(record: Record) -> tuple[Any, ...]:
        return tuple(record[key] for key in ("backend", "mode", "threads", "tensors", "size", "kernels"))

    for (backend, mode, threads, tensors, size, kernels), found in itertools.groupby(
        sorted(results.records, key=group), group
    ):
        records = list(found)
        allocators = [each for each in ALLOCATORS if any(r["allocator"] == each for r in records)]
        what = f"ResNet-50, {records[0]['elements']:,} elements" if tensors == "resnet50" else f"n = {size:,}"
        device = f" ({records[0]['device']})" if records[0].get("device") else ""
        title = f"{backend}{device}{' in a graph' * (mode == 'graph')}, {threads} thread{'s'[: threads > 1]}, {what}"
        copies = ", ".join(f"{NAMES[a]} {_first(records, a)['memcpy']['us']:.4g}" for a in allocators)
        title += f"{', kernels off' * (kernels == 'off')}; memcpy in µs: {copies}"
        gap = 2 if console.width > 80 else 1
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, gap, 0, 0))
        table.add_column("method", overflow="fold", min_width=24)
        operations = [each for each in ("encode", "commit", "decode", "step") if any(r[each] for r in records)]
        waits = ["host waits"] if device else []
        times = [f"{each}\nxM" for each in operations]
        extra = ["extra\nmemory"] if any(r["extra_memory"] for r in records) else []
        shares = ["% of\ncopy"] if any(r["encode"] or r["decode"] for r in records) else []
        peers = ["vs peer"] if any(map(_speedups, records)) else []
        for head in ("bytes", "bits/\nelement", *times, *shares, *waits, *extra, *peers):
            table.add_column(head, justify="right", no_wrap=head[:2] in ("by", "bi"))
        for label in sorted({r["label"]: None for r in records}, key=lambda label: _order(records, label)):
            mine = {r["allocator"]: r for r in records if r["label"] == label}
            any_of = next(iter(mine.values()))
            table.add_row(
                escape(label + (f" ({any_of['form']})" if any_of["form"] else "")),
                f"{any_of['bytes']:,}",
                f"{any_of['bits_per_element']:.3g}",
                *(_both(allocators, mine, lambda r, each=each: _time(r, each)) for each in operations),  # type: ignore[misc]
                *(_shares([*mine.values()][-1]) for _ in shares),
                *(str(any_of["host_waits"]) for _ in waits),
                *(next((_extra(r) for r in mine.values() if r["extra_memory"]), "") for _ in extra),
                *(_both(allocators, mine, _speedups) for _ in peers),
            )
        console.print(table, "")
    columns = " / ".join(NAMES[a] for a in ALLOCATORS)
    console.print(
        f"xM: times a memcpy of the gradient in the same run, allocator {columns}; encode is compensate, compress and "
        "update; commit keeps the new state; decode is the mean of 4 workers' payloads. * measured once: three rounds "
        "exceed the budget. % of copy: rates of encode with commit, and of decode (tuned), as shares of memcpy's: "
        "bytes to read and write, over the time. Extra memory: of a step, + what is kept between steps, as "
        "shares of the model. vs peer: encode (with commit) and decode, or the whole step, times faster."
    )
    for line in omissions(results):
        console.print(escape(line))


def omissions(results: Results) -> list[str]:
    """Omissions, one line per reason."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for each in results.left_out:
        where = ""
        if "backend" in each:
            tensors = "ResNet-50" if each["tensors"] == "resnet50" else f"n={each['size']:,}"
            where = f"{each['backend']} {each['mode']} {tensors}".replace("  ", " ")
        reasons.setdefault(each["reason"], {}).setdefault(each["label"], []).append(where)
    lines = []
    for reason, labels in reasons.items():
        named = ", ".join(
            label + (f" ({'; '.join(places)})" if (places := list(dict.fromkeys(filter(None, wheres)))) else "")
            for label, wheres in labels.items()
        )
        lines.append(f"left out: {named}: {reason}")
    return lines


def _first(records: Iterable[Record], allocator: str) -> Record:
    return next(r for r in records if r["allocator"] == allocator)


def _order(records: list[Record], label: str) -> tuple[str, int, str]:
    record = next(r for r in records if r["label"] == label)
    return record["compressor"], record["source"] != "grace", label


def _both(allocators: list[str], mine: dict[str, Record], text: Callable[[Record], str]) -> str:
    cells = [text(mine[a]) if a in mine else "-" for a in allocators]
    return " / ".join(cells) if any(cells) else ""


def _time(record: Record, operation: str) -> str:
    found = record[operation]
    return f"{found['x']:.3g}{'*' * found['once']}" if found else "-"


def _shares(record: Record) -> str:
    found = (share_of_copy(record, operation) for operation in ("encode", "decode"))
    return ", ".join("-" if share is None else f"{100 * share:.0f}" for share in found)


def _extra(record: Record) -> str:
    found = record["extra_memory"]
    return f"{found['step_share']:.0%} + {found['state_share']:.0%}"


def _speedups(record: Record) -> str:
    return " ".join(
        ", ".join(f"{ratio:.3g}x" for ratio in ratios.values()) for ratios in record["speedup"].values() if ratios
    )


# -- targets -------------------------------------------------------------------------------------------------------
def check(results: Results) -> list[dict[str, Any]]:
    """The rows of the table of targets: measured, limit, met (None: not measured)."""
    lines = []
    for target in TARGETS:
        label = parse(target.spec).label
        for kernels, limit in (("off", target.portable), ("on", target.native)):
            if limit is None:
                continue
            for allocator in ALLOCATORS:
                record = _find(results, target, label, kernels, allocator)
                value = None if record is None or not record[target.operation] else multiple(record, target.operation)
                what = "native" if kernels == "on" else "portable"
                lines.append(_line(target, f"{what}, {NAMES[allocator]}", value, limit, "M", most=True))
        for allocator, least in zip(ALLOCATORS, target.speedup, strict=True) if target.peer else ():
            for kernels in ("off", "on"):
                record = _find(results, target, label, kernels, allocator)
                value = None if record is None else record["speedup"].get(target.peer, {}).get(target.operation)
                what = "native" if kernels == "on" else "portable"
                against = f"{what}, {NAMES[allocator]}, against {target.peer}"
                lines.append(_line(target, against, value, least, "x", most=False))
    return lines


def _line(target: Target, how: str, value: float | None, limit: float, unit: str, most: bool) -> dict[str, Any]:
    return {
        "what": target.what,
        "spec": target.spec,
        "how": how,
        "measured": value,
        "limit": limit,
        "unit": unit,
        "met": None if value is None else (value <= limit if most else value >= limit),
    }


def _find(results: Results, target: Target, label: str, kernels: str, allocator: str) -> Record | None:
    for record in results.records:
        key = (record["label"], record["kernels"], record["allocator"], record["tensors"])
        if key == (label, kernels, allocator, target.tensors) and (kernels == "off" or record["native"]):
            return record  # kernels "on" counts only if native kernels were used
    return None


def render_check(lines: list[dict[str, Any]], console: Console) -> None:
    """Print measurements against targets."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Targets", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for head in ("operation", "method", "how", "measured", "wanted", "met"):
        table.add_column(head, justify="right" if head in ("measured", "wanted") else "left", overflow="fold")
    verdicts = {True: "[green]yes[/]", False: "[red]no[/]", None: "[yellow]not measured[/]"}
    for line in lines:
        sign, unit = ("<=", " M") if line["unit"] == "M" else (">=", "x")
        measured = "-" if line["measured"] is None else f"{line['measured']:.3g}{unit}"
        texts = (line["what"], line["spec"], line["how"], measured, f"{sign} {line['limit']:g}{unit}")
        table.add_row(*map(escape, texts), verdicts[line["met"]])
    console.print(table)


# -- chart ---------------------------------------------------------------------------------------------------------
def plot(results: Results, path: str) -> None:
    """Draw a bar chart of encode and decode at the largest size on one thread, with a line at one memcpy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    threads = min(r["threads"] for r in results.records)
    tensors = min(r["tensors"] for r in results.records)  # flat, if available
    size = max(r["size"] for r in results.records if r["tensors"] == tensors)
    shown = [r for r in results.records if (r["threads"], r["tensors"], r["size"]) == (threads, tensors, size)]
    panels = sorted({(r["backend"], r["mode"], r["kernels"]) for r in shown})
    tallest = max(len({r["label"] for r in shown if (r["backend"], r["mode"], r["kernels"]) == p}) for p in panels)
    figure, axes = pyplot.subplots(
        len(panels), 2, figsize=(13, (0.9 + 0.24 * tallest) * len(panels)), squeeze=False, layout="constrained"
    )
    for row, panel in zip(axes, panels, strict=True):
        records = [r for r in shown if (r["backend"], r["mode"], r["kernels"]) == panel]
        ours = {r["label"] for r in records if r["source"] == "grace"}
        for axis, operation in zip(row, ("encode", "decode"), strict=True):
            found = [r for r in records if r[operation]]
            labels = list(dict.fromkeys(r["label"] for r in sorted(found, key=lambda r: -multiple(r, operation))))
            allocators = [a for a in ALLOCATORS if any(r["allocator"] == a for r in found)]
            for number, allocator in enumerate(allocators):
                bars = {r["label"]: multiple(r, operation) for r in found if r["allocator"] == allocator}
                height = 0.8 / len(allocators)
                places = [labels.index(label) + (number - (len(allocators) - 1) / 2) * height for label in bars]
                axis.barh(places, list(bars.values()), height, label=f"allocator {NAMES[allocator]}")
            axis.axvline(1, color="black", linewidth=1, linestyle="--")
            axis.set_yticks(range(len(labels)), labels, fontsize=7)
            for label, tick in zip(labels, axis.get_yticklabels(), strict=True):
                tick.set_color("black" if label in ours else "tab:red")
            axis.margins(y=0.01)
            axis.set_xscale("log")
            axis.set_xlabel(f"{operation}{' with commit' * (operation == 'encode')}, times a memcpy of the gradient")
            backend, mode, kernels = panel
            axis.set_title(f"{backend} {mode}{', kernels off' * (kernels == 'off')}", fontsize=9)
            axis.legend(fontsize=7)
    what = "ResNet-50" if tensors == "resnet50" else f"{size:,} elements"
    figure.suptitle(f"{what}, {threads} thread{'s'[: threads > 1]}, {results.machine['cpu']}", fontsize=10)
    figure.savefig(path)
    pyplot.close(figure)


def plot_levels(report: Report, epochs: int, path: str) -> None:
    """Draw each tensor's level over the epochs, as coloured rows; the first level is the darkest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    shown = [tensor for tensor in report.tensors if tensor.levels]
    if not shown:
        raise ValueError("no tensor has levels: this report is of a run without a policy")
    texts = list(dict.fromkeys(str(level) for tensor in shown for _, level in tensor.levels))
    colours = pyplot.get_cmap("Blues_r")([0.15 + 0.7 * i / max(1, len(texts) - 1) for i in range(len(texts))])
    figure, axis = pyplot.subplots(figsize=(8, 1.2 + 0.3 * len(shown)), layout="constrained")
    for row, tensor in enumerate(shown):
        ends = [epoch for epoch, _ in tensor.levels[1:]] + [epochs]
        for (begin, level), end in zip(tensor.levels, ends, strict=True):
            axis.barh(row, end - begin, left=begin, color=colours[texts.index(str(level))])
    axis.set_yticks(range(len(shown)), [tensor.name for tensor in shown], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, epochs)
    axis.set_xlabel("epoch")
    handles = [Patch(color=colour, label=text) for colour, text in zip(colours, texts, strict=True)]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
