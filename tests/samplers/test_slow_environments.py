"""Slots that wait concurrently give the episodes of serial stepping, in whatever order they answer."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from slow_env import HORIZON, AsksForLoopEnv, AwaitedEnv, BoundEnv, FixedThreadEnv, SlowEnv

from maml_rl import MultiTaskSampler
from maml_rl.config.config import Config
from maml_rl.config.yaml_source import Mapping
from maml_rl.envs import Retry
from maml_rl.envs.calls import METHODS
from maml_rl.envs.checking import check_meta_env
from maml_rl.envs.global_generators import seeded_generators
from maml_rl.errors import ChildEnvError, ChildEnvTimeout
from maml_rl.experiment.train import train
from maml_rl.policies import GRUPolicy, NormalMLPPolicy, Policy

TASKS, EPISODES = 4, 4
THREADS: dict[str, Any] = {"stepping": "threads", "num_workers": 0}


def a_policy(memory: bool = False, size: int = 2) -> Policy:
    if memory:
        return GRUPolicy(spaces.Box(-np.inf, np.inf, (size,)), SlowEnv.action_space, 6)
    with seeded_generators(0):
        return NormalMLPPolicy(size, 1, (8,), "tanh")


def digests(env: Any, policy: Policy | None = None, **options: Any) -> tuple[list[str], int]:
    """Sample two iterations, the second with separate parameters for each task; return digests and retries."""
    settings = {"seed": 0, "max_episode_steps": HORIZON, "start_method": "fork", "max_retries": 50, **options}
    policy = policy or a_policy()
    with MultiTaskSampler(env, {}, EPISODES, policy, **settings) as sampler:
        found = []
        for scale in (1.0, 0.5):
            params = None
            if not policy.has_memory:
                params = {
                    name: value.detach() * scale + 0.1 * torch.arange(TASKS).reshape(-1, *[1] * value.dim())
                    for name, value in policy.named_parameters()
                }
            found.append(sampler.rollout(sampler.sample_tasks(TASKS), params).digest())
        return found, sampler.retries


@pytest.fixture(scope="module", autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(5.0)
    assert not [thread for thread in started if thread.is_alive()]


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    return digests(SlowEnv, num_workers=0)[0]


@pytest.mark.parametrize(
    ("env", "options"),
    [
        (SlowEnv, {"num_workers": 0, "stepping_threads": 3}),
        (SlowEnv, {"num_workers": 0, "slots_per_task": 1}),
        (SlowEnv, {"num_workers": 3, "inference": "worker", "slots_per_task": 2}),
        (SlowEnv, {"num_workers": 2, "inference": "central"}),
        (AwaitedEnv, {"num_workers": 0, "slots_per_task": 2}),
        (AwaitedEnv, {"num_workers": 1, "inference": "worker"}),
    ],
    ids=str,
)
def test_episodes_are_those_of_serial_stepping_for_any_latency(
    env: Any, options: dict[str, Any], undisturbed: list[str]
) -> None:
    assert digests(partial(env, wait=0.004), stepping="threads", **options)[0] == undisturbed


class SplitEnv(SlowEnv):
    """Keeps test tasks apart."""

    def sample_test_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"goal": task["goal"] + 1.0} for task in SlowEnv.sample_tasks(self, num_tasks)]


def with_an_async(name: str) -> type[SplitEnv]:
    """Return a class of which this method must be awaited, and no other."""
    own = getattr(SplitEnv, name)

    async def later(self: Any, *arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(0)
        self.awaited = True
        return own(self, *arguments, **options)

    return type(f"Awaits{name}", (SplitEnv,), {name: later})


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", METHODS)
def test_every_method_may_be_async_or_is_refused(
    name: str, undisturbed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    env, options = with_an_async(name), {"evaluation": name == "sample_test_tasks"}
    expected = digests(SplitEnv, num_workers=0, **options)[0]
    assert (expected == undisturbed) is not options["evaluation"]
    assert digests(env, num_workers=0, **options)[0] == expected
    check_meta_env(env(), make_another=env)
    with pytest.raises(TypeError, match=f"has an async {name}, which is not awaited .*use stepping='threads'"):
        digests(env, num_workers=0, stepping="serial")
    hidden = type("Hidden", (env,), {name: lambda self, *given, **named: getattr(env, name)(self, *given, **named)})
    if name == "close":
        digests(hidden, num_workers=0)
        assert "close() raises it returned the coroutine" in caplog.text
    else:
        with pytest.raises(ChildEnvError, match="coroutine"):
            digests(hidden, num_workers=0, **options)
    with pytest.raises(ChildEnvError, match=f"has an async {name}; a vector environment waits for its slots itself"):
        digests(
            type("Many", (VectorEnv,), {"__init__": lambda self, num_envs: None, name: getattr(env, name)}),
            num_workers=0,
        )


@pytest.mark.parametrize("slots_per_task", [1, 4])
def test_last_step_is_that_of_serial_stepping(slots_per_task: int) -> None:
    policy = a_policy(memory=True, size=5)
    options = {"slots_per_task": slots_per_task, "observe_last": True, "num_workers": 0}
    serial, _ = digests(SlowEnv, policy, **options)
    assert digests(partial(SlowEnv, wait=0.003), policy, stepping="threads", **options)[0] == serial
    assert digests(partial(SlowEnv, retry=0.05), policy, **options)[0] == serial
    assert digests(partial(SlowEnv, wait=0.002, retry=0.05), policy, stepping="threads", **options)[0] == serial


def test_a_slot_does_not_wait_for_a_slower_one() -> None:
    """If all slots took each step together, none would get to the step in which the others wait for it."""
    together = threading.Barrier(16)
    env = partial(SteadyEnv, partial(together.wait, 20.0))
    with MultiTaskSampler(env, {}, 1, a_policy(), seed=0, max_episode_steps=HORIZON, **THREADS) as sampler:
        assert sampler.rollout(sampler.sample_tasks(16)).num_steps == 16 * HORIZON


class SteadyEnv(SlowEnv):
    """Never ends, and waits in one step, a different one for every task."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__()
        self._pause = wait

    def step(self, action: Any) -> Any:
        if self._steps == self._task["goal"] % HORIZON:
            self._pause()
        self._length = HORIZON + 1
        return super().step(action)


