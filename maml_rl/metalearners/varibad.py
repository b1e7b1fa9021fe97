"""VariBAD: a belief about the task that explains its rewards, and a policy of state and belief, trained by PPO."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from pydantic import Field
from torch import Tensor, nn

from maml_rl import functional
from maml_rl.config import Config
from maml_rl.config.settings import Count, StepSize
from maml_rl.derivatives import EpisodeStore
from maml_rl.envs.observing import LastStepParts
from maml_rl.experience import Replay, Steps
from maml_rl.metalearners.stepper import Input, Stepper
from maml_rl.metalearners.trial_learner import MemorySettings, refuse_hidden_rewards, refuse_small_replay
from maml_rl.metalearners.trial_ppo import TrialPPOLearner, TrialPPOSettings
from maml_rl.policies import BeliefPolicy, Policy
from maml_rl.policies.mlp import Perceptron
from maml_rl.policies.trial_encoder import EncoderSizes

_DECODER, _BELIEF, _EXPERIENCE = "decoder", "belief", "trials"
# Number of cells of the largest grid with an output for each.
_MOST_CELLS = 10_000


class VariBAD(TrialPPOLearner):
    """A recurrent encoder turns the history of a trial into a belief about its task, on which the policy acts.

    The encoder is trained as that of a variational autoencoder: from the belief at every step of a trial a decoder
    predicts the rewards (and optionally the states) of all of its steps, past and future, and the loss penalizes the
    divergence of each belief from that of the step before. The trials come from a replay buffer. The policy sees the
    observation and the belief, and PPO trains it; its gradient does not enter the encoder.

    Source: Zintgraf et al. 2020, https://arxiv.org/abs/1910.08348
    """

    class Settings(TrialPPOSettings, MemorySettings):
        """Settings of VariBAD."""

        encoder_size: Annotated[Count, Field(description="units of the encoder, or width of a token")] = 64
        latent_size: Annotated[Count, Field(description="numbers of the latent vector that represents the task")] = 5
        observation_embedding: Annotated[Count, Field(description="units of the encoder's layer for observations")] = 32
        action_embedding: Annotated[
            int, Field(ge=0, le=2**20, description="units of its layer for actions; 0: it does not see them")
        ] = 16
        reward_embedding: Annotated[Count, Field(description="units of its layer for rewards and ends of episodes")] = 8
        normalize_observations: Annotated[
            bool, Field(description="normalize the observations of the policy (not of the encoder)")
        ] = True
        reward_decoder: Annotated[
            Literal["cells", "network"],
            Field(
                description="how rewards are predicted: network, by the squared error, from both observations, action "
                "and latent; cells, for grids: whether the reward of a cell is positive, with an output for each cell"
            ),
        ] = "network"
        decoder_sizes: Annotated[
            tuple[Count, ...], Field(strict=False, description="units of the decoder's layers")
        ] = (32, 32)
        state_coefficient: Annotated[
            float, Field(ge=0, description="weight of the predicted observations' squared error; 0: not predicted")
        ] = 0.0
        kl_coefficient: Annotated[
            float, Field(ge=0, description="weight of the divergence of each belief from the one before")
        ] = 0.1
        belief_learning_rate: Annotated[StepSize, Field(description="step size of Adam for encoder and decoder")] = 1e-3
        belief_updates: Annotated[Count, Field(description="steps of Adam for them in each meta-update")] = 3
        belief_trials: Annotated[Count, Field(description="trials for each of these steps, from the replay buffer")] = (
            25
        )
        belief_steps: Annotated[
            Count | None, Field(description="steps of each trial whose beliefs are decoded, at random; null: all")
        ] = None
        replay_steps: Annotated[Count, Field(description="capacity of the replay buffer, in steps")] = 1_000_000

    uses = frozenset({"gamma", "gae-lambda", "hidden-sizes", "nonlinearity", "meta-batch-size"})
    instead = MappingProxyType({"bootstrap": "bootstrap-trials"})
    # As in the tests of the published code.
    tests_without_noise = True
    settings: Settings
    policy: BeliefPolicy

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not isinstance(self.policy, BeliefPolicy):
            raise TypeError(
                f"varibad trains a policy of state and belief, and got a {type(self.policy).__name__}; use BeliefPolicy"
            )
        settings = self.settings
        self._train_by_ppo(
            self.policy.acting_parameters(), unroll=self.policy.unroll_known, see=self.policy.with_belief
        )
        self.decoder = Decoder(self.policy, settings, self.torch_generator(_DECODER)).to(self.device)
        self.networks = nn.ModuleDict({_DECODER: self.decoder})
        trained = [*self.policy.encoder_parameters(), *self.decoder.parameters()]
        optimizer = torch.optim.Adam(trained, lr=settings.belief_learning_rate)
        self.optimizers = {_BELIEF: optimizer}
        self.belief_stepper = Stepper(self.loss, optimizer, name="varibad", setting="belief-learning-rate")
        self.experience = {_EXPERIENCE: Replay(settings.replay_steps, device=self.device)}

    @classmethod
    def make_policy(cls, env: Any, config: Config, settings: Any) -> Policy:
        """Make a policy of state and belief."""
        refuse_hidden_rewards(config)
        refuse_small_replay(config, env, "replay-steps", settings.replay_steps, config.fast_batch_size)
        embeddings = settings.observation_embedding, settings.action_embedding, settings.reward_embedding
        policy = BeliefPolicy(
            env.single_observation_space,
            env.single_action_space,
            config.hidden_sizes,
            EncoderSizes(settings.encoder_size, embeddings, settings.body_of(settings.encoder_size, config)),
            latent_size=settings.latent_size,
            nonlinearity=config.nonlinearity,
            seed=config.seed,
        )
        if settings.reward_decoder == "cells":
            try:
                Grid.of(policy)
            except ValueError as error:
                raise config.error(str(error), "algorithm-settings", "reward-decoder") from None
        return policy

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        """Take steps of Adam on PPO's clipped objective, then on the evidence bound of trials from the replay.

        Returns:
            The metrics of `TrialPPOLearner.update`, and of the first step on the bound: `belief/reconstruction` and
            `belief/kl`, for each step of a trial the decoder's loss over the whole trial and the divergence, and
            `belief/grad_norm`.
        """
        metrics = super().update(batch)
        # The belief is learned from whole trials.
        (episodes,) = batch.phases
        self.experience[_EXPERIENCE].append(episodes)
        return metrics | self._update_belief()

    def _update_belief(self) -> dict[str, float]:
        """Train encoder and decoder by steps of Adam; return the metrics of the first."""
        replay, rng = self.experience[_EXPERIENCE], self.generator("trials")
        statistics = [
            self.belief_stepper(*self.inputs_of(replay.sample_sequences(rng, self.settings.belief_trials), rng))
            for _ in range(self.settings.belief_updates)
        ]
        reconstruction, divergence, _, norm, *_ = self.belief_stepper.checked(torch.cat(statistics))
        return {"belief/reconstruction": reconstruction, "belief/kl": divergence, "belief/grad_norm": norm}

    def inputs_of(self, steps: Steps, rng: np.random.Generator) -> Sequence[Input]:
        """Return the inputs of a step on trials (L, N, ...): the beliefs to decode, and noise, are drawn."""
        length, num = steps.mask.shape
        count = min(self.settings.belief_steps or length, length)
        if count < length:
            keys = rng.random((length, num), np.float32) + (steps.mask == 0).float().cpu().numpy()
            chosen = torch.from_numpy(np.sort(np.argpartition(keys, count - 1, axis=0)[:count], axis=0))
        else:
            chosen = torch.arange(length).unsqueeze(1).expand(length, num)
        noise = torch.randn(count, num, self.settings.latent_size, generator=self.torch_generator("latents"))
        return *self.belief_stepper.padded(length, replace(steps, infos={})), chosen, noise

    def loss(self, steps: Steps, chosen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss; and reconstruction and divergence (2,), means over trials and their steps.

        Args:
            steps: (L, N, ...).
            chosen: (K, N) the steps of each trial whose beliefs are decoded.
            noise: (K, N, Z) from N(0, 1), of the latents.
        """
        mean, log_variance, _ = self.policy.encode(steps.observations)
        log_std = 0.5 * log_variance
        before = [torch.cat((torch.zeros_like(each[:1]), each[:-1])) for each in (mean, log_std)]
        divergence = functional.gaussian_kl(mean, log_std, *before).gather(0, chosen)
        places = chosen.unsqueeze(-1).expand(*chosen.shape, mean.shape[-1])
        latents = mean.gather(0, places) + log_std.gather(0, places).exp() * noise
        # All trials have the same weight, and so do the steps of each.
        real = steps.mask.gather(0, chosen)
        weight = real / real.sum(0) / real.shape[1]
        losses = self.decoder(latents, steps)
        terms = [torch.where(real > 0, each, 0.0).mul(weight).sum() for each in (losses, divergence)]
        return terms[0] + self.settings.kl_coefficient * terms[1], torch.stack(terms)


