"""The search over settings: the value of a trial, its early end, and searches that are continued."""

import csv
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.suite import SUITE
from maml_rl.cli.main import main
from maml_rl.config import Config, load_config
from maml_rl.config.catalog import find_config
from maml_rl.errors import ConfigError, NonFiniteError
from maml_rl.experiment import search as tune
from maml_rl.runs.metrics import read_metrics
from tests.small_runs import config_of

PAGE = SUITE.page
# One task with 2 x 2 episodes of 4 steps.
STEPS = 2 * 2 * 4
TINY = {"env_name": "TabularMDP-v0", "meta_batch_size": 1, "fast_batch_size": 2, "max_episode_steps": 4}


@pytest.mark.parametrize("ended", [None, 3])
def test_value_of_a_trial_is_that_of_its_last_ninth_and_it_may_end_early(tmp_path: Path, ended: int | None) -> None:
    rungs: list[tuple[int, float]] = []

    def ends(rung: int, value: float, steps: int) -> bool:
        rungs.append((rung, value))
        assert steps == 2 * rung * STEPS
        return rung == ended

    config = config_of(**TINY, num_workers=0, num_batches=100, checkpoint_every=100)
    value, steps = tune.train_trial(config, tmp_path / "run", 18.0 * STEPS, ends)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    returns = [row["return/step_1"] for row in metrics]
    number = 9 if ended is None else ended
    # Two meta-updates for each of the nine parts.
    assert len(metrics) == 2 * number
    assert steps == 2 * number * STEPS
    means = np.reshape(returns, (-1, 2)).mean(1)
    assert [rung for rung, _ in rungs] == list(range(1, number + 1))
    np.testing.assert_allclose([value for _, value in rungs], means)
    assert value == (None if ended else pytest.approx(means[-1]))


def test_trial_that_is_too_short_for_its_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'num-batches' in .*: a trial ends after 32 of 144 .*: set more than 2 "):
        tune.train_trial(
            config_of(**TINY, num_workers=0, num_batches=2),
            tmp_path / "run",
            9.0 * STEPS,
            lambda rung, value, steps: False,
        )


def test_keys_of_sections_are_replaced_individually() -> None:
    config = config_of(env_kwargs={"low": -0.5, "high": 0.5})
    changed = tune.changed(
        config,
        {"fast-lr": 0.3, "env-kwargs.low": -1.0, "algorithm-settings.max-kl": 0.5, "algorithm-settings.cg-iters": 4},
    )
    assert changed.fast_lr == 0.3
    assert changed.env_kwargs == {"low": -1.0, "high": 0.5}
    assert changed.algorithm_settings == {"max-kl": 0.5, "cg-iters": 4}
    fixed = config_of(tasks={"distribution": "fixed", "train": 5})
    assert tune.changed(fixed, {"tasks.test": 7}).tasks == {"distribution": "fixed", "train": 5, "test": 7}


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (("max-kl=1e-3:1e-1:log", "nonlinearity=relu|tanh"), (0.01, "tanh")),
        (("algorithm-settings.cg-iters=1:20", "hidden-sizes=[32]|[64, 64]"), (5, "[64, 64]")),
        (("max-kl=1e-3:5e-3:log", "nonlinearity=relu|tanh"), (None, "tanh")),
        (("nonlinearity=relu|selu",), (None,)),
        (("env-kwargs.high=0.1:1.0",), (0.5,)),
        (("env-kwargs.wind=0.1:1.0",), (None,)),
    ],
)
def test_own_values_of_a_config_are_a_trial_where_they_are_in_the_space(space: Any, values: Any) -> None:
    pytest.importorskip("optuna")
    distributions = {key: tune.distribution_of(key, text) for key, _, text in (each.partition("=") for each in space)}
    config = tune.changed(load_config(find_config(CONFIG)), {"max-kl": 0.01, "hidden-sizes": [64, 64]})
    own = tune.own_values(config, distributions)
    # A value outside of its range is searched in the first trial, too.
    assert own == {key: value for key, value in zip(distributions, values, strict=True) if value is not None}


ROWS = re.findall(r"\]\((tune/[\w-]+\.csv)\)[^|]*\|[^|]*\|([^|]*)\|[^|]*\|([^|]*)\|([^|]*)\|", PAGE.read_text())


