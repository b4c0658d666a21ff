"""The scripts of docs/save-and-resume.md: stopped and restarted, they end as an undisturbed run."""

import re
from pathlib import Path

import pytest
from launch import command_of, run

pytestmark = pytest.mark.processes
PAGE = Path(__file__).parents[1] / "docs" / "save-and-resume.md"


def script(heading):
    """The first Python block below a heading."""
    return re.search(r"```python\n(.*?)```", PAGE.read_text().split(f"# {heading}\n", 1)[1], re.DOTALL)[1]


@pytest.mark.parametrize(
    "how, toolkit, heading",
    [
        ("torchrun", "torch", "PyTorch"),
        ("horovodrun", "tensorflow", "Keras on TensorFlow"),
        ("torchrun", "keras", "Keras on PyTorch"),
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
            printed = run(*command_of(how, 2, folder / "train.py", stop), log=folder / f"log-{number}")
            lost = folder / "checkpoints" / "step-000000032" / "worker-00001-of-00002.grace"
            if stop == "4" and lost.exists():  # as if worker 1 had died while saving: resume from the previous one
                lost.unlink()
            assert stop == "6" or any((folder / name).exists() for name in ("checkpoints", "backup"))
        reached.append(dict(re.findall(r"worker (\d): (step 48, weights [\d.]+)", printed)))
    assert reached[0] == reached[1]
    assert sorted(reached[0]) == ["0", "1"]
    assert len(set(reached[0].values())) == 1, "workers differ"
