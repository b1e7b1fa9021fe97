"""A fault costs the sampler time, never data: its episodes are bit-identical to those of an undisturbed run."""

from pathlib import Path
from typing import Any

import pytest
from faulty_env import HORIZON
from faulty_sampler import digests, faulty_sampler
from trials import Recurrent, sample

from maml_rl import MultiTaskSampler
from maml_rl.envs.global_generators import seeded_generators
from maml_rl.errors import ChildEnvError, ChildEnvTimeout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

NUM_TASKS = 3


def make_sampler(num_workers: int, fault: dict[str, Any] | None = None, **options: Any) -> MultiTaskSampler:
    # Faults of workers that act by themselves are tested in work/child/test_child_backend.py.
    return faulty_sampler(fault, num_workers=num_workers, start_method="fork", inference="central", **options)


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    return digests(make_sampler(0), NUM_TASKS)


# One for each use of workers; `work/child/test_faults.py` has a death at every place.
@pytest.mark.parametrize(("fault", "place"), [("kill", "sample_tasks"), ("segfault", HORIZON - 1)])
def test_episodes_are_bit_identical_after_a_death(
    fault: str, place: Any, undisturbed: list[str], tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    sampler = make_sampler(2, {"fault": fault, "place": place, "marker": str(marker)})
    assert digests(sampler, NUM_TASKS) == undisturbed
    assert marker.exists()


@pytest.mark.parametrize(("fault", "error"), [("raise", ChildEnvError), ("hang", ChildEnvTimeout)])
def test_sampler_can_be_used_after_an_error_and_continues_as_if_there_had_been_none(
    fault: str, error: type[Exception], undisturbed: list[str], tmp_path: Path
) -> None:
    faulty = {"fault": fault, "place": 3, "marker": str(tmp_path / "marker")}
    with make_sampler(2, faulty, step_timeout=1.0) as sampler:
        tasks = sampler.sample_tasks(NUM_TASKS)
        with pytest.raises(error):
            sampler.rollout(tasks)
        assert [sampler.rollout(tasks).digest() for _ in range(2)] == undisturbed


def test_child_that_always_dies_ends_the_phase_with_an_error() -> None:
    with (
        make_sampler(2, {"fault": "kill", "place": 2}, max_restarts=1) as sampler,
        pytest.raises(ChildEnvError, match="died 2 times in one phase"),
    ):
        sampler.rollout(sampler.sample_tasks(NUM_TASKS))


@pytest.mark.parametrize(("inference", "episode", "step"), [("worker", 2, 2), ("central", 3, "reset")])
def test_trials_are_bit_identical_after_a_worker_died_during_one(
    inference: str, episode: int, step: Any, tmp_path: Path
) -> None:
    with seeded_generators(0):
        policy = Recurrent()
    fault = {"fault": "kill", "place": step, "marker": str(tmp_path / "marker"), "in_episode": episode}
    found = sample(policy, 2, fault, inference=inference)
    assert (tmp_path / "marker").exists()
    assert found.digest() == sample(policy).digest()
