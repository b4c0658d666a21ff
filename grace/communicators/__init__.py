"""One file per communicator. Importing this package registers them all."""

from grace.communicators import allgather, allreduce, broadcast, twostage  # noqa: F401
