"""Random tabular Markov decision processes.

Source: Duan et al. 2016, section 3.2, https://arxiv.org/abs/1611.02779
"""

from typing import Any, Unpack

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.arguments import check_count
from maml_rl.arrays import Floats, Mask, write_one_hot
from maml_rl.envs.family import BatchedFamily, FamilyOptions, one_slot, to_all_slots
from maml_rl.envs.meta_env import Task
from maml_rl.envs.tasks import TaskEntry
from maml_rl.machine import refuse_if_too_large
from maml_rl.seeding import SlotStreams


def _is_transition_table(transitions: Floats) -> bool:
    # JSON written with few digits still sums to one within this.
    return bool((transitions >= 0).all()) and np.allclose(transitions.sum(-1), 1.0, rtol=0.0, atol=1e-6)


class TabularMDPVectorEnv(BatchedFamily):
    """S states, A actions, random transitions and random mean rewards; starts in state 0.

    The reward of action a in state s is Normal(rewards_mean[s, a], 1).

    Args:
        num_states: S.
        num_actions: A.
        **options: see `BatchedFamily`; the task is `{"transitions": (S, A, S), "rewards_mean": (S, A)}`.
    """

    task_description = "transitions (S, A, S): Dirichlet(1) for each state and action; rewards_mean (S, A): N(1, 1)"
    default_steps = 10

    def __init__(
        self,
        num_envs: int = 1,
        *,
        num_states: int = 10,
        num_actions: int = 5,
        **options: Unpack[FamilyOptions],
    ) -> None:
        check_count("num_envs", num_envs)
        check_count("num_states", num_states)
        check_count("num_actions", num_actions)
        # The spaces are arrays, too.
        num_bytes = 8 * num_envs * num_actions * num_states**2
        refuse_if_too_large(
            num_bytes, f"the tables of {num_states:,} states", "choose a smaller num_states or num_actions"
        )
        self.num_states, self.num_actions = num_states, num_actions
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
            **options,
        )
        self._states = np.zeros(num_envs, np.int64)

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Task]:
        shape = (self.num_states, self.num_actions)
        transitions = random.dirichlet(np.ones(self.num_states), (num_tasks, *shape))
        rewards_mean = random.normal(1.0, 1.0, (num_tasks, *shape))
        return [
            {"transitions": table, "rewards_mean": means}
            for table, means in zip(transitions, rewards_mean, strict=True)
        ]

    def _tasks_changed(self) -> None:
        cumulative = self.tasks["transitions"].cumsum(-1)
        # Rounded tables sum to nearly one; divided by the sum, a state of probability zero is never entered.
        self._cumulative = cumulative / cumulative[..., -1:]

    def _reset_slots(self, mask: Mask | None, streams: SlotStreams) -> None:
        self._states[slice(None) if mask is None else mask] = 0

    def _step_slots(self, actions: NDArray[Any], active: Mask | None, streams: SlotStreams) -> tuple[Floats, bool]:
        where = self._slots, self._states, actions
        rewards = self.tasks["rewards_mean"][where] + to_all_slots(streams.normal(1, active), active)[:, 0]
        following = (self._cumulative[where] <= to_all_slots(streams.uniform(1, active), active)).sum(-1)
        self._states = following if active is None else self.xp.where(active, following, self._states)
        self._reward_terms = {"reward_state_action": rewards}
        return rewards, False

    def _write_observations(self, out: NDArray[Any]) -> None:
        write_one_hot(out, self._states)


TabularMDPEnv = one_slot(TabularMDPVectorEnv)
