"""The guarantees of the seam to environments, each over all ways to run slots, compared with a plain loop."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from maml_rl.envs import MetaVectorEnv, Retry, TaskParameter, TaskSpace, global_generators, make_vector_env
from maml_rl.envs.calls import CallRules
from maml_rl.envs.meta_env import OneBatchVectorEnv
from maml_rl.errors import TaskError

LIMIT, SLOTS = 5, 3
SEEDS = [11, 12, 13]
Tasks = list[dict[str, Any]]
SPACE = TaskSpace.of_numbers(slope=TaskParameter.between(0.5, 1.0))


class Walk(gymnasium.Env[Any, Any]):
    """Adds up its actions and noise, and ends beyond 2; subclasses break a rule each."""

    observation_space: spaces.Space[Any] = spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (1,), np.float32)
    recorded_infos: ClassVar[dict[str, Any]] = {"place": "step", "beyond": "episode"}
    value_ranges: ClassVar[dict[str, Any]] = {"reward": (-9.0, 0.0)}
    task_space = SPACE

    def sample_tasks(self, num_tasks: int) -> Any:
        return [{"slope": np.array([slope])} for slope in self.np_random.uniform(0.5, 1.0, num_tasks)]

    def reset_task(self, task: Any) -> Any:
        self.slope = task["slope"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.place = 0, float(self.np_random.uniform(-0.1, 0.1))
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.place += float(self.slope[0]) * float(action[0]) + 0.01 * float(self.np_random.normal())
        over, late = abs(self.place) > 2.0, self.steps == LIMIT
        info = {"place": self.place} | ({"beyond": abs(self.place)} if over or late else {})
        return self.observe(), -abs(self.place), over, late, info

    def observe(self) -> Any:
        return np.array([self.place, self.steps], np.float32)


def walk(name: str, **methods: Any) -> type[Walk]:
    """Return a `Walk` with these methods instead of its own."""
    return type(name, (Walk,), methods)


def stepping(name: str, change: Callable[..., Any]) -> type[Walk]:
    """Return a `Walk` whose steps have other results."""
    return walk(name, step=lambda self, action: change(*Walk.step(self, action)))


def fail(error: BaseException) -> Any:
    raise error


def awaited(env: type[Walk]) -> Any:
    """Return the same environment with coroutines."""

    class Awaited(env):  # type: ignore[valid-type,misc]
        async def sample_tasks(self, num_tasks: int) -> Any:
            return super().sample_tasks(num_tasks)

        async def reset_task(self, task: Any) -> None:
            super().reset_task(task)

        async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return super().reset(seed=seed)

        async def step(self, action: Any) -> Any:
            return super().step(action)

    return Awaited


class Several:
    """Several environments in one loop, as the batches of other code."""

    def __init__(self, env: type[Walk], num_envs: int) -> None:
        self.envs = [env() for _ in range(num_envs)]

    def step(self, actions: Any, over: Any) -> list[Any]:
        # Those whose episode is over go on by themselves.
        return [
            env.reset() if done else env.step(action)
            for env, action, done in zip(self.envs, actions, over, strict=True)
        ]


def batched(env: type[Walk]) -> Any:
    """Return the same as a `VectorEnv`."""

    class Batch(VectorEnv[Any, Any, Any]):
        metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        np_random: Any = None
        recorded_infos, value_ranges, task_space = env.recorded_infos, env.value_ranges, env.task_space
        max_episode_steps = LIMIT

        def __init__(self, num_envs: int) -> None:
            self.several, self.num_envs = Several(env, num_envs), num_envs
            self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
            self.observation_space = batch_space(env.observation_space, num_envs)
            self.action_space = batch_space(env.action_space, num_envs)

        def sample_tasks(self, num_tasks: int) -> Any:
            self.several.envs[0].np_random = self.np_random
            return self.several.envs[0].sample_tasks(num_tasks)

        def reset_task(self, tasks: Tasks) -> None:
            for each, task in zip(self.several.envs, tasks, strict=True):
                each.reset_task(task)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.over = np.zeros(self.num_envs, np.bool_)
            each = zip(self.several.envs, seed, strict=True)
            return np.stack([env.reset(seed=own)[0] for env, own in each]), {}

        def step(self, actions: Any) -> Any:
            results = [
                r if len(r) == 5 else (r[0], 0.0, False, False, r[1]) for r in self.several.step(actions, self.over)
            ]
            observations, rewards, terminated, truncated, infos = (list(part) for part in zip(*results, strict=True))
            self.over = [ended is True or late for ended, late in zip(terminated, truncated, strict=True)]
            merged: dict[str, Any] = {}
            for slot, info in enumerate(infos):
                merged = self._add_info(merged, info, slot)
            return np.array(observations), np.array(rewards), np.array(terminated), np.array(truncated), merged

    return Batch


def in_array_code(env: type[Walk]) -> Any:
    """Return the same as somebody's `MetaVectorEnv`."""

    class Slots(OneBatchVectorEnv):
        recorded_infos, value_ranges, task_space = env.recorded_infos, env.value_ranges, env.task_space
        max_episode_steps = LIMIT

        def __init__(self, num_envs: int) -> None:
            self.several = Several(env, num_envs)
            self._set_up(num_envs, env.observation_space, env.action_space)

        def sample_tasks(self, num_tasks: int, *, seed: int | None = None, evaluation: bool = False) -> Any:
            if seed is not None:
                self.several.envs[0].np_random = np.random.default_rng(seed)
            return self.several.envs[0].sample_tasks(num_tasks)

        def reset_task(self, tasks: Any) -> None:
            for each, task in zip(self.several.envs, tasks, strict=True):
                each.reset_task(task)

        def _reset(self, seeds: Any, mask: Any, options: Any) -> None:
            self._ready = True
            for slot, seed in enumerate(seeds):
                self.buffers.observations[slot] = self.several.envs[slot].reset(seed=seed)[0]
            self.buffers.begin(slice(None))

        def _step(self, actions: NDArray[Any]) -> None:
            buffers = self.buffers
            buffers.rewards[:] = 0.0
            for slot in np.flatnonzero(~buffers.over):
                observation, reward, terminated, truncated, info = self.several.envs[slot].step(actions[slot])
                buffers.observations[slot], buffers.rewards[slot] = observation, reward
                buffers.terminated[slot], buffers.truncated[slot] = terminated, truncated
                for name, values in buffers.infos.items():
                    values[slot] = info.get(name, np.nan)

    return Slots


