"""Traits are cached, but are no hyper-parameters. Former attributes of methods still work."""

import copy
import pickle
import re
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest

from grace import Combine, Compressor, Traits, simulate
from grace.compressors.measured.blockint import BlockInt
from grace.compressors.measured.qsgd import QSGD
from grace.compressors.measured.topk import TopK
from grace.core import Resize
from grace.core.memory import FORMER as FORMER_OF_MEMORIES
from grace.core.registry import compressors
from grace.core.traits import FORMER
from grace.memories.none import NoMemory


def test_cached_traits_are_no_part_of_a_compressor():
    for name, cls in compressors.items():
        fresh, read = cls(), cls()
        assert isinstance(read.traits, Traits), name
        assert fresh == read, name
        assert hash(fresh) == hash(read), name
        assert repr(fresh) == repr(read), name
        assert not {b"Traits", b"Elements"} & {*re.findall(rb"\w+", pickle.dumps(read))}, name
        for copied in (replace(read), copy.copy(read), copy.deepcopy(read), pickle.loads(pickle.dumps(read))):
            assert copied == read, name
            assert copied.traits == read.traits, name


def test_traits_follow_replaced_hyper_parameters():
    method = BlockInt(rounding="nearest", block_size=512)
    assert (method.traits.unbiased, method.traits.block_size) == (False, 512)
    other = replace(method, rounding="stochastic", block_size=0)
    assert (other.traits.unbiased, other.traits.block_size, other.traits.memory) == (True, None, "none")


def test_traits_can_be_compared_and_hashed():
    one, other = (Traits(reshard={"seen": compressors["adacomp"]().traits.reshard["residual"]}) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Traits()


# -- the attributes that traits replaced ---------------------------------------------------------------------------
class Whole(Compressor):
    """Sends everything."""

    def compress(self, x, state, ctx):
        return (x,), state

    def decompress(self, payload, ctx):
        return payload[0]


def declared(*bases, **names):
    """A frozen dataclass that declares these, with the warning that this gives."""
    with pytest.warns(DeprecationWarning, match="declare traits") as caught:
        made = dataclass(frozen=True)(type("Mine", bases, names))
    (warning,) = caught
    return made, str(warning.message)


def test_each_former_attribute_becomes_its_trait():
    values = {"combine": Combine.MEAN, "family": "hybrid", "memory": "none", "summed": ("int8", 1), "resize": {"a": 1}}
    for former, name in FORMER.items():
        value = values.get(former, 7)
        made, said = declared(Whole, **{former: value})
        assert made().traits == replace(Traits(), **{name: value})
        assert said == f"Mine declares {former}: declare traits = Traits({name}=...) instead"


def test_former_properties_are_computed_from_the_instance():
    names = {"__annotations__": {"width": int}, "width": 8, "block": property(lambda self: self.width), "vote": True}
    made, said = declared(Whole, **names)
    assert "block, vote" in said
    assert "traits = Traits(block_size=..., majority_vote=...)" in said
    assert made().traits == Traits(block_size=8, majority_vote=True)
    assert made(width=16).traits == Traits(block_size=16, majority_vote=True)
    assert made(width=16).block == 16


def test_former_fields_are_computed_from_the_instance():
    with pytest.warns(DeprecationWarning, match="declares memory") as caught:

        @dataclass(frozen=True)
        class Mine(Whole):
            memory: str = field(default="none")

    assert caught[0].filename == __file__
    assert Mine().traits.memory == "none"
    assert Mine("residual").traits.memory == "residual"


def test_former_attributes_change_inherited_traits():
    made, _ = declared(TopK, memory="dgc")
    assert made(0.1).traits == replace(TopK(0.1).traits, memory="dgc")
    assert made(0.1, selector="sampled").traits.variable_length
    further, said = declared(made, largest=1e4)
    assert "memory" not in said
    assert further(0.1).traits == replace(made(0.1).traits, max_magnitude=1e4)
    assert made(0.1).traits.max_magnitude == 1e30
    inside, _ = declared(type("Mixin", (), {"unbiased": True}), Whole)
    assert inside().traits.unbiased


def test_a_former_property_that_asks_super_fails_by_name():
    with pytest.warns(DeprecationWarning, match="Mine declares unbiased"):

        class Mine(BlockInt):
            @property
            def unbiased(self):
                return super().unbiased and self.bits == 8

    with pytest.raises(AttributeError, match="'super' object has no attribute 'unbiased'"):
        Mine().unbiased  # noqa: B018


def test_a_class_that_declares_traits_may_use_the_names_otherwise():
    @dataclass(frozen=True)
    class Mine(Whole):
        block: int = 3
        traits = Traits(unbiased=True)

    assert Mine().traits == Traits(unbiased=True)
    assert Mine(block=4).block == 4


def test_former_attributes_can_be_read():
    for former, name in FORMER.items():
        with pytest.warns(DeprecationWarning, match=f"{former} is now traits.{name}") as caught:
            assert getattr(QSGD(), former) == getattr(QSGD().traits, name)
        assert caught[0].filename == __file__
    shown = {*dir(QSGD()), *dir(QSGD)}
    assert not shown & set(FORMER)
    with pytest.raises(AttributeError, match="'QSGD' object has no attribute 'blocks'"):
        QSGD().blocks  # noqa: B018


def test_a_method_with_former_attributes_is_carried_out_as_before():
    def compress(self, x, state, ctx):
        return (ctx.xp.cast(x, "float16"),), state

    def decompress(self, payload, ctx):
        return ctx.xp.cast(payload[0], "float32")

    made, _ = declared(Compressor, compress=compress, decompress=decompress, block=property(lambda self: 8))
    gradients = [{"w": np.full(4096, worker, np.float32)} for worker in range(4)]
    out = simulate({"compressor": made(), "communicator": "twostage"}, gradients)  # twostage needs blocks
    assert np.array_equal(out.means[3]["w"], np.full(4096, 1.5, np.float32))
    assert out.report.method == "Mine + residual + twostage"


def test_former_names_of_a_memory_become_those_of_today():
    with pytest.warns(DeprecationWarning, match=r"Mine\.\w+ is now") as caught:

        @dataclass(frozen=True)
        class Mine(NoMemory):
            momentum_inside = True
            server = NoMemory()
            plain = property(lambda self: False)
            resize: ClassVar = {"momentum": Resize.MEAN}

            def finish(self, mean, compressor, state, ctx):
                return mean * 2.0, state

            def finish_dense(self, mean, state, ctx):
                return mean * 3.0, state

    assert len(caught) == len(FORMER_OF_MEMORIES)
    assert {warning.filename for warning in caught} == {__file__}
    memory = Mine()
    assert (memory.includes_momentum, memory.standard_feedback) == (True, False)
    assert (memory.second_stage, memory.reshard) == (NoMemory(), {"momentum": Resize.MEAN})
    gradients = [{"w": np.full(4096, worker, np.float32), "b": np.full(2, worker, np.float32)} for worker in range(2)]
    out = simulate({"compressor": "terngrad", "memory": memory}, gradients).means[0]
    assert np.array_equal(out["w"], np.full(4096, 1.0, np.float32))
    assert np.array_equal(out["b"], np.full(2, 1.5, np.float32))
