"""The trained policies in the package load, perform as in their evaluations, and stay small."""

import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl import load_policy
from maml_rl.cli import main as cli
from maml_rl.config import load_config
from maml_rl.config.catalog import ZOO, zoo
from maml_rl.envs import FAMILIES
from maml_rl.errors import ConfigError
from maml_rl.experiment import zoo as zoo_module
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import train
from maml_rl.experiment.zoo import EVALUATION, MOST_BYTES, add_to_zoo, folder_size, returns_digest
from maml_rl.results.statistics import ENOUGH_TASKS, student_quantile
from maml_rl.runs.system import describe_system
from tests.envs.contract import marks
from tests.small_runs import config_of

FAMILY_OF = {name: load_config(folder / "config.json").env_name for name, folder in zoo().items()}
# Physics would take these tests half a minute.
FAST = [
    name for name, env_id in FAMILY_OF.items() if "mujoco" not in FAMILIES[env_id].module and not FAMILIES[env_id].extra
]
# A policy can be loaded where its family can be made. Random actions in Meta-World take long; another of its policies
# is loaded by day, and other policies with a memory are compared with random actions.
LOADABLE = [
    pytest.param(
        name,
        marks=[*(marks(env_id) if FAMILIES[env_id].extra else []), *[pytest.mark.nightly] * (name == "rl2/ml1-push")],
    )
    for name, env_id in FAMILY_OF.items()
]


def evaluation_of(name: str) -> dict[str, Any]:
    return dict(json.loads((zoo()[name] / EVALUATION).read_text(encoding="utf-8")))


def intervals_of(found: dict[str, Any]) -> list[list[float]]:
    """Return mean, low and high of each column; of too few tasks for an interval, four standard errors around it."""
    returns = np.asarray(found["task-returns"])
    reach = 4.0 * returns.std(axis=0, ddof=1) / np.sqrt(len(returns))
    rows = zip(found["intervals"], reach.tolist(), strict=True)
    return [[mean, mean - most, mean + most] if low is None else [mean, low, high] for (mean, low, high), most in rows]


def test_zoo_has_policies_and_is_small() -> None:
    assert {"2d-navigation", "finn2017/2d-navigation", "ad/dark-room", "dpt/bandit-k5-n100"} <= set(zoo())
    assert set(FAST) >= {"2d-navigation", "finn2017/2d-navigation"}
    assert folder_size(ZOO) <= MOST_BYTES
    # Commands name no folder of the machine that trained a policy.
    for name in zoo():
        words = shlex.split(evaluation_of(name)["trained-with"].get("command") or "")
        assert not [word for word in words if Path(word).is_absolute()], name


@pytest.mark.parametrize("name", LOADABLE)
def test_policy_loads_and_its_evaluation_shows_adaptation(name: str) -> None:
    policy = load_policy(f"zoo:{name}")
    assert all(bool(param.isfinite().all()) for param in policy.parameters())
    found = evaluation_of(name)
    assert np.shape(found["task-returns"]) == (found["tasks"], len(found["intervals"]))
    returns = np.asarray(found["task-returns"])
    # After adaptation it is above the return of the same task before, with an interval that excludes zero.
    gains = returns[:, 1:] - returns[:, :1]
    reach = student_quantile(np.array(len(gains) - 1.0)) * gains.std(axis=0, ddof=1) / np.sqrt(len(gains))
    if not np.any(gains.mean(axis=0) > reach):
        # Only a policy that acts on what it observed can adapt within its first episode, to above random actions.
        assert found["columns"] == "episode"
        # No more tasks than an interval needs, since those of Meta-World take long.
        experiment = make_experiment(load_config(zoo()[name] / "config.json"))
        initial = evaluate(experiment, tasks=ENOUGH_TASKS, num_workers=0)
        # Equal returns, as of a sparse reward that is never found, have no interval.
        unadapted = initial.intervals()[0, 0 if np.ptp(initial.task_returns()) == 0.0 else 2]
        assert intervals_of(found)[0][1] > unadapted
    np.testing.assert_allclose(np.mean(found["task-returns"], axis=0), [mean for mean, _, _ in found["intervals"]])


