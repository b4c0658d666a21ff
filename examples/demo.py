"""Train with and without compression; show accuracy, bytes, and the time that a slow network would take.

    make demo        PyTorch, over torch.distributed
    make demo-all    also Keras on TensorFlow, over Horovod, Keras on PyTorch, and JAX

Two workers on this machine train handwritten digits, once for each method, from the same initial weights and on the
same batches, with the same learning rate and number of epochs. Accuracy, bytes and computation are measured. The
seconds over 100 Mbit/s are computed: a worker's processor seconds in training steps, compression included, plus its
bytes over the rate, up to the first epoch with the target accuracy; latency is left out, and nothing overlaps. The demo
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
TOOLKITS = {"torch": "PyTorch", "keras": "Keras on TensorFlow", "keras-torch": "Keras on PyTorch", "jax": "JAX"}
METHODS: dict[str, dict[str, Any]] = {
    "dense": {"compressor": "none"},
    "blockint 4 bits": {"compressor": "blockint", "bits": 4},
    "eden 3 bits": {"compressor": "eden", "bits": 3, "block_size": 64},
    "PowerSGD": {"compressor": "powersgd", "compress_rank": 4},
    "auto": {"compressor": "auto"},
}
COMPILED = {name: params for name, params in METHODS.items() if name != "auto"}  # a compiled step has one method
RATE = 100e6  # bits per second, each way
# Targets: the largest loss of accuracy against dense, in points, and the smallest reduction of bytes. Each method must
# also reach the target accuracy sooner than dense. auto has no target for bytes: they depend on its choice.
POINTS = 1.5
RATIOS = {"blockint 4 bits": 7, "eden 3 bits": 8, "PowerSGD": 30}
TIMEOUT = 600  # seconds for one toolkit, on a slow and busy machine
HOROVODRUN = Path(sys.executable).with_name("horovodrun")
HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "out" / "demo"


def main() -> int:
    names = ("torch", "sklearn", "rich", "matplotlib", "psutil")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        print(f"The demo needs {', '.join(missing)}, which is not installed here: run `make demo`.")
        return 1
    import digits

    parser = digits.arguments("Compare methods in PyTorch, and in Keras.", one_method=False)
    parser.set_defaults(epochs=10)
    parser.add_argument("--toolkit", choices=[*TOOLKITS, "all"], default="torch", help="the two with Keras need Keras")
    parser.add_argument("--target", type=float, default=0.96, help="the accuracy that is timed and must be reached")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of results and plot")
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)  # when make did
    parser.add_argument("--worker", choices=TOOLKITS, help=argparse.SUPPRESS)
    parser.add_argument("--events", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.worker and options.toolkit in ("keras", "all") and not HOROVODRUN.exists():
        print("Keras on TensorFlow needs Horovod, which is not installed here: run `make demo-all`.")
        return 1
    return work(options) if options.worker else compare(options)


# -- in each worker --------------------------------------------------------------------------------------------------
def work(options: argparse.Namespace) -> int:
    """Train with one method after another; worker 0 writes what happens to a file, one JSON object a line."""
    example = importlib.import_module(f"digits_{options.worker.split('-')[0]}")
    from grace import Grace, grace_from_params

    example.start()
    # In JAX both workers are devices of one process, and steps are compiled for an exchange.
    rank = int(os.environ.get("RANK") or os.environ.get("HOROVOD_RANK") or 0)
    make = getattr(example, "exchange", grace_from_params)
    with open(options.events if rank == 0 else os.devnull, "a", buffering=1) as events:
        for method, params in methods_of(options.worker).items():
            grc, told, sent = make(params), 0.0, 0

            def tell(
                done: int, total: int, epoch: dict[str, Any] | None, method: str = method, grc: Grace = grc
            ) -> None:
                nonlocal told, sent
                if method == "auto":  # auto compares the times of steps, so simulate the network's delay
                    before, sent = sent, grc.report().bytes_sent
                    time.sleep((sent - before) * 8 / RATE)
                if epoch or time.monotonic() - told > 0.1:
                    told = time.monotonic()
                    event = {"method": method, "done": done, "total": total, "epoch": epoch}
                    events.write(json.dumps(event) + "\n")

            outcome = example.train(grc, options, tell)
            events.write(json.dumps({"method": method, "params": params, "result": outcome}) + "\n")
    return 0


def methods_of(toolkit: str) -> dict[str, dict[str, Any]]:
    return COMPILED if toolkit == "jax" else METHODS


# -- in the parent process ------------------------------------------------------------------------------------------
def compare(options: argparse.Namespace) -> int:
    from rich.console import Console

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises SystemExit, which stops the workers
    console = Console()
    console.print(f"{WORKERS} workers on this machine, each with its own half of the images; seed {options.seed}.")
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    results: list[dict[str, Any]] = []
    for toolkit in TOOLKITS if options.toolkit == "all" else [options.toolkit]:
        found = run(console, toolkit, options)
        if found is None:
            return 1
        results += found
    for one in results:
        one["reached"] = reached(one, options.target)
    console.print(table(results, options.target))
    chosen = {one["toolkit"]: one["report"]["chosen"] for one in results if one["method"] == "auto"}
    console.print(*(f"auto, {toolkit}: {why}" for toolkit, why in chosen.items()), sep="\n", highlight=False)
    console.print(explained(options.target), style="dim", highlight=False)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, options.target, options.out / "time_to_accuracy.png")
    for name in ("results.json", "time_to_accuracy.png"):
        print(os.path.relpath(options.out / name))
    ended, trained = time.time(), sum(one["seconds"] for one in results)
    parts = {"set-up": began - options.began, "start-up, table and picture": ended - began - trained}
    for one in results:
        parts[one["method"]] = parts.get(one["method"], 0) + one["seconds"]
    each = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts.items())
    console.print(f"Time: {each}; in all {ended - options.began:.0f} s.", highlight=False)
    broken = failures(results, options.target)
    for line in broken:
        print(f"The demo's claim does not hold: {line}", file=sys.stderr)
    return 1 if broken else 0


def run(console: Any, toolkit: str, options: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Run all methods with one toolkit, with a progress bar each. Returns results, or None after a failure."""
    with tempfile.TemporaryDirectory(prefix="grace-demo-") as folder:
        events, log = Path(folder, "events.jsonl"), Path(folder, "log")
        events.touch()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
        if toolkit == "keras":
            command = [str(HOROVODRUN), "-np", str(WORKERS), "--gloo", sys.executable]
        if toolkit == "jax":
            command = [sys.executable]
        command.append(str(HERE / "demo.py"))
        for name in ("epochs", "batch_size", "lr", "momentum", "seed"):
            command.append(f"--{name.replace('_', '-')}={getattr(options, name)}")
        command += ["--worker", toolkit, "--events", str(events)]
        results, status = watch(console, toolkit, command, events, log)
        if status == 0 and len(results) == len(methods_of(toolkit)):
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
            for method in methods_of(toolkit)
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
    """End the launcher and its workers, which have separate sessions, so that none outlives the demo."""
    import psutil

    if process.poll() is not None:
        return
    family = [process, *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()  # the launcher then ends its workers
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


# -- results --------------------------------------------------------------------------------------------------------
def seconds(epoch: dict[str, Any]) -> tuple[float, float]:
    """Seconds of computation up to the end of an epoch, and those that its bytes take at RATE."""
    return epoch["computed"], epoch["bytes_sent"] * 8 / RATE


def reached(one: dict[str, Any], target: float) -> float | None:
    """Seconds over the network to the first epoch with the target accuracy; None if there was none."""
    return next((sum(seconds(epoch)) for epoch in one["history"] if epoch["accuracy"] >= target), None)


def explained(target: float) -> str:
    """What the computed column means."""
    return (
        f"Seconds to {target:.0%} over {RATE / 1e6:.0f} Mbit/s are computed, not measured: a worker's processor time "
        "in training steps, compression included, plus its bytes at that rate, up to the first epoch with that "
        "accuracy. Latency is left out, and nothing overlaps. auto chooses by the time of a step, so its steps wait as "
        "long as their bytes would take. On this machine itself bytes cost nothing."
    )


def dense_of(results: list[dict[str, Any]], one: dict[str, Any]) -> dict[str, Any]:
    """The result without compression, of the same toolkit."""
    return next(each for each in results if each["toolkit"] == one["toolkit"] and each["method"] == "dense")


def failures(results: list[dict[str, Any]], target: float) -> list[str]:
    """The targets that these results miss."""
    lines = []
    for one in results:
        name, dense = f"{one['toolkit']} {one['method']}", dense_of(results, one)
        if one["reached"] is None:
            lines.append(f"{name}: no epoch with a test accuracy of {target:.1%}")
        elif one is not dense and not one["reached"] < (dense["reached"] or float("inf")):
            lines.append(f"{name}: {one['reached']:.1f} s over the network to {target:.1%}, no less than dense")
        behind = 100 * (dense["accuracy"] - one["accuracy"])
        if behind > POINTS + 1e-6:
            lines.append(f"{name}: {behind:.1f} points behind dense, not {POINTS} at most")
        times = dense["bytes_per_step"] / one["bytes_per_step"]
        if times < RATIOS.get(one["method"], 0):
            lines.append(f"{name}: {times:.1f} times fewer bytes than dense, not {RATIOS[one['method']]}")
    return lines


def table(results: list[dict[str, Any]], target: float) -> Any:
    from rich.table import Table

    several = len({one["toolkit"] for one in results}) > 1
    rows = Table()
    for head in ("toolkit", "method")[not several :]:
        rows.add_column(head, no_wrap=True)
    rate = f"{RATE / 1e6:.0f} Mbit/s"
    for head in ("accuracy", "bytes per step", "fewer", f"seconds to {target:.0%}, {rate}", "sooner"):
        rows.add_column(head, justify="right")
    for one in results:
        dense = dense_of(results, one)
        timed = one["reached"] is not None and dense["reached"] is not None and one is not dense
        rows.add_row(
            *[one["toolkit"]] * several,
            one["method"],
            f"{one['accuracy']:.1%}",
            f"{one['bytes_per_step']:,.0f}",
            "" if one is dense else f"{dense['bytes_per_step'] / one['bytes_per_step']:.1f}x",
            "not reached" if one["reached"] is None else f"{one['reached']:.1f}",
            f"{dense['reached'] / one['reached']:.1f}x" if timed else "",
            end_section=one["method"] == list(METHODS)[-1],
        )
    return rows


def plot(results: list[dict[str, Any]], target: float, path: Path) -> None:
    """Left: the seconds to the target accuracy over the network, in two parts. Right: accuracy against seconds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    colours = dict(zip(METHODS, ("#4d4d4d", "#0072b2", "#009e73", "#d55e00", "#cc79a7"), strict=True))
    styles = dict(zip(TOOLKITS.values(), ("-", "--", ":", "-."), strict=True))
    several = len({one["toolkit"] for one in results}) > 1
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (bars, way) = plt.subplots(1, 2, figsize=(11, 3.2 + 0.16 * len(results)), layout="constrained")
    for place, one in enumerate(results):
        colour, line = colours[one["method"]], styles[one["toolkit"]]
        times = [sum(seconds(epoch)) for epoch in one["history"]]
        label = None if line != styles[results[0]["toolkit"]] else one["method"]
        way.plot(
            times, [100 * e["accuracy"] for e in one["history"]], line, marker="o", ms=3, color=colour, label=label
        )
        epoch = next((e for e in one["history"] if e["accuracy"] >= target), None)
        if epoch:
            computing, sending = seconds(epoch)
            bars.barh(place, computing, color=colour)
            bars.barh(place, sending, left=computing, color=colour, alpha=0.45)
            bars.text(computing + sending, place, f" {computing + sending:.1f} s", va="center")
    names = [f"{one['method']}, {one['toolkit']}" if several else one["method"] for one in results]
    bars.set_yticks(range(len(results)), names)
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.set(xlabel="seconds: computing (dark) and sending (light)")
    bars.set_title(f"To {target:.0%} accuracy over {RATE / 1e6:.0f} Mbit/s (computed)", loc="left", weight="bold")
    way.set(xscale="log", xlabel=f"seconds over {RATE / 1e6:.0f} Mbit/s (computed)", ylabel="test accuracy, %")
    way.set_title("On the way there, epoch by epoch", loc="left", weight="bold")
    way.axhline(100 * target, color="#bbbbbb", lw=1, zorder=0)
    way.grid(True, color="#eeeeee", lw=0.6)
    way.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    handles, _ = way.get_legend_handles_labels()
    if several:
        handles += [plt.Line2D([], [], color="#777777", ls=line, label=name) for name, line in styles.items()]
    way.legend(handles=handles, loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
