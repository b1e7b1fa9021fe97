"""`JaxFamily`: what crosses into JAX and out of it, and what it refuses, with one line about the remedy."""

import copy
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.envs import make_vector_env
from maml_rl.envs.global_generators import KeptGenerators
from maml_rl.errors import ConfigError, NonFiniteError, TaskError
from maml_rl.policies import GRUPolicy
from maml_rl.spaces import PackedSpace, array_writer

pytestmark = [pytest.mark.jax, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def jax() -> Iterator[Any]:
    """JAX, whose import draws from the process's generators, which a test must not."""
    with KeptGenerators():
        yield pytest.importorskip("jax")


# Shapes of one ruleset of XLand-MiniGrid.
RULESETS = {"goals": (5,), "rules": (2, 7), "init_tiles": (3, 2)}


def counter(**changes: Any) -> Any:
    """A family whose state is a sum of actions; the reward is the task's factor times it."""
    import jax.numpy as jnp

    from maml_rl.envs.jax import JaxFamily

    def reset(key: Any, task: Any) -> Any:
        return jnp.zeros(()), jnp.zeros(2)

    def step(key: Any, state: Any, action: Any, task: Any) -> Any:
        state = state + action[0]
        return state, jnp.stack([state, task["factor"]]), task["factor"] * state, state > 3.0, state < -3.0, {}

    def draw(random: np.random.Generator, num_tasks: int) -> dict[str, Any]:
        return {"factor": random.uniform(1.0, 2.0, num_tasks)}

    given: dict[str, Any] = {
        "reset": reset,
        "step": step,
        "draw_tasks": draw,
        "action_space": spaces.Box(-2.0, 2.0, (1,)),
    } | changes
    return JaxFamily(**given)


def begun(family: Any, factors: Any) -> Any:
    slots = family(len(factors))
    slots.autoreset_mode = "Disabled"
    slots.reset_task([{"factor": factor} for factor in factors])
    slots.reset(seed=0)
    return slots


def test_steps_are_those_of_the_function_and_slots_that_are_over_stay() -> None:
    slots = begun(counter(), [1.0, 2.0, 1.5])
    rows = np.array([[9.0], [-9.0], [1.0]], np.float32)  # clipped to 2 and -2
    for number in range(1, 4):
        observations, rewards, terminated, truncated, _ = slots.step(rows)
        # The first two are over after two steps.
        sums = np.array([2.0 * min(number, 2), -2.0 * min(number, 2), number])
        np.testing.assert_array_equal(observations, np.stack([sums, [1.0, 2.0, 1.5]], 1).astype(np.float32))
        active = np.array([number < 3, number < 3, True])
        np.testing.assert_array_equal(rewards, np.where(active, sums * [1.0, 2.0, 1.5], 0.0))
        assert terminated.tolist() == [number >= 2, False, False]
        assert truncated.tolist() == [False, number >= 2, False]


def test_state_of_a_slot_that_is_over_does_not_drift_and_begins_anew_alone() -> None:
    import jax.numpy as jnp

    def drift(key: Any, state: Any, action: Any, task: Any) -> Any:
        state = state + 1.0
        return state, jnp.stack([state, task["factor"]]), state, state >= task["factor"], False, {}

    slots = begun(counter(step=drift), [1.0, 3.0])
    for _ in range(3):
        observations, rewards, *_ = slots.step(np.zeros((2, 1), np.float32))
    assert observations.tolist() == [[1.0, 1.0], [3.0, 3.0]]
    assert rewards.tolist() == [0.0, 3.0]
    slots.autoreset_mode = "NextStep"
    slots.reset(seed=0)
    seen = [slots.step(np.zeros((2, 1), np.float32))[0][:, 0].tolist() for _ in range(4)]
    assert seen == [[1.0, 1.0], [0.0, 2.0], [1.0, 3.0], [0.0, 0.0]]


def test_truncation_by_the_family_itself_is_recorded_on_a_device_and_on_the_cpu() -> None:
    import jax.numpy as jnp

    def drift(key: Any, state: Any, action: Any, task: Any) -> Any:
        # One of the tasks, which are 1 to 2, ends in one way, and one in the other.
        far = state > 3.0
        return state + 1.0, jnp.zeros(2), 0.0, far & (task["factor"] > 1.5), far & (task["factor"] <= 1.5), {}

    def drift_until_cut(*given: Any) -> Any:
        *before, ends, cut, infos = drift(*given)
        return *before, False, ends | cut, infos

    for step, ends in ((drift, [False, True]), (drift_until_cut, [False, False])):
        family = counter(step=step, draw_tasks=lambda random, num: {"factor": np.linspace(1.0, 2.0, num)})
        policy = get_policy_for_env(family(1), (8,), "tanh")
        for place in ({"num_workers": 0}, {"backend": "device"}):
            with MultiTaskSampler(family, {}, 2, policy, seed=0, max_episode_steps=8, **place) as sampler:
                episodes = sampler.rollout(sampler.sample_tasks(2))
                assert episodes.lengths.tolist() == [[5, 5], [5, 5]]
                assert episodes.terminated.tolist() == [[end, end] for end in ends]
                assert episodes.truncated.tolist() == [[not end, not end] for end in ends]


def test_what_the_caller_writes_later_changes_nothing() -> None:
    slots, other = begun(counter(), [1.0, 2.0]), begun(counter(), [1.0, 2.0])
    actions = np.array([[1.0], [0.5]], np.float32)
    for _ in range(3):
        expected = other.step(actions.copy())
        seen = slots.step(actions)
        actions[:] = 100.0
        for array, wanted in zip(seen[:4], expected[:4], strict=True):
            np.testing.assert_array_equal(array, wanted)
            assert array.flags.writeable
            array[...] = 7
        slots.buffers.rewards[:] = 7
        actions[:] = [[1.0], [0.5]]
    with pytest.raises(ValueError, match="read-only"):
        slots._out_of(slots._seen)[:] = 7


def test_faults_of_an_episode_on_a_device_are_told_after_the_next_has_begun() -> None:
    import jax.numpy as jnp

    from maml_rl.samplers.device.slots import DeviceSlots

    def wrong_once(key: Any, state: Any, action: Any, task: Any) -> Any:
        return state + 1, (state + 1) * 300, 0.0, False, False, {}

    zero = jnp.zeros((), jnp.int32)
    space = spaces.Box(0, 255, (), np.uint8)
    family = counter(reset=lambda key, task: (zero, zero), step=wrong_once, observation_space=space)(1)
    made = DeviceSlots(family, torch.device("cpu"))
    made.begin(made.take_tasks([{"factor": 1.0}], np.zeros(1, np.int64)))
    made.step(torch.zeros(1, 1), None)
    made.begin(made.take_tasks([{"factor": 1.0}], np.zeros(1, np.int64)))
    with pytest.raises(ValueError, match="slot 0, step 1: an observation with 300"):
        family.refuse_faults()
    family.refuse_faults()


def test_memory_of_a_gpu_is_shared_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    from maml_rl.envs.jax import of_the_extra, slot_functions

    name, seen = "XLA_PYTHON_CLIENT_PREALLOCATE", list[str | None]()

    def devices(platform: str) -> list[Any]:
        seen.append(os.environ.get(name))
        return [None]

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr("maml_rl.machine.uses_jax", lambda: False)
    for setting in (None, "true"):
        monkeypatch.delenv(name, raising=False) if setting is None else monkeypatch.setenv(name, setting)
        slot_functions.begin_jax("cuda")
        assert os.environ.get(name) == setting
        with of_the_extra():
            # Some packages use JAX while they are imported.
            devices("cuda")
        assert os.environ.get(name) == setting
    assert seen == ["false", "false", "true", "true"]


def test_tensors_of_a_device_share_nothing_with_the_state() -> None:
    from maml_rl.samplers.device.slots import DeviceSlots

    made = DeviceSlots(counter()(2), torch.device("cpu"))
    seeds = made.take_tasks([{"factor": 1.0}, {"factor": 2.0}], np.zeros(2, np.int64))
    made.begin(seeds)
    actions = torch.tensor([[1.0], [0.5]])
    for number in range(1, 4):
        rewards, *_ = made.step(actions, None)
        assert rewards.tolist() == [number, number]
        assert made.observations.tolist() == [[number, 1.0], [0.5 * number, 2.0]]
        actions.fill_(50.0)
        made.observations.fill_(9.0)
        actions.copy_(torch.tensor([[1.0], [0.5]]))


def test_seeds_of_64_bits_are_told_apart_and_tasks_keep_their_types() -> None:
    import jax
    import jax.numpy as jnp

    def reset(key: Any, task: Any) -> Any:
        return jax.random.uniform(key), task["numbers"]

    def step(key: Any, state: Any, action: Any, task: Any) -> Any:
        return state, task["numbers"], state, False, False, {}

    largest = np.array([2**32 - 1, 5], np.uint32)
    slots = counter(
        reset=reset,
        step=step,
        draw_tasks=lambda random, num: {"numbers": np.tile(largest, (num, 1))},
        observation_space=spaces.Box(0, 2**31 - 1, (2,), np.int64),
    )
    with pytest.raises(ValueError, match=r"slot 0, step 0: an observation with .* outside of its space"):
        slots(1).reset(seed=0)
    family = counter(
        reset=lambda key, task: (jax.random.uniform(key), jnp.zeros(())),
        step=lambda key, state, action, task: (state, state, state, False, False, {}),
    )
    made, seeds = family(3), [5, 2**32 + 5, 2**40 + 5]

    def start(seed: int, episode: int) -> Any:
        words = np.array([seed >> 32, seed & (2**32 - 1)], np.uint32)
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), episode)
        return float(jax.random.uniform(jax.random.fold_in(key, 0)))

    for episode, seed in enumerate((seeds, None)):
        made.reset(seed=seed)
        rewards = made.step(np.zeros((3, 1), np.float32))[1]
        assert rewards.tolist() == [start(each, episode) for each in seeds]
        assert len(set(rewards)) == 3


