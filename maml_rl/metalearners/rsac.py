"""Recurrent SAC: soft actor-critic whose actor and critics have a memory, trained on whole trials of a replay."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from maml_rl.config import Config
from maml_rl.config.settings import Count, Fraction
from maml_rl.experience import Replay, Steps
from maml_rl.metalearners.metalearner import SINGLE
from maml_rl.metalearners.soft_actor_critic import (
    EnsembleMLP,
    SACSettings,
    SoftCritics,
    masked_mean,
    soft_targets,
    soft_values,
    soft_values_of_choices,
)
from maml_rl.metalearners.stepper import Input, Stepper
from maml_rl.metalearners.trial_learner import MemorySettings, TrialReplayLearner, TrialReplaySettings
from maml_rl.policies import Policy
from maml_rl.policies.gru_sequences import GRUSequences
from maml_rl.policies.heads import SquashedGaussianHead
from maml_rl.policies.slot_rows import through
from maml_rl.policies.soft_actors import LAST_LAYER, RecurrentActor
from maml_rl.policies.trial_encoder import EncoderSizes, TrialEncoder, action_unit, encode, make_linear
from maml_rl.policies.two_hot import OF_BINS, TwoHot

Units = Annotated[int, Field(ge=0, le=2**31)]


class RecurrentCritics(nn.Module):
    """Twin critics on one trial encoder, beside it an embedding of the current observation and action.

    They share spaces and sizes with an actor, and have an encoder of their own. For discrete actions they have one
    output for each, and the action is not an input. An output is a value, or with `two_hot` the logits of its
    distribution over bins.
    """

    def __init__(
        self,
        actor: RecurrentActor,
        hidden_sizes: Sequence[int],
        generator: torch.Generator,
        two_hot: TwoHot | None = None,
    ) -> None:
        super().__init__()
        self.two_hot = two_hot
        mine, size = actor.encoder, actor.encoder.sizes.hidden_size
        self.encoder = TrialEncoder(actor.observation_space, actor.action_space, mine.sizes, generator)
        observation = mine.parts.observation
        self.num_choices = sum(actor.distributions.num_categories)
        entries = 0 if self.num_choices else actor.distributions.noise_size
        self.present = make_linear(observation.stop - observation.start + 1 + entries, size, generator)
        outputs = (self.num_choices or 1) * (1 if two_hot is None else two_hot.num_bins)
        of_last = LAST_LAYER if two_hot is None else OF_BINS
        self.heads = EnsembleMLP(2 * size, hidden_sizes, outputs, generator, of_last=of_last)

    def first_layer(self, units: Tensor) -> Tensor:
        """Return what units (L, N, H) of the encoder add to the first layer of the heads, for `forward`."""
        return self.heads.first_layer(units.flatten(0, 1))

    def forward(self, entered: Tensor, observations: Tensor, actions: Tensor | None, *, fixed: bool = False) -> Tensor:
        """Return outputs (2, L, N, O) for actions, or (2, L, N, K, O) for all discrete ones.

        Args:
            entered: result of `first_layer`.
            observations: (L, N, size), which the encoder has seen there.
            actions: (L, N, A) in (-1, 1); None for discrete ones.
            fixed: take the parameters as constants, so that gradients go to the actions alone.
        """
        seen = self.encoder.see(observations)
        seen = (seen if actions is None else torch.cat((seen, actions), -1)).flatten(0, 1)
        params: dict[str, Tensor] = dict(self.present.named_parameters(prefix="present"))
        if fixed:
            params, entered = {name: param.detach() for name, param in params.items()}, entered.detach()
        present = through(seen, params, "present").relu_()
        summed = self.heads.first_layer(present, self.encoder.sizes.hidden_size, entered, fixed=fixed)
        outputs = self.heads.rest(summed, fixed=fixed)
        each = (self.num_choices,) if self.num_choices else ()
        return outputs.reshape(2, *observations.shape[:2], *each, -1)

    def decode(self, outputs: Tensor) -> Tensor:
        """Return the values (...) that outputs (..., O) are."""
        return outputs.squeeze(-1) if self.two_hot is None else self.two_hot.decode(outputs)

    def errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses (2, L, N) of outputs (2, L, N, O) with target values (L, N)."""
        if self.two_hot is None:
            return (outputs.squeeze(-1) - targets).square()
        return self.two_hot.loss(outputs, targets.expand(outputs.shape[:-1]))


