"""The contract of policies: observations -> torch Distribution, with optional parameters, shared or one set per task.

Every method takes `params`, a mapping from parameter names to tensors. Left out, the policy's own are used. Given
tensors of the policy's own shapes, observations have any leading axes. Given stacked tensors (M, ...), observations
are (M, ..., *observation shape), and row m of every tensor belongs to task m.

A policy is a body, which computes distribution parameters from observations, and a head, `distributions`, which
interprets them; see `maml_rl.policies.heads`.

A policy may have a memory: `initial_memory` returns one for each slot, and `act` takes it and returns the next; without
one it is an empty tuple. The sampler carries it, from step to step and through all episodes of a trial. A policy that
keeps state itself has `stateless = False`, and samplers refuse it where copies of it would act.
"""

import copy
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import gymnasium
import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.distributions import Distribution

from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies.distributions import DistributionParams, Distributions, NoiseKind, middle_of, mode
from maml_rl.policies.heads import Head, Params

# The memory of a policy: tensors (num, ...), finite numbers or integers; empty for a policy without a memory.
Memory = tuple[Tensor, ...]
# Actions (...) and the memory after them; and what computes them from observations, noise and the memory before.
Acted: TypeAlias = tuple[Tensor, Memory]
Act: TypeAlias = Callable[[Tensor, Tensor, Memory], Acted]


@dataclass(frozen=True, slots=True)
class Unrolled:
    """The outputs of a policy with a memory on N sequences of L steps.

    Attributes:
        distribution: the distribution parameters, with the leading axes (L, N), or none where they are the same.
        values: (L, N) estimates of the return from each step on; None if the policy has none.
        memory: tensors (N, ...) after the last step.
        units: (L, N, H) hidden units at each step, for further heads; None if the policy shows none.
        value_logits: (L, N, bins) the distributions of which `values` are the means, see `TwoHot`; None if they are
            numbers.
    """

    distribution: DistributionParams
    values: Tensor | None
    memory: Memory
    units: Tensor | None = None
    value_logits: Tensor | None = None


