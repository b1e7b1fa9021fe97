"""A trained policy on new tasks, before and after every gradient step, with the episodes for pictures of it."""

import io
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from maml_rl.config.config import Config
from maml_rl.config.placement import ELSEWHERE
from maml_rl.derivatives import EpisodeStore
from maml_rl.envs.meta_env import Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import MamlRLError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.foreign_files import read_regular
from maml_rl.machine import refuse_if_too_large
from maml_rl.policies import performed
from maml_rl.results.comparable import Run, RunGroup
from maml_rl.results.evaluation import REPETITIONS, Evaluation, same_tasks
from maml_rl.runs.numbered import newest_path
from maml_rl.runs.trust import unknown_code
from maml_rl.seeding import PhaseStreams

EVALUATION = "evaluation.npz"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledEvaluation:
    """Episodes of one policy on tasks that training never drew.

    Attributes:
        config: the run's.
        phases: episodes before adaptation, and after each gradient step.
        evaluation: their returns.
        source_returns: see `MetaLearner`.
    """

    config: Config
    phases: list[TaskEpisodes]
    evaluation: Evaluation
    source_returns: NDArray[np.float32] | None = None

    def episode_seed(self, phase: int, task: int, episode: int) -> int:
        """Return the seed with which the environment of an episode was reset."""
        streams = PhaseStreams(self.config.seed, 0, phase, evaluation=True)
        return int(streams.episode_seeds(task + 1, range(episode, episode + 1))[task, 0])

    def median_episode(self, phase: int, task: int) -> int:
        """Return the episode whose return is the median of its task and phase."""
        returns = self.evaluation.returns[task, phase, : self.phases[phase].rewards.shape[2]]
        return int(np.argsort(returns, kind="stable")[(len(returns) - 1) // 2])


@dataclass(frozen=True, slots=True)
class GroupResult:
    """Evaluations of a group's policies.

    Attributes:
        group: the runs.
        evaluations: of those runs that could be evaluated.
        untrained: the first run's initial policy on the same tasks, if it was evaluated; that of an oracle would mean
            nothing.
        sampled: the first run's episodes, for pictures.
    """

    group: RunGroup
    evaluations: list[Evaluation]
    untrained: Evaluation | None
    sampled: SampledEvaluation | None

    def part(self, name: str) -> "GroupResult":
        """Return the results of a family of a mixture, or the normalized ones, as far as they are known."""
        found = [parts[name] for each in self.evaluations if name in (parts := each.parts())]
        untrained = None if self.untrained is None else self.untrained.parts().get(name)
        return replace(self, evaluations=found, untrained=untrained, sampled=None)


def evaluate_group(
    group: RunGroup,
    tasks: int | Path,
    *,
    placement: Mapping[str, Any] = MappingProxyType({}),
    with_untrained: bool = True,
    on_run: Callable[[], object] = lambda: None,
) -> tuple[GroupResult, list[str]]:
    """Adapt the policies of a group to new tasks; use the results of `test.py` in a run's folder if there are any.

    The policies of foreign runs that name code are not evaluated, even if it is known.

    Args:
        group: of runs.
        tasks: how many new tasks to evaluate on, or their file; results of `test.py` on tasks that are not in the file
            are ignored.
        placement: of the evaluation, which takes none from the training.
        with_untrained: whether to evaluate the initial policy, too, unless it is an oracle's.
        on_run: called before a run is evaluated.

    Returns:
        The results, and sentences about runs that could not be evaluated.
    """
    settings = {**ELSEWHERE, **placement}
    evaluations: list[Evaluation] = []
    notices: list[str] = []
    sampled = untrained = held_out = None
    for run in group.runs:
        on_run()
        evaluation, complaint = _saved_evaluation(run)
        notices += complaint
        code = [name for _, name in unknown_code(run.config, known=False)]
        if code:
            if tasks and evaluation is None:
                notices.append(
                    f"The policy of {run.path} was not tried on new tasks: it needs {' and '.join(code)}, and "
                    f"a report imports nothing that a run names; add --trust, or measure it with `test.py {run.path}`."
                )
        elif isinstance(tasks, Path):
            try:
                held_out = make_experiment(run.config).load_tasks(tasks)
            except MamlRLError as error:
                notices.append(f"The policy of {run.path} could not be tried: {error}.")
                continue
            if evaluation is not None and not same_tasks(evaluation.tasks, held_out):
                evaluation = None
        wanted = tasks if isinstance(tasks, int) else held_out
        if not code and wanted and (evaluation is None or sampled is None):
            logger.info("trying the policy of %s on %d tasks", run.path, wanted if held_out is None else len(held_out))
            try:
                tried = _evaluate(run, wanted, settings, trained=True)
                if sampled is None:
                    sampled = tried
                    if with_untrained and run.config.method != "oracle":
                        untrained = _evaluate(run, wanted, settings, trained=False).evaluation
                evaluation = evaluation or tried.evaluation
            except (MamlRLError, OSError) as error:
                notices.append(f"The policy of {run.path} could not be tried on new tasks: {error}.")
        if evaluation is not None:
            evaluations.append(evaluation)
    return GroupResult(group, evaluations, untrained, sampled), notices


def _evaluate(run: Run, tasks: int | list[Task], settings: Mapping[str, Any], *, trained: bool) -> SampledEvaluation:
    """Adapt a run's policy, or its initial one, to new or given tasks, and keep the episodes."""
    experiment = make_experiment(run.config.override(settings))
    if trained:
        experiment.restore("last", run.path)
    # Pictures show the first repetition.
    shown: list[TaskEpisodes] = []

    def keep_first(batch: EpisodeStore) -> None:
        if not shown:
            shown.extend(performed(experiment.policy, each) for each in batch.phases)

    evaluation = evaluate(
        experiment, tasks, repetitions=1 if isinstance(tasks, int) else REPETITIONS, on_batch=keep_first
    )
    return SampledEvaluation(experiment.config, shown, evaluation, experiment.metalearner.source_returns)


def _pairs(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, list[float]]:
    return {name.removeprefix(prefix): arrays[name].tolist() for name in arrays if name.startswith(prefix)}


def _saved_evaluation(run: Run) -> tuple[Evaluation | None, list[str]]:
    """Return the last evaluation that `test.py <run>` has written."""
    path = newest_path(run.path / EVALUATION)
    if path is None:
        return None, []
    try:
        data = io.BytesIO(read_regular(path))
        refuse_if_too_large(
            sum(entry.file_size for entry in ZipFile(data).infolist()), f"the evaluation {path}", "make a smaller one"
        )
        with np.load(data, allow_pickle=False) as arrays:
            tasks: list[Task] = json.loads(str(arrays["tasks"]))
            step_sizes = tuple(arrays["step_sizes"].tolist())
            evaluation = Evaluation(
                str(arrays["env_name"]),
                int(arrays["seed"]),
                tasks,
                step_sizes,
                np.asarray(arrays["returns"], np.float32),
                # Files of earlier versions have no fixed tasks, and no repetitions.
                fixed_tasks="fixed_tasks" in arrays and bool(arrays["fixed_tasks"]),
                infos={name.removeprefix("info/"): arrays[name] for name in arrays if name.startswith("info/")},
                repetitions=int(arrays["repetitions"]) if "repetitions" in arrays else 1,
                columns=str(arrays["columns"]) if "columns" in arrays else "step",
                ranges={name: (low, high) for name, (low, high) in _pairs(arrays, "range/").items()},
                references={name: (low, high) for name, (low, high) in _pairs(arrays, "reference/").items()},
            )
            evaluation.repetition_returns()
            # Every entry that is read is compared with its checksum. An entry with an altered name would look like a
            # missing one.
            for name in arrays:
                arrays[name]
    # zipfile, zlib and NumPy raise different errors for each kind of damage.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return None, [f"{path} cannot be read ({reason}); `test.py --overwrite --output {path}` writes it again."]
    if evaluation.env_name != run.config.env_name or evaluation.returns.ndim != 3 or not len(tasks):
        return None, [f"{path} is not an evaluation of this run; `test.py --overwrite --output {path}` makes one."]
    return evaluation, []