def test_committed_searches_are_those_of_the_page_of_the_suite_and_as_it_says() -> None:
    assert {PAGE.parent / path for path, *_ in ROWS} == set((PAGE.parent / "tune").glob("*.csv"))
    for path, trials, first, best in ROWS:
        with (PAGE.parent / path).open(newline="") as file:
            rows = list(csv.DictReader(file))
        values = [float(row["value"]) for row in rows if row["state"] == "complete"]
        said = int(trials), first.strip(), best.strip()
        assert (len(rows), f"{float(rows[0]['value']):.1f}", f"{max(values):.1f}") == said, path
        assert {int(row["seed"]) for row in rows}.isdisjoint({0, 1, 2}), path


CONFIG = "2d-navigation"
SPACE = ("fast-lr=0.01:1.0:log", "algorithm-settings.cg-iters=1:9", "nonlinearity=relu|tanh")


def search(folder: Path, trials: int, space: tuple[str, ...] = SPACE, *further: str) -> list[dict[str, str]]:
    """Run a search, and return the rows of its table."""
    sizes = ["--env-steps", "900", "--runs", str(folder), "--trials", str(trials)]
    if main(["tune", CONFIG, "--search", *space, *sizes, *further]):
        raise SystemExit
    tables = sorted(folder.glob("*/trials.csv"), key=lambda path: path.stat().st_mtime_ns)
    with tables[-1].open(newline="") as file:
        return list(csv.DictReader(file))


def judge(config: Config, folder: Path, env_steps: float, ends: tune.Ends) -> tuple[float | None, int]:
    """A fake training, whose best result is at a step size of 0.1 with tanh."""
    value = -((np.log10(config.fast_lr) + 1.0) ** 2) - (config.nonlinearity == "relu")
    for rung in range(1, 10):
        if ends(rung, value, 100 * rung) and rung < 9:
            return None, 100 * rung
    return value, 900


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setattr(tune, "train_trial", judge)


def untimed(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**row, "seconds": ""} for row in rows]


@pytest.mark.usefixtures("judged")
def test_search_finds_the_best_and_ends_bad_trials(tmp_path: Path) -> None:
    rows = search(tmp_path, 20)
    own = load_config(find_config(CONFIG))
    assert (float(rows[0]["fast-lr"]), rows[0]["nonlinearity"]) == (own.fast_lr, own.nonlinearity)
    assert [row["trial"] for row in rows] == [str(number) for number in range(20)]
    whole = [row for row in rows if row["state"] == "complete"]
    ended = [row for row in rows if row["state"] == "pruned"]
    best = max(whole, key=lambda row: float(row["value"]))
    assert best["nonlinearity"] == "tanh"
    assert float(best["fast-lr"]) == pytest.approx(0.1, rel=0.5)
    assert {int(row["env_steps"]) for row in ended} <= {100, 300}
    assert len(ended) > 10
    assert {row["seed"] for row in rows} == {"7000"}


