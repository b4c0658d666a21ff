"""Groups of workers, and scripts from elsewhere, over real workers."""

import numpy as np
import pytest
from exchanges import ROWS, gradients
from launch import launch

from grace import simulate

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("launcher, transport", [("torchrun", "torch"), ("horovodrun", "horovod")])
def test_groups_of_workers_average_among_themselves(launcher, transport, tmp_path):
    found = launch(launcher, 4, "groups.py", tmp_path, transport)
    for members in ([0, 2], [1, 3]):
        for index in (index for index in found[0] if isinstance(index, int)):
            expected = simulate(ROWS[index], [gradients(0, rank) for rank in members]).means[0]
            for place, rank in enumerate(members):
                means, *where = found[rank][index]
                assert where == [place, 2]
                for name, want in expected.items():
                    np.testing.assert_allclose(means[name], want, rtol=1e-5, atol=1e-5)
    for worker in found:
        assert "not in the process" in worker["other"]


def test_a_script_for_upstream_grace_trains(tmp_path):
    (losses, mine, ratio), (_, other, _) = launch("horovodrun", 2, "upstream.py", tmp_path)
    assert np.array_equal(mine, other)
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    assert ratio > 5
