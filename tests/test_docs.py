"""README and docs: code runs, links resolve, tables and commands are correct."""

import ast
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from launch import alone, free_port, launcher, run

import grace
from grace.core import name_of
from grace.core.registry import communicators, compressors, memories
from grace.planner.measured import RECOMMENDED
from grace_bench.tasks import plan

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = [
    ROOT / "docs" / "memories.md",
    ROOT / "docs" / "communicators.md",
    *sorted((ROOT / "docs" / "methods").glob("*.md")),
]
GENERATOR = [sys.executable, str(ROOT / "docs" / "generate_methods.py")]
MEASURED = [sys.executable, str(ROOT / "docs" / "generate_measured.py")]
CHOICE = [sys.executable, str(ROOT / "docs" / "generate_choose.py")]
TOOLKITS = ("horovod", "jax", "keras", "optax", "ray", "tensorflow", "torch")
TO_COPY = ("README", "quick-start", "save-and-resume")
"""Pages whose scripts readers take as they are: each compresses to less than half."""
PLAN = {
    "README": 500,
    "quick-start": 600,
    "choose": 700,
    "two-machines": 700,
    "clusters": 900,
    "gpus": 500,
    "save-and-resume": 400,
    "report": 900,
    "troubleshooting": 1300,
    "pytorch": 1200,
    "keras": 1200,
    "jax": 1200,
    "fsdp2": 1200,
    "settings": 1200,
    "auto": 500,
    "write-a-method": 1300,
    "compare": 900,
    "local": 1200,
    "stages": 1200,
    "planner": 1200,
    "accordion": 800,
    "sidco": 800,
    "pufferfish": 800,
    "gossip": 800,
    "benchmarks": 600,
    "benchmarks-tasks": 1500,
    "benchmarks-kernels": 1500,
    "benchmarks-gpu": 1500,
    "benchmarks-lab": 1500,
    "reliability": 1500,
}
"""The largest number of words of a page, without its blocks of code."""


QUESTIONS = {
    "Which method?": ("choose", "`eden` with 3 bits in blocks of 64 had the fastest steps of all methods"),
    "Does it pay?": ("advise", "predicts the time of a training step with each method"),
    "How do I resume?": ("save-and-resume", "`grace.checkpoint`: [script](#pytorch)"),
    "My loss got worse": ("troubleshooting", 'Train once with `{"compressor": "none"}`, everything else equal'),
    "How many bytes?": ("report", "want to see bytes, residuals and times beside the quality"),
    "Which GPU settings?": ("gpus", "one per GPU. Set the device before the process group"),
    "How do I add a method?": ("write-a-method", "A compressor is one class with two methods"),
    "FSDP?": ("fsdp2", "grace.torch.fsdp(model, grace=grc, parameters=int8)"),
    "Keras?": ("keras", "Begin here, unless your model is TensorFlow's"),
    "Slow links?": ("choose", "the slowest links, below 100 Mbit/s"),
}
"""What newcomers ask: the page that answers, and the line that does."""


def scripts():
    """A page's Python blocks, joined; after the comment <!-- fresh --> a new process begins."""
    for page in (page for page in PAGES if page not in GENERATED):
        for number, part in enumerate(page.read_text().split("<!-- fresh -->")):
            code = "\n".join(re.findall(r"^```python\n(.*?)^```", part, re.DOTALL | re.MULTILINE))
            if page.stem in TO_COPY and "grc = " in code and "fully_shard" not in code:  # fully_shard sends nothing
                code += "\nassert grc.report().ratio > 2, grc.report()\n"
            if code:
                yield pytest.param(code, id=f"{page.stem}-{number}")


