"""One file per memory. Importing this package registers them all."""

from grace.memories import none, residual  # noqa: F401
