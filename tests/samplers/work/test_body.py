"""What a worker does with its slots, in this process."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from faulty_env import FaultyEnv, RetryingEnv

from maml_rl.envs.calls import CallRules
from maml_rl.envs.make_env import Recipe
from maml_rl.envs.meta_env import EnvDescription
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.loop import sample_phase
from maml_rl.samplers.work.body import Body
from maml_rl.samplers.worker_progress import IN_SAMPLE_TASKS, IN_UPDATE, MAKING, Progress
from maml_rl.seeding import PhaseStreams

TASKS = ({"goal": 1.0}, {"goal": 7.0}, {"goal": 3.0})


def of_two() -> Progress:
    return Progress({name: np.zeros(shape, dtype) for name, (shape, dtype) in Progress.layout(2).items()})


def body_of(progress: Progress | None = None, **fault: object) -> Body:
    """Return that of the second of two workers."""
    return Body(Recipe.of(partial(FaultyEnv, **fault), {}, 5), progress or of_two(), 1)


def run(body: Body, first: int, last: int, generation: int = 0) -> EpisodeArrays:
    """Return the episodes of some of the tasks, two of each."""
    policy = NormalMLPPolicy(2, 1, (4,))
    for param in policy.parameters():
        param.data.fill_(0.1)
    phase = Phase(TASKS, policy, None, PhaseStreams(0, 0, 0), 2, 5).unit(slice(2 * first, 2 * last))
    body.generation = generation
    slots = body.slots_of(phase, 2 * first)
    arrays = EpisodeArrays.allocate(EpisodeArrays.layout(EnvDescription.of(slots), *phase.sizes))
    sample_phase(slots, phase, arrays)
    return arrays


def test_fewer_slots_are_the_first_of_those_that_there_are_and_more_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, doing, usual = of_two(), list[int](), Recipe.make

    def make(recipe: Recipe, *arguments: Any, **options: Any) -> Any:
        doing.append(int(progress.steps[1]))
        return usual(recipe, *arguments, **options)

    monkeypatch.setattr(Recipe, "make", make)
    progress.steps[1] = 3
    body = body_of(progress)
    whole = run(body, 0, 3)
    assert (progress.physics_seconds > 0.0).tolist() == [False, True]
    assert body.slots(6) is body.slots(6)
    assert body.slots(2) is body.slots(2)
    assert body.slots(2).envs[0] is body.slots(6).envs[0]  # type: ignore[attr-defined]
    for first, last in ((0, 1), (1, 3), (2, 3)):
        part = run(body, first, last)
        np.testing.assert_array_equal(part.rewards, whole.rewards[first:last])
    made, progress.heartbeats[1], progress.steps[1] = body.slots(6), 0.0, IN_SAMPLE_TASKS
    assert body.slots(8) is not made
    # What is made for other work is told as that, and then the work again.
    assert doing == [MAKING, MAKING]
    assert progress.steps.tolist() == [0, IN_SAMPLE_TASKS]
    assert progress.heartbeats[1] > 0.0
    assert body.any_slots() is body.slots(8)
    body.close()


def test_slots_that_cannot_be_divided_are_kept_in_two_numbers() -> None:
    body = Body(Recipe.of("2DNavigation-v0", {}, 5), Progress.here(), 0)
    four, two = body.slots(4), body.slots(2)
    assert (two.num_envs, body.slots(4), body.slots(2)) == (2, four, two)
    assert body.slots(3).num_envs == 3
    assert body.slots(4) is not four
    body.close()


def test_failure_names_slot_and_task_and_whether_the_environment_raised() -> None:
    body = body_of(fault="raise", place=2, slot_task=7.0)
    with pytest.raises(RuntimeError) as raised:
        run(body, 1, 3)
    failure = body.failed(0, raised.value, of_env=False)
    assert (failure.slot, failure.task, failure.of_env) == (2, "{'goal': 7.0}", True)
    other = body_of(fault="raise", place="make")
    with pytest.raises(RuntimeError) as raised:
        run(other, 0, 1)
    assert other.failed(0, raised.value, of_env=False).of_env
    other = body_of()
    run(other, 0, 1)
    failure = other.failed(0, ValueError("of a learner"), of_env=False)
    assert (failure.of_env, other.failed(0, ValueError(), of_env=True).of_env) == (False, True)
    for each in (body, other):
        each.close()


def test_retries_and_waiting_are_counted_since_the_last_time() -> None:
    recipe, closed = Recipe.of(RetryingEnv, {}, 5, CallRules(stepping="threads")), RetryingEnv.closed
    body = Body(recipe, Progress.here(), 0)
    for _ in range(2):
        body.slots(2).reset_buffers(np.arange(2))
        retries, waited = body.take_counts()
        assert (retries, waited >= 0.01) == (2, True)
        assert body.take_counts() == (0, 0.0)
        body.close()
    assert RetryingEnv.closed == closed + 4


def test_computing_shows_life_and_keeps_one_policy_until_another_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = of_two()
    body, events = body_of(progress, fault="raise", place=2), list[Any]()

    class Kept:
        def __init__(self, policy: Any, sample: Any, get: Any, beat: Any) -> None:
            events.append(policy)

        def carry_out(self, request: Any) -> Any:
            if request == "raise":
                raise ValueError("of a learner")
            events.append((request, int(progress.steps[1]), progress.heartbeats[1] > 0.0))
            return {0: "answer"}

        def forget(self) -> None:
            events.append("forgotten")

    def compute(request: str) -> Any:
        return body.compute(request, lambda: "policy", None, None)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr("maml_rl.samplers.remote_store.KeptBlocks", Kept)
    assert [compute("one"), compute("two")] == [{0: "answer"}] * 2
    body.forget()
    body.forget_policy()
    compute("three")
    shown = [(request, IN_UPDATE, True) for request in ("one", "two", "three")]
    assert events == ["policy", *shown[:2], "forgotten", "policy", shown[2]]
    with pytest.raises(RuntimeError):
        run(body, 0, 1)
    with pytest.raises(ValueError, match="of a learner") as raised:
        compute("raise")
    assert not body.failed(0, raised.value, of_env=False).of_env
    body.close()