class KilledError(BaseException):
    """The process of a trial is killed."""


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize(("num_trials", "num_kills"), [(8, 10), pytest.param(14, 20, marks=pytest.mark.nightly)])
def test_killed_and_continued_search_has_the_trials_of_an_undisturbed_one(
    num_trials: int, num_kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = untimed(search(tmp_path / "undisturbed", num_trials))
    kills = iter(np.random.default_rng(0).integers(0, 4, 3 * num_kills // 2).tolist())

    def killed(config: Config, folder: Path, env_steps: float, ends: tune.Ends) -> tuple[float | None, int]:
        left = next(kills, None)

        def ends_or_dies(rung: int, value: float, steps: int) -> bool:
            nonlocal left
            if left == 0:
                raise KilledError
            left = None if left is None else left - 1
            return ends(rung, value, steps)

        return judge(config, folder, env_steps, ends_or_dies)

    monkeypatch.setattr(tune, "train_trial", killed)
    count, found = 0, []
    # One trial more at a time, too.
    for trials in range(1, num_trials + 1):
        while True:
            try:
                found = search(tmp_path / "killed", trials)
                break
            except KilledError:
                count += 1
    assert count >= num_kills
    assert untimed(found) == expected


@pytest.mark.usefixtures("judged")
def test_trials_of_other_configs_seeds_and_lengths_are_not_counted(tmp_path: Path) -> None:
    first = search(tmp_path, 3)
    for further in (["--set", "max-kl=0.02"], ["--seed", "7"], ["--env-steps", "1800"]):
        others = search(tmp_path, 3, SPACE, *further)
        assert [row["trial"] for row in others] == ["0", "1", "2"]
    assert untimed(search(tmp_path, 3)) == untimed(first)
    assert len(list(tmp_path.glob("*/trials.csv"))) == 4


@pytest.mark.usefixtures("judged")
def test_search_is_continued_with_narrower_ranges(tmp_path: Path) -> None:
    first = search(tmp_path, 5)
    narrower = ("fast-lr=0.05:0.2:log", *SPACE[1:])
    rows = search(tmp_path, 9, narrower)
    assert untimed(rows[:5]) == untimed(first)
    assert all(0.05 <= float(row["fast-lr"]) <= 0.2 for row in rows[5:])


@pytest.mark.usefixtures("judged")
@pytest.mark.parametrize(
    ("values", "before"),
    [
        ("fast-lr=0.1|0.2", "0.01:1.0:log"),
        ("fast-lr=1:2", "0.01:1.0:log"),
        ("fast-lr=0.1:0.2", "0.01:1.0:log"),
        ("nonlinearity=relu|tanh|relu", "relu|tanh"),
    ],
)
def test_search_is_not_continued_with_values_of_another_kind(
    tmp_path: Path, values: str, before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = search(tmp_path, 2)
    with pytest.raises(SystemExit):
        search(tmp_path, 4, (values,))
    key, _, text = values.partition("=")
    assert f"the values of '{key}' are '{text}', and earlier trials of this search had '{before}'" in (
        capsys.readouterr().err
    )
    # No trial was begun.
    assert untimed(search(tmp_path, 4))[:2] == untimed(first)


@pytest.mark.usefixtures("judged")
def test_trial_that_fails_is_recorded_and_the_search_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(config: Config, *arguments: Any) -> tuple[float | None, int]:
        if config.fast_lr > 0.15:
            raise NonFiniteError("the objective is not finite")
        return judge(config, *arguments)

    monkeypatch.setattr(tune, "train_trial", diverge)
    search(tmp_path, 6)
    rows = search(tmp_path, 12)
    failed = [row for row in rows if row["state"] == "fail"]
    assert 0 < len(failed) < len(rows) == 12
    assert all(float(row["fast-lr"]) > 0.15 and not row["value"] for row in failed)


@pytest.mark.usefixtures("judged")
def test_searches_of_two_processes_share_the_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[list[dict[str, str]]] = []

    def with_another(config: Config, *arguments: Any) -> tuple[float | None, int]:
        if not inside:
            inside.append([])
            # While the lock of this trial is held, as by another process.
            inside[0] = search(tmp_path, 3)
        return judge(config, *arguments)

    monkeypatch.setattr(tune, "train_trial", with_another)
    rows = search(tmp_path, 3)
    assert [row["trial"] for row in inside[0]] == ["1", "2"]
    assert [row["trial"] for row in rows] == ["0", "1", "2"]


@pytest.mark.usefixtures("judged")
def test_numbers_may_have_an_exponent_alone(tmp_path: Path) -> None:
    space = ("fast-lr=1e-2|1e-1", "max-kl=1e-05:1.0001e-05")
    first = search(tmp_path, 1, space, "--set", "fast-lr=1e-2", "max-kl=1e-05")
    assert first[0]["max-kl"] == "1e-05"
    assert untimed(search(tmp_path, 2, space, "--set", "fast-lr=1e-2", "max-kl=1e-05"))[0] == untimed(first)[0]


@pytest.mark.parametrize("cut", ["", "half", "noise", "other"])
def test_altered_file_of_trials_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], cut: str) -> None:
    optuna = pytest.importorskip("optuna")
    path = tmp_path / "studies.db"
    optuna.create_study(storage=f"sqlite:///{path}", study_name="another")
    whole = path.read_bytes()
    path.write_bytes(
        {"": b"trial,state\n", "half": whole[: len(whole) // 2], "noise": whole[:5000] + b"x" * 9000}.get(cut, b"")
    )
    if cut == "other":
        path.unlink()
        os.mkfifo(path)
    with pytest.raises(SystemExit):
        search(tmp_path, 1)
    error = capsys.readouterr().err
    assert f"cannot keep the trials in {path}" in error
    assert "Traceback" not in error
