"""Workers of different speeds: how they are told from chance, and what is shared out by them."""

from typing import Any

import numpy as np
import pytest

from maml_rl import MultiTaskSampler
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers.phase import weighted_parts
from maml_rl.samplers.processes.phases import WorkerSpeeds
from maml_rl.samplers.processes.worker_hosts import shared_out


def observed(true: list[float], deviation: float, phases: int, seed: int = 0) -> np.ndarray[Any, Any]:
    speeds, random = WorkerSpeeds(len(true)), np.random.default_rng(seed)
    for _ in range(phases):
        seconds = np.exp(deviation * random.standard_normal(len(true))) / np.array(true)
        speeds.observe(np.full(len(true), 100), seconds)
    return speeds.relative()


def test_lasting_speeds_are_found_after_two_phases_and_one_is_not_enough() -> None:
    true = [1.0] * 6 + [1.6, 1.6]
    np.testing.assert_allclose(observed(true, 0.0, 2), np.array(true) / np.mean(true))
    assert observed(true, 0.0, 1).tolist() == [1.0] * 8
    assert observed([2.0], 0.1, 3).tolist() == [1.0]
    found = observed(true, 0.1, 8)
    assert found[6:].min() > 1.2 > 1.05 > found[:6].max()


def test_speeds_that_differ_by_chance_are_almost_equal() -> None:
    estimates = np.array([observed([1.0] * 16, 0.15, 8, seed) for seed in range(50)])
    # The means of eight phases would differ by 0.053.
    assert estimates.std() < 0.02


def test_a_phase_in_which_no_time_was_measured_tells_nothing() -> None:
    speeds = WorkerSpeeds(2)
    for seconds in ([1.0, 2.0], [1.0, 0.0], [1.0, 2.0]):
        speeds.observe(np.array([10, 10]), np.array(seconds))
    np.testing.assert_allclose(speeds.relative(), [4 / 3, 2 / 3])


def test_parts_are_in_proportion_to_weights_and_cover_all_slots() -> None:
    parts = weighted_parts(80, [1.0, 2.0, 1.0])
    assert parts == [slice(0, 20), slice(20, 60), slice(60, 80)]


def test_pieces_go_to_the_fastest_and_to_neighbors_where_speeds_are_alike() -> None:
    assert shared_out([3, 4, 3, 4], [1.0, 1.01, 1.0, 0.99, 1.0, 1.0, 1.0, 1.0]) == [0, 2, 4, 6]
    assert shared_out([3, 4], [1.0, 1.0, 2.0, 1.5]) == [3, 2]
    assert sorted(shared_out([1] * 5, [1.0, 2.0])) == [0, 0, 1, 1, 1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("env", ["HalfCheetahDir-v5", "2DNavigation-v0"])
def test_episodes_are_the_same_for_workers_of_any_speed(env: str) -> None:
    spaces = MultiTaskSampler.spaces(env)
    policy = NormalMLPPolicy(spaces.observation_space.shape[0], spaces.action_space.shape[0], (8,), "tanh", seed=0)

    def sampled(num_workers: int, *speeds: float) -> list[str]:
        with MultiTaskSampler(
            env, {}, 4, policy, seed=0, num_workers=num_workers, max_episode_steps=6, start_method="fork"
        ) as sampler:
            tasks = sampler.sample_tasks(3)
            digests = [sampler.rollout(tasks).digest()]
            for factors in (np.array(speeds), 1.0 / np.array(speeds)):
                if speeds:
                    phases = sampler._workers.backend._phases  # type: ignore[attr-defined]
                    phases.speeds = WorkerSpeeds(num_workers)
                    for _ in range(2):
                        phases.speeds.observe(np.full(num_workers, 10), 1.0 / factors)
                    before = list(phases._parts)
                digests.append(sampler.rollout(tasks).digest())
                if speeds:
                    assert phases._parts != before
        return digests

    assert sampled(2, 2.0, 1.0) == sampled(3, 1.0, 1.0, 4.0) == sampled(0)
