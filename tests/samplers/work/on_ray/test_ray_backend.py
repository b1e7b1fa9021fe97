"""The Ray backend on a real cluster of three nodes: bit-identical to sampling in this process, with any faults."""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import cloudpickle
import psutil
import ray
import torch
from cluster_on_this_machine import FINDS_TESTS, STORE, actor_processes, wait_until
from faulty_sampler import digests, faulty_sampler

from maml_rl import LinearFeatureBaseline, MultiTaskSampler
from maml_rl.errors import ChildEnvError
from maml_rl.policies import NormalMLPPolicy, as_policy
from maml_rl.profiling import StageTimer
from maml_rl.samplers import PopulationEvaluator

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

NUM_TASKS = 5


@pytest.fixture(autouse=True)
def nothing_left_behind(connected: Any) -> Iterator[None]:
    """The cluster may remain, but no actor."""
    yield
    # Ray kills actors by a message to each, which a process that was paged out takes long to read.
    _, alive = psutil.wait_procs(actor_processes(), timeout=60)
    assert not alive


def make_sampler(backend: str, fault: dict[str, Any] | None = None, **options: Any) -> MultiTaskSampler:
    num_workers = 0 if backend == "in-process" else 2
    return faulty_sampler(fault, backend=backend, **{"num_workers": num_workers, **options})


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    return digests(make_sampler("in-process"), NUM_TASKS)


# The same episodes.


