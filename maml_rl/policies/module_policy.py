"""Any module that maps observations to a distribution of actions, as a policy."""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.distributions import Distribution, Independent
from torch.func import functional_call, vmap

from maml_rl.envs.global_generators import refusing_draws
from maml_rl.errors import NonFiniteError
from maml_rl.policies.distributions import (
    DistributionForm,
    DistributionParams,
    mode,
    noise_shape,
    sample_from_noise,
    take_apart,
)
from maml_rl.policies.heads import Params
from maml_rl.policies.layers import within
from maml_rl.policies.policy import Act, Acted, Memory, Policy, Unrolled
from maml_rl.spaces import category_counts

_DEPENDS_ON_BATCH = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
# Tasks that act together. Rounding under vmap depends on the number of tasks and on the place among them: both are the
# same for a task of a given number, wherever its block is computed.
_BLOCK = 16
# Modules with more parameters act task by task: empty places of a block would cost more than a call for each task.
_MOST_PARAMETERS_IN_BLOCKS = 100_000
# How torch's distributions refuse a parameter, with all its values.
_OUT_OF_RANGE = re.compile(
    r"Expected parameter (?P<parameter>\w+) .* of distribution (?P<distribution>\w+)\(.*"
    r"to satisfy the constraint (?P<constraint>.*?), but found invalid values:(?P<values>.*)",
    re.DOTALL,
)
_NUMBER = re.compile(r"-?(?:\d+\.\d*(?:e[-+]?\d+)?|\b(?:inf|nan)\b)")
# How many observations the module is tried on; a size that actions rarely have, so that axes cannot be confused.
_TRIED = 7