class Policy(nn.Module, ABC):
    """Base of all policies.

    A policy of distributions sets `distributions` and implements `distribution_parameters`. A policy that chooses
    actions in another way implements `act`.

    Attributes:
        noise_kind: of the noise that `act` turns into actions: "normal" for N(0, 1), "uniform" for U[0, 1).
        noise_size: numbers of noise per action.
        distributions: log-probability, entropy and divergence for distribution parameters; see `heads`.
        stateless: whether an action depends only on observation, noise, parameters, and the memory that is passed to
            it. A copy of such a policy in another process acts the same.
        reads_text: whether it takes and returns text as bytes; see `spaces.PackedSpace`.
        told_who_acts: whether the function that `actor` returns takes a fourth argument, (M, S) bool: which slots take
            a step. Only their actions count. A policy that keeps state of every slot is always called for all slots.
        is_greedy: whether it was made by `greedy`.
        origin: the run of the policy, above all its learner, as set by `load_policy`; None for other policies.
    """

    noise_kind: NoiseKind
    noise_size: int
    distributions: Distributions
    stateless: ClassVar[bool] = False
    reads_text: ClassVar[bool] = False
    told_who_acts: ClassVar[bool] = False
    is_greedy: bool = False
    origin: Any = None

    @property
    def trained_with(self) -> Any:
        """The config of the run that the policy was loaded from; None for other policies."""
        return None if self.origin is None else self.origin.config

    def forward(self, observations: Tensor, params: Params | None = None) -> Distribution:
        """Return the distribution of actions; its batch shape is the leading axes of `observations`."""
        # The parameters come first: the first distribution of a module determines its kind.
        parameters = self.distribution_parameters(check_observations(self, observations), params)
        return self.distributions.distribution(parameters)

    def distribution_parameters(self, observations: Tensor, params: Params | None = None) -> DistributionParams:
        """Return the parameters of the distribution of actions, e.g. (mean, log_std) or (logits,).

        Raises:
            TypeError: If the policy has no distribution that depends on the observations alone.
        """
        name = type(self).__name__
        if self.has_memory:
            raise TypeError(f"{name} has a memory, so that its actions depend on the steps before; use unroll")
        raise TypeError(f"{name} has no distribution of actions; write its method distribution_parameters")

    def act(self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None) -> Acted:
        """Return actions and the memory after them, a deterministic function of the arguments.

        Args:
            observations: (..., *observation shape); with a memory (M, S, *observation shape), of S slots of each of M
                tasks.
            noise: (..., noise_size) of `noise_kind`.
            memory: tensors (M, S, ...), which must not be changed in place; empty for a policy without one.
            params: see the module.

        Returns:
            (..., *action shape) actions, and a memory of the same shapes and types as `memory`. Rows are independent:
            the results for one slot never depend on another. With stacked parameters the actions of a task do not
            depend, to the last bit, on which other tasks are computed along with it; they may depend on its number.
            Samplers call this with one intra-op thread: with several, torch may split a product by the number of tasks.
        """
        head = getattr(self, "distributions", None)
        if not isinstance(head, Head):
            raise TypeError(f"{type(self).__name__} does not say how it acts; write its method act")
        return head.act(self.distribution_parameters(observations, params), noise), ()

    def actor(self, params: Params, first_task: int = 0) -> Callable[..., Acted]:
        """Return `act` as a function of observations, noise and memory, for many calls under the same parameters.

        Samplers use it. It may return actions as they are to be recorded, of which `perform` makes the environment's.

        A policy may compute once what depends only on the parameters. The actions are those that `act` computes for
        all tasks of a phase, except that tanh may differ in its last place; see `layers.tanh_`.

        Parameters that all tasks share are not stacked for a policy with a memory, so that thousands of trials can
        run at once. Its result for a task must not depend on which other tasks are computed with it.

        Where a copy of the memory would cost more than the step, it may write into a tensor of the memory and return
        that tensor. It must then read such a place only if the rest of the returned memory says that it was written,
        because a slot whose step does not count keeps its other tensors, and must lose nothing.

        Args:
            params: see the module; stacked ones may be a view of what all tasks share.
            first_task: number of the first task that stacked parameters are for.
        """
        own = {name: value.contiguous() for name, value in params.items()}
        return lambda observations, noise, memory: self.act(observations, noise, memory, own)

    @property
    def has_static_steps(self) -> bool:
        """Whether the function that `actor` returns does the same operations at every call, on the same shapes.

        On a GPU they are then recorded as a graph. They must not wait for the device.
        """
        return False

    @property
    def class_name(self) -> str:
        """The class that its author wrote, for messages."""
        return type(self).__name__

    @property
    def has_memory(self) -> bool:
        """Whether the policy has a memory."""
        return bool(self.initial_memory(1))

    def initial_memory(self, num: int) -> Memory:
        """Return the memory of `num` slots at the start of a trial: tensors (num, ...), on the policy's device."""
        return ()

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> "Unrolled":
        """Go through sequences of observations, differentiably, as the update of a recurrent policy needs it.

        Args:
            observations: (L, N, *observation shape), N sequences of L steps; with stacked parameters those of each
                task, (M, L, N, *observation shape).
            memory: tensors (N, ...) before the first step, or (M, N, ...); None where trials begin.
            params: of the policy's own shapes, or stacked (M, ...); see `unroll_tasks`.

        Returns:
            Distributions and values of every step, and the memory after the last; with stacked parameters each with
            another leading axis, of the tasks.

        Raises:
            TypeError: If the policy does not implement it.
        """
        raise TypeError(f"{type(self).__name__} cannot go through sequences; write its method unroll")

    def unroll_tasks(self, observations: Tensor, params: Params, memory: Memory | None = None) -> "Unrolled":
        """Go through sequences under the parameters of each task, differentiably in these: task by task, by `unroll`.

        A policy that can do it for all tasks at once overrides this. Learners that adapt by gradient steps need it, and
        those with second derivatives need it to be differentiable twice.

        Args:
            observations: (M, L, N, *observation shape).
            params: {name: (M, ...)}.
            memory: tensors (M, N, ...) before the first step; None where trials begin.
        """
        steps, num = observations.shape[1:3]
        unrolled = [
            self.unroll(
                of_task,
                None if memory is None else tuple(state[task] for state in memory),
                {name: value[task] for name, value in params.items()},
            )
            for task, of_task in enumerate(observations)
        ]

        def whole(tensor: Tensor) -> Tensor:
            # A parameter of a distribution, such as its deviation, may be the same for all steps.
            return tensor if tensor.shape[:2] == (steps, num) else tensor.expand(steps, num, *tensor.shape)

        values = [each.values for each in unrolled if each.values is not None]
        units = [each.units for each in unrolled if each.units is not None]
        return Unrolled(
            tuple(
                torch.stack([whole(part) for part in parts])
                for parts in zip(*(each.distribution for each in unrolled), strict=True)
            ),
            torch.stack(values) if values else None,
            tuple(torch.stack(kept) for kept in zip(*(each.memory for each in unrolled), strict=True)),
            torch.stack(units) if units else None,
        )

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        """Refuse spaces that the policy does not fit; called before the first phase.

        Raises:
            TypeError: If the policy's distribution is of a kind that cannot act.
            ValueError: If a space does not fit.
        """

    def choose(
        self, observation: ArrayLike, memory: Memory | None = None, rng: np.random.Generator | None = None
    ) -> tuple[Any, Memory]:
        """Return an action for one observation, and the memory after it: for `env.step`, outside of a sampler.

        Args:
            observation: (*observation shape).
            memory: as the previous call returned it; None where a trial begins, and for a policy without a memory.
            rng: draws the action from the distribution. None takes its mode; for a transformed distribution, the
                transformed mode of its base; for a policy without a distribution, the action for noise in the middle
                of its range.

        Returns:
            (*action shape) action, a NumPy integer from 0 on for discrete actions, and the memory for the next call.
            An environment of your own whose actions start elsewhere, or that does not clip them to its Box, gets
            `own_actions(stored_actions(env.action_space), action)` of `maml_rl.spaces`, as samplers do.
        """
        memory = self.initial_memory(1) if memory is None else memory
        device = next((tensor.device for tensor in (*self.parameters(), *memory)), torch.device("cpu"))
        rows = check_observations(self, torch.as_tensor(np.asarray(observation), device=device)[None, None])
        with torch.inference_mode():
            if rng is None and (unrolled := self._try_unroll(rows, memory)) is not None:
                actions = mode(self.distributions.distribution(unrolled.distribution))
                return actions[0, 0].cpu().numpy()[()], unrolled.memory
            if rng is None:
                noise = torch.full((1, 1, self.noise_size), middle_of(self.noise_kind))
            else:
                draw = rng.standard_normal if self.noise_kind == "normal" else rng.random
                noise = torch.from_numpy(draw((1, 1, self.noise_size), np.float32))
            actions, after = self.act(rows, noise.to(device), tuple(tensor.unsqueeze(0) for tensor in memory))
            return actions[0, 0].cpu().numpy()[()], tuple(tensor.squeeze(0) for tensor in after)

    def _try_unroll(self, rows: Tensor, memory: Memory) -> "Unrolled | None":
        """Return the distribution for one step (1, 1, ...) and the memory after it; None where there is none."""
        if type(self).unroll is not Policy.unroll and memory:
            return self.unroll(rows, memory)
        if type(self).distribution_parameters is not Policy.distribution_parameters and not memory:
            return Unrolled(self.distribution_parameters(rows), None, ())
        return None

    def log_prob(self, observations: Tensor, actions: Tensor, params: Params | None = None) -> Tensor:
        """Return the log-probability (...) of `actions`, summed (never averaged) over action entries."""
        parameters = self.distribution_parameters(check_observations(self, observations), params)
        return self.distributions.log_prob(parameters, actions)

    def update_params(
        self,
        loss: Tensor,
        params: Params | None = None,
        step_size: float | Mapping[str, float | Tensor] = 0.5,
        first_order: bool = False,
    ) -> dict[str, Tensor]:
        """Return the parameters after one gradient step on `loss`, as in pytorch-maml-rl.

        Args:
            loss: a number, computed with `params`.
            params: the initial ones; the policy's own by default.
            step_size: one for all parameters, or one for each name.
            first_order: treat the gradient as a constant when differentiating the result.

        Returns:
            {name: tensor} of the shapes of `params`; the policy's own parameters stay as they are.
        """
        start = dict(self.named_parameters()) if params is None else params
        gradients = torch.autograd.grad(loss, list(start.values()), create_graph=not first_order)
        sizes = step_size if isinstance(step_size, Mapping) else dict.fromkeys(start, step_size)
        return {
            name: param - sizes[name] * gradient
            for (name, param), gradient in zip(start.items(), gradients, strict=True)
        }

    def stack_parameters(self, num_tasks: int, params: Params | None = None) -> dict[str, Tensor]:
        """Return one contiguous copy of the parameters per task; gradients flow through it.

        Args:
            num_tasks: M.
            params: of the policy's own shapes, or stacked already.

        Returns:
            {name: (M, ...)}.

        Raises:
            ValueError: If a name or shape does not fit the policy.
        """
        stacked, given = {}, {} if params is None else check_parameters(self, params)
        for name, own in self.named_parameters():
            param, shape = given.get(name, own), tuple(own.shape)
            if tuple(param.shape) == shape:
                # For a single task `contiguous` would return the parameter itself.
                stacked[name] = param.expand(num_tasks, *shape).clone(memory_format=torch.contiguous_format)
            elif tuple(param.shape) == (num_tasks, *shape):
                stacked[name] = param.contiguous()
            else:
                raise ValueError(
                    f"parameter {name!r} must have the shape {shape}, or {(num_tasks, *shape)} for {num_tasks} tasks, "
                    f"got {tuple(param.shape)}"
                )
        return stacked


