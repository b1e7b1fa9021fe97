"""`maml-rl compare`: what is trained, what is refused, and what the figure, the table and the sentence say."""

import argparse
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import trim_mean

from maml_rl.cli import compare
from maml_rl.cli import main as cli
from maml_rl.config import Config
from maml_rl.errors import NonFiniteError
from maml_rl.experiment import build
from maml_rl.experiment import estimate as estimating
from maml_rl.experiment import measure as measuring
from maml_rl.experiment import train as training
from maml_rl.experiment.estimate import Estimate
from maml_rl.experiment.measure import measure
from maml_rl.report import paper
from maml_rl.results import identity as identities
from maml_rl.results.comparable import read_runs
from maml_rl.results.evaluation import Evaluation, probability_of_improvement
from maml_rl.results.verdict import GroupResult, in_words, verdicts
from maml_rl.runs.metrics import read_metrics
from tests.small_runs import SMALL, config_of

# Six short runs are made before the first test.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
OF_ALL = ["--num-workers", "0", "--tasks", "20", "--log-level", "warning"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two configs, their runs, a figure and tables; tests must not change it."""
    folder = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        values = {key: value for key, value in SMALL.items() if key != "cg-iters"}
        for name, more in {"one": {}, "other": {"algorithm": "promp", "num-batches": 9, "meta-batch-size": 4}}.items():
            Path(f"{name}.yaml").write_text(json.dumps(values | more))
        written = ["--figure", "figure.svg", "--table", "table.md"]
        assert cli.main(["compare", "one.yaml", "other.yaml", "--seeds", "3", *written, *OF_ALL]) == 0
    return folder


@pytest.fixture(scope="module")
def results(finished: Path) -> list[GroupResult]:
    """The finished runs, measured as by the command."""
    return measure(read_runs((finished / "runs/compare").iterdir())[0], 20, placement={"num-workers": 0})[0]


@pytest.fixture
def copied(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, a copy of the finished one."""
    shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def compare_options(arguments: list[str]) -> argparse.Namespace:
    """Return the options of a comparison."""
    found: list[argparse.Namespace] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "_compare", found.append)
        assert cli.main(["compare", *arguments, *OF_ALL]) == 0
    return found[0]


def runs_of(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("runs/compare/*/seed-*/config.json"))


def test_configs_are_trained_to_equal_environment_steps(finished: Path) -> None:
    runs = runs_of(finished)
    assert [run.relative_to(finished / "runs/compare").as_posix() for run in runs] == [
        f"{name}/seed-{seed}" for name in ("one", "other") for seed in range(3)
    ]
    steps = [read_metrics(run / "metrics.jsonl")[-1]["env_steps"] for run in runs]
    # An iteration has at most 2 phases with 4 episodes of 10 steps in each of 4 tasks.
    assert max(steps) - min(steps) <= 2 * 4 * 4 * 10
    assert min(steps) >= 0.99 * 4 * 2 * 3 * 4 * 5


def test_second_command_trains_nothing_and_writes_the_same_files(finished: Path, copied: Path) -> None:
    before = {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs_of(Path())}
    for path in ("figure.svg", "table.md"):
        Path(path).unlink()
    written = ["--figure", "figure.svg", "--table", "table.md"]
    assert cli.main(["compare", "one.yaml", "other.yaml", "--seeds", "3", *written, *OF_ALL]) == 0
    assert {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs_of(Path())} == before
    for path in ("figure.svg", "table.md"):
        assert Path(path).read_bytes() == (finished / path).read_bytes()


