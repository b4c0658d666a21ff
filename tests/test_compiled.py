"""Compiled forms give the results of the plain functions, are compiled once, and warn if there are none."""

import re
import warnings
from itertools import groupby

import numpy as np
import pytest
from methods import alone, backend, context, host, spread
from table import ROWS

from grace import grace_from_params, simulate
from grace.backends.buffers import InPlace
from grace.core.sharding import divisible, piece
from grace.engine.encoders import FastMethod
from grace.engine.workspace import Workspace
from grace.memories.none import NoMemory
from grace.memories.residual import Residual
from grace.transports.local import LocalTransport

torch = pytest.importorskip("torch")
inductor = pytest.importorskip("grace.engine.inductor")

PIECE = 4096
N = 5 * PIECE + 4077  # a few whole pieces of every method, and a short one
UNBIASED = {"compressor": "blockint", "bits": 8, "rounding": "stochastic"}
REFUSED = {
    "efsignsgd": "'efsignsgd' encodes .* not be the same to the bit",  # its sums are in float32
    "chunktopk": "'chunktopk' (en|de)codes .* looks at the values",
    "eden": "'eden' .*codes .* draws random numbers to decode",
    "kashin": "'kashin' encodes .* draws positions",
}
"""Methods that are not compiled, or one way only, and what the warning says."""


@pytest.fixture
def xp(monkeypatch):
    """PyTorch without kernels, with small pieces, and with forms that nothing has compiled yet."""
    xp = backend("torch")
    monkeypatch.setenv("GRACE_KERNELS", "off")
    monkeypatch.setattr(xp, "piece", PIECE)
    forms = inductor.Forms(xp)
    monkeypatch.setattr("grace.engine.encoders.compiled", lambda xp: forms)
    monkeypatch.setattr("grace.engine.lazy_mean.compiled", lambda xp: forms)
    monkeypatch.setattr(xp, "forms", forms, raising=False)
    return xp


@pytest.fixture
def without_inductor(monkeypatch):
    """Traced and run as traced: all of a form but the code that the compiler makes, which takes seconds."""
    eager = torch._dynamo.lookup_backend("aot_eager")
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: eager)


def made(params):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*without error feedback")
        return grace_from_params({**params, "memory": "none"}, LocalTransport()).method.compressor


BLOCKWISE = [row for row in ROWS if not row.matrix and divisible(made(row.params))]
FEW = [
    row
    for _, rows in groupby(BLOCKWISE, lambda row: row.params["compressor"])
    for row in list(rows)[:2]  # each takes a second
]


COMPILE = Workspace(compile=True)


def exchanged(xp, method, n=N, steps=3, compile=False, **fields):
    """Payloads, residuals and means of some steps, in NumPy."""
    found, state = [], method.init(context(xp, n))
    for step in range(steps):
        ctx = context(xp, n, rank=1, step=step, _workspace=Workspace(compile=compile), **fields)
        x = xp.asarray(spread(n, seed=step), "float32")
        payload, state = alone(lambda ctx, x=x, state=state: method.encode(x, state, ctx), ctx)
        state = {key: xp.buffers.copy(value) for key, value in state.items()}
        mean = method.mean([payload] * 3, ctx).into(xp.zeros(n))
        found.append([*host(xp, payload), *host(xp, state.values()), xp.to_numpy(mean).copy()])
    return found


def assert_same(one, two):
    for arrays, others in zip(one, two, strict=True):
        for a, b in zip(arrays, others, strict=True):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("row", FEW, ids=str)
