"""Triton's kernels of groups in its interpreter against the native library and the plain functions.

Run by tests/test_triton.py, as tests of pytest.
"""

import ctypes
import os
import warnings

# Triton reads this when it is imported, so it must not be set in a shared process.
assert os.environ["TRITON_INTERPRET"] == "1"

import numpy as np
import pytest
import torch
from methods import PLAIN, built, lockstep, states, unchanged
from support.cases import in_turn
from support.groups import drawn, equal, groups_of, step, team
from support.kernels import vector

from grace.backends import get_backend
from grace.backends.torch import TorchBackend
from grace.core import Context
from grace.engine.groups.devices import DeviceCoding, DeviceDecoder, DeviceEncoder
from grace.engine.groups.native import Decoder, Encoder, Message, Point
from grace.engine.groups.recipes import recipe
from grace.factory import grace_from_params
from grace.kernels import library
from grace.kernels.triton import groups, launcher, selections
from grace.transports.local import LocalTransport

SIZES = (1, 9, 511, 512, 513, 65, 1000, 130, 66, 9001)
KIND = {65: "tiny", 1000: "special", 130: "ties", 66: "zeros"}
"""The kinds of numbers of some tensors; those of the others are normally distributed."""
CODED = {
    "int4": {"compressor": "blockint"},
    "int2 at random": {"compressor": "blockint", "bits": 2, "block_size": 64, "rounding": "stochastic"},
    "int8 at random, one scale": {"compressor": "blockint", "bits": 8, "block_size": 0, "rounding": "stochastic"},
    "int8, large blocks": {"compressor": "blockint", "bits": 8, "block_size": 9000},
    "signs": {"compressor": "efsignsgd"},
    "signs, small blocks": {"compressor": "efsignsgd", "block_size": 24},
    "signs, one scale": {"compressor": "efsignsgd", "block_size": 0},
    "signs, large blocks": {"compressor": "efsignsgd", "block_size": 9000},
    "eden": {"compressor": "eden", "bits": 3, "block_size": 64},
    "eden, large blocks": {"compressor": "eden", "bits": 4, "block_size": 8192},
    "qsgd": {"compressor": "qsgd"},
    "qsgd, 3 bits": {"compressor": "qsgd", "quantum_num": 3, "bucket_size": 24},
    "qsgd, one norm": {"compressor": "qsgd", "quantum_num": 20, "bucket_size": 0},
    "terngrad": {"compressor": "terngrad", "block_size": 512},
    "terngrad, one scale": {"compressor": "terngrad"},
    "natural": {"compressor": "natural", "block_size": 512},
    "natural, one scale": {"compressor": "natural"},
    "natural, a fixed window": {"compressor": "natural", "window": "grace", "block_size": 64},
    "natural, to the nearest": {"compressor": "natural", "stochastic": False, "block_size": 64, "memory": "none"},
    "votes": {"compressor": "signsgd"},
    "topk": {"compressor": "topk", "compress_ratio": 0.05},
    "topk, most": {"compressor": "topk", "compress_ratio": 0.7},
    "drive": {"compressor": "eden", "bits": 1, "biased": True, "block_size": 512},
}
CARRIERS = {
    "gathered": {"communicator": "allgather"},
    "two stages": {"communicator": "twostage", "min_shard": 600},
}


# "natural, to the nearest" runs without a residual: with one, natural forms no group.
pytestmark = pytest.mark.filterwarnings("ignore:'natural' without error feedback:UserWarning")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    built()
    monkeypatch.setenv("GRACE_KERNELS", "triton")


@pytest.fixture
def xp():
    found = get_backend("torch")
    found.__dict__.pop("_device_kernels", None)  # a test may have made it fail
    return found


def native(monkeypatch):
    monkeypatch.setenv("GRACE_KERNELS", PLAIN)
    return library()


def compressor_of(params):
    return grace_from_params(params, LocalTransport()).method.compressor


