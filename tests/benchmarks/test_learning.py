"""The runner of trainings, its CSV files, and the pages that are made from them."""

import math
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.learning import page
from benchmarks.learning.command import run
from benchmarks.learning.plan import COMPARISON, LONG, Family, Method, Plan, env_steps_of, named, read_plan
from benchmarks.learning.results import Row, read_rows, write_rows
from benchmarks.learning.training import Job, checkpoint_bytes, run_jobs, say_what_is_left, turns
from benchmarks.suite import SUITE
from maml_rl.errors import ConfigError, MamlRLError, NonFiniteError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.load_policy import load_policy
from maml_rl.experiment.train import train
from maml_rl.metalearners.registry import algorithm_of
from maml_rl.runs.metrics import read_metrics
from maml_rl.runs.run_folder import METRICS
from maml_rl.task_distributions.task_files import save_tasks

TINY = {"max-episode-steps": 4, "hidden-sizes": [4], "fast-batch-size": 2, "meta-batch-size": 2, "evaluation-steps": 1}
# Three meta-updates of an algorithm with an inner step, of 32 environment steps each.
FAMILY = Family("navigation", "Navigation", "2d-navigation.yaml", 96, 2, TINY)


def tiny_plan(folder: Path) -> Plan:
    page = folder / "results" / "page.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text("Before.\n\n<!-- results of navigation -->\nOld.\n<!-- end of results -->\n\nAfter.\n")
    methods = named(
        Method("promp", "promp"), Method("pretrain", changes={"method": "pretrain"}), Method("random", trained=False)
    )
    return Plan(page, named(FAMILY), methods, {"navigation": (0, 1)})


def row(seed: int, iteration: int, *returns: float, tasks: int = 2) -> Row:
    return Row(seed, iteration, 100 * iteration, 60.0 * iteration, 60.0, "1", np.tile([returns], (tasks, 1)))


def plan_with(folder: Path, rows: dict[str, list[Row]], tasks: Sequence[dict[str, Any]] = ()) -> Plan:
    """Return the plan, with results of some methods on these tasks."""
    plan = tiny_plan(folder)
    for name, of_method in rows.items():
        write_rows(plan.folder(FAMILY) / f"{name}.csv", of_method)
    save_tasks(plan.folder(FAMILY) / "tasks.json", "HalfCheetahDir-v5", tasks)
    return plan


def train_tiny(plan: Plan, folder: Path, *options: str) -> None:
    run(plan, ["--train", "--num-workers", "0", "--runs", str(folder / "runs"), *options])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    """A completed plan; tests must not write to it."""
    folder = tmp_path_factory.mktemp("learning")
    plan = tiny_plan(folder)
    train_tiny(plan, folder, "--methods", "promp", "random")
    return plan, folder


def test_rows_of_other_settings_are_replaced_together_by_a_training_that_is_as_long(tmp_path: Path) -> None:
    (job, _), csv = tiny_jobs(tmp_path, replace(FAMILY, steps=32 * 8, evaluations=4)), tmp_path / "promp.csv"
    settings = job.method.settings(job.family)
    others = [replace(row(seed, 3, 1, 1), settings="other") for seed in (0, 1)]
    alike = [replace(row(2, 8, 1, 1), settings=settings), row(3, 8, 1, 1)]
    write_rows(csv, [*others, *alike])
    job.publish(row(0, 2, 5, 5))
    assert [each.key for each in read_rows(csv)] == [(0, 3), (1, 3), (2, 8), (3, 8)]
    job.publish(replace(row(0, 4, 5, 5), settings=settings))
    assert [each.key for each in read_rows(csv)] == [(0, 2), (0, 4), (2, 8), (3, 8)]
    assert [each.settings for each in read_rows(csv)] == ["", settings, settings, ""]
    write_rows(csv, [replace(row(0, 8, 1, 1), settings="other")])
    assert not job.is_over()


def test_run_with_other_settings_is_neither_taken_for_that_of_the_plan_nor_continued(tmp_path: Path) -> None:
    (job, _) = tiny_jobs(tmp_path, FAMILY)
    run_jobs([job], 5.0)
    assert job.is_over()
    other = replace(job, method=replace(job.method, changes={"fast-lr": 0.3}))
    assert [point for _, point in turns([other])] == other.points()
    with pytest.raises(ConfigError, match=r"seed-0.*fast-lr"):
        run_jobs([other], 5.0)


