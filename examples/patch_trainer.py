"""A transformers Trainer publishes its weights every few steps: python examples/patch_trainer.py FOLDER

Workers that follow the folder: examples/patch_processes.py. Model and text are made here: nothing is downloaded.
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import grace


class Publish(TrainerCallback):
    """Publishes bf16 weights every ``every`` steps, by worker 0."""

    def __init__(self, folder, every):
        self.publisher, self.every = grace.patch.Publisher(folder), every

    def on_step_end(self, args, state, control, model=None, **more):
        if state.global_step % self.every == 0 and state.is_world_process_zero:
            path = self.publisher.publish({name: each.detach().bfloat16() for name, each in model.named_parameters()})
            print(path.name, sum(file.stat().st_size for file in path.iterdir()), "bytes", flush=True)


rows = [{"input_ids": (torch.arange(32) * n) % 97, "labels": (torch.arange(32) * n) % 97} for n in range(1, 65)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=2, n_positions=32))
how = {"max_steps": 12, "learning_rate": 1e-5, "save_strategy": "no", "report_to": [], "use_cpu": True}
arguments = TrainingArguments(output_dir=f"{sys.argv[1]}-trainer", disable_tqdm=True, **how)
Trainer(model, arguments, train_dataset=rows, callbacks=[Publish(sys.argv[1], 4)]).train()
