"""Handwritten digits with PyTorch Lightning: GRACE is the communication hook of its DDPStrategy.

torchrun --nproc-per-node 2 examples/lightning_torch.py
"""

from __future__ import annotations

import argparse
from typing import Any

import digits
import lightning
import torch
from digits_torch import make_model
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import grace.torch
from grace import Grace, grace_from_params


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


class HookOnCPU(lightning.Callback):
    """Registers the hook, which Lightning does only for models on GPUs."""

    def __init__(self, grc: Grace):
        self.grace = grc

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.strategy.root_device.type != "cuda":
            trainer.strategy.model.register_comm_hook(self.grace, grace.torch.ddp_hook)


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

    grc = grace_from_params({"compressor": options.method, **options.params})
    module = Digits(options)
    grace.torch.name_parameters(grc, module)
    trainer = lightning.Trainer(
        accelerator=device,
        devices=size,
        strategy=DDPStrategy(ddp_comm_state=grc, ddp_comm_hook=grace.torch.ddp_hook),
        callbacks=[HookOnCPU(grc)],
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
        print(f"test accuracy {float(trainer.callback_metrics['accuracy']):.3f}, ratio {grc.report().ratio:.1f}")
        print(grc.report())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
