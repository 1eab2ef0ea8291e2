"""Training with torch that disturbs nobody: one thread while it lasts, randomness of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in a fixed order, so that a seed decides everything; the number of threads is put back afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
