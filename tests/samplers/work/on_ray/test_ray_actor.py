"""An actor in this process: who has raised, and when it has all the time that it needs."""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from faulty_env import FaultyEnv
from faulty_sampler import Broken
from ray import cloudpickle

from maml_rl.envs.make_env import Recipe
from maml_rl.errors import ChildEnvError, RemoteError
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers.failures import Failed, error_of
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.policy_copies import state_of
from maml_rl.samplers.work.body import Body
from maml_rl.samplers.work.ray.actor import Job, RolloutActor, Sampled, for_store
from maml_rl.samplers.worker_progress import IN_RESET_TASK, IN_UPDATE, PhaseAbandonedError
from maml_rl.seeding import PhaseStreams

pytestmark = [pytest.mark.ray, pytest.mark.timeout(60)]


class Probe(RolloutActor):
    """An actor with a method that calls what it is given."""

    def probe(self, function: Any) -> Any:
        return function()


def sampled(
    policy: NormalMLPPolicy, monkeypatch: pytest.MonkeyPatch, slots: slice = slice(0, 2), **fault: Any
) -> tuple[Probe, Any]:
    """Return an actor, and its reply to a phase of two tasks."""
    recipe = Recipe.of(partial(FaultyEnv, **fault), {}, 5)
    stored = for_store(cloudpickle.dumps(recipe), cloudpickle.dumps(policy), needs_modules=False)
    monkeypatch.setattr(ray, "get", lambda reference: stored)
    tasks = ({"goal": 1.0}, {"goal": 2.0})
    phase = Phase(tasks, policy, None, PhaseStreams(0, 0, 0), 1, 5).without_policy()
    actor = Probe()
    of_phase = phase, state_of(policy), False
    return actor, actor.carry_out(0, "run", Job(0, [None]), of_phase, None, slots)


def test_policy_and_environment_that_raise_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reply = sampled(Broken(2, 1, (4,)), monkeypatch)
    assert isinstance(reply, Failed)
    error = error_of([("an actor", reply)], "faulty")
    assert isinstance(error, RemoteError)
    assert error.summary.startswith("ValueError in ")
    assert error.summary.endswith(": no actor")
    _, reply = sampled(NormalMLPPolicy(2, 1, (4,)), monkeypatch, fault="raise", place=2)
    assert isinstance(error_of([("an actor", reply)], "faulty"), ChildEnvError)
    assert (reply.doing, reply.cannot_load) == ("in step 2", False)


def test_actor_that_computes_says_so_except_while_it_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = NormalMLPPolicy(2, 1, (4,))
    actor, reply = sampled(policy, monkeypatch)
    assert isinstance(reply, Sampled)
    assert actor.look(False).steps != IN_UPDATE
    phase = Phase(({"goal": 1.0},), policy, None, PhaseStreams(0, 0, 0), 1, 5)

    def compute(self: Any, request: Any, policy: Any, sample: Any, get: Any) -> dict[int, Any]:
        self.beat()
        before = actor.look(False).steps
        sample(phase)
        return {0: (before, actor.look(False).steps)}

    monkeypatch.setattr(Body, "compute", compute)
    assert actor.carry_out(1, "work", Job(0, [None]), None).result == {0: (IN_UPDATE, IN_UPDATE)}


def test_call_that_is_abandoned_before_or_while_it_runs_has_no_reply() -> None:
    actor, done = Probe(), []
    actor.abandon((3, 5))

    def abandoned() -> int:
        actor.abandon((7,))
        done.append(int(actor._progress.generation[0]))
        actor.abandon((4,))
        done.append(int(actor._progress.generation[0]))
        raise PhaseAbandonedError

    assert [actor.carry_out(number, "probe", lambda: "reply") for number in (2, 3)] == ["reply", None]
    assert actor.carry_out(4, "probe", abandoned) is None
    assert done == [4, -1]
    assert [actor.carry_out(number, "probe", lambda: "reply") for number in (5, 6, 7)] == [None, "reply", None]


def test_every_call_begins_with_a_mark_of_its_own_before_the_first_step() -> None:
    actor = Probe()
    actor._progress.steps[0], actor._progress.current_slots[0], actor._progress.heartbeats[0] = 4, 3, 0.0
    look = actor.carry_out(1, "probe", lambda: actor.look(False))
    assert look.mark[:2] == (1, -1)
    assert look.mark[2] > 0.0
    assert (look.steps, look.slot) == (IN_RESET_TASK, None)


def test_slot_and_steps_of_an_actor_are_those_of_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, reply = sampled(NormalMLPPolicy(2, 1, (4,)), monkeypatch, slice(1, 2), fault="raise", place=0)
    assert (reply.doing, reply.slot) == ("in step 0", 1)
    actor._progress.steps[0] = 0
    look = actor.look(False)
    assert (look.steps, look.slot, look.task) == (0, 1, "{'goal': 2.0}")


def test_only_a_failed_import_before_the_environment_is_made_leaves_out_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor, _ = sampled(NormalMLPPolicy(2, 1, (4,)), monkeypatch)

    def fail(*arguments: Any) -> Any:
        raise ImportError("no libGL")

    reply = actor.carry_out(1, "probe", fail)
    assert (reply.cannot_load, reply.difference, reply.slot) == (True, "", None)
    monkeypatch.setattr(Body, "compute", fail)
    assert not actor.carry_out(2, "work", Job(0, [None]), None).cannot_load


def test_environments_are_closed_after_an_error_and_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Body] = []
    monkeypatch.setattr(Body, "forget", lambda body: closed.append(body))
    _, reply = sampled(NormalMLPPolicy(2, 1, (4,)), monkeypatch, fault="leave", place=2)
    assert (reply.error, reply.message) == ("SystemExit", "enough")
    assert len(closed) == 1
    actor, _ = sampled(NormalMLPPolicy(2, 1, (4,)), monkeypatch)
    for number in (1, 2):
        assert actor.carry_out(number, "forget", Job(0, [None])) is None
    assert len(closed) == 2


def test_actor_keeps_what_it_has_loaded_and_sends_no_steps_past_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(slots: Any, phase: Phase, arrays: Any, timer: Any) -> None:
        arrays.lengths[:] = 3

    monkeypatch.setattr("maml_rl.samplers.work.ray.actor.sample_phase", fill)
    policy = NormalMLPPolicy(2, 1, (4,))
    actor, reply = sampled(policy, monkeypatch)
    (block,) = reply.result
    assert block.rewards.shape[1] == 3
    loaded = actor._hosted(Job(0, [None]))
    assert actor._hosted(Job(0, [None])) == loaded
