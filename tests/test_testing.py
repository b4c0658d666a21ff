"""The test kit: its laws hold for every memory and communicator, and each law rejects a method that breaks it."""

import inspect
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from methods import BACKENDS, backend

from grace import Combine, Compressor, Memory, Traits, registry
from grace.communicators.allgather import Allgather
from grace.compressors.measured.blockint import BlockInt
from grace.compressors.measured.powersgd import PowerSGD
from grace.compressors.measured.qsgd import QSGD
from grace.compressors.measured.topk import TopK
from grace.compressors.studies.dion import Dion
from grace.compressors.studies.randomk import RandomK
from grace.core.collectives import Gather
from grace.memories.ef21 import EF21
from grace.memories.onebit_adam import OneBitAdam
from grace.memories.residual import Residual
from grace.ops.validate import fitting, placed
from grace.testing import (
    check_communicator,
    check_compressor,
    check_memory,
    communicator_laws,
    communicators,
    compressors,
    memories,
    memory_laws,
)
from grace.testing.cases import carries

MATES = {"decoupled": Dion(), "diana": QSGD(), "momentum": TopK(compress_ratio=0.1), "none": QSGD()}
MEMORIES = [
    check
    for name, cls in registry.memories.items()
    for check in memory_laws(cls(freeze_step=2) if cls is OneBitAdam else cls(), MATES.get(name, TopK(0.1)))
] + list(memory_laws(EF21(momentum=0.3), TopK(0.1), ["numpy"]))


@pytest.mark.parametrize("check", MEMORIES, ids=lambda check: f"{type(check.run.args[1][0]).__name__}-{check}")
def test_memories_hold_their_laws(check):
    check.run()


CARRIED = [TopK(compress_ratio=0.1), RandomK(compress_ratio=0.1), BlockInt(block_size=64), PowerSGD(min_rate=1.0)]


def communicators_with_what_they_carry():
    """All pairs on NumPy and PyTorch. On TensorFlow the pairs share the laws; the remaining checks are exhaustive."""
    for cls in registry.communicators.values():
        pairs = [each for each in CARRIED if not cls.reduce_scatters and carries(cls(), each)]
        for number, compressor in enumerate(pairs):
            for law, check in enumerate(communicator_laws(cls(), compressor)):
                whole = check.backend != "tensorflow" or law % len(pairs) == number
                yield pytest.param(check, marks=[] if whole else pytest.mark.exhaustive)


COMMUNICATORS = list(communicators_with_what_they_carry())


@pytest.mark.parametrize(
    "check", COMMUNICATORS, ids=lambda c: "-".join([*(type(part).__name__ for part in c.run.args[1]), str(c)])
)
def test_communicators_hold_their_laws(check):
    check.run()


# -- what breaks a law is caught -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plain(Compressor):
    """Sends everything; base class of the broken methods below.

    Payload: float32[n].
    """

    traits = Traits(family="hybrid", unbiased=True, memory="none")

    def compress(self, x, state, ctx):
        return (x,), state

    def decompress(self, payload, ctx):
        return fitting(ctx.xp, payload[0], "float32", ctx.size, "elements")


@dataclass(frozen=True)
class NotFrozenValues(Plain):
    """Has a field whose values are never equal."""

    made: object = field(default_factory=object, init=False)


@dataclass(frozen=True)
class WrongDtype(Plain):
    """Sends int64 as bool."""

    def compress(self, x, state, ctx):
        return (x >= 0,), state

    def decompress(self, payload, ctx):
        return ctx.xp.cast(payload[0], "float32")


@dataclass(frozen=True)
class LooksAtRank(Plain):
    """Decodes by its own rank."""

    def decompress(self, payload, ctx):
        return super().decompress(payload, ctx) + float(ctx.rank)


@dataclass(frozen=True)
class ChangesGradient(Plain):
    """Writes into its input."""

    def compress(self, x, state, ctx):
        if ctx.xp.name == "numpy" and ctx.size:
            x[0] = 7
        return (x,), state


@dataclass(frozen=True)
class GlobalNumbers(Plain):
    """Uses NumPy's global generator."""

    def compress(self, x, state, ctx):
        np.random.standard_normal()  # noqa: NPY002
        return (x,), state


@dataclass(frozen=True)
class NotLinear(Plain):
    """Declares that payloads may be averaged, but squares them."""

    traits = replace(Plain.traits, combine=Combine.MEAN)

    def decompress(self, payload, ctx):
        return payload[0] * ctx.xp.abs(payload[0])


@dataclass(frozen=True)
class WrongResidual(Plain):
    """Feeds back what it has sent, instead of the error."""

    def residual(self, x, payload, ctx):
        return x


@dataclass(frozen=True)
class ForgetsInTime(WrongResidual):
    """Sends a half and drops the rest."""

    traits = replace(Plain.traits, unbiased=False, memory="residual")

    def compress(self, x, state, ctx):
        return (x * 0.5,), state

    def residual(self, x, payload, ctx):
        return x * 0.0


