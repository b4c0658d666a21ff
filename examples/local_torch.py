"""Handwritten digits with PyTorch, on workers that exchange seldom: DiLoCo with any compressor.

torchrun --nproc-per-node 2 examples/local_torch.py --every 20 --method chunktopk
torchrun --nproc-per-node 2 examples/local_torch.py --every 20 --fragments 2 --delay 5    # training goes on meanwhile
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import digits
import torch
from digits_torch import make_model, start
from torch import nn

import grace.local
import grace.torch
from grace import grace_from_params


def train(local: grace.local.DiLoCo, options: argparse.Namespace, tell: digits.Tell) -> dict[str, Any]:
    """Train a new model; returns `digits.result`."""
    data = digits.load(local.rank, local.world_size)
    images, labels, test_images, test_labels = (torch.from_numpy(array) for array in data)
    torch.manual_seed(options.seed)
    model = make_model()
    steps = len(images) // options.batch_size
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * steps)  # of inner steps
    grace.torch.local(optimizer, local, model.named_parameters(), model.named_buffers())
    grace.torch.broadcast_parameters(model.state_dict(), root_rank=0)

    began = time.perf_counter()
    history: list[dict[str, Any]] = []
    for epoch in range(options.epochs):
        losses = 0.0
        for batch in torch.randperm(len(images)).split(options.batch_size)[:steps]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch][:, None]), labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
            losses += loss.item()
        if epoch + 1 == options.epochs:
            local.finish()  # now all workers have the same model; before, each tests its own
        with torch.no_grad():
            accuracy = (model(test_images[:, None]).argmax(1) == test_labels).double().mean().item()
        sent = local.report().bytes_sent
        history.append({"epoch": epoch + 1, "loss": losses / steps, "accuracy": accuracy, "bytes_sent": sent})
        tell((epoch + 1) * steps, options.epochs * steps, history[-1])
    return digits.result("PyTorch", local, history, time.perf_counter() - began)


def main() -> None:
    parser = digits.arguments("Handwritten digits with PyTorch, on workers that exchange seldom.")
    parser.add_argument("--every", type=int, default=20, help="inner steps in which every parameter is exchanged once")
    parser.add_argument("--fragments", type=int, default=1, help="parts that are exchanged in turn")
    parser.add_argument("--delay", type=int, default=0, help="inner steps that an exchange may travel")
    options = parser.parse_args()
    start()
    grc = grace_from_params({"compressor": options.method, **options.params})
    local = grace.local.DiLoCo(grc, options.every, fragments=options.fragments, fragment_sync_delay=options.delay)
    with digits.progress(f"PyTorch {options.method}, every {options.every} steps", local.rank) as tell:
        outcome = train(local, options, tell)
    digits.finish(options, local, outcome)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
