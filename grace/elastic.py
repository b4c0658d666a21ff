"""Horovod elastic: training continues, with its residuals, while workers join and leave.

    # or KerasState(model, epoch=0)
    state = grace.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

    @grace.elastic.run
    def train(state):
        ...
        state.commit()

A state commits, restores and syncs what Horovod's own states do, and the state of a Grace. After a change of workers,
every array is resized by its rule (`grace.core.Resize`): residuals of the remaining workers are added up and divided
among all workers. Only the residuals of lost workers are lost.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from grace import checkpoint
from grace.backends import get_backend
from grace.core.collectives import Gather
from grace.engine.session import Grace
from grace.local import DiLoCo
from grace.transports import get_transport

__all__ = ["KerasState", "TorchState", "run"]

Folder = str | os.PathLike[str] | None
# Matches TensorFlow's errors for a lost worker. Before an operation begins, the text is Horovod's; later it is gloo's
# (with its source file) or NCCL's, and only the operation's name shows that GRACE issued it.
_LOST = re.compile(r"Horovod|gloo/transport/|\{\{node (\S*/)?grace\.")


def TorchState(
    model: Any = None, optimizer: Any = None, grace: Grace | None = None, folder: Folder = None, **kwargs: Any
) -> Any:
    """A horovod.torch.elastic.TorchState that includes a Grace.

    ``grace``: by default that of a distributed optimizer; or a `grace.local.DiLoCo`. ``folder``: write every commit
    there, too, as with `grace.checkpoint.save`, so that a worker's commits outlive the worker. Use a new folder for
    each job, on a disk (or /dev/shm) that another worker of the machine, or all workers, can read. Other arguments are
    Horovod's: more models, optimizers and samplers by name, and plain objects. Create it before `run`; it sends no
    messages.
    """
    return _torch_state()(model, optimizer, grace, folder, **kwargs)


def KerasState(
    model: Any, optimizer: Any = None, grace: Grace | None = None, folder: Folder = None, **kwargs: Any
) -> Any:
    """As horovod.tensorflow.elastic.TensorFlowKerasState, but for Keras 3 and with a Grace.

    ``model``: a built model. ``optimizer``: by default the compiled model's. ``grace``: by default that of a
    distributed optimizer; or a `grace.local.DiLoCo`, which then gets the model's variables. ``folder``: as in
    `TorchState`.
    ``kwargs``: plain objects by name. Create your own tf.functions that average gradients inside the function that
    `run` wraps: a graph is valid for one number of workers, and raises InvalidArgumentError with another.
    """
    return _keras_state()(model, optimizer, grace, folder, **kwargs)


def run(train: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``train(state, ...)`` again from the last commit whenever workers were lost or have joined.

    Replaces horovod.torch.elastic.run and horovod.tensorflow.elastic.run, which miss some of TensorFlow's errors for a
    lost worker. ``state``: a `TorchState` or `KerasState`.
    """

    @functools.wraps(train)
    def running(state: Any, *args: Any, **kwargs: Any) -> Any:
        from horovod.common.elastic import run_fn

        hvd = importlib.import_module(f"horovod.{state.toolkit}")

        def begin_again() -> None:
            hvd.shutdown()
            hvd.init()

        return run_fn(functools.partial(_plainly, train), begin_again)(state, *args, **kwargs)

    return running


