"""Observations and actions of every kind; `test_plain_loop.py` samples them in every placement."""

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.baseline import make_baseline
from maml_rl.envs import make_vector_env
from maml_rl.experiment.evaluate import evaluate_trials
from maml_rl.metalearners import MAMLTRPO
from maml_rl.samplers.plain_loop import SampledActions
from tests.envs.third_party import DictEnv, KnobsEnv, PixelEnv, SwitchesEnv, WalkEnv
from tests.numbered_env import NumberedEnv

KINDS: dict[str, Any] = {
    "float64 observations": WalkEnv,
    "parts and float64 actions": DictEnv,
    "several choices": KnobsEnv,
    "switches": SwitchesEnv,
    "images": PixelEnv,
    "a batched family of images": "PixelNavigation-v0",
}


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_have_the_type_of_the_space_and_an_update_the_type_of_the_policy(kind: str) -> None:
    with closing(make_vector_env(KINDS[kind])) as env:
        policy = get_policy_for_env(env, (8,), "tanh")
        observation_space, action_space = env.single_observation_space, env.single_action_space
    settings: dict[str, Any] = {"batch_size": 3, "seed": 0, "max_episode_steps": 5, "num_workers": 0}
    baseline = make_baseline("linear", observation_space)
    with MultiTaskSampler(KINDS[kind], {}, policy=policy, baseline=baseline, **settings) as sampler:
        train, valid = sampler.sample(sampler.sample_tasks(4), num_steps=1, fast_lr=0.1)
    for episodes in (*train, valid):
        assert episodes.observations.numpy().dtype == observation_space.dtype
        assert episodes.actions.numpy().dtype == action_space.dtype
        assert policy.log_prob(episodes.observations, episodes.actions).dtype == torch.float32
    before = [param.clone() for param in policy.parameters()]
    metrics = MAMLTRPO(policy, 0.1).step(train, valid, cg_damping=1e-2, ls_backtrack_ratio=0.5)
    assert metrics["accepted"]
    assert any(not torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))


@pytest.mark.parametrize("pairs", [False, True])
def test_actions_are_counted_from_zero_wherever_those_of_the_environment_start(pairs: bool) -> None:
    found = set()
    for start in (0, -5):
        policy = SampledActions(NumberedEnv(start, pairs).action_space)
        settings: dict[str, Any] = {"seed": 0, "num_workers": 0, "max_episode_steps": 5, "observe_last": True}
        with MultiTaskSampler(NumberedEnv, {"start": start, "pairs": pairs}, 4, policy, **settings) as sampler:
            episodes = sampler.rollout(sampler.sample_tasks(3))
        numbers = episodes.actions[..., 0] if pairs else episodes.actions
        paid = torch.tensor([task["paid"] for task in episodes.tasks]).reshape(-1, 1, 1)
        assert torch.equal((numbers == paid) & (episodes.mask > 0), episodes.rewards > 0)
        found.add(episodes.digest())
    assert len(found) == 1


def test_policies_of_other_people_return_actions_as_the_environment_has_them() -> None:
    class Last:
        def reset(self, num_tasks: int) -> None: ...

        def act(self, observations: Any, rewards: Any, dones: Any) -> Any:
            return np.full(len(observations), -3)

    tasks = [{"paid": paid} for paid in range(3)]
    found = evaluate_trials(Last(), NumberedEnv, tasks, 1, env_kwargs={"start": -5}, max_episode_steps=4)
    assert np.ravel(found.returns).tolist() == [0.0, 0.0, 4.0]
