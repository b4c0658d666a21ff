"""Laws for compressors. Each takes the compressor and a backend, and asserts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from grace.core import Combine, Compressor, name_of
from grace.core.registry import usual_communicator
from grace.engine.codecs import TensorCodec
from grace.memories.residual import Residual
from grace.testing import exchanges
from grace.testing.cases import (
    BAD,
    EXTREMES,
    WIRE,
    Laws,
    alone,
    context,
    encode,
    fitting,
    fully,
    handed_over,
    host,
    memory_of,
    patterns,
    poisoned,
    receive,
    same,
    send,
    shape_of,
    shapes,
    spread,
)

LAWS = Laws()
FAMILIES = ("quantisation", "sparsification", "hybrid", "low rank")


def reference(check: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Decorator: check a law on NumPy only, as it needs many draws; other laws compare the toolkits with NumPy."""
    check.reference = True  # type: ignore[attr-defined]
    return check


@LAWS.add
@reference
def declarations_make_sense(compressor: Compressor, xp: Any) -> None:
    """The compressor is a frozen dataclass with a docstring and valid declarations."""
    assert dataclasses.is_dataclass(compressor), "put @dataclass(frozen=True) above the class"
    assert dataclasses.replace(compressor) == compressor, "it must be made of its fields alone"
    assert hash(compressor) == hash(dataclasses.replace(compressor)), "@dataclass needs frozen=True"
    family = compressor.traits.family
    assert (family or "hybrid") in FAMILIES, f"family {family!r} is none of {FAMILIES}"
    assert (type(compressor).__doc__ or "").strip(), "a docstring must say what it does and what travels"
    for n in (1, 64, 100_000):
        d, w = compressor.contraction(n), compressor.variance(n)
        assert d is None or 0 < d <= 1, f"contraction({n}) is {d}, outside (0, 1]"
        assert w is None or (w >= 0 and compressor.traits.unbiased), (
            f"variance({n}) is {w}; it belongs to unbiased methods"
        )
    memory_of(compressor)


@LAWS.add
def payloads_can_travel(compressor: Compressor, xp: Any) -> None:
    """Payloads are arrays of wire dtypes with a first dimension, and decode to float32[n]."""
    for shape in shapes(compressor, xp):
        ctx = context(xp, shape)
        payload, _ = send(compressor, xp, spread(*shape), ctx)
        wire = payload
        if compressor.traits.combine is Combine.AGREED:  # the exchange happens inside compress
            state, x = compressor.init(ctx), xp.asarray(spread(*shape).reshape(-1), "float32")
            wire = handed_over(lambda ctx: compressor.compress(x, state, ctx), ctx)  # noqa: B023
            assert wire, "combine is AGREED, but compress asks for no collective"
        assert {xp.dtype(array) for array in wire} <= WIRE, (
            f"{[xp.dtype(array) for array in wire]} are not all in {WIRE}"
        )
        assert all(len(xp.shape(array)) >= 1 for array in wire), "an array without dimensions cannot be gathered"
        receive(compressor, xp, payload, ctx)


@LAWS.add
def state_is_what_init_makes(compressor: Compressor, xp: Any) -> None:
    """The state that ``compress`` returns has the keys, shapes and dtypes of ``init``: other data would be lost."""
    for shape in shapes(compressor, xp):
        ctx = context(xp, shape)
        made, (_, kept) = compressor.init(ctx), send(compressor, xp, spread(*shape), ctx)
        one, two = ({k: (xp.shape(array), xp.dtype(array)) for k, array in s.items()} for s in (made, kept))
        assert one == two, f"init makes {one}, but compress gives back {two}"


@LAWS.add
def marks_show_what_is_not_finite(compressor: Compressor, xp: Any) -> None:
    """``nonfinite_in_payload``: the payload's floats are finite if and only if the gradient is."""
    if not compressor.traits.nonfinite_in_payload:
        return
    shape = shape_of(compressor, 1000)
    for name in (None, *BAD):
        x = spread(*shape) if name is None else poisoned(shape, name, 0)
        with xp.quiet():
            payload = host(xp, send(compressor, xp, x, context(xp, shape))[0])
        shown = not all(np.isfinite(array).all() for array in payload if array.dtype == np.float32)
        assert shown == (name is not None), f"a gradient with {name or 'finite numbers'}: marked payload is {shown}"


