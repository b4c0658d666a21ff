"""Policies: at the end of an epoch they choose settings for each tensor or for the whole model."""

from grace.core.policy import Cost, Decision, Forecast, Level, Noise, Policy, at_level, level_of

__all__ = ["Cost", "Decision", "Forecast", "Level", "Noise", "Policy", "at_level", "level_of"]
