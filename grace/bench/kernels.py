"""Starts a process per configuration, watches it, and merges the results."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grace
from grace.bench.plan import DEVICES, MODES, Case, Config, Limits, method_of, to_dict
from grace.core import name_of
from grace.engine.about import cores, processor

FORMAT = 1  # version of the JSON format
VISIBLE = 10**6  # fewest elements for which a step's memory stands out from the process's own
START = 120.0  # seconds to import a toolkit and draw gradients
REMEDIES = {
    "torch": "pip install '.[torch]' in GRACE's source tree",
    "tensorflow": "pip install '.[tensorflow]' in GRACE's source tree",
    "jax": "pip install '.[jax]' in GRACE's source tree",
}
Progress = Callable[[str], None]


@dataclass
class Results:
    """The measurements, and what was omitted."""

    machine: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)

    def omit(self, label: str, reason: str, config: Config | None = None, mode: str = "") -> None:
        """Record an omission and its reason."""
        settings = {} if config is None else to_dict(config)
        self.left_out.append({"label": label, "reason": reason, "mode": mode, **settings})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Times are in microseconds; ``x`` is a time as a multiple of memcpy's."""
        return {"format": FORMAT, **dataclasses.asdict(self)}


def measure(
    results: Results,
    cases: Mapping[str, Sequence[Case]],
    configs: Iterable[Config],
    limits: Limits,
    peer: str = "",
    memory: bool = True,
    progress: Progress = lambda text: None,
    save: Callable[[Results], None] = lambda results: None,
) -> None:
    """Measure ``cases`` (by kind of tensors) in all configurations, and add the records to ``results``.

    ``peer``: a checkout of upstream GRACE, for the cases that need one. ``memory``: also measure the memory of a step.
    ``save``: called after each configuration, since a full run may take hours.
    """
    hopeless: dict[tuple[Any, ...], str] = {}
    configs = list(configs)
    for config in configs:
        if importlib.util.find_spec(config.toolkit) is None:
            results.omit("everything", f"{config.toolkit} is missing: {REMEDIES[config.toolkit]}", config)
            continue
        mine = []
        for case in cases[config.tensors]:
            if reason := hopeless.get((case.label, *_kind(config))):
                results.omit(case.label, reason, config)
            elif case.source == "grace" or config.toolkit == "torch":
                mine.append(case)
            else:
                results.omit(case.label, "peers are measured on torch only", config)
        _configuration(config, mine, limits, peer, results, hopeless, progress)
        save(results)
    if memory:
        # On JAX the user's program compiles a step as a whole, with the model: there is none to measure alone.
        configs = [config for config in configs if config.toolkit != "jax"]
        _memory(cases, configs, limits, results, hopeless, progress)


def _kind(config: Config) -> tuple[Any, ...]:
    return config.backend, config.size, config.tensors


def _configuration(
    config: Config,
    cases: list[Case],
    limits: Limits,
    peer: str,
    results: Results,
    hopeless: dict[tuple[Any, ...], str],
    progress: Progress,
) -> None:
    known = {case.label: case for case in cases}
    # Start with the case that was slowest at another size: if it is abandoned, little has to be repeated.
    mine = [r for r in results.records if r["backend"] == config.backend and r["encode"]]
    seen = {r["label"]: -r["encode"]["us"] / r["elements"] for r in mine}
    left, batch = sorted((case.label for case in cases), key=lambda label: seen.get(label, 0.0)), 0
    while left:
        job = {
            "task": "kernels",
            "config": to_dict(config),
            "limits": to_dict(limits),
            "cases": [to_dict(known[label]) for label in left],
            "peer": peer,
            "seed": batch,
        }
        postponed: list[str] = []
        omitted: list[tuple[str, str, str]] = []
        done: dict[str, Any] = {}
        at = ""
        try:
            for message in messages(job, config, limits):
                if "begin" in message:
                    at = message.get("case", "")
                    progress(f"{config}: {message['begin']}")
                elif "left_out" in message:
                    omitted.append((message["left_out"], message["reason"], message["mode"]))
                elif "postponed" in message:
                    postponed = message["postponed"]
                else:
                    done = message
        except Ended as end:
            if not at:
                for label in left:
                    results.omit(label, str(end), config)
                return
            results.omit(at, str(end), config)
            if end.slow:
                hopeless[(at, *_kind(config))] = f"{end} (seen before, not tried again)"
            left.remove(at)  # then measure the other cases again, in a new process
            continue
        for label, reason, mode in omitted:
            results.omit(label, reason, config, mode)
        found = [_record(known[each["label"]], config, batch, each, done) for each in done["records"]]
        _compare(found)
        results.records += found
        if len(postponed) == len(left):  # no case fits, not even alone
            for label in postponed:
                results.omit(label, "too little memory is free", config)
            return
        left, batch = postponed, batch + 1


