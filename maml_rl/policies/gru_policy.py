"""A recurrent policy, of a GRU or an LSTM.

Trials are sampled cell by cell, in one product for all gates and a few element-wise operations; in the update, the
kernels of `recurrent.run` go through whole sequences. The two agree to rounding.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Unpack, get_args

import gymnasium
import torch
from torch import Tensor

from maml_rl.policies.heads import Params
from maml_rl.policies.mlp import Perceptron
from maml_rl.policies.policy import Memory, Unrolled
from maml_rl.policies.recurrent import Cell, make_recurrent, next_state, run, weights_of, zero_state
from maml_rl.policies.sequence_policy import SequenceOptions, SequencePolicy, SlotRows, affine, row_product


class GRUPolicy(SequencePolicy):
    """A recurrent layer whose output gives the distribution of actions, and the values.

    Observations are encoded as `SequencePolicy` does. Gaussians have a learned deviation that does not
    see the state, as those of `NormalMLPPolicy`. The memory of a GRU is (num, H), that of an LSTM twice that.

    Args:
        observation_space: of one environment; with `observe_last` it shows the last action and reward.
        action_space: of one environment; see `get_policy_for_env`.
        hidden_size: H, units of the recurrent layer.
        cell: "gru" or "lstm".
        memory_span: initially, units keep their memory for 1 to this many steps, and values are near zero.
            None: each unit forgets half of it at every step, and values are random at first.
        layers: units of tanh layers that compute actions from observation and memory, and of equally many that
            estimate values. Without any, both are linear functions of the memory.
        seed: of the initial weights; the global random state does not change.
        options: `value`, `init_std`, `min_std`, `predict_rewards`, `normalize_observations`, `conv_layers`,
            `image_scale`; see `SequencePolicy`.

    Raises:
        TypeError: If a space is not supported.
        ValueError: If a number is not positive, or the cell or the kind of value is unknown.
    """

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

    def initial_memory(self, num: int) -> Memory:
        """Return zeros (num, H), twice for an LSTM."""
        return zero_state(self.cell, num, self.hidden_size, self.head.weight)

    def actor(self, params: Params, first_task: int = 0) -> Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]:
        """Return `act` under fixed parameters, without gradients; see `Policy.actor`."""
        params = self._acting_params(params)
        size, inputs = self.hidden_size, self.input_size
        gates, gate_bias = self._gates(params)
        names = self._layers["head"].layer_names if self._layers else (("head.weight", "head.bias"),)
        layers = [(params[weight].mT.contiguous(), params[bias]) for weight, bias in names]
        choose = self.distributions.actor(params)
        is_stacked, is_gru = gates.dim() == 3, self.cell == "gru"

        # Created once: the arrays that the steps of a grid fill at every call.
        @cache
        def make_step(grid: torch.Size) -> Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]:
            rows = SlotRows(grid, None if is_stacked else first_task)
            # Rows of padding stay zero.
            units, summed = gates.new_zeros(*rows.shape, inputs + size), gates.new_empty(*rows.shape, gates.shape[-1])
            sum_gates = row_product(units, gates, gate_bias, summed)
            outputs = [gates.new_empty(*rows.shape, weight.shape[-1]) for weight, _ in layers]
            # Layers see the observation, too.
            enters = [units if self._layers else units[..., inputs:], *outputs[:-1]]
            products = [row_product(*each) for each in zip(enters, *zip(*layers, strict=True), outputs, strict=True)]
            seen, old = units[..., rows.own, :].split((inputs, size), -1)
            parts = summed[..., rows.own, :]
            # Gates are (reset, keep) in a GRU, (enter, keep, leave) in an LSTM.
            gated = parts[..., : (2 if is_gru else 3) * size]
            first, second, third, last = parts.split(size, -1)
            chosen_from = outputs[-1][..., rows.own, :].reshape(*grid, -1)

            def step(observations: Tensor, noise: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
                seen.copy_(self._encode_rows(observations, params, rows).reshape(seen.shape))
                old.copy_(memory[0].reshape(old.shape))
                sum_gates()
                torch.sigmoid_(gated)
                if is_gru:
                    new = last.mul_(first).add_(third).tanh_()
                    hidden = (old - new).mul_(second).add_(new)
                    after: Memory = (hidden,)
                else:
                    state = memory[1].reshape(old.shape) * second + first * torch.tanh(last)
                    hidden = third * torch.tanh(state)
                    after = hidden, state
                # The memory has been read: its buffer now takes the units that the next product multiplies.
                old.copy_(hidden)
                for index, product in enumerate(products):
                    if index:
                        outputs[index - 1].tanh_()
                    product()
                actions = choose(chosen_from, noise)
                return actions, tuple(tensor.reshape(*grid, size) for tensor in after)

            return step

        def act(observations: Tensor, noise: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
            return make_step(noise.shape[:2])(observations, noise, memory)

        return act

    def _gates(self, params: Params) -> tuple[Tensor, Tensor]:
        """Return one matrix (..., I + H, gates) and one bias (..., gates) for inputs and memory side by side.

        Those of a GRU are (reset, keep, new from the inputs, new from the memory); of an LSTM, (enter, keep, leave,
        new).
        """
        from_input, from_memory, input_bias, memory_bias = weights_of(params, "core")
        size = self.hidden_size
        if self.cell == "gru":
            both, new = slice(0, 2 * size), slice(2 * size, None)
            from_input = torch.cat((from_input, torch.zeros_like(from_input[..., new, :])), -2)
            of_gates, of_new = from_memory[..., both, :], from_memory[..., new, :]
            from_memory = torch.cat((of_gates, torch.zeros_like(of_new), of_new), -2)
            bias = torch.cat(
                (input_bias[..., both] + memory_bias[..., both], input_bias[..., new], memory_bias[..., new]), -1
            )
            return torch.cat((from_input, from_memory), -1).mT.contiguous(), bias
        # torch has (enter, keep, new, leave); sigmoids apply to adjacent gates.
        order = torch.cat([torch.arange(size) + size * gate for gate in (0, 1, 3, 2)]).to(from_input.device)
        weights = torch.cat((from_input, from_memory), -1).index_select(-2, order)
        return weights.mT.contiguous(), (input_bias + memory_bias).index_select(-1, order)

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> Unrolled:
        """Go through sequences (L, N, ...), differentiably; see `Policy.unroll`."""
        params = dict(self.named_parameters()) if params is None else params
        if params["head.weight"].dim() != 2:
            return self.unroll_tasks(observations, params, memory)
        memory = self.initial_memory(observations.shape[1]) if memory is None else memory
        inputs = self._encode(observations, params).reshape(*observations.shape[:2], self.input_size)
        units, last = run(self.cell, inputs, memory, weights_of(params, "core"))
        of_values = None if self.value_head is None else units
        if self.value_core is not None:
            empty = tuple(torch.zeros_like(old) for old in memory)
            of_values, _ = run(self.cell, inputs, empty, weights_of(params, "value_core"))
        return self._through_heads(inputs, units, of_values, params, last)

    def unroll_tasks(self, observations: Tensor, params: Params, memory: Memory | None = None) -> Unrolled:
        """Go through sequences (M, L, N, ...) of all tasks at once; see `Policy.unroll_tasks`.

        Step by step, because torch's own kernels for sequences support one set of weights, and those of an LSTM have no
        second derivatives.
        """
        num_tasks, steps, num = observations.shape[:3]
        if memory is None:
            memory = tuple(kept.unflatten(0, (num_tasks, num)) for kept in self.initial_memory(num_tasks * num))
        inputs = self._encode(observations, params).reshape(num_tasks, steps, num, self.input_size)
        units, last = self._run_tasks("core", params, inputs, memory)
        of_values = None if self.value_head is None else units
        if self.value_core is not None:
            of_values, _ = self._run_tasks("value_core", params, inputs, tuple(torch.zeros_like(old) for old in memory))
        return self._through_heads(inputs, units, of_values, params, last)

    def _run_tasks(self, core: str, params: Params, inputs: Tensor, state: Memory) -> tuple[Tensor, Memory]:
        """Return the units (M, L, N, H) of a recurrent layer, and its last state (M, N, H)."""
        from_input, from_memory, input_bias, memory_bias = weights_of(params, core)
        units = []
        for of_input in affine(inputs, from_input, input_bias).unbind(1):
            state = next_state(self.cell, of_input, affine(state[0], from_memory, memory_bias), state)
            units.append(state[0])
        return torch.stack(units, 1), state
