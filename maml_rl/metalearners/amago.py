"""AMAGO: off-policy learning on whole trials, with values by classification and a policy by filtered imitation."""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import spaces
from pydantic import Field
from torch import Tensor, nn

from maml_rl.config import Config, SettingsModel
from maml_rl.config.config import MIXTURE
from maml_rl.config.settings import Count, Fraction, Positive, StepSize
from maml_rl.derivatives import EpisodeStore
from maml_rl.errors import AlgorithmError
from maml_rl.experience import Replay, Steps
from maml_rl.experience.hindsight import NUM_CANDIDATES, Hindsight
from maml_rl.metalearners.history_learner import HistoryLearner, HistorySettings
from maml_rl.metalearners.losses import filtered_imitation
from maml_rl.metalearners.metalearner import SINGLE, MetaLearner, State
from maml_rl.metalearners.soft_actor_critic import EnsembleMLP, masked_mean
from maml_rl.metalearners.stepper import Input, Stepper, move_targets, records_steps
from maml_rl.metalearners.trial_learner import (
    CellKind,
    MemorySettings,
    NumTrials,
    TrialReplayLearner,
    TrialReplaySettings,
)
from maml_rl.policies import Policy, SequencePolicy
from maml_rl.policies.distributions import DistributionParams
from maml_rl.policies.heads import LatentGaussianHead, SquashedGaussianHead
from maml_rl.policies.two_hot import OF_BINS, TwoHot

# In the state: recorded actions are those before squashing.
_BEFORE_SQUASHING = "actions_before_squashing"


