"""Six methods on handwritten digits, four workers in this process: python examples/compare_methods.py [FOLDER]"""

import sys
from pathlib import Path

import digits
import torch
from torch.nn import Flatten, Linear, ReLU, Sequential, functional

from grace.simulate import step, workers

SIZE, EPOCHS, BATCH, LR, FOLDER = 4, 10, 32, 0.3, Path(*sys.argv[1:])
FOLDER.mkdir(parents=True, exist_ok=True)
shards = [[torch.from_numpy(array) for array in digits.load(rank, SIZE)] for rank in range(SIZE)]
print(f"{'method':<14}{'test accuracy':>14}{'bytes a step':>14}{'ratio':>8}")
for method in ("none", "topk", "qsgd", "efsignsgd", "powersgd", "blockint"):
    torch.manual_seed(0)
    model = Sequential(Flatten(), Linear(64, 128), ReLU(), Linear(128, 10))
    weights = dict(model.named_parameters())
    graces = workers({"compressor": method, "record": str(FOLDER / f"{method}.jsonl")}, SIZE)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(shards[0][0])).split(BATCH):
            losses = [functional.cross_entropy(model(x[batch]), y[batch]) for x, y, _, _ in shards]
            grads = [dict(zip(weights, torch.autograd.grad(loss, weights.values()), strict=True)) for loss in losses]
            for name, mean in step(graces, grads)[0].items():  # equal on all workers
                weights[name].data -= LR * mean
        accuracy = (model(shards[0][2]).argmax(1) == shards[0][3]).double().mean().item()
        graces[0].record(accuracy=accuracy)  # then compare the runs: grace report *.jsonl
    report = graces[0].report()
    print(f"{method:<14}{accuracy:>14.1%}{report.bytes_sent / report.steps:>14,.0f}{report.ratio:>8.1f}")
