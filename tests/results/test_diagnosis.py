"""Why a curve is flat: runs that are broken on purpose, and metrics of each kind of learner."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import sem

from benchmarks.flat_curves import BROKEN, NAVIGATION, SIZES, found
from maml_rl.cli import main as cli
from maml_rl.results.comparable import Run
from maml_rl.results.diagnosis import diagnose
from maml_rl.runs.metrics import MetricsLog
from tests.small_runs import config_of


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_cause_of_a_run_that_is_broken_on_purpose_is_first_or_second(name: str, tmp_path: Path) -> None:
    cause, settings = BROKEN[name]
    names = list(dict.fromkeys(each.name for each in found(settings, tmp_path / "run")))
    assert cause in names[:2], names


@pytest.mark.slow
def test_run_that_learns_has_no_cause(tmp_path: Path) -> None:
    assert found(NAVIGATION | SIZES | {"meta-batch-size": 20, "num-batches": 25}, tmp_path / "run") == []


def run_of(algorithm: str, rows: list[dict[str, Any]], **settings: Any) -> Run:
    config = config_of(num_batches=len(rows), meta_batch_size=20).model_copy(
        update={"algorithm": algorithm, "algorithm_settings": settings}
    )
    return Run(Path("run"), config, [{"iteration": index, **row} for index, row in enumerate(rows)])


# A return that rises, and one that does not.
RISING = [-20.0 + index + 0.3 * (index % 2) for index in range(20)]
FLAT = [-20.0 + 0.3 * (index % 3) for index in range(20)]


LOUD, LARGE = "too much exploration", "updates too large"


def soft(returns: list[float], **more: Any) -> list[dict[str, Any]]:
    """Metrics of a soft actor-critic."""
    return [
        {"return/round_0": value - 5.0, "return/round_1": value, "replay/steps": 9, "updates": 5, "loss/critics": 1.0}
        | {key: each(index) if callable(each) else each for key, each in more.items()}
        for index, value in enumerate(returns)
    ]


@pytest.mark.parametrize(
    ("algorithm", "rows", "settings", "expected"),
    [
        ("pearl", soft(RISING, kl=1e-9, entropy=-3.0), {}, None),
        ("pearl", soft(FLAT, kl=1e-9, entropy=-3.0), {}, "noise"),
        ("pearl", soft(FLAT, **{"loss/critics": lambda index: 10.0**index}), {}, "values do not fit"),
        ("pearl", soft(FLAT, updates=0), {"warmup-steps": 99}, "no update"),
        ("rsac", soft(FLAT, updates=0), {"warmup-trials": 99}, "no update"),
        ("rsac", soft(FLAT, entropy=0.01), {}, "no exploration"),
        ("ad", [{"loss": 2.0 - 0.001 * index} for index in range(20)], {"warmup": 900}, "updates too small"),
        ("dpt", [{"loss": 2.0 - 0.09 * index} for index in range(20)], {}, None),
        ("varibad", [{"return/episode_0": each, "explained_variance": -0.2} for each in FLAT], {}, "values do not fit"),
        ("rl2", [{"return/episode_0": each, "kl": 0.5} for each in FLAT], {"learning-rate": 1.0}, LARGE),
        ("rl2", [{"return/episode_0": each, "kl": 1e-9} for each in FLAT], {}, "updates too small"),
        ("rl2", [{"return/episode_0": RISING[min(i, 19 - i)]} for i in range(20)], {}, LARGE),
        ("reptile", [{"return/step_1": RISING[min(i, 19 - i)]} for i in range(20)], {"meta-step-size": 1.0}, LARGE),
        ("maml-trpo", [{"return/step_0": -20.0 - each, "return/step_1": each} for each in RISING], {}, None),
        ("rl2", [{"return/episode_0": each, "entropy": 1.6} for each in FLAT], {"entropy-coefficient": 10.0}, LOUD),
        ("rl2", [{"return/episode_0": each, "entropy": 1.6} for each in RISING], {"entropy-coefficient": 10.0}, None),
    ],
)
def test_first_cause_of_every_learner(
    algorithm: str, rows: list[dict[str, Any]], settings: dict[str, Any], expected: str | None
) -> None:
    causes = diagnose(run_of(algorithm, rows, **settings))
    assert (causes[0].name if causes else None) == expected, causes
    assert not any(word in cause.remedy for cause in causes for word in ("nan", "None")), causes
    if algorithm == "reptile":
        assert causes[0].remedy.startswith("a smaller meta-step-size (now 1);")
    assert [cause.weight for cause in causes] == sorted((cause.weight for cause in causes), reverse=True)


@pytest.mark.parametrize(
    ("family", "returns", "expected"),
    [
        ("Bandit-K5-v0", [1.0] * 20, []),
        ("Bandit-K5-v0", [0.0] * 20, ["no reward"]),
        # Ten steps at -0.1 each; and a return that rose from there to that of nearly always being on the goal.
        ("GridNavi-v0", [-1.0] * 20, ["no reward"]),
        ("GridNavi-v0", [-1.0] * 3 + [9.9] * 17, []),
        # 0 is the greatest reward of navigation.
        ("2DNavigation-v0", [0.0] * 20, []),
        ("their:Family-v0", [3.0] * 20, []),
        ("their:Family-v0", [0.0] * 20, ["no reward"]),
        # One iteration has no other return to differ from.
        ("their:Family-v0", [-3.0], []),
    ],
)
def test_constant_return_lacks_rewards_only_at_the_least_of_the_family(
    family: str, returns: list[float], expected: list[str]
) -> None:
    run = run_of("rl2", [{"return/episode_0": each, "no_signal": 1.0} for each in returns])
    run = replace(run, config=run.config.model_copy(update={"env_name": family}))
    assert [cause.name for cause in diagnose(run) if cause.name == "no reward"] == expected
    assert (diagnose(run) == []) == (not expected and family != "their:Family-v0")


def test_first_actions_far_outside_are_a_cause_unless_the_return_rises() -> None:
    for returns, expected in ((FLAT, True), (RISING, False)):
        run = run_of("maml-trpo", [{"return/step_0": each - 5.0, "return/step_1": each} for each in returns])
        run = replace(run, config=run.config.model_copy(update={"output_scale": 30.0}))
        assert ("actions too large" in [cause.name for cause in diagnose(run)]) == expected


def test_one_iteration_does_not_tell_whether_adaptation_helps() -> None:
    rows = [{"return/step_0": -20.0, "return/step_1": -20.0 - 0.01 * index} for index in range(20)]
    found = {length: [each.name for each in diagnose(run_of("maml-trpo", rows[:length]))] for length in (2, 20)}
    assert "adaptation does nothing" in found[20]
    assert "adaptation does nothing" not in found[2]
    # Of two gains in the second half, as scipy has their standard error.
    uneven = [{"return/step_0": -20.0, "return/step_1": -20.0 + gain} for gain in (0.3, 0.3, -0.5, 1.0)]
    seen = " ".join(each.seen for each in diagnose(run_of("maml-trpo", uneven)))
    assert f"changes the return by 0.25, with a standard error of {sem([-0.5, 1.0]):.2g}" in seen


def test_every_cause_has_a_row_of_the_page() -> None:
    root = Path(__file__).resolve().parents[2]
    source = (root / "maml_rl/results/diagnosis.py").read_text()
    page = (root / "docs/flat-curves.md").read_text()
    names = {line.strip().strip('",') for line in source.split("Cause(\n")[1:] for line in line.splitlines()[:1]}
    assert len(names) >= 12
    assert all(name in page for name in names), names


def test_command_shows_causes_with_a_remedy_also_of_unfinished_and_diverged_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(num_batches=100, env_name="DarkRoom-v0")
    for run in (tmp_path / "unfinished", tmp_path / "diverged"):
        run.mkdir()
        (run / "config.json").write_text(config.to_json())
        log = MetricsLog(run / "metrics.jsonl")
        for index in range(12):
            log.write({"iteration": index, "env_steps": index, "return/step_0": 0.0, "return/step_1": 0.0})
        log.close()
    (tmp_path / "diverged" / "failure.json").write_text('{"iteration": 12, "reason": "diverged"}')
    assert cli.main(["diagnose", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "12 of 100 iterations" in shown
    assert shown.count("  1. no reward: 100% of the mean returns are exactly 0") == 2
    assert "max-episode-steps" in shown
    assert json.loads((tmp_path / "unfinished" / "config.json").read_text())["num-batches"] == 100
