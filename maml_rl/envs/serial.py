"""`SerialVectorEnv`: anyone's environment with `sample_tasks` and `reset_task` as N slots, stepped one after the other."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from maml_rl.envs.checking import find_method, require_meta_env
from maml_rl.envs.meta_env import MetaVectorEnv, Seeds, StepBuffers, Task, slot_seeds
from maml_rl.errors import TaskError

# Many environments hand their seed to generators that take 32 bits.
_SEED_BITS = np.uint64(2**32 - 1)


class SerialVectorEnv(MetaVectorEnv):
    """Adapter around N environment objects.

    Args:
        make_env: makes one environment; called N times.
        env_kwargs: keyword arguments of `make_env`.
        num_envs: N, at least 1.

    Attributes:
        current_slots: (1,) the slot that is being made, reset, given its task, or stepped; somebody else may read it meanwhile.

    Raises:
        TypeError: If the environments are no task family, or their spaces are not supported.
        ValueError: If the spaces of two slots differ.
    """

    def __init__(
        self, make_env: Callable[..., Any], env_kwargs: Mapping[str, Any] | None = None, num_envs: int = 1
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        self.num_envs, self.current_slots = num_envs, np.zeros(1, np.int64)
        self.envs: list[gymnasium.Env[Any, Any]] = []
        for slot in range(num_envs):
            self.current_slots[0] = slot
            self.envs.append(make_env(**(env_kwargs or {})))
            require_meta_env(self.envs[-1])
            self._require_same_spaces(self.envs[-1])
        first = self.envs[0]
        self.single_observation_space, self.single_action_space = first.observation_space, first.action_space
        self.observation_space = batch_space(first.observation_space, num_envs)
        self.action_space = batch_space(first.action_space, num_envs)
        self.spec, self.render_mode = first.spec, first.render_mode
        self.max_episode_steps = None if first.spec is None else first.spec.max_episode_steps
        self.parts, self.physics_seconds = (slice(0, num_envs),), np.zeros(1)
        self.buffers = StepBuffers.allocate(first.observation_space, num_envs)
        self._reset_task = [find_method(env, "reset_task") for env in self.envs]
        self._ready = False
        self._sent: NDArray[Any] | None = None
        self._env_infos: dict[str, Any] = {}

    def _require_same_spaces(self, env: gymnasium.Env[Any, Any]) -> None:
        for kind in ("observation_space", "action_space"):
            first, other = getattr(self.envs[0], kind), getattr(env, kind)
            if first != other:
                raise ValueError(
                    f"all slots must have the same {kind.replace('_', ' ')}: "
                    f"slot 0 has {first}, slot {self.current_slots[0]} has {other}"
                )

    def sample_tasks(self, num_tasks: int, *, seed: int | None = None) -> list[Task]:
        """Draw tasks from the generator of slot 0; `seed` resets that slot with it first."""
        self.current_slots[0] = 0
        if seed is not None:
            self.envs[0].reset(seed=int(seed & int(_SEED_BITS)))
            self._ready = False
        tasks: list[Task] = list(find_method(self.envs[0], "sample_tasks")(num_tasks))
        return tasks

    def reset_task(self, tasks: Sequence[Task]) -> None:
        """Give slot i the task `tasks[i]`; whatever its `reset_task` raises passes through."""
        if len(tasks) != self.num_envs:
            raise TaskError(f"expected one task for each of the {self.num_envs} slots, got {len(tasks)}")
        for slot, (reset_task, task) in enumerate(zip(self._reset_task, tasks, strict=True)):
            self.current_slots[0] = slot
            reset_task(task)

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset all slots, or those of the boolean array `options["reset_mask"]`; see `MetaVectorEnv`."""
        mask = np.ones(self.num_envs, np.bool_)
        if options and options.get("reset_mask") is not None:
            mask = np.asarray(options["reset_mask"], np.bool_)
        self._reset(slot_seeds(seed, self.num_envs), mask)
        return self.buffers.observations.copy(), self._infos()

    def reset_buffers(self, seeds: ArrayLike) -> None:
        """Reset all slots, slot i with the low 32 bits of `seeds[i]`; see `MetaVectorEnv`."""
        low = np.asarray(seeds, np.uint64) & _SEED_BITS
        self._reset([int(seed) for seed in low], np.ones(self.num_envs, np.bool_))

    def _reset(self, seeds: Sequence[int | None], mask: NDArray[np.bool_]) -> None:
        start = perf_counter()
        self._sent, self._env_infos = None, {}
        buffers = self.buffers
        for slot in np.flatnonzero(mask):
            self.current_slots[0] = slot
            observation, info = self.envs[slot].reset(seed=seeds[slot])
            buffers.observations[slot] = observation
            self._env_infos = self._add_info(self._env_infos, info, slot)
        buffers.rewards[:] = 0.0
        buffers.terminated[mask] = False
        buffers.truncated[mask] = False
        self._ready = True
        self.physics_seconds[0] += perf_counter() - start

    def step_send(self, index: int, actions: NDArray[Any]) -> None:
        """Take the actions of all slots (N, *act); `step_recv` runs the step."""
        if not self._ready:
            raise ResetNeeded("cannot step before the first reset; call reset first")
        self._sent = np.asarray(actions)

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        """Run the step and write the buffers; see `MetaVectorEnv`."""
        if self._sent is None:
            raise RuntimeError("no step was started; call step_send first")
        start = perf_counter()
        actions, self._sent = self._sent, None
        buffers = self.buffers
        buffers.rewards[:] = 0.0
        self._env_infos = {}
        for slot in np.flatnonzero(~(buffers.terminated | buffers.truncated)):
            self.current_slots[0] = slot
            observation, reward, terminated, truncated, info = self.envs[slot].step(self._action(actions[slot]))
            buffers.observations[slot] = observation
            buffers.rewards[slot] = reward
            buffers.terminated[slot], buffers.truncated[slot] = terminated, truncated
            self._env_infos = self._add_info(self._env_infos, info, slot)
        self.physics_seconds[0] += perf_counter() - start
        return [0]

    def _action(self, action: Any) -> Any:
        """Return what the policy put out as an element of the action space: clipped where that has bounds."""
        space = self.single_action_space
        if isinstance(space, spaces.Box):
            return np.clip(action, space.low, space.high).astype(space.dtype)
        return space.dtype.type(action) if space.dtype is not None else action

    def _infos(self) -> dict[str, Any]:
        return self._env_infos

    def close_extras(self, **kwargs: Any) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()
