"""A family as an ordinary environment whose task changes from episode to episode, for code without tasks."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from numpy.typing import NDArray

from maml_rl.arrays import Mask
from maml_rl.envs.checking import find_method, seed_draws
from maml_rl.envs.meta_env import MetaVectorEnv, Task, read_reset_mask
from maml_rl.envs.tasks import own_drawn, own_task


class SampleTaskOnReset(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Draws a task of the family at every reset: `gymnasium.make` alone gives one fixed task.

    Tasks come from the environment's own generator, so that a seeded reset repeats the tasks of all episodes after it.

    Args:
        env: with `sample_tasks` and `reset_task`, also behind wrappers.

    Attributes:
        task: the current task; empty before the first reset. The info of `reset` holds it, too, as "task".

    Raises:
        TypeError: If the environment has no tasks.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        RecordConstructorArgs.__init__(self)
        gymnasium.Wrapper.__init__(self, env)
        self._sample_tasks, self._reset_task = find_method(env, "sample_tasks"), find_method(env, "reset_task")
        self.task: Task = {}
        # The generator of the tasks; None before the first seeded reset.
        self._draws: np.random.Generator | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw a task, and start an episode in it."""
        if seed is not None:
            # Tasks are drawn from the generator that this seeds; the start of the episode is drawn after them.
            self.env.reset(seed=seed, options=options)
            if self.env.np_random_seed != seed:
                # The family has passed another seed on, such as that of a level.
                seed_draws(self.env, seed)
            self._draws = self.env.np_random
        if self._draws is not None and self.env.np_random is not self._draws:
            self.env.np_random = self._draws
        (self.task,) = own_drawn(self._sample_tasks(1), 1, "sample_tasks", self.env)
        self._reset_task(own_task(self.task))
        observation, info = self.env.reset(options=options)
        return observation, {"task": self.task, **info}


class SampleTaskOnResetVector(VectorWrapper):
    """Draws a task for every slot that is reset, by `reset` or by `step` after the end of an episode.

    Args:
        env: from `gymnasium.make_vec` with the id of a family of this package; its `autoreset_mode` is "NextStep", the
            default, or "Disabled".

    Attributes:
        tasks: the current task of every slot; empty before the first reset. The infos hold them, too, as "task".

    Raises:
        TypeError: If the environment has no tasks.
        ValueError: If it resets slots in the step that ends their episode, between which no task can be changed.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        family = env.unwrapped
        if not isinstance(family, MetaVectorEnv):
            raise TypeError(
                f"{env} has no tasks for its slots; make it by gymnasium.make_vec with the id of a family, or wrap "
                "each of its environments in SampleTaskOnReset"
            )
        if family.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP:
            raise ValueError("slots that are reset in the step that ends an episode keep their task; use NextStep")
        self._family = family
        self.tasks: list[Task] = []

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw tasks for the slots that are reset, and start their episodes."""
        if seed is not None or not self.tasks:
            self.env.reset(seed=seed, options=options)
        mask = read_reset_mask(options, self.num_envs)
        self._draw(np.ones(self.num_envs, np.bool_) if mask is None or not self.tasks else mask)
        return self.env.reset(options=options)

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step all slots; those that are reset instead get new tasks. See `VectorEnv.step`."""
        over = self._family.buffers.over
        if over.any() and self._family.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP:
            self._draw(over)
        return self.env.step(actions)

    def _draw(self, slots: Mask) -> None:
        num_tasks = int(slots.sum())
        drawn = iter(own_drawn(self._family.sample_tasks(num_tasks), num_tasks, "sample_tasks", self._family))
        self.tasks = [next(drawn) if slots[slot] else self.tasks[slot] for slot in range(self.num_envs)]
        self._family.reset_task([own_task(task) for task in self.tasks])
