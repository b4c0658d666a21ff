"""Pufferfish with PyTorch: train digits dense, with factors from the start, and with factors after a warm-up.

python examples/pufferfish_torch.py                                    # one worker
horovodrun -np 2 --gloo python examples/pufferfish_torch.py            # two, over Horovod
torchrun --nproc-per-node 2 examples/pufferfish_torch.py               # two, over torch.distributed
python examples/pufferfish_torch.py --forms dense hybrid --rank-ratio 0.25
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from typing import Any

import digits
import torch
from digits_torch import start
from pufferfish import FORMS, WIDTHS, arguments, outcome, show
from torch import nn

import grace.torch
from grace import Grace, grace_from_params
from grace.factorize import WarmUp, factorize


def make_model() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(form: str, grc: Grace, options: argparse.Namespace) -> dict[str, Any]:
    """Train a new model in one of the forms, and return the measurements."""
    data = digits.load(grc.rank, grc.world_size)
    images, labels, test_images, test_labels = (torch.from_numpy(array) for array in data)
    torch.manual_seed(options.seed)
    model = make_model()
    settings, warm = FORMS[form](options)
    if settings is not None and not warm:
        factorize(model, init="random", **settings)
    warmup = WarmUp(warm, ramp_epochs=1, **settings) if settings is not None and warm else None

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)

    optimizer = grace.torch.DistributedOptimizer(make_optimizer(model), grc, model.named_parameters())
    grace.torch.broadcast_parameters(model.state_dict(), root_rank=0)
    order = torch.Generator().manual_seed(options.seed)
    steps = len(images) // options.batch_size
    seconds: list[float] = []
    for epoch in range(options.epochs):
        if warmup is not None and warmup.due(epoch):
            model, optimizer = warmup.switch(model, optimizer, make_optimizer)
            seconds.clear()
        batches = torch.randperm(len(images), generator=order).split(options.batch_size)[:steps]
        began = time.perf_counter()
        for step, batch in enumerate(batches):
            now = epoch + step / steps
            for group in optimizer.param_groups:
                group["lr"] = options.lr * (1 - now / options.epochs) * (warmup.lr_scale(now) if warmup else 1)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - began)
    with torch.no_grad():  # every worker tests on all test images, which are few
        accuracy = (model(test_images).argmax(1) == test_labels).double().mean().item()
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return outcome(form, parameters, grc, statistics.median(seconds) / steps, accuracy)


def main() -> None:
    options = arguments("Pufferfish with PyTorch.").parse_args()
    start()
    rows = []
    for form in options.forms:
        grc = grace_from_params({"compressor": options.method, **options.params})
        rows.append(train(form, grc, options))
    show("PyTorch", rows, grc.rank, grc.world_size, options.json)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
