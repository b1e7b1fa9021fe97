"""The rollout, tested on an environment whose every number can be predicted."""

import inspect
import textwrap
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from phases import sample_here

from maml_rl import MultiTaskSampler
from maml_rl.envs import ObservedLastStep, make_vector_env
from maml_rl.envs.serial import SerialVectorEnv
from maml_rl.errors import NonFiniteError
from maml_rl.policies import GRUPolicy, NormalMLPPolicy, performed
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.loop import _Loop
from maml_rl.seeding import PhaseStreams

HORIZON = 6
STREAMS = PhaseStreams(0, 0, 0)


class CountingEnv(gymnasium.Env):
    """Observes (task, seed, step); ends at the task's length; the reward is 100 * task + step."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, terminates: bool = True) -> None:
        self.terminates = terminates
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
        observation = self._observation() * (np.nan if poison == "observation" else 1.0)
        reward = np.inf if poison == "reward" else reward
        return observation, reward, over and self.terminates, over and not self.terminates, {}

    def _observation(self) -> Any:
        return np.array([self.task["number"], self.start, self.now], np.float64)


def make_tasks(lengths: Sequence[int]) -> list[dict[str, Any]]:
    return [{"number": number, "length": length} for number, length in enumerate(lengths)]


def sample(
    tasks: Sequence[dict[str, Any]],
    episodes_per_task: int = 2,
    slots_per_task: int | None = None,
    horizon: int = HORIZON,
    policy: NormalMLPPolicy | None = None,
    terminates: bool = True,
    streams: PhaseStreams = STREAMS,
    params: Any = None,
) -> Any:
    slots = slots_per_task or episodes_per_task
    vector_env = SerialVectorEnv(lambda: CountingEnv(terminates), num_envs=len(tasks) * slots)
    policy = policy or NormalMLPPolicy(3, 2, (4,), "tanh")
    phase = Phase(tuple(tasks), policy, params, streams, episodes_per_task, horizon, slots_per_task=slots)
    return sample_here(vector_env, phase)


def test_every_slot_gets_its_own_task_and_every_step_its_own_entry() -> None:
    episodes = sample(make_tasks([6, 6, 6]))
    task, step, _ = np.meshgrid(np.arange(3), np.arange(6), np.arange(2), indexing="ij")
    np.testing.assert_array_equal(episodes.observations[..., 0], task)
    np.testing.assert_array_equal(episodes.observations[..., 2], step)
    np.testing.assert_array_equal(episodes.rewards, 100 * task + step + 1)


def test_final_observation_of_every_episode_is_kept() -> None:
    episodes = sample(make_tasks([2, 5, 3]))
    np.testing.assert_array_equal(episodes.final_observations[:, :, 2], [[2, 2], [5, 5], [3, 3]])


def test_short_episodes_are_padded_with_zeros_and_masked() -> None:
    episodes = sample(make_tasks([2, 4]))
    np.testing.assert_array_equal(episodes.lengths, [[2, 2], [4, 4]])
    np.testing.assert_array_equal(episodes.mask[:, :, 0], [[1, 1, 0, 0], [1, 1, 1, 1]])
    for name in ("observations", "actions", "rewards"):
        assert (getattr(episodes, name)[0, 2:] == 0).all(), name
    assert (episodes.actions[1] != 0).all()


def test_termination_and_truncation_stay_apart() -> None:
    assert sample(make_tasks([2, 5])).terminated.all()
    truncated = sample(make_tasks([2, 5]), terminates=False)
    assert truncated.truncated.all()
    assert not truncated.terminated.any()


def test_horizon_truncates_an_episode_that_would_continue() -> None:
    episodes = sample(make_tasks([2, 5]), horizon=3)
    np.testing.assert_array_equal(episodes.lengths[:, 0], [2, 3])
    np.testing.assert_array_equal(episodes.terminated[:, 0], [True, False])
    np.testing.assert_array_equal(episodes.truncated[:, 0], [False, True])
    np.testing.assert_array_equal(episodes.final_observations[1, 0, 2], 3)


def test_float64_observations_stay_float64() -> None:
    assert sample(make_tasks([3])).observations.dtype == torch.float64


def test_actions_are_mean_plus_noise_of_their_own_stream() -> None:
    policy, streams = NormalMLPPolicy(3, 2, (4,), "tanh", init_std=0.5), PhaseStreams(3, 4, 1)
    episodes = sample(make_tasks([6, 6, 6]), policy=policy, streams=streams)
    noise = np.moveaxis(streams.action_noise("normal", 3, range(2), range(6), 2), 0, 1)
    mean = policy(episodes.observations).mean.detach().numpy()
    np.testing.assert_allclose(episodes.actions.numpy(), mean + 0.5 * noise, rtol=1e-5, atol=1e-5)


def test_noise_is_drawn_for_no_more_steps_than_there_can_be() -> None:
    drawn: list[range] = []

    class Recording(PhaseStreams):
        def action_noise(self, kind: Any, num_tasks: int, episodes: range, steps: range, size: int) -> Any:
            drawn.append(steps)
            return super().action_noise(kind, num_tasks, episodes, steps, size)

    sample(make_tasks([6, 6]), streams=Recording(*STREAMS))
    assert drawn == [range(HORIZON)]


def test_each_task_acts_under_its_own_parameters() -> None:
    policy = NormalMLPPolicy(3, 2, (4,), "tanh", init_std=1e-6)
    params = policy.stack_parameters(2)
    params["mu.bias"] = torch.tensor([[5.0, 5.0], [-5.0, -5.0]])
    params = {name: value.detach() for name, value in params.items()}
    actions = sample(make_tasks([4, 4]), policy=policy, params=params).actions
    assert (actions[0] > 0).all()
    assert (actions[1] < 0).all()


def test_waves_sample_the_same_episodes_as_all_slots_at_once() -> None:
    together, waves = sample(make_tasks([6, 3]), 4), sample(make_tasks([6, 3]), 4, slots_per_task=2)
    for name in ("observations", "rewards", "lengths", "final_observations"):
        np.testing.assert_array_equal(getattr(together, name), getattr(waves, name))
    # Another batch shape may round differently.
    np.testing.assert_allclose(together.actions, waves.actions, rtol=1e-5, atol=1e-6)


def test_episodes_have_seeds_of_their_own_and_another_phase_has_others() -> None:
    first = sample(make_tasks([6, 6]), streams=PhaseStreams(0, 0, 0)).observations[:, 0, :, 1]
    second = sample(make_tasks([6, 6]), streams=PhaseStreams(0, 0, 1)).observations[:, 0, :, 1]
    assert len(np.unique(np.concatenate([first.ravel(), second.ravel()]))) == 8


def test_seed_zero_is_a_seed() -> None:
    digests = [sample(make_tasks([6, 6]), streams=PhaseStreams(seed, 0, 0)).digest() for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("what", ["observation", "reward"])
@pytest.mark.parametrize("step", [2, HORIZON])
def test_value_that_is_not_finite_is_named(what: str, step: int) -> None:
    tasks = make_tasks([6, 6])
    tasks[1]["poison"] = {step: what}
    at = step if what == "observation" else step - 1
    with pytest.raises(NonFiniteError, match=f"the {what} of task 1, episode 0, step {at} is not finite"):
        sample(tasks)


def test_action_that_is_not_finite_is_named() -> None:
    policy = NormalMLPPolicy(3, 2, (4,), "tanh")
    params = {name: value.detach() for name, value in policy.stack_parameters(2).items()}
    params["mu.bias"][1] = torch.nan
    with pytest.raises(NonFiniteError, match="the action of task 1, episode 0, step 0 is not finite"):
        sample(make_tasks([6, 6]), policy=policy, params=params)


def test_thread_count_and_global_random_state_are_left_alone() -> None:
    threads, numpy_state, torch_state = torch.get_num_threads(), np.random.get_state()[1].copy(), torch.get_rng_state()
    sample(make_tasks([3]))
    assert torch.get_num_threads() == threads
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)
    assert torch.equal(torch.get_rng_state(), torch_state)


@pytest.mark.parametrize(
    "options",
    [{"num_workers": 0}, {"num_workers": 2, "inference": "worker"}, {"num_workers": 2}, {"backend": "device"}],
    ids=["here", "in workers", "central", "device"],
)
def test_actions_recorded_before_squashing_reach_the_environment_squashed(
    options: dict[str, Any], forked_workers: None
) -> None:
    with closing(make_vector_env(ObservedLastStep("PointGoal-v0"))) as env:
        policy = GRUPolicy(env.single_observation_space, env.single_action_space, 8, squash=True, seed=1)
    with torch.no_grad():
        policy.head.bias += torch.tensor([4.0, -0.5, 0.3, 0.0])
    settings: dict[str, Any] = {"seed": 0, "observe_last": True, "slots_per_task": 1, "max_episode_steps": 6}
    with MultiTaskSampler("PointGoal-v0", {}, 2, policy, **settings, **options) as sampler:
        episodes = sampler.rollout_trials(sampler.sample_tasks(3))
    own, seen, after = episodes.actions, episodes.observations, episodes.next_observations
    assert (own[..., 0] > 3.0).any()
    moves = 0.1 * torch.tanh(own)
    torch.testing.assert_close(after[..., :2] - seen[..., :2], moves, rtol=0, atol=1e-6)
    # As the policy remembers them.
    torch.testing.assert_close(after[:, :-1, :, 2:4], moves[:, :-1], rtol=0, atol=1e-7)
    torch.testing.assert_close(performed(policy, episodes).actions, moves, rtol=0, atol=1e-7)
    # Outside of a sampler a policy says what the environment gets.
    chosen, _ = policy.choose(seen[0, 0, 0].numpy(), rng=np.random.default_rng(0))
    assert env.single_action_space.contains(chosen)


def test_schedules_that_the_documentation_shows_are_those_of_the_loop() -> None:
    shown = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text()
    for schedule in (_Loop.run_in_lockstep, _Loop.run_by_slot):
        assert textwrap.dedent(inspect.getsource(schedule)) in shown