def _plainly(train: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> Any:
    # Raise HorovodInternalError where TensorFlow wrapped Horovod's error in its own, so that Horovod restarts. Raise
    # any other error unchanged: after a user's error, restarts would never end.
    from horovod.common.exceptions import HorovodInternalError

    try:
        return train(state, *args, **kwargs)
    except Exception as error:
        tf = sys.modules.get("tensorflow")
        lost = () if tf is None else (tf.errors.UnknownError, tf.errors.AbortedError)
        if not isinstance(error, lost) or not _LOST.search(str(error)):
            raise
        raise HorovodInternalError(error) from error


class _Carrying:
    """Adds a Grace to one of Horovod's states; must precede that class among the bases."""

    toolkit = ""

    def carry(self, grace: Grace | None, optimizer: Any, folder: Folder) -> None:
        """Set the Grace, by default the optimizer's."""
        if grace is None:
            held = getattr(optimizer, "_grace", None)
            grace = held if isinstance(held, Grace) else getattr(held, "grace", None)
        if grace is None:
            raise ValueError(
                "the optimizer is not distributed by grace: wrap it in DistributedOptimizer first, or name the Grace, "
                "as grace=grc"
            )
        self.grace, self._folder = grace, folder
        self._commits = [grace.state_dict()]  # states at the last two commits: a worker may die while others commit
        self._restored = False  # after a restore: sync the last commit, not the current state
        self._met = False  # whether this worker has synced with others before

    def save(self) -> None:
        super().save()  # type: ignore[misc]
        self._commits = [*self._commits[-1:], self.grace.state_dict()]
        if self._folder is not None and self._met:
            checkpoint.save(self.grace, self._folder)

    def restore(self) -> None:
        super().restore()  # type: ignore[misc]
        self._restored = True

    def reset(self) -> None:
        from grace.transports.horovod import SETS

        super().reset()  # type: ignore[misc]
        SETS.clear()  # process sets are invalid without their workers
        if not self._restored:
            self._commits = [self.grace.state_dict()]

    def sync(self) -> None:
        super().sync()  # type: ignore[misc]
        self._follow()
        self._restored, self._met = False, True
        self.save()  # a common starting point

    def check_host_updates(self) -> None:
        from horovod.common.exceptions import HostsUpdatedInterrupt

        try:
            super().check_host_updates()  # type: ignore[misc]
        except HostsUpdatedInterrupt:
            # Even if workers only leave, the remaining ones must sync.
            raise HostsUpdatedInterrupt(skip_sync=False) from None

    def _follow(self) -> None:
        # Called once all workers have joined, surviving ones with their states: agree on a commit, and load the states
        # of this commit.
        transport: Any = get_transport("horovod").bind(get_backend(self.toolkit))
        transport.timeout = self.grace.options.timeout
        places = [[state[key] for key in ("step", "world_size", "rank")] for state in self._commits]
        told = [json.loads(text) for text in transport.exchange(json.dumps([self._met, places]))]
        met = any(here for here, _ in told)
        if met and not told[0][0]:
            raise RuntimeError(
                "worker 0 is new, so its weights are the initial ones: restart from a checkpoint. Horovod gives rank 0 "
                "to a surviving worker as long as that worker's host is up"
            )
        if not met and [has[-1][1:] for _, has in told] == [[len(told), rank] for rank in range(len(told))]:
            self._check_folder(places[-1][0])
            self.grace.settle()  # the job starts: each worker keeps its initial state
            return
        counting = [has if known or not met else [] for known, has in told]  # ignore the states of new workers
        step, before = _common(counting)
        sent = [state for state in self._commits if (state["step"], state["world_size"]) == (step, before)][-1:]
        sent = sent if counting[transport.rank] else []
        if self._folder is not None:
            here = [rank for has in counting for when, world, rank in has if (when, world) == (step, before)]
            sent += checkpoint.left_behind(self._folder, step, here, before)
        data = transport.xp.asarray(bytearray(checkpoint.to_bytes({"states": sent})), "uint8")
        (received,) = transport.start([Gather((data,), ragged=True)], "states")()
        bodies = [checkpoint.from_bytes(transport.xp.to_numpy(body).tobytes()) for (body,) in received]
        states = list({state["rank"]: state for body in bodies for state in body["states"]}.values())
        self.grace.reset("horovod", states)
        self.grace.settle()
        if len(states) < before and transport.rank == 0:
            warnings.warn(
                f"{before - len(states)} of {before} workers are lost, and so are their residuals; {transport.size} "
                f"continue from step {step}. With folder=..., only uncommitted residuals are lost",
                stacklevel=2,
            )

    def _check_folder(self, step: int) -> None:
        later = [each for each in checkpoint.numbers(self._folder) if each > step] if self._folder is not None else []
        if later:
            raise ValueError(
                f"{self._folder} has commits of steps {later}, and this job starts at {step}: they belong to another "
                "job. Give each job a separate folder"
            )


def _common(commits: list[list[list[int]]]) -> tuple[int, int]:
    # From every worker's commits, (step, number of workers, rank), choose the valid step and number of workers: worker
    # 0's last step, which matches the weights. Worker 0 may have committed it twice, before and after a change of
    # workers: then choose the number that most workers have.
    step = commits[0][-1][0]
    worlds = [world for when, world, _ in commits[0] if when == step]
    return step, max(worlds, key=lambda world: sum([step, world] in [each[:2] for each in has] for has in commits))


@functools.cache
def _torch_state() -> Any:
    import torch
    from horovod.torch.elastic import TorchState as Base
    from horovod.torch.elastic.state import ModelStateHandler, OptimizerStateHandler

    from grace.torch import broadcast_optimizer_state, broadcast_parameters

    class Model(ModelStateHandler):
        def sync(self) -> None:
            # Horovod's function does not compare workers, and lacks some dtypes
            broadcast_parameters(self.value.state_dict())

    class Optimizer(OptimizerStateHandler):
        def sync(self) -> None:
            broadcast_optimizer_state(self.value)  # Horovod's function steps an optimizer without state

    class TorchState(_Carrying, Base):
        toolkit = "torch"

        def __init__(self, model: Any, optimizer: Any, grace: Grace | None, folder: Folder, **kwargs: Any):
            super().__init__(model=model, optimizer=optimizer, **kwargs)
            for name, handler in self._handlers.items():
                if isinstance(handler.value, torch.optim.Optimizer):
                    self._handlers[name] = Optimizer(handler.value)
                elif isinstance(handler.value, torch.nn.Module):
                    self._handlers[name] = Model(handler.value)
            self.carry(grace, optimizer, folder)

        def reset(self) -> None:
            super().reset()
            for handler in self._handlers.values():
                if hasattr(handler.value, "_grace"):
                    handler.value._grace.reset()

    return TorchState


@functools.cache
def _keras_state() -> Any:
    from horovod.common.elastic import ObjectState
    from horovod.tensorflow.functions import broadcast_object
    from horovod.tensorflow.mpi_ops import rank

    from grace.tensorflow import broadcast_variables, build, local_variables

    class KerasState(_Carrying, ObjectState):
        toolkit = "tensorflow"

        def __init__(self, model: Any, optimizer: Any, grace: Grace | None, folder: Folder, **kwargs: Any):
            self.model = model
            self.optimizer = model.optimizer if optimizer is None else optimizer
            if not model.built:
                raise ValueError("the model must be built first: give it an Input, or call it once")
            if not self.optimizer.built:
                self.optimizer.build(model.trainable_variables)
            super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)
            if isinstance(grace, DiLoCo) and not grace.built:
                local_variables(grace, model.trainable_variables, model.non_trainable_weights)
            self.carry(grace, self.optimizer, folder)
            if isinstance(self.grace, Grace):
                build(self.grace, model.trainable_variables)
            self.save()

        @property
        def _variables(self) -> list[Any]:
            return [*self.model.variables, *self.optimizer.variables]

        def save(self) -> None:
            super().save()
            self._values = [variable.numpy() for variable in self._variables]

        def restore(self) -> None:
            super().restore()
            for variable, value in zip(self._variables, self._values, strict=True):
                variable.assign(value)

        def sync(self) -> None:
            broadcast_variables(self._variables)
            super().sync()

        def reset(self) -> None:
            super().reset()
            self.model.train_function = None  # its graph belongs to the previous workers

    return KerasState
