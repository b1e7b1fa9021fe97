"""Returns of MAML-TRPO's meta-updates on new episodes: `python -m benchmarks.stale_episodes`, for docs/notes.

A meta-update is computed from episodes of the old policy. Here its new policy adapts to further episodes of the old
one, as the surrogate assumes, and to its own episodes, as in practice. The training continues with one of the inner
losses; at the inspected meta-updates both take a step from the same parameters and episodes.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from maml_rl.adaptation import adapt
from maml_rl.cli.console import Parser
from maml_rl.config import Config, load_config
from maml_rl.config.catalog import find_config
from maml_rl.envs.meta_env import Task
from maml_rl.episode import TaskEpisodes
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.functional import masked_mean
from maml_rl.metalearners import MAMLTRPO
from maml_rl.metalearners.maml_trpo import INNER_LOSSES
from maml_rl.samplers import MultiTaskSampler

# Number of draws over which returns are averaged.
_DRAWS = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """The effect of one meta-update.

    Attributes:
        update: number of the meta-update, from 0.
        inner_loss: the loss that it was computed with.
        kl: mean KL(old, new) of the policy before adaptation, on episodes of the old one.
        before: change of the return before adaptation.
        stale: change of the return after adaptation to episodes of the old policy.
        fresh: change of the return after adaptation to the policy's own episodes.
    """

    update: int
    inner_loss: str
    kl: float
    before: float
    stale: float
    fresh: float


def outcomes(config: Config, updates: Sequence[int]) -> Iterator[Outcome]:
    """Train, and yield the effect of a step with each inner loss at the meta-updates with these numbers.

    Raises:
        TypeError: If the algorithm is not MAML-TRPO.
    """
    experiment = make_experiment(config)
    learner = experiment.metalearner
    if not isinstance(learner, MAMLTRPO):
        raise TypeError(f"the algorithm {config.algorithm} has no choice of an inner loss; use maml-trpo")
    own = learner.settings.inner_loss
    with experiment.make_sampler() as sampler:
        for update in range(max(updates) + 1):
            sampler.seek(update - 1)
            tasks = sampler.sample_tasks(config.meta_batch_size)
            for name in INNER_LOSSES if update in updates else ():
                yield _outcome(experiment, learner, sampler, tasks, update, name)
            learner.rule = learner.rule.replace(inner_loss=INNER_LOSSES[own])
            sampler.seek(update - 1)
            learner.update(learner.collect(sampler, sampler.sample_tasks(config.meta_batch_size)))


def _outcome(
    experiment: Experiment,
    learner: MAMLTRPO,
    sampler: MultiTaskSampler,
    tasks: Sequence[Task],
    update: int,
    name: str,
) -> Outcome:
    policy = learner.policy
    old = {key: value.clone() for key, value in policy.state_dict().items()}
    learner.rule = learner.rule.replace(inner_loss=INNER_LOSSES[name])
    sampler.seek(update - 1)
    batch = learner.collect(sampler, sampler.sample_tasks(len(tasks)))
    ours = [_phase_zero(experiment, sampler, tasks) for _ in range(_DRAWS)]
    before = _returns(ours), _after(learner, sampler, tasks, ours)
    seen = ours[0]
    with torch.no_grad():
        old_distribution = policy.distribution_parameters(seen.observations)
        learner.update(batch)
        kl = masked_mean(
            policy.distributions.kl(old_distribution, policy.distribution_parameters(seen.observations)), seen.mask
        )
    theirs = [_phase_zero(experiment, sampler, tasks) for _ in range(_DRAWS)]
    stale, fresh = (_after(learner, sampler, tasks, episodes) for episodes in (ours, theirs))
    moved = _returns(theirs) - before[0]
    policy.load_state_dict(old)
    return Outcome(update, name, float(kl.mean()), moved, stale - before[1], fresh - before[1])


def _phase_zero(experiment: Experiment, sampler: MultiTaskSampler, tasks: Sequence[Task]) -> TaskEpisodes:
    episodes, collection = sampler.rollout(tasks), experiment.metalearner.collection
    episodes.compute_advantages(
        experiment.baseline,
        gamma=collection.gamma,
        gae_lambda=collection.gae_lambda,
        bootstrap=collection.bootstrap,
    )
    return episodes


def _after(learner: MAMLTRPO, sampler: MultiTaskSampler, tasks: Sequence[Task], draws: Sequence[TaskEpisodes]) -> float:
    """Return the mean return after one step on each of these draws."""
    return _returns(
        [
            sampler.rollout(tasks, adapt(learner.policy, episodes, rule=learner.rule, create_graph=False))
            for episodes in draws
        ]
    )


def _returns(draws: Sequence[TaskEpisodes]) -> float:
    return float(np.mean([float(episodes.episode_returns().double().mean()) for episodes in draws]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = Parser(
        description=(__doc__ or "").partition(":")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--config", default="maml/2d-navigation", help="name or path of a config of MAML-TRPO")
    parser.add_argument("--inner-loss", default="log-probability", choices=INNER_LOSSES, help="of the training")
    parser.add_argument("--updates", type=int, nargs="+", default=[8, 11, 12, 13, 15, 17], help="to look at")
    parser.add_argument("--seed", type=int, default=11, help="of the training")
    parser.add_argument("--output-scale", type=float, default=1.0, help="of the first policy")
    parser.add_argument("--num-workers", type=int, help="worker processes; one for each core if not given")
    options = parser.parse_args(arguments)
    config = load_config(find_config(options.config)).override(
        {
            "num-workers": options.num_workers,
            "seed": options.seed,
            "inner-loss": options.inner_loss,
            "output-scale": options.output_scale,
        }
    )
    print("| meta-update | inner loss | KL before adaptation | before | after, old episodes | after, new episodes |")
    print("|---:|---|---:|---:|---:|---:|")
    for one in outcomes(config, options.updates):
        changes = " | ".join(f"{change:+.1f}" for change in (one.before, one.stale, one.fresh))
        print(f"| {one.update} | {one.inner_loss} | {one.kl:.3f} | {changes} |", flush=True)


if __name__ == "__main__":
    main()
