"""Handwritten digits with PyTorch Lightning: `LightningCallback` compresses what its DDPStrategy exchanges.

torchrun --nproc-per-node 2 examples/lightning_torch.py
"""

from __future__ import annotations

import argparse
from typing import Any

import digits
import lightning
import torch
from digits_torch import make_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import grace.torch


class Digits(lightning.LightningModule):
    """The model, its training and its test, independent of GRACE."""

    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.options = options
        self.model = make_model()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        right = (self.model(x).argmax(1) == y).double().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.options.lr, momentum=self.options.momentum)


def main() -> None:
    options = digits.arguments("Handwritten digits with Lightning.").parse_args()
    torch.set_num_threads(1)  # more threads do not help so small a model
    lightning.seed_everything(options.seed, verbose=False)
    device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    torch.distributed.init_process_group(backend)  # before Lightning does: the data is shared out below
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    images, labels, test_images, test_labels = (torch.from_numpy(array) for array in digits.load(rank, size))
    batches = DataLoader(TensorDataset(images[:, None], labels), options.batch_size, shuffle=True, drop_last=True)
    tests = DataLoader(TensorDataset(test_images[:, None], test_labels), 250)

    module = Digits(options)
    callback = grace.torch.LightningCallback({"compressor": options.method, **options.params})
    trainer = lightning.Trainer(
        accelerator=device,
        devices=size,
        strategy="ddp",
        callbacks=[callback],
        max_epochs=options.epochs,
        gradient_clip_val=5.0,  # of the means
        use_distributed_sampler=False,  # the data is shared out above
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches, tests)
    if trainer.is_global_zero:
        report = callback.grace.report()
        print(f"test accuracy {float(trainer.callback_metrics['accuracy']):.3f}, ratio {report.ratio:.1f}")
        print(report)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
