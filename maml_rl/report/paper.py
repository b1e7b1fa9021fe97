"""A comparison for a paper: policies measured on the same tasks, a figure, a table, and a sentence with intervals.

The quantities are those of rliable: interquartile mean, performance profile, probability of improvement. Their
intervals are the ones of `results.statistics`, which cover the truth for few seeds, too.

Source: Agarwal et al. 2021, https://arxiv.org/abs/2108.13264
"""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maml_rl.config.config import PROBLEM, Config
from maml_rl.config.placement import ELSEWHERE
from maml_rl.envs.meta_env import Task
from maml_rl.errors import ConfigError, explain
from maml_rl.experiment.build import Experiment, make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.results.comparable import Run, RunGroup, common_steps, readable_value, unequal_settings
from maml_rl.results.evaluation import (
    Evaluation,
    difference_interval,
    improvement_interval,
    pooled_intervals,
    profile_intervals,
)
from maml_rl.results.scales import readable_interval, readable_share
from maml_rl.results.statistics import interquartile_mean
from maml_rl.runs.checkpoint import list_checkpoints
from maml_rl.runs.run_folder import CHECKPOINTS

# A checkpoint with at least this share of the common steps counts as one at the common steps.
_NEAR = 0.9
# Okabe and Ito 2008: colors that readers with any color vision tell apart; and dashes, for prints in gray.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5)))
# The text width of a page, in inches; and iterations over whose mean each curve is smoothed.
_WIDTH, _SMOOTHING, _THRESHOLDS = 6.75, 5, 201
_ENDINGS = (".pdf", ".svg", ".png")
_LATEX = str.maketrans(
    {each: f"\\{each}" for each in "&%$#_{}"} | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A group of runs, and the evaluation of each at the common steps on the common tasks."""

    group: RunGroup
    evaluations: list[Evaluation]

    @property
    def name(self) -> str:
        """The group's name."""
        return self.group.name

    @property
    def head(self) -> str:
        """The name, and the number of runs."""
        return f"{self.name} (n = {len(self.evaluations)})"


def refuse_different_problems(configs: Sequence[Config]) -> None:
    """Refuse configs whose tasks differ, and name the settings that make them one problem."""
    differing: dict[str, list[str]] = {}
    for name in PROBLEM:
        values = list(dict.fromkeys(readable_value(getattr(config, name)) for config in configs))
        if len(values) > 1:
            differing[name] = values
    if differing:
        what = ", ".join(f"{name.replace('_', '-')!r} is {' and '.join(each)}" for name, each in differing.items())
        settings = {name.replace("_", "-"): json.dumps(getattr(configs[0], name)) for name in differing}
        given = " ".join(shlex.quote(f"{key}={value}") for key, value in settings.items())
        raise ConfigError(
            f"{what}: these are different problems; compare runs of one, or train all configs on that of the first: "
            f"--set {given}"
        )


def check_comparable(groups: Sequence[RunGroup]) -> list[str]:
    """Refuse groups of different problems, and return sentences about the other settings that differ."""
    if len(groups) < 2:
        raise ConfigError("these runs are all of one experiment; give those of two or more")
    refuse_different_problems([group.config for group in groups])
    unequal = unequal_settings(groups)
    return [
        f"Not only the algorithm differs: {key} is "
        + ", ".join(f"{readable_value(value)} ({group.name})" for value, group in zip(values, groups, strict=True))
        + "."
        for key, values in unequal.items()
    ]


def measure(
    groups: Sequence[RunGroup],
    tasks: int | Path,
    *,
    num_workers: int | None = None,
    on_run: Callable[[str], object] = lambda name: None,
) -> list[Measured]:
    """Adapt the policies of all runs, as they were at the common environment steps, to the same new tasks.

    Args:
        groups: that were checked.
        tasks: how many new tasks, drawn by the first run from the streams of evaluations, unless its test tasks were
            drawn once and for all; or their file.
        num_workers: worker processes; see `MultiTaskSampler`.
        on_run: called with the folder of each run before it is measured.

    Raises:
        ConfigError: If a run has no checkpoint near the common steps.
    """
    here = ELSEWHERE | {"num-workers": num_workers}
    limit = common_steps(groups)
    checkpoints = {id(run): _checkpoint_near(run, limit) for group in groups for run in group.runs}
    shared: list[Task] = []
    drawn = False
    measured = []
    for group in groups:
        evaluations = []
        for run in group.runs:
            on_run(str(run.path))
            experiment = make_experiment(run.config.override(here))
            experiment.restore(checkpoints[id(run)], run.path)
            if not shared:
                if isinstance(tasks, Path):
                    shared = experiment.load_tasks(tasks)
                else:
                    fixed = experiment.fixed_tasks("test")
                    drawn = fixed is None
                    shared = fixed or _draw_tasks(experiment, tasks)
            found = evaluate(experiment, shared)
            # Drawn once for all runs, they are still a sample of the family.
            evaluations.append(replace(found, fixed_tasks=not drawn))
        measured.append(Measured(group, evaluations))
    return measured


def _draw_tasks(experiment: Experiment, count: int) -> list[Task]:
    with experiment.make_sampler(num_workers=0, evaluation=True, task_split="test") as sampler:
        return list(sampler.sample_tasks(count))


def _checkpoint_near(run: Run, limit: float) -> int | str:
    """Return the iterations of a run's last checkpoint up to some environment steps, if it is near them."""
    if not np.isfinite(limit) or not limit or run.env_steps <= limit / _NEAR:
        return "last"
    steps = {row["iteration"] + 1: row["env_steps"] for row in run.metrics}
    numbers = [int(path.name.rpartition("-")[2]) for path in list_checkpoints(run.path / CHECKPOINTS)]
    near = [number for number in numbers if _NEAR * limit <= steps.get(number, 0) <= limit]
    if not near:
        raise ConfigError(
            f"{run.path} has {run.env_steps:,.0f} environment steps, the shortest run {limit:,.0f}, and it has no "
            "checkpoint near that; train the others longer, or this one again with --env-steps"
        )
    return max(near)


def parts(measured: Sequence[Measured]) -> list[Sequence[Measured]]:
    """Return the comparison; or of a mixture the normalized one, where that is known, and that of each family."""
    names = measured[0].evaluations[0].parts()
    return [
        [replace(side, evaluations=[each.parts()[name] for each in side.evaluations]) for side in measured]
        for name in names
    ] or [measured]


def table(measured: Sequence[Measured], *, latex: bool = False) -> str:
    """Return the numbers of a comparison in Markdown, or in LaTeX with booktabs."""
    first = measured[0]
    head = ["", "n", "interquartile mean", "mean", f"difference to {first.name}", f"P(better than {first.name})"]
    rows = []
    for each in measured:
        found = [pooled_intervals(each.evaluations, interquartile_mean)[-1], pooled_intervals(each.evaluations)[-1]]
        cells = [each.name, str(len(each.evaluations)), *(_number(interval) for interval in found)]
        if each is first:
            cells += ["", ""]
        else:
            cells.append(_number(difference_interval(each.evaluations, first.evaluations)))
            cells.append(_percent(improvement_interval(each.evaluations, first.evaluations)))
        rows.append(cells)
    caption = _caption(measured)
    if not latex:
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + f"\n\n{caption}\n"
    ruled = [" & ".join(cell.translate(_LATEX) for cell in cells) + r" \\" for cells in [head, *rows]]
    body = "\n".join([ruled[0], r"\midrule", *ruled[1:]]).replace("\N{MINUS SIGN}", "$-$")
    return (
        "% Needs \\usepackage{booktabs}.\n\\begin{table}\n\\centering\n\\begin{tabular}{lrrrrr}\n\\toprule\n"
        f"{body}\n\\bottomrule\n\\end{{tabular}}\n\\caption{{{caption.translate(_LATEX)}}}\n\\end{{table}}\n"
    )


def sentences(measured: Sequence[Measured]) -> list[str]:
    """Return what a text may say about each pair of groups, with numbers of runs and intervals."""
    found = []
    for pair_of in combinations(measured, 2):
        # The better one first.
        means = [pooled_intervals(each.evaluations)[-1, 0] for each in pair_of]
        one, other = pair_of if means[0] >= means[1] else pair_of[::-1]
        pair = [(each, pooled_intervals(each.evaluations, interquartile_mean)[-1]) for each in (one, other)]
        sides = " and ".join(f"{_number(interval)} for {each.head}" for each, interval in pair)
        difference = difference_interval(one.evaluations, other.evaluations)
        better = improvement_interval(one.evaluations, other.evaluations)
        decided = np.isfinite(difference[1]) and (difference[1] > 0.0 or difference[2] < 0.0)
        verdict = "" if decided else "; these runs do not tell which is better"
        found.append(
            f"After {_steps(measured)}, the interquartile mean of the return after adaptation is {sides}; the mean of "
            f"{one.name} is higher by {_number(difference)}, and it is better with probability {_percent(better)}"
            f"{verdict}. {_caption(measured)}"
        )
    return found


def _caption(measured: Sequence[Measured]) -> str:
    first = measured[0].evaluations[0]
    tasks = f"the same {len(first.tasks)} {'test' if first.fixed_tasks else 'new'} tasks"
    over = "runs" if first.fixed_tasks else "runs and tasks"
    return (
        f"Returns on {tasks} of {first.env_name} after {_steps(measured)}; in brackets 95 % intervals over {over}; n "
        "is the number of runs."
    )


def _steps(measured: Sequence[Measured]) -> str:
    steps = common_steps([each.group for each in measured])
    if not steps > 0.0:
        return "training"
    return f"{steps / 1e6:.3g} million environment steps" if steps >= 1e5 else f"{steps:,.0f} environment steps"


def _number(interval: NDArray[np.float64]) -> str:
    return " ".join(readable_interval(interval)).rstrip()


def _percent(interval: NDArray[np.float64]) -> str:
    return " ".join(readable_share(interval)).rstrip()


def check_figure(path: Path) -> None:
    """Refuse a figure that could not be written, before anything is trained."""
    if path.suffix.lower() not in _ENDINGS:
        raise ConfigError(f"--figure {path} must end with {', '.join(_ENDINGS)}")
    try:
        import matplotlib.figure  # noqa: F401
    # One that is there and broken, as beside another NumPy, may raise anything.
    except Exception as error:
        raise ConfigError(
            f"a figure needs matplotlib, which cannot be imported ({explain(error)}); run pip install "
            "'maml-rl[figures]'"
        ) from None


def write_figure(measured: Sequence[Measured], path: Path) -> None:
    """Write a figure as wide as a page: curves, interquartile means, profiles, and probabilities of improvement."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text that stays text: in PDF as TrueType, which publishers ask for.
    style: Any = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "pdf.fonttype": 42}
    style |= {"svg.fonttype": "none", "svg.hashsalt": "maml-rl", "legend.frameon": False}
    with rc_context(style):
        figure = Figure(figsize=(_WIDTH, 0.68 * _WIDTH), layout="constrained")
        (curves, means), (profiles, better) = figure.subplots(2, 2)
        _draw_curves(curves, measured)
        _draw_means(means, measured)
        _draw_profiles(profiles, measured)
        _draw_improvement(better, measured)
        handles, labels = curves.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(len(measured), 3))
        # Without the time, so that the same runs give the same file.
        date = {".pdf": "CreationDate", ".svg": "Date"}.get(path.suffix.lower())
        figure.savefig(path, dpi=300, metadata={date: None} if date else None)


def _style(index: int) -> dict[str, Any]:
    return {"color": _COLORS[index % len(_COLORS)], "linestyle": _DASHES[index % len(_DASHES)]}


def _draw_curves(axes: Any, measured: Sequence[Measured]) -> None:
    limit = common_steps([each.group for each in measured])
    by_steps = np.isfinite(limit) and limit > 0.0
    unit, name = (1e6, "million environment steps") if limit >= 1e6 else (1e3, "thousand environment steps")
    key = "evaluation/return/" if all(each.group.keys("evaluation/return/") for each in measured) else "return/"
    for index, each in enumerate(measured):
        curve = each.group.curve(each.group.keys(key)[-1], _SMOOTHING if key == "return/" else 1)
        steps = each.group.curve("env_steps").mean if by_steps else curve.iterations.astype(np.float64)
        shown = np.isfinite(curve.mean) & (steps <= limit * 1.001 if by_steps else True)
        x = steps[shown] / (unit if by_steps else 1.0)
        # A single evaluation is a point.
        marker = "o" if shown.sum() == 1 else None
        axes.plot(x, curve.mean[shown], label=each.head, marker=marker, markersize=3, **_style(index))
        # The interval of two seeds would fill the chart.
        if len(each.group.runs) > 2:
            axes.fill_between(x, curve.low[shown], curve.high[shown], color=_style(index)["color"], alpha=0.2, lw=0)
    axes.set(
        title="(a) training" if key == "return/" else "(a) evaluations during training",
        xlabel=name if by_steps else "iteration",
        ylabel="return after adaptation",
    )


def _draw_means(axes: Any, measured: Sequence[Measured]) -> None:
    for index, each in enumerate(measured):
        intervals = pooled_intervals(each.evaluations, interquartile_mean)
        for place, filled in ((0, False), (-1, True)):
            value, low, high = intervals[place]
            color = _style(index)["color"]
            face = color if filled else "white"
            label = None if index else "after adaptation" if filled else "before adaptation"
            y = index + (0.12 if filled else -0.12)
            if np.isfinite(low):
                axes.plot([low, high], [y, y], color=color, lw=1.2)
            axes.plot(value, y, "o", color=color, markerfacecolor=face, markersize=4, label=label)
    axes.set_yticks(range(len(measured)), [each.name for each in measured])
    axes.set_ylim(len(measured) - 0.5, -0.5)
    axes.set(title="(b) new tasks", xlabel="interquartile mean of the return")
    axes.legend(fontsize=7)


def _draw_profiles(axes: Any, measured: Sequence[Measured]) -> None:
    returns = np.concatenate([each.task_returns()[:, -1] for side in measured for each in side.evaluations])
    room = 0.02 * max(float(np.ptp(returns)), 1e-6)
    thresholds = np.linspace(returns.min() - room, returns.max() + room, _THRESHOLDS)
    for index, each in enumerate(measured):
        share, low, high = profile_intervals(each.evaluations, thresholds).T
        axes.plot(thresholds, share, **_style(index))
        if len(each.evaluations) > 2:
            axes.fill_between(thresholds, low, high, color=_style(index)["color"], alpha=0.2, lw=0)
    axes.set(title="(c) performance profiles", xlabel="return", ylabel="share of runs and tasks above it")
    axes.set_ylim(-0.02, 1.02)


def _draw_improvement(axes: Any, measured: Sequence[Measured]) -> None:
    pairs = list(combinations(measured, 2))
    for place, (one, other) in enumerate(pairs):
        value, low, high = improvement_interval(one.evaluations, other.evaluations)
        if np.isfinite(low):
            axes.plot([low, high], [place, place], color="black", lw=1.2)
        axes.plot(value, place, "o", color="black", markersize=4)
    axes.axvline(0.5, color="gray", lw=0.8, linestyle=":")
    axes.set_yticks(range(len(pairs)), [f"{one.name}\nbeats {other.name}" for one, other in pairs])
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    axes.set(title="(d) probability of improvement", xlabel="probability", xlim=(-0.02, 1.02))
