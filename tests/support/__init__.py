"""Shared helpers of test modules."""
