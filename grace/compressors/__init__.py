"""One file per method. Importing this package registers them all."""

from grace.compressors import (  # noqa: F401
    bf16,
    dettmers8,
    efsignsgd,
    fp16,
    natural,
    none,
    onebit,
    powersgd,
    qsgd,
    randomk,
    signsgd,
    signum,
    terngrad,
    threshold,
    topk,
)
