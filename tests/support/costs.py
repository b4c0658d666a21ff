"""Costs of a method for the planner."""

from grace.planner.costs import Codec, Curve, Speed

FAST = Speed(*(Curve((1e3, 1e8), (seconds, seconds * 1e3)) for seconds in (2e-6, 1e-6, 1e-7)))
TOPK = {"compressor": "topk", "compress_ratio": 0.01}


def codec(params=TOPK, ratio=0.02, speed=FAST):
    return Codec(params, Curve((1e3, 1e8), (4e3 * ratio, 4e8 * ratio)), {"gpu": speed})
