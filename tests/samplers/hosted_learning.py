"""Iterations of an algorithm in any placement, and everything in them that must have the same bytes."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from maml_rl import MultiTaskSampler
from maml_rl.config import Config
from maml_rl.config.yaml_source import Mapping
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import count_steps, digest_of, policy_spread
from maml_rl.samplers.remote_store import RemoteStore

NUM_TASKS = 9
# Settings that algorithms with trials need.
OF_TRIALS: dict[str, dict[str, Any]] = {
    "rl2": {
        "observe-last": True,
        "max-episode-steps": 6,
        "algorithm-settings": {"hidden-size": 8, "num-minibatches": 2, "num-epochs": 2},
    },
    "varibad": {
        "observe-last": True,
        "max-episode-steps": 6,
        "algorithm-settings": {"encoder-size": 8, "num-minibatches": 2, "num-epochs": 2, "belief-trials": 4},
    },
}


@dataclass
class Learned:
    """The results of some iterations.

    Attributes:
        metrics: of each.
        state: bytes of the parameters and of the learner's state.
    """

    metrics: list[dict[str, Any]]
    state: dict[str, Any]


def config_of(algorithm: str, **settings: Any) -> Config:
    values = {
        "env-name": "2DNavigation-v0",
        "algorithm": algorithm,
        "max-episode-steps": 24,
        "fast-batch-size": 4,
        "meta-batch-size": NUM_TASKS,
        **({} if algorithm == "rl2" else {"hidden-sizes": [16]}),
        "num-batches": 3,
        "num-workers": 0,
        **OF_TRIALS.get(algorithm, {}),
        **settings,
    }
    return Config.from_mapping(Mapping("the test", values))


def learn(experiment: Experiment, sampler: MultiTaskSampler, iterations: int, *, on_hosts: bool) -> Learned:
    """Train an experiment's learner from its start with a sampler, which may be that of another experiment."""
    learner = experiment.metalearner
    sampler.policy = learner.policy
    sampler.seek(-1)
    metrics = []
    for number in range(iterations):
        batch = learner.collect(sampler, sampler.sample_tasks(NUM_TASKS))
        assert isinstance(batch, RemoteStore) == on_hosts
        found = {
            "steps": count_steps(batch),
            **policy_spread(learner.policy, batch),
            "returns": learner.returns(batch).numpy().tobytes(),
            "infos": {name: info.numpy().tobytes() for name, info in learner.infos(batch).items()},
            "digest": digest_of(batch),
        }
        metrics.append(found | learner.learn(batch, number))
    state = {**learner.policy.state_dict(), **learner.state_dict()}
    return Learned(metrics, {name: _bytes(value) for name, value in state.items()})


def learned_here(algorithm: str, iterations: int = 2, **settings: Any) -> Learned:
    """Return the results in this process."""
    experiment = make_experiment(config_of(algorithm, **settings))
    with make_sampler(experiment) as sampler:
        return learn(experiment, sampler, iterations, on_hosts=False)


# Computed once in a process, for tests with the same chunks.
learned_once = cache(learned_here)


def _bytes(value: Any) -> Any:
    return value.detach().numpy().tobytes() if isinstance(value, torch.Tensor) else value
