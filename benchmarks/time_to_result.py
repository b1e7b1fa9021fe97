"""Time that meta-training takes to reach a result, and what reduces it: `benchmarks.time_to_result --train`.

The trainings run like those of `benchmarks.learning`; tables and charts are in docs/performance.md. A result is a
return after one step, on 40 held-out tasks, in two evaluations in a row; then the training ends.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.learning.command import run
from benchmarks.learning.page import chart_of, draw_curves, rows_of
from benchmarks.learning.plan import ROOT, Family, Method, Plan, named
from benchmarks.learning.results import by_seed, passing_rows


def _trpo(
    tasks: int,
    episodes: int,
    max_kl: float,
    fast_lr: float | None = None,
    *,
    conjugate_gradients: int = 10,
    curvature: float = 1.0,
) -> Method:
    """Return MAML-TRPO with these tasks, episodes and trust region, and curvature from this share of the episodes."""
    changes: dict[str, Any] = {
        "meta-batch-size": tasks,
        "fast-batch-size": episodes,
        "algorithm-settings": {
            "max-kl": max_kl,
            "cg-iters": conjugate_gradients,
            "curvature-fraction": curvature,
        },
    }
    name = f"{tasks}x{episodes}-kl-{max_kl:g}"
    if fast_lr is not None:
        name, changes["fast-lr"] = f"{name}-fast-lr-{fast_lr:g}", fast_lr
    if conjugate_gradients != 10:
        name = f"{name}-cg-{conjugate_gradients}"
    if curvature != 1.0:
        name = f"{name}-curvature-{curvature:g}"
    return Method(name, changes=changes)


# The first method of a family has the settings that its config had before these trainings.
_OF_NAVIGATION = (
    _trpo(40, 20, 0.01),
    _trpo(20, 20, 0.01),
    _trpo(20, 20, 0.03),
    _trpo(40, 20, 0.02),
    _trpo(40, 20, 0.01, conjugate_gradients=5),
    _trpo(40, 20, 0.01, conjugate_gradients=3),
    _trpo(40, 20, 0.02, conjugate_gradients=5),
    _trpo(40, 20, 0.02, conjugate_gradients=3),
    _trpo(40, 20, 0.01, curvature=0.25),
    _trpo(40, 20, 0.01, curvature=0.5),
    _trpo(40, 20, 0.02, conjugate_gradients=5, curvature=0.25),
)
_OF_HALFCHEETAH_DIR = (
    _trpo(40, 20, 0.01, 0.1),
    _trpo(40, 20, 0.01, 0.1, curvature=0.25),
    _trpo(40, 20, 0.01, 0.1, conjugate_gradients=5, curvature=0.25),
    _trpo(20, 10, 0.03, 0.5),
    _trpo(20, 10, 0.03, 0.5, conjugate_gradients=5),
    _trpo(20, 10, 0.03, 0.5, curvature=0.25),
)

# Return after one step, on 40 tasks (Finn et al. 2017, figure 4).
_PUBLISHED = -11.7
_NAVIGATION = Family(
    "time-to-navigation",
    "2D navigation, the published protocol",
    "../finn2017/2d-navigation.yaml",
    8_000_000,
    threshold=_PUBLISHED,
    # Episodes in the authors' test.
    test_changes={"fast-batch-size": 40, "evaluation-steps": 1},
    ends_at_threshold=True,
    methods=tuple(named(*_OF_NAVIGATION)),
)
_HALFCHEETAH_DIR = Family(
    "time-to-halfcheetah-dir",
    "HalfCheetahDir, horizon 100",
    "halfcheetah-dir.yaml",
    24_000_000,
    evaluations=60,
    threshold=150.0,
    test_changes={"fast-batch-size": 20, "evaluation-steps": 1},
    ends_at_threshold=True,
    methods=tuple(named(*_OF_HALFCHEETAH_DIR)),
)
PLAN = Plan(
    ROOT / "docs" / "performance.md",
    named(_NAVIGATION, _HALFCHEETAH_DIR),
    named(*_OF_NAVIGATION, *_OF_HALFCHEETAH_DIR),
    {_NAVIGATION.name: (0, 1, 2), _HALFCHEETAH_DIR.name: (0, 1, 2)},
)


def tables(plan: Plan, family: Family) -> str:
    """Return the time that the methods needed on one family, as Markdown."""
    found = rows_of(plan, family)
    assert family.threshold is not None
    if not found:
        return "No results yet."
    lines = [
        f"![{family.title}: returns](images/{chart_of(plan, family).name})",
        "",
        f"Until the return after one step reaches {family.threshold:g} in two evaluations in a row, means and ranges:",
        "",
        "| | trainings | that reach it | meta-updates | environment steps | minutes | share of the first's minutes |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    first = None
    for name, rows in found.items():
        trainings = list(by_seed(rows).values())
        reached = passing_rows(trainings, family.threshold)
        cells = [name, str(len(trainings)), str(len(reached))]
        if reached:
            minutes = [row.minutes for row in reached]
            first = float(np.mean(minutes)) if first is None else first
            updates = [row.iteration for row in reached]
            cells += [
                f"{np.mean(updates):.0f} ({min(updates)} to {max(updates)})",
                f"{np.mean([row.env_steps for row in reached]) / 1e6:.1f} M",
                f"{np.mean(minutes):.1f} ({min(minutes):.1f} to {max(minutes):.1f})",
                f"{np.mean(minutes) / first:.2f}",
            ]
        lines.append(f"| {' | '.join(cells + [''] * (7 - len(cells)))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run(PLAN, arguments, tables=tables, draw=partial(draw_curves, minutes=True))


if __name__ == "__main__":
    main()
