"""The suite's aggregates, against closed forms, and its page."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks import suite, time_to_result
from benchmarks.learning.command import run
from benchmarks.learning.page import draw_curves
from benchmarks.learning.plan import PRETRAIN, TRPO, Contender, Family, Plan, named
from benchmarks.learning.results import Row, write_rows
from maml_rl.metalearners.registry import algorithm_of

FAMILY = Family("family", "Family", "2d-navigation.yaml", 10, 10)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Two seeds of each of three contenders on four tasks; the oracle has no steps."""
    page = tmp_path / "page.md"
    page.write_text("<!-- results of family -->\n<!-- end of results -->\n")
    plan = Plan(page, named(FAMILY), named(TRPO, PRETRAIN, Contender("oracle")), {FAMILY.name: (0, 1)})
    for name, returns in (("maml-trpo", [0.0, 9.0]), ("pretrain", [0.0, 3.0]), ("oracle", [20.0])):
        rows = [
            Row(seed, iteration, 1000 * iteration, 1.0, 1.0, "1", np.arange(4.0)[:, None] + returns + seed)
            for seed in (0, 1)
            for iteration in (0, 10)
        ]
        write_rows(plan.folder(FAMILY) / f"{name}.csv", rows)
    return plan


def test_interquartile_mean_is_over_trainings_and_tasks(plan: Plan) -> None:
    scores = suite.scores_of(plan, FAMILY)
    np.testing.assert_array_equal(scores["maml-trpo"], [[9, 10, 11, 12], [10, 11, 12, 13]])
    estimates = suite.interquartile_means(scores)
    # The middle four of the eight.
    assert estimates["maml-trpo"][0] == pytest.approx(11.0)
    assert estimates["oracle"][0] == pytest.approx(22.0)
    assert all(low < value < high for value, low, high in estimates.values())


def test_improvement_is_the_share_of_pairs(plan: Plan) -> None:
    scores = suite.scores_of(plan, FAMILY)
    np.testing.assert_array_equal(suite.improvements(scores, "pretrain")["maml-trpo"], [1.0, 1.0, 1.0])
    scores["twin"] = scores["maml-trpo"]
    assert suite.improvements(scores, "maml-trpo")["twin"][0] == pytest.approx(0.5)


