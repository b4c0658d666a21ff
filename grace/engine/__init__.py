"""The engine: drives named gradients through a method, a communicator and a transport to their means."""
