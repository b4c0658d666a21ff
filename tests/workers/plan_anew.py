"""Three workers with a plan for eight, whose file only worker 0 has; then with changing levels: OUT TRANSPORT."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from launch import join_torch, leave_gloo, save
from strategies import PARAMETERS, planned

from grace import grace_from_params

out, transport = sys.argv[1:]
rank, size = join_torch(transport)
if rank == 0:
    Path(out, "plan.json").write_text(json.dumps(planned(8, ratio=0.1).to_dict()))
tensors = {name: torch.from_numpy(x) for name, x in PARAMETERS.items()}


def strategies(grc):
    return {tensor.name: tensor.strategy or "allreduce(flat)" for tensor in grc.report().tensors}


grc = grace_from_params({"plan": str(Path(out, "plan.json" if rank == 0 else "not here.json"))})
grc.build(tensors)
found = {"plan": strategies(grc), "origin": grc.report().plan, "levels": []}

file = planned(8, levels=(0.5, 0.05)).to_dict()
grc = grace_from_params({"plan": file, "policy": "warmup", "warmup_ratio": 0.5, "warmup_factor": 0.1})
grc.build(tensors)
total = {name: np.zeros(x.shape) for name, x in PARAMETERS.items()}


def step(number):
    rng = np.random.default_rng([number, rank])
    given = {name: rng.standard_normal(x.shape).astype(np.float32) for name, x in PARAMETERS.items()}
    for name, mean in grc.step({name: torch.from_numpy(x) for name, x in given.items()}).items():
        total[name] += mean.numpy()


for epoch in range(3):
    found["levels"].append(strategies(grc))
    step(epoch)
    grc.end_epoch()
found["means"] = total
save(out, rank, found)
if transport == "torch":
    leave_gloo()