def _record(case: Case, config: Config, batch: int, found: dict[str, Any], done: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"compressor": case.params.get("name", ""), "memory": case.params.get("memory", "")}
    parameters = {key: value for key, value in case.params.items() if key not in ("name", "memory")}
    if case.source == "grace":
        method = method_of(case.params)
        compressor: Any = method.compressor
        settings = {"compressor": name_of(compressor), "memory": name_of(method.memory)}
        parameters = {f.name: repr_of(getattr(compressor, f.name)) for f in dataclasses.fields(compressor)}
    return {
        "label": case.label,
        "source": case.source,
        **settings,
        "parameters": parameters,
        "form": case.form,
        "how": case.how,
        "against": list(case.against),
        **to_dict(config),
        "batch": batch,
        "native": done["native"],
        "device": done["device"],
        "memcpy": done["memcpy"],
        "encode": None,
        "commit": None,
        "decode": None,
        "step": None,
        **found,
        "speedup": {},
        "extra_memory": None,
    }


def repr_of(value: Any) -> Any:
    """A parameter as plain data."""
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _compare(records: list[dict[str, Any]]) -> None:
    # Peers update their residual inside encode, so compare theirs with our encode plus commit.
    by_label = {record["label"]: record for record in records}
    for record in records:
        for label in record["against"]:
            peer = by_label.get(label)
            if peer is None:
                continue
            ratios = {}
            for operation in ("encode", "decode", "step"):
                if record[operation] and peer[operation] and seconds(record, operation):
                    ratios[operation] = seconds(peer, operation) / seconds(record, operation)
            record["speedup"][label] = ratios


def seconds(record: Mapping[str, Any], operation: str) -> float:
    """Microseconds of an operation; encode includes its commit."""
    found = record[operation]["us"]
    return found + record["commit"]["us"] if operation == "encode" and record["commit"] else found


def multiple(record: Mapping[str, Any], operation: str) -> float:
    """`seconds` as a multiple of memcpy's."""
    return seconds(record, operation) / record["memcpy"]["us"]


def share_of_copy(record: Mapping[str, Any], operation: str) -> float | None:
    """The rate of encode or decode (bytes to read and write, over the time) as a share of memcpy's rate.

    Encode reads the gradient and the state, and writes the payload and the state; decode reads the payloads of all
    workers, and writes the mean. None if it was not measured.
    """
    if not record[operation] or not seconds(record, operation):
        return None
    gradient = 4 * record["elements"]
    if operation == "encode":
        moved = gradient + record["bytes"] + 2 * record["state_bytes"]
    else:
        moved = gradient + record["bytes"] * record["workers_decoded"]
    return float(moved / (2 * gradient) / multiple(record, operation))


def _memory(
    cases: Mapping[str, Sequence[Case]],
    configs: list[Config],
    limits: Limits,
    results: Results,
    hopeless: dict[tuple[Any, ...], str],
    progress: Progress,
) -> None:
    # Measure once per backend, with the default allocator, at the largest size: memory scales with the model.
    largest: dict[tuple[str, str], Config] = {}
    for config in configs:
        key = (config.backend, config.tensors)
        if key not in largest or config.size > largest[key].size:
            largest[key] = config
    for (backend, tensors), config in largest.items():
        alone = dataclasses.replace(config, threads=1, allocator="asis")
        labels = {(record["label"], record["mode"]) for record in results.records if record["backend"] == backend}
        for case, mode in itertools.product(cases[tensors], MODES[backend]):
            if case.source != "grace" or case.how or (case.label, mode) not in labels:
                continue
            if config.size < VISIBLE and tensors == "flat":
                results.omit(case.label, f"memory of a step: not seen below {VISIBLE:,} elements", alone, mode)
                continue
            progress(f"{alone}: memory of {case.label} ({mode})")
            job = {"task": "memory", "config": to_dict(alone), "case": to_dict(case), "mode": mode}
            try:
                found = next(
                    m["memory"] for m in messages(job, alone, limits, START + 4 * limits.call) if "memory" in m
                )
            except Ended as end:
                found = {"left_out": str(end)}
            if "left_out" in found:
                results.omit(case.label, f"memory of a step: {found['left_out']}", alone, mode)
                continue
            for record in results.records:
                same = (record["label"], record["mode"], record["backend"], record["size"], record["tensors"])
                if same == (case.label, mode, backend, config.size, tensors):
                    record["extra_memory"] = found


