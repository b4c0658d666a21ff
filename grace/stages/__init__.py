"""Compression between pipeline stages: of activations (forward) and of their gradients (backward), set up separately.

    stage = grace.torch.PipelineStage(module, i, n, device, forward={"compressor": "blockint", "bits": 8})
    layer = grace.torch.Boundary(forward={"compressor": "blockint", "bits": 4})    # the same numerics in one process

This package has the parts that all toolkits share: `codec` holds the pure functions, `ends` the state at the ends of an
edge. An edge joins stage i and stage i + 1. Examples are the rows of a batch, and each is compressed by itself.

Rudakov, Beznosikov, Kholodov and Gasnikov, "Activations and Gradients Compression for Model-Parallel Training", 2024,
arXiv:2401.07788, for "none", "ef", "ef21" and top-k; Wang et al., "Fine-tuning Language Models over Slow Networks using
Activation Quantization with Guarantees", NeurIPS 2022, arXiv:2206.01299, algorithm 1 (AQ-SGD), for "aq".
"""

from __future__ import annotations

from grace.stages.codec import FEEDBACKS, AllLevels, Codec, ExampleTopK, receive, send
from grace.stages.ends import EdgeBytes, End, Report
from grace.stages.settings import INT8, Direction, directions

__all__ = [
    "FEEDBACKS",
    "INT8",
    "AllLevels",
    "Codec",
    "Direction",
    "EdgeBytes",
    "End",
    "ExampleTopK",
    "Report",
    "directions",
    "receive",
    "send",
]
