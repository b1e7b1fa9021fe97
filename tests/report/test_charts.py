import copy
import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from maml_rl.config.config import Config, load_config
from maml_rl.report import curves, task_charts, write_report
from maml_rl.report.comparison import performance_profiles, published_returns, step_returns, step_table, verdict
from maml_rl.report.markup import Markup
from maml_rl.report.paper import caption
from maml_rl.results.comparable import RunGroup, common_steps, read_runs
from maml_rl.results.evaluation import Evaluation, difference_interval
from maml_rl.results.scales import readable, readable_interval
from maml_rl.results.verdict import GroupResult, cautions
from tests.report.conftest import NAVIGATION, make_run, measured


@pytest.fixture(scope="module")
def navigation(navigation_runs: Path) -> GroupResult:
    return measured([navigation_runs], 20)[0][0]


def read(markup: Markup | None) -> ElementTree.Element:
    assert markup is not None
    return ElementTree.fromstring(markup)


def marks(root: ElementTree.Element, tag: str, css: str) -> list[ElementTree.Element]:
    return [mark for mark in root.iter(tag) if css in mark.get("class", "").split()]


def count(root: ElementTree.Element, tag: str, css: str) -> int:
    return len(marks(root, tag, css))


def places(dots: list[ElementTree.Element], axis: str) -> list[float]:
    """Return where dots are along one axis of the drawing."""
    return [float(dot.get(f"c{axis}", 0)) for dot in dots]


def rows_of(root: ElementTree.Element) -> list[list[str]]:
    return [[" ".join(cell.itertext()) for cell in row] for row in root.iter("tr")]


def over_steps(root: ElementTree.Element) -> ElementTree.Element:
    """Return the drawing over environment steps."""
    return marks(root, "g", "by-steps")[-1]


def unsmoothed(root: ElementTree.Element) -> ElementTree.Element:
    return next(mark for mark in over_steps(root).iter("g") if mark.get("class") == "smoothed width1")


def numbers(root: ElementTree.Element) -> list[dict[str, Any]]:
    """Return the numbers of a chart that the page's script saves and shows."""
    (script,) = root.iter("script")
    return list(json.loads(script.text or "")["series"])


def words(root: ElementTree.Element) -> str:
    return " ".join(text for text in root.itertext())


def evaluation(task_list: list[dict[str, object]], returns: np.ndarray) -> Evaluation:
    return Evaluation("Any-v0", 0, task_list, (0.1,) * (returns.shape[1] - 1), returns[:, :, None].astype(np.float32))


BEFORE_AND_AFTER = np.array([[-3.0, 1.0], [-2.0, 2.0], [-1.0, 3.0], [0.0, 4.0], [1.0, 5.0]])


@pytest.mark.parametrize(
    ("seeds", "drawn", "phrase"),
    [
        (1, {"line": 2, "seed": 0, "band": 0}, "--seeds"),
        (2, {"line": 6, "seed": 4, "band": 0}, "the mean over 2 seeds, the thin ones are the seeds"),
        (3, {"line": 2, "seed": 0, "band": 2}, "the mean over 3 seeds, the band its 95 % interval"),
    ],
)
def test_learning_curve_has_a_line_for_every_step_and_its_seeds_or_a_band(
    navigation: GroupResult, seeds: int, drawn: dict[str, int], phrase: str
) -> None:
    first, second = navigation.group.runs
    root = read(curves.learning_curve(replace(navigation.group, runs=[first, second, first][:seeds])))
    assert {css: count(unsmoothed(root), "path", css) for css in drawn} == drawn
    for text in ("before adaptation", "after 1 step", phrase):
        assert text in words(root)


@pytest.fixture(scope="module")
def evaluated_group(tmp_path_factory: pytest.TempPathFactory) -> RunGroup:
    """Three seeds, which are evaluated after every iteration."""
    folder = tmp_path_factory.mktemp("evaluated")
    for seed in range(3):
        make_run(folder / f"seed-{seed}", {**NAVIGATION, "seed": seed, "evaluate-every": 1, "evaluation-tasks": 2})
    (group,), _ = read_runs([folder])
    return group


