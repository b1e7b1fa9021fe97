"""The benchmark of more iterations of conjugate gradients."""

import pytest

from benchmarks import directions
from benchmarks.learning.plan import ROOT
from maml_rl.config import load_config

TINY = {
    "hidden-sizes": [8],
    "max-episode-steps": 10,
    "fast-batch-size": 4,
    "meta-batch-size": 4,
    "num-workers": 0,
}


def test_gain_of_a_step_is_the_predicted_one_to_first_order_and_grows_with_iterations() -> None:
    config = load_config(ROOT / "configs" / "maml" / "2d-navigation.yaml").override({**TINY, "max-kl": 1e-8})
    # With less damping, rounding in float32 would determine the last directions.
    steps = list(directions.steps(config, 2, [1e-2]))
    assert [step.iterations for step in steps] == [*directions.ITERATIONS] * 2
    for step in steps:
        assert step.own == pytest.approx(step.predicted, rel=0.05)
        assert step.predicted < 0.0
    promised = [step.predicted for step in steps[: len(directions.ITERATIONS)]]
    assert promised == sorted(promised, reverse=True)
    assert all(step.other != step.own for step in steps)
    # The first direction is the gradient's; float32 gives six digits of it.
    assert all(0.0 < step.rounded < 1e-4 for step in steps if step.iterations == 1)


def test_damping_shortens_steps_in_directions_dominated_by_rounding() -> None:
    config = load_config(ROOT / "configs" / "maml" / "2d-navigation.yaml").override(TINY)
    steps = list(directions.steps(config, 1, [1e-5, 1e-1]))
    assert [step.damping for step in steps] == [1e-5] * len(directions.ITERATIONS) + [1e-1] * len(directions.ITERATIONS)
    rounded = {step.damping: step.rounded for step in steps if step.iterations == 20}
    assert rounded[1e-1] < rounded[1e-5]


def test_an_algorithm_without_a_trust_region_is_refused() -> None:
    config = load_config(ROOT / "configs" / "promp" / "2d-navigation.yaml")
    with pytest.raises(TypeError, match="promp has no trust region; use maml-trpo"):
        next(directions.steps(config, 1))


def test_the_table_has_a_row_for_every_number_of_iterations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = directions.load_config
    monkeypatch.setattr(directions, "load_config", lambda path: load(path).override(TINY))
    directions.main(["--config", "2d-navigation", "--updates", "1", "--seeds", "0", "1", "--num-workers", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[3].strip() for line in lines[2:]] == [str(count) for count in directions.ITERATIONS]
    assert all(line.count("|") == 10 for line in lines)


def test_step_by_finite_differences_from_the_parameters_of_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load, sizes = directions.load_config, {name: value for name, value in TINY.items() if name != "hidden-sizes"}
    monkeypatch.setattr(directions, "load_config", lambda path: load(path).override(sizes))
    monkeypatch.setattr(directions, "ITERATIONS", (1,))
    options = "--run zoo:2d-navigation --differences --updates 1 --after 0 --seeds 0 --dampings 1 --num-workers 0"
    directions.main(options.split())
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(row[0], row[2]) for row in rows] == [("exact", "1"), ("exact", "5"), ("differences", "5")]
    exact, differences = (float(row[-1].rstrip("%")) for row in rows[1:])
    # Below 100 % the two steps form an acute angle.
    assert exact < differences < 100.0
    assert float(rows[2][3]) > 0.0