# An evaluation of 100 episodes for each trial takes twenty seconds.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name == "ad/dark-room" else name for name in FAST]
)
def test_evaluation_of_a_fast_policy_is_reproducible(name: str) -> None:
    found = evaluation_of(name)
    experiment = make_experiment(load_config(zoo()[name] / "config.json"))
    experiment.restore("last", zoo()[name])
    again = evaluate(experiment, tasks=found["tasks"], num_workers=0)
    # Other processors and versions may round differently.
    if all(found["evaluated-with"][key] == describe_system()[key] for key in ("cpu", "platform", "packages")):
        assert returns_digest(again) == found["digest"]
        assert again.task_returns().tolist() == found["task-returns"]
    for (mean, _, _), (_, low, high) in zip(again.intervals(), intervals_of(found), strict=True):
        assert low < mean < high


@pytest.mark.parametrize(("name", "count"), [("ad/dark-room", 73), ("dpt/bandit-k5-n100", 100_000)])
def test_policy_of_the_zoo_refuses_a_test_on_the_tasks_of_its_histories(name: str, count: int) -> None:
    folder = zoo()[name]
    experiment = make_experiment(load_config(folder / "config.json"), num_workers=0)
    with make_sampler(experiment, num_workers=0) as sampler:
        # `maml-rl record` draws the first tasks of the config's seed; of a fixed set, those of training.
        learned = experiment.fixed_tasks("training") or sampler.sample_tasks(count)
    experiment.restore("last", folder)
    assert len(learned) == count
    with pytest.raises(ConfigError, match="1 of the 1 tasks are among those of the histories"):
        evaluate(experiment, tasks=[learned[-1]], num_workers=0)


@pytest.fixture
def own_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty zoo, to write to."""
    folder = tmp_path / "zoo"
    monkeypatch.setattr("maml_rl.config.catalog.ZOO", folder)
    monkeypatch.setattr("maml_rl.experiment.zoo.ZOO", folder)
    monkeypatch.setattr("maml_rl.cli.run_options.ZOO", folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    config = config_of(num_batches=4, evaluate_every=2, evaluation_tasks=2, max_kl=0.1)
    train(config, folder, num_workers=0)
    return folder


def test_policy_of_a_run_is_added_listed_tested_and_loaded(
    own_zoo: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["zoo", "add", str(run), "--name", "mine/small", "--checkpoint", "2", "--num-workers", "0"]) == 0
    capsys.readouterr()
    assert cli.main(["zoo", "--verbose"]) == 0
    row = " ".join(capsys.readouterr().out.split())
    assert row.startswith("maml-trpo mine/small 2DNavigation-v0: mean return ")
    assert "2 meta-updates. Returns after 0, 1, ... inner steps" in row
    saved = load_policy("zoo:mine/small").state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in load_policy(run, "2").state_dict().items())
    config = load_config(own_zoo / "mine" / "small" / "config.json")
    assert (config.num_batches, config.evaluate_every, config.evaluation_tasks) == (2, None, 40)
    before = sorted(own_zoo.rglob("*"))
    for words in (["zoo:mine/small"], ["--policy", "zoo:mine/small"]):
        assert cli.main(["test", *words, "--num-workers", "0"]) == 0
        assert f"{evaluation_of('mine/small')['intervals'][0][0]:.2f}" in capsys.readouterr().out
    results = tmp_path / "runs" / "zoo" / "mine"
    assert sorted(path.name for path in results.iterdir()) == ["small-2.npz", "small.npz"]
    assert cli.main(["train", "zoo:mine/small", "--num-batches", "1", "--num-workers", "0"]) == 0
    assert (results / "small" / "metrics.jsonl").is_file()
    assert sorted(own_zoo.rglob("*")) == before


def test_policy_without_intervals_is_added_without_this_machines_folders_and_listed(
    own_zoo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sparse rewards, the returns of an untrained policy are zero in all tasks."""
    monkeypatch.setattr("sys.argv", ["train.py", "--output-folder", str(tmp_path / "my run"), "--seed", "3"])
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    config = config_of(env_name="SparsePointGoal-v0", num_batches=1, max_episode_steps=5)
    train(config, tmp_path / "run", num_workers=0)
    add_to_zoo(tmp_path / "run", "sparse", num_workers=0)
    assert evaluation_of("sparse")["intervals"][0] == [0.0, None, None]
    assert cli.main(["zoo", "--verbose"]) == 0
    assert "0.0 (no interval)" in " ".join(capsys.readouterr().out.split())
    assert evaluation_of("sparse")["trained-with"]["command"] == "python train.py --output-folder 'my run' --seed 3"


