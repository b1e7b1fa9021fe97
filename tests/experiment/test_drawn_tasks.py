"""The section `tasks` of a config: the tasks of training and its evaluations, in every placement and after resuming."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maml_rl.config import Config, load_config
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.envs import Task, global_generators
from maml_rl.errors import AlgorithmError, ConfigError, MamlRLError, TaskError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import train
from maml_rl.metalearners import MAMLTRPO
from maml_rl.results.evaluation import Evaluation
from maml_rl.runs.checkpoint import latest_intact
from maml_rl.task_distributions import FamilyTasks, Stratified, TaskDistribution, TaskList
from maml_rl.task_distributions.task_files import save_tasks
from tests.small_runs import assert_same_run, config_of, train_until, untimed

pytestmark = pytest.mark.usefixtures("forked_workers")

SPLIT = {"distribution": "split", "train": {"goal_0": [-0.5, 0]}, "test": {"goal_0": [0, 0.5]}}
CURRICULUM = {"distribution": "curriculum", "parameter": "goal_0", "parts": 3}
NOTEBOOK = {"distribution": f"{__name__}:Notebook"}
LISTED = {"distribution": "list", "tasks": [{"goal": [0.1, 0.2]}, {"goal": [-0.1, 0.2]}]}


class Notebook(TaskDistribution):
    """Records its calls."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        self.notes.append("draw")
        return family.draw(num_tasks, rng)

    def update(self, tasks: Any, returns: NDArray[np.float64]) -> None:
        assert returns.shape == (3, 2)
        self.notes.append("update")

    def state_dict(self) -> dict[str, Any]:
        return {"notes": self.notes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.notes = list(state["notes"])


def goals(tasks: list[Task]) -> list[list[float]]:
    return [list(task["goal"]) for task in tasks]


def test_training_is_bit_identical_in_workers_after_an_interruption(tmp_path: Path) -> None:
    config = config_of(tasks=CURRICULUM)
    train(config, tmp_path / "whole", num_workers=0)
    train_until(2, config, tmp_path / "parts")
    train(config, tmp_path / "parts", num_workers=2, resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_distribution_of_a_family_draws_the_tasks_of_the_family() -> None:
    drawn = []
    for tasks in (None, NOTEBOOK):
        with make_sampler(make_experiment(config_of(tasks=tasks)), num_workers=0) as sampler:
            drawn.append([goals(sampler.sample_tasks(3)) for _ in range(2)])
    assert drawn[0] == drawn[1]


def test_curriculum_receives_the_returns_and_draws_by_them(tmp_path: Path) -> None:
    config = config_of(tasks={**CURRICULUM, "uniform": 0.0}, meta_batch_size=12)
    train(config, tmp_path, num_workers=0)
    averages = latest_intact(tmp_path / "checkpoints")[1].state["tasks"]["averages"]
    assert all(slow < 0.0 and fast != slow for fast, slow in averages)
    rows = untimed(tmp_path)
    assert [rows[-1][f"tasks/return/part_{part}"] for part in range(3)] == [fast for fast, _ in averages]
    shares = [[row[f"tasks/share/part_{part}"] for part in range(3)] for row in rows]
    progress = [abs(fast - slow) for fast, slow in averages]
    assert shares[-1] == pytest.approx([each / sum(progress) for each in progress])
    assert shares[0] != shares[-1]
    drawn = []
    for state in (None, {"averages": [[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]}):
        experiment = make_experiment(config)
        assert experiment.task_distribution is not None
        if state is not None:
            experiment.task_distribution.load_state_dict(state)
        with make_sampler(experiment, num_workers=0) as sampler:
            drawn.append(goals(sampler.sample_tasks(30)))
    assert min(x for x, _ in drawn[0]) < -0.2
    assert min(x for x, _ in drawn[1]) >= 0.5 - 1.0 / 3.0 - 1e-9


@pytest.mark.parametrize("prefetch", [0, 2])
def test_distribution_receives_every_batch_before_the_next_and_is_checkpointed(tmp_path: Path, prefetch: int) -> None:
    config = config_of(tasks=NOTEBOOK, prefetch=prefetch)
    train(config, tmp_path, num_workers=0)
    checkpoints = sorted((tmp_path / "checkpoints").iterdir())
    for path in checkpoints[-2:]:
        state = json.loads((path / "state.json").read_text())
        assert str(state).count("'draw', 'update'") == int(path.name[-6:])


def test_evaluations_draw_the_test_side_of_a_split_or_that_of_training_on_request() -> None:
    experiment = make_experiment(config_of(tasks=SPLIT))
    test = evaluate(experiment, tasks=20, num_steps=0, num_workers=0)
    training = evaluate(experiment, tasks=20, num_steps=0, num_workers=0, split="training")
    choosing = evaluate(experiment, tasks=20, num_steps=0, num_workers=0, split="validation")
    assert all(x >= 0.0 for x, _ in goals(test.tasks))
    assert all(x < 0.0 for x, _ in goals(training.tasks) + goals(choosing.tasks))
    assert goals(training.tasks) != goals(choosing.tasks)


class Growing(Notebook):
    """Draws goals for validation that depend on its state, which that changes; it cannot be copied."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.lock = threading.Lock()

    def sample_validation(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Task]:
        self.notes.append("validate")
        return [{"goal": [0.01 * len(self.notes), 0.0]} for _ in range(num_tasks)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_evaluations_during_training_see_the_same_tasks_whatever_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    seen: list[Any] = []

    def record(*arguments: Any, **options: Any) -> Evaluation:
        evaluation = evaluate(*arguments, **options)
        seen.append(goals(evaluation.tasks))
        return evaluation

    monkeypatch.setattr("maml_rl.experiment.train.evaluate", record)
    config = config_of(tasks={"distribution": f"{__name__}:Growing"}, evaluate_every=1, evaluation_tasks=2)
    for batches in (2, 4):
        longer = config.override({"num-batches": batches, "prefetch": prefetch})
        train(longer, tmp_path, num_workers=0, resume=batches > 2)
    assert seen == [[[0.01, 0.0], [0.01, 0.0]]] * 4
    state = latest_intact(tmp_path / "checkpoints")[1].state["tasks"]
    assert state == {"notes": ["draw", "update"] * 4}


def test_name_and_file_may_replace_a_distribution_and_a_list_is_drawn_from(tmp_path: Path) -> None:
    save_tasks(tmp_path / "some.json", "2DNavigation-v0", [{"goal": np.array([0.1, 0.2])}])
    given = ("stratified", str(tmp_path / "some.json"), LISTED)
    experiments = [make_experiment(config_of(tasks=tasks)) for tasks in given]
    stratified, of_file, listed = (experiment.task_distribution for experiment in experiments)
    assert isinstance(stratified, Stratified)
    assert isinstance(of_file, TaskList)
    assert goals(of_file.tasks) == [[0.1, 0.2]]
    with make_sampler(experiments[2], num_workers=0) as sampler:
        assert sorted(goals(sampler.sample_tasks(2))) == [[-0.1, 0.2], [0.1, 0.2]]
    assert isinstance(listed, TaskList)
    assert experiments[0].config.tasks == {"distribution": "stratified", "parameters": None}


def test_run_with_other_tasks_in_its_file_is_not_resumed(tmp_path: Path) -> None:
    save_tasks(tmp_path / "some.json", "2DNavigation-v0", [{"goal": [0.1, 0.2]}])
    config = config_of(tasks=str(tmp_path / "some.json"), num_batches=1)
    train(config, tmp_path / "run", num_workers=0)
    failure = tmp_path / "run" / "failure.json"
    failure.write_text('{"iteration": 1, "reason": "diverged"}')
    save_tasks(tmp_path / "some.json", "2DNavigation-v0", [{"goal": [0.1, 0.3]}])
    with pytest.raises(Exception, match="cannot be resumed with these tasks: the tasks are not those with which"):
        train(config.override({"num-batches": 2}), tmp_path / "run", num_workers=0, resume=True)
    # It is complete, as before, and failed as before.
    assert load_config(tmp_path / "run" / "config.json").num_batches == 1
    assert failure.exists()
    save_tasks(tmp_path / "some.json", "2DNavigation-v0", [{"goal": [0.1, 0.2]}])
    train(config, tmp_path / "run", num_workers=0, resume=True)
    assert not failure.exists()


def test_distribution_that_draws_too_few_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Notebook, "sample", lambda self, family, num_tasks, rng: family.draw(1, rng))
    with (
        make_sampler(make_experiment(config_of(tasks=NOTEBOOK)), num_workers=0) as sampler,
        pytest.raises(TaskError, match=r"sample\(3\) of Notebook returned 1 tasks"),
    ):
        sampler.sample_tasks(3)


def test_wrong_result_of_a_hook_of_a_distribution_ends_training_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index, (name, wrong, message) in enumerate(
        [
            ("metrics", {"level": "high"}, "Notebook.metrics returned the metric 'level' as 'high'"),
            ("state_dict", None, "Notebook.state_dict returned None; return a dict of JSON values"),
            ("state_dict", {"rng": (each for each in "a")}, "a checkpoint cannot hold state/tasks/rng = <generator"),
            ("state_dict", {"means": [0.0, np.nan]}, "a checkpoint cannot hold state/tasks/means = nan"),
        ]
    ):
        with monkeypatch.context() as patched:
            patched.setattr(Notebook, name, lambda self, wrong=wrong: wrong)
            with pytest.raises(MamlRLError) as caught:
                train(config_of(tasks=NOTEBOOK), tmp_path / str(index), num_workers=0)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_update_of_a_distribution_gets_copies_and_must_not_draw_from_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(self: Any, tasks: list[Task], returns: Any) -> None:
        for task in tasks:
            task["goal"] = None

    learned: list[Task] = []
    update = MAMLTRPO.update

    def noted(self: MAMLTRPO, batch: Any) -> dict[str, Any]:
        learned.extend(batch.phases[0].tasks)
        return update(self, batch)

    monkeypatch.setattr(MAMLTRPO, "update", noted)
    monkeypatch.setattr(Notebook, "update", spoil)
    config = config_of(tasks=NOTEBOOK)
    train(config, tmp_path / "spoilt", num_workers=0)
    assert learned
    assert all(task["goal"] is not None for task in learned)
    monkeypatch.setattr(Notebook, "update", lambda *_: np.random.random())
    with global_generators.KeptGenerators(), pytest.raises(AlgorithmError, match="update of Notebook draws from np"):
        train(config, tmp_path / "drawn", num_workers=0)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"distribution": "splitt"}, "'tasks.distribution' in x.yaml, line 1: unknown task distribution 'splitt'"),
        ({"train": {"goal_0": [0, 1]}}, "'tasks' in x.yaml, line 1: add a line `distribution: ...`, one of list, "),
        ({"distribution": "split", "trian": {}}, "unknown key 'trian' in x.yaml, line 1; did you mean 'train'"),
        ({"distribution": "split", "test": [0, 1]}, r"'test' in x.yaml, line 1: expected a mapping, got \[0, 1\]"),
        ({"distribution": "fixed", "train": 0, "test": 1}, "'train' in x.yaml, line 1: expected at least 1, got 0"),
        ({"distribution": "list", "file": "x", "tasks": [{}]}, "two lists of tasks; keep 'tasks' or 'file'"),
        (3, "'tasks' in x.yaml, line 1: expected a mapping, got 3"),
        ("nowhere.json", "nowhere.json: No such file or directory; a relative path begins in the current folder$"),
        ("/nowhere.json", "cannot read the tasks in /nowhere.json: No such file or directory$"),
    ],
)
def test_wrong_section_is_refused_in_a_line_before_any_process_starts(tasks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        make_experiment(config_of(tasks=tasks))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("env_name", "tasks", "message"),
    [
        ("HalfCheetahDir-v5", {"distribution": "grid", "values": {"direction": [0.5]}}, "must be -1 or 1, got 0.5"),
        ("Bandit-K5-v0", {"distribution": "split", "test": {"mean_0": [1, 2]}}, "must be probabilities in"),
        ("DarkRoom-v0", {"distribution": "split", "test": {"goal_0": [9]}}, "must be a cell, two integers from 0 to 8"),
    ],
)
def test_task_that_a_family_does_not_allow_is_refused(env_name: str, tasks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"'tasks' in x.yaml, line 1: .*{message}"):
        make_experiment(config_of(env_name=env_name, tasks=tasks))


def test_command_line_replaces_the_section_as_a_whole(tmp_path: Path) -> None:
    text = "env-name: 2DNavigation-v0\ntasks:\n  distribution: split\n  test: {goal_0: [0.5, 1]}\n"
    config = Config.from_mapping(parse_mapping(text, "x.yaml"))
    replaced = config.override({"tasks": {"distribution": "grid", "valves": {}}})
    with pytest.raises(ConfigError, match="unknown key 'valves' in the command line; did you mean 'values'"):
        make_experiment(replaced)
    assert make_experiment(config.override({"tasks": None})).task_distribution is None
    saved = tmp_path / "config.json"
    written = make_experiment(config).config
    saved.write_text(written.to_json())
    assert load_config(saved).differences(written) == []
    with pytest.raises(ConfigError, match=r"'tasks' in x.yaml, line 2: 'test', 'goal_0': expected a range"):
        make_experiment(Config.from_mapping(parse_mapping(text.replace("[0.5, 1]", "3"), "x.yaml")))
