"""torchtitan: a ModelSpec whose models exchange compressed gradients. Never run under torchtitan itself.

Written for torchtitan 0.3, of which ModelSpec is a dataclass and its `parallelize_fn` returns the FSDP2 model. In a
config of your own:

    from torchtitan.models.llama3 import model_registry
    from torchtitan_spec import compressed

    config.model_spec = compressed(model_registry("debugmodel"), {"compressor": "blockint", "bits": 4})

State is not in torchtitan's checkpoints: a resumed training begins with empty residuals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

import grace.torch


def compressed(spec: Any, params: Mapping[str, Any]) -> Any:
    """The same spec; what its `parallelize_fn` returns goes through `grace.torch.compress`."""
    parallelize = spec.parallelize_fn

    def parallelize_and_compress(model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        model = parallelize(model, *args, **options)
        grace.torch.compress(model, params)
        return model

    return replace(spec, parallelize_fn=parallelize_and_compress)
