"""Train with and without compression, in PyTorch and in Keras on both backends; show bytes sent and accuracy.

    make demo

Two workers on this machine train handwritten digits over Horovod, once for each method, from the same initial weights
and on the same batches, with the same learning rate and number of epochs. All figures are measured. The demo
fails if a compressed run misses its targets. Results and a plot are written to out/demo/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

WORKERS = 2
TOOLKITS = {"torch": "PyTorch", "keras": "Keras on TensorFlow", "keras-torch": "Keras on PyTorch"}
METHODS: dict[str, dict[str, Any]] = {
    "dense": {"compressor": "none"},
    "top-k 1%": {"compressor": "topk", "compress_ratio": 0.01, "memory": "residual"},
    "PowerSGD": {"compressor": "powersgd", "compress_rank": 4, "memory": "residual"},
    "1-bit": {"compressor": "efsignsgd", "memory": "residual"},
}
# Targets: the maximum loss of accuracy against dense, and the minimum factor of fewer bytes.
POINTS = {"top-k 1%": 1.5, "PowerSGD": 1.5}
RATIOS = {"top-k 1%": 20, "1-bit": 25}
DENSE_ACCURACY = 0.97
TIMEOUT = 600  # seconds for one toolkit, on a slow and busy machine
HOROVODRUN = Path(sys.executable).with_name("horovodrun")
HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "out" / "demo"


def main() -> int:
    missing = [name for name in ("horovod", "sklearn", "rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing or not HOROVODRUN.exists():
        print(f"The demo needs {', '.join(missing) or 'horovodrun'}, which is not installed here: run `make install`.")
        return 1
    import digits

    parser = digits.arguments("Compare methods in PyTorch and in Keras.", one_method=False)
    parser.add_argument("--toolkit", choices=TOOLKITS, help="only this one (default: all)")
    parser.add_argument("--worker", choices=TOOLKITS, help=argparse.SUPPRESS)
    parser.add_argument("--events", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    return work(options) if options.worker else compare(options)


# -- in each worker --------------------------------------------------------------------------------------------------
def work(options: argparse.Namespace) -> int:
    """Train with one method after another; worker 0 writes what happens to a file, one JSON object a line."""
    example = importlib.import_module(f"digits_{options.worker.split('-')[0]}")
    from grace import grace_from_params

    example.start()
    with open(options.events if int(os.environ["HOROVOD_RANK"]) == 0 else os.devnull, "a", buffering=1) as events:
        for method, params in METHODS.items():
            told = 0.0

            def tell(done: int, total: int, epoch: dict[str, Any] | None, method: str = method) -> None:
                nonlocal told
                if epoch or time.monotonic() - told > 0.1:
                    told = time.monotonic()
                    event = {"method": method, "done": done, "total": total, "epoch": epoch}
                    events.write(json.dumps(event) + "\n")

            outcome = example.train(grace_from_params(params), options, tell)
            events.write(json.dumps({"method": method, "params": params, "result": outcome}) + "\n")
    return 0


# -- in the parent process ------------------------------------------------------------------------------------------
def compare(options: argparse.Namespace) -> int:
    from rich.console import Console

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the workers are stopped
    console = Console()
    console.print(f"{WORKERS} workers on this machine, each with its own half of the images; seed {options.seed}.")
    OUT.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    results: list[dict[str, Any]] = []
    for toolkit in [options.toolkit] if options.toolkit else TOOLKITS:
        found = run(console, toolkit, options)
        if found is None:
            return 1
        results += found
    console.print(table(results))
    console.print(f"{time.perf_counter() - began:.0f} seconds in all, start-up included.")
    console.print("Between two workers on one machine bytes cost nothing: over a network, they do.", style="dim")
    (OUT / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, OUT / "accuracy_and_bytes.png")
    for name in ("results.json", "accuracy_and_bytes.png"):
        print(os.path.relpath(OUT / name))
    broken = failures(results)
    for line in broken:
        print(f"The demo's claim does not hold: {line}", file=sys.stderr)
    return 1 if broken else 0


def run(console: Any, toolkit: str, options: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Run all methods with one toolkit, with a progress bar each. Returns results, or None after a failure."""
    with tempfile.TemporaryDirectory(prefix="grace-demo-") as folder:
        events, log = Path(folder, "events.jsonl"), Path(folder, "log")
        events.touch()
        command = [str(HOROVODRUN), "-np", str(WORKERS), "--gloo", sys.executable, str(HERE / "demo.py")]
        for name in ("epochs", "batch_size", "lr", "momentum", "seed"):
            command.append(f"--{name.replace('_', '-')}={getattr(options, name)}")
        command += ["--worker", toolkit, "--events", str(events)]
        results, status = watch(console, toolkit, command, events, log)
        if status == 0 and len(results) == len(METHODS):
            return results
        print(log.read_text(), file=sys.stderr)
    print(f"The {TOOLKITS[toolkit]} workers failed (exit status {status}); see above.", file=sys.stderr)
    return None


