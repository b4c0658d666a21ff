"""Array helpers that methods share, written over a backend ``xp``."""
