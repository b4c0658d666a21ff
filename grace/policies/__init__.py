"""What changes over time: a policy decides at the end of an epoch, for each tensor or for the whole model."""

from grace.core.policy import Decision, Forecast, Level, Noise, Policy, at_level, level_of

__all__ = ["Decision", "Forecast", "Level", "Noise", "Policy", "at_level", "level_of"]
