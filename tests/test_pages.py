"""Pages in headless Chromium, as wide as a phone and as a desktop: takes pictures, and finds parts that do not fit."""

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import numpy as np
import pytest

import grace

pytest.importorskip("typer", reason="`grace report` writes the pages")
from typer.testing import CliRunner

from grace.cli.app import app

ROOT = Path(__file__).parents[1]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
WIDTHS = {"phone": 390, "desktop": 1280}
# An iframe, since a window cannot be as narrow as a phone; media queries see the frame's width. Legends are the keys
# above charts, and the texts inside.
FRAME = """<!doctype html><body style="margin: 0">
<iframe src="{page}" style="border: 0; width: {width}px; height: {height}px"></iframe><pre id="found"></pre><script>
const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
onload = () => {{
  const page = document.querySelector("iframe").contentDocument, overlaps = [];
  for (const group of page.querySelectorAll("figure, .key")) {{
    const texts = [...group.querySelectorAll("svg text, span")].filter(each => each.textContent.trim());
    const boxes = texts.map(each => each.getBoundingClientRect());
    texts.forEach((one, i) => texts.forEach((other, j) => {{
      const met = i < j && !one.contains(other) && meet(boxes[i], boxes[j]);
      if (met) overlaps.push([one.textContent, other.textContent]);
    }}));
  }}
  const {{scrollWidth}} = page.documentElement, {{innerWidth}} = page.defaultView;
  const headings = page.querySelectorAll("h1").length;
  document.querySelector("#found").textContent = JSON.stringify({{scrollWidth, innerWidth, overlaps, headings}});
}};
</script>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path: apt install chromium"),
]


def looked_at(page, width, height=2400):
    """Load a page in a frame of this width; returns measures, and saves a picture beside it or in $GRACE_PICTURES."""
    frame = page.with_name(f"{page.stem}-{width}.frame.html")
    frame.write_text(FRAME.format(page=page.name, width=width, height=height))
    pictures = Path(os.environ.get("GRACE_PICTURES", page.parent))
    pictures.mkdir(parents=True, exist_ok=True)
    picture = pictures / f"{page.stem}-{width}.png"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [
        f"--user-data-dir={page.parent / 'profile'}",
        f"--window-size={max(width, 500)},{height}",
        frame.as_uri(),
    ]
    shot = [*command, "--hide-scrollbars", f"--screenshot={picture}"]
    subprocess.run(shot, check=True, capture_output=True, timeout=240)
    told = subprocess.run([*command, "--dump-dom"], check=True, capture_output=True, text=True, timeout=240).stdout
    frame.unlink()
    assert picture.stat().st_size > 10_000
    found = json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', told, re.DOTALL)[1]))
    assert found["innerWidth"] == width
    return found


def run_page(folder, *names):
    """The page of `grace report` for recorded runs."""
    rng = np.random.default_rng(0)
    shapes = {"transformer.encoder.layers.11.self_attention.output.dense.weight": (64, 64), "bias": (3000,)}
    methods = ({"compressor": "topk"}, {"compressor": "blockint"}, {"compressor": "qsgd"}, {"compressor": "none"})
    for number, name in enumerate(names):
        steps = [
            [{key: rng.standard_normal(shape, "float32") for key, shape in shapes.items()} for _ in range(2)]
            for _ in range(12)
        ]
        grace.simulate(methods[number % 4] | {"record": str(folder / name), "record_every": 1}, steps)
        with (folder / name).open("a") as record:
            for step in range(1, 13):
                quality = {"validation accuracy of a long name": 0.9 - 1 / (step + number), "loss": 1 / step}
                record.write(json.dumps({"kind": "metrics", "step": step, "values": quality}) + "\n")
    page = folder / f"{'run' if len(names) == 1 else 'compared'}.html"
    done = CliRunner().invoke(app, ["report", *(str(folder / name) for name in names), "--html", str(page)])
    assert done.exit_code == 0, done.output
    return page


@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize("runs", [1, 7])
def test_the_page_of_a_report_fits(tmp_path, device, runs):
    names = [f"a-training-with-a-long-name-{number}.jsonl" for number in range(runs)]
    found = looked_at(run_page(tmp_path, *names), WIDTHS[device])
    assert found["headings"] == 1
    assert found["scrollWidth"] <= WIDTHS[device]
    assert found["overlaps"] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if not MKDOCS.exists():
        pytest.skip("the site is built by `make docs`, whose environment is not here")
    out = tmp_path_factory.mktemp("site")
    command = [MKDOCS, "build", "--quiet", "--no-directory-urls", "--site-dir", out]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=quiet, check=True, capture_output=True, timeout=600)
    return out


@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize("name", ["index", "quick-start", "choose"])
def test_the_first_pages_of_the_site_fit(site, name, device):
    found = looked_at(site / f"{name}.html", WIDTHS[device])
    assert found["headings"] == 1
    assert found["scrollWidth"] <= WIDTHS[device]
    assert found["overlaps"] == []


def test_a_page_that_does_not_fit_is_seen(tmp_path):
    (tmp_path / "wide.html").write_text(
        "<h1>Wide</h1><p style='width: 900px'>" + "text " * 900 + "</p><figure><svg width='300'>"
        "<text x='10' y='20'>one</text><text x='12' y='21'>two</text></svg></figure>"
    )
    found = looked_at(tmp_path / "wide.html", 390)
    assert found["scrollWidth"] > 390
    assert found["overlaps"] == [["one", "two"]]
