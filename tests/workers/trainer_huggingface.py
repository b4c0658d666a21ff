"""transformers.Trainer with grace.torch.trainer on two gloo workers: OUT [kill]. Saves the results of each run.

"kill": worker 1 is killed after the first step that follows a checkpoint.
"""

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset
from launch import error_of, leave_gloo, save
from support.sharding import ON_CPUS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.distributed.tensor import DTensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

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


def model(**changed):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 16, **changed}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == STEPS // 2 + 1 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Bypassing(Trainer):
    """Calls the module inside DistributedDataParallel, so bypasses DDP."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(self.model, inputs, return_outputs, num_items_in_batch)


def made(name, params=None, kind=Trainer, callbacks=(), tied=True, **changed):
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
    whole = model(tie_word_embeddings=tied)
    found = kind(whole, TrainingArguments(**settings), train_dataset=rows(64, 1), eval_dataset=rows(16, 2))
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

# Local training with rounds of two steps: the checkpoint after step three is within a round.
LOCAL = {"local": {"sync_every": 2}, **TOPK}
start = weights(made("local")[0])
alone, log, diloco = train("local", LOCAL, max_steps=5)
report = diloco.report()
found["local"] = (diloco.landed, report.ratio, losses(log), [each["grace_ratio"] for each in log if "loss" in each])
found["local weights"] = alone
resumed, _, again = train("local", LOCAL, str(out / "local" / f"checkpoint-{STEPS // 2}"), max_steps=5)
found["local resumed"] = (same(alone, resumed), again.landed, again.steps)

# TRL.
tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, **{f"w{i}": i + 2 for i in range(38)}}, "<pad>"))
tokenizer.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
texts = Dataset.from_list([{"text": " ".join(f"w{int(i) % 38}" for i in row["input_ids"])} for row in rows(64, 1)])


def sft(name, params=None, resume=None, steps=4):
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "save_steps": 2, "logging_steps": 1}
    settings |= {"max_steps": steps, "learning_rate": 1e-2, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    args = SFTConfig(str(out / name), max_length=16, bf16=False, **settings)
    trainer = SFTTrainer(model(), args, train_dataset=texts, processing_class=tokenizer)
    grc = None if params is None else grace.torch.trainer(trainer, params)
    trainer.train(resume_from_checkpoint=resume)
    return weights(trainer), trainer.state.log_history, grc


own, _, _ = sft("sft")
none, _, grc = sft("sft-none", {"compressor": "none", "min_numel": 0})
found["sft none"] = (same(own, none), grc.steps)
whole, _, _ = sft("sft-whole", TOPK)
resumed, _, grc = sft("sft-whole", TOPK, str(out / "sft-whole" / "checkpoint-2"))
found["sft resumed"] = (same(whole, resumed), grc.steps)
_, log, grc = sft("sft-int4", {"compressor": "blockint", "bits": 4, "min_numel": 0}, steps=12)
found["sft int4"] = (losses(log), grc.report().ratio, [each["grace_ratio"] for each in log if "loss" in each])

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
refused.model._tp_size = 2  # as from_pretrained(tp_plan="auto") sets it on two devices
assert refused.model.tp_size == 2
found["tensor parallel"] = error_of(grace.torch.trainer, refused, TOPK)
placed = model()
placed.hf_device_map = {"transformer": 0, "lm_head": 1}
placed = Trainer(placed, TrainingArguments(str(out / "refused"), report_to=[], use_cpu=True))
found["device map"] = error_of(grace.torch.trainer, placed, TOPK)
refused, _ = made("refused")
refused.args._n_gpu = 2
found["data parallel"] = error_of(grace.torch.trainer, refused, TOPK)
refused, _ = made("refused", auto_find_batch_size=True)
found["batch size"] = error_of(grace.torch.trainer, refused, TOPK)


# FSDP2. Accelerate offers it only on GPUs, so the test sets Accelerate's state by hand.
def sharded(name, params=None, resume=None, version=2, **changed):
    trainer, _ = made(name, tied=False, **changed)
    layers = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["GPT2Block"]}
    layers |= {"state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": False}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **layers)
    trainer.accelerator.state._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    trainer.is_fsdp_enabled = True
    grc = None if params is None else grace.torch.trainer(trainer, params)
    trainer.train(resume_from_checkpoint=resume)
    named = trainer.model.named_parameters()  # after the evaluation some are unsharded
    return {name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in named}, grc


found["fsdp1"] = error_of(sharded, "fsdp1", TOPK, version=1)
found["fsdp local"] = error_of(sharded, "fsdp-local", {"compressor": "none", "local": {"sync_every": 2}})
if ON_CPUS:
    own, _ = sharded("fsdp", save_strategy="no")
    none, grc = sharded("fsdp-none", {"compressor": "none", "min_numel": 0}, save_strategy="no")
    found["fsdp none"] = (same(own, none), grc.steps)
    params = {**TOPK, "parameters": {"compressor": "blockint", "bits": 8}}
    whole, grc = sharded("fsdp-whole", params)
    resumed, again = sharded("fsdp-whole", params, str(out / "fsdp-whole" / "checkpoint-3"))
    gathered = grc.report().parameters
    gathered = sum(each.bytes_dense for each in gathered) / sum(each.bytes_sent for each in gathered)
    found["fsdp resumed"] = (same(whole, resumed), again.steps, grc.report().ratio, gathered)
save(out, found["rank"], found)
leave_gloo()
