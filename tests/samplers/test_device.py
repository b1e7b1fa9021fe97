"""The backend `device`: the CPU's own episodes from the same keys, as tensors that stay on the device."""

from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch

from maml_rl import MultiTaskSampler, PopulationEvaluator
from maml_rl.arrays import copied
from maml_rl.config.placement import Placement
from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.last_step import LastStepVectorEnv
from maml_rl.envs.make_env import ObservedLastStep, ObservedTask, make_vector_env
from maml_rl.envs.meta_env import EnvDescription
from maml_rl.envs.registration import FAMILIES
from maml_rl.envs.task_entries import TaskEntry
from maml_rl.errors import ChildEnvError, ConfigError, NonFiniteError, TaskError
from maml_rl.policies import GRUPolicy, TransformerPolicy, get_policy_for_env
from maml_rl.policies.transformer import Attention
from maml_rl.samplers.device.backend import DeviceLoop
from maml_rl.samplers.device.slots import DeviceSlots
from maml_rl.samplers.device.streams import DeviceSlotStreams, PhaseNoise, philox
from maml_rl.samplers.env_recipe import Recipe
from maml_rl.samplers.make_backend import choose
from maml_rl.samplers.phase import Phase
from maml_rl.seeding import PhaseStreams, SlotStreams
from maml_rl.seeding import philox as philox_of_numpy
from tests.device_alone import META, device_alone
from tests.recorded_steps import record_on_the_cpu

CPU = torch.device("cpu")
ARRAY_CODE = sorted(name for name, family in FAMILIES.items() if not family.has_physics and not family.extra)
PHYSICS = ("HalfCheetahDir-v5", "Walker2DRandParams-v5", "AntDir-finn2017-v0", "SwimmerVel-v5")
SAMPLED = ("observations", "actions", "rewards", "final_observations")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def policy_for(env_id: str) -> Any:
    env = gymnasium.make_vec(env_id, 1, vectorization_mode="vector_entry_point")
    try:
        return get_policy_for_env(env, hidden_sizes=(16,))
    finally:
        env.close()


def sample(backend: str, env_id: str, policy: Any, *, phases: int = 1, device: str = "cpu", **options: Any) -> Any:
    given = {"batch_size": 4, "slots_per_task": 2, "seed": 3, "max_episode_steps": 12} | options
    kwargs = given.pop("env_kwargs", {})
    with MultiTaskSampler(env_id, kwargs, policy=policy, backend=backend, device=device, **given) as sampler:
        tasks = sampler.sample_tasks(3)
        return [sampler.rollout(tasks) for _ in range(phases)]


