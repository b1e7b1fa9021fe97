"""Policies of a body with a memory that are trained on whole sequences: encoded observations, the body, heads.

The body, a GRU, an LSTM or a transformer, turns encoded observations into units; heads turn units into the distribution
of actions, into values, and into predicted rewards. Trials are sampled step by step; in the update the body goes
through whole sequences. The two agree to rounding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, get_args

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from maml_rl.policies.cnn import ConvLayer, InputEncoder, refuse_image_options
from maml_rl.policies.heads import Head, Params, head_for
from maml_rl.policies.layers import empty_layer, orthogonal, tanh_, within
from maml_rl.policies.memory_policy import BodyPolicy, Enter, Leave, MemoryBody, MemoryStep
from maml_rl.policies.mlp import Perceptron, register_parameters
from maml_rl.policies.policy import Memory, Unrolled, perform
from maml_rl.policies.recurrent import Cell, Recurrent, RecurrentStep, make_recurrent
from maml_rl.policies.slot_rows import SlotRows, row_layers, row_product, through
from maml_rl.policies.transformer import Attention, Transformer
from maml_rl.policies.two_hot import OF_BINS, TwoHot, symlog
from maml_rl.spaces import PackedSpace, category_counts, is_image, parts_of, stored_actions

ValueKind = Literal["head", "network", "two-hot", "none"]

# Of products: of the observation, and of the memory.
_FACTORS = ("seen_factor", "memory_factor")
# Lower bound of the deviation of an observation.
_LEAST_STD = 1e-2


class SequenceOptions(TypedDict, total=False):
    """Further arguments of policies that are trained on sequences.

    Attributes:
        value: the estimator of values: "head", a linear function of the policy's own units; "two-hot", one that gives
            a distribution over the bins of `TwoHot`; "network", a linear function of a body of its own; or "none".
        squash: squash Gaussians, whose deviation then sees the state, into the bounds of a Box, where it has some;
            recorded actions are those before squashing.
        init_std: initial standard deviation of a Gaussian that is not squashed.
        min_std: it never falls below this.
        predict_rewards: add a head for the reward of an action, with one output for each Discrete action, else one that
            takes the action; rl2 trains it by `reward-prediction-coefficient`, and acting does not use it.
        normalize_observations: normalize the unbounded numbers of an observation, such as positions, velocities and the
            last reward, by the statistics from `normalize_by`; leave others, such as actions and one-hot vectors.
        compress_rewards: show the body the last reward r, the last number of an observation but one, as
            sign(r) log(1 + |r|), so that large rewards do not drown small ones.
        conv_layers: see `InputEncoder`.
        image_scale: see `InputEncoder`.
        embedding_size: units of a linear layer between encoded observations and all else; None: none. Where there are
            many categories, of which one is seen at a time, as in grids of symbols, it makes updates faster.
    """

    value: ValueKind
    squash: bool
    init_std: float
    min_std: float
    predict_rewards: bool
    normalize_observations: bool
    compress_rewards: bool
    conv_layers: Sequence[ConvLayer] | None
    image_scale: float | None
    embedding_size: int | None


class SequencePolicy(BodyPolicy):
    """A body with a memory, under a head for actions, and optionally under heads for values and rewards.

    Observations are flattened, Discrete ones become one-hot vectors, and images, also among other parts, go through
    convolutions; see `InputEncoder`. A subclass makes its body and the heads by `_make`, or in its own way.

    Args:
        observation_space: of one environment; with `observe_last` it shows the last action and reward.
        action_space: of one environment; see `get_policy_for_env`.
        hidden_size: H, units of the body.
        options: `SequenceOptions` describes them.

    Attributes:
        input_size: numbers of an encoded observation, embedded if it is.
        observation_mean: (size,) subtracted from the first numbers of an observation; None for zero.
        observation_std: (size,) by which they are then divided; None for one.
    """

    distributions: Head
    value_head: nn.Linear | None
    reward_head: nn.Linear | None
    embedding: nn.Linear | None
    observation_mean: nn.Parameter | None
    observation_std: nn.Parameter | None
    _normalized: Tensor

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_size: int,
        **options: Unpack[SequenceOptions],
    ) -> None:
        super().__init__()
        self.value = options.get("value", "head")
        if self.value not in get_args(ValueKind):
            raise ValueError(f"value must be one of {', '.join(get_args(ValueKind))}, got {self.value!r}")
        embedding_size = options.get("embedding_size")
        for name, size in (("hidden_size", hidden_size), ("embedding_size", embedding_size)):
            if size is not None and size < 1:
                raise ValueError(f"{name} must be positive, got {size}")
        space, self.hidden_size = observation_space, hidden_size
        self.predicts_rewards = options.get("predict_rewards", False)
        self.action_space = stored_actions(action_space)
        self._has_one_choice = isinstance(action_space, spaces.Discrete)
        self._is_two_hot, self._compresses = self.value == "two-hot", options.get("compress_rewards", False)
        if not isinstance(space, spaces.Box | spaces.Discrete):
            raise TypeError(f"no policy for the observation space {space}: expected Box or Discrete")
        self.observation_space = space
        of_images = options.get("conv_layers"), options.get("image_scale")
        self._inputs: InputEncoder | None = None
        if is_image(space) or isinstance(space, PackedSpace):
            self._inputs = InputEncoder(space, of_images[0], image_scale=of_images[1])
            self.input_size = self._inputs.size
        else:
            refuse_image_options(space, *of_images)
            self.input_size = spaces.flatdim(space)
        for name in ("observation_mean", "observation_std"):
            self.register_parameter(name, None)
        if options.get("normalize_observations"):
            if self._inputs or not isinstance(space, spaces.Box) or len(space.shape) != 1:
                raise ValueError(
                    f"only vectors are normalized, and the observations are {space}; leave normalize_observations out"
                )
            self._normalize(torch.from_numpy(~(np.isfinite(space.low) & np.isfinite(space.high))))
        self.embedding = None
        if embedding_size is not None:
            self.embedding = empty_layer(nn.Linear, self.input_size, embedding_size)
            self.input_size = embedding_size
        stds = options.get("init_std", 1.0), options.get("min_std", 1e-6)
        self.distributions = head_for(action_space, *stds, squash=options.get("squash", False))
        register_parameters(self, self.distributions)
        self.noise_kind, self.noise_size = self.distributions.noise_kind, self.distributions.noise_size
        # Layers before a head, by its name; they take inputs and units, and where there are some, products of both.
        self._layers: dict[str, Perceptron] = {}
        self._has_products = False

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

    def _make(self, make_body: Callable[[], MemoryBody], *, values_first: bool) -> None:
        """Make bodies and heads; the latter without initial weights. The order is that of all checkpoints."""
        make = partial(empty_layer, nn.Linear)
        outputs, entries = self.distributions.num_units, self.distributions.noise_size
        # One row for each Discrete action; others are an input.
        of_rewards = (self.hidden_size, outputs) if self._has_one_choice else (self.hidden_size + entries, 1)
        self.add_module(self.body_name, make_body())
        self.head = make(self.hidden_size, outputs)
        for_values = f"value_{self.body_name}", make_body() if self.value == "network" else None
        if values_first:
            setattr(self, *for_values)
        values = TwoHot().num_bins if self._is_two_hot else 1
        self.value_head = None if self.value == "none" else make(self.hidden_size, values)
        self.reward_head = make(*of_rewards) if self.predicts_rewards else None
        if not values_first:
            setattr(self, *for_values)

    def _initialize_heads(self, generator: torch.Generator, *, of_values: float = 1.0) -> None:
        of_values = OF_BINS if self._is_two_hot else of_values
        for head, gain in ((self.head, 0.01), (self.value_head, of_values), (self.reward_head, 1.0)):
            if head is not None:
                orthogonal(head.weight, generator, gain)
                nn.init.zeros_(head.bias)
        if self._inputs is not None:
            self._inputs.register(self, generator)
        if self.embedding is not None:
            # Of each one-hot vector one number is not zero.
            seen = sum(math.prod(shape) for _, shape, *_ in parts_of(self.observation_space))
            nn.init.normal_(self.embedding.weight, std=seen**-0.5, generator=generator)
            nn.init.zeros_(self.embedding.bias)

    def acting(self, params: Params) -> Callable[[SlotRows, MemoryStep], tuple[Enter, Leave]]:
        prepared = params if self._inputs is None else {**params, **self._inputs.prepared(params)}
        last = self._layers["head"].layer_names if self._layers else (("head.weight", "head.bias"),)
        of_products = [(f"{name}.weight", f"{name}.bias") for name in _FACTORS] if self._has_products else []
        layers, factors = (
            [(params[weight].mT.contiguous(), params[bias]) for weight, bias in names] for names in (last, of_products)
        )
        choose = self.distributions.actor(prepared)

        def make(rows: SlotRows, step: MemoryStep) -> tuple[Enter, Leave]:
            # Layers see the observation, too.
            known = step.seen if self._layers and isinstance(step, RecurrentStep) else step.units
            calls = list[Callable[[], None]]()
            if factors:
                known, multiply = _with_products(known, step, factors)
                calls.append(multiply)
            compute, outputs = row_layers(known, layers, tanh_)
            calls.append(compute)
            entered, chosen_from = step.inputs[..., rows.own, :], outputs[..., rows.own, :].reshape(*rows.grid, -1)

            def enter(observations: Tensor) -> Tensor:
                entered.copy_(self._encode_rows(observations, prepared, rows).reshape(entered.shape))
                return observations

            def leave(observations: Tensor, noise: Tensor) -> Tensor:
                for call in calls:
                    call()
                return choose(chosen_from, noise, observations)

            return enter, leave

        return make

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> Unrolled:
        """Go through sequences (L, N, ...), differentiably; see `Policy.unroll`.

        A value network of its own sees the sequences from where they begin here.
        """
        params = dict(self.named_parameters()) if params is None else params
        is_stacked, body = params["head.weight"].dim() == 3, self._body
        if is_stacked and not body.runs_tasks:
            return super().unroll_tasks(observations, params, memory)
        inputs = self._encode(observations, params)
        units, after = body.run(inputs, memory, within(params, f"{self.body_name}."))
        of_values = units
        if self.value == "network":
            of_values, _ = body.run(inputs, None, within(params, f"value_{self.body_name}."))
        known = self._known(inputs, units, params)
        distribution = self.distributions.parametrize(self._through_head("head", known, params), params)
        distribution = self.distributions.masked(distribution, observations)
        unrolled = Unrolled(distribution, None, after, known if "reward_head" in self._layers else units)
        if self.value_head is None:
            return unrolled
        known = known if of_values is units else self._known(inputs, of_values, params)
        values = self._through_head("value_head", known, params)
        if self._is_two_hot:
            return replace(unrolled, values=TwoHot().decode(values), value_logits=values)
        return replace(unrolled, values=values.squeeze(-1))

    def unroll_tasks(self, observations: Tensor, params: Params, memory: Memory | None = None) -> Unrolled:
        return self.unroll(observations, memory, params)

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

    def _through_head(self, head: str, known: Tensor, params: Params) -> Tensor:
        return self._layers[head].units(known, params) if head in self._layers else through(known, params, head)

    def _known(self, inputs: Tensor, units: Tensor, params: Params) -> Tensor:
        """Return what heads see: the units; before layers also the inputs, and products of both."""
        if not self._layers:
            return units
        of_inputs, of_memory = _FACTORS
        if not self._has_products:
            return torch.cat((inputs, units), -1)
        products = through(inputs, params, of_inputs) * through(units, params, of_memory)
        return torch.cat((inputs, units, products), -1)

    def predict_rewards(self, unrolled: Unrolled, actions: Tensor, params: Params | None = None) -> Tensor:
        """Return the predicted reward of each action, (L, N), differentiably.

        Args:
            unrolled: result of `unroll`.
            actions: (L, N, *action shape).
            params: of the policy's own shapes; None for the policy's own.
        """
        name = type(self).__name__
        if not self.predicts_rewards or unrolled.units is None:
            raise TypeError(f"{name} predicts no rewards; make a {name} with predict_rewards=True")
        units = unrolled.units
        if not self._has_one_choice:
            units = torch.cat((units, self.distributions.entries(perform(self, actions)).to(units)), -1)
        params = dict(self.named_parameters()) if params is None else params
        rewards = self._through_head("reward_head", units, params)
        if self._has_one_choice:
            rewards = rewards.gather(-1, actions.long().unsqueeze(-1))
        return rewards.squeeze(-1)

    def _encode(self, observations: Tensor, params: Params) -> Tensor:
        """Return observations as vectors (..., size) of the parameters' type; integer ones become one-hot vectors.

        They are normalized, if this policy does that, by parameters that are shared or stacked (M, ...). Where there is
        an embedding, they went through it.
        """
        space = self.observation_space
        if self._inputs is not None:
            numbers = self.compressed(self._inputs.features(observations, params))
        elif isinstance(space, spaces.Discrete):
            categories = torch.arange(int(space.n), device=observations.device) + int(space.start)
            numbers = (observations.unsqueeze(-1) == categories).to(self.head.weight.dtype)
        else:
            numbers = self._flat(observations)
            if self.observation_mean is not None:
                mean, std = params["observation_mean"], params["observation_std"]
                if mean.dim() == 2:
                    # The parameters of each task, beside (M, ..., size).
                    lead = (-1, *(1,) * (numbers.dim() - 2))
                    mean, std = (tensor.unflatten(0, lead) for tensor in (mean, std))
                numbers = (numbers - mean) / std
        return numbers if self.embedding is None else through(numbers, params, "embedding")

    def _flat(self, observations: Tensor) -> Tensor:
        """Return observations of a Box as vectors (..., size) of the parameters' type."""
        shape = self.observation_space.shape or ()
        axes = observations.shape[: observations.dim() - len(shape)]
        return self.compressed(observations.reshape(*axes, math.prod(shape)).to(self.head.weight.dtype))

    def compressed(self, numbers: Tensor) -> Tensor:
        """Return the numbers (..., size) of observations with the last reward as the body sees it."""
        if not self._compresses:
            return numbers
        return torch.cat((numbers[..., :-2], symlog(numbers[..., -2:-1]), numbers[..., -1:]), -1)

    def _encode_rows(self, observations: Tensor, params: Params, rows: SlotRows) -> Tensor:
        """Return observations (M, S, ...) as numbers (M, S, input_size), to the last bit the same with any others."""
        if self._inputs is None and self.embedding is None:
            return self._encode(observations, params)
        return rows.join([self._encode(block, params) for block in rows.split(observations)])