def points_of(compressor, xp, sizes, workers=1, rank=0):
    """Points of tensors for two messages, each after a gap; the last one is a shard from the middle of its tensor."""
    found = []
    for number, n in enumerate(sizes):
        offset = 61440 if number == len(sizes) - 1 else 0  # its noise takes two rows of the table
        ctx = Context(xp, f"t{number}", (n,), offset=offset, seed=5, rank=rank, world_size=workers)
        found.append(Point(ctx, recipe(compressor, ctx), number % 2))
    return found


def starts_of(sizes):
    return np.cumsum([3, *(n + 5 for n in sizes)])[:-1]


def memory(sizes, seed, kinds=None):
    """A vector with these segments, and other numbers in the gaps between them."""
    whole = torch.full((int(sum(sizes)) + 5 * len(sizes) + 8,), 7.0)
    for number, (at, n) in enumerate(zip(starts_of(sizes).tolist(), sizes, strict=True)):
        whole[at : at + n] = torch.from_numpy(vector(n, seed + number, (kinds or {}).get(n, "normal")))
    return whole


def same(one, two):
    """Assert equal bits; NaN and infinity may differ, as residuals of blocks that are not finite are discarded."""
    one, two = one.numpy().view(np.uint32), two.numpy().view(np.uint32)
    one, two = (np.where((each & 0x7FFFFFFF) >= 0x7F800000, 0x7FC00000, each) for each in (one, two))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("method", CODED)
def test_a_group_encodes_and_decodes_as_the_native_library_does(xp, monkeypatch, method):
    """Messages, means, new residuals and x, with no, one or two rows of state; nothing is written into gaps."""
    sizes, compressor, workers, at = SIZES, compressor_of(CODED[method]), 3, 4 * starts_of(SIZES)
    triton, host = xp.kernels.groups, native(monkeypatch)
    messages = []
    for rank, rows in enumerate((0, 1, 2)):
        points = points_of(compressor, xp, sizes, workers, rank)
        floats = any(dtype == "float32" for _, dtype, _ in points[0].recipe.arrays)
        rows = rows if floats else 0  # without float32 arrays the library keeps no residuals, and checks no values
        message, found = Message(points, 2), []
        for mine in (True, False):
            x, old, new = memory(sizes, 10 * rank, KIND), memory(sizes, 100 + rank), memory(sizes, 200)
            out = torch.full((message.size,), 165, dtype=torch.uint8)
            encoder = DeviceEncoder(triton, compressor, points, message) if mine else Encoder(host, points, message, 1)
            state = (0, 0) if rows == 0 else (old.data_ptr() + at, (old if rows == 1 else new).data_ptr() + at)
            with np.errstate(all="ignore"):
                encoder.encode(x.data_ptr() + at, *state, out.data_ptr(), 4)
            found.append((x, old, new, out))
        *vectors, sent = zip(*found, strict=True)
        for one, two in vectors:
            same(one, two)
        same_messages(points, message, *sent)
        messages.append(sent[0])
    bases = np.array([each.data_ptr() for each in messages])
    for senders in (np.tile(np.arange(workers), (len(sizes), 1)), np.arange(len(sizes))[:, None] % workers):
        places = {name: message.begins + at for name, at in message.places.items()}
        one, two = (memory(sizes, 300) for _ in range(2))
        decoder = DeviceDecoder(triton, compressor, points, places, senders, np.arange(len(points)))
        other = Decoder(host, points, places, senders, 1)
        decoder.mean(bases, one.data_ptr() + at, 4)
        other.mean(bases, two.data_ptr() + at, 4)
        same(one, two)
        if not floats:
            continue
        flags = torch.ones(len(points), dtype=torch.int32)
        decoder.judge(bases, flags)
        sent = [[array for _, payload in other.payloads(n, bases) for array in payload] for n in range(len(sizes))]
        finite = [all(np.isfinite(array).all() for array in arrays if array.dtype == "float32") for arrays in sent]
        np.testing.assert_array_equal(flags.numpy() != 0, finite)
    assert not triton.failed


def same_messages(points, message, one, two):
    # NaN scales may have either sign; padding is not compared.
    for number, point in enumerate(points):
        for name, dtype, n in point.recipe.arrays:
            begin = int(message.begins[number] + message.places[name][number])
            a, b = (each.numpy()[begin:][: n * np.dtype(dtype).itemsize].view(dtype) for each in (one, two))
            np.testing.assert_array_equal(a, b, err_msg=f"{name} of {number}")


