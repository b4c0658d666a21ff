"""docs/migrate.md: upstream's dictionaries are accepted or refused with a remedy; the page's defaults are correct."""

import re
from pathlib import Path

import pytest

from grace import grace_from_params
from grace.core.registry import compressors, memories

PAGE = (Path(__file__).parents[1] / "docs" / "migrate.md").read_text()
TAKEN = [
    {"compressor": "topk", "memory": "residual", "communicator": "allgather", "compress_ratio": 0.3, "world_size": 1},
    {"compressor": "dgc", "memory": "dgc", "communicator": "allgather", "momentum": 0.9, "compress_ratio": 0.3},
    {"compressor": "efsignsgd", "memory": "efsignsgd", "communicator": "allgather", "lr": 0.1},
    {"compressor": "fp16", "memory": "none", "communicator": "allreduce"},
    {"compressor": "natural", "memory": "none", "communicator": "allgather"},
    {"compressor": "onebit", "memory": "none", "communicator": "allgather"},
    {"compressor": "powersgd", "memory": "powersgd", "communicator": "allreduce", "compress_rank": 1},
    {"compressor": "qsgd", "memory": "none", "communicator": "allgather", "quantum_num": 64, "bucket_size": 128},
    {"compressor": "qsgd", "memory": "none", "communicator": "alltoall", "bucket_size": 128},
    {"compressor": "randomk", "memory": "residual", "communicator": "allreduce", "compress_ratio": 0.3},
    {"compressor": "signsgd", "memory": "none", "communicator": "broadcast"},
    {"compressor": "signum", "memory": "momentum", "communicator": "allgather", "momentum": 0.9},
    {"compressor": "terngrad", "memory": "none", "communicator": "allgather", "clip": 2.5},
    {"compressor": "threshold", "memory": "residual", "communicator": "allgather", "threshold": 0.01},
    {"compressor": "adaq", "memory": "residual", "communicator": "allgather", "compress_ratio": 0.3},
    {"compressor": "inceptionn", "memory": "none", "communicator": "allgather", "error_bound": 2e-10},
    {"compressor": "sketch", "memory": "none", "communicator": "allgather", "quantiles": 64},
    {"compressor": "u8bit", "memory": "none", "communicator": "allgather"},
]
REFUSED = [
    ({"compressor": "qsgd_cuda"}, "did you mean 'qsgd'"),
    ({"compressor": "natural_cuda"}, "did you mean 'natural'"),
    ({"compressor": "topk", "kernel": "torch"}, "unknown key 'kernel'"),
    ({"compressor": "powersgd", "momentum_factor": 0.9}, "unknown key 'momentum_factor'"),
    ({"compressor": "dgc", "memory": "dgc", "gradient_clipping": True}, "of type float"),
    (
        {"compressor": "signum", "memory": "none", "momentum": 0.9},
        "belongs to memory 'dgc' and memory 'ef21' and memory 'momentum'",
    ),
    ({"compressor": "qsgd", "quantum_num": 256}, "1 .. 127"),
    (
        {"compressor": "topk", "memory": "residual", "communicator": "allreduce"},
        "Leave communicator out, or use 'allgather'",
    ),
]


@pytest.mark.filterwarnings("ignore:.*(without error feedback|is read as)")  # accepted, with a warning
@pytest.mark.parametrize("params", TAKEN, ids=lambda params: params["compressor"] + "-" + params["communicator"])
def test_upstreams_dictionaries_are_taken(params):
    grace = grace_from_params(params, "local")
    for part, found in (("compressor", compressors), ("memory", memories)):
        assert isinstance(getattr(grace.method, part), found[params[part]])


@pytest.mark.parametrize(("params", "remedy"), REFUSED, ids=lambda each: str(each)[:40])
def test_what_is_not_taken_is_refused_with_the_remedy(params, remedy):
    with pytest.raises(ValueError, match=re.escape(remedy)):
        grace_from_params(params, "local")


def test_defaults_are_those_of_the_page():
    qsgd, terngrad, momentum = compressors["qsgd"](), compressors["terngrad"](), memories["dgc"]().momentum
    said = " ".join(PAGE.split())
    for text in (
        f"`compress_ratio` is {compressors['topk']().compress_ratio} (`dgc` {compressors['dgc']().compress_ratio})",
        f"`compress_rank` {compressors['powersgd']().compress_rank}, not 1",
        f"`quantum_num` ({qsgd.quantum_num}, here also its largest value)",
        f"`threshold` ({compressors['threshold']().threshold})",
        f"`momentum` ({momentum})",
        f"each bucket of {qsgd.bucket_size} elements",
    ):
        assert text in said
    assert terngrad.clip == 0
    assert terngrad.traits.unbiased
