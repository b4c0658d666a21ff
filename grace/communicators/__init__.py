"""One file per communicator. The registry imports them all when it is first asked."""
