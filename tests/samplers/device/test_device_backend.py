"""The backend `device`: the CPU's own episodes from the same keys, step by step, recorded, or on a GPU."""

import sys
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from device_phases import (
    Counting,
    policy_for,
    require_as_on_the_cpu,
    require_close,
    require_same_when_recorded,
    sample,
    sample_adapted,
)
from gymnasium import spaces

from maml_rl import MultiTaskSampler, PopulationEvaluator
from maml_rl.config.placement import Placement
from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.make_env import ObservedLastStep, Recipe
from maml_rl.envs.meta_env import EnvDescription
from maml_rl.envs.registration import FAMILIES
from maml_rl.envs.tasks import TaskEntry
from maml_rl.errors import ChildEnvError, ConfigError, NonFiniteError
from maml_rl.policies import GRUPolicy, Policy, TransformerPolicy, as_policy
from maml_rl.policies.transformer import Attention
from maml_rl.samplers.device.backend import DeviceLoop
from maml_rl.samplers.device.slots import DeviceSlots
from maml_rl.samplers.make_backend import choose
from maml_rl.samplers.phase import Phase
from maml_rl.seeding import PhaseStreams
from tests.device_alone import META, device_alone
from tests.recorded_steps import record_on_the_cpu

# One id of each class of array code.
CLASSES = {kind.name: env_id for env_id, kind in sorted(FAMILIES.items()) if not kind.has_physics and not kind.extra}
PHYSICS = ("HalfCheetahDir-v5", "Walker2DRandParams-v5")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("env", [*CLASSES.values(), pytest.param("GymnaxCartPole-v0", marks=pytest.mark.jax)])
def test_recorded_steps_have_the_episodes_of_the_cpu(env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if env == "GymnaxCartPole-v0":
        pytest.importorskip("jax")
    require_same_when_recorded(env, monkeypatch)


class Ending(Counting):
    """Ends an episode by its action, so that slots end at different steps of different episodes."""

    def _step_slots(self, actions: Any, active: Any, streams: Any) -> Any:
        return self._next(), actions[:, 0] > 0.5


class Shrinking(GRUPolicy):
    """Returns less of its memory than it gets, but not when it is tried with one task."""

    def actor(self, params: Any, first_task: int = 0) -> Any:
        act = super().actor(params, first_task)

        def shrunk(*given: Any) -> Any:
            actions, memory = act(*given)
            return actions, tuple(kept[..., :1] for kept in memory) if len(actions) > 1 else memory

        return shrunk


def memory_for(env: Any, made: type[GRUPolicy] = GRUPolicy) -> GRUPolicy:
    spaces = MultiTaskSampler.spaces(env, observe_last=True)
    # Squashed actions are not those that are recorded.
    return made(spaces.observation_space, spaces.action_space, 8, squash=env == "2DNavigation-v0", seed=0)


@pytest.mark.parametrize(("env", "forgets"), [("2DNavigation-v0", True), ("GridNavi-v0", False), (Ending, False)])
def test_a_memory_goes_through_a_trial_as_on_the_cpu(env, forgets):
    policy = memory_for(env)
    options = {"observe_last": True, "slots_per_task": 1, "reset_memory_each_episode": forgets}
    ours = require_as_on_the_cpu(env, policy, **options)
    assert env is not Ending or len(set(ours.lengths.flatten().tolist())) > 2
    with pytest.raises(ValueError, match="Shrinking returned the shape"):
        sample("device", env, memory_for(env, Shrinking), **options)


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


def test_slots_get_actions_of_the_type_that_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    got, usual = [], DeviceSlots.step

    def noted(self: DeviceSlots, actions: Any, *others: Any) -> Any:
        got.append(actions.dtype)
        return usual(self, actions, *others)

    monkeypatch.setattr(DeviceSlots, "step", noted)
    (episodes,) = sample("device", "2DNavigation-v0", policy_for("2DNavigation-v0").double())
    assert {*got} == {episodes.actions.dtype} == {torch.float32}


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


@pytest.mark.parametrize(("env_id", "deterministic"), [("2DNavigation-v0", False), ("GridNavi-v0", True)])
def test_every_task_acts_under_its_own_parameters_as_on_the_cpu(env_id, deterministic):
    options = {"policy": policy_for(env_id), "deterministic": deterministic}
    ours, theirs = (sample_adapted(backend, env_id, **options) for backend in ("device", "in-process"))
    for one, other in zip(ours, theirs, strict=True):
        require_close(one, other)


class Closing(Counting):
    """Notes how many slots were closed."""

    closed_slots: ClassVar[list[int]] = []

    def close_extras(self, **kwargs: Any) -> None:
        self.closed_slots.append(self.num_envs)


def test_slots_are_closed_when_their_number_changes_and_at_the_end() -> None:
    policy = policy_for(Closing)
    with MultiTaskSampler(Closing, {}, 2, policy, seed=0, backend="device", device="cpu") as sampler:
        Closing.closed_slots.clear()
        for num_tasks in (3, 2):
            sampler.rollout(sampler.sample_tasks(num_tasks))
    # The last one describes the others.
    assert Closing.closed_slots == [6, 4, 1]


class Faulty(Counting):
    """Shows NaN once, at a step that is drawn: in the middle of an episode, at its end, or never."""

    def _reset_slots(self, mask: Any, streams: Any) -> None:
        super()._reset_slots(mask, streams)
        self._fault = 1.0 + (12.0 * streams.uniform(1)[:, 0]) // 1.0

    def _write_observations(self, out: Any) -> None:
        out[:] = self.xp.where(self._count == self._fault, np.nan, self.tasks["first"])[:, None]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_first_number_that_is_not_finite_is_that_of_the_cpu_in_any_wave(seed):
    env: Any = Faulty if seed else Counting
    policy, messages = policy_for(env), []
    if not seed:
        # An action.
        with torch.no_grad():
            policy.get_parameter("mu.bias").fill_(float("inf"))
    for backend in ("device", "in-process"):
        with pytest.raises(NonFiniteError) as found:
            sample(backend, env, policy, seed=seed, slots_per_task=1)
        messages.append((str(found.value), found.value.tasks))
    assert messages[0] == messages[1]


class Choosing(Counting):
    """Has choices, and observes its count of steps; has a fault in the second step."""

    def __init__(self, num_envs: int, fault: str = "") -> None:
        self._fault, self.recorded_infos = fault, {"count": "step"}
        entries, choices = {"first": TaskEntry()}, spaces.Discrete(3)
        BatchedFamily.__init__(self, num_envs, spaces.Discrete(5), choices, entries, max_episode_steps=4)

    def _reset_slots(self, mask: Any, streams: Any) -> None:
        if self._fault == "resets":
            raise RuntimeError("no fuel")
        super()._reset_slots(mask, streams)

    def _write_observations(self, out: Any) -> None:
        out[:] = self._count * (3.0 if self._fault == "outside" else 1.0)

    def _step_slots(self, actions: Any, active: Any, streams: Any) -> Any:
        rewards, self._reward_terms = self._next(), {"count": self._count}
        if self._fault and int(self._count[0]) == 2:
            if self._fault == "raises":
                raise RuntimeError("out of fuel")
            if self._fault == "leaves":
                sys.exit(0)
            rewards = rewards[:, None] if self._fault == "shape" else rewards
            self._reward_terms = {} if self._fault == "info" else self._reward_terms
            return rewards, rewards * 0.5 if self._fault == "ends" else False
        return rewards, False


class Beyond(Policy):
    """Chooses what does not exist, now and then."""

    noise_kind, noise_size, stateless = "uniform", 1, True

    def act(self, observations: Any, noise: Any, memory: Any = (), params: Any = None) -> Any:
        return torch.where(noise[..., 0] > 0.8, 3, 1), ()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("resets", r"Choosing raised, in reset: RuntimeError in .*: no fuel"),
        ("raises", r"Choosing raised, in step 1: RuntimeError in .*: out of fuel"),
        ("leaves", r"Choosing raised, in step 1: SystemExit in .*: 0"),
        ("shape", r"_step_slots of Choosing has rewards of shape \(12, 1\); it must have a number for each of the 12"),
        ("ends", r"Choosing raised, in step 1: terminated must be True or False, got array\(\["),
        ("info", r"Choosing declares 'count' in recorded_infos, so _step_slots must put it into self._reward_terms"),
        ("outside", r"in slot 0 with the task .*, in step 1: Choosing wrote an observation with 6, outside of its"),
        ("", r"Choosing raised, in step \d: actions must be integers in \[0, 3\), got \[.*3.*\]"),
    ],
)
def test_error_of_a_family_is_that_of_the_cpu(fault: str, message: str) -> None:
    policy: Any = policy_for(Choosing) if fault else as_policy(Beyond())
    options, found = {"env_kwargs": {"fault": fault}, "slots_per_task": 4, "max_episode_steps": None}, []
    for backend in ("device", "in-process"):
        with pytest.raises(ChildEnvError, match=message) as raised:
            sample(backend, Choosing, policy, **options)
        found.append(str(raised.value))
    assert found[0] == found[1]


