"""Nearest4 against the laws of compression, on every toolkit that is installed."""

import pytest
from grace_nearest4 import Nearest4

from grace.testing import compressor_laws


@pytest.mark.parametrize("check", [*compressor_laws(Nearest4()), *compressor_laws(Nearest4(block_size=8))], ids=str)
def test_laws(check):
    check.run()
