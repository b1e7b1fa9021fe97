"""A task distribution that a config would refuse is refused by a sampler that gets it directly."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from maml_rl import MultiTaskSampler
from maml_rl.errors import TaskError
from maml_rl.policies import MLPPolicy, get_policy_for_env
from maml_rl.task_distributions import FamilyTasks, FixedTasks, Split, TaskDistribution, TaskList

FAMILY = "2DNavigation-v0"


class Own(TaskDistribution):
    """Draws what it was made with."""

    def __init__(self, *tasks: Any) -> None:
        self.tasks = list(tasks)

    def sample(self, family: FamilyTasks, num_tasks: int, rng: np.random.Generator) -> list[Any]:
        return (self.tasks * num_tasks)[:num_tasks]


def policy() -> MLPPolicy:
    import gymnasium

    made = get_policy_for_env(gymnasium.make(FAMILY), (4,))
    assert isinstance(made, MLPPolicy)
    return made


@pytest.mark.parametrize(
    ("distribution", "message", "num_workers"),
    [
        (Split({"goal_0": [-0.4, 0.2]}, {"goal_0": [0.0, 0.4]}), "'train' and 'test' overlap", 0),
        (TaskList(tasks=[{"speed": 1.0}]), "task 1 in the distribution: .*unknown entry 'speed'", 0),
        (FixedTasks(train=2, test=2), "a batch has distinct tasks, and there are 2 training tasks", 0),
        (Own({"speed": 1.0}), "task 1 in the first draw of Own: .*unknown entry 'speed'", 0),
        (Own({"goal": [0.0]}), "task 1 in the first draw of Own: .*goal", 1),
        (Own(3), r"the first draw of Own has \[3, 3, 3\]; a task is a dict", 0),
        (Own(), "Own was asked for 3 tasks and drew 0", 0),
    ],
)
@pytest.mark.usefixtures("forked_workers")
def test_every_rule_of_a_check_holds_for_a_sampler(
    distribution: TaskDistribution, message: str, num_workers: int
) -> None:
    with (
        MultiTaskSampler(
            FAMILY, policy=policy(), batch_size=2, num_workers=num_workers, seed=0, task_distribution=distribution
        ) as sampler,
        pytest.raises((ValueError, TaskError), match=message) as caught,
    ):
        sampler.sample_tasks(3)
    assert "\n" not in str(caught.value)


def test_distribution_is_checked_once_for_each_family() -> None:
    tried: list[Sequence[Any]] = []
    split = Split({"goal_0": [-0.4, -0.1]}, {"goal_0": [0.1, 0.4]})
    with MultiTaskSampler(FAMILY, policy=policy(), num_workers=0, seed=0) as sampler:
        space = sampler.env.task_space
    for name in ("a", "a", "b"):
        split.admit(FamilyTasks(name, space, lambda count, seed: []), tried.append)
    assert len(tried) == 2
