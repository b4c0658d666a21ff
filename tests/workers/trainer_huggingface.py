"""transformers.Trainer with grace.torch.trainer on two gloo workers: OUT [kill]. Saves what each run left.

"kill": worker 1 is killed after the first step that follows a checkpoint.
"""

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import torch
from launch import error_of, leave_gloo, save
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import grace.torch

out, kill = Path(sys.argv[1]), sys.argv[2:] == ["kill"]
torch.set_num_threads(1)
logging.getLogger("transformers").setLevel(logging.ERROR)
STEPS = 6
TOPK = {"compressor": "topk", "compress_ratio": 0.1, "memory": "residual", "min_numel": 0}


def rows(number, seed):
    """Sentences that count upwards, so that there is something to learn."""
    starts = torch.randint(0, 40, (number,), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": (s + torch.arange(12)) % 40, "labels": (s + torch.arange(12)) % 40} for s in starts]


def model():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == STEPS // 2 + 1 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Bypassing(Trainer):
    """Calls the module inside DistributedDataParallel."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(self.model, inputs, return_outputs, num_items_in_batch)


def made(name, params=None, kind=Trainer, callbacks=(), **changed):
    settings = {
        "output_dir": str(out / name),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "max_steps": STEPS,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": STEPS // 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **changed,
    }
    found = kind(model(), TrainingArguments(**settings), train_dataset=rows(64, 1), eval_dataset=rows(16, 2))
    for callback in callbacks:
        found.add_callback(callback)
    grc = None if params is None else grace.torch.trainer(found, params)
    return found, grc


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


def train(name, params=None, resume=None, **changed):
    trainer, grc = made(name, params, **changed)
    trainer.train(resume_from_checkpoint=resume)
    return weights(trainer), trainer.state.log_history, grc


def losses(log):
    return [each["loss"] for each in log if "loss" in each]


if kill:
    with suppress(RuntimeError):  # worker 0 loses its connection
        train("killed", TOPK, callbacks=[Kill()])
    os._exit(1)

found = {}
own, log, _ = train("own")
none, _, grc = train("none", {"compressor": "none", "min_numel": 0})
found["rank"] = torch.distributed.get_rank()
found["none"] = (same(own, none), grc.steps)
found["names"] = sorted(grc.names) == sorted(own)

quantised, log, grc = train("int4", {"compressor": "blockint", "bits": 4, "min_numel": 0}, max_steps=20)
report = grc.report()
found["int4"] = (losses(log), [each for each in log if "grace_ratio" in each], report.bytes_sent, report.bytes_dense)

whole, _, grc = train("whole", TOPK)
residuals = [float(each.residual_norm) for each in grc.report().tensors]
resumed, log, again = train("whole", TOPK, str(out / "whole" / f"checkpoint-{STEPS // 2}"))
found["resumed"] = (same(whole, resumed), again.steps, [float(e.residual_norm) for e in again.report().tensors])
found["residuals"] = residuals
after, log, _ = train("killed", TOPK, True)
found["killed"] = (same(whole, after), len(losses(log)))
lossy, _, _ = train("lossy", TOPK, save_strategy="no")
found["files matter"] = not same(own, whole) and same(lossy, whole)

# Refusals, before training; and a step without an exchange.
bypassing, _ = made("bypassing", TOPK, kind=Bypassing)
found["bypass"] = (error_of(bypassing.train), bypassing.state.global_step)
missing, _ = made("own", TOPK)
found["missing"] = error_of(missing.train, resume_from_checkpoint=True)
found["twice"] = error_of(grace.torch.trainer, missing, TOPK)
found["no trainer"] = error_of(grace.torch.trainer, model(), TOPK)
for name, attribute in (("deepspeed", "is_deepspeed_enabled"), ("parts", "is_distributed_loading_by_transformers")):
    refused, _ = made("refused")
    setattr(refused, attribute, True)
    found[name] = error_of(grace.torch.trainer, refused, TOPK)
refused, _ = made("refused")
refused.args._n_gpu = 2
found["data parallel"] = error_of(grace.torch.trainer, refused, TOPK)
refused, _ = made("refused", auto_find_batch_size=True)
found["batch size"] = error_of(grace.torch.trainer, refused, TOPK)
save(out, found["rank"], found)
leave_gloo()