def test_settings_differ_where_a_training_would_and_not_by_its_seed_or_length() -> None:
    method = Method("promp", "promp", {"fast-lr": 0.2})
    settings = method.settings(FAMILY)
    assert settings == method.settings(replace(FAMILY, name="other", steps=10**9, evaluations=3))
    assert settings == replace(method, changes={"fast-lr": 0.2, "gamma": 0.99}).settings(FAMILY)
    assert settings != replace(method, changes={"fast-lr": 0.3}).settings(FAMILY)
    assert settings != method.settings(replace(FAMILY, algorithm_changes={"promp": {"gamma": 0.5}}))


def test_plans_with_the_same_csv_files_have_the_same_settings() -> None:
    shared = [name for name in COMPARISON.families if name in SUITE.families]
    assert shared == ["2d-navigation", "halfcheetah-dir"]
    for name in shared:
        for method in COMPARISON.methods.keys() & SUITE.methods.keys():
            found = {plan.methods[method].settings(plan.families[name]) for plan in (COMPARISON, SUITE)}
            assert len(found) == 1, (name, method)


@pytest.mark.slow
def test_rows_are_those_of_plain_training_and_evaluation(done: tuple[Plan, Path], tmp_path: Path) -> None:
    plan, folder = done
    rows = read_rows(folder / "results" / "navigation" / "promp.csv")
    assert [each.key for each in rows] == [(seed, point) for seed in (0, 1) for point in (0, 1, 3)]
    config = plan.methods["promp"].config(FAMILY, 1)
    trained = train(config, tmp_path / "run", num_workers=0).state_dict()
    resumed = load_policy(folder / "runs" / "navigation" / "promp" / "seed-1").state_dict()
    assert all((trained[name] == tensor).all() for name, tensor in resumed.items())
    experiment = make_experiment(config)
    experiment.restore("latest", tmp_path / "run")
    tasks = experiment.load_tasks(folder / "results" / "navigation" / "tasks.json")
    assert len(tasks) == 40
    returns = evaluate(experiment, tasks=tasks, num_workers=0).task_returns()
    np.testing.assert_allclose(rows[-1].task_returns, returns, atol=6e-3)
    assert rows[-1].env_steps == 3 * 2 * 2 * 2 * 4
    assert rows[-1].digest == read_metrics(tmp_path / "run" / METRICS)[-1]["digest"]
    assert rows[-1].settings == plan.methods["promp"].settings(FAMILY)


@pytest.mark.slow
def test_bytes_of_a_checkpoint_are_known_before_it_is_written(done: tuple[Plan, Path]) -> None:
    plan, folder = done
    (written,) = (folder / "runs" / "navigation" / "promp" / "seed-0").glob("checkpoints/*3/tensors.safetensors")
    expected = checkpoint_bytes(make_experiment(plan.methods["promp"].config(FAMILY, 0)))
    # The header of the file has names and shapes.
    assert expected <= written.stat().st_size <= expected + 4096