class Decoder(nn.Module):
    """Predicts the rewards, and perhaps the observations, of all steps of a trial from a latent."""

    def __init__(self, policy: BeliefPolicy, settings: VariBAD.Settings, generator: torch.Generator) -> None:
        super().__init__()
        self._own, self._state_coefficient = policy.own_size, settings.state_coefficient
        self._parts = LastStepParts.within(policy.observation_space, policy.action_space)
        self._latent_size = policy.latent_size
        self._grid = Grid.of(policy) if settings.reward_decoder == "cells" else None
        hidden = settings.decoder_sizes
        actions = self._parts.last_action.stop - self._parts.last_action.start
        # Inputs of the prediction of a step besides the latent: its observation and action, and for rewards the next
        # observation.
        seen = {"rewards": 2 * self._own + actions, "states": self._own + actions}
        self._networks: dict[str, Perceptron] = {}
        if self._grid is not None:
            self._networks["cells"] = _layers("cells", (self._latent_size, *hidden, self._grid.num_cells))
        else:
            self._networks["rewards"] = _layers("rewards", (self._latent_size + seen["rewards"], *hidden, 1))
        if self._state_coefficient > 0.0:
            self._networks["states"] = _layers("states", (self._latent_size + seen["states"], *hidden, self._own))
        for network in self._networks.values():
            network.register(self, generator)

    def forward(self, latents: Tensor, steps: Steps) -> Tensor:
        """Return the loss of predicting all steps of each trial (L, N, ...) from K latents of it (K, N, Z): (K, N)."""
        before = steps.observations[..., : self._own]
        after, action = (
            steps.next_observations[..., part] for part in (self._parts.observation, self._parts.last_action)
        )
        if self._grid is not None:
            losses = self._of_cells(latents, self._grid.cells_of(after), steps)
        else:
            rewards = self._predict("rewards", latents, torch.cat((before, action, after), -1)).squeeze(-1)
            losses = _over_steps((rewards - steps.rewards).square(), steps.mask)
        if self._state_coefficient > 0.0:
            states = self._predict("states", latents, torch.cat((before, action), -1))
            errors = _over_steps((states - after).square().mean(-1), steps.mask)
            losses = losses + self._state_coefficient * errors
        return losses

    def _of_cells(self, latents: Tensor, cells: Tensor, steps: Steps) -> Tensor:
        """Return the negative log-likelihood (K, N) of whether each step's reward, in its cell, is positive."""
        logits = self._networks["cells"].units(latents, dict(self.named_parameters()))
        # Steps in the same cell have the same prediction: it is enough to count them.
        zeros = logits.new_zeros(cells.shape[1], logits.shape[-1])
        paid, unpaid = (
            zeros.scatter_add(1, cells.mT, (which * steps.mask).mT.to(logits))
            for which in (steps.rewards > 0.0, steps.rewards <= 0.0)
        )
        return (paid * F.softplus(-logits) + unpaid * F.softplus(logits)).sum(-1)

    def _predict(self, name: str, latents: Tensor, seen: Tensor) -> Tensor:
        """Return predictions (K, L, N, out) from latents (K, N, Z) and what steps show, (L, N, in)."""
        network, params = self._networks[name], dict(self.named_parameters())
        (weight, bias), *others = network.layer_names
        of_latents, of_steps = params[weight].tensor_split([self._latent_size], dim=1)
        # The first layer is linear in both: neither is multiplied again for every pair.
        units = F.linear(latents, of_latents).unsqueeze(1) + F.linear(seen, of_steps, params[bias])
        for weight, bias in others:
            units = F.linear(network.nonlinearity(units), params[weight], params[bias])
        return units


