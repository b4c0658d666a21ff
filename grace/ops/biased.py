"""Classes of biased compressors, and conversions between them.

The classes are bounds for every x, in expectation over the random draws of a compressor C:

B1(alpha, beta): alpha |x|² <= E|C(x)|² <= beta E<C(x), x>.
B2(gamma, beta): max(gamma |x|², E|C(x)|² / beta) <= E<C(x), x>.
B3(delta): E|C(x) - x|² <= (1 - 1/delta) |x|²; a contraction d is B3(1/d).

If C is in B1(alpha, beta), then s C is in B1(alpha s², beta s) for every s > 0; if C is in B2(gamma, beta), then s C is
in B2(gamma s, beta s). B3 holds only for a suitable scale.
Beznosikov, Horvath, Richtarik and Safaryan, "On Biased Compression for Distributed Learning", 2020, arXiv:2002.12410,
section 2.
"""

from __future__ import annotations

from typing import NamedTuple


class B1(NamedTuple):
    """Bounds of the squared norm of C(x)."""

    alpha: float
    beta: float


class B2(NamedTuple):
    """Bounds of the product of C(x) and x."""

    gamma: float
    beta: float


class B3(NamedTuple):
    """Bound of the distance of ``scale`` * C(x) from x."""

    delta: float
    scale: float = 1.0


def of_contraction(d: float) -> tuple[B1, B2, B3]:
    """Classes of a compressor with `Compressor.contraction` d."""
    return (*from_b3(1 / d), B3(1 / d))


def of_variance(w: float) -> tuple[B1, B2, B3]:
    """Classes of an unbiased compressor with `Compressor.variance` w."""
    return B1(1.0, 1 + w), B2(1.0, 1 + w), B3(1 + w, 1 / (1 + w))


def from_b1(alpha: float, beta: float) -> tuple[B2, B3]:
    """Classes of a compressor in B1(alpha, beta)."""
    return B2(alpha / beta, beta), B3(beta**2 / alpha, 1 / beta)


def from_b2(gamma: float, beta: float) -> tuple[B1, B3]:
    """Classes of a compressor in B2(gamma, beta)."""
    return B1(gamma**2, beta), B3(beta / gamma, 1 / beta)


def from_b3(delta: float) -> tuple[B1, B2]:
    """Classes of a compressor in B3(delta)."""
    return B1(1 / (4 * delta**2), 2.0), B2(1 / (2 * delta), 2.0)
