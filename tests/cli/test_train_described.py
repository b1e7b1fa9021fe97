"""What `train` says of a run before it, without it, and after it."""

import json
import re
from pathlib import Path

import pytest

from maml_rl.cli import main as cli
from maml_rl.cli import train as train_command
from maml_rl.config import Config, load_config
from maml_rl.experiment.estimate import estimate
from maml_rl.experiment.train import train
from maml_rl.runs.metrics import read_metrics
from tests.small_runs import SMALL, config_of

# Given as options below.
OPTIONS = {"fast-lr": 0.25, "max-kl": 0.02}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in SMALL.items()))
    return path


def train_with(*arguments: str) -> int:
    return cli.main(["train", "small.yaml", "--num-workers", "0", "--log-level", "warning", *arguments])


def test_printed_config_trains_the_same_run_and_names_every_source(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for key, value in OPTIONS.items() for word in (f"--{key}", str(value))]
    assert train_with("--print-config", *given) == 0
    shown = capsys.readouterr().out
    assert sorted(path.name for path in config.parent.iterdir()) == ["small.yaml"]
    assert shown.startswith("# small.yaml\n")
    sources = dict(re.findall(r"^ *([\w-]+): .*?  # (.*)$", shown, re.MULTILINE))
    lines = config.read_text().splitlines()
    for key in SMALL:
        assert lines[int(sources.pop(key).removeprefix("line ")) - 1].startswith(f"{key}: ")
    assert {key for key, source in sources.items() if source == "the command line"} == {*OPTIONS, "num-workers"}
    assert {source for source in sources.values() if source != "the command line"} == {"default"}
    assert train_with("--quiet", "--output-folder", "first", *given) == 0
    (config.parent / "printed.yaml").write_text(shown)
    assert cli.main(["train", "printed.yaml", "--quiet", "--output-folder", "second"]) == 0
    first, second = (json.loads((config.parent / name / "config.json").read_text()) for name in ("first", "second"))
    assert first == second
    digests = [[row["digest"] for row in read_metrics(Path(name) / "metrics.jsonl")] for name in ("first", "second")]
    assert digests[0] == digests[1]