@pytest.mark.parametrize(
    ("stepping", "options"),
    [
        ("serial", {"num_workers": 0}),
        ("threads", {"num_workers": 0}),
        ("serial", {"num_workers": 2, "inference": "central"}),
        ("threads", {"num_workers": 2}),
    ],
    ids=str,
)
def test_retried_episodes_restart_from_their_keys(
    stepping: str, options: dict[str, Any], undisturbed: list[str], tmp_path: Path
) -> None:
    env = partial(SlowEnv, retry=0.08, after=0.001, marker=str(tmp_path))
    found, retries = digests(env, stepping=stepping, **options)
    assert found == undisturbed
    assert retries == len(list(tmp_path.iterdir())) > 0


def test_kills_and_retries_at_random_moments_change_no_episode_and_leave_no_process(
    undisturbed: list[str], tmp_path: Path
) -> None:
    env = partial(SlowEnv, wait=0.002, retry=0.03, kill=0.01, marker=str(tmp_path))
    before = set(psutil.Process().children(recursive=True))
    options = {"stepping": "threads", "num_workers": 2, "inference": "worker", "max_restarts": 1000}
    for _ in range(3):
        assert digests(env, **options)[0] == undisturbed
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"kill", "retry"}
    assert set(psutil.Process().children(recursive=True)) == before


