"""An encoder of trials: embeds the observation, the last action and its reward, under a body with a memory.

Observations are those that show the last step: the environment's own, the last action, the last reward, and whether an
episode has ended; see `LastStepParts`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from maml_rl.envs.observing import LastStepParts
from maml_rl.policies.gru_sequences import GRUSequences
from maml_rl.policies.heads import Params
from maml_rl.policies.layers import empty_layer, within
from maml_rl.policies.memory_policy import MemoryBody
from maml_rl.policies.policy import Memory
from maml_rl.policies.recurrent import GRU, Cell, make_recurrent, weights_of
from maml_rl.policies.slot_rows import through
from maml_rl.policies.transformer import Attention, Transformer

# The layers that embed the parts of an observation; in checkpoints they have the names behind them.
_EMBEDDINGS = {"observation": "seen", "action": "did", "reward": "got"}


def make_linear(inputs: int, outputs: int, generator: torch.Generator, bound: float | None = None) -> nn.Linear:
    """Return a linear layer with uniform weights, as torch makes them, or within `bound`; from the generator alone."""
    layer = empty_layer(nn.Linear, inputs, outputs)
    bound = inputs**-0.5 if bound is None else bound
    for weights in layer.parameters():
        nn.init.uniform_(weights, -bound, bound, generator=generator)
    return layer


def make_body(kind: Cell | Attention, inputs: int, hidden_size: int, generator: torch.Generator) -> MemoryBody:
    """Return a recurrent layer, or a transformer of these sizes; its weights come from the generator alone."""
    if isinstance(kind, Attention):
        return Transformer(inputs, hidden_size, kind, generator)
    return make_recurrent(kind, inputs, hidden_size, generator)


@dataclass(frozen=True, slots=True)
class EncoderSizes:
    """The sizes of an encoder of trials.

    Attributes:
        hidden_size: H, units of the body.
        embeddings: units for the observation, the last action and the last reward; 0 leaves one out.
        cell: of a recurrent body, or the sizes of a transformer.
    """

    hidden_size: int = 64
    embeddings: tuple[int, int, int] = (32, 8, 0)
    cell: Cell | Attention = "gru"


class TrialEncoder(nn.Module):
    """Embeddings of observation, last action and last reward, each linear and a ReLU, under a body with a memory.

    The observation space must show the last step. The generator draws the initial weights.
    """

    unit: Tensor

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        sizes: EncoderSizes,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.parts = LastStepParts.within(observation_space, action_space)
        self.sizes, embeddings = sizes, sizes.embeddings
        self.register_buffer("unit", action_unit(action_space), persistent=False)
        observation, action = self.parts.observation, self.parts.last_action
        entries = observation.stop - observation.start + 1, action.stop - action.start, 1
        self._embedded = [name for name, units in zip(_EMBEDDINGS, embeddings, strict=True) if units]
        for name, inputs, units in zip(_EMBEDDINGS.values(), entries, embeddings, strict=True):
            if units:
                self.add_module(name, make_linear(inputs, units, generator))
        self.core = make_body(sizes.cell, sum(embeddings), sizes.hidden_size, generator)

    def see(self, observations: Tensor) -> Tensor:
        """Return the environment's own part of observations (..., size), and whether an episode has just ended."""
        parts = self.parts
        return torch.cat((observations[..., parts.observation], observations[..., parts.last_termination]), -1)

    def embed(self, observations: Tensor, params: Params) -> Tensor:
        """Return the inputs of the body (..., I) for observations (..., size)."""
        parts = {
            "observation": self.see(observations),
            # In units of half of the range: as the actions of a squashed Gaussian are.
            "action": observations[..., self.parts.last_action] * self.unit,
            "reward": observations[..., self.parts.last_reward],
        }
        return torch.cat([through(parts[name], params, _EMBEDDINGS[name]).relu_() for name in self._embedded], -1)

    def run(
        self, observations: Tensor, memory: Memory | None = None, params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Go through sequences (L, N, size) of observations, differentiably."""
        params = dict(self.named_parameters()) if params is None else params
        return self.core.run(self.embed(observations, params), memory, within(params, "core."))


def encode(encoders: Sequence[TrialEncoder], observations: Tensor, sequences: GRUSequences) -> tuple[Tensor, ...]:
    """Return the units (L, N, H) of encoders of one cell and size for trials (L, N, size), differentiably.

    GRUs on a CPU go through them by `sequences`, which is faster than torch's own kernels.
    """
    if not isinstance(encoders[0].core, GRU) or observations.device.type != "cpu":
        return tuple(encoder.run(observations)[0] for encoder in encoders)
    inputs = [encoder.embed(observations, dict(encoder.named_parameters())) for encoder in encoders]
    return sequences(inputs, [weights_of(dict(encoder.core.named_parameters())) for encoder in encoders])


def action_unit(action_space: gymnasium.Space[Any]) -> Tensor:
    """Return the factors of the entries of an action: one over half of the range, 1 where that is infinite or zero."""
    if not isinstance(action_space, spaces.Box) or not action_space.is_bounded():
        return torch.ones(())
    width = action_space.high - action_space.low
    return torch.from_numpy((2.0 / np.where(width > 0.0, width, 2.0)).astype("float32").ravel())
