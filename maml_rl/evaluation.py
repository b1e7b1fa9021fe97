"""How fast a meta-policy adapts to tasks it never saw: returns after 0 ... K gradient steps, with their intervals."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.atomic_files import replace_file
from maml_rl.config import Halving
from maml_rl.errors import ConfigError
from maml_rl.experiment import Experiment
from maml_rl.seeding import Purpose, StreamKey, generator

_CONFIDENCE = 0.95
_RESAMPLES = 10_000

Task = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What came out of an evaluation.

    Attributes:
        env_name: the task family.
        seed: of the tasks, the episodes, and the resamples of the intervals.
        tasks: the N tasks.
        step_sizes: (K,) size of each gradient step.
        returns: (N, K + 1, B) undiscounted return of every episode after 0 ... K steps.
    """

    env_name: str
    seed: int
    tasks: list[Task]
    step_sizes: tuple[float, ...]
    returns: NDArray[np.float32]

    def task_returns(self) -> NDArray[np.float64]:
        """Return the mean return of every task, (N, K + 1)."""
        means: NDArray[np.float64] = self.returns.mean(axis=2, dtype=np.float64)
        return means

    def intervals(self) -> NDArray[np.float64]:
        """Return the mean over tasks and the bounds of its 95 % bootstrap interval, (K + 1, 3)."""
        rows = []
        for step, values in enumerate(self.task_returns().T):
            rng = generator(StreamKey(self.seed, Purpose.BOOTSTRAP, phase=step))
            rows.append((values.mean(), *bootstrap_interval(values, rng)))
        return np.array(rows)

    def table(self) -> str:
        """Return the returns after each number of steps as a table of text."""
        lines = [f"{'gradient steps':>14}  {'mean return':>11}  {'95 % interval':>20}"]
        for step, (mean, low, high) in enumerate(self.intervals()):
            interval = f"[{low:.2f}, {high:.2f}]"
            lines.append(f"{step:>14}  {mean:>11.2f}  {interval:>20}")
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write an `.npz` file, whole or not at all, that `numpy.load` reads without unpickling anything.

        It holds `returns` (N, K + 1, B), `mean`, `low` and `high` (K + 1,), `step_sizes` (K,), `seed`, and as text
        `env_name` and `tasks` (a JSON list).
        """
        mean, low, high = self.intervals().T
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            returns=self.returns,
            mean=mean,
            low=low,
            high=high,
            step_sizes=np.array(self.step_sizes),
            seed=np.array(self.seed),
            env_name=np.array(self.env_name),
            tasks=np.array(json.dumps(self.tasks, default=_as_list)),
        )
        replace_file(Path(path), buffer.getvalue())


def evaluate(
    experiment: Experiment,
    *,
    num_batches: int = 1,
    meta_batch_size: int = 40,
    step_sizes: Sequence[float],
    num_workers: int | None = None,
    on_batch: Callable[[], object] | None = None,
) -> Evaluation:
    """Adapt the experiment's policy to fresh tasks, with new episodes before each gradient step.

    Tasks and episodes come from streams that training never draws from, whatever the seed.

    Args:
        experiment: its policy is evaluated, and left as it is.
        num_batches: batches of tasks.
        meta_batch_size: tasks in each.
        step_sizes: size of each gradient step; see `step_schedule`.
        num_workers: child processes; 0 steps in this process, None takes the number of usable cores.
        on_batch: called after each batch.

    Returns:
        Returns of N = num_batches * meta_batch_size tasks.

    Raises:
        ConfigError: If a number is out of range.
        ChildEnvError: If an environment fails.
    """
    for name, number in (("num-batches", num_batches), ("meta-batch-size", meta_batch_size)):
        if number < 1:
            raise ConfigError(f"{name} must be at least 1, got {number}")
    config = experiment.config
    tasks: list[Task] = []
    returns = []
    with experiment.make_sampler(num_workers=num_workers, evaluation=True) as sampler:
        for _ in range(num_batches):
            batch = sampler.sample_tasks(meta_batch_size)
            train_episodes, valid_episodes = sampler.sample(
                batch,
                num_steps=len(step_sizes),
                fast_lr=list(step_sizes),
                gamma=config.gamma,
                gae_lambda=config.gae_lambda,
                device=experiment.device,
                bootstrap=config.bootstrap,
            )
            phases = [*train_episodes, valid_episodes]
            returns.append(np.stack([phase.episode_returns().cpu().numpy() for phase in phases], axis=1))
            tasks.extend(batch)
            if on_batch is not None:
                on_batch()
    return Evaluation(config.env_name, config.seed, tasks, tuple(step_sizes), np.concatenate(returns))


def step_schedule(step_size: float, num_steps: int, *, halve: Halving) -> tuple[float, ...]:
    """Return the size of each gradient step.

    Args:
        step_size: of the first step.
        num_steps: how many.
        halve: "never"; "once" for half the size from the second step on; "always" for half the size of the step before.

    Raises:
        ConfigError: If `num_steps` is negative.

    Source: Finn et al. 2017, https://arxiv.org/abs/1703.03400, whose published protocol halves once
    """
    if num_steps < 0:
        raise ConfigError(f"num-steps must not be negative, got {num_steps}")
    halvings = {"never": 0, "once": 1, "always": num_steps}[halve]
    return tuple(step_size / 2 ** min(step, halvings) for step in range(num_steps))


def bootstrap_interval(values: NDArray[np.float64], rng: np.random.Generator) -> tuple[float, float]:
    """Return the bounds of the 95 % percentile bootstrap interval of the mean of `values` (n,).

    Source: Efron and Tibshirani 1993, An introduction to the bootstrap, chapter 13
    """
    samples = rng.choice(values, size=(_RESAMPLES, len(values)), replace=True)
    tail = (1.0 - _CONFIDENCE) / 2.0
    low, high = np.quantile(samples.mean(axis=1), [tail, 1.0 - tail])
    return float(low), float(high)


def _as_list(value: Any) -> Any:
    """Turn what NumPy holds into what JSON can write."""
    return value.tolist()
