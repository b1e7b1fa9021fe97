"""Learners of single tasks, many in parallel: each task has its own parameters, and no learner learns from another.

Their episodes from the first to the last are a learning history. Parameters of M learners are stacked,
(M, ...), as those of adapted policies are; an update is one batch of array code, in chunks of tasks, whose bits do not
depend on the number of cores.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from maml_rl import functional
from maml_rl.config import SettingsModel
from maml_rl.config.settings import Count, Fraction, Positive, StepSize
from maml_rl.derivatives import ChunkWorkers, ParameterLayout, PhaseOutcome, chunks_of
from maml_rl.episode.advantages import Baseline
from maml_rl.episode.steps import Steps
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import NonFiniteError
from maml_rl.metalearners.losses import clipped_surrogate
from maml_rl.plan import Plan
from maml_rl.policies import Policy, get_policy_for_env
from maml_rl.policies.classical.tabular import QTablePolicy

_MOMENTS = ("mean of gradients ", "mean of their squares ")
_COUNT = "number of updates"


class SingleTaskLearner(ABC):
    """M learners, each of one task. They act by `policy` under `params`, and `update` follows every batch.

    Attributes:
        Settings: model of the settings.
        uses: keys of those settings of a `Config` that it uses.
        policy: what acts.
        params: {name: (M, ...)} of all learners.
    """

    Settings: ClassVar[type[SettingsModel]]
    uses: ClassVar[tuple[str, ...]]
    policy: Policy
    params: dict[str, Tensor]

    @abstractmethod
    def update(self, episodes: TaskEpisodes) -> None:
        """Learn from a batch (M, T, B, ...), each learner from its own task; its losses must be finite."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the state of all learners, for `load`."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


class SingleTaskPPOSettings(SettingsModel):
    """Settings of `SingleTaskPPO`."""

    learning_rate: Annotated[StepSize, Field(description="step size of Adam")] = 3e-3
    num_epochs: Annotated[Count, Field(description="steps of Adam on each batch, all of it in each")] = 4
    clip: Annotated[Positive, Field(description="clip range of the probability ratio around 1")] = 0.2
    entropy_coefficient: Annotated[float, Field(ge=0, description="weight of the policy's entropy")] = 0.01
    max_grad_norm: Annotated[Positive, Field(description="maximum norm of a gradient; longer ones are clipped")] = 0.5


class SingleTaskPPO(SingleTaskLearner):
    """PPO with a network for each task: steps of Adam on the clipped objective, on whole batches.

    Args:
        spaces: any object with the spaces of one environment.
        seeds: (M) integers, of the initial weights of each learner.
        settings: of the objective.
        hidden_sizes: units of each hidden layer.
        nonlinearity: "relu" or "tanh".
        baseline: estimates values for the advantages, of each task.
        plan: how these are estimated.

    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347
    """

    Settings = SingleTaskPPOSettings
    uses = ("gamma", "gae-lambda", "bootstrap", "baseline", "hidden-sizes", "nonlinearity")

    def __init__(
        self,
        spaces: Any,
        seeds: Sequence[int],
        settings: SingleTaskPPOSettings,
        *,
        hidden_sizes: Sequence[int] = (64, 64),
        nonlinearity: str = "tanh",
        baseline: Baseline | None = None,
        plan: Plan | None = None,
    ) -> None:
        self._settings, self._baseline, self._plan = settings, baseline, plan or Plan()
        each = [get_policy_for_env(spaces, hidden_sizes, nonlinearity, seed=seed) for seed in seeds]
        self.policy = each[0]
        named = [dict(policy.named_parameters()) for policy in each]
        self.params = {name: torch.stack([params[name].detach() for params in named]) for name in named[0]}
        self._moments = {
            f"{moment}{name}": torch.zeros_like(param) for moment in _MOMENTS for name, param in self.params.items()
        }
        self._num_steps = torch.zeros(())
        self._chunks: list[tuple[slice, dict[str, Tensor], torch.optim.Adam]] = []

    def update(self, episodes: TaskEpisodes) -> None:
        episodes.compute_advantages(self._baseline, **self._plan.estimation)
        if not self._chunks:
            width, device = ParameterLayout(self.policy).width, torch.device("cpu")
            self._chunks = [self._chunk(tasks) for tasks in chunks_of([episodes], width, device)]
        with ChunkWorkers(torch.device("cpu")) as workers:
            finite = workers.map(lambda chunk: self._learn(episodes, chunk), self._chunks)
        if not all(finite):
            raise NonFiniteError("the loss of a learner or its gradient is not finite; use a smaller learning-rate")
        self._num_steps += self._settings.num_epochs

    def _chunk(self, tasks: slice) -> tuple[slice, dict[str, Tensor], torch.optim.Adam]:
        """Return the learners of some tasks as leaves, which share their memory with `params`, and their optimizer."""
        # A view has the version counter of its tensor, by which autograd notices changes, and other threads change
        # their own parts of it. The views of `data` have a counter for each call.
        leaves = {name: param.data[tasks].requires_grad_() for name, param in self.params.items()}
        # Adam is elementwise: of stacked parameters it is one optimizer for each task.
        optimizer = torch.optim.Adam(leaves.values(), lr=self._settings.learning_rate)
        for name, leaf in leaves.items():
            mean, square = (self._moments[f"{moment}{name}"][tasks] for moment in _MOMENTS)
            optimizer.state[leaf] = {"step": self._num_steps.clone(), "exp_avg": mean, "exp_avg_sq": square}
        return tasks, leaves, optimizer

    def _learn(self, episodes: TaskEpisodes, chunk: tuple[slice, dict[str, Tensor], torch.optim.Adam]) -> bool:
        """Take the steps of some tasks, and return whether all was finite; otherwise the last step is not taken."""
        tasks, leaves, optimizer = chunk
        dtype = next(iter(leaves.values())).dtype
        samples = Steps.of_tasks(episodes, tasks, dtype=dtype, device=torch.device("cpu"))
        old: Tensor | None = None
        for _ in range(self._settings.num_epochs):
            with torch.enable_grad():
                outcome = PhaseOutcome.of(self.policy, samples, leaves)
                old = outcome.log_probs.detach() if old is None else old
                losses = clipped_surrogate(outcome.log_probs, old, samples, clip=self._settings.clip)
                entropy = functional.masked_mean(outcome.entropy, samples.mask)
                losses = losses - self._settings.entropy_coefficient * entropy
                gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
            # Each learner has its own length of the gradient.
            squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0)
            if not bool(squares.isfinite().all() and losses.isfinite().all()):
                return False
            shorter = (self._settings.max_grad_norm / squares.sqrt().clamp(min=1e-12)).clamp(max=1.0)
            for leaf, gradient in zip(leaves.values(), gradients, strict=True):
                leaf.grad = gradient * shorter.reshape(-1, *(1,) * (gradient.dim() - 1))
            optimizer.step()
        return True

    def state(self) -> dict[str, Tensor]:
        return {**self.params, **self._moments, _COUNT: self._num_steps}

    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        self._chunks = []