@pytest.mark.filterwarnings("ignore:'natural' without error feedback")
@in_turn("method, carrier", [(method,) for method in CODED], CARRIERS)
def test_steps_have_the_bits_of_the_plain_functions(xp, monkeypatch, method, carrier):
    """Means, states and bytes, with a NaN in one tensor, over three steps."""
    sizes, found = (1, 9, 513, 2500), {}

    def poison(gradients):
        gradients[-1]["t513"][5] = float("nan")

    for use in ("triton", "off"):
        monkeypatch.setenv("GRACE_KERNELS", use)
        graces = team({**CODED[method], **CARRIERS[carrier]}, 3, xp, sizes)
        groups = groups_of(graces[0]).groups
        assert [len(each.units) for each in groups] == ([len(sizes)] if use == "triton" else [])
        assert all(each.group.on_device for each in groups)
        means = [step(graces, xp, number, poison if number == 2 else None, sizes) for number in (1, 2, 3)]
        report = graces[0].report()
        found[use] = means, states(graces), [grace.report().bytes_sent for grace in graces]
        assert report.runs_as == ("triton" if use == "triton" else "plain functions")
    for one, two in zip(found["triton"][0], found["off"][0], strict=True):
        equal(one, two)
    assert unchanged(found["triton"][1], found["off"][1])
    assert found["triton"][2] == found["off"][2]


@pytest.mark.filterwarnings("ignore:'randomk' without error feedback")
@pytest.mark.parametrize("broken", [(), ("group_digits",), ("group_scatter", "group_finite")], ids=str)
@pytest.mark.parametrize("memory", ["residual", "none"])
def test_randomk_draws_its_positions_on_the_device(xp, monkeypatch, memory, broken):
    """Bits, states and bytes equal the plain functions', also with a NaN that is not sent, and with broken kernels."""
    sizes, found = (1, 9, 513, 2500), {}

    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("no device")

    def poison(gradients):
        gradients[-1]["t513"][5] = float("nan")

    for use in ("off", "triton"):
        monkeypatch.setenv("GRACE_KERNELS", use)
        graces = team({"compressor": "randomk", "compress_ratio": 0.05, "memory": memory}, 3, xp, sizes)
        for name in broken if use == "triton" else ():
            monkeypatch.setattr(groups if hasattr(groups, name) else selections, name, Broken())
        for each in graces:  # check all before one fails, since they share a backend
            assert [group.group.on_device for group in groups_of(each).groups] == [True] * (use == "triton")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            means = [step(graces, xp, number, poison if number == 2 else None, sizes) for number in (1, 2, 3)]
        assert len(warned) == (use == "triton" and bool(broken))
        found[use] = means, states(graces), [grace.report().bytes_sent for grace in graces]
    for one, two in zip(found["triton"][0], found["off"][0], strict=True):
        equal(one, two)
    assert unchanged(found["triton"][1], found["off"][1])
    assert found["triton"][2] == found["off"][2]


def told(xp, params, sizes=(9, 513, 1500)):
    """Means and states of exchanges that count, are discarded, joined or abandoned, are partly absent or not finite."""
    graces, found = team({**params, "nonfinite": "zero"}, 2, xp, sizes), []
    for each in graces:
        each.defer_commit = each.track_missing = True

    small, middle, large = (f"t{size}" for size in sizes)

    def change(gradients):
        gradients[0][middle].reshape(-1)[7] = float("inf")
        gradients[0][small] = None
        for mine in gradients:
            mine[large] = None

    def kept(numbers, change=None):
        found.extend(step(graces, xp, number, change, sizes) for number in numbers)

    kept([1])
    for each in graces:
        each.commit()
    kept([2, 3])
    for each in graces:
        each.discard()
    kept([4, 5])
    for each in graces:
        each.decide(applied=[middle], discarded=[small, large])
    for rounds in (0, 1, 2):
        for rank, each in enumerate(graces):
            each.launch({name: xp.asarray(x, "float32") for name, x in drawn(9, rank, sizes).items()}, spent=True)
        for _ in range(rounds):
            for each in graces:
                each.advance()
        for each in graces:
            each.abandon()
    kept([6], change)
    for each in graces:
        each.commit()
    kept([7])
    return found, states(graces)


