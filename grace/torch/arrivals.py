"""Gradients of a backward pass on their way into an exchange."""

from __future__ import annotations

import torch

from grace.engine.session import Grace


class Arrivals:
    """Collects gradients; when the next bucket of a Grace is complete, submits all of them by one call."""

    def __init__(self, grace: Grace):
        self._grace = grace
        self._ready: dict[str, torch.Tensor | None] = {}
        self._missing: set[str] = set()  # gradients of the next bucket that have not arrived

    @property
    def begun(self) -> bool:
        """Whether the exchange has a gradient."""
        return bool(self._ready or self._grace.started)

    def begin(self) -> None:
        """Begin an exchange."""
        self._missing = self._grace.next_bucket()

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient, whose memory the mean may overwrite; submit if this completes the bucket."""
        self._ready[name] = gradient
        self._missing.discard(name)
        if not self._missing:
            self.submit()
            self._missing = self._grace.next_bucket()

    def submit(self) -> None:
        """Submit the gradients collected so far."""
        ready, self._ready = self._ready, {}
        if ready:
            self._grace.start_all(ready, spent=True)

    def clear(self) -> None:
        """Drop gradients that were collected, but not submitted."""
        self._ready.clear()