# -- processes ----------------------------------------------------------------------------------------------------
class Ended(Exception):
    """A process ended, or was killed, before it was done."""

    def __init__(self, reason: str, slow: bool = False):
        super().__init__(reason)
        self.slow = slow


def messages(job: dict[str, Any], config: Config, limits: Limits, patience: float = 0.0) -> Iterable[dict[str, Any]]:
    """Start a process for ``job`` and yield its messages. Raises Ended if it is silent for too long or ends early."""
    home = str(Path(grace.__file__).parents[1])  # last on the path, so that it shadows no package of the user's
    code = f"import sys; sys.path.append({home!r}); from grace.bench.worker import main; main()"
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(config, os.environ),
        )
        assert process.stdin
        assert process.stdout
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            try:
                process.stdin.write(json.dumps(job))
                process.stdin.close()
            except BrokenPipeError:
                pass  # the error message quotes its last output
            wait, done = patience or START, False
            while not done:
                try:
                    line = lines.get(timeout=wait)
                except queue.Empty:
                    raise Ended(f"given up after {wait:.0f} s in one call (--call-limit)", slow=True) from None
                if not line:
                    process.wait()
                    errors.seek(0)
                    words = errors.read().strip().splitlines()[-1:] or [""]
                    raise Ended(f"the process ended with status {process.returncode}. {words[0]}".strip())
                message = json.loads(line)
                wait = START if message.get("begin") == "gradients" else patience or limits.call
                done = "records" in message or "memory" in message
                yield message
        finally:
            process.kill()
            process.wait()
            reader.join()
            process.stdout.close()


def _read(stream: Any, lines: queue.Queue[str]) -> None:
    for line in stream:
        lines.put(line)
    lines.put("")


MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "THP_MEM_ALLOC_ENABLE")


def environment(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a process, which set its threads, allocator and kernels."""
    found = {key: value for key, value in environ.items() if key not in MALLOC}
    tunables = [each for each in found.pop("GLIBC_TUNABLES", "").split(":") if each and "malloc" not in each]
    if config.allocator == "tuned":
        tunables.append("glibc.malloc.hugetlb=1")
    if tunables:
        found["GLIBC_TUNABLES"] = ":".join(tunables)
    for name in ("OMP", "MKL", "OPENBLAS"):
        found[f"{name}_NUM_THREADS"] = str(config.threads)
    if config.kernels == "off":
        found["GRACE_KERNELS"] = "off"
    elif config.backend in DEVICES:
        found["GRACE_KERNELS"] = "triton"
    elif found.get("GRACE_KERNELS", "").lower() in ("off", "0"):
        del found["GRACE_KERNELS"]
    return {**found, "TF_CPP_MIN_LOG_LEVEL": "3"}


def native() -> str:
    """The instruction set of the native kernels if they are built for this machine; else empty."""
    try:
        from grace.kernels import library  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return ""
    found = library("")
    return found.isa if found else ""


def machine() -> dict[str, Any]:
    """Facts about the machine that the figures depend on, without its name."""
    versions = {}
    for name in ("numpy", "torch", "tensorflow", "tensorflow-cpu", "jax", "horovod"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": processor(),
        "cores": cores(),
        "memory_gib": round(int(_first(r"MemTotal: +(\d+)", "/proc/meminfo") or 0) / 2**20, 1) or None,
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "huge_pages": _first(r"\[(\w+)\]", "/sys/kernel/mm/transparent_hugepage/enabled"),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "grace": grace.__version__,
        "kernels": native(),
        **versions,
    }


def _first(pattern: str, path: str) -> str:
    try:
        match = re.search(pattern, Path(path).read_text())
    except OSError:
        return ""
    return match[1] if match else ""