@pytest.mark.parametrize("place", [{"num_workers": 0}, {"backend": "device"}], ids=["cpu", "device"])
def test_whole_numbers_of_a_task_reach_the_family_with_all_their_32_bits(place: Any) -> None:
    import jax.numpy as jnp

    def halves(key: Any, task: Any) -> Any:
        return jnp.zeros(()), jnp.stack([task["world"] >> 16, task["world"] & 0xFFFF]).astype(jnp.float32)

    family = counter(
        reset=halves,
        step=lambda key, state, action, task: (state, halves(key, task)[1], 0.0, False, False, {}),
        draw_tasks=lambda random, num: {"world": random.integers(2**32, size=num, dtype=np.uint32)},
    )
    policy = get_policy_for_env(family(1), (8,), "tanh")
    worlds = [5, 2**31 - 1, 2**31, 2**31 + 7, 2**32 - 1]
    with MultiTaskSampler(family, {}, 1, policy, seed=0, max_episode_steps=2, **place) as sampler:
        seen = sampler.rollout([{"world": world} for world in worlds]).observations[:, 0, 0].tolist()
    assert [int(high) * 2**16 + int(low) for high, low in seen] == worlds


def test_packed_observations_with_the_last_step_are_on_a_device_as_here() -> None:
    import jax.numpy as jnp

    def see(state: Any) -> Any:
        return jnp.stack([state % 5, state % 3])

    def step(key: Any, state: Any, action: Any, task: Any) -> Any:
        state = state + 1 + action.astype(jnp.int32)
        return state, see(state), state * 0.5, state > 9, False, {}

    family = counter(
        reset=lambda key, task: (jnp.zeros((), jnp.int32), see(jnp.zeros((), jnp.int32))),
        step=step,
        observation_space=PackedSpace(spaces.MultiDiscrete([5, 3])),
        action_space=spaces.Discrete(3),
    )
    seen = MultiTaskSampler.spaces(family, observe_last=True)
    policy, found = GRUPolicy(seen.observation_space, seen.action_space, 8), []
    options: dict[str, Any] = {"seed": 0, "max_episode_steps": 8, "observe_last": True, "slots_per_task": 1}
    for place in ({"num_workers": 0}, {"backend": "device"}):
        with MultiTaskSampler(family, {}, 3, policy, **options, **place) as sampler:
            found.append(sampler.rollout(sampler.sample_tasks(3)))
    here, there = found
    for name in ("observations", "final_observations", "actions", "rewards", "terminated"):
        assert torch.equal(getattr(here, name), getattr(there, name)), name


