"""One file per communicator. The registry imports them all on first access."""