WAYS: dict[str, tuple[Callable[[type[Walk]], Any], CallRules]] = {
    "one by one": (lambda env: env, CallRules()),
    "threads": (lambda env: env, CallRules(stepping="threads")),
    "event loop": (awaited, CallRules()),
    "vector env": (batched, CallRules()),
    "array code": (in_array_code, CallRules()),
}
OBJECTS = ("one by one", "threads", "event loop")


@contextmanager
def slots(
    env: type[Walk], way: str, num_envs: int = SLOTS, limit: int | None = None
) -> Iterator[tuple[MetaVectorEnv, NDArray[np.int64]]]:
    """Make slots, and yield them with the number of the one at work."""
    adapt, rules = WAYS[way]
    current = np.full(1, -1)
    made = make_vector_env(adapt(env), {}, num_envs, max_episode_steps=limit, current_slots=current, rules=rules)
    try:
        yield made, current
    finally:
        made.close()


def act(made: MetaVectorEnv, actions: NDArray[Any]) -> None:
    for index, part in enumerate(made.parts):
        made.step_send(index, actions[part])
    made.step_recv()


def some_actions(steps: int = LIMIT, num_envs: int = SLOTS) -> NDArray[np.float32]:
    return np.random.default_rng(0).uniform(-1.0, 1.0, (steps, num_envs, 1)).astype(np.float32)


def played(made: MetaVectorEnv, tasks: Tasks, actions: NDArray[Any]) -> list[Any]:
    """Return copies of all buffers after the reset and after every step."""
    made.reset_task(tasks)
    made.reset_buffers(np.array(SEEDS[: made.num_envs]))
    seen = [copy.deepcopy(made.buffers)]
    for action in actions:
        own = action.copy()
        act(made, own)
        # The sampler's memory for actions is used again.
        own[:] = 9.0
        seen.append(copy.deepcopy(made.buffers))
    return seen


