"""`python -m grace.cli` is the `grace` command."""

from grace.cli import main

main()
