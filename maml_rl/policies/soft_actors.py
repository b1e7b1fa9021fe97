"""The actors of soft actor-critics: one with a memory, and one on a latent context, which is one of its parameters."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from maml_rl.policies.distributions import DistributionParams
from maml_rl.policies.heads import CategoricalHead, Head, Params, SquashedGaussianHead
from maml_rl.policies.layers import within
from maml_rl.policies.memory_policy import BodyPolicy, Enter, Leave, MemoryStep
from maml_rl.policies.policy import Memory, Policy, Unrolled
from maml_rl.policies.slot_rows import SlotRows, through
from maml_rl.policies.trial_encoder import EncoderSizes, TrialEncoder, make_linear
from maml_rl.spaces import require_vectors, stored_actions

CONTEXT = "context"
# Bound of the last layer of an actor or a critic: actions start near the middle of their range, with noise as large as
# the range, and values near zero.
LAST_LAYER = 3e-3


class SoftActor(Policy):
    """Layers of ReLU, `layer0`, `layer1`, ..., under a head of a soft actor-critic, for vectors of numbers."""

    stateless = True
    # What to do about other observations.
    _remedy: ClassVar[str]
    distributions: Head

    def __init__(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], head: Head) -> None:
        super().__init__()
        assert isinstance(observation_space, spaces.Box)
        self.distributions = head
        self.observation_space, self.action_space = observation_space, stored_actions(action_space)
        self.observation_shape = observation_space.shape
        self.noise_kind, self.noise_size = head.noise_kind, head.noise_size

    def _add_layers(self, inputs: int, hidden_sizes: Sequence[int], generator: torch.Generator) -> None:
        self.hidden_sizes, sizes = tuple(hidden_sizes), (inputs, *hidden_sizes)
        self.layers = [f"layer{index}" for index in range(len(hidden_sizes))]
        for name, layer in zip(self.layers, pairwise(sizes), strict=True):
            self.add_module(name, make_linear(*layer, generator))
        self.head = make_linear(sizes[-1], self.distributions.num_units, generator, LAST_LAYER)

    def _through_layers(self, inputs: Tensor, seen: Tensor, params: Params) -> DistributionParams:
        """Return the distribution parameters for inputs of the first layer, and the observations they come from."""
        for name in self.layers:
            inputs = through(inputs, params, name).relu_()
        return self.distributions.masked(self.distributions.parametrize(through(inputs, params, "head"), params), seen)

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        if observation_space.shape != self.observation_shape:
            raise ValueError(
                f"the policy is for observations of shape {self.observation_shape}, but the environment has "
                f"{observation_space}; {self._remedy}"
            )
        self.distributions.check_actions(action_space)


class RecurrentActor(SoftActor, BodyPolicy):
    """A trial encoder, beside it an embedding of the current observation, and hidden layers of ReLU under a head.

    Actions of a bounded Box are squashed Gaussians, Discrete ones categorical.

    Args:
        observation_space: of one environment, which shows the last step: make it with `observe_last`.
        action_space: a bounded Box, or Discrete.
        sizes: of the encoder.
        hidden_sizes: of the layers above it.
        seed: of the initial weights; the global random state does not change.

    Source: Ni et al. 2022, https://arxiv.org/abs/2110.05038
    """

    body_name = "encoder.core"
    _remedy = "with observe_last=True the last action and reward are among them"

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        sizes: EncoderSizes = EncoderSizes(),  # noqa: B008 - frozen
        hidden_sizes: Sequence[int] = (128, 128),
        *,
        seed: int = 0,
    ) -> None:
        require_vectors("a RecurrentActor, as of rsac,", observation_space)
        super().__init__(observation_space, action_space, head_of(action_space))
        generator = torch.Generator().manual_seed(seed)
        self.encoder = TrialEncoder(observation_space, action_space, sizes, generator)
        observation = self.encoder.parts.observation
        self.present = make_linear(observation.stop - observation.start + 1, sizes.embeddings[0], generator)
        self._add_layers(sizes.hidden_size + sizes.embeddings[0], hidden_sizes, generator)

    def acting(self, params: Params) -> Callable[[SlotRows, MemoryStep], tuple[Enter, Leave]]:
        of_encoder, dtype = within(params, "encoder."), self.head.weight.dtype

        def make(rows: SlotRows, step: MemoryStep) -> tuple[Enter, Leave]:
            inputs, units = (rows.blocks(each[..., : rows.shape[-1], :]) for each in (step.inputs, step.units))

            def enter(observations: Tensor) -> Sequence[Tensor]:
                blocks = rows.split(observations.to(dtype))
                for into, seen in zip(inputs, blocks, strict=True):
                    into.copy_(self.encoder.embed(seen, of_encoder))
                return blocks

            def leave(blocks: Sequence[Tensor], noise: Tensor) -> Tensor:
                chosen = [
                    self.distributions.act(self.parameters_of(known, seen, params), drawn)
                    for known, seen, drawn in zip(units, blocks, rows.split(noise), strict=True)
                ]
                return rows.join(chosen)

            return enter, leave

        return make

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> Unrolled:
        params = dict(self.named_parameters()) if params is None else params
        observations = observations.to(self.head.weight.dtype)
        units, last = self.encoder.run(observations, memory, within(params, "encoder."))
        return Unrolled(self.parameters_of(units, observations, params), None, last)

    def parameters_of(self, units: Tensor, observations: Tensor, params: Params | None = None) -> DistributionParams:
        """Return the distribution parameters at units (..., H) of the encoder and observations (..., size)."""
        params = dict(self.named_parameters()) if params is None else params
        present = through(self.encoder.see(observations), params, "present").relu_()
        return self._through_layers(torch.cat((units, present), -1), observations, params)


class ContextActor(SoftActor):
    """Layers of ReLU on observation and context, under squashed Gaussians.

    The context is the parameter `context` (Z,): zero, and never trained by gradients. A sampler gives every task its
    own, `{**own, "context": (M, Z)}`.

    Args:
        observation_space: a Box of vectors.
        action_space: a bounded Box of floats.
        context_size: Z.
        hidden_sizes: units of each layer, at least one.
        seed: of the initial weights; the global random state does not change.

    Attributes:
        adapts_only: names of the only parameters that adaptation may change.
    """

    _remedy = "load the policy of a run of this family"
    adapts_only = (CONTEXT,)
    distributions: SquashedGaussianHead

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        context_size: int = 5,
        hidden_sizes: Sequence[int] = (300, 300, 300),
        *,
        seed: int = 0,
    ) -> None:
        require_vectors("a ContextActor, as of pearl,", observation_space)
        super().__init__(observation_space, action_space, SquashedGaussianHead(action_space))
        self._add_layers(self.observation_shape[0] + context_size, hidden_sizes, torch.Generator().manual_seed(seed))
        self.context = nn.Parameter(torch.zeros(context_size), requires_grad=False)

    @property
    def has_static_steps(self) -> bool:
        return True

    def distribution_parameters(self, observations: Tensor, params: Params | None = None) -> DistributionParams:
        params = dict(self.named_parameters()) if params is None else params
        context = params[CONTEXT]
        if context.dim() == 2:
            context = context.reshape(len(context), *(1,) * (observations.dim() - 2), -1)
        return self.under(observations, context.expand(*observations.shape[:-1], -1), params)

    def under(self, observations: Tensor, contexts: Tensor, params: Params | None = None) -> DistributionParams:
        """Return mean and log standard deviation (..., A) of observations (..., o) under contexts (..., Z)."""
        params = dict(self.named_parameters()) if params is None else params
        inputs = torch.cat((observations.to(self.head.weight.dtype), contexts), -1)
        return self._through_layers(inputs, observations, params)


def head_of(action_space: gymnasium.Space[Any]) -> Head:
    """Return the head of soft actor-critics for actions: squashed Gaussian or categorical; a TypeError for others."""
    match action_space:
        case spaces.Discrete(n=n):
            return CategoricalHead(int(n))
        case spaces.Box():
            return SquashedGaussianHead(action_space)
    raise TypeError(
        f"no soft actor-critic for the action space {action_space}: expected a bounded Box of floats, or Discrete; "
        "map it to one of these with gymnasium.wrappers.TransformAction, or take rl2, which takes all kinds"
    )
