"""Units in worker processes, and updates there: the same bytes as in this process, whenever workers are killed."""

import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hosted_learning import NUM_TASKS, config_of, learn, learned_here
from slow_env import SlowEnv

from maml_rl import MultiTaskSampler
from maml_rl.derivatives import Cache, chunks, store
from maml_rl.errors import AlgorithmError, ChildEnvTimeout, RemoteError
from maml_rl.experiment import sampling
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import train
from maml_rl.metalearners import MAMLTRPO, trial_ppo
from maml_rl.policies import NormalMLPPolicy
from maml_rl.runs.checkpoint import latest_intact
from maml_rl.runs.run_folder import CHECKPOINTS
from maml_rl.samplers.work.child.backend import ChildStore
from maml_rl.samplers.work.child.worker_pool import WorkerPool
from tests.metalearners.small_algorithms import once_a_kind
from tests.small_runs import untimed

pytestmark = [pytest.mark.usefixtures("forked_workers"), pytest.mark.timeout(240)]

KILLS = 10


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of few tasks, and blocks of several of them."""
    monkeypatch.setattr(chunks, "_CPU_CHUNK", (1 << 10, 1 << 12))
    monkeypatch.setattr(store, "_FEW_BLOCKS", 4)
    monkeypatch.setattr(trial_ppo, "_CHUNK", 1)


def in_workers(algorithm: str, iterations: int = 2, num_workers: int = 2, **settings: Any) -> Any:
    experiment = make_experiment(config_of(algorithm, **{"num-workers": num_workers, "update": "workers", **settings}))
    with make_sampler(experiment, num_workers=num_workers) as sampler:
        return learn(experiment, sampler, iterations, on_hosts=True)


@pytest.mark.parametrize(
    "algorithm", once_a_kind(["maml-trpo", "promp", "meta-sgd", "reptile", "e-maml", "cavia", "rl2", "varibad"])
)
def test_parameters_and_metrics_are_those_of_an_update_in_this_process(algorithm: str) -> None:
    assert in_workers(algorithm) == learned_here(algorithm)


def test_policy_of_another_experiment_acts_in_the_workers() -> None:
    settings = {"num-workers": 2, "update": "workers"}
    experiment = make_experiment(config_of("maml-trpo"))
    with make_sampler(make_experiment(config_of("maml-trpo", **settings)), num_workers=2) as sampler:
        assert learn(experiment, sampler, 2, on_hosts=True) == learned_here("maml-trpo")


@pytest.mark.parametrize(
    "settings",
    [
        {"num-steps": 2, "slots-per-task": 2, "algorithm-settings": {"curvature-fraction": 0.5}},
        {"env-name": "HopperRandParams-v5", "max-episode-steps": 40},
        # More workers than blocks.
        {"meta-batch-size": NUM_TASKS, "num_workers": 5},
    ],
)
def test_update_in_workers_has_the_same_bytes_for_other_settings(settings: dict[str, Any]) -> None:
    num_workers = settings.pop("num_workers", 3)
    expected = learned_here("maml-trpo", 1, **settings)
    assert in_workers("maml-trpo", 1, num_workers, **settings) == expected


@pytest.mark.parametrize("algorithm", ["maml-trpo", "promp", "rl2", "varibad"])
def test_workers_that_are_killed_while_they_compute_change_no_byte(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice, usual, killed, timers = random.Random(0), ChildStore._carry_out, [], []

    def kill(env: Any) -> None:
        """Kill a worker that lives; another may have been killed, and not been replaced yet."""
        while True:
            with suppress(ProcessLookupError, IndexError):
                os.kill(pid := choice.choice(env.pids), signal.SIGKILL)
                killed.append(pid)
                return
            time.sleep(0.001)

    def ask_of_the_dying(self: ChildStore, request: Any) -> Any:
        if len(timers) < KILLS and request.call is not None:
            timers.append(threading.Timer(choice.choice([0.0, 0.002, 0.01]), kill, [self._env]))
            timers[-1].start()
        return usual(self, request)

    expected = learned_here(algorithm)
    monkeypatch.setattr(ChildStore, "_carry_out", ask_of_the_dying)
    found = in_workers(algorithm, **{"max-restarts": 10})
    for timer in timers:
        timer.join()
    assert len(killed) == KILLS
    assert found == expected


def number_of(phases: Any, cache: Cache, function: Any) -> torch.Tensor:
    return torch.tensor(function(1))


def test_argument_that_cannot_be_pickled_is_a_clear_error() -> None:
    experiment = make_experiment(config_of("maml-trpo", update="workers", **{"num-workers": 2}))
    with make_sampler(experiment, num_workers=2) as sampler:
        batch = experiment.metalearner.collect(sampler, sampler.sample_tasks(NUM_TASKS))
        assert not batch.in_this_process
        with pytest.raises(TypeError, match=r"cannot be pickled for the workers .*`update: driver`"):
            batch.map(number_of, lambda x: x)
        assert len(batch.map(number_of, int)) > 1


def test_questions_about_episodes_whose_memory_is_used_again_are_refused() -> None:
    experiment = make_experiment(config_of("maml-trpo", update="workers", **{"num-workers": 2}))
    with make_sampler(experiment, num_workers=2) as sampler:
        tasks = sampler.sample_tasks(NUM_TASKS)
        batch = experiment.metalearner.collect(sampler, tasks)
        sampler.rollout(tasks)
        with pytest.raises(RuntimeError, match="the episodes are gone"):
            experiment.metalearner.returns(batch)


def refuse(phases: Any, cache: Cache) -> torch.Tensor:
    raise ValueError("no gradient")


class Broken(NormalMLPPolicy):
    """A policy that cannot act."""

    stateless = True

    def actor(self, params: Any, first_task: int = 0) -> Any:
        raise ValueError("no actor")


@pytest.mark.parametrize("broken", ["update", "policy"])
def test_error_of_a_learner_in_workers_is_that_of_an_update_in_this_process(broken: str) -> None:
    messages = []
    for settings in ({"num-workers": 0}, {"num-workers": 2, "update": "workers"}):
        experiment = make_experiment(config_of("maml-trpo", **settings))
        with make_sampler(experiment, num_workers=settings["num-workers"]) as sampler:
            tasks = sampler.sample_tasks(NUM_TASKS)
            work: Any = partial(sampler.rollout, tasks)
            if broken == "update":
                batch = experiment.metalearner.collect(sampler, tasks)
                work = partial(batch.map, refuse)
            else:
                sampler.policy = Broken(2, 2, (16,))
            with pytest.raises(AlgorithmError) as raised, experiment.guard:
                work()
            messages.append(str(raised.value))
    assert "ValueError in " in messages[0]
    assert "test_child_backend.py, line" in messages[0]
    assert messages[1] == messages[0]
    # Where the traceback in the worker is.
    assert isinstance(raised.value.__cause__, RemoteError)
    assert "in refuse" in str(raised.value.__cause__) or "in actor" in str(raised.value.__cause__)


def wait_for(phases: Any, cache: Cache, path: str) -> torch.Tensor:
    while not Path(path).exists():
        time.sleep(0.01)
    return torch.zeros(1)


def test_update_in_workers_may_take_longer_than_step_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, usual = [], WorkerPool._check_deadlines

    def look(self: WorkerPool, now: float) -> None:
        looks.append(now)
        if looks[-1] > looks[0] + 2 * self.limits.call:
            (tmp_path / "go").touch()
        usual(self, now)

    experiment = make_experiment(config_of("maml-trpo", update="workers", **{"num-workers": 2}))
    with make_sampler(experiment, num_workers=2) as sampler:
        batch = experiment.metalearner.collect(sampler, sampler.sample_tasks(NUM_TASKS))
        monkeypatch.setattr(WorkerPool, "_check_deadlines", look)
        sampler._workers.backend._env.pool.limits.call = 0.1
        batch.map(wait_for, str(tmp_path / "go"))
    assert len(looks) > 1


def test_worker_that_is_stopped_in_an_update_hangs_after_step_timeout(tmp_path: Path) -> None:
    experiment = make_experiment(config_of("maml-trpo", update="workers", **{"num-workers": 2}))
    with make_sampler(experiment, num_workers=2) as sampler:
        batch = experiment.metalearner.collect(sampler, sampler.sample_tasks(NUM_TASKS))
        sampler._workers.backend._env.pool.limits.call = 0.5
        os.kill(sampler.pids[0], signal.SIGSTOP)
        with pytest.raises(ChildEnvTimeout, match=r"hangs in an update .*for more than 0\.5 s"):
            batch.map(wait_for, str(tmp_path / "never"))


def test_whole_trials_are_read_from_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for update in ("workers", "driver"):
        experiment = make_experiment(config_of("varibad", update=update, **{"num-workers": 2}))
        with make_sampler(experiment, num_workers=2) as sampler:
            batch = experiment.metalearner.collect(sampler, sampler.sample_tasks(NUM_TASKS))
            with monkeypatch.context() as patch:
                # No worker is asked.
                patch.setattr(WorkerPool, "results", None)
                (episodes,) = batch.phases
            later = experiment.metalearner.collect(sampler, sampler.sample_tasks(NUM_TASKS))
            assert episodes.digest() != later.phases[0].digest()
            goals = [task["goal"].tolist() for task in episodes.tasks]
            found.append((episodes.digest(), episodes.horizon, goals, episodes.chunks))
    assert found[0] == found[1]


# A test above shows the same bytes for two workers.
@pytest.mark.parametrize(
    "algorithm", ["maml-trpo", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("promp", "rl2", "varibad"))]
)
def test_run_leaves_its_updates_to_four_workers_and_has_the_same_bytes(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, usual = [], ChildStore._carry_out

    def counted(self: ChildStore, request: Any) -> Any:
        asked.append(request.call is not None)
        return usual(self, request)

    monkeypatch.setattr(ChildStore, "_carry_out", counted)
    found = []
    for num_workers in (0, 3, 4):
        asked.clear()
        train(config_of(algorithm, update="auto"), folder := tmp_path / str(num_workers), num_workers=num_workers)
        assert any(asked) == (num_workers == 4)
        checkpoint = latest_intact(folder / CHECKPOINTS)
        tensors = {path.name: path.read_bytes() for path in checkpoint[0].glob("*.safetensors")}
        assert tensors
        found.append((untimed(folder), tensors))
    assert found[0] == found[1] == found[2]


class Unpicklable(MAMLTRPO):
    """A learner with a part that has no pickle."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.part = lambda: None


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({}, "workers"),
        ({"num-workers": 3}, "driver"),
        ({"num-workers": None, "backend": "in-process"}, "driver"),
        ({"update": "driver"}, "driver"),
        ({"prefetch": 1}, "driver"),
        ({"inference": "central"}, "driver"),
        ({"num-groups": 2}, "driver"),
        ({"recv-timeout": 1.0}, "driver"),
        ({"algorithm": "pearl"}, "driver"),
        ({"algorithm": "rl2"}, "workers"),
        ({"algorithm": "rl2", "meta-batch-size": 3}, "driver"),
        ({"algorithm": f"{__name__}:Unpicklable"}, "driver"),
    ],
)
def test_automatic_place_of_a_runs_updates(settings: dict[str, Any], place: str) -> None:
    values = {"num-workers": 4, "algorithm": "maml-trpo", **settings}
    experiment = make_experiment(config_of(values.pop("algorithm"), **values))
    with make_sampler(experiment, in_run=True) as sampler:
        assert sampler.placement.update == place
    # Batches of other samplers may be used after the next is sampled.
    with make_sampler(experiment) as sampler:
        assert sampler.placement.update == "driver"


