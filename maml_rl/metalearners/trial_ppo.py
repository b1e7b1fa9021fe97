"""PPO on whole trials, which trains a policy with a memory: the loss, what it needs to know of a batch, the learner.

The chunks of a batch are where they were sampled. An update takes three sums over all steps there, `_total`,
`_spread` and `_square`, of which the scales of the loss are made; then each step of Adam for the gradient of the loss.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from maml_rl import functional
from maml_rl.arrays import to_device
from maml_rl.config import Config, SettingsModel
from maml_rl.config.settings import Count, Positive, StepSize
from maml_rl.derivatives import Cache, ChunkResult, EpisodeStore, remembered
from maml_rl.episode.steps import Steps
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.metalearners.metalearner import State
from maml_rl.metalearners.stepper import Stepper, records_steps, set_step_size
from maml_rl.metalearners.trial_learner import TrialLearner, refuse_idle_updates
from maml_rl.plan import Plan
from maml_rl.policies.policy import Memory, Policy, Unrolled
from maml_rl.policies.sequence_policy import SequencePolicy
from maml_rl.policies.two_hot import TwoHot

_NUM_UPDATES, _RETURN_SQUARE, _REWARD_VARIANCE = "num_updates", "return_square", "reward_variance"
_OBSERVED = "observed"
# In checkpoints of earlier versions, the root mean square of the first batch's returns, which remained the unit.
_VALUE_SCALE = "value_scale"
# Trials that are computed together in one thread: a number that depends on neither cores nor batch.
_CHUNK = 64
# On an accelerator, all.
_ALL = 2**31
# Share of a batch in the running mean squares that losses are divided by.
_SHARE = 0.1
# What a policy makes of sequences (L, N, ...) of its inputs; and these inputs for observations, with the memory after.
Unroll: TypeAlias = Callable[[Tensor], Unrolled]
See: TypeAlias = Callable[[Tensor], tuple[Tensor, Memory]]
# The unit of the values so far, in which the policy that has sampled has them; and that from now on.
Units: TypeAlias = tuple[float, float]


class TrialPPOSettings(SettingsModel):
    """Settings of every `TrialPPOLearner`."""

    learning_rate: Annotated[StepSize, Field(description="step size of Adam")] = 2e-4
    num_epochs: Annotated[Count, Field(description="passes through each batch")] = 5
    num_minibatches: Annotated[Count, Field(description="steps of Adam in each pass")] = 1
    clip: Annotated[Positive, Field(description="clip range of the probability ratio around 1")] = 0.1
    value_coefficient: Annotated[float, Field(ge=0, description="weight of the values' squared error")] = 0.5
    value_lambda: Annotated[
        float | None,
        Field(ge=0, le=1, description="lambda of the targets of the values, 1 for returns; null: gae-lambda"),
    ] = None
    bootstrap_trials: Annotated[
        bool, Field(description="add the value of the final observation where a time limit ends the trial")
    ] = False
    entropy_coefficient: Annotated[float, Field(ge=0, description="weight of the policy's entropy")] = 0.0
    anneal_over: Annotated[
        Count | None,
        Field(description="meta-updates in which step size and weight of the entropy fall evenly to zero; null: never"),
    ] = None
    max_grad_norm: Annotated[Positive, Field(description="maximum norm of a gradient; longer ones are clipped")] = 0.5
    normalize_observations: Annotated[
        bool, Field(description="normalize observations to mean 0 and deviation 1, over all trials so far")
    ] = False

    def check_with(self, config: Config) -> None:
        """Refuse a training that continues after the step size has fallen to zero."""
        refuse_idle_updates(config, self.anneal_over)


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
        """Include the mean square of one more batch."""
        self.total += _SHARE * (square - self.total)
        self.weight += _SHARE * (1.0 - self.weight)

    @property
    def mean(self) -> float:
        """The running mean; 1 while there were only zeros, which give no unit."""
        return self.total / self.weight if self.total > 0.0 else 1.0


@dataclass(frozen=True, eq=False)
class Moments:
    """Number of values, their mean (D,), and the sum of their squared distances from it (D,), both float64."""

    count: int
    mean: Tensor
    squares: Tensor

    def merged(self, other: "Moments") -> "Moments":
        """Return the moments of the values of both, of which there are some."""
        count, difference = self.count + other.count, other.mean - self.mean
        squares = self.squares + other.squares + difference.square() * (self.count * other.count / count)
        return Moments(count, self.mean + difference * (other.count / count), squares)

    @property
    def variance(self) -> Tensor:
        """(D,) float64; 1 before there is anything."""
        return self.squares / self.count if self.count else torch.ones_like(self.mean)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialLoss:
    """The loss of PPO on trials, as a function of tensors; other processes get it with the policy as it is.

    Attributes:
        policy: has the distributions.
        params: those of its parameters that are trained.
        unroll: goes through sequences of inputs with it, differentiably.
        see: returns these inputs; None where they are the observations.
        settings: of the learner.
        plan: has the discount per step, and lambda of the advantages.
        reward_prediction: weight of the predicted rewards' squared error.
        num_observed: number of inputs that are normalized.
        num_minibatches: each has every n-th task.
        at_once: how many trials are unrolled together, at most.
        device: where to compute.
    """

    policy: Policy
    params: list[nn.Parameter]
    unroll: Unroll
    see: See | None
    settings: TrialPPOSettings
    plan: Plan
    reward_prediction: float
    num_observed: int
    num_minibatches: int
    at_once: int
    device: torch.device

    def __call__(
        self,
        observations: Tensor,
        actions: Tensor,
        old_log_probs: Tensor,
        gains: Tensor,
        targets: Tensor,
        mask: Tensor,
        weight: Tensor,
        rewards: Tensor,
        entropy_coefficient: float | Tensor,
        reward_variance: float | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, differentiably; and loss, divergence, entropy and rewards' error, (4,).

        Args:
            observations: (L, n, ...) inputs of the policy.
            actions: (L, n, ...) that were taken.
            old_log_probs: (L, n) of the policy that has sampled.
            gains: (L, n) advantages, centered and divided by their deviation.
            targets: (L, n) of the values.
            mask: (L, n) 1 for real steps.
            weight: (L, n) of each step, which add up to 1 over a minibatch.
            rewards: (L, n) to predict.
            entropy_coefficient: weight of the entropy.
            reward_variance: unit of the squared error of predicted rewards.
        """
        settings, real = self.settings, mask > 0
        unrolled, distributions = self.unroll(observations), self.policy.distributions
        log_probs = distributions.log_prob(unrolled.distribution, actions)
        # Zeroed before the exponential: infinity times zero, in the gradient too, would be NaN.
        ratio_log = torch.where(real, log_probs - old_log_probs, 0.0)
        ratio = torch.exp(ratio_log)
        gain = functional.clipped_gain(ratio, gains, settings.clip)
        try:
            entropy = distributions.entropy(unrolled.distribution).expand_as(gain)
        except NotImplementedError:
            # torch knows none of transformed distributions: an estimate from the actions taken, and of the gradient.
            entropy = -ratio * log_probs
        losses = -gain - entropy_coefficient * entropy
        if unrolled.value_logits is not None:
            losses = losses + settings.value_coefficient * TwoHot().loss(unrolled.value_logits, targets)
        elif unrolled.values is not None:
            losses = losses + settings.value_coefficient * (unrolled.values - targets).square()
        errors = torch.zeros_like(losses)
        if self.reward_prediction > 0.0:
            predicted = self.policy.predict_rewards(unrolled, actions)  # type: ignore[operator]
            errors = (predicted - rewards).square() / reward_variance
            losses = losses + self.reward_prediction * errors
        loss = torch.where(real, losses, 0.0).mul(weight).sum()
        with torch.no_grad():
            entropy, errors = (torch.where(real, each, 0.0).mul(weight).sum() for each in (entropy, errors))
            divergence = ((ratio - 1.0) - ratio_log).mul(weight).sum()
            return loss, torch.stack([loss, divergence, entropy, errors])


