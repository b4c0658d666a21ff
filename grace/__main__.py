"""`python -m grace` is the `grace` command."""

from grace.cli import main

main()
