"""A policy of state and belief: a recurrent encoder infers a belief about the task, and separate layers act on it.

The belief is a diagonal Gaussian over a latent vector that represents the task. The encoder is trained to make the
latent predict rewards and states, not by the policy's objective; see `maml_rl.metalearners.varibad`.

Source: Zintgraf et al. 2020, https://arxiv.org/abs/1910.08348
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from maml_rl.arguments import check_count
from maml_rl.envs.last_step import LastStepParts
from maml_rl.policies.heads import Params
from maml_rl.policies.layers import empty_layer
from maml_rl.policies.mlp import Nonlinearity, Perceptron
from maml_rl.policies.policy import Memory, Unrolled
from maml_rl.policies.recurrent import make_recurrent, run, weights_of, zero_state
from maml_rl.policies.sequence_policy import SequencePolicy, SlotRows, row_product
from maml_rl.spaces import require_vectors


class BeliefPolicy(SequencePolicy):
    """A GRU over observations, actions and rewards infers a belief; actions and values use observation and belief.

    The belief is the mean and the logarithm of the variance of a latent vector, and no gradient of actions or values
    enters the encoder. The memory is the GRU's state, (num, H). Observation, action and reward each have an embedding
    of their own, a linear layer and a ReLU.

    Args:
        observation_space: of one environment; it shows the last action and reward (`observe_last`).
        action_space: of one environment; see `get_policy_for_env`.
        hidden_sizes: units of the layers that act, and of those that estimate values.
        encoder_size: H, units of the GRU.
        latent_size: Z, numbers of the latent vector.
        embedding_sizes: units for observation, action, and reward; 0 for an input that the encoder does not have.
        nonlinearity: after each hidden layer: "relu", "tanh", or any element-wise callable on tensors.
        init_std: initial standard deviation of a Gaussian.
        min_std: it never falls below this.
        seed: of the initial weights; the global random state does not change.

    Raises:
        TypeError: If a space is not supported.
        ValueError: If a size is out of range, or the observations do not show the last step.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (32,),
        *,
        encoder_size: int = 64,
        latent_size: int = 5,
        embedding_sizes: tuple[int, int, int] = (32, 0, 8),
        nonlinearity: str | Nonlinearity = "tanh",
        init_std: float = 1.0,
        min_std: float = 1e-6,
        seed: int = 0,
    ) -> None:
        require_vectors("a BeliefPolicy, as of varibad,", observation_space)
        super().__init__(
            observation_space,
            action_space,
            check_count("encoder_size", encoder_size),
            value="network",
            init_std=init_std,
            min_std=min_std,
        )
        self.latent_size = check_count("latent_size", latent_size)
        for size in embedding_sizes:
            check_count("an embedding size", size, 0)
        if not any(embedding_sizes):
            raise ValueError("the encoder sees nothing; give embedding_sizes at least one size above 0")
        parts = LastStepParts.within(observation_space, action_space)
        self.own_size = parts.observation.stop
        # Reward and end of the episode are seen together.
        outcome = slice(parts.last_reward.start, parts.last_termination.stop)
        # By name, the range of numbers that an embedding has as inputs, and its units.
        self._embeddings = {
            name: (part, size)
            for name, part, size in zip(
                ("observation_embedding", "action_embedding", "outcome_embedding"),
                (parts.observation, parts.last_action, outcome),
                embedding_sizes,
                strict=True,
            )
            if size
        }
        generator = torch.Generator().manual_seed(seed)
        make = partial(empty_layer, nn.Linear)
        for name, (part, size) in self._embeddings.items():
            self.add_module(name, make(part.stop - part.start, size))
        latent = make(encoder_size, 2 * latent_size)
        for layer in (*(self.get_submodule(name) for name in self._embeddings), latent):
            assert isinstance(layer, nn.Linear)
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
        # In the order of all checkpoints.
        self.core = make_recurrent("gru", sum(embedding_sizes), encoder_size, generator)
        self.latent = latent
        inputs = self.own_size + 2 * latent_size
        self._actor, self._critic = (
            Perceptron(
                (inputs, *hidden_sizes, outputs),
                [*(f"{kind}_{index}" for index in range(len(hidden_sizes))), last],
                nonlinearity,
            )
            for kind, last, outputs in (
                ("actor", "head", self.distributions.num_units),
                ("critic", "value_head", 1),
            )
        )
        self.reward_head = None
        for layers in (self._actor, self._critic):
            layers.register(self, generator)
        self._initialize_heads(generator)
        # The encoder sees them as they are.
        self._normalize(torch.ones(self.own_size, dtype=torch.bool))

    def encoder_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the belief depends on."""
        modules = [self.get_submodule(name) for name in self._embeddings]
        return [param for module in (*modules, self.core, self.latent) for param in module.parameters()]

    def acting_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that actions and values depend on, given the belief."""
        of_encoder = {id(param) for param in self.encoder_parameters()}
        return [param for param in self.parameters() if param.requires_grad and id(param) not in of_encoder]

    def initial_memory(self, num: int) -> Memory:
        """Return zeros (num, H)."""
        return zero_state("gru", num, self.hidden_size, self.head.weight)

    def actor(self, params: Params, first_task: int = 0) -> Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]:
        """Return `act` under fixed parameters, without gradients; see `Policy.actor`."""
        params = {name: value.detach() for name, value in params.items()}
        size, own = self.hidden_size, self.own_size
        embedding, embedding_bias = self._embedding(params)
        is_stacked = embedding.dim() == 3
        mean, std = (params[f"observation_{name}"].unsqueeze(-2) for name in ("mean", "std"))
        choose = self.distributions.actor(params)
        # In the order in which they are multiplied with.
        products = [
            (embedding.mT.contiguous(), embedding_bias),
            *(
                (params[f"{name.format('weight')}"].mT.contiguous(), params[name.format("bias")])
                for name in ("core.{}_ih_l0", "core.{}_hh_l0", "latent.{}")
            ),
            *((params[weight].mT.contiguous(), params[bias]) for weight, bias in self._actor.layer_names),
        ]

        # Created once: the arrays that the steps of a grid fill at every call.
        @cache
        def make_step(grid: torch.Size) -> Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]:
            rows = SlotRows(grid, None if is_stacked else first_task)
            make = partial(embedding.new_zeros, *rows.shape)
            outputs = [make(weight.shape[-1]) for weight, _ in products]
            embedded, from_input, from_memory, belief, *layers = outputs
            seen, hidden, known = make(self.input_size), make(size), make(products[4][0].shape[-2])
            inputs = [seen, embedded, hidden, hidden, known, *layers[:-1]]
            embed, read, recall, believe, *act_on = (
                row_product(units, weight, bias, out)
                for units, (weight, bias), out in zip(inputs, products, outputs, strict=True)
            )
            entered, old = (values[..., rows.own, :] for values in (seen, hidden))
            chosen_from = outputs[-1][..., rows.own, :].reshape(*grid, -1)
            # In torch's order, reset, keep and new.
            gated, recalled, both = from_input[..., : 2 * size], from_memory[..., 2 * size :], slice(0, 2 * size)
            reset, keep, new = from_input.split(size, -1)

            def step(observations: Tensor, noise: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
                entered.copy_(self._encode(observations).reshape(entered.shape))
                old.copy_(memory[0].reshape(old.shape))
                embed()
                embedded.relu_()
                read()
                recall()
                gated.add_(from_memory[..., both]).sigmoid_()
                new.addcmul_(reset, recalled).tanh_()
                hidden.sub_(new).mul_(keep).add_(new)
                believe()
                torch.sub(seen[..., :own], mean, out=known[..., :own]).div_(std)
                known[..., own:].copy_(belief)
                for index, act_on_layer in enumerate(act_on):
                    if index:
                        layers[index - 1].copy_(self._actor.nonlinearity(layers[index - 1]))
                    act_on_layer()
                actions = choose(chosen_from, noise)
                return actions, (old.reshape(*grid, size).clone(),)

            return step

        def act(observations: Tensor, noise: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
            return make_step(noise.shape[:2])(observations, noise, memory)

        return act

    def believe(
        self, observations: Tensor, memory: Memory | None = None, params: Params | None = None
    ) -> tuple[Tensor, Tensor, Memory]:
        """Go through sequences (L, N, ...), differentiably, and return the belief at every step.

        Args:
            observations: (L, N, *observation shape).
            memory: tensors (N, ...) before the first step; None where trials begin.
            params: of the policy's own shapes.

        Returns:
            Mean (L, N, Z) and logarithm of the variance (L, N, Z) of the latent, and the memory after the last step.
        """
        params = dict(self.named_parameters()) if params is None else params
        memory = self.initial_memory(observations.shape[1]) if memory is None else memory
        seen = self._encode(observations).reshape(*observations.shape[:2], self.input_size)
        embedded = linear(seen, *self._embedding(params)).relu()
        units, after = run("gru", embedded, memory, weights_of(params, "core"))
        mean, log_variance = linear(units, params["latent.weight"], params["latent.bias"]).chunk(2, -1)
        return mean, log_variance, after

    def know(
        self, observations: Tensor, memory: Memory | None = None, params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Return the inputs of the acting policy, (L, N, own + 2 Z), observation and belief; see `believe`.

        No gradient flows back from it.
        """
        with torch.no_grad():
            mean, log_variance, after = self.believe(observations, memory, params)
            seen = self._encode(observations).reshape(*observations.shape[:2], self.input_size)
            return torch.cat((seen[..., : self.own_size], mean, log_variance), -1), after

    def unroll_known(self, known: Tensor, params: Params | None = None) -> Unrolled:
        """Return distributions and values for what `know` returned, differentiably."""
        params = dict(self.named_parameters()) if params is None else params
        observed, belief = known[..., : self.own_size], known[..., self.own_size :]
        inputs = torch.cat(((observed - params["observation_mean"]) / params["observation_std"], belief), -1)
        distribution = self.distributions.parametrize(self._actor.units(inputs, params), params)
        return Unrolled(distribution, self._critic.units(inputs, params).squeeze(-1), ())

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> Unrolled:
        """Go through sequences (L, N, ...); actions and values are differentiable; see `Policy.unroll`."""
        known, after = self.know(observations, memory, params)
        unrolled = self.unroll_known(known, params)
        return Unrolled(unrolled.distribution, unrolled.values, after)

    def _embedding(self, params: Params) -> tuple[Tensor, Tensor]:
        """Return one matrix (..., E, inputs) and one bias (..., E) for all embeddings side by side."""
        weights = []
        for name, (part, _) in self._embeddings.items():
            weight = params[f"{name}.weight"]
            weights.append(nn.functional.pad(weight, (part.start, self.input_size - part.stop)))
        return torch.cat(weights, -2), torch.cat([params[f"{name}.bias"] for name in self._embeddings], -1)
