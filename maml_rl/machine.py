"""Resources of this machine: its memory, its cores, and the threads that torch may use.

torch is imported where it is needed: a worker that does not act never loads it.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from maml_rl.errors import ConfigError

# Where Linux has the control groups of this process, their limits, and the memory of the machine.
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_MEMORY_OF_MACHINE = Path("/proc/meminfo")
# Of versions 2 and 1: the folder of memory below `_GROUPS`, and the files of limit and use.
_GROUP_FILES = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
_GIB = 2**30
# Whether JAX takes most of a GPU's memory when it begins.
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


@cache
def total_memory() -> int | None:
    """Return the bytes of memory of this machine, or of this container; None where it is not known.

    They are looked up once: every phase asks for them.
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    return min([total, *(limit for limit, _ in _memory_of_groups())])


def available_memory() -> int | None:
    """Return the bytes that may still be taken on this machine, or in this container; None where that is not known."""
    left = None
    with suppress(OSError, ValueError, StopIteration):
        lines = _MEMORY_OF_MACHINE.read_text().splitlines()
        left = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    known = [] if left is None else [left]
    return min([*known, *(limit - used for limit, used in _memory_of_groups())], default=None)


def _memory_of_groups() -> list[tuple[int, int]]:
    """Return limit and use in bytes of every control group that this process is in, up to the root.

    Containers see their own group as the root; Slurm and systemd put a process into a group further down.
    """
    limits = []
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            is_first = "memory" in controllers.split(",")
            if number != "0" and not is_first:
                continue
            folder, *names = _GROUP_FILES[is_first]
            group = Path(path)
            # A group of the host, whose folders a container does not see, leaves the root.
            for parent in (group, *group.parents):
                with suppress(OSError, ValueError):
                    limit, used = (
                        int((_GROUPS / folder / parent.relative_to("/") / name).read_text()) for name in names
                    )
                    limits.append((limit, used))
    return limits


def refuse_if_too_large(num_bytes: int, what: str, remedy: str) -> None:
    """Raise a ConfigError if work needs more bytes than this machine has in total.

    Its message says what the work is, and the remedy.
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


# `count`: the number of torch threads that a thread has outside of its `single_threaded` blocks; None: it is in none.
_outside = threading.local()


@contextmanager
def single_threaded(chunk_threads_inside: int | None = None) -> Iterator[None]:
    """Compute every torch operation of the `with` block on one core: its rounding depends on how many share it.

    All that is promised to be reproducible is computed in such a block. Work in chunks, which are the same on every
    machine, is shared out to `chunk_threads()` threads.

    Args:
        chunk_threads_inside: what `chunk_threads` returns in the block; by default what it returns outside.
    """
    import torch

    # Every thread has a number of its own, which it takes from the process when it first needs it.
    before, outer = torch.get_num_threads(), getattr(_outside, "count", None)
    _outside.count = chunk_threads() if chunk_threads_inside is None else chunk_threads_inside
    if before != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if before != 1:
            torch.set_num_threads(before)
        _outside.count = outer


def chunk_threads() -> int:
    """Return how many threads share the chunks of the caller: torch's number, outside of `single_threaded`."""
    import torch

    count: int | None = getattr(_outside, "count", None)
    return torch.get_num_threads() if count is None else count


@contextmanager
def usual_torch() -> Iterator[None]:
    """Record gradients in the `with` block, whatever the caller has set, and compute as `single_threaded`."""
    import torch

    device = torch.get_default_device()
    if device.type != "cpu":
        raise ConfigError(
            f"torch's default device is {str(device)!r}, and this needs the CPU's; call torch.set_default_device(None) "
            "before, and name the device of policy and update by the argument `device`"
        )
    with torch.inference_mode(False), torch.enable_grad(), single_threaded():
        yield


def uses_jax() -> bool:
    """Return whether JAX has been used in this process: it then has threads that a forked child would not have."""
    # Private, but the library has no public function that does not begin to use it.
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())


@contextmanager
def sharing_gpus() -> Iterator[None]:
    """Have JAX, if it is first used meanwhile, leave the memory of GPUs to torch, too; the setting of a user stays."""
    kept = os.environ.get(_PREALLOCATE)
    if not uses_jax():
        # JAX reads it when it first looks for devices.
        os.environ.setdefault(_PREALLOCATE, "false")
    try:
        yield
    finally:
        if kept is None:
            os.environ.pop(_PREALLOCATE, None)


_forked_from_jax = False


def forked_from_jax() -> bool:
    """Return whether this process was forked from one that had used JAX, where JAX would hang."""
    return _forked_from_jax


def _note_fork() -> None:
    global _forked_from_jax
    _forked_from_jax = _forked_from_jax or uses_jax()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
