"""Communicator `planned`: a strategy of Espresso's tree for each tensor."""

from grace.communicators.planned.runner import Planned

__all__ = ["Planned"]
