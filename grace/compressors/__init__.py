"""One file per method. The registry imports them all when it is first asked."""
