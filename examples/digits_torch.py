"""Handwritten digits with PyTorch: each worker trains on its own images, and gradients are compressed.

python examples/digits_torch.py                                              # one worker
horovodrun -np 2 --gloo python examples/digits_torch.py --method powersgd    # two, over Horovod
torchrun --nproc-per-node 2 examples/digits_torch.py --method efsignsgd      # two, over torch.distributed
python examples/digits_torch.py --method topk --params '{"compress_ratio": 0.05}'
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import digits
import torch
from torch import nn

import grace.torch
from grace import Grace, grace_from_params


def start() -> None:
    """Join the other workers through the launcher's library."""
    torch.set_num_threads(1)  # more threads do not help so small a model
    if torch.distributed.is_torchelastic_launched():
        torch.distributed.init_process_group("gloo")
    elif {"HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"} & set(os.environ):
        import horovod.torch as hvd

        hvd.init()


def make_model() -> nn.Module:
    """283,786 parameters, nearly all of them in two large tensors."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def train(grc: Grace, options: argparse.Namespace, tell: digits.Tell) -> dict[str, Any]:
    """Train a new model; returns `digits.result`."""
    data = digits.load(grc.rank, grc.world_size)
    images, labels, test_images, test_labels = (torch.from_numpy(array) for array in data)
    torch.manual_seed(options.seed)
    model = make_model()
    steps = len(images) // options.batch_size

    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * steps)
    optimizer = grace.torch.DistributedOptimizer(optimizer, grace=grc, named_parameters=model.named_parameters())
    grace.torch.broadcast_parameters(model.state_dict(), root_rank=0)
    grace.torch.broadcast_optimizer_state(optimizer, root_rank=0)

    began = time.perf_counter()
    order = torch.Generator().manual_seed(options.seed)
    history: list[dict[str, Any]] = []
    computed = 0.0
    for epoch in range(options.epochs):
        busy = time.process_time()
        batches = torch.randperm(len(images), generator=order).split(options.batch_size)[:steps]
        losses = 0.0
        for step, batch in enumerate(batches, start=1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch][:, None]), labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
            losses += loss.item()
            if step < steps:
                tell(epoch * steps + step, options.epochs * steps, None)
        computed += time.process_time() - busy
        with torch.no_grad():  # every worker tests on all test images, which are few
            accuracy = (model(test_images[:, None]).argmax(1) == test_labels).double().mean().item()
        sent = grc.report().bytes_sent
        record = {"epoch": epoch + 1, "loss": losses / steps, "accuracy": accuracy}
        history.append({**record, "bytes_sent": sent, "computed": computed})
        tell((epoch + 1) * steps, options.epochs * steps, history[-1])
    return digits.result("PyTorch", grc, history, time.perf_counter() - began)


def main() -> None:
    options = digits.arguments("Handwritten digits with PyTorch.").parse_args()
    start()
    grc = grace_from_params({"compressor": options.method, **options.params})
    with digits.progress(f"PyTorch {options.method}", grc.rank) as tell:
        outcome = train(grc, options, tell)
    digits.finish(options, grc, outcome)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
