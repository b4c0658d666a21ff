"""`trainer`: Hugging Face's Trainer, and TRL's, which are subclasses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from grace.engine.session import Grace
from grace.local import DiLoCo
from grace.torch.trainers.exchange import Exchange, figures
from grace.torch.trainers.local import LocalTraining

PLAIN = {"evaluation_mode": True}
"""Arguments with which Accelerate does not wrap a model in DistributedDataParallel."""


def trainer(trainer: Trainer, params: Mapping[str, Any] | Grace) -> Grace | DiLoCo:
    """Compress what a transformers.Trainer exchanges; every TRL trainer is one. Call it before ``trainer.train()``.

    ``params``: as for `grace.grace_from_params`, or a Grace. With an FSDP2 model (``TrainingArguments(fsdp=True)``) the
    communicator is "reducescatter" by default, and "parameters" compresses the all-gather, as in `grace.torch.fsdp`.
    With ``{"local": {"sync_every": 100}, ...}``, as for `grace.local.from_params`, the model is not wrapped: workers
    begin with worker 0's parameters, step on their own, average every 100 steps, and end with one model. Returns the
    Grace, or the `grace.local.DiLoCo`, for its report.

    The trainer's logs get ``grace_ratio`` and ``grace_bytes_sent`` (by this worker, since the training began or was
    resumed). Each worker writes its state into the trainer's checkpoints, ``checkpoint-N/grace``; in local training
    also its model and optimizer, since those that the trainer saves are worker 0's.
    ``train(resume_from_checkpoint=...)`` loads it, also with another number of workers. Gradients that are accumulated
    are exchanged once per step. A single process sends nothing.

    Raises TypeError for other trainers; ValueError, on all workers, for DeepSpeed, DataParallel, FSDP1, models that
    transformers loads in parts, ``auto_find_batch_size``, and a second call. ``train`` raises RuntimeError after the
    first step if no gradient has passed through DistributedDataParallel.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"a transformers.Trainer is needed, not {type(trainer).__name__}")
    if reason := _refused(trainer):
        raise ValueError(f"grace.torch.trainer cannot compress what this trainer exchanges: {reason}")
    exchange: Exchange | LocalTraining
    if isinstance(params, Mapping) and "local" in params and not trainer.is_fsdp_enabled:
        exchange = LocalTraining(params)
        prepare = trainer.accelerator.prepare_model
        trainer.accelerator.prepare_model = lambda *args, **options: prepare(*args, **{**options, **PLAIN})
    else:
        exchange = Exchange(params, trainer.is_fsdp_enabled)
    callback = _Callback(trainer, exchange)
    trainer.add_callback(callback)
    trainer.train = callback.train
    trainer.log = callback.log
    return exchange.averages


def _refused(trainer: Any) -> str:
    # Why this trainer cannot train with GRACE; empty if it can.
    if any(isinstance(each, _Callback) for each in trainer.callback_handler.callbacks):
        return "it has a Grace already; one call is enough"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed averages gradients itself and offers no hook. Leave out `deepspeed`; use DDP, or fsdp=True"
    if trainer.args.n_gpu > 1:
        return "one process drives several GPUs (DataParallel), which sends no gradients. Start one per GPU by torchrun"
    in_parts = getattr(trainer, "is_distributed_loading_by_transformers", False)
    if in_parts or (getattr(trainer.model, "tp_size", None) or 1) > 1:
        return "transformers loaded the model in parts, and exchanges them itself. Load the whole model; use fsdp=True"
    if trainer.is_model_parallel:
        return "the model lies on several devices (device_map). Load it on one; use fsdp=True if it does not fit"
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        return "FSDP1 offers no hook for sharded gradients. Set fsdp_config={'version': 2}"
    if trainer.args.auto_find_batch_size:
        return "auto_find_batch_size repeats failed passes on one worker alone. Set per_device_train_batch_size"
    return ""


class _Callback(TrainerCallback):
    def __init__(self, trainer: Any, exchange: Exchange | LocalTraining):
        self.exchange = exchange
        self._trainer, self._train, self._log = trainer, trainer.train, trainer.log
        self._resume: Any = None
        self._exchanges = False

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own method; remembers the checkpoint."""
        self._resume = resume_from_checkpoint
        return self._train(resume_from_checkpoint, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        """The trainer's own method, with the figures of the exchange."""
        if self._exchanges and not {"loss", "train_loss"}.isdisjoint(logs):
            logs = {**logs, **figures(self.exchange.averages)}
        return self._log(logs, *args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        model = self._trainer.model_wrapped
        if isinstance(self.exchange, LocalTraining):
            optimizer = self._trainer.optimizer
            self._exchanges = self.exchange.attach(model, getattr(optimizer, "optimizer", optimizer))
        else:
            self._exchanges = self.exchange.attach(model)
        resume, self._resume = self._resume, None
        if resume and self._exchanges:
            self.exchange.load(get_last_checkpoint(args.output_dir) if resume is True else resume)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._exchanges and not args.save_only_model:
            self.exchange.save(f"{args.output_dir}/{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if isinstance(self.exchange, LocalTraining):
            self.exchange.averages.finish()
