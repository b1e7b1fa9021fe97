"""The policy of off-policy learners with a memory: a trial encoder under a head that also sees the observation."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.policies.heads import CategoricalHead, DistributionParams, Head, Params, SquashedGaussianHead
from maml_rl.policies.memory_policy import MemoryPolicy
from maml_rl.policies.policy import Memory, Unrolled
from maml_rl.policies.recurrent import Cell
from maml_rl.policies.sequence_policy import SlotRows
from maml_rl.policies.transformer import Attention, TokenStep, Transformer, within
from maml_rl.policies.trial_encoder import LAST_LAYER, TrialEncoder, make_linear, through
from maml_rl.spaces import require_vectors


class RecurrentActor(MemoryPolicy):
    """A trial encoder, beside it an embedding of the current observation, and hidden layers of ReLU under a head.

    Actions of a bounded Box are squashed Gaussians, Discrete ones categorical.

    Args:
        observation_space: of one environment, which shows the last step: make it with `observe_last`.
        action_space: a bounded Box, or Discrete.
        hidden_size: units of the recurrent layer.
        hidden_sizes: of the layers above it.
        cell: "gru", "lstm", or the sizes of a transformer.
        embeddings: units for the observation, the last action and the last reward; 0 leaves one out.
        seed: of the initial weights; the global random state does not change.

    Raises:
        TypeError: If a space is not supported.
        ValueError: If the observations do not show the last step, or `hidden_size` does not fit to the transformer.

    Source: Ni et al. 2022, https://arxiv.org/abs/2110.05038
    """

    distributions: Head

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_size: int = 64,
        hidden_sizes: Sequence[int] = (128, 128),
        *,
        cell: Cell | Attention = "gru",
        embeddings: tuple[int, int, int] = (32, 8, 0),
        seed: int = 0,
    ) -> None:
        super().__init__()
        require_vectors("a RecurrentActor, as of rsac,", observation_space)
        assert isinstance(observation_space, spaces.Box)
        self.distributions = head_of(action_space)
        self.observation_space, self.action_space = observation_space, action_space
        self.observation_shape = observation_space.shape
        self.noise_kind, self.noise_size = self.distributions.noise_kind, self.distributions.noise_size
        generator = torch.Generator().manual_seed(seed)
        self.encoder = TrialEncoder(
            observation_space, action_space, hidden_size, cell=cell, embeddings=embeddings, generator=generator
        )
        own = self.encoder.parts.observation
        self.present = make_linear(own.stop - own.start + 1, embeddings[0], generator)
        self.hidden_sizes = tuple(hidden_sizes)
        sizes = [hidden_size + embeddings[0], *hidden_sizes]
        self.layers = [f"layer{index}" for index in range(len(hidden_sizes))]
        for name, inputs, outputs in zip(self.layers, sizes[:-1], sizes[1:], strict=True):
            setattr(self, name, make_linear(inputs, outputs, generator))
        self.head = make_linear(sizes[-1], self.distributions.num_units, generator, LAST_LAYER)

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        """Refuse other spaces than those that the policy was made for; see `Policy.check_spaces`."""
        if observation_space.shape != self.observation_shape:
            raise ValueError(
                f"the policy is for observations of shape {self.observation_shape}, but the environment has "
                f"{observation_space}; with observe_last=True the last action and reward are among them"
            )
        self.distributions.check_actions(action_space)

    def initial_memory(self, num: int) -> Memory:
        """Return zeros (num, H), twice for an LSTM, or the initial memory of a transformer."""
        return self.encoder.initial_state(num, self.head.weight)

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Return actions (M, S, ...), and the memory after them; see `Policy.act`."""
        # The actor of a transformer writes into the ring that it is given.
        ring, *rest = memory
        memory = (ring.clone(), *rest) if isinstance(self.encoder.core, Transformer) else memory
        return self._act_by_actor(observations, noise, memory, params)

    def actor(self, params: Params, first_task: int = 0) -> Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]:
        """Return `act` under fixed parameters, without gradients; see `Policy.actor`.

        With a transformer it writes into the ring that it is given, as `TransformerPolicy.actor` does.
        """
        params = {name: value.detach() for name, value in params.items()}
        of_encoder, core = self._of_encoder(params), self.encoder.core
        is_stacked = params["head.weight"].dim() == 3
        tokens: dict[torch.Size, TokenStep] = {}

        def remember(rows: SlotRows, blocks: Sequence[Tensor], memory: Memory) -> tuple[Sequence[Tensor], Memory]:
            if not isinstance(core, Transformer):
                states = zip(*map(rows.split, memory), strict=True)
                after = [self.encoder.step(*both, of_encoder) for both in zip(blocks, states, strict=True)]
                each = tuple(zip(*after, strict=True))
                return each[0], tuple(map(rows.join, each))
            if rows.grid not in tokens:
                tokens[rows.grid] = TokenStep(core, within(of_encoder, "core."), rows)
            token, (ring, count) = tokens[rows.grid], memory
            embedded = rows.join([self.encoder.embed(seen, of_encoder) for seen in blocks])
            token(embedded, ring.flatten(0, 1), count.flatten())
            units = token.units[..., token.own, :].reshape(*rows.grid, -1)
            return rows.split(units), (ring, count + 1)

        def act(observations: Tensor, noise: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
            rows = SlotRows(noise.shape[:2], None if is_stacked else first_task)
            blocks = rows.split(observations.to(self.head.weight.dtype))
            units, after = remember(rows, blocks, memory)
            chosen = [
                self.distributions.act(self.parameters_of(known, seen, params), drawn)
                for known, seen, drawn in zip(units, blocks, rows.split(noise), strict=True)
            ]
            return rows.join(chosen), after

        return act

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> Unrolled:
        """Go through sequences (L, N, size), differentiably; see `Policy.unroll`."""
        params = dict(self.named_parameters()) if params is None else params
        observations = observations.to(self.head.weight.dtype)
        units, last = self.encoder.run(observations, memory, self._of_encoder(params))
        return Unrolled(self.parameters_of(units, observations, params), None, last)

    def parameters_of(self, units: Tensor, observations: Tensor, params: Params | None = None) -> DistributionParams:
        """Return the distribution parameters at units (..., H) of the encoder and observations (..., size)."""
        params = dict(self.named_parameters()) if params is None else params
        hidden = torch.cat((units, through(self.encoder.see(observations), params, "present").relu_()), -1)
        for name in self.layers:
            hidden = through(hidden, params, name).relu_()
        return self.distributions.parametrize(through(hidden, params, "head"), params)

    @cached_property
    def _encoder_names(self) -> dict[str, str]:
        return {name: f"encoder.{name}" for name in self.encoder.own_params()}

    def _of_encoder(self, params: Params) -> dict[str, Tensor]:
        return {name: params[full] for name, full in self._encoder_names.items()}


def head_of(action_space: gymnasium.Space[Any]) -> Head:
    """Return the head of soft actor-critics for an action space: squashed Gaussian, or categorical.

    Raises:
        TypeError: If the space is neither a bounded Box of floats nor Discrete.
    """
    match action_space:
        case spaces.Discrete(n=n, start=0):
            return CategoricalHead(int(n))
        case spaces.Box():
            return SquashedGaussianHead(action_space)
    raise TypeError(
        f"no soft actor-critic for the action space {action_space}: expected a bounded Box of floats, or Discrete "
        "starting at 0; map it to one of these with gymnasium.wrappers.TransformAction, or take rl2, which takes all "
        "kinds"
    )