def test_recorded_step_that_differs_from_the_step_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class InAVariable(Counting):
        def _next(self) -> Any:
            calls.append(1)
            return super()._next() * len(calls)

    record_on_the_cpu(monkeypatch)
    with pytest.raises(ConfigError, match=r"recorded step of InAVariable differs .* 'rewards', at step \d: it dep"):
        sample("device", InAVariable)
    sample("device", Counting)


def test_loop_of_a_policy_whose_buffer_was_replaced_is_made_anew():
    policy = policy_for(Counting)
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
    env, own = "PixelNavigation-v0", MultiTaskSampler.spaces("PixelNavigation-v0").observation_space.low.size
    policy, options = memory_for(env), {"observe_last": True, "slots_per_task": 1}
    (ours,), (theirs,) = (sample(backend, env, policy, **options) for backend in ("device", "in-process"))
    # The noise of actions may differ in its last bits, and so may what follows from it.
    seen, expected = ours.observations[..., :own], theirs.observations[..., :own]
    torch.testing.assert_close(seen[:, 0], expected[:, 0], rtol=0, atol=0)
    assert (seen == expected).float().mean() > 0.99
    torch.testing.assert_close(ours.rewards, theirs.rewards, rtol=1e-5, atol=1e-5)
    recipe = Recipe.of(ObservedLastStep(env), {}, None)
    assert choose(Placement(device="cuda"), recipe, policy).backend == "device"


