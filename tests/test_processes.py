"""Real workers give the results of `simulate`, all with the same bits."""

from functools import cache
from operator import attrgetter

import numpy as np
import pytest
from exchanges import ROWS, SHAPES, STEPS, gradients, rows
from launch import launch

from grace import grace_from_params, simulate
from grace.core import name_of
from grace.core.registry import communicators, compressors, memories
from grace.engine.handshake import HEADER

LAUNCHES = [
    ("horovodrun", 2, "torch", "horovod"),
    ("horovodrun", 2, "tensorflow", "horovod"),
    ("torchrun", 2, "torch", "torch"),
    ("torchrun", 4, "torch", "torch"),
    ("horovodrun", 4, "torch", "horovod"),
    ("horovodrun", 4, "tensorflow", "horovod"),
]

# One launch runs all methods of the table; the first test of each case waits for it.
pytestmark = pytest.mark.processes


def test_every_part_is_exchanged_by_real_workers():
    for kind, registry in (("compressor", compressors), ("memory", memories), ("communicator", communicators)):
        graces = [grace_from_params({**row, "node_size": 1} if "node_size" in row else row, "local") for row in ROWS]
        parts = {"compressor": "method.compressor", "memory": "method.memory", "communicator": "communicator"}[kind]
        found = {name_of(attrgetter(parts)(grace)) for grace in graces}
        if kind == "communicator":
            # Tested elsewhere: rows of gradients in tests/test_fsdp.py, plans in tests/test_plan_execution.py. "auto"
            # only chooses among the others.
            found |= {"reducescatter", "planned", "auto"}
        assert set(registry) == found, f"no row has {set(registry) - found}"


CASES = [(case, index) for case in LAUNCHES for index in rows(*case[2:], case[1])]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """A function of a case: the findings of each worker for every row. Each case is launched once."""

    @cache
    def of(case):
        name, size, toolkit, transport = case
        return launch(name, size, "exchange.py", tmp_path_factory.mktemp("out"), toolkit, transport, timeout=880)

    return of


def name(value):
    return "-".join(map(str, value[:3] if isinstance(value, tuple) else ROWS[value].values()))


@pytest.mark.parametrize("case, index", CASES, ids=name)
def test_real_workers_agree_with_the_simulation(launched, case, index):
    params, workers = ROWS[index], [worker[index] for worker in launched(case)]
    sequence = [[gradients(step, rank) for rank in range(len(workers))] for step in range(STEPS)]
    expected = simulate(params, sequence)
    # fp16 also rounds in between; atomo's singular vectors are sensitive to rounding if values are close.
    room = {"fp16": 2e-3, "atomo": 5e-4}.get(params["compressor"], 1e-5)
    for step in range(STEPS):
        for name in SHAPES:
            mine = workers[0][0][step][name]
            for other, *_ in workers[1:]:
                assert np.array_equal(mine, other[step][name]), f"workers differ in {name} at step {step}"
            want = expected.history[step][0][name]
            assert mine.shape == want.shape
            assert mine.dtype == want.dtype
            # Sums on the wire may be in another order.
            np.testing.assert_allclose(mine, want, rtol=room, atol=room)
    _, sent, received, dense, steps, headers = workers[0]
    report = expected.report
    assert (sent, received, dense, steps) == (report.bytes_sent, report.bytes_received, report.bytes_dense, STEPS)
    assert headers % (4 * HEADER * STEPS) == 0
    assert headers < 20 * 4 * HEADER * STEPS
