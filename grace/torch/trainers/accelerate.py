"""`AccelerateHook`: Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from grace.engine.session import Grace
from grace.torch.trainers.exchange import Exchange


class AccelerateHook:
    """For Accelerate: ``accelerator.ddp_handler = grace.torch.AccelerateHook(grc, accelerator)`` before ``prepare``.

    ``grace``: a Grace, or the dictionary for `grace.grace_from_params`. The model that ``prepare`` wraps in
    DistributedDataParallel exchanges through it, under its own parameter names; one model per hook.
    ``accelerator``: keeps the DDP options of its DistributedDataParallelKwargs, and makes ``save_state`` write one file
    per worker into the folder ``grace`` of the checkpoint, which ``load_state`` loads, also with another number of
    workers. Without it DDP has its default options, and checkpoints hold no state of the Grace.

    Raises ValueError for a handler that has a communication hook; RuntimeError after an optimizer's first step if no
    gradient has passed through the prepared model. With FSDP2 call `grace.torch.compress` after ``prepare`` instead.
    """

    def __init__(self, grace: Grace | Mapping[str, Any], accelerator: Any = None):
        self._exchange, self._options = Exchange(grace), dict[str, Any]()
        self.grace = self._exchange.averages
        """The Grace, for its report."""
        if accelerator is None:
            return
        if (handler := accelerator.ddp_handler) is not None:
            hook = getattr(handler, "comm_hook", "no")
            if getattr(hook, "value", hook) != "no":
                raise ValueError(
                    f"the accelerator's handler has comm_hook={hook!r}, but DDP takes one hook: leave it out"
                )
            self._options = handler.to_kwargs()
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: self._exchange.save(folder))
        accelerator.register_load_state_pre_hook(lambda models, folder: self._exchange.load(folder))

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments of DistributedDataParallel; Accelerate calls this."""
        return dict(self._options)

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Attach to a new model; Accelerate calls this."""
        self._exchange.attach(model)
