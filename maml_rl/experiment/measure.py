"""Policies of several runs, measured alike: on the same tasks, at the same environment steps, as their configs say.

Reports and `maml-rl compare` take their evaluations from here, so that both have the same numbers.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from maml_rl.results.evaluation import (
    REPETITIONS,
    Evaluation,
    SampledEvaluation,
    load_evaluation,
    same_tasks,
)
from maml_rl.results.verdict import GroupResult
from maml_rl.runs.numbered import newest_path
from maml_rl.runs.trust import unknown_code

EVALUATION = "evaluation.npz"

logger = logging.getLogger(__name__)


@dataclass
class _Tasks:
    """The tasks of all policies: drawn by the first run that can, or of a file, or the fixed set of each run.

    Attributes:
        wanted: how many, or their file.
        drawn: the drawn ones, once they are known.
    """

    wanted: int | Path
    drawn: list[Task] | None = None

    def of(self, experiment: Experiment) -> tuple[list[Task], bool]:
        """Return the tasks of an experiment, and whether they are not a sample of its family."""
        if isinstance(self.wanted, Path):
            return experiment.load_tasks(self.wanted), True
        fixed = experiment.fixed_tasks("test")
        if fixed is not None:
            return fixed, True
        if self.drawn is None:
            with make_sampler(experiment, num_workers=0, evaluation=True, task_split="test") as sampler:
                self.drawn = list(sampler.sample_tasks(self.wanted))
        return self.drawn, False


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
    chosen = _Tasks(tasks)
    notices: list[str] = []
    results: list[GroupResult] = []
    limit = common_steps(groups)
    for group in groups:
        evaluations: list[Evaluation] = []
        sampled = untrained = None
        for run in group.runs:
            on_run(run)
            checkpoint = run.checkpoint_near(limit) if len(groups) > 1 else None
            evaluation, complaints = saved_evaluation(run, checkpoint)
            notices += complaints
            try:
                policy = _Measured(run, checkpoint, chosen, {**ELSEWHERE, **placement}, known)
                evaluation = evaluation if policy.has(evaluation) else None
                if tasks and (evaluation is None or (pictures and sampled is None and policy.is_trusted)):
                    tried = policy.evaluate()
                    evaluation = evaluation or tried.evaluation
                    sampled = sampled or (tried if pictures else None)
                    enough = untrained is not None or any(result.untrained is not None for result in results)
                    if with_untrained and not enough and run.config.method != "oracle":
                        untrained = policy.evaluate(trained=False).evaluation
            except (MamlRLError, OSError) as error:
                notices.append(f"The policy of {run.path} could not be tried on new tasks: {error}.")
            if evaluation is not None:
                evaluations.append(evaluation)
        ranges = evaluations[0].ranges if evaluations else {}
        results.append(GroupResult(replace(group, ranges=ranges), evaluations, untrained, sampled))
    return results, notices


class _Measured:
    """The policy of a run at a checkpoint, and the tasks that it is measured on."""

    def __init__(
        self, run: Run, checkpoint: int | None, chosen: _Tasks, settings: Mapping[str, Any], known: bool
    ) -> None:
        self._run, self._checkpoint, self._settings = run, checkpoint, settings
        self._named = [name for _, name in unknown_code(run.config, known=known)]
        self._chosen = chosen
        self._tasks: list[Task] = []
        self._fixed = False
        if chosen.wanted and not self._named:
            self._tasks, self._fixed = chosen.of(self._restored())

    def _restored(self, *, trained: bool = True) -> Experiment:
        experiment = make_experiment(self._run.config.override(dict(self._settings)))
        if trained:
            experiment.restore("last" if self._checkpoint is None else self._checkpoint, self._run.path)
        return experiment

    @property
    def is_trusted(self) -> bool:
        """Whether the policy may be tried."""
        return not self._named

    def has(self, saved: Evaluation | None) -> bool:
        """Return whether a saved evaluation is on these tasks; any is, where no policy is tried."""
        if saved is None or not self._tasks:
            return saved is not None
        return same_tasks(saved.tasks, self._tasks) and saved.fixed_tasks == self._fixed

    def evaluate(self, *, trained: bool = True) -> SampledEvaluation:
        """Adapt the policy, or the initial one, and keep the episodes."""
        run = self._run
        if self._named:
            raise ConfigError(
                f"it needs {' and '.join(self._named)}, and this imports nothing that a run names; add "
                f"--trust, or measure it with `test.py {run.path}`"
            )
        logger.info("trying the policy of %s", run.path)
        experiment = self._restored(trained=trained)
        # Pictures show the first repetition.
        shown: list[TaskEpisodes] = []

        def keep_first(batch: EpisodeStore) -> None:
            if not shown:
                shown.extend(performed(experiment.policy, phase) for phase in batch.phases)

        repetitions = REPETITIONS if isinstance(self._chosen.wanted, Path) else 1
        saved = evaluate(experiment, self._tasks, repetitions=repetitions, on_batch=keep_first)
        checkpoint = run.finished if self._checkpoint is None else self._checkpoint
        # Drawn once for all runs, tasks are still a sample of the family.
        saved = replace(saved, fixed_tasks=self._fixed, identity=run.identity, checkpoint=checkpoint if trained else 0)
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
    steps = saved.returns.shape[1] - 1
    differs = {
        "another family": saved.env_name != run.config.env_name,
        "an earlier version, or another seed": not saved.identity or saved.seed != run.config.seed,
        "other settings": saved.identity != run.identity,
        f"{saved.after} instead of {run.config.test_steps}": saved.columns == "step" and steps != run.config.test_steps,
        "another checkpoint": saved.checkpoint != (run.finished if checkpoint is None else checkpoint),
    }
    how = next((name for name, is_so in differs.items() if is_so), None)
    return (saved, []) if how is None else (None, [f"{path} is not used here: it is of {how}."])
