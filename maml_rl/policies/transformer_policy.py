"""A transformer as a policy with a memory: causal attention to the last steps of a trial."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, Unpack

import gymnasium
import torch
from torch import Tensor

from maml_rl.policies.heads import Params
from maml_rl.policies.policy import Memory, Unrolled
from maml_rl.policies.sequence_policy import SequenceOptions, SequencePolicy, SlotRows, row_product
from maml_rl.policies.transformer import Attention, TokenStep, Transformer, within


class TransformerPolicy(SequencePolicy):
    """A decoder of pre-normalized blocks whose output gives the distribution of actions, and the values.

    One step of a trial is one token: the observation, which with `observe_last` includes the last action and reward.
    Every layer attends to the last `context` tokens, with positions relative to each other (rotary embeddings), so that
    a trial may be longer than the context. The memory is a ring of keys and values, (num, layers, 2, key-value heads,
    context, H / heads), the number of tokens so far, (num,), and with `token_shift` the last observation, (num, size).

    Args:
        observation_space: of one environment; with `observe_last` it shows the last action and reward.
        action_space: of one environment; see `get_policy_for_env`.
        hidden_size: H, width of a token.
        context: N, tokens that a token attends to, itself among them.
        num_layers: blocks of attention and a network of one hidden layer, 4 H wide.
        num_heads: of attention; divides H into an even number.
        num_key_value_heads: keys and values that groups of heads share; fewer make a smaller memory and faster steps.
        token_shift: add the previous observation to each token (zeros at the start of a trial). State, action and their
            result are then in one token, and a single layer can look them up.
        checkpoint_above: sequences longer than this are computed again for their gradient, block by block, which takes
            less memory and a third more time; None for never.
        seed: of the initial weights; the global random state does not change.
        options: `value`, `init_std`, `min_std`, `predict_rewards`, `normalize_observations`, `conv_layers`,
            `image_scale`; see `SequencePolicy`.

    Raises:
        TypeError: If a space is not supported.
        ValueError: If a number is not positive, or the sizes do not divide each other.

    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Su et al. 2021, https://arxiv.org/abs/2104.09864
    (rotary positions); Ainslie et al. 2023, https://arxiv.org/abs/2305.13245 (shared keys and values); Peng et al.
    2023, https://arxiv.org/abs/2305.13048 (token shift)
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_size: int = 64,
        *,
        context: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        num_key_value_heads: int = 1,
        token_shift: bool = False,
        checkpoint_above: int | None = 1024,
        seed: int = 0,
        **options: Unpack[SequenceOptions],
    ) -> None:
        sizes = Attention(context, num_layers, num_heads, num_key_value_heads)
        super().__init__(observation_space, action_space, hidden_size, **options)
        self.context, self.token_shift = context, token_shift
        inputs = self.input_size * (1 + token_shift)
        self.body = Transformer(inputs, hidden_size, sizes, checkpoint_above=checkpoint_above)
        self.head, self.value_head, self.reward_head = self._make_heads()
        self.value_body = copy.deepcopy(self.body) if self.value == "network" else None
        generator = torch.Generator().manual_seed(seed)
        for body in (self.body, self.value_body):
            if body is not None:
                body.initialize(generator)
        self._initialize_heads(generator)

    def initial_memory(self, num: int) -> Memory:
        """Return an empty ring, zeros (num,) int64, and with `token_shift` zeros (num, size); see the class."""
        last = (self.head.weight.new_zeros(num, self.input_size),) if self.token_shift else ()
        return *self.body.initial_memory(num, self.head.weight), *last

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Return actions (M, S, ...), and the memory after them; see `Policy.act`."""
        # An actor writes into the ring that it is given.
        return super().act(observations, noise, (memory[0].clone(), *memory[1:]), params)

    def actor(self, params: Params, first_task: int = 0) -> Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]:
        """Return `act` under fixed parameters, without gradients, which writes into the ring it is given.

        It writes only to the place that the next token of a slot takes, so that a slot whose step does not count loses
        nothing; see `Policy.actor`.
        """
        params = self._acting_params(params)
        is_stacked = params["head.weight"].dim() == 3
        of_body = within(params, "body.")
        weight, bias = params["head.weight"].mT.contiguous(), params["head.bias"]
        choose = self.distributions.actor(params)

        @cache
        def begin(grid: torch.Size) -> tuple[TokenStep, Callable[[], object], Tensor, SlotRows]:
            rows = SlotRows(grid, None if is_stacked else first_task)
            step = TokenStep(self.body, of_body, rows)
            choices = weight.new_empty(*step.units.shape[:-1], weight.shape[-1])
            return step, row_product(step.units, weight, bias, choices), choices, rows

        def act(observations: Tensor, noise: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
            grid = noise.shape[:2]
            step, multiply, choices, rows = begin(grid)
            ring, count, *before = memory
            numbers = self._encode_rows(observations, params, rows)
            step(torch.cat((numbers, *before), -1), ring.flatten(0, 1), count.flatten())
            multiply()
            # The sampler will write to the observations again.
            last = [numbers.clone() for _ in before]
            return choose(choices[..., step.own, :].reshape(*grid, -1), noise), (ring, count + 1, *last)

        return act

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> Unrolled:
        """Go through sequences (L, N, ...), differentiably; see `Policy.unroll`.

        A value network of its own sees the sequences from where they begin here.
        """
        params = dict(self.named_parameters()) if params is None else params
        if params["head.weight"].dim() != 2:
            return self.unroll_tasks(observations, params, memory)
        inputs = self._encode(observations, params).reshape(*observations.shape[:2], self.input_size)
        units, after = self.body.run(self._tokens(inputs, memory), memory and memory[:2], within(params, "body."))
        of_values = None if self.value_head is None else units
        if self.value_body is not None:
            of_values, _ = self.value_body.run(self._tokens(inputs, None), None, within(params, "value_body."))
        last = (inputs[-1],) if self.token_shift else ()
        return self._through_heads(inputs, units, of_values, params, (*after, *last))

    def _tokens(self, inputs: Tensor, memory: Memory | None) -> Tensor:
        """Return the inputs of tokens for observations (L, N, size) and the memory before them."""
        if not self.token_shift:
            return inputs
        before = torch.zeros_like(inputs[:1]) if memory is None else memory[2].unsqueeze(0)
        return torch.cat((inputs, torch.cat((before, inputs[:-1]))), -1)
