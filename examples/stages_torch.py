"""Handwritten digits with PyTorch, as a pipeline of one stage per worker whose messages are compressed.

torchrun --nproc-per-node 2 examples/stages_torch.py
torchrun --nproc-per-node 2 examples/stages_torch.py --forward '{"compressor": "blockint", "bits": 4}' --feedback aq
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import digits
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from grace.torch import PipelineStage

WIDTH = 512


def module(stage: int, stages: int) -> nn.Module:
    """A stage: hidden layers, of which the first one reads the images, and the last one ends in the classes."""
    torch.manual_seed(stage)
    layers = [nn.Linear(64 if stage == 0 else WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.Linear(WIDTH, 10)] if stage == stages - 1 else []))


def main() -> None:
    int8 = {"compressor": "blockint", "bits": 8}
    parser = argparse.ArgumentParser(
        description="Handwritten digits as a pipeline.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--forward", type=json.loads, default=int8, metavar="JSON", help="compressor of activations")
    parser.add_argument("--backward", type=json.loads, default=int8, metavar="JSON", help="and of their gradients")
    parser.add_argument("--feedback", default="none", choices=["none", "ef", "ef21", "aq"])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    # Every stage reads the data: the first one takes images, the last one labels, and "aq" ids on all of them.
    images, labels, test_images, test_labels = (torch.from_numpy(array) for array in digits.load(0, 1))
    model = module(rank, size)
    stage = PipelineStage(
        model,
        rank,
        size,
        torch.device("cpu"),
        forward=options.forward,
        backward=options.backward,
        feedback=options.feedback,
        samples=len(images),
    )
    schedule = Schedule1F1B(stage, options.microbatches, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.Adam(model.parameters(), 0.001)
    order = torch.Generator().manual_seed(0)  # the same on all workers

    for epoch in range(options.epochs):
        losses: list[torch.Tensor] = []
        whole = len(images) // options.batch_size * options.batch_size
        for batch in torch.randperm(len(images), generator=order)[:whole].split(options.batch_size):
            optimizer.zero_grad()
            if options.feedback == "aq":
                stage.sample_ids = batch
            inputs = [images[batch].flatten(1)] if stage.is_first else []
            schedule.step(*inputs, **({"target": labels[batch], "losses": losses} if stage.is_last else {}))
            optimizer.step()
        if stage.is_last:
            loss = torch.stack(losses[-options.microbatches :]).mean().item()
            print(f"epoch {epoch + 1}: loss of the last batch {loss:.4f}", flush=True)

    # Evaluation in batches of the training's size; activations are compressed here, too.
    right = torch.zeros(())
    batches = list(zip(test_images.split(options.batch_size), test_labels.split(options.batch_size), strict=True))[:-1]
    with torch.no_grad():
        for inputs, targets in batches:
            if stage.is_last:
                output = schedule.eval(target=targets)
                right += (output.argmax(1) == targets).sum()
            else:
                schedule.eval(*([inputs.flatten(1)] if stage.is_first else []))
    if stage.is_last:
        accuracy = right.item() / (len(batches) * options.batch_size)
        print(f"test accuracy {accuracy:.1%}\n{stage.report()}")
        if options.json:
            edges = [{**vars(edge), "ratio": edge.ratio} for edge in stage.report().edges]
            options.json.write_text(json.dumps({"accuracy": accuracy, "edges": edges}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
