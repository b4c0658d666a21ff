"""A small language model with transformers.Trainer: `grace.torch.trainer` compresses what it exchanges.

torchrun --nproc-per-node 2 examples/trainer_torch.py
torchrun --nproc-per-node 2 examples/trainer_torch.py --params '{"compressor": "powersgd"}'
torchrun --nproc-per-node 2 examples/trainer_torch.py --params '{"compressor": "none", "local": {"sync_every": 10}}'
torchrun --nproc-per-node 2 examples/trainer_torch.py --steps 120 --resume     # goes on from the last checkpoint

Model and text are made here: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import grace.torch

PERIOD, LENGTH = 97, 64


class Counting(torch.utils.data.Dataset):
    """Sequences that count in steps of one to four, modulo a prime."""

    def __init__(self, number: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, PERIOD, (number, 1), generator=draw)
        strides = torch.randint(1, 5, (number, 1), generator=draw)
        self.rows = (starts + strides * torch.arange(LENGTH)) % PERIOD

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers.Trainer with GRACE.")
    parser.add_argument("--params", type=json.loads, default={"compressor": "blockint", "bits": 4}, metavar="JSON")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=Path("trainer_results"), help="for checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint there")
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=PERIOD, **sizes))
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=options.steps,
        learning_rate=3e-3,
        eval_strategy="steps",
        eval_steps=30,
        logging_steps=10,
        save_steps=30,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=Counting(2000, 1), eval_dataset=Counting(64, 2))
    grc = grace.torch.trainer(trainer, options.params)
    trainer.train(resume_from_checkpoint=options.resume)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"loss {loss:.3f}, ratio {grc.report().ratio:.1f}")
        print(grc.report())


if __name__ == "__main__":
    main()