class Scales(NamedTuple):
    """What a step needs to know of the whole batch.

    Attributes:
        units: see `Units`.
        mean: of the advantages.
        divisor: of the centered advantages, their deviation; infinity where the rewards have no signal.
        coefficients: of the entropy, and the unit of the rewards' squared error; see `TrialLoss`.
        num_steps: real steps of each minibatch.
    """

    units: Units
    mean: float
    divisor: float
    coefficients: tuple[float, float]
    num_steps: Sequence[float]


class _OldTrials(NamedTuple):
    """Some trials, and what the policy that has sampled them said of them, in the unit of the batch before.

    The observations are the policy's inputs. Log-probabilities and values are (L, N), and final values (N,) those of
    the state after each trial, zero if it is terminal; None if they do not count.
    """

    trials: Steps
    log_probs: Tensor
    values: Tensor
    final_values: Tensor | None


def _old_trials(phases: Sequence[TaskEpisodes], cache: Cache, old: TrialLoss) -> _OldTrials:
    (episodes,) = phases

    def compute() -> _OldTrials:
        trials = Steps.of_trials(episodes.to(old.device))
        parts = torch.arange(trials.mask.shape[1], device=old.device).split(old.at_once)

        def seen(observations: Tensor) -> list[Tensor]:
            return [observations[:, part] if old.see is None else old.see(observations[:, part])[0] for part in parts]

        final_values = None
        if old.settings.bootstrap_trials:
            longer = seen(trials.with_end(episodes.final_observations[:, -1].to(old.device)))
            estimates = [old.unroll(each).values for each in longer]
            known = [each for each in estimates if each is not None]
            if known:
                goes_on = episodes.truncated[:, -1] & ~episodes.terminated[:, -1]
                at_the_end = torch.cat(known, 1).gather(0, trials.mask.sum(0).long().unsqueeze(0))
                final_values = at_the_end.squeeze(0) * goes_on.to(old.device)
        inputs, of_parts = seen(trials.observations), []
        for part, whole in zip(parts, inputs, strict=True):
            unrolled = old.unroll(whole)
            log_probs = old.policy.distributions.log_prob(unrolled.distribution, trials.actions[:, part])
            of_parts.append((log_probs, torch.zeros_like(log_probs) if unrolled.values is None else unrolled.values))
        log_probs, values = (torch.cat(each, 1) for each in zip(*of_parts, strict=True))
        trials = trials if old.see is None else replace(trials, observations=torch.cat(inputs, 1))
        return _OldTrials(trials, log_probs if trials.log_probs is None else trials.log_probs, values, final_values)

    return remembered(cache, "trials", old, compute)


