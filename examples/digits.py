"""Shared parts of the examples: data, command line, progress display and results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from grace import Grace

TEST_IMAGES = 500  # of 1797
Tell = Callable[[int, int, "dict[str, Any] | None"], None]
"""Called after every step with the number of finished steps, of all steps and, at the end of an epoch, its results."""


def load(rank: int, size: int) -> tuple[np.ndarray, ...]:
    """This worker's training images and labels, and all test images and labels. Images: float32[n, 8, 8] in [0, 1]."""
    data = load_digits()
    images, labels = (data.images / 16).astype(np.float32), data.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))  # the same split on all workers and for every seed
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    shard = train[rank::size][: len(train) // size]  # equally many per worker, so that all run equally many steps
    return images[shard], labels[shard], images[test], labels[test]


def arguments(description: str, one_method: bool = True) -> argparse.ArgumentParser:
    """The command line of the examples. The defaults suit all methods; none is tuned."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    if one_method:
        parser.add_argument("--method", default="topk", help="compressor, as `grace methods` lists them")
        parser.add_argument("--params", type=json.loads, default={}, metavar="JSON", help="further keys, as its ratio")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of the images")
    return parser


@contextmanager
def progress(title: str, rank: int) -> Iterator[Tell]:
    """Show training on worker 0: a bar on a terminal, otherwise one line per epoch."""
    if rank != 0:
        yield lambda *_: None
    elif not sys.stdout.isatty():
        yield lambda done, total, epoch: print(title, summary(epoch), flush=True) if epoch else None
    else:
        from rich.progress import Progress

        with Progress() as bars:
            bar = bars.add_task(title)

            def tell(done: int, total: int, epoch: dict[str, Any] | None) -> None:
                text = f"{title} {summary(epoch)}" if epoch else None
                bars.update(bar, completed=done, total=total, **({"description": text} if text else {}))

            yield tell


def summary(epoch: dict[str, Any]) -> str:
    """One line about an epoch."""
    return f"epoch {epoch['epoch']}: loss {epoch['loss']:.3f}, test accuracy {epoch['accuracy']:.1%}"


def result(toolkit: str, grc: Grace, history: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The measured results of a run. In `history`, `bytes_sent` and `computed` are totals: this worker's bytes, and its
    processor's seconds in training steps, compression included."""
    report = grc.report()
    return {
        "toolkit": toolkit,
        "accuracy": history[-1]["accuracy"],
        "bytes_per_step": report.bytes_sent / report.steps,
        "dense_bytes_per_step": report.bytes_dense / report.steps,
        "ratio": report.ratio,
        "seconds": seconds,
        "history": history,
        "report": report.to_dict(),
    }


def finish(options: argparse.Namespace, grc: Grace, outcome: dict[str, Any]) -> None:
    """On worker 0, print what was sent and write the result."""
    if grc.rank == 0:
        print(grc.report())
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(outcome, indent=1) + "\n")
