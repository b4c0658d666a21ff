"""The `grace` command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the `grace` command."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as missing:
        sys.exit(
            f"The grace command needs {missing.name}, which is not installed: pip install '.[cli]' in GRACE's source "
            "tree"
        )
    from grace.cli.app import app
    from grace.cli.inputs import readable_output

    readable_output()
    try:
        try:
            app(prog_name="grace")
        finally:
            if sys.stdout is not None:  # `>&-` closes it
                sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except OSError as error:
        sys.exit(f"Error: {error}")