def _with_products(
    known: Tensor, step: MemoryStep, factors: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Callable[[], None]]:
    """Return rows for what is known and products of inputs and units, and what writes them."""
    size, products = known.shape[-1], factors[0][0].shape[-1]
    wide = known.new_zeros(*known.shape[:-1], size + products)
    pair = [known.new_zeros(*known.shape[:-1], products) for _ in factors]
    compute = [
        row_product(units, *factor, out)
        for units, factor, out in zip((step.inputs, step.units), factors, pair, strict=True)
    ]

    def write() -> None:
        for each in compute:
            each()
        wide[..., :size].copy_(known)
        torch.mul(*pair, out=wide[..., size:])

    return wide, write


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
        products: K; layers then also see K products, each of a linear function of the observation and one of the
            memory, and predicted rewards go through such layers, too. What matches what is remembered is then learned
            sooner (Jayakumar et al., "Multiplicative Interactions and Where to Find Them", ICLR 2020). 0: none.
        seed: of the initial weights; the global random state does not change.
        options: `value`, `init_std`, ... These and the spaces are those of `SequencePolicy`.

    Raises:
        TypeError: If a space is not supported.
        ValueError: If a number is not positive, the cell or the kind of value is unknown, observations that are to be
            normalized are not vectors, or options for images come without any.
    """

    body_name = "core"
    core: Recurrent

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_size: int = 64,
        *,
        cell: Cell = "gru",
        memory_span: int | None = None,
        layers: Sequence[int] = (),
        products: int = 0,
        seed: int = 0,
        **options: Unpack[SequenceOptions],
    ) -> None:
        if cell not in get_args(Cell):
            raise ValueError(f"cell must be one of {', '.join(get_args(Cell))}, got {cell!r}")
        if memory_span is not None and memory_span < 1:
            raise ValueError(f"memory_span must be positive, got {memory_span}")
        if products < 0 or (products and not layers):
            raise ValueError(
                f"products must be 0, or a number of inputs of layers, got {products} and {len(layers) or 'no'} layers"
            )
        super().__init__(observation_space, action_space, hidden_size, **options)
        self.cell, generator = cell, torch.Generator().manual_seed(seed)
        self._make(
            partial(make_recurrent, cell, self.input_size, hidden_size, generator, memory_span), values_first=True
        )
        heads = [("acting", "head", self.head, hidden_size), ("estimating", "value_head", self.value_head, hidden_size)]
        self._has_products = products > 0
        if products:
            for factor, size in zip(_FACTORS, (self.input_size, hidden_size), strict=True):
                layer = empty_layer(nn.Linear, size, products)
                nn.init.normal_(layer.weight, std=size**-0.5, generator=generator)
                nn.init.zeros_(layer.bias)
                self.add_module(factor, layer)
            if self.reward_head is not None:
                heads.append(("predicting", "reward_head", self.reward_head, self.reward_head.in_features))
        for name, last, outputs, known in heads:
            if layers and outputs is not None:
                sizes = (self.input_size + known + products, *layers, outputs.out_features)
                names = [*(f"{name}_{index}" for index in range(len(layers))), last]
                self._layers[last] = Perceptron(sizes, names, torch.tanh)
                self._layers[last].register(self, generator)
        self._initialize_heads(generator, of_values=1.0 if memory_span is None else 0.01)


class TransformerPolicy(SequencePolicy):
    """A decoder of pre-normalized blocks whose output gives the distribution of actions, and the values.

    One step of a trial is one token: the observation, which with `observe_last` includes the last action and reward.
    Every layer attends to the last tokens, as many as `sizes` say, so that a trial may be longer than the context. The
    memory is that of `Transformer`.

    Args:
        hidden_size: H, width of a token.
        sizes: of the layers.
        token_shift: see `Transformer`.
        seed: of the initial weights; the global random state does not change.
        options: `value`, `init_std`, ... These and the spaces are those of `SequencePolicy`.

    Raises:
        TypeError: If a space is not supported.
        ValueError: As of a `GRUPolicy`; or if the sizes do not divide each other.
    """

    body_name = "body"
    body: Transformer

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
        generator = torch.Generator().manual_seed(seed)
        make = partial(Transformer, self.input_size, hidden_size, sizes, generator, token_shift=token_shift)
        self._make(make, values_first=False)
        self._initialize_heads(generator)