def watch(
    console: Any, toolkit: str, command: list[str], events: Path, log: Path
) -> tuple[list[dict[str, Any]], int | None]:
    """Show the workers' progress while the command runs. Returns results and exit status."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    # One thread per worker: they share the machine's cores.
    backend = {"KERAS_BACKEND": "torch" if toolkit == "keras-torch" else "tensorflow"}
    env = {**os.environ, **backend, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    results: list[dict[str, Any]] = []
    columns = (
        TextColumn("{task.description:28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps  {task.fields[note]}"),
    )
    with log.open("w") as output, Progress(*columns, console=console) as bars:
        rows = {
            method: bars.add_task(f"{TOOLKITS[toolkit]} {method}", total=None, start=False, note="")
            for method in METHODS
        }
        bars.update(rows["dense"], note="starting the workers")
        # In a separate session: only this process gets Ctrl-C, and then stops the workers.
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            for event in follow(events, process):
                row = rows[event["method"]]
                if "result" in event:
                    results.append({**event["result"], "method": event["method"], "params": event["params"]})
                    continue
                bars.start_task(row)
                epoch = event["epoch"]
                note = {"note": f"test accuracy {epoch['accuracy']:.1%}"} if epoch else {}
                bars.update(row, completed=event["done"], total=event["total"], **note)
        finally:
            stop(process)
    return results, process.returncode


def follow(path: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Objects of a growing file of JSON lines, until its writer ends or takes too long."""
    deadline = time.monotonic() + TIMEOUT
    with path.open() as lines:
        rest = ""
        while True:
            ended = process.poll() is not None or time.monotonic() > deadline  # before reading, to miss nothing
            *complete, rest = (rest + lines.read()).split("\n")
            yield from map(json.loads, complete)
            if ended:
                return
            time.sleep(0.1)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End horovodrun and its workers, which have separate sessions, so that none outlives the demo."""
    import psutil  # comes with Horovod

    if process.poll() is not None:
        return
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()  # horovodrun then ends its workers
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


# -- results --------------------------------------------------------------------------------------------------------
def failures(results: list[dict[str, Any]]) -> list[str]:
    """The targets that these results miss."""
    lines = []
    for one in results:
        name = f"{one['toolkit']} {one['method']}"
        dense = next(r for r in results if r["toolkit"] == one["toolkit"] and r["method"] == "dense")
        behind = 100 * (dense["accuracy"] - one["accuracy"])
        if one is dense and one["accuracy"] < DENSE_ACCURACY:
            lines.append(f"{name}: test accuracy {one['accuracy']:.1%}, not {DENSE_ACCURACY:.0%}")
        if behind > POINTS.get(one["method"], 100) + 1e-6:
            lines.append(f"{name}: {behind:.1f} points behind dense, not {POINTS[one['method']]} at most")
        times = dense["bytes_per_step"] / one["bytes_per_step"]
        if times < RATIOS.get(one["method"], 0):
            lines.append(f"{name}: {times:.1f} times fewer bytes than dense, not {RATIOS[one['method']]}")
    return lines


def table(results: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    rows = Table()
    rows.add_column("toolkit")
    rows.add_column("method")
    for head in ("test accuracy", "bytes sent per step", "fewer than dense", "seconds"):
        rows.add_column(head, justify="right")
    for one in results:
        dense = next(r for r in results if r["toolkit"] == one["toolkit"] and r["method"] == "dense")
        rows.add_row(
            one["toolkit"],
            one["method"],
            f"{one['accuracy']:.1%}",
            f"{one['bytes_per_step']:,.0f}",
            "" if one is dense else f"{dense['bytes_per_step'] / one['bytes_per_step']:.1f}x",
            f"{one['seconds']:.1f}",
            end_section=one["method"] == list(METHODS)[-1],
        )
    return rows


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Left: final accuracy of each method. Right: accuracy against bytes sent."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    colours = dict(zip(METHODS, ("#4d4d4d", "#0072b2", "#d55e00", "#009e73"), strict=True))
    styles = {"PyTorch": ("o", "-"), "Keras on TensorFlow": ("s", "--"), "Keras on PyTorch": ("^", ":")}
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (end, way) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for one in results:
        marker, line = styles[one["toolkit"]]
        colour = colours[one["method"]]
        step, accuracy = one["bytes_per_step"] / 1e3, 100 * one["accuracy"]
        end.scatter(step, accuracy, s=70, marker=marker, color=colour, edgecolor="white", zorder=3)
        sent = [epoch["bytes_sent"] / 1e6 for epoch in one["history"]]
        way.plot(sent, [100 * epoch["accuracy"] for epoch in one["history"]], line, color=colour, lw=1.6)
        way.plot(sent[-1], accuracy, marker, color=colour, markeredgecolor="white", ms=8, zorder=3)
    lowest = min(100 * one["accuracy"] for one in results)
    end.set(xscale="log", xlabel="kB sent per worker and step", ylabel="test accuracy, %")
    end.set_ylim(min(95, lowest - 0.5), 100)
    end.set_title("After training", loc="left", weight="bold")
    way.set(xscale="log", ylim=(20, 102), xlabel="MB sent per worker so far", ylabel="test accuracy, %")
    way.set_title("On the way there, epoch by epoch", loc="left", weight="bold")
    for axes in (end, way):
        axes.grid(True, which="major", color="#dddddd", lw=0.6)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    dense = results[0]["bytes_per_step"]
    patches = []
    for one in results[: len(METHODS)]:
        fewer = "" if one is results[0] else f", {dense / one['bytes_per_step']:.0f}x fewer bytes"
        patches.append(plt.Line2D([], [], color=colours[one["method"]], marker="o", ls="", label=one["method"] + fewer))
    end.legend(handles=patches, loc="lower center", frameon=False)
    shown = [name for name in styles if any(r["toolkit"] == name for r in results)]
    lines = [plt.Line2D([], [], color="#777777", marker=styles[n][0], ls=styles[n][1], label=n) for n in shown]
    way.legend(handles=lines, loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