@pytest.mark.slow
def test_finished_trainings_are_not_repeated(done: tuple[Plan, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plan, folder = done
    before = {path: path.read_bytes() for path in (folder / "results").rglob("*") if path.is_file()}
    monkeypatch.setattr("benchmarks.learning.training.Job.advance", lambda *_: pytest.fail("nothing is left to do"))
    train_tiny(plan, folder, "--methods", "promp", "random")
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.slow
def test_trainings_stop_when_the_time_is_over_and_are_resumed(done: tuple[Plan, Path], tmp_path: Path) -> None:
    plan, folder = tiny_plan(tmp_path), done[1]
    choice = ("--methods", "promp", "--seeds", "1")
    train_tiny(plan, tmp_path, *choice, "--minutes", "0")
    for _ in range(4):
        # Long enough only for the current iteration.
        train_tiny(plan, tmp_path, *choice, "--minutes", "0.0001")
    train_tiny(plan, tmp_path, *choice)
    mine, whole = (read_rows(each / "results" / "navigation" / "promp.csv") for each in (tmp_path, folder))
    for found, wanted in zip(mine, [each for each in whole if each.seed == 1], strict=True):
        np.testing.assert_array_equal(found.returns(), wanted.returns())


@pytest.mark.slow
def test_page_is_made_between_its_marks_only_from_the_csv_files(done: tuple[Plan, Path], tmp_path: Path) -> None:
    plan, folder = done
    text = plan.page.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert "Old." not in text
    assert "| [promp](navigation/promp.csv) | 2 | 3 | 0.0 M |" in text
    assert "| [random](navigation/random.csv) | 2 | 0 | 0.0 M |" in text
    chart = folder / "images" / "page-navigation.svg"
    drawn = chart.read_bytes()
    moved = (folder / "runs").rename(tmp_path / "elsewhere")
    run(plan, [])
    moved.rename(folder / "runs")
    assert plan.page.read_text() == text
    assert chart.read_bytes() == drawn


@pytest.mark.slow
def test_page_without_a_place_for_results_is_refused(done: tuple[Plan, Path]) -> None:
    plan, _ = done
    text = plan.page.read_text()
    plan.page.write_text("Nothing.\n")
    with pytest.raises(ValueError, match="navigation"):
        page.write_page(plan)
    plan.page.write_text(text)


def test_unknown_method_is_refused_with_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(tiny_plan(tmp_path), ["--methods", "prom"])
    assert "did you mean 'promp'" in capsys.readouterr().err


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    rows = [row(seed, iteration, -1.5, iteration + seed / 4) for seed in (1, 0) for iteration in (0, 5, 10)]
    rows[0] = replace(rows[0], digest="abc")
    write_rows(path, rows)
    found = read_rows(path)
    assert [each.key for each in found] == [(0, 0), (0, 5), (0, 10), (1, 0), (1, 5), (1, 10)]
    assert all(each.task_returns.shape == (2, 2) for each in found)
    assert [list(each.returns()) for each in found[3:]] == [[-1.5, 0.25], [-1.5, 5.25], [-1.5, 10.25]]
    assert [each.digest for each in found] == ["", "", "", "abc", "", ""]
    write_rows(path, found)
    assert read_rows(path)[2].minutes == pytest.approx(11.0)


def test_success_rates_are_kept_and_shown_where_a_family_has_them(tmp_path: Path) -> None:
    rates = np.repeat([[0.0, 1.0], [0.1, 0.5]], 10, axis=0)
    without = [row(seed, 3, -3, -2, tasks=20) for seed in (0, 1)]
    promp = [replace(each, task_successes=rates) for each in without]
    rows = {"promp": [*promp, row(0, 0, -3, -2, tasks=20)], "pretrain": without}
    plan = plan_with(tmp_path, rows, [{"direction": value} for value in range(5)])
    start, first, _ = read_rows(plan.folder(FAMILY) / "promp.csv")
    assert start.task_successes is None
    np.testing.assert_array_equal(first.task_successes, rates)
    table = page.tables(plan, replace(FAMILY, steps=1000)).splitlines()
    assert next(line for line in table if line.startswith("| | runs")).endswith(
        "| before | after 1 step | each run | success before | success after 1 step | beats `pretrain` |"
    )
    assert "| 5 % [" in next(line for line in table if line.startswith("| [promp]"))
    assert "| 75 % [" in next(line for line in table if line.startswith("| [promp]"))
    assert next(line for line in table if line.startswith("| [pretrain]")).endswith("|  |  |  |")


def test_table_has_each_training_and_intervals_within_the_returns_that_are_possible(tmp_path: Path) -> None:
    assert FAMILY.ranges() == {"return": (-math.inf, 0.0)}
    tasks = np.linspace(-0.5, 0.5, 20)[:, None]
    levels = (-1.0, -9.0, -80.0)
    rows = [
        replace(row(seed, 3, 1, 1), task_returns=np.hstack([tasks + level] * 2)) for seed, level in enumerate(levels)
    ]
    plan = plan_with(tmp_path, {"promp": rows}, [{"goal": [0.0, 0.1 * n]} for n in range(20)])
    table = page.tables(plan, replace(FAMILY, steps=1000))
    assert "| -1.0, -9.0, -80.0 |" in table
    assert re.search(r"\| -19\.5 \[-\d+\.\d, 0\.0\] \|", table), table


def test_rates_of_episodes_become_as_many_episodes_as_they_need_at_least() -> None:
    for count in (1, 3, 10, 60):
        rates = np.round(np.arange(count + 1) / count, 4)[:, None]
        evaluation = replace(row(0, 3, 1, tasks=count + 1), task_successes=rates).evaluation()
        assert evaluation.infos["success"].shape == evaluation.returns.shape == (count + 1, 1, count)
        np.testing.assert_allclose(evaluation.task_returns("success"), rates, atol=5e-5)


def test_a_caution_names_the_method_that_it_is_about(tmp_path: Path) -> None:
    skewed = np.repeat(np.exp(2.0 * np.random.default_rng(2).normal(size=(60, 1))), 2, axis=1)
    rows = {
        "promp": [replace(row(seed, 3, 1, 1), task_returns=skewed) for seed in (0, 1)],
        "pretrain": [replace(row(0, 3, 1, 1), task_returns=np.linspace([0.0, 0.0], [1.0, 1.0], 60))],
    }
    plan = plan_with(tmp_path, rows, [{"direction": value} for value in range(60)])
    text = page.tables(plan, replace(FAMILY, steps=1000))
    assert text.count("this skewed") == text.count("promp: with returns this skewed") == 1


def tiny_jobs(folder: Path, family: Family) -> list[Job]:
    return [Job(family, Method("promp", "promp"), seed, folder / "runs", folder, 0) for seed in (0, 1)]


def test_published_rows_are_replaced_by_those_of_an_equally_long_training(tmp_path: Path) -> None:
    write_rows(tmp_path / "promp.csv", [row(0, 0, 1, 1), row(0, 3, 1, 1), row(1, 3, 1, 1)])
    job, other = tiny_jobs(tmp_path, replace(FAMILY, steps=32 * 8, evaluations=4))
    before = (tmp_path / "promp.csv").read_bytes()
    for point in (0, 2):
        assert (job, point) in turns([job, other])
        job.publish(row(0, point, 5, 5))
    assert (tmp_path / "promp.csv").read_bytes() == before
    job.publish(row(0, 4, 5, 5))
    assert [each.key for each in read_rows(tmp_path / "promp.csv")] == [(0, 0), (0, 2), (0, 4), (1, 3)]
    assert list(turns([job])) == [(job, 6), (job, 8)]
    # The run is missing, and the published rows are incomplete.
    job.run_csv.unlink()
    assert [point for _, point in turns([job])] == [0, 2, 4, 6, 8]
    write_rows(tmp_path / "promp.csv", [row(0, 8, 1, 1)])
    assert not list(turns([job]))


def test_rows_that_a_killed_command_has_not_published_are_published_by_the_next(tmp_path: Path) -> None:
    (job, _), rows = tiny_jobs(tmp_path, FAMILY), [row(0, 0, 1, 1), row(0, 1, 2, 2), row(0, 3, 3, 3)]
    write_rows(job.run_csv, rows)
    write_rows(job.csv, rows[:2])
    assert run_jobs([job], 0.0)
    assert [each.key for each in read_rows(job.csv)] == [(0, 0), (0, 1), (0, 3)]


def test_training_that_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, lines = tiny_jobs(tmp_path, FAMILY), list[str]()

    def advance(job: Job, point: int, *_: Any) -> Row:
        if job.seed == 0 and point == 1:
            job.run.mkdir(parents=True)
            (job.run / "failure.json").write_text('{"iteration": 1, "reason": "diverged"}\n')
            raise NonFiniteError("a return is NaN")
        return row(job.seed, point, 0, 0)

    monkeypatch.setattr("benchmarks.learning.training.Job.advance", advance)
    for in_order in (False, True):
        with pytest.raises(MamlRLError, match="1 of 2 trainings failed") if not in_order else nullcontext():
            run_jobs(jobs, 5.0, lines.append, in_order=in_order)
    assert [each.key for each in read_rows(jobs[0].csv)] == [(0, 0), (1, 0), (1, 1), (1, 3)]
    (said,) = [line for line in lines if "failed" in line]
    assert re.fullmatch("navigation, promp, seed 0 failed: NonFiniteError in .*: a return is NaN", said)
    lines.clear()
    say_what_is_left(jobs, say=lines.append)
    assert lines[0].startswith("ended: navigation, promp, seed 0 diverged at iteration 1; remove ")
    assert lines[1] == "nothing is left"


def test_families_that_need_a_missing_extra_are_left_out_or_refused_where_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Job] = []
    monkeypatch.setattr("benchmarks.learning.command.run_jobs", lambda jobs, minutes, **_: seen.extend(jobs))
    monkeypatch.setattr("benchmarks.learning.command.importlib.util.find_spec", lambda name: None)
    plan = tiny_plan(tmp_path)
    arm = replace(FAMILY, name="arm", changes={**TINY, "env-name": "MetaWorld/ML1-push-v3"})
    plan = replace(plan, families=named(FAMILY, arm), seeds=dict.fromkeys(("navigation", "arm"), (0,)))
    run(plan, ["--train"])
    assert {job.family.name for job in seen} == {"navigation"}
    remedy = "arm needs the extra metaworld; docs/families.md says how to install it"
    assert f"left out: {remedy}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run(plan, ["--train", "--families", "arm"])
    assert f"--families: {remedy}" in capsys.readouterr().err
    run(plan, ["--train", "--families", "navigation"])
    assert "left out" not in capsys.readouterr().out


def test_family_may_name_the_methods_that_are_trained_on_it_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Job] = []
    monkeypatch.setattr("benchmarks.learning.command.run_jobs", lambda jobs, minutes, **_: seen.extend(jobs))
    plan = tiny_plan(tmp_path)
    run(plan, ["--train"])
    assert {job.method.name for job in seen} == set(plan.methods)
    seen.clear()
    plan = replace(plan, families=named(replace(FAMILY, methods=("random",))))
    run(plan, ["--train"])
    assert {job.method.name for job in seen} == {"random"}
    seen.clear()
    run(plan, ["--train", "--methods", "promp"])
    assert {job.method.name for job in seen} == {"promp"}


