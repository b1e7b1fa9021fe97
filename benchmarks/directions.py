"""What more iterations of conjugate gradients bring: `python -m benchmarks.directions`, a table of docs/performance.md.

A trust-region step is computed from the episodes of one batch of tasks, and its loss and divergence are measured on
them and on the episodes of another batch, sampled with the same parameters. What a step gains on its own episodes
alone, it has learned from their noise.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from maml_rl.cli.console import Parser
from maml_rl.config import Config, load_config
from maml_rl.config.catalog import find_config
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.metalearners import MAMLTRPO
from maml_rl.metalearners.meta_objective import MetaObjective
from maml_rl.metalearners.metalearner import Batch
from maml_rl.metalearners.objectives import surrogate
from maml_rl.metalearners.trust_region import longest_step

ITERATIONS = (1, 2, 3, 5, 7, 10)


@dataclass(frozen=True, slots=True)
class Step:
    """One step, before the line search.

    Attributes:
        iterations: of conjugate gradients.
        predicted: change of the loss that gradient and step promise, on the step's own episodes.
        own: change of the loss there.
        own_kl: mean KL(old, new) there.
        other: change of the loss on other episodes.
        other_kl: mean KL(old, new) there.
    """

    iterations: int
    predicted: float
    own: float
    own_kl: float
    other: float
    other_kl: float


def steps(config: Config, updates: int) -> Iterator[Step]:
    """Train for `updates` meta-updates; yield a step for each number of iterations, before every update but the first.

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

        for update in range(updates + 1):
            batch = sample()
            if update:
                yield from _steps(learner, batch, sample())
            learner.update(batch)


def _steps(learner: MAMLTRPO, own_batch: Batch, other_batch: Batch) -> Iterator[Step]:
    settings = learner.settings
    with _objective(learner, own_batch) as own, _objective(learner, other_batch) as other:
        theta = own.initial_parameters()
        for objective in (own, other):
            objective.anchor(theta)
        own_loss, gradient = own.gradient(theta)
        other_loss, _ = other.gradient(theta)
        for iterations in ITERATIONS:
            step = longest_step(
                own.curvature_product,
                gradient,
                iterations=iterations,
                damping=settings.cg_damping,
                max_kl=settings.max_kl,
            )
            own_there, own_kl = own.evaluate(theta + step)
            other_there, other_kl = other.evaluate(theta + step)
            predicted = torch.dot(gradient, step).item()
            yield Step(iterations, predicted, own_there - own_loss, own_kl, other_there - other_loss, other_kl)


def _objective(learner: MAMLTRPO, batch: Batch) -> MetaObjective:
    return MetaObjective(
        learner.policy,
        batch.train_episodes,
        batch.valid_episodes,
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
    parser.add_argument("--updates", type=int, default=3, help="meta-updates of each training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the trainings")
    parser.add_argument("--num-workers", type=int, help="worker processes; one for each core if not given")
    options = parser.parse_args(arguments)
    try:
        config = load_config(find_config(options.config)).override({"num-workers": options.num_workers})
    except ConfigError as error:
        parser.error(str(error))
    found = [step for seed in options.seeds for step in steps(config.override({"seed": seed}), options.updates)]
    print("| iterations | promised | gained | KL | gained on other episodes | KL there |")
    print("|---:|---:|---:|---:|---:|---:|")
    for iterations in ITERATIONS:
        of_these = [step for step in found if step.iterations == iterations]
        gains = [
            -1000.0 * np.mean([getattr(step, name) for step in of_these]) for name in ("predicted", "own", "other")
        ]
        own_kl, other_kl = (np.mean([getattr(step, name) for step in of_these]) for name in ("own_kl", "other_kl"))
        promised, own, other = (f"{gain:.1f}" for gain in gains)
        print(f"| {iterations} | {promised} | {own} | {own_kl:.4f} | {other} | {other_kl:.4f} |", flush=True)


if __name__ == "__main__":
    main()
