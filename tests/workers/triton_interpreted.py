"""Triton's kernels in its interpreter against the plain compressors.

Run by tests/test_triton.py, as tests of pytest.
"""

import os

# Triton reads this when it is imported, so it must not be set in a shared process.
assert os.environ["TRITON_INTERPRET"] == "1"

import numpy as np
import pytest
import torch
from support.cases import in_turn
from support.kernels import KINDS, blocks_of, efsignsgd_oracle, equal, ulps, vector

from grace import simulate
from grace.backends.torch import TorchBackend
from grace.compressors.measured.blockint import BlockInt
from grace.compressors.measured.eden import Eden
from grace.compressors.measured.efsignsgd import EFSignSGD
from grace.compressors.measured.topk import TopK
from grace.core import Context
from grace.core.errors import Unavailable
from grace.engine.codecs import TensorCodec
from grace.engine.codecs.table import encode
from grace.engine.codecs.tensor import RESIDUAL
from grace.kernels.triton import TritonKernels, groups, launcher, selections
from grace.memories.residual import Residual
from grace.ops.hadamard import width_of

SIZES = (1, 9, 513, 4101, 9001)
BLOCKS = (0, 24, 512, 4096, 9000)
CASES = [(n, "normal", block) for n in SIZES for block in BLOCKS if block < 2 * n]
CASES += [(5001, kind, block) for kind in KINDS[1:] for block in (0, 512)]
MEANS = [(*case, workers) for case in CASES if case[0] < 9001 for workers in (1, 3)]
MEANS += [(513, "normal", 512, workers) for workers in (2, 4, 5, 6, 7, 8, 9, 17)]


@pytest.fixture
def xp(monkeypatch):
    monkeypatch.setenv("GRACE_KERNELS", "triton")
    found = TorchBackend()
    assert isinstance(found.kernels, TritonKernels)
    assert launcher.INTERPRETED
    return found


@pytest.fixture
def plain(monkeypatch):
    """A backend without kernels, whatever the environment says."""
    monkeypatch.setattr(Plain, "kernels", None)
    return Plain()


class Plain(TorchBackend):
    """PyTorch's backend as on a device: without the host's kernels."""

    host_kernels = None


def tensor(array):
    return torch.from_numpy(array.copy())


def pair(n, kind):
    x, residual = vector(n, 1, kind), vector(n, 2)
    with np.errstate(all="ignore"):
        return x, residual, x + residual


def repeated(scales, v, block):
    return np.repeat(scales, [len(part) for part in blocks_of(v, block)])


# -- signs -------------------------------------------------------------------------------------------------------------
@in_turn("n, kind, block, fed_back", CASES, [True, False])
def test_efsignsgd_encode(xp, plain, n, kind, block, fed_back):
    x, residual, v = pair(n, kind)
    v = v if fed_back else x
    spent, kept = tensor(x), tensor(residual)
    (bits, scales), left = xp.kernels.quantisers.efsignsgd_encode(spent, kept if fed_back else None, block)
    with np.errstate(all="ignore"):
        expected_bits, expected_scales = efsignsgd_oracle(v, block)
    equal(bits, expected_bits)
    ulps(scales, expected_scales)
    equal(kept, residual)
    assert left is spent

    compressor, ctx = EFSignSGD(block_size=block), Context(plain, "w", (n,))
    payload, _ = compressor.compress(tensor(v), {}, ctx)
    equal(bits, payload[0])
    ulps(scales, payload[1].numpy())
    equal(left, compressor.residual(tensor(v), (bits, scales), ctx) if fed_back else x)


@pytest.mark.parametrize("n, kind, block, workers", MEANS, ids=str)
def test_efsignsgd_mean(xp, plain, n, kind, block, workers):
    compressor, ctx = EFSignSGD(block_size=block), Context(plain, "w", (n,))
    payloads = [compressor.compress(tensor(vector(n, 10 + w, kind)), {}, ctx)[0] for w in range(workers)]
    equal(xp.kernels.quantisers.efsignsgd_mean(payloads, None, n, block), compressor.aggregate(payloads, ctx))
    out = torch.full((n + 2,), 7.0)
    assert xp.kernels.quantisers.efsignsgd_mean(payloads, out[1:-1], n, block).data_ptr() == out[1:].data_ptr()
    equal(out[1:-1], compressor.aggregate(payloads, ctx))
    assert out[0] == out[-1] == 7


