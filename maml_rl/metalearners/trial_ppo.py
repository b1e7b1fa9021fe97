"""PPO on whole trials: the steps of Adam that train a policy with a memory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn

from maml_rl import functional
from maml_rl.config import Config, SettingsModel
from maml_rl.config.config import Count, Positive
from maml_rl.derivatives.workers import ChunkWorkers, Workspace
from maml_rl.episode.trials import Trials
from maml_rl.errors import NonFiniteError
from maml_rl.metalearners.metalearner import State
from maml_rl.policies.heads import Distributions
from maml_rl.policies.memory_policy import PredictsRewards
from maml_rl.policies.policy import Unrolled
from maml_rl.policies.sequence_policy import SequencePolicy

_NUM_UPDATES, _RETURN_SQUARE, _REWARD_VARIANCE = "num_updates", "return_square", "reward_variance"
_OBSERVED = "observed"
# In checkpoints of earlier versions, the root mean square of the first batch's returns, which remained the unit.
_VALUE_SCALE = "value_scale"
# Trials that are computed side by side in one thread: a number that depends on neither cores nor batch.
_CHUNK = 64
# Share of a batch in the running mean squares that losses are divided by.
_SHARE = 0.1


class TrialPPOSettings(SettingsModel):
    """Settings of every algorithm that trains by `TrialPPO`."""

    learning_rate: Annotated[Positive, Field(description="step size of Adam")] = 2e-4
    num_epochs: Annotated[Count, Field(description="passes through each batch")] = 5
    num_minibatches: Annotated[Count, Field(description="steps of Adam in each pass")] = 1
    clip: Annotated[Positive, Field(description="how far the ratio of probabilities may leave 1 and still count")] = 0.1
    value_coefficient: Annotated[float, Field(ge=0, description="weight of the values' squared error")] = 0.5
    value_lambda: Annotated[
        float | None,
        Field(ge=0, le=1, description="lambda of what values are fitted to, 1 for returns; gae-lambda if null"),
    ] = None
    entropy_coefficient: Annotated[float, Field(ge=0, description="weight of the policy's entropy")] = 0.0
    anneal_over: Annotated[
        Count | None,
        Field(description="meta-updates in which step size and weight of the entropy fall evenly to zero; null: never"),
    ] = None
    max_grad_norm: Annotated[Positive, Field(description="longer gradients are shortened to this length")] = 0.5
    normalize_observations: Annotated[
        bool, Field(description="show the policy observed numbers of mean 0 and deviation 1, over all trials so far")
    ] = False


def refuse_annealed_away(config: Config, settings: TrialPPOSettings) -> None:
    """Refuse a training that goes on after the step size has fallen to zero.

    Raises:
        ConfigError: If there are more meta-updates than `anneal_over`.
    """
    if settings.anneal_over is not None and settings.anneal_over < config.num_batches:
        raise config.error(
            f"{config.algorithm} learns nothing after meta-update {settings.anneal_over}, when its step size is "
            f"zero; use at most {settings.anneal_over}, or a longer anneal-over",
            "num-batches",
        )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some trials of a minibatch, (L, n, ...) each; the weight is 1 / real steps of the minibatch, 0 on padding.

    Rewards are wanted as predictions, whose squared error counts in units of `reward_variance`.
    """

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    advantages: Tensor
    targets: Tensor
    rewards: Tensor
    reward_variance: Tensor
    weight: Tensor


@dataclass(slots=True)
class RunningSquare:
    """A running mean of squares, the unit of a loss.

    Attributes:
        total: weighted sum of the squares of all batches; the newest counts most.
        weight: sum of the weights, at most 1.
    """

    total: float = 0.0
    weight: float = 0.0

    def add(self, square: float) -> None:
        """Take in the mean square of one more batch."""
        self.total += _SHARE * (square - self.total)
        self.weight += _SHARE * (1.0 - self.weight)

    @property
    def mean(self) -> float:
        """The running mean; 1 while there were only zeros, of which no unit can be made."""
        return self.total / self.weight if self.total > 0.0 else 1.0


