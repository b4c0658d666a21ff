"""One file per method. Importing this package registers them all."""

from grace.compressors import (  # noqa: F401
    bf16,
    efsignsgd,
    fp16,
    none,
    powersgd,
    qsgd,
    randomk,
    signsgd,
    threshold,
    topk,
)