# -- integers ----------------------------------------------------------------------------------------------------------
@in_turn("n, kind, block, bits, rounding", CASES, [8, 4, 2], ["nearest", "stochastic"])
def test_blockint_encode(xp, plain, n, kind, block, bits, rounding):
    x, residual, v = pair(n, kind)
    compressor = BlockInt(bits=bits, block_size=block, rounding=rounding)
    ctx = Context(plain, "w", (n,), step=n, offset=(0, 65536, 65528, 123_456)[n % 4])
    payload, _ = compressor.compress(tensor(v), {}, ctx)
    rest = compressor.residual(tensor(v), payload, ctx).numpy()
    rng = ctx.rng("round") if rounding == "stochastic" else None
    spent, kept = tensor(x), tensor(residual)
    (codes, scales), left = xp.kernels.quantisers.blockint_encode(spent, kept, block, bits, rng)
    equal(scales, payload[1])
    equal(kept, residual)
    finite = np.isfinite(repeated(scales.numpy(), v, block))
    whole = np.packbits(np.repeat(finite, bits)[: n * bits], bitorder="little") if not finite.all() else None
    mask = np.full(len(codes), 255, np.uint8) if whole is None else whole
    equal(codes.numpy() & mask, payload[0].numpy() & mask)
    equal(left.numpy()[finite], rest[finite])
    assert not np.isfinite(left.numpy()[~np.isfinite(rest)]).any()

    spent = tensor(v)  # without a residual x stays unchanged
    (again, _), left = xp.kernels.quantisers.blockint_encode(spent, None, block, bits, rng)
    equal(again, codes)
    equal(left, v)


@pytest.mark.parametrize("block", [0, 512])
def test_noise_goes_on_where_a_row_of_it_ends(xp, plain, block):
    compressor = BlockInt(bits=8, block_size=block, rounding="stochastic")
    for offset in (65_536 - 1000, 2**32 - 1003, 2**40 + 65_001):
        ctx = Context(plain, "w", (5001,), seed=3, offset=offset)
        x = vector(5001)
        payload, _ = compressor.compress(tensor(x), {}, ctx)
        (codes, _), _ = xp.kernels.quantisers.blockint_encode(tensor(x), None, block, 8, ctx.rng("round"))
        equal(codes, payload[0])


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_halves_are_rounded_to_even_and_divisions_to_nearest(xp, plain, bits):
    rng, top = np.random.default_rng(6), np.float32((1 << (bits - 1)) - 1)
    v = rng.uniform(0.01, 1, 20_000).astype(np.float32)
    v[::8] = rng.uniform(1, 2, 2500).astype(np.float32) * np.float32(2) ** rng.integers(-60, 110, 2500)
    turn = ((rng.integers(0, int(top), 20_000) + np.float32(0.5)) / top * np.repeat(v[::8], 8)).astype(np.float32)
    near = np.nextafter(turn, rng.choice([0, np.inf], 20_000).astype(np.float32))
    v = np.where(np.arange(20_000) % 8 == 0, v, np.where(np.arange(20_000) % 2, near, turn)).astype(np.float32)
    compressor, ctx = BlockInt(bits=bits, block_size=8), Context(plain, "w", (20_000,))
    payload, _ = compressor.compress(tensor(v), {}, ctx)
    (codes, _), left = xp.kernels.quantisers.blockint_encode(tensor(v), torch.zeros(20_000), 8, bits, None)
    equal(codes, payload[0])
    equal(left, compressor.residual(tensor(v), payload, ctx))


@in_turn("n, kind, block, workers, bits", MEANS, [8, 4, 2])
def test_blockint_mean(xp, plain, n, kind, block, workers, bits):
    compressor, ctx = BlockInt(bits=bits, block_size=block), Context(plain, "w", (n,))
    payloads = [compressor.compress(tensor(vector(n, 10 + w, kind)), {}, ctx)[0] for w in range(workers)]
    equal(xp.kernels.quantisers.blockint_mean(payloads, None, n, block, bits), compressor.aggregate(payloads, ctx))


# -- top-k -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n, kind", [*((n, "normal") for n in SIZES), *((9001, kind) for kind in KINDS[1:])], ids=str)
@pytest.mark.parametrize("ratio", [0.001, 0.1])
@pytest.mark.parametrize("fed_back", [True, False])
def test_topk_encode(xp, plain, n, kind, ratio, fed_back):
    x, residual, v = pair(n, kind)
    v = v if fed_back or kind == "ties" else x
    x, residual = (np.zeros(n, np.float32), v) if kind == "ties" else (x, residual)
    compressor, ctx = TopK(ratio), Context(plain, "w", (n,))
    k = compressor.elements.selector.count(n)
    payload, _ = compressor.compress(tensor(v), {}, ctx)
    rest = compressor.residual(tensor(v), payload, ctx)
    spent = tensor(x if fed_back else v)
    (values, positions), left = xp.kernels.sparsifiers.topk_encode(spent, tensor(residual) if fed_back else None, k)
    equal(positions, payload[1])
    equal(values, payload[0])
    equal(left, rest if fed_back else v)
    assert left is spent


