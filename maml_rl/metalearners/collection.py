"""Collection of the data for an update: the sampler, the way of collecting, and the resulting batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from maml_rl.adaptation import AdaptationRule
from maml_rl.config import Config
from maml_rl.derivatives import Hosts, Memo
from maml_rl.derivatives.hosts import Question, Result
from maml_rl.envs.meta_env import Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Memory, Policy


class SampleOptions(TypedDict, total=False):
    """How a sampler samples a phase."""

    num_episodes: int | None
    deterministic: bool


class Estimation(TypedDict, total=False):
    """How a sampler estimates advantages; see `Collection`."""

    gamma: float
    gae_lambda: float
    bootstrap: bool


class Sampler(Protocol):
    """The methods of a `MultiTaskSampler` that a metalearner calls; see there."""

    policy: Policy

    def rollout(
        self, tasks: Sequence[Task], params: Mapping[str, Tensor] | None = None, **options: Unpack[SampleOptions]
    ) -> TaskEpisodes:
        """Sample the episodes of one phase under fixed parameters."""

    def rollout_trials(
        self, tasks: Sequence[Task], params: Mapping[str, Tensor] | None = None, **options: Unpack[SampleOptions]
    ) -> TaskEpisodes:
        """Sample a trial of every task: its episodes one after the other, through which the policy keeps its memory."""

    def remember_trials(
        self, tasks: Sequence[Task], params: Mapping[str, Tensor] | None = None, **options: Unpack[SampleOptions]
    ) -> tuple[TaskEpisodes, Memory]:
        """Sample a trial of every task, and return it with the policy's memory at its end."""

    def generator(self, purpose: str) -> np.random.Generator:
        """Return the random stream for a learner's own draws before the next phase."""

    def adapt(
        self,
        tasks: Sequence[Task],
        num_steps: int,
        rule: AdaptationRule,
        *,
        device: torch.device | str = ...,
        **options: Unpack[Estimation],
    ) -> tuple[list[TaskEpisodes], Mapping[str, Tensor] | None]:
        """Adapt the policy to every task by gradient steps, new episodes before each."""

    def sample(
        self,
        tasks: Sequence[Task],
        num_steps: int = ...,
        *,
        rule: AdaptationRule | None = ...,
        device: torch.device | str = ...,
        **options: Unpack[Estimation],
    ) -> tuple[list[TaskEpisodes], TaskEpisodes]:
        """Adapt the policy to every task, and sample the adapted policies."""

    def sample_on_hosts(
        self,
        tasks: Sequence[Task],
        num_steps: int,
        rule: AdaptationRule,
        *,
        for_update: bool = ...,
        **options: Unpack[Estimation],
    ) -> Hosts | None:
        """Do the same on hosts that keep the episodes, if there are any."""

    def trials_on_hosts(
        self, tasks: Sequence[Task], *, trials_per_chunk: int | None = ..., deterministic: bool = ...
    ) -> Hosts | None:
        """Sample a trial of every task on hosts that keep the episodes, if there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """How episodes are collected and their advantages estimated.

    Attributes:
        num_steps: inner steps in training.
        gamma: discount in [0, 1].
        gae_lambda: in [0, 1].
        bootstrap: continue truncated episodes with the value of their final observation.
    """

    num_steps: int = 1
    gamma: float = 0.99
    gae_lambda: float = 1.0
    bootstrap: bool = True

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return what a config says."""
        return cls(
            num_steps=config.training_steps,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            bootstrap=config.bootstrap,
        )

    @property
    def estimation(self) -> Estimation:
        """How advantages are estimated, as arguments of a sampler's methods."""
        return {"gamma": self.gamma, "gae_lambda": self.gae_lambda, "bootstrap": self.bootstrap}


@dataclass(frozen=True, slots=True)
class Batch:
    """The episodes of a batch of tasks, as the metalearner collected them.

    Attributes:
        phases: for a learner that adapts by gradient steps the episodes before each step and after the last; for one
            with a memory the episodes of the trials, (M, T, B, ...).
        hosts: where the episodes are; None if that is left to the learner.
    """

    phases: Sequence[TaskEpisodes]
    hosts: Hosts | None = None

    @classmethod
    def on(cls, hosts: Hosts | None) -> Self | None:
        """Make the batch of episodes on hosts, if there are any; they are fetched on first access."""
        return None if hosts is None else cls(_FetchedPhases(hosts), hosts)

    def map(self, question: Question[[], Result]) -> list[Result]:
        """Return the answers about the episodes on each chunk; without hosts, about all at once."""
        return [question(self.phases, {})] if self.hosts is None else self.hosts.map(question)

    @property
    def train_episodes(self) -> Sequence[TaskEpisodes]:
        """The episodes before each inner step."""
        return self.phases[:-1]

    @property
    def valid_episodes(self) -> TaskEpisodes:
        """The episodes after the last inner step."""
        return self.phases[-1]


class _FetchedPhases(Sequence[TaskEpisodes]):
    """The phases of a batch on hosts, fetched on first access."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._fetched: list[TaskEpisodes] | None = None

    def __len__(self) -> int:
        return self._hosts.num_phases

    def __getitem__(self, index: Any) -> Any:
        if self._fetched is None:
            self._fetched = self._hosts.fetch()
        return self._fetched[index]


def returns_of(phases: Sequence[TaskEpisodes], memo: Memo) -> Tensor:
    """Return the undiscounted return of every episode, (M, phases, B)."""
    return torch.stack([episodes.episode_returns() for episodes in phases], dim=1)


def infos_of(phases: Sequence[TaskEpisodes], memo: Memo) -> dict[str, Tensor]:
    """Return one number of each recorded info for every episode, (M, phases, B) by name."""
    of_phases = [episodes.episode_infos() for episodes in phases]
    return {name: torch.stack([infos[name] for infos in of_phases], dim=1) for name in of_phases[0]}