@pytest.mark.slow
@pytest.mark.parametrize("code", list(scripts()))
def test_code_runs(code, tmp_path):
    for name in TOOLKITS:
        if re.search(rf"^\s*(import|from) {name}\b|\"{name}\"", code, re.MULTILINE):
            pytest.importorskip(name)
    one = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    script = tmp_path / "script.py"
    script.write_text(code)
    of_tensorflow = re.search("keras|tensorflow", code) and 'KERAS_BACKEND"] = "torch"' not in code
    done = subprocess.run(
        [sys.executable, script] if "jax" in code else alone(script, "tensorflow" if of_tensorflow else "torch"),
        cwd=tmp_path,
        env={**os.environ, **one, **quiet, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.processes
@pytest.mark.parametrize(
    "page, of, lines", [("README.md", "ddp_hook", 15), ("docs/quick-start.md", "fully_shard(", 50)]
)
def test_a_script_compresses_on_two_workers_and_one_of_them_speaks(page, of, lines, tmp_path):
    pytest.importorskip("torch")
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    code = next(code for code in blocks if of in code)
    assert len(code.splitlines()) <= lines
    script = tmp_path / "train.py"
    script.write_text(code)
    printed = run(*launcher("torchrun", 2), script, log=tmp_path / "log")
    (ratio,) = re.findall(r"worker \d of 2 \| \d+ steps \| .* \| ratio ([\d.]+)", printed)
    assert float(ratio) > 2


def test_code_fits_a_narrow_window():
    for page in {*PAGES, *GENERATED}:
        for kind, block in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            columns = 88 if kind == "python" else 112  # the width beside two columns of links, see docs/extra.css
            if block.startswith("@register"):  # a method copied from the source
                columns = 120
            assert [line for line in block.splitlines() if len(line) > columns] == [], page


def test_the_site_has_tabs_and_highlights_what_a_script_has_because_of_grace():
    spec = importlib.util.spec_from_file_location("docs_index", ROOT / "scripts" / "docs_index.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    source = (ROOT / "docs" / "quick-start.md").read_text()
    shown = site.highlighted(source)
    blocks = re.findall(r'^```python hl_lines="([\d -]+)"\n(.*?)^```', shown, re.DOTALL | re.MULTILINE)
    assert len(blocks) == len(re.findall("^import grace", source, re.MULTILINE))
    for spans, code in blocks:
        ends = [map(int, span.split("-")) for span in spans.split()]
        lines = {number for first, last in ends for number in range(first, last + 1)}
        marked = {n for n, line in enumerate(code.splitlines(), 1) if re.search(r"\S.*# GRACE", line)}
        assert marked <= lines, code
    tabs = re.findall(r'^=== "(.*)"\n\n((?: {4}.*\n|\n)+)', site.in_tabs(shown), re.MULTILINE)
    assert [name for name, _ in tabs] == re.findall("^### (.*)$", source, re.MULTILINE)
    assert all(text.count("    ```python") == 1 for _, text in tabs)


def words(text):
    """How many words a page has, in prose and tables, without code and comments."""
    plain = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    return sum(bool(re.search(r"\w", word)) for word in plain.split())


@pytest.mark.parametrize("name", PLAN)
def test_a_page_is_as_short_as_planned(name):
    (page,) = (page for page in PAGES if page.stem == name)
    assert words(page.read_text()) <= PLAN[name]


def anchors(text):
    """The names under which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    plain = (unicodedata.normalize("NFKD", heading).lower() for heading in headings)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in plain}


def test_relative_links_lead_somewhere():
    for page in {*PAGES, *GENERATED, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"}:
        follow(page)


def test_what_newcomers_ask_is_answered_within_two_clicks_of_the_readme():
    clicks, last = {"README": 0}, [ROOT / "README.md"]
    for number in (1, 2):
        reached = []
        for page in last:
            prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
            for target in re.findall(r"\]\((?!https?:)([^)\s#]+\.md)", prose):
                if (found := page.parent / target).stem not in clicks:
                    clicks[found.stem] = number
                    reached.append(found)
        last = reached
    for question, (name, line) in QUESTIONS.items():
        assert clicks.get(name, 9) <= 2, f"{question} {name} is not within two clicks"
        assert line in " ".join((ROOT / "docs" / f"{name}.md").read_text().split()), f"{question} {name}: {line}"


def follow(page):
    """Every link of a page leads to a file, and to one of its headings."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(found.read_text()), f"{page.name} links to {target}"


def test_pages_of_methods_are_what_the_registry_says():
    done = subprocess.run([*GENERATOR, "--check"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


CELL = ("task", "toolkit", "workers")


def test_the_choice_of_methods_is_that_of_the_stored_results():
    done = subprocess.run([*CHOICE, "--check"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    folder = ROOT / "benchmarks" / "results"
    stored = [*folder.glob("tasks-*.json"), *folder.glob("*-workers.json")]
    assert len(stored) == 2
    rows = [row for file in stored for row in json.loads(file.read_text())["results"]]
    rows = [row for row in rows if not row["method"].startswith(("auto", "localsgd"))]  # not recommended on this page
    cells = {(*(row[key] for key in CELL), row["bandwidth"], row["method"]): row for row in rows}
    methods = {row["method"] for row in rows}
    shares, out = {}, set()
    for (*cell, method), row in cells.items():
        base = cells[(*cell, "dense")]
        loss = (base["quality"] - row["quality"]) / base["quality"] * (1 if row["higher"] else -1)
        if all((*cell, each) in cells for each in methods):
            shares.setdefault(method, []).append(math.log(row["seconds"] / base["seconds"]))
        out |= {method} if loss > 0.03 else set()
    assert out == {"eden:bits=2,block_size=64"}
    means = {method: sum(each) / len(each) for method, each in shares.items() if method not in out}
    first = plan.Job("image", "torch", 2, min(means, key=means.get), ()).params
    assert first in RECOMMENDED
    assert json.dumps(first) in (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "choose.md").read_text()
    for method in methods:  # the page has every method, and marks those that fail
        (line,) = (each for each in page.splitlines() if each.startswith(f"| `{method}` |") and "of 4" in each)
        assert ("**" in line) == (method in out), line


def test_the_pages_say_what_was_stored(monkeypatch):
    pytest.importorskip("torch", reason="the models of the benchmarks")
    monkeypatch.setattr(sys, "path", [*sys.path])
    from docs import check

    assert check.problems() == []
    shift = str.maketrans("0123456789", "1234567890")
    wrong = check.problems(lambda page: check.file_of(page).read_text().translate(shift))
    assert len(wrong) == sum(bool(re.search(r"\d", claim)) for _, claim in check.claims()) > 30


def test_every_row_of_the_seeds_is_repeated_and_compared():
    from docs import repeat

    assert repeat.rows().keys() == repeat.READ.keys() >= set(repeat.QUICK)
    figure = repeat.Figure("steps of {} and {} of the dense time", (0.58, 0.384))
    rows = ("steps of 0.58 and 0.38 of the dense time", "steps of 0.59 and 0.38 of the dense time", "steps of 0.58")
    assert [figure.on(row) for row in rows] == [True, False, False]
    assert [figure._replace(tolerance=0.1, values=(0.63, value)).on(rows[0]) for value in (0.4, 0.44)] == [True, False]


def test_each_claim_of_a_paper_is_quoted_and_judged():
    page = (ROOT / "docs" / "seeds.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| **")]
    assert len(rows) == 13
    for system, claim, _, found, command in rows:
        assert re.search('"[^"]+"', claim), system
        assert re.search(r"\((abstract|abstracts|section|announcement)\b", claim), system
        assert found in ("reproduced", "partly", "not", "not tried"), system
        assert "`" in command, system


def test_a_method_links_to_the_tables_that_have_it():
    parts = (ROOT / "docs" / "benchmarks-methods.md").read_text().split("\n## ")
    kernels, lab, sent, quality = (
        next(part for part in parts if part.startswith(heading))
        for heading in ("Kernels", "Network lab", "Bytes by number", "Quality of")
    )
    for name in sorted(compressors):
        links = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
        assert ("md#kernels" in links) == (f"\n| `{name}` |" in kernels), name
        assert ("md#bytes-by-number" in links) == (f"\n| `{name}` |" in sent), name
        cases = {"efsignsgd": "sign", "blockint": "int4"}.get(name, name)
        assert ("md#network-lab" in links) == (f"\n| grace-torch-{cases} |" in lab), name
        short = {"blockint": "int4", "powersgd": "powersgd rank 16", "eden": "eden 3 bits"}.get(name, name)
        assert ("md#quality-of-the-tasks" in links) == (f"\n| {short} |" in quality.lower()), name


def test_stored_measurements_of_the_package_are_those_of_the_results():
    done = subprocess.run([*MEASURED, "--check"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore")
def test_dictionaries_of_the_pages_of_methods_are_taken():
    shown = 0
    for page in GENERATED:
        for block in re.findall(r"^```python\nparams = (.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            params = ast.literal_eval(block)
            grc = grace.grace_from_params(params, "local")
            assert params["compressor"] == name_of(grc.method.compressor), page
            shown += 1
    assert shown == sum(map(len, (compressors, memories, communicators)))


def test_the_speeds_in_the_readme_are_those_of_the_choice():
    table = r"^\| `([\w:=,]+)` \| ([\d.]+) \| ([\d.]+) \|$"
    measured = re.findall(table, (ROOT / "docs" / "choose.md").read_text(), re.MULTILINE)
    wanted = {
        json.dumps(
            plan.Job("image", "torch", 2, method, ()).params if ":" in method else {"compressor": method}
        ): speeds
        for method, *speeds in measured
        if method != "dense"
    }
    found = re.findall(r"^\| `(\{.*?\})`.* \| ([\d.]+) \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(found) == 4
    assert {name: speeds for name, *speeds in found} == wanted


def test_the_lines_of_the_picture_pass_through_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import generate_picture as picture

    rows = picture.common(row for run in picture.load(picture.STORE, *picture.FRESH) for row in run["results"])
    for method in picture.SHOWN.keys() - {"auto"}:
        line, dots = picture.computed(rows, method), picture.measured(rows, method)
        assert len(dots) == 2
        for rate, seconds in dots.items():
            assert line(rate) == pytest.approx(seconds, rel=1e-3), method


def public(path):
    """The names in a module's __all__, read without importing its toolkit."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return {name for name in ast.literal_eval(node.value) if not name.startswith("_")}
    return set()


def test_the_reference_has_all_that_is_public():
    text = (ROOT / "docs" / "reference.md").read_text()
    shown = set()
    for path, members in re.findall(r"^::: (\S+)\n(?: +options:\n +members: \[(.*)\]\n)?", text, re.MULTILINE):
        shown |= {f"{path}.{member}" for member in re.split(r", *", members)} if members else set()
        shown.add(path)
    for module in ("grace", "grace.torch", "grace.keras", "grace.tensorflow", "grace.checkpoint", "grace.elastic"):
        path = ROOT / module.replace(".", "/")
        names = public(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
        assert names, module
        absent = {f"{module}.{name}" for name in names if f"{module}.{name}.{name}" not in shown} - shown
        assert not absent, absent


def shell(page):
    """The shell lines of a page, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_commands_exist(page):
    pytest.importorskip("typer", reason="the command line")
    from grace.cli.app import app

    commands = {command.callback.__name__ for command in app.registered_commands}
    commands |= {group.typer_instance.info.name for group in app.registered_groups}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(re.findall(r"^([\w-]+) =$", (ROOT / "setup.cfg").read_text(), re.MULTILINE))
    inline = re.findall(r"`((?:grace|make) [^`]+)`", page.read_text())
    for line in [*shell(page), *inline]:
        words = line.split()
        if not words:
            continue
        if words[0] == "grace":
            assert words[1] in commands, line
        if words[0] == "make":
            assert words[1] in targets, line
        if words[0] == "python":
            assert words[1] == "train.py" or (ROOT / words[1]).exists(), line
        for extra in re.findall(r"\.\[([\w,-]+)\]", line):
            assert set(extra.split(",")) <= extras, line


def test_a_new_process_is_not_begun_for_nothing():
    for page in PAGES:
        for part in page.read_text().split("<!-- fresh -->")[1:]:
            assert re.match(r"\s*```python\n", part), f"{page.name}: the comment stands right above a block of Python"


def test_the_methods_in_the_design_are_those_in_the_source():
    page = (ROOT / "docs" / "design.md").read_text()
    shown = re.findall(r"^`(grace/\S+)`:\n\n```text\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    assert [Path(name).stem for name, _ in shown] == ["onebit", "powersgd"]
    for name, code in shown:
        source = (ROOT / name).read_text()
        assert code == source[source.index("@register") :], name


def test_the_design_is_a_map_of_at_most_200_lines():
    assert len((ROOT / "docs" / "design.md").read_text().splitlines()) <= 200


def test_the_design_names_modules_that_exist():
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("design.md", "engine.md"))
    rows = [
        row
        for table in re.findall(r"^\| module \| holds \|\n(.*?)\n\n", pages, re.DOTALL | re.MULTILINE)
        for row in re.findall(r"^\| (`.*?) \| .* \|$", table, re.MULTILINE)
    ]
    named = [name for row in rows for name in re.findall(r"`([a-z_/]+)`", row)]
    assert len(named) > 20
    for name in named:
        found = [ROOT / base / f"{name}{end}" for base in ("grace", ".") for end in ("", ".py")]
        assert any(path.exists() for path in found), name