def require_close(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    for name in ("lengths", "terminated", "truncated"):
        torch.testing.assert_close(getattr(ours, name).cpu(), getattr(theirs, name), rtol=0, atol=0)
    for name in SAMPLED:
        torch.testing.assert_close(getattr(ours, name).cpu(), getattr(theirs, name), rtol=tolerance, atol=tolerance)
    assert ours.infos.keys() == theirs.infos.keys()
    for name, info in theirs.infos.items():
        torch.testing.assert_close(ours.infos[name].cpu(), info, rtol=tolerance, atol=tolerance)


def test_philox_gives_the_same_words_as_on_the_cpu():
    random = np.random.default_rng(0)
    counter, key = random.integers(2**32, size=(4, 100)), random.integers(2**32, size=(2, 100))
    words = philox(tuple(map(torch.from_numpy, key)), tuple(map(torch.from_numpy, counter)))  # type: ignore[arg-type]

    np.testing.assert_array_equal(torch.stack(words, 1).numpy(), philox_of_numpy(tuple(key), tuple(counter)))


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("common", [False, True])
def test_action_noise_is_that_of_the_cpu(kind, common):
    streams = PhaseStreams(2**32 - 1, 7, 3, first_task=5, common=common)
    ours = PhaseNoise(kind, (11, 4, 5, 6), CPU)
    ours.draw(streams, range(2, 7))

    theirs = streams.action_noise(kind, 4, range(2, 7), range(11), 6).reshape(11, 20, 6)
    np.testing.assert_allclose(ours.rows.numpy(), theirs, rtol=0, atol=0 if kind == "uniform" else 1e-6)


def test_slots_draw_what_they_draw_on_the_cpu():
    seeds = np.array([0, 5, 2**63 - 1, 123_456_789_012_345])
    ours, theirs = DeviceSlotStreams(4, CPU), SlotStreams(seeds)
    ours.reseed(torch.from_numpy(seeds))

    for size in (3, 1, 4):
        np.testing.assert_array_equal(ours.uniform(size).numpy(), theirs.uniform(size))
        np.testing.assert_allclose(ours.normal(size).numpy(), theirs.normal(size), rtol=1e-14)


@pytest.mark.parametrize("env_id", ARRAY_CODE)
def test_episodes_of_array_code_are_those_of_the_cpu(env_id):
    policy = policy_for(env_id)

    for ours, theirs in zip(
        sample("device", env_id, policy, phases=2), sample("in-process", env_id, policy, phases=2), strict=True
    ):
        require_close(ours, theirs)
        assert repr(ours.tasks) == repr(theirs.tasks)


@pytest.mark.parametrize("env_id", ["2DNavigation-v0", "Bandit-K5-v0", "GridNavi-v0"])
def test_a_memory_goes_through_a_trial_as_on_the_cpu(env_id):
    env = gymnasium.make_vec(env_id, 1, vectorization_mode="vector_entry_point")
    with MultiTaskSampler(env_id, {}, policy=policy_for(env_id), observe_last=True, num_workers=0) as sampler:
        policy = GRUPolicy(sampler.single_observation_space, env.single_action_space, 8)
    options = {"observe_last": True, "slots_per_task": 1}

    (ours,), (theirs,) = (sample(backend, env_id, policy, **options) for backend in ("device", "in-process"))

    require_close(ours, theirs)


# One id of each class.
CLASSES = {FAMILIES[env_id].name: env_id for env_id in ARRAY_CODE}


@pytest.mark.parametrize("env_id", CLASSES.values())
def test_a_step_on_a_device_neither_waits_for_it_nor_copies_to_it(env_id):
    recipe = Recipe.of(ObservedLastStep(env_id), {}, 12)
    host = recipe.make(1)
    policy = GRUPolicy(host.single_observation_space, host.single_action_space, 8)
    slots, tasks = DeviceSlots(recipe.make(6), META), tuple(host.sample_tasks(3, seed=0))
    phase = Phase(tasks, policy.to(META), None, PhaseStreams(0, 1, 0), 2, 12)
    loop = DeviceLoop(slots, EnvDescription.of(host), phase)
    loop._make_actor()
    with torch.no_grad(), device_alone():
        loop._begin(torch.zeros(6, dtype=torch.int64, device=META), forget=True)
        loop._one_step()
        # After the first, whether an episode may end early is known.
        loop._one_step()


def test_what_a_device_cannot_do_alone_is_refused():
    rows, index = torch.zeros(3, device=META), torch.zeros(1, dtype=torch.int64, device=META)
    for work in (
        lambda: torch.tensor(1.0, device=META),
        lambda: rows.__setitem__(index, 1.0),
        lambda: rows + torch.zeros(3),
    ):
        with pytest.raises(AssertionError), device_alone():
            work()
    with pytest.raises((RuntimeError, NotImplementedError)), device_alone():
        rows[rows > 0]


def perturbed(policy: Any, num_tasks: int, scale: float) -> Any:
    generator = torch.Generator().manual_seed(1)
    return {
        name: value.detach() + scale * torch.randn(value.shape, generator=generator).to(value)
        for name, value in policy.stack_parameters(num_tasks).items()
    }


def sample_adapted(backend: str, env_id: str, policy: Any, device: str = "cpu", **options: Any) -> Any:
    """One phase under the policy's own parameters, one under those of each task, and one under its own again."""
    given = {"batch_size": 4, "slots_per_task": 2, "seed": 3, "max_episode_steps": 6} | options
    with (
        MultiTaskSampler(env_id, {}, policy=policy, backend=backend, device=device, **given) as sampler,
        torch.no_grad(),
    ):
        tasks = sampler.sample_tasks(3)
        return [sampler.rollout(tasks, params) for params in (None, perturbed(policy, 3, 0.5), None)]


@pytest.mark.parametrize("env_id", ["2DNavigation-v0", "GridNavi-v0"])
def test_every_task_acts_under_its_own_parameters_as_on_the_cpu(env_id):
    policy = policy_for(env_id)

    ours, theirs = (sample_adapted(backend, env_id, policy) for backend in ("device", "in-process"))

    for one, other in zip(ours, theirs, strict=True):
        require_close(one, other)


def test_an_oracle_sees_its_task_as_on_the_cpu():
    env: Any = ObservedTask("2DNavigation-v0")
    with MultiTaskSampler(env, {}, policy=policy_for("2DNavigation-v0"), num_workers=0) as sampler:
        policy = get_policy_for_env(sampler.env, hidden_sizes=(8,))

    require_close(*(sample(backend, env, policy)[0] for backend in ("device", "in-process")))


def test_deterministic_episodes_are_those_of_the_cpu():
    policy, found = policy_for("2DNavigation-v0"), []
    for backend in ("device", "in-process"):
        with MultiTaskSampler(
            "2DNavigation-v0", {}, 2, policy, backend=backend, seed=1, max_episode_steps=6
        ) as sampler:
            found.append(sampler.rollout(sampler.sample_tasks(2), deterministic=True))

    require_close(*found)


def test_a_number_that_is_not_finite_is_named_as_on_the_cpu():
    policy = policy_for("2DNavigation-v0")
    with torch.no_grad():
        policy.get_parameter("mu.weight").fill_(1e30)
        policy.get_parameter("mu.bias").fill_(float("inf"))

    messages = []
    for backend in ("device", "in-process"):
        with pytest.raises(NonFiniteError) as found:
            sample(backend, "2DNavigation-v0", policy)
        messages.append((str(found.value), found.value.tasks))

    assert messages[0] == messages[1]


def test_a_malformed_task_is_named():
    with (
        MultiTaskSampler("2DNavigation-v0", {}, 2, policy_for("2DNavigation-v0"), backend="device") as sampler,
        pytest.raises(TaskError, match=r"task 1: .*'goal'"),
    ):
        sampler.rollout([{"goal": (0.0, 0.1)}, {"goal": (1.0,)}])


def test_an_environment_of_objects_is_refused():
    class Env(gymnasium.Env[Any, Any]):
        observation_space = action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

        def sample_tasks(self, num_tasks: int) -> list[dict[str, float]]:
            return [{"a": 1.0}] * num_tasks

        def reset_task(self, task: dict[str, float]) -> None: ...

    with pytest.raises(ConfigError, match="not array code"):
        MultiTaskSampler(Env, {}, 2, policy_for("2DNavigation-v0"), backend="device", max_episode_steps=3)


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ({"device": "cuda"}, ("device", "cuda")),
        ({"device": "cuda", "num_workers": 2}, ("auto", "cpu")),
        ({"device": "cuda", "backend": "in-process"}, ("in-process", "cpu")),
        ({"device": "cuda", "inference": "central", "num_workers": 2}, ("auto", "cuda")),
        ({"device": "cpu"}, ("auto", "cpu")),
        ({"device": "cpu", "backend": "device"}, ("device", "cpu")),
    ],
)
def test_where_phases_are_and_where_the_policy_acts(asked, chosen):
    placement = choose(Placement(**asked), Recipe.of("2DNavigation-v0", {}, None), policy_for("2DNavigation-v0"))

    assert (placement.backend, placement.device) == chosen