class Scaling(torch.nn.Module):
    """A policy that only its first phase knows the kind of."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = torch.nn.Parameter(torch.ones(2))

    def forward(self, observations: torch.Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.factors * observations, 1.0)


def test_module_and_policies_of_other_kinds_that_replace_it_act_on_the_actors() -> None:
    found: dict[str, list[str]] = {}
    for backend in ("in-process", "ray"):
        num_workers = 0 if backend == "in-process" else 2
        others = (NormalMLPPolicy(2, 2, (8,), name, seed=0) for name in ("tanh", "tanh", "relu"))
        # The module has not acted anywhere before.
        policies = [as_policy(Scaling()), *others]
        with torch.no_grad():
            policies[2].get_parameter("sigma").add_(1.0)
        with MultiTaskSampler(
            "2DNavigation-v0", policy=policies[0], batch_size=2, seed=0, backend=backend, num_workers=num_workers
        ) as sampler:
            tasks, pids = sampler.sample_tasks(4), []
            for policy in policies:
                sampler.policy = policy
                sampler.seek(0)
                found.setdefault(backend, []).append(sampler.rollout(tasks).digest())
                pids.append(set(sampler.pids))
    assert found["ray"] == found["in-process"]
    assert len(set(found["ray"])) == 4
    # Parameters and policies reach the same actors.
    assert set.intersection(*pids)


def navigation(backend: str, num_workers: int, **options: Any) -> list[str]:
    """Return the digests of phases of several sizes: with adapted parameters, in waves, and without noise."""
    # A lambda is sent to the actors by value.
    policy = NormalMLPPolicy(2, 2, (8,), lambda units: torch.relu(units), seed=0)
    settings: dict[str, Any] = {"seed": 3, "max_episode_steps": 20, "slots_per_task": 2, "backend": backend, **options}
    with MultiTaskSampler(
        "2DNavigation-v0", {}, 4, policy, LinearFeatureBaseline(2), num_workers=num_workers, **settings
    ) as sampler:
        found = []
        for num_tasks in (9, 9, 4):
            train_episodes, valid_episodes = sampler.sample(sampler.sample_tasks(num_tasks), 1, 0.1)
            found += [train_episodes[0].digest(), valid_episodes.digest()]
            # The next phase has other parameters.
            with torch.no_grad():
                policy.get_parameter("mu.bias").add_(0.1)
        tasks = sampler.sample_tasks(3)
        for count, deterministic in ((2, False), (6, True), (4, False)):
            found.append(sampler.rollout(tasks, num_episodes=count, deterministic=deterministic).digest())
        return found


def test_digests_are_those_of_the_backend_in_this_process(caplog: pytest.LogCaptureFixture) -> None:
    timer = StageTimer()
    assert navigation("ray", 9, timer=timer) == navigation("in-process", 0)
    message = r"num_workers=9, but the Ray cluster at \S+ has places for 3 actors with 1 CPU each; it continues"
    assert re.search(message, caplog.text)
    seconds = timer.take()
    assert all(seconds[stage] > 0.0 for stage in ("physics", "inference", "assembly", "waiting"))


def test_shorter_episodes_of_some_units_are_padded_as_in_this_process() -> None:
    # Episodes like those of a bandit: some end early, each unit at a different step.
    def found(backend: str, num_workers: int) -> list[str]:
        policy = NormalMLPPolicy(11, 3, (4,))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.fill_(0.05)
        with MultiTaskSampler(
            "HopperRandParams-v5", {}, 1, policy, seed=1, num_workers=num_workers, backend=backend, max_episode_steps=60
        ) as sampler:
            episodes = sampler.rollout(sampler.sample_tasks(4))
            assert len(set(episodes.lengths.ravel().tolist())) > 1
            return [episodes.digest()]

    assert found("ray", 2) == found("in-process", 0)


def test_population_sends_each_actor_only_the_parameters_of_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    put, sizes = ray.put, []

    def measured(value: Any) -> Any:
        sizes.append(len(cloudpickle.dumps(value)))
        return put(value)

    monkeypatch.setattr(ray, "put", measured)

    def returns(**options: Any) -> list[float]:
        policy = NormalMLPPolicy(2, 2, (4,))
        with PopulationEvaluator("2DNavigation-v0", policy, seed=1, max_episode_steps=10, **options) as evaluator:
            weights = torch.linspace(-1.0, 1.0, 600 * evaluator.size).reshape(600, -1).numpy()
            first = list(map(float, evaluator.evaluate(weights)))
            # Now there are two actors.
            sizes.clear()
            return first + list(map(float, evaluator.evaluate(weights)))

    found = returns(num_workers=2, backend="ray")
    # Two units, each with a part of 600 x 24 numbers.
    assert 0 < max(sizes) < 600 * 24 * 4 * 0.6
    assert found == returns(num_workers=0)


@pytest.mark.nightly
def test_episodes_leave_the_object_store_at_once() -> None:
    policy = NormalMLPPolicy(2, 2, (4,))
    with MultiTaskSampler(
        "2DNavigation-v0", {}, 400, policy, seed=0, num_workers=2, backend="ray", max_episode_steps=500
    ) as sampler:
        tasks = sampler.sample_tasks(8)
        for _ in range(8):
            # 8 x 500 x 400 steps of 20 bytes: 32 MB a phase, 256 MB in all.
            episodes = sampler.rollout(tasks)
        assert episodes.num_steps == 8 * 500 * 400 or episodes.num_steps > 0
        used = sum(
            node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"]
        ) - ray.available_resources().get("object_store_memory", 0)
        assert used < STORE


# Faults.


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["hang_with_gil", "stop"])
def test_episodes_are_bit_identical_after_an_actor_hung(fault: str, undisturbed: list[str], tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    sampler = make_sampler("ray", {"fault": fault, "place": 2, "marker": str(marker)}, num_workers=1, step_timeout=2.0)
    assert digests(sampler, NUM_TASKS) == undisturbed
    assert marker.exists()


def test_task_that_ends_every_actor_is_named() -> None:
    with make_sampler("in-process") as sampler:
        goal = sampler.sample_tasks(NUM_TASKS)[2]["goal"]
    fault = {"fault": "kill", "place": 1, "slot_task": goal}
    message = rf"3 Ray actors were lost with the tasks {{'goal': {goal}}}, more often than"
    with make_sampler("ray", fault, max_restarts=2, num_workers=1) as sampler:
        tasks = sampler.sample_tasks(NUM_TASKS)
        with pytest.raises(ChildEnvError, match=message):
            sampler.rollout(tasks)


def test_sampler_gives_the_same_episodes_after_each_of_many_faults(undisturbed: list[str], tmp_path: Path) -> None:
    script = tmp_path / "fault.json"

    def prepare(fault: str = "", place: Any = "", *, once: bool = True) -> Path:
        marker = tmp_path / f"{fault}-{place}"
        script.write_text(json.dumps({"fault": fault, "place": place, "marker": str(marker) if once else None}))
        return marker

    def sample() -> list[str]:
        sampler.seek(-1)
        tasks = sampler.sample_tasks(NUM_TASKS)
        return [sampler.rollout(tasks).digest() for _ in range(2)]

    prepare()
    with make_sampler("ray", {"script": str(script)}, step_timeout=200.0) as sampler:
        assert sample() == undisturbed
        # Idle actors die, and one of those that replace them while it makes its environment.
        marker = prepare("kill", "make")
        for pid in sampler.pids:
            os.kill(pid, signal.SIGKILL)
        assert sample() == undisturbed
        assert marker.exists()
        marker = prepare("exit", 3)
        assert sample() == undisturbed
        assert marker.exists()
        prepare("raise", 4)
        with pytest.raises(ChildEnvError, match=r"RuntimeError.*out of fuel") as raised:
            sample()
        assert raised.value.summary.startswith("RuntimeError in tests/samplers/faulty_env.py, line")
        for part in ("in _raise", "in step 4", "in slot ", "with the task {'goal': "):
            assert part in str(raised.value)
        assert sample() == undisturbed
        prepare("raise_unpicklable", 2)
        with pytest.raises(ChildEnvError, match="UnpicklableError") as raised:
            sample()
        assert len(str(raised.value)) < 20_000
        assert sample() == undisturbed
        wait_until(lambda: (sampler.prepare(NUM_TASKS), len(sampler.pids) == 2)[-1])
        # One actor hangs, for much less than its time limit; the other samples its tasks.
        marker = prepare("hang", 2)
        assert sample() == undisturbed
        assert marker.exists()
        prepare("hang", 1, once=False)
        timer = threading.Timer(0.5, sampler.interrupt, kwargs={"now": True})
        timer.start()
        with pytest.raises(RuntimeError, match="interrupted by another thread"):
            sample()
        # Ray may still be killing actors.
        timer.join()


# Nodes.


def test_nodes_may_join_and_leave_during_a_run(connected: Any, undisturbed: list[str]) -> None:
    with make_sampler("ray", num_workers=None) as sampler:
        tasks = sampler.sample_tasks(NUM_TASKS)
        found = {sampler.rollout(tasks).digest()}
        node = connected.add_node(num_cpus=1, object_store_memory=STORE, env_vars=FINDS_TESTS)
        try:
            wait_until(lambda: (sampler.prepare(20), len(sampler.pids) == 4)[-1])
            sampler.seek(0)
            found.add(sampler.rollout(tasks).digest())
        finally:
            connected.remove_node(node, allow_graceful=False)
        sampler.seek(0)
        found.add(sampler.rollout(tasks).digest())
        assert len(found) == 1
        assert found.pop() == undisturbed[0]
        # A node that remains would affect the next tests.
        wait_until(lambda: sum(each["Alive"] for each in ray.nodes()) == 3)


# Refusals.


def test_policy_that_cannot_be_pickled_is_refused_with_the_name_of_the_attribute() -> None:
    policy = NormalMLPPolicy(2, 2, (4,))
    policy.layer1.guard = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"the policy NormalMLPPolicy\.layer1\.guard cannot be pickled for Ray actors"):
        MultiTaskSampler("2DNavigation-v0", {}, 2, policy, backend="ray")


def test_environment_that_cannot_be_pickled_is_refused_with_the_name_of_the_argument() -> None:
    with pytest.raises(TypeError, match=r"the environment '2DNavigation-v0'\.env_kwargs\.low cannot be pickled"):
        MultiTaskSampler("2DNavigation-v0", {"low": threading.Lock()}, 2, NormalMLPPolicy(2, 2, (4,)), backend="ray")