def test_updates_stay_in_the_driver_where_workers_would_lack_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = make_experiment(config_of("maml-trpo", **{"num-workers": 4}))
    for left, place in ((None, "workers"), (2**31, "workers"), (2**30, "driver")):
        monkeypatch.setattr(sampling, "available_memory", lambda left=left: left)
        with make_sampler(experiment, in_run=True) as sampler:
            assert sampler.placement.update == place


# Tasks of very different length.


# The first half takes long: all of it is one worker's share.
SLOW, TASKS = 3, 6


class UnevenEnv(SlowEnv):
    """Takes long in the first tasks, and records which process has which task; see `SlowEnv`.

    Args:
        folder: receives a file for each episode that begins.
        wait: seconds of an episode of a slow task.
        dies: whether its process is killed once, in phase 1 and the last task.
    """

    def __init__(self, folder: str = "", wait: float = 0.0, dies: bool = False) -> None:
        super().__init__()
        self._folder, self._seconds, self._dies = Path(folder), wait, dies

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        goal = int(self._task["goal"])
        if self._seconds:
            (self._folder / f"{self._task['phase']}-{goal}-{os.getpid()}-{time.monotonic_ns()}").touch()
            time.sleep(self._seconds if goal < SLOW else 0.0)
        if self._dies and goal == TASKS - 1 and self._task["phase"] == 1 and not (self._folder / "fault").exists():
            (self._folder / "fault").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(seed=seed, options=options)