def wrong_if(key: Any, state: Any, action: Any, task: Any) -> Any:
    return (state, state, 1.0, False, False, {}) if state > 0 else None


def wrong_draw(key: Any, state: Any, action: Any, task: Any) -> Any:
    return state, state, np.random.uniform(), False, False, {}


def numbers(shape: Any = (), dtype: Any = np.float32) -> Callable[..., Any]:
    def step(key: Any, state: Any, action: Any, task: Any) -> Any:
        import jax.numpy as jnp

        return jnp.zeros(shape, dtype), jnp.zeros(()), 0.0, False, False, {}

    return step


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (wrong_if, r"step of the family cannot be compiled: TracerBool.* in .*test_jax_family.py, line \d+.*jnp.where"),
        (wrong_draw, r"it draws from np.random, once for all episodes; draw by jax.random from its key"),
        (numbers((2,)), r"state is float32\[2\] after a step, and float32\[\] before it"),
        (numbers((), np.int32), r"state is int32\[\] after a step, and float32\[\] before it"),
        (lambda *given: (1, 2), "step must return state, observation, reward, terminated, truncated and a dict of"),
    ],
    ids=["if", "draw", "shape", "type", "form"],
)
def test_function_that_cannot_be_compiled_is_an_error_with_its_line(step: Any, told: str) -> None:
    import jax.numpy as jnp

    family = counter(reset=lambda key, task: (jnp.zeros(()), jnp.zeros(())), step=step)
    with pytest.raises(TypeError, match=told):
        family(2)