class TrialCritics(nn.Module):
    """An ensemble of E critics for G discounts, layers on the units of the policy's memory.

    A value is a distribution over bins. For Discrete actions there is one for each; others are an input. The initial
    weights are drawn by `generator`.
    """

    def __init__(
        self, policy: SequencePolicy, settings: "CriticSettings", num_discounts: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        space = policy.action_space
        self.head: Any = policy.distributions
        self.num_choices = int(space.n) if isinstance(space, spaces.Discrete) else 0
        entries = 0 if self.num_choices else policy.noise_size
        self.num_discounts, self.two_hot = num_discounts, TwoHot(settings.num_bins, settings.largest_value)
        outputs = max(1, self.num_choices) * num_discounts * settings.num_bins
        sizes = settings.critic_layers
        num, inputs = settings.num_critics, policy.hidden_size + entries
        self.layers = EnsembleMLP(inputs, sizes, outputs, generator, num, of_last=OF_BINS)

    def forward(self, units: Tensor, actions: Tensor | None, *, fixed: bool = False) -> Tensor:
        """Return logits (E, L, N, G, bins) of actions, or (E, L, N, K, G, bins) of all discrete ones.

        Args:
            units: (L, N, H) of the memory.
            actions: (L, N, *action shape), as recorded; None for discrete ones.
            fixed: take the parameters as constants, so that gradients go to units and actions alone.
        """
        inputs = units
        if actions is not None:
            numbers = actions.to(units)
            is_squashed = isinstance(self.head, SquashedGaussianHead)
            numbers = self.head.inside(self.head.perform(numbers)) if is_squashed else self.head.entries(numbers)
            inputs = torch.cat((units, numbers), -1)
        logits = self.layers.rest(self.layers.first_layer(inputs.flatten(0, 1), fixed=fixed), fixed=fixed)
        each = (self.num_choices,) if self.num_choices else ()
        return logits.reshape(self.layers.num, *units.shape[:2], *each, self.num_discounts, self.two_hot.num_bins)

    def values(
        self, units: Tensor, parameters: DistributionParams, noise: Tensor | None, *, fixed: bool = False
    ) -> Tensor:
        """Return the values (E, L, N, G) of a policy, whose actions have these parameters, by each critic."""
        if noise is None:
            values = self.two_hot.decode(self(units, None, fixed=fixed))
            return (parameters[0].softmax(-1).unsqueeze(-1) * values).sum(-2)
        return self.two_hot.decode(self(units, self.head.record(parameters, noise), fixed=fixed))


class CriticSettings(SettingsModel):
    """Settings of AMAGO's critics, and of the actor's loss."""

    critic_layers: Annotated[
        tuple[Count, ...], Field(strict=False, min_length=1, description="units of the layers of each critic")
    ] = (256, 256)
    further_discounts: Annotated[
        tuple[Fraction, ...],
        Field(strict=False, description="discounts of further values, from which the memory learns, too"),
    ] = (0.9,)
    num_critics: Annotated[int, Field(ge=2, le=64, description="critics of the ensemble")] = 4
    num_bins: Annotated[int, Field(ge=2, le=4096, description="bins of a value")] = 128
    largest_value: Annotated[Positive, Field(description="value of the last bin; the first is minus that")] = 1e4
    reward_multiplier: Annotated[
        Positive, Field(description="values are those of the rewards times this; bins are finest for values below 1")
    ] = 1.0
    normalize_rewards: Annotated[
        bool | None,
        Field(
            description="divide rewards by their root mean square in a family, and show the memory the symlog of the "
            "last one; null: in a mixture, except in runs of earlier versions"
        ),
    ] = None
    filter_temperature: Annotated[
        Positive | None,
        Field(description="imitate actions by exp(advantage / temperature); null: those that are better than none"),
    ] = None
    policy_gradient_share: Annotated[
        Fraction, Field(description="share of the usual policy gradient in the loss of the actor")
    ] = 0.0
    critic_coefficient: Annotated[Positive, Field(description="weight of the critics' loss")] = 10.0
    tau: Annotated[
        Fraction, Field(description="share of the way that the target critics move to the critics in an update")
    ] = 0.003
    normalize_observations: Annotated[
        bool, Field(description="normalize unbounded observations and the last reward, by moments that follow by tau")
    ] = False


class FilteredActorCritic(MetaLearner):
    """Base of AMAGO, from a replay and from recorded histories: critics on the memory of the policy, and the losses."""

    measured: tuple[str, ...] = ("loss/critics", "loss/actor", "value", "imitated")
    training_state = (SINGLE, "critics", "targets")
    policy: SequencePolicy
    optimizer: torch.optim.Optimizer
    settings: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not isinstance(self.policy, SequencePolicy) or not isinstance(
            self.policy.action_space, spaces.Box | spaces.Discrete
        ):
            raise TypeError(
                "amago trains a GRUPolicy or TransformerPolicy with actions of a Box or Discrete ones, got "
                f"{type(self.policy).__name__} with {getattr(self.policy, 'action_space', None)}; leave out the policy "
                "of the config, or take rl2, which takes all actions"
            )
        discounts = (*self.settings.further_discounts, self.plan.gamma)
        self.discounts = torch.tensor(discounts, dtype=torch.float64, device=self.device)
        critics = TrialCritics(self.policy, self.settings, len(discounts), self.torch_generator("critics"))
        targets = copy.deepcopy(critics).requires_grad_(False)
        self.networks = nn.ModuleDict({"critics": critics, "targets": targets}).to(self.device)
        self.critics, self.targets = critics, targets
        trained = [param for param in (*self.policy.parameters(), *critics.parameters()) if param.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained, lr=self.settings.learning_rate, weight_decay=self.settings.weight_decay, fused=True
        )
        self.stepper = Stepper(
            self.loss,
            self.optimizer,
            name=type(self).__name__.lower(),
            max_norm=self.settings.max_grad_norm,
            after=partial(move_targets, targets, critics, self.settings.tau),
        )

    @classmethod
    def complete(cls, settings: Any, config: Config) -> Any:
        """Decide whether rewards are normalized; see the setting."""
        settings = super().complete(settings, config)
        if settings.normalize_rewards is not None:
            return settings
        normalize = config.env_name == MIXTURE and not config.is_recorded
        return settings.model_copy(update={"normalize_rewards": normalize})

    @classmethod
    def make_policy(cls, env: Any, config: Config, settings: Any) -> Policy:
        settings.refuse(config, env)
        options = {
            "squash": settings.squash,
            "normalize_observations": settings.normalize_observations,
            "compress_rewards": bool(settings.normalize_rewards),
        }
        policy: Policy = settings.make_policy(env, config, value="none", **options)
        return policy

    @abstractmethod
    def draw_trials(self) -> Steps:
        """Draw the N trials of a step, (L, N, ...), or sequences of them."""

    # Where nothing follows a step: within trials of a replay, the end of an episode is a step like others.
    terminal_ends = staticmethod(Steps.terminal_ends)

    def draw_inputs(self) -> Sequence[Input]:
        """Draw the trials of a step, `inputs_of` it; the moments of observations follow them."""
        trials = self.draw_trials().to(self.device)
        seen, terminal = trials.with_end(), self.terminal_ends(trials)
        self._follow(seen[:-1], trials.mask)
        return self.inputs_of(seen, trials.actions, trials.rewards, terminal, trials.mask)

    def inputs_of(self, *trials: Tensor) -> Sequence[Input]:
        """Return the inputs of a step on N trials of L steps, the first arguments of `losses`; the rest is drawn."""
        pair = torch.from_numpy(self.generator("critics").permutation(self.settings.num_critics)[:2])
        return pair, *self.stepper.padded(len(trials[1]), *trials, *self._noise(trials[0]))

    def _follow(self, observations: Tensor, mask: Tensor) -> None:
        """Move the moments that normalize observations by `tau` toward those of real steps (L, N, size)."""
        mean, std = self.policy.observation_mean, self.policy.observation_std
        if mean is not None and std is not None:
            observations, tau = self.policy.compressed(observations), self.settings.tau
            if records_steps(self.device):
                # To select the real steps would wait for the device.
                share = (mask / mask.sum()).unsqueeze(-1).to(observations)
                average = (share * observations).sum((0, 1))
                variance = (share * (observations - average).square()).sum((0, 1))
            else:
                real = observations[mask > 0]
                average, variance = real.mean(0), real.var(0, correction=0)
            difference = average - mean
            self.policy.normalize_by(mean + tau * difference, std.square().lerp(variance + difference.square(), tau))

    def loss(self, pair: Tensor, *trials: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the `losses` of both, and all that they return."""
        losses = self.losses(*trials, pair=pair)
        return self.settings.critic_coefficient * losses[0] + losses[1], torch.stack(losses)

    def _noise(self, seen: Tensor) -> tuple[Tensor, ...]:
        """Return the noise of continuous actions (L + 1, N, A) for what is seen (L + 1, N, ...), if they are."""
        shape = *seen.shape[:2], self.policy.noise_size
        return () if self.critics.num_choices else (torch.randn(shape, generator=self.torch_generator("actions")),)

    def losses(
        self,
        seen: Tensor,
        actions: Tensor,
        rewards: Tensor,
        terminal: Tensor,
        mask: Tensor,
        noise: Tensor | None = None,
        *,
        pair: Sequence[int] | Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the losses of critics and actor, the mean value of the actions, and the share that is imitated.

        The target of a critic is r + gamma * (1 - terminal) * min over a pair of target critics of V(s'), V the mean
        over the policy's actions: exact for discrete ones, else of one of them. The advantage of an action is its mean
        value over all critics minus that of the policy.

        Args:
            seen: (L + 1, N, *observation shape), before each action and after the last.
            actions: (L, N, *action shape), as recorded.
            rewards: (L, N).
            terminal: (L, N) 1 where a step led to a terminal state of the trial.
            mask: (L, N) 1 for real steps.
            noise: (L + 1, N, A) of the policy's actions; None for discrete ones.
            pair: numbers of two critics.
        """
        unrolled = self.policy.unroll(seen)
        assert unrolled.units is not None
        units, head = unrolled.units, self.critics.head
        parameters = tuple(
            parameter.expand(*seen.shape[:2], *parameter.shape[-1:]) for parameter in unrolled.distribution
        )
        before, after = (
            tuple(parameter[:-1] for parameter in parameters),
            tuple(parameter[1:] for parameter in parameters),
        )
        own_noise, later_noise = (None, None) if noise is None else (noise.to(units)[:-1], noise.to(units)[1:])
        with torch.no_grad():
            values = self.targets.values(units[1:], after, later_noise)
            following = values[pair].amin(0)
            scaled = self.settings.reward_multiplier * rewards
            targets = scaled.unsqueeze(-1) + self.discounts.to(rewards) * (1.0 - terminal.unsqueeze(-1)) * following
        logits = self.critics(units[:-1], None if self.critics.num_choices else actions)
        if self.critics.num_choices:
            index = actions.long().reshape(1, *mask.shape, 1, 1, 1)
            logits = logits.take_along_dim(index, 3).squeeze(3)
        two_hot = self.critics.two_hot
        critic_loss = masked_mean(two_hot.loss(logits, targets.expand(logits.shape[:-1])).mean((0, -1)), mask)
        with torch.no_grad():
            taken = two_hot.decode(logits)[..., -1].mean(0)
            usual = self.critics.values(units[:-1], before, own_noise)[..., -1].mean(0)
            advantages = taken - usual
        imitation = filtered_imitation(head.log_prob(before, actions), advantages, self.settings.filter_temperature)
        share = self.settings.policy_gradient_share
        actor_loss = (1.0 - share) * masked_mean(imitation, mask)
        if share:
            reached = self.critics.values(units[:-1].detach(), before, own_noise, fixed=True)[..., -1].mean(0)
            actor_loss = actor_loss - share * masked_mean(reached, mask)
        imitated = masked_mean((advantages > 0).to(mask.dtype), mask)
        return critic_loss, actor_loss, masked_mean(taken, mask), imitated


class AMAGO(FilteredActorCritic, TrialReplayLearner):
    """One sequence model under actor and critics, trained off-policy on whole trials of a replay.

    Values are learned by classification, and the policy imitates those of its actions that were better than what it
    would have done. All losses share one pass through the memory. In a mixture rewards are divided by their root mean
    square in a family, so that values of 1,000 in one do not hide those of 1 in another.

    Source: Grigsby et al. 2024, https://arxiv.org/abs/2310.09971 and https://arxiv.org/abs/2411.11188
    """

    class Settings(TrialReplaySettings, MemorySettings, CriticSettings):
        """Settings of AMAGO."""

        squash: ClassVar[bool] = True
        cell: CellKind = "transformer"
        hidden_size: Annotated[Count, Field(description="units of the recurrent layer, or width of a token")] = 128
        learning_rate: Annotated[StepSize, Field(description="step size of AdamW")] = 3e-4
        weight_decay: Annotated[float, Field(ge=0, description="decay of the weights, as AdamW has it")] = 1e-4
        max_grad_norm: Annotated[Positive, Field(description="maximum norm of a gradient")] = 1.0
        batch_size: NumTrials = 32
        hindsight_share: Annotated[
            Fraction, Field(description="share of an update's trials whose task is taken to be one that they served")
        ] = 0.0

    uses = frozenset({"gamma", "meta-batch-size", "conv-layers", "image-scale"})
    instead = MappingProxyType({"memory": "cell", "hidden-sizes": "critic-layers"})
    settings: Settings
    hindsight: Hindsight | None = None
    # Whether the replay may have actions that an earlier version has recorded after squashing.
    _was_squashed = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # The noise of continuous actions is there to explore.
        self.tests_without_noise = isinstance(self.policy.action_space, spaces.Box)
        own = self.settings
        # Families relabel with NumPy.
        device = "cpu" if own.hindsight_share else self.device
        self.experience = {"trials": Replay(own.buffer_steps, memory_bytes=own.mapped_bytes, device=device)}

    @classmethod
    def from_config(cls, policy: Policy, config: Config, settings: Any, device: torch.device | str = "cpu") -> Self:
        learner = super().from_config(policy, config, settings, device)
        if settings.hindsight_share:
            where = "algorithm-settings", "hindsight-share"
            if settings.sequence_length is not None:
                raise config.error("whole trials are relabeled; leave sequence-length out", *where)
            if settings.normalize_rewards:
                raise config.error("relabeled rewards are not normalized; leave normalize-rewards out", *where)
            try:
                seen, done = learner.policy.observation_space, learner.policy.action_space
                learner.hindsight = Hindsight(config.env_name, config.env_kwargs, seen, done)
            except TypeError as error:
                raise config.error(str(error), *where) from None
        return learner

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        was_squashed, self._was_squashed = self._was_squashed, False
        if was_squashed and self.experience["trials"].num_trials:
            raise AlgorithmError(
                "an earlier version of amago has recorded the trials of this run, with actions after squashing; begin "
                "another run with its policy and learner, by --init RUN --init-learner"
            )
        return super().update(batch)

    def state_dict(self) -> State:
        known = {_BEFORE_SQUASHING: True} if isinstance(self.policy.distributions, LatentGaussianHead) else {}
        return super().state_dict() | known

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        is_squashed = isinstance(self.policy.distributions, LatentGaussianHead)
        self._was_squashed = is_squashed and _BEFORE_SQUASHING not in state

    def draw_trials(self) -> Steps:
        settings = self.settings
        trials = self.experience["trials"].sample_sequences(
            self.generator("replay"),
            settings.batch_size,
            length=settings.sequence_length,
            normalize=bool(settings.normalize_rewards),
        )
        relabeled = round(settings.hindsight_share * settings.batch_size)
        if relabeled and self.hindsight is not None:
            # Tasks that the run has trained on, whatever they are drawn from: not those that it keeps for tests.
            drawn = self.experience["trials"].draw_tasks(self.generator("hindsight"), NUM_CANDIDATES)
            self.hindsight.relabel(trials, self.hindsight.best_tasks(trials, relabeled, drawn))
        return trials


# The loss is amago's, with other inputs than that of imitation.
class OfflineAMAGO(FilteredActorCritic, HistoryLearner):  # type: ignore[misc]
    """AMAGO without a sampler: it learns from recorded histories, and imitates those of their actions that were good.

    Where `ad` imitates a learner as it improves, this one need not see progress: values tell which actions were good.

    Source: Grigsby et al. 2024, https://arxiv.org/abs/2411.11188
    """

    class Settings(HistorySettings, CriticSettings):
        """Settings of AMAGO from recorded histories."""

        keep: Annotated[Count, Field(description="use only every keep-th episode of a history; 1: all")] = 1

    uses = frozenset({"gamma"})
    instead = MappingProxyType({"hidden-sizes": "critic-layers"})
    settings: Settings

    def draw(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        drawn = self.sequences(rng, keep=self.settings.keep)
        return drawn.observations, drawn.actions

    def draw_trials(self) -> Steps:
        normalize = bool(self.settings.normalize_rewards)
        drawn = self.sequences(self.generator("histories"), keep=self.settings.keep, normalize=normalize)
        return replace(drawn, actions=self.policy.distributions.recorded(drawn.actions))

    @staticmethod
    def terminal_ends(steps: Steps) -> Tensor:
        """Return (L, N) 1 where a step led to a terminal state, of any episode of a history."""
        return steps.terminations.to(steps.rewards)

    def draw_inputs(self) -> Sequence[Input]:
        self._set_step_size()
        return super().draw_inputs()

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Take steps on sequences of the histories; return `updates`, and what is `measured`."""
        return self.stepper.take(self.settings.num_updates, self.draw_inputs, self.measured)