# -- blocks that are rotated at random ---------------------------------------------------------------------------------
ROTATED = [
    Eden(bits=1, block_size=8),
    Eden(bits=1, block_size=64, biased=True),
    Eden(bits=1, biased=True),
    Eden(bits=2, block_size=64),
    Eden(bits=2),
    Eden(bits=3, block_size=8),
    Eden(bits=3, block_size=8192),
    Eden(block_size=8),
    Eden(),
]
ROTATIONS = [(n, "normal") for n in SIZES] + [(5001, kind) for kind in KINDS[1:]]
EDENS = in_turn("n, kind, compressor", ROTATIONS, ROTATED)


def rotation(compressor, ctx):
    return width_of(ctx, compressor.block_size), compressor.levels(), ctx.shared_rng("rotation")


@EDENS
def test_eden_encode(xp, plain, n, kind, compressor):
    x, residual, v = pair(n, kind)
    ctx = Context(plain, "w", (n,), rank=(0, 5, 31)[n % 3], step=n)
    d, levels, rng = rotation(compressor, ctx)
    how = compressor.middles(), compressor.divisor(d) if compressor.biased else 0.0, ctx.rank, rng
    payload, _ = compressor.compress(tensor(v), {}, ctx)
    spent, kept = tensor(x), tensor(residual)
    (codes, scales, streams), left = xp.kernels.transforms.eden_encode(spent, kept, d, levels, *how)
    ulps(scales, payload[1].numpy())
    equal(streams, payload[2])
    finite = np.isfinite(scales.numpy())  # other blocks may have any codes
    equal(codes.reshape(len(finite), -1)[finite], payload[0].reshape(len(finite), -1)[finite])
    elements = np.repeat(finite, d)[:n]
    with np.errstate(all="ignore"):
        rest = compressor.residual(tensor(v), (payload[0], scales, streams), ctx)
    equal(left.numpy()[elements], rest.numpy()[elements])
    assert not np.isfinite(left.numpy()[~elements]).any()
    equal(kept, residual)
    assert left is spent

    spent = tensor(v)  # without a residual x stays unchanged
    again, left = xp.kernels.transforms.eden_encode(spent, None, d, levels, *how)
    equal(again[0].reshape(len(finite), -1)[finite], codes.reshape(len(finite), -1)[finite])
    equal(again[1], scales)
    equal(left, v)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_normal_encode_writes_only_its_payload(xp, monkeypatch, bits):
    made = []

    def empty(n, dtype="float32"):
        made.append(torch.full((n + 8,), 7, dtype=getattr(torch, dtype)))
        return made[-1][4:-4]

    monkeypatch.setattr(xp.buffers, "empty", empty)
    for n, block in ((9, 8), (513, 8), (513, 64), (4101, 4096)):
        compressor = Eden(bits=bits, block_size=block)
        d, levels, rng = rotation(compressor, Context(xp, "w", (n,)))
        xp.kernels.transforms.eden_encode(tensor(vector(n)), None, d, levels, compressor.middles(), 0.0, 0, rng)
    assert len(made) == 4
    assert all((array[:4] == 7).all() and (array[-4:] == 7).all() for array in made)


@pytest.mark.parametrize("workers", [1, 3])
@EDENS
def test_eden_mean(xp, plain, n, kind, compressor, workers):
    rotated_mean(xp, plain, n, kind, compressor, workers)


@pytest.mark.parametrize("workers", [2, 4, 5, 9])
def test_normal_mean_of_groups(xp, plain, workers):
    rotated_mean(xp, plain, 513, "normal", Eden(block_size=64), workers)


