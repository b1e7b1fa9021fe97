"""A policy of state and belief: a recurrent encoder infers a belief about the task, and separate layers act on it.

The belief is a diagonal Gaussian over a latent vector that represents the task. The encoder is trained to make the
latent predict rewards and states, not by the policy's objective; see `maml_rl.metalearners.varibad`.

Source: Zintgraf et al. 2020, https://arxiv.org/abs/1910.08348
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from maml_rl.arguments import check_count
from maml_rl.envs.observing import LastStepParts
from maml_rl.policies.heads import Params
from maml_rl.policies.layers import empty_layer, within
from maml_rl.policies.memory_policy import Enter, Leave, MemoryStep
from maml_rl.policies.mlp import Nonlinearity, Perceptron
from maml_rl.policies.policy import Memory, Policy, Unrolled
from maml_rl.policies.sequence_policy import SequencePolicy
from maml_rl.policies.slot_rows import SlotRows, row_layers, row_product
from maml_rl.policies.trial_encoder import EncoderSizes, make_body
from maml_rl.spaces import require_vectors


class BeliefPolicy(SequencePolicy):
    """A body with a memory infers a belief from observations, actions and rewards; observation and belief are acted on.

    The belief is the mean and the logarithm of the variance of a latent vector, and no gradient of actions or values
    enters the encoder. The memory is the body's. Observation, action and reward each have an embedding of their own, a
    linear layer and a ReLU.

    Args:
        observation_space: of one environment; it shows the last action and reward (`observe_last`).
        action_space: of one environment; see `get_policy_for_env`.
        hidden_sizes: units of the layers that act, and of those that estimate values.
        sizes: of the encoder.
        latent_size: Z, numbers of the latent vector.
        nonlinearity: after each hidden layer: "relu", "tanh", or any element-wise callable on tensors.
        seed: of the initial weights; the global random state does not change.

    Raises:
        TypeError: If a space is not supported.
        ValueError: If a size is out of range, or the observations do not show the last step.
    """

    body_name = "core"
    unroll_tasks = Policy.unroll_tasks

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (32,),
        sizes: EncoderSizes = EncoderSizes(embeddings=(32, 0, 8)),  # noqa: B008 - frozen
        *,
        latent_size: int = 5,
        nonlinearity: str | Nonlinearity = "tanh",
        seed: int = 0,
    ) -> None:
        require_vectors("a BeliefPolicy, as of varibad,", observation_space)
        super().__init__(
            observation_space, action_space, check_count("hidden_size", sizes.hidden_size), value="network"
        )
        self.latent_size = check_count("latent_size", latent_size)
        for size in sizes.embeddings:
            check_count("an embedding size", size, 0)
        if not any(sizes.embeddings):
            raise ValueError("the encoder sees nothing; give embeddings at least one size above 0")
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
                sizes.embeddings,
                strict=True,
            )
            if size
        }
        generator = torch.Generator().manual_seed(seed)
        make = partial(empty_layer, nn.Linear)
        for name, (part, size) in self._embeddings.items():
            self.add_module(name, make(part.stop - part.start, size))
        latent = make(sizes.hidden_size, 2 * latent_size)
        for layer in (*(self.get_submodule(name) for name in self._embeddings), latent):
            assert isinstance(layer, nn.Linear)
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
        # In the order of all checkpoints.
        self.core = make_body(sizes.cell, sum(sizes.embeddings), sizes.hidden_size, generator)
        self.latent = latent
        inputs = self.own_size + 2 * latent_size
        self._actor, self._critic = (
            Perceptron(
                (inputs, *hidden_sizes, outputs),
                [*(f"{kind}_{index}" for index in range(len(hidden_sizes))), last],
                nonlinearity,
            )
            for kind, last, outputs in (("actor", "head", self.distributions.num_units), ("critic", "value_head", 1))
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

    def acting(self, params: Params) -> Callable[[SlotRows, MemoryStep], tuple[Enter, Leave]]:
        size, names = self.own_size, (("latent.weight", "latent.bias"), *self._actor.layer_names)
        # In the order in which they are multiplied with.
        layers = [self._embedding(params), *((params[weight], params[bias]) for weight, bias in names)]
        embedding, latent, *layers = [(weight.mT.contiguous(), bias) for weight, bias in layers]
        mean, std = (params[f"observation_{name}"].unsqueeze(-2) for name in ("mean", "std"))
        choose = self.distributions.actor(params)

        def make(rows: SlotRows, step: MemoryStep) -> tuple[Enter, Leave]:
            new = partial(step.units.new_zeros, *step.units.shape[:-1])
            seen, belief, known = new(self.input_size), new(2 * self.latent_size), new(size + 2 * self.latent_size)
            embed, infer = row_product(seen, *embedding, step.inputs), row_product(step.units, *latent, belief)
            compute, outputs = row_layers(known, layers, self._actor.nonlinearity)
            entered, chosen_from = seen[..., rows.own, :], outputs[..., rows.own, :].reshape(*rows.grid, -1)

            def enter(observations: Tensor) -> Tensor:
                entered.copy_(self._flat(observations).reshape(entered.shape))
                embed()
                step.inputs.relu_()
                return observations

            def leave(observations: Tensor, noise: Tensor) -> Tensor:
                infer()
                torch.sub(seen[..., :size], mean, out=known[..., :size]).div_(std)
                known[..., size:].copy_(belief)
                compute()
                return choose(chosen_from, noise, observations)

            return enter, leave

        return make

    def encode(
        self, observations: Tensor, memory: Memory | None = None, params: Params | None = None
    ) -> tuple[Tensor, Tensor, Memory]:
        """Go through sequences (L, N, *observation shape), differentiably; without a memory, trials begin.

        Returns:
            Mean (L, N, Z) and logarithm of the variance (L, N, Z) of the latent, and the memory after the last step.
        """
        params = dict(self.named_parameters()) if params is None else params
        embedded = linear(self._flat(observations), *self._embedding(params)).relu()
        units, after = self.core.run(embedded, memory, within(params, "core."))
        mean, log_variance = linear(units, params["latent.weight"], params["latent.bias"]).chunk(2, -1)
        return mean, log_variance, after

    def with_belief(
        self, observations: Tensor, memory: Memory | None = None, params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Return the inputs of the acting policy, (L, N, own + 2 Z), observation and belief; see `encode`.

        No gradient flows back from it.
        """
        with torch.no_grad():
            mean, log_variance, after = self.encode(observations, memory, params)
            return torch.cat((self._flat(observations)[..., : self.own_size], mean, log_variance), -1), after

    def unroll_known(self, known: Tensor, params: Params | None = None) -> Unrolled:
        """Return distributions and values for what `with_belief` returned, differentiably."""
        params = dict(self.named_parameters()) if params is None else params
        observed, belief = known[..., : self.own_size], known[..., self.own_size :]
        inputs = torch.cat(((observed - params["observation_mean"]) / params["observation_std"], belief), -1)
        distribution = self.distributions.parametrize(self._actor.units(inputs, params), params)
        distribution = self.distributions.masked(distribution, observed)
        return Unrolled(distribution, self._critic.units(inputs, params).squeeze(-1), ())

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> Unrolled:
        """Go through sequences (L, N, ...); actions and values are differentiable."""
        known, after = self.with_belief(observations, memory, params)
        unrolled = self.unroll_known(known, params)
        return Unrolled(unrolled.distribution, unrolled.values, after)

    def _embedding(self, params: Params) -> tuple[Tensor, Tensor]:
        """Return one matrix (..., E, inputs) and one bias (..., E) for all embeddings side by side."""
        weights = []
        for name, (part, _) in self._embeddings.items():
            weight = params[f"{name}.weight"]
            weights.append(nn.functional.pad(weight, (part.start, self.input_size - part.stop)))
        return torch.cat(weights, -2), torch.cat([params[f"{name}.bias"] for name in self._embeddings], -1)
