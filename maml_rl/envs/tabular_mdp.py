"""Random tabular Markov decision processes.

Source: Duan et al. 2016, section 3.2, https://arxiv.org/abs/1611.02779
"""

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.envs.bandit import check_actions, check_positive
from maml_rl.envs.family import BatchedFamily, BatchOfOne
from maml_rl.envs.meta_env import Task
from maml_rl.envs.tasks import TaskEntry
from maml_rl.seeding import SlotStreams


def _is_transition_table(transitions: NDArray[np.float64]) -> bool:
    # JSON written with few digits still sums to one within this.
    return bool((transitions >= 0).all()) and np.allclose(transitions.sum(-1), 1.0, rtol=0.0, atol=1e-6)


class TabularMDPVectorEnv(BatchedFamily):
    """S states, A actions, random transitions and random mean rewards; starts in state 0.

    The reward of action a in state s is Normal(rewards_mean[s, a], 1).

    Args:
        num_envs: number of slots.
        num_states: S.
        num_actions: A.
        task: `{"transitions": (S, A, S), "rewards_mean": (S, A)}`.
        max_episode_steps: steps after which an episode is truncated.
        render_mode: None.
    """

    task_description = "transitions (S, A, S): Dirichlet(1) for each state and action; rewards_mean (S, A): N(1, 1)"

    def __init__(
        self,
        num_envs: int = 1,
        *,
        num_states: int = 10,
        num_actions: int = 5,
        task: Task | None = None,
        max_episode_steps: int | None = 10,
        render_mode: str | None = None,
    ) -> None:
        check_positive("num_states", num_states)
        check_positive("num_actions", num_actions)
        self.num_states, self.num_actions = num_states, num_actions
        self._states = np.zeros(max(num_envs, 1), np.int64)
        shape = (num_states, num_actions)
        entries = {
            "transitions": TaskEntry((*shape, num_states), "distributions over the last axis", _is_transition_table),
            "rewards_mean": TaskEntry(shape),
        }
        super().__init__(
            num_envs,
            spaces.Box(0.0, 1.0, (num_states,), np.float32),
            spaces.Discrete(num_actions),
            entries,
            task=task,
            max_episode_steps=max_episode_steps,
            render_mode=render_mode,
        )

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        """Draw transition tables and mean rewards."""
        shape = (self.num_states, self.num_actions)
        transitions = random.dirichlet(np.ones(self.num_states), (num_tasks, *shape))
        rewards_mean = random.normal(1.0, 1.0, (num_tasks, *shape))
        return [
            {"transitions": table, "rewards_mean": means} for table, means in zip(transitions, rewards_mean, strict=True)
        ]

    def _tasks_changed(self) -> None:
        self._cumulative = self.tasks["transitions"].cumsum(-1)

    def _reset_slots(self, mask: NDArray[np.bool_] | None, streams: SlotStreams) -> None:
        self._states[slice(None) if mask is None else mask] = 0

    def _step_slots(
        self, actions: NDArray[Any], active: NDArray[np.bool_] | None, streams: SlotStreams
    ) -> tuple[NDArray[np.float64], bool]:
        check_actions(actions, self.num_actions)
        slots = np.arange(self.num_envs)
        rewards = self.tasks["rewards_mean"][slots, self._states, actions] + streams.normal(1)[:, 0]
        # The last sum may fall short of one by a rounding error; the last state takes what is left.
        cumulative = self._cumulative[slots, self._states, actions, :-1]
        following = (cumulative <= streams.uniform(1)).sum(-1)
        self._states = following if active is None else np.where(active, following, self._states)
        self._reward_terms = {"reward_state_action": rewards}
        return rewards, False

    def _write_observations(self, out: NDArray[Any]) -> None:
        out[:] = 0.0
        out[np.arange(self.num_envs), self._states] = 1.0


class TabularMDPEnv(BatchOfOne):
    """One slot of `TabularMDPVectorEnv`."""

    family_class = TabularMDPVectorEnv