@LAWS.add
def damaged_payloads_are_refused(compressor: Compressor, xp: Any) -> None:
    """``decompress`` raises ValueError for arrays of a wrong length and for positions outside of the tensor.

    A length may vary if ``variable_length`` is set. Integers that are no positions may have any value. NaN in a float
    array is refused, or shows in the result. On devices only lengths are checked (`grace.ops.validate`). Methods whose
    workers agree on a payload are exempt, because each worker decodes its own.
    """
    if compressor.traits.combine is Combine.AGREED:
        return
    shape = shape_of(compressor, 1000)
    ctx, n = context(xp, shape), math.prod(shape)
    payload = host(xp, send(compressor, xp, spread(*shape), ctx)[0])

    def decoded(number: int, array: Any) -> Any:
        # Returns the result for a payload in which one array is replaced; None if it is refused.
        sent = [xp.asarray(array if i == number else each, str(each.dtype)) for i, each in enumerate(payload)]
        try:
            with xp.quiet():
                return receive(compressor, xp, tuple(sent), ctx)
        except ValueError:
            return None
        except AssertionError as error:
            raise AssertionError(f"array {number} of {len(payload)} is damaged, and {error}") from error
        except Exception as error:
            raise AssertionError(
                f"array {number} of {len(payload)} is damaged, and decompress raises {error!r}: check lengths and "
                "positions with grace.ops.validate, which raises ValueError"
            ) from error

    for number, array in enumerate(payload):
        what = f"array {number} of {len(payload)}, {array.dtype}{list(array.shape)}"
        for length in {len(array) - 1, len(array) + 1} - {-1}:
            found = decoded(number, np.resize(array, (length, *array.shape[1:])))
            assert found is None or compressor.traits.variable_length, f"{what} is decoded with {length} rows"
        if array.size == 0 or not xp.on_host:
            continue
        if array.dtype.kind == "f":
            for place in (0, -1):
                damaged = array.copy()
                damaged.reshape(-1)[place] = np.nan
                found = decoded(number, damaged)
                assert found is None or not np.isfinite(found).all(), f"NaN in {what} vanishes"
        elif array.dtype.itemsize >= 4:
            for place in (0, -1):
                results = {}
                for value in (-1, n - 1, n, -n - 1, 2**31 - 1):
                    damaged = array.copy()
                    damaged.reshape(-1)[place] = value
                    results[value] = decoded(number, damaged)
                one, two = results[-1], results[n - 1]
                assert one is None or two is None or not np.isfinite(one).all() or not same([one], [two]), (
                    f"-1 in {what} is decoded as position {n - 1}: check positions with grace.ops.validate.placed"
                )


@LAWS.add
def any_worker_decodes_the_same_bits(compressor: Compressor, xp: Any) -> None:
    """``decompress`` depends only on the payload and on data that all workers know."""
    for shape in shapes(compressor, xp):
        payload, _ = send(compressor, xp, spread(*shape), context(xp, shape, rank=1, step=3))
        mine, *others = (receive(compressor, xp, payload, context(xp, shape, rank=r, step=3)) for r in (1, 0, 3))
        assert same([mine, mine], others), f"shape {shape}: the receiver's rank changes what is decoded"


@LAWS.add
def arguments_are_left_alone_and_twice_is_the_same(compressor: Compressor, xp: Any) -> None:
    """``compress``, ``decompress`` and ``aggregate`` change none of their arguments, and are repeatable.

    ``residual`` may change x, which is not used afterwards, but not the payload.
    """
    for shape in shapes(compressor, xp):
        ctx, x = context(xp, shape), spread(*shape)
        array, state = xp.asarray(x.reshape(-1).copy(), "float32"), compressor.init(ctx)
        before = host(xp, state.values())
        payload, again = (alone(lambda ctx: compressor.compress(array, state, ctx), ctx)[0] for _ in range(2))  # noqa: B023
        assert same(host(xp, state.values()), before), "compress changes the state that it was given: return a new one"
        assert same(host(xp, [array]), [x.reshape(-1)]), "compress changes the gradient"
        assert same(host(xp, payload), host(xp, again)), "the same gradient, step and worker give another payload"
        payload = tuple(xp.buffers.copy(array) for array in payload)
        copied = host(xp, payload)
        found = [receive(compressor, xp, payload, ctx) for _ in range(2)]
        assert same(found[:1], found[1:]), "decompress gives another result the second time"
        if compressor.traits.combine is not Combine.AGREED:
            means = [host(xp, [compressor.aggregate([payload] * 3, ctx)]) for _ in range(2)]
            assert same(means[0], means[1]), "aggregate gives another result the second time"
        left = compressor.residual(xp.buffers.copy(array), payload, ctx)
        assert xp.shape(left) == (ctx.size,), "residual must have the gradient's size"
        assert same(host(xp, payload), copied), "decompress, aggregate or residual changes the payload"


