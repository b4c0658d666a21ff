"""Keras callbacks: broadcasts, averaged metrics, policies, records, gossip."""

from __future__ import annotations

import json
import numbers
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from grace.core import Transport
from grace.engine.session import Grace
from grace.gossip import Gossip
from grace.keras.broadcast import assign_from, compare, transport_of
from grace.keras.checks import check_grace, process_set_of
from grace.keras.names import EXCHANGED, names_of
from grace.keras.start import compare_starts, iterations_of
from grace.keras.toolkits import Toolkit, toolkit, unconverted


class GraceCallback(keras.callbacks.Callback):
    """A callback for the Graces of the model's optimizers, or for a given Grace."""

    def __init__(self, grace: Grace | None = None, *args: Any, **kwargs: Any):
        self._kit = toolkit(f"grace.keras.{type(self).__name__}")
        if grace is not None:
            check_grace(grace, type(self).__name__)
        super().__init__(*args, **kwargs)
        self._grace = grace

    def _driven(self) -> list[tuple[Any, Grace]]:
        # Pairs of an optimizer and its Grace. A model with its own compile (a GAN) may have several.
        found = {id(each._grace): (each, each._grace) for each in optimizers_of(self.model) if hasattr(each, "_grace")}
        if self._grace is not None:
            return [found.get(id(self._grace), (getattr(self.model, "optimizer", None), self._grace))]
        return list(found.values())

    def _wanted(self) -> list[tuple[Any, Grace]]:
        if not (driven := self._driven()):
            raise ValueError(
                "no optimizer of the model is distributed: wrap the model's optimizer, or one that is an attribute of "
                f"the model, in DistributedOptimizer, or name the Grace, as {type(self).__name__}(grace=grc)"
            )
        return driven

    def _transport(self) -> Any:
        graces = [grace for _, grace in self._driven()]
        if len({process_set_of(grace) for grace in graces}) > 1:
            raise ValueError(
                "the model's optimizers average over different workers: name the Grace whose workers are meant, as "
                f"{type(self).__name__}(grace=grc)"
            )
        return transport_of(self._kit, graces[0] if graces else None)