def _layers(name: str, sizes: tuple[int, ...]) -> Perceptron:
    return Perceptron(sizes, [f"{name}_{index}" for index in range(len(sizes) - 1)], "relu")


def _over_steps(losses: Tensor, mask: Tensor) -> Tensor:
    """Sum losses (K, L, N) over the real steps (L, N) of each trial: (K, N)."""
    return torch.where(mask > 0, losses, 0.0).sum(1)


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells that integer observations denote.

    Attributes:
        low: (D,) the lowest numbers.
        shape: number of cells along each axis.
    """

    low: tuple[float, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, policy: BeliefPolicy) -> Self:
        """Return the grid of the policy's observations; a ValueError if there is none."""
        space = policy.observation_space
        assert isinstance(space, spaces.Box)
        low, high = (bound[: policy.own_size].astype(np.float64) for bound in (space.low, space.high))
        finite = bool(np.isfinite(low).all() and np.isfinite(high).all())
        if not (finite and (low == np.floor(low)).all() and (high == np.floor(high)).all()):
            raise ValueError(
                "observations are not the cells of a grid: their bounds are not integers; use the reward-decoder "
                "'network'"
            )
        num_cells = float(np.prod(high - low + 1.0))
        if num_cells > _MOST_CELLS:
            raise ValueError(
                f"a grid of {num_cells:.3g} cells is too large for an output for each; use the reward-decoder 'network'"
            )
        return cls(tuple(low.tolist()), tuple((high - low + 1.0).astype(int).tolist()))

    @property
    def num_cells(self) -> int:
        """Number of cells."""
        return int(np.prod(self.shape))

    def cells_of(self, observations: Tensor) -> Tensor:
        """Return the numbers (...) int64 of the cells that observations (..., D) name."""
        cells = torch.zeros_like(observations[..., 0], dtype=torch.int64)
        for axis, (low, size) in enumerate(zip(self.low, self.shape, strict=True)):
            cells = cells * size + (observations[..., axis] - low).round().long()
        return cells
