"""How long MAML-TRPO needs until a result, and what shortens it: `python -m benchmarks.time_to_result --train`.

The trainings are run as those of `benchmarks.learning`; tables and charts are in docs/performance.md. A result
is a return after one step, on 40 held-out tasks, that two evaluations in a row reach.
"""

from collections.abc import Sequence

from benchmarks.learning.command import run
from benchmarks.learning.plan import QUARTER_CURVATURE, ROOT, TRPO, Contender, Family, Plan, named

_NAVIGATION = Family(
    "time-to-navigation",
    "2D navigation, the published protocol",
    "../finn2017/2d-navigation.yaml",
    60,
    5,
    -11.7,
    # The authors' test.
    test_changes={"fast-batch-size": 40},
)
_HALFCHEETAH_DIR = Family(
    "time-to-halfcheetah-dir", "HalfCheetahDir, horizon 100", "halfcheetah-dir.yaml", 100, 10, 150.0
)
PLAN = Plan(
    ROOT / "docs" / "performance.md",
    named(_NAVIGATION, _HALFCHEETAH_DIR),
    named(
        TRPO,
        QUARTER_CURVATURE,
        Contender("large-steps", changes={"algorithm-settings": {"max-kl": 0.02}}),
        Contender(
            "quarter-curvature-large-steps",
            changes={"algorithm-settings": {"curvature-fraction": 0.25, "max-kl": 0.02}},
        ),
        Contender("half-the-tasks", changes={"meta-batch-size": 20}),
        Contender("prefetch", changes={"prefetch": 1}),
    ),
    {_NAVIGATION.name: (0, 1, 2), _HALFCHEETAH_DIR.name: (0, 1, 2)},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run(PLAN, arguments)


if __name__ == "__main__":
    main()
