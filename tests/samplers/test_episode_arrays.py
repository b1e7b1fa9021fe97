"""Arrays of episodes: their memory is that of earlier ones only once nobody has these."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maml_rl import MultiTaskSampler
from maml_rl.envs.meta_env import EnvDescription
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers import episode_arrays
from maml_rl.samplers.episode_arrays import EpisodeArrays, KeptMemory
from maml_rl.seeding import PhaseStreams

LARGE = (2, 2**18)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_once_no_view_of_it_is_left() -> None:
    memory, dtype = KeptMemory(), np.dtype(np.float32)
    first = memory.empty(LARGE, dtype)
    place, first[...] = address(first), 1.0
    kept = torch.from_numpy(first[1:])[0]
    del first
    second = memory.empty(LARGE, dtype)
    second[...] = 2.0
    assert bool((kept == 1.0).all())
    del kept
    third = memory.empty(LARGE, np.dtype(np.int32))
    assert address(third) == place
    assert address(second) != place
    del third
    # Of another size, which frees what nobody has.
    other = memory.empty((3, 2**18), dtype)
    assert [block.nbytes for block, _ in memory._blocks] == [second.nbytes, other.nbytes]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.timeout(60)
def test_episodes_that_are_kept_are_not_changed_by_later_phases(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_arrays, "_KEPT_FROM", 1)
    policy, options = NormalMLPPolicy(2, 2, (8,), "tanh"), {"seed": 0, "num_workers": num_workers}
    with MultiTaskSampler("2DNavigation-v0", {}, 2, policy, max_episode_steps=5, **options) as sampler:
        tasks, streams = sampler.sample_tasks(2), [PhaseStreams(0, iteration, 0) for iteration in range(3)]
        kept = [sampler.rollout(tasks, streams=each) for each in streams]
        digests = [episodes.digest() for episodes in kept]
        part = kept[1].observations[1]
        expected = part.clone()
        del kept
        again = [sampler.rollout(tasks, streams=each).digest() for each in streams]
    assert again == digests
    assert torch.equal(part, expected)


def test_views_have_a_range_of_episodes_and_copies_no_step_past_the_longest() -> None:
    env = EnvDescription(spaces.Box(0.0, 1.0, (3,)), spaces.Discrete(2), None, {"now": "step", "last": "episode"})
    arrays = EpisodeArrays.zeros(EpisodeArrays.layout(env, 2, 4, 5))
    view = arrays.view(slice(1, 2), slice(1, 3))
    view.rewards[:], view.lengths[:], view.infos["last"][:] = 1.0, 3, 2.0
    assert np.argwhere(arrays.lengths).tolist() == np.argwhere(arrays.infos["last"]).tolist() == [[1, 1], [1, 2]]
    assert arrays.rewards.sum() == arrays.rewards[1, :, 1:3].sum() == 10.0
    copied = arrays.copy()
    assert copied.rewards.shape == copied.infos["now"].shape == (2, 3, 4)
    assert copied.infos["last"].shape == (2, 4)
    assert not np.shares_memory(copied.rewards, arrays.rewards)
