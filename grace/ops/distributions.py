"""Thresholds that a given share of magnitudes exceeds, by distributions fitted to the magnitudes; over a backend.

Each distribution is fitted to moments, float64[1]: ``mean`` and ``variance`` of the magnitudes, or of their excess over
the previous threshold. ``share``: the natural logarithm of the share that exceeds the result, float64[1], <= 0. Each
function returns a threshold, float64[1], relative to zero or to the previous threshold. If a distribution cannot be
fitted, the exponential one replaces it.
Abdelmoniem, Elzanaty, Alouini and Canini, "An Efficient Statistical-based Gradient Compression Technique for
Distributed Training Systems" (SIDCo), MLSys 2021, arXiv:2101.10761, section 2.
"""

from __future__ import annotations

from typing import Any

from grace.core import Array

ROUNDS = 8
"""Iterations of Halley's method. Four suffice for shapes 0.01 .. 100 and shares from 1e-7; the other four cost
microseconds."""
SMALLEST = 2.0**-52
"""A number that is added to each magnitude before its logarithm is taken, since magnitudes may be zero. The number is
in units of their Euclidean norm, as in the authors' code."""


def exponential(xp: Any, mean: Array, share: Array) -> Array:
    """The threshold for exponential magnitudes (of numbers with a Laplace distribution)."""
    return -mean * share


def pareto(xp: Any, mean: Array, variance: Array, share: Array) -> Array:
    """The threshold for generalised Pareto magnitudes. The shape is clamped to -5 .. 0.499, where moments exist."""
    shape = pareto_shape(xp, mean, variance)
    scale = mean * (1.0 - shape)
    curved = (shape > 1e-6) | (shape < -1e-6)  # else the formula is 0 / 0
    far = scale * (xp.exp(-shape * share) - 1.0) / xp.where(curved, shape, 1.0)
    return xp.where(curved, far, -scale * share * (1.0 - 0.5 * shape * share))


def pareto_shape(xp: Any, mean: Array, variance: Array) -> Array:
    """The shape xi of a generalised Pareto distribution, by its moments; 0 (exponential) if mean or variance is 0."""
    spread = (variance > 1e-9 * mean * mean) & (mean > 0)
    shape = 0.5 - 0.5 * mean * mean / xp.where(spread, variance, 1.0)
    return xp.where(spread, xp.minimum(xp.maximum(shape, -5.0), 0.499), 0.0)


def gamma(xp: Any, mean: Array, log: Array, share: Array, closed: bool = False) -> Array:
    """The threshold for gamma-distributed magnitudes x.

    ``log``: the mean of ln((x + `SMALLEST` * norm) / mean), at most about 0. ``closed``: use the paper's closed form,
    scale * -(share + lnGamma(shape)), which is too high for shapes below 1: it drops the factor x ** (shape - 1).
    """
    fits = (log < -1e-6) & (log > -1e6)
    shape = xp.where(fits, gamma_shape(xp, xp.where(fits, log, -1.0)), 1.0)
    scale = mean / shape
    standard = -(share + xp.lgamma(shape)) if closed else gamma_quantile(xp, shape, share)
    return xp.where(fits, scale * xp.maximum(standard, 0.0), exponential(xp, mean, share))


def gamma_shape(xp: Any, log: Array) -> Array:
    """The shape of a gamma distribution, by Minka's approximation of the maximum likelihood, clamped to 0.01 .. 100."""
    z = -log
    return xp.minimum(xp.maximum((3.0 - z + xp.sqrt((z - 3.0) * (z - 3.0) + 24.0 * z)) / (12.0 * z), 0.01), 100.0)


def gamma_quantile(xp: Any, shape: Array, share: Array) -> Array:
    """x with Q(shape, x) = exp(share), Q the regularised upper incomplete gamma function.

    Halley's method from Abramowitz and Stegun's starting points (26.4.17, 6.5.4), as in Press et al., "Numerical
    Recipes", third edition, section 6.2.1.
    """
    upper = xp.exp(share)
    lower = 1.0 - upper
    less = shape - 1.0
    # Starting points: the cube of a normal quantile for shapes above 1; else a power near zero, a log in the tail.
    rest = xp.minimum(upper, lower)
    t = xp.sqrt(-2.0 * xp.log(rest))
    normal = (2.30753 + t * 0.27061) / (1.0 + t * (0.99229 + t * 0.04481)) - t
    normal = xp.where(upper > 0.5, normal, -normal)
    third = 1.0 - 1.0 / (9.0 * shape) + normal / (3.0 * xp.sqrt(shape))
    large = xp.maximum(shape * third * third * third, 1e-3)
    bend = xp.minimum(xp.maximum(1.0 - shape * (0.253 + shape * 0.12), 0.5), 1.0)
    power = xp.exp(xp.log(lower / bend) / shape)
    tail = 1.0 - xp.log(xp.maximum(1.0 - (lower - bend) / (1.0 - bend), 1e-300))
    x = xp.where(less > 0, large, xp.where(lower < bend, power, tail))
    constant = xp.lgamma(shape)
    for _ in range(ROUNDS):
        density = xp.exp(less * xp.log(x) - x - constant)
        step = (upper - xp.igammac(shape, x)) / xp.where(density > 0, density, 1.0)
        step = step / (1.0 - 0.5 * xp.minimum(step * (less / x - 1.0), 1.0))
        x = xp.maximum(x - step, 0.5 * x)
    return x