def test_methods_are_compared_at_the_last_iteration_that_all_of_their_seeds_have() -> None:
    found = {
        "far": [row(seed, iteration, 0, 1) for seed in (0, 1) for iteration in (0, 5, 10)],
        "uneven": [row(0, 0, 0, 1), row(0, 5, 0, 1), row(0, 10, 0, 1), row(1, 0, 0, 1), row(1, 5, 0, 1)],
        "begun": [row(0, 0, 0, 1), row(0, 5, 0, 1), row(1, 0, 0, 1)],
        "random": [row(0, 0, 0, 1), row(1, 0, 0, 1)],
    }
    keys = {name: [each.key for each in rows] for name, rows in page.final_rows(found).items()}
    assert keys == {
        "far": [(0, 10), (1, 10)],
        "uneven": [(0, 5), (1, 5)],
        "begun": [(0, 5)],
        "random": [(0, 0), (1, 0)],
    }


def test_trainings_that_went_on_have_a_line_of_their_own(tmp_path: Path) -> None:
    going_on = [row(0, 0, -3, -2), row(0, 1, -2, -1), row(0, 4, -2, -0.5)]
    rows = {
        "promp": [*going_on, row(1, 0, -3, -2), row(1, 1, -2, -1)],
        "pretrain": [row(seed, iteration, -3, -2) for seed in (0, 1) for iteration in (0, 4)],
    }
    plan = plan_with(tmp_path, rows, [{"goal": np.zeros(2)}] * 2)
    family = replace(FAMILY, steps=1000)
    assert "earlier settings" not in page.tables(plan, family)
    found = page.rows_of(plan, family)
    assert {name: [each.key for each in rows] for name, rows in page.with_continued(found).items()} == {
        "promp": [each.key for each in found["promp"]],
        "promp, continued": [(0, 0), (0, 1), (0, 4)],
        "pretrain": [each.key for each in found["pretrain"]],
    }
    lines = page.tables(plan, family).splitlines()
    assert [line.split(" | ")[:4] for line in lines if line.startswith("| [promp")] == [
        ["| [promp](navigation/promp.csv)", "2", "1", "0.0 M"],
        ["| [promp, continued](navigation/promp.csv)", "1", "4", "0.0 M"],
    ]
    write_rows(plan.folder(FAMILY) / "pretrain.csv", [replace(each, settings="other") for each in rows["pretrain"]])
    assert "\n\nWith earlier settings than those of the plan: pretrain.\n\n" in page.tables(plan, family)


