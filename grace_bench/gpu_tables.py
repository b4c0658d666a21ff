"""Failures in the results of `grace bench gpu`, and tables of the results in Markdown."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grace.bench import kernels as bench
from grace_bench import gpt2_steps, processes
from grace_bench import trainings as loops
from grace_bench.gpu import BASELINE, FORMAT


def failures(data: Mapping[str, Any]) -> list[str]:
    """Descriptions of everything that failed in the parts that were run."""
    found = [f"law: {each}" for each in data.get("laws", {"broken": ()})["broken"]]
    cases = data.get("kernels", {"cases": ()})["cases"]
    found += [f"kernels: {each['case']} differs" for each in cases if not each["equal"]]
    for each in differing(data):
        difference = f"{each['difference']:.2g}"
        found.append(f"trainings: {each['loop']} over {each['network']}, {each['method']}: differs by {difference}")
    for part in ("trainings", "streams", "gpt2", "training"):
        failed = [each for each in _left_out(data, part) if processes.NO_TIME not in each["reason"]]
        found += [f"{part}: {each['network']}: {each['reason']}" for each in failed]
    found += [f"host waits: {each['label']} waits {each['host_waits']} times" for each in waiting(data)]
    found += [f"host waits: {each['method']} by {each['loop']}: {each['waits']}" for each in stopped(data)]
    return found


def _left_out(data: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = data.get(part, {"left_out": []})["left_out"]
    return found


def differing(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Trainings whose results differ from those on the CPU."""
    # `not <=`: a difference may be NaN.
    rows = data.get("trainings", {"rows": []})["rows"]
    return [each for each in rows if not each["difference"] <= loops.TOLERANCE]


