"""Communicator `planned`: exchanges each tensor by a strategy from Espresso's tree of strategies."""

from grace.communicators.planned.runner import Planned

__all__ = ["Planned"]
