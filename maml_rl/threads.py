"""How many cores torch uses, set for one block of code and put back after it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Run the `with` block with `count` torch intra-op threads, then restore the caller's number.

    Args:
        count: at least 1.
    """
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