@pytest.mark.parametrize("reads", [True, False], ids=["on a host", "as on a device"])
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("method", ["int4", "signs, one scale"])
def test_states_are_decided_as_those_of_the_plain_functions(xp, monkeypatch, method, carrier, reads):
    params = {**CODED[method], **CARRIERS[carrier]}
    monkeypatch.setattr(TorchBackend, "can_read_values", reads)
    means, after = told(xp, params)
    monkeypatch.setattr(TorchBackend, "can_read_values", True)
    monkeypatch.setenv("GRACE_KERNELS", "off")
    expected, state = told(xp, params)
    for one, two in zip(means, expected, strict=True):
        for mine, other in zip(one, two, strict=True):
            for name, mean in mine.items():
                assert (mean is None) == (other[name] is None)
                np.testing.assert_array_equal(mean, other[name], err_msg=name)
    assert unchanged(after, state)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("method", ["int4", "int2 at random"])
def test_no_step_reads_a_value(xp, monkeypatch, method, carrier):
    """A read would make the host wait for the device."""
    monkeypatch.setattr(TorchBackend, "can_read_values", False)
    graces = team({**CODED[method], **CARRIERS[carrier]}, 2, xp, (9, 700))
    reads, launch = [], launcher.Launcher._launch

    def reading(name):
        def read(self, *rest, **form):
            if not inside:
                reads.append(name)
            return original(self, *rest, **form)

        original = getattr(torch.Tensor, name)
        return read

    def launched(self, *rest, **form):
        inside.append(True)
        try:
            launch(self, *rest, **form)
        finally:
            inside.pop()

    inside = []
    monkeypatch.setattr(launcher.Launcher, "_launch", launched)
    for name in ("item", "cpu", "tolist", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, reading(name))
    gradients = [{n: xp.asarray(x, "float32") for n, x in drawn(1, rank, (9, 700)).items()} for rank in range(2)]
    lockstep(graces, gradients)
    assert reads == []


@pytest.mark.parametrize("broken", ["group_encode", "group_mean", "group_finite", "group_restore"])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_kernel_that_fails_leaves_the_messages_as_they_are(xp, monkeypatch, carrier, broken):
    """This worker continues with the plain functions; the others do not notice."""

    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("first line\nptxas was not found")

    sizes, params, found = (9, 513, 1500), {**CODED["int4"], **CARRIERS[carrier]}, {}

    def poison(gradients):
        gradients[-1]["t513"][5] = float("nan")

    for use in ("off", "triton"):
        monkeypatch.setenv("GRACE_KERNELS", use)
        graces = team(params, 3, xp, sizes)
        if use == "off":
            means = [step(graces, xp, number, poison if number == 2 else None, sizes) for number in (1, 2, 3)]
        else:
            monkeypatch.setattr(groups, broken, Broken())
            with pytest.warns(UserWarning, match="run without them, slower: ptxas was not found") as warned:
                means = [step(graces, xp, number, poison if number == 2 else None, sizes) for number in (1, 2, 3)]
            assert len(warned) == 1
            assert graces[0].report().runs_as != "triton"
            assert groups_of(graces[0]).groups
        found[use] = means, states(graces)
    for one, two in zip(found["triton"][0], found["off"][0], strict=True):
        equal(one, two)
    assert unchanged(found["triton"][1], found["off"][1])


@pytest.mark.parametrize("method, launches", [("int4", 4), ("eden", 3), ("signs, one scale", 6), ("topk", 7)])
def test_a_step_takes_the_same_launches_for_any_number_of_tensors(xp, monkeypatch, method, launches):
    """One launch each to encode, to check, to decode and to restore states; large blocks need two more.

    Top-k needs four to encode.
    """
    launched, launch = [], launcher.Launcher._launch
    monkeypatch.setattr(
        launcher.Launcher, "_launch", lambda self, kernel, *rest, **form: launched.append(kernel)
        or launch(self, kernel, *rest, **form),
    )  # fmt: skip
    for sizes in ((600, 700), (600, 601, 700, 800, 900)):
        graces = team(CODED[method], 1, xp, sizes, nonfinite="zero")
        launched.clear()
        step(graces, xp, 1, sizes=sizes)
        assert len(launched) == launches