def test_images_with_further_numbers_are_sampled_on_a_device_as_on_the_cpu():
    recipe = Recipe.of(ObservedLastStep("PixelNavigation-v0"), {}, None)
    host = recipe.make(1)
    policy = GRUPolicy(host.single_observation_space, host.single_action_space, 8)
    options = {"observe_last": True, "slots_per_task": 1}

    (ours,), (theirs,) = (
        sample(backend, "PixelNavigation-v0", policy, **options) for backend in ("device", "in-process")
    )

    # The noise of actions may differ in its last bits, and so may what follows from it.
    own = len(host.env.single_observation_space.low.ravel())
    seen, expected = ours.observations[..., :own], theirs.observations[..., :own]
    torch.testing.assert_close(seen[:, 0], expected[:, 0], rtol=0, atol=0)
    assert (seen == expected).float().mean() > 0.99
    torch.testing.assert_close(ours.rewards, theirs.rewards, rtol=1e-5, atol=1e-5)
    assert choose(Placement(device="cuda"), recipe, policy).backend == "device"


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "warp", "num_workers": 2},
        {"engine": "warp", "backend": "processes"},
        {"backend": "device", "num_workers": 2},
        {"backend": "device", "engine": "mujoco"},
    ],
)
def test_workers_and_a_device_exclude_each_other(options):
    with pytest.raises(ValueError, match=r"engine|backend"):
        Placement(**options)