def looped(env: type[Walk], task: dict[str, Any], seed: int, actions: NDArray[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield what a plain loop sees: observation, reward, ends and infos, until the episode is over."""
    made = env()
    made.reset_task(copy.deepcopy(task))
    yield made.reset(seed=seed)[0], 0.0, False, False, {}
    for action in actions:
        result = made.step(action.copy())
        yield result
        if result[2] or result[3]:
            return


def expect_loop(seen: list[Any], env: type[Walk], tasks: Tasks, actions: NDArray[Any]) -> None:
    for slot, task in enumerate(tasks):
        ended = None
        results = list(looped(env, task, SEEDS[slot], actions[:, slot]))
        for step, buffers in enumerate(seen):
            if step < len(results):
                observation, reward, *ends, infos = results[step]
            else:
                # A slot whose episode is over stays as it is.
                observation, reward, ends, infos = ended[0], 0.0, ended[2:4], None  # type: ignore[index]
            ended = observation, reward, *ends
            np.testing.assert_array_equal(buffers.observations[slot], observation)
            assert buffers.rewards[slot] == reward
            assert [buffers.terminated[slot], buffers.truncated[slot]] == list(ends)
            if infos is not None:
                recorded = {name: values[slot] for name, values in buffers.infos.items()}
                assert recorded == pytest.approx({name: infos.get(name, np.nan) for name in recorded}, nan_ok=True)


TASKS: Tasks = [{"slope": np.array([slope])} for slope in (0.5, 1.0, 0.9)]


@pytest.mark.parametrize("way", WAYS)
def test_slots_have_the_values_of_a_loop_until_their_episodes_end(way: str) -> None:
    actions = some_actions(LIMIT + 2)
    # Slot 1 goes beyond 2 before its limit.
    actions[:, 1] = 0.9
    with slots(Walk, way) as (made, _):
        seen = played(made, TASKS, actions)
        expect_loop(seen, Walk, TASKS, actions)
        assert seen[-1].terminated.tolist() == [False, True, False]
        if way in OBJECTS:
            # A slot whose episode is over is not stepped.
            assert [each.unwrapped.steps for each in made.envs] == [5, 3, 5]  # type: ignore[attr-defined]
        # Once more: nothing is left of the episodes before.
        expect_loop(played(made, TASKS, actions), Walk, TASKS, actions)


@pytest.mark.parametrize("way", WAYS)
def test_time_limit_truncates_episodes_that_go_on(way: str) -> None:
    actions = some_actions()
    # Slot 1 goes beyond 2 at the limit: it is both, as by Gymnasium's wrapper.
    actions[:, 1] = 1.0
    with slots(Walk, way, limit=3) as (made, _):
        for _ in range(2):
            truncated = [buffers.truncated.tolist() for buffers in played(made, TASKS, actions)]
            assert truncated == [[False] * SLOTS] * 3 + [[True] * SLOTS] * (len(actions) - 2)
            assert made.buffers.terminated.tolist() == [False, True, False]
            assert made.buffers.observations[:, 1].tolist() == [3.0] * SLOTS
            assert np.isfinite(made.buffers.infos["place"]).all()


class KeepsAll(Walk):
    """Keeps and changes what it is given, and draws into one array."""

    drawn = np.zeros(1)

    def sample_tasks(self, num_tasks: int) -> Any:
        self.drawn[:] = self.np_random.uniform()
        return [{"slope": self.drawn}] * num_tasks

    def reset_task(self, task: Any) -> Any:
        self.slope, self.last = task.pop("slope"), np.zeros(1, np.float32)

    def step(self, action: Any) -> Any:
        self.slope += 0.5
        before, self.last = self.last, action
        return super().step(before)


@pytest.mark.parametrize("way", WAYS)
def test_environment_that_keeps_what_it_is_given_has_copies_of_its_own(way: str) -> None:
    actions = some_actions()
    with slots(KeepsAll, way) as (made, _):
        shared = {"slope": np.array([0.5])}
        seen = played(made, [shared] * SLOTS, actions)
        assert shared == {"slope": np.array([0.5])}
        first = made.sample_tasks(2, seed=1)
        kept = copy.deepcopy(first)
        made.sample_tasks(2, seed=2)
        assert first == kept
        assert first[0]["slope"] is not first[1]["slope"]
    expect_loop(seen, KeepsAll, [shared] * SLOTS, actions)


class Endless:
    """Tasks without an end, in an object that is no iterator itself."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(1000):
            yield {"slope": 1.0}
        pytest.fail("all are drawn")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("env", "message"),
    [
        (walk("DrawsTooFew", sample_tasks=lambda self, num_tasks: [{"slope": 1.0}]), "returned 1 tasks"),
        (
            walk("DrawsOn", sample_tasks=lambda self, num_tasks: itertools.repeat({"slope": 1.0})),
            "returned more than 3",
        ),
        (walk("DrawsFromAll", sample_tasks=lambda self, num_tasks: Endless()), "returned more than 3"),
        (walk("DrawsNumbers", sample_tasks=lambda self, num_tasks: [0.5] * num_tasks), "a task is a dict"),
    ],
)
def test_tasks_that_are_not_as_many_dicts_are_refused(way: str, env: type[Walk], message: str) -> None:
    with slots(env, way) as (made, _), pytest.raises(TaskError, match=message):
        made.sample_tasks(3, seed=0)


class ObservesOutside(Walk):
    observation_space = spaces.Box(0, 3, (2,), np.int8)
    outside = 2

    def observe(self) -> Any:
        return np.array([0, 5 if self.steps == self.outside and self.slope[0] == 1.0 else 1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", [0, 2])
def test_observation_outside_of_its_space_is_refused_at_its_step(way: str, step: int) -> None:
    with slots(type("Outside", (ObservesOutside,), {"outside": step}), way) as (made, current):
        made.reset_task(TASKS)
        *others, last = [lambda: made.reset(seed=SEEDS), *[lambda: act(made, np.zeros((SLOTS, 1), np.float32))] * step]
        for call in others:
            call()
        with pytest.raises(ValueError, match=r"with 5.*outside of its space"):
            last()
        assert current[0] == 1


@pytest.mark.parametrize("way", [way for way in WAYS if way != "array code"])
@pytest.mark.parametrize(
    ("env", "message"),
    [
        (stepping("PaysText", lambda seen, _, *rest: (seen, "much", *rest)), "reward"),
        (stepping("EndsMaybe", lambda seen, reward, _, *rest: (seen, reward, "no", *rest)), "terminated"),
        (stepping("TellsNoPlace", lambda *result: (*result[:4], {})), "'place'"),
        (stepping("TellsNoEnd", lambda *result: (*result[:2], True, False, {"place": 0.0})), "'beyond'"),
    ],
)
def test_results_that_are_not_numbers_flags_or_declared_infos_are_refused(
    way: str, env: type[Walk], message: str
) -> None:
    with slots(env, way) as (made, _):
        made.reset_task(TASKS)
        made.reset_buffers(np.array(SEEDS))
        with pytest.raises((TypeError, ValueError), match=message):
            act(made, np.zeros((SLOTS, 1), np.float32))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("recorded_infos", {"place": "often"}, "recorded_infos must be a dict"),
        ("value_ranges", {"reward": (1.0, 0.0)}, "value_ranges must be a dict"),
        ("task_space", "all", "task_space must be a"),
        ("seed_bits", 64, "seed_bits"),
        ("stepping", "thread", "stepping must be 'serial' or 'threads', got 'thread'"),
    ],
)
def test_declarations_are_read_and_checked(way: str, name: str, wrong: Any, message: str) -> None:
    with slots(Walk, way) as (made, _):
        assert dict(made.recorded_infos) == {"place": "step", "beyond": "episode"}
        assert dict(made.value_ranges) == {"reward": (-9.0, 0.0)}
        assert made.task_space is SPACE
    adapt, rules = WAYS[way]
    with pytest.raises((TypeError, ValueError), match=message):
        make_vector_env(type("Wrong", (adapt(Walk),), {name: wrong}), {}, SLOTS, rules=rules)


class DrawsGlobally(Walk):
    def __init__(self) -> None:
        self.made_of = float(np.random.uniform()) + float(torch.rand(()))

    def observe(self) -> Any:
        drawn = np.random.uniform() if self.steps else 0.0
        return np.array([self.made_of, drawn], np.float32)


@pytest.mark.parametrize("way", WAYS)
def test_generators_of_the_process_are_keyed_refused_or_warned_of(way: str, caplog: pytest.LogCaptureFixture) -> None:
    actions, twice, made_of = some_actions(3), [], []
    for seed in range(2):
        with global_generators.KeptGenerators() as generators, slots(DrawsGlobally, way) as (made, _):
            # What others have drawn before.
            generators.seed(seed)
            if way in ("threads", "event loop"):
                with pytest.raises(RuntimeError, match=r"draws from np\.random"):
                    played(made, TASKS, actions)
            else:
                twice.append(np.stack([buffers.observations for buffers in played(made, TASKS, actions)]))
            # Constructors draw the same, each time.
            made_of.append(made.buffers.observations[:, 0].tolist())
    assert made_of[0] == made_of[1]
    assert way not in OBJECTS or len(set(made_of[0])) == 1
    if way == "one by one":
        np.testing.assert_array_equal(*twice)
    elif twice:
        assert "draws from np.random" in caplog.text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", WAYS)
def test_slots_are_made_and_step_for_a_thread_that_has_lent_the_generators(way: str) -> None:
    actions, tasks = some_actions(), TASKS
    with global_generators.seeded_generators(0), slots(Walk, way) as (made, _):
        expect_loop(played(made, tasks, actions), Walk, tasks, actions)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", OBJECTS)
def test_constructor_that_seeds_or_makes_others_takes_the_generators_itself(way: str) -> None:
    class Nested(Walk):
        def __init__(self) -> None:
            with global_generators.seeded_generators(3):
                self.inner = make_vector_env(Walk)

    with slots(Nested, way) as (made, _):
        expect_loop(played(made, TASKS, some_actions()), Walk, TASKS, some_actions())


class Breaks(Walk):
    def step(self, action: Any) -> Any:
        if self.slope[0] == 1.0:
            raise KeyError("lost")
        return super().step(action)


@pytest.mark.parametrize("way", OBJECTS)
def test_error_of_a_step_passes_and_leaves_the_number_of_its_slot(way: str) -> None:
    with slots(Breaks, way) as (made, current):
        made.reset_task(TASKS)
        made.reset_buffers(np.array(SEEDS))
        with pytest.raises(KeyError, match="lost"):
            act(made, np.zeros((SLOTS, 1), np.float32))
        assert current[0] == 1


class ReturnsCoroutines(Walk):
    def reset_task(self, task: Any) -> Any:
        async def give() -> None:
            self.slope = task["slope"]

        return give()


@pytest.mark.parametrize("way", ["one by one", "threads"])
def test_coroutine_that_nobody_awaits_is_refused(way: str) -> None:
    with (
        slots(ReturnsCoroutines, way) as (made, _),
        pytest.raises(TypeError, match=r"returned the coroutine ReturnsCoroutines\.reset_task"),
    ):
        made.reset_task(TASKS)


@pytest.mark.parametrize("way", WAYS)
def test_environment_that_is_refused_is_closed(way: str) -> None:
    closed = []

    class Refused(Walk):
        def close(self) -> None:
            closed.append(self)

    adapt, rules = WAYS[way]
    made = adapt(Refused)
    if way in ("vector env", "array code"):
        made.close = Refused.close
    made.recorded_infos = {"place": "always"}
    with pytest.raises((TypeError, ValueError)):
        make_vector_env(made, {}, 1, rules=rules)
    # Gymnasium before 1.4 also closes a batch when it is freed.
    assert len({id(each) for each in closed}) == 1


@pytest.mark.parametrize("way", WAYS)
def test_error_of_close_is_a_warning_that_names_what_was_closed(way: str, caplog: pytest.LogCaptureFixture) -> None:
    adapt, rules = WAYS[way]
    badly = walk("ClosesBadly", close=lambda self: fail(SystemExit(0)))
    made = adapt(badly)
    if way not in OBJECTS:
        made.close = badly.close
    make_vector_env(made, {}, SLOTS, rules=rules).close()
    warned = sorted(message for message in caplog.messages if "close() raises SystemExit in " in message)
    assert len(warned) == (SLOTS if way in OBJECTS else 1)
    assert all(
        message.startswith(f"slot {slot}, <" if way in OBJECTS else made.__name__)
        for slot, message in enumerate(warned)
    )


class TakesFewBits(Walk):
    """Observes its seed, and refuses one that is too large."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None and seed >= 2**31:
            raise OverflowError("seed must fit into int32")
        super().reset(seed=seed)
        return np.array([seed or 0.0, 0.0], np.float32), {}


@pytest.mark.parametrize("way", WAYS)
def test_environment_gets_as_many_bits_of_a_seed_as_it_declares_or_is_told_to(way: str) -> None:
    adapt, rules = WAYS[way]
    made, seeds = type("Declares", (adapt(TakesFewBits),), {"seed_bits": 31}), [5, 2**31 + 7, 2**40 + 2**31 + 9]
    with closing(make_vector_env(adapt(TakesFewBits), {}, SLOTS, rules=rules)) as env:
        named = r"declare it: seed_bits = 31 in \w+$" if way != "array code" else "seed must fit"
        with pytest.raises((OverflowError, ValueError), match=named):
            env.reset_buffers(np.array(seeds))
    with closing(make_vector_env(made, {}, SLOTS, rules=rules)) as env:
        env.reset_buffers(np.array(seeds))
        assert env.buffers.observations[:, 0].tolist() == [5.0, 7.0, 9.0]
        assert env.reset(seed=seeds)[0][:, 0].tolist() == [5.0, 7.0, 9.0]
        assert env.sample_tasks(2, seed=2**31 + 3) == env.sample_tasks(2, seed=3) != env.sample_tasks(2, seed=4)


def drawn_globally(num_tasks: int) -> Tasks:
    return [{"slope": np.random.uniform(0.5, 1.0, 1)} for _ in range(num_tasks)]


@pytest.mark.parametrize(
    "env",
    [
        walk("DrawsTasksGlobally", sample_tasks=lambda self, num_tasks: drawn_globally(num_tasks)),
        walk("DrawsThemLater", sample_tasks=lambda self, num_tasks: (drawn_globally(1)[0] for _ in range(num_tasks))),
        walk("TakesTasksGlobally", reset_task=lambda self, task: vars(self).update(drawn_globally(1)[0])),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_tasks_drawn_or_taken_from_the_processs_generators_are_noticed(
    env: type[Walk], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    def call(seed: int) -> Tasks:
        with global_generators.KeptGenerators() as generators, slots(env, way) as (made, _):
            generators.seed(seed)
            made.reset_task(TASKS)
            return made.sample_tasks(2, seed=3)

    if way in ("threads", "event loop"):
        with pytest.raises(RuntimeError, match=r"draws from np\.random"):
            call(0)
    elif way == "one by one":
        assert call(0) == call(1)
    else:
        call(0)
        assert "draws from np.random" in caplog.text


@pytest.mark.parametrize("way", ["vector env", "array code"])
def test_retry_of_a_batch_says_that_its_slots_cannot_begin_again(way: str) -> None:
    busy = walk("Busy", step=lambda self, action: fail(Retry(reason="the service is busy")))
    with slots(busy, way) as (made, _):
        made.reset_task(TASKS)
        made.reset_buffers(np.array(SEEDS))
        with pytest.raises(Retry, match="the service is busy; episodes begin again where each slot is an environment"):
            act(made, np.zeros((SLOTS, 1), np.float32))