def waiting(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Methods with a fixed payload length in which the host waited for the device."""
    records = data.get("times", {"records": []})["records"]
    return [each for each in records if each["host_waits"] and not each["variable_length"]]


def stopped(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Training loops in which the host waited between backward and step, though payloads have a fixed length."""
    rows = data.get("streams", {"rows": []})["rows"]
    return [each for each in rows if each["check"] == "waits" and each["waits"]]


# -- tables -----------------------------------------------------------------------------------------------------------
def file_name(device: str) -> str:
    """The name of a device's result file."""
    return f"gpu-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def tables(data: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    head = f"**{data['device']}**" if data["gpu"] else "**A CPU: a test of the command, no result of a GPU**"
    if not data["complete"]:
        return f"{head}: the run did not end"
    lines = [
        f"{head}{', small tensors' * data['quick']}, PyTorch {data['machine'].get('torch', '?')}, "
        f"{data['seconds']:.0f} s. {' '.join(_sentences(data))}".rstrip()
    ]
    if "times" in data:
        lines += _times_table(data["times"])
    if "streams" in data:
        lines += _streams_table(data["streams"])
    if "gpt2" in data:
        lines += _gpt2_table(data["gpt2"])
    if "exchange" in data:
        lines += _steps_table(data["exchange"])
    if "training" in data:
        lines += _losses_table(data["training"])
    for each in data.get("trainings", {}).get("absent", ()):
        lines.append(f"\ntrainings over {each['network']}, loop {each['loop']}, not run: {each['reason']}")
    for part in ("trainings", "streams", "gpt2", "exchange", "training"):
        lines += [f"\n{part} over {each['network']}, left out: {each['reason']}" for each in _left_out(data, part)]
    return "\n".join(lines) + "\n"


def _sentences(data: Mapping[str, Any]) -> Iterator[str]:
    if "laws" in data:
        laws, cases = data["laws"], data["kernels"]["cases"]
        yield f"Laws: {laws['held']} hold, {len(laws['broken'])} broken, {len(laws['left_out'])} methods not reached."
        equal = sum(case["equal"] for case in cases)
        isa = data["kernels"]["isa"] or "none here"
        yield f"Kernels ({isa}): {equal} of {len(cases)} cases equal the plain functions."
    if "trainings" in data:
        rows, others = data["trainings"]["rows"], ", others did not run" * bool(_left_out(data, "trainings"))
        yield f"Trainings: {len(rows) - len(differing(data))} of {len(rows)} end as on the CPU{others}."
    if "times" in data:
        yield f"The host waits in {len(waiting(data))} methods of a fixed length."
    if found := [each for each in data.get("streams", {"rows": ()})["rows"] if each["check"] == "waits"]:
        yield f"Between backward and step the host waits in {len(stopped(data))} of {len(found)} loops."


def _times_table(times: Mapping[str, Any]) -> list[str]:
    lines = ["", f"Times in copies of {times['elements']:,} elements on the device:", ""]
    lines += [
        "| method | bits per element | encode | decode | share of copy | host waits |",
        "|---|---|---|---|---|---|",
    ]
    for record in times["records"]:
        found = [
            "" if not record[key] else f"{bench.multiple(record, key):.3g}"
            for key in (("encode", "decode") if record["encode"] else ("step", "decode"))
        ]
        waits = "not counted" if record["host_waits"] is None else record["host_waits"]
        cells = [record["label"], f"{record['bits_per_element']:.3g}", *found, _share(record), str(waits)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _share(record: Mapping[str, Any]) -> str:
    # The shares of encode and decode; empty for older files, which lack the data.
    if "workers_decoded" not in record:
        return ""
    found = [bench.share_of_copy(record, operation) for operation in ("encode", "decode")]
    return ", ".join("-" if share is None else f"{share:.0%}" for share in found)


def _streams_table(found: Mapping[str, Any]) -> list[str]:
    if "absent" in found:
        return ["", f"Host waits in loops, and streams: not measured, as {found['absent']}"]
    rows = [each for each in found["rows"] if each["check"] == "streams"]
    lines = ["", "Milliseconds of a step in which streams other than the busiest one run, and of them beside it:", ""]
    lines += ["| method | other streams | beside |", "|---|---|---|"]
    return lines + [f"| {each['method']} | {each['others_ms']:.3g} | {each['beside_ms']:.3g} |" for each in rows]


def _gpt2_table(found: Mapping[str, Any]) -> list[str]:
    columns = {"ms": "ms", "host_ms": "host ms", "device_ms": "device ms", "launches": "launches", "peak_mib": "MiB"}
    lines = ["", "Steps of GPT-2 in one process, which nothing waits for:", ""]
    lines += [f"| exchange | {' | '.join(columns.values())} | times no exchange |", "|---" * (len(columns) + 2) + "|"]
    alone = next((each["ms"] for each in found["rows"] if each["method"] == gpt2_steps.ALONE), math.nan)
    for row in found["rows"]:
        cells = ["" if row[key] is None else _number(row[key]) for key in columns]
        lines.append(f"| {row['method']} | {' | '.join(cells)} | {row['ms'] / alone:.2f} |")
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _steps_table(exchange: Mapping[str, Any]) -> list[str]:
    lines = ["", "Steps of two processes on this device:", ""]
    lines += ["| model | network | method | ms | against bf16 | bytes |", "|---|---|---|---|---|---|"]
    base: dict[Any, float] = {}
    for row in exchange["rows"]:
        if row["method"] == BASELINE:
            base[row["model"], row["network"]] = row["ms"]
        ratio = f"{base[row['model'], row['network']] / row['ms']:.2f}"
        cells = [row["model"], row["network"], row["method"], f"{row['ms']:.3g}", ratio, f"{row['bytes']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _losses_table(training: Mapping[str, Any]) -> list[str]:
    rows = training["rows"]
    if not rows:
        return []
    steps = len(rows[0]["losses"])
    shown = [max(1, steps * share // 4) for share in range(1, 5)]
    token = {"byte pairs": "token (byte pairs)"}.get(rows[0].get("tokens", ""), "byte")
    lines = ["", f"Loss in nats per {token} of {rows[0]['parameters']:,} parameters, two processes, after steps:", ""]
    lines += [f"| method | {' | '.join(map(str, shown))} | seconds | bytes per step |", "|---" * (len(shown) + 3) + "|"]
    for row in rows:
        losses = [f"{statistics.fmean(row['losses'][max(0, at - 10) : at]):.3f}" for at in shown]
        cells = [row["method"], *losses, f"{row['seconds']:.3g}", f"{row['bytes_per_step']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def read(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Read result files. Raises ValueError for files of another format."""
    found = []
    for file in files:
        data = json.loads(file.read_text())
        if not isinstance(data, dict) or data.get("format") != FORMAT or "gpu" not in data:
            raise ValueError(f"{file.name} was not written by `grace bench gpu`")
        found.append(data)
    return found
