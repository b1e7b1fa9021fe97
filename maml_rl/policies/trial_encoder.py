"""An encoder of trials: embeds the observation, the last action and its reward, and has a memory.

Observations are those that show the last step: the environment's own, the last action, the last reward, and whether an
episode has ended; see `LastStepParts`.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from maml_rl.envs.last_step import LastStepParts
from maml_rl.policies.gru_sequences import GRUSequences
from maml_rl.policies.heads import Params
from maml_rl.policies.layers import empty_layer
from maml_rl.policies.policy import Memory
from maml_rl.policies.recurrent import Cell, make_recurrent, next_state, run, weights_of, zero_state
from maml_rl.policies.sequence_policy import affine
from maml_rl.policies.transformer import Attention, Transformer, within

# Bound of the last layer of an actor or a critic: actions start near the middle of their range, with noise as large as
# the range, and values near zero.
LAST_LAYER = 3e-3


def through(inputs: Tensor, params: Params, name: str) -> Tensor:
    """Return inputs (..., I) through the linear layer `name`; see `affine`."""
    return affine(inputs, params[f"{name}.weight"], params[f"{name}.bias"])


def make_linear(inputs: int, outputs: int, generator: torch.Generator, bound: float | None = None) -> nn.Linear:
    """Return a linear layer with uniform weights, as torch makes them, or within `bound`; from the generator alone."""
    layer = empty_layer(nn.Linear, inputs, outputs)
    bound = inputs**-0.5 if bound is None else bound
    for weights in layer.parameters():
        nn.init.uniform_(weights, -bound, bound, generator=generator)
    return layer


class TrialEncoder(nn.Module):
    """Embeddings of observation, last action and last reward, each linear and a ReLU, under a layer with a memory.

    Args:
        observation_space: of one environment, which shows the last step.
        action_space: of one environment.
        hidden_size: H, units of the layer.
        cell: of a recurrent layer; or the sizes of a transformer, whose state is its ring: see `Transformer`.
        embeddings: units for the observation, the last action and the last reward; 0 leaves one out.
        generator: draws the initial weights.

    Raises:
        ValueError: If the observations do not show the last step, or H is not a valid width of the transformer.
    """

    unit: Tensor
    core: nn.GRU | nn.LSTM | Transformer

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_size: int,
        *,
        cell: Cell | Attention,
        embeddings: tuple[int, int, int],
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.parts = LastStepParts.within(observation_space, action_space)
        self.hidden_size, self.cell = hidden_size, cell
        self.register_buffer("unit", action_unit(action_space), persistent=False)
        own, action = self.parts.observation, self.parts.last_action
        sizes = {"seen": own.stop - own.start + 1, "did": action.stop - action.start, "got": 1}
        self.embedded = {name: units for name, units in zip(sizes, embeddings, strict=True) if units}
        for name, units in self.embedded.items():
            setattr(self, name, make_linear(sizes[name], units, generator))
        inputs = sum(self.embedded.values())
        if isinstance(cell, Attention):
            self.core = Transformer(inputs, hidden_size, cell)
            self.core.initialize(generator)
        else:
            self.core = make_recurrent(cell, inputs, hidden_size, generator)

    def own_params(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return dict(self.named_parameters())

    def see(self, observations: Tensor) -> Tensor:
        """Return the environment's own part of observations (..., size), and whether an episode has just ended."""
        parts = self.parts
        return torch.cat((observations[..., parts.observation], observations[..., parts.last_termination]), -1)

    def embed(self, observations: Tensor, params: Params) -> Tensor:
        """Return the inputs of the recurrent layer (..., I) for observations (..., size)."""
        seen: dict[str, Tensor] = {"seen": self.see(observations)}
        # In units of half of the range: as the actions of a squashed Gaussian are.
        seen["did"] = observations[..., self.parts.last_action] * self.unit
        seen["got"] = observations[..., self.parts.last_reward]
        return torch.cat([through(seen[name], params, name).relu_() for name in self.embedded], -1)

    def forward(self, observations: Tensor, state: Memory | None = None, params: Params | None = None) -> Tensor:
        """Return the units (L, N, H) of sequences (L, N, size) of observations; see `run`."""
        return self.run(observations, state, params)[0]

    def run(
        self, observations: Tensor, state: Memory | None = None, params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Go through sequences (L, N, size), differentiably, by the kernels of torch.

        Args:
            observations: of N trials.
            state: before the first step; None where trials begin.
            params: by name, of the encoder's own shapes; None for its own.

        Returns:
            Units (L, N, H), and the state (N, H) after the last step, twice for an LSTM.
        """
        params = self.own_params() if params is None else params
        inputs = self.embed(observations, params)
        if isinstance(self.core, Transformer):
            return self.core.run(inputs, state, within(params, "core."))
        state = self.initial_state(observations.shape[1], inputs) if state is None else state
        assert not isinstance(self.cell, Attention)
        return run(self.cell, inputs, state, weights_of(params, "core"))

    def step(self, observations: Tensor, state: Memory, params: Params) -> Memory:
        """Return the state of a recurrent layer after one more step, without the kernels of sequences.

        Args:
            observations: (R, size), or (M, S, size) under stacked parameters.
            state: of those shapes.
            params: by name.
        """
        of_input, of_memory, input_bias, memory_bias = weights_of(params, "core")
        entering = affine(self.embed(observations, params), of_input, input_bias)
        assert not isinstance(self.cell, Attention)
        return next_state(self.cell, entering, affine(state[0], of_memory, memory_bias), state)

    def initial_state(self, num: int, like: Tensor) -> Memory:
        """Return zeros (num, H), twice for an LSTM, or an empty ring, of the type and on the device of `like`."""
        if isinstance(self.core, Transformer):
            return self.core.initial_memory(num, like)
        assert not isinstance(self.cell, Attention)
        return zero_state(self.cell, num, self.hidden_size, like)


def encode(encoders: Sequence[TrialEncoder], observations: Tensor, sequences: GRUSequences) -> tuple[Tensor, ...]:
    """Return the units (L, N, H) of several encoders of one size for the same trials, differentiably.

    Args:
        encoders: of one cell and size.
        observations: (L, N, size).
        sequences: goes through them, where that is faster than torch's own kernels: with GRUs on a CPU.
    """
    if encoders[0].cell != "gru" or observations.device.type != "cpu":
        return tuple(encoder(observations) for encoder in encoders)
    inputs = [encoder.embed(observations, encoder.own_params()) for encoder in encoders]
    return sequences(inputs, [list(encoder.core.parameters()) for encoder in encoders])


def action_unit(action_space: gymnasium.Space[Any]) -> Tensor:
    """Return the factors of the entries of an action: one over half of the range, 1 where there is none."""
    if not isinstance(action_space, spaces.Box) or not action_space.is_bounded():
        return torch.ones(())
    return torch.from_numpy((2.0 / (action_space.high - action_space.low)).astype("float32").ravel())
