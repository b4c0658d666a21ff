"""Classes of biased compressors and the conversions between them.

For every x, in expectation over the draws of a compressor C:

B1(alpha, beta): alpha |x|² <= E|C(x)|² <= beta E<C(x), x>.
B2(gamma, beta): max(gamma |x|², E|C(x)|² / beta) <= E<C(x), x>.
B3(delta): E|C(x) - x|² <= (1 - 1/delta) |x|²; a contraction d is B3(1/d).

A compressor stays in B1 and B2 if it is scaled, C in B1(alpha, beta) as B1(alpha s², beta s), in B2(gamma, beta) as
B2(gamma s, beta s); B3 needs the right scale. Beznosikov, Horvath, Richtarik and Safaryan, "On Biased Compression for
Distributed Learning", 2020, arXiv:2002.12410, section 2.
"""

from __future__ import annotations

from typing import NamedTuple


class B1(NamedTuple):
    """Bounds of the square of a compressed vector."""

    alpha: float
    beta: float


class B2(NamedTuple):
    """Bounds of its product with the vector."""

    gamma: float
    beta: float


class B3(NamedTuple):
    """Bound of its distance from the vector, if it is first multiplied by ``scale``."""

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