def _estimates(phases: Sequence[TaskEpisodes], cache: Cache, old: TrialLoss, units: Units) -> tuple[Tensor, Tensor]:
    """Return the advantages and the targets of the values, (L, N) each."""

    def compute() -> tuple[Tensor, Tensor]:
        trials, _, values, final = _old_trials(phases, cache, old)
        plan, value_lambda, (before, now) = old.plan, old.settings.value_lambda, units
        values, final = values * before, None if final is None else final * before
        advantages = trials.trial_advantages(values, plan.gamma, plan.gae_lambda, final)
        errors = (
            advantages if value_lambda is None else trials.trial_advantages(values, plan.gamma, value_lambda, final)
        )
        return advantages, (values + errors) / now

    return remembered(cache, "estimates", (old, units), compute)


def _minibatch(
    phases: Sequence[TaskEpisodes], cache: Cache, old: TrialLoss, scales: Scales, number: int
) -> tuple[Tensor, ...]:
    """Return the tensors of a minibatch that `TrialLoss` takes."""
    trials, log_probs, _, _ = _old_trials(phases, cache, old)
    advantages, targets = _estimates(phases, cache, old, scales.units)
    rows = _rows(phases[0], old, number)
    mask = trials.mask[:, rows]
    return (
        trials.observations[:, rows],
        trials.actions[:, rows],
        log_probs[:, rows],
        ((advantages[:, rows].double() - scales.mean) / scales.divisor).to(advantages.dtype),
        targets[:, rows],
        mask,
        mask / scales.num_steps[number],
        trials.rewards[:, rows],
    )


def _rows(episodes: TaskEpisodes, old: TrialLoss, number: int) -> Tensor:
    """Return the trials of a minibatch. Tasks are independent, so every n-th is equivalent to a shuffled part."""
    start = (number - episodes.first_task) % old.num_minibatches
    return torch.arange(len(episodes), device=old.device)[start :: old.num_minibatches]


