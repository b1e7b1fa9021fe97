"""An actor in this process: who has raised, and when it has all the time that it needs."""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from faulty_env import FaultyEnv
from ray import cloudpickle

from maml_rl.envs.make_env import Recipe
from maml_rl.errors import ChildEnvError, RemoteError
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers.failures import error_of
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.policy_copies import state_of
from maml_rl.samplers.work.ray.actor import Job, PhaseData, Raised, RolloutActor, Sampled, Stored
from maml_rl.seeding import PhaseStreams

pytestmark = [pytest.mark.ray, pytest.mark.timeout(60)]


class Broken(NormalMLPPolicy):
    """A policy that cannot act."""

    stateless = True

    def actor(self, params: Any, first_task: int = 0) -> Any:
        raise ValueError("no actor")


def sampled(policy: NormalMLPPolicy, monkeypatch: pytest.MonkeyPatch, **fault: Any) -> tuple[RolloutActor, Any]:
    """Return an actor, and its reply to a phase of two tasks."""
    recipe = Recipe.of(partial(FaultyEnv, **fault), {}, 5)
    stored = Stored.of(cloudpickle.dumps(recipe), cloudpickle.dumps(policy), needs_modules=False)
    monkeypatch.setattr(ray, "get", lambda reference: stored)
    tasks = ({"goal": 1.0}, {"goal": 2.0})
    phase = Phase(tasks, policy, None, PhaseStreams(0, 0, 0), 1, 5).without_policy()
    actor = RolloutActor()
    data = PhaseData(phase, state_of(policy), timed=False)
    return actor, actor.carry_out(0, "run", Job(0, [None]), data, None, slice(0, 2))


def test_policy_and_environment_that_raise_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reply = sampled(Broken(2, 1, (4,)), monkeypatch)
    assert isinstance(reply, Raised)
    error = error_of([("an actor, in run,", reply.failure)], "faulty")
    assert isinstance(error, RemoteError)
    assert error.summary.startswith("ValueError in ")
    assert error.summary.endswith(": no actor")
    _, reply = sampled(NormalMLPPolicy(2, 1, (4,)), monkeypatch, fault="raise", place=2)
    assert isinstance(error_of([("an actor, in step 2,", reply.failure)], "faulty"), ChildEnvError)
    assert (reply.steps, reply.cannot_load) == (2, False)


def test_actor_that_computes_says_so_until_it_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = NormalMLPPolicy(2, 1, (4,))
    actor, reply = sampled(policy, monkeypatch)
    assert isinstance(reply, Sampled)
    assert not actor.look(False).updating
    seen = []

    def compute(self: Any, *arguments: Any) -> dict[int, Any]:
        self.beat()
        seen.append(actor.look(False).updating)
        return {}

    monkeypatch.setattr("maml_rl.samplers.work.body.Body.compute", compute)
    actor.carry_out(1, "work", Job(0, [None]), None)
    assert seen == [True]