def test_an_engine_for_what_has_no_physics_is_refused():
    with pytest.raises(ValueError, match="engine='warp' is for the MuJoCo families"):
        MultiTaskSampler("2DNavigation-v0", {}, 2, policy_for("2DNavigation-v0"), engine="warp")


class Counting(BatchedFamily):
    """Pays its own count of steps, kept as a subclass says; some slots terminate at the third."""

    def __init__(self, num_envs: int, **options: Any) -> None:
        box = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        super().__init__(num_envs, box, box, {"first": TaskEntry()}, max_episode_steps=5, **options)

    def draw_tasks(self, random: Any, num_tasks: int) -> list[dict[str, Any]]:
        return [{"first": float(first)} for first in random.uniform(0.0, 1.0, num_tasks)]

    def _reset_slots(self, mask: Any, streams: Any) -> None:
        self._count = self.xp.zeros_like(self.tasks["first"])

    def _write_observations(self, out: Any) -> None:
        out[:] = self.tasks["first"][:, None]

    def _step_slots(self, actions: Any, active: Any, streams: Any) -> Any:
        return self._next(), self._count >= 3.0 + self.tasks["first"].round()

    def _next(self) -> Any:
        self._count = self._count + 1.0
        return self._count + 0.0


class Faulty(Counting):
    """Shows NaN once, at a step that is drawn: in the middle of an episode, at its end, or never."""

    def _reset_slots(self, mask: Any, streams: Any) -> None:
        super()._reset_slots(mask, streams)
        self._fault = 1.0 + (12.0 * streams.uniform(1)[:, 0]) // 1.0

    def _write_observations(self, out: Any) -> None:
        out[:] = self.xp.where(self._count == self._fault, np.nan, self.tasks["first"])[:, None]


@pytest.mark.parametrize("seed", [1, 2])
def test_first_number_that_is_not_finite_is_that_of_the_cpu_in_any_wave(seed):
    policy, messages = get_policy_for_env(make_vector_env(Faulty, {}, 1), (4,)), []
    for backend in ("device", "in-process"):
        with pytest.raises(NonFiniteError) as found:
            sample(backend, Faulty, policy, seed=seed, slots_per_task=1)
        messages.append((str(found.value), found.value.tasks))

    assert messages[0] == messages[1]


class InManyPlaces(Counting):
    """Keeps state in all ways that work: views, arrays that become others, change places or are results, containers."""

    def __init__(self, num_envs: int, **options: Any) -> None:
        self._pair = np.zeros((num_envs, 2))
        self._second, self._kind = self._pair[:, 1], np.zeros(num_envs, np.int64)
        super().__init__(num_envs, **options)

    def _reset_slots(self, mask: Any, streams: Any) -> None:
        super()._reset_slots(mask, streams)
        self._pair[:] = 0.0
        self._start, self._kind = self._count, self._count + 0.25
        self._odd, self._even = self._count + 1.0, self._count + 2.0
        self._past = {"counts": self._count, "listed": 1.0}
        self._list = [self._count, self._count]

    def _next(self) -> Any:
        before, self._past = self._count, {"counts": self._count, "listed": 1.0}
        super()._next()
        self._pair += self._count[:, None]
        self._odd, self._even = self._even, self._odd
        self._list = [self._list[1], self._kind + self._count]
        found = (self._second, self._start, self._kind, self._odd, self._past["counts"], self._list[0])
        self._reward_terms = {"before": before}
        self._sum = sum(place * array for place, array in zip((1, 10, 100, 1e3, 1e4, 1e5), found, strict=True))
        return self._sum


class ReplacingLastStep(LastStepVectorEnv):
    """Shows the last step by another array after every step."""

    def take_step(self, *arguments: Any) -> None:
        self._last = copied(self._last)
        super().take_step(*arguments)


class ObservedReplacing(ObservedLastStep):
    wrapper = ReplacingLastStep