def test_step_that_writes_into_its_state_is_compared_with_the_state_before_it() -> None:
    import jax.numpy as jnp

    def writes(amount: Any) -> Callable[..., Any]:
        def step(key: Any, state: Any, action: Any, task: Any) -> Any:
            # As bodies of Brax do, with numbers of Python.
            before, state["is_first"], state["sum"] = state["sum"], 0.0, state["sum"] + amount
            return state, before, state["sum"], False, False, {}

        return step

    def reset(key: Any, task: Any) -> Any:
        return {"sum": 0, "is_first": 1.0}, jnp.zeros((), jnp.int32)

    space = spaces.Box(0, 9, (), np.int32)
    slots = begun(counter(reset=reset, step=writes(2), observation_space=space), [1.0])
    assert [slots.step(np.zeros((1, 1), np.float32))[:2] for _ in range(3)] == [(0, 2.0), (2, 4.0), (4, 6.0)]
    with pytest.raises(TypeError, match=r"state\['sum'\] is float32\[\] after a step, and int32\[\] before it"):
        counter(reset=reset, step=writes(0.5), observation_space=space)(1)


def test_actions_of_several_parts_are_refused_by_their_space() -> None:
    with pytest.raises(TypeError, match=r"unsupported space Dict\('a': Discrete\(2\)\): expected Box, Discrete"):
        counter(action_space=spaces.Dict({"a": spaces.Discrete(2)}))(1)


def test_tasks_of_other_shapes_or_types_are_refused_by_slot_and_entry() -> None:
    slots = counter()(2)
    with pytest.raises(TaskError, match=r"slot 1: entry 'factor' of a task must have the shape \(\), got \(2,\)"):
        slots.reset_task([{"factor": 1.0}, {"factor": [1.0, 2.0]}])
    with pytest.raises(TypeError, match=r"draw_tasks\(1\) returned 'factor' as <U1 of shape \(1,\)"):
        counter(draw_tasks=lambda random, num: {"factor": np.array(["a"] * num)})(1)
    whole = counter(draw_tasks=lambda random, num: {"factor": np.zeros(num, np.uint8)})(1)
    for wrong in (300, 2.5, -1):
        with pytest.raises(TaskError, match=f"must be whole numbers that uint8 has, got {wrong}"):
            whole.reset_task([{"factor": wrong}])
    with pytest.raises(TypeError, match=r"draw_tasks\(1\) returned 'factor' as float64 of shape \(3,\)"):
        counter(draw_tasks=lambda random, num: {"factor": np.zeros(3)})(1)


def test_tasks_are_drawn_for_training_and_for_tests_each_with_arrays_of_its_own() -> None:
    def draw(factor: float) -> Callable[..., Any]:
        return lambda random, num: {"factor": np.full(num, factor), "goal": np.zeros((num, 2))}

    slots = counter(draw_tasks=draw(1.0), draw_test_tasks=draw(2.0))(1)
    for evaluation, factor in ((False, 1.0), (True, 2.0)):
        drawn = slots.sample_tasks(2, seed=0, evaluation=evaluation)
        assert [task["factor"] for task in drawn] == [factor, factor]
        assert all(task["goal"].base is None for task in drawn)


def test_family_is_pickled_by_what_makes_it_and_slots_with_their_episodes() -> None:
    from maml_rl.envs.jax import drawn_evenly
    from maml_rl.envs.jax.gymnax_control import GymnaxVectorEnv

    family = GymnaxVectorEnv.family_of("Pendulum-v1")
    assert pickle.loads(pickle.dumps(family)) is family
    plain = counter()
    assert copy.deepcopy(plain) is plain
    # So do functions of the package with which a user makes a family.
    draw, space = pickle.loads(pickle.dumps(drawn_evenly({"factor": (1.0, 2.0)})))
    assert 1.0 <= draw(np.random.default_rng(0), 1)["factor"][0] < 2.0
    assert list(space.parameters) == ["factor"]
    slots = GymnaxVectorEnv(2)
    slots.reset_task(slots.sample_tasks(2, seed=0))
    slots.reset(seed=0)
    actions = np.full((2, 1), 0.5, np.float32)
    slots.step(actions)
    other = pickle.loads(pickle.dumps(slots))
    for _ in range(2):
        np.testing.assert_array_equal(slots.step(actions)[0], other.step(actions)[0])


