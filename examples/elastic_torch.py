"""Handwritten digits with PyTorch, on workers that may die and join during training.

    horovodrun -np 4 --min-np 2 --max-np 4 --host-discovery-script ./hosts.sh python examples/elastic_torch.py

hosts.sh prints the available hosts as "host:workers" lines; Horovod calls it repeatedly. If a worker dies, Horovod
excludes its whole host. `--blacklist-cooldown-range 10 60` lets the host come back.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import digits
import horovod.torch as hvd
import torch
from digits_torch import make_model
from torch import nn

import grace
from grace import grace_from_params


@grace.elastic.run
def train(state: Any, options: argparse.Namespace) -> None:
    """All communication with other workers. Restarts from the last commit when workers are lost or join."""
    grc, model, optimizer = state.grace, state.model, state.optimizer
    data = digits.load(grc.rank, grc.world_size)  # another share for another number of workers
    images, labels, test_images, test_labels = (torch.from_numpy(array) for array in data)
    steps = len(images) // options.batch_size
    while state.epoch < options.epochs:
        order = torch.Generator().manual_seed(options.seed + state.epoch)
        losses = 0.0
        batches = torch.randperm(len(images), generator=order).split(options.batch_size)[:steps]
        for step, batch in enumerate(batches, start=1):
            progress = (state.epoch + step / steps) / options.epochs
            for group in optimizer.param_groups:
                group["lr"] = options.lr * (1 + math.cos(math.pi * progress)) / 2
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch][:, None]), labels[batch])
            loss.backward()
            optimizer.step()
            losses += loss.item()
        with torch.no_grad():
            accuracy = (model(test_images[:, None]).argmax(1) == test_labels).double().mean().item()
        state.epoch += 1
        epoch = {"epoch": state.epoch, "loss": losses / steps, "accuracy": accuracy, "workers": grc.world_size}
        state.history = [*state.history, epoch]
        if grc.rank == 0:
            print(f"{digits.summary(epoch)}, {grc.world_size} workers", flush=True)
        state.commit()  # finished epochs are not repeated


def main() -> None:
    options = digits.arguments("Handwritten digits with PyTorch, on workers that come and go.").parse_args()
    torch.set_num_threads(1)  # more threads do not help so small a model
    hvd.init()
    torch.manual_seed(options.seed)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    grc = grace_from_params({"compressor": options.method, **options.params})
    optimizer = grace.torch.DistributedOptimizer(optimizer, grace=grc, named_parameters=model.named_parameters())
    # Until `train`, nothing may wait for other workers: existing ones would not answer.
    state = grace.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, history=[])
    train(state, options)
    digits.finish(options, grc, {"history": state.history})


if __name__ == "__main__":
    main()