def test_forms_of_every_blockwise_method_equal_the_plain_functions(row, xp, without_inductor):
    compressor = made(row.params)
    method = FastMethod(compressor, NoMemory() if compressor.traits.majority_vote else Residual())
    plain = exchanged(xp, method)
    refused = REFUSED.get(row.params["compressor"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        compiled = exchanged(xp, method, compile=True)
    told = [str(each.message) for each in told if "compile=True" in str(each.message)]
    assert_same(compiled, plain)
    if refused is None:
        assert not told
        assert xp.forms.compilations == 2
    else:
        assert told
        assert any(re.search(refused, each) for each in told)


@pytest.mark.parametrize(
    ("params", "size"),
    [
        (UNBIASED, 2**16),  # whole rows of noise, from its table
        ({"compressor": "onebit", "block_size": 512}, PIECE),
        ({"compressor": "qsgd", "quantum_num": 2, "bucket_size": 24}, PIECE),
        ({"compressor": "signsgd"}, 2**14),
    ],
    ids=lambda value: value["compressor"] if isinstance(value, dict) else "",
)
def test_what_the_compiler_makes_equals_the_plain_functions_and_is_made_once(params, size, xp, monkeypatch):
    monkeypatch.setattr(xp, "piece", size)
    compressor = made(params)
    method = FastMethod(compressor, NoMemory() if compressor.traits.majority_vote else Residual())
    for n, name in ((3 * size + 77, "w"), (4 * size + 5, "other")):
        assert n > 3 * piece(compressor, xp)
        assert_same(exchanged(xp, method, n, name=name, compile=True), exchanged(xp, method, n, name=name))
    assert xp.forms.compilations == 2, "steps, names or sizes of tensors were compiled in"


def test_many_steps_compile_nothing_anew(xp, without_inductor):
    method = FastMethod(made(UNBIASED), Residual())
    exchanged(xp, method, steps=1, compile=True)
    before = dict(torch._dynamo.utils.counters["stats"])
    exchanged(xp, method, steps=20, seed=7, compile=True)
    assert xp.forms.compilations == 2
    assert dict(torch._dynamo.utils.counters["stats"]) == before


def test_one_warning_where_there_is_no_compiler(xp, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    method = FastMethod(made({**UNBIASED, "block_size": 1024}), Residual())
    with pytest.warns(UserWarning, match=r"compile=True: 'blockint' encodes uncompiled.*C\+\+ compiler") as told:
        compiled = exchanged(xp, method, compile=True)
    assert len(told) == 1
    assert_same(compiled, exchanged(xp, method))


def test_a_form_that_gives_other_bits_is_not_used(xp, without_inductor, monkeypatch):
    monkeypatch.setattr(inductor.Traceable, "round", lambda self, x: torch.floor(x + 0.5))  # halves upwards
    method = FastMethod(made({"compressor": "blockint"}), Residual())
    with pytest.warns(UserWarning, match="'blockint' encodes uncompiled, .* not be the same to the bit"):
        compiled = exchanged(xp, method, compile=True)
    assert_same(compiled, exchanged(xp, method))


def test_a_residual_or_mean_of_other_bits_is_not_used(xp, without_inductor, monkeypatch):
    class Inexact(InPlace):
        def multiply(self, x, y):
            return x * y * (1 + 2**-20)

    monkeypatch.setattr(inductor.Traceable, "inplace", property(Inexact))
    method = FastMethod(made({"compressor": "dettmers8", "block_size": 64}), Residual())
    with pytest.warns(UserWarning, match="'dettmers8' .*codes uncompiled") as told:
        compiled = exchanged(xp, method, compile=True)
    found = [re.search(r"its (residual|mean) would not be the same", str(each.message))[1] for each in told]
    assert found == ["residual", "mean"]
    assert_same(compiled, exchanged(xp, method))


def test_payloads_that_do_not_fit_are_refused_as_ever(xp, without_inductor):
    method = FastMethod(made(UNBIASED), Residual())
    ctx = context(xp, N, world_size=2, _workspace=COMPILE)
    payload, _ = alone(lambda ctx: method.encode(xp.asarray(spread(N), "float32"), method.init(ctx), ctx), ctx)
    with pytest.raises(ValueError, match=r"worker 1 of 2 sent a payload .* scales are float32"):
        method.mean([payload, (payload[0], payload[1].double())], ctx).into(xp.zeros(N))
    with pytest.raises(ValueError, match="worker 0 of 2 sent a payload"):
        method.mean([(payload[0][:-1], payload[1]), payload], ctx).into(xp.zeros(N))
    assert xp.forms.compilations == 2


def test_bits_that_lie_anywhere_in_a_message(xp, without_inductor):
    method = FastMethod(made({"compressor": "signsgd"}), NoMemory())
    xp.piece = 8192
    n = 3 * 8192 + 5
    ctx = context(xp, n, _workspace=COMPILE)
    (bits, flags), _ = alone(lambda ctx: method.encode(xp.asarray(spread(n), "float32"), {}, ctx), ctx)
    message = torch.zeros(len(bits) + 3, dtype=torch.uint8)
    message[3:] = bits
    for here in (ctx, context(xp, n)):
        mean = method.mean([(message[3:], flags)], here).into(xp.zeros(n))
        assert torch.equal(mean, torch.where(xp.asarray(spread(n), "float32") >= 0, 1.0, -1.0))


def test_what_is_not_finite_poisons_as_ever(xp, without_inductor):
    for params in (UNBIASED, {"compressor": "signsgd"}, {"compressor": "onebit", "block_size": 64}):
        grc = grace_from_params({**params, "compile": True}, LocalTransport())
        x = torch.from_numpy(spread(N))
        x[PIECE + 9] = float("nan")
        grc.build({"w": x})
        mean = grc.step({"w": x})["w"]
        assert torch.isnan(mean[PIECE + 9]), params


@pytest.mark.filterwarnings("ignore:.*without error feedback")
def test_grace_and_the_door_give_the_same_with_it(xp, without_inductor):
    weights = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(200, 120)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        params = {**UNBIASED, "memory": "none", "compile": compile}
        from grace.torch import DistributedOptimizer

        grc = grace_from_params(params, LocalTransport())
        optimizer = DistributedOptimizer(optimizer, grace=grc, named_parameters=model.named_parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 200)).square().sum().backward()
            optimizer.step()
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)
    assert xp.forms.compilations == 2


def gradients(n=N):
    return {"w": spread(n)}


@pytest.mark.parametrize(
    ("params", "n", "message"),
    [
        ({"compressor": "topk"}, N, "methods that work on blocks one by one, .* not 'topk'"),
        ({"compressor": "efsignsgd"}, N, "as block_size=512 makes many do, not 'efsignsgd'"),
        ({"compressor": "none"}, N, "not 'none'"),
        (UNBIASED, PIECE, "tensors of more than 4,096 elements"),
    ],
    ids=str,
)
def test_a_request_without_effect_is_told(params, n, message, xp):
    with pytest.warns(UserWarning, match=f"compile=True has no effect: .*{message}") as told:
        simulate({**params, "compile": True}, [gradients(n)] * 2, backend="torch", steps=2)
    assert len(told) == 2  # once on each of two workers


def test_other_toolkits_tell_that_they_have_none():
    with pytest.warns(UserWarning, match="compile=True has no effect: it is for PyTorch's tensors on CPUs"):
        simulate({**UNBIASED, "compile": True}, [gradients()], backend="numpy")


def test_kernels_go_first_and_it_is_told(xp, monkeypatch):
    from grace.kernels import library

    monkeypatch.delenv("GRACE_KERNELS")
    if library() is None:
        pytest.skip("kernels are not built")
    with pytest.warns(UserWarning, match="compile=True has no effect: native kernels, .* carry out 'blockint'"):
        simulate({**UNBIASED, "compile": True}, [gradients()], backend="torch")
    assert xp.forms.compilations == 0


def test_nothing_is_told_where_it_works(xp, without_inductor):
    found = simulate({**UNBIASED, "compile": True}, [gradients()] * 2, backend="torch", steps=2)
    plain = simulate(UNBIASED, [gradients()] * 2, backend="torch", steps=2)
    assert np.array_equal(found.means[0]["w"], plain.means[0]["w"])
    assert xp.forms.compilations == 2