@LAWS.add
def streams_are_keyed(compressor: Compressor, xp: Any) -> None:
    """Random numbers depend on seed, step, tensor and worker alone; no global generator changes."""
    shape = shape_of(compressor, 1000)
    x, sent, before = spread(*shape), {}, generators(xp)
    for step, rank, seed in ((5, 1, 0), (6, 1, 0), (5, 2, 0), (5, 1, 1)):
        ctx = context(xp, shape, step=step, rank=rank, seed=seed)
        payload = host(xp, send(compressor, xp, x, ctx)[0])
        assert same(payload, host(xp, send(compressor, xp, x, ctx)[0])), "the same key gives another payload"
        sent[step, rank, seed] = payload
    assert generators(xp) == before, "a global random number generator was used: take ctx.rng(label)"
    traits = compressor.traits
    if traits.combine is Combine.MEAN and traits.wire_sum is None and not traits.unbiased:
        assert same(sent[5, 1, 0], sent[5, 2, 0]), "payloads that are summed must choose alike on all workers"


def generators(xp: Any) -> Any:
    """The states of all global generators that a method could use."""
    import random

    found: list[Any] = [random.getstate(), repr(np.random.get_state(legacy=False))]  # noqa: NPY002
    if xp.name == "torch":
        import torch

        found.append(torch.get_rng_state().numpy().tobytes())
    if xp.name == "tensorflow":
        import tensorflow as tf

        found.append(tf.random.get_global_generator().state.numpy().tobytes())
    return found


@LAWS.add
def averaged_payloads_are_linear(compressor: Compressor, xp: Any) -> None:
    """Combine MEAN: the mean (of integers: the sum) of payloads decodes to the mean of the decoded payloads."""
    if compressor.traits.combine is not Combine.MEAN:
        return
    for shape in shapes(compressor, xp):
        ctx = context(xp, shape)
        payloads = [send(compressor, xp, spread(*shape, seed=r), context(xp, shape, rank=r))[0] for r in range(4)]
        arrays = zip(*(host(xp, payload) for payload in payloads), strict=True)
        sums = [sum(array.astype(np.float64) for array in each) for each in arrays]
        if compressor.traits.wire_sum:
            dtype, magnitude = compressor.traits.wire_sum
            assert {xp.dtype(array) for array in payloads[0]} == {dtype}, f"`summed` promises {dtype}"
            assert max(abs(array).max(initial=0) for array in sums) <= 4 * magnitude, f"larger than {magnitude}"
        else:
            sums = [array / 4 for array in sums]
        wire = tuple(xp.asarray(a, xp.dtype(like)) for a, like in zip(sums, payloads[0], strict=True))
        reduced, expected = host(xp, [compressor.reduced(wire, ctx), compressor.aggregate(payloads, ctx)])
        half = any(xp.dtype(array) == "float16" for array in payloads[0])
        np.testing.assert_allclose(reduced, expected, rtol=2**-9 if half else 1e-5, atol=1e-6)


