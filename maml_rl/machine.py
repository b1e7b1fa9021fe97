"""Resources of this machine: its memory, its cores, and the threads that torch may use.

torch is imported where it is needed: a worker that does not act never loads it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from maml_rl.errors import ConfigError

# Files in which Linux has the memory limit of a container.
_LIMIT_OF_CONTAINER = Path("/sys/fs/cgroup/memory.max")
_MEMORY_OF_MACHINE = Path("/proc/meminfo")
_GIB = 2**30


def total_memory() -> int | None:
    """Return the bytes of memory of this machine, or of this container; None where it is not known."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    with suppress(OSError, ValueError):
        total = min(total, int(_LIMIT_OF_CONTAINER.read_text()))
    return total


def available_memory() -> int | None:
    """Return the bytes that may still be taken on this machine, or in this container; None where that is not known."""
    left = None
    with suppress(OSError, ValueError, StopIteration):
        lines = _MEMORY_OF_MACHINE.read_text().splitlines()
        left = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError):
        limit, used = (
            int((_LIMIT_OF_CONTAINER.parent / name).read_text()) for name in ("memory.max", "memory.current")
        )
        left = limit - used if left is None else min(left, limit - used)
    return left


def refuse_if_too_large(num_bytes: int, what: str, remedy: str) -> None:
    """Refuse work that needs more memory than this machine has in total.

    Args:
        num_bytes: needed at least.
        what: the work, for the message.
        remedy: what to do instead.

    Raises:
        ConfigError: If there is less.
    """
    total = total_memory()
    if total is not None and num_bytes > total:
        raise ConfigError(
            f"{what} would take at least {num_bytes / _GIB:,.1f} GiB of memory, of which this machine has "
            f"{total / _GIB:,.1f}; {remedy}"
        )


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Run the `with` block with `count` torch intra-op threads, then restore the caller's number.

    Args:
        count: at least 1.
    """
    import torch

    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
