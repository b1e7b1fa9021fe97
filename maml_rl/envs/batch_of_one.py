"""`BatchOfOne`: one slot of a batched family as a `gymnasium.Env`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from maml_rl.envs.meta_env import MetaEnv, Task

if TYPE_CHECKING:
    from maml_rl.envs.family import BatchedFamily


class BatchOfOne(MetaEnv):
    """A family of one slot as a `gymnasium.Env`, bit-identical to a slot of the vector environment.

    It never truncates: `gymnasium.make` wraps it in the time limit that its id is registered with.

    Args:
        **kwargs: of the family.
    """

    family_class: ClassVar[type[BatchedFamily]]
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it an instance variable

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        metadata = cls.family_class.metadata
        cls.metadata = {"render_modes": []} | {key: metadata[key] for key in metadata if key != "autoreset_mode"}

    def __init__(self, **kwargs: Any) -> None:
        if "autoreset_mode" in kwargs:
            raise TypeError(f"{type(self).__name__} is one environment; autoreset_mode is for gymnasium.make_vec")
        if "max_episode_steps" in kwargs:
            raise TypeError(
                f"{type(self).__name__} never truncates; pass max_episode_steps to gymnasium.make, or wrap it in "
                "gymnasium.wrappers.TimeLimit"
            )
        self._family = self.family_class(1, max_episode_steps=None, **kwargs)
        self._family.autoreset_mode = AutoresetMode.DISABLED
        self.observation_space = self._family.single_observation_space
        self.action_space = self._family.single_action_space
        self.render_mode = self._family.render_mode
        self.recorded_infos, self.max_episode_steps = self._family.recorded_infos, self._family.max_episode_steps
        self.task_space, self.value_ranges = self._family.task_space, self._family.value_ranges

    def sample_tasks(self, num_tasks: int) -> list[Task]:
        return self._family.draw_tasks(self.np_random, num_tasks)

    def sample_test_tasks(self, num_tasks: int) -> list[Task]:
        """Draw tasks for evaluations from `np_random`."""
        return self._family.draw_test_tasks(self.np_random, num_tasks)

    def reset_task(self, task: Task) -> None:
        self._family.reset_task([task])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        observations, infos = self._family.reset(seed=seed)
        return observations[0], _first_slot(infos)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step once."""
        observations, rewards, terminated, truncated, infos = self._family.step(np.asarray(action)[None])
        return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), _first_slot(infos)

    def render(self) -> NDArray[np.uint8] | None:
        """Return a picture (height, width, 3), or None without a render mode."""
        frames = self._family.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        """Release the family's resources."""
        self._family.close()


def one_slot(family: type[BatchedFamily]) -> type[BatchOfOne]:
    """Return the class of one slot of a family `<name>VectorEnv`, to be assigned to `<name>Env` in the same module."""
    name = family.__name__.replace("VectorEnv", "Env")
    known = {"family_class": family, "__module__": family.__module__, "__doc__": f"One slot of `{family.__name__}`."}
    return type(name, (BatchOfOne,), known)


def _first_slot(infos: Mapping[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = {}
    for name, values in infos.items():
        if isinstance(values, Mapping):
            first[name] = _first_slot(values)
        elif not name.startswith("_"):
            text = values.dtype == object
            first[name] = values[0].copy() if values.ndim > 1 else values[0] if text else float(values[0])
    return first