def test_evaluation_curve_has_a_point_for_each_evaluation_and_a_band_around_seeds(evaluated_group: RunGroup) -> None:
    group = evaluated_group
    (before, _, after) = (group.curve(key).known() for key in group.keys("evaluation/return/"))
    assert before.iterations.tolist() == [0, 1, 2]
    for curve in (before, after):
        assert (curve.low < curve.seeds.mean(axis=0)).all()
        assert (curve.high > curve.seeds.mean(axis=0)).all()
    root = read(curves.evaluation_curve(group))
    assert (count(over_steps(root), "path", "line"), count(over_steps(root), "path", "band")) == (3, 3)
    assert "held-out tasks, which are the same in every evaluation" in words(root)
    fixed = group.config.override({"tasks": {"distribution": "fixed", "train": 5, "test": 2}})
    of_training = read(curves.evaluation_curve(replace(group, runs=[replace(run, config=fixed) for run in group.runs])))
    assert "training tasks of a fixed set, which are the same in every evaluation" in words(of_training)
    assert "the mean over 3 seeds, the band its 95 % interval" in words(root)


def test_evaluations_between_iterations_without_any_are_joined(
    evaluated_group: RunGroup, navigation: GroupResult
) -> None:
    run = evaluated_group.runs[0]
    rows = [dict(row) for row in run.metrics]
    rows[1] = {key: value for key, value in rows[1].items() if not key.startswith("evaluation/")}
    group = replace(evaluated_group, name="one", runs=[replace(run, metrics=rows)])
    root = read(curves.evaluation_curve(group))
    paths = [mark.get("d", "") for mark in marks(over_steps(root), "path", "line")]
    assert [(path.count("M"), path.count("L")) for path in paths] == [(1, 1)] * 3
    # Runs without evaluations add no line to the chart.
    compared = read(curves.compared_evaluation_curves([replace(group, index=1), navigation.group]))
    assert (count(over_steps(compared), "path", "line"), len(list(compared.iter("li")))) == (1, 1)
    assert "one, after 2 steps, 1 run" in words(compared)
    assert curves.compared_evaluation_curves([navigation.group]) is None
    assert curves.evaluation_curve(navigation.group) is None


def test_step_returns_compare_with_the_untrained_policy(navigation: GroupResult) -> None:
    root = read(step_returns([navigation]))
    for css, intervals in (("run", 0), ("untrained", 3)):
        assert count(root, "circle", css) == 3
        # The intervals of two seeds would flatten the chart.
        assert count(root, "path", css) == 1 + intervals
    assert "of two seeds, the table has them" in words(root)
    assert "On the same 20 tasks that training never drew" in words(root)
    # Episodes of 12 steps differ from the published ones.
    assert not count(root, "circle", "published")


@pytest.fixture(scope="module")
def compared(navigation_runs: Path, compared_runs: list[Path]) -> list[GroupResult]:
    return measured([navigation_runs / "seed-0", *compared_runs], 20)[0]


def test_methods_are_compared_on_one_chart_and_the_same_tasks(compared: list[GroupResult]) -> None:
    root = read(step_returns(compared))
    assert ["".join(item.itertext()) for item in root.iter("li")] == [
        "meta-trained, 1 run",
        "pretrained, 1 run",
        "oracle, sees the task, 1 run",
        "random initialization",
    ]
    # An oracle is a level, with one dot.
    assert [count(root, "circle", css) for css in ("group0", "group1", "group2", "untrained")] == [3, 3, 1, 3]
    assert [count(root, "path", "level"), count(root, "path", "interval")] == [1, 10]
    assert "On the same 20 tasks that training never drew" in words(root)
    moved = replace(compared[1].evaluations[0], tasks=[{"goal": [0.0, 0.0]}] * 4)
    elsewhere = words(read(step_returns([compared[0], replace(compared[1], evaluations=[moved])])))
    assert "different ones for each experiment" in elsewhere


def test_compared_learning_curves_name_the_steps_and_run_over_environment_steps(compared: list[GroupResult]) -> None:
    groups = [result.group for result in compared]
    root = read(curves.compared_learning_curves(groups))
    assert ["".join(item.itertext()) for item in root.iter("li")] == [
        "meta-trained, after 1 step, 1 run",
        "pretrained, without adaptation, 1 run",
        "oracle, sees the task, without adaptation, 1 run",
    ]
    # One meta-update samples before and after adaptation, and costs twice as much as one of the others. Curves end near
    # the steps that all have.
    used = [[row["env_steps"] for row in group.runs[0].metrics] for group in groups]
    assert [series["places"]["steps"] for series in numbers(root)] == [used[0][:1], used[1], used[2]]
    assert count(unsmoothed(root), "path", "line") == 2
    assert count(unsmoothed(root), "circle", "group0") == 1


