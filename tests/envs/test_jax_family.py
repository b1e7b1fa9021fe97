"""`JaxFamily`: what crosses into JAX and out of it, and what it refuses, with one line about the remedy."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.envs.global_generators import KeptGenerators
from maml_rl.errors import ConfigError, NonFiniteError, TaskError

pytestmark = [pytest.mark.jax, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def jax() -> Iterator[Any]:
    """JAX, whose import draws from the process's generators, which a test must not."""
    with KeptGenerators():
        yield pytest.importorskip("jax")


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

    given = {"reset": reset, "step": step, "draw_tasks": draw, "action_space": spaces.Box(-2.0, 2.0, (1,))} | changes
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


def test_truncation_by_the_family_itself_is_recorded_on_a_device_and_on_the_cpu() -> None:
    import jax.numpy as jnp

    def drift(key: Any, state: Any, action: Any, task: Any) -> Any:
        # One of the tasks, which are 1 to 2, ends in one way, and one in the other.
        far = state > 3.0
        return state + 1.0, jnp.zeros(2), 0.0, far & (task["factor"] > 1.5), far & (task["factor"] <= 1.5), {}

    family = counter(step=drift, draw_tasks=lambda random, num: {"factor": np.linspace(1.0, 2.0, num)})
    policy = get_policy_for_env(family(1), (8,), "tanh")
    for place in ({"num_workers": 0}, {"backend": "device"}):
        with MultiTaskSampler(family, {}, 2, policy, seed=0, max_episode_steps=8, **place) as sampler:
            episodes = sampler.rollout(sampler.sample_tasks(2))
            assert episodes.lengths.tolist() == [[5, 5], [5, 5]]
            assert episodes.truncated.tolist() == [[True, True], [False, False]]
            assert episodes.terminated.tolist() == [[False, False], [True, True]]


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
    family = counter(reset=reset, step=lambda *given: (given[1], jnp.float32(given[1]), given[1], False, False, {}))
    family = counter(
        reset=lambda key, task: (jax.random.uniform(key), jnp.zeros(())),
        step=lambda key, state, action, task: (state, state, state, False, False, {}),
    )
    made = family(3)
    made.reset(seed=[5, 2**32 + 5, 2**40 + 5])
    assert len(set(made.step(np.zeros((3, 1), np.float32))[1])) == 3


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


def test_tasks_of_other_shapes_or_types_are_refused_by_slot_and_entry() -> None:
    slots = counter()(2)
    with pytest.raises(TaskError, match=r"slot 1: entry 'factor' of a task must have the shape \(\), got \(2,\)"):
        slots.reset_task([{"factor": 1.0}, {"factor": [1.0, 2.0]}])
    with pytest.raises(TypeError, match=r"draw_tasks\(1\) returned 'factor' as <U1 of shape \(1,\)"):
        counter(draw_tasks=lambda random, num: {"factor": np.array(["a"] * num)})(1)
    whole = counter(draw_tasks=lambda random, num: {"factor": np.zeros(num, np.uint8)})(1)
    with pytest.raises(TaskError, match="must be whole numbers that uint8 has, got 300"):
        whole.reset_task([{"factor": 300}])


@pytest.mark.parametrize("place", [{"num_workers": 0}, {"backend": "device"}], ids=["cpu", "device"])
def test_numbers_that_are_not_finite_or_outside_name_slot_and_step(place: Any) -> None:
    import jax.numpy as jnp

    def nan_later(key: Any, state: Any, action: Any, task: Any) -> Any:
        return state + 1, jnp.where(state > 1, jnp.nan, state), 0.0, False, False, {}

    def large_later(key: Any, state: Any, action: Any, task: Any) -> Any:
        return state + 1, jnp.where(state > 1, 300, 0), 0.0, False, False, {}

    first = {"reset": lambda key, task: (jnp.zeros(()), jnp.zeros(())), "step": nan_later}
    grid = {"observation_space": spaces.Box(0, 255, (), np.uint8)}
    symbols = {"reset": lambda key, task: (jnp.zeros(()), jnp.zeros((), jnp.int32)), "step": large_later, **grid}
    for changes, kind, told in (
        (first, NonFiniteError, "the observation of task 0, episode 0, step 3 is not finite"),
        (symbols, Exception, r"slot 0, step 3: an observation with 300, outside of its space Box\(0, 255"),
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


def test_other_random_numbers_of_jax_are_refused(jax: Any) -> None:
    family = counter()
    with jax.threefry_partitionable(False), pytest.raises(ConfigError, match="jax_threefry_partitionable is off"):
        family(1)


def test_process_that_has_used_jax_is_not_forked() -> None:
    policy = get_policy_for_env(MultiTaskSampler.spaces("GymnaxPendulum-v0"), (8,), "tanh")
    with pytest.raises(ConfigError, match=r"copies a process that has used JAX.*use 'forkserver' or 'spawn'"):
        MultiTaskSampler("GymnaxPendulum-v0", {}, 1, policy, num_workers=1, start_method="fork").sample_tasks(1)


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