class RunningMoments:
    """Mean and variance of all numbers so far.

    Args:
        size: D.
    """

    def __init__(self, size: int) -> None:
        self._count = 0
        self._mean: Tensor = torch.zeros(size, dtype=torch.float64)
        self._squares = torch.zeros_like(self._mean)

    def add(self, values: Tensor) -> None:
        """Take in further values (n, D)."""
        values = values.detach().cpu().double()
        count, mean = self._count + len(values), values.mean(0)
        difference = mean - self._mean
        squares = (values - mean).square().sum(0) + difference.square() * (self._count * len(values) / count)
        self._mean, self._squares = self._mean + difference * (len(values) / count), self._squares + squares
        self._count = count

    @property
    def mean(self) -> Tensor:
        """Mean (D,) float64."""
        return self._mean

    @property
    def variance(self) -> Tensor:
        """(D,) float64; 1 before there is anything."""
        return self._squares / self._count if self._count else torch.ones_like(self._mean)

    def state_dict(self) -> State:
        """Return what `load_state_dict` takes."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._count, self._mean, self._squares = int(state["count"]), state["mean"], state["squares"]


class Trainable(Protocol):
    """What `TrialPPO` trains: a policy, or the part of one that does not remember."""

    @property
    def distributions(self) -> Distributions:
        """What the distribution parameters mean."""

    def unroll(self, observations: Tensor) -> Unrolled:
        """Go through sequences (L, N, ...), differentiably; see `Policy.unroll`."""


class TrialPPO:
    """Steps of Adam on PPO's clipped objective, for a policy that is unrolled through trials.

    Returns are discounted through a trial, across the ends of its episodes. Values are learned in units of the running
    root mean square of the returns, so that their loss neither drowns the policy's nor vanishes, whatever the first
    batch was like. With a `reward_prediction_coefficient` the policy predicts the reward of
    every action from what it remembers, too: what a memory has to hold is then learned from each step's reward, not
    from the policy's gradient alone.

    Args:
        policy: what is unrolled and trained, with values or without.
        optimizer: of those of its parameters that are trained.
        settings: of the objective; with `anneal_over`, of the optimizer's step size, too.
        gamma: discount per step.
        gae_lambda: of the advantages.
        device: where the computation runs.
        reward_prediction_coefficient: weight of the predicted rewards' squared error, in units of the rewards'
            variance; 0 for a policy that predicts none.
        normalizing: the policy that normalizes its observations, if that is set; what it normalizes by stays as it is
            while a batch is sampled and learned from, and is that of all steps so far in the next.

    Attributes:
        return_square: running mean square of the returns, whose root is the unit of the values.
        reward_variance: running variance of the rewards, the unit of the squared error of their predictions.
        num_updates: batches that have been learned from, which `anneal_over` counts.

    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347; rewards are predicted as an auxiliary task as in
    Jaderberg et al. 2016, https://arxiv.org/abs/1611.05397, and from a memory as in Zintgraf et al. 2020,
    https://arxiv.org/abs/1910.08348
    """

    def __init__(
        self,
        policy: "Trainable",
        optimizer: torch.optim.Optimizer,
        settings: TrialPPOSettings,
        *,
        gamma: float,
        gae_lambda: float,
        device: torch.device,
        reward_prediction_coefficient: float = 0.0,
        normalizing: SequencePolicy | None = None,
    ) -> None:
        self._policy, self._optimizer, self._settings = policy, optimizer, settings
        self._params: list[nn.Parameter] = [param for group in optimizer.param_groups for param in group["params"]]
        self._gamma, self._gae_lambda, self._device = gamma, gae_lambda, device
        self._reward_prediction = reward_prediction_coefficient
        self.return_square, self.reward_variance = RunningSquare(), RunningSquare()
        self.num_updates = 0
        self._normalizing = normalizing if settings.normalize_observations else None
        mean = None if self._normalizing is None else self._normalizing.observation_mean
        self._observed = None if mean is None else RunningMoments(mean.numel())

    def update(self, trials: Trials) -> dict[str, Any]:
        """Take the steps that one batch is good for.

        Returns:
            `loss/before`, the clipped objective and the values' error in the first pass; `loss/after`, in the last;
            `kl`, an estimate of the divergence from the old policy in the last pass; `policy/entropy`; `grad_norm` of
            the first step; `explained_variance`, the share of the returns' variance that the values knew of; where
            rewards are predicted, `explained_rewards`, the share of their variance in the first pass.

        Raises:
            NonFiniteError: If the loss or its gradient is not finite; the step is not taken.
        """
        if self._settings.anneal_over is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = self._settings.learning_rate * self._annealed()
        rows = torch.arange(trials.mask.shape[1], device=self._device)
        with ChunkWorkers(self._device) as workers:
            before = workers.map(lambda part, _: self._evaluate(trials, part), rows.split(_CHUNK))
            log_probs, values = (torch.cat(parts, 1) for parts in zip(*before, strict=True))
            if trials.log_probs is not None:
                log_probs = trials.log_probs
            minibatches, explained = self._prepare(trials, log_probs, values)
            history: list[tuple[Tensor, float]] = []
            for _ in range(self._settings.num_epochs):
                for chunks in minibatches:
                    parts = workers.map(self._differentiate, chunks)
                    statistics = torch.stack([part[0] for part in parts]).sum(0)
                    means = [
                        torch.stack(of_param).sum(0) for of_param in zip(*(part[1] for part in parts), strict=True)
                    ]
                    for param, mean in zip(self._params, means, strict=True):
                        param.grad = mean.to(param)
                    norm = float(nn.utils.clip_grad_norm_(self._params, self._settings.max_grad_norm))
                    if not (torch.isfinite(statistics).all() and torch.isfinite(torch.tensor(norm))):
                        raise NonFiniteError("the loss or its gradient is not finite; use a smaller learning-rate")
                    self._optimizer.step()
                    history.append((statistics, norm))
        self.num_updates += 1
        if self._observed is not None and self._normalizing is not None:
            self._observed.add(trials.observations[..., : len(self._observed.mean)][trials.mask > 0])
            moments = self._observed.mean.to(self._device), self._observed.variance.to(self._device)
            self._normalizing.normalize_by(*moments)
        first, last = (
            torch.stack([statistics for statistics, _ in part]).mean(0).tolist()
            for part in (history[: len(minibatches)], history[-len(minibatches) :])
        )
        predictions = {}
        if self._reward_prediction > 0.0:
            predictions["explained_rewards"] = 1.0 - first[3]
        return {
            "loss/before": first[0],
            "loss/after": last[0],
            "kl": last[1],
            "policy/entropy": first[2],
            "grad_norm": history[0][1],
            "explained_variance": explained,
            **predictions,
        }

    def state_dict(self) -> State:
        """Return the units of values and predicted rewards, how many updates there were, and what was observed."""
        squares = ((_RETURN_SQUARE, self.return_square), (_REWARD_VARIANCE, self.reward_variance))
        units = {name: [square.total, square.weight] for name, square in squares}
        observed = {} if self._observed is None else self._observed.state_dict()
        return {
            **units,
            _NUM_UPDATES: self.num_updates,
            **{f"{_OBSERVED}.{name}": value for name, value in observed.items()},
        }

    def load_state_dict(self, state: State) -> None:
        """Take over what `state_dict` returned."""
        first = state.get(_VALUE_SCALE)
        self.return_square = RunningSquare(*state.get(_RETURN_SQUARE, (first**2, 1.0) if first else ()))
        self.reward_variance = RunningSquare(*state.get(_REWARD_VARIANCE, ()))
        # Checkpoints from before there was annealing do not count.
        self.num_updates = state.get(_NUM_UPDATES, 0)
        if self._observed is not None:
            self._observed.load_state_dict(entries_of(_OBSERVED, state))

    def _annealed(self) -> float:
        """Return what is left of step size and weight of the entropy: 1 at first, 0 from `anneal_over` on."""
        over = self._settings.anneal_over
        return 1.0 if over is None else max(0.0, 1.0 - self.num_updates / over)

    def _prepare(self, trials: Trials, log_probs: Tensor, values: Tensor) -> tuple[list[list[_Chunk]], float]:
        """Return the minibatches, each in chunks, and the share of the returns' variance that the values knew of."""
        mask = trials.mask
        returns = trials.returns(self._gamma)
        # The values that collected and learned so far are in the unit of the batch before.
        unit_before = math.sqrt(self.return_square.mean) if self.return_square.weight else None
        self.return_square.add(float(functional.masked_mean(returns.square(), mask)))
        unit = math.sqrt(self.return_square.mean)
        known = values * (unit_before or unit)
        advantages = trials.advantages(known, self._gamma, self._gae_lambda)
        value_lambda, errors = self._settings.value_lambda, advantages
        if value_lambda is not None:
            errors = trials.advantages(known, self._gamma, value_lambda)
        targets = (known + errors) / unit
        left, spread = functional.masked_mean((returns - known).square(), mask), _variance(returns, mask)
        # Of returns that are all the same there is nothing to explain.
        explained = float(1.0 - left / spread) if spread > 0.0 else 0.0
        advantages = functional.masked_normalize(advantages, mask)
        self.reward_variance.add(float(_variance(trials.rewards, mask)))
        variance = mask.new_tensor(self.reward_variance.mean).expand_as(mask)
        of_steps = (trials.observations, trials.actions, log_probs, advantages, targets, trials.rewards, variance)
        minibatches = []
        for number in range(min(self._settings.num_minibatches, mask.shape[1])):
            # Tasks are drawn independently, so that every n-th is as good as a shuffled part.
            rows = torch.arange(number, mask.shape[1], self._settings.num_minibatches, device=mask.device)
            weight = mask / mask[:, rows].sum()
            minibatches.append(
                [_Chunk(*(tensor[:, part] for tensor in (*of_steps, weight))) for part in rows.split(_CHUNK)]
            )
        return minibatches, explained

    def _evaluate(self, trials: Trials, part: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and values (L, n) of some trials; values in their unit, zero if there are none."""
        unrolled = self._policy.unroll(trials.observations[:, part])
        log_probs = self._policy.distributions.log_prob(unrolled.distribution, trials.actions[:, part])
        return log_probs, torch.zeros_like(log_probs) if unrolled.values is None else unrolled.values

    def _differentiate(self, chunk: _Chunk, workspace: Workspace) -> tuple[Tensor, list[Tensor]]:
        """Return a chunk's share of loss, divergence, entropy and rewards' error (4,), and of the gradient."""
        settings, real = self._settings, chunk.weight > 0
        with torch.enable_grad():
            unrolled = self._policy.unroll(chunk.observations)
            log_probs = self._policy.distributions.log_prob(unrolled.distribution, chunk.actions)
            # Zeroed before the exponential: infinity times zero, in the gradient too, would be NaN.
            ratio_log = torch.where(real, log_probs - chunk.log_probs, 0.0)
            ratio = torch.exp(ratio_log)
            gain = functional.clipped_gain(ratio, chunk.advantages, settings.clip)
            entropy = self._policy.distributions.entropy(unrolled.distribution).expand_as(gain)
            losses = -gain - settings.entropy_coefficient * self._annealed() * entropy
            if unrolled.values is not None:
                losses = losses + settings.value_coefficient * (unrolled.values - chunk.targets).square()
            errors = torch.zeros_like(losses)
            if self._reward_prediction > 0.0:
                assert isinstance(self._policy, PredictsRewards)
                predicted = self._policy.predict_rewards(unrolled, chunk.actions)
                errors = (predicted - chunk.rewards).square() / chunk.reward_variance
                losses = losses + self._reward_prediction * errors
            loss = torch.where(real, losses, 0.0).mul(chunk.weight).sum()
            gradients = torch.autograd.grad(loss, self._params, allow_unused=True, materialize_grads=True)
        entropy, errors = (torch.where(real, each, 0.0).mul(chunk.weight).sum() for each in (entropy, errors))
        divergence = ((ratio - 1.0) - ratio_log).mul(chunk.weight).sum()
        statistics = torch.stack([loss, divergence, entropy, errors])
        return statistics.detach().double(), [gradient.double() for gradient in gradients]


def entries_of(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `state` whose names begin with a prefix and a dot, without it."""
    return {name.removeprefix(f"{prefix}."): value for name, value in state.items() if name.startswith(f"{prefix}.")}


def _variance(values: Tensor, mask: Tensor) -> Tensor:
    """Return the variance () of the real steps' values."""
    return functional.masked_mean((values - functional.masked_mean(values, mask)).square(), mask)