@pytest.mark.parametrize(("stepping", "num_workers"), [("serial", 2), ("threads", 0)])
def test_too_many_retries_are_an_error_that_names_slot_and_reason(stepping: str, num_workers: int) -> None:
    with pytest.raises(
        ChildEnvError, match=r"(?s)slot \d+.*raised Retry 3 times in one episode.*max_retries=2.*is restarting"
    ):
        digests(partial(SlowEnv, retry=1.0), stepping=stepping, num_workers=num_workers, max_retries=2)


def test_a_pause_longer_than_the_deadline_is_not_a_call_that_hangs(undisturbed: list[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"step_timeout": 0.4, "num_workers": 1}
    for stepping in ("serial", "threads"):
        env = partial(OnceEnv, str(tmp_path / stepping))
        assert digests(env, stepping=stepping, **options) == (undisturbed, 1)


class OnceEnv(SlowEnv):
    """Raises `Retry` with a long pause, once."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self._once = Path(marker)

    def _go_wrong(self) -> None:
        if self._steps == 1:
            try:
                # Only one of several slots that get here at once.
                self._once.touch(exist_ok=False)
            except FileExistsError:
                return
            raise Retry(after=1.5)


def exit_process() -> None:
    raise SystemExit(0)


def press_ctrl_c() -> None:
    raise KeyboardInterrupt


def deafen_loop() -> None:
    """Let the loop lose the calls of environments that other threads ask it for."""
    loop = asyncio.get_running_loop()
    ask = loop.call_soon_threadsafe

    def hear(callback: Any, *arguments: Any, **options: Any) -> Any:
        if callback.__name__ != "_await_all":
            ask(callback, *arguments, **options)

    loop.call_soon_threadsafe = hear  # type: ignore[method-assign]


class Meddling(AwaitedEnv):
    """Interferes with the event loop in a background task."""

    def __init__(self, meddle: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self._meddle = meddle

    async def step(self, action: Any) -> Any:
        if self._steps == 1 and self._task["goal"] == 0.0:

            async def meddle() -> None:
                self._meddle()

            self._background = asyncio.get_running_loop().create_task(meddle())
        return await super().step(action)


@pytest.mark.parametrize(
    ("meddle", "error", "told", "num_workers"),
    [
        (exit_process, ChildEnvError, r"event loop .* has ended: a background task raised SystemExit\(0\); catch", 1),
        (press_ctrl_c, ChildEnvError, r"event loop .* has ended: a background task raised KeyboardInterrupt\(\)", 0),
        (deafen_loop, ChildEnvTimeout, r"no call has begun for 0\.5 s although \d+ are waiting to", 0),
        (deafen_loop, ChildEnvTimeout, r"no call has begun for 0\.5 s although \d+ are waiting to", 1),
    ],
)
def test_event_loop_that_ends_is_an_error_and_not_an_endless_wait(
    meddle: Any, error: type[Exception], told: str, num_workers: int
) -> None:
    started = time.monotonic()
    limit = 0.5 if error is ChildEnvTimeout else 60.0
    options: dict[str, Any] = {"stepping": "threads", "num_workers": num_workers, "step_timeout": limit}
    with pytest.raises(error, match=told):
        digests(partial(Meddling, meddle, wait=0.002), inference="auto", **options)
    assert time.monotonic() - started < 20.0


@pytest.mark.parametrize("env", [SlowEnv, AwaitedEnv])
def test_keyboard_interrupt_of_an_environment_in_a_thread_is_not_taken_for_ctrl_c(env: Any) -> None:
    class Interrupting(env):  # type: ignore[misc]
        def _take_time(self) -> None:
            if self._steps == 1:
                raise KeyboardInterrupt

    with pytest.raises(ChildEnvError, match="raised KeyboardInterrupt itself"):
        digests(Interrupting, **THREADS)


def make_bound() -> Any:
    return gymnasium.wrappers.TransformReward(BoundEnv(), lambda reward: reward)


@pytest.mark.parametrize(
    ("env", "options"),
    [
        (BoundEnv, {"stepping_threads": 3, "slots_per_task": 2}),
        (BoundEnv, {"num_workers": 2}),
        (make_bound, {"num_workers": 2}),
        (AsksForLoopEnv, {"num_workers": 2}),
        (lambda: AsksForLoopEnv(), {}),
    ],
    ids=["threads", "workers", "function", "loop in workers", "loop of a function"],
)
def test_slot_stays_with_its_thread_or_event_loop_from_constructor_to_close(
    env: Any, options: dict[str, Any], undisturbed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert digests(env, **{"num_workers": 0, **options})[0] == undisturbed
    # Nor does `close` raise.
    assert not caplog.messages


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (FixedThreadEnv, {"stepping": "threads"}, "FixedThreadEnv declares that it is not thread-safe"),
        ("2DNavigation-v0", {"stepping": "threads"}, "2DNavigation-v0 steps all its slots as one batch"),
        (AwaitedEnv, {"stepping": "serial"}, "AwaitedEnv has an async reset and step"),
    ],
)
def test_wrong_input_is_one_line_before_any_process_starts(env: Any, options: dict[str, Any], message: str) -> None:
    before = psutil.Process().children()
    with pytest.raises((TypeError, ValueError), match=message) as error:
        MultiTaskSampler(env, {}, 2, a_policy(), num_workers=2, max_episode_steps=3, **options)
    assert "\n" not in str(error.value)
    assert psutil.Process().children() == before


def test_more_threads_than_slots_are_refused_before_any_process_starts() -> None:
    before = psutil.Process().children()
    with (
        MultiTaskSampler(SlowEnv, {}, 2, a_policy(), num_workers=2, max_episode_steps=3, stepping_threads=7) as sampler,
        pytest.raises(ValueError, match="stepping_threads=7 is more than the 6 slots of a phase of 3 tasks"),
    ):
        sampler.rollout([{"goal": 0.0}] * 3)
    assert psutil.Process().children() == before


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_watcher_sees_how_many_slots_wait_and_which_is_the_slowest(num_workers: int) -> None:
    seen: list[Any] = []
    over = threading.Event()
    options: dict[str, Any] = {"stepping": "threads", "num_workers": num_workers, "start_method": "fork"}
    with MultiTaskSampler(
        partial(SteadyEnv, partial(time.sleep, 0.4)), {}, 1, a_policy(), seed=0, max_episode_steps=HORIZON, **options
    ) as it:

        def watch() -> None:
            while not over.wait(0.01):
                seen.append(it.slot_counts)

        it.prepare(4)
        watcher = threading.Thread(target=watch)
        watcher.start()
        it.rollout([{"goal": goal} for goal in (5.0, 5.0, 5.5, 2.0)])
        over.set()
        watcher.join()
        assert it.waiting_seconds > 0.0
    counts = [each for each in seen if each is not None]
    assert {each.waiting + each.acting + each.done for each in counts} == {4}
    # Three slots wait, each in a step of its own task; that of the third task never waits and has ended by then.
    assert any((each.waiting, each.done) == (3, 1) and each.slowest in (0, 1, 3) for each in counts)
    assert max(each.seconds for each in counts) > 0.2


def test_metrics_of_a_training_have_the_seconds_of_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maml_rl.experiment.train._WATCH_SECONDS", 0.01)
    sizes = {"fast-batch-size": 2, "meta-batch-size": 2, "num-batches": 1, "hidden-sizes": [4], "num-workers": 0}
    settings = {"env-name": "slow_env:Slow-v0", "env-kwargs": {"wait": 0.02}, "stepping": "threads", **sizes}
    metrics: list[Any] = []
    counts: list[Any] = []
    config = Config.from_mapping(Mapping("the test", settings))
    train(config, tmp_path / "run", num_workers=0, on_iteration=metrics.append, on_slots=counts.append)
    assert 0.0 < metrics[0]["time/waiting"] <= metrics[0]["time/sample_s"]
    assert {each.waiting + each.acting + each.done for each in counts} == {4}
