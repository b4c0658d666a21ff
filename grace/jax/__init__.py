"""GRACE for JAX: exchanges gradients inside `jax.shard_map`, over named axes of a mesh.

`exchange` is an optax transformation, `mean` the same as a function.
"""

from grace.jax.exchange import Exchange, ExchangeState, exchange
from grace.jax.means import Residuals, init, mean, report, specs

__all__ = ["Exchange", "ExchangeState", "Residuals", "exchange", "init", "mean", "report", "specs"]
