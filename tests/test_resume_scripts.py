"""The quick start's scripts that save and resume: stopped and restarted, they end as an undisturbed run."""

import re
from pathlib import Path

import pytest
from launch import launcher, run

pytestmark = pytest.mark.processes
PAGE = Path(__file__).parents[1] / "docs" / "quick-start.md"


def script(heading):
    """The first Python block below a heading."""
    return re.search(r"```python\n(.*?)```", PAGE.read_text().split(f"### {heading}", 1)[1], re.DOTALL)[1]


@pytest.mark.parametrize(
    "how, toolkit, heading",
    [
        ("torchrun", "torch", "DistributedDataParallel, AdamW, bfloat16"),
        ("horovodrun", "keras", "Keras, float16"),
    ],
)
def test_a_run_that_is_stopped_and_loses_a_file_ends_where_an_undisturbed_one_ends(
    how, toolkit, heading, tmp_path, monkeypatch
):
    pytest.importorskip(toolkit)
    reached = []
    for stops in (("6",), ("2", "4", "6")):
        folder = tmp_path / "-".join(stops)
        folder.mkdir()
        (folder / "train.py").write_text(script(heading))
        monkeypatch.chdir(folder)
        for number, stop in enumerate(stops):
            printed = run(*launcher(how, 2), folder / "train.py", stop, log=folder / f"log-{number}")
            if stop == "4":  # as if worker 1 had ended while it saved: the run goes on from the checkpoint before
                (folder / "checkpoints" / "step-000000032" / "worker-00001-of-00002.grace").unlink()
        reached.append(dict(re.findall(r"worker (\d): (step 48, weights [\d.]+)", printed)))
    assert reached[0] == reached[1]
    assert sorted(reached[0]) == ["0", "1"]
    assert len(set(reached[0].values())) == 1, "workers differ"
