"""The ways of collecting that make sense, and why the others do not."""

from typing import Literal, get_args

import torch

from maml_rl.policies import Policy
from maml_rl.samplers.rollout.in_children import pickle_policy

# Where the policy acts: in the parent for all children, or in each child for itself; or whichever is faster.
Inference = Literal["auto", "central", "worker"]


def check_mode(
    *,
    num_workers: int,
    inference: str = "auto",
    recv_timeout: float | None = None,
    num_groups: int = 1,
    device: torch.device | str = "cpu",
) -> None:
    """Refuse ways of collecting that make no sense; see `MultiTaskSampler` for the arguments.

    Raises:
        ValueError: If an argument is out of range, or two of them exclude each other.
    """
    if inference not in get_args(Inference):
        raise ValueError(f"inference must be one of {', '.join(get_args(Inference))}, got {inference!r}")
    if recv_timeout is not None and not recv_timeout >= 0.0:
        raise ValueError(f"recv_timeout must be None or a number of seconds, got {recv_timeout}")
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 1:
        raise ValueError(f"num_groups must be an integer of at least 1, got {num_groups!r}")
    if inference == "worker":
        _check_worker_inference(num_workers, recv_timeout, num_groups, torch.device(device))
        return
    if num_groups > max(num_workers, 1):
        raise ValueError(
            f"num_groups={num_groups} needs at least as many children to take turns, but num_workers is "
            f"{num_workers}; raise num_workers, or leave num_groups at 1"
        )
    if recv_timeout is not None and num_groups > 1:
        raise ValueError("recv_timeout and num_groups exclude each other: a group is waited for as a whole")
    if recv_timeout is not None and num_workers == 0:
        raise ValueError("recv_timeout needs children to wait for, but num_workers is 0; raise it")


def fewest_tasks_to_act(
    policy: Policy,
    *,
    num_workers: int,
    inference: Inference,
    recv_timeout: float | None,
    num_groups: int,
    device: torch.device | str,
) -> int | None:
    """Return from how many tasks on the policy acts in the children; see `MultiTaskSampler` for the arguments.

    Children that act by themselves never wait for each other within a phase, which is faster, but each needs whole
    tasks. "auto" has them act where every child gets a task and nothing else speaks against it.

    Returns:
        The fewest tasks; None if the policy always acts in this process.

    Raises:
        TypeError: If the policy is to act in children, but cannot be pickled.
    """
    if inference == "worker":
        # Refused here rather than in the first phase.
        pickle_policy(policy)
        return 1
    central = recv_timeout is not None or num_groups > 1 or num_workers == 0 or torch.device(device).type != "cpu"
    if inference == "central" or central or not policy.stateless:
        return None
    try:
        pickle_policy(policy)
    except TypeError:
        return None
    return num_workers


def _check_worker_inference(
    num_workers: int, recv_timeout: float | None, num_groups: int, device: torch.device
) -> None:
    if num_workers == 0:
        raise ValueError(
            "inference='worker' needs children to act in, but num_workers is 0; raise it, or use inference='central'"
        )
    for name, given in (("recv_timeout", recv_timeout is not None), ("num_groups", num_groups > 1)):
        if given:
            raise ValueError(
                f"{name} and inference='worker' exclude each other: a child that acts by itself is waited for once a "
                "phase, not once a step"
            )
    if device.type != "cpu":
        raise ValueError(
            f"inference='worker' acts on the CPU, in every child, got device={str(device)!r}; use device='cpu', or "
            "inference='central'"
        )
