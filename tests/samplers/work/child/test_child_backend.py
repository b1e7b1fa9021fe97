"""Phases and updates in worker processes: the same bytes as in this process, whenever workers are killed."""

import os
import random
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_env import HORIZON, FaultyEnv
from faulty_sampler import Broken
from hosted_learning import NUM_TASKS, config_of, learn, learned_once
from slow_env import SlowEnv

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.config.placement import Placement
from maml_rl.derivatives import Cache
from maml_rl.envs import make_vector_env
from maml_rl.envs.make_env import Recipe
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import AlgorithmError, ChildEnvError, ChildEnvTimeout, RemoteError
from maml_rl.experiment import sampling
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import train
from maml_rl.metalearners import MAMLTRPO
from maml_rl.policies import GRUPolicy, NormalMLPPolicy
from maml_rl.profiling import NULL_TIMER
from maml_rl.runs.checkpoint import latest_intact
from maml_rl.runs.run_folder import CHECKPOINTS
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.work.child.backend import ChildStore, ProcessBackend
from maml_rl.samplers.work.child.worker_pool import WorkerPool
from maml_rl.seeding import PhaseStreams
from tests.small_runs import untimed

pytestmark = [pytest.mark.usefixtures("forked_workers", "small_chunks"), pytest.mark.timeout(240)]

KILLS = 6
# Forked children share the torch of this process, and so start at once.
IN_CHILDREN: dict[str, Any] = {"inference": "worker", "start_method": "fork"}


# Phases.


def sample_faulty(num_workers: int, options: dict[str, Any] | None = None, **fault: Any) -> str:
    """Sample a phase of three tasks in `FaultyEnv`, and return its digest."""
    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    settings = {"seed": 0, "max_episode_steps": HORIZON, **(IN_CHILDREN if num_workers else {}), **(options or {})}
    env = partial(FaultyEnv, **fault)
    with MultiTaskSampler(env, {}, 2, policy, num_workers=num_workers, **settings) as sampler:
        return sampler.rollout([{"goal": 0.0}, {"goal": 1.0}, {"goal": 2.0}]).digest()


def backend_of(policy: Any) -> Any:
    """Return a backend of two workers, whose tasks have two slots each, for a `with`."""
    return closing(
        ProcessBackend(Placement(num_workers=2, **IN_CHILDREN), Recipe.of("2DNavigation-v0", {}, 5), policy, 2)
    )


def sample(backend: ProcessBackend, policy: Any, number: int = 0, horizon: int = 5) -> TaskEpisodes:
    tasks = tuple({"goal": [0.1 * (task + 1), 0.3]} for task in range(3))
    return backend.run(Phase(tasks, policy, None, PhaseStreams(0, 0, number), 2, horizon), NULL_TIMER)