def rotated_mean(xp, plain, n, kind, compressor, workers):
    ctx = Context(plain, "w", (n,))
    each = [Context(plain, "w", (n,), rank=31 - w // 2) for w in range(workers)]  # two ranks are equal
    payloads = [compressor.compress(tensor(vector(n, w, kind)), {}, here)[0] for w, here in enumerate(each)]
    d, levels, rng = rotation(compressor, ctx)
    out, expected = torch.full((n + 2,), 7.0), compressor.aggregate(payloads, ctx)
    found = xp.kernels.transforms.eden_mean(payloads, out[1:-1], n, d, levels, rng)
    assert found.data_ptr() == out[1:].data_ptr()
    equal(found, expected)
    assert out[0] == out[-1] == 7
    equal(xp.kernels.transforms.eden_mean(payloads, None, n, d, levels, rng), expected)


def test_random_words_encode_where_their_counter_carries(xp, plain):
    compressor, x = Eden(bits=2, block_size=64), vector(1024)
    for offset in (128, 2**31 - 64, 2**32 - 512, 2**40 - 512):
        ctx = Context(plain, "w", (1024,), seed=3, offset=offset)
        payload, _ = compressor.compress(tensor(x), {}, ctx)
        d, levels, rng = rotation(compressor, ctx)
        found, _ = xp.kernels.transforms.eden_encode(tensor(x), None, d, levels, compressor.middles(), 0.0, 0, rng)
        for array, other in zip(found, payload, strict=True):
            equal(array, other)
        equal(xp.kernels.transforms.eden_mean([found], None, 1024, d, levels, rng), compressor.decompress(found, ctx))


# -- nothing, what does not fit, and what fails ------------------------------------------------------------------------
@pytest.mark.parametrize("block", [0, 512])
def test_nothing(xp, block):
    nothing = torch.zeros(0)
    encoded = (
        xp.kernels.quantisers.efsignsgd_encode(nothing, nothing, block),
        xp.kernels.quantisers.blockint_encode(nothing, None, block, 4, None),
    )
    assert all(array.shape == (0,) for payload, left in encoded for array in (*payload, left))
    payload, left = xp.kernels.sparsifiers.topk_encode(nothing, nothing, 0)
    assert [array.shape for array in (*payload, left)] == [(0,)] * 3
    assert xp.kernels.quantisers.efsignsgd_mean([encoded[0][0]] * 2, None, 0, block).shape == (0,)
    assert xp.kernels.quantisers.blockint_mean([encoded[1][0]] * 2, None, 0, block, 4).shape == (0,)
    d, levels, rng = rotation(Eden(bits=2), ctx := Context(xp, "w", (0,)))
    payload, left = xp.kernels.transforms.eden_encode(nothing, None, d, levels, Eden(bits=2).middles(), 0.0, 0, rng)
    assert [array.shape for array in (*payload, left)] == [(0,)] * 4
    assert xp.kernels.transforms.eden_mean([payload] * 2, None, ctx.size, d, levels, rng).shape == (0,)


def test_payloads_that_do_not_fit_are_refused(xp):
    bits, scales = torch.zeros(125, dtype=torch.uint8), torch.zeros(2)
    for wrong in ((bits[1:], scales), (bits, scales[1:]), (bits.view(torch.int8), scales), (bits, scales.double())):
        with pytest.raises(ValueError, match="its arrays are"):
            xp.kernels.quantisers.efsignsgd_mean([(bits, scales), wrong], None, 1000, 512)
        with pytest.raises(ValueError, match="its arrays are"):
            xp.kernels.quantisers.blockint_mean([wrong], None, 1000, 512, 1)
    _, levels, rng = rotation(Eden(bits=1), Context(xp, "w", (1000,)))
    good = torch.zeros(128, dtype=torch.uint8), scales, torch.zeros(2, dtype=torch.uint8)
    for wrong in ((good[0][1:], *good[1:]), (good[0], scales[1:], good[2]), (*good[:2], good[2][1:])):
        with pytest.raises(ValueError, match="its arrays are"):
            xp.kernels.transforms.eden_mean([good, wrong], None, 1000, 512, levels, rng)


@pytest.mark.parametrize("bits", [1, 4])
def test_blocks_too_large_for_one_program_have_no_kernel(xp, bits):
    compressor, ctx = Eden(bits=bits, block_size=2 * launcher.LARGE), Context(xp, "w", (5 * launcher.LARGE,))
    d, levels, rng = rotation(compressor, ctx)
    with pytest.raises(Unavailable):
        xp.kernels.transforms.eden_encode(torch.ones(ctx.size), None, d, levels, compressor.middles(), 0.0, 0, rng)
    assert encode(compressor, torch.ones(ctx.size), None, ctx) is None
    assert isinstance(xp.kernels, TritonKernels), "others are used as before"


BREAKING = {
    "group_encode": BlockInt(block_size=0),
    "group_partials": EFSignSGD(block_size=0),
    "group_take": TopK(0.1),
    "eden_group": Eden(),
}


@pytest.mark.parametrize("name", BREAKING)
def test_a_kernel_that_fails_leaves_the_plain_form(xp, plain, monkeypatch, name):
    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("first line\nptxas was not found")

    (module,) = [each for each in (groups, selections) if hasattr(each, name)]
    monkeypatch.setattr(module, name, Broken())
    compressor = BREAKING[name]
    x, residual, _ = pair(5001, "normal")
    expected = expected_mean = None
    for each in (plain, xp):
        ctx, method = Context(each, "w", (5001,)), TensorCodec(compressor, Residual())
        state = {RESIDUAL: tensor(residual)}
        if each is xp:
            with pytest.warns(UserWarning, match="run without them, slower: ptxas was not found"):
                payload, state = encoded(method, tensor(x), state, ctx)
            assert not isinstance(xp.kernels, TritonKernels)
        else:
            payload, state = encoded(method, tensor(x), state, ctx)
        mean = method.mean([payload, payload, payload], ctx).array()
        if expected is not None:
            for array, other in zip((*payload, state[RESIDUAL]), expected, strict=True):
                np.testing.assert_allclose(array.numpy(), other.numpy(), rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(mean.numpy(), expected_mean.numpy(), rtol=1e-6, atol=1e-7)
        expected, expected_mean = (*payload, state[RESIDUAL]), mean


def test_a_mean_that_fails_is_decoded_plainly(xp, plain, monkeypatch):
    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError

    monkeypatch.setattr(groups, "group_mean", Broken())
    compressor = BlockInt()
    payload, _ = compressor.compress(tensor(vector(5001)), {}, Context(plain, "w", (5001,)))
    codec = TensorCodec(compressor, Residual())
    expected = codec.mean([payload] * 3, Context(plain, "w", (5001,))).array()
    with pytest.warns(UserWarning, match="run without them, slower: RuntimeError"):
        found = codec.mean([payload] * 3, Context(xp, "w", (5001,))).array()
    equal(found, expected)


def encoded(method, x, state, ctx):
    program = method.encode(x, dict(state), ctx)
    with pytest.raises(StopIteration) as stop:
        next(program)
    return stop.value.value


# -- whole steps -------------------------------------------------------------------------------------------------------
METHODS = [
    {"compressor": "efsignsgd"},
    {"compressor": "efsignsgd", "block_size": 8192},
    {"compressor": "blockint", "block_size": 512},
    {"compressor": "blockint", "bits": 8, "block_size": 4096, "communicator": "twostage"},
    {"compressor": "blockint", "bits": 2, "block_size": 0},
    {"compressor": "blockint", "bits": 8, "rounding": "stochastic"},
    {"compressor": "topk", "compress_ratio": 0.02},
    {"compressor": "topk", "compress_ratio": 1.0},
    {"compressor": "topk", "compress_ratio": 0.02, "index_coding": "elias_fano"},
    {"compressor": "eden", "bits": 3, "block_size": 64},
    {"compressor": "eden", "bits": 1, "biased": True},
    {"compressor": "eden", "block_size": 2 * launcher.LARGE},
    {"compressor": "qsgd"},
    {"compressor": "powersgd"},
    {"compressor": "dgc", "memory": "dgc"},
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: "-".join(map(str, method.values())))
def test_steps_are_the_same_without_kernels(monkeypatch, method):
    gradients = [
        [{"w": vector(9001, 10 * step + w).reshape(1, 9001), "b": vector(70, step + w)} for w in range(3)]
        for step in range(3)
    ]
    gradients[1][1]["w"][0, 77] = np.inf  # so the step does not count
    launched = []
    launch = launcher.Launcher._launch
    monkeypatch.setattr(
        launcher.Launcher, "_launch", lambda self, kernel, *rest, **form: launched.append(kernel)
        or launch(self, kernel, *rest, **form),
    )  # fmt: skip
    found = {}
    for use in ("off", "triton"):
        monkeypatch.setenv("GRACE_KERNELS", use)
        assert not launched
        found[use] = simulate({**method, "min_numel": 100}, gradients, backend="torch")
    fits = method.get("block_size") != 2 * launcher.LARGE
    assert bool(launched) == (method["compressor"] in ("efsignsgd", "blockint", "topk", "eden", "qsgd") and fits)
    assert found["off"].report.bytes_sent == found["triton"].report.bytes_sent
    for mean, other in zip(found["triton"].means, found["off"].means, strict=True):
        assert mean.keys() == other.keys() == {"w", "b"}
        for name in mean:
            equal(mean[name], other[name])


def test_a_method_without_memory_is_encoded_at_once(xp, plain):
    compressor, x = BlockInt(rounding="stochastic"), vector(5001)
    payload, _ = encode(compressor, tensor(x), None, Context(xp, "w", (5001,)))
    expected, _ = compressor.compress(tensor(x), {}, Context(plain, "w", (5001,)))
    for array, other in zip(payload, expected, strict=True):
        equal(array, other)
