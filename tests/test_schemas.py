"""The published JSON Schemas hold for files that GRACE writes, and for no others."""

import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.schemas import FOLDER, problems, schema

import grace
from grace.planner import models, plan
from grace.planner.costs import Cluster, Codec, Curve, Link, Rate, Speed

CURVE = Curve((1e3, 1e8), (2e-6, 2e-3))
TOPK = {"compressor": "topk", "compress_ratio": 0.01}
DOCS = Path(__file__).parents[1] / "docs"


def cluster():
    fits = {"allreduce": Rate(1e-5, 1e-9)}
    return Cluster(2, 4, Link(5e-5, 1e9, fits), Link(1e-6, 1e10), "measured", Link(5e-5, 1e9), Rate(1e-6, 0.0))


def written(kind, folder):
    """Data of files as GRACE writes them."""
    if kind == "cluster":
        return [cluster().to_dict()]
    if kind == "plan":
        codec = Codec(TOPK, Curve((1e3, 1e8), (80.0, 8e6)), {"gpu": Speed(CURVE, CURVE, CURVE)}, "measured")
        basis = plan.Basis(models.profile("vgg16"), cluster(), (codec,), ("gpu",), None, 1024, "refined", 2, False)
        basis.plan().save(folder / "plan.json")
        return [json.loads((folder / "plan.json").read_text())]
    gradients = {"w": np.ones((40, 50), np.float32), "b": np.ones(5, np.float32)}
    record = str(folder / "run.jsonl")
    for params in ({**TOPK, "min_numel": 0}, {"compressor": "topk", "policy": "accordion", "k_low": 0.1}):
        grc = grace.grace_from_params({**params, "record": record, "record_every": 1}, "local")
        grc.build(gradients)
        for _ in range(3):
            grc.step(gradients)
        grc.end_epoch(0.1)
        with pytest.warns(UserWarning, match="not finite"):
            grc.record(loss=0.5, accuracy=float("nan"))
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["cluster", "plan", "record"])
def test_files_are_valid_and_damaged_ones_are_not(kind, tmp_path):
    rules, found = schema(kind), written(kind, tmp_path)
    assert [problems(each, rules) for each in found] == [[]] * len(found)
    if kind == "record":
        assert {each["kind"] for each in found} == {"begin", "tensors", "steps", "metrics"}
    for each in found:
        parts = rules.get("oneOf", [rules])
        required = next(part["required"] for part in parts if not problems(each, part, rules))
        for key in required:
            assert problems({name: value for name, value in each.items() if name != key}, rules), key
            assert problems({**copy.deepcopy(each), key: [{}]}, rules), key
        assert problems({**each, "beside": 1}, rules)


def test_clusters_of_the_pages_are_valid():
    text = (DOCS / "planner.md").read_text()
    found = [json.loads(each) for each in re.findall(r'`({"nodes": .*?})`', text)]
    assert found
    for each in found:
        assert problems(each, schema("cluster")) == []


def test_the_pages_name_every_schema():
    text = (DOCS / "reference.md").read_text()
    assert [path.name for path in FOLDER.iterdir() if f"schemas/{path.name}" not in text] == []
