"""How fast a meta-policy adapts to tasks it never saw: returns after 0 ... K gradient steps, with their intervals."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.config.config import Halving
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import Experiment
from maml_rl.experiment.statistics import Statistic, interquartile_mean, mean, stratified_intervals
from maml_rl.runs.atomic_files import replace_file
from maml_rl.seeding import Purpose, StreamKey, generator

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
        fixed_tasks: whether the tasks are those of a file, and not a sample of their family.
        infos: (N, K + 1, B) by name, one number of each recorded info for every episode: the mean over its steps, or
            that at its end.
    """

    env_name: str
    seed: int
    tasks: list[Task]
    step_sizes: tuple[float, ...]
    returns: NDArray[np.float32]
    fixed_tasks: bool = False
    infos: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)

    def task_returns(self) -> NDArray[np.float64]:
        """Return the mean return of every task, (N, K + 1)."""
        means: NDArray[np.float64] = self.returns.mean(axis=2, dtype=np.float64)
        return means

    def intervals(self, statistic: Statistic = mean) -> NDArray[np.float64]:
        """Return a statistic of the returns and its 95 % interval, (K + 1, 3); see `pooled_intervals`."""
        return pooled_intervals([self], statistic)

    def table(self) -> str:
        """Return the returns after each number of steps as a table of text."""
        interval = f"{'95 % interval':>20}"
        lines = [f"{'gradient steps':>14}  {'mean return':>11}  {interval}  {'interquartile mean':>18}  {interval}"]
        lines[0] += "".join(f"  {'mean ' + name:>11}" for name in self.infos)
        for step, rows in enumerate(zip(self.intervals(), self.intervals(interquartile_mean), strict=True)):
            cells = []
            for width, (value, low, high) in zip((11, 18), rows, strict=True):
                interval = f"[{low:.2f}, {high:.2f}]"
                cells.append(f"{value:>{width}.2f}  {interval:>20}")
            for name, info in self.infos.items():
                cells.append(f"{info[:, step].mean(dtype=np.float64):>{max(11, len('mean ' + name))}.3f}")
            lines.append("  ".join([f"{step:>14}", *cells]))
        return "\n".join(lines)

    def resampling(self) -> str:
        """Return what the intervals are about."""
        if self.fixed_tasks:
            return "the intervals are for these very tasks: the episodes of each are resampled"
        return "the intervals are for the family: the tasks are resampled"

    def save(self, path: str | Path) -> None:
        """Write an `.npz` file, whole or not at all, that `numpy.load` reads without unpickling anything.

        It holds `returns` (N, K + 1, B); `mean`, `low`, `high`, and `iqm`, `iqm_low`, `iqm_high` (K + 1,) for the
        interquartile mean; `info/<name>` (N, K + 1, B) of each recorded info; `step_sizes` (K,), `seed`, `fixed_tasks`,
        and as text `env_name` and `tasks` (a JSON list).
        """
        names = "mean", "low", "high", "iqm", "iqm_low", "iqm_high"
        columns = np.concatenate([self.intervals(), self.intervals(interquartile_mean)], axis=1).T
        infos: dict[str, Any] = {f"info/{name}": info for name, info in self.infos.items()}
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            returns=self.returns,
            **infos,
            **dict(zip(names, columns, strict=True)),
            fixed_tasks=np.array(self.fixed_tasks),
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
    tasks: Sequence[Task] | None = None,
    num_workers: int | None = None,
    on_tasks: Callable[[Sequence[Task]], object] | None = None,
    on_batch: Callable[[], object] | None = None,
) -> Evaluation:
    """Adapt the experiment's policy to fresh tasks, with new episodes before each gradient step.

    Tasks and episodes come from streams that training never draws from, whatever the seed.

    Args:
        experiment: its policy is evaluated, and left as it is.
        num_batches: batches of tasks.
        meta_batch_size: tasks in each.
        step_sizes: size of each gradient step; see `step_schedule`.
        tasks: what to measure on, each once, in batches of `meta_batch_size`; None to draw `num_batches` new ones.
        num_workers: child processes; 0 steps in this process, None takes the number of usable cores.
        on_tasks: is given the tasks that were drawn, before the first episode; they are fixed from then on.
        on_batch: called after each batch.

    Returns:
        Returns of all tasks.

    Raises:
        ConfigError: If a number is out of range.
        ChildEnvError: If an environment fails.
    """
    for name, number in (("num-batches", num_batches), ("meta-batch-size", meta_batch_size)):
        if number < 1:
            raise ConfigError(f"{name} must be at least 1, got {number}")
    config = experiment.config
    returns, infos = [], []
    with experiment.make_sampler(num_workers=num_workers, evaluation=True) as sampler:
        drawn = tasks is None
        if tasks is None:
            tasks = [task for _ in range(num_batches) for task in sampler.sample_tasks(meta_batch_size)]
            if on_tasks is not None:
                on_tasks(tasks)
        for index, first in enumerate(range(0, len(tasks), meta_batch_size)):
            batch = tasks[first : first + meta_batch_size]
            sampler.seek(index)
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
            infos.append(episode_infos(phases))
            if on_batch is not None:
                on_batch()
    return Evaluation(
        config.env_name,
        config.seed,
        list(tasks),
        tuple(step_sizes),
        np.concatenate(returns),
        fixed_tasks=not drawn or on_tasks is not None,
        infos={name: np.concatenate([batch[name] for batch in infos]) for name in infos[0]},
    )


