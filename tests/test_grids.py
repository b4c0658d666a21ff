"""Fixed grids below the largest element of a block, and properties of some quantisers."""

import itertools

import numpy as np
import pytest
from methods import alone, backend, context, host, normal

from grace import grace_from_params
from grace.transports.local import LocalTransport


def made(**params):
    return grace_from_params(params, LocalTransport()).method.compressor


def payload_of(compressor, xp, x, step=0):
    ctx = context(xp, len(x), step=step)
    return alone(lambda ctx: compressor.compress(xp.asarray(x.copy(), "float32"), {}, ctx), ctx)[0]


def decoded(compressor, xp, x, step=0):
    found = compressor.decompress(payload_of(compressor, xp, x, step), context(xp, len(x), step=step))
    return np.array(xp.to_numpy(found))


# -- fp8 -----------------------------------------------------------------------------------------------------------
FORMATS = {"e4m3": ("float8_e4m3fn", 448, 126), "e5m2": ("float8_e5m2", 57344, 123)}


@pytest.mark.parametrize("kind", FORMATS)
def test_fp8_is_the_format_of_the_hardware(xp, kind):
    # The largest element makes the scale 1, so the bytes must equal those of PyTorch's cast.
    torch = pytest.importorskip("torch")
    dtype, largest, top = FORMATS[kind]
    values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).float().numpy()
    values = values[np.isfinite(values)]
    assert np.sort(values)[-1] == largest
    grid = np.unique(values)
    middles = (grid[1:] + grid[:-1]) / 2  # ties, which round to the even code
    draws = normal(5000) * np.exp(4 * normal(5000, seed=1))
    x = np.concatenate([grid, middles, middles * (1 + 1e-6), draws.clip(-largest, largest), [largest]])
    x = x.astype(np.float32)
    codes, scale = host(xp, payload_of(made(compressor="fp8", format=kind, block_size=0), xp, x))
    assert scale.tolist() == [1.0]
    expected = torch.tensor(x).to(getattr(torch, dtype)).view(torch.uint8).numpy()
    zero = (codes & 127) == 0  # there are two codes of zero, with equal meaning
    assert np.array_equal(codes[~zero], expected[~zero])
    assert (expected[zero] & 127 == 0).all()
    assert codes.max() <= 128 + top
    found = decoded(made(compressor="fp8", format=kind, block_size=0), xp, x)
    assert np.array_equal(found, torch.tensor(x).to(getattr(torch, dtype)).float().numpy())


@pytest.mark.parametrize("kind", FORMATS)
def test_fp8_keeps_its_own_numbers_whatever_is_drawn(xp, kind):
    _, largest, top = FORMATS[kind]
    codes = np.array([code for code in range(256) if code & 127 <= top and code != 128], np.uint8)
    compressor = made(compressor="fp8", format=kind, rounding="stochastic", block_size=0)
    ctx = context(xp, len(codes))
    x = xp.to_numpy(compressor.decompress((xp.asarray(codes, "uint8"), xp.full(1, 1.0)), ctx))
    assert x.max() == largest
    for step in range(20):
        assert host(xp, payload_of(compressor, xp, np.array(x), step))[0].tolist() == codes.tolist()


# -- blockint, natural_dithering -------------------------------------------------------------------------------------
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_blockint_keeps_its_own_numbers(xp, bits, rounding):
    top = 2 ** (bits - 1) - 1
    x = np.resize(np.arange(-top, top + 1), 1003).astype(np.float32) * 0.37
    found = decoded(made(compressor="blockint", bits=bits, rounding=rounding), xp, x)
    np.testing.assert_allclose(found, x, rtol=1e-6)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_blockint_never_errs_by_more_than_half_a_step_or_the_element(xp, bits):
    x = normal(5000)
    error = abs(decoded(made(compressor="blockint", bits=bits, block_size=0), xp, x) - x)
    assert (error <= abs(x).max() / (2 ** (bits - 1) - 1) / 2 * (1 + 1e-5)).all()
    assert (error <= abs(x)).all()


@pytest.mark.parametrize("s", [1, 2, 7, 127])
def test_natural_dithering_keeps_powers_of_two(xp, s):
    powers = 2.0 ** -np.arange(min(s, 100))
    x = np.resize(np.concatenate([[0], powers, -powers]), 1003).astype(np.float32) * np.float32(3)
    assert np.array_equal(decoded(made(compressor="natural_dithering", s=s, block_size=0), xp, x), x)


