"""The sampling loop, tested on an environment whose every number can be predicted, and in every schedule."""

import inspect
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from phases import sample_here
from trials import Counting

from maml_rl.envs import Retry, make_vector_env
from maml_rl.envs.calls import CallRules, Stepping
from maml_rl.envs.families.navigation import Navigation2DVectorEnv, PixelNavigationVectorEnv
from maml_rl.envs.meta_env import EnvDescription
from maml_rl.errors import NonFiniteError
from maml_rl.policies import NormalMLPPolicy, Policy, get_policy_for_env
from maml_rl.policies.classical.tabular import QTablePolicy
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.loop import _Loop, sample_phase
from maml_rl.seeding import PhaseStreams

HORIZON = 6
STREAMS = PhaseStreams(0, 0, 0)


class CountingEnv(gymnasium.Env):
    """Observes (task, seed, step); ends at the task's length; the reward is 100 * task + step."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self) -> None:
        self.retried = False
        self.reset_task({"number": 0, "length": HORIZON})

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"number": number % 40, "length": HORIZON} for number in range(num_tasks)]

    def reset_task(self, task: dict[str, Any]) -> None:
        self.task = task

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.now, self.start = 0, float((seed or 0) % 1000)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.now += 1
        over = self.now >= self.task["length"]
        reward = 100.0 * self.task["number"] + self.now
        poison = self.task.get("poison", {}).get(self.now)
        if poison == "retry" and not self.retried:
            self.retried = True
            raise Retry
        observation = self._observation() * (np.nan if poison == "observation" else 1.0)
        reward = np.inf if poison == "reward" else reward
        return observation, reward, over, False, {}

    def _observation(self) -> Any:
        return np.array([self.task["number"], self.start, self.now], np.float64)


def make_tasks(lengths: Sequence[int]) -> list[dict[str, Any]]:
    return [{"number": number, "length": length} for number, length in enumerate(lengths)]


def sample(
    tasks: Sequence[dict[str, Any]],
    episodes_per_task: int = 2,
    slots_per_task: int | None = None,
    policy: Policy | None = None,
    streams: PhaseStreams = STREAMS,
    params: Any = None,
    stepping: Stepping = "serial",
    reset_memory: bool = False,
) -> Any:
    slots, rules = slots_per_task or episodes_per_task, CallRules(stepping=stepping, timeout=20.0)
    vector_env = make_vector_env(CountingEnv, {}, len(tasks) * slots, rules=rules)
    policy = policy or NormalMLPPolicy(3, 1, (4,), "tanh")
    phase = Phase(tuple(tasks), policy, params, streams, episodes_per_task, HORIZON, reset_memory, slots_per_task=slots)
    episodes = sample_here(vector_env, phase)
    vector_env.close()
    return episodes


def test_every_slot_gets_its_own_task_and_every_step_its_own_entry() -> None:
    episodes = sample(make_tasks([6, 6, 6]))
    task, step, _ = np.meshgrid(np.arange(3), np.arange(6), np.arange(2), indexing="ij")
    assert episodes.observations.dtype == torch.float64
    np.testing.assert_array_equal(episodes.observations[..., 0], task)
    np.testing.assert_array_equal(episodes.observations[..., 2], step)
    np.testing.assert_array_equal(episodes.rewards, 100 * task + step + 1)


def test_slots_get_actions_as_they_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, got = NormalMLPPolicy(2, 2, (4,), "tanh").double(), list[NDArray[Any]]()
    usual = Navigation2DVectorEnv.step_send

    def noted(self: Navigation2DVectorEnv, index: int, actions: NDArray[Any]) -> None:
        got.append(np.array(actions))
        usual(self, index, actions)

    monkeypatch.setattr(Navigation2DVectorEnv, "step_send", noted)
    with closing(make_vector_env("2DNavigation-v0", {}, 3)) as env:
        tasks = tuple(env.sample_tasks(3, seed=0))
        actions = sample_here(env, Phase(tasks, policy, None, STREAMS, 1, HORIZON)).actions[:, :, 0].numpy()
    assert [(each.dtype, each.tolist()) for each in got] == [
        (np.float32, row.tolist()) for row in actions.swapaxes(0, 1)
    ]


def test_actions_are_mean_plus_noise_of_their_own_stream() -> None:
    policy, streams = NormalMLPPolicy(3, 1, (4,), "tanh", init_std=0.5), PhaseStreams(3, 4, 1)
    episodes = sample(make_tasks([6, 6, 6]), policy=policy, streams=streams)
    noise = np.moveaxis(streams.action_noise("normal", 3, range(2), range(6), 1), 0, 1)
    mean = policy(episodes.observations).mean.detach().numpy()
    np.testing.assert_allclose(episodes.actions.numpy(), mean + 0.5 * noise, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stepping", ["serial", "threads"])
def test_waves_sample_the_same_episodes_as_all_slots_at_once(stepping: Stepping) -> None:
    tasks = make_tasks([HORIZON + 2, 3])
    together = sample(tasks, 4)
    waves = sample(tasks, 4, slots_per_task=2, stepping=stepping)
    # Episodes that the environment would continue end at the horizon.
    assert together.terminated.tolist() == together.truncated.logical_not().tolist() == [[False] * 4, [True] * 4]
    for name in ("observations", "rewards", "lengths", "truncated", "final_observations"):
        np.testing.assert_array_equal(getattr(together, name), getattr(waves, name))
    # Another batch shape may round differently.
    np.testing.assert_allclose(together.actions, waves.actions, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("stepping", "slots", "reset"),
    [("serial", 1, False), ("serial", 2, True), ("threads", 2, False), ("threads", 1, True)],
)
def test_memory_goes_through_a_trial_and_restarts_with_an_episode(stepping: Stepping, slots: int, reset: bool) -> None:
    """The action is the number of steps that the policy remembers."""
    tasks = make_tasks([6, 2, 4])
    tasks[2]["poison"] = {3: "retry"}
    episodes = sample(tasks, 4, slots, policy=Counting(size=3), stepping=stepping, reset_memory=reset)
    before = (torch.arange(4) // slots) * episodes.lengths * (not reset)
    steps = torch.arange(HORIZON)[:, None] + before[:, None]
    assert torch.equal(episodes.actions[..., 0], steps * episodes.mask)


def test_unit_that_cuts_a_task_has_the_episodes_of_the_whole_phase() -> None:
    phase = Phase(tuple(make_tasks([6, 3])), NormalMLPPolicy(3, 1, (4,), "tanh"), None, STREAMS, 2, HORIZON)
    found = []
    for part in (phase, phase.unit(slice(1, 4))):
        with closing(make_vector_env(CountingEnv, {}, len(part.slot_tasks))) as env:
            found.append(EpisodeArrays.zeros(EpisodeArrays.layout(EnvDescription.of(env), *part.sizes)))
            sample_phase(env, part, found[-1])
    whole, unit = found
    for name in ("observations", "actions", "rewards"):
        of_whole, of_unit = getattr(whole, name), getattr(unit, name)
        np.testing.assert_array_equal(of_unit[1], of_whole[1])
        np.testing.assert_array_equal(of_unit[0, :, 1], of_whole[0, :, 1])
        # What others sample.
        assert not of_unit[0, :, 0].any()


class Checking(NormalMLPPolicy):
    """Refuses observations outside of the space of `Lifted`."""

    def act(self, observations: Any, *others: Any, **options: Any) -> Any:
        if not ((observations >= 1000) & (observations < 2000)).all():
            raise ValueError(f"no observations: {observations.tolist()}")
        return super().act(observations, *others, **options)


class LateEnv(CountingEnv):
    """Is reset once the slot of the first task has stepped; zeros are not in its observation space."""

    observation_space: Any = spaces.Discrete(3, start=5)
    action_space: Any = spaces.Discrete(2)
    first_has_stepped = Event()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.first_has_stepped.set()
        observation, reward, over, truncated, infos = super().step(action)
        return int(observation), reward, over, truncated, infos

    def _observation(self) -> Any:
        assert self.task["number"] == 0 or self.first_has_stepped.wait(10.0)
        return 5 + self.now % 3


class Lifted(Navigation2DVectorEnv):
    def _write_observations(self, out: NDArray[Any]) -> None:
        super()._write_observations(out)
        out[...] = np.abs(out) % 1000 + 1000


@pytest.mark.parametrize("own_slots", [slice(0, 2), slice(1, 4), slice(2, 3)])
def test_policy_sees_nothing_of_slots_that_others_have(own_slots: slice) -> None:
    with closing(Lifted(own_slots.stop - own_slots.start, autoreset_mode="Disabled")) as env:
        tasks = tuple(env.sample_tasks(1, seed=0))
        phase = Phase(tasks, Checking(2, 2, (4,), "tanh"), None, STREAMS, 4, HORIZON).unit(own_slots)
        arrays = EpisodeArrays.zeros(EpisodeArrays.layout(EnvDescription.of(env), *phase.sizes))
        # What others write there, meanwhile.
        arrays.observations[...] = np.nan
        sample_phase(env, phase, arrays)
    assert (arrays.observations[:, :, own_slots] >= 1000).all()
    others = [slot for slot in range(4) if slot not in range(own_slots.start, own_slots.stop)]
    assert np.isnan(arrays.observations[:, :, others]).all()


def test_policy_sees_nothing_of_slots_that_have_not_been_reset() -> None:
    LateEnv.first_has_stepped.clear()
    policy = QTablePolicy(LateEnv.observation_space, LateEnv.action_space)
    with closing(make_vector_env(LateEnv, {}, 2, rules=CallRules(stepping="threads", timeout=20.0))) as env:
        episodes = sample_here(env, Phase(tuple(make_tasks([6, 6])), policy, None, STREAMS, 1, HORIZON))
    assert episodes.observations[..., 0].tolist() == [[5, 6, 7, 5, 6, 7]] * 2


def test_episodes_have_seeds_of_their_own_and_another_phase_has_others() -> None:
    first = sample(make_tasks([6, 6]), streams=PhaseStreams(0, 0, 0)).observations[:, 0, :, 1]
    second = sample(make_tasks([6, 6]), streams=PhaseStreams(0, 0, 1)).observations[:, 0, :, 1]
    assert len(np.unique(np.concatenate([first.ravel(), second.ravel()]))) == 8


@pytest.mark.parametrize("what", ["observation", "reward"])
@pytest.mark.parametrize("step", [2, HORIZON])
def test_value_that_is_not_finite_is_named(what: str, step: int) -> None:
    tasks = make_tasks([6, 6])
    tasks[1]["poison"] = {step: what}
    at = step if what == "observation" else step - 1
    with pytest.raises(NonFiniteError, match=f"the {what} of task 1, episode 0, step {at} is not finite"):
        sample(tasks)


def test_schedules_that_the_documentation_includes_are_those_of_the_loop() -> None:
    root = Path(__file__).parents[3]
    included = (root / "docs" / "architecture.md").read_text()
    (path, section) = re.findall(r'^--8<-- "(.*loop\.py):(\w+)"$', included, re.MULTILINE)[0]
    _, shown, _ = re.split(rf"# --8<-- \[(?:start|end):{section}\]\n", (root / path).read_text())
    for schedule in (_Loop.run_in_lockstep, _Loop.run_by_slot):
        assert inspect.getsource(schedule) in shown


# Observations that slots write directly into the recorded arrays.


class Spied(PixelNavigationVectorEnv):
    """Records the arrays into which it draws; if `ends`, every other slot ends after two steps."""

    def __init__(self, num_envs: int, ends: bool = False, **options: Any) -> None:
        self.drawn: list[NDArray[Any]] = []
        self.ends = ends
        super().__init__(num_envs, autoreset_mode="Disabled", **options)

    def _write_observations(self, out: NDArray[Any]) -> None:
        super()._write_observations(out)
        self.drawn.append(out)

    def _step_slots(self, *arguments: Any) -> Any:
        rewards, terminated = super()._step_slots(*arguments)
        return rewards, (np.arange(self.num_envs) % 2 == 0) & (self._elapsed == 1) if self.ends else terminated


def sample_images(env: Any, horizon: int = 5, num_tasks: int = 2, *, copy: bool = False) -> Any:
    tasks = tuple(env.sample_tasks(num_tasks, seed=0))
    policy, per_task = get_policy_for_env(env, (4,)), env.num_envs // num_tasks
    if copy:
        env.observes_anywhere = False
    return sample_here(env, Phase(tasks, policy, None, STREAMS, 3, horizon, slots_per_task=per_task))


@pytest.mark.parametrize("limit", [5, 50])
def test_images_are_drawn_into_the_recorded_array_without_a_copy(limit: int) -> None:
    env = Spied(6, max_episode_steps=limit)
    own = env.buffers.observations
    recorded = (episodes := sample_images(env)).observations.numpy()
    assert len(env.drawn) == 6
    for step, drawn in enumerate(env.drawn[:5]):
        assert np.shares_memory(drawn, recorded[:, step])
        np.testing.assert_array_equal(drawn.reshape(recorded[:, step].shape), recorded[:, step])
    # The observation after the last step does not belong to any step.
    assert env.drawn[5] is own is env.buffers.observations
    np.testing.assert_array_equal(own.reshape(2, 3, 32, 32, 1), episodes.final_observations.numpy())


@pytest.mark.parametrize("ends", [False, True])
def test_episodes_drawn_in_place_are_those_that_are_copied(ends: bool) -> None:
    env, copying = Spied(6, ends), Spied(6, ends)
    episodes, expected = sample_images(env), sample_images(copying, copy=True)
    assert all(drawn is copying.buffers.observations for drawn in copying.drawn)
    assert episodes.lengths.tolist() == ([[2, 5, 2], [5, 2, 5]] if ends else [[5] * 3] * 2)
    assert episodes.digest() == expected.digest()
    np.testing.assert_array_equal(env.buffers.observations, copying.buffers.observations)
    # Of vectors only those of one task are adjacent in the recorded array.
    for num_tasks in (1, 2):
        vectors = [
            sample_images(Navigation2DVectorEnv(3 * num_tasks, autoreset_mode="Disabled"), 4, num_tasks, copy=copy)
            for copy in (False, True)
        ]
        assert vectors[0].digest() == vectors[1].digest()


def test_buffers_are_as_before_when_a_phase_ends_in_an_error() -> None:
    class Failing(Spied):
        def _step_slots(self, *arguments: Any) -> Any:
            if len(self.drawn) > 2:
                raise OSError("no more steps")
            return super()._step_slots(*arguments)

    env = Failing(6)
    own = env.buffers.observations
    with pytest.raises(OSError, match="no more steps"):
        sample_images(env)
    assert env.buffers.observations is own