def test_numbers_of_a_column_have_the_same_decimals(compared: list[GroupResult]) -> None:
    # 79.6 sets one decimal for the column, so -0.6 has no more.
    evaluations = [
        evaluation([{"goal": [0.0, 0.1 * n]} for n in range(4)], np.full((4, 2), value)) for value in (-79.6, -0.6)
    ]
    results = [
        replace(result, evaluations=[each], untrained=None) for result, each in zip(compared, evaluations, strict=False)
    ]
    cells = [cell.text for cell in read(step_table(results)).iter("td")]
    assert [cell for cell in cells if cell and "." in cell] == ["\N{MINUS SIGN}79.6"] * 4 + ["\N{MINUS SIGN}0.6"] * 4


def test_table_has_means_and_interquartile_means_of_every_policy(compared: list[GroupResult]) -> None:
    root = read(step_table(compared))
    rows = rows_of(root)
    assert rows[0] == ["", "gradient steps", "mean return", "interquartile mean"]
    # An oracle takes no steps; the others take two.
    assert [len(row) for row in rows[1:]] == [4, 3, 3, 4, 3, 3, 4, 4, 3, 3]
    assert rows[1][2].startswith(readable(compared[0].evaluations[0].intervals()[0, 0]))
    assert "for this policy on the family" in words(root)
    # The tasks of a file are fixed.
    fixed = [
        replace(result, untrained=None, evaluations=[replace(each, fixed_tasks=True) for each in result.evaluations])
        for result in compared
    ]
    assert "20 tasks of a file" in words(read(step_table(fixed)))
    assert "gives no interval" in words(read(step_table(fixed)))


def test_table_has_the_mean_of_each_of_a_few_runs(compared: list[GroupResult]) -> None:
    first = compared[0].evaluations[0]
    three = [replace(first, seed=seed, returns=first.returns - np.float32(10 * seed)) for seed in range(3)]
    rows = rows_of(read(step_table([replace(compared[0], evaluations=three, untrained=None)])))
    assert rows[0][-1] == "each run"
    expected = [float(each.task_returns()[:, 0].mean()) for each in three]
    shown = [float(number.replace("\N{MINUS SIGN}", "-")) for number in rows[1][-1].split(", ")]
    assert shown == pytest.approx(expected, abs=0.6)


def test_oracle_alone_has_a_chart_of_one_point_and_nothing_to_adapt(compared: list[GroupResult]) -> None:
    oracle = compared[-1]
    assert oracle.untrained is None
    root = read(step_returns([oracle]))
    assert (count(root, "circle", "run"), count(root, "path", "level")) == (1, 0)
    assert "this policy, oracle, sees the task" in words(root)
    assert "training does not adapt" in words(read(curves.learning_curve(oracle.group)))
    assert oracle.sampled is not None
    assert task_charts.navigation_paths(oracle.sampled) is None


def test_time_of_a_run_is_shown_by_sampling_and_update(navigation: GroupResult) -> None:
    root = read(curves.time_per_stage(navigation.group))
    assert {"sampling", "update"} <= set(words(root).split())
    widths = [float(re.findall(r"[\d.]+", bar.get("style", ""))[0]) for bar in root.iter("i")]
    assert max(widths) == 100.0


