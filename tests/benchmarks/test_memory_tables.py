"""The tables of trials: measuring, keeping and writing results."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import memory_tables
from benchmarks.memory_tables import PROBLEMS, PUBLISHED, Result, main, measure, read_results, table, write_results
from maml_rl.config import Config
from maml_rl.config.yaml_source import Mapping
from maml_rl.experiment.train import train

PAGE = "Text.\n" + "".join(
    f"\n<!-- results of {kind} -->\n<!-- end of results -->\n" for kind in ("bandit", "mdp", "variants")
)


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "page.md").write_text(PAGE)
    paths = ["--csv", str(tmp_path / "results" / "tables.csv"), "--page", str(tmp_path / "page.md")]
    return [*paths, "--trials", "6", "--tuning-trials", "2", "--rows"]


def test_tables_are_measured_once_and_written_into_the_page(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*command, "bandit-10-5"])
    results = read_results(tmp_path / "results" / "tables.csv")
    assert set(results) == {("bandit-10-5", name) for name in memory_tables.algorithms_of(PROBLEMS["bandit-10-5"])}
    assert results["bandit-10-5", "UCB1"].setting.startswith("c = ")
    assert all(0.0 <= result.mean <= 10.0 and result.trials == 6 for result in results.values())
    page = (tmp_path / "page.md").read_text()
    assert "(6.7)" in page
    assert page.startswith("Text.\n")
    assert page.count("<!-- end of results -->") == 3

    def refuse(*arguments: Any) -> Result:
        raise AssertionError("measured again")

    monkeypatch.setattr(memory_tables, "measure", refuse)
    main([*command, "bandit-10-5"])
    assert (tmp_path / "page.md").read_text() == page
    with pytest.raises(AssertionError, match="measured again"):
        main([*command, "bandit-10-5", "--seed", "1"])
    assert "| 10, 5 |" in capsys.readouterr().out


def test_process_figures_are_totals_over_all_episodes() -> None:
    problem = PROBLEMS["mdp-10"]
    options = Namespace(trials=200, tuning_trials=2, seed=0, num_workers=0)
    random = measure(problem, "random", memory_tables.algorithms_of(problem)["random"], options)
    # Ten episodes of ten steps with a mean reward of one.
    assert abs(random.mean - 100.0) < 5 * random.standard_error


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results = {
        ("mdp-10", "BEB"): Result("mdp-10", "BEB", "beta = 20", 1000, 0, 150.25, 0.75),
        ("bandit-10-5", "TS"): Result("bandit-10-5", "TS", "", 1000, 0, 5.75, 0.05),
    }
    write_results(tmp_path / "new" / "results.csv", results)
    assert read_results(tmp_path / "new" / "results.csv") == results
    assert next(iter(read_results(tmp_path / "new" / "results.csv"))) == ("bandit-10-5", "TS")


def test_a_figure_more_than_three_standard_errors_off_is_bold() -> None:
    results = {
        ("bandit-10-5", "TS"): Result("bandit-10-5", "TS", "", 1000, 0, 5.87, 0.06),
        ("bandit-10-5", "OTS"): Result("bandit-10-5", "OTS", "", 1000, 0, 5.94, 0.06),
    }
    text = table("bandit", results)
    assert "| 5.87 ± 0.06 (5.7) |" in text
    assert "| **5.94 ± 0.06** (6.5) |" in text
    assert text.count("(6.6)") == 3


def test_every_row_has_a_published_figure_for_every_column() -> None:
    assert len(PROBLEMS) == len(PUBLISHED) == 14
    for problem, figures in PUBLISHED.items():
        assert set(figures) <= {*memory_tables.algorithms_of(problem), "RL2"}
        assert len(figures) == 8


def test_unknown_row_is_refused_with_the_known_ones(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "bandit-7-7"])
    assert stopped.value.code == 2
    assert "unknown: bandit-7-7; there are bandit-10-5" in capsys.readouterr().err


def test_single_algorithm_is_written_to_another_file_and_changes_no_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--rows", "bandit-10-5", "--trials", "2", "--csv", str(tmp_path / "more.csv"), "--algorithms"]
    main([*command, "greedy"])
    assert list(read_results(tmp_path / "more.csv")) == [("bandit-10-5", "greedy")]
    assert not list(tmp_path.glob("*.md"))
    with pytest.raises(SystemExit) as stopped:
        main([*command, "gready"])
    assert stopped.value.code == 2
    assert "unknown: gready; there are random, Gittins" in capsys.readouterr().err


def test_a_run_of_rl2_fills_its_column_and_another_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rl2 = {"algorithm": "rl2", "observe-last": True, "algorithm-settings": {"hidden-size": 4}}
    bandit = {"env-name": "Bandit-K5-v0", "fast-batch-size": 2, "env-kwargs": {"pulls": 5}, "num-batches": 1}
    for folder, settings in (("rl2", bandit | rl2), ("maml", bandit | {"hidden-sizes": [4]})):
        config = Config.from_mapping(Mapping("the test", settings | {"meta-batch-size": 3}))
        train(config, tmp_path / folder, num_workers=0)
    command = ["--rows", "--trials", "30", "--csv", str(tmp_path / "rl2.csv"), "--runs"]
    main([*command, str(tmp_path / "rl2")])
    result = read_results(tmp_path / "rl2.csv")["bandit-10-5", "RL2"]
    assert abs(result.mean - 5.0) < 5 * result.standard_error
    assert result.setting == "1 meta-updates"
    for run, message in (("maml", "a run of maml-trpo on Bandit-K5-v0"), ("none", "is not a run folder")):
        with pytest.raises(SystemExit) as stopped:
            main([*command, str(tmp_path / run)])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
