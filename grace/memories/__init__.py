"""One file per memory. The registry imports them all on first access."""
