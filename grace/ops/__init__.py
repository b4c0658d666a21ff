"""Array helpers for methods, written over a backend ``xp``."""
