"""`maml-rl compare`: what is trained, what is refused, and what the figure, the table and the sentence say."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import trim_mean

from maml_rl.cli import main as cli
from maml_rl.errors import ConfigError
from maml_rl.report import paper
from maml_rl.results.comparable import read_runs
from maml_rl.results.evaluation import Evaluation
from maml_rl.runs.metrics import read_metrics
from maml_rl.task_distributions.task_files import save_tasks
from tests.small_runs import SMALL

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


def runs_of(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("runs/compare/*/seed-*/config.json"))


def test_configs_are_trained_to_equal_environment_steps(finished: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = runs_of(finished)
    assert [run.relative_to(finished / "runs/compare").as_posix() for run in runs] == [
        f"{name}/seed-{seed}" for name in ("one", "other") for seed in range(3)
    ]
    steps = [read_metrics(run / "metrics.jsonl")[-1]["env_steps"] for run in runs]
    # An iteration has at most 2 phases with 4 episodes of 10 steps in each of 4 tasks.
    assert max(steps) - min(steps) <= 2 * 4 * 4 * 10
    assert min(steps) >= 0.99 * 4 * 2 * 3 * 4 * 5


def test_second_command_trains_nothing_and_writes_the_same_files(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    before = {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs_of(Path())}
    for path in ("figure.svg", "table.md"):
        Path(path).unlink()
    written = ["--figure", "figure.svg", "--table", "table.md"]
    assert cli.main(["compare", "one.yaml", "other.yaml", "--seeds", "3", *written, *OF_ALL]) == 0
    assert {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs_of(Path())} == before
    for path in ("figure.svg", "table.md"):
        assert Path(path).read_bytes() == (finished / path).read_bytes()


@pytest.mark.parametrize("ending", [".pdf", ".png", ".svg"])
def test_figure_has_panels_names_and_numbers_of_runs(
    finished: Path, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(finished)
    figure, tex = tmp_path / f"new/figure{ending}", tmp_path / "new/table.tex"
    folders = [str(path) for path in (finished / "runs/compare").iterdir()]
    assert cli.main(["compare", *sorted(folders), "--figure", str(figure), "--table", str(tex), *OF_ALL]) == 0
    start = {".pdf": b"%PDF", ".png": b"\x89PNG", ".svg": b"<?xml"}
    assert figure.read_bytes().startswith(start[ending])
    if ending == ".svg":
        words = " ".join(re.findall(r">([^<>]+)</text>", figure.read_text()))
        for each in ("(a)", "(b)", "(c)", "(d)", "maml-trpo (n = 3)", "promp (n = 3)", "interquartile mean"):
            assert each in words
    table = tex.read_text()
    assert table.count(r" \\") == 3
    assert r"95 \% intervals" in table
    shown = capsys.readouterr().out
    assert "n = 3" in shown
    assert "95 % intervals over runs and tasks" in shown
    assert "Not only the algorithm differs: meta-batch-size is 3 (maml-trpo), 4 (promp)." in shown


def test_tasks_of_a_file_are_those_that_are_compared(finished: Path, tmp_path: Path) -> None:
    groups, _ = read_runs((finished / "runs/compare").iterdir())
    goals = [[0.25, -0.5], [0.0, 0.125]]
    save_tasks(tmp_path / "tasks.json", SMALL["env-name"], [{"goal": goal} for goal in goals])
    for side in paper.measure(groups, tmp_path / "tasks.json", num_workers=0):
        for each in side.evaluations:
            assert each.fixed_tasks
            assert [np.asarray(task["goal"]).tolist() for task in each.tasks] == goals


def test_numbers_are_those_of_rliable_on_the_same_tasks_for_all_runs(finished: Path) -> None:
    groups, _ = read_runs((finished / "runs/compare").iterdir())
    measured = paper.measure(groups, 20, num_workers=0)
    everyone: list[Evaluation] = [each for side in measured for each in side.evaluations]
    assert all(each.tasks == everyone[0].tasks for each in everyone)
    assert not any(each.fixed_tasks for each in everyone)
    scores = {side.name: np.stack([each.task_returns()[:, -1] for each in side.evaluations]) for side in measured}
    table = paper.table(measured).splitlines()
    for name, values in scores.items():
        (row,) = (line for line in table if line.startswith(f"| {name} |"))
        # As rliable computes it.
        expected = trim_mean(values, proportiontocut=0.25, axis=None)
        assert row.split("|")[3].split()[0] == f"{expected:.2f}".replace("-", "\N{MINUS SIGN}")
    one, other = scores.values()
    wins = np.mean([(x > y) + 0.5 * (x == y) for x in one for y in other])
    found = paper.improvement_interval(measured[0].evaluations, measured[1].evaluations)
    assert found[0] == pytest.approx(wins)


def test_longer_run_is_measured_where_the_shorter_one_ended(finished: Path, tmp_path: Path) -> None:
    for run in runs_of(finished):
        shutil.copytree(run, tmp_path / run.parent.name / run.name)
    groups, _ = read_runs([tmp_path / "one", tmp_path / "other"])
    run = groups[0].runs[0]
    steps = {row["iteration"] + 1: row["env_steps"] for row in run.metrics}
    # Its checkpoints are those of iterations 2 and 4 and of the last one.
    assert paper._checkpoint_near(run, steps[4] * 1.01) == 4
    assert paper._checkpoint_near(run, run.env_steps) == "last"
    with pytest.raises(paper.ConfigError, match="no checkpoint near"):
        paper._checkpoint_near(run, 0.4 * steps[2])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["one.yaml", "other.yaml", "--figure", "x.gif"], ["x.gif", ".pdf, .svg, .png"]),
        (["one.yaml", "other.yaml", "--table", "x.csv"], ["x.csv", ".tex or .md"]),
        (["one.yaml", "other.yaml", "--env-steps", "many"], ["--env-steps", "positive number"]),
        (["one.yaml", "nowhere"], ["there is no config 'nowhere'"]),
        (
            ["one.yaml", "longer.yaml"],
            ["'max-episode-steps' is 10 and 11", "different problems", "--set max-episode-steps=10"],
        ),
        (["runs/compare/one"], ["all of one experiment"]),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line_before_training(
    finished: Path,
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    Path("longer.yaml").write_text(json.dumps(SMALL | {"max-episode-steps": 11}))
    before = sorted(Path().rglob("*"))
    assert cli.main(["compare", *arguments, *OF_ALL]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words), line
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("reason", ["No module named 'matplotlib'", "numpy.core.multiarray failed to import"])
def test_figure_without_a_matplotlib_that_imports_says_why(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text(f"raise ImportError({reason!r})")
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"a figure needs matplotlib, .*{re.escape(reason)}.*maml-rl\\[figures\\]"):
        paper.check_figure(tmp_path / "figure.pdf")
