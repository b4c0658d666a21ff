"""The `grace` command: what is installed, which methods there are."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `grace` command."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as missing:
        sys.exit(
            f"The grace command needs {missing.name}, which is not installed: pip install 'grace-compression[cli]'"
        )
    from grace.cli.app import app

    app()
