"""One file per memory. Importing this package registers them all."""

from grace.memories import momentum, none, residual  # noqa: F401
