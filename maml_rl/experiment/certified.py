"""Certified benchmarks: held-out tasks that are part of the package, and how a policy is measured on them.

A benchmark fixes the family, the length of an episode, the tasks, how many episodes of a task come before the ones that
count, and how often each task is adapted to. Its tasks are a file whose SHA-256 is in `certified/benchmarks.json`.
"""

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maml_rl.arguments import suggest
from maml_rl.envs.make_env import make_vector_env
from maml_rl.envs.meta_env import Task
from maml_rl.envs.tasks import family_of, task_key
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import Experiment
from maml_rl.experiment.evaluate import FREE, evaluate_trials
from maml_rl.foreign_files import read_regular
from maml_rl.policies import Policy
from maml_rl.policies.external_policy import ForeignPolicy
from maml_rl.results.evaluation import Evaluation
from maml_rl.task_distributions.task_files import read_tasks

FOLDER = Path(__file__).resolve().parents[1] / "certified"
REGISTRY = FOLDER / "benchmarks.json"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Tasks and rules for comparing policies.

    Attributes:
        name: ends with its version; another task or rule is another version.
        description: one sentence.
        env_name: the family.
        env_kwargs: of its environments.
        max_episode_steps: the length of an episode.
        episodes_before: largest number of episodes of a task before those that count, which are the episodes after the
            last step of adaptation, or the last episode of a trial.
        repetitions: how often each task is adapted to, each time from the start.
        sha256: of the file of tasks.
    """

    name: str
    description: str
    env_name: str
    env_kwargs: Mapping[str, Any]
    max_episode_steps: int
    episodes_before: int
    repetitions: int
    sha256: str

    @property
    def file(self) -> Path:
        """The file of its tasks."""
        return FOLDER / f"{self.name}.json"

    def tasks(self) -> list[Task]:
        """Return the tasks."""
        try:
            content = read_regular(self.file)
        except OSError as error:
            raise ConfigError(
                f"cannot read the tasks of {self.name} in {self.file} ({error.strerror}); install again"
            ) from error
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise ConfigError(
                f"{self.file} does not hold the certified tasks of {self.name}, its SHA-256 differs; install maml-rl "
                "again, and copy the file for tasks of your own, which --tasks takes"
            )
        return read_tasks(self.file, self.env_name)

    def tasks_for(self, experiment: Experiment) -> list[Task]:
        """Return the tasks, after checking that none is in the policy's fixed set of training tasks."""
        tasks = self.tasks()
        trained = {task_key(task) for task in experiment.fixed_tasks("training") or []}
        among = sum(task_key(task) in trained for task in tasks)
        if among:
            raise ConfigError(
                f"{among} of the {len(tasks)} tasks of {self.name} are among the {len(trained)} training tasks of the "
                "run; train it on others, or on all of the family"
            )
        return tasks

    def check(self, experiment: Experiment, num_steps: int) -> None:
        """Refuse a policy of another problem, or one that would adapt to more episodes than the benchmark allows.

        A policy may have its own unit of actions, `normalization_scale`: it maps them onto the same range.
        """
        config = experiment.config
        if config.method == "oracle":
            raise ConfigError(f"an oracle observes its task, and {self.name} measures adaptation; test another policy")
        if config.env_name != self.env_name:
            raise ConfigError(f"{self.name} is of the family {self.env_name}, and the policy of {config.env_name}")
        defaults = _defaults(self.env_name, self.env_kwargs)
        mine, theirs = (
            {**defaults, **kwargs, **dict.fromkeys(FREE)} for kwargs in (self.env_kwargs, config.env_kwargs)
        )
        if mine != theirs:
            key = min(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
            raise ConfigError(
                f"{self.name} has environments with {key}: {mine.get(key)!r}, and the policy was trained with "
                f"{theirs.get(key)!r}; train it with --env-kwargs {json.dumps(dict(self.env_kwargs))!r}"
            )
        steps = config.max_episode_steps
        if steps is None:
            with closing(experiment.make_env()) as env:
                steps = env.max_episode_steps
        if steps != self.max_episode_steps:
            raise ConfigError(
                f"{self.name} has episodes of {self.max_episode_steps} steps, and the policy was trained with {steps}; "
                f"train it with --max-episode-steps {self.max_episode_steps}"
            )
        learner = experiment.metalearner
        if learner.whole_trials:
            before, remedy = config.fast_batch_size - 1, f"--fast-batch-size {self.episodes_before + 1}"
        else:
            before = config.fast_batch_size * (num_steps if learner.takes_steps else 1)
            remedy = f"--fast-batch-size {max(1, self.episodes_before // max(1, num_steps))}"
            if learner.takes_steps and config.fast_batch_size <= self.episodes_before:
                remedy = f"--num-steps {self.episodes_before // config.fast_batch_size}, or {remedy}"
        if before > self.episodes_before:
            raise ConfigError(
                f"{self.name} allows {self.episodes_before} episodes before those that count, and the policy would "
                f"adapt to {before}; give {remedy}"
            )


def benchmarks() -> dict[str, Benchmark]:
    """Return the benchmarks by name."""
    content = json.loads(REGISTRY.read_text(encoding="utf-8"))
    return {name: Benchmark(name=name, **fields) for name, fields in content.items()}


def find_benchmark(name: str) -> Benchmark:
    """Return a benchmark."""
    known = benchmarks()
    if name not in known:
        raise ConfigError(
            f"there is no benchmark {name!r}{suggest(name, list(known))} (`maml-rl benchmarks` lists them)"
        )
    return known[name]


def measure(
    policy: ForeignPolicy | Policy, benchmark: str | Benchmark, *, num_episodes: int | None = None, seed: int = 0
) -> Evaluation:
    """Measure a policy of any other package on a benchmark: one trial of every task, all in parallel, in this process.

    Args:
        policy: as `evaluate_trials` takes it.
        benchmark: its name.
        num_episodes: of a trial, of which the last counts; None for as many as the benchmark allows.
        seed: of the episodes.
    """
    rules = benchmark if isinstance(benchmark, Benchmark) else find_benchmark(benchmark)
    most = rules.episodes_before + 1
    num_episodes = most if num_episodes is None else num_episodes
    if not 1 <= num_episodes <= most:
        raise ConfigError(f"{rules.name} has trials of 1 to {most} episodes, got {num_episodes}")
    return evaluate_trials(
        policy,
        rules.env_name,
        rules.tasks(),
        num_episodes,
        env_kwargs=rules.env_kwargs,
        max_episode_steps=rules.max_episode_steps,
        repetitions=rules.repetitions,
        seed=seed,
    )


def nearest(tasks: Sequence[Task], others: Sequence[Task]) -> float:
    """Return the smallest distance of a task to another one, over all numbers of a task; infinity if there are none.

    Those of a mixture are compared within each family.
    """
    closest = float("inf")
    for family in {family_of(task) for task in tasks}:
        one, other = ([_vector(task) for task in each if family_of(task) == family] for each in (tasks, others))
        if other:
            closest = min(closest, float(np.linalg.norm(np.stack(one)[:, None] - np.stack(other)[None], axis=-1).min()))
    return closest


def _vector(task: Task) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.concatenate([np.asarray(task[name], np.float64).ravel() for name in sorted(task) if name != "family"])


def _defaults(env_name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a family's keyword arguments; those of `kwargs` are enough to make an environment."""
    with closing(make_vector_env(env_name, dict(kwargs))) as env:
        parameters = inspect.signature(type(env).__init__).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
