"""Which of several experiments is better: one rule and one sentence, for reports, `maml-rl compare` and the pages.

The rule: the difference of the mean returns after adaptation, at common environment steps. One experiment leads another
if the 95 % interval of the difference excludes 0. A single run on either side decides nothing, however many tasks it
was tried on: its seed is in no interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from maml_rl.results.comparable import RunGroup, all_alike, common_steps, difference_at_common_steps
from maml_rl.results.evaluation import (
    NORMALIZED,
    Evaluation,
    Line,
    SampledEvaluation,
    difference_interval,
    share_tasks,
    whose_tasks_differ,
)
from maml_rl.results.scales import counted, listed, readable_count, readable_interval

# With as many experiments, the best one is chosen after its return is known.
_MANY = 3

# Which of two experiments is better: a sentence, with the groups instead of their names.
Verdict = tuple[str | RunGroup, ...]


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
    untrained: Evaluation | None = None
    sampled: SampledEvaluation | None = None

    def part(self, name: str) -> "GroupResult":
        """Return the results of a family of a mixture, or the normalized ones, as far as they are known."""
        evaluations = [parts[name] for evaluation in self.evaluations if name in (parts := evaluation.parts())]
        untrained = None if self.untrained is None else self.untrained.parts().get(name)
        return replace(self, evaluations=evaluations, untrained=untrained, sampled=None)

    @property
    def env_steps(self) -> list[float]:
        """Environment steps after which each policy was evaluated."""
        runs = {run.config.seed: run for run in self.group.runs}
        return [
            runs[evaluation.seed].steps_at(evaluation.checkpoint)
            if evaluation.seed in runs
            else self.group.runs[0].env_steps
            for evaluation in self.evaluations
        ]


def in_words(verdict: Verdict) -> str:
    """Return a verdict as text."""
    return "".join(word if isinstance(word, str) else word.name for word in verdict)


def normalized(results: Sequence[GroupResult]) -> Sequence[GroupResult]:
    """Return the results of a mixture with normalized returns, where all have them; other results as they are."""
    parts = [result.part(NORMALIZED) for result in results]
    return parts if all(part.evaluations for part in parts) else results


def at_common_steps(results: Sequence[GroupResult]) -> bool:
    """Return whether all policies were evaluated after about the same number of environment steps."""
    steps = [each for result in results for each in result.env_steps]
    return bool(steps) and all_alike(steps)


def base_of(results: Sequence[GroupResult]) -> int:
    """Return the place of the experiment that others are compared with in tables: pretraining, or else the first."""
    return next((place for place, result in enumerate(results) if result.group.config.method == "pretrain"), 0)


def after(results: Sequence[GroupResult]) -> str:
    """Return in words what comes before the returns of several experiments, or how they differ in it."""
    return _all_or_each({result.group.name: result.evaluations[0].after for result in results if result.evaluations})


def _all_or_each(texts: Mapping[str, str]) -> str:
    """Return a text that is that of all groups, or that of each by its name."""
    return next(iter(texts.values())) if len({*texts.values()}) == 1 else "; ".join(map(" ".join, texts.items()))


def leads(interval: NDArray[np.float64]) -> bool:
    """Return whether the first of two is better than the second, by their difference (3,) and its bounds."""
    return bool(np.isfinite(interval[1]) and interval[1] > 0.0)


def verdicts(results: Sequence[GroupResult]) -> list[Verdict]:
    """Return how the experiment with the highest return compares with each of the others, best first.

    Policies that were evaluated after about the same environment steps are compared there; others by what their
    trainings recorded at their common steps. Nothing for fewer than two.
    """
    if len(results) < 2:
        return []
    tried = all(result.evaluations for result in results) and at_common_steps(results)
    if tried:
        levels = [
            float(np.mean([evaluation.task_returns()[:, -1].mean() for evaluation in result.evaluations]))
            for result in results
        ]
    else:
        gaps = [difference_at_common_steps(result.group, results[0].group) for result in results]
        levels = [float("nan") if gap is None else float(gap[0][0]) for gap in gaps]
    order = np.argsort([-level if np.isfinite(level) else np.inf for level in levels], kind="stable")
    best, *others = [results[index] for index in order]
    return [_tried(best, other) if tried else _recorded(best, other) for other in others]


def cautions(results: Sequence[GroupResult]) -> list[str]:
    """Return what a reader of the verdicts must know: failed runs, single runs, and how the best one was chosen."""
    sentences = [f"{result.group.name}: {result.group.counted}." for result in results if result.group.failed]
    if any(result.group.failed for result in results):
        sentences.append("A run that failed is in no mean, so that means favor what fails.")
    repeated = [
        result.group.name
        for result in results
        if len({run.config.seed for run in result.group.runs}) < len(result.group.runs)
    ]
    if repeated:
        sentences.append(
            f"Several runs of {listed(repeated)} have one seed: they are not independent, and intervals are too narrow."
        )
    single = [result.group.name for result in results if len(result.group.runs) == 1]
    if single and len(results) > 1:
        sentences.append(
            f"One run of {listed(single)}: how much runs differ by their seed is unknown, and equal algorithms often "
            "differ as much; five runs (--seeds 5) tell."
        )
    if len(results) >= _MANY:
        sentences.append(
            f"The best of {len(results)} was chosen by its return: of six equal algorithms it would lead some other in "
            "10 % (three runs) to 24 % (five runs) of cases."
        )
    return sentences


def _tried(best: GroupResult, other: GroupResult) -> Verdict:
    """Compare two experiments by policies that were tried on new tasks."""
    pair = best, other
    everyone = [evaluation for result in pair for evaluation in result.evaluations]
    sizes = listed(sorted({str(len(evaluation.tasks)) for evaluation in everyone}, key=int), "or")
    kinds = listed(sorted({"fixed" if evaluation.fixed_tasks else "new" for evaluation in everyone}), "or")
    differ = whose_tasks_differ([Line(result.group.name, result.evaluations) for result in pair])
    tasks = f"the same {sizes} {kinds} tasks" if share_tasks(everyone) else f"{sizes} {kinds} tasks, {differ}"
    steps = min(steps for result in pair for steps in result.env_steps)
    interval = difference_interval(best.evaluations, other.evaluations)
    counts = [len(result.evaluations) for result in pair]
    return _sentence(best.group, other.group, interval, counts, steps, f"{after(pair)}, on {tasks}")


def _recorded(best: GroupResult, other: GroupResult) -> Verdict:
    """Compare two experiments by what their trainings recorded at common environment steps."""
    gap = difference_at_common_steps(best.group, other.group)
    if gap is None:
        return best.group, " and ", other.group, " have no returns at common environment steps, and are not compared."
    interval, evaluated = gap
    counts, steps = [len(result.group.runs) for result in (best, other)], common_steps([best.group, other.group])
    where = "in the evaluations of training" if evaluated else "on the tasks of training"
    what = _all_or_each({each.group.name: each.group.last_return(evaluated=evaluated) for each in (best, other)})
    return _sentence(best.group, other.group, interval, counts, steps, f"{what}, {where}")


def _sentence(
    best: RunGroup, other: RunGroup, interval: NDArray[np.float64], counts: Sequence[int], steps: float, where: str
) -> Verdict:
    single = min(counts) == 1
    if single:
        interval = np.array([interval[0], np.nan, np.nan])
    value, bounds = readable_interval(interval)
    at = f"At {readable_count(steps)} environment steps, " if np.isfinite(steps) and steps > 0.0 else ""
    runs = (
        f"{counts[0]} and {counted(counts[1], 'run')}"
        if counts[0] != counts[1]
        else f"{counted(counts[0], 'run')} each"
    )
    detail = f" in the mean return {where} ({runs})"
    if leads(interval):
        return at, best, " leads ", other, f" by {value} {bounds}{detail}."
    if single:
        why = "with a single run there is no interval, and this does not tell which is better"
    elif not bounds:
        why = "the interval is unknown, and this does not tell which is better"
    else:
        why = "these runs do not tell which is better"
    between = f" by {value} {bounds}".rstrip()
    return at, best, " is above ", other, f"{between}{detail}; {why}."
