"""One file per memory. The registry imports them all when it is first asked."""
