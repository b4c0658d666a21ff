"""The exchange of gradients as an optax transformation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from grace.core import Array
from grace.engine.report import Report
from grace.jax import means
from grace.jax.means import Config, Residuals
from grace.jax.plan import Axes


class ExchangeState(NamedTuple):
    """State of `exchange`, a pytree; see `specs`."""

    count: Array
    """Number of steps, int32[]."""
    nonfinite: Array
    """Number of means so far that were not finite, int32[]."""
    residuals: Residuals


class Exchange(optax.GradientTransformation):
    """An optax transformation, with `report`."""

    config: Config
    axis_name: str | Axes
    mesh: Any

    def report(self, params: Any) -> Report:
        """The bytes of one step, from shapes alone (`grace.jax.report`)."""
        return means.report(params, self.config, self.axis_name, self.mesh)


def exchange(config: Config, axis_name: str | Axes = "data", mesh: Any = None) -> Exchange:
    """An `optax.GradientTransformation` that turns each device's own gradients into compressed means over all devices.

        tx = optax.chain(grace.jax.exchange({"compressor": "eden", "bits": 3}, axis_name="data"), optax.adamw(1e-3))

    Call ``tx.init`` outside of `jax.shard_map`, which makes residuals with a leading axis of the mesh. Call
    ``tx.update`` inside, with `grace.jax.specs` of the state as specs. ``config``: as for `grace.grace_from_params`.
    ``axis_name``: an axis of the mesh, or two, machines first, then the devices of each. ``mesh``: by default that of
    `jax.set_mesh`.

    Nothing in a compiled step raises an error: a mean that is not finite is counted in the state, `ExchangeState`. It
    leaves its tensor's residuals unchanged; ``nonfinite="zero"`` makes it 0, and "raise" is refused by ValueError.
    """
    axes = means._axes(axis_name)
    if config.get("nonfinite") == "raise":
        raise ValueError(
            "a compiled step cannot raise: leave nonfinite='raise' out, and read the state's `nonfinite`, which counts "
            "the means that are not finite"
        )

    def init(params: Any) -> ExchangeState:
        count, nonfinite = (jnp.zeros((), jnp.int32) for _ in range(2))  # two arrays, for they may be donated
        return ExchangeState(count, nonfinite, means.init(params, config, axes, mesh))

    def update(updates: Any, state: ExchangeState, params: Any = None) -> tuple[Any, ExchangeState]:
        del params
        found, residuals, bad = means.averaged(updates, state.residuals, state.count, config, axes)
        return found, ExchangeState(state.count + 1, state.nonfinite + bad, residuals)

    made = Exchange(init, update)
    made.config, made.axis_name, made.mesh = config, axis_name, mesh
    return made