def test_charts_of_runs_without_metrics_are_left_out(navigation_runs: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_bytes((navigation_runs / "seed-0" / "config.json").read_bytes())
    (group,), _ = read_runs([tmp_path / "run"])
    made = [curves.learning_curve(group), curves.compared_learning_curves([group]), curves.time_per_stage(group)]
    made += [curves.over_iterations([group], "time/steps_per_s"), curves.over_iterations([group], "kl")]
    made += [chart([GroupResult(group, [], None, None)]) for chart in (step_returns, step_table)]
    assert made == [None] * 7


def test_long_trial_is_drawn_with_a_band_beside_the_distilled_learners(navigation: GroupResult) -> None:
    tasks = [{"goal": [float(task), 0.0]} for task in range(20)]
    returns = np.arange(40.0) + np.random.default_rng(0).normal(size=(20, 40))
    trial = replace(evaluation(tasks, returns), step_sizes=(), columns="episode")
    assert navigation.sampled is not None
    source = np.linspace(0.0, 80.0, 60, dtype=np.float32)
    sampled = replace(navigation.sampled, source_returns=source)
    result = GroupResult(navigation.group, [trial], None, sampled)
    root = read(step_returns([result]))
    assert (count(root, "path", "band"), count(root, "circle", "dot"), count(root, "path", "source")) == (1, 0, 1)
    assert {"what was learned from (dashed)", "Return by episode of the trial"} <= {*root.itertext()}
    # The curve of the source learners has as many episodes as the trial.
    (line,) = marks(root, "path", "source")
    assert len(re.findall("[ML]", line.get("d", ""))) == 40
    heads = [cell.text for cell in read(step_table([result])).iter("th")]
    assert len(heads) < 20
    assert {"1", "40"} <= set(heads)


def published_run(**changes: object) -> Config:
    config = load_config(Path(__file__).parents[2] / "configs" / "finn2017" / "2d-navigation.yaml")
    return config.override({key.replace("_", "-"): value for key, value in changes.items()})


def evaluated(episodes: int, *step_sizes: float, repetitions: int = 1) -> Evaluation:
    returns = np.zeros((2, len(step_sizes) + 1, episodes * repetitions), np.float32)
    return Evaluation("2DNavigation-v0", 0, [{}, {}], step_sizes, returns, repetitions=repetitions)


def test_published_returns_are_shown_for_as_many_steps_as_keep_their_schedule() -> None:
    published = (-40.4, -11.7, -3.3, -3.2)
    assert published_returns(published_run(), evaluated(40, 0.5, 0.25, 0.25)) == published
    assert published_returns(published_run(), evaluated(40, 0.5, 0.25, 0.125)) == published[:3]
    assert published_returns(published_run(), evaluated(40, 0.5, 0.5)) == published[:2]
    assert published_returns(published_run(), evaluated(40, 0.5, repetitions=3)) == published[:2]


def test_published_returns_are_shown_only_for_their_protocol() -> None:
    others: dict[str, object] = {"max_episode_steps": 50, "fast_batch_size": 10, "hidden_sizes": [64, 64]}
    others |= {"env_kwargs": {"low": -0.5, "high": 0.5}, "nonlinearity": "tanh", "first_order": True}
    others |= {"method": "pretrain"}
    family = {"env_name": "HalfCheetahDir-v5", "env_kwargs": {}, "max_episode_steps": 200}
    for changes in [*({key: value} for key, value in others.items()), family]:
        assert published_returns(published_run(**changes), evaluated(40, 0.5, 0.25)) is None, changes
    assert published_returns(published_run(), evaluated(20, 0.5, 0.25)) is None


def test_returns_are_drawn_over_the_number_that_distinguishes_tasks() -> None:
    task_list: list[dict[str, object]] = [{"velocity": 0.1 * index} for index in range(5)]
    root = read(task_charts.task_returns(evaluation(task_list, BEFORE_AND_AFTER)))
    before = places(marks(root, "circle", "before"), "x")
    assert before == sorted(before)
    assert count(root, "circle", "after") == 5
    assert "Return against velocity" in words(root)


def test_tasks_of_two_kinds_are_in_two_columns() -> None:
    task_list: list[dict[str, object]] = [{"direction": sign} for sign in (1, -1, 1, -1, 1)]
    root = read(task_charts.task_returns(evaluation(task_list, BEFORE_AND_AFTER)))
    after = places(marks(root, "circle", "after"), "x")
    assert max(after[1::2]) < min(after[0::2])
    assert {"1", "\N{MINUS SIGN}1"} <= {text.text for text in root.iter("text")}


def test_tasks_in_the_plane_are_maps_with_a_scale() -> None:
    task_list: list[dict[str, object]] = [{"goal": [0.1 * index, -0.1 * index]} for index in range(5)]
    root = read(task_charts.task_returns(evaluation(task_list, BEFORE_AND_AFTER)))
    assert len(list(root.iter("svg"))) == 2
    # Of all ten returns, -3 and -2 are in the lowest seventh, 4 and 5 in the highest.
    assert (count(root, "circle", "shade0"), count(root, "circle", "shade6")) == (2, 2)
    assert "5.00" in words(root)


@pytest.mark.parametrize("entry", [{"mean": [0.1, 0.2, 0.3]}, {"velocity": 1.0, "goal": [0.0, 1.0]}, {"name": "red"}])
def test_tasks_without_an_axis_are_in_the_order_in_which_they_were_drawn(entry: dict[str, object]) -> None:
    # If tasks were sorted by a noisy return, the lowest would seem to improve without any adaptation.
    returns = BEFORE_AND_AFTER[[3, 0, 4, 1, 2]]
    root = read(task_charts.task_returns(evaluation([dict(entry) for _ in range(5)], returns)))
    assert count(root, "path", "link") == 5
    dots = marks(root, "circle", "before")
    assert places(dots, "x") == sorted(places(dots, "x"))
    assert np.argsort([-height for height in places(dots, "y")]).tolist() == np.argsort(returns[:, 0]).tolist()
    assert "in the order in which they were drawn" in words(root)
    assert task_charts.task_returns(evaluation([dict(entry)] * 5, returns[:, :1])) is None, "without steps"


def test_paths_go_from_the_start_to_the_end_of_the_episode(navigation: GroupResult) -> None:
    assert navigation.sampled is not None
    root = read(task_charts.navigation_paths(navigation.sampled))
    maps = [plot for plot in root.iter("svg") if plot.get("role") == "img"]
    assert len(maps) == 8
    (line,) = (mark for mark in maps[0].iter("path") if mark.get("class") == "line before")
    (start,), (goal,) = marks(maps[0], "circle", "start"), marks(maps[0], "circle", "goal")
    points = [tuple(map(float, point.split())) for point in line.get("d", "")[1:].split("L")]
    assert points[0] == pytest.approx((float(start.get("cx", 0)), float(start.get("cy", 0))), abs=0.1)
    length = int(navigation.sampled.phases[0].lengths[0, 0])
    assert len(points) == length + 1
    # The goal and the end of the path have the same scale from meters to pixels.
    metres = np.stack(
        [navigation.sampled.phases[0].final_observations[0, 0].numpy(), navigation.sampled.evaluation.tasks[0]["goal"]]
    )
    pixels = np.array([points[-1], (float(goal.get("cx", 0)), float(goal.get("cy", 0)))]) - points[0]
    scale = np.abs(pixels).max() / np.abs(metres).max()
    np.testing.assert_allclose(pixels, metres * [scale, -scale], atol=1.0)
    # One path of each phase stands out, and all maps have the same axes.
    assert [count(maps[0], "path", css) for css in ("before", "after", "other")] == [3, 3, 4]
    assert len({tuple(text.text for text in plot.iter("text")) for plot in maps}) == 1


def test_paths_are_completely_within_axes_with_numbers(navigation: GroupResult) -> None:
    assert navigation.sampled is not None
    first, second = navigation.sampled.phases[:2]
    # A walk that ends far away.
    moved = copy.copy(first)
    moved.observations = first.observations * 30.0
    sampled = replace(navigation.sampled, phases=[moved, second, second])
    for plot in read(task_charts.navigation_paths(sampled)).iter("svg"):
        _, _, width, height = map(float, plot.get("viewBox", "").split())
        for line in marks(plot, "path", "line"):
            points = np.array([tuple(map(float, point.split())) for point in line.get("d", "")[1:].split("L")])
            assert (points >= 0.0).all()
            assert (points <= [width, height]).all()
        assert sum(text.get("text-anchor") == "end" for text in plot.iter("text")) >= 2
        assert sum(text.get("text-anchor") == "middle" for text in plot.iter("text")) >= 2


def test_tasks_are_described_in_few_words_and_chosen_over_their_range() -> None:
    assert task_charts.describe({"velocity": 1.2749}) == "velocity 1.27"
    assert task_charts.describe({"direction": -1}) == "direction \N{MINUS SIGN}1"
    assert task_charts.describe({"goal": np.array([0.5, -0.25])}) == "goal (0.5, \N{MINUS SIGN}0.25)"
    large = task_charts.describe({"transitions": np.zeros((10, 5, 10)), "kind": "a"})
    assert large == "transitions 10\N{MULTIPLICATION SIGN}5\N{MULTIPLICATION SIGN}10, kind a"
    assert task_charts.spread_out([{"velocity": speed} for speed in (0.5, 2.0, 0.0, 1.0)], 2) == [2, 1]
    assert task_charts.spread_out([{"goal": [0, 0]}] * 3, 2) == [0, 1]
    assert task_charts.spread_out([{"velocity": 1.0}], 4) == [0]


def test_recorded_infos_are_drawn_over_training_and_reported_on_new_tasks(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {**NAVIGATION, "env-name": "tests.lamp_env:Lamp-v0"})
    (group,), _ = read_runs([run])
    titles = [words(read(figure)) for figure in curves.info_curves(group)]
    assert len(titles) == 2
    assert "Mean power" in titles[0]
    assert "Mean success" in titles[1]
    options = {"tasks": 4, "num_videos": 0, "placement": {"num-workers": 0}}
    page = write_report([run], tmp_path / "report.html", **options, trust=True).read_text()
    assert "mean success" in page
    rate = r"<dt>mean success</dt><dd>[01]\.\d*<small>on new tasks after 2 steps \[[\d.]+, [\d.]+\]; [01]\.\d* before"
    assert re.search(rate, page)


@pytest.fixture(params=["light", "dark"])
def colors(request: pytest.FixtureRequest) -> dict[str, str]:
    """The colors of the charts by name, of one scheme."""
    style = (Path(curves.__file__).parent / "charts.css").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)")[:2]
    return dict(re.findall(r"--([a-z]+[0-9]?): (#[0-9a-f]{6})", light if request.param == "light" else dark))