def episode_infos(phases: Sequence[TaskEpisodes]) -> dict[str, NDArray[np.float32]]:
    """Return one number of each recorded info for every episode of every phase, (M, phases, B) by name."""
    of_phases = [phase.episode_infos() for phase in phases]
    return {name: np.stack([infos[name].cpu().numpy() for infos in of_phases], axis=1) for name in of_phases[0]}


def pooled_intervals(evaluations: Sequence[Evaluation], statistic: Statistic = mean) -> NDArray[np.float64]:
    """Return a statistic of the returns of one or several policies, and its stratified 95 % bootstrap interval.

    What is resampled is what chance has chosen. Where tasks were drawn, they are, within each policy; so the interval
    is about the family. Where the tasks are fixed, and the same for all, every task is a stratum of its own, in which
    the policies are resampled, or the episodes of the only one; so the interval is about these tasks, and narrower.

    Args:
        evaluations: at least one.
        statistic: `intervals.mean` or `intervals.interquartile_mean`.

    Returns:
        (K + 1, 3) statistic, lower and upper bound, K being the least number of steps in `evaluations`.

    Source: Agarwal et al. 2021, section 4, https://arxiv.org/abs/2108.13264
    """
    steps = min(evaluation.returns.shape[1] for evaluation in evaluations)
    scores = [evaluation.task_returns()[:, :steps] for evaluation in evaluations]
    strata: Sequence[NDArray[np.float64]] = scores
    first = evaluations[0].tasks
    if all(each.fixed_tasks and same_tasks(each.tasks, first) for each in evaluations):
        strata = list(np.stack(scores, axis=1))
        if len(evaluations) == 1:
            strata = [episodes.T.astype(np.float64) for episodes in evaluations[0].returns]
    return stratified_intervals(strata, statistic, generator(StreamKey(evaluations[0].seed, Purpose.BOOTSTRAP)))


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


def same_tasks(first: Sequence[Task], second: Sequence[Task]) -> bool:
    """Return whether the tasks are the same, one by one; lists are as good as arrays."""
    one, other = (json.dumps(tasks, default=_as_list, sort_keys=True) for tasks in (first, second))
    return one == other


def _as_list(value: Any) -> Any:
    """Turn what NumPy holds into what JSON can write."""
    return value.tolist()
