"""The effect of more iterations of conjugate gradients: `python -m benchmarks.directions`, tables of docs/notes.

A trust-region step is computed from the episodes of one batch of tasks, and its loss and divergence are measured on
them and on the episodes of another batch, sampled with the same parameters. A gain only on its own episodes is fitted
to their noise.
"""

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from maml_rl.cli.console import Parser
from maml_rl.config import Config, load_config
from maml_rl.config.catalog import find_config
from maml_rl.derivatives import ThreadHosts
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.metalearners import MAMLTRPO
from maml_rl.metalearners.collection import Batch
from maml_rl.metalearners.losses import surrogate
from maml_rl.metalearners.meta_objective import MetaObjective
from maml_rl.metalearners.trust_region import longest_step
from maml_rl.policies import Policy

ITERATIONS = (1, 2, 3, 5, 7, 10, 20)


@dataclass(frozen=True, slots=True)
class Step:
    """One step, before the line search.

    Attributes:
        iterations: of conjugate gradients.
        damping: of the curvature.
        predicted: change of the loss to first order, gradient times step, on the step's own episodes.
        own: measured change of the loss on them.
        own_kl: mean KL(old, new) on them.
        other: change of the loss on other episodes.
        other_kl: mean KL(old, new) on those.
        rounded: relative distance between this step and that of float64 gradients and products.
    """

    iterations: int
    damping: float
    predicted: float
    own: float
    own_kl: float
    other: float
    other_kl: float
    rounded: float


def steps(config: Config, updates: int, dampings: Sequence[float] | None = None, *, after: int = 1) -> Iterator[Step]:
    """Train, and yield a step for each number of iterations before each of some meta-updates.

    Args:
        config: of MAML-TRPO.
        updates: number of meta-updates that are inspected.
        dampings: a step is computed for each of them; the config's by default.
        after: number of meta-updates before the first that is inspected.

    Raises:
        TypeError: If the algorithm has no trust region.
    """
    experiment = make_experiment(config)
    learner = experiment.metalearner
    if not isinstance(learner, MAMLTRPO):
        raise TypeError(f"the algorithm {config.algorithm} has no trust region; use maml-trpo")
    with experiment.make_sampler() as sampler:

        def sample() -> Batch:
            return learner.collect(sampler, sampler.sample_tasks(config.meta_batch_size))

        for update in range(after + updates):
            batch = sample()
            if update >= after:
                yield from _steps(learner, batch, sample(), dampings or [learner.settings.cg_damping])
            learner.update(batch)


def _steps(learner: MAMLTRPO, own_batch: Batch, other_batch: Batch, dampings: Sequence[float]) -> Iterator[Step]:
    settings, exact_policy = learner.settings, copy.deepcopy(learner.policy).double()
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
                _directions(objective, slope, damping, settings.max_kl)
                for objective, slope in ((own, gradient), (exact, exact_gradient))
            )
            for iterations, step, exact_step in zip(ITERATIONS, rounded, unrounded, strict=True):
                own_there, own_kl = own.evaluate(theta + step)
                other_there, other_kl = other.evaluate(theta + step)
                yield Step(
                    iterations,
                    damping,
                    torch.dot(gradient, step).item(),
                    own_there - own_loss,
                    own_kl,
                    other_there - other_loss,
                    other_kl,
                    ((step - exact_step).norm() / exact_step.norm()).item(),
                )


def _directions(objective: MetaObjective, gradient: Tensor, damping: float, max_kl: float) -> list[Tensor]:
    """Return the step of every number of iterations; the shorter ones reuse the products of the longest."""
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

    return [of(iterations) for iterations in ITERATIONS]


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
    parser.add_argument("--updates", type=int, default=3, help="meta-updates of each training to look at")
    parser.add_argument("--after", type=int, default=1, help="meta-updates before the first of these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the trainings")
    parser.add_argument("--dampings", type=float, nargs="+", help="of the curvature; the config's if not given")
    parser.add_argument("--num-workers", type=int, help="worker processes; one for each core if not given")
    options = parser.parse_args(arguments)
    try:
        config = load_config(find_config(options.config)).override({"num-workers": options.num_workers})
    except ConfigError as error:
        parser.error(str(error))
    found = [
        step
        for seed in options.seeds
        for step in steps(config.override({"seed": seed}), options.updates, options.dampings, after=options.after)
    ]
    print("| damping | iterations | promised | gained | KL | gained on other episodes | KL there | rounding |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for damping, iterations in dict.fromkeys((step.damping, step.iterations) for step in found):
        of_these = [step for step in found if (step.damping, step.iterations) == (damping, iterations)]
        gains = [
            -1000.0 * np.mean([getattr(step, name) for step in of_these]) for name in ("predicted", "own", "other")
        ]
        own_kl, other_kl = (np.mean([getattr(step, name) for step in of_these]) for name in ("own_kl", "other_kl"))
        promised, own, other = (f"{gain:.1f}" for gain in gains)
        rounded = np.mean([step.rounded for step in of_these])
        print(
            f"| {damping:g} | {iterations} | {promised} | {own} | {own_kl:.4f} | {other} | {other_kl:.4f} |",
            f"{rounded:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
