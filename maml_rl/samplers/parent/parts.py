"""Which slots belong to which child."""

from itertools import pairwise

from maml_rl.envs.arguments import check_count


def split_slots(num_envs: int, num_children: int, granularity: int = 1) -> tuple[slice, ...]:
    """Return contiguous ranges of slots that differ by at most `granularity` in length, one per child.

    Args:
        num_envs: N, a multiple of `granularity`.
        num_children: how many there may be; fewer than that if there is not enough for all.
        granularity: number of slots that stay together.

    Raises:
        ValueError: If `granularity` is not positive or does not divide `num_envs`.
    """
    if num_envs % check_count("granularity", granularity):
        raise ValueError(f"granularity must divide num_envs, got {granularity} and {num_envs}")
    pieces = num_envs // granularity
    num_children = min(num_children, pieces)
    bounds = [pieces * index // num_children * granularity for index in range(num_children + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(bounds))
