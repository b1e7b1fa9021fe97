import hashlib
import itertools
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Event, Semaphore, active_count
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from maml_rl.config import load_config
from maml_rl.envs.families.navigation import Navigation2DVectorEnv
from maml_rl.errors import ChildEnvError, ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import made_ahead, train
from maml_rl.runs.checkpoint import latest_intact, list_checkpoints
from maml_rl.runs.metrics import Metrics, read_metrics
from tests.envs.third_party import WordEnv
from tests.small_runs import assert_same_run, config_of, snapshot, train_until

pytestmark = pytest.mark.usefixtures("forked_workers")


def test_methods_train_on_the_same_tasks_and_only_the_oracle_sees_them() -> None:
    tasks, observations = [], []
    for method in ("maml", "pretrain", "oracle"):
        with make_sampler(make_experiment(config_of(method=method)), num_workers=0) as sampler:
            drawn = sampler.sample_tasks(3)
            observations.append(sampler.rollout(drawn).observations[:, 0, 0])
            tasks.append([task["goal"].tolist() for task in drawn])
    assert tasks[0] == tasks[1] == tasks[2]
    assert torch.equal(observations[0], observations[1])
    torch.testing.assert_close(observations[2][:, 2:], torch.tensor(tasks[0]), rtol=0.0, atol=1e-6)


def test_oracle_of_tasks_that_are_not_numbers_is_refused_before_any_process_starts(
    request: pytest.FixtureRequest,
) -> None:
    gymnasium.register("Words-v0", WordEnv)
    request.addfinalizer(lambda: gymnasium.registry.pop("Words-v0"))
    config = config_of(env_name="Words-v0", method="oracle")
    with pytest.raises(ConfigError, match=r"'method' in x.yaml.*cannot be observed: expected numbers, got 'steep'"):
        make_experiment(config)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(config_of(), folder, num_workers=0)
    return folder