@pytest.mark.parametrize("with_image", [False, True], ids=["vector", "bytes"])
def test_observations_of_several_parts_are_arrays_as_the_package_writes_them(with_image: bool) -> None:
    import jax
    import jax.numpy as jnp

    parts: dict[str, spaces.Space[Any]] = {
        "symbol": spaces.Discrete(3, start=-2, seed=1),
        "kinds": spaces.MultiDiscrete([2, 4], seed=2),
        "speed": spaces.Box(-1.0, 1.0, (2,), seed=3),
    }
    if with_image:
        parts |= {"image": spaces.Box(0, 255, (2, 2, 3), np.uint8, seed=4), "alive": spaces.MultiBinary(2, seed=5)}
    own = spaces.Dict(parts)
    element = {name: part.sample() for name, part in parts.items()}
    shown = jax.tree.map(jnp.asarray, element)
    family = counter(
        reset=lambda key, task: (jnp.zeros(()), shown),
        step=lambda key, state, action, task: (state, shown | {"speed": jnp.full(2, jnp.nan)}, 0.0, False, False, {}),
        observation_space=own,
    )
    writer = array_writer(own)
    row = np.zeros(writer.flat_space.shape or (), writer.flat_space.dtype)
    writer.write(element, row)
    slots = family(1)
    np.testing.assert_array_equal(slots.reset(seed=0)[0][0], row)
    if with_image:
        # Nobody sees later that a number among bytes is none.
        with pytest.raises(ValueError, match=r"slot 0, step 1: .* numbers that are not finite at \['speed'\]"):
            slots.step(np.zeros((1, 1), np.float32))


@pytest.mark.parametrize("place", [{"num_workers": 0}, {"backend": "device"}], ids=["cpu", "device"])
def test_numbers_that_are_not_finite_or_outside_name_slot_and_step(place: Any) -> None:
    import jax.numpy as jnp

    def nan_later(key: Any, state: Any, action: Any, task: Any) -> Any:
        return state + 1, jnp.where(state > 1, jnp.nan, state), 0.0, False, False, {}

    def large_later(key: Any, state: Any, action: Any, task: Any) -> Any:
        return state + 1, jnp.where(state > 1, 300, 0), 0.0, False, False, {}

    def both_large_later(*given: Any) -> Any:
        state, seen, *others = large_later(*given)
        return state, {"first": seen, "second": seen + 1}, *others

    def less_later(*given: Any) -> Any:
        state, seen, *others = large_later(*given)
        return state, jnp.where(seen == 300, -1, 0), *others

    def as_bytes(*given: Any) -> Any:
        state, seen, *others = large_later(*given)
        return state, seen.astype(jnp.uint8), *others

    symbol, zero = spaces.Box(0, 255, (), np.uint8), jnp.zeros((), jnp.int32)
    first = {"reset": lambda key, task: (jnp.zeros(()), jnp.zeros(())), "step": nan_later}
    symbols = {"reset": lambda key, task: (jnp.zeros(()), zero), "step": large_later, "observation_space": symbol}
    pairs = {
        "reset": lambda key, task: (jnp.zeros(()), {"first": zero, "second": zero}),
        "step": both_large_later,
        "observation_space": spaces.Dict({"first": symbol, "second": symbol}),
    }
    for changes, kind, told in (
        (first, NonFiniteError, "the observation of task 0, episode 0, step 3 is not finite"),
        (symbols, Exception, r"slot 0, step 3: an observation with 300, outside of its space Box\(0, 255"),
        (symbols | {"step": less_later}, Exception, "slot 0, step 3: an observation with -1, outside of its space"),
        # A step whose type has no other numbers says nothing of a reset.
        (symbols | {"reset": lambda key, task: (0.0, zero + 300), "step": as_bytes}, Exception, "step 0: .* with 300"),
        (pairs, Exception, r"slot 0, step 3: an observation with 300 at \['first'\], outside of its space Box"),
    ):
        family = counter(**changes)
        policy = get_policy_for_env(counter(reset=first["reset"], step=nan_later)(1), (8,), "tanh")
        if kind is Exception:
            policy = get_policy_for_env(spaces_of(family), (8,), "tanh")
        with (
            MultiTaskSampler(family, {}, 1, policy, seed=0, max_episode_steps=6, **place) as sampler,
            pytest.raises(kind, match=told),
        ):
            sampler.rollout(sampler.sample_tasks(2))


def spaces_of(family: Any) -> Any:
    return MultiTaskSampler.spaces(family)


