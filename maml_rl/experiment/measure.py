"""Policies of several runs, measured alike: on the same tasks, at the same environment steps, as their configs say.

Reports and `maml-rl compare` take their evaluations from here, so that both have the same numbers.
"""

import logging
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from maml_rl.config.placement import ELSEWHERE
from maml_rl.derivatives import EpisodeStore
from maml_rl.envs.meta_env import Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ConfigError, MamlRLError
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.sampling import make_sampler
from maml_rl.policies import performed
from maml_rl.results.comparable import Run, RunGroup, common_steps
from maml_rl.results.evaluation import REPETITIONS, Evaluation, SampledEvaluation, load_evaluation, same_tasks
from maml_rl.results.identity import identity_now
from maml_rl.results.verdict import GroupResult
from maml_rl.runs.atomic_files import newest_path
from maml_rl.runs.trust import refuse_missing, unknown_code
from maml_rl.task_distributions.task_files import read_tasks

EVALUATION = "evaluation.npz"

logger = logging.getLogger(__name__)


def measure(
    groups: Sequence[RunGroup],
    tasks: int | Path,
    *,
    placement: Mapping[str, Any] = MappingProxyType({}),
    pictures: bool = False,
    with_untrained: bool = False,
    known: bool = False,
    on_run: Callable[[Run], object] = lambda run: None,
) -> tuple[list[GroupResult], list[str]]:
    """Adapt the policies of all runs, as they were at their common environment steps, to the same new tasks.

    A run that has no checkpoint near the common steps is measured at its end. What `test.py` has written into the
    folder of a run is used instead, if it is of the same policy, tasks and settings.

    Args:
        groups: of one problem.
        tasks: how many new tasks, drawn by the first run from the streams of evaluations, unless a run has a fixed set;
            or their file. With 0 only what `test.py` has written is used.
        placement: of the evaluation, which takes none from the training.
        pictures: whether to keep the episodes of the first policy of each group.
        with_untrained: whether to evaluate the initial policy of the first run, too, unless it is an oracle's.
        known: whether to import code of foreign runs that is known from own training; other code never is, and such
            policies are not evaluated.
        on_run: called before a run is evaluated.

    Returns:
        The results, and sentences about runs that could not be evaluated.
    """
    notices: list[str] = []
    results: list[GroupResult] = []
    drawn: list[Task] = []
    limit = common_steps(groups)
    placed = {**ELSEWHERE, **placement}
    repetitions = REPETITIONS if isinstance(tasks, Path) else 1
    for group in groups:
        evaluations: list[Evaluation] = []
        sampled = untrained = None
        for run in group.runs:
            on_run(run)
            checkpoint = run.checkpoint_near(limit) if len(groups) > 1 else None
            evaluation, complaints = saved_evaluation(run, checkpoint)
            notices += complaints
            named = unknown_code(run.config, known=known)
            try:
                if isinstance(tasks, Path) and named and evaluation is not None:
                    saved, evaluation = evaluation, None
                    if same_tasks(saved.tasks, read_tasks(tasks, run.config.env_name)):
                        evaluation = saved
                if tasks and named and evaluation is None:
                    refuse_missing(run.config, named)
                    names = " and ".join(name for _, name in named)
                    raise ConfigError(
                        f"it needs {names}, and this imports nothing that a run names; add --trust, or measure it with "
                        f"`test.py {shlex.quote(str(run.path))}`"
                    )
                if tasks and not named:
                    experiment = make_experiment(run.config.override(placed))
                    updates = experiment.restore("last" if checkpoint is None else checkpoint, run.path)
                    chosen, fixed = _tasks_of(experiment, tasks, drawn)
                    if evaluation is not None and (
                        evaluation.fixed_tasks != fixed or not same_tasks(evaluation.tasks, chosen)
                    ):
                        evaluation = None
                    if evaluation is None or (pictures and sampled is None):
                        tried = _evaluated(experiment, run, updates, chosen, repetitions, fixed=fixed)
                        evaluation = evaluation or tried.evaluation
                        sampled = sampled or (tried if pictures else None)
                        enough = untrained is not None or any(result.untrained is not None for result in results)
                        if with_untrained and not enough and run.config.method != "oracle":
                            initial = make_experiment(run.config.override(placed))
                            untrained = _evaluated(initial, run, 0, chosen, repetitions, fixed=fixed).evaluation
            except (MamlRLError, OSError) as error:
                notices.append(f"The policy of {run.path} could not be tried on new tasks: {error}.")
            if evaluation is not None:
                evaluations.append(evaluation)
        ranges = evaluations[0].ranges if evaluations else {}
        results.append(GroupResult(replace(group, ranges=ranges), evaluations, untrained, sampled))
    return results, notices


def _tasks_of(experiment: Experiment, wanted: int | Path, drawn: list[Task]) -> tuple[list[Task], bool]:
    """Return the tasks of an experiment, and whether they are not a sample of its family: of a file, or its fixed set.

    Others are drawn by the first run that can, into `drawn`.
    """
    if isinstance(wanted, Path):
        return experiment.load_tasks(wanted), True
    fixed = experiment.fixed_tasks("test")
    if fixed is not None:
        return fixed, True
    if not drawn:
        with make_sampler(experiment, num_workers=0, evaluation=True, task_split="test") as sampler:
            drawn += sampler.sample_tasks(wanted)
    return drawn, False


def _evaluated(
    experiment: Experiment, run: Run, updates: int, tasks: Sequence[Task], repetitions: int, *, fixed: bool
) -> SampledEvaluation:
    """Adapt the policy of a run after so many meta-updates, and keep the episodes."""
    logger.info("trying the policy of %s", run.path)
    # Pictures show the first repetition.
    shown: list[TaskEpisodes] = []

    def keep_first(batch: EpisodeStore) -> None:
        if not shown:
            shown.extend(performed(experiment.policy, phase) for phase in batch.phases)

    saved = evaluate(experiment, tasks, repetitions=repetitions, on_batch=keep_first)
    # Drawn once for all runs, tasks are still a sample of the family.
    saved = replace(saved, fixed_tasks=fixed, identity=identity_now(run.config, run.system), checkpoint=updates)
    return SampledEvaluation(experiment.config, shown, saved, experiment.metalearner.source_returns)


def saved_evaluation(run: Run, checkpoint: int | None = None) -> tuple[Evaluation | None, list[str]]:
    """Return the last evaluation that `test.py` has written into a run's folder, if it is of this policy and config.

    Args:
        run: the run.
        checkpoint: meta-updates of the policy; None for the last one.

    Returns:
        The evaluation or None, and why there is none.
    """
    path = newest_path(run.path / EVALUATION)
    if path is None:
        return None, []
    try:
        saved = load_evaluation(path)
    except ConfigError as error:
        return None, [f"{error}."]
    steps, wanted = saved.returns.shape[1] - 1, run.config.test_steps
    if checkpoint is None:
        # That of a killed run has fewer meta-updates than the run.
        checkpoint = run.checkpoint_near(math.nan)
    differs = {
        "another family": saved.env_name != run.config.env_name,
        "an earlier version, or another seed": not saved.identity or saved.seed != run.config.seed,
        "other settings, or other files": saved.identity != identity_now(run.config, run.system),
        f"the policy {saved.after}, not after {wanted}": saved.columns == "step" and steps != wanted,
        "another checkpoint": saved.checkpoint != (run.finished if checkpoint is None else checkpoint),
    }
    how = next((name for name, is_so in differs.items() if is_so), None)
    return (saved, []) if how is None else (None, [f"{path} is not used here: it is of {how}."])
