"""Measurements behind the figures of the documentation."""