def test_a_phase_takes_one_message_to_each_child(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Counter[tuple[int, str]] = Counter()
    send = WorkerPool.send

    def counting(pool: WorkerPool, index: int, command: Any, *rest: Any) -> None:
        sent[index, command.method] += 1
        send(pool, index, command, *rest)

    policy = NormalMLPPolicy(2, 2, (4,), "tanh")
    with backend_of(policy) as backend:
        backend.prepare(3)
        monkeypatch.setattr(WorkerPool, "send", counting)
        for number in range(3):
            sample(backend, policy, number)
    assert sent == {(child, kind): count for child in (0, 1) for kind, count in (("load_policy", 1), ("run", 3))}


class ShiftedPolicy(NormalMLPPolicy):
    """Adds a constant that is not a parameter."""

    def __init__(self) -> None:
        super().__init__(2, 2, (4,), "tanh")
        self.register_buffer("shift", torch.zeros(2))

    def act(self, observations: torch.Tensor, noise: torch.Tensor, memory: Any = (), params: Any = None) -> Any:
        return super().act(observations, noise, params=params)[0] + self.shift, ()


def test_constants_of_the_policy_reach_the_children() -> None:
    policy = ShiftedPolicy()
    with backend_of(policy) as backend:
        before = sample(backend, policy, horizon=1).actions
        policy.shift += 5.0
        after = sample(backend, policy, horizon=1).actions
    torch.testing.assert_close(after, before + 5.0)


# `test_faults.py` has a death at every place.
@pytest.mark.slow
@pytest.mark.parametrize(("place", "doing"), [("reset", "in reset"), (HORIZON - 1, f"in step {HORIZON - 1}")])
def test_killed_child_is_replaced_and_the_phase_is_bit_identical(
    place: Any, doing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = tmp_path / "marker"
    found = sample_faulty(2, fault="kill", place=place, marker=str(marker), slot_task=1.0)
    assert (marker.exists(), found) == (True, sample_faulty(0))
    assert f"SIGKILL (by a user, or by the kernel when memory ran out) {doing} with the tasks" in caplog.messages[0]
    assert len(caplog.messages) == 1


@pytest.mark.slow
def test_hung_child_is_shown_with_task_step_and_stack_and_killed() -> None:
    start = time.monotonic()
    # Each worker has one slot of this task; a busy machine decides whose hang is noticed first.
    shown = r"(?s)hangs in step 2 of slot [23] with the task {'goal': 1.0}.*in _hang_with_gil"
    with pytest.raises(ChildEnvTimeout, match=shown):
        sample_faulty(2, {"step_timeout": 0.5}, fault="hang_with_gil", place=2, slot_task=1.0)
    assert time.monotonic() - start < 30.0


@pytest.mark.slow
def test_task_that_ends_every_worker_ends_as_many_as_max_restarts_allows(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ChildEnvError, match=r"3 workers were lost with the tasks .*'goal': 1\.0.* max_restarts=2"):
        sample_faulty(3, {"max_restarts": 2}, fault="kill", place="reset_task", slot_task=1.0)
    assert ["in reset_task with the tasks" in message for message in caplog.messages] == [True] * 3


class InDefaultType(torch.nn.Module):
    """Adds a tensor of torch's default type, in which a third is another number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, observations: torch.Tensor) -> Any:
        mean = torch.tensor([1 / 3]) * 1e7 + self.weight + 0.0 * observations.sum(-1, keepdim=True)
        return torch.distributions.Normal(mean - 1e7 / 3, torch.full((1,), 1e-3))


class DrawsThirds(FaultyEnv):
    """Draws a task of torch's default type."""

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{**task, "goal": float(torch.tensor(1 / 3))} for task in super().sample_tasks(num_tasks)]


@pytest.mark.slow
def test_workers_draw_and_act_in_the_default_type_of_the_main_process(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)
    found = []
    for place in ({"num_workers": 0}, {"num_workers": 1, "start_method": "spawn", "inference": "worker"}):
        with MultiTaskSampler(DrawsThirds, {}, 2, InDefaultType(), seed=0, max_episode_steps=3, **place) as sampler:
            tasks = sampler.sample_tasks(2)
            found.append((tasks[0]["goal"], sampler.rollout(tasks).digest()))
    assert found[0] == found[1]
    assert found[0][0] == 1 / 3


@pytest.mark.slow
def test_policy_of_a_type_that_numpy_lacks_acts_here_and_workers_refuse_it_by_name() -> None:
    policy = NormalMLPPolicy(2, 2, (4,), seed=0).bfloat16()
    found = []
    for place in ({"num_workers": 0}, {"num_workers": 1, "start_method": "fork"}):
        with MultiTaskSampler("2DNavigation-v0", {}, 2, policy, seed=0, max_episode_steps=3, **place) as sampler:
            found.append(sampler.rollout(sampler.sample_tasks(2)).digest())
    assert found[0] == found[1]
    with pytest.raises(TypeError, match=r"'sigma' of the policy NormalMLPPolicy has the type torch.bfloat16, which"):
        MultiTaskSampler("2DNavigation-v0", {}, 2, policy, num_workers=2, inference="worker")


def test_policy_that_cannot_be_pickled_is_refused_by_name() -> None:
    policy = NormalMLPPolicy(2, 2, (4,), lambda units: torch.relu(units))
    with pytest.raises(
        TypeError, match=r"the policy NormalMLPPolicy\.perceptron\.nonlinearity cannot be pickled .* top level"
    ):
        MultiTaskSampler("2DNavigation-v0", {}, 2, policy, num_workers=2, inference="worker")


CUT: dict[str, dict[str, Any]] = {
    "images": {"env_name": "PixelNavigation-v0"},
    "memory over waves": {"env_name": "2DNavigation-v0", "slots_per_task": 2, "reset_memory_each_episode": True},
    "infos over waves": {"env_name": SlowEnv, "slots_per_task": 2},
    "threads over waves": {"env_name": SlowEnv, "stepping": "threads", "slots_per_task": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_episodes_do_not_depend_on_the_cut(name: str) -> None:
    options = {"batch_size": 4, "seed": 0, "max_episode_steps": 6, **CUT[name]}
    with closing(make_vector_env(options["env_name"])) as env:
        spaces = env.single_observation_space, env.single_action_space
        policy: Any = GRUPolicy(*spaces, 5) if "memory" in name else get_policy_for_env(env, (8,), "tanh")
    params = {key: value.detach().clone() for key, value in policy.stack_parameters(3).items()}
    for value in params.values():
        value += torch.arange(3.0).reshape(3, *(1,) * (value.dim() - 1)) * 0.01
    found = []
    for num_workers in (0, 2, 9):
        placement = IN_CHILDREN if num_workers else {}
        with MultiTaskSampler(policy=policy, num_workers=num_workers, **options, **placement) as sampler:
            tasks = sampler.sample_tasks(3)
            found.append([sampler.rollout(tasks, given).digest() for given in (None, params)])
    assert found == found[:1] * 3


# Updates.


def in_workers(algorithm: str, iterations: int = 2, num_workers: int = 2, **settings: Any) -> Any:
    experiment = make_experiment(config_of(algorithm, **{"num-workers": num_workers, "update": "workers", **settings}))
    with make_sampler(experiment, num_workers=num_workers) as sampler:
        return learn(experiment, sampler, iterations, on_hosts=True)


@pytest.mark.parametrize("algorithm", ["maml-trpo", "rl2"])
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

    expected = learned_once(algorithm)
    monkeypatch.setattr(ChildStore, "_carry_out", ask_of_the_dying)
    found = in_workers(algorithm, **{"max-restarts": 10})
    for timer in timers:
        timer.join()
    assert len(killed) == KILLS
    assert found == expected


def test_workers_get_what_they_were_not_sent_since_another_had_died(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, killed = WorkerPool.send, list[int]()

    def send(self: WorkerPool, index: int, command: Any, *others: Any) -> None:
        if command.method == "take" and not killed:
            killed.append(index)
            os.kill(self.worker(index).process.pid, signal.SIGKILL)
            # The channel is at its end.
            assert select.select([self.worker(index).channel], [], [], 30.0)[0]
        usual(self, index, command, *others)

    monkeypatch.setattr(WorkerPool, "send", send)
    assert in_workers("maml-trpo", **{"max-restarts": 10}) == learned_once("maml-trpo")
    assert killed


def number_of(phases: Any, cache: Cache, function: Any) -> torch.Tensor:
    return torch.tensor(function(1))


@pytest.fixture
def in_two() -> Iterator[Any]:
    """A sampler, and a batch in its two workers."""
    experiment = make_experiment(config_of("maml-trpo", update="workers", **{"num-workers": 2}))
    with make_sampler(experiment, num_workers=2) as sampler:
        yield sampler, experiment.metalearner.collect(sampler, sampler.sample_tasks(NUM_TASKS))


def test_arguments_without_a_pickle_and_episodes_that_are_gone_are_clear_errors(in_two: Any) -> None:
    sampler, batch = in_two
    assert not batch.in_this_process
    with pytest.raises(TypeError, match=r"cannot be pickled for the workers .*`update: driver`"):
        batch.map(number_of, lambda x: x)
    assert len(batch.map(number_of, int)) > 1
    # Their memory is used again.
    sampler.rollout(batch._batch.phase.tasks)
    with pytest.raises(RuntimeError, match="the episodes are gone"):
        batch.map(number_of, int)


def refuse(phases: Any, cache: Cache) -> torch.Tensor:
    raise ValueError("no gradient")


@pytest.mark.parametrize(("broken", "file"), [("update", "test_child_backend.py"), ("policy", "faulty_sampler.py")])
def test_error_of_a_learner_in_workers_is_that_of_an_update_in_this_process(broken: str, file: str) -> None:
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
    assert f"{file}, line" in messages[0]
    assert messages[1] == messages[0]
    # Where the traceback in the worker is.
    assert isinstance(raised.value.__cause__, RemoteError)
    assert "in refuse" in str(raised.value.__cause__) or "in actor" in str(raised.value.__cause__)


def wait_for(phases: Any, cache: Cache, path: str) -> torch.Tensor:
    while not Path(path).exists():
        time.sleep(0.01)
    return torch.zeros(1)


def test_update_in_workers_may_take_longer_than_step_timeout(
    in_two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, batch = in_two
    looks, usual = [], WorkerPool._check_deadlines

    def look(self: WorkerPool, now: float) -> None:
        looks.append(now)
        if looks[-1] > looks[0] + 2 * self.limits.call:
            (tmp_path / "go").touch()
        usual(self, now)

    monkeypatch.setattr(WorkerPool, "_check_deadlines", look)
    sampler._workers.backend._env.pool.limits.call = 0.1
    batch.map(wait_for, str(tmp_path / "go"))
    assert len(looks) > 1


def test_worker_that_is_stopped_in_an_update_hangs_after_step_timeout(in_two: Any, tmp_path: Path) -> None:
    sampler, batch = in_two
    # The next one has sampled nothing.
    os.kill(sampler.pids[0], signal.SIGKILL)
    assert len(batch.map(number_of, int)) > 1
    sampler._workers.backend._env.pool.limits.call = 0.5
    os.kill(sampler.pids[0], signal.SIGSTOP)
    message = r"\(pid \d+, slots 0-15\) .* hangs in an update with the tasks {'goal': .*for more than 0\.5 s"
    with pytest.raises(ChildEnvTimeout, match=message):
        batch.map(wait_for, str(tmp_path / "never"))


def test_more_workers_than_blocks_change_no_byte_and_keep_no_earlier_batch() -> None:
    experiment = make_experiment(config_of("maml-trpo", update="workers", **{"num-workers": 5}))
    with make_sampler(experiment, num_workers=5) as sampler:
        assert learn(experiment, sampler, 2, on_hosts=True) == learned_once("maml-trpo")
        batch = experiment.metalearner.collect(sampler, sampler.sample_tasks(NUM_TASKS))
        experiment.metalearner.learn(batch, 2)
        objects = [worker.objects for worker in sampler._workers.backend.env.pool.living()]
    assert {min(of_worker) for of_worker in objects} == {batch._reference.number}


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


def test_run_leaves_its_updates_to_four_workers_and_has_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, usual = [], ChildStore._carry_out

    def counted(self: ChildStore, request: Any) -> Any:
        asked.append(request.call is not None)
        return usual(self, request)

    monkeypatch.setattr(ChildStore, "_carry_out", counted)
    found = []
    for num_workers in (0, 4):
        asked.clear()
        train(
            config_of("maml-trpo", update="auto", **{"num-batches": 2}),
            folder := tmp_path / str(num_workers),
            num_workers=num_workers,
        )
        assert any(asked) == (num_workers == 4)
        checkpoint = latest_intact(folder / CHECKPOINTS)
        tensors = {path.name: path.read_bytes() for path in checkpoint[0].glob("*.safetensors")}
        assert tensors
        found.append((untimed(folder), tensors))
    assert found[0] == found[1]


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


def sampled(env: Any, observe_last: bool = False, num_workers: int = 2) -> list[str]:
    """Sample two phases, the second of them in units, and return their digests."""
    policy = NormalMLPPolicy(5 if observe_last else 2, 1, (4,), "tanh", seed=0)
    options: dict[str, Any] = {"slots_per_task": None if observe_last else 1, "observe_last": observe_last}
    with MultiTaskSampler(env, {}, 2, policy, seed=0, max_episode_steps=4, num_workers=num_workers, **options) as made:
        return [made.rollout(tasks_of(phase)).digest() for phase in range(2)]


def workers_of(folder: Path, phase: int) -> dict[int, set[str]]:
    """Return the processes that have sampled each task of a phase."""
    notes = [path.name.split("-") for path in folder.iterdir() if path.name.startswith(f"{phase}-")]
    return {task: {note[2] for note in notes if note[1] == str(task)} for task in range(TASKS)}


@pytest.mark.slow
def test_idle_workers_take_the_next_tasks_when_their_times_differ_much(tmp_path: Path) -> None:
    found = sampled(partial(UnevenEnv, str(tmp_path), 0.09), observe_last=True)
    assert found == sampled(UnevenEnv, observe_last=True, num_workers=0)
    first, second = (workers_of(tmp_path, phase) for phase in (0, 1))
    # At first each worker has its own tasks, and one worker has all the slow ones.
    assert len(set.union(*(first[task] for task in range(SLOW)))) == 1
    assert len(set.union(*(second[task] for task in range(SLOW)))) == 2


@pytest.mark.slow
def test_worker_that_dies_with_a_unit_costs_no_finished_unit(tmp_path: Path) -> None:
    assert sampled(partial(UnevenEnv, str(tmp_path), 0.09, True)) == sampled(UnevenEnv, num_workers=0)
    begun = Counter(path.name.split("-")[1] for path in tmp_path.iterdir() if path.name.startswith("1-"))
    # Two episodes per task. The last unit was lost, and no finished unit was sampled again.
    assert begun.pop(str(TASKS - 1)) > 2
    assert min(begun.values()) == 2
    assert sum(count > 2 for count in begun.values()) <= 1