@dataclass(frozen=True)
class DividesByZero(Plain):
    """Divides by the largest element, which may be zero."""

    def compress(self, x, state, ctx):
        xp = ctx.xp
        return (x,) if not ctx.size else (x / xp.max(xp.abs(x)), xp.reshape(xp.max(xp.abs(x)), (1,))), state

    def decompress(self, payload, ctx):
        return payload[0] * payload[1] if len(payload) > 1 else payload[0]


@dataclass(frozen=True)
class ToolkitsDiffer(Plain):
    """Rounds on one toolkit and not on another."""

    def compress(self, x, state, ctx):
        return (ctx.xp.round(x) if ctx.xp.name == "torch" else x,), state


@dataclass(frozen=True)
class NoContraction(Plain):
    """Promises to contract, and doubles."""

    traits = replace(Plain.traits, unbiased=False)

    def contraction(self, n):
        return 0.5

    def decompress(self, payload, ctx):
        return payload[0] * 2.0 + 0.0


@dataclass(frozen=True)
class Biased(Plain):
    """Promises the mean, and is off by a tenth."""

    def variance(self, n):
        return 0.001

    def decompress(self, payload, ctx):
        return payload[0] * 1.1


@dataclass(frozen=True)
class NotInPieces(Plain):
    """Declares a block size, but computes one statistic for all blocks."""

    traits = replace(Plain.traits, block_size=8)

    def compress(self, x, state, ctx):
        xp = ctx.xp
        return (x, xp.reshape(xp.sum(x), (1,))), state


@dataclass(frozen=True)
class LosesNaN(Plain):
    """Turns values that are not finite into zeros."""

    def compress(self, x, state, ctx):
        return (ctx.xp.where(ctx.xp.isfinite(x), x, 0.0),), state


@dataclass(frozen=True)
class GrowsState(Plain):
    """Has a state that init did not make."""

    def compress(self, x, state, ctx):
        return (x,), {"seen": x}


@dataclass(frozen=True)
class Shrinks(Plain):
    """Keeps less after each step."""

    def init(self, ctx):
        return {"seen": ctx.xp.zeros(ctx.size)}

    def compress(self, x, state, ctx):
        return (x,), {"seen": x[1:]}


@dataclass(frozen=True)
class Steers(Plain):
    """Branches on the step in Python, which a graph cannot trace."""

    def compress(self, x, state, ctx):
        return (x * float(int(ctx.step) % 2 + 1),), state


@dataclass(frozen=True)
class WorkersDiffer(Plain):
    """Each worker decodes the gathered payloads in its own way."""

    def aggregate(self, payloads, ctx):
        return super().aggregate(payloads, ctx) + float(ctx.rank)


@dataclass(frozen=True)
class HiddenState(Plain):
    """Keeps a number outside the state."""

    counts: list = field(default_factory=list, compare=False, repr=False)

    def compress(self, x, state, ctx):
        self.counts.append(1)
        return (x * float(len(self.counts)),), state


@dataclass(frozen=True)
class AgreesAlone(Plain):
    """Declares that all workers agree on a payload, but does not communicate."""

    traits = replace(Plain.traits, combine=Combine.AGREED)


@dataclass(frozen=True)
class HidesInfinity(Plain):
    """Declares that its float32 arrays show NaN and infinity, but sends finite numbers."""

    traits = replace(Plain.traits, nonfinite_in_payload=True)

    def compress(self, x, state, ctx):
        return (ctx.xp.cast(x, "float16"),), state

    def decompress(self, payload, ctx):
        return ctx.xp.cast(payload[0], "float32")


@dataclass(frozen=True)
class Largest(Compressor):
    """Sends the element of largest magnitude.

    Payload: value float32[1]; position int32[1].
    """

    traits = Traits(family="sparsification")

    def compress(self, x, state, ctx):
        position = ctx.xp.topk_abs(x, 1)
        return (ctx.xp.take(x, position), position), state

    def decompress(self, payload, ctx):
        return ctx.xp.scatter(ctx.xp.zeros(ctx.size), payload[1], payload[0])


@dataclass(frozen=True)
class LargestAnyLength(Largest):
    """Checks the position, but not the payload's length."""

    def decompress(self, payload, ctx):
        return ctx.xp.scatter(ctx.xp.zeros(ctx.size), placed(ctx.xp, payload[1], ctx.size)[:1], payload[0][:1])


@dataclass(frozen=True)
class LargestFinite(Largest):
    """Hides NaN."""

    def decompress(self, payload, ctx):
        xp = ctx.xp
        value = fitting(xp, payload[0], "float32", 1, "value")
        position = placed(xp, fitting(xp, payload[1], "int32", 1, "position"), ctx.size)
        return xp.scatter(xp.zeros(ctx.size), position, xp.where(xp.isfinite(value), value, 0.0))


