"""``python -m benchmarks.lab``."""

from benchmarks.lab.cli import app

if __name__ == "__main__":
    app(prog_name="python -m benchmarks.lab")
