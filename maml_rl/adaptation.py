"""The inner loop: gradient steps from common to task-specific parameters, for all tasks at once, and their rule.

phi_0 = theta, phi_{k+1} = phi_k - step_size_k * grad L_k(phi_k), where L_k is the inner loss on the episodes sampled
under phi_k. An `AdaptationRule` holds the loss, the step sizes and the parameters. `adapt` takes one step and is
differentiable by torch; `InnerLoop` takes several on a chunk of tasks, and gives products with the Jacobian of phi_K
in theta.

Source: Finn et al. 2017, https://arxiv.org/abs/1703.03400
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from maml_rl import functional
from maml_rl.config.config import Halving
from maml_rl.derivatives import (
    ChunkWorkers,
    Linearization,
    Loss,
    ParameterLayout,
    PhaseOutcome,
    PolicyOnSamples,
    chunks_of,
    scratch,
)
from maml_rl.episode.steps import Steps
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import Params, Policy, as_policy
from maml_rl.policies.policy import check_observations, check_parameters

# The policy's outputs on the samples of M tasks -> one loss per task, (M,).
InnerLoss = Callable[[PhaseOutcome], Tensor]
# The same -> the change of the logarithm of each task's divisor of advantages, (M,).
LogDivisor = Callable[[PhaseOutcome], Tensor]
# One for all parameters; or by name, for those that are adapted, each as a tensor that broadcasts to the parameter.
StepSize: TypeAlias = float | Mapping[str, float | Tensor]


def of_log_probs(loss: InnerLoss) -> InnerLoss:
    """Mark an inner loss that reads nothing but `log_probs` and `samples` of an outcome.

    The derivatives of the package's multi-layer perceptrons are then computed by hand, which is faster. Without the
    mark, a loss may use the distribution, the parameters and parts of the policy as well.
    """
    loss.__dict__["of_log_probs"] = True
    return loss


def is_of_log_probs(loss: InnerLoss) -> bool:
    """Return whether a loss is marked by `of_log_probs`."""
    return getattr(loss, "of_log_probs", False) is True


def dividing_by(log_divisor: LogDivisor) -> Callable[[InnerLoss], InnerLoss]:
    """Mark an inner loss whose advantages are divided by a number that depends on the parameters, too.

    A step itself does not change: where the episodes were sampled, the change of the divisor is 0. But its derivative
    becomes I - S (H - g u^T), where g is the gradient of the loss, H its Hessian, u the gradient of the logarithm of
    the divisor, and S the step sizes on a diagonal.

    Args:
        log_divisor: maps a `PhaseOutcome` of M tasks to the change of the logarithm of each task's divisor, (M,), since
            the episodes were sampled; it may read what `of_log_probs` allows.
    """

    def mark(loss: InnerLoss) -> InnerLoss:
        loss.__dict__["log_divisor"] = log_divisor
        return loss

    return mark


def log_divisor_of(loss: InnerLoss) -> LogDivisor | None:
    """Return what a loss is marked with by `dividing_by`; None for one whose divisors are constants."""
    return getattr(loss, "log_divisor", None)


@of_log_probs
def reinforce(outcome: PhaseOutcome) -> Tensor:
    """Return the inner loss of MAML, -mean(log pi(a|s) * A) over the real steps of each task, (M,)."""
    return functional.reinforce_loss(outcome.log_probs, outcome.samples.advantages, outcome.samples.mask)


class AdaptationRule:
    """How to compute the parameters of a task from its episodes: gradient steps on an inner loss.

    Sampling, meta-update, evaluation and saved policies take the same rule. A subclass with step sizes of its own
    (learned, say) overrides `step_size`. A rule is never changed in place, so that threads may share it.

    Args:
        step_size: one for all steps, one for each, or by parameter name (parameters without one are not adapted).
        halve: "never"; "once" for half the size from the second step on; "always" for half the size of the step before.
        parameters: names of the parameters that are adapted; None for all.
        inner_loss: maps a `PhaseOutcome` of M tasks to one loss per task, (M,): its log-probabilities, distribution,
            parameters, entropy, parts of the policy, and its samples with rewards, advantages and mask.

    Raises:
        ValueError: If step sizes by name come with `parameters`, or a step size is not a number of at least 0. Tensors,
            which may be learned, are not checked.
        TypeError: If the inner loss does not take one argument.

    Source: Finn et al. 2017, https://arxiv.org/abs/1703.03400, whose published protocol halves once
    """

    def __init__(
        self,
        step_size: float | Sequence[float] | Mapping[str, Tensor] = 0.1,
        *,
        halve: Halving = "never",
        parameters: Sequence[str] | None = None,
        inner_loss: InnerLoss = reinforce,
    ) -> None:
        if isinstance(step_size, Mapping) and parameters is not None:
            raise ValueError("step sizes by name already say which parameters are adapted; leave out `parameters`")
        _check_inner_loss(inner_loss)
        _check_step_size(step_size)
        self._step_size = step_size
        self.halve, self.inner_loss = halve, inner_loss
        self.parameters = None if parameters is None else tuple(parameters)

    def step_size(self, step: int) -> StepSize:
        """Return the size of gradient step `step`, from 0; a ValueError if there is one for each, and none for this."""
        factor = 0.5 ** min(step, {"never": 0, "once": 1, "always": step}[self.halve])
        if isinstance(self._step_size, Mapping):
            return {name: factor * size for name, size in self._step_size.items()}
        if isinstance(self._step_size, int | float):
            size = float(self._step_size)
        elif step < len(self._step_size):
            size = float(self._step_size[step])
        else:
            raise ValueError(
                f"expected at most {len(self._step_size)} inner steps, one for each of the step sizes "
                f"{list(self._step_size)}, got {step + 1}"
            )
        return size * factor if self.parameters is None else dict.fromkeys(self.parameters, size * factor)

    def step_sizes(self, num_steps: int) -> tuple[StepSize, ...]:
        """Return the size of each of `num_steps` gradient steps.

        Raises:
            ValueError: If `num_steps` is negative, or there is one step size for each of another number of steps.
        """
        if num_steps < 0:
            raise ValueError(f"the number of inner steps must not be negative, got {num_steps}")
        if isinstance(self._step_size, Sequence) and len(self._step_size) != num_steps:
            raise ValueError(
                f"expected the episodes of {len(self._step_size)} inner steps, one for each of the step sizes "
                f"{list(self._step_size)}, got {num_steps}"
            )
        return tuple(self.step_size(step) for step in range(num_steps))

    def replace(
        self,
        *,
        step_size: float | Sequence[float] | None = None,
        halve: Halving | None = None,
        inner_loss: InnerLoss | None = None,
    ) -> AdaptationRule:
        """Return the same rule with another step size, schedule or loss; None keeps the current one."""
        if inner_loss is not None:
            _check_inner_loss(inner_loss)
        if step_size is not None:
            _check_step_size(step_size)
        rule = copy.copy(self)
        rule._step_size = self._step_size if step_size is None else step_size
        rule.halve, rule.inner_loss = halve or self.halve, inner_loss or self.inner_loss
        return rule

    def name(self) -> str:
        """Name the inner loss and its parameters; episodes keep this, so that an update by another rule is refused."""
        loss = getattr(self.inner_loss, "__qualname__", repr(self.inner_loss))
        return loss if self.parameters is None else f"{loss} on {', '.join(self.parameters)}"


# Accepted wherever a rule is expected: step sizes mean plain gradient steps on the `reinforce` loss.
RuleLike: TypeAlias = AdaptationRule | float | Sequence[float]


def as_rule(rule: RuleLike) -> AdaptationRule:
    """Return a rule unchanged; turn step sizes into the plain rule."""
    return rule if isinstance(rule, AdaptationRule) else AdaptationRule(rule)


def adapt(
    policy: nn.Module,
    episodes: TaskEpisodes,
    params: Params | None = None,
    *,
    step_size: RuleLike | None = None,
    rule: RuleLike | None = None,
    step: int = 0,
    inner_loss: InnerLoss | None = None,
    first_order: bool = False,
    create_graph: bool | None = None,
) -> dict[str, Tensor]:
    """Take one gradient step for every task.

    Args:
        policy: a policy, or a module that `as_policy` takes; its own parameters stay as they are.
        episodes: (M, T, B, ...), with advantages; sampled under `params`.
        params: the initial ones: of the policy's own shapes, or stacked (M, ...); the policy's own by default.
        step_size: of the step, instead of a rule.
        rule: inner loss, step sizes and parameters; a number is a step size.
        step: which of the rule's steps this is, from 0.
        inner_loss: see `AdaptationRule`; by default the rule's.
        first_order: treat the inner gradient as a constant when differentiating the result.
        create_graph: whether the result is differentiable with respect to `params`; by default wherever torch
            records gradients and they ask for them. Without, the step is computed in chunks of tasks on all cores.

    Returns:
        {name: (M, ...)} the adapted parameters, on the device of the episodes.

    Raises:
        TypeError: If neither `step_size` nor `rule` is given, or both are.
        ValueError: If the episodes have no advantages, `params` do not fit the policy, or the rule adapts parameters
            that the policy does not adapt.
    """
    given_rule = step_size if rule is None else rule
    if given_rule is None or None not in (rule, step_size):
        raise TypeError("adapt expects either a step_size or a rule")
    chosen = as_rule(given_rule).replace(inner_loss=inner_loss)
    loss, size = chosen.inner_loss, chosen.step_size(step)
    check_advantages(episodes, "episodes")
    policy = as_policy(policy, episodes.observations.shape[3:])
    check_observations(policy, episodes.observations)
    only = getattr(policy, "adapts_only", ())
    if only and not (isinstance(size, Mapping) and size.keys() <= set(only)):
        raise ValueError(
            f"a {policy.class_name} adapts {', '.join(only)} alone; give the rule "
            f"that it was trained with, or one with parameters={list(only)}"
        )
    with torch.set_grad_enabled(torch.is_grad_enabled() if create_graph is None else create_graph):
        given = _start(policy, None) if params is None else check_parameters(policy, params)
        start = {name: param.to(episodes.device) for name, param in given.items()}
        stacked = policy.stack_parameters(len(episodes), start)
        learned = size.values() if isinstance(size, Mapping) else ()
        if not any(isinstance(x, Tensor) and x.requires_grad for x in (*stacked.values(), *learned)):
            return _adapt_in_chunks(policy, episodes, stacked, size, loss)
        dtype = next(iter(stacked.values())).dtype
        samples = Steps.of_tasks(episodes, slice(None), dtype=dtype, device=episodes.device)
        # Parameters without gradients of their own are adapted, too, by learned step sizes.
        stacked = {name: x if x.requires_grad else x.detach().requires_grad_() for name, x in stacked.items()}
        return inner_step(PhaseOutcome.of(policy, samples, stacked), loss, size, first_order=first_order)


def inner_step(
    outcome: PhaseOutcome, inner_loss: InnerLoss, step_size: StepSize, *, first_order: bool = False
) -> dict[str, Tensor]:
    """Move the parameters {name: (M, ...)} of M tasks against the gradient of their inner loss, differentiably.

    With `first_order` the gradient is a constant when the result is differentiated. A ValueError if a step size is for
    a name that is not one of the parameters.
    """
    params = outcome.params
    sizes = step_size if isinstance(step_size, Mapping) else dict.fromkeys(params, step_size)
    _check_names(sizes, params)
    gradients = torch.autograd.grad(
        inner_loss(outcome).sum(),
        [params[name] for name in sizes],
        create_graph=not first_order,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    if log_divisor := log_divisor_of(inner_loss):
        change = log_divisor(outcome)
        factor = torch.exp(-(change.detach() if first_order else change))
        gradients = tuple(factor.reshape(-1, *(1,) * (each.dim() - 1)) * each for each in gradients)
    stepped = {
        name: _descended(params[name], size, gradient)
        for (name, size), gradient in zip(sizes.items(), gradients, strict=True)
    }
    return {name: stepped.get(name, param) for name, param in params.items()}


def adapt_steps(
    policy: nn.Module,
    episodes: Sequence[TaskEpisodes],
    params: Params | None = None,
    *,
    rule: RuleLike,
    first_order: bool = False,
    create_graph: bool | None = None,
) -> dict[str, Tensor]:
    """Take one gradient step per batch of episodes, each from where the last one ended.

    The episodes of a step were sampled under the parameters before it. The rule may be one step size for all steps, or
    one for each. See `adapt` for the other arguments.

    Raises:
        ValueError: If there are no episodes, or not as many as step sizes.
    """
    if not episodes:
        raise ValueError("expected the episodes of at least one inner step, got none")
    rule = as_rule(rule)
    rule.step_sizes(len(episodes))
    for step, batch in enumerate(episodes):
        params = adapt(policy, batch, params, rule=rule, step=step, first_order=first_order, create_graph=create_graph)
    return dict(_start(policy, params))


def check_advantages(episodes: TaskEpisodes, name: str) -> None:
    """Refuse, by a ValueError, episodes without advantages; `name` says in the message which they are."""
    try:
        _ = episodes.advantages
    except RuntimeError as error:
        raise ValueError(f"{name} without advantages; call compute_advantages(baseline, gamma=...) first") from error


def check_phases(train: Sequence[TaskEpisodes], valid: TaskEpisodes, rule: AdaptationRule) -> None:
    """Refuse, by a ValueError, the phases of an update that have no advantages, or that `rule` did not sample."""
    for index, (episodes, step_size) in enumerate(zip(train, rule.step_sizes(len(train)), strict=True)):
        name = f"train_episodes[{index}]"
        check_advantages(episodes, name)
        for what, sampled, expected in (
            ("fast_lr", episodes.fast_lr, step_size),
            ("the inner loss", episodes.rule, rule.name()),
        ):
            if sampled is not None and sampled != expected:
                raise ValueError(
                    f"{name} were sampled for {what} {sampled}, but the metalearner adapts with {expected}; "
                    "give both the same"
                )
        if len(episodes) != len(valid):
            raise ValueError(f"{name} are of {len(episodes)} tasks, but valid_episodes of {len(valid)}")
    check_advantages(valid, "valid_episodes")


@dataclass(frozen=True, slots=True)
class _Step:
    """An inner step of k tasks, linearized.

    Attributes:
        linearization: of the inner loss.
        size: a number, or (D,) one for each parameter.
        divided: where the divisor of the advantages depends on the parameters: the factor (k, 1) by which the gradient
            is multiplied, 1 where the episodes were sampled; the gradient (k, D) without it; and the slope (k, D) of
            the logarithm of the divisor.
    """

    linearization: Linearization
    size: float | Tensor
    divided: tuple[Tensor, Tensor, Tensor] | None

    def multiply(self, vectors: Tensor, *, transposed: bool) -> Tensor:
        """Multiply (k, D) vectors by the derivative of the gradient that is descended, or by its transpose.

        A Hessian is symmetric, the term of a divisor is not.
        """
        product = self.linearization.hessian_product(vectors)
        if self.divided is None:
            return product
        factor, gradient, slope = self.divided
        one, other = (gradient, slope) if transposed else (slope, gradient)
        return factor * (product - (one * vectors).sum(1, keepdim=True) * other)


class Adaptation:
    """A chunk of tasks after the inner loop, and the Jacobian J of each task's parameters with respect to theta.

    J is the product of one factor I - S H per step, H the Hessian of its inner loss, which is symmetric, and S the step
    sizes on a diagonal; see `dividing_by` for the term of a divisor.
    """

    def __init__(self, trajectory: list[Tensor], steps: Sequence[_Step]) -> None:
        self.trajectory = trajectory
        self._steps = steps

    @property
    def parameters(self) -> Tensor:
        """The adapted parameters, (k, D)."""
        return self.trajectory[-1]

    def push_forward(self, vectors: Tensor) -> Tensor:
        """Return J v, (k, D): how the adapted parameters move when theta moves along `vectors` (k, D)."""
        for step in self._steps:
            vectors = vectors - step.size * step.multiply(vectors, transposed=False)
        return vectors

    def pull_back(self, vectors: Tensor) -> Tensor:
        """Return J^T v, (k, D): from gradients in the adapted parameters to gradients in theta."""
        for step in reversed(self._steps):
            if isinstance(step.size, Tensor):
                vectors = vectors - step.multiply(step.size * vectors, transposed=True)
            else:
                vectors = vectors - step.size * step.multiply(vectors, transposed=True)
        return vectors


class InnerLoop:
    """The inner loop of a chunk of k tasks.

    Args:
        steps: for each inner step the policy on its episodes.
        step_sizes: one for each: a number, or (D,) one for each parameter.
        inner_loss: see `AdaptationRule`; one that is not `of_log_probs` needs steps that are differentiated
            automatically.
        first_order: treat every Hessian, and so J - I, as zero.
    """

    def __init__(
        self,
        steps: Sequence[PolicyOnSamples],
        step_sizes: Sequence[float | Tensor],
        inner_loss: InnerLoss = reinforce,
        *,
        first_order: bool = False,
    ) -> None:
        self._steps = list(zip(steps, step_sizes, strict=True))
        # With the log-probabilities of the old policy, once they are known.
        self._samples = [step.samples for step in steps]
        self._inner_loss, self._first_order = inner_loss, first_order

    def run(self, start: Tensor, *, anchor: bool = False) -> Tensor:
        """Return the adapted parameters (k, D) from `start` (k, D); keep only what `anchor` needs, see `linearize`."""
        for index, (step, step_size) in enumerate(self._steps):
            gradient, _ = self._differentiate(index, step.at(start, scratch()), anchor=anchor)
            start = _descended(start, step_size, gradient)
        return start

    def linearize(self, start: Tensor, trajectory: list[Tensor] | None = None, *, anchor: bool = False) -> Adaptation:
        """Adapt from `start` (k, D), and keep what products with the Jacobian need.

        A known `trajectory`, phi_0 ... phi_K, is that along which it is computed. With `anchor` the log-probabilities
        of this pass are from now on those of the old policy, where none were recorded while sampling. An inner loss
        with a ratio is then a function of the parameters elsewhere, too.
        """
        if self._first_order:
            return Adaptation(trajectory or [start, self.run(start, anchor=anchor)], [])
        points, steps = [start], []
        for index, (step, step_size) in enumerate(self._steps):
            linearization = step.at(points[-1])
            gradient, divided = self._differentiate(index, linearization, twice=True, anchor=anchor)
            points.append(_descended(points[-1], step_size, gradient) if trajectory is None else trajectory[index + 1])
            steps.append(_Step(linearization, step_size, divided))
        return Adaptation(points, steps)

    def _differentiate(
        self,
        index: int,
        linearization: Linearization,
        *,
        twice: bool = False,
        anchor: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """Return the gradient that is descended, (k, D), and with `twice` what its derivative needs besides."""
        if anchor and (samples := self._steps[index][0].samples).log_probs is None:
            self._samples[index] = replace(samples, log_probs=linearization.log_probs.clone())
        samples = self._samples[index]

        def of_log_probs(function: InnerLoss) -> Loss:
            return lambda log_probs: function(linearization.outcome(samples, log_probs))

        log_divisor, change, slope = log_divisor_of(self._inner_loss), None, None
        if log_divisor is not None:
            # Before the loss, of which the linearization keeps more.
            change, slope = (
                linearization.differentiate(of_log_probs(log_divisor))
                if twice
                else (of_log_probs(log_divisor)(linearization.log_probs), None)
            )
        _, gradient = linearization.differentiate(of_log_probs(self._inner_loss), twice=twice)
        if change is None:
            return gradient, None
        factor = torch.exp(-change).unsqueeze(1)
        return factor * gradient, None if slope is None else (factor, gradient, slope)


def _descended(params: Tensor, step_size: float | Tensor, gradient: Tensor) -> Tensor:
    """Return the parameters, of any shape, after one inner step."""
    size = step_size.to(gradient.device) if isinstance(step_size, Tensor) else step_size
    return params - size * gradient


def flat_step_size(step_size: StepSize, layout: ParameterLayout, like: Tensor) -> float | Tensor:
    """Return a number unchanged; step sizes by name as a vector (D,), zero where a parameter is not adapted."""
    if not isinstance(step_size, Mapping):
        return step_size
    _check_names(step_size, layout.shapes)
    flat = torch.zeros(layout.size, dtype=like.dtype, device=like.device)
    for name, view in layout.views(flat).items():
        size = step_size.get(name, 0.0)
        view.copy_(size.detach() if isinstance(size, Tensor) else view.new_tensor(size))
    return flat


def _check_step_size(step_size: Any) -> None:
    sizes: list[Any] = [step_size]
    if isinstance(step_size, Mapping):
        sizes = [size for size in step_size.values() if not isinstance(size, Tensor)]
    elif isinstance(step_size, Sequence) and not isinstance(step_size, str):
        sizes = list(step_size)
    for size in sizes:
        if not isinstance(size, int | float) or isinstance(size, bool) or not 0.0 <= size < math.inf:
            raise ValueError(f"a step size must be a number of at least 0, got {size!r}")


def _check_inner_loss(loss: InnerLoss) -> None:
    try:
        inspect.signature(loss).bind(None)
    except TypeError:
        raise TypeError(
            f"an inner loss takes one argument, a PhaseOutcome with log_probs, samples, distribution and params; "
            f"{getattr(loss, '__qualname__', repr(loss))} takes {inspect.signature(loss)}"
        ) from None
    except ValueError:
        pass  # Functions written in C have no signature.


def _check_names(names: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"the rule adapts {', '.join(unknown)}, but the policy's parameters are {', '.join(known)}")


def _start(policy: nn.Module, params: Params | None) -> Params:
    return dict(policy.named_parameters()) if params is None else params


def _adapt_in_chunks(
    policy: Policy, episodes: TaskEpisodes, stacked: Params, step_size: StepSize, inner_loss: InnerLoss
) -> dict[str, Tensor]:
    layout = ParameterLayout(policy)
    start = layout.flatten(stacked)
    size = flat_step_size(step_size, layout, start)

    def adapt_chunk(tasks: slice) -> Tensor:
        samples = Steps.of_tasks(episodes, tasks, dtype=start.dtype, device=start.device)
        step = PolicyOnSamples(policy, layout, samples, automatic=not is_of_log_probs(inner_loss))
        return InnerLoop([step], [size], inner_loss).run(start[tasks])

    chunks = chunks_of([episodes], layout.width, start.device)
    with ChunkWorkers(start.device) as workers:
        adapted = torch.cat(workers.map(adapt_chunk, chunks))
    return {name: param.contiguous() for name, param in layout.views(adapted).items()}