@pytest.mark.slow
@pytest.mark.timeout(300)
# The last one has a forward pass after each step, forces of contacts and rotations.
@pytest.mark.parametrize("env_id", [*PHYSICS, "AntDir-finn2017-v0"])
def test_physics_agrees_with_mujoco_after_a_step(env_id):
    pytest.importorskip("mujoco_warp")
    (ours,), (theirs,) = (sample(backend, env_id, max_episode_steps=2) for backend in ("device", "in-process"))
    np.testing.assert_array_equal(ours.lengths, theirs.lengths)
    torch.testing.assert_close(ours.observations[:, 0], theirs.observations[:, 0], rtol=1e-5, atol=1e-5)
    difference = (ours.observations[:, 1] - theirs.observations[:, 1]).abs() / (theirs.observations[:, 1].abs() + 1.0)
    assert float(difference.median()) < 1e-6
    assert float(difference.max()) < 0.05


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backend", "engine", "num_rows"), [("device", {}, 12), ("in-process", {"engine": "warp"}, 12)]
)
def test_too_little_room_for_contacts_is_an_error_in_any_wave(backend, engine, num_rows):
    pytest.importorskip("mujoco_warp")
    options = {"env_kwargs": {"max_constraints": num_rows, **engine}, "batch_size": 6, "slots_per_task": 1}
    with pytest.raises((ConfigError, ChildEnvError), match=rf"env-kwargs: \{{max_constraints: {2 * num_rows}\}}"):
        sample(backend, "HalfCheetahDir-v5", **options)


@on_gpu
@pytest.mark.cuda
@pytest.mark.parametrize("env_id", CLASSES.values())
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
@pytest.mark.parametrize("env_id", PHYSICS)
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
    shown = MultiTaskSampler.spaces("2DNavigation-v0", observe_last=True)
    spaces, options = (shown.observation_space, shown.action_space), {"observe_last": True, "slots_per_task": 1}

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