class InATuple(Counting):
    def _reset_slots(self, mask: Any, streams: Any) -> None:
        super()._reset_slots(mask, streams)
        self._pair = (self._count, self._count)

    def _next(self) -> Any:
        self._pair = (self._pair[1], super()._next())
        return self._pair[1]


class InANumber(Counting):
    _number = 0

    def _reset_slots(self, mask: Any, streams: Any) -> None:
        super()._reset_slots(mask, streams)
        self._number = 0

    def _next(self) -> Any:
        self._number += 1
        count = super()._next()
        return count if self._number % 2 else 2.0 * count


class InAnObject(Counting):
    def __init__(self, num_envs: int, **options: Any) -> None:
        self._held = SimpleNamespace(steps=[0])
        super().__init__(num_envs, **options)

    def _next(self) -> Any:
        self._held.steps[0] += 1
        return super()._next()


class Growing(Counting):
    def _next(self) -> Any:
        count = super()._next()
        self._past = count[:, None] if not hasattr(self, "_past") else self._past.repeat(1, 2)
        return count


class OfAnEpisode(Counting):
    _episode = 0

    def _reset_slots(self, mask: Any, streams: Any) -> None:
        super()._reset_slots(mask, streams)
        self._episode += 1


class OfNumPy(Counting):
    def _reset_slots(self, mask: Any, streams: Any) -> None:
        super()._reset_slots(mask, streams)
        self._rates = np.ones(self.num_envs)


@pytest.mark.parametrize(
    ("made", "name", "what"),
    [
        (InATuple, "_pair", "tuple"),
        (InANumber, "_number", "int"),
        (InAnObject, "_held", "SimpleNamespace"),
        (Growing, "_past", "Tensor"),
        (OfAnEpisode, "_episode", "int"),
        (OfNumPy, "_rates", "ndarray"),
    ],
)
def test_state_that_a_recorded_step_cannot_see_is_refused_by_name(made, name, what):
    with pytest.raises(ConfigError, match=rf"{made.__name__} has state in its attribute '{name}', a {what}"):
        sample("device", made, get_policy_for_env(make_vector_env(made, {}, 1), (4,)), slots_per_task=1)


KINDS = [
    *sorted(CLASSES.values()),
    pytest.param(InManyPlaces, id="of a user"),
    pytest.param(ObservedReplacing("2DNavigation-v0"), id="showing more"),
    pytest.param("GymnaxCartPole-v0", marks=pytest.mark.jax),
]


@pytest.mark.parametrize("env", KINDS)
def test_recorded_steps_have_the_episodes_of_the_cpu(env, monkeypatch):
    if env == "GymnaxCartPole-v0":
        pytest.importorskip("jax")
    record_on_the_cpu(monkeypatch)
    policy = get_policy_for_env(make_vector_env(env, {}, 1), (16,))

    for ours, theirs in zip(*(sample(place, env, policy, phases=2) for place in ("device", "in-process")), strict=True):
        require_close(ours, theirs)


def test_mixture_is_refused_and_sampled_on_the_cpu_beside_a_gpu():
    kwargs = {"families": ["PointGoal-v0", "SparsePointGoal-v0"]}
    policy = get_policy_for_env(make_vector_env("Mixture-v0", kwargs, 1), (4,))

    assert choose(Placement(device="cuda"), Recipe.of("Mixture-v0", kwargs, 5), policy).backend == "auto"
    with pytest.raises(ConfigError, match="tasks of MixtureVectorEnv have texts"):
        sample("device", "Mixture-v0", policy, env_kwargs=kwargs)


def families_with_hidden_state() -> list[type[Counting]]:
    """Return families whose state is neither in an attribute nor in what an attribute holds."""
    calls = []

    class InAVariable(Counting):
        def _next(self) -> Any:
            calls.append(1)
            return super()._next() * len(calls)

    class InTheModule(Counting):
        def _next(self) -> Any:
            EndsLater.calls.append(1)
            count = super()._next()
            return count if len(EndsLater.calls) % 2 else -count

    return [InAVariable, InTheModule]


@pytest.mark.parametrize("index", [0, 1])
def test_recorded_step_that_differs_from_the_step_itself_is_refused(index, monkeypatch):
    made = families_with_hidden_state()[index]
    policy = get_policy_for_env(make_vector_env(made, {}, 1), (4,))
    record_on_the_cpu(monkeypatch)

    with pytest.raises(
        ConfigError, match=rf"recorded step of {made.__name__} differs .* 'rewards', at step \d: it dep"
    ):
        sample("device", made, policy)
    sample("device", Counting, policy)


