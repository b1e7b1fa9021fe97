"""Phases and updates in worker processes: the same bytes as in this process, whenever workers are killed."""

import os
import random
import re
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_env import HORIZON, FaultyEnv
from hosted_learning import NUM_TASKS, config_of, learn, learned_here
from phases import sample_here
from script_runs import Run
from slow_env import SlowEnv

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.config.placement import Placement
from maml_rl.derivatives import Cache
from maml_rl.envs import make_vector_env
from maml_rl.envs.make_env import Recipe
from maml_rl.envs.meta_env import RecordedInfos
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
from tests.metalearners.small_algorithms import once_a_kind
from tests.small_runs import untimed

pytestmark = [pytest.mark.usefixtures("forked_workers", "small_chunks"), pytest.mark.timeout(240)]

KILLS = 10
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


@contextmanager
def backend_of(policy: Any, env: Any = "2DNavigation-v0", num_workers: int = 2, **options: Any) -> Iterator[Any]:
    """Return a backend whose tasks have two slots each."""
    placement = Placement(num_workers=num_workers, **IN_CHILDREN, **options)
    with closing(ProcessBackend(placement, Recipe.of(env, {}, 5), policy, 2)) as backend:
        yield backend


def whole_phase(policy: Any, number: int = 0, params: Any = None, horizon: int = 5) -> Phase:
    tasks = tuple({"goal": [0.1 * (task + 1), 0.3]} for task in range(3))
    return Phase(tasks, policy, params, PhaseStreams(0, 0, number), 2, horizon)


def sample(backend: ProcessBackend, policy: Any, number: int = 0, params: Any = None, horizon: int = 5) -> TaskEpisodes:
    return backend.run(whole_phase(policy, number, params, horizon), NULL_TIMER)


def sampled_here(policy: Any, number: int = 0, horizon: int = 5) -> str:
    """Return the digest of a phase that is sampled in this process."""
    with closing(make_vector_env("2DNavigation-v0", {}, 6)) as env:
        return sample_here(env, whole_phase(policy, number, horizon=horizon)).digest()


def test_the_parent_itself_does_not_act(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = NormalMLPPolicy(2, 2, (4,), "tanh")

    def actor(*_: Any) -> Any:
        raise AssertionError("the parent acts")

    with backend_of(policy) as backend:
        first = sample(backend, policy)
        # The workers were forked before.
        monkeypatch.setattr(NormalMLPPolicy, "actor", actor)
        with pytest.raises(AssertionError, match="the parent acts"):
            sampled_here(policy)
        assert sample(backend, policy).digest() == first.digest()


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


def test_parameters_of_every_phase_reach_the_children() -> None:
    policy = NormalMLPPolicy(2, 2, (4,), "tanh", init_std=1e-6)
    with backend_of(policy) as backend:
        for biases in ((0.05, -0.05, 0.01), (-0.02, 0.0, 0.08)):
            params = {name: torch.zeros_like(value) for name, value in policy.stack_parameters(3).items()}
            params["sigma"] -= 20.0
            params["mu.bias"] += torch.tensor(biases).unsqueeze(1)
            actions = sample(backend, policy, params=params).actions
            expected = torch.tensor(biases).reshape(3, 1, 1, 1).expand_as(actions)
            torch.testing.assert_close(actions, expected, atol=1e-5, rtol=0.0)


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


def test_another_policy_and_another_horizon_replace_the_first() -> None:
    with backend_of(NormalMLPPolicy(2, 2, (4,), "tanh")) as backend:
        for hidden, horizon in (((4,), 5), ((9, 3), 2), ((4,), 5)):
            policy = NormalMLPPolicy(2, 2, hidden, "tanh")
            assert sample(backend, policy, 1, horizon=horizon).digest() == sampled_here(policy, 1, horizon)


@pytest.mark.slow
def test_policy_of_the_main_script_is_found_by_the_children(run: Run) -> None:
    script = run("""
        from maml_rl import MultiTaskSampler, get_policy_for_env
        from maml_rl.policies import GRUPolicy, NormalMLPPolicy

        class MyPolicy(NormalMLPPolicy):
            pass

        if __name__ == "__main__":
            policy = MyPolicy(2, 2, (4,), "tanh")
            options = dict(seed=0, max_episode_steps=3, inference="worker", num_workers=1)
            with MultiTaskSampler("2DNavigation-v0", {}, 2, policy, **options) as sampler:
                print(sampler.rollout(sampler.sample_tasks(2)).num_steps)
    """)
    output, errors = script.communicate(timeout=110)
    assert output == "12\n", errors


@pytest.mark.slow
@pytest.mark.parametrize("place", ["reset_task", "reset", 0, 2, HORIZON - 1])
def test_killed_child_is_replaced_and_the_phase_is_bit_identical(
    place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = str(tmp_path / "marker")
    found = sample_faulty(2, fault="kill", place=place, marker=marker, slot_task=1.0)
    assert os.path.exists(marker)
    assert found == sample_faulty(0)
    (record,) = caplog.records
    doing = f"in step {place}" if isinstance(place, int) else f"in {place}"
    assert f"SIGKILL (by a user, or by the kernel when memory ran out) {doing} with the tasks" in record.getMessage()


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "place"), [("hang", "reset"), ("hang_with_gil", 2)])
def test_hung_child_is_shown_with_task_step_and_stack_and_killed(fault: str, place: Any) -> None:
    start = time.monotonic()
    with pytest.raises(ChildEnvTimeout) as caught:
        sample_faulty(2, {"step_timeout": 2.0}, fault=fault, place=place, slot_task=1.0)
    assert time.monotonic() - start < 30.0
    doing = f"in step {place}" if isinstance(place, int) else f"in {place}"
    # Each worker has one slot of this task; a busy machine decides whose hang is noticed first.
    assert re.search(rf"hangs {doing} of slot [23] with the task {{'goal': 1.0}}", str(caught.value))
    assert f"in _{fault}" in str(caught.value)


