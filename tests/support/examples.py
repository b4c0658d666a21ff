"""The examples of handwritten digits."""

from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PARAMETERS = 283_786
