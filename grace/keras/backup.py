"""BackupAndRestore: Keras's callback of this name, with the states of all workers' Graces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import keras

from grace import checkpoint
from grace.core import Transport
from grace.engine.session import Grace
from grace.keras.callbacks import GraceCallback, broadcast_model
from grace.keras.start import iterations_of

STATES = "states.json"
"""The file that records which steps of the Graces belong to which steps of their optimizers."""


class BackupAndRestore(GraceCallback, keras.callbacks.BackupAndRestore):
    """keras.callbacks.BackupAndRestore for several workers: a restarted `fit` continues on all of them, with residuals.

    Worker 0 writes weights, optimizer and epoch, and restores them for all. Each worker writes its Grace's state below
    ``backup_dir`` and reads its own; the folder is shared, or on each worker's disk. With ``save_freq="epoch"`` and
    batches that depend on the epoch alone, the restarted training is bit-equal to an uninterrupted one. With an
    integer, Keras begins the interrupted epoch again. Arguments as Keras's; ``grace``: as in `BroadcastCallback`.

    Raises ValueError on all workers if one cannot read its part of the backup.
    """

    def __init__(self, backup_dir: Any, *args: Any, grace: Grace | None = None, **kwargs: Any):
        super().__init__(grace, backup_dir, *args, **kwargs)
        self._folder = Path(backup_dir)

    def on_train_begin(self, logs: Any = None) -> None:
        transport, driven = self._transport(), self._wanted()
        epoch, steps, problem = self._restored(driven, logs) if transport.rank == 0 else (0, [], "")
        if transport.size > 1:
            epoch, steps, problem = json.loads(transport.exchange(json.dumps([epoch, steps, problem]))[0])
        if problem:
            raise ValueError(f"worker 0 cannot restore its backup from {self.backup_dir}: {problem}")
        if epoch is None:  # there is no backup
            return
        broadcast_model(self._kit, self.model, transport, 0)
        self.model._initial_epoch = epoch
        try:
            for number, (step, (_, grace)) in enumerate(zip(steps, driven, strict=False)):
                checkpoint.load(grace, self._folder / str(number), step)
        except (OSError, ValueError) as error:
            problem = str(error)
        self._agree(transport, problem, "restore its Grace from")

    def _restored(self, driven: Any, logs: Any) -> tuple[int | None, list[int], str]:
        # Returns the epoch (None: there is no backup), the steps of the Graces (empty for a backup of Keras's own
        # callback, whose missing residuals a warning names at the first step), and the error if the backup could not be
        # read.
        before, self.model._initial_epoch = self.model._initial_epoch, None
        try:
            super().on_train_begin(logs)
            return self.model._initial_epoch, self._steps().get(self._key(driven), []), ""
        except (OSError, ValueError) as error:
            return None, [], f"{type(error).__name__}: {error}"
        finally:
            if self.model._initial_epoch is None:
                self.model._initial_epoch = before

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        # Write states before weights, and keep the last two states: after a crash in between, the older one fits the
        # weights.
        transport, driven = self._transport(), self._wanted()
        problem = ""
        try:
            for number, (_, grace) in enumerate(driven):
                checkpoint.save(grace, self._folder / str(number))
        except OSError as error:
            problem = str(error)
        self._agree(transport, problem, "write its Grace to")
        if transport.rank == 0:
            steps = dict([*self._steps().items(), (self._key(driven), [grace.steps for _, grace in driven])][-2:])
            part = self._folder / f"{STATES}.part"
            part.write_text(json.dumps(steps))
            part.replace(self._folder / STATES)
            super()._save_model(*args, **kwargs)

    def on_train_end(self, logs: Any = None) -> None:
        transport = self._transport()
        if transport.rank == 0:
            super().on_train_end(logs)
        self._agree(transport, "", "")
        if self.delete_checkpoint:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _agree(self, transport: Transport, problem: str, what: str) -> None:
        # Wait for all workers; all raise if one has a problem.
        for rank, text in enumerate(transport.exchange(problem) if transport.size > 1 else [problem]):
            if text:
                raise ValueError(f"worker {rank} cannot {what} {self.backup_dir}: {text}")

    def _key(self, driven: Any) -> str:
        return " ".join(str(iterations_of(self._kit, optimizer)) for optimizer, _ in driven)

    def _steps(self) -> dict[str, list[int]]:
        path = self._folder / STATES
        return dict(json.loads(path.read_text())) if path.exists() else {}