@pytest.mark.parametrize(
    ("changes", "algorithm", "points"),
    [
        # 4 trials of 2 episodes of 4 steps; as many episodes before and after a step; without a step; with three steps.
        ({"observe-last": True, "meta-batch-size": 4}, "rl2", [0, 10, 20, 30]),
        ({"meta-batch-size": 4}, "promp", [0, 5, 10, 15]),
        ({"meta-batch-size": 4, "method": "pretrain"}, "maml", [0, 10, 20, 30]),
        ({"num-steps": 3}, "promp", [0, 5, 10, 15]),
        ({"num-steps": 2}, "promp", [0, 6, 13, 20]),
    ],
)
def test_evaluations_are_at_the_same_environment_steps_for_every_batch(
    changes: dict[str, Any], algorithm: str, points: list[int]
) -> None:
    method = Method("small", algorithm, changes)
    family = replace(FAMILY, steps=960, evaluations=3, algorithm_changes={"small": {"gamma": 0.5}, "rl2": {}})
    assert method.points(family) == points
    config = method.config(family, 0)
    assert (config.num_batches, config.checkpoint_every, config.gamma) == (points[-1], points[-1] // 3, 0.5)


PLAN = """\
page: page.md
seeds: [0]
steps: 256
evaluations: 2
methods:
  - {name: promp, configs: promp}
  - {name: rl2, configs: rl2, changes: {observe-last: true}}
families:
  - name: navigation
    title: Navigation
    config: 2d-navigation.yaml
    changes: {max-episode-steps: 4, fast-batch-size: 2, meta-batch-size: 2, evaluation-steps: 1}
    minutes: {promp: 3, rl2: 5.5}
    methods: [promp, rl2]
"""


def plan_file(folder: Path, text: str = PLAN) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "page.md").write_text("<!-- results of navigation -->\n<!-- end of results -->\n")
    (folder / "plan.yaml").write_text(text)
    return folder / "plan.yaml"


