"""Records as one HTML page; its charts are inline SVG, and it loads nothing else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape

from grace.cli.compare import NO_METRICS, measured, metrics_of, written
from grace.cli.show import COLOURS, size, spans
from grace.engine.record import Line, Run, warnings_of

POINTS = 300  # maximum points per curve
ROWS = 60  # maximum tensors in the chart of levels
LINES = 6  # maximum tensors in the chart of residuals
WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 30

Series = tuple[str, list[tuple[float, float]]]

STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #56657a; --rule: #d9e0e8; --back: #fff; --card: #f6f8fa;
  --warn: #fff4d6; --edge: #c98a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8edf3; --soft: #a9b7c7; --rule: #384452; --back: #14191f;
  --card: #1d242c; --warn: #3a2f12; --edge: #e0aa55; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 1120px;
  margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; } p { margin: .3rem 0; }
h1, p, .key { overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem; margin: 1.4rem 0; }
.tiles div { background: var(--card); border-radius: 8px; padding: .7rem 1rem; }
.tiles b { display: block; font-size: 1.45rem; font-weight: 600; }
.warnings { background: var(--warn); border-left: 4px solid var(--edge); border-radius: 4px; margin: 0;
  padding: .7rem 1rem .7rem 2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 1.6rem;
  margin-top: 1.6rem; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: .3rem; } svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11.5px system-ui, sans-serif; } .grid { stroke: var(--rule); }
@media (max-width: 480px) { figure text { font-size: 15px; } }
.key { font-size: 13px; color: var(--soft); } .key span { display: inline-block; margin-right: .9em; }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em;
  vertical-align: -1px; }
.wide { overflow-x: auto; } .wide svg { min-width: 900px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } .n { text-align: right; font-variant-numeric: tabular-nums; }
td:first-child { font-family: ui-monospace, monospace; }
"""


def page(run: Run, title: str) -> str:
    """The page of a run; ``title``: its name, such as the file's."""
    about = run.about
    workers = f"{about['world_size']} worker{'s' * (about['world_size'] > 1)}"
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(about["when"]))
    notes = "".join(f"<li>{escape(text)}</li>" for text in warnings_of(run))
    where = f"{escape(about['toolkit'])} · GRACE {escape(about['grace'])} · begun {began}"
    counted = (
        "Bytes are those that worker 0 handed to collectives; how often they cross a link is the library's choice. "
        "Times are worker 0's, on its host."
    )
    body = [
        f"<h1>{escape(about['method'])}</h1>",
        f'<p class="soft">{escape(title)} · {workers} · {where}</p>',
        _tiles(run) if run.lines else "",
        f'<ul class="warnings">{notes}</ul>' if notes else "",
        *(_pictures(run) if run.lines else ()),
        _levels(run),
        _table(run) if run.lines else "",
        f'<p class="soft">{counted}</p>',
    ]
    return _document(title, body)


def comparison(runs: Mapping[str, Run]) -> str:
    """The page of several runs: totals, and each metric over steps, seconds and bytes."""
    metrics = metrics_of(runs)
    rows = [["run", "method", "workers", "steps", "seconds", "bytes sent", "ratio", *metrics]]
    for name, run in runs.items():
        numbers = [run.about["world_size"], run.total("steps"), round(run.total("seconds"), 2), run.total("bytes_sent")]
        last = {metric: points[-1][metric] for metric in metrics if (points := measured(run, metric))}
        ends = [written(last[metric]) if metric in last else "" for metric in metrics]
        rows.append([name, run.about["method"], *(f"{number:,}" for number in numbers), f"{run.ratio:.1f}", *ends])
    tags = ["th", *["td"] * len(runs)]
    cells = [[f"<{tag}>{escape(cell)}</{tag}>" for cell in row] for tag, row in zip(tags, rows, strict=True)]
    table = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    notes = "" if metrics else f'<ul class="warnings"><li>{escape(NO_METRICS)}</li></ul>'
    body = [
        f"<h1>{len(runs)} trainings</h1>",
        f'<div class="wide"><table>{table}</table></div>{notes}',
        *('<div class="charts">', *(_quality(runs, metric) for metric in metrics), "</div>"),
        '<p class="soft">The table has the last value of each metric. Bytes are those that worker 0 sent.</p>',
    ]
    return _document("Comparison", body)


