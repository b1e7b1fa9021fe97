"""A policy of another package, behind two methods: it is told when trials begin, and asked for actions."""

from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from maml_rl.policies.heads import Params
from maml_rl.policies.memory_policy import MemoryPolicy
from maml_rl.policies.policy import Memory
from maml_rl.spaces import array_layout


class ForeignPolicy(Protocol):
    """What a policy of any other package has to offer."""

    def reset(self, num_tasks: int) -> object:
        """Forget everything: trials of so many new tasks begin."""

    def act(self, observations: NDArray[Any], rewards: NDArray[np.float32], dones: NDArray[np.bool_]) -> ArrayLike:
        """Choose an action for each of the M tasks.

        Args:
            observations: (M, *observation shape), as the environment gives them.
            rewards: (M,) of the last step; zero at the first step of a trial.
            dones: (M,) whether the last step ended an episode; the observation is then the first of the next one.

        Returns:
            (M, *action shape).
        """


class ExternalPolicy(MemoryPolicy):
    """Has a `ForeignPolicy` act in a sampler, with one slot for each task, and environments that show the last step.

    Args:
        policy: keeps whatever it needs itself, so that it acts in the process of the sampler.
        observation_space: of one environment, without the last step.
        action_space: of one environment.

    Raises:
        TypeError: If the policy has no `reset` and `act`.
    """

    # What the policy keeps itself begins anew with a trial, of which the memory tells.
    stateless = True
    noise_kind = "uniform"
    noise_size = 1

    def __init__(
        self, policy: ForeignPolicy, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
    ) -> None:
        super().__init__()
        for name in ("reset", "act"):
            if not callable(getattr(policy, name, None)):
                raise TypeError(
                    f"{type(policy).__name__} has no method {name}; a policy has reset(num_tasks) and "
                    "act(observations, rewards, dones)"
                )
        self._policy, self._observation_space, self._action_space = policy, observation_space, action_space
        self._own = spaces.flatdim(observation_space)

    def initial_memory(self, num: int) -> Memory:
        """Return zeros (num, 1), the number of steps of the trial."""
        return (torch.zeros(num, 1, dtype=torch.int64),)

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Ask the policy for actions (M, 1, ...); see `Policy.act`.

        Raises:
            ValueError: If they are not one for each task, or not numbers that the action space holds.
        """
        (steps,) = memory
        rows = observations.flatten(0, 1).numpy()
        if not steps.any():
            self._policy.reset(len(rows))
        shape, dtype = array_layout(self._observation_space)
        own = rows[:, : self._own]
        if isinstance(self._observation_space, spaces.Discrete):
            seen = own.argmax(1) + self._observation_space.start
        else:
            seen = own.reshape(len(rows), *shape).astype(dtype)
        chosen = np.asarray(self._policy.act(seen, rows[:, -2].copy(), rows[:, -1] > 0.0))
        shape, dtype = array_layout(self._action_space)
        name = type(self._policy).__name__
        if chosen.shape != (len(rows), *shape):
            raise ValueError(
                f"{name} returned actions of the shape {chosen.shape}; expected {(len(rows), *shape)}, a row for each"
            )
        if not np.can_cast(chosen.dtype, dtype, "same_kind"):
            raise ValueError(f"{name} returned actions of the type {chosen.dtype}; expected {dtype}")
        return torch.from_numpy(chosen.astype(dtype)).unflatten(0, noise.shape[:2]), (steps + 1,)