BROKEN = [
    (Largest, "damaged_payloads_are_refused"),
    (LargestAnyLength, "damaged_payloads_are_refused"),
    (LargestFinite, "damaged_payloads_are_refused"),
    (HidesInfinity, "marks_show_what_is_not_finite"),
    (NotFrozenValues, "declarations_make_sense"),
    (WrongDtype, "payloads_can_travel"),
    (AgreesAlone, "payloads_can_travel"),
    (LooksAtRank, "any_worker_decodes_the_same_bits"),
    (ChangesGradient, "arguments_are_left_alone_and_twice_is_the_same"),
    (HiddenState, "arguments_are_left_alone_and_twice_is_the_same"),
    (GlobalNumbers, "streams_are_keyed"),
    (NotLinear, "averaged_payloads_are_linear"),
    (WrongResidual, "what_is_sent_and_what_is_kept_add_up"),
    (ForgetsInTime, "nothing_is_lost_in_fifty_steps"),
    (DividesByZero, "finite_in_finite_out"),
    (ToolkitsDiffer, "toolkits_agree_with_numpy"),
    (NoContraction, "contractions_contract"),
    (Biased, "unbiased_methods_are_unbiased_with_the_stated_variance"),
    (NotInPieces, "pieces_of_whole_blocks_make_the_whole_payload"),
    (LosesNaN, "one_bad_element_is_seen_by_all_and_changes_no_state"),
    (WorkersDiffer, "shapes_and_dtypes_are_kept_and_all_workers_agree"),
    (GrowsState, "state_is_what_init_makes"),
    (Shrinks, "state_keeps_its_keys_shapes_and_dtypes"),
    (HiddenState, "a_checkpoint_continues_bit_for_bit"),
    (Steers, "a_step_is_traced_once"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls, law", BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_what_breaks_a_law_is_caught_by_it(cls, law):
    name = {"toolkits_agree_with_numpy": "torch", "a_step_is_traced_once": "tensorflow"}.get(law, "numpy")
    subject, xp = cls(), backend(name)
    with pytest.raises(Exception):  # noqa: B017 - a graph raises an error of its own
        compressors.LAWS[law](subject, xp)


def test_every_law_is_broken_by_something():
    assert {law for _, law in BROKEN} == set(compressors.LAWS)


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_sound_passes(name):
    backend(name)
    check_compressor(Plain(), backends=[name])


def test_the_law_the_toolkit_and_the_finding_are_named():
    with pytest.raises(
        AssertionError, match=r"LooksAtRank breaks the law 'any_worker_\w+' on numpy, shape \(1,\): shape"
    ):
        check_compressor(LooksAtRank(), backends=["numpy"])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_decoder_that_takes_position_minus_one_breaks_a_law(name):
    backend(name)
    found = "-1 in array 1 of 2, int32|raises .*grace.ops.validate|is decoded with"
    with pytest.raises(
        AssertionError, match=rf"'damaged_payloads_are_refused' on {name}, shape \(1000,\): .*({found})"
    ):
        check_compressor(Largest(), backends=[name])


def test_an_error_inside_a_law_names_the_law_too():
    @dataclass(frozen=True)
    class Fails(Plain):
        """Raises KeyError when it decodes."""

        def decompress(self, payload, ctx):
            raise KeyError("scale")

    with pytest.raises(AssertionError, match=r"breaks the law '\w+' on numpy, shape \(\d+,\): KeyError: 'scale'"):
        check_compressor(Fails(), backends=["numpy"])


@dataclass(frozen=True)
class Leaky(Memory):
    """Feeds back a tenth of the first element, and nothing else."""

    feedback = True

    def init(self, ctx):
        return {"kept": ctx.xp.zeros(ctx.size)}

    def compensate(self, x, state, ctx):
        return x + state["kept"], state

    def update(self, x, payload, compressor, state, ctx):
        return {"kept": compressor.residual(x, payload, ctx) * 0.1}


def test_a_memory_that_forgets_is_caught():
    check_memory(Residual(), backends=["numpy"])
    with pytest.raises(AssertionError, match="Leaky with topk breaks the law 'steady_gradients_come_through' on numpy"):
        check_memory(Leaky(), TopK(compress_ratio=0.05), backends=["numpy"])


@dataclass(frozen=True)
class FirstOnly(Allgather):
    """Takes worker 0's payload for the mean."""

    def reduce(self, x, method, state, ctx):
        payload, state = yield from method.encode(x, state, ctx)
        payloads = yield Gather(payload, ragged=method.compressor.traits.variable_length)
        return method.compressor.decompress(payloads[0], ctx), state


def test_a_communicator_that_takes_no_mean_is_caught():
    check_communicator(Allgather(), [TopK(compress_ratio=0.1)], backends=["numpy"])
    with pytest.raises(AssertionError, match="FirstOnly with topk breaks the law"):
        check_communicator(FirstOnly(), [TopK(compress_ratio=0.1)], backends=["numpy"])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        communicators.LAWS["nothing_is_lost_without_compression"](FirstOnly(), TopK(0.1), backend("numpy"))


def test_every_law_says_what_it_is():
    for laws in (compressors.LAWS, memories.LAWS, communicators.LAWS):
        assert all(inspect.getdoc(law) for law in laws.values())
