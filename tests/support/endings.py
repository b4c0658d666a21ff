"""A process that ends in a given way, for tests of code that starts processes."""

import os
import time
from pathlib import Path


def end(rank, folder, ends, codes):
    """End with the exit code ``codes[rank]``; "error": write error.txt first; None: go on for a minute."""
    code = codes[rank]
    if code is None:
        time.sleep(60)
    if code == "error":
        (Path(folder) / "error.txt").write_text(f"rank {rank}: ValueError: no")
        code = 1
    os._exit(code)