@LAWS.add
def what_is_sent_and_what_is_kept_add_up(compressor: Compressor, xp: Any) -> None:
    """``residual`` is x minus this worker's decoded payload; bit for bit, if elements are sent exactly."""
    if compressor.traits.majority_vote:
        return
    for shape in shapes(compressor, xp):
        ctx, x = context(xp, shape, world_size=1), spread(*shape).reshape(-1)
        payload, _ = send(compressor, xp, x, ctx)
        found = receive(compressor, xp, payload, ctx)
        kept = np.array(xp.to_numpy(compressor.residual(xp.asarray(x.copy(), "float32"), payload, ctx)))
        if compressor.traits.sends_exact_values:
            assert np.array_equal(found + kept, x), "a mask keeps or sends every element as it is"
            assert ((found == 0) | (kept == 0)).all(), "a mask sends an element or keeps it"
        else:
            scale = abs(x).max(initial=0) * 1e-6 + abs(found).max(initial=0) * 2e-7
            np.testing.assert_allclose(found + kept, x, atol=max(scale, 1e-30))


@LAWS.add
def nothing_is_lost_in_fifty_steps(compressor: Compressor, xp: Any) -> None:
    """With error feedback, sent values plus the residual equal the sum of all gradients so far."""
    traits = compressor.traits
    if traits.majority_vote or (compressor.variance(2**20) or 0) >= 1 or traits.memory == "none":
        return
    shape = shape_of(compressor)
    method, ctx = TensorCodec(compressor, Residual()), context(xp, shape, world_size=1)
    state, n = method.init(ctx), ctx.size
    carried, given = np.zeros(n), np.zeros(n)
    for step in range(50 if fully(xp) else 15):
        ctx, g = context(xp, shape, step=step, world_size=1), spread(n, seed=step)
        payload, state = encode(method, xp, g, state, ctx)
        carried += receive(compressor, xp, payload, ctx)
        given += g
        kept = np.array(xp.to_numpy(state["memory/residual"]))
        lost = abs(carried + kept - given).max()
        assert lost < 1e-5 * max(1, abs(given).max(), abs(kept).max()) * (step + 1), (
            f"{lost} is lost after {step} steps"
        )


@LAWS.add
def finite_in_finite_out(compressor: Compressor, xp: Any) -> None:
    """Zeros, spikes, constants and the ends of float32's range give finite results; zeros give zeros."""
    sizes = ((1,), (9,), (1000,)) if fully(xp) else ((1000,),)
    for shape in sizes if not compressor.traits.needs_shape else (shape_of(compressor),):
        for what, x in patterns(math.prod(shape), EXTREMES if fully(xp) else EXTREMES[::8]).items():
            if abs(x).max() > compressor.traits.max_magnitude:
                continue
            state = compressor.init(context(xp, shape))
            for step in range(2):
                ctx = context(xp, shape, step=step)
                payload, state = send(compressor, xp, x, ctx, state)
                found = receive(compressor, xp, payload, ctx)
                assert np.isfinite(found).all(), f"{what} gives {found[~np.isfinite(found)][:3]}"
                assert all(np.isfinite(array).all() for array in host(xp, state.values())), f"{what} spoils the state"
                if what == "zeros" and not compressor.traits.majority_vote:
                    assert (found == 0).all(), f"zeros give {found[found != 0][:3]}"


@LAWS.add
def toolkits_agree_with_numpy(compressor: Compressor, xp: Any) -> None:
    """Payloads have the same integers as NumPy's, and the same floats up to rounding."""
    from grace.backends import get_backend

    one = get_backend("numpy")
    if xp is one:
        return
    for shape in shapes(compressor, one):
        x = spread(*shape)
        payload, _ = send(compressor, one, x, context(one, shape, step=3, rank=2))
        other, _ = send(compressor, xp, x, context(xp, shape, step=3, rank=2))
        for a, b in zip(host(one, payload), host(xp, other), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{a.dtype}{a.shape} became {b.dtype}{b.shape}"
            if a.dtype.kind in "iu":
                assert np.array_equal(a, b), f"{(a != b).sum()} of {a.size} integers differ"
            elif not compressor.traits.needs_shape:
                np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6 * max(abs(a).max(initial=0), 1e-30))
        # The factors of a matrix are unique only up to signs; their product is unique.
        found = receive(compressor, xp, other, context(xp, shape, step=3))
        expected = receive(compressor, one, payload, context(one, shape, step=3))
        loose = 1e-4 if compressor.traits.needs_shape else 1e-6
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=loose * abs(x).max(initial=0))


