"""Parts that policies trained on whole sequences share, with any body: encoded observations, and heads.

A body turns encoded observations into units (L, N, H); linear heads turn units into the distribution of actions, into
values, and into predicted rewards.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypedDict, get_args

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import linear

from maml_rl.policies.cnn import ConvLayer, InputEncoder, refuse_image_options
from maml_rl.policies.heads import Head, Params, head_for
from maml_rl.policies.layers import empty_layer, orthogonal
from maml_rl.policies.memory_policy import MemoryPolicy
from maml_rl.policies.mlp import Perceptron, register_parameters
from maml_rl.policies.policy import Memory, Unrolled
from maml_rl.spaces import PackedSpace, category_counts, is_image, parts_of

ValueKind = Literal["head", "network", "none"]

# Rows that are multiplied together: a product of a fixed shape rounds a slot's row in the same way in every process and
# with any other rows.
ROWS = 64
# Lower bound of the deviation of an observation.
_LEAST_STD = 1e-2


class SequenceOptions(TypedDict, total=False):
    """Further arguments of policies that are trained on sequences; see `SequencePolicy`."""

    value: ValueKind
    init_std: float
    min_std: float
    predict_rewards: bool
    normalize_observations: bool
    conv_layers: Sequence[ConvLayer] | None
    image_scale: float | None


class SequencePolicy(MemoryPolicy):
    """A body with a memory, under a head for actions, and optionally under heads for values and rewards.

    Observations are flattened, Discrete ones become one-hot vectors, and images, also among other parts, go through
    convolutions; see `InputEncoder`. A subclass registers its body, takes the heads from `_make_heads`, and writes
    `initial_memory`, `actor` and `unroll`.

    Args:
        observation_space: of one environment; with `observe_last` it shows the last action and reward.
        action_space: of one environment; see `get_policy_for_env`.
        hidden_size: H, units of the body.
        value: the estimator of values: "head", a linear function of the policy's own units; "network", one of a body of
            its own; or "none".
        init_std: initial standard deviation of a Gaussian.
        min_std: it never falls below this.
        predict_rewards: add a head for the reward of an action, with one output for each Discrete action, else one that
            takes the action; rl2 trains it by `reward-prediction-coefficient`, and acting does not use it.
        normalize_observations: normalize the unbounded numbers of an observation, such as positions, velocities and the
            last reward, by the statistics from `normalize_by`; leave others, such as actions and one-hot vectors.
        conv_layers: see `InputEncoder`.
        image_scale: see `InputEncoder`.

    Attributes:
        input_size: numbers of an encoded observation.
        observation_mean: (size,) subtracted from the first numbers of an observation; None for zero.
        observation_std: (size,) by which they are then divided; None for one.

    Raises:
        TypeError: If a space is not supported.
        ValueError: If `hidden_size` is not positive, the kind of value is unknown, observations that are to be
            normalized are not vectors, or options for images come without any.
    """

    distributions: Head
    head: nn.Linear
    value_head: nn.Linear | None
    reward_head: nn.Linear | None
    observation_mean: nn.Parameter | None
    observation_std: nn.Parameter | None

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_size: int,
        *,
        value: ValueKind = "head",
        init_std: float = 1.0,
        min_std: float = 1e-6,
        predict_rewards: bool = False,
        normalize_observations: bool = False,
        conv_layers: Sequence[ConvLayer] | None = None,
        image_scale: float | None = None,
    ) -> None:
        super().__init__()
        if value not in get_args(ValueKind):
            raise ValueError(f"value must be one of {', '.join(get_args(ValueKind))}, got {value!r}")
        if hidden_size < 1:
            raise ValueError(f"hidden_size must be positive, got {hidden_size}")
        if not isinstance(observation_space, spaces.Box | spaces.Discrete):
            raise TypeError(f"no policy for the observation space {observation_space}: expected Box or Discrete")
        self.observation_space, self.action_space = observation_space, action_space
        self.hidden_size, self.value, self.predicts_rewards = hidden_size, value, predict_rewards
        self._inputs: InputEncoder | None = None
        if is_image(observation_space) or isinstance(observation_space, PackedSpace):
            self._inputs = InputEncoder(observation_space, conv_layers, image_scale=image_scale)
            self.input_size = self._inputs.size
        else:
            refuse_image_options(observation_space, conv_layers, image_scale)
            self.input_size = spaces.flatdim(observation_space)
        self.distributions = head_for(action_space, init_std, min_std)
        register_parameters(self, self.distributions)
        self.noise_kind, self.noise_size = self.distributions.noise_kind, self.distributions.noise_size
        # Layers before a head, by its name; they take inputs and units.
        self._layers: dict[str, Perceptron] = {}
        for name in ("observation_mean", "observation_std"):
            self.register_parameter(name, None)
        if normalize_observations:
            if self._inputs or not isinstance(observation_space, spaces.Box) or len(observation_space.shape) != 1:
                raise ValueError(
                    f"only vectors are normalized, and the observations are {observation_space}; leave "
                    "normalize_observations out"
                )
            is_bounded = np.isfinite(observation_space.low) & np.isfinite(observation_space.high)
            self._normalize(torch.from_numpy(~is_bounded))

    def _normalize(self, which: Tensor) -> None:
        """Normalize those of the first numbers of an observation for which `which` (size,) is true."""
        self._normalized = which
        # The statistics are computed from data, and sent like parameters.
        self.observation_mean = nn.Parameter(torch.zeros(len(which)), requires_grad=False)
        self.observation_std = nn.Parameter(torch.ones(len(which)), requires_grad=False)

    def normalize_by(self, mean: Tensor, variance: Tensor) -> None:
        """Normalize by `mean` (size,) and the square root of `variance` (size,)."""
        assert self.observation_mean is not None
        assert self.observation_std is not None
        which, std = self._normalized.to(mean.device), variance.sqrt().clamp(min=_LEAST_STD)
        with torch.no_grad():
            self.observation_mean.copy_(torch.where(which, mean, 0.0))
            self.observation_std.copy_(torch.where(which, std, 1.0))

    def _make_heads(self) -> tuple[nn.Linear, nn.Linear | None, nn.Linear | None]:
        """Return heads for actions, values and rewards, without initial weights."""
        make = partial(empty_layer, nn.Linear)
        outputs, entries = self.distributions.num_units, self.distributions.noise_size
        # One row for each Discrete action; others are an input.
        of_rewards = (self.hidden_size, outputs) if self._has_one_choice else (self.hidden_size + entries, 1)
        return (
            make(self.hidden_size, outputs),
            None if self.value == "none" else make(self.hidden_size, 1),
            make(*of_rewards) if self.predicts_rewards else None,
        )

    def _initialize_heads(self, generator: torch.Generator, *, of_values: float = 1.0) -> None:
        for head, gain in ((self.head, 0.01), (self.value_head, of_values), (self.reward_head, 1.0)):
            if head is not None:
                orthogonal(head.weight, generator, gain)
                nn.init.zeros_(head.bias)
        if self._inputs is not None:
            self._inputs.register(self, generator)

    @abstractmethod
    def actor(self, params: Params, first_task: int = 0) -> Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]:
        """Return `act` under fixed parameters, without gradients; see `Policy.actor`."""

    act = MemoryPolicy._act_by_actor

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        """Refuse other spaces than those that the policy was made for; see `Policy.check_spaces`."""
        mine, theirs = (
            (spaces.flatdim(seen), self._inputs and parts_of(seen), done.shape, category_counts(done))
            for seen, done in ((self.observation_space, self.action_space), (observation_space, action_space))
        )
        if mine != theirs:
            raise ValueError(
                f"the policy is for {mine[0]} observed numbers and {self.action_space}, but the environment "
                f"has {spaces.flatdim(observation_space)} and {action_space}; with observe_last=True the last action "
                "and reward are among them"
            )

    def _through_heads(
        self, inputs: Tensor, units: Tensor, of_values: Tensor | None, params: Params, memory: Memory
    ) -> Unrolled:
        """Return the outputs of the heads for inputs (L, N, I), units (L, N, H), and the units for values."""

        def read(head: str, known: Tensor) -> Tensor:
            if head in self._layers:
                return self._layers[head].units(torch.cat((inputs, known), -1), params)
            return affine(known, params[f"{head}.weight"], params[f"{head}.bias"])

        distribution = self.distributions.parametrize(read("head", units), params)
        values = None if of_values is None else read("value_head", of_values).squeeze(-1)
        return Unrolled(distribution, values, memory, units if self.predicts_rewards else None)

    def predict_rewards(self, unrolled: Unrolled, actions: Tensor, params: Params | None = None) -> Tensor:
        """Return the predicted reward of each action, (L, N), differentiably.

        Args:
            unrolled: result of `unroll`.
            actions: (L, N, *action shape).
            params: of the policy's own shapes.

        Raises:
            TypeError: If the policy was made without `predict_rewards`.
        """
        name = type(self).__name__
        if unrolled.units is None:
            raise TypeError(f"{name} predicts no rewards; make a {name} with predict_rewards=True")
        params = dict(self.named_parameters()) if params is None else params
        units = unrolled.units
        if not self._has_one_choice:
            units = torch.cat((units, actions.flatten(2).to(units)), -1)
        rewards = linear(units, params["reward_head.weight"], params["reward_head.bias"])
        if self._has_one_choice:
            first = int(getattr(self.action_space, "start", 0))
            rewards = rewards.gather(-1, (actions.long() - first).unsqueeze(-1))
        return rewards.squeeze(-1)

    @property
    def _has_one_choice(self) -> bool:
        return isinstance(self.action_space, spaces.Discrete)

    def _encode(self, observations: Tensor, params: Params | None = None) -> Tensor:
        """Return observations (M, S, ...) as numbers of the parameters' type; integer ones as one-hot vectors.

        Given the parameters, shared or stacked (M, ...), they are normalized, too, if this policy does that.
        """
        if self._inputs is not None:
            return self._inputs.features(observations, dict(self.named_parameters()) if params is None else params)
        dtype = self.head.weight.dtype
        if isinstance(self.observation_space, spaces.Discrete):
            categories = torch.arange(self.input_size, device=observations.device) + int(self.observation_space.start)
            return (observations.unsqueeze(-1) == categories).to(dtype)
        numbers = observations.to(dtype)
        if params is None or self.observation_mean is None:
            return numbers
        mean, std = params["observation_mean"], params["observation_std"]
        if mean.dim() == 2:
            # The parameters of each task, beside (M, ..., size).
            lead = (-1, *(1,) * (numbers.dim() - 2))
            mean, std = (each.unflatten(0, lead) for each in (mean, std))
        return (numbers - mean) / std

    def _acting_params(self, params: Params) -> dict[str, Tensor]:
        """Return the parameters without gradients, ready for `_encode_rows`."""
        own = {name: value.detach() for name, value in params.items()}
        return own if self._inputs is None else own | self._inputs.prepared(own)

    def _encode_rows(self, observations: Tensor, params: Params, rows: "SlotRows") -> Tensor:
        """Return observations (M, S, ...) as numbers (M, S, input_size), to the last bit the same with any others."""
        if self._inputs is None:
            return self._encode(observations, params).reshape(*rows.grid, self.input_size)
        return rows.join([self._encode(block, params) for block in rows.split(observations)])


class SlotRows:
    """The rows of M x S slots: one block (M, S) under stacked parameters, else in blocks of `ROWS`; see there.

    Args:
        grid: M and S.
        first_task: the number of the first task; None under stacked parameters.

    Attributes:
        shape: (M, S), or the rows of all blocks, (R,).
        before: number of rows of other tasks before these in their block.
        own: which of the rows of a block or of all blocks are the slots'.
    """

    def __init__(self, grid: torch.Size, first_task: int | None) -> None:
        self.grid, self._is_stacked = grid, first_task is None
        self.before = 0 if first_task is None else first_task * grid[1] % ROWS
        end = self.before + (grid[1] if self._is_stacked else grid.numel())
        self.shape: tuple[int, ...] = grid if self._is_stacked else (-(-end // ROWS) * ROWS,)
        self.own = slice(self.before, end)

    def split(self, values: Tensor) -> Sequence[Tensor]:
        """Return the blocks of values (M, S, ...), zeros beside them."""
        if self._is_stacked:
            return (values,)
        padded = values.new_zeros(*self.shape, *values.shape[2:])
        padded[self.own] = values.flatten(0, 1)
        blocks: Sequence[Tensor] = padded.split(ROWS)
        return blocks

    def join(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the values (M, S, ...) of blocks."""
        if self._is_stacked:
            return blocks[0]
        joined: Tensor = torch.cat(tuple(blocks))[self.own].unflatten(0, self.grid)
        return joined


def affine(units: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """Apply a linear layer to units (..., I); with stacked weights (M, O, I), to units (M, ..., I)."""
    if weights.dim() == 2:
        return linear(units, weights, bias)
    rows = torch.baddbmm(bias.unsqueeze(1), units.flatten(1, -2), weights.mT)
    return rows.reshape(*units.shape[:-1], weights.shape[1])


def row_product(units: Tensor, weights: Tensor, bias: Tensor, out: Tensor) -> Callable[[], Tensor | None]:
    """Return a function that writes units @ weights + bias: per task for stacked weights, else in blocks of `ROWS`."""
    if weights.dim() == 3:
        return partial(torch.baddbmm, bias.unsqueeze(1), units, weights, out=out)
    if units.device.type != "cpu":
        blocks = units.unflatten(0, (-1, ROWS))
        shared = weights.expand(len(blocks), *weights.shape)
        return partial(torch.baddbmm, bias, blocks, shared, out=out.unflatten(0, (-1, ROWS)))
    pairs = list(zip(units.split(ROWS), out.split(ROWS), strict=True))

    def multiply() -> None:
        for block, into in pairs:
            torch.addmm(bias, block, weights, out=into)

    return multiply
