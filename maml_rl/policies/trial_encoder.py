"""A recurrent encoder of trials: embeds what is seen, the last action and its reward, and remembers.

Observations are those that show the last step: the environment's own, the last action, the last reward, and whether an
episode has ended; see `LastStepParts`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from maml_rl.envs.last_step import LastStepParts
from maml_rl.policies.gru_sequences import GRUSequences
from maml_rl.policies.heads import Params

Cell = Literal["gru", "lstm"]
# What an encoder remembers: (num, H), twice for an LSTM.
State = tuple[Tensor, ...]


def affine(inputs: Tensor, params: Params, name: str) -> Tensor:
    """Return inputs (..., I) through the linear layer `name`; (M, S, I) under stacked parameters (M, O, I)."""
    weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
    if weight.dim() == 2:
        return nn.functional.linear(inputs, weight, bias)
    return torch.baddbmm(bias.unsqueeze(-2), inputs, weight.mT)


def make_linear(inputs: int, outputs: int, generator: torch.Generator, bound: float | None = None) -> nn.Linear:
    """Return a linear layer with uniform weights, as torch makes them, or within `bound`; from the generator alone."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
    bound = inputs**-0.5 if bound is None else bound
    for weights in layer.parameters():
        nn.init.uniform_(weights, -bound, bound, generator=generator)
    return layer


def make_recurrent(cell: Cell, inputs: int, hidden: int, generator: torch.Generator) -> nn.GRU | nn.LSTM:
    """Return a recurrent layer whose gates are orthogonal and whose biases are zero; from the generator alone."""
    layer = nn.GRU if cell == "gru" else nn.LSTM
    core = layer(inputs, hidden, device="meta").to_empty(device="cpu")
    for name, weights in core.named_parameters():
        if name.startswith("bias"):
            nn.init.zeros_(weights)
            continue
        for gate in weights.detach().split(hidden):
            nn.init.orthogonal_(gate, generator=generator)
    return core


class TrialEncoder(nn.Module):
    """Embeddings of observation, last action and last reward, each linear and a ReLU, under a recurrent layer.

    Args:
        observation_space: of one environment, which shows the last step.
        action_space: of one environment.
        hidden_size: H, units of the recurrent layer.
        cell: of the recurrent layer.
        embeddings: units for the observation, the last action and the last reward; 0 leaves one out.
        generator: draws the initial weights.

    Raises:
        ValueError: If the observations do not show the last step.
    """

    unit: Tensor

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_size: int,
        *,
        cell: Cell,
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
        self.core = make_recurrent(cell, sum(self.embedded.values()), hidden_size, generator)

    def own_params(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return dict(self.named_parameters())

    def see(self, observations: Tensor) -> Tensor:
        """Return the environment's own part of observations (..., size), and whether an episode has just ended."""
        parts = self.parts
        return torch.cat((observations[..., parts.observation], observations[..., parts.last_termination]), -1)

    def embed(self, observations: Tensor, params: Params) -> Tensor:
        """Return what the recurrent layer takes (..., I), of observations (..., size)."""
        seen: dict[str, Tensor] = {"seen": self.see(observations)}
        # In units of half of the range: as the actions of a squashed Gaussian are.
        seen["did"] = observations[..., self.parts.last_action] * self.unit
        seen["got"] = observations[..., self.parts.last_reward]
        return torch.cat([affine(seen[name], params, name).relu_() for name in self.embedded], -1)

    def forward(self, observations: Tensor, state: State | None = None, params: Params | None = None) -> Tensor:
        """Return the units (L, N, H) of sequences (L, N, size) of observations; see `run`."""
        return self.run(observations, state, params)[0]

    def run(
        self, observations: Tensor, state: State | None = None, params: Params | None = None
    ) -> tuple[Tensor, State]:
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
        state = self.initial_state(observations.shape[1], inputs) if state is None else state
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        weights = [params[f"core.{name}"] for name in names]
        # With biases, one layer, no dropout, differentiable, in one direction, steps first.
        options = True, 1, 0.0, True, False, False
        before = tuple(each.unsqueeze(0).contiguous() for each in state)
        if self.cell == "gru":
            units, last = torch.gru(inputs, before[0], weights, *options)
            return units, (last.squeeze(0),)
        units, *lasts = torch.lstm(inputs, before, weights, *options)
        return units, tuple(last.squeeze(0) for last in lasts)

    def step(self, observations: Tensor, state: State, params: Params) -> State:
        """Return the state after one more step, without the kernels of sequences.

        Args:
            observations: (R, size), or (M, S, size) under stacked parameters.
            state: of those shapes.
            params: by name.
        """
        inputs, size = self.embed(observations, params), self.hidden_size
        weights = {
            f"{side}.{kind}": params[f"core.{kind}_{short}_l0"]
            for side, short in (("in", "ih"), ("own", "hh"))
            for kind in ("weight", "bias")
        }
        entering, held = affine(inputs, weights, "in"), affine(state[0], weights, "own")
        if self.cell == "gru":
            gates = torch.sigmoid(entering[..., : 2 * size] + held[..., : 2 * size])
            reset, keep = gates.split(size, -1)
            new = torch.tanh(entering[..., 2 * size :] + reset * held[..., 2 * size :])
            return (new + keep * (state[0] - new),)
        enter, keep, new, leave = (entering + held).split(size, -1)
        inside = torch.sigmoid(keep) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
        return torch.sigmoid(leave) * torch.tanh(inside), inside

    def initial_state(self, num: int, like: Tensor) -> State:
        """Return zeros (num, H), twice for an LSTM, of the type and on the device of `like`."""
        zeros = like.new_zeros(num, self.hidden_size)
        return (zeros,) if self.cell == "gru" else (zeros, zeros.clone())


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
    """Return what the entries of an action are multiplied by: one over half of the range, 1 where there is none."""
    if not isinstance(action_space, spaces.Box) or not action_space.is_bounded():
        return torch.ones(())
    return torch.from_numpy((2.0 / (action_space.high - action_space.low)).astype("float32").ravel())