@pytest.mark.parametrize("odd", [0, 3])
def test_messages_are_copied_where_their_numbers_are_not_aligned(xp, odd):
    """A device cannot load them; two messages of one round may follow each other without padding."""
    whole = [torch.arange(40, dtype=torch.uint8) + rank for rank in range(2)]
    received = [(each[odd : odd + 32],) for each in whole]
    landed = DeviceCoding(xp, None, None).landed(received, 1)
    assert not (landed.addresses % 4).any()
    same_place = [int(at) == array.data_ptr() for at, (array,) in zip(landed.addresses, received, strict=True)]
    assert same_place == [not odd] * 2
    for at, (array,) in zip(landed.addresses.tolist(), received, strict=True):
        assert bytes((ctypes.c_char * 32).from_address(at)) == bytes(array.tolist())


FACTORED = {
    "powersgd": {"compressor": "powersgd", "compress_rank": 3},
    "powersgd alone": {"compressor": "powersgd", "compress_rank": 3, "memory": "none"},
    "acpsgd": {"compressor": "acpsgd", "compress_rank": 3},
    "acpsgd alone": {"compressor": "acpsgd", "compress_rank": 3, "memory": "none"},
    "dion": {"compressor": "dion", "rank_fraction": 0.1},
    "dion alone": {"compressor": "dion", "rank_fraction": 0.1, "memory": "none", "output_axis": -1},
}


def near(mine, other, most, name):
    """Whether numbers differ by at most this part of the largest."""
    np.testing.assert_allclose(mine, other, 0, most * np.nanmax(np.abs(other), initial=0), err_msg=str(name))


@pytest.mark.filterwarnings("ignore:'(powersgd|acpsgd|dion)' without error feedback", "ignore:.*run without them")
@pytest.mark.parametrize("method", FACTORED)
@pytest.mark.parametrize("where", ["on a host", "as on a device", "without kernels"])
def test_factors_are_exchanged_by_batched_products(xp, monkeypatch, method, where):
    """Equals the plain functions up to rounding, with one or two rows of state, a NaN, and dead directions.

    Rounding is at most 1e-6 of the largest number in the first step; later ones begin with different states.
    """
    shapes, found, params = ((40, 50), (50, 40), (16, 8, 3, 3), (40, 50, 1), (60, 30)), {}, FACTORED[method]

    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("no device")

    def first(gradients):
        for mine in gradients:
            mine[f"t{shapes[3]}"].zero_()  # its directions die, but not those of equal shape

    def poison(gradients):
        gradients[-1][f"t{shapes[0]}"].reshape(-1)[5] = float("nan")
        for mine in gradients:
            mine[f"t{shapes[1]}"].zero_()

    changes = {1: first, 2: poison, 4: poison}
    if where == "without kernels":
        monkeypatch.setattr(groups, "group_restore", Broken())
    for use in ("triton", "off"):
        monkeypatch.setenv("GRACE_KERNELS", use)
        monkeypatch.setattr(TorchBackend, "can_read_values", where != "as on a device" or use == "off")
        graces, means = team(params, 2, xp, shapes), []
        grouped = groups_of(graces[0]).groups
        assert [each.group.on_device for each in grouped] == [True] * (use == "triton")
        for each in graces:
            each.track_missing = True
        for number in range(1, 6):
            for each in graces:
                each.defer_commit = number > 3
            means.append(step(graces, xp, number, changes.get(number), shapes))
            for each in graces if number > 3 else ():
                (each.discard if number == 4 else each.commit)()
        found[use] = means, states(graces), [grace.report().bytes_sent for grace in graces]
        failed = any(each.group.library.failed for each in grouped)
        assert failed == (use == "triton" and where == "without kernels" and "memory" not in params)
    assert found["triton"][2] == found["off"][2]
    for number, (one, two) in enumerate(zip(found["triton"][0], found["off"][0], strict=True)):
        for mine, other in zip(one, two, strict=True):
            for name, mean in mine.items():
                near(mean, other[name], 1e-5 if number else 1e-6, name)
        for name in one[0]:
            np.testing.assert_array_equal(one[0][name], one[1][name])  # all workers have the same mean
    for one, two in zip(found["triton"][1], found["off"][1], strict=True):
        for key, array in one.items():
            near(array, two[key], 1e-5, key)


