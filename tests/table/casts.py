"""none, fp16, bf16."""

import numpy as np

from table.row import ANY, Row, Where, X


def bf16(stochastic):
    def formula(x, where: Where):
        bits = x.view(np.uint32).astype(np.uint64)
        if stochastic:
            bits += where.words("round", len(x)) & np.uint32(0xFFFF)
        else:
            bits += 0x7FFF + ((bits >> 16) & 1)
        return ((bits >> 16) << 16).astype(np.uint32).view(np.float32)

    return formula


ROWS = [
    Row(
        {"compressor": "none"},
        ("allreduce", *ANY, "twostage"),
        lambda x: 4 * x.size,
        lambda x, where: x,
        mask=True,
        variance=lambda n: 0.0,
        contraction=lambda n: 1.0,
        golden=(X.tobytes().hex(),),
    ),
    Row(
        {"compressor": "fp16"},
        ("allreduce", *ANY, "twostage"),
        lambda x: 2 * x.size,
        lambda x, where: x.astype(np.float16).astype(np.float32),
        largest=6e4,
        loose=1e-3,  # halves are summed in half precision
        golden=("003800bc0034000000b0004000ba003e",),
    ),
    Row(
        {"compressor": "bf16"},
        (*ANY, "twostage"),
        lambda x: 2 * x.size,
        bf16(stochastic=False),
        contraction=lambda n: 1 - 2**-16,
        golden=("003f80bf803e000000be004040bfc03f",),
    ),
    Row(
        {"compressor": "bf16", "rounding": "stochastic"},
        (*ANY, "twostage"),
        lambda x: 2 * x.size,
        bf16(stochastic=True),
        random=True,
        variance=lambda n: 2**-16,
        golden=("003f80bf803e000000be004040bfc03f",),
    ),
]
