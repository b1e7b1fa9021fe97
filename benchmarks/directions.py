"""The effect of more iterations of conjugate gradients: `python -m benchmarks.directions`, tables of docs/notes.

A trust-region step is computed from the episodes of one batch of tasks, and its loss and divergence are measured on
them and on the episodes of another batch, sampled with the same parameters. A gain only on its own episodes is fitted
to their noise.
"""

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from maml_rl.cli.console import Parser
from maml_rl.config import Config, load_config
from maml_rl.config.catalog import find_config, find_run
from maml_rl.derivatives import ParameterLayout, ThreadHosts
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.metalearners import MAMLTRPO
from maml_rl.metalearners.autograd_objective import AutogradObjective
from maml_rl.metalearners.collection import Batch
from maml_rl.metalearners.losses import divergence, surrogate
from maml_rl.metalearners.meta_objective import MetaObjective
from maml_rl.metalearners.trust_region import longest_step
from maml_rl.policies import Policy
from maml_rl.runs.run_folder import CONFIG

ITERATIONS = (1, 2, 3, 5, 7, 10, 20)


@dataclass(frozen=True, slots=True)
class Step:
    """One step, before the line search.

    Attributes:
        products: how products with the curvature are computed, "exact" or "differences".
        iterations: of conjugate gradients.
        damping: of the curvature.
        predicted: change of the loss to first order, gradient times step, on the step's own episodes.
        own: measured change of the loss on them.
        own_kl: mean KL(old, new) on them.
        other: change of the loss on other episodes.
        other_kl: mean KL(old, new) on those.
        rounded: relative distance between this step and that of exact float64 gradients and products.
    """

    products: str
    iterations: int
    damping: float
    predicted: float
    own: float
    own_kl: float
    other: float
    other_kl: float
    rounded: float


def steps(
    config: Config,
    updates: int,
    dampings: Sequence[float] | None = None,
    *,
    after: int = 1,
    run: Path | None = None,
    differences: bool = False,
) -> Iterator[Step]:
    """Train, and yield a step for each number of iterations before each of some meta-updates.

    Args:
        config: of MAML-TRPO.
        updates: number of meta-updates that are inspected.
        dampings: a step is computed for each of them; the config's by default.
        after: number of meta-updates before the first that is inspected.
        run: with whose newest parameters to begin.
        differences: whether to yield also the step with the config's number of iterations and with the products of
            Finn et al.'s code.

    Raises:
        TypeError: If the algorithm has no trust region.
    """
    experiment = make_experiment(config)
    learner = experiment.metalearner
    if not isinstance(learner, MAMLTRPO):
        raise TypeError(f"the algorithm {config.algorithm} has no trust region; use maml-trpo")
    if run is not None:
        experiment.restore("last", run)
    with experiment.make_sampler() as sampler:

        def sample() -> Batch:
            return learner.collect(sampler, sampler.sample_tasks(config.meta_batch_size))

        for update in range(after + updates):
            batch = sample()
            if update >= after:
                of_update = dampings or [learner.settings.cg_damping]
                yield from _steps(learner, batch, sample(), of_update, differences=differences)
            learner.update(batch)


def _steps(
    learner: MAMLTRPO, own_batch: Batch, other_batch: Batch, dampings: Sequence[float], *, differences: bool
) -> Iterator[Step]:
    settings, exact_policy = learner.settings, copy.deepcopy(learner.policy).double()
    numbers = sorted({*ITERATIONS, settings.cg_iters})
    with (
        _objective(learner, learner.policy, own_batch) as own,
        _objective(learner, learner.policy, other_batch) as other,
        _objective(learner, exact_policy, own_batch) as exact,
    ):
        theta = own.initial_parameters()
        for objective in (own, other, exact):
            objective.anchor(theta)
        own_loss, gradient = own.gradient(theta)
        other_loss, _ = other.gradient(theta)
        _, exact_gradient = exact.gradient(theta)
        for damping in dampings:
            rounded, unrounded = (
                _directions(objective, slope, numbers, damping, settings.max_kl)
                for objective, slope in ((own, gradient), (exact, exact_gradient))
            )
            found = [("exact", *each) for each in zip(numbers, rounded, unrounded, strict=True)]
            if differences:
                step = longest_step(
                    _differences(learner, own_batch, theta, own),
                    gradient,
                    iterations=settings.cg_iters,
                    damping=damping,
                    max_kl=settings.max_kl,
                )
                found.append(("differences", settings.cg_iters, step, unrounded[numbers.index(settings.cg_iters)]))
            for products, iterations, step, exact_step in found:
                own_there, own_kl = own.evaluate(theta + step)
                other_there, other_kl = other.evaluate(theta + step)
                yield Step(
                    products,
                    iterations,
                    damping,
                    torch.dot(gradient, step).item(),
                    own_there - own_loss,
                    own_kl,
                    other_there - other_loss,
                    other_kl,
                    ((step - exact_step).norm() / exact_step.norm()).item(),
                )