@LAWS.add
@reference
def contractions_contract(compressor: Compressor, xp: Any) -> None:
    """|x - x̂|² <= (1 - d)|x|² for heavy-tailed x, decoded as x̂, on average over draws; d = contraction(n)."""
    shape = shape_of(compressor, 64) if compressor.traits.needs_shape else (64,)
    n = math.prod(shape)
    d = compressor.contraction(n)
    if d is None:
        return
    ratios = []
    for seed in range(300):
        x = np.random.default_rng(seed).standard_t(1.5, n).astype(np.float32)
        ctx = context(xp, shape, step=seed, world_size=1)
        error = x - receive(compressor, xp, send(compressor, xp, x, ctx)[0], ctx).astype(np.float64)
        ratios.append((error**2).sum() / (x.astype(np.float64) ** 2).sum())
    noise = 5 * np.std(ratios) / math.sqrt(len(ratios))
    assert np.mean(ratios) <= (1 - d) * (1 + 1e-5) + noise + 1e-9, f"mean {np.mean(ratios)} exceeds 1 - {d}"


@LAWS.add
@reference
def unbiased_methods_are_unbiased_with_the_stated_variance(compressor: Compressor, xp: Any) -> None:
    """The mean of 2000 draws is x, and their variance is at most variance(n) |x|²: for spiky, uniform and normal x."""
    shape, draws = shape_of(compressor, 64) if compressor.traits.needs_shape else (64,), 2000
    n = math.prod(shape)
    w = compressor.variance(n)
    if w is None:
        return
    spiky = np.full(n, 0.01)
    spiky[3] = 5
    rng = np.random.default_rng(0)
    for kind, x in {"spiky": spiky, "uniform": rng.uniform(size=n), "normal": rng.standard_normal(n)}.items():
        x = x.astype(np.float32).astype(np.float64)
        total, square = np.zeros(n), 0.0
        for step in range(draws):
            ctx = context(xp, shape, step=step, world_size=1)
            found = receive(compressor, xp, send(compressor, xp, x.astype(np.float32), ctx)[0], ctx).astype(np.float64)
            total += found
            square += ((found - x) ** 2).sum()
        norm, rounding = (x**2).sum(), n * (1e-6 * abs(x).max()) ** 2
        bias = ((total / draws - x) ** 2).sum()
        assert bias <= 9 * w * norm / draws + rounding, f"{kind}: the mean of {draws} draws is off by {bias}"
        measured = square / draws / norm
        assert measured <= w * (1 + 4 / math.sqrt(draws)) + rounding / norm, f"{kind}: variance {measured} exceeds {w}"


@LAWS.add
def pieces_of_whole_blocks_make_the_whole_payload(compressor: Compressor, xp: Any) -> None:
    """``block_size``: blocks can be compressed independently."""
    if compressor.traits.block_size is None:
        return
    unit = math.lcm(8, compressor.traits.block_size)
    n = 4 * unit + 5 if unit > 1000 else 5000
    x = spread(n)
    whole = host(xp, send(compressor, xp, x, context(xp, n, step=2, rank=1))[0])
    for cuts in ([unit], [2 * unit, 3 * unit], [unit, n]):
        pieces = []
        for start, stop in pairwise([0, *cuts, n]):
            ctx = context(xp, n, step=2, rank=1).piece(start, stop - start)
            pieces.append(host(xp, send(compressor, xp, x[start:stop], ctx)[0]))
        joined = [np.concatenate(arrays) for arrays in zip(*pieces, strict=True)]
        assert same(joined, whole), f"pieces cut at {cuts} of {n} do not make the payload of the whole"


def _over_communicators(check: Callable[..., None]) -> None:
    def over(compressor: Compressor, xp: Any) -> None:
        # Communicators are the same code on all toolkits: the slower ones run the usual one, and in graphs a second.
        few = (usual_communicator(compressor), *(["twostage"] if graphs else []))
        for communicator in fitting(compressor):
            if fully(xp) or name_of(communicator) in few:
                check(communicator, compressor, xp)

    graphs = getattr(check, "graphs", False)
    over.__name__, over.__doc__ = check.__name__, check.__doc__
    over.graphs = graphs  # type: ignore[attr-defined]
    LAWS.add(over)


for _check in exchanges.LAWS.values():
    _over_communicators(_check)
