"""The command line in this process."""

import pytest


def run(*words):
    pytest.importorskip("typer", reason="the command line")
    from typer.testing import CliRunner

    from grace.cli.app import app

    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", "TERM": "dumb"})