def test_loop_of_a_policy_whose_buffer_was_replaced_is_made_anew():
    policy = get_policy_for_env(make_vector_env(Counting, {}, 1), (4,))
    policy.register_buffer("shift", torch.zeros(1))
    with MultiTaskSampler(Counting, {}, 2, policy, seed=0, backend="device", device="cpu") as sampler:
        tasks = sampler.sample_tasks(2)
        loops = []
        for shift in (policy.shift, policy.shift, torch.ones(1)):
            policy.shift = shift
            sampler.rollout(tasks)
            loops.append(sampler._workers.backend._loops[0])
    assert loops[0] is loops[1]
    assert loops[1] is not loops[2]


class EndsTogether(Counting):
    def _step_slots(self, actions: Any, active: Any, streams: Any) -> Any:
        return self._next(), True


class EndsLater(Counting):
    calls: ClassVar[list[int]] = []

    def _step_slots(self, actions: Any, active: Any, streams: Any) -> Any:
        self.calls.append(1)
        return self._next(), len(self.calls) % 3 == 0


class EndsSooner(Counting):
    _calls = 0

    def _step_slots(self, actions: Any, active: Any, streams: Any) -> Any:
        type(self)._calls += 1
        return self._next(), self._calls == 1 and self._count >= 3.0


def test_terminated_may_be_a_bool_that_stays_the_same():
    policies = [get_policy_for_env(make_vector_env(made, {}, 1), (4,)) for made in (Counting, EndsTogether)]
    for made, policy in zip((Counting, EndsTogether), policies, strict=True):
        ours, theirs = (sample(backend, made, policy)[0] for backend in ("device", "in-process"))
        require_close(ours, theirs)
    assert set(ours.lengths.flatten().tolist()) == {1}
    with pytest.raises(ConfigError, match="EndsLater returns False for terminated in one step and more in another"):
        sample("device", EndsLater, policies[0])
    with pytest.raises(ConfigError, match="EndsSooner returns False for terminated in one step and more in another"):
        sample("device", EndsSooner, policies[0])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("env_id", PHYSICS)
def test_physics_agrees_with_mujoco_after_a_step(env_id):
    pytest.importorskip("mujoco_warp")
    policy = policy_for(env_id)

    (ours,), (theirs,) = (sample(backend, env_id, policy, max_episode_steps=2) for backend in ("device", "in-process"))

    np.testing.assert_array_equal(ours.lengths, theirs.lengths)
    torch.testing.assert_close(ours.observations[:, 0], theirs.observations[:, 0], rtol=1e-5, atol=1e-5)
    difference = (ours.observations[:, 1] - theirs.observations[:, 1]).abs() / (theirs.observations[:, 1].abs() + 1.0)
    assert float(difference.median()) < 1e-6
    assert float(difference.max()) < 0.05


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backend", "engine", "num_rows"), [("device", {}, 1), ("device", {}, 12), ("in-process", {"engine": "warp"}, 12)]
)
def test_too_little_room_for_contacts_is_an_error_in_any_wave(backend, engine, num_rows):
    pytest.importorskip("mujoco_warp")
    options = {"env_kwargs": {"max_constraints": num_rows, **engine}, "batch_size": 6, "slots_per_task": 1}

    with pytest.raises((ConfigError, ChildEnvError), match=rf"env-kwargs: \{{max_constraints: {2 * num_rows}\}}"):
        sample(backend, "HalfCheetahDir-v5", policy_for("HalfCheetahDir-v5"), **options)


@pytest.mark.slow
@pytest.mark.parametrize("make", [gymnasium.make, partial(gymnasium.make_vec, num_envs=2)], ids=["one", "many"])
def test_too_little_room_for_contacts_is_an_error_without_a_sampler(make):
    pytest.importorskip("mujoco_warp")
    refused = pytest.raises(ConfigError, match=r"env-kwargs: \{max_constraints: 2\}")
    with closing(make("HalfCheetahDir-v5", engine="warp", max_constraints=1)) as env, refused:
        play(env)


def play(env: Any) -> None:
    env.reset(seed=0)
    for _ in range(30):
        env.step(env.action_space.sample())