def tasks_of(phase: int) -> list[dict[str, float]]:
    return [{"goal": float(goal), "phase": phase} for goal in range(TASKS)]


def sampled(env: Any, **options: Any) -> list[str]:
    """Sample two phases, the second of them in units, and return their digests."""
    settings: dict[str, Any] = {"seed": 0, "max_episode_steps": 4, "num_workers": 2, "slots_per_task": 1, **options}
    with MultiTaskSampler(env, {}, 2, NormalMLPPolicy(2, 1, (4,), "tanh", seed=0), **settings) as sampler:
        return [sampler.rollout(tasks_of(phase)).digest() for phase in range(2)]


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    return sampled(UnevenEnv, num_workers=0)


def workers_of(folder: Path, phase: int) -> dict[int, set[str]]:
    """Return the processes that have sampled each task of a phase."""
    notes = [path.name.split("-") for path in folder.iterdir() if path.name.startswith(f"{phase}-")]
    return {task: {note[2] for note in notes if note[1] == str(task)} for task in range(TASKS)}


@pytest.mark.slow
@pytest.mark.parametrize("observe_last", [False, True])
def test_idle_workers_take_the_next_tasks_when_their_times_differ_much(
    undisturbed: list[str], tmp_path: Path, observe_last: bool
) -> None:
    if observe_last:
        policy: Any = NormalMLPPolicy(5, 1, (4,), "tanh", seed=0)
        found = []
        for env, workers in ((UnevenEnv, 0), (partial(UnevenEnv, str(tmp_path), 0.09), 2)):
            with MultiTaskSampler(
                env, {}, 2, policy, seed=0, num_workers=workers, max_episode_steps=4, observe_last=True
            ) as sampler:
                found.append([sampler.rollout(tasks_of(phase)).digest() for phase in range(2)])
        assert found[0] == found[1]
    else:
        assert sampled(partial(UnevenEnv, str(tmp_path), 0.09)) == undisturbed
    first, second = (workers_of(tmp_path, phase) for phase in (0, 1))
    # At first each worker has its own tasks, and one worker has all the slow ones.
    assert len(set.union(*(first[task] for task in range(SLOW)))) == 1
    assert len(set.union(*(second[task] for task in range(SLOW)))) == 2


@pytest.mark.slow
def test_worker_that_dies_with_a_unit_costs_no_finished_unit(undisturbed: list[str], tmp_path: Path) -> None:
    assert sampled(partial(UnevenEnv, str(tmp_path), 0.09, True)) == undisturbed
    begun = Counter(path.name.split("-")[1] for path in tmp_path.iterdir() if path.name.startswith("1-"))
    # Two episodes per task. The last unit was lost, and no finished unit was sampled again.
    assert begun.pop(str(TASKS - 1)) > 2
    assert min(begun.values()) == 2
    assert sum(count > 2 for count in begun.values()) <= 1
