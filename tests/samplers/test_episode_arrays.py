"""Arrays of episodes: their memory is that of earlier ones only once nobody has these."""

import numpy as np
import pytest
import torch

from maml_rl import MultiTaskSampler
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers import episode_arrays
from maml_rl.samplers.episode_arrays import KeptMemory
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
