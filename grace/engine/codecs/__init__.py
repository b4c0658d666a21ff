"""Codecs of one tensor: a method as plain functions, in chunks that fit a cache, or by native kernels."""

from grace.engine.codecs.mean import PendingMean, all_finite
from grace.engine.codecs.table import Calls, calls_of
from grace.engine.codecs.tensor import TensorCodec

__all__ = ["Calls", "PendingMean", "TensorCodec", "all_finite", "calls_of"]