def test_bootstrap_draws_trainings_of_each_task_and_tasks() -> None:
    values = np.arange(6.0).reshape(2, 3)
    drawn = suite.resampled(values)
    assert (drawn % 3 == np.arange(3)).all()
    assert {tuple(each) for each in (drawn // 3).reshape(-1, 6)} == set(product((0.0, 1.0), repeat=6))
    drawn = suite.resampled(values, resample_tasks=True) % 3
    assert (drawn[:, 0] == drawn[:, 1]).all()
    assert {tuple(each) for each in drawn[:, 0]} == set(product((0.0, 1.0, 2.0), repeat=3))


def test_page_has_the_table_and_the_chart(plan: Plan) -> None:
    pytest.importorskip("matplotlib")
    run(plan, [], tables=suite.tables, draw=suite.draw)
    text = plan.page.read_text()
    assert "| maml-trpo | 2 | 10 | 0.0 M | 11.0 [" in text
    assert "| 100 % |  |" in text
    chart = plan.page.parent / "images" / "page-family.svg"
    drawn = chart.read_bytes()
    run(plan, [], tables=suite.tables, draw=suite.draw)
    assert chart.read_bytes() == drawn


def test_committed_page_shows_the_committed_results() -> None:
    text = suite.SUITE.page.read_text(encoding="utf-8")
    for family in suite.SUITE.families.values():
        assert suite.tables(suite.SUITE, family) in text


@pytest.mark.parametrize("plan", [suite.SUITE, time_to_result.PLAN], ids=lambda plan: plan.page.stem)
def test_every_contender_has_a_config_for_every_family(plan: Plan) -> None:
    for family in plan.families.values():
        for contender in plan.contenders.values():
            algorithm_of(contender.config(family, 3))


@pytest.mark.parametrize("name", ["2d-navigation", "halfcheetah-dir", "halfcheetah-vel", "ant-dir", "tabular-mdp"])
def test_rl2_has_as_many_episodes_of_training_as_a_gradient_step(name: str) -> None:
    family, contenders = suite.SUITE.families[name], suite.SUITE.contenders
    trials, steps = (contenders[name].config(family, 3) for name in ("rl2", "promp"))
    assert trials.meta_batch_size * trials.fast_batch_size == steps.meta_batch_size * steps.fast_batch_size * (
        1 + steps.num_steps
    )


def test_settings_of_an_algorithm_on_a_family_come_last() -> None:
    changes = {"promp": {"fast-lr": 0.3}, "maml-trpo": {"max-kl": 0.5}}
    family = Family("f", "F", "halfcheetah-vel.yaml", 3, 1, changes={"fast-lr": 0.7}, algorithm_changes=changes)
    promp, trpo = Contender("promp", "promp", {"fast-lr": 0.9}).config(family, 0), Contender("trpo").config(family, 0)
    assert (promp.fast_lr, trpo.fast_lr) == (0.3, 0.7)
    assert trpo.algorithm_settings["max-kl"] == 0.5
    assert "max-kl" not in promp.algorithm_settings


def test_committed_page_shows_how_long_results_take() -> None:
    text = time_to_result.PLAN.page.read_text(encoding="utf-8")
    for family in time_to_result.PLAN.families.values():
        assert time_to_result.tables(time_to_result.PLAN, family) in text


@pytest.mark.slow
@pytest.mark.parametrize("name", list(time_to_result.PLAN.families))
def test_every_word_of_a_chart_is_within_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    plan = time_to_result.PLAN
    draw_curves(plan, plan.families[name], tmp_path / "chart.svg")
    figure = pyplot.gcf()
    figure.canvas.draw()
    monkeypatch.undo()
    (legend,) = figure.legends
    words = [*legend.get_texts(), *figure.texts]
    words += [axis.label for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    words += figure.axes[-1].get_yticklabels()
    extents = {text.get_text(): text.get_window_extent() for text in words if text.get_text()}
    assert len(extents) > 8
    pyplot.close(figure)
    for text, extent in extents.items():
        assert figure.bbox.x0 <= extent.x0 <= extent.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= extent.y0 <= extent.y1 <= figure.bbox.y1, text


def test_time_to_a_result_is_that_of_the_first_of_two_evaluations_that_reach_it(tmp_path: Path) -> None:
    family = Family("family", "Family", "2d-navigation.yaml", 30, 10, 5.0)
    contenders = named(Contender("slow"), Contender("fast"), Contender("never"))
    plan = Plan(tmp_path / "page.md", named(family), contenders, {family.name: (0, 1)})
    assert time_to_result.tables(plan, family) == "No results yet."
    for name, reached, seconds in (("slow", 20, 60.0), ("fast", 10, 30.0), ("never", 99, 1.0)):
        rows = [
            Row(
                seed, iteration, 10**5 * iteration, seconds * iteration * (1 + seed), 0.0, "1", np.array([[0.0, value]])
            )
            for seed in (0, 1)
            for iteration in (0, 10, 20, 30)
            for value in (9.0 if iteration >= reached else 0.0,)
        ]
        write_rows(plan.folder(family) / f"{name}.csv", rows)
    table = time_to_result.tables(plan, family).splitlines()
    assert table[-3] == "| slow | 2 | 2 | 20 (20 to 20) | 2.0 M | 30.0 (20.0 to 40.0) | 1.00 |"
    assert table[-2] == "| fast | 2 | 2 | 10 (10 to 10) | 1.0 M | 7.5 (5.0 to 10.0) | 0.25 |"
    assert table[-1] == "| never | 2 | 0 |  |  |  |  |"
