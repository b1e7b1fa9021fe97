"""Which backend a sampler gets: what its arguments say, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch

from maml_rl.envs.arguments import check_count
from maml_rl.errors import ConfigError
from maml_rl.policies import Policy
from maml_rl.samplers.backend import Inference, RolloutBackend
from maml_rl.samplers.vector_env_backends import InProcessBackend, ProcessBackend, usable_cores
from maml_rl.samplers.wire.env_recipe import Recipe

BACKENDS = ("auto", "in-process", "processes", "ray")


def make_backend(
    backend: str,
    recipe: Recipe,
    policy: Policy,
    *,
    num_workers: int | None,
    slots_per_task: int,
    episodes_per_task: int,
    device: torch.device | str,
    inference: Inference,
    recv_timeout: float | None,
    num_groups: int,
    ray_address: str | None = None,
    strict: bool = False,
    **processes: Any,
) -> RolloutBackend:
    """Make the backend of a sampler, without starting a worker.

    Args:
        backend: see `MultiTaskSampler`, as for what is not said here.
        recipe: what the environment is made from.
        policy: of the phases.
        num_workers: None for one per usable core, or none where there are no workers.
        slots_per_task: S.
        episodes_per_task: B.
        device: where the policy acts.
        inference: in which process it acts.
        recv_timeout: seconds to wait for workers.
        num_groups: groups of workers that take turns.
        ray_address: of the Ray cluster.
        strict: refuse a Ray cluster that is too small.
        processes: further arguments of `ProcessBackend`.

    Raises:
        ConfigError: If there is no Ray, or its cluster cannot be reached.
        ValueError: If an argument is out of range, or two of them exclude each other.
        TypeError: If the environment or the policy cannot go where it is needed.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "ray":
        check_count("num_workers", 1 if num_workers is None else num_workers)
        _check_ray_mode(inference, recv_timeout, num_groups, torch.device(device), processes.pop("start_method", None))
        _check_stateless(policy)
        return _ray_backend()(
            recipe, policy, slots_per_task, num_workers=num_workers, address=ray_address, strict=strict, **processes
        )
    if num_workers is None:
        num_workers = 0 if backend == "in-process" else usable_cores()
    elif check_count("num_workers", num_workers, 0) == 0 and backend == "processes":
        raise ValueError("backend='processes' needs workers, but num_workers is 0; raise it, or use 'in-process'")
    elif num_workers and backend == "in-process":
        raise ValueError(f"backend='in-process' has no workers, but num_workers is {num_workers}; use 'processes'")
    _check_mode(num_workers, inference, recv_timeout, num_groups, torch.device(device))
    if num_workers or slots_per_task < episodes_per_task:
        _check_stateless(policy)
    if num_workers == 0:
        return InProcessBackend(recipe, slots_per_task, device)
    return ProcessBackend(
        recipe,
        slots_per_task,
        device,
        policy=policy,
        num_workers=num_workers,
        inference=inference,
        recv_timeout=recv_timeout,
        num_groups=num_groups,
        **processes,
    )


def _ray_backend() -> Callable[..., RolloutBackend]:
    """Return the class of the Ray backend, which only those who use it need to have.

    Raises:
        ConfigError: If Ray is not installed.
    """
    try:
        from maml_rl.samplers.ray_backend import RayBackend
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "backend 'ray' needs the package ray; install the extra: pip install 'maml-rl[ray]'"
        ) from None
    return RayBackend


def _check_ray_mode(
    inference: str, recv_timeout: float | None, num_groups: int, device: torch.device, start_method: str | None
) -> None:
    """Refuse ways of sampling that need the workers to be on this machine."""
    for name, given in (
        ("inference='central'", inference == "central"),
        ("recv_timeout", recv_timeout is not None),
        ("num_groups", num_groups != 1),
    ):
        if given:
            raise ValueError(
                f"{name} and backend='ray' exclude each other: they share memory at every step, and actors on other "
                "machines cannot; leave it out, or use backend='processes'"
            )
    if start_method is not None:
        raise ValueError("start_method is how child processes start; with backend='ray' leave it out")
    if device.type != "cpu":
        raise ValueError(
            f"backend='ray' acts on the CPU, in every actor, got device={str(device)!r}; use device='cpu', or another "
            "backend"
        )


def _check_stateless(policy: Policy) -> None:
    """Refuse a policy of which copies must not act."""
    if not policy.stateless:
        raise ValueError(
            f"{type(policy).__name__} is not stateless: its actions may depend on earlier calls, but it is not told "
            "when a phase begins, is cut into waves or repeated, nor for which slots it acts; use num_workers=0 "
            "without slots_per_task, have it remember through initial_memory and act, or declare "
            "`stateless = True` in its class if an action depends on observation, noise and parameters alone"
        )


def _check_mode(
    num_workers: int, inference: str, recv_timeout: float | None, num_groups: int, device: torch.device
) -> None:
    """Refuse ways of sampling that make no sense."""
    if inference not in get_args(Inference):
        raise ValueError(f"inference must be one of {', '.join(get_args(Inference))}, got {inference!r}")
    if recv_timeout is not None and not recv_timeout >= 0.0:
        raise ValueError(f"recv_timeout must be None or a number of seconds, got {recv_timeout}")
    check_count("num_groups", num_groups)
    if inference == "worker":
        if num_workers == 0:
            raise ValueError(
                "inference='worker' needs workers to act in, but num_workers is 0; raise it, or use inference='central'"
            )
        for name, given in (("recv_timeout", recv_timeout is not None), ("num_groups", num_groups > 1)):
            if given:
                raise ValueError(
                    f"{name} and inference='worker' exclude each other: a worker that acts by itself is waited for "
                    "once a phase, not once a step"
                )
        if device.type != "cpu":
            raise ValueError(
                f"inference='worker' acts on the CPU, in every worker, got device={str(device)!r}; use device='cpu', "
                "or inference='central'"
            )
    elif num_groups > max(num_workers, 1):
        raise ValueError(
            f"num_groups={num_groups} needs at least as many workers to take turns, but num_workers is "
            f"{num_workers}; raise num_workers, or leave num_groups at 1"
        )
    elif recv_timeout is not None and num_groups > 1:
        raise ValueError("recv_timeout and num_groups exclude each other: a group is waited for as a whole")
    elif recv_timeout is not None and num_workers == 0:
        raise ValueError("recv_timeout needs workers to wait for, but num_workers is 0; raise it")