def test_every_color_of_the_charts_has_one_meaning(colors: dict[str, str]) -> None:
    meanings = [name for name in colors if re.fullmatch(r"before|after|step\d|group\d|run|plain|published|goal", name)]
    assert len(meanings) == 2 + 4 + 6 + 4
    assert len({colors[name] for name in meanings}) == len(meanings)


# Transforms of linear light for the three kinds of color blindness; Machado, Oliveira and Fernandes 2009, severity 1,
# https://doi.org/10.1109/TVCG.2009.113
VISIONS = {
    "full": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def light_of(color: str) -> np.ndarray:
    channels = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    """Return CIELAB, in which a distance of 2.3 is just noticeable."""
    x, y, z = np.cbrt(np.maximum(TO_XYZ @ light / TO_XYZ.sum(axis=1), 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_every_reader_can_distinguish_the_colors_of_groups(colors: dict[str, str]) -> None:
    groups = [light_of(colors[f"group{number}"]) for number in range(6)]
    for vision, matrix in VISIONS.items():
        seen = [lab(np.clip(np.asarray(matrix) @ group, 0.0, 1.0)) for group in groups]
        apart = min(np.linalg.norm(one - other) for one, other in combinations(seen, 2))
        assert apart > 15, (vision, apart)
    card = TO_XYZ[1] @ light_of(colors["card"])
    for number, group in enumerate(groups):
        dim, bright = sorted((card, TO_XYZ[1] @ group))
        assert (bright + 0.05) / (dim + 0.05) >= 3.0, number


def test_profiles_compare_evaluations_and_show_their_values(compared: list[GroupResult]) -> None:
    assert performance_profiles(compared) is None
    assert "unequal environment steps" in words(read(step_returns(compared)))
    alike = [replace(result, group=replace(result.group, runs=compared[0].group.runs)) for result in compared]
    assert "unequal environment steps" not in words(read(step_returns(alike)))
    root = read(performance_profiles(alike))
    assert [count(root, "path", css) for css in ("group0", "group1", "group2", "untrained")] == [2, 2, 2, 2]
    # A profile begins where all returns are above, and ends where none is.
    (shown,) = (series for series in numbers(root) if series["css"] == "group2")
    assert (shown["name"], shown["values"][0], shown["values"][-1]) == ("oracle, sees the task", 1.0, 0.0)
    assert all(
        low <= share <= high for share, low, high in zip(*map(shown.get, ("values", "low", "high")), strict=True)
    )
    assert "Half of the returns are above" in str(ElementTree.tostring(root))
    alone = replace(compared[0], untrained=None)
    assert performance_profiles([alone]) is None


def test_curves_have_a_layer_for_every_smoothing_and_every_horizontal_axis(navigation: GroupResult) -> None:
    root = read(curves.learning_curve(navigation.group))
    layers = [mark.get("class") for mark in over_steps(root).iter("g")]
    assert layers[1:] == ["smoothed width1", "smoothed width5", "smoothed width25"]
    metrics = [metrics for run in navigation.group.runs for metrics in run.metrics]
    seconds = [each["time/sample_s"] + each["time/update_s"] for each in metrics]
    steps = np.reshape([each["env_steps"] for each in metrics], (2, 3))
    # Means are at the steps of the run that took fewer; the other is interpolated there.
    fewest = steps[np.argmin(steps[:, -1])]
    for step, series in enumerate(numbers(root)):
        returns = np.reshape([each[f"return/step_{step}"] for each in metrics], (2, 3))
        expected = np.mean([np.interp(fewest, *run) for run in zip(steps, returns, strict=True)], axis=0)
        np.testing.assert_allclose(series["values"], expected, rtol=1e-5)
        assert series["places"]["iterations"] == [1, 2, 3]
        assert series["places"]["steps"] == fewest.tolist()
        of_run = np.reshape(seconds, (2, 3))
        minutes = np.cumsum(np.mean([np.interp(fewest, *run) for run in zip(steps, of_run, strict=True)], axis=0)) / 60
        np.testing.assert_allclose(series["places"]["minutes"], minutes, rtol=0.2)
    assert {"environment steps", "iterations", "minutes of training"} <= {text.text for text in root.iter("text")}
    # Three iterations, without fractions.
    across = next(mark for mark in root.iter("g") if mark.get("class") == "by by-iterations")
    assert {text.text for text in across.iter("text")} == {"0", "1", "2", "3", "iterations"}


def test_chart_of_runs_that_took_no_environment_steps_has_iterations_instead(navigation: GroupResult) -> None:
    without = [replace(run, metrics=[{**row, "env_steps": 0} for row in run.metrics]) for run in navigation.group.runs]
    root = read(curves.learning_curve(replace(navigation.group, runs=without)))
    assert "environment steps" not in words(root)
    assert over_steps(root).get("class") == "by by-steps by-iterations"


def shorter(group: RunGroup) -> RunGroup:
    """Return a group of the same runs without their last iteration."""
    runs = [replace(run, metrics=run.metrics[:-1]) for run in group.runs]
    return replace(group, runs=runs, index=1, name="shorter")


def test_compared_curves_end_at_their_common_steps(navigation: GroupResult) -> None:
    whole = read(curves.learning_curve(navigation.group))
    root = read(curves.compared_learning_curves([navigation.group, shorter(navigation.group)]))
    steps = numbers(whole)[0]["places"]["steps"]
    assert len(steps) == 3
    assert [series["places"]["steps"] for series in numbers(root)] == [steps[:2]] * 2
    assert "environment steps, which all runs have" in words(root)


def test_verdict_has_difference_interval_runs_tasks_and_steps(navigation: GroupResult) -> None:
    better = [replace(each, returns=each.returns + np.float32(50)) for each in navigation.evaluations]
    other = replace(navigation, group=replace(navigation.group, index=1, name="better"), evaluations=better)
    text = words(read(verdict([navigation, other]))).replace("  ", " ")
    steps = f"{common_steps([navigation.group]):,.0f}"
    value, bounds = readable_interval(difference_interval(better, navigation.evaluations))
    where = "after 2 gradient steps on 4 episodes each, on the same 20 new tasks (2 runs each)"
    assert (
        f"At {steps} environment steps, better leads navigation by {value} {bounds} in the mean return {where}." in text
    )
    assert "Besides" not in text
    noise = np.random.default_rng(0).normal(size=(2, *better[0].returns.shape)).astype(np.float32)
    alike = [
        replace(each, returns=each.returns + extra) for each, extra in zip(navigation.evaluations, noise, strict=True)
    ]
    same = words(read(verdict([navigation, replace(other, evaluations=alike)]))).replace("  ", " ")
    assert "these runs do not tell which is better" in same
    assert "leads" not in same
    assert verdict([navigation]) is None


@pytest.mark.parametrize(
    ("moved", "phrase"),
    [((0, 0), "experiment"), ((1, 0), "run of better"), ((1, 2), "run of better"), ((1, 2, 1, 2), "run")],
)
def test_verdict_says_whose_runs_have_different_tasks(
    navigation: GroupResult, moved: tuple[int, ...], phrase: str
) -> None:
    # Two runs of the one and, where there are four numbers, of the other experiment.
    tasks = [[{"goal": [0.0, 0.01 * (place + number)]} for place in range(20)] for number in moved]
    everyone = [replace(each, tasks=those) for each, those in zip([*navigation.evaluations] * 2, tasks, strict=False)]
    sides = [everyone[2:] or navigation.evaluations, everyone[:2]]
    results = [
        replace(navigation, group=replace(navigation.group, index=index, name=name), evaluations=evaluations)
        for index, (name, evaluations) in enumerate(zip(("one", "better"), sides, strict=True))
    ]
    text = words(read(verdict(results))).replace("  ", " ")
    assert f"on 20 new tasks, different ones for each {phrase} (2 runs each)" in text
    assert f"new tasks (different ones for each {phrase}) of " in caption(results)


def test_runs_of_one_seed_are_named_beside_the_verdict(navigation: GroupResult) -> None:
    runs = [navigation.group.runs[0], navigation.group.runs[0]]
    other = replace(navigation, group=replace(navigation.group, name="twice", runs=runs))
    sentence = "Several runs of twice have one seed: they are not independent, and intervals are too narrow."
    assert sentence in cautions([navigation, other])
    assert cautions([navigation, navigation]) == []


def test_verdict_on_unequal_steps_is_about_what_training_recorded_at_common_steps(navigation: GroupResult) -> None:
    # The shorter one is better after two iterations, whatever the other one reaches after three.
    key = "return/step_1"
    runs = [
        replace(run, metrics=[{**row, key: row[key] + 50.0} for row in run.metrics]) for run in navigation.group.runs
    ]
    better = shorter(replace(navigation.group, runs=runs))
    text = words(read(verdict([navigation, replace(navigation, group=better)]))).replace("  ", " ")
    steps = f"{common_steps([better]):,.0f}"
    assert f"At {steps} environment steps, shorter leads navigation by 50.0" in text
    assert "in the mean return after 1 gradient step on 4 episodes, on the tasks of training (2 runs each)" in text
    # As of a pretrained policy, which training does not adapt.
    unadapted = [
        replace(run, metrics=[{name: row[name] for name in row if name != key} for row in run.metrics])
        for run in better.runs
    ]
    text = words(read(verdict([navigation, replace(navigation, group=replace(better, runs=unadapted))])))
    each = ("navigation after 1 gradient step on 4 episodes", "shorter without adaptation")
    assert all(part in text.replace("  ", " ") for part in each)
    once = replace(better, runs=[replace(run, metrics=run.metrics[:1]) for run in better.runs])
    coarse = replace(navigation.group, runs=[replace(run, metrics=run.metrics[1:]) for run in navigation.group.runs])
    text = words(read(verdict([replace(navigation, group=group) for group in (coarse, once)])))
    assert "have no returns at common environment steps, and are not compared" in text


def test_verdict_names_settings_that_differ_besides_the_algorithm(navigation: GroupResult) -> None:
    runs = [replace(run, config=run.config.override({"fast-lr": 0.7})) for run in navigation.group.runs]
    other = replace(navigation, group=replace(navigation.group, index=1, runs=runs))
    text = words(read(verdict([navigation, other])))
    assert "Besides algorithm and seed, the configs differ in fast-lr (0.1; 0.7)." in text


def test_verdict_on_single_runs_says_what_their_interval_leaves_out(compared: list[GroupResult]) -> None:
    first, second, _ = compared
    alike = replace(second, group=replace(second.group, runs=first.group.runs))
    text = words(read(verdict([first, alike])))
    assert "on the same 20 new tasks (1 run each); with a single run there is no interval" in text
    assert "does not tell which is better" in text
    assert "One run of meta-trained and pretrained: how much runs differ by their seed is unknown" in text
    assert "leads" not in text
