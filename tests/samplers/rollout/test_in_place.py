"""Observations that slots write directly into the recorded arrays."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from phases import sample_here

from maml_rl.envs.families.navigation import Navigation2DVectorEnv, PixelNavigationVectorEnv
from maml_rl.policies import get_policy_for_env
from maml_rl.samplers.phase import Phase
from maml_rl.seeding import PhaseStreams

STREAMS = PhaseStreams(0, 0, 0, False)


class Spied(PixelNavigationVectorEnv):
    """Records the arrays into which it draws."""

    def __init__(self, num_envs: int, **options: Any) -> None:
        self.drawn: list[NDArray[Any]] = []
        super().__init__(num_envs, **options)

    def _write_observations(self, out: NDArray[Any]) -> None:
        super()._write_observations(out)
        self.drawn.append(out)


def sample(env: Any, horizon: int = 5, num_tasks: int = 2) -> Any:
    tasks = tuple(env.sample_tasks(num_tasks, seed=0))
    policy, per_task = get_policy_for_env(env, (4,)), env.num_envs // num_tasks
    return sample_here(env, Phase(tasks, policy, None, STREAMS, 3, horizon, slots_per_task=per_task))


@pytest.mark.parametrize("limit", [5, 50])
def test_images_are_drawn_into_the_recorded_array_without_a_copy(limit: int) -> None:
    env = Spied(6, autoreset_mode="Disabled", max_episode_steps=limit)
    own = env.buffers.observations
    episodes = sample(env)
    recorded = episodes.observations.numpy()
    assert len(env.drawn) == 6
    for step, drawn in enumerate(env.drawn[:5]):
        assert np.shares_memory(drawn, recorded[:, step])
        np.testing.assert_array_equal(drawn.reshape(recorded[:, step].shape), recorded[:, step])
    # The observation after the last step does not belong to any step.
    assert env.drawn[5] is own is env.buffers.observations
    np.testing.assert_array_equal(own.reshape(2, 3, 32, 32, 1), episodes.final_observations.numpy())


def test_episodes_are_those_of_slots_whose_observations_are_copied() -> None:
    copying = Spied(6, autoreset_mode="Disabled")
    copying.observes_anywhere = False
    expected = sample(copying)
    assert all(drawn is copying.buffers.observations for drawn in copying.drawn)
    assert sample(Spied(6, autoreset_mode="Disabled")).digest() == expected.digest()


class Ending(Spied):
    """Every other slot ends after two steps."""

    def _step_slots(self, *arguments: Any) -> Any:
        rewards, _ = super()._step_slots(*arguments)
        return rewards, (np.arange(self.num_envs) % 2 == 0) & (self._elapsed == 1)


def test_slots_that_end_early_leave_zeros_behind_and_their_last_image_in_the_buffers() -> None:
    env, other = Ending(6, autoreset_mode="Disabled"), Ending(6, autoreset_mode="Disabled")
    other.observes_anywhere = False
    episodes, expected = sample(env), sample(other)
    assert episodes.lengths.tolist() == [[2, 5, 2], [5, 2, 5]]
    assert episodes.digest() == expected.digest()
    assert not episodes.observations[0, 2:, 0].any()
    np.testing.assert_array_equal(env.buffers.observations, other.buffers.observations)


def test_waves_copy_because_their_episodes_are_not_contiguous() -> None:
    env = Spied(2, autoreset_mode="Disabled")
    waves = sample(env)
    assert all(drawn is env.buffers.observations for drawn in env.drawn)
    copying = Spied(2, autoreset_mode="Disabled")
    copying.observes_anywhere = False
    assert waves.digest() == sample(copying).digest()
    # A product of one row may round differently from that of three.
    at_once = sample(Spied(6, autoreset_mode="Disabled"))
    torch.testing.assert_close(waves.actions, at_once.actions)
    assert torch.equal(waves.lengths, at_once.lengths)


def test_buffers_are_as_before_when_a_phase_ends_in_an_error() -> None:
    class Failing(Spied):
        def _step_slots(self, *arguments: Any) -> Any:
            if len(self.drawn) > 2:
                raise OSError("no more steps")
            return super()._step_slots(*arguments)

    env = Failing(6, autoreset_mode="Disabled")
    own = env.buffers.observations
    with pytest.raises(OSError, match="no more steps"):
        sample(env)
    assert env.buffers.observations is own


def test_vectors_of_one_task_are_written_in_place_too() -> None:
    """With one task the memory layout allows it; the episodes are the same."""
    digests = []
    for anywhere in (True, False):
        env = Navigation2DVectorEnv(3, autoreset_mode="Disabled")
        env.observes_anywhere = anywhere
        digests.append(sample(env, horizon=4, num_tasks=1).digest())
    assert digests[0] == digests[1]
