"""Links between real workers, measured."""

import pytest
from launch import launch

from grace.planner.costs import COEFFICIENTS, cluster

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("launcher, transport", [("torchrun", "torch"), ("horovodrun", "horovod")])
def test_all_workers_measure_the_same_cluster(launcher, transport, tmp_path):
    found = launch(launcher, 4, "planner_links.py", tmp_path, transport)
    first = found[0]
    assert found == [first] * 4
    assert (first.nodes, first.per_node, first.source) == (2, 2, "measured")
    for link in (first.inter, first.intra, first.flat):
        assert set(link.fits) == set(COEFFICIENTS)
        for rate in link.fits.values():
            assert min(rate) >= 0
            assert 0 < rate.latency + 2**20 * rate.per_byte < 10
    assert cluster(first.to_dict()).levels
