"""Supervised fine-tuning with TRL: its trainers are transformers.Trainer's, so `grace.torch.trainer` fits them all.

torchrun --nproc-per-node 2 examples/trl_torch.py
torchrun --nproc-per-node 2 examples/trl_torch.py --method eden --params '{"bits": 3}'

Model, tokenizer and text are made here: nothing is downloaded. With yours: AutoModelForCausalLM.from_pretrained(...).
"""

from __future__ import annotations

import argparse
import json
from itertools import product

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import grace.torch

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def texts() -> list[dict[str, str]]:
    """Sums and products modulo ten, in words."""
    pairs = list(product(range(10), repeat=2))
    sums = [f"{DIGITS[i]} plus {DIGITS[j]} is {DIGITS[(i + j) % 10]}" for i, j in pairs]
    products = [f"{DIGITS[i]} times {DIGITS[j]} is {DIGITS[i * j % 10]}" for i, j in pairs]
    return [{"text": text} for text in sums + products] * 4


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word."""
    words = ["<pad>", "<eos>", "is", "plus", "times", *DIGITS]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    parser = argparse.ArgumentParser(description="TRL's SFTTrainer with GRACE.")
    parser.add_argument("--method", default="blockint", help="compressor, as `grace methods` lists them")
    parser.add_argument("--params", type=json.loads, default={"bits": 4}, metavar="JSON")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default="trl_results", help="for checkpoints")
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, pad_token_id=0, eos_token_id=1))
    arguments = SFTConfig(
        output_dir=options.folder,
        per_device_train_batch_size=16,
        max_steps=options.steps,
        learning_rate=3e-3,
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(texts()), processing_class=tokenizer)
    grc = grace.torch.trainer(trainer, {"compressor": options.method, **options.params})
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, ratio {grc.report().ratio:.1f}")
        print(grc.report())


if __name__ == "__main__":
    main()
