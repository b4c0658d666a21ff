"""`grace patch` on checkpoints of safetensors files."""

import json

import numpy as np
import pytest
from support.patches import same, versions

import grace
from grace.patch.checkpoints import Folder
from grace.patch.folders import save_whole

pytest.importorskip("zstandard")
pytest.importorskip("xxhash")
pytest.importorskip("typer")
from typer.testing import CliRunner

from grace.cli.app import app


@pytest.fixture
def checkpoints(tmp_path):
    tensors = versions(0, [("float16", (500, 7), "plain", 0.1), ("float32", (), "plain", 0.0)])
    for name, each in zip(("base", "new"), tensors, strict=True):
        save_whole(each, tmp_path / name, 0)
    return tmp_path, *tensors


def grace_patch(*words, fails=False):
    done = CliRunner().invoke(app, ["patch", *map(str, words)])
    assert (done.exit_code != 0) == fails, done.output
    return done


def held(folder):
    return {name: np.array(each.words) for name, each in Folder(folder).views().items()}


def test_from_diff_to_apply(checkpoints):
    folder, base, new = checkpoints
    out = grace_patch("diff", folder / "new", folder / "base", folder / "patches", "--json").stdout
    found = json.loads(out)
    assert found["density"] == grace.patch.diff(new, base).density
    assert found["tensors"] == 1
    assert f"{found['bytes']:,}" in grace_patch("info", folder / "patches").output
    before = held(folder / "base")
    assert "to version 1" in " ".join(grace_patch("verify", folder / "patches", folder / "base").output.split())
    assert json.loads(grace_patch("verify", folder / "patches", folder / "base", "--json").stdout) | {"path": 0} == {
        **found,
        "path": 0,
    }
    assert same(held(folder / "base"), before)
    assert "has version 1 now" in " ".join(grace_patch("apply", folder / "patches", folder / "base").output.split())
    assert same(held(folder / "base"), held(folder / "new"))


def test_what_is_wrong_is_said(checkpoints):
    folder, _, _ = checkpoints
    grace_patch("diff", folder / "new", folder / "base", folder / "patches", "--encoding", "xor")
    said = grace_patch("diff", folder / "new", folder / "base", folder / "patches", fails=True)
    assert "is there already" in " ".join(said.output.replace("│", "").split())
    grace_patch("apply", folder / "patches", folder / "base")
    for command in ("apply", "verify"):
        said = grace_patch(command, folder / "patches", folder / "base", fails=True)
        assert "applied before" in " ".join(said.output.replace("│", "").split())
    said = grace_patch("info", folder / "new", fails=True)
    assert "holds a checkpoint, not a patch" in " ".join(said.output.replace("│", "").split())
    said = grace_patch("diff", folder / "gone", folder / "base", folder / "more", fails=True)
    assert "has neither" in " ".join(said.output.replace("│", "").split())