def _differentiate(
    phases: Sequence[TaskEpisodes], cache: Cache, old: TrialLoss, scales: Scales, new: TrialLoss, number: int
) -> ChunkResult:
    """Return the share in the statistics (4,) of a minibatch, and in the gradient of its loss."""
    tensors = _minibatch(phases, cache, old, scales, number)
    if not tensors[0].shape[1]:
        nothing = tensors[5].new_zeros(4 + sum(param.numel() for param in new.params), dtype=torch.float64)
        return ChunkResult(sums=(nothing,))
    with torch.enable_grad():
        given: tuple[Any, ...] = (*tensors, *scales.coefficients)
        loss, statistics = new(*given)
        gradients = torch.autograd.grad(loss, new.params, allow_unused=True, materialize_grads=True)
    flat = [part.detach().double().flatten() for part in (statistics, *gradients)]
    return ChunkResult(sums=(torch.cat(flat),))


def _total(phases: Sequence[TaskEpisodes], cache: Cache, old: TrialLoss) -> ChunkResult:
    """Count and sum over the trials.

    Returns:
        Real steps, and sums of returns, squared returns, and rewards, (4,); number of trials, and the sum of their
        squared lengths, (2,); sums of observations, (D,).
    """
    trials = _old_trials(phases, cache, old).trials
    returns, lengths = trials.returns(old.plan.gamma), trials.mask.double().sum(0)
    sums = _sums(trials, torch.ones_like(returns), returns, returns.double().square(), trials.rewards)
    of_lengths = torch.stack([torch.ones_like(lengths).sum(), lengths.square().sum()])
    return ChunkResult(sums=(sums, of_lengths, _observed(trials, old).sum(0)))


def _spread(
    phases: Sequence[TaskEpisodes],
    cache: Cache,
    old: TrialLoss,
    units: Units,
    mean_return: float,
    mean_reward: float,
    mean_observed: Tensor,
) -> ChunkResult:
    """Sum how the trials spread around means over all real steps of the batch.

    Returns:
        Sums of the advantages; of the squares of what the values did not know of the returns; of the squared
        distances of returns and rewards from their means; and the real steps of each minibatch. The sums of the squared
        distances of observations from their mean, (D,).
    """
    trials, _, values, _ = _old_trials(phases, cache, old)
    advantages, _ = _estimates(phases, cache, old, units)
    returns = trials.returns(old.plan.gamma)
    sums = _sums(
        trials,
        advantages,
        (returns - values * units[0]).double().square(),
        (returns.double() - mean_return).square(),
        (trials.rewards.double() - mean_reward).square(),
    )
    counts = [trials.mask[:, _rows(phases[0], old, each)].double().sum() for each in range(old.num_minibatches)]
    distances = (_observed(trials, old) - mean_observed.to(old.device)).square().sum(0)
    return ChunkResult(sums=(torch.cat([sums, torch.stack(counts)]), distances))


def _square(phases: Sequence[TaskEpisodes], cache: Cache, old: TrialLoss, units: Units, mean: float) -> ChunkResult:
    """Return the sum of the squared distances of the advantages from their mean."""
    advantages, _ = _estimates(phases, cache, old, units)
    return ChunkResult(sums=(_sums(_old_trials(phases, cache, old).trials, (advantages.double() - mean).square()),))


def _observed(trials: Steps, old: TrialLoss) -> Tensor:
    """Return the numbers whose moments are needed, of the real steps, (n, D) float64."""
    if not old.num_observed:
        return trials.mask.new_zeros(0, 0, dtype=torch.float64)
    return trials.observations[..., : old.num_observed][trials.mask > 0].double()


def _sums(trials: Steps, *values: Tensor) -> Tensor:
    """Return sums over the real steps."""
    real = trials.mask > 0
    return torch.stack([torch.where(real, value, 0.0).double().sum() for value in values])


