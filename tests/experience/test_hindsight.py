"""Relabeling in hindsight, against the rewards of the environments themselves."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from maml_rl import MultiTaskSampler
from maml_rl.envs import ObservedLastStep, make_vector_env
from maml_rl.envs.families.point import SparsePointGoalVectorEnv
from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.tasks import TaskEntry
from maml_rl.errors import AlgorithmError, ConfigError
from maml_rl.experience import Replay, Steps
from maml_rl.experience.hindsight import Hindsight
from maml_rl.experiment.build import make_experiment
from maml_rl.policies import get_policy_for_env
from tests.metalearners.small_algorithms import small

FAMILIES: dict[str, dict[str, Any]] = {
    "PointGoal-v0": {},
    "SparsePointGoal-v0": {"normalization_scale": 1.0},
    "SemiCircle-v0": {"reward": "nearness"},
    "GridNavi-v0": {},
    "DarkRoom-v0": {"size": 5},
    "PointCorner-v0": {},
}


def sampled(env_id: str, kwargs: dict[str, Any]) -> tuple[Steps, list[Any], Hindsight]:
    """Return trials of two episodes, drawn from a replay, their tasks, and what relabels them."""
    env = ObservedLastStep(env_id)
    single = make_vector_env(env, kwargs, 1)
    policy = get_policy_for_env(single, (4,))
    options: dict[str, Any] = {"slots_per_task": 1, "observe_last": True, "num_workers": 0, "max_episode_steps": 6}
    with MultiTaskSampler(env_id, kwargs, 2, policy, seed=0, **options) as sampler:
        tasks = sampler.sample_tasks(5)
        episodes = sampler.rollout_trials(tasks)
    replay = Replay(1000)
    replay.append(episodes)
    found = [replay.sample_sequences(np.random.default_rng(0), 1, tasks=[task]) for task in tasks]
    names = found[0].tensors()
    trials = Steps.of({name: torch.cat([each.tensors()[name] for each in found], 1) for name in names})
    return trials, tasks, Hindsight(env_id, kwargs, single.single_observation_space, single.single_action_space)


@pytest.mark.parametrize("env_id", FAMILIES)
def test_relabeled_trial_has_the_rewards_of_its_new_task(env_id: str) -> None:
    trials, tasks, hindsight = sampled(env_id, FAMILIES[env_id])
    expected = {name: getattr(trials, name).clone() for name in ("rewards", "observations", "next_observations")}
    # With its own task it is what it was.
    hindsight.relabel(trials, tasks)
    for name, values in expected.items():
        torch.testing.assert_close(getattr(trials, name), values, rtol=1e-5, atol=1e-6)
    other = tasks[1:] + tasks[:1]
    actions = trials.actions.clone()
    hindsight.relabel(trials, other[:3])
    env: Any = make_vector_env(env_id, FAMILIES[env_id], 1)
    for trial in range(3):
        for step in range(len(trials.rewards)):
            # A step from the observed state, by the environment itself.
            env.reset_task([other[trial]])
            env.reset(seed=0)
            own = trials.observations[step, trial, : env.single_observation_space.shape[0]].numpy()
            if hasattr(env, "_position"):
                env._position[0] = own
            else:
                env._cells = np.array(
                    [divmod(int(own.argmax()), env.size)] if env_id == "DarkRoom-v0" else [own], np.int64
                )
            reward = env.step(actions[step, trial : trial + 1].numpy())[1][0]
            assert trials.rewards[step, trial].item() == pytest.approx(reward, abs=1e-5)


@pytest.mark.parametrize("env_id", ["DarkRoom-v0", "PointGoal-v0"])
def test_best_task_of_a_trial_is_the_one_drawn_in_which_it_has_the_highest_return(env_id: str) -> None:
    trials, _, hindsight = sampled(env_id, FAMILIES[env_id])
    before = trials.rewards.clone()
    drawn = make_vector_env(env_id, FAMILIES[env_id], 1).draw_tasks(np.random.default_rng(0), 32)
    found = hindsight.best_tasks(trials, 3, drawn)
    hindsight.relabel(trials, found)
    assert torch.equal(trials.rewards[:, 3:], before[:, 3:])
    highest = trials.rewards[:, :3].sum(0)
    returns = []
    for task in drawn:
        hindsight.relabel(trials, [task] * 3)
        returns.append(trials.rewards[:, :3].sum(0))
    assert torch.equal(torch.stack(returns).amax(0), highest)
    assert len(torch.stack(returns).unique()) >= 4


class EndingPoint(SparsePointGoalVectorEnv):
    """An episode ends at the goal."""

    def _step_slots(self, actions: Any, active: Any, streams: Any) -> Any:
        rewards, _ = super()._step_slots(actions, active, streams)
        return rewards, rewards > 0.0


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("EndingPoint-v0", "EndingPoint-v0 ends episodes in terminal states"),
        ("Wind-v0", "Wind-v0 cannot say the reward for another goal"),
    ],
)
def test_family_without_goals_or_that_ends_at_one_is_refused_before_training(
    env_id: str, message: str, request: pytest.FixtureRequest
) -> None:
    gymnasium.register("EndingPoint-v0", vector_entry_point=EndingPoint)
    request.addfinalizer(lambda: gymnasium.registry.pop("EndingPoint-v0"))
    with pytest.raises(ConfigError, match=f"hindsight-share' in .*{message}"):
        make_experiment(
            small("amago", env_name=env_id, max_episode_steps=6).override(
                {"algorithm-settings": {"hindsight-share": 0.5}}
            )
        )


def test_trial_with_an_end_that_no_random_episode_had_is_refused() -> None:
    trials, tasks, hindsight = sampled("SparsePointGoal-v0", FAMILIES["SparsePointGoal-v0"])
    trials.terminations[2, 4] = True
    with pytest.raises(AlgorithmError, match="SparsePointGoal-v0 ends episodes in terminal states"):
        hindsight.relabel(trials, tasks[:1])


class Lines(BatchedFamily):
    """A point on a line of five places, which is observed as a number or as two places; a task is the one that pays."""

    default_steps = 6
    task_description = "place (): which pays"

    def __init__(self, num_envs: int = 1, *, seen: gymnasium.Space[Any], **options: Any) -> None:
        super().__init__(num_envs, seen, spaces.Discrete(2), {"place": TaskEntry(())}, **options)
        self._places, self.given = np.zeros(num_envs, np.int64), list[Any]()

    def draw_tasks(self, random: np.random.Generator, num_tasks: int) -> list[Any]:
        return [{"place": float(place)} for place in random.integers(5, size=num_tasks)]

    def _reset_slots(self, mask: Any, streams: Any) -> None:
        self._places[slice(None) if mask is None else mask] = 0

    def _step_slots(self, actions: Any, active: Any, streams: Any) -> Any:
        self._places = (self._places + actions) % 5
        return (self._places == self.tasks["place"]).astype(float), False

    def _write_observations(self, out: Any) -> None:
        if out.ndim == 1:
            out[:] = 3 + self._places
        else:
            out[:] = self._places.reshape(-1, 1, 1)

    def rewards_between(self, before: Any, after: Any) -> Any:
        assert len(before) == len(after) == len(self.tasks["place"])
        self.given.append((before, after))
        places = after - 3 if after.ndim == 1 else after[:, 0, 0]
        return (places == self.tasks["place"]).astype(float)


@pytest.mark.parametrize(
    "seen", [spaces.Discrete(5, start=3), spaces.Box(0.0, 4.0, (1, 2), np.float64)], ids=["discrete", "box"]
)
def test_rewards_between_gets_observations_as_the_family_returns_them(
    seen: gymnasium.Space[Any], request: pytest.FixtureRequest
) -> None:
    gymnasium.register("Lines-v0", vector_entry_point=Lines)
    request.addfinalizer(lambda: gymnasium.registry.pop("Lines-v0"))
    trials, tasks, hindsight = sampled("Lines-v0", {"seen": seen})
    expected = trials.rewards.clone()
    hindsight.relabel(trials, tasks)
    assert torch.equal(trials.rewards, expected)
    ((before, after),) = hindsight._family.given
    for given in (before, after):
        assert given.shape == (trials.rewards.numel(), *(seen.shape or ()))
        assert given.dtype == seen.dtype
