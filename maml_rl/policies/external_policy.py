"""A policy of another package, with two methods: `reset` when trials begin, and `act` for actions."""

from collections.abc import Callable
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from maml_rl.policies.heads import Params
from maml_rl.policies.memory_policy import MemoryPolicy
from maml_rl.policies.policy import Acted, Memory
from maml_rl.spaces import PackedSpace, array_layout, array_writer, has_text, is_image, stored_actions, to_stored


class ForeignPolicy(Protocol):
    """The methods that a policy of another package needs."""

    def reset(self, num_tasks: int) -> object:
        """Begin trials of `num_tasks` new tasks: forget everything."""

    def act(self, observations: Any, rewards: NDArray[np.float32], dones: NDArray[np.bool_]) -> Any:
        """Choose an action for each of the M tasks.

        Tasks that wait, for example for their environment, also have a row; its action is not used.

        Args:
            observations: (M, *observation shape), as the environment gives them. Of a Text space an object array (M,)
                of strings, and of Dict and Tuple spaces with one in them dicts and tuples of such arrays. Instead of
                the texts of tasks that wait there is None.
            rewards: (M,) of the last step; zero at the first step of a trial.
            dones: (M,) whether the last step ended an episode; the observation is then the first of the next one.

        Returns:
            (M, *action shape). Where actions have text in them, a sequence of M elements of the action space; those of
            tasks that wait may be anything.
        """


class ExternalPolicy(MemoryPolicy):
    """Lets a `ForeignPolicy` act in a sampler, with one slot for each task, and environments that show the last step.

    The sampler is made with `slots_per_task=1` and `observe_last=True`. In workers a copy of the policy acts for the
    tasks of each: its answers to a task must not depend on the others.

    Args:
        policy: stores its own state. If environments raise `Retry` it also has `begin_anew(tasks)`, which discards its
            state of the current episodes of these tasks, an array of their numbers.
        observation_space: of one environment, without the last step.
        action_space: of one environment.

    Raises:
        TypeError: If the policy has no `reset` and `act`, or a space is not supported.
    """

    # The policy resets its own state when a trial begins, which the memory shows.
    stateless = True
    reads_text = True
    told_who_acts = True
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
        self._seen = array_writer(observation_space).flat_space
        self._policy, self._chosen = policy, stored_actions(action_space)
        # Number of steps of its trial that each task has taken.
        self._asked = np.zeros(0, np.int64)

    def initial_memory(self, num: int) -> Memory:
        """Return zeros (num, 1), the number of steps of the trial."""
        return (torch.zeros(num, 1, dtype=torch.int64),)

    def act(self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None) -> Acted:
        """Get the policy's actions for all tasks (M, 1, ...); see `Policy.act`.

        Raises:
            ValueError: If they are not one for each task, or not in the action space; or if an episode was restarted,
                and the policy has no `begin_anew`.
        """
        return self._ask(observations, memory, np.ones(observations.shape[:2], np.bool_))

    def actor(self, params: Params, first_task: int = 0) -> Callable[..., Acted]:
        return lambda observations, noise, memory, acting: self._ask(observations, memory, acting.numpy())

    def _ask(self, observations: Tensor, memory: Memory, acting: NDArray[np.bool_]) -> tuple[Tensor, Memory]:
        (steps,) = memory
        rows, taken, acting = observations.flatten(0, 1).numpy(), steps.flatten().numpy(), acting.ravel()
        if not taken.any():
            self._policy.reset(len(rows))
            self._asked = np.zeros(len(rows), np.int64)
        if (anew := np.flatnonzero(acting & (taken < self._asked))).size:
            if (begin_anew := getattr(self._policy, "begin_anew", None)) is None:
                raise ValueError(
                    f"the episode of task {anew[0]} was restarted, since its environment raised Retry, and "
                    f"{type(self._policy).__name__} may remember the abandoned episode; give it a method "
                    "begin_anew(tasks)"
                )
            begin_anew(anew)
        self._asked[acting] = taken[acting] + 1
        answers = self._policy.act(*self._observed(rows, acting))
        return torch.from_numpy(self._actions(answers, acting)).unflatten(0, observations.shape[:2]), (steps + 1,)

    def _observed(
        self, rows: NDArray[Any], acting: NDArray[np.bool_]
    ) -> tuple[Any, NDArray[np.float32], NDArray[np.bool_]]:
        """Return observations, rewards and dones of rows that show the last step."""
        if isinstance(self._seen, PackedSpace) or is_image(self._seen):
            own_space = self._seen.own if isinstance(self._seen, PackedSpace) else self._seen
            # Beside text there is no last action.
            numbers = 2 if has_text(self._seen) else 2 + spaces.flatdim(self._chosen)
            further = spaces.Box(-np.inf, np.inf, (numbers,), np.float32)
            seen, last = PackedSpace(spaces.Tuple((own_space, further))).read(rows, acting)
            return seen, last[:, -2].copy(), last[:, -1] > 0.0
        shape, dtype = array_layout(self._seen)
        observed = rows[:, : spaces.flatdim(self._seen)]
        if isinstance(self._seen, spaces.Discrete):
            seen = observed.argmax(1) + self._seen.start
        else:
            seen = observed.reshape(len(rows), *shape).astype(dtype)
        return seen, rows[:, -2].copy(), rows[:, -1] > 0.0

    def _actions(self, answers: Any, acting: NDArray[np.bool_]) -> NDArray[Any]:
        """Return the policy's answers as rows of actions."""
        shape, dtype = array_layout(self._chosen)
        name = type(self._policy).__name__
        if isinstance(self._chosen, PackedSpace):
            if isinstance(answers, str) or len(answers) != len(acting):
                given = "a single text" if isinstance(answers, str) else f"{len(answers)} actions"
                raise ValueError(f"{name} returned {given}; expected {len(acting)} actions, one for each task")
            rows = np.zeros((len(acting), *shape), dtype)
            for task in np.flatnonzero(acting).tolist():
                try:
                    self._chosen.write(answers[task], rows[task])
                except ValueError as error:
                    raise ValueError(f"{name} returned {error}, as the action of task {task}") from error
            return rows
        chosen = np.asarray(answers)
        if chosen.shape != (len(acting), *shape):
            raise ValueError(
                f"{name} returned actions of the shape {chosen.shape}; expected {(len(acting), *shape)}, a row for each"
            )
        if not np.can_cast(chosen.dtype, dtype, "same_kind"):
            raise ValueError(f"{name} returned actions of the type {chosen.dtype}; expected {dtype}")
        return to_stored(self._chosen, chosen).astype(dtype)
