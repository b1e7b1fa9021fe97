"""A sampler of `FaultyEnv`, the digests of its episodes, and its errors."""

from functools import partial
from typing import Any

import pytest
from faulty_env import HORIZON, FaultyEnv

from maml_rl import MultiTaskSampler
from maml_rl.errors import ChildEnvError
from maml_rl.policies import NormalMLPPolicy

TASKS = [{"goal": 1.0}, {"goal": 7.0}]
# Where an environment fails, and how errors say it.
PLACES = {
    "make": "while making the environment",
    "sample_tasks": "in sample_tasks",
    "reset_task": "in reset_task",
    "reset": "in reset",
    3: "in step 3",
}


class Broken(NormalMLPPolicy):
    """A policy that cannot act."""

    stateless = True

    def actor(self, params: Any, first_task: int = 0) -> Any:
        raise ValueError("no actor")


def faulty_sampler(fault: dict[str, Any] | None = None, **options: Any) -> MultiTaskSampler:
    """Return a sampler of an environment with such a `fault`, the arguments of `FaultyEnv`."""
    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    env = partial(FaultyEnv, **(fault or {}))
    return MultiTaskSampler(env, {}, 2, policy, seed=5, **{"max_episode_steps": HORIZON, **options})


def digests(sampler: MultiTaskSampler, num_tasks: int) -> list[str]:
    """Return the digests of two phases of the same tasks, and close the sampler."""
    with sampler:
        tasks = sampler.sample_tasks(num_tasks)
        return [sampler.rollout(tasks).digest() for _ in range(2)]


def error_of(fault: str, place: Any, **options: Any) -> ChildEnvError:
    """Return the error of sampling in an environment that fails at one place."""
    with faulty_sampler({"fault": fault, "place": place}, **options) as sampler:
        # Drawing tasks resets a slot, too.
        work = partial(sampler.sample_tasks, 2) if place == "sample_tasks" else partial(sampler.rollout, TASKS)
        with pytest.raises(ChildEnvError) as raised:
            work()
    return raised.value