def _quality(runs: Mapping[str, Run], metric: str) -> str:
    points = {name: [each for each in measured(run, metric) if each[metric] is not None] for name, run in runs.items()}
    found = ""
    for axis, along, mark in (
        ("step", "step", _whole),
        ("seconds", "seconds", _number),
        (
            "bytes_sent",
            "bytes sent",
            lambda power: size(10**power),
        ),  # a logarithmic axis: dense gradients need many times the bytes of other methods
    ):
        series: list[Series] = []
        for name, measures in points.items():
            pairs = [(each[axis], each[metric]) for each in measures if axis != "bytes_sent" or each[axis]]
            series.append((name, [(math.log10(x) if axis == "bytes_sent" else x, y) for x, y in pairs]))
        series = [(name, pairs) for name, pairs in series if pairs]
        # further runs get hues a golden angle apart
        more = (f"hsl({137.5 * number % 360:.0f} 60% 40%)" for number in range(len(series)))
        colours = (*COLOURS[:3], *COLOURS[4:], *more)
        found += _figure(f"{metric} over {along}", series, _number, colours=colours, along=along, mark=mark)
    return found


def _document(title: str, body: Sequence[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _tiles(run: Run) -> str:
    steps, seconds = run.total("steps"), run.total("seconds")
    tiles = [
        (f"{run.lines[-1].step:,}", "steps"),
        (f"{run.ratio:.1f}x", "fewer bytes than dense"),
        (size(run.total("bytes_sent") / steps), f"sent a step, dense {size(run.total('bytes_dense') / steps)}"),
        (size(run.total("bytes_sent")), "sent in all"),
        (f"{seconds / steps * 1e3:.3g} ms", "a step"),
    ]
    if run.times:
        own = sum(seconds for name, seconds in run.times.items() if name != "elsewhere")
        tiles.append((f"{own / max(seconds, 1e-9):.0%}", "of the time in the exchange"))
    return '<div class="tiles">' + "".join(f"<div><b>{a}</b>{escape(b)}</div>" for a, b in tiles) + "</div>"


def _pictures(run: Run) -> list[str]:
    lines = run.thinned(POINTS)

    def over(value: Callable[[Line], float]) -> list[tuple[float, float]]:
        return [(line.step, value(line)) for line in lines]

    sizes = [
        ("dense", over(lambda line: line.bytes_dense / line.steps)),
        ("received", over(lambda line: line.bytes_received / line.steps)),
        ("sent", over(lambda line: line.bytes_sent / line.steps)),
    ]
    found = [
        _figure("Bytes a step", sizes, size, log=True, colours=(COLOURS[3], COLOURS[5], COLOURS[0])),
        _figure("Ratio: dense bytes over sent bytes", [("ratio", over(lambda line: line.ratio))], _number),
    ]
    if any(line.norm is not None for line in lines):
        found.append(_figure("Norms of residuals", _residuals(run, lines), _number))
    for metric in metrics_of({"": run}):
        points = [(each["step"], each[metric]) for each in measured(run, metric) if each[metric] is not None]
        none = f'<p class="soft">{escape(metric)}: not finite</p>'
        found.append(_figure(metric, [(metric, points)], _number) if points else none)
    if run.times:
        kinds: list[Series] = []
        for name in run.times:
            kinds.append((name, over(lambda line, name=name: _milliseconds(line, name))))  # type: ignore[misc]
        found.append(_bars("Milliseconds a step", kinds))
    else:
        found.append(
            _figure(
                "Milliseconds a step", [("all", over(lambda line: line.seconds / line.steps * 1e3))], _number, zero=True
            )
        )
    return ['<div class="charts">', *found, "</div>"]


def _milliseconds(line: Line, name: str) -> float:
    own = sum(line.times.values())
    return (line.times.get(name, 0.0) if name != "elsewhere" else max(line.seconds - own, 0.0)) / line.steps * 1e3


def _residuals(run: Run, lines: Sequence[Line]) -> list[Series]:
    last = lines[-1]
    known = [(norm, t["name"]) for norm, t in zip(last.residual, last.tensors, strict=True) if norm is not None]
    largest = [name for _, name in sorted(known, reverse=True)[:LINES]]
    curves: list[Series] = [(name, []) for name in largest]
    for line in lines:
        norms = {t["name"]: norm for t, norm in zip(line.tensors, line.residual, strict=True)}
        for name, points in curves:
            if (norm := norms.get(name)) is not None:
                points.append((line.step, norm))
    rest = len(known) - len(largest)
    return [
        (f"{name} (largest of {rest + LINES})" if rest and not n else name, p) for n, (name, p) in enumerate(curves)
    ]


def _whole(value: float) -> str:
    return f"{value:,.0f}"


# -- charts ------------------------------------------------------------------------------------------------------------
def _figure(
    title: str,
    series: Sequence[Series],
    form: Callable[[float], str],
    log: bool = False,
    zero: bool = False,
    colours: Sequence[str] = (*COLOURS[:3], *COLOURS[4:]),
    along: str = "step",
    mark: Callable[[float], str] = _whole,
) -> str:
    values = [y for _, points in series for _, y in points if y > 0 or not log]
    if not values:
        return ""
    low, high = min(values), max(values)
    log = log and low > 0 and high > 4 * low
    if log:
        ticks = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    else:
        spread = high - low
        ticks = _ticks(min(low, 0.0) if zero or spread > 0.5 * abs(high) or not spread else low, high)
    bottom, top = ticks[0], ticks[-1]
    drop = (
        (lambda y: math.log(max(y, bottom) / bottom) / math.log(top / bottom))
        if log
        else (lambda y: (y - bottom) / (top - bottom))
    )
    left, right = _range(series)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / (right - left)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - drop(y) * (HEIGHT - TOP - BOTTOM)

    parts = [_axes(ticks, form, place, left, right, along, mark)]
    for (name, points), colour in zip(series, colours, strict=False):
        shown = [place(x, y) for x, y in points]
        if len(shown) == 1:
            shown = [shown[0], (shown[0][0] + 0.1, shown[0][1])]
        wide = 5 if name == "received" else 2  # wider, so that it stays visible below the line of sent bytes
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
        parts.append(
            f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="{wide}" stroke-linejoin="round" '
            'stroke-linecap="round"/>'
        )
        for (x, y), (across, down) in zip(points, shown, strict=False):
            parts.append(
                f'<circle cx="{across:.1f}" cy="{down:.1f}" r="5" fill="transparent">'
                f"<title>{escape(name)}: {escape(form(y))} at {along} {mark(x)}</title></circle>"
            )
    return _framed(title, "".join(parts), [name for name, _ in series], colours)


def _bars(title: str, series: Sequence[Series]) -> str:
    tops = [sum(points[place][1] for _, points in series) for place in range(len(series[0][1]))]
    ticks = _ticks(0.0, sorted(tops)[-1 - len(tops) // 50])  # exclude outliers, such as a first step that compiles
    steps = [x for x, _ in series[0][1]]
    wide = (WIDTH - LEFT - RIGHT) / len(steps)
    high = (HEIGHT - TOP - BOTTOM) / ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - steps[0]) / max(steps[-1] - steps[0], 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * high

    parts = [_axes(ticks, _number, place, steps[0], max(steps[-1], steps[0] + 1))]
    for number in range(len(steps)):
        floor = 0.0
        for (name, points), colour in zip(series, COLOURS, strict=False):
            value = points[number][1]
            shown = min(value, ticks[-1] - floor)
            parts.append(
                f'<rect x="{LEFT + number * wide:.2f}" y="{HEIGHT - BOTTOM - (floor + shown) * high:.2f}" '
                f'width="{max(wide - 0.4, 0.4):.2f}" height="{max(shown, 0) * high:.2f}" fill="{colour}">'
                f"<title>{escape(name)}: {value:.3g} ms, up to step {steps[number]:,.0f}</title></rect>"
            )
            floor += shown
    return _framed(title, "".join(parts), [name for name, _ in series], COLOURS)


def _levels(run: Run) -> str:
    rows = [(tensor["name"], spans(run, tensor["name"])) for tensor in run.tensors if tensor["level"]]
    rows = [(name, held) for name, held in rows if held]
    if not rows:
        return ""
    known = list(dict.fromkeys(level for _, held in rows for _, _, level in held))
    shown, high, left = rows[:ROWS], 16, 260
    first, last = min(held[0][0] for _, held in rows), max(held[-1][1] for _, held in rows)
    scale = (1040 - left) / max(last - first, 1)
    parts = []
    for row, (name, held) in enumerate(shown):
        short = name if len(name) <= 38 else f"…{name[-37:]}"
        parts.append(f'<text x="{left - 8}" y="{row * high + 12}" text-anchor="end">{escape(short)}</text>')
        parts += [
            f'<rect x="{left + (start - first) * scale:.1f}" y="{row * high + 1}" width="{(end - start) * scale:.1f}" '
            f'height="{high - 2}" fill="{_shade(known.index(level), len(known))}">'
            f"<title>{escape(name)}: {escape(level)}, steps {start:,} to {end:,}</title></rect>"
            for start, end, level in held
        ]
    foot = len(shown) * high + 16
    parts += [
        f'<text x="{left}" y="{foot}">step {first:,}</text>',
        f'<text x="1040" y="{foot}" text-anchor="end">{last:,}</text>',
    ]
    more = f' <span class="soft">({len(rows) - ROWS} more in the table)</span>' if len(rows) > ROWS else ""
    key = _key(known, [_shade(number, len(known)) for number in range(len(known))])
    drawn = f'<svg viewBox="0 0 1040 {foot + 6}" role="img">{"".join(parts)}</svg>'
    return f'<h2>Levels over time{more}</h2><div class="wide">{drawn}</div>{key}'


def _table(run: Run) -> str:
    line = run.lines[-1]
    leveled = any(tensor["level"] for tensor in run.tensors)
    heads = ["tensor", "shape", "method", "bytes a step", "ratio", "residual", *["level"] * leveled, ""]
    numeric = ("bytes a step", "ratio", "residual")
    rows = []
    for place in sorted(range(len(line.tensors)), key=lambda place: -line.sent[place]):
        tensor, sent, norm = line.tensors[place], line.sent[place], line.residual[place]
        cells = [
            tensor["name"],
            "×".join(map(str, tensor["shape"])) or "scalar",
            tensor["method"],
            f"{sent / line.steps:,.0f}",
            f"{line.dense[place] / sent:.1f}" if sent else "",
            "" if norm is None else f"{norm:.3g}",
            *[tensor["level"]] * leveled,
            tensor["reason"] or tensor["strategy"],
        ]
        rows.append(
            "<tr>"
            + "".join(
                f"<td{' class=n' * (head in numeric)}>{escape(cell)}</td>"
                for head, cell in zip(heads, cells, strict=True)
            )
            + "</tr>"
        )
    top = "".join(f"<th{' class=n' * (head in numeric)}>{head}</th>" for head in heads)
    return (
        f"<h2>Tensors, in the last {line.steps:,} steps</h2>"
        f'<div class="wide"><table><tr>{top}</tr>{"".join(rows)}</table></div>'
    )


def _framed(title: str, inside: str, names: Sequence[str], colours: Sequence[str]) -> str:
    key = _key(names, colours) if len(names) > 1 else ""
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{escape(title)}</title>{inside}</svg>{key}</figure>"
    )


def _key(names: Sequence[str], colours: Sequence[str]) -> str:
    marks = (f'<span><i style="background:{c}"></i>{escape(n)}</span> ' for n, c in zip(names, colours, strict=False))
    return f'<div class="key">{"".join(marks)}</div>'


def _axes(
    ticks: Sequence[float],
    form: Callable[[float], str],
    place: Callable[[float, float], tuple[float, float]],
    left: float,
    right: float,
    along: str = "step",
    mark: Callable[[float], str] = _whole,
) -> str:
    parts = []
    for tick in ticks:
        _, y = place(left, tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(form(tick))}</text>'
        )
    for tick in _ticks(left, right):
        x, _ = place(tick, ticks[0])
        if x >= LEFT + 30 + 8 * len(along) and tick <= right:  # leave space for the axis's name
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{mark(tick)}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 10}">{along}</text>')
    return "".join(parts)


def _range(series: Sequence[Series]) -> tuple[float, float]:
    steps = [x for _, points in series for x, _ in points]
    return min(steps), max(steps) if max(steps) > min(steps) else min(steps) + 1


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose ``low`` to ``high``."""
    high = high if high > low else low + (abs(low) or 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _shade(number: int, count: int) -> str:
    light = 78 - 48 * number / max(count - 1, 1)
    return f"hsl(205 70% {light:.0f}%)"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