@on_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("env_id", ARRAY_CODE)
def test_episodes_on_cuda_are_those_of_the_cpu(env_id):
    theirs = sample("in-process", env_id, policy_for(env_id), phases=2)
    ours = sample("device", env_id, policy_for(env_id).to("cuda"), phases=2, device="cuda")

    for one, other in zip(ours, theirs, strict=True):
        assert one.device.type == "cuda"
        # A step may come to another cell, or end elsewhere, where a device rounds differently.
        same = (one.lengths.cpu() == other.lengths).float().mean()
        assert same > 0.9
        steps = min(one.rewards.shape[1], other.rewards.shape[1], 3)
        close = (one.observations[:, :steps].cpu().float() - other.observations[:, :steps].float()).abs() < 1e-4
        assert close.float().mean() > 0.95


@on_gpu
@pytest.mark.cuda
@pytest.mark.timeout(300)
@pytest.mark.parametrize("env_id", PHYSICS[:2])
def test_physics_on_cuda_agrees_with_mujoco_after_a_step(env_id):
    pytest.importorskip("mujoco_warp")
    (theirs,) = sample("in-process", env_id, policy_for(env_id), max_episode_steps=3)
    ours = sample("device", env_id, policy_for(env_id).to("cuda"), phases=2, device="cuda", max_episode_steps=3)[0]

    # The first phase, from the same keys.
    first, second = ours.observations[:, :2].cpu(), theirs.observations[:, :2]
    assert float(((first - second).abs() / (second.abs() + 1.0)).median()) < 1e-6


@on_gpu
@pytest.mark.cuda
def test_graphs_follow_the_parameters_of_each_phase():
    theirs = sample_adapted("in-process", "2DNavigation-v0", policy_for("2DNavigation-v0"))
    ours = sample_adapted("device", "2DNavigation-v0", policy_for("2DNavigation-v0").to("cuda"), "cuda")

    for one, other in zip(ours, theirs, strict=True):
        require_close(one, other, 1e-4)


@on_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("cell", ["gru", "lstm", "transformer"])
def test_a_memory_goes_through_a_trial_on_cuda_as_on_the_cpu(cell):
    with MultiTaskSampler(
        "2DNavigation-v0", {}, policy=policy_for("2DNavigation-v0"), observe_last=True, num_workers=0
    ) as sampler:
        spaces = sampler.single_observation_space, sampler.single_action_space
    options = {"observe_last": True, "slots_per_task": 1}

    def make() -> Any:
        # A context that is shorter than a trial, so that the ring goes around.
        attention = Attention(context=7, num_layers=2, num_heads=2)
        return TransformerPolicy(*spaces, 8, attention) if cell == "transformer" else GRUPolicy(*spaces, 8, cell=cell)

    theirs = sample_adapted("in-process", "2DNavigation-v0", make(), **options)
    ours = sample_adapted("device", "2DNavigation-v0", make().to("cuda"), "cuda", **options)

    for one, other in zip(ours, theirs, strict=True):
        require_close(one, other, 1e-3)


@on_gpu
@pytest.mark.cuda
def test_a_population_on_cuda_has_the_returns_of_the_cpu():
    members = 0.3 * np.random.default_rng(0).standard_normal((5, 1))
    found = []
    for device in ("cuda", "cpu"):
        with PopulationEvaluator(
            "2DNavigation-v0", policy_for("2DNavigation-v0").to(device), 0, max_episode_steps=5, seed=1
        ) as evaluator:
            weights = evaluator.policy_weights() + members
            weights[2] = np.nan
            found.append(evaluator.evaluate(weights))

    np.testing.assert_allclose(*found, rtol=1e-4, equal_nan=True)
    assert np.isnan(found[0]).tolist() == [False, False, True, False, False]


@on_gpu
@pytest.mark.cuda
def test_environments_on_the_cpu_give_the_bytes_of_a_run_without_a_gpu():
    policy = policy_for("2DNavigation-v0")
    (theirs,) = sample("in-process", "2DNavigation-v0", policy)
    (ours,) = sample("in-process", "2DNavigation-v0", policy_for("2DNavigation-v0").to("cuda"), device="cuda")

    assert ours.device.type == "cpu"
    assert ours.digest() == theirs.digest()