class QLearningSettings(SettingsModel):
    """Settings of `QLearning`."""

    learning_rate: Annotated[Fraction, Field(description="share of the error by which a value changes")] = 0.5
    initial_value: Annotated[
        float, Field(description="initial value of all actions; a value above all returns makes the learner try all")
    ] = 0.0
    least_epsilon: Annotated[Fraction, Field(description="final share of random actions")] = 0.05
    explore_over: Annotated[Count, Field(description="updates in which that share falls evenly from 1")] = 100


class QLearning(SingleTaskLearner):
    """Q-learning with a table for each of M tasks, on every step of a batch, the last step of an episode first.

    Source: Watkins and Dayan 1992, https://doi.org/10.1007/BF00992698
    """

    Settings = QLearningSettings
    uses = ("gamma",)
    policy: QTablePolicy

    def __init__(self, spaces: Any, num_tasks: int, settings: QLearningSettings, *, gamma: float = 0.99) -> None:
        self.policy = QTablePolicy(spaces.observation_space, spaces.action_space, settings.initial_value)
        self.params = {name: param.detach() for name, param in self.policy.stack_parameters(num_tasks).items()}
        self._settings, self._gamma = settings, gamma
        self._num_updates = torch.zeros(())

    def update(self, episodes: TaskEpisodes) -> None:
        """Go backward through the episodes, one after the other."""
        table, every = self.params["table"], torch.arange(len(episodes))
        # Padding is zero, from which a state need not start.
        states = torch.where(episodes.mask > 0, self.policy.states(episodes.observations), 0)
        last = self.policy.states(episodes.final_observations)
        for column in range(episodes.rewards.shape[2]):
            following = last[:, column]
            goes_on = (~episodes.terminated[:, column]).to(table)
            lengths = episodes.lengths[:, column]
            for step in reversed(range(int(lengths.max()))):
                real = lengths > step
                state, action = states[:, step, column], episodes.actions[:, step, column]
                value = table[every, following].amax(-1) * self._gamma
                # Only the last step of an episode leads to a terminal state.
                value = torch.where(lengths == step + 1, value * goes_on, value)
                error = episodes.rewards[:, step, column] + value - table[every, state, action]
                table[every, state, action] += torch.where(real, self._settings.learning_rate * error, 0.0)
                following = torch.where(real, state, following)
        self._num_updates += 1
        share = (self._num_updates / self._settings.explore_over).clamp(max=1.0)
        self.params["epsilon"].copy_(1.0 - share * (1.0 - self._settings.least_epsilon))

    def state(self) -> dict[str, Tensor]:
        return {**self.params, _COUNT: self._num_updates}
