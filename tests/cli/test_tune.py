"""The search over settings: the value of a trial, its early end, and resuming from the CSV file."""

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.suite import SUITE
from maml_rl.cli.main import main
from maml_rl.config import Config, load_config
from maml_rl.config.catalog import find_config
from maml_rl.errors import ConfigError
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

    def ends(rung: int, value: float) -> bool:
        rungs.append((rung, value))
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
    with pytest.raises(ConfigError, match=r"'num-batches' in .*: a trial ends after 32 of 144 environment steps"):
        tune.train_trial(
            config_of(**TINY, num_workers=0, num_batches=2),
            tmp_path / "run",
            9.0 * STEPS,
            lambda rung, value: False,
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


def test_search_that_is_continued_does_not_repeat_its_first_trials() -> None:
    optuna = pytest.importorskip("optuna")
    space = {"max-kl": tune.distribution_of("max-kl", "0.001:0.1:log")}

    def draw(numbers: range) -> list[float]:
        found = []
        for number in numbers:
            study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=tune._seed_of(7000, number)))
            found.append(study.ask(space).params["max-kl"])
        return found

    whole = draw(range(4))
    assert draw(range(2)) + draw(range(2, 4)) == whole
    assert len(set(whole)) == 4


ROWS = re.findall(r"\]\((tune/[\w-]+\.csv)\)[^|]*\|[^|]*\|([^|]*)\|[^|]*\|([^|]*)\|([^|]*)\|", PAGE.read_text())


def test_every_search_is_on_the_page_of_the_suite() -> None:
    assert {PAGE.parent / path for path, *_ in ROWS} == set((PAGE.parent / "tune").glob("*.csv"))


@pytest.mark.parametrize(("path", "trials", "first", "best"), ROWS)
def test_committed_search_is_as_the_page_says(path: str, trials: str, first: str, best: str) -> None:
    with (PAGE.parent / path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    values = [float(row["value"]) for row in rows if row["state"] == "complete"]
    assert (len(rows), f"{float(rows[0]['value']):.1f}", f"{max(values):.1f}") == (
        int(trials),
        first.strip(),
        best.strip(),
    )
    assert {int(row["seed"]) for row in rows}.isdisjoint({0, 1, 2})


CONFIG = "2d-navigation"
SPACE = ("fast-lr=0.01:1.0:log", "algorithm-settings.cg-iters=1:9", "nonlinearity=relu|tanh")


def search(path: Path, trials: int, space: tuple[str, ...] = SPACE, *further: str) -> list[dict[str, str]]:
    sizes = ["--env-steps", "900", "--csv", str(path), "--trials", str(trials)]
    if main(["tune", CONFIG, "--search", *space, *sizes, *further]):
        raise SystemExit
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def judge(config: Config, folder: Path, env_steps: float, ends: Any) -> tuple[float | None, int]:
    """A fake training, whose best result is at a step size of 0.1 with tanh."""
    value = -((np.log10(config.fast_lr) + 1.0) ** 2) - (config.nonlinearity == "relu")
    for rung in range(1, 10):
        if ends(rung, value) and rung < 9:
            return None, 100 * rung
    return value, 900


def test_search_finds_the_best_ends_bad_trials_and_continues_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setattr(tune, "train_trial", judge)
    seeds = set()

    def judge_seed(config: Config, *arguments: Any) -> tuple[float | None, int]:
        seeds.add(config.seed)
        return judge(config, *arguments)

    first = search(tmp_path / "trials.csv", 12)
    own = load_config(find_config(CONFIG))
    assert (float(first[0]["fast-lr"]), first[0]["nonlinearity"]) == (own.fast_lr, own.nonlinearity)
    monkeypatch.setattr(tune, "train_trial", judge_seed)
    rows = search(tmp_path / "trials.csv", 30)
    assert [{**row, "seconds": ""} for row in rows[:12]] == [{**row, "seconds": ""} for row in first]
    assert [row["trial"] for row in rows] == [str(number) for number in range(30)]
    whole = [row for row in rows if row["state"] == "complete"]
    ended = [row for row in rows if row["state"] == "pruned"]
    best = max(whole, key=lambda row: float(row["value"]))
    assert best["nonlinearity"] == "tanh"
    assert float(best["fast-lr"]) == pytest.approx(0.1, rel=0.5)
    assert {int(row["env_steps"]) for row in ended} <= {100, 300}
    assert len(ended) > 10
    assert seeds == {7000}


def test_numbers_may_have_an_exponent_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    monkeypatch.setattr(tune, "train_trial", judge)
    space = ("fast-lr=1e-2|1e-1", "max-kl=1e-05:1.0001e-05")
    first = search(tmp_path / "trials.csv", 1, space, "--set", "fast-lr=1e-2", "max-kl=1e-05")
    assert first[0]["max-kl"] == "1e-05"
    again = search(tmp_path / "trials.csv", 2, space, "--set", "fast-lr=1e-2", "max-kl=1e-05")
    assert again[0] == first[0]


@pytest.mark.parametrize(
    ("space", "further", "message"),
    [
        (("fast-lr=0.1",), (), "the values of 'fast-lr' are '0.1': expected LOW:HIGH, LOW:HIGH:log or A|B|C"),
        (("fast-lr",), (), "--search expects KEY=VALUE, got 'fast-lr'"),
        (("fast-lrr=0.1:0.2",), (), "unknown key 'fast-lrr' in the settings that are searched; did you mean 'fast-lr'"),
        (
            ("algorithm-settings.cg-iters=0:3",),
            (),
            "'cg-iters' in the settings that are searched: expected at least 1, got 0",
        ),
    ],
)
def test_invalid_searches_are_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], space: Any, further: Any, message: str
) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(SystemExit):
        search(tmp_path / "trials.csv", 1, space, *further)
    assert message in capsys.readouterr().err


def test_trials_of_other_settings_are_not_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "trials.csv").write_text("trial,state,value,env_steps,seconds,config,seed,version,rungs,max-kl\n0\n")
    with pytest.raises(SystemExit):
        search(tmp_path / "trials.csv", 1, ("fast-lr=0.1:0.2",))
    assert "has trials of ['max-kl'], not ['fast-lr']" in capsys.readouterr().err