class RSAC(TrialReplayLearner):
    """Off-policy meta-RL as reinforcement learning of a partially observed task: SAC with a memory, on whole trials.

    Actor and critics have recurrent encoders of their own. An update goes through a batch of trials once with each of
    them, and once with that of the target critics; all losses share these passes, and one step of Adam follows. So the
    actor learns from the critics before their step, where the published code runs the encoder of the critics again
    after it.

    Source: Ni et al. 2022, https://arxiv.org/abs/2110.05038
    """

    class Settings(SACSettings, TrialReplaySettings, MemorySettings):
        """Settings of recurrent SAC."""

        hidden_size: Annotated[Count, Field(description="units of the recurrent layers, or width of a token")] = 64
        observation_embedding: Annotated[Count, Field(description="units that embed an observation")] = 32
        action_embedding: Annotated[Units, Field(description="units that embed the last action; 0: not an input")] = 8
        reward_embedding: Annotated[Units, Field(description="units that embed the last reward; 0: not an input")] = 8
        rewarded_share: Annotated[
            Fraction,
            Field(description="share of an update's trials that have a reward; sequences of them hold the first"),
        ] = 0.0
        value: Annotated[
            Literal["number", "two-hot"],
            Field(description="values as numbers, or by classification, whose loss is as large for any unit"),
        ] = "number"
        goal_reward: Annotated[
            float | None,
            Field(description="reward from which on a step counts as terminal, though the trial continues; null: none"),
        ] = None

    uses = frozenset({"gamma", "hidden-sizes", "meta-batch-size"})
    instead = MappingProxyType({"memory": "cell"})
    measured = ("loss/critics", "loss/actor", "temperature", "value", "entropy")
    training_state = (SINGLE, "critic", "target")
    tests_without_noise = True
    settings: Settings
    policy: RecurrentActor
    networks: SoftCritics[RecurrentCritics]
    optimizer: torch.optim.Optimizer

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not isinstance(self.policy, RecurrentActor):
            raise TypeError(
                f"rsac trains a RecurrentActor, whose encoder its critics repeat, and {type(self.policy).__name__} is "
                "not one; leave out the policy of the config, or pass a RecurrentActor"
            )
        sizes = self.policy.hidden_sizes
        two_hot = TwoHot() if self.settings.value == "two-hot" else None
        self.critics = RecurrentCritics(self.policy, sizes, self.torch_generator("critics"), two_hot)
        self.networks = SoftCritics(self.critics, self.policy.action_space, self.settings).to(self.device)
        self.targets = self.networks.target
        self._unit = action_unit(self.policy.action_space).to(self.device)
        head = self.policy.distributions
        self._squashed = head if isinstance(head, SquashedGaussianHead) else None
        groups = [
            {"params": [*self.policy.parameters(), *self.critics.parameters()], "lr": self.settings.learning_rate},
            {"params": [self.networks.log_temperature], "lr": self.settings.temperature_learning_rate},
        ]
        self.optimizer = torch.optim.Adam(groups, fused=True)
        after = self.networks.update_targets
        self.stepper = Stepper(self.loss, self.optimizer, name="rsac", after=after)
        self._sequences, self._target_sequences = GRUSequences(), GRUSequences()
        self.experience = {
            "trials": Replay(self.settings.buffer_steps, memory_bytes=self.settings.mapped_bytes, device=self.device)
        }

    @classmethod
    def make_policy(cls, env: Any, config: Config, settings: Any) -> Policy:
        settings.refuse(config, env)
        embeddings = settings.observation_embedding, settings.action_embedding, settings.reward_embedding
        return RecurrentActor(
            env.single_observation_space,
            env.single_action_space,
            EncoderSizes(settings.hidden_size, embeddings, settings.body_of(settings.hidden_size, config)),
            config.hidden_sizes,
            seed=config.seed,
        )

    def draw_inputs(self) -> Sequence[Input]:
        settings = self.settings
        rewarded = round(settings.rewarded_share * settings.batch_size)
        trials = self.experience["trials"].sample_sequences(
            self.generator("replay"), settings.batch_size, length=settings.sequence_length, rewarded=rewarded
        )
        return self.inputs_of(trials)

    def inputs_of(self, trials: Steps) -> Sequence[Input]:
        """Return the inputs of a step on a batch of trials, or of sequences of them, (L, N, ...); noise is drawn."""
        return self.stepper.padded(len(trials.mask), replace(trials, infos={}), self._noise(trials))

    def loss(self, trials: Steps, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the `losses`, and what is `measured`: losses, temperature, means of value and entropy."""
        critic_loss, actor_loss, temperature_loss, value, entropy = self.losses(trials, noise)
        temperature = self.networks.log_temperature.detach().exp()
        return critic_loss + actor_loss + temperature_loss, torch.stack(
            (critic_loss, actor_loss, temperature, value, entropy)
        )

    def _noise(self, trials: Steps) -> Tensor:
        """Return the noise of the actions (L + 1, N, A) at every step of trials (L, N, ...) and after them."""
        length, num = trials.mask.shape
        size = 0 if self._squashed is None else self.policy.noise_size
        dtype = self.policy.head.weight.dtype
        return torch.randn((length + 1, num, size), generator=self.torch_generator("actions")).to(dtype)

    def losses(self, trials: Steps, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the losses of critics, actor and temperature, the mean value, and the mean entropy.

        The gradient of each goes only to its own parameters.

        Args:
            trials: (L, N, ...), whole, or sequences of them, at whose start nothing is remembered.
            noise: of the actions, as a step draws it.
        """
        mask, temperature = trials.mask, self.networks.log_temperature.exp()
        seen, terminal = trials.with_end(), trials.terminal_ends()
        if self.settings.goal_reward is not None:
            terminal = torch.maximum(terminal, (trials.rewards >= self.settings.goal_reward).to(terminal.dtype))
        before, after = seen[:-1], seen[1:]
        units, remembered = encode((self.policy.encoder, self.critics.encoder), seen, self._sequences)
        parameters = self.policy.parameters_of(units, seen)
        of_critics = self.critics.first_layer(remembered[:-1])
        with torch.no_grad():
            (remembered,) = encode((self.targets.encoder,), seen, self._target_sequences)
            of_targets = self.targets.first_layer(remembered[1:])
        alpha = temperature.detach()
        if self._squashed is None:
            log_probs = F.log_softmax(parameters[0], -1)
            with torch.no_grad():
                values = self.targets.decode(self.targets(of_targets, after, None))
                following = soft_values_of_choices(values, log_probs[1:], alpha)
            of_choices = self.critics(of_critics, before, None)
            taken = of_choices.take_along_dim(trials.actions.long()[None, ..., None, None], 3).squeeze(3)
            reached = soft_values_of_choices(self.critics.decode(of_choices.detach()), log_probs[:-1], alpha)
            entropies = -(log_probs.detach().exp() * log_probs.detach()).sum(-1)
        else:
            noise = (self._noise(trials) if noise is None else noise).to(seen)
            actions, log_probs = self._squashed.sample(parameters, noise)
            with torch.no_grad():
                values = self.targets.decode(self.targets(of_targets, after, actions[1:]))
                following = soft_values(values, log_probs[1:], alpha)
            done = (self._squashed.entries(trials.actions.to(seen)) - self._squashed.bounds(seen)[0]) * self._unit
            taken = self.critics(of_critics, before, done)
            proposed = self.critics(of_critics, before, actions[:-1], fixed=True)
            reached = soft_values(self.critics.decode(proposed), log_probs[:-1], alpha)
            entropies = -log_probs.detach()
        targets = soft_targets(trials.rewards, terminal, following, self.plan.gamma)
        entropy = masked_mean(entropies[:-1], mask)
        target_entropy = self.networks.target_entropy_of(tuple(parameter[:-1] for parameter in parameters), mask)
        return (
            masked_mean(self.critics.errors(taken, targets), mask),
            -masked_mean(reached, mask),
            temperature * (entropy - target_entropy),
            masked_mean(self.critics.decode(taken.detach())[0], mask),
            entropy,
        )