class BroadcastCallback(GraceCallback):
    """Start ``model.fit`` from worker ``root_rank``'s weights and optimizer state.

    ``grace``: its workers take part, and ``root_rank`` is a rank among them; by default the workers of the model's
    distributed optimizers, or all workers if there are none. Optimizers are the model's own and those that are
    attributes of the model or of its layers. A model that its first batch builds is broadcast after that batch. Raises
    ValueError on all workers, naming the difference, if their variables differ.

    It warns after the first batch if no worker averaged gradients of the model, for example if a loaded or copied
    optimizer was not wrapped again. When the first epoch begins, it raises ValueError on all workers if their epochs or
    steps differ, for example if only one worker has restored a backup.
    """

    def __init__(self, root_rank: int = 0, grace: Grace | None = None):
        if isinstance(root_rank, Grace):
            raise TypeError("root_rank comes before the Grace: BroadcastCallback(0, grace=grc)")
        super().__init__(grace)
        self.root_rank = root_rank
        self._done = self._looked = self._compared = False

    def on_train_begin(self, logs: Any = None) -> None:
        if self.model.jit_compile and not self._kit.breaks_graphs:
            raise ValueError("Horovod's operations have no XLA form: compile the model with jit_compile=False")
        self._looked = self._compared = False
        self._done = self._broadcast(first=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # Compare now, not earlier: a callback that restores a backup may come later in the list.
        if not self._compared:
            steps = ", ".join(str(iterations_of(self._kit, each)) for each in optimizers_of(self.model))
            self._compare(f"in epoch {epoch} at step {steps}")

    def on_train_end(self, logs: Any = None) -> None:
        if not self._compared:
            self._compare("with no epoch left")

    def _compare(self, start: str) -> None:
        self._compared = True
        compare_starts(
            self._transport(),
            start,
            "give fit the same epochs, and restore one backup on every worker, as grace.keras.BackupAndRestore does",
        )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._done:
            self._done = self._broadcast()
        if not self._looked:
            self._looked = True
            self._look()

    def _broadcast(self, first: bool = False) -> bool:
        # Returns whether everything was broadcast; unbuilt layers must wait for their first batch.
        transport = self._transport()
        if not isinstance(self.root_rank, int) or not 0 <= self.root_rank < transport.size:
            raise ValueError(f"root_rank={self.root_rank!r}: there are workers 0 to {transport.size - 1}")
        whole = not first or all(layer.built for layer in self.model._flatten_layers())
        return broadcast_model(self._kit, self.model, transport, self.root_rank, whole) and whole

    def _look(self) -> None:
        variables = self.model.trainable_variables
        if variables and self._transport().size > 1 and not any(self._kit.identity(v) in EXCHANGED for v in variables):
            warnings.warn(
                "no gradient of this model was averaged over the workers in its first batch: each trains by itself. An "
                "optimizer that was loaded or copied is a plain one: wrap it in DistributedOptimizer",
                stacklevel=2,
            )


class MetricAverageCallback(GraceCallback):
    """Average the metrics of each epoch over all workers, by name. Put it before callbacks that use them.

    Numbers become floats, and arrays (a metric per class) float64 arrays of the same shape. The mean is computed in
    float64 over the workers that have the metric, and every worker gets it, even one without. Other values stay
    unchanged. A value that is not finite makes the mean not finite; a warning on worker 0 names the metric and the
    workers, once. ``grace``: as in `BroadcastCallback`. Raises ValueError on all workers if arrays of one name differ
    in shape.
    """

    def __init__(self, grace: Grace | None = None):
        super().__init__(grace)
        self._not_finite: set[str] = set()  # metrics that a warning has named

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        mine = {str(key): _plain(value) for key, value in (logs or {}).items()}
        mine = {key: value for key, value in mine.items() if value is not None}
        transport = self._transport()
        texts = [json.dumps(mine)] if transport.size == 1 else transport.exchange(json.dumps(mine))
        workers = [json.loads(text) for text in texts]
        for key in dict.fromkeys(key for worker in workers for key in worker):
            ranks = [rank for rank, worker in enumerate(workers) if key in worker]
            values = [np.array(workers[rank][key], np.float64) for rank in ranks]
            for rank, value in zip(ranks, values, strict=True):
                if value.shape != values[0].shape:
                    raise ValueError(
                        f"metric {key!r} has shape {list(values[0].shape)} on worker {ranks[0]} and "
                        f"{list(value.shape)} on worker {rank}: give every worker the same metrics"
                    )
            bad = [rank for rank, value in zip(ranks, values, strict=True) if not np.isfinite(value).all()]
            if bad and transport.rank == 0 and key not in self._not_finite:
                self._not_finite.add(key)
                where = "any worker" if bad == ranks else f"worker {', '.join(map(str, bad))}"
                warnings.warn(f"metric {key!r} is not finite on {where}, so neither is its mean", stacklevel=2)
            if logs is not None:
                with np.errstate(invalid="ignore", over="ignore"):
                    mean = np.mean(values, axis=0)
                logs[key] = mean if mean.ndim else float(mean)


class PolicyCallback(GraceCallback):
    """Report the end of each step and epoch to a Grace's policy. Put it after callbacks that set the learning rate.

    An epoch's end is reported when the next epoch begins, since only then is the next learning rate known, or when
    training ends. ``grace``: by default those of the model's optimizers, each with its optimizer's learning rate.
    Raises ValueError if there is none.
    """

    def __init__(self, grace: Grace | None = None):
        super().__init__(grace)
        self._rates: dict[int, float] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for _, grace in self._wanted():
            grace.tune()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for optimizer, grace in self._wanted():
            if optimizer is None:
                raise ValueError("the model has no optimizer: PolicyCallback reads its learning rate")
            rate = float(optimizer.learning_rate)
            self._end(grace, rate)
            self._rates[id(grace)] = rate

    def on_train_end(self, logs: Any = None) -> None:
        for _, grace in self._wanted():
            self._end(grace, self._rates.get(id(grace)))

    def _end(self, grace: Grace, next_rate: float | None) -> None:
        if grace.steps_this_epoch:
            grace.end_epoch(self._rates.get(id(grace)), next_rate)


class RecordCallback(GraceCallback):
    """Write the record (`Options.record`) during ``fit``, which a graph cannot do itself.

    Writes a line after every ``record_every`` steps (with ``steps_per_execution``, after the call that includes the
    last of these steps), one after each epoch with worker 0's metrics (``loss``, ``val_accuracy``), and one for the
    last steps when training ends. ``grace``: by default those of the model's optimizers that have a record. Raises
    ValueError if none has.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        graces = [grace for _, grace in self._wanted()]
        # A Grace given explicitly must have a record; otherwise `Grace.record` raises.
        self._graces = [grace for grace in graces if grace.options.record] or graces
        self._written = {id(grace): grace.steps for grace in self._graces}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for grace in self._graces:
            before, now, every = self._written[id(grace)], grace.steps, grace.options.record_every
            if now // every > before // every:
                grace.record()
                self._written[id(grace)] = now

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        metrics = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, numbers.Real)}
        for grace in self._graces:
            grace.record(**metrics)

    def on_train_end(self, logs: Any = None) -> None:
        for grace in self._graces:
            grace.record()


def broadcast_model(kit: Toolkit, model: Any, transport: Transport, root_rank: int, whole: bool = True) -> bool:
    """Send a model's weights and, if it is ``whole``, its optimizers' variables. Returns whether there were any."""
    variables, optimizer = list(model.weights), model.optimizer
    if whole and variables:
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        variables += [variable for each in optimizers_of(model) for variable in each.variables]
    variables = list({kit.identity(variable): variable for variable in variables}.values())
    if compare(kit, variables, transport, root_rank) and transport.size > 1:
        assign_from(kit, variables, transport, root_rank)
    return bool(variables)


@unconverted
def gossip_variables(gossip: Gossip, variables: Sequence[Any]) -> None:
    """Mix variables between neighbours, once; the first call builds their state. Call it eagerly, after a step.

    Raises RuntimeError inside a graph, since which side of a matrix is sent depends on the round.
    """
    kit = toolkit("grace.keras.gossip_variables", variables)
    if kit.inside_graph():
        raise RuntimeError("gossip_variables is no part of a graph: call it after the tf.function that steps")
    named = dict(zip(names_of(kit, variables), variables, strict=True))
    with kit.inside():
        values = {name: kit.tensor(variable) for name, variable in named.items()}
        if not gossip.built:
            gossip.build(values)
        for name, mixed in gossip.step(values).items():
            named[name].assign(mixed)


class GossipCallback(keras.callbacks.Callback):
    """Mix the model's trainable variables between neighbours after each training step in ``fit``.

    Use a plain optimizer: gradients stay local. With ``steps_per_execution`` above 1, workers mix once per execution.
    Put `BroadcastCallback` before it, so that all workers start from the same variables.
    """

    def __init__(self, gossip: Gossip):
        self._kit = toolkit("grace.keras.GossipCallback")
        super().__init__()
        self._gossip = gossip

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        EXCHANGED.update(map(self._kit.identity, self.model.trainable_variables))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        gossip_variables(self._gossip, self.model.trainable_variables)


def optimizers_of(model: Any) -> list[Any]:
    """A model's optimizers: its own, and those that are attributes of it or its layers, sorted by name.

    An optimizer inside a LossScaleOptimizer is not listed separately.
    """
    if model is None:
        return []
    found = {id(model.optimizer): model.optimizer} if getattr(model, "optimizer", None) is not None else {}
    for part in [model, *model._flatten_layers(include_self=False)]:
        for _, value in sorted(vars(part).items()):
            found.update({id(each): each for each in _optimizers_in(value)})
    inside = {id(each.inner_optimizer) for each in found.values() if hasattr(each, "inner_optimizer")}
    return [each for key, each in found.items() if key not in inside]


def _optimizers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, Mapping):
        yield from (each for each in value.values() if isinstance(each, keras.optimizers.Optimizer))
    elif isinstance(value, (list, tuple)):
        yield from (each for each in value if isinstance(each, keras.optimizers.Optimizer))


def _plain(value: Any) -> Any:
    # The value as a number or nested lists of numbers; None if it is neither a number nor an array.
    if isinstance(value, numbers.Real):
        return float(value)
    value = value.detach().cpu() if hasattr(value, "detach") else value
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    return array.astype(np.float64).tolist() if array.dtype.kind in "fiub" else None