def _directions(
    objective: MetaObjective, gradient: Tensor, numbers: Sequence[int], damping: float, max_kl: float
) -> list[Tensor]:
    """Return the step of each of the numbers of iterations; the shorter ones reuse the products of the longest."""
    images: list[Tensor] = []

    def of(iterations: int) -> Tensor:
        known = iter(images.copy())

        def product(vector: Tensor) -> Tensor:
            image = next(known, None)
            if image is None:
                image = objective.curvature_product(vector)
                images.append(image)
            return image

        return longest_step(product, gradient, iterations=iterations, damping=damping, max_kl=max_kl)

    return [of(iterations) for iterations in numbers]


def _differences(
    learner: MAMLTRPO, batch: Batch, theta: Tensor, objective: MetaObjective
) -> Callable[[Tensor], Tensor]:
    """Return the products of Finn et al.'s code: symmetric differences of the divergence's gradient.

    It is differentiated at theta + eps v and theta - eps v, with eps = 1 / |theta|, whatever the length of v.
    """
    kl = AutogradObjective(
        learner.policy,
        batch.phases,
        rule=learner.rule,
        objective=lambda new, old: divergence(new[-1], old[-1]),
        device=learner.device,
    )
    kl.anchor()
    layout, eps = ParameterLayout(learner.policy), 1.0 / float(torch.linalg.vector_norm(theta))

    def gradient_at(params: Tensor) -> Tensor:
        objective.write_to_policy(params)
        kl.backward()
        gradients = {name: cast(Tensor, param.grad) for name, param in learner.policy.named_parameters()}
        return layout.flatten(gradients).to("cpu", torch.float64)

    def product(vector: Tensor) -> Tensor:
        difference = gradient_at(theta + eps * vector) - gradient_at(theta - eps * vector)
        objective.write_to_policy(theta)
        return difference / (2.0 * eps)

    return product


def _objective(learner: MAMLTRPO, policy: Policy, batch: Batch) -> MetaObjective:
    return MetaObjective(
        policy,
        ThreadHosts(batch.phases, policy, learner.device),
        rule=learner.rule,
        objective=surrogate,
        device=learner.device,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = Parser(
        description=(__doc__ or "").partition(":")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--config", default="finn2017/2d-navigation", help="name or path of a config of MAML-TRPO")
    parser.add_argument("--run", help="run, or zoo:NAME, with whose newest parameters to begin, and its config")
    parser.add_argument(
        "--differences", action="store_true", help="also a step by finite differences, as Finn et al.'s"
    )
    parser.add_argument("--updates", type=int, default=3, help="meta-updates of each training to look at")
    parser.add_argument("--after", type=int, default=1, help="meta-updates before the first of these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the trainings")
    parser.add_argument("--dampings", type=float, nargs="+", help="of the curvature; the config's if not given")
    parser.add_argument("--num-workers", type=int, help="worker processes; one for each core if not given")
    options = parser.parse_args(arguments)
    try:
        run = None if options.run is None else find_run(options.run)
        path = find_config(options.config) if run is None else run / CONFIG
        config = load_config(path).override({"num-workers": options.num_workers})
    except ConfigError as error:
        parser.error(str(error))
    found = [
        step
        for seed in options.seeds
        for step in steps(
            config.override({"seed": seed}),
            options.updates,
            options.dampings,
            after=options.after,
            run=run,
            differences=options.differences,
        )
    ]
    print(
        "| products | damping | iterations | promised | gained | KL | gained on other episodes | KL there | rounding |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for kind in dict.fromkeys((step.products, step.damping, step.iterations) for step in found):
        of_these = [step for step in found if (step.products, step.damping, step.iterations) == kind]
        products, damping, iterations = kind
        gains = [
            -1000.0 * np.mean([getattr(step, name) for step in of_these]) for name in ("predicted", "own", "other")
        ]
        own_kl, other_kl = (np.mean([getattr(step, name) for step in of_these]) for name in ("own_kl", "other_kl"))
        promised, own, other = (f"{gain:.1f}" for gain in gains)
        rounded = np.mean([step.rounded for step in of_these])
        print(
            f"| {products} | {damping:g} | {iterations} | {promised} | {own} | {own_kl:.4f} |",
            f"{other} | {other_kl:.4f} | {rounded:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