class ModulePolicy(Policy):
    """A policy of any module with `forward(observations) -> torch.distributions.Distribution`.

    The module sees one leading axis: observations (N, *observation shape), floating-point ones in the type of its
    parameters, integers as they are. The first axis of the distribution's batch shape must be N; log-probabilities are
    summed over all its other axes. The distribution is one of Normal, MultivariateNormal, Laplace, Categorical,
    OneHotCategorical and Bernoulli, or an Independent or TransformedDistribution of one of these.

    Policy and module share their parameters, buffers and names. With stacked parameters derivatives are computed by
    `torch.func.functional_call` under `torch.func.vmap`, or task by task where the module does not allow that. Actions
    are computed so in blocks of a fixed number of tasks; those of large or convolutional modules, task by task.

    A module with a memory has the method `initial_memory(num)`, which returns a tuple of tensors (num, ...), and
    `forward(observations, memory) -> (distribution, memory)`, each tensor of the memory (N, ...); if it estimates
    values, (distribution, memory, values (N,)). The sampler carries the memory through every trial; see `Policy`. Where
    all tasks share their parameters, such a module acts for a fixed number of tasks at a time; where every task has its
    own, task by task.

    Args:
        module: has parameters; its output depends only on observations, memory, parameters and buffers.
        observation_shape: shape of one observation; None until `check_spaces` or `as_policy` sets it.

    Raises:
        TypeError: If it is not a module.
        ValueError: If it has no parameters, or parameters or layers that cannot be adapted to a task.
    """

    stateless = True

    def __init__(self, module: nn.Module, observation_shape: Sequence[int] | None = None) -> None:
        super().__init__()
        _check_module(module)
        # Not registered as a submodule, which would give every parameter another name; the registries are shared.
        self.__dict__["module"] = module
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[registry] = module.__dict__[registry]
        self.training = module.training
        self.observation_shape = None if observation_shape is None else tuple(observation_shape)
        self._form: DistributionForm | None = None
        self._allows_vmap: bool | None = None
        # Whether it was seen in training mode, or else without, that calls leave the module as it is.
        self._unchanged: set[bool] = set()

    def train(self, mode: bool = True) -> "ModulePolicy":
        """Set the mode of the module."""
        self.__dict__["module"].train(mode)
        return super().train(mode)

    def check_spaces(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        shape = tuple(observation_space.shape or ())
        self._take_shape(shape)
        dtype = observation_space.dtype if observation_space.dtype is not None else np.dtype(np.float32)
        start = np.asarray(getattr(observation_space, "start", 0), dtype)
        device = next(self.parameters()).device
        observations = torch.from_numpy(np.broadcast_to(start, (_TRIED, *shape)).copy()).to(device)
        # With gradients, so that learned tensors are recognized.
        with torch.enable_grad():
            with refusing_draws(f"forward of {self.class_name}", "leave chance to the distribution that it returns"):
                tensors = self._tensors_of(_copy_structure(self.__dict__["module"]), self._own(), observations)
            self._refuse_changes(observations)
            self._can_be_vmapped(observations)
        distribution = self.distributions.distribution(tuple(tensor.detach() for tensor in tensors))
        name = type(distribution).__name__
        kind = self.distributions
        if kind.is_discrete != np.issubdtype(action_space.dtype, np.integer):
            raise ValueError(
                f"the distribution {name} of {self.class_name} has "
                f"{'integer' if kind.is_discrete else 'real'} actions, which do not fit the action space {action_space}"
            )
        expected = (*(action_space.shape or ()),)
        actions = sample_from_noise(distribution, torch.full(noise_shape(distribution), 0.5, device=device))
        expected_counts, counts = category_counts(action_space), [take_apart(distribution)[1][0].shape[-1]]
        if isinstance(action_space, gymnasium.spaces.MultiDiscrete):
            counts *= len(expected_counts)
        counts = kind.arguments.get("num_categories", counts)
        if tuple(actions.shape[1:]) != expected or (expected_counts and list(counts) != expected_counts):
            raise ValueError(
                f"the distribution {name} of {self.class_name} has actions of the shape {tuple(actions.shape[1:])}"
                f"{f' and {counts[0] if len(counts) == 1 else list(counts)} categories' if expected_counts else ''}, "
                f"which do not fit the action space {action_space}"
            )

    def _refuse_changes(self, observations: Tensor) -> None:
        """Refuse a module that its calls change: whose second call differs, or whose every call writes into a buffer.

        A cache is written once. The buffer that `forward` assigns instead is as before in the next call.
        """
        if self.training in self._unchanged:
            return
        module, own = _copy_structure(self.__dict__["module"]), self._own()
        buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        versions: dict[str, int] = {}
        calls: list[DistributionParams] = []
        forms: list[Any] = []
        for _ in range(2):
            versions = {name: buffer._version for name, buffer in buffers.items()}
            calls.append(self._tensors_of(module, {**own, **buffers}, observations))
            forms.append((self.distributions.kind, [(tensor.shape, tensor.dtype) for tensor in calls[-1]]))
        for name, buffer in buffers.items():
            if buffer._version != versions[name]:
                raise ValueError(
                    f"forward of {self.class_name} changes its buffer {name!r}, so that actions would depend on which "
                    "process has computed how many before; change it in the learner's update, or call module.eval() "
                    "where that keeps it"
                )
        if new := [name for name, _ in module.named_parameters() if name not in own]:
            raise ValueError(
                f"forward of {self.class_name} registers the parameter {new[0]!r}, which nothing would train; register "
                "it in __init__"
            )
        # Rounding may differ from call to call, as that of sums on a GPU does.
        close = partial(torch.allclose, rtol=1e-3, atol=1e-4, equal_nan=True)
        if forms[0] != forms[1] or not all(map(close, *calls)):
            raise ValueError(
                f"forward of {self.class_name} returns another distribution when it is called again with the same "
                "observations, so that actions would depend on which process has computed how many before; pass what "
                "it keeps from call to call as its memory (initial_memory)"
            )
        self._unchanged.add(self.training)

    def initial_memory(self, num: int) -> Memory:
        module = self.__dict__["module"]
        if not hasattr(module, "initial_memory"):
            return ()
        with torch.no_grad():
            memory: Memory = module.initial_memory(num)
        return memory

    def distribution_parameters(self, observations: Tensor, params: Params | None = None) -> DistributionParams:
        if self.has_memory:
            return super().distribution_parameters(observations, params)
        stacked = params is not None and self._is_stacked(params)
        if self.observation_shape is None:
            if stacked:
                raise RuntimeError("the shape of an observation is not known; use as_policy(module, observation_shape)")
            self.observation_shape = tuple(observations.shape[1:])
        lead = observations.shape[: observations.dim() - len(self.observation_shape)]
        if params is None or not stacked:
            rows = observations.reshape(-1, *self.observation_shape)
            tensors = self._tensors_of(_copy_structure(self.__dict__["module"]), params or self._own(), rows)
        else:
            num_tasks = len(next(iter(params.values())))
            if lead[:1] != (num_tasks,):
                raise ValueError(
                    f"parameters are stacked for {num_tasks} tasks, so observations must have the shape "
                    f"({num_tasks}, ..., *{self.observation_shape}), got {tuple(observations.shape)}"
                )
            rows = observations.reshape(num_tasks, -1, *self.observation_shape)
            tensors = tuple(tensor.flatten(0, 1) for tensor in self._tensors_of_tasks(params, rows))
        return tuple(tensor.unflatten(0, lead) for tensor in tensors)

    def act(self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None) -> Acted:
        lead = noise.shape[:-1]
        self._take_shape(tuple(observations.shape[len(lead) :]))
        if self.has_memory or (params is not None and self._is_stacked(params)):
            return self.actor(params or self._own())(observations, noise, memory)
        rows, noise = observations.flatten(0, len(lead) - 1), noise.flatten(0, len(lead) - 1)
        module = _copy_structure(self.__dict__["module"])
        actions = self._choose(self._call(module, params or self._own(), rows), noise)
        return actions.unflatten(0, lead), ()

    def actor(self, params: Params, first_task: int = 0) -> Act:
        is_stacked = self._is_stacked(params)
        if not is_stacked and not self.has_memory:
            return super().actor(params)
        module = _copy_structure(self.__dict__["module"])
        # Copies have the same alignment wherever the stack begins, so that products round the same in every process.
        of_tasks = [
            {name: value.clone() for name, value in own.items()} for own in (_unstack(params) if is_stacked else ())
        ]

        own_params = list(self.parameters())
        few = sum(param.numel() for param in own_params) <= _MOST_PARAMETERS_IN_BLOCKS
        fits_in_blocks = few and all(param.dim() <= 2 for param in own_params)

        def act_rows(theta: Params, rows: Tensor, noise: Tensor, memory: Memory = ()) -> Acted:
            distribution, after, _ = self._step(module, theta, rows, memory)
            return self._choose(distribution, noise), after

        def act_flat(theta: Params, rows: Tensor, noise: Tensor, memory: Memory) -> Acted:
            """Act for the slots of several tasks, (tasks, S, ...), under the same parameters."""
            lead, before = noise.shape[:2], tuple(old.flatten(0, 1) for old in memory)
            actions, after = act_rows(theta, rows.flatten(0, 1).clone(), noise.flatten(0, 1), before)
            return actions.unflatten(0, lead), tuple(new.unflatten(0, lead) for new in after)

        @cache
        def blocks(num_tasks: int) -> list[tuple[Tensor, slice, Params]]:
            """Return of each block its tasks, which of its places are theirs, and their parameters."""
            chunks = []
            for start in range(first_task - first_task % _BLOCK, first_task + num_tasks, _BLOCK):
                # Places of a block that stay empty repeat the nearest task.
                places = (torch.arange(start, start + _BLOCK) - first_task).clamp(0, num_tasks - 1)
                own = {name: value[places.to(value.device)] for name, value in params.items()} if is_stacked else params
                chunks.append((places, slice(max(first_task - start, 0), first_task + num_tasks - start), own))
            return chunks

        def act(observations: Tensor, noise: Tensor, memory: Memory) -> Acted:
            grid = noise.shape[1:-1]
            rows, noise = (values.flatten(1, len(grid)) for values in (observations, noise))
            parts: list[Acted] = []
            if is_stacked and (memory or not (fits_in_blocks and self._can_be_vmapped(rows[0]))):
                for task, of_task in enumerate(of_tasks):
                    row = slice(task, task + 1)
                    parts.append(act_flat(of_task, rows[row], noise[row], tuple(old[row] for old in memory)))
            else:
                for places, real, of_block in blocks(len(noise)):
                    here = places.to(noise.device)
                    if is_stacked:
                        actions, after = vmap(act_rows)(of_block, rows[here], noise[here])
                    else:
                        actions, after = act_flat(of_block, rows[here], noise[here], tuple(old[here] for old in memory))
                    parts.append((actions[real], tuple(new[real] for new in after)))
            each_actions, each_memory = zip(*parts, strict=True)
            kept_memory = tuple(torch.cat(tensors) for tensors in zip(*each_memory, strict=True))
            return torch.cat(each_actions).unflatten(1, grid), kept_memory

        return act

    def unroll(self, observations: Tensor, memory: Memory | None = None, params: Params | None = None) -> Unrolled:
        if params is not None and self._is_stacked(params):
            return self.unroll_tasks(observations, params, memory)
        module, params = _copy_structure(self.__dict__["module"]), params or self._own()
        memory = self.initial_memory(observations.shape[1]) if memory is None else memory
        tensors, values = [], []
        for rows in observations:
            distribution, memory, estimates = self._step(module, params, rows, memory)
            self._form, of_step = take_apart(distribution)
            tensors.append(of_step)
            values.append(estimates)
        estimated = [value for value in values if value is not None]
        return Unrolled(
            tuple(torch.stack(parts) for parts in zip(*tensors, strict=True)),
            torch.stack(estimated) if estimated else None,
            memory,
        )

    def choose(
        self, observation: ArrayLike, memory: Memory | None = None, rng: np.random.Generator | None = None
    ) -> tuple[Any, Memory]:
        self._take_shape(np.shape(observation))
        return super().choose(observation, memory, rng)

    @property
    def class_name(self) -> str:
        return type(self.__dict__["module"]).__name__

    def _own(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())

    def _is_stacked(self, params: Params) -> bool:
        name, param = next(iter(self.named_parameters()))
        return params[name].dim() > param.dim()

    def _take_shape(self, shape: tuple[int, ...]) -> None:
        if self.observation_shape is None:
            self.observation_shape = shape
        elif self.observation_shape != shape:
            raise ValueError(
                f"{self.class_name} is used on observations of the shape {self.observation_shape}, got {shape}"
            )

    @property
    def distributions(self) -> DistributionForm:  # type: ignore[override]
        """The distributions of the form that the module has returned; a RuntimeError before it has returned one."""
        if self._form is None:
            raise RuntimeError(
                f"the distribution of {self.class_name} is not known before its first forward pass; use "
                "policy.check_spaces(observation_space, action_space)"
            )
        return self._form

    def _call(self, module: nn.Module, params: Params, rows: Tensor) -> Distribution:
        """Return the distribution for observations (N, *shape), of batch shape (N,); at the first step of a trial."""
        return self._step(module, params, rows, self.initial_memory(len(rows)))[0]

    def _step(
        self, module: nn.Module, params: Params, rows: Tensor, memory: Memory
    ) -> tuple[Distribution, Memory, Tensor | None]:
        """Return the distribution for observations (N, *shape), of batch shape (N,), the next memory, and values."""
        if rows.is_floating_point():
            rows = rows.to(next(iter(params.values())).dtype)
        tensors: dict[str, Tensor] = {**dict(self.named_buffers()), **params}
        after: Memory = ()
        values: Tensor | None = None
        returned = _call_module(module, tensors, (rows, memory) if memory else (rows,))
        if memory:
            if not isinstance(returned, tuple) or len(returned) not in (2, 3):
                raise TypeError(
                    f"forward of {self.class_name}, which has a memory, must return (distribution, memory) or "
                    f"(distribution, memory, values), got a {type(returned).__name__}"
                )
            distribution, after = returned[:2]
            values = returned[2] if len(returned) == 3 else None
        else:
            distribution = returned
        if not isinstance(distribution, Distribution):
            raise TypeError(
                f"forward of {self.class_name} must return a torch.distributions.Distribution, got a "
                f"{type(distribution).__name__}; for a Gaussian return Independent(Normal(mean, std), 1)"
            )
        batch = distribution.batch_shape
        if batch[:1] != rows.shape[:1]:
            raise ValueError(
                f"forward of {self.class_name} must return a distribution whose batch shape begins with the number of "
                f"observations, {len(rows)}; got the batch shape {tuple(batch)}"
            )
        joint = distribution if len(batch) == 1 else Independent(distribution, len(batch) - 1, validate_args=False)
        return joint, after, values

    def _tensors_of(self, module: nn.Module, params: Params, rows: Tensor) -> DistributionParams:
        """Return the tensors (N, ...) of the distribution for observations (N, *shape)."""
        distribution = self._call(module, params, rows)
        self._form, tensors = take_apart(distribution)
        self.noise_kind, self.noise_size = self._form.noise_kind, noise_shape(distribution)[1:].numel()
        return tensors

    def _tensors_of_tasks(self, params: Params, rows: Tensor) -> DistributionParams:
        """Return the tensors (M, N, ...) for observations (M, N, *shape), each task under its own parameters."""
        module = _copy_structure(self.__dict__["module"])

        def of_task(theta: Params, observations: Tensor) -> DistributionParams:
            return self._tensors_of(module, theta, observations)

        if self._can_be_vmapped(rows[0]):
            tensors: DistributionParams = vmap(of_task)(dict(params), rows)
            return tensors
        each = [of_task(own, of_one) for own, of_one in zip(_unstack(params), rows, strict=True)]
        return tuple(torch.stack(parts) for parts in zip(*each, strict=True))

    def _can_be_vmapped(self, rows: Tensor) -> bool:
        """Return whether vmap allows the module; tried once, on observations (N, *shape)."""
        if self._allows_vmap is None:
            module, params = _copy_structure(self.__dict__["module"]), self.stack_parameters(2)
            try:
                vmap(lambda theta, rows: self._tensors_of(module, theta, rows))(params, torch.stack((rows, rows)))
                self._allows_vmap = True
            # Control flow that depends on the data, operations without a batching rule, and other causes. An error of
            # the module itself is raised again where it is called for each task.
            except Exception:
                self._allows_vmap = False
        return self._allows_vmap

    def _choose(self, distribution: Distribution, noise: Tensor) -> Tensor:
        if self.is_greedy:
            return mode(distribution)
        return sample_from_noise(distribution, noise.reshape(noise_shape(distribution)))


def _call_module(module: nn.Module, tensors: dict[str, Tensor], arguments: tuple[Any, ...]) -> Any:
    """Return what the module returns; a NonFiniteError if a parameter of its distribution is out of range."""
    try:
        return functional_call(module, tensors, arguments)
    except ValueError as error:
        if (match := _OUT_OF_RANGE.search(str(error))) is None:
            raise
        numbers = [float(number) for number in _NUMBER.findall(match["values"])]
        least, most = min(numbers, default=math.nan), max(numbers, default=math.nan)
        values = f"{least:g}" if least == most else f"between {least:g} and {most:g}"
        if any(math.isnan(number) for number in numbers):
            values = "NaN"
        raise NonFiniteError(
            f"the parameter {match['parameter']} of the distribution {match['distribution']} of "
            f"{type(module).__name__} is {values}, and must satisfy {match['constraint']}; keep it in its range in "
            "the module, as by torch.nn.functional.softplus, or use a smaller step size"
        ) from error


def unsaved(policy: Policy) -> dict[str, Any]:
    """Return, to be compared, the data of a policy besides its parameters and persistent buffers, by name."""
    saved, found = {*policy.state_dict(), *dict(policy.named_parameters())}, dict[str, Any]()
    modules = dict(policy.named_modules()) | {"": vars(policy).get("module", policy)}
    for path, module in modules.items():
        for name, value in (vars(module) | module._buffers).items():
            where = f"{path}.{name}" if path else name
            if isinstance(value, Tensor) and where not in saved:
                # With the tensor, so that no later one has its id. One of inference mode has no version.
                found[where] = id(value), None if value.is_inference() else value._version, value
            elif isinstance(value, np.ndarray):
                found[where] = value.tobytes()
            elif isinstance(value, bool | int | float | str) and name != "training":
                # Many updates set the mode, and layers whose actions depend on it are refused.
                found[where] = repr(value)
    return found


def as_policy(policy: nn.Module, observation_shape: Sequence[int] | None = None) -> Policy:
    """Return a policy as it is, and any other module as a `ModulePolicy`, which shares its parameters.

    Args:
        policy: maps observations to a distribution of actions.
        observation_shape: shape of one observation, if it is known.

    Raises:
        TypeError: If it is not a module.
        ValueError: If the module cannot be adapted to tasks; see `ModulePolicy`.
    """
    if not isinstance(policy, Policy):
        return ModulePolicy(policy, observation_shape)
    if isinstance(policy, ModulePolicy) and observation_shape is not None:
        policy._take_shape(tuple(observation_shape))
    return policy


def call_submodule(policy: nn.Module, name: str, params: Params, observations: Tensor) -> Tensor:
    """Call a part of a policy, such as a critic, under the parameters (k, ...) of each task.

    The part has a name as in `nn.Module.get_submodule`, and maps observations (N, ...) to a tensor (N, ...): here (k,
    N, ...) to (k, N, ...).
    """
    module, of_part = _copy_structure(policy.get_submodule(name)), within(params, f"{name}.")
    if observations.is_floating_point():
        observations = observations.to(next(iter(params.values())).dtype)
    buffers = dict(module.named_buffers())

    def call(of_task: Params, rows: Tensor) -> Tensor:
        outputs: Tensor = functional_call(module, {**buffers, **of_task}, (rows,))
        return outputs

    result: Tensor = vmap(call)(of_part, observations)
    return result


def _copy_structure(module: nn.Module) -> nn.Module:
    """Return a copy that shares its tensors: `functional_call` swaps tensors in place, and threads call it at once."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _unstack(params: Params) -> list[dict[str, Tensor]]:
    """Return the parameters of each task, as views."""
    return [dict(zip(params, values, strict=True)) for values in zip(*params.values(), strict=True)]


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"expected a policy, or a torch.nn.Module with forward(observations) -> torch.distributions.Distribution, "
            f"got {module!r}"
        )
    name = type(module).__name__
    params: Mapping[str, nn.Parameter] = dict(module.named_parameters())
    if not params:
        raise ValueError(f"{name} has no parameters, so that there is nothing to adapt; register some")
    for key, param in params.items():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {key!r} of {name} has no shape yet; call the module on an observation first")
        if not param.requires_grad:
            raise ValueError(f"parameter {key!r} of {name} is frozen; register it as a buffer, or let it be learned")
    if len({param.dtype for param in params.values()}) > 1:
        raise ValueError(f"parameters of {name} have several types; convert them with module.float()")
    for key, layer in module.named_modules():
        if layer.training and isinstance(layer, _DEPENDS_ON_BATCH):
            raise ValueError(
                f"layer {key!r} of {name} is a {type(layer).__name__} in training mode, so that actions would depend "
                "on chance or on other observations; call module.eval(), or leave it out"
            )