def test_figure_has_panels_names_and_numbers_of_runs_and_the_report_the_same_verdict(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(finished)
    figure, tex = tmp_path / "new/figure.svg", tmp_path / "new/table.tex"
    folders = sorted(map(str, Path("runs/compare").iterdir()))
    assert cli.main(["compare", *folders, "--figure", str(figure), "--table", str(tex), *OF_ALL]) == 0
    words = " ".join(re.findall(r">([^<>]+)</text>", figure.read_text()))
    for each in ("(a)", "(b)", "(c)", "(d)", "maml-trpo (n = 3)", "promp (n = 3)", "interquartile mean"):
        assert each in words
    assert "2DNavigation-v0: returns after 3 gradient steps on 4 episodes each." in words
    table = tex.read_text()
    assert table.count(r" \\") == 3
    assert r"95 \% intervals" in table
    shown = capsys.readouterr().out
    assert "(3 runs each)" in shown
    assert "95 % intervals over runs and tasks" in shown
    assert "Not only the algorithm differs: meta-batch-size is 3 (maml-trpo), 4 (promp)." in shown
    (sentence,) = (line for line in shown.splitlines() if line.startswith("At "))
    assert re.search(r"by \S+ \[\S+, \S+\] in the mean return after 3 gradient steps on 4 episodes each", sentence)
    page = tmp_path / "report.html"
    assert cli.main(["report", *folders, "--output", str(page), "--videos", "0", *OF_ALL]) == 0
    assert sentence in re.sub("<[^>]+>", "", page.read_text())


def test_own_code_of_the_first_run_is_known_in_all_others(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "unknown_code", lambda config, known: [] if known else [(("env-name",), "mine:Env")])
    groups, _ = read_runs((finished / "runs/compare").iterdir())
    measured, complaints = measure(groups, 1, placement={"num-workers": 0}, known=True)
    assert complaints == []
    assert [len(side.evaluations) for side in measured] == [3, 3]


def test_numbers_are_those_of_rliable_on_the_same_tasks_for_all_runs(results: list[GroupResult]) -> None:
    everyone: list[Evaluation] = [each for side in results for each in side.evaluations]
    assert all(each.tasks == everyone[0].tasks for each in everyone)
    assert not any(each.fixed_tasks for each in everyone)
    scores = {side.group.name: np.stack([each.task_returns()[:, -1] for each in side.evaluations]) for side in results}
    lines = paper.table(results).splitlines()
    places = {name: place for place, name in enumerate(map(str.strip, lines[0].split("|")))}
    for name, values in scores.items():
        (row,) = (line.split("|") for line in lines if line.startswith(f"| {name} |"))
        # As rliable computes it: 60 values are a multiple of 4.
        expected = trim_mean(values, proportiontocut=0.25, axis=None)
        shown = float(row[places["interquartile mean"]].split()[0].replace("\N{MINUS SIGN}", "-"))
        assert shown == pytest.approx(expected, abs=0.06)
    one, other = scores.values()
    wins = np.mean([(x > y) + 0.5 * (x == y) for x in one for y in other])
    assert probability_of_improvement(*(side.evaluations for side in results)) == pytest.approx(wins)


def test_figure_has_no_curve_of_runs_that_sampled_nothing_in_training(
    results: list[GroupResult], tmp_path: Path
) -> None:
    first, *others = results
    rows = [{"iteration": 0, "env_steps": 0, "loss": 1.0}]
    runs = [replace(run, metrics=rows) for run in first.group.runs]
    paper.write_figure([replace(first, group=replace(first.group, runs=runs)), *others], tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text()
    assert "(a) training" in drawn
    assert "environment steps" in drawn
    curves = drawn.rpartition("(a) training")[2].partition("(b)")[0]
    assert ["group0" in curves, "group1" in curves] == [False, True]


def test_other_test_of_one_run_does_not_change_the_verdict(copied: Path, results: list[GroupResult]) -> None:
    tested = ["test", "runs/compare/one/seed-0", "--num-workers", "0", "--log-level", "error"]
    assert cli.main([*tested, "--fast-lr", "0.9"]) == 0
    again, notices = measure(read_runs(["runs/compare"])[0], 20, placement={"num-workers": 0})
    assert [in_words(each) for each in verdicts(again)] == [in_words(each) for each in verdicts(results)]
    assert any("is not used here" in notice for notice in notices)


# Each changes one thing of one config, and nothing that is finished may be taken for it.
OTHERS = {"env-name": "PointGoal-v0", "env-kwargs": {"low": -0.2}, "max-episode-steps": 9, "algorithm": "reptile"}
OTHERS |= {"max-kl": 0.02, "fast-lr": 0.9, "num-steps": 2, "meta-batch-size": 5, "fast-batch-size": 5, "gamma": 0.9}
OTHERS |= {"hidden-sizes": [4], "nonlinearity": "relu"}


def test_no_finished_run_is_taken_for_one_of_other_settings_version_or_learners_file(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finished_of(*arguments: str) -> bool:
        (entry,) = compare._entries(compare_options([*arguments, "--seeds", "3"]))
        return entry.folder.exists() or entry.folder.name != f"one-{entry.identity[:8]}"

    values = json.loads(Path("one.yaml").read_text())
    for key, value in OTHERS.items():
        Path("one.yaml").write_text(json.dumps(values | {key: value}))
        assert not finished_of("one.yaml"), key
    Path("one.yaml").write_text(json.dumps(values))
    assert not finished_of("one.yaml", "--set", "gamma=0.9")
    for what in ("package_versions", "sources"):
        with monkeypatch.context() as patch:
            patch.setattr(identities, what, lambda *given: {"algorithm": "0" * 64})
            assert not finished_of("one.yaml")


def test_finished_runs_are_taken_and_another_config_of_one_name_is_kept_apart(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Config] = []
    make_env = build._make_env
    monkeypatch.setattr(build, "_make_env", lambda config, **how: made.append(config) or make_env(config, **how))
    Path("b").mkdir()
    Path("b/one.yaml").write_text(json.dumps(json.loads(Path("one.yaml").read_text()) | {"gamma": 0.5}))
    first, second = compare._entries(compare_options(["one.yaml", "b/one.yaml", "--seeds", "4"]))
    assert first.folder == Path("runs/compare/one") != second.folder
    assert [run.is_dir() for run in first.runs(4)] == [True, True, True, False]
    # Of each config, not of each run.
    assert len(made) == 2


def test_finished_runs_with_sets_of_tasks_by_their_seeds_are_taken_again(tmp_path: Path) -> None:
    config = config_of(tasks={"distribution": "fixed", "train": 5, "test": 3}, num_batches=1)
    for seed in range(2):
        training.train(config.override({"seed": seed}), tmp_path / f"seed-{seed}", num_workers=0)
    runs = compare._read([tmp_path])
    other = config.override({"tasks": {"distribution": "fixed", "seed": 1}})
    for each, taken in ((config, True), (other, False)):
        entry = compare._Entry("x", each, tmp_path, build.make_experiment(each).config)
        assert [entry.has(run) for run in runs] == [taken] * 2


def test_experiment_without_a_finished_run_is_named_and_not_said_to_be_the_other(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in runs_of(Path()):
        if run.parent.name == "other":
            lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
            (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert cli.main(["compare", "runs/compare/one", "runs/compare/other", *OF_ALL]) == 2
    shown = capsys.readouterr().err
    assert shown.count("is unfinished, ") == 3
    assert "`--unfinished` includes them" in shown
    assert "all of one experiment" not in shown


def test_finished_runs_are_continued_up_to_more_environment_steps(copied: Path) -> None:
    metrics = copied / "runs/compare/one/seed-0/metrics.jsonl"
    begun, steps = metrics.read_bytes(), 2 * read_metrics(metrics)[-1]["env_steps"]
    compare._trained(compare_options(["one.yaml", "other.yaml", "--seeds", "1", "--env-steps", str(steps)]))
    assert metrics.read_bytes().startswith(begun)
    assert 0.99 * steps <= read_metrics(metrics)[-1]["env_steps"] <= 1.2 * steps


def test_run_that_diverges_is_named_and_the_others_are_compared(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = []

    def fails(config: object, run: Path, **options: object) -> None:
        trained.append(run)
        if run.name == "seed-3":
            shutil.copytree(run.with_name("seed-0"), run)
            text = (run / "config.json").read_text().replace('"seed": 0', '"seed": 3')
            (run / "config.json").write_text(text)
            (run / "SHA256SUMS").unlink()
            (run / "failure.json").write_text(json.dumps({"iteration": 2, "reason": "diverged"}))
            raise NonFiniteError("the objective is not finite")

    monkeypatch.setattr(training, "train", fails)
    command = ["compare", "one.yaml", "other.yaml", "--seeds", "4", "--env-steps", "400", *OF_ALL]
    shutil.copytree("runs/compare/other/seed-0", "runs/compare/other/seed-3")
    for _ in range(2):
        assert cli.main(command) == 0
        shown = capsys.readouterr().out
        assert "maml-trpo: 3 of 4 runs; one diverged at iteration 2." in shown
    assert trained == [Path("runs/compare/one/seed-3")]


def test_learner_of_recorded_data_is_not_trained_to_environment_steps(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(estimating, "estimate", lambda config: Estimate(0.0, 1.0, 0.0, 0, 0.0, 0, 4, 2, None, None))
    assert cli.main(["compare", "one.yaml", "other.yaml", "--set", "gamma=0.5", "--env-steps", "400", *OF_ALL]) == 2
    assert "takes no environment steps; train it first" in capsys.readouterr().err


def test_longer_run_is_measured_where_the_shorter_one_ended(finished: Path) -> None:
    groups, _ = read_runs([finished / "runs/compare/one"])
    run = groups[0].runs[0]
    steps = {row["iteration"] + 1: row["env_steps"] for row in run.metrics}
    # Its checkpoints are those of iterations 2 and 4 and of the last one.
    assert run.checkpoint_near(steps[4] * 1.01) == 4
    assert run.checkpoint_near(run.env_steps) == run.finished
    assert run.checkpoint_near(0.4 * steps[2]) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["one.yaml", "other.yaml", "--figure", "x.gif"], ["x.gif", ".pdf, .svg, .png"]),
        (["one.yaml", "other.yaml", "--table", "x.csv"], ["x.csv", ".tex or .md"]),
        (["one.yaml", "other.yaml", "--env-steps", "many"], ["--env-steps", "positive number"]),
        (["one.yaml", "longer.yaml"], ["'max-episode-steps' is 10 and 11", "problems", "--set max-episode-steps=10"]),
        (["runs/compare/one"], ["all of one experiment"]),
        (["one.yaml", "one.yaml", "runs/compare/one", "--seeds", "9"], ["all of one experiment"]),
        (["runs/compare/one", "empty"], ["empty is not a run folder", "all of one experiment"]),
        (["runs/compare/one", "runs/compare/other", "--tasks", "0"], ["no policy of", "leave out --tasks 0"]),
        # Their own seeds, on which their sets of tasks depend, are not those that would be trained.
        (["fixed.yaml", "fixed_5.yaml"], ["all of one experiment"]),
        *[
            (["runs/compare/one", "runs/compare/other", option, value], [f"{option} is for configs that are trained"])
            for option, value in (("--seeds", "2"), ("--env-steps", "9"), ("--set", "gamma=0.5"))
        ],
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line_before_training(
    copied: Path, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = SMALL | {"tasks": {"distribution": "fixed", "train": 3, "test": 2}}
    for name, values in {
        "longer": SMALL | {"max-episode-steps": 11},
        "fixed": fixed,
        "fixed_5": fixed | {"seed": 5},
    }.items():
        Path(f"{name}.yaml").write_text(json.dumps(values))
    Path("empty").mkdir()
    before = sorted(Path().rglob("*"))
    assert cli.main(["compare", *OF_ALL, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words), line
    assert sorted(Path().rglob("*")) == before
