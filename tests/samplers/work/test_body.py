"""What a worker does with its slots, in this process."""

from functools import partial

import numpy as np
import pytest
from faulty_env import FaultyEnv

from maml_rl.envs.meta_env import EnvDescription
from maml_rl.policies import NormalMLPPolicy
from maml_rl.profiling import NULL_TIMER
from maml_rl.samplers.env_recipe import Recipe
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.work.body import Body
from maml_rl.samplers.worker_progress import Progress
from maml_rl.seeding import PhaseStreams

TASKS = ({"goal": 1.0}, {"goal": 7.0}, {"goal": 3.0})


def body_of(**fault: object) -> Body:
    return Body(Recipe.of(partial(FaultyEnv, **fault), {}, 5), Progress.here(), 0)


def run(body: Body, first: int, last: int) -> EpisodeArrays:
    """Return the episodes of some of the tasks, two of each."""
    policy = NormalMLPPolicy(2, 1, (4,))
    for param in policy.parameters():
        param.data.fill_(0.1)
    phase = Phase(TASKS, policy, None, PhaseStreams(0, 0, 0), 2, 5).unit(slice(2 * first, 2 * last))
    slots = EnvDescription.of(body.slots(2 * (last - first)))
    arrays = EpisodeArrays.allocate(EpisodeArrays.layout(slots, *phase.sizes))
    body.run(phase, 2 * first, arrays, NULL_TIMER)
    return arrays


def test_fewer_slots_are_the_first_of_those_that_there_are_and_more_are_made() -> None:
    body = body_of()
    whole = run(body, 0, 3)
    assert body.slots(6) is body.slots(6)
    assert body.slots(2) is body.slots(2)
    assert body.slots(2).envs[0] is body.slots(6).envs[0]  # type: ignore[attr-defined]
    for first, last in ((0, 1), (1, 3), (2, 3)):
        part = run(body, first, last)
        np.testing.assert_array_equal(part.rewards, whole.rewards[first:last])
    made = body.slots(6)
    assert body.slots(8) is not made
    assert body.any_slots() is body.slots(8)
    body.close()


def test_failure_names_slot_and_task_and_whether_the_environment_raised() -> None:
    body = body_of(fault="raise", place=2, slot_task=7.0)
    with pytest.raises(RuntimeError) as raised:
        run(body, 1, 3)
    failure = body.failed(0, raised.value, of_env=False)
    assert (failure.slot, failure.task, failure.of_env) == (2, "{'goal': 7.0}", True)
    other = body_of()
    run(other, 0, 1)
    failure = other.failed(0, ValueError("of a learner"), of_env=False)
    assert (failure.of_env, other.failed(0, ValueError(), of_env=True).of_env) == (False, True)
    for each in (body, other):
        each.close()
