"""PPO on whole trials: the steps of Adam that train a policy with a memory."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, Self, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from maml_rl import functional
from maml_rl.arrays import to_device
from maml_rl.config import Config, SettingsModel
from maml_rl.config.settings import Count, Positive, StepSize
from maml_rl.derivatives import Answer, EpisodeStore, Memo, remembered
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.episode.trials import Trials
from maml_rl.metalearners.metalearner import MetaLearner, State
from maml_rl.metalearners.stepper import Stepper, set_step_size
from maml_rl.plan import Plan
from maml_rl.policies.memory_policy import PredictsRewards
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
# The unit of the values so far, and that from now on: advantages, and the targets of values, depend on them.
Units: TypeAlias = tuple[float, float]


class TrialPPOSettings(SettingsModel):
    """Settings of every algorithm that trains by `TrialPPO`."""

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
        if self.anneal_over is not None and self.anneal_over < config.num_batches:
            raise config.error(
                f"{config.algorithm} learns nothing after meta-update {self.anneal_over}, when its step size is "
                f"zero; use at most {self.anneal_over}, or a longer anneal-over",
                "num-batches",
            )


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


class RunningMoments:
    """Mean and variance, (D,), of all numbers so far."""

    def __init__(self, size: int) -> None:
        self._count = 0
        self._mean: Tensor = torch.zeros(size, dtype=torch.float64)
        self._squares = torch.zeros_like(self._mean)

    def add(self, number: int, mean: Tensor, squares: Tensor) -> None:
        """Include further values, of this number, mean (D,) and sum of squared distances from it (D,), both float64."""
        count = self._count + number
        difference = mean - self._mean
        self._squares = self._squares + squares + difference.square() * (self._count * number / count)
        self._mean, self._count = self._mean + difference * (number / count), count

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
        """Restore what `state_dict` returned."""
        self._count, self._mean, self._squares = int(state["count"]), state["mean"], state["squares"]


@dataclass(frozen=True, slots=True)
class _Scales:
    """Scales of the whole batch that a step of Adam needs.

    Attributes:
        mean: of the advantages.
        divisor: of the centered advantages, their deviation; infinity where the rewards have no signal.
        num_steps: real steps of the minibatch.
        entropy_coefficient: weight of the entropy.
        reward_variance: unit of the squared error of predicted rewards.
    """

    mean: float
    divisor: float
    num_steps: float
    entropy_coefficient: float
    reward_variance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Learner:
    """What is trained.

    Attributes:
        policy: has the distributions.
        unroll: goes through sequences of inputs with it, differentiably.
        params: those of its parameters that are trained.
        see: returns these inputs; None where they are the observations.
    """

    policy: Policy
    unroll: Unroll
    params: list[nn.Parameter]
    see: See | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Problem:
    """PPO's objective on chunks of trials.

    Attributes:
        old: the learner that has sampled them.
        num_observed: number of the policy's inputs whose moments are needed.
        settings: of the objective.
        plan: has the discount per step, and lambda of the advantages.
        reward_prediction: weight of the predicted rewards' squared error.
        num_minibatches: their number n; each has every n-th task.
        at_once: how many trials are unrolled together, at most.
        device: where to compute.
    """

    old: _Learner
    num_observed: int
    settings: TrialPPOSettings
    plan: Plan
    reward_prediction: float
    num_minibatches: int
    at_once: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class _OldTrials:
    """Some trials, and what the policy that has sampled them said of them, in the unit of the batch before.

    Attributes:
        trials: with the policy's inputs as observations.
        log_probs: (L, N).
        values: (L, N).
        final_values: (N,) of the state after the trial, zero if it is terminal; None if they do not count.
    """

    trials: Trials
    log_probs: Tensor
    values: Tensor
    final_values: Tensor | None


def _old_trials(phases: Sequence[TaskEpisodes], memo: Memo, problem: _Problem) -> _OldTrials:
    (episodes,), old = phases, problem.old

    def compute() -> _OldTrials:
        trials = Trials.of(episodes.to(problem.device))
        parts = torch.arange(trials.mask.shape[1], device=problem.device).split(problem.at_once)
        final_values = _values_at_the_end(problem, trials, episodes, parts)
        if old.see is not None:
            seen = torch.cat([old.see(trials.observations[:, part])[0] for part in parts], 1)
            trials = replace(trials, observations=seen)
        found = []
        for part in parts:
            unrolled = old.unroll(trials.observations[:, part])
            log_probs = old.policy.distributions.log_prob(unrolled.distribution, trials.actions[:, part])
            found.append((log_probs, torch.zeros_like(log_probs) if unrolled.values is None else unrolled.values))
        log_probs, values = (torch.cat(each, 1) for each in zip(*found, strict=True))
        return _OldTrials(trials, log_probs if trials.log_probs is None else trials.log_probs, values, final_values)

    return remembered(memo, "trials", problem, compute)


def _values_at_the_end(
    problem: _Problem, trials: Trials, episodes: TaskEpisodes, parts: Sequence[Tensor]
) -> Tensor | None:
    """Return the values (N,) of the final observations, zero where a trial ended in a terminal state."""
    if not problem.settings.bootstrap_trials:
        return None
    longer = trials.with_end(episodes.final_observations[:, -1].to(problem.device))
    lengths, found, old = trials.mask.sum(0).long(), [], problem.old
    for part in parts:
        seen = longer[:, part] if old.see is None else old.see(longer[:, part])[0]
        values = old.unroll(seen).values
        if values is None:
            return None
        found.append(values.gather(0, lengths[part].unsqueeze(0)).squeeze(0))
    goes_on = episodes.truncated[:, -1] & ~episodes.terminated[:, -1]
    return torch.cat(found) * goes_on.to(problem.device)


def _estimates(phases: Sequence[TaskEpisodes], memo: Memo, problem: _Problem, units: Units) -> tuple[Tensor, Tensor]:
    """Return the advantages and the targets of the values, (L, N) each."""

    def compute() -> tuple[Tensor, Tensor]:
        old, gamma, value_lambda = (
            _old_trials(phases, memo, problem),
            problem.plan.gamma,
            problem.settings.value_lambda,
        )
        known = old.values * units[0]
        final = None if old.final_values is None else old.final_values * units[0]
        advantages = old.trials.advantages(known, gamma, problem.plan.gae_lambda, final)
        errors = advantages if value_lambda is None else old.trials.advantages(known, gamma, value_lambda, final)
        return advantages, (known + errors) / units[1]

    return remembered(memo, "estimates", (problem, units), compute)


def _count(phases: Sequence[TaskEpisodes], memo: Memo, problem: _Problem) -> Answer:
    """Ask about the trials.

    Returns:
        Real steps, and sums of returns, squared returns, and rewards, (4,); number of trials, and the sum of their
        squared lengths, (2,); sums of observations, (D,).
    """
    trials = _old_trials(phases, memo, problem).trials
    returns = trials.returns(problem.plan.gamma)
    sums = _sums(trials, torch.ones_like(returns), returns, returns.double().square(), trials.rewards)
    lengths = trials.mask.double().sum(0)
    of_lengths = torch.stack([torch.ones_like(lengths).sum(), lengths.square().sum()])
    return Answer(sums=(sums, of_lengths, _observed(trials, problem).sum(0)))


def _center_observations(phases: Sequence[TaskEpisodes], memo: Memo, problem: _Problem, mean: Tensor) -> Answer:
    """Return the sums of the squared distances of observations from their mean, (D,)."""
    observed = _observed(_old_trials(phases, memo, problem).trials, problem)
    return Answer(sums=((observed - mean.to(problem.device)).square().sum(0),))


def _estimate(
    phases: Sequence[TaskEpisodes],
    memo: Memo,
    problem: _Problem,
    units: Units,
    mean_return: float,
    mean_reward: float,
) -> Answer:
    """Ask about the advantages, given the means of returns and rewards over all real steps of the batch.

    Returns:
        Sums of the advantages; of the squares of what the values did not know of the returns; of the squared
        distances of returns and rewards from their means; and the real steps of each minibatch.
    """
    old, (advantages, _) = _old_trials(phases, memo, problem), _estimates(phases, memo, problem, units)
    trials = old.trials
    returns = trials.returns(problem.plan.gamma)
    sums = _sums(
        trials,
        advantages,
        (returns - old.values * units[0]).double().square(),
        (returns.double() - mean_return).square(),
        (trials.rewards.double() - mean_reward).square(),
    )
    counts = [
        trials.mask[:, _rows(phases[0], problem, number)].double().sum() for number in range(problem.num_minibatches)
    ]
    return Answer(sums=(torch.cat([sums, torch.stack(counts)]),))


def _center(phases: Sequence[TaskEpisodes], memo: Memo, problem: _Problem, units: Units, mean: float) -> Answer:
    """Return the sum of the squared distances of the advantages from their mean."""
    advantages, _ = _estimates(phases, memo, problem, units)
    return Answer(sums=(_sums(_old_trials(phases, memo, problem).trials, (advantages.double() - mean).square()),))


def _differentiate(
    phases: Sequence[TaskEpisodes],
    memo: Memo,
    problem: _Problem,
    units: Units,
    learner: _Learner,
    number: int,
    scales: _Scales,
) -> Answer:
    """Return the share in loss, divergence, entropy and rewards' error (4,) of a minibatch, and in the gradient."""
    old, (advantages, targets) = _old_trials(phases, memo, problem), _estimates(phases, memo, problem, units)
    trials, params = old.trials, learner.params
    rows = _rows(phases[0], problem, number)
    if not len(rows):
        nothing = trials.mask.new_zeros(4 + sum(param.numel() for param in params), dtype=torch.float64)
        return Answer(sums=(nothing,))
    given = _Given.of(old, advantages, targets, rows, scales)
    with torch.enable_grad():
        loss, statistics = _objective(problem, learner, given, scales.entropy_coefficient, scales.reward_variance)
        gradients = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
    flat = [part.detach().double().flatten() for part in (statistics, *gradients)]
    return Answer(sums=(torch.cat(flat),))


