"""The contract of policies: observations -> torch Distribution, with optional parameters, shared or one set per task.

Every method takes `params`, a mapping from parameter names to tensors. Left out, the policy's own are used. Given
tensors of the policy's own shapes, observations have any leading axes. Given stacked tensors (M, ...), observations
are (M, ..., *observation shape), and row m of every tensor belongs to task m.

A policy may have a memory: `initial_memory` returns one for each slot, and `act_with_memory` takes it and returns the
next. The sampler carries it, from step to step and through all episodes of a trial. A policy that keeps anything itself
has `stateless = False`, and samplers refuse it where copies of it would act.

A parametrized distribution is handed around as a tuple of tensors, the distribution parameters, so that hot paths never
build distribution objects.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.distributions import Distribution, kl_divergence

from maml_rl.policies.distributions import mode

Params = Mapping[str, Tensor]
DistributionParams = tuple[Tensor, ...]
# What a policy remembers: tensors (num, ...), finite numbers or integers; nothing for a policy without a memory.
Memory = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Unrolled:
    """What a policy with a memory computes of N sequences of L steps.

    Attributes:
        distribution: the distribution parameters, with the leading axes (L, N), or none where they are the same.
        values: (L, N) estimates of the return from each step on; None if the policy has none.
        memory: tensors (N, ...) after the last step.
        units: (L, N, H) what the policy knows at each step, from which it predicts rewards; None if it does not.
    """

    distribution: DistributionParams
    values: Tensor | None
    memory: Memory
    units: Tensor | None = None


class Policy(nn.Module, ABC):
    """Base of all policies.

    Attributes:
        noise_kind: what `act` turns into actions: "normal" for N(0, 1), "uniform" for U[0, 1).
        noise_size: how many such numbers per action.
        stateless: whether an action depends only on observation, noise, parameters, and the memory that is handed to
            it. A copy of such a policy in another process acts the same.
        predicts_rewards: whether `predict_rewards` may be called.
        trained_with: what `load_policy` says about the run that the policy comes from; None for other policies.
        adaptation_rule: the inner loop of that run, for `adapt_to_task`.
    """

    noise_kind: Literal["normal", "uniform"]
    noise_size: int
    stateless: ClassVar[bool] = False
    predicts_rewards: bool = False
    trained_with: Any = None
    adaptation_rule: Any = None

    def forward(self, observations: Tensor, params: Params | None = None) -> Distribution:
        """Return the distribution of actions; its batch shape is the leading axes of `observations`."""
        return self.distribution_from(self.distribution_parameters(self.check_observations(observations), params))

    def check_observations(self, observations: Tensor | ArrayLike) -> Tensor:
        """Return observations as a tensor on the policy's device, where they are arrays.

        Args:
            observations: (..., *observation shape).

        Raises:
            ValueError: If they are of another shape than the policy's.
        """
        if not isinstance(observations, Tensor):
            device = next((param.device for param in self.parameters()), torch.device("cpu"))
            observations = torch.as_tensor(np.asarray(observations), device=device)
        shape = getattr(self, "observation_shape", None)
        if shape and tuple(observations.shape[-len(shape) :]) != tuple(shape):
            raise ValueError(
                f"the policy is for observations of shape {tuple(shape)}, got observations of shape "
                f"{tuple(observations.shape)}; make it for the environment with get_policy_for_env"
            )
        return observations

    @abstractmethod
    def distribution_parameters(self, observations: Tensor, params: Params | None = None) -> DistributionParams:
        """Return what parametrizes the distribution of actions, e.g. (mean, log_std) or (logits,)."""

    @abstractmethod
    def distribution_from(self, parameters: DistributionParams) -> Distribution:
        """Return the distribution that `distribution_parameters` describe."""

    @abstractmethod
    def act(self, observations: Tensor, noise: Tensor, params: Params | None = None) -> Tensor:
        """Return actions, a deterministic function of observations and noise; the fast path of sampling.

        Args:
            observations: (..., *observation shape).
            noise: (..., noise_size) of `noise_kind`.
            params: see the module.

        Returns:
            (..., *action shape) actions. With stacked parameters the actions of a task do not depend, to the last bit,
            on which other tasks are computed along with it; they may depend on its number. Samplers call this with one
            intra-op thread: with several, torch may split a product by the number of tasks.
        """

    def actor(self, params: Params, first_task: int = 0) -> Callable[[Tensor, Tensor], Tensor]:
        """Return `act` as a function of observations and noise, for many calls under the same parameters.

        A policy may compute once what depends only on the parameters. The actions are those that `act` computes for
        all tasks of a phase, to the last bit.

        Args:
            params: see the module.
            first_task: number of the first task that stacked parameters are for.
        """
        return lambda observations, noise: self.act(observations, noise, params)

    @property
    def has_memory(self) -> bool:
        """Whether the policy remembers anything from step to step."""
        return bool(self.initial_memory(1))

    def initial_memory(self, num: int) -> Memory:
        """Return what is remembered in each of `num` slots where a trial begins: tensors (num, ...), on its device."""
        return ()

    def act_with_memory(
        self, observations: Tensor, noise: Tensor, memory: Memory, params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Return actions, and what is remembered after them; `act` for a policy that remembers nothing.

        Rows do not mix: what happens in one slot never depends on another.

        Args:
            observations: (M, S, *observation shape), of S slots of each of M tasks.
            noise: (M, S, noise_size) of `noise_kind`.
            memory: tensors (M, S, ...), which must not be changed in place.
            params: see the module.

        Returns:
            (M, S, *action shape) actions, and a memory of the same shapes and types as `memory`.
        """
        return self.act(observations, noise, params), ()

    def memory_actor(
        self, params: Params, first_task: int = 0
    ) -> Callable[[Tensor, Tensor, Memory], tuple[Tensor, Memory]]:
        """Return `act_with_memory` as a function of observations, noise and memory; see `actor`.

        Parameters that all tasks share are not stacked for a policy with a memory, so that thousands of trials can go
        on at once. What it computes for a task must not depend on which other tasks are computed along with it.
        """
        if self.has_memory:
            return lambda observations, noise, memory: self.act_with_memory(observations, noise, memory, params)
        act = self.actor(params, first_task)
        return lambda observations, noise, memory: (act(observations, noise), ())

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> "Unrolled":
        """Go through sequences of observations, differentiably: what the update of a recurrent policy computes.

        Args:
            observations: (L, N, *observation shape), N sequences of L steps.
            memory: tensors (N, ...) before the first step; None where trials begin.
            params: of the policy's own shapes.

        Returns:
            Distributions and values of every step, and the memory after the last.

        Raises:
            TypeError: If the policy does not say how.
        """
        raise TypeError(f"{type(self).__name__} cannot go through sequences; write its method unroll")

    def predict_rewards(self, unrolled: "Unrolled", actions: Tensor, params: Params | None = None) -> Tensor:
        """Return what reward is expected for each action, (L, N), differentiably; see `GRUPolicy`.

        Args:
            unrolled: what `unroll` returned.
            actions: (L, N, *action shape).
            params: of the policy's own shapes.

        Raises:
            TypeError: If the policy predicts none.
        """
        raise TypeError(f"{type(self).__name__} predicts no rewards; make a GRUPolicy with predict_rewards=True")

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        """Refuse spaces that the policy does not fit; called before the first phase.

        Args:
            observation_space: of one environment.
            action_space: of one environment.

        Raises:
            TypeError: If the policy's distribution is of a kind that cannot act.
            ValueError: If a space does not fit.
        """

    def log_prob_from(self, distribution: DistributionParams, actions: Tensor) -> Tensor:
        """Return the log-probability (...) of `actions` (..., *action shape), summed over action entries."""
        return self.distribution_from(distribution).log_prob(actions)

    def entropy_from(self, distribution: DistributionParams) -> Tensor:
        """Return the entropy (...)."""
        return self.distribution_from(distribution).entropy()

    def kl(self, old: DistributionParams, new: DistributionParams) -> Tensor:
        """Return KL(old, new), (...)."""
        return kl_divergence(self.distribution_from(old), self.distribution_from(new))

    def fisher_product(
        self, distribution: DistributionParams, tangents: DistributionParams, weights: Tensor
    ) -> DistributionParams:
        """Multiply tangents by the Fisher metric of the distribution, the middle of a Gauss-Newton product J^T F J v.

        The metric is the Hessian of KL(old, new) with respect to new, at new = old.

        Args:
            distribution: what `distribution_parameters` returned.
            tangents: one per entry of `distribution`, of its shape (J v).
            weights: (...) weight of each step; mask / mask.sum() for a mean over real steps.

        Returns:
            Cotangents of the shapes of `distribution`, ready for a vector-Jacobian product.
        """
        old = tuple(entry.detach() for entry in distribution)
        with torch.enable_grad():
            new = tuple(entry.detach().requires_grad_() for entry in distribution)
            divergence = (self.kl(old, new) * weights).sum()
            slopes = torch.autograd.grad(divergence, new, create_graph=True)
        return torch.autograd.grad(slopes, new, tangents, allow_unused=True, materialize_grads=True)

    def choose(self, observation: ArrayLike, rng: np.random.Generator | None = None) -> Any:
        """Return an action for one observation, both as arrays: for `env.step`, outside of a sampler.

        Args:
            observation: (*observation shape).
            rng: draws the action from the distribution; None takes its mode, or for a transformed distribution what the
                mode of its base becomes.

        Returns:
            (*action shape) action; a NumPy integer for discrete actions.
        """
        device = next(self.parameters()).device
        with torch.inference_mode():
            batch = torch.as_tensor(np.asarray(observation), device=device)[None]
            if rng is None:
                actions = mode(self(batch))
            else:
                draw = rng.standard_normal if self.noise_kind == "normal" else rng.random
                noise = torch.from_numpy(draw((1, self.noise_size), np.float32)).to(device)
                actions = self.act(batch, noise)
            return actions[0].cpu().numpy()[()]

    def choose_with_memory(
        self, observation: ArrayLike, memory: Memory | None = None, rng: np.random.Generator | None = None
    ) -> tuple[Any, Memory]:
        """Return an action for one observation of a trial, and what is remembered after it: for `env.step`.

        Args:
            observation: (*observation shape).
            memory: what the call before returned; None where a trial begins.
            rng: draws the action from the distribution; None takes its mode, or for a policy without `unroll` what
                noise in the middle of its range gives.

        Returns:
            (*action shape) action, and the memory for the next call.
        """
        memory = self.initial_memory(1) if memory is None else memory
        device = next((tensor.device for tensor in (*self.parameters(), *memory)), torch.device("cpu"))
        rows = torch.as_tensor(np.asarray(observation), device=device)[None, None]
        with torch.inference_mode():
            if rng is None and type(self).unroll is not Policy.unroll:
                unrolled = self.unroll(rows, memory)
                actions = mode(self.distribution_from(unrolled.distribution))
                return actions[0, 0].cpu().numpy()[()], unrolled.memory
            if rng is None:
                noise = torch.full((1, 1, self.noise_size), 0.0 if self.noise_kind == "normal" else 0.5)
            else:
                draw = rng.standard_normal if self.noise_kind == "normal" else rng.random
                noise = torch.from_numpy(draw((1, 1, self.noise_size), np.float32))
            actions, after = self.act_with_memory(
                rows, noise.to(device), tuple(tensor.unsqueeze(0) for tensor in memory)
            )
            return actions[0, 0].cpu().numpy()[()], tuple(tensor.squeeze(0) for tensor in after)

    def log_prob(self, observations: Tensor, actions: Tensor, params: Params | None = None) -> Tensor:
        """Return the log-probability (...) of `actions`, summed (never averaged) over action entries."""
        observations = self.check_observations(observations)
        return self.log_prob_from(self.distribution_parameters(observations, params), actions)

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
            params: where to start; the policy's own by default.
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

    def check_parameters(self, params: Mapping[str, Tensor | ArrayLike]) -> dict[str, Tensor]:
        """Return parameters as tensors; arrays get the type and device of the policy's own.

        Args:
            params: by name.

        Raises:
            ValueError: If they are not those of the policy, by their names.
        """
        own = dict(self.named_parameters())
        if params.keys() != own.keys():
            raise ValueError(f"expected parameters {sorted(own)}, got {sorted(params)}")
        return {
            name: value
            if isinstance(value := params[name], Tensor)
            else torch.as_tensor(np.asarray(value), dtype=param.dtype, device=param.device)
            for name, param in own.items()
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
        own = dict(self.named_parameters())
        params = own if params is None else self.check_parameters(params)
        return {name: _stack(name, params[name], tuple(own[name].shape), num_tasks) for name in own}


def _stack(name: str, param: Tensor, shape: tuple[int, ...], num_tasks: int) -> Tensor:
    if tuple(param.shape) == shape:
        # For a single task `contiguous` would return the parameter itself.
        return param.expand(num_tasks, *shape).clone(memory_format=torch.contiguous_format)
    if tuple(param.shape) == (num_tasks, *shape):
        return param.contiguous()
    raise ValueError(
        f"parameter {name!r} must have the shape {shape}, or {(num_tasks, *shape)} for {num_tasks} tasks, "
        f"got {tuple(param.shape)}"
    )