def greedy(policy: Policy) -> Policy:
    """Return a policy on the same parameters that takes its most probable actions: for deterministic sampling.

    Its `act` and `actor` get noise in the middle of its range, zeros or 0.5. Nothing else changes for a policy with
    its own `act`.
    """
    shared = {id(tensor): tensor for tensor in (*policy.parameters(), *policy.buffers())}
    ready = copy.deepcopy(policy, shared)
    for module in ready.modules():
        if isinstance(head := vars(module).get("distributions"), Head):
            head.is_greedy = True
    ready.is_greedy = True
    return ready


def perform(policy: Policy, recorded: Tensor) -> Tensor:
    """Return recorded actions (..., *action shape) as the environment gets them."""
    head = getattr(policy, "distributions", None)
    return head.perform(recorded) if isinstance(head, Head) else recorded


def performed(policy: Policy, episodes: TaskEpisodes) -> TaskEpisodes:
    """Return a policy's episodes with the actions that the environment got."""
    actions = perform(policy, episodes.actions)
    if actions is not episodes.actions:
        episodes = copy.copy(episodes)
        episodes.actions = actions
    return episodes


def distributions_in_episodes(policy: Policy, observations: Tensor, params: Params) -> DistributionParams:
    """Return the distribution parameters at every step of episodes (M, T, B, ...), under parameters (M, ...).

    A policy with a memory begins every episode with an empty one.
    """
    if policy.has_memory:
        return policy.unroll_tasks(observations, params).distribution
    return policy.distribution_parameters(observations, params)


def check_observations(policy: Policy, observations: Tensor | ArrayLike) -> Tensor:
    """Return observations (..., *observation shape) as a tensor, on the policy's device; a ValueError for others."""
    if not isinstance(observations, Tensor):
        device = next((param.device for param in policy.parameters()), torch.device("cpu"))
        observations = torch.as_tensor(np.asarray(observations), device=device)
    shape = getattr(policy, "observation_shape", None)
    if shape and tuple(observations.shape[-len(shape) :]) != tuple(shape):
        raise ValueError(
            f"the policy is for observations of shape {tuple(shape)}, got observations of shape "
            f"{tuple(observations.shape)}; make it for the environment with get_policy_for_env"
        )
    return observations


def check_parameters(policy: Policy, params: Mapping[str, Tensor | ArrayLike]) -> dict[str, Tensor]:
    """Return a policy's parameters by name as tensors; arrays get the type and device of its own."""
    current = dict(policy.named_parameters())
    if params.keys() != current.keys():
        raise ValueError(f"expected parameters {sorted(current)}, got {sorted(params)}")
    return {
        name: value
        if isinstance(value := params[name], Tensor)
        else torch.as_tensor(np.asarray(value), dtype=param.dtype, device=param.device)
        for name, param in current.items()
    }