@pytest.mark.parametrize(
    ("name", "usual", "other", "told"),
    [
        ("threefry_partitionable", True, False, "off"),
        ("enable_x64", False, True, "on"),
        ("default_prng_impl", "threefry2x32", "rbg", "rbg"),
    ],
)
def test_settings_with_which_keys_give_other_numbers_are_refused_with_the_remedy(
    name: str, usual: Any, other: Any, told: str, jax: Any
) -> None:
    family, use = counter(), getattr(jax, name)
    remedy = re.escape(f"'with jax.{name}({usual!r}):'")
    with use(other), pytest.raises(ConfigError, match=f"jax_{name} is {told}.* within {remedy}"):
        family(1)
    family(1)
    # Also once its functions are compiled.
    with use(other), pytest.raises(ConfigError, match=f"jax_{name} is {told}"):
        family(1)
    with use(other), use(usual):
        family(1)


def test_setting_of_jax_that_changes_between_steps_is_what_the_error_names(jax: Any) -> None:
    slots, actions = begun(counter(), [1.0]), np.ones((1, 1), np.float32)
    with jax.enable_x64(True), pytest.raises(ConfigError, match="jax_enable_x64 is on"):
        slots.step(actions)
    with jax.enable_x64(True), jax.enable_x64(False):
        slots.step(actions)


def test_process_that_has_used_jax_is_not_forked() -> None:
    policy = get_policy_for_env(MultiTaskSampler.spaces("GymnaxPendulum-v0"), (8,), "tanh")
    with pytest.raises(ConfigError, match=r"copies a process that has used JAX.*use 'forkserver' or 'spawn'"):
        MultiTaskSampler("GymnaxPendulum-v0", {}, 1, policy, num_workers=1, start_method="fork").sample_tasks(1)


def test_objects_of_test_rulesets_are_in_no_training_task_and_never_tell_the_goal() -> None:
    from maml_rl.envs.jax.xland import generated

    found: dict[bool, set[Any]] = {}
    for test in (False, True):
        drawn = generated(1, 3, 2, 1, np.random.default_rng(0), 400, test=test)
        goals, tiles, rules = drawn["goal"].tolist(), drawn["init_tiles"].tolist(), drawn["rules"].tolist()
        for goal, first, (rule,) in zip(goals, tiles, rules, strict=True):
            # Hold what one rule makes of two objects that are there, of six kinds in one color.
            assert goal == [1, *rule[5:], 0, 0]
            assert rule[0] == 3
            assert rule[1:3] in first
            assert rule[3:5] in first
            assert first[:3] == first[3:]
            different = {tuple(tile) for tile in [*first, rule[5:]]}
            assert len(different) == 4
            assert different <= {(kind, 1) for kind in (3, 4, 5, 7, 11, 12)}
        found[test] = {
            (frozenset([goal[1], *(kind for kind, _ in first)]), goal[1])
            for goal, first in zip(goals, tiles, strict=True)
        }
    objects = {test: {these for these, _ in pairs} for test, pairs in found.items()}
    assert not objects[False] & objects[True]
    # Of the 15 sets of four objects; in each, all four are goals.
    assert len(objects[False] | objects[True]) == 15
    assert found[False] | found[True] == {(these, goal) for these in objects[False] | objects[True] for goal in these}


def test_tasks_of_a_file_of_rulesets_are_its_rows_the_last_fifth_for_tests(tmp_path: Any) -> None:
    pytest.importorskip("xminigrid")
    from maml_rl.envs.jax.xland import XLandVectorEnv

    rows = np.arange(10, dtype=np.uint8)
    goals, rules, tiles = (np.tile(rows.reshape(10, *(1,) * len(s)), (1, *s)) for s in ((5,), (2, 7), (3, 2)))
    np.savez(tmp_path / "rulesets.npz", goals=goals, rules=rules, init_tiles=tiles)
    env = XLandVectorEnv(1, rulesets=tmp_path / "rulesets.npz")
    for evaluation, expected in ((False, set(range(8))), (True, {8, 9})):
        tasks = env.sample_tasks(100, seed=0, evaluation=evaluation)
        assert {task["goal"][0] for task in tasks} == expected
        for task in tasks:
            row = int(task["goal"][0])
            for name, of_file in (("goal", goals), ("rules", rules), ("init_tiles", tiles)):
                np.testing.assert_array_equal(task[name], of_file[row])
    env.reset_task(tasks[:1])
    assert env.reset(seed=0)[0].shape == env.observation_space.shape