class LingeringEnv(FaultyEnv):
    """Takes long for every step."""

    def step(self, action: Any) -> Any:
        time.sleep(0.1)
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, False, info


@pytest.mark.slow
def test_phase_may_take_longer_than_the_time_for_one_step() -> None:
    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    options: dict[str, Any] = {"step_timeout": 1.0, "max_episode_steps": 12, **IN_CHILDREN}
    with MultiTaskSampler(LingeringEnv, {}, 1, policy, seed=0, num_workers=1, **options) as sampler:
        start = time.monotonic()
        assert sampler.rollout([{"goal": 0.0}]).num_steps == 12
        assert time.monotonic() - start > 1.0


@pytest.mark.slow
def test_slots_of_a_phase_may_take_longer_together_than_the_time_of_one() -> None:
    # Six slots of one worker take 1.2 s.
    assert sample_faulty(1, {"step_timeout": 0.6}, fault="work", place=1) == sample_faulty(0)


@pytest.mark.slow
def test_phase_whose_worker_dies_too_often_ends_although_another_still_samples() -> None:
    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    env = partial(LingeringEnv, fault="kill", place=0, slot_task=1.0)
    with backend_of(policy, env, max_restarts=1) as backend:
        # A phase of 1,000 steps would take 100 seconds.
        long = Phase(({"goal": 0.0}, {"goal": 1.0}), policy, None, PhaseStreams(0, 0, 0), 2, 1000)
        start = time.monotonic()
        with pytest.raises(ChildEnvError, match=r"worker 1 of .* died 2 times in one phase, more often than max_"):
            backend.run(long, NULL_TIMER)
        assert time.monotonic() - start < 40.0
        assert backend.pids == []


@pytest.mark.slow
def test_task_that_ends_every_worker_ends_as_many_as_max_restarts_allows(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ChildEnvError, match=r"3 workers were lost with the tasks .*'goal': 1\.0.* max_restarts=2"):
        sample_faulty(3, {"max_restarts": 2}, fault="kill", place="reset_task", slot_task=1.0)
    assert len(caplog.records) == 3


def test_policy_that_cannot_be_pickled_is_refused_by_name() -> None:
    policy = NormalMLPPolicy(2, 2, (4,), lambda units: torch.relu(units))
    with pytest.raises(
        TypeError, match=r"the policy NormalMLPPolicy\.perceptron\.nonlinearity cannot be pickled .* top level"
    ):
        MultiTaskSampler("2DNavigation-v0", {}, 2, policy, num_workers=2, inference="worker")


class EndingEnv(FaultyEnv):
    """Episodes of different lengths, with numbers that are recorded."""

    recorded_infos: RecordedInfos = {"clock": "step", "success": "episode"}  # noqa: RUF012

    def step(self, action: Any) -> Any:
        observation, reward, *_ = super().step(action)
        over = bool(observation[0] > 0.5)
        return observation, reward, over, False, {"clock": self._steps, "success": over}


CUT: dict[str, dict[str, Any]] = {
    "images": {"env_name": "PixelNavigation-v0"},
    "waves": {"env_name": "2DNavigation-v0", "slots_per_task": 2},
    "memory": {"env_name": "2DNavigation-v0"},
    "memory over waves": {"env_name": "2DNavigation-v0", "slots_per_task": 2, "reset_memory_each_episode": True},
    "infos": {"env_name": EndingEnv},
    "infos over waves": {"env_name": EndingEnv, "slots_per_task": 2},
    "threads": {"env_name": EndingEnv, "stepping": "threads"},
    "threads over waves": {"env_name": EndingEnv, "stepping": "threads", "slots_per_task": 2},
    "deterministic": {"env_name": "2DNavigation-v0"},
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
    for num_workers in (0, 2, 3, 5, 9):
        placement = IN_CHILDREN if num_workers else {}
        with MultiTaskSampler(policy=policy, num_workers=num_workers, **options, **placement) as sampler:
            tasks = sampler.sample_tasks(3)
            sampled = [sampler.rollout(tasks, given, deterministic=name == "deterministic") for given in (None, params)]
            found.append([each.digest() for each in sampled])
    assert found == found[:1] * 5


# Updates.


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
    assert in_workers("maml-trpo", **{"max-restarts": 10}) == learned_here("maml-trpo")
    assert killed


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
        # The next one has sampled nothing.
        os.kill(sampler.pids[0], signal.SIGKILL)
        assert len(batch.map(number_of, int)) > 1
        sampler._workers.backend._env.pool.limits.call = 0.5
        os.kill(sampler.pids[0], signal.SIGSTOP)
        message = r"\(pid \d+, slots 0-15\) .* hangs in an update with the tasks {'goal': .*for more than 0\.5 s"
        with pytest.raises(ChildEnvTimeout, match=message):
            batch.map(wait_for, str(tmp_path / "never"))


def test_workers_keep_nothing_of_earlier_batches_even_without_blocks_of_their_own() -> None:
    experiment = make_experiment(config_of("maml-trpo", update="workers", **{"num-workers": 5}))
    with make_sampler(experiment, num_workers=5) as sampler:
        for number in range(2):
            batch = experiment.metalearner.collect(sampler, sampler.sample_tasks(NUM_TASKS))
            experiment.metalearner.learn(batch, number)
        first = batch._reference.number
        objects = [worker.objects for worker in sampler._workers.backend.env.pool.living()]
    assert all(min(of_worker) == first for of_worker in objects)


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
