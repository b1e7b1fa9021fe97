"""Whatever a user's learner, policy or task distribution raises in a hook is one error that names its line."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from maml_rl.cli import main as cli
from maml_rl.config import Config
from maml_rl.derivatives import EpisodeStore
from maml_rl.envs import Task
from maml_rl.errors import AlgorithmError, CheckpointError, ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.train import train
from maml_rl.metalearners.metalearner import MetaLearner, State
from maml_rl.task_distributions import FamilyTasks, TaskDistribution
from tests.small_runs import config_of

HERE = re.escape(f"{Path(__file__).name}, line ")
# The hook that fails, how, and after how many calls of it.
FAILURE: dict[str, Any] = {}
FAILURES: dict[str, Callable[[], Any]] = {
    "raises": lambda: {}["no such key"],
    "refuses": lambda: int("three"),
    "exits": lambda: sys.exit(0),
}


def fail_in(hook: str) -> None:
    if FAILURE.get("hook") == hook:
        FAILURE["calls"] = FAILURE.get("calls", 0) + 1
        if FAILURE["calls"] > FAILURE.get("after", 0):
            FAILURES[FAILURE["how"]]()


class Failing(MetaLearner):
    """Fails in the hook that `FAILURE` names."""

    def __init__(self, *args: Any, **options: Any) -> None:
        fail_in("__init__")
        super().__init__(*args, **options)

    def acting_state(self) -> dict[str, Tensor]:
        fail_in("acting_state")
        return {}

    def update(self, batch: EpisodeStore) -> dict[str, Any]:
        fail_in("update")
        returned: dict[str, Any] = FAILURE.get("returns", {})
        return returned

    def state_dict(self) -> State:
        fail_in("state_dict")
        return {}

    def load_state_dict(self, state: State) -> None:
        fail_in("load_state_dict")


def failing_hook(name: str) -> Any:
    def hook(self: Failing, *args: Any) -> Any:
        fail_in(name)
        return getattr(super(Failing, self), name)(*args)

    return hook


for name in ("collect", "collector", "returns", "infos", "test"):
    setattr(Failing, name, failing_hook(name))


class FailingTasks(TaskDistribution):
    """Fails in the hook that `FAILURE` names."""

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        fail_in("sample")
        return family.draw(num_tasks, rng)

    def update(self, tasks: Sequence[Task], returns: NDArray[np.float64]) -> None:
        fail_in("update_tasks")

    def state_dict(self) -> dict[str, Any]:
        fail_in("state_of_tasks")
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        fail_in("load_state_of_tasks")


def failing(**values: Any) -> Config:
    given = {"num_batches": 3, "checkpoint_every": 100, "num_workers": 0, **values}
    return config_of(**given).override({"algorithm": f"{__name__}:Failing"})


@pytest.fixture(autouse=True)
def nothing_fails() -> Any:
    FAILURE.clear()
    yield
    FAILURE.clear()


@pytest.mark.parametrize(
    "hook", ["collect", "acting_state", "collector", "update", "returns", "infos", "test", "state_dict"]
)
def test_failing_hook_of_a_learner_is_one_error_with_its_line(hook: str, tmp_path: Path) -> None:
    how, kind = ("exits", "SystemExit") if hook == "update" else ("raises", "KeyError")
    FAILURE.update(hook=hook, how=how)
    config = failing(prefetch=1, evaluate_every=1, evaluation_tasks=2)
    with pytest.raises(AlgorithmError, match=rf"Failing: {kind} in .*{HERE}") as raised:
        train(config, tmp_path / "run")
    assert "\n" not in str(raised.value)
    assert type(raised.value.__cause__).__name__ == kind


@pytest.mark.parametrize("how", ["refuses", "exits"])
def test_learner_that_cannot_be_made_is_an_error_of_the_config(how: str, tmp_path: Path) -> None:
    FAILURE.update(hook="__init__", how=how)
    with pytest.raises(ConfigError, match=rf"'algorithm' .*Failing cannot be made: .*{HERE}"):
        train(failing(), tmp_path / "run")


def test_hook_that_fails_to_resume_or_in_a_test_is_one_error(tmp_path: Path) -> None:
    # Metrics may be numbers of all kinds.
    numbers = {"a": torch.tensor(1.0), "b": np.float32(2.0), "c": True, "d": None, "e": 3, "f": np.bool_(True)}
    FAILURE.update(returns=numbers)
    train(failing(), tmp_path / "run")
    FAILURE.update(hook="load_state_dict", how="exits")
    with pytest.raises(AlgorithmError, match="SystemExit"):
        train(failing(num_batches=4), tmp_path / "run", resume=True)
    with pytest.raises(AlgorithmError, match="SystemExit"):
        make_experiment(failing()).restore("last", tmp_path / "run")
    FAILURE.update(hook="test")
    with pytest.raises(AlgorithmError, match="SystemExit"):
        evaluate(make_experiment(failing()), tasks=2)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "Failing.update returned None; return a dict of metrics by name"),
        ({"loss": torch.zeros(2)}, r"returned the metric 'loss' as tensor\(\[0., 0.\]\); return a number"),
        ({"loss": "low"}, "returned the metric 'loss' as 'low'; return a number"),
        ({3: 0.0}, "returned the metric 3 as 0.0"),
    ],
)
def test_update_that_returns_no_metrics_is_refused(returned: Any, message: str, tmp_path: Path) -> None:
    FAILURE.update(returns=returned)
    with pytest.raises(AlgorithmError, match=message):
        train(failing(), tmp_path / "run")


@pytest.mark.parametrize(
    ("hook", "how"),
    [("sample", "exits"), *((hook, "raises") for hook in ("update_tasks", "state_of_tasks", "load_state_of_tasks"))],
)
def test_failing_hook_of_a_task_distribution_is_one_error(hook: str, how: str, tmp_path: Path) -> None:
    distribution = {"tasks": {"distribution": f"{__name__}:FailingTasks"}}
    train(config_of(num_batches=1, num_workers=0, **distribution), tmp_path / "run")
    FAILURE.update(hook=hook, how=how)
    with pytest.raises((AlgorithmError, CheckpointError), match=r"KeyError|no such key|SystemExit") as raised:
        train(config_of(num_batches=2, num_workers=0, **distribution), tmp_path / "run", resume=True)
    assert "\n" not in str(raised.value)


def test_command_ends_with_one_line_and_an_exit_code_that_is_not_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    FAILURE.update(hook="update", how="exits")
    config = tmp_path / "config.json"
    config.write_text(failing().to_json())
    options = ["train", str(config), "--output-folder", str(tmp_path / "run"), "--num-workers", "0"]
    assert cli.main([*options, "--log-level", "error"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len([line for line in errors if "error:" in line]) == 1
    assert not any("Traceback" in line for line in errors)
    assert cli.main([*options, "--overwrite", "--log-level", "debug"]) == 1
    assert "Traceback" in caplog.text


class FailingNetwork(nn.Module):
    """A policy that exits when it acts, or when it is differentiated."""

    def __init__(self, observations: Any, actions: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, observations: Tensor) -> torch.distributions.Distribution:
        fail_in("forward")
        return torch.distributions.Normal(self.layer(observations), 1.0)


def test_failing_policy_is_one_error(tmp_path: Path) -> None:
    config = config_of(num_batches=1, num_workers=0, policy=f"{__name__}:FailingNetwork")
    train(config, tmp_path / "run")
    FAILURE.update(hook="forward", how="exits", after=20)
    with pytest.raises((AlgorithmError, ConfigError)) as raised:
        train(config, tmp_path / "run", overwrite=True)
    assert "\n" not in str(raised.value)