def test_setting_missing_in_a_section_of_the_file_is_printed_as_a_default(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(config.read_text() + "algorithm-settings:\n  max-kl: 0.02\n")
    assert train_with("--print-config") == 0
    shown = capsys.readouterr().out
    assert re.search(rf"^  max-kl: 0.02 +# line {len(config.read_text().splitlines())}$", shown, re.MULTILINE)
    assert re.search("^  cg-damping: 1e-05 +# default$", shown, re.MULTILINE)


@pytest.mark.parametrize("every", [None, 2])
def test_estimate_has_the_steps_and_evaluations_of_the_run(every: int | None, tmp_path: Path) -> None:
    # Episodes of tabular MDPs always have the same length.
    config = config_of(env_name="TabularMDP-v0", num_batches=7, evaluate_every=every)
    found = estimate(config.override({"num-workers": 0}))
    train(config, tmp_path / "run", num_workers=0)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert found.total_env_steps == rows[-1]["env_steps"]
    assert found.num_evaluations == sum("time/evaluation_s" in row for row in rows)
    assert (found.evaluating > 0.0) == (every is not None)


def test_estimated_time_is_that_of_the_timed_iterations(tmp_path: Path) -> None:
    ticks = iter([0.0, 100.0, 103.0, 107.0])
    found = estimate(config_of(num_batches=60, num_workers=0), clock=lambda: next(ticks))
    # 100 s for the first iteration, of which 3.5 are those of any other.
    assert found.seconds == 3.5
    assert found.minutes == pytest.approx((96.5 + 60 * 3.5) / 60.0)


def test_estimate_of_a_learner_that_warms_up_times_iterations_with_updates() -> None:
    # Two iterations fill the replay, the third has the first update.
    settings = {"warmup-trials": 9, "num-updates": 1, "hidden-size": 8}
    family = {"env-name": "TabularMDP-v0", "observe-last": True}
    values = SMALL | family | {"algorithm": "rsac", "algorithm-settings": settings, "num-batches": 60, "num-workers": 0}
    del values["cg-iters"]
    config = Config.model_validate(values)
    ticks = iter([0.0, 1.0, 3.0, 103.0, 110.0, 118.0])
    found = estimate(config, clock=lambda: next(ticks))
    assert (found.without_updates, found.seconds) == (2, 7.5)
    assert found.minutes == pytest.approx((103.0 + 57 * 7.5) / 60.0)


def test_dry_run_says_in_which_iteration_updates_begin(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = ["--algorithm", "rsac", "--env-name", "TabularMDP-v0", "--observe-last", "true"]
    settings = ["--algorithm-settings", '{"warmup-trials": 9, "num-updates": 1, "hidden-size": 8}']
    assert train_with("--dry-run", "--num-batches", "5", *family, *settings) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "s for each iteration with updates, which begin in iteration 3; iterations timed: 2" in shown


def test_dry_run_writes_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_with("--dry-run") == 0
    shown = capsys.readouterr().out
    assert sorted(path.name for path in config.parent.iterdir()) == ["small.yaml"]
    # Phases before and after a step, of 3 tasks with 4 episodes of at most 10 steps.
    found = re.search(r"Steps: 5 iterations of (\d+) environment steps", shown)
    assert found is not None
    assert 0 < int(found[1]) <= 2 * 3 * 4 * 10
    assert re.search(r"Time: about .* iterations timed: 2", shown)
    assert "The run would be in runs/small" in shown


def test_described_run_goes_where_the_run_would_or_is_refused_as_the_run(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_with("--quiet", "--num-batches", "1") == 0
    assert train_with("--dry-run") == 0
    assert "The run would be in runs/small-2; " in capsys.readouterr().out
    assert [path.name for path in (config.parent / "runs").iterdir()] == ["small"]
    for option in ("--dry-run", "--print-config"):
        assert train_with(option, "--output-folder", "runs/small") == 2
        assert "runs/small holds another run; continue it with --resume" in capsys.readouterr().err
        assert train_with(option, "--resume", "--output-folder", "runs/small", "--gamma", "0.5") == 2
        assert "the run in runs/small was made with another 'gamma'" in capsys.readouterr().err
        assert train_with(option, "--init", "nowhere") == 2
        assert "there is no checkpoint nowhere" in capsys.readouterr().err
    assert train_with("--print-config", "--resume") == 0

    def interrupt(*given: object, **options: object) -> None:
        raise KeyboardInterrupt

    # It has saved nothing that would be continued.
    monkeypatch.setattr(train_command, "_describe", interrupt)
    capsys.readouterr()
    assert train_with("--dry-run", "--resume", "--output-folder", "runs/small") == 130
    assert capsys.readouterr().err == "maml-rl train: interrupted\n"


def test_dry_run_of_several_seeds_says_how_many_and_refuses_those_of_a_run(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_with("--dry-run", "--seeds", "0", "1") == 0
    shown = capsys.readouterr().out
    assert "All that is for one seed; --seeds names 2.\nThe runs would be in runs/small; " in shown
    for option in ("--dry-run", "--print-config"):
        assert train_with(option, "--seeds", "3", "3") == 2
        assert "--seeds names 3 more than once" in capsys.readouterr().err


def test_quiet_training_says_nothing_and_another_names_the_next_commands(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_with("--quiet", "--output-folder", "quiet") == 0
    assert capsys.readouterr() == ("", "")
    assert load_config("quiet/config.json").num_batches == SMALL["num-batches"]
    assert train_with("--output-folder", "loud run") == 0
    shown = capsys.readouterr().out
    assert "maml-rl test 'loud run'" in shown
    assert "maml-rl report 'loud run'" in shown