@pytest.mark.parametrize(
    ("altered", "expected"),
    [
        ({"goals": None}, "has no array 'goals'; it has rules, init_tiles"),
        ({"rules": np.zeros((3, 2, 7), np.uint8)}, r"rules in .* got uint8 of shape \(3, 2, 7\)"),
        ({"init_tiles": np.zeros((4, 3), np.uint8)}, r"init_tiles in .* of shape \(N, any, 2\)"),
        ({"goals": np.zeros((4, 5), np.float32)}, "goals in .* got float32"),
        ({name: np.zeros((1, *shape), np.uint8) for name, shape in RULESETS.items()}, "N at least 2"),
        ({"goals": np.array([{}] * 4, object)}, "not a whole .npz file: Object arrays"),
    ],
)
def test_rulesets_that_are_not_those_of_tasks_are_refused_by_name(
    altered: dict[str, Any], expected: str, tmp_path: Any
) -> None:
    pytest.importorskip("xminigrid")
    from maml_rl.envs.jax.xland import XLandVectorEnv

    arrays = {name: np.zeros((4, *shape), np.uint8) for name, shape in RULESETS.items()} | altered
    np.savez(tmp_path / "rulesets.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(ConfigError, match=expected):
        XLandVectorEnv(1, rulesets=str(tmp_path / "rulesets.npz"))


def test_rooms_of_xland_are_left_at_the_limit_of_the_rewards() -> None:
    kwargs = {"size": 5, "tiles": 2, "colors": 1, "steps": 3}
    policy = get_policy_for_env(MultiTaskSampler.spaces("XLand-v0", kwargs), (8,), "tanh")
    with MultiTaskSampler("XLand-v0", kwargs, 4, policy, seed=0, backend="device") as sampler:
        episodes = sampler.rollout(sampler.sample_tasks(8))
    # Both ends occur; a reward is at least that of the last step.
    assert episodes.lengths.max() == 3
    assert (episodes.lengths[episodes.truncated] == 3).all()
    assert episodes.terminated.any()
    assert (episodes.rewards.sum(1)[episodes.terminated] > 0.09).all()


@pytest.mark.parametrize(("layout", "cells"), [("R1", 25), ("R9", 9)])
def test_objects_of_xland_and_the_agent_have_a_cell_each_or_are_refused(layout: str, cells: int) -> None:
    from maml_rl.envs.jax.xland import XLandVectorEnv

    given: dict[str, Any] = {"size": 7, "layout": layout, "tiles": 2}
    fitting = (cells - 1) // 2
    with pytest.raises(ValueError, match=f"{2 * fitting + 2} objects and the agent .* {layout} of size 7 has {cells}"):
        XLandVectorEnv(1, **given, copies=fitting + 1)
    slots = XLandVectorEnv(1, **given, copies=fitting)
    slots.reset(seed=0)
    assert slots._carry is not None
    (grid,) = (leaf for leaf in slots._carry.state if leaf.shape == (1, 7, 7, 2))
    # Balls, squares, pyramids, keys, hexagons and stars.
    assert np.isin(grid[..., 0], (3, 4, 5, 7, 11, 12)).sum() == 2 * fitting


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"size": [3]}, r"size must be an integer, got \[3\]"),
        ({"tiles": 2.5}, "tiles must be an integer, got 2.5"),
        ({"rules": -1}, "each of -1 rules needs two of 4 tiles"),
        ({"rulesets": 3}, "rulesets must be text, got 3"),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
    ],
    ids=["list", "fraction", "negative", "text", "least"],
)
def test_arguments_of_a_ready_made_family_are_refused_by_name(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make_vector_env("XLand-v0", arguments)


def test_arguments_of_a_ready_made_family_are_of_their_annotations_or_defaults() -> None:
    from maml_rl.envs.jax import JaxFamily, ReadyMade

    got: list[Any] = []

    class Mine(ReadyMade):
        @staticmethod
        def make(low: float = 0, most: "float" = np.inf, path: str = "", size: int | None = 3, name="x") -> JaxFamily:  # type: ignore[no-untyped-def]
            got.append((low, most, path, size, name))
            return counter()

    for options, expected in (
        ({}, (0, np.inf, "", 3, "x")),
        ({"low": np.float32(0.5), "most": 2, "path": Path("a.npz"), "size": None}, (0.5, 2.0, "a.npz", None, "x")),
        ({"low": 1, "path": None, "name": Path("b")}, (1.0, np.inf, "", 3, "b")),
    ):
        Mine(1, **options)
        assert repr(got[-1]) == repr(expected)
    for name, value, told in (("low", "1", "a number"), ("name", 1, "text")):
        with pytest.raises(ValueError, match=f"{name} must be {told}, got {value!r}"):
            Mine(1, **{name: value})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Brax System")
def test_equal_limits_of_brax_are_one_velocity_and_others_an_error() -> None:
    pytest.importorskip("brax")
    from maml_rl.envs.jax.brax_locomotion import BraxVelVectorEnv

    family = BraxVelVectorEnv.make(low=1.5, high=1.5)
    assert family.tasks_drawn(np.random.default_rng(0), 2)["velocity"].tolist() == [1.5, 1.5]
    for low, high, told in ((2.0, 1.0, "low must be below high"), (np.inf, np.inf, "low must be a finite number")):
        with pytest.raises(ValueError, match=told):
            BraxVelVectorEnv.make(low=low, high=high)


@pytest.mark.timeout(60)
def test_pipe_in_place_of_rulesets_is_refused_at_once(tmp_path: Any) -> None:
    pytest.importorskip("xminigrid")
    from maml_rl.envs.jax.xland import XLandVectorEnv

    os.mkfifo(tmp_path / "rulesets.npz")
    with pytest.raises(ConfigError, match=r"rulesets.npz cannot be read: it is a device, a pipe or a socket"):
        XLandVectorEnv(1, rulesets=str(tmp_path / "rulesets.npz"))


def test_device_that_jax_does_not_see_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    seen = {"cpu": jax.devices("cpu")}

    def devices(platform: str | None = None) -> Any:
        if platform not in (None, *seen):
            raise RuntimeError(f"Unknown backend {platform}")
        return seen["cpu"]

    monkeypatch.setattr(jax, "devices", devices)
    slots = counter()(1)
    with pytest.raises(ConfigError, match=r"torch has a GPU, and JAX sees none .*pip install 'jax\[cuda12\]'"):
        slots.move_to(torch.device("cuda"))
    del seen["cpu"]
    with pytest.raises(ConfigError, match=r"JAX must not use the CPU .*Unknown backend cpu\); leave out JAX_PLATFORMS"):
        counter()(1)


@pytest.mark.parametrize("begins_anew", [False, True])
def test_check_notes_a_family_that_begins_another_episode_by_itself(begins_anew: bool) -> None:
    from maml_rl.envs.checking import check_vector_family

    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def reset(key: Any, task: Any) -> Any:
        place = jax.random.uniform(key)
        return {"place": place, "time": 0}, place

    def step(key: Any, state: Any, action: Any, task: Any) -> Any:
        state = {"place": state["place"] + action[0] + task["factor"], "time": state["time"] + 1}
        over = state["time"] == 7
        if begins_anew:
            state = jax.tree.map(lambda new, old: jnp.where(over, new, old), reset(key, task)[0], state)
        return state, state["place"], 1.0, over, False, {}

    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        check_vector_family(counter(reset=reset, step=step))
    told = [str(each.message) for each in noted]
    assert [text.startswith("where an episode ends, its state is as at a start") for text in told] == [
        True
    ] * begins_anew


def test_functions_are_traced_in_the_first_phase_alone_whatever_ends() -> None:
    import jax.numpy as jnp

    traced: list[str] = []
    expected: list[str] = []

    def reset(key: Any, task: Any) -> Any:
        traced.append("reset")
        return 0.0, jnp.zeros(2)

    def step(key: Any, state: Any, action: Any, task: Any) -> Any:
        traced.append("step")
        state = state + 1.0
        return state, jnp.zeros(2), state, state > 2 * task["factor"], False, {}

    family = counter(reset=reset, step=step)
    policy = get_policy_for_env(family(1), (8,), "tanh")
    with MultiTaskSampler(family, {}, 2, policy, seed=0, num_workers=0, max_episode_steps=6) as sampler:
        for number in range(3):
            # Slots of each phase end at other steps.
            lengths = sampler.rollout([{"factor": 1.0}, {"factor": 1.0 + number}]).lengths
            assert lengths.tolist() == [[3, 3], [min(6, 3 + 2 * number)] * 2]
            expected = expected or traced.copy()
            assert traced == expected
    # One reset for the space; each once, whatever the number of slots, although a number of Python begins the state.
    assert sorted(traced) == ["reset", "reset", "step"]


@pytest.mark.parametrize("missing", ["jax", "xminigrid"])
def test_missing_package_is_one_line_with_the_command_that_installs_it(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from maml_rl.envs import make_vector_env; "
        "make_vector_env('XLand-v0')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env={**os.environ}, check=False
    )
    assert ended.returncode == 1
    assert "pip install 'maml-rl[jax]'" in ended.stderr.strip().splitlines()[-1]