def test_policy_that_would_make_the_zoo_too_large_is_refused_and_leaves_nothing(
    own_zoo: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = folder_size(add_to_zoo(run, "first", num_workers=0))
    before = sorted(own_zoo.rglob("*"))
    monkeypatch.setattr(zoo_module, "MOST_BYTES", 2 * one - 100)
    with pytest.raises(ConfigError, match=r"with 'second' the zoo would have [\d,]+ bytes, at most [\d,]+ are allowed"):
        add_to_zoo(run, "second", num_workers=0)
    assert sorted(own_zoo.rglob("*")) == before
    # Replacing a policy takes no more room.
    add_to_zoo(run, "first", overwrite=True, num_workers=0)
    assert sorted(own_zoo.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, "is not a name for the zoo") for name in ("../elsewhere", "a/b/c", "a..b", "/tmp/a", ".hidden")),
        ("2d-navigation/checkpoints", "is not a name for the zoo"),
        ("rl2", "'rl2' is above the policy 'rl2/[a-z0-9-]+' of the zoo; choose another --name"),
        ("2d-navigation/mine", "'2d-navigation/mine' is below the policy '2d-navigation' of the zoo"),
        ("", "is not a name for the zoo"),
        ("mine", "there is no folder .*nowhere; give the --output-folder of a training run"),
        ("2d-navigation", "the zoo has a policy '2d-navigation'; replace it with --overwrite"),
    ],
)
def test_taken_or_invalid_name_is_refused_in_one_line_and_nothing_changes(
    own_zoo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    for taken in ("2d-navigation", "rl2/bandit-k5-n10", "rl2/tabular-mdp-n10"):
        (own_zoo / taken / "checkpoints" / "iteration-000001").mkdir(parents=True)
        (own_zoo / taken / "config.json").write_text("{}")
    before = sorted(own_zoo.rglob("*"))
    command = ["zoo", "add", str(tmp_path / "nowhere"), "--name", name]
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(words, line)
    assert sorted(own_zoo.rglob("*")) == before


def test_folder_of_the_zoo_that_holds_no_policy_is_not_replaced(own_zoo: Path, run: Path) -> None:
    (own_zoo / "notes").mkdir(parents=True)
    (own_zoo / "notes" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="notes exists and is not a policy"):
        add_to_zoo(run, "notes", overwrite=True)
    assert (own_zoo / "notes" / "thesis.tex").is_file()


def test_policy_that_needs_code_of_the_user_is_refused(own_zoo: Path, tmp_path: Path) -> None:
    train(config_of(env_name="tests.lamp_env:Lamp-v0", num_batches=1), tmp_path / "run", num_workers=0)
    with pytest.raises(ConfigError, match=r"env-name 'tests.lamp_env:Lamp-v0' of .* is not part of the package"):
        add_to_zoo(tmp_path / "run", "lamp")
    assert not own_zoo.exists()