class TrialPPOLearner(TrialLearner):
    """A learner whose policy takes steps of Adam on PPO's clipped objective of whole trials, in any placement.

    Returns are discounted through a trial, across the ends of its episodes. Values are learned in units of the running
    root mean square of the returns, so that their loss neither dominates the policy's nor vanishes, for any first
    batch; those of a two-hot head are in the unit of the rewards. A policy that predicts the reward of every action
    from its memory learns from each step's reward, too, not only from the policy's gradient.

    Attributes:
        return_square: running mean square of the returns, whose root is the unit of the values.
        reward_variance: running variance of the rewards, the unit of the squared error of their predictions.
        num_updates: batches that have been learned from, which `anneal_over` counts.

    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347; rewards are predicted as an auxiliary task as in
    Jaderberg et al. 2016, https://arxiv.org/abs/1611.05397, and from a memory as in Zintgraf et al. 2020,
    https://arxiv.org/abs/1910.08348
    """

    maps_over_tasks = True
    settings: TrialPPOSettings
    optimizer: torch.optim.Optimizer

    def _train_by_ppo(
        self,
        params: Iterable[nn.Parameter],
        *,
        reward_prediction: float = 0.0,
        unroll: Unroll | None = None,
        see: See | None = None,
    ) -> None:
        """Have Adam train parameters of the policy.

        Args:
            params: to train.
            reward_prediction: weight of the predicted rewards' squared error, in units of the rewards' variance.
            unroll: instead of the policy's own, for other inputs than observations.
            see: returns these inputs; see `See`.
        """
        settings, policy = self.settings, self.policy
        self.return_square, self.reward_variance, self.num_updates = RunningSquare(), RunningSquare(), 0
        # Statistics of observations are constant while a batch is sampled and learned from; for the next batch they
        # cover all steps so far.
        normalizes = settings.normalize_observations and isinstance(policy, SequencePolicy)
        mean = policy.observation_mean if normalizes and isinstance(policy, SequencePolicy) else None
        zeros = torch.zeros(0 if mean is None else mean.numel(), dtype=torch.float64)
        self._observed = None if mean is None else Moments(0, zeros, zeros.clone())
        trained, is_recorded = list(params), records_steps(self.device)
        self.optimizer = torch.optim.Adam(trained, lr=settings.learning_rate)
        self._loss = TrialLoss(
            policy=policy,
            params=trained,
            unroll=unroll or policy.unroll,
            see=see,
            settings=settings,
            plan=self.plan,
            reward_prediction=reward_prediction,
            num_observed=len(zeros),
            num_minibatches=settings.num_minibatches,
            at_once=_ALL if is_recorded else _CHUNK,
            device=self.device,
        )
        norm = settings.max_grad_norm
        self.stepper = Stepper(self._loss, self.optimizer, name="PPO", max_norm=norm)
        # An efficient number for each minibatch.
        self.tasks_per_chunk = _ALL if is_recorded else _CHUNK * settings.num_minibatches

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Take all steps on one batch of trials.

        Returns:
            `loss/before`, the clipped objective and the values' error in the first pass; `loss/after`, in the last;
            `kl`, an estimate of the divergence from the old policy in the last pass; `policy/entropy`; `grad_norm` of
            the first step; `explained_variance`, the share of the returns' variance that the values explained;
            `no_signal`, 1 if the rewards gave the policy none; where rewards are predicted, `explained_rewards`, the
            share of their variance in the first pass.
        """
        settings, new = self.settings, self._loss
        if settings.anneal_over is not None:
            set_step_size(self.optimizer, settings.learning_rate * self._annealed())
        # Spaces never change, and take longer to copy than all else; a module of a user may have none.
        spaces = [getattr(new.policy, name, None) for name in ("observation_space", "action_space")]
        num_minibatches = min(settings.num_minibatches, batch.num_tasks)
        now = replace(new, num_minibatches=num_minibatches)
        old, history = batch.share(copy.deepcopy(now, {id(space): space for space in spaces})), list[Tensor]()
        with batch:
            scales, explained = self._scales(batch, old)
            if self.stepper.is_recorded:
                # One chunk has all trials, in this process.
                (history,) = batch.map(self._take_on_device, old, scales)
            for step in range(0 if self.stepper.is_recorded else settings.num_epochs * num_minibatches):
                total = batch.total(_differentiate, old, scales, new, step % num_minibatches).sums[0]
                statistics, *gradients = total.split([4, *(param.numel() for param in new.params)])
                for param, gradient in zip(new.params, gradients, strict=True):
                    param.grad = gradient.reshape(param.shape).to(param)
                history.append(self.stepper.apply(statistics))
        self.num_updates += 1
        if self._observed is not None and isinstance(new.policy, SequencePolicy):
            moments = self._observed.mean.to(self.device), self._observed.variance.to(self.device)
            new.policy.normalize_by(*moments)
        parts = history[:num_minibatches], history[-num_minibatches:]
        first, last = (torch.stack(part).mean(0).tolist() for part in parts)
        return {
            "loss/before": first[0],
            "loss/after": last[0],
            "kl": last[1],
            "policy/entropy": first[2],
            "grad_norm": float(history[0][-1]),
            "explained_variance": explained,
            "no_signal": float(math.isinf(scales.divisor)),
            **({"explained_rewards": 1.0 - first[3]} if new.reward_prediction > 0.0 else {}),
        }

    def _take_on_device(
        self, phases: Sequence[TaskEpisodes], cache: Cache, old: TrialLoss, scales: Scales
    ) -> list[Tensor]:
        """Take all steps on the trials of one chunk; return statistics (4,), loss and the gradient's norm of each."""
        coefficients = to_device(torch.tensor(scales.coefficients), old.device).unbind()
        minibatches = [
            (*_minibatch(phases, cache, old, scales, each), *coefficients) for each in range(old.num_minibatches)
        ]
        statistics = torch.stack(
            [self.stepper(*minibatch) for _ in range(self.settings.num_epochs) for minibatch in minibatches]
        )
        self.stepper.checked(statistics.flatten())
        return [*statistics.cpu().double()]

    def _scales(self, batch: EpisodeStore, old: TrialLoss) -> tuple[Scales, float]:
        """Return the scales of the loss, and the share of the returns' variance that values explained."""
        sums, of_lengths, of_observations = batch.total(_total, old).sums
        count, of_returns, of_squares, of_rewards = sums.tolist()
        # The values that collected and learned so far are in the unit of the previous batch.
        unit_before = math.sqrt(self.return_square.mean) if self.return_square.weight else None
        self.return_square.add(of_squares / count)
        unit = math.sqrt(self.return_square.mean)
        by_classes = isinstance(self.policy, SequencePolicy) and self.policy.value == "two-hot"
        units = (1.0, 1.0) if by_classes else (unit_before or unit, unit)
        means = of_returns / count, of_rewards / count, of_observations / count
        spreads, of_observations = batch.total(_spread, old, units, *means).sums
        if self._observed is not None:
            self._observed = self._observed.merged(Moments(int(count), means[2], of_observations))
        of_advantages, left, spread, of_distances, *num_steps = spreads.tolist()
        # If all returns are equal there is nothing to explain.
        explained = 1.0 - left / spread if spread > 0.0 else 0.0
        self.reward_variance.add(of_distances / count)
        mean = of_advantages / count
        deviation = math.sqrt(float(batch.total(_square, old, units, mean).sums[0]) / count)
        # Advantages are differences of returns and values. If every step of all trials has the same reward, and all
        # trials are of equal length, they are nothing but the errors of the values.
        num_trials, of_squared_lengths = of_lengths.tolist()
        of_equal_length = num_trials * of_squared_lengths == count**2
        constant = of_distances <= count * (functional.RESOLUTION * of_rewards / count) ** 2
        precision = math.inf if of_equal_length and constant else functional.RESOLUTION * math.sqrt(of_squares / count)
        divisor = float(functional.divisor(*torch.tensor([deviation, precision], dtype=torch.float64)))
        coefficients = self.settings.entropy_coefficient * self._annealed(), self.reward_variance.mean
        return Scales(units, mean, divisor, coefficients, num_steps), explained

    def _annealed(self) -> float:
        """Return the remaining share of step size and entropy weight: 1 at first, 0 from `anneal_over` on."""
        over = self.settings.anneal_over
        return 1.0 if over is None else max(0.0, 1.0 - self.num_updates / over)

    def state_dict(self) -> State:
        """Return the units of values and predicted rewards, the number of updates, and the moments, too."""
        squares = ((_RETURN_SQUARE, self.return_square), (_REWARD_VARIANCE, self.reward_variance))
        observed = {} if self._observed is None else vars(self._observed)
        return {
            **super().state_dict(),
            **{name: [square.total, square.weight] for name, square in squares},
            _NUM_UPDATES: self.num_updates,
            **{f"{_OBSERVED}.{name}": value for name, value in observed.items()},
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        first = state.get(_VALUE_SCALE)
        self.return_square = RunningSquare(*state.get(_RETURN_SQUARE, (first**2, 1.0) if first else ()))
        self.reward_variance = RunningSquare(*state.get(_REWARD_VARIANCE, ()))
        # Checkpoints of versions without annealing have no count.
        self.num_updates = state.get(_NUM_UPDATES, 0)
        if self._observed is not None:
            self._observed = Moments(**{name: state[f"{_OBSERVED}.{name}"] for name in vars(self._observed)})

    def begin_schedules(self) -> None:
        self.num_updates = 0
