"""Updates in the actors of a real cluster of three nodes: bit-identical to updates in this process, with any faults."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("ray")

import psutil
from cluster_on_this_machine import actor_processes
from hosted_learning import config_of, learn, learned_here

from maml_rl import MultiTaskSampler
from maml_rl.derivatives import chunks
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.metalearners import trial_ppo
from tests.metalearners.outside_learner import learned, make_learner

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

IN_WORKERS = {"backend": "ray", "update": "workers", "max-restarts": 100}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The actors remain from test to test."""


@pytest.fixture(scope="module", autouse=True)
def small_chunks(connected: Any) -> Iterator[None]:
    """Several chunks of few tasks; no actor may remain after the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_CPU_CHUNK", (1 << 10, 1 << 12))
        patch.setattr(trial_ppo, "_CHUNK", 1)
        yield
    _, alive = psutil.wait_procs(actor_processes(), timeout=60)
    assert not alive


@pytest.fixture(scope="module")
def sampler(small_chunks: None) -> Iterator[MultiTaskSampler]:
    """A sampler of perceptrons, on three actors."""
    with make_sampler(make_experiment(config_of("maml-trpo", **IN_WORKERS)), num_workers=3) as made:
        yield made


def test_loss_from_outside_of_the_package_learns_the_same_bytes_on_actors() -> None:
    here, there = (learned(make_learner(**given), number) for given, number in (({}, 0), ({"backend": "ray"}, 2)))
    assert {name: value.tolist() for name, value in there.items()} == {name: x.tolist() for name, x in here.items()}


def test_learner_of_trials_has_the_bytes_of_an_update_in_this_process() -> None:
    experiment = make_experiment(config_of("rl2", **IN_WORKERS))
    with make_sampler(experiment, num_workers=2) as made:
        assert learn(experiment, made, 3, on_hosts=True) == learned_here("rl2", 3)


def test_actors_that_are_killed_in_all_stages_change_no_byte(sampler: MultiTaskSampler) -> None:
    over, killed = threading.Event(), []

    def kill_now_and_then() -> None:
        choice = random.Random(0)
        while not over.wait(choice.uniform(0.2, 1.0)):
            actors = [process for process in actor_processes() if process.pid not in killed]
            # One actor survives, so that there is progress; every start takes seconds.
            if len(actors) > 1 and len(killed) < 4:
                victim = choice.choice(actors).pid
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    killed.append(victim)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    expected = learned_here("maml-trpo", 8)
    try:
        assert learn(make_experiment(config_of("maml-trpo")), sampler, 8, on_hosts=True) == expected
    finally:
        over.set()
        killer.join()
    assert killed
