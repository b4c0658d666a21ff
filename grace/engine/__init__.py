"""The engine: averages named gradients with a method, a communicator and a transport."""