class _Given(NamedTuple):
    """What the objective of a minibatch is about, (L, n, ...) each.

    Attributes:
        observations: inputs of the policy.
        actions: that were taken.
        log_probs: of the policy that has sampled.
        gains: advantages, centered and divided.
        targets: of the values.
        mask: 1 for real steps.
        weight: of each step.
        rewards: to predict.
    """

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    gains: Tensor
    targets: Tensor
    mask: Tensor
    weight: Tensor
    rewards: Tensor

    @classmethod
    def of(cls, old: _OldTrials, advantages: Tensor, targets: Tensor, rows: Tensor, scales: _Scales) -> Self:
        """Return what is given of some trials."""
        trials, mask = old.trials, old.trials.mask[:, rows]
        return cls(
            trials.observations[:, rows],
            trials.actions[:, rows],
            old.log_probs[:, rows],
            ((advantages[:, rows].double() - scales.mean) / scales.divisor).to(advantages.dtype),
            targets[:, rows],
            mask,
            mask / scales.num_steps,
            trials.rewards[:, rows],
        )


def _objective(
    problem: _Problem,
    learner: _Learner,
    given: _Given,
    entropy_coefficient: float | Tensor,
    reward_variance: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the loss, differentiably; and loss, divergence, entropy and rewards' error, (4,)."""
    settings, real, weight, policy = problem.settings, given.mask > 0, given.weight, learner.policy
    unrolled = learner.unroll(given.observations)
    log_probs = policy.distributions.log_prob(unrolled.distribution, given.actions)
    # Zeroed before the exponential: infinity times zero, in the gradient too, would be NaN.
    ratio_log = torch.where(real, log_probs - given.log_probs, 0.0)
    ratio = torch.exp(ratio_log)
    gain = functional.clipped_gain(ratio, given.gains, settings.clip)
    entropy = policy.distributions.entropy(unrolled.distribution).expand_as(gain)
    losses = -gain - entropy_coefficient * entropy
    if unrolled.value_logits is not None:
        losses = losses + settings.value_coefficient * TwoHot().loss(unrolled.value_logits, given.targets)
    elif unrolled.values is not None:
        losses = losses + settings.value_coefficient * (unrolled.values - given.targets).square()
    errors = torch.zeros_like(losses)
    if problem.reward_prediction > 0.0:
        assert isinstance(policy, PredictsRewards)
        predicted = policy.predict_rewards(unrolled, given.actions)
        errors = (predicted - given.rewards).square() / reward_variance
        losses = losses + problem.reward_prediction * errors
    loss = torch.where(real, losses, 0.0).mul(weight).sum()
    with torch.no_grad():
        entropy, errors = (torch.where(real, each, 0.0).mul(weight).sum() for each in (entropy, errors))
        divergence = ((ratio - 1.0) - ratio_log).mul(weight).sum()
        statistics = torch.stack([loss, divergence, entropy, errors])
    return loss, statistics


def _rows(episodes: TaskEpisodes, problem: _Problem, number: int) -> Tensor:
    """Return the trials of a minibatch. Tasks are independent, so every n-th is equivalent to a shuffled part."""
    start = (number - episodes.first_task) % problem.num_minibatches
    return torch.arange(start, len(episodes), problem.num_minibatches, device=problem.device)


def _observed(trials: Trials, problem: _Problem) -> Tensor:
    """Return the numbers whose moments are needed, of the real steps, (n, D) float64."""
    if not problem.num_observed:
        return trials.mask.new_zeros(0, 0, dtype=torch.float64)
    return trials.observations[..., : problem.num_observed][trials.mask > 0].double()


def _sums(trials: Trials, *values: Tensor) -> Tensor:
    """Return sums over the real steps."""
    real = trials.mask > 0
    return torch.stack([torch.where(real, each, 0.0).double().sum() for each in values])


class TrialPPO:
    """Steps of Adam on PPO's clipped objective, for a policy that is unrolled through trials, in any placement.

    Returns are discounted through a trial, across the ends of its episodes. Values are learned in units of the running
    root mean square of the returns, so that their loss neither dominates the policy's nor vanishes, for any first
    batch; those of a two-hot head are in the unit of the rewards. With a `reward_prediction_coefficient` the policy
    predicts the reward of every action from its memory, too: the memory then also learns from each step's reward, not
    only from the policy's gradient.

    Args:
        policy: the policy to unroll and train, with values or without.
        optimizer: of those of its parameters that are trained.
        settings: of the objective; with `anneal_over`, of the optimizer's step size, too.
        plan: has the discount per step, and lambda of the advantages.
        device: where the computation runs.
        reward_prediction_coefficient: weight of the predicted rewards' squared error, in units of the rewards'
            variance; 0 for a policy that predicts none.
        unroll: instead of the policy's own, for other inputs than observations.
        see: returns these inputs; see `See`.

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
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        settings: TrialPPOSettings,
        plan: Plan,
        *,
        device: torch.device,
        reward_prediction_coefficient: float = 0.0,
        unroll: Unroll | None = None,
        see: See | None = None,
    ) -> None:
        self._optimizer, self._settings = optimizer, settings
        self._stepper = Stepper(self._loss_of, optimizer, device=device, name="PPO", max_norm=settings.max_grad_norm)
        self._params = self._stepper.params
        self._plan, self._device = plan, device
        self._reward_prediction = reward_prediction_coefficient
        self._learner = _Learner(policy=policy, unroll=unroll or policy.unroll, params=self._params, see=see)
        self.return_square, self.reward_variance = RunningSquare(), RunningSquare()
        self.num_updates = 0
        # The policy that normalizes its observations. Its statistics are constant while a batch is sampled and learned
        # from; for the next batch they cover all steps so far.
        self._normalizing: SequencePolicy | None = None
        if settings.normalize_observations and isinstance(policy, SequencePolicy):
            self._normalizing = policy
        mean = None if self._normalizing is None else self._normalizing.observation_mean
        self._observed = None if mean is None else RunningMoments(mean.numel())

    @property
    def tasks_per_chunk(self) -> int:
        """The largest number of trials in a chunk: an efficient number for each minibatch."""
        return _ALL if self._stepper.is_recorded else _CHUNK * self._settings.num_minibatches

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Take all steps on one batch of trials.

        Returns:
            `loss/before`, the clipped objective and the values' error in the first pass; `loss/after`, in the last;
            `kl`, an estimate of the divergence from the old policy in the last pass; `policy/entropy`; `grad_norm` of
            the first step; `explained_variance`, the share of the returns' variance that the values explained;
            `no_signal`, 1 if the rewards gave the policy none; where rewards are predicted, `explained_rewards`, the
            share of their variance in the first pass.

        Raises:
            NonFiniteError: If the loss or its gradient is not finite; the step is not taken.
        """
        if self._settings.anneal_over is not None:
            set_step_size(self._optimizer, self._settings.learning_rate * self._annealed())
        learner = self._learner
        # A module of a user may have none.
        spaces = [getattr(learner.policy, name, None) for name in ("observation_space", "action_space")]
        problem = batch.share(
            _Problem(
                # Spaces never change, and take longer to copy than all else.
                old=copy.deepcopy(learner, {id(space): space for space in spaces}),
                num_observed=0 if self._observed is None else len(self._observed.mean),
                settings=self._settings,
                plan=self._plan,
                reward_prediction=self._reward_prediction,
                num_minibatches=min(self._settings.num_minibatches, batch.num_tasks),
                at_once=_ALL if self._stepper.is_recorded else _CHUNK,
                device=self._device,
            )
        )
        params, history = self._params, list[Tensor]()
        with batch:
            units, minibatches, explained = self._prepare(batch, problem)
            if self._stepper.is_recorded:
                # One chunk has all trials, in this process.
                (history,) = batch.map(self._take_on_device, problem, units, minibatches)
            for _ in range(0 if self._stepper.is_recorded else self._settings.num_epochs):
                for number, scales in enumerate(minibatches):
                    statistics, *gradients = (
                        batch.total(_differentiate, problem, units, learner, number, scales)
                        .sums[0]
                        .split([4, *(param.numel() for param in params)])
                    )
                    for param, gradient in zip(params, gradients, strict=True):
                        param.grad = gradient.reshape(param.shape).to(param)
                    history.append(self._stepper.apply(statistics))
        self.num_updates += 1
        if self._normalizing is not None and self._observed is not None:
            moments = self._observed.mean.to(self._device), self._observed.variance.to(self._device)
            self._normalizing.normalize_by(*moments)
        first, last = (
            torch.stack(part).mean(0).tolist() for part in (history[: len(minibatches)], history[-len(minibatches) :])
        )
        predictions = {}
        if self._reward_prediction > 0.0:
            predictions["explained_rewards"] = 1.0 - first[3]
        return {
            "loss/before": first[0],
            "loss/after": last[0],
            "kl": last[1],
            "policy/entropy": first[2],
            "grad_norm": float(history[0][-1]),
            "explained_variance": explained,
            "no_signal": float(math.isinf(minibatches[0].divisor)),
            **predictions,
        }

    def _take_on_device(
        self, phases: Sequence[TaskEpisodes], memo: Memo, problem: _Problem, units: Units, scales: Sequence[_Scales]
    ) -> list[Tensor]:
        """Take all steps on the trials of one chunk; return statistics (4,), loss and the gradient's norm of each."""
        old, estimates = _old_trials(phases, memo, problem), _estimates(phases, memo, problem, units)
        self._problem, minibatches = problem, []
        for number, each in enumerate(scales):
            coefficients = to_device(torch.tensor([each.entropy_coefficient, each.reward_variance]), problem.device)
            rows = _rows(phases[0], problem, number)
            minibatches.append((*_Given.of(old, *estimates, rows, each), *coefficients.unbind()))
        found = [self._stepper(*given) for _ in range(self._settings.num_epochs) for given in minibatches]
        taken = torch.stack(found)
        self._stepper.checked(taken.flatten())
        return [*taken.cpu().double()]

    def _loss_of(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the statistics of a step on a device."""
        *given, entropy_coefficient, reward_variance = tensors
        return _objective(self._problem, self._learner, _Given(*given), entropy_coefficient, reward_variance)

    def state_dict(self) -> State:
        """Return the units of values and predicted rewards, the number of updates, and the moments of observations."""
        squares = ((_RETURN_SQUARE, self.return_square), (_REWARD_VARIANCE, self.reward_variance))
        units = {name: [square.total, square.weight] for name, square in squares}
        observed = {} if self._observed is None else self._observed.state_dict()
        return {
            **units,
            _NUM_UPDATES: self.num_updates,
            **{f"{_OBSERVED}.{name}": value for name, value in observed.items()},
        }

    def load_state_dict(self, state: State) -> None:
        """Restore what `state_dict` returned."""
        first = state.get(_VALUE_SCALE)
        self.return_square = RunningSquare(*state.get(_RETURN_SQUARE, (first**2, 1.0) if first else ()))
        self.reward_variance = RunningSquare(*state.get(_REWARD_VARIANCE, ()))
        # Checkpoints of versions without annealing have no count.
        self.num_updates = state.get(_NUM_UPDATES, 0)
        if self._observed is not None:
            observed = {name: state[f"{_OBSERVED}.{name}"] for name in self._observed.state_dict()}
            self._observed.load_state_dict(observed)

    def _annealed(self) -> float:
        """Return the remaining share of step size and entropy weight: 1 at first, 0 from `anneal_over` on."""
        over = self._settings.anneal_over
        return 1.0 if over is None else max(0.0, 1.0 - self.num_updates / over)

    def _prepare(self, batch: EpisodeStore, problem: _Problem) -> tuple[Units, list[_Scales], float]:
        """Return units, the scales of each minibatch, and the share of the returns' variance that values explained."""
        sums, of_lengths, of_observations = batch.total(_count, problem).sums
        count, of_returns, of_squares, of_rewards = sums.tolist()
        if self._observed is not None:
            mean_observed = of_observations / count
            squares = batch.total(_center_observations, problem, mean_observed).sums[0]
            self._observed.add(int(count), mean_observed, squares)
        # The values that collected and learned so far are in the unit of the previous batch.
        unit_before = math.sqrt(self.return_square.mean) if self.return_square.weight else None
        self.return_square.add(of_squares / count)
        unit = math.sqrt(self.return_square.mean)
        policy = self._learner.policy
        by_classes = isinstance(policy, SequencePolicy) and policy.value == "two-hot"
        units = (1.0, 1.0) if by_classes else (unit_before or unit, unit)
        found = batch.total(_estimate, problem, units, of_returns / count, of_rewards / count).sums[0]
        of_advantages, left, spread, of_distances, *num_steps = found.tolist()
        # If all returns are equal there is nothing to explain.
        explained = 1.0 - left / spread if spread > 0.0 else 0.0
        self.reward_variance.add(of_distances / count)
        mean = of_advantages / count
        deviation = math.sqrt(float(batch.total(_center, problem, units, mean).sums[0]) / count)
        # Advantages are differences of returns and values. If every step of all trials has the same reward, and all
        # trials are of equal length, they are nothing but the errors of the values.
        num_trials, of_squared_lengths = of_lengths.tolist()
        of_equal_length = num_trials * of_squared_lengths == count**2
        constant = of_distances <= count * (functional.RESOLUTION * of_rewards / count) ** 2
        precision = math.inf if of_equal_length and constant else functional.RESOLUTION * math.sqrt(of_squares / count)
        scales = [
            _Scales(
                mean=mean,
                divisor=float(functional.divisor(*torch.tensor([deviation, precision], dtype=torch.float64))),
                num_steps=steps,
                entropy_coefficient=self._settings.entropy_coefficient * self._annealed(),
                reward_variance=self.reward_variance.mean,
            )
            for steps in num_steps
        ]
        return units, scales, explained


class TrialPPOLearner(MetaLearner):
    """A learner of trials whose policy is trained by `TrialPPO`."""

    columns = "episode"
    whole_trials = True
    maps_over_tasks = True
    settings: TrialPPOSettings

    def _train_by_ppo(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        """Have Adam train parameters of the policy; see `TrialPPO` for the options."""
        self.optimizer = torch.optim.Adam(params, lr=self.settings.learning_rate)
        self._ppo = TrialPPO(self.policy, self.optimizer, self.settings, self.plan, device=self.device, **options)
        self.tasks_per_chunk = self._ppo.tasks_per_chunk

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        return self._ppo.update(batch)

    def state_dict(self) -> State:
        return super().state_dict() | self._ppo.state_dict()

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._ppo.load_state_dict(state)

    def begin_schedules(self) -> None:
        self._ppo.num_updates = 0
