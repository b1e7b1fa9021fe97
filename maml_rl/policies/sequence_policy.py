"""Policies of a body with a memory that are trained on whole sequences: encoded observations, the body, heads.

The body, a GRU, an LSTM or a transformer, turns encoded observations into units; heads turn units into the distribution
of actions, into values, and into predicted rewards. Trials are sampled step by step; in the update the body goes
through whole sequences. The two agree to rounding.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar, Literal, TypedDict, Unpack, get_args

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import linear

from maml_rl.policies.cnn import ConvLayer, InputEncoder, refuse_image_options
from maml_rl.policies.heads import Head, Params, head_for
from maml_rl.policies.layers import empty_layer, orthogonal, within
from maml_rl.policies.memory_body import MemoryBody
from maml_rl.policies.memory_policy import MemoryPolicy
from maml_rl.policies.mlp import Perceptron, register_parameters
from maml_rl.policies.policy import Memory, Unrolled, perform
from maml_rl.policies.recurrent import Cell, RecurrentStep, make_recurrent
from maml_rl.policies.slot_rows import SlotRows, row_product, through
from maml_rl.policies.transformer import Attention, Transformer
from maml_rl.policies.two_hot import OF_BINS, TwoHot, symlog
from maml_rl.spaces import PackedSpace, category_counts, is_image, parts_of, stored_actions

ValueKind = Literal["head", "network", "two-hot", "none"]

# Lower bound of the deviation of an observation.
_LEAST_STD = 1e-2


class InputOptions(TypedDict, total=False):
    """How a policy takes its observations.

    Attributes:
        normalize_observations: normalize the unbounded numbers of an observation, such as positions, velocities and the
            last reward, by the statistics from `normalize_by`; leave others, such as actions and one-hot vectors.
        compress_rewards: show the body the last reward r, the last number of an observation but one, as
            sign(r) log(1 + |r|), so that large rewards do not drown small ones.
        conv_layers: see `InputEncoder`.
        image_scale: see `InputEncoder`.
    """

    normalize_observations: bool
    compress_rewards: bool
    conv_layers: Sequence[ConvLayer] | None
    image_scale: float | None


class SequenceOptions(InputOptions, total=False):
    """Further arguments of policies that are trained on sequences; see `SequencePolicy`."""

    value: ValueKind
    squash: bool
    init_std: float
    min_std: float
    predict_rewards: bool


class SequencePolicy(MemoryPolicy):
    """A body with a memory, under a head for actions, and optionally under heads for values and rewards.

    Observations are flattened, Discrete ones become one-hot vectors, and images, also among other parts, go through
    convolutions; see `InputEncoder`. A subclass registers its body by the name `body_name`, with `value_` before it one
    for the values if they have one, and takes the heads from `_make_heads`.

    Args:
        observation_space: of one environment; with `observe_last` it shows the last action and reward.
        action_space: of one environment; see `get_policy_for_env`.
        hidden_size: H, units of the body.
        value: the estimator of values: "head", a linear function of the policy's own units; "two-hot", one that gives
            a distribution over the bins of `TwoHot`; "network", a linear function of a body of its own; or "none".
        squash: squash Gaussians, whose deviation then sees the state, into the bounds of a Box, where it has some;
            recorded actions are those before squashing.
        init_std: initial standard deviation of a Gaussian that is not squashed.
        min_std: it never falls below this.
        predict_rewards: add a head for the reward of an action, with one output for each Discrete action, else one that
            takes the action; rl2 trains it by `reward-prediction-coefficient`, and acting does not use it.
        of_inputs: how observations are taken.

    Attributes:
        input_size: numbers of an encoded observation.
        observation_mean: (size,) subtracted from the first numbers of an observation; None for zero.
        observation_std: (size,) by which they are then divided; None for one.
        token_shift: whether the body sees the previous observation, too, which is then the last tensor of the memory.

    Raises:
        TypeError: If a space is not supported.
        ValueError: If `hidden_size` is not positive, the kind of value is unknown, observations that are to be
            normalized are not vectors, or options for images come without any.
    """

    body_name: ClassVar[str]
    token_shift = False
    distributions: Head
    head: nn.Linear
    value_head: nn.Linear | None
    reward_head: nn.Linear | None
    observation_mean: nn.Parameter | None
    observation_std: nn.Parameter | None
    _normalized: Tensor

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_size: int,
        *,
        value: ValueKind = "head",
        squash: bool = False,
        init_std: float = 1.0,
        min_std: float = 1e-6,
        predict_rewards: bool = False,
        **of_inputs: Unpack[InputOptions],
    ) -> None:
        super().__init__()
        if value not in get_args(ValueKind):
            raise ValueError(f"value must be one of {', '.join(get_args(ValueKind))}, got {value!r}")
        if hidden_size < 1:
            raise ValueError(f"hidden_size must be positive, got {hidden_size}")
        self.hidden_size, self.value, self.predicts_rewards = hidden_size, value, predict_rewards
        self.action_space, self._has_one_choice = (
            stored_actions(action_space),
            isinstance(action_space, spaces.Discrete),
        )
        self._is_two_hot = value == "two-hot"
        self._take(observation_space, **of_inputs)
        self.distributions = head_for(action_space, init_std, min_std, squash=squash)
        register_parameters(self, self.distributions)
        self.noise_kind, self.noise_size = self.distributions.noise_kind, self.distributions.noise_size
        # Layers before a head, by its name; they take inputs and units.
        self._layers: dict[str, Perceptron] = {}

    def _take(
        self,
        space: gymnasium.Space[Any],
        *,
        normalize_observations: bool = False,
        compress_rewards: bool = False,
        conv_layers: Sequence[ConvLayer] | None = None,
        image_scale: float | None = None,
    ) -> None:
        """Take the observations of a space."""
        if not isinstance(space, spaces.Box | spaces.Discrete):
            raise TypeError(f"no policy for the observation space {space}: expected Box or Discrete")
        self.observation_space, self._compresses = space, compress_rewards
        self._inputs: InputEncoder | None = None
        if is_image(space) or isinstance(space, PackedSpace):
            self._inputs = InputEncoder(space, conv_layers, image_scale=image_scale)
            self.input_size = self._inputs.size
        else:
            refuse_image_options(space, conv_layers, image_scale)
            self.input_size = spaces.flatdim(space)
        for name in ("observation_mean", "observation_std"):
            self.register_parameter(name, None)
        if normalize_observations:
            if self._inputs or not isinstance(space, spaces.Box) or len(space.shape) != 1:
                raise ValueError(
                    f"only vectors are normalized, and the observations are {space}; leave normalize_observations out"
                )
            self._normalize(torch.from_numpy(~(np.isfinite(space.low) & np.isfinite(space.high))))

    def _normalize(self, which: Tensor) -> None:
        """Normalize those of the first numbers of an observation for which `which` (size,) is true."""
        self.register_buffer("_normalized", which, persistent=False)
        # The statistics are computed from data, and sent like parameters.
        self.observation_mean = nn.Parameter(torch.zeros(len(which)), requires_grad=False)
        self.observation_std = nn.Parameter(torch.ones(len(which)), requires_grad=False)

    def normalize_by(self, mean: Tensor, variance: Tensor) -> None:
        """Normalize by `mean` (size,) and the square root of `variance` (size,)."""
        assert self.observation_mean is not None
        assert self.observation_std is not None
        which, std = self._normalized, variance.sqrt().clamp(min=_LEAST_STD)
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
            None if self.value == "none" else make(self.hidden_size, TwoHot().num_bins if self._is_two_hot else 1),
            make(*of_rewards) if self.predicts_rewards else None,
        )

    def _initialize_heads(self, generator: torch.Generator, *, of_values: float = 1.0) -> None:
        of_values = OF_BINS if self._is_two_hot else of_values
        for head, gain in ((self.head, 0.01), (self.value_head, of_values), (self.reward_head, 1.0)):
            if head is not None:
                orthogonal(head.weight, generator, gain)
                nn.init.zeros_(head.bias)
        if self._inputs is not None:
            self._inputs.register(self, generator)

    @property
    def _body(self) -> MemoryBody:
        body = self.get_submodule(self.body_name)
        assert isinstance(body, MemoryBody)
        return body

    def initial_memory(self, num: int) -> Memory:
        """Return the body's memory where trials begin, and with `token_shift` zeros (num, size)."""
        like = self.head.weight
        last = (like.new_zeros(num, self.input_size),) if self.token_shift else ()
        return *self._body.initial_memory(num, like), *last

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        return self._act_by_actor(observations, noise, memory, params, writes=self._body.writes_memory)

    def actor(self, params: Params, first_task: int = 0) -> Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]:
        """Return `act` under fixed parameters, without gradients; see `Policy.actor`.

        With a transformer it writes into the ring it is given, only to the place that the next token of a slot takes.
        """
        params = {name: value.detach() for name, value in params.items()}
        params |= {} if self._inputs is None else self._inputs.prepared(params)
        is_stacked, of_body = params["head.weight"].dim() == 3, within(params, f"{self.body_name}.")
        names = self._layers["head"].layer_names if self._layers else (("head.weight", "head.bias"),)
        layers = [(params[weight].mT.contiguous(), params[bias]) for weight, bias in names]
        choose = self.distributions.actor(params)

        # Created once: the arrays that the steps of a grid fill at every call.
        @cache
        def make_step(grid: torch.Size) -> Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]:
            rows = SlotRows(grid, None if is_stacked else first_task)
            step = self._body.step(of_body, rows)
            outputs = [step.units.new_empty(*step.units.shape[:-1], weight.shape[-1]) for weight, _ in layers]
            # Layers see the observation, too.
            first = step.seen if self._layers and isinstance(step, RecurrentStep) else step.units
            enters = zip((first, *outputs[:-1]), *zip(*layers, strict=True), outputs, strict=True)
            products = [row_product(*each) for each in enters]
            own, chosen_from = step.inputs[..., rows.own, :], outputs[-1][..., rows.own, :].reshape(*grid, -1)

            def act(observations: Tensor, noise: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
                numbers = self._encode_rows(observations, params, rows)
                if self.token_shift:
                    memory, before = memory[:-1], memory[-1]
                    own.copy_(torch.cat((numbers, before), -1).reshape(own.shape))
                else:
                    own.copy_(numbers.reshape(own.shape))
                after = step(memory)
                for index, product in enumerate(products):
                    if index:
                        outputs[index - 1].tanh_()
                    product()
                # The sampler will write to the observations again.
                last = (numbers.clone(),) if self.token_shift else ()
                return choose(chosen_from, noise, observations), (*after, *last)

            return act

        def act(observations: Tensor, noise: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
            return make_step(noise.shape[:2])(observations, noise, memory)

        return act

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> Unrolled:
        """Go through sequences (L, N, ...), differentiably; see `Policy.unroll`.

        A value network of its own sees the sequences from where they begin here.
        """
        params = dict(self.named_parameters()) if params is None else params
        is_stacked, body = params["head.weight"].dim() == 3, self._body
        if is_stacked and not body.runs_tasks:
            return super().unroll_tasks(observations, params, memory)
        shape = *observations.shape[: 3 if is_stacked else 2], self.input_size
        inputs = self._encode(observations, params).reshape(shape)
        of_body = memory if memory is None or not self.token_shift else memory[:-1]
        units, after = body.run(self._tokens(inputs, memory), of_body, within(params, f"{self.body_name}."))
        of_values = None if self.value_head is None else units
        if self.value == "network":
            of_values, _ = body.run(self._tokens(inputs, None), None, within(params, f"value_{self.body_name}."))
        last = (inputs[-1],) if self.token_shift else ()
        unrolled = self._through_heads(inputs, units, of_values, params, (*after, *last))
        return replace(unrolled, distribution=self.distributions.masked(unrolled.distribution, observations))

    def unroll_tasks(self, observations: Tensor, params: Params, memory: Memory | None = None) -> Unrolled:
        return self.unroll(observations, memory, params)

    def _tokens(self, inputs: Tensor, memory: Memory | None) -> Tensor:
        """Return the inputs of the body for encoded observations (L, N, size) and the memory before them."""
        if not self.token_shift:
            return inputs
        before = torch.zeros_like(inputs[:1]) if memory is None else memory[-1].unsqueeze(0)
        return torch.cat((inputs, torch.cat((before, inputs[:-1]))), -1)

    @property
    def has_static_steps(self) -> bool:
        return self._inputs is None

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
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
            return through(known, params, head)

        distribution = self.distributions.parametrize(read("head", units), params)
        if of_values is None:
            return Unrolled(distribution, None, memory, units)
        values = read("value_head", of_values)
        if self._is_two_hot:
            return Unrolled(distribution, TwoHot().decode(values), memory, units, values)
        return Unrolled(distribution, values.squeeze(-1), memory, units)

    def predict_rewards(self, unrolled: Unrolled, actions: Tensor, params: Params | None = None) -> Tensor:
        """Return the predicted reward of each action, (L, N); see `PredictsRewards`."""
        name = type(self).__name__
        if not self.predicts_rewards or unrolled.units is None:
            raise TypeError(f"{name} predicts no rewards; make a {name} with predict_rewards=True")
        params = dict(self.named_parameters()) if params is None else params
        units = unrolled.units
        if not self._has_one_choice:
            units = torch.cat((units, perform(self, actions).flatten(2).to(units)), -1)
        rewards = linear(units, params["reward_head.weight"], params["reward_head.bias"])
        if self._has_one_choice:
            rewards = rewards.gather(-1, actions.long().unsqueeze(-1))
        return rewards.squeeze(-1)

    def _encode(self, observations: Tensor, params: Params | None = None) -> Tensor:
        """Return observations (M, S, ...) as numbers of the parameters' type; integer ones as one-hot vectors.

        Given the parameters, shared or stacked (M, ...), they are normalized, too, if this policy does that.
        """
        if self._inputs is not None:
            own = dict(self.named_parameters()) if params is None else params
            return self.compressed(self._inputs.features(observations, own))
        dtype = self.head.weight.dtype
        if isinstance(self.observation_space, spaces.Discrete):
            categories = torch.arange(self.input_size, device=observations.device) + int(self.observation_space.start)
            return (observations.unsqueeze(-1) == categories).to(dtype)
        numbers = self.compressed(observations.to(dtype))
        if params is None or self.observation_mean is None:
            return numbers
        mean, std = params["observation_mean"], params["observation_std"]
        if mean.dim() == 2:
            # The parameters of each task, beside (M, ..., size).
            lead = (-1, *(1,) * (numbers.dim() - 2))
            mean, std = (each.unflatten(0, lead) for each in (mean, std))
        return (numbers - mean) / std

    def compressed(self, numbers: Tensor) -> Tensor:
        """Return the numbers (..., size) of observations with the last reward as the body sees it."""
        if not self._compresses:
            return numbers
        return torch.cat((numbers[..., :-2], symlog(numbers[..., -2:-1]), numbers[..., -1:]), -1)

    def _encode_rows(self, observations: Tensor, params: Params, rows: SlotRows) -> Tensor:
        """Return observations (M, S, ...) as numbers (M, S, input_size), to the last bit the same with any others."""
        if self._inputs is None:
            return self._encode(observations, params).reshape(*rows.grid, self.input_size)
        return rows.join([self._encode(block, params) for block in rows.split(observations)])


class GRUPolicy(SequencePolicy):
    """A recurrent layer whose output gives the distribution of actions, and the values.

    Observations are encoded as `SequencePolicy` does. The learned deviation of Gaussians does not see the state, as
    that of `NormalMLPPolicy`, unless they are squashed. The memory of a GRU is (num, H), that of an LSTM twice that.

    Args:
        hidden_size: H, units of the recurrent layer.
        cell: "gru" or "lstm".
        memory_span: initially, units keep their memory for 1 to this many steps, and values are near zero.
            None: each unit forgets half of it at every step, and values are random at first.
        layers: units of tanh layers that compute actions from observation and memory, and of equally many that
            estimate values. Without any, both are linear functions of the memory.
        seed: of the initial weights; the global random state does not change.
        options: `value`, `init_std`, ... These and the spaces are those of `SequencePolicy`.

    Raises:
        ValueError: If a number is not positive, or the cell or the kind of value is unknown.
    """

    body_name = "core"

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_size: int = 64,
        *,
        cell: Cell = "gru",
        memory_span: int | None = None,
        layers: Sequence[int] = (),
        seed: int = 0,
        **options: Unpack[SequenceOptions],
    ) -> None:
        if cell not in get_args(Cell):
            raise ValueError(f"cell must be one of {', '.join(get_args(Cell))}, got {cell!r}")
        if memory_span is not None and memory_span < 1:
            raise ValueError(f"memory_span must be positive, got {memory_span}")
        super().__init__(observation_space, action_space, hidden_size, **options)
        self.cell = cell
        generator = torch.Generator().manual_seed(seed)
        make = partial(make_recurrent, cell, self.input_size, hidden_size, generator, memory_span)
        # In the order of all checkpoints.
        self.core = make()
        self.head, value_head, reward_head = self._make_heads()
        self.value_core = make() if self.value == "network" else None
        self.value_head, self.reward_head = value_head, reward_head
        for name, last, outputs in (("acting", "head", self.head), ("estimating", "value_head", self.value_head)):
            if layers and outputs is not None:
                sizes = (self.input_size + hidden_size, *layers, outputs.out_features)
                names = [*(f"{name}_{index}" for index in range(len(layers))), last]
                self._layers[last] = Perceptron(sizes, names, torch.tanh)
                self._layers[last].register(self, generator)
        self._initialize_heads(generator, of_values=1.0 if memory_span is None else 0.01)


class TransformerPolicy(SequencePolicy):
    """A decoder of pre-normalized blocks whose output gives the distribution of actions, and the values.

    One step of a trial is one token: the observation, which with `observe_last` includes the last action and reward.
    Every layer attends to the last tokens, as many as `sizes` say, so that a trial may be longer than the context. The
    memory is that of `Transformer`, and with `token_shift` the last observation, (num, size).

    Args:
        hidden_size: H, width of a token.
        sizes: of the layers.
        token_shift: add the previous observation to each token (zeros at the start of a trial). State, action and their
            result are then in one token, and a single layer can look them up.
        seed: of the initial weights; the global random state does not change.
        options: `value`, `init_std`, ... These and the spaces are those of `SequencePolicy`.

    Raises:
        ValueError: If a number is not positive, or the sizes do not divide each other.

    Source: Peng et al. 2023, https://arxiv.org/abs/2305.13048 (token shift)
    """

    body_name = "body"

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_size: int = 64,
        sizes: Attention = Attention(),  # noqa: B008 - frozen
        *,
        token_shift: bool = False,
        seed: int = 0,
        **options: Unpack[SequenceOptions],
    ) -> None:
        super().__init__(observation_space, action_space, hidden_size, **options)
        self.token_shift = token_shift
        inputs = self.input_size * (1 + token_shift)
        self.body = Transformer(inputs, hidden_size, sizes)
        self.head, self.value_head, self.reward_head = self._make_heads()
        self.value_body = copy.deepcopy(self.body) if self.value == "network" else None
        generator = torch.Generator().manual_seed(seed)
        for body in (self.body, self.value_body):
            if body is not None:
                body.initialize(generator)
        self._initialize_heads(generator)
