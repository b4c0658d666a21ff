"""Two shelves of methods, a file each, and the code they share. The registry imports them all on first access."""