# -- sketch ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("quantiles", [2, 64, 256])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 5000])
def test_sketch_keeps_the_sum_and_fills_buckets_evenly(xp, quantiles, n):
    x = normal(n) + np.float32(0.1)
    compressor = made(compressor="sketch", quantiles=quantiles)
    found = decoded(compressor, xp, x)
    assert found.sum(dtype=np.float64) == pytest.approx(x.sum(dtype=np.float64), rel=1e-5)
    # Elements keep their order; those of one bucket share a value; buckets have n / q elements, rounded up or down.
    assert (np.diff(found[np.argsort(x)]) >= 0).all()
    sizes = np.unique(found, return_counts=True)[1]
    q = min(quantiles, n)
    assert len(sizes) == q
    assert set(sizes.tolist()) <= {n // q, -(-n // q)}
    if n <= quantiles:
        assert np.array_equal(found, x)
    assert ((found - x) ** 2).sum() <= (x**2).sum()


def test_sketch_puts_equal_elements_into_one_bucket(xp):
    x = np.resize(np.float32([1, 1, 1, 1, 1, 1, 1, -2]), 1000)
    np.testing.assert_allclose(decoded(made(compressor="sketch"), xp, x), x, rtol=1e-6)


# -- 3lc -------------------------------------------------------------------------------------------------------------
def shortened(sent):
    """The paper's zero-run encoding, byte by byte."""
    found = []
    for byte, group in itertools.groupby(sent):
        length = len(list(group))
        if byte != 121:
            found += [byte] * length
            continue
        found += [255] * (length // 14)
        length %= 14
        found += [243 + length - 2] if length > 1 else [121] * length
    return found


@pytest.mark.parametrize("density", [0.0, 0.002, 0.01, 0.05, 0.2, 0.5, 1.0])
def test_runs_of_zeros_are_those_of_the_paper(xp, density):
    for seed, n in itertools.product(range(5), (1, 5, 70, 350, 1003, 5000)):
        rng = np.random.default_rng(seed)
        x = np.where(rng.random(n) < density, rng.choice([-1, 1], n), 0).astype(np.float32)
        whole = host(xp, payload_of(made(compressor="3lc", zero_run=False), xp, x))[0]
        assert len(whole) == -(-n // 5)
        runs = host(xp, payload_of(made(compressor="3lc"), xp, x))[0]
        assert runs.tolist() == shortened(whole.tolist())
        assert np.array_equal(decoded(made(compressor="3lc"), xp, x), x)


def test_every_length_of_a_run_comes_back(xp):
    for length in range(45):
        for around in itertools.product((0, 1), repeat=2):
            x = np.concatenate([np.ones(5 * around[0]), np.zeros(5 * length), np.ones(5 * around[1] + 1)])
            assert np.array_equal(decoded(made(compressor="3lc"), xp, x.astype(np.float32)), x)


def test_3lc_makes_halves_zero(xp):
    x = np.array([2, 1, -1, 1.0001, -1.0001, -2], np.float32)
    assert decoded(made(compressor="3lc"), xp, x).tolist() == [2, 0, 0, 2, -2, -2]


def test_3lc_sends_fewer_bytes_for_a_larger_multiplier(xp):
    x = normal(5000)
    sizes = [len(host(xp, payload_of(made(compressor="3lc", sparsity=s), xp, x))[0]) for s in (1.0, 1.5, 1.9)]
    assert sizes[0] > sizes[1] > sizes[2]


# -- inceptionn ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("power", [-1, -2, -5, -8, -10, -14])
def test_inceptionn_keeps_its_bound(xp, power):
    rng = np.random.default_rng(0)
    x = (rng.choice([-1, 1], 20_000) * 2.0 ** rng.uniform(-20, 3, 20_000)).astype(np.float32)
    found = decoded(made(compressor="inceptionn", error_bound=2.0**power), xp, x)
    assert (abs(found - x) < 2.0**power).all()
    assert (abs(found) <= abs(x)).all()
    assert (found * x >= 0).all()
    assert np.array_equal(found[abs(x) >= 1], x[abs(x) >= 1])


def test_inceptionn_reads_the_bound_of_graces_first_release():
    with pytest.warns(UserWarning, match="error_bound=2e-10 is read as 2..-10"):
        old = made(compressor="inceptionn", error_bound=2e-10)
    xp, x = backend("numpy"), normal(1003) / 50
    assert np.array_equal(decoded(old, xp, x), decoded(made(compressor="inceptionn"), xp, x))


@pytest.mark.parametrize("name", ["fp8", "blockint"])
def test_rounding_to_nearest_needs_a_residual_and_at_random_none(name):
    for rounding, memory in (("nearest", "residual"), ("stochastic", "none")):
        assert made(compressor=name, rounding=rounding).traits.memory == memory


@pytest.mark.parametrize(
    "params, message",
    [
        ({"compressor": "fp8", "format": "e3m4"}, "format='e3m4': choose one of 'e4m3', 'e5m2'"),
        ({"compressor": "fp8", "rounding": "up"}, "rounding='up'"),
        ({"compressor": "blockint", "bits": 3}, "bits=3: choose 2, 4 or 8"),
        ({"compressor": "blockint", "rounding": "up"}, "rounding='up'"),
        ({"compressor": "natural_dithering", "s": 0}, "s=0 must lie in 1 .. 127"),
        ({"compressor": "sketch", "quantiles": 1}, "quantiles=1 must lie in 2 .. 256"),
        ({"compressor": "3lc", "sparsity": 2.0}, "sparsity=2.0 must be 1 or more and below 2"),
        ({"compressor": "3lc", "block_size": 40}, "block_size needs zero_run=False"),
        ({"compressor": "3lc", "block_size": 64, "zero_run": False}, "block_size=64 must be a multiple of 40"),
        ({"compressor": "inceptionn", "error_bound": 1e-9}, "error_bound=1e-09 must lie in"),
        ({"compressor": "inceptionn", "error_bound": 1.0}, "error_bound=1.0 must lie in"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        made(**params)