def test_metrics_have_the_keys_of_every_iteration(undisturbed: Path) -> None:
    rows = read_metrics(undisturbed / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == list(range(5))
    promised = {"env_steps", "return/step_0", "return/step_1", "kl", "loss/before", "loss/after", "digest"}
    for row in rows:
        assert promised | {"time/sample_s", "time/update_s"} <= row.keys()
        assert 0 <= row["kl"] <= 0.01
        assert len(row["digest"]) == 64
    # 3 tasks, 4 episodes, 10 steps, 2 phases; an episode may reach its goal earlier.
    steps = [row["env_steps"] for row in rows]
    assert all(0 < after - before <= 240 for before, after in zip([0, *steps], steps, strict=False))
    # A standard Gaussian in each of two entries, before the first meta-update.
    assert rows[0]["policy/std"] == pytest.approx(1.0)
    assert rows[0]["policy/entropy"] == pytest.approx(np.log(2.0 * np.pi * np.e), abs=1e-5)
    assert rows[1]["policy/std"] != rows[0]["policy/std"]


def test_folder_of_a_run_has_config_metrics_events_and_checkpoints(undisturbed: Path) -> None:
    assert load_config(undisturbed / "config.json").differences(make_experiment(config_of()).config) == []
    (events,) = (undisturbed / "tensorboard").glob("events.*")
    accumulator = EventAccumulator(str(events)).Reload()
    tags = set(accumulator.Tags()["scalars"])
    assert {"policy/std", "policy/entropy"} <= tags
    groups = {tag.partition("/")[0] for tag in tags}
    assert groups == {"return", "policy", "loss", "time", "train"}, "TensorBoard shows one section for each"
    names = [path.name for path in list_checkpoints(undisturbed / "checkpoints")]
    assert names[-1] == "iteration-000005"


def test_first_iteration_agrees_with_the_sampler(undisturbed: Path) -> None:
    experiment = make_experiment(config_of())
    with make_sampler(experiment, num_workers=0) as sampler:
        tasks = sampler.sample_tasks(3)
        train_episodes, valid_episodes = sampler.sample(tasks, num_steps=1, fast_lr=0.1, gamma=0.99, gae_lambda=1.0)
    row = read_metrics(undisturbed / "metrics.jsonl")[0]
    phases = [*train_episodes, valid_episodes]
    digests = [phase.part(slice(task, task + 1)).digest() for phase in phases for task in range(3)]
    assert row["digest"] == hashlib.sha256("".join(digests).encode()).hexdigest()
    rewards = train_episodes[0].rewards * train_episodes[0].mask
    assert row["return/step_0"] == pytest.approx(rewards.sum().item() / 12, rel=1e-5)
    assert row["env_steps"] == int(train_episodes[0].mask.sum() + valid_episodes.mask.sum())


def test_run_interrupted_repeatedly_is_bit_identical_when_resumed(tmp_path: Path, undisturbed: Path) -> None:
    for iteration in (0, 2, 3, 4):
        train_until(iteration, config_of(), tmp_path, resume=iteration > 0)
    train(config_of(), tmp_path, num_workers=0, resume=True)
    assert_same_run(tmp_path, undisturbed)


def test_run_resumed_past_a_broken_checkpoint_is_bit_identical(tmp_path: Path, undisturbed: Path) -> None:
    train_until(4, config_of(), tmp_path)
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    (newest / "tensors.safetensors").write_bytes(b"torn")
    train(config_of(), tmp_path, num_workers=0, resume=True)
    assert_same_run(tmp_path, undisturbed)


def test_finished_run_does_nothing_when_resumed_unless_for_more_iterations(tmp_path: Path, undisturbed: Path) -> None:
    train(config_of(num_batches=3), tmp_path, num_workers=0)
    before = snapshot(tmp_path / "checkpoints")
    seen: list[Metrics] = []
    train(config_of(num_batches=3), tmp_path, num_workers=0, resume=True, on_iteration=seen.append)
    assert seen == []
    assert snapshot(tmp_path / "checkpoints") == before
    train(config_of(), tmp_path, num_workers=0, resume=True)
    assert_same_run(tmp_path, undisturbed)


def test_profile_accounts_for_the_time_of_an_iteration(tmp_path: Path) -> None:
    train(config_of(num_batches=2), tmp_path, num_workers=0, profile=True)
    for row in read_metrics(tmp_path / "metrics.jsonl"):
        shares = {key: value for key, value in row.items() if key.startswith("time/share/")}
        assert {"time/share/inference", "time/share/inner", "time/share/outer"} <= shares.keys()
        assert all(0 <= share <= 1 for share in shares.values())
        assert 0.3 < sum(shares.values()) <= 1.001


def test_wrong_number_of_workers_is_refused_and_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_workers"):
        train(config_of(), tmp_path / "run", num_workers=-1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_environment_is_never_made_in_the_parent_of_children(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    config = config_of(env_name="tests.lamp_env:Marked-v0", env_kwargs={"marker": str(marker)}, num_batches=1)
    train(config, tmp_path / "run", num_workers=1)
    pids = {int(pid) for pid in marker.read_text().split()}
    # One child has checked it, one has sampled.
    assert len(pids) == 2
    assert os.getpid() not in pids
    make_experiment(config)
    assert os.getpid() in {int(pid) for pid in marker.read_text().split()}


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("max_restarts", [0, 1])
def test_child_that_checks_the_environment_is_replaced_as_workers_are(max_restarts: int, tmp_path: Path) -> None:
    kwargs = {"marker": str(tmp_path / "marker"), "wrong": "die once"}
    config = config_of(env_name="tests.lamp_env:Marked-v0", env_kwargs=kwargs, max_restarts=max_restarts)
    if max_restarts:
        make_experiment(config, num_workers=1)
    else:
        with pytest.raises(ConfigError, match=r"died 1 times .*max_restarts=0"):
            make_experiment(config, num_workers=1)
    assert len((tmp_path / "marker").read_text().split()) == 1 + max_restarts


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [("raise", ["RuntimeError in ", "lamp_env.py, line ", ": the lamp is broken"]), ("die", ["exited with status 3"])],
)
def test_environment_that_fails_in_its_child_is_refused_on_one_line(
    tmp_path: Path, wrong: str, words: list[str]
) -> None:
    kwargs = {"marker": str(tmp_path / "marker"), "wrong": wrong}
    config = config_of(env_name="tests.lamp_env:Marked-v0", env_kwargs=kwargs)
    with pytest.raises(ConfigError) as caught:
        train(config, tmp_path / "run", num_workers=2)
    message = str(caught.value)
    assert "tests.lamp_env:Marked-v0 cannot be made: " in message
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert not (tmp_path / "run").exists()


def test_entropy_of_a_policy_with_discrete_actions_is_at_most_that_of_chance(tmp_path: Path) -> None:
    train(config_of(env_name="Bandit-K5-v0", max_episode_steps=None, num_batches=1), tmp_path / "run", num_workers=0)
    (metrics,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert 1.0 < metrics["policy/entropy"] <= np.log(5.0) + 1e-6
    assert "policy/std" not in metrics


@pytest.mark.parametrize("kind", [None, KeyboardInterrupt, SystemExit])
def test_training_that_is_stopped_or_interrupted_saves_its_last_iteration(
    tmp_path: Path, undisturbed: Path, kind: type[BaseException] | None
) -> None:
    stop = Event()

    # Checkpoints are those of every second iteration, and this one.
    def end_after_the_third(metrics: Metrics) -> None:
        if metrics["iteration"] == 2:
            stop.set()
            if kind is not None:
                raise kind

    with nullcontext() if kind is None else pytest.raises(kind):
        train(config_of(), tmp_path, num_workers=0, on_iteration=end_after_the_third, stop=stop)
    assert latest_intact(tmp_path / "checkpoints")[1].iteration == 3
    train(config_of(), tmp_path, num_workers=0, resume=True)
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_training_that_an_environment_ends_saves_the_last_finished_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefetch: int
) -> None:
    config = config_of(num_batches=5, checkpoint_every=100, prefetch=prefetch)
    train(config, tmp_path / "whole", num_workers=0)
    usual, numbers = Navigation2DVectorEnv.step_send, itertools.count()

    def fail(self: Navigation2DVectorEnv, index: int, actions: Any) -> None:
        # Two phases of ten steps in each of three iterations.
        if next(numbers) == 65:
            raise OSError("the simulator is gone")
        usual(self, index, actions)

    with monkeypatch.context() as patch:
        patch.setattr(Navigation2DVectorEnv, "step_send", fail)
        with pytest.raises(ChildEnvError, match="the simulator is gone"):
            train(config, tmp_path / "run", num_workers=0)
    assert latest_intact(tmp_path / "run" / "checkpoints")[1].iteration == 3
    train(config, tmp_path / "run", num_workers=0, resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def ignore(*, now: bool) -> None:
    """An interrupt for work that ends by itself."""


@pytest.fixture
def waits_for_room(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Return an event that is set when the thread that works ahead begins to wait."""
    waits = Event()

    class Watched(Semaphore):
        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            if not super().acquire(blocking=False):
                waits.set()
                return super().acquire(blocking, timeout)
            return True

    monkeypatch.setattr("maml_rl.experiment.train.Semaphore", Watched)
    return waits


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ahead", [1, 5])
def test_items_come_in_order_and_none_is_begun_before_there_is_room_for_it(ahead: int, waits_for_room: Event) -> None:
    before, begun = active_count(), list[int]()

    def make() -> int:
        begun.append(len(begun))
        return begun[-1]

    with made_ahead(make, 5 + ahead, ahead, ignore) as take:
        for taken in range(5):
            assert waits_for_room.wait(10.0)
            assert begun == list(range(taken + ahead))
            waits_for_room.clear()
            assert take() == taken
        assert [take() for _ in range(ahead)] == list(range(5, 5 + ahead))
    assert active_count() == before


@pytest.mark.timeout(60)
def test_error_of_work_ahead_is_raised_after_the_items_before_it() -> None:
    error, before = RuntimeError("out of fuel"), active_count()
    numbers = iter([0, 1, error])

    def make() -> int:
        number = next(numbers)
        if isinstance(number, RuntimeError):
            raise number
        return number

    with made_ahead(make, 10, 5, ignore) as take:
        assert [take(), take()] == [0, 1]
        with pytest.raises(RuntimeError) as caught:
            take()
        assert caught.value is error
    assert active_count() == before


def fail_after(event: Event, ahead: AbstractContextManager[object], error: BaseException) -> None:
    with ahead:
        assert event.wait(10.0)
        raise error


@pytest.mark.timeout(60)
def test_error_of_the_user_ends_a_thread_that_waits_for_room(waits_for_room: Event) -> None:
    before = active_count()
    with pytest.raises(KeyboardInterrupt):
        fail_after(waits_for_room, made_ahead(itertools.count().__next__, 100, 1, ignore), KeyboardInterrupt())
    assert active_count() == before


@pytest.mark.timeout(60)
def test_error_of_the_user_interrupts_work_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maml_rl.experiment.train._GRACE_SECONDS", 0.01)
    asked: list[bool] = []
    begun, ended = Event(), Event()

    def make() -> None:
        begun.set()
        assert ended.wait(10.0)

    def interrupt(*, now: bool) -> None:
        asked.append(now)
        if now:
            ended.set()

    before = active_count()
    with pytest.raises(ZeroDivisionError):
        fail_after(begun, made_ahead(make, 1, 1, interrupt), ZeroDivisionError())
    assert asked == [False, True]
    assert active_count() == before
