"""Bad input: a short `python -m benchmarks.fuzz`, and that it detects removed checks."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from methods import BACKENDS, backend

sys.path.insert(0, str(Path(__file__).parents[1]))
from table import ROWS

from benchmarks.fuzz import Payloads, Silent, Target, apart, go, targets
from grace.engine.codecs import PendingMean

LOADERS = targets(())
EACH, MANY = 24, 150  # inputs of each method, and of each loader


def checked(chosen, count):
    found = [go(target, 0, count) for target in chosen]
    assert [(each.target, each.notes) for each in found if each.failures] == []
    assert sum(each.inputs for each in found) == count * len(found) > 0
    return found


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", BACKENDS)
def test_no_payload_and_no_message_does_harm(name):
    backend(name)
    found = checked(targets((name,))[: -len(LOADERS)], EACH // (3 if name == "tensorflow" else 1))
    for each in found:  # each target must reject some inputs, and accept others
        assert each.refused > 0, each.target
    assert sum(each.harmless for each in found) > len(found)


@pytest.mark.parametrize("target", LOADERS, ids=lambda target: target.name)
def test_no_file_and_no_setting_does_harm(target):
    (found,) = checked([target], MANY)
    assert found.refused > MANY // 3
    assert found.harmless > 0


# -- what it is there to find -----------------------------------------------------------------------------------------
def silent(rng):
    raise Silent("nobody looked")


def odd(rng):
    raise KeyError("key")


def dies(rng):
    if rng.random() < 0.2:
        os.kill(os.getpid(), signal.SIGKILL)


def hangs(rng):
    if rng.random() < 0.1:
        time.sleep(60)


def test_what_is_taken_silently_and_what_is_odd_is_counted():
    found = go(Target("silent", lambda: silent), 0, 3)
    assert (found.silent, found.failures, len(found.notes)) == (3, 3, 3)
    found = go(Target("odd", lambda: odd), 0, 3)
    assert (found.odd, found.failures) == (3, 3)
    assert "input 0: KeyError('key') at test_fuzz.py" in found.notes[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_an_input_that_kills_or_holds_a_process_costs_that_input_alone():
    deaths = sum(random.Random(f"0 dies {number}").random() < 0.2 for number in range(30))
    hung = sum(random.Random(f"0 hangs {number}").random() < 0.1 for number in range(20))
    fine = Target("fine", lambda: lambda rng: None)
    jobs = [(fine, 5), (Target("dies", lambda: dies), 30), (Target("hangs", lambda: hangs), 20), (fine, 5)]
    first, died, held, last = apart(jobs, hang=1.0)
    assert [(each.target, each.harmless, each.failures) for each in (first, last)] == [("fine", 5, 0)] * 2
    assert (died.inputs, died.crash, died.harmless) == (30, deaths, 30 - deaths)
    assert (held.inputs, held.hang, held.harmless) == (20, hung, 20 - hung)
    assert deaths > 2
    assert hung > 0
    assert "exit code -9" in died.notes[0]


class Careless(Payloads):
    """A decoder that writes one element beyond the result."""

    def __init__(self):
        super().__init__(next(row for row in ROWS if row.name == "topk"), "numpy", 300)
        array = PendingMean.array

        def beyond(mean, out=None):
            if out is not None:
                out.base[-1] = 0.0
            return array(mean, out)

        self.beyond = beyond


def test_what_is_written_outside_is_seen(monkeypatch):
    careless = Careless()
    careless.decode(careless.good)
    monkeypatch.setattr(PendingMean, "array", careless.beyond)
    with pytest.raises(Silent, match="outside"):
        careless.decode(careless.good)


@pytest.mark.parametrize("broken", ["lengths", "positions", "messages"])
def test_a_check_that_is_taken_away_is_missed(broken, monkeypatch):
    """The fuzzer fails when a kind of check is disabled."""
    from grace.backends.numpy import NumpyBackend
    from grace.compressors import efsignsgd
    from grace.transports.packer import Packer

    monkeypatch.setenv("GRACE_KERNELS", "off")
    if broken == "positions":
        monkeypatch.setattr(NumpyBackend, "sound", lambda self, x, ok, message: x)
        target = "payload numpy topk,compress_ratio=0.3,index_coding=int32"
    elif broken == "lengths":
        monkeypatch.setattr(efsignsgd, "fitting", lambda xp, array, *rest: array)
        target = "payload numpy efsignsgd"
    else:
        monkeypatch.setattr(Packer, "unpack", lambda self, data, layout, sender: self.cut(data, layout))
        target = "message numpy topk"
    chosen = next(each for each in targets(("numpy",)) if each.name.startswith(target))
    assert go(chosen, 0, 60).failures > 0
    monkeypatch.undo()
    assert go(chosen, 0, 60).failures == 0


def test_inputs_can_be_made_again():
    target = next(each for each in targets(("numpy",)) if each.name.startswith("payload numpy topk"))
    whole, part = go(target, 0, 40), go(target, 20, 20)
    first = go(target, 0, 20)
    assert (first.refused + part.refused, first.harmless + part.harmless) == (whole.refused, whole.harmless)
    assert np.all([each.failures == 0 for each in (whole, part, first)])
