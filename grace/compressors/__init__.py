"""One file per method. The registry imports them all on first access."""
