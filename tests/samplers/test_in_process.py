"""Slots in this process: what their environments raise is one error that names slot, task and step."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from faulty_env import HORIZON, FaultyEnv
from faulty_sampler import PLACES, TASKS, error_of, faulty_sampler

from maml_rl import MultiTaskSampler
from maml_rl.errors import ChildEnvError, explain
from maml_rl.policies import NormalMLPPolicy

pytestmark = [pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    ("place", "fault"), [*((place, "raise_os") for place in PLACES), (3, "leave_quietly"), (3, "raise_unpicklable")]
)
def test_error_of_an_environment_here_names_environment_slot_task_and_step(fault: str, place: Any) -> None:
    error = error_of(fault, place, num_workers=0)
    name = {"leave_quietly": "SystemExit", "raise_os": "OSError", "raise_unpicklable": "UnpicklableError"}[fault]
    told = str(error)
    assert told.startswith("faulty_env.FaultyEnv raised in slot 0")
    assert f", {PLACES[place]}: {name} in " in told or "<no text" in told
    assert "\n" not in told
    assert explain(error) in told
    assert type(error.__cause__).__name__ == name
    if place in ("reset_task", "reset", 3):
        assert "with the task {'goal': 1.0}" in told


@pytest.mark.parametrize("stepping", ["serial", "threads"])
def test_slot_that_raises_is_the_one_that_is_named(stepping: str) -> None:
    # Both slots of the task raise; in threads either may be the first.
    slot = "2" if stepping == "serial" else "[23]"
    with (
        faulty_sampler({"fault": "raise", "place": 1, "slot_task": 7.0}, num_workers=0, stepping=stepping) as sampler,
        pytest.raises(ChildEnvError, match=rf"in slot {slot} with the task {{'goal': 7.0}}, in step 1: .*out of"),
    ):
        sampler.rollout(TASKS)


def test_ctrl_c_in_an_environment_of_this_process_is_not_wrapped() -> None:
    with faulty_sampler({"fault": "interrupt", "place": 1}, num_workers=0) as sampler, pytest.raises(KeyboardInterrupt):
        sampler.rollout(sampler.sample_tasks(2))


@pytest.mark.parametrize("stepping", ["serial", "threads"])
def test_sampler_continues_after_an_error_in_this_process(stepping: str, tmp_path: Path) -> None:
    fault = {"fault": "raise_os", "place": 2, "marker": str(tmp_path / "once")}
    with faulty_sampler(fault, num_workers=0, stepping=stepping) as sampler:
        tasks = sampler.sample_tasks(2)
        with pytest.raises(ChildEnvError):
            sampler.rollout(tasks)
        again = sampler.rollout(tasks).digest()
    with faulty_sampler(None, num_workers=0) as sampler:
        assert sampler.rollout(sampler.sample_tasks(2)).digest() == again


def test_environment_is_freed_after_its_last_use_without_the_garbage_collector() -> None:
    made: list[Any] = []

    class Counted(FaultyEnv):
        def __init__(self) -> None:
            super().__init__()
            made.append(weakref.ref(self))

    policy = NormalMLPPolicy(2, 1, (4,), "tanh")
    gc.collect()
    gc.disable()
    try:
        with MultiTaskSampler(Counted, {}, 2, policy, num_workers=0, max_episode_steps=HORIZON) as sampler:
            sampler.rollout(sampler.sample_tasks(1))
        del sampler
        # The collector of a forked child, which inherits the environment, must not find it.
        assert [env() for env in made] == [None] * len(made) != []
    finally:
        gc.enable()
