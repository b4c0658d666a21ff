"""Handwritten digits under Ray Train: two workers, a checkpoint per epoch, and a restart after a worker was killed.

    python examples/ray_train.py --kill 2    # worker 1 dies in epoch 2, once

Needs `pip install 'ray[train]'`; run with Ray 2.60 on one machine. `train` needs no Ray: a test runs it on two
processes, kills one, and compares the resumed training with an undisturbed one, and with Ray's if Ray is installed.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import digits
import torch
from digits_torch import make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import grace

Report = Callable[[dict[str, Any], Path], None]
"""Hands over an epoch's metrics, and the folder with this worker's files of the checkpoint."""


def train(config: dict[str, Any], checkpoint: Path | None, report: Report, device: Any = "cpu") -> nn.Module:
    """One worker of an initialised process group; continues from ``checkpoint``, a folder with all workers' files."""
    grace.init()
    torch.manual_seed(config["seed"])
    model = DistributedDataParallel(make_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    grc = grace.torch.compress(model, {"compressor": config["method"], **config["params"]})
    first = 1
    if checkpoint is not None:
        shared = torch.load(checkpoint / "shared.pt", map_location=device)
        model.module.load_state_dict(shared["model"])
        optimizer.load_state_dict(shared["optimizer"])
        first = shared["epoch"] + 1
        grace.checkpoint.load(grc, checkpoint)  # each worker's own residuals
        if grc.rank == 0:
            print(f"continues after epoch {shared['epoch']}", flush=True)
    data = digits.load(grc.rank, grc.world_size)
    images, labels, test_images, test_labels = (torch.from_numpy(array).to(device) for array in data)
    for epoch in range(first, config["epochs"] + 1):
        if epoch == config["kill"] and grc.rank == 1 and first == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        order = torch.Generator().manual_seed(config["seed"] + epoch)
        for batch in torch.randperm(len(images), generator=order).split(config["batch_size"]):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch][:, None]), labels[batch])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model.module(test_images[:, None]).argmax(1) == test_labels).double().mean().item()
        with tempfile.TemporaryDirectory() as folder:
            if grc.rank == 0:
                shared = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(shared, Path(folder, "shared.pt"))
            grace.checkpoint.save(grc, folder)
            report({"epoch": epoch, "loss": loss.item(), "accuracy": accuracy}, Path(folder))
    return model.module


def train_under_ray(config: dict[str, Any]) -> None:
    """`train` with Ray's checkpoints. Ray merges the workers' folders, and starts all workers again if one dies."""
    import ray.train.torch
    from ray.train import CheckpointConsistencyMode

    def report(metrics: dict[str, Any], folder: Path) -> None:
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(str(folder)))
        # Ray forgets the checkpoint if a worker dies before the controller, which asks every 2 seconds, knows of it.
        ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)

    device = ray.train.torch.get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    checkpoint = ray.train.get_checkpoint()
    with checkpoint.as_directory() if checkpoint else nullcontext() as folder:
        train(config, Path(folder) if folder else None, report, device)


def main() -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = digits.arguments("Handwritten digits under Ray Train.")
    parser.add_argument("--kill", type=int, default=0, help="an epoch after the first, in which worker 1 dies once")
    parser.add_argument("--storage", type=Path, default="ray_results", help="a folder that all machines share")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train_under_ray,
        train_loop_config={key: value for key, value in vars(options).items() if key not in ("json", "storage")},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=str(options.storage.resolve()), failure_config=FailureConfig(max_failures=1)),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
