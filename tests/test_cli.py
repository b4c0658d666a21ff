"""Commands: rejected arguments, output, and exit status."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import GenericAlias
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest

import grace
from grace.planner.costs import Codec, Curve, Speed

pytest.importorskip("typer", reason="the command line")

from rich.console import Console
from typer.models import OptionInfo, ParameterInfo
from typer.testing import CliRunner

from grace.cli import inputs
from grace.cli.app import app

ROOT = Path(__file__).parents[1]
PROFILE = {"tensors": [{"name": "a", "size": 100_000, "backward": 0.1}]}
LINES = [
    {"kind": "begin", "format": 1, "step": 0, "every": 1, "toolkit": "numpy", "graph": False, "world_size": 2},
    {
        "kind": "tensors",
        "method": "topk + residual + allgather",
        "tensors": [
            {"name": name, "shape": [256, 64], "method": "topk", "reason": "", "strategy": "", "level": ""}
            for name in ("kernel", "encoder.layers.11.attention.output.dense.weight")
        ],
    },
    *(
        {
            "kind": "steps",
            "step": step,
            "steps": 1,
            "seconds": 0.01 * step,
            "bytes_sent": 2608,
            "bytes_received": 2608,
            "bytes_dense": 131072,
            "times": {"compress": 0.001, "wait": 0.002, "decompress": 0.001},
            "skipped": 0,
            "sent": [1304, 1304],
            "dense": [65536, 65536],
            "residual": [100.0 * step, 101.0 * step],
        }
        for step in (1, 2, 3)
    ),
]


def costs_of(label):
    """Plausible costs of a method, so that nothing is measured."""
    curve = Curve((1000.0, 1e6), (1e-5, 1e-3))
    name, _, rest = label.partition(":")
    params = {"compressor": name}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        params[key] = json.loads(value)
    return Codec(params, Curve((1000.0, 1e6), (40.0, 4e4)), {"gpu": Speed(curve, curve, curve)}, "measured in a dream")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A working directory with a file of each kind."""
    labels = ("fp16", "topk", "topk:compress_ratio=0.001")
    (tmp_path / "costs.json").write_text(json.dumps([costs_of(label).to_dict() for label in labels]))
    (tmp_path / "model.json").write_text(json.dumps(PROFILE))
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": 2, "inter": {"gbit_per_s": 10}}))
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (tmp_path / "empty").write_text("")
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep").write_text("[" * 100_000 + "\n")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def idle(monkeypatch):
    """Make any measurement or training an error."""

    def works(*_, **__):
        raise AssertionError("it works before it looks at what it was given")

    for place in ("grace.bench.costs.compressor", "grace.bench.kernels.measure", "grace_bench.sidco.measure"):
        monkeypatch.setattr(place, works)
    monkeypatch.setattr("grace_bench.tasks.run.run", works)
    monkeypatch.setattr("grace.cli.report.page", works)


def run(*words, columns=200):
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": str(columns), "TERM": "dumb"})


def said(done):
    """The printed output in one line, without frames."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.output).split())


def refused(words, match):
    done = run(*words)
    assert done.exit_code == 2, (words, done.output, done.exception)
    assert isinstance(done.exception, SystemExit), done.exception
    assert match in said(done), (words, said(done))


def process(*words, **environment):
    environment = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    return subprocess.run([sys.executable, "-m", "grace", *map(str, words)], env=environment, capture_output=True)


def commands(group=app, path=()):
    """All commands: the words that call them, and their functions."""
    for each in group.registered_commands:
        yield (*path, each.name or each.callback.__name__), each.callback
    for each in group.registered_groups:
        yield from commands(each.typer_instance, (*path, each.typer_instance.info.name))


def test_python_3_10_can_read_the_callbacks():
    """Typer asks `issubclass(annotation, ...)`, which raises for list[Path] there."""
    hints = [hint for _, function in commands() for hint in get_type_hints(function, include_extras=True).values()]
    about = [each for hint in hints if get_origin(hint) is Annotated for each in get_args(hint)[1:]]
    callbacks = {each.callback for each in about if isinstance(each, ParameterInfo) and each.callback}
    assert inputs.input_files in callbacks
    for each in callbacks:
        own = [hint for name, hint in get_type_hints(each).items() if name != "return"]
        assert not any(isinstance(hint, GenericAlias) for hint in own), each.__name__


WORDS = {"plan": ("model.json",), "advise": ("model.json",), "report": ("run.jsonl",)}
"""What commands must be given."""
READ = {"cluster_file", "costs", "peer", "data"}


def options(kind):
    """All options of a type: the words of their command, and their spelling."""
    for words, function in commands():
        for name, hint in get_type_hints(function, include_extras=True).items():
            base, *about = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            option = next((each for each in about if isinstance(each, OptionInfo)), None)
            if option is not None and kind in (base, *get_args(base)) and name not in READ:
                written = [each for each in (option.default, *(option.param_decls or ())) if isinstance(each, str)]
                yield words, (written or [f"--{name.replace('_', '-')}"])[0]


def named(value):
    return "-".join(value) if isinstance(value, tuple) else value


# -- outputs -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words, option", list(options(Path)), ids=named)
def test_every_output_is_tried_before_the_work(words, option, files, idle):
    given = (*words, *WORDS.get(words[0], ()))
    end = ".png" if option == "--plot" else ""
    (files / f"there{end}").mkdir()
    refused((*given, option, f"text/x{end}"), "'text' is a file, not a folder" if option != "--out" else "is a file")
    if option == "--out":
        refused((*given, option, "text"), "is a file, not a folder")
        return
    refused((*given, option, f"nowhere/x{end}"), "No such folder: 'nowhere'")
    refused((*given, option, f"there{end}"), "is a folder, not a file")
    refused((*given, option, f"/proc/x{end}"), "cannot be created")
    assert set(os.listdir(files)) >= {"text", "folder"}
    assert not (files / f"x{end}").exists()


def test_an_output_leaves_what_is_there_until_the_work_is_done(files):
    (files / "old.json").write_text("old")
    refused(("plan", "model.json", "--compressor", "powersgd", "-o", "old.json"), "exchanges inside compress")
    assert (files / "old.json").read_text() == "old"
    refused(("plan", "model.json", "--compressor", "powersgd", "-o", "new.json"), "exchanges inside compress")
    assert not (files / "new.json").exists()


@pytest.mark.parametrize(
    "words, match",
    [
        (("advise", "resnet50", "--plot", "x.foo"), "a chart's name ends with one of"),
        (("bench", "sidco", "--plot", "x"), "a chart's name ends with one of"),
        (("report", "run.jsonl", "--html", "run.jsonl"), "is read, too"),
        (("plan", "model.json", "--costs", "costs.json", "-o", "./costs.json"), "is read, too"),
        (("plan", "model.json", "--costs", "costs.json", "-o", "model.json"), "is read, too"),
        (("plan", "model.json", "-o", "a", "--trace", "a"), "named twice"),
        (("advise", "resnet50", "--cluster", "cluster.json", "--workers", 4), "--workers has no effect"),
        (("advise", "resnet50", "--batch", 4, "--backward", 1), "--batch is only for named models"),
        (("plan", "model.json", "--batch", 4), "--batch is only for named models"),
        (("plan", "resnet50", "--mode", "best"), "choose from paper, refined, exact"),
        (("advise", "resnet50", "--backend", "jax"), "choose from torch, tensorflow, numpy"),
        (("advise", "resnet50", "--fragments", 2), "--fragments has no effect with synchronous training"),
        (("advise", "resnet50", "--sync-every", 4, "--plot", "x.png"), "--plot has no effect with --sync-every"),
        (("advise", "resnet50", "--sync-every", 4, "--fragment-sync-delay", 4), "must be in 0 .. 3"),
        (("report", "run.jsonl", "--json", "--follow"), "leave out --follow"),
        (("bench", "kernels", "--targets", "--threads", "2"), "--threads has no effect with --targets"),
        (("bench", "tasks", "--show", "--retry"), "--retry has no effect with --show"),
        (("bench", "tasks", "--loopback", "--bandwidth", "1"), "--bandwidth has no effect with --loopback"),
        (("bench", "sidco", "what"), "'what' is no option"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, match, files, idle):
    refused(words, match)


def test_an_output_on_a_full_disk_is_a_sentence(files):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    done = process("plan", "model.json", "--compressor", "fp16", "--costs", "costs.json", "-o", "/dev/full")
    assert done.returncode == 1
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


# -- numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words, option", list(options(float)), ids=named)
def test_every_number_must_be_finite(words, option, files, idle):
    for text in ("nan", "inf", "-inf", "1e999", "-1"):
        refused((*words, *WORDS.get(words[0], ()), option, text), f"Invalid value for '{option}'")


@pytest.mark.parametrize(
    "option", ["--bandwidth", "--intra-bandwidth", "--compress-speed", "--backward", "--bucket-mb"]
)
def test_a_rate_or_a_time_of_zero_is_refused(option, files, idle):
    refused(("advise", "model.json", option, "0"), "positive")


@pytest.mark.parametrize("option", ["--sizes", "--threads"])
def test_lists_of_numbers_must_be_finite(option, files, idle):
    for text in ("nan", "inf", "1e4,nan", "1e999", "0", "1.5", ""):
        refused(("bench", "kernels", "topk", option, text), "write whole numbers of at least 1")
    refused(("bench", "tasks", "--workers", "2,inf"), "write whole numbers of at least 1")


RATES = {
    "10": 10,
    "10Gbit": 10,
    "10gbit/s": 10,
    "10 Gb/s": 10,
    "10Gbps": 10,
    "10000Mbit/s": 10,
    "1e1": 10,
    "0.01Tbit": 10,
}
RATES |= {"100mbit": 0.1, "0.1": 0.1, "100M": 0.1, "64kbit": 6.4e-5, "1000bit/s": 1e-6}


@pytest.mark.parametrize("text, gbit", RATES.items())
def test_a_rate_is_written_in_one_way_everywhere(text, gbit, files):
    words = ("advise", "model.json", "fp16", "--costs", "costs.json", "--json", "--bandwidth", text)
    there = json.loads(run(*words).stdout)["cluster"]["inter"]["gbit_per_s"]
    assert there == pytest.approx(gbit)
    from grace_bench.lab.network import bits_per_second

    assert bits_per_second(inputs.as_tc(text)) == pytest.approx(gbit * 1e9)


@pytest.mark.parametrize(
    "text", ["fast", "nan", "inf", "-1", "0", "0Gbit", "1GB/s", "10 parsecs", "1.2.3", "", "1e-30"]
)
def test_what_is_no_rate_is_refused_everywhere(text, files, idle):
    for words in (("advise", "model.json"), ("plan", "model.json"), ("bench", "tasks")):
        refused((*words, "--bandwidth", text), "10, 10Gbit, 100Mbit/s")


# -- inputs ------------------------------------------------------------------------------------------------------------
PROBLEMS = {
    "none.json": "No such file",
    "empty": "empty",
    "bytes": "not text in UTF-8",
    "folder": "is a folder, not a file",
    "deep": "nested too deeply",
}
PLACES = {
    "plan": ("plan", "{}"),
    "cluster": ("advise", "model.json", "--cluster", "{}"),
    "costs": ("advise", "model.json", "--costs", "{}"),
    "report": ("report", "{}"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_file_that_cannot_be_read_is_named_in_plain_words(place, name, files, idle):
    words = [word.format(name) for word in PLACES[place]]
    match = "no model and no file" if (place, name) == ("plan", "none.json") else PROBLEMS[name]
    refused(words, match)
    assert name in said(run(*words))


@pytest.mark.parametrize(
    "place, name, match",
    [
        ("plan", "text", "is not one JSON value"),
        ("costs", "text", "is not one JSON value"),
        ("plan", "run.jsonl", "it is the record of a training"),
        ("cluster", "run.jsonl", "it is the record of a training"),
        ("costs", "run.jsonl", "it is the record of a training"),
        ("plan", "cluster.json", "this is a cluster"),
        ("plan", "costs.json", "this is compression costs"),
        ("cluster", "model.json", "this is a profile of a model"),
        ("costs", "cluster.json", "this is a cluster"),
        ("report", "text", "is not part of a record"),
        ("report", "model.json", "this is a profile of a model"),
        ("report", "cluster.json", "this is a cluster"),
    ],
)
def test_a_file_of_another_kind_is_told_apart(place, name, match, files, idle):
    words = [word.format(name) for word in PLACES[place]]
    refused(words, match)
    assert name in said(run(*words))


def test_numbers_in_files_must_be_finite(files, idle):
    for text in ("NaN", "Infinity", "-1", "1" + "0" * 400):
        (files / "bad.json").write_text(json.dumps(PROFILE).replace("0.1", text))
        refused(("plan", "bad.json"), "backward of 'a'")


def test_a_record_without_its_first_line_is_refused(files):
    text = (files / "run.jsonl").read_text().splitlines(keepends=True)
    (files / "cut.jsonl").write_text("".join(text[2:]))
    refused(("report", "cut.jsonl"), "is no record")
    (files / "cut.jsonl").write_text(text[0].replace('"toolkit": "numpy", ', ""))
    refused(("report", "cut.jsonl"), "it has no 'toolkit'")


def test_rows_of_another_command_are_no_tasks(files, idle):
    (files / "out").mkdir()
    (files / "out" / "rows.jsonl").write_text('{"format": 1}\n')
    refused(("bench", "tasks", "--show", "--out", "out"), "line 1, is no row")


@pytest.mark.slow
# -- printing ----------------------------------------------------------------------------------------------------------
def test_output_without_utf8_stays_readable(files):
    full = process("report", "run.jsonl", PYTHONIOENCODING="utf-8", COLUMNS=80)
    assert full.returncode == 0, full.stderr
    assert "→" in full.stdout.decode()
    for encoding in ("ascii", "latin-1", "ascii:strict"):
        done = process("report", "run.jsonl", PYTHONIOENCODING=encoding, COLUMNS=80)
        assert done.returncode == 0, done.stderr
        text = done.stdout.decode(encoding.partition(":")[0])
        assert "?" not in text
        assert "->" in text
        assert re.search(r"residual +_[-_.:=+*]#", text)
        assert "encoder.layers.11.attention" in text
    done = process("plan", "nichts", PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert b"no model and no file 'nichts'" in done.stderr


def test_characters_that_an_encoding_lacks_have_plain_forms(monkeypatch):
    import io

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    inputs.readable_output()
    print("memcpy in µs: é … █ 中", flush=True)
    assert raw.getvalue().rstrip() == b"memcpy in us: e ... # ?"


def lines_of(text, columns=80):
    found = text.splitlines()
    assert max(map(len, found)) <= columns
    return found


def test_advise_is_readable_in_80_columns(files):
    words = ("advise", "resnet50", "topk:compress_ratio=0.001", "fp16", "--costs", "costs.json", "--bandwidth", "0.001")
    text = run(*words, columns=80).stdout
    lines = lines_of(text)
    rows = [line.split() for line in lines if line.startswith(("topk", "fp16", "dense"))]
    assert sorted(row[0] for row in rows) == ["dense", "fp16", "topk:compress_ratio=0.001"]
    assert {row[-1] for row in rows} <= {"bytes", "latency", "compression", "computation"}
    assert all(re.fullmatch(r"[\d.]+x", row[2]) for row in rows)


@pytest.mark.slow
def test_methods_and_plans_are_readable_in_80_columns(files):
    lines = lines_of(run("methods", columns=80).stdout)
    row = next(line for line in lines if line.startswith("topk "))
    assert re.match(r"topk +0\.64 +residual +Send the elements of", row)
    names = [line.split()[0] for line in lines if re.match(r"\w+ +[\d.]+ +\w+ +[A-Z]", line)]
    assert {"natural_dithering", "efsignsgd", "demo"} <= set(names)
    lines = lines_of(run("plan", "vgg16", "--costs", "costs.json", columns=80).stdout)
    assert any(line.startswith("Predicted step") for line in lines)


def test_a_report_is_readable_in_80_columns(files):
    lines = lines_of(run("report", "run.jsonl", columns=80).stdout)
    (row,) = (line for line in lines if line.startswith("kernel "))
    assert row.split() == ["kernel", "256x64", "topk", "1.3", "kB", "50.3", "300"]
    text = "\n".join(lines)
    assert "…" not in text
    assert "encoder.layers.11" in text


@pytest.mark.parametrize(
    "words, text",
    [
        ("bench tasks --task digits --quick", "`grace bench tasks` needs the package of benchmarks"),
        ("bench sidco --epochs 0", "`grace bench sidco` needs the package of benchmarks"),
        ("bench gpu --json", "`grace bench gpu` needs the package of benchmarks"),
        (f"bench kernels topk --peer {Path(__file__).parent}", "--peer needs the package of benchmarks"),
    ],
)
def test_without_its_package_a_bench_says_how_to_get_it(words, text):
    code = "import sys; sys.modules['grace_bench'] = None; from grace.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", done.stderr).split())
    assert f"{text}, which is not installed: pip install ./grace_bench in GRACE's source tree" in said


def test_benches_are_readable_in_80_columns():
    from grace.bench import show
    from grace.bench.kernels import Results
    from grace_bench import sidco, sidco_show

    label = "blockint:bits=8,rounding=stochastic,memory=residual"
    time_ = {"x": 98.7654321, "us": 1.0, "once": False}
    record = {
        "backend": "tensorflow",
        "mode": "graph",
        "threads": 1,
        "tensors": "flat",
        "size": 25_000_000,
        "elements": 25_000_000,
        "kernels": "on",
        "label": label,
        "compressor": "blockint",
        "source": "grace",
        "form": "blockwise",
        "bytes": 25_195_312,
        "bits_per_element": 8.06,
        "state_bytes": 0,
        "workers_decoded": 4,
        "memcpy": {"us": 5231.5},
        **dict.fromkeys(("encode", "commit", "decode"), time_),
        "step": None,
        "extra_memory": None,
        "speedup": {},
    }
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    results = Results({}, {}, [{**record, "allocator": each} for each in ("asis", "tuned")])
    show.render(results, console)
    text = console.export_text()
    assert text.count("98.8 / 98.8") == 3
    assert "25,195,312" in text
    timed = {"backend": "tensorflow", "n": 10**7, "method": "GRACE's RedSync bisection", "ms": 3470.5, "faster": 15.48}
    speed = [{**timed, "ratio": ratio} for ratio in sidco.RATIOS]
    band = {"mean": 10.86, "low": 1.07, "high": 32.02}
    training = [{"method": "dense", "ratio": None, "accuracy": 0.987}] + [
        {"method": name, "ratio": 0.01, "accuracy": 0.987, "own": band, "same": band, "us": 1.0}
        for name in ("exact top-k", "RedSync bisection")
    ]
    sidco_show.render(sidco.Results(training=training, speed=speed), console)
    text = console.export_text()
    assert text.count("15.48x  3470") == 3
    assert text.count("10.86 (1.07-32.02)") == 4
    console.file.close()


def test_width_is_that_of_the_terminal_or_of_COLUMNS_else_wide(monkeypatch):
    monkeypatch.setattr(inputs.os, "isatty", lambda number: False)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert inputs.console().width == inputs.WIDE
    monkeypatch.setenv("COLUMNS", "80")
    assert inputs.console().width == 80


# -- ways to call them -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words", [(), ("bench",), *(words for words, _ in commands())], ids=" ".join)
def test_help_is_there_by_its_short_name(words):
    short, long = (run(*words, option) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert "Usage:" in short.output
    assert short.output == long.output


def test_json_means_the_same_in_every_command():
    flags = [words for words, option in options(bool) if option == "--json"]
    assert flags == [words for words, _ in commands()]
    assert len(flags) == 13


def test_json_alone_is_printed(files, monkeypatch):
    for words in (("report", "run.jsonl"), ("plan", "model.json", "--costs", "costs.json"), ("methods", "topk")):
        done = run(*words, "--json")
        assert done.exit_code == 0, done.output
        assert isinstance(json.loads(done.stdout), dict)
    monkeypatch.setattr("grace.bench.kernels.measure", lambda *_: None)
    monkeypatch.setattr("grace_bench.sidco.measure", lambda *_: None)
    for words in (("bench", "kernels", "topk"), ("bench", "sidco")):
        assert json.loads(run(*words, "--json").stdout)["format"] == 1
        old = run(*words, "--json", "old.json")  # the older form, with a file name after --json
        assert "--output old.json" in old.output
        assert json.loads((files / "old.json").read_text())["format"] == 1
        (files / "old.json").unlink()


def test_the_package_is_a_command():
    done = process("--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().strip() == f"grace {grace.__version__}"


def test_messages_install_from_the_source_tree():
    found = [
        (path.name, line)
        for path in (ROOT / "grace").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "grace-compression" in line
    ]
    assert not found


# -- costs -------------------------------------------------------------------------------------------------------------
def test_advice_takes_the_costs_of_the_toolkit_that_is_installed(files, monkeypatch):
    asked = []

    def measured(params, backend):
        asked.append(backend)
        found = costs_of(params["compressor"])
        return Codec(found.params, found.wire, found.speeds, f"measured with {backend} on a CPU")

    monkeypatch.setattr("grace.bench.costs.compressor", measured)
    here = {"torch", "tensorflow", "numpy"}
    monkeypatch.setattr(inputs.importlib.util, "find_spec", lambda name: object() if name in here else None)
    for backend in ("torch", "tensorflow", "numpy"):
        done = run("advise", "resnet50", "fp16")
        assert done.exit_code == 0, done.output
        assert re.search(
            rf"(Use fp16|Do not compress).*This holds for compression times measured with {backend} on a CPU",
            said(done),
        )
        assert run("plan", "resnet50", "--compressor", "topk").exit_code == 0
        assert asked == [backend, backend]
        asked.clear()
        here.discard(backend)
    refused(("advise", "resnet50", "fp16", "--backend", "torch"), "torch is not installed: pip install '.[torch]'")
    slow = run("advise", "resnet50", "fp16", "--backend", "numpy", "--compress-speed", "20")
    assert "measured with numpy on a CPU, divided by 20" in said(slow)


def test_measured_costs_say_where_and_leave_threads_alone():
    torch = pytest.importorskip("torch")
    from grace.bench import costs as measure

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = measure.compressor({"compressor": "fp16"}, (4096,), "torch", 0.01)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert re.fullmatch(r"measured with torch on a CPU \(.+\), one thread", found.source)


# -- tables of the documentation ---------------------------------------------------------------------------------------
def test_tables_of_the_documentation_are_put_in_by_a_command(tmp_path):
    spec = importlib.util.spec_from_file_location("generate_tables", ROOT / "docs" / "generate_tables.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- grace a -->\nold\n<!-- end -->\nbetween\n<!-- grace b -->\n<!-- end -->\nafter\n")
    made.replaced(page, lambda what: f"new {what}")
    assert page.read_text() == (
        "before\n<!-- grace a -->\n\nnew grace a\n\n<!-- end -->\nbetween\n"
        "<!-- grace b -->\n\nnew grace b\n\n<!-- end -->\nafter\n"
    )
    for name in ("advise.md", "systems-measured.md", "planner.md"):
        blocks = made.BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))
        assert blocks, name
    training = [{"method": "dense", "ratio": None, "accuracy": 0.9}]
    for method in made.METHODS:
        for ratio in made.RATIOS:
            own = {"mean": ratio, "low": ratio / 2, "high": 2 * ratio}
            training.append({"method": method, "ratio": ratio, "accuracy": 0.5, "own": own})
    lines = made.kept({"training": training}).splitlines()
    assert "| `bisect` | 0.10 (0.05-0.20) | 0.01 (0.01-0.02) | 0.00 (0.00-0.00) | 0.500 0.500 0.500 |" in lines
    assert lines[-1] == "Dense training ends at 0.900."


@pytest.mark.slow
# -- how they end ------------------------------------------------------------------------------------------------------
def test_a_reader_that_leaves_ends_a_command_quietly(files):
    for words in (("--version",), ("report", "run.jsonl", "--json"), ("methods",)):
        command = [sys.executable, "-m", "grace", *words]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
            started.stdout.close()
            assert started.stderr.read() == b""
        assert started.returncode == 1


@pytest.mark.processes
def test_a_bench_that_is_interrupted_leaves_no_process():
    psutil = pytest.importorskip("psutil")
    words = "bench kernels topk --backend numpy --sizes 1e6 --threads 1 --allocator asis --budget 100 --rounds 9999"
    started = subprocess.Popen(
        [sys.executable, "-m", "grace", *words.split(), "--no-memory"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job may ignore it
    )
    children = []
    try:
        until = time.monotonic() + 60
        while not children and time.monotonic() < until:
            time.sleep(0.1)
            children = psutil.Process(started.pid).children(recursive=True)
        assert children
        time.sleep(1)
        started.send_signal(signal.SIGINT)
        _, stderr = started.communicate(timeout=60)
        assert started.returncode == 130
        assert b"Traceback" not in stderr
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
    finally:
        for each in (started, *children):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                each.kill()
        started.wait()
