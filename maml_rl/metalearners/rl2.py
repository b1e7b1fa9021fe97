"""RL2: a recurrent policy that learns to learn, trained by PPO on whole trials."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from maml_rl import functional
from maml_rl.adaptation import AdaptationRule
from maml_rl.config import Config, SettingsModel
from maml_rl.config.config import Count, Positive
from maml_rl.derivatives.workers import ChunkWorkers, Workspace
from maml_rl.envs.meta_env import Task
from maml_rl.episode.trials import Trials
from maml_rl.errors import NonFiniteError
from maml_rl.metalearners.metalearner import Batch, MetaLearner, Sampler, State
from maml_rl.policies import GRUPolicy, Policy

# Trials that are computed side by side in one thread: a number that depends on neither cores nor batch.
_CHUNK = 64
_VALUE_SCALE = "value_scale"


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some trials of a minibatch, (L, n, ...) each; the weight is 1 / real steps of the minibatch, 0 on padding."""

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    advantages: Tensor
    targets: Tensor
    weight: Tensor


class RL2(MetaLearner):
    """A policy whose memory is the learning algorithm: it sees its rewards, and PPO trains it through whole trials.

    A trial is all episodes of a task, one after the other in one slot. Returns are discounted through it, across the
    ends of episodes, so that exploring early is worth what it brings later. Values are learned in units of the root
    mean square of the first batch's returns.

    Source: Duan et al. 2016, https://arxiv.org/abs/1611.02779; Schulman et al. 2017, https://arxiv.org/abs/1707.06347
    """

    class Settings(SettingsModel):
        """Settings of RL2."""

        cell: Annotated[Literal["gru", "lstm"], Field(description="recurrent layer of the policy")] = "gru"
        hidden_size: Annotated[Count, Field(description="units of the recurrent layer")] = 256
        value: Annotated[
            Literal["head", "network", "none"],
            Field(description="values from a head of the policy, a recurrent network of their own, or none"),
        ] = "head"
        learning_rate: Annotated[Positive, Field(description="step size of Adam")] = 2e-4
        num_epochs: Annotated[Count, Field(description="passes through each batch")] = 5
        num_minibatches: Annotated[Count, Field(description="steps of Adam in each pass")] = 1
        clip: Annotated[
            Positive, Field(description="how far the ratio of probabilities may leave 1 and still count")
        ] = 0.1
        value_coefficient: Annotated[float, Field(ge=0, description="weight of the values' squared error")] = 0.5
        entropy_coefficient: Annotated[float, Field(ge=0, description="weight of the policy's entropy")] = 0.0
        max_grad_norm: Annotated[Positive, Field(description="longer gradients are shortened to this length")] = 0.5

    columns = "episode"
    settings: Settings
    optimizer: torch.optim.Optimizer

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not self.policy.has_memory:
            raise TypeError(
                f"rl2 trains a policy with a memory, and {type(self.policy).__name__} has none; use GRUPolicy, or a "
                "policy with initial_memory, act_with_memory and unroll"
            )
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=self.settings.learning_rate)
        self._value_scale: float | None = None

    @classmethod
    def make_policy(cls, env: Any, config: Config, settings: Any) -> Policy:
        """Make a recurrent policy.

        Raises:
            ConfigError: If it would not observe its rewards.
        """
        if not config.observe_last:
            raise config.error("rl2 learns from the last action and reward; add 'observe-last: true'", "algorithm")
        return GRUPolicy(
            env.single_observation_space,
            env.single_action_space,
            settings.hidden_size,
            cell=settings.cell,
            value=settings.value,
            seed=config.seed,
        )

    @classmethod
    def make_rule(cls, policy: Policy, config: Config, settings: Any) -> None:
        """Return None: the memory is what adapts."""
        return

    @classmethod
    def from_config(cls, policy: Policy, config: Config, settings: Any, device: torch.device | str = "cpu") -> Self:
        """Make the metalearner that a config describes.

        Raises:
            ConfigError: If the config asks for several slots of a task, or another method.
        """
        if config.slots_per_task not in (None, 1):
            raise config.error("the episodes of a trial follow each other in one slot; leave it out", "slots-per-task")
        if config.method != "maml":
            raise config.error("rl2 adapts by its memory, in training as afterwards; leave it out", "method")
        return super().from_config(policy, config, settings, device)

    def collect(self, sampler: Sampler, tasks: Sequence[Task]) -> Batch:
        """Sample one trial of every task."""
        return Batch([sampler.rollout_trials(tasks)])

    def test(
        self, sampler: Sampler, tasks: Sequence[Task], num_steps: int = 0, rule: AdaptationRule | None = None
    ) -> Batch:
        """Sample one trial of every task; see `MetaLearner.test`."""
        return self.collect(sampler, tasks)

    def returns(self, batch: Batch) -> Tensor:
        """Return the return of each episode of the trial, (M, B, 1)."""
        return batch.phases[0].episode_returns().unsqueeze(-1)

    def infos(self, batch: Batch) -> dict[str, Tensor]:
        """Return one number of each recorded info for every episode of the trial, (M, B, 1) by name."""
        return {name: info.unsqueeze(-1) for name, info in batch.phases[0].episode_infos().items()}

    def update(self, batch: Batch) -> dict[str, Any]:
        """Take steps of Adam on PPO's clipped objective.

        Returns:
            `loss/before`, the clipped objective and the values' error in the first pass; `loss/after`, in the last;
            `kl`, an estimate of the divergence from the old policy in the last pass; `policy/entropy`; `grad_norm` of
            the first step; `explained_variance`, the share of the returns' variance that the values knew of.

        Raises:
            NonFiniteError: If the loss or its gradient is not finite; the step is not taken.
        """
        trials = Trials.of(batch.phases[0].to(self.device))
        params = list(self.policy.parameters())
        rows = torch.arange(trials.mask.shape[1], device=self.device)
        with ChunkWorkers(self.device) as workers:
            before = workers.map(lambda part, _: self._evaluate(trials, part), rows.split(_CHUNK))
            log_probs, values = (torch.cat(parts, 1) for parts in zip(*before, strict=True))
            if trials.log_probs is not None:
                log_probs = trials.log_probs
            minibatches, explained = self._prepare(trials, log_probs, values)
            history: list[tuple[Tensor, float]] = []
            for _ in range(self.settings.num_epochs):
                for chunks in minibatches:
                    parts = workers.map(self._differentiate, chunks)
                    statistics = torch.stack([part[0] for part in parts]).sum(0)
                    means = [
                        torch.stack(of_param).sum(0) for of_param in zip(*(part[1] for part in parts), strict=True)
                    ]
                    for param, mean in zip(params, means, strict=True):
                        param.grad = mean.to(param)
                    norm = float(nn.utils.clip_grad_norm_(params, self.settings.max_grad_norm))
                    if not (torch.isfinite(statistics).all() and torch.isfinite(torch.tensor(norm))):
                        raise NonFiniteError("the loss or its gradient is not finite; use a smaller learning-rate")
                    self.optimizer.step()
                    history.append((statistics, norm))
        first, last = (
            torch.stack([statistics for statistics, _ in part]).mean(0).tolist()
            for part in (history[: len(minibatches)], history[-len(minibatches) :])
        )
        return {
            "loss/before": first[0],
            "loss/after": last[0],
            "kl": last[1],
            "policy/entropy": first[2],
            "grad_norm": history[0][1],
            "explained_variance": explained,
        }

    def state_dict(self) -> State:
        """Return the state of Adam, and the unit of the values."""
        return super().state_dict() | {_VALUE_SCALE: self._value_scale}

    def load_state_dict(self, state: State) -> None:
        """Take over what `state_dict` returned."""
        super().load_state_dict(state)
        self._value_scale = state[_VALUE_SCALE]

    def _prepare(self, trials: Trials, log_probs: Tensor, values: Tensor) -> tuple[list[list[_Chunk]], float]:
        """Return the minibatches, each in chunks, and the share of the returns' variance that the values knew of."""
        gamma, mask = self.collection.gamma, trials.mask
        returns = trials.returns(gamma)
        if self._value_scale is None:
            self._value_scale = max(float(functional.masked_mean(returns.square(), mask).sqrt()), 1e-3)
        advantages = trials.advantages(values * self._value_scale, gamma, self.collection.gae_lambda)
        targets = values + advantages / self._value_scale
        spread = functional.masked_mean((returns - functional.masked_mean(returns, mask)).square(), mask)
        left = functional.masked_mean((returns - values * self._value_scale).square(), mask)
        explained = float(1.0 - left / spread.clamp(min=1e-12))
        advantages = functional.masked_normalize(advantages, mask)
        of_steps = (trials.observations, trials.actions, log_probs, advantages, targets)
        minibatches = []
        for number in range(min(self.settings.num_minibatches, mask.shape[1])):
            # Tasks are drawn independently, so that every n-th is as good as a shuffled part.
            rows = torch.arange(number, mask.shape[1], self.settings.num_minibatches, device=mask.device)
            weight = mask / mask[:, rows].sum()
            minibatches.append(
                [_Chunk(*(tensor[:, part] for tensor in (*of_steps, weight))) for part in rows.split(_CHUNK)]
            )
        return minibatches, explained

    def _evaluate(self, trials: Trials, part: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and values (L, n) of some trials; values in their unit, zero if there are none."""
        unrolled = self.policy.unroll(trials.observations[:, part])
        log_probs = self.policy.log_prob_from(unrolled.distribution, trials.actions[:, part])
        return log_probs, torch.zeros_like(log_probs) if unrolled.values is None else unrolled.values

    def _differentiate(self, chunk: _Chunk, workspace: Workspace) -> tuple[Tensor, list[Tensor]]:
        """Return a chunk's share of loss, divergence and entropy (3,), and of the gradient."""
        settings, real = self.settings, chunk.weight > 0
        with torch.enable_grad():
            unrolled = self.policy.unroll(chunk.observations)
            log_probs = self.policy.log_prob_from(unrolled.distribution, chunk.actions)
            # Zeroed before the exponential: infinity times zero, in the gradient too, would be NaN.
            ratio_log = torch.where(real, log_probs - chunk.log_probs, 0.0)
            ratio = torch.exp(ratio_log)
            clipped = ratio.clamp(1.0 - settings.clip, 1.0 + settings.clip)
            gain = torch.minimum(ratio * chunk.advantages, clipped * chunk.advantages)
            entropy = self.policy.entropy_from(unrolled.distribution).expand_as(gain)
            losses = -gain - settings.entropy_coefficient * entropy
            if unrolled.values is not None:
                losses = losses + settings.value_coefficient * (unrolled.values - chunk.targets).square()
            loss = torch.where(real, losses, 0.0).mul(chunk.weight).sum()
            gradients = torch.autograd.grad(
                loss, list(self.policy.parameters()), allow_unused=True, materialize_grads=True
            )
        divergence = ((ratio - 1.0) - ratio_log).mul(chunk.weight).sum()
        statistics = torch.stack([loss, divergence, torch.where(real, entropy, 0.0).mul(chunk.weight).sum()])
        return statistics.detach().double(), [gradient.double() for gradient in gradients]
