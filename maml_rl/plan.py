"""Plan: what a sampler collects for a learner, from every task of a batch.

A learner makes the plan, a sampler carries it out: `sampler.collect(tasks, plan)` returns the store of the episodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule
from maml_rl.config import Config
from maml_rl.derivatives import EpisodeStore
from maml_rl.envs.meta_env import Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to collect from every task, and how to estimate advantages.

    Attributes:
        num_steps: gradient steps of the inner loop; new episodes are sampled before each, and after the last.
        rule: the inner loop; None for phases without advantages, of which there is one.
        gamma: discount in [0, 1].
        gae_lambda: in [0, 1].
        bootstrap: continue truncated episodes with the value of their final observation.
        whole_trials: the episodes of a task are one trial, in one slot, through which the policy keeps its memory.
        deterministic: the policy acts without noise after the last step, or in the trials.
        for_update: what is collected is learned from: the last phase gets advantages, too, and chunks of tasks are the
            same everywhere.
        adapt_only: sample nothing after the last step. The store then has the result of the adaptation, parameters or
            memories.
        in_this_process: bring the episodes to this process, for a learner that reads them as a whole; otherwise they
            may stay in the workers that have sampled them.
        tasks_per_chunk: how many tasks are computed at once, at most; None for as many as fit a core's cache.
        device: where gradients are computed.
    """

    num_steps: int = 1
    rule: AdaptationRule | None = None
    gamma: float = 0.99
    gae_lambda: float = 1.0
    bootstrap: bool = True
    whole_trials: bool = False
    deterministic: bool = False
    for_update: bool = True
    adapt_only: bool = False
    in_this_process: bool = False
    tasks_per_chunk: int | None = None
    device: torch.device | str = "cpu"

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the plan of a config's inner steps and advantages."""
        return cls(
            num_steps=config.training_steps,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            bootstrap=config.bootstrap,
        )

    def replace(self, **changes: Any) -> Self:
        """Return this plan with other values."""
        return replace(self, **changes)

    @property
    def num_inner_steps(self) -> int:
        """Gradient steps: none in trials, or without a rule."""
        return 0 if self.whole_trials or self.rule is None else self.num_steps

    @property
    def num_phases(self) -> int:
        """Phases: one before each gradient step, and one after the last; or one of trials."""
        return 1 if self.whole_trials else self.num_inner_steps + (not self.adapt_only)

    @property
    def estimation(self) -> dict[str, Any]:
        """How advantages are estimated, as arguments of `TaskEpisodes.compute_advantages`."""
        return {"gamma": self.gamma, "gae_lambda": self.gae_lambda, "bootstrap": self.bootstrap}


class SampleOptions(TypedDict, total=False):
    """How a sampler samples a phase."""

    num_episodes: int | None
    deterministic: bool


class Sampler(Protocol):
    """The methods of `MultiTaskSampler` that learners call."""

    policy: Policy

    def collect(self, tasks: Sequence[Task], plan: Plan) -> EpisodeStore:
        """Collect episodes by a plan, and return their store."""

    def rollout(
        self, tasks: Sequence[Task], params: Mapping[str, Tensor] | None = None, **options: Unpack[SampleOptions]
    ) -> TaskEpisodes:
        """Sample the episodes of one phase under fixed parameters."""

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the random stream for a learner's own draws before the next phase."""