@pytest.mark.parametrize("reads", [True, False], ids=["on a host", "as on a device"])
@pytest.mark.parametrize("method", ["powersgd", "acpsgd", "dion"])
def test_states_of_factors_are_decided_as_those_of_the_plain_functions(xp, monkeypatch, method, reads):
    shapes = (40, 50), (50, 40), (60, 30)
    monkeypatch.setattr(TorchBackend, "can_read_values", reads)
    means, after = told(xp, FACTORED[method], shapes)
    monkeypatch.setattr(TorchBackend, "can_read_values", True)
    monkeypatch.setenv("GRACE_KERNELS", "off")
    expected, state = told(xp, FACTORED[method], shapes)
    for one, two in zip(means, expected, strict=True):
        for mine, other in zip(one, two, strict=True):
            for name, mean in mine.items():
                assert (mean is None) == (other[name] is None)
                if mean is not None:
                    near(mean, other[name], 1e-5, name)
    for one, two in zip(after, state, strict=True):
        for key, array in one.items():
            near(array, two[key], 1e-5, key)


def test_dion_returns_zero_where_its_directions_see_nothing(xp, monkeypatch):
    """Equals the plain functions; a tensor of equal shape is not affected."""
    shapes = (blind, seeing) = (40, 50), (40, 50, 1)

    def first_column(gradients):
        for mine in gradients:
            mine[f"t{blind}"][:, 1:] = 0

    found = []
    for use in ("triton", "off"):
        monkeypatch.setenv("GRACE_KERNELS", use)
        graces = team(FACTORED["dion"], 2, xp, shapes)
        for setup in (each.setup for each in graces):
            for unit in (unit for bucket in setup.table.buckets for unit in bucket.units):
                if unit.shape == blind:
                    setup.store.cells_by_key(unit, 0)["compressor/q"].read()[:, 0] = 0
        found.append((step(graces, xp, 1, first_column, shapes)[0], states(graces)[0]))
    (mean, state), (expected, plain) = found
    assert not mean[f"t{blind}"].any()
    assert mean[f"t{seeing}"].all()
    for one, two in ((mean, expected), (state, plain)):
        for key, array in one.items():
            near(array, two[key], 1e-6, key)


@pytest.mark.parametrize("method, rounds", [("powersgd", 2), ("acpsgd", 1), ("dion", 2)])
def test_a_round_of_factors_is_one_collective(xp, monkeypatch, method, rounds):
    """For any number of tensors, equal on all workers, and as large as the factors."""
    shapes, sent = ((40, 50), (50, 40), (40, 50, 1), (60, 30)), []
    graces = team(FACTORED[method], 2, xp, shapes)
    (grouped,) = groups_of(graces[0]).groups
    exchange = type(grouped.group).exchange

    def recorded(self, x, step):
        program, answer = exchange(self, x, step), None
        while True:
            try:
                asked = program.send(answer)
            except StopIteration as end:
                return end.value
            sent.append([tuple(array.shape) for array in asked.arrays])
            answer = yield asked

    monkeypatch.setattr(type(grouped.group), "exchange", recorded)
    step(graces, xp, 1, sizes=shapes)
    expected = [[form.shape for form in asked.arrays] for asked in grouped.group.asked]
    assert len(expected) == rounds
    assert sorted(sent) == sorted(expected * 2)
    sizes = [grouped.group._compressor.sizes(ctx) for ctx in grouped.group.contexts]
    assert expected == [[(sum(each[2] * each[side] for each in sizes),)] for side in range(rounds)]
