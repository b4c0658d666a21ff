"""`LightningCallback`: Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from grace.engine.session import Grace
from grace.torch.checkpoint import GatheredState
from grace.torch.trainers.exchange import Exchange, figures

if TYPE_CHECKING or find_spec("lightning") is not None:
    from lightning.pytorch import Callback
else:
    from pytorch_lightning import Callback

KEY = "grace"


class LightningCallback(Callback):
    """``Trainer(strategy="ddp", callbacks=[grace.torch.LightningCallback({...})])``, on CPUs and GPUs.

    ``params``: as for `grace.grace_from_params`, or a Grace. With ModelParallelStrategy and `fully_shard` in the
    module's ``configure_model``, the communicator is "reducescatter" by default, and "parameters" compresses the
    all-gather, as in `grace.torch.fsdp`.

    Every ``log_every_n_steps`` steps ``grace_ratio`` and ``grace_bytes_sent`` (by worker 0, since the training began or
    was resumed) go to the trainer's loggers. A checkpoint holds the states of all workers, and
    ``fit(ckpt_path=...)`` gives each its own, or reshards them for another number of workers; meanwhile each worker
    holds all states in host memory. A second ``fit`` without ``ckpt_path`` begins with new states, and needs a
    dictionary.

    In ``fit`` raises ValueError for strategies without a hook (DeepSpeed, FSDP1) and for checkpoints without a state;
    RuntimeError after the first step if no gradient has passed through DistributedDataParallel.
    """

    def __init__(self, params: Mapping[str, Any] | Grace):
        super().__init__()
        self._params = params
        self._loaded: dict[str, Any] | None = None
        self._exchange: Exchange | None = None
        self._exchanges = False

    @property
    def grace(self) -> Grace:
        """The Grace, for its report; RuntimeError before ``fit``."""
        if self._exchange is None:
            raise RuntimeError("the Grace is made when fit begins")
        return self._exchange.averages

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the Grace, anew for each fit, as Lightning wraps the model anew."""
        if stage == "fit":
            self._loaded, self._exchanges = None, False
            self._exchange = Exchange(self._params, type(trainer.strategy).__name__ == "ModelParallelStrategy")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the wrapped model, and load the state that a checkpoint held."""
        assert self._exchange is not None
        self._exchanges = self._exchange.attach(trainer.strategy.model)
        self._load()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the figures."""
        if self._exchanges and trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(figures(self.grace), on_step=True, on_epoch=False)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add all workers' states."""
        if self._exchanges:
            checkpoint[KEY] = GatheredState(self.grace).state_dict()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the states until the model is attached."""
        if trainer.state.fn == "fit":
            self._loaded = {key: checkpoint[key] for key in (KEY,) if key in checkpoint}
            self._load()  # ModelParallelStrategy loads after `on_fit_start`

    def _load(self) -> None:
        if not self._exchanges or self._loaded is None:
            return
        if KEY not in self._loaded:
            raise ValueError(
                "this checkpoint was written without grace.torch.LightningCallback: train without ckpt_path, or load "
                "its weights alone"
            )
        GatheredState(self.grace).load_state_dict(self._loaded[KEY])
        self._loaded = None