def options_of(path: Path) -> list[str]:
    return ["--plan", str(path), "--runs", str(path.parent / "runs"), "--num-workers", "0"]


def carry_out(path: Path, *options: str) -> None:
    run(COMPARISON, [*options_of(path), *(options or ["--train"])])


def untimed_rows(path: Path) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each file, as texts without their seconds."""
    names = [each.name for each in fields(Row) if "seconds" not in each.name]
    return {
        each.name: [{name: str(getattr(row, name)) for name in names} for row in read_rows(each)]
        for each in sorted((path.parent / "navigation").glob("*.csv"))
    }


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_trainings_side_by_side_have_the_rows_of_each_alone(tmp_path: Path) -> None:
    beside, alone = plan_file(tmp_path / "beside"), plan_file(tmp_path / "alone")
    carry_out(beside, "--train", "--at-once", "2")
    carry_out(alone)
    assert untimed_rows(beside) == untimed_rows(alone)


def test_plan_says_what_is_left_of_it_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    carry_out(plan_file(tmp_path / "plan"), "--left")
    assert capsys.readouterr().out.splitlines() == [
        "left: navigation, promp, seed 0: from meta-update 0 of 8, about 3.0 minutes",
        "left: navigation, rl2, seed 0: from meta-update 0 of 16, about 5.5 minutes",
        "left in all: 2 jobs, about 8 minutes",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("methods: [promp, rl2]", "methods: [promp, rl3]", "navigation names the method 'rl3'; did you mean 'rl2'?"),
        ("seeds: [0]", "seed: [0]", "is not a plan: seeds: Field required"),
        ("steps: 256", "steps: many", "is not a plan: steps: expected a valid integer, got 'many'"),
        ("meta-batch-size: 2", "meta-batch-sise: 2", "meta-batch-sise"),
        ("page.md", "other.md", "there is no page"),
        ("name: navigation", "name: other", "has no marks for other"),
    ],
)
def test_wrong_plan_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        carry_out(plan_file(tmp_path / "plan", PLAN.replace(old, new)))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "plan" / "runs").exists()


def test_plan_of_long_trainings_has_the_published_protocols_and_fits_into_days() -> None:
    plan = read_plan(LONG)
    assert list(plan.families)[:3] == ["halfcheetah-vel-long", "ant-dir-long", "halfcheetah-dir-long"]
    assert page.marks(plan) == list(plan.families)
    for family in plan.families.values():
        assert family.methods[:4] == ("rl2", "maml-trpo", "varibad", "promp")
        assert set(family.minutes) == set(family.methods)
        for name in family.methods:
            method = plan.methods[name]
            config = method.config(family, 2)
            sizes = {"pearl": (5, 1)} | dict.fromkeys(("rl2", "rl2-transformer", "varibad"), (1000, 2))
            assert (config.meta_batch_size, config.fast_batch_size) == sizes.get(name, (40, 20))
            assert config.max_episode_steps == 200
            # Its checkpoints would be more than those of the plan.
            assert config.evaluate_every is None
            whole = method.steps or 100_000_000
            assert 0.99 * whole < config.num_batches * env_steps_of(config) <= whole
    assert 3 * sum(sum(family.minutes.values()) for family in plan.families.values()) < 30 * 60


@pytest.mark.slow
def test_trainings_of_the_long_plan_can_be_made_and_carried() -> None:
    plan = read_plan(LONG)
    first, *others = plan.families.values()
    for family, names in ((first, first.methods), *((family, ("rl2", "varibad")) for family in others)):
        for name in names:
            experiment = make_experiment(plan.methods[name].config(family, 0))
            assert checkpoint_bytes(experiment) < 16 * 2**20, (family.name, name)


def test_run_whose_checkpoints_are_too_large_to_carry_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = PLAN.replace("evaluation-steps: 1", "evaluation-steps: 1, hidden-sizes: [3000, 3000]")
    with pytest.raises(SystemExit):
        carry_out(plan_file(tmp_path / "plan", wide), "--train", "--largest-file", "16")
    error = capsys.readouterr().err
    # Three numbers of four bytes for each of 9 million weights.
    assert "navigation, promp, seed 0: a checkpoint takes 103." in error
    assert "more than the 16 MiB of --largest-file" in error
    assert not (tmp_path / "plan" / "runs").exists()


def test_page_shows_the_methods_of_the_family_alone_as_long_as_they_are_planned(tmp_path: Path) -> None:
    rows = [row(0, iteration, -3, -2) for iteration in (0, 1, 2)]
    plan = plan_with(tmp_path, dict.fromkeys(("promp", "random"), rows))
    assert [each.iteration for each in page.rows_of(plan, replace(FAMILY, steps=100))["promp"]] == [0, 1]
    assert list(page.rows_of(plan, FAMILY)) == ["promp", "random"]
    assert list(page.rows_of(plan, replace(FAMILY, methods=("random",)))) == ["random"]


def trainings(*means: float, spread: float = 0.1) -> list[Row]:
    """Return rows of one training for each mean, on thirty tasks."""
    random = np.random.default_rng(0)
    tasks = np.linspace(-5.0, 5.0, 30)
    return [
        Row(seed, 10, 1000, 1.0, 1.0, "1", np.stack([tasks, tasks + mean + spread * random.normal(size=30)], axis=1))
        for seed, mean in enumerate(means)
    ]


@pytest.mark.parametrize(
    ("means", "steps", "parts"),
    [
        (
            {"a": (1.0, 1.1, 1.2), "b": (3.0, 3.1, 3.2), "pretrain": (-9.0, -9.1, -9.2)},
            {},
            (
                r"^\*\*b leads\*\* a by 2\.0 \[1\.\d, 2\.\d\] at 0\.0 M steps\. ",
                r" Its interquartile mean is 3\.1 \[",
                r"It beats `pretrain` on the same task in 100 % of the runs\.$",
            ),
        ),
        (
            {"a": (0.0, 2.0, 4.0), "b": (1.0, 2.0, 3.5), "c": (-50.0, -50.0, -51.0)},
            {},
            (
                r"^\*\*No algorithm leads all others\.\*\* b has the highest interquartile mean, 2\.2 \[",
                "At equal environment steps, the 95 % interval of its difference to a includes 0, that to c is above 0",
            ),
        ),
        (
            {"a": (1.0, 1.1), "b": (3.0, 3.1), "c": (2.0, 2.1), "d": (0.0, 0.1)},
            {"b": 4_000_000, "c": 3_700_000, "d": 3_500_000},
            (r" a \(0\.0 M\) and d \(3\.5 M\) were trained for fewer steps than b \(4\.0 M\)\.$",),
        ),
        (
            {"a": (1.0, 1.1), "b": (3.0,), "oracle": (9.0, 9.0)},
            {},
            (
                r"^\*\*No statement is possible\*\*: it needs several runs of at least two algorithms\.",
                r"One run each, which is no evidence: b\.$",
            ),
        ),
    ],
    ids=["one leads", "none leads", "other lengths", "single runs"],
)
def test_sentence_says_as_much_as_the_intervals_of_several_trainings_allow(
    means: dict[str, tuple[float, ...]], steps: dict[str, int], parts: tuple[str, ...]
) -> None:
    finals = {name: trainings(*values) for name, values in means.items()}
    for name, number in steps.items():
        finals[name] = [replace(each, env_steps=number) for each in finals[name]]
    sentence = page.leader(finals)
    assert all(re.search(part, sentence) for part in parts), sentence


def test_methods_are_compared_at_equal_environment_steps() -> None:
    def rows(*returns: float) -> list[Row]:
        """Evaluations of three trainings at 0, 100, 200 ... environment steps."""
        noise = np.random.default_rng(len(returns)).normal(size=(20, 2))
        return [
            replace(row(seed, number, 0.0, 0.0), task_returns=np.add(noise, [value - 1.0, value + 0.01 * seed]))
            for seed in (0, 1, 2)
            for number, value in enumerate(returns)
        ]

    found = {"far": rows(0.0, 1.0, 5.0, 9.0), "near": rows(0.0, 3.0), "pretrain": rows(0.0, 0.0, 0.0)}
    one, other = page.at_equal_steps(found["far"], found["near"]) or ([], [])
    assert [[each.key for each in rows] for rows in (one, other)] == [[(0, 1), (1, 1), (2, 1)]] * 2
    sentence = page.leader(found)
    assert sentence.startswith("**No algorithm leads all others.** far has the highest interquartile mean, ")
    assert "At equal environment steps, the 95 % interval of its difference to near is below 0." in sentence
    # One task has no interval.
    few = {name: [replace(each, task_returns=each.task_returns[:1]) for each in rows] for name, rows in found.items()}
    assert "the 95 % interval of its difference to near cannot be computed." in page.leader(few)
    # A method that is not trained, and one that was never evaluated where the other one ended.
    random = [row(seed, 0, 0.0, 0.0) for seed in (0, 1, 2)]
    assert page.at_equal_steps(found["far"], random) == (found["far"][3::4], random)
    assert page.at_equal_steps(found["near"], [row(seed, n, 0.0, 0.0) for seed in (0, 1, 2) for n in (0, 9)]) is None


@pytest.mark.parametrize("plan", [COMPARISON, SUITE, read_plan(LONG)], ids=["comparison", "suite", "long"])
def test_committed_page_and_charts_are_those_of_the_committed_results(plan: Plan, tmp_path: Path) -> None:
    text = plan.page.read_text(encoding="utf-8")
    for family in (family for family in plan.families.values() if page.rows_of(plan, family)):
        assert page.tables(plan, family) in text
        page.draw_curves(plan, family, tmp_path / "chart.svg")
        assert (tmp_path / "chart.svg").read_text() == page.chart_of(plan, family).read_text(), family.name


@pytest.mark.parametrize("plan", [COMPARISON, SUITE], ids=lambda plan: plan.page.stem)
def test_every_method_has_a_config_for_every_family(plan: Plan) -> None:
    for family in plan.families.values():
        for method in [plan.methods[name] for name in plan.methods_of(family)]:
            config = method.config(family, 3)
            assert (config.seed, config.num_batches) == (3, max(method.points(family)[-1], 1))
            algorithm_of(config)


def test_no_method_is_compared_with_a_pretraining_that_has_not_begun(tmp_path: Path) -> None:
    rows = {"promp": [row(0, 0, -3, -2), row(0, 3, -2, -1)], "pretrain": [row(0, 0, -3, -2), row(0, 3, -2, -2)]}
    plan = plan_with(tmp_path, rows, [{"direction": value} for value in range(5)])
    family = replace(FAMILY, steps=1000)
    assert "| 100 % |" in page.tables(plan, family)
    write_rows(plan.folder(FAMILY) / "pretrain.csv", rows["pretrain"][:1])
    assert " % |" not in page.tables(plan, family)


def test_few_different_tasks_are_shown_one_by_one(tmp_path: Path) -> None:
    returns = np.array([[0.0, 10.0], [0.0, 50.0], [0.0, 30.0]])
    seeds = [Row(seed, 3, 96, 1.0, 1.0, "1", returns + seed) for seed in (0, 1)]
    plan = plan_with(tmp_path, {"promp": seeds}, [{"direction": sign} for sign in (1, -1, 1)])
    text = page.tables(plan, replace(FAMILY, steps=1000))
    assert "| | direction -1 | direction 1 | mean |" in text
    assert "| promp | 50.5 | 20.5 | 35.5 |" in text
