"""Sampled episodes of families in JAX are those of plain loops of JAX, wherever they are sampled."""

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl import MultiTaskSampler
from maml_rl.envs import FAMILIES as SPECS
from maml_rl.envs.global_generators import KeptGenerators
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.policies import GRUPolicy
from maml_rl.seeding import PhaseStreams
from tests.envs.contract import HEAVY, OF_HEAVY

# By id: the function of plain_jax_loops, its arguments, steps of an episode.
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "GymnaxCartPole-v0": ("cart_pole", {}, 25),
    "GymnaxPendulum-v0": ("pendulum", {}, 10),
    "XLand-v0": ("xland", {"size": 7}, 12),
    "JumanjiMaze-v0": ("maze", {"size": 6}, 15),
    "CraftaxClassic-v0": ("craftax", {}, 6),
    "BraxHalfCheetahVel-v0": ("half_cheetah", {}, 5),
}
# Largest difference by rounding: of Brax, XLA rounds a step otherwise as a part of a larger function.
ROUNDING = {"BraxHalfCheetahVel-v0": 2e-3}
# That a worker compiles counts as a call, which takes minutes on a busy core.
WORKERS = {"num_workers": 2, "step_timeout": 600.0}
PLACES: dict[str, dict[str, Any]] = {
    "in this process": {"num_workers": 0},
    "on a device": {"backend": "device"},
    "in two workers": WORKERS,
    "in a worker, with central inference": {**WORKERS, "num_workers": 1, "inference": "central"},
}

pytestmark = [pytest.mark.jax, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def imported(env_id: str) -> None:
    """The packages of a family."""
    with KeptGenerators():
        pytest.importorskip("jax")
    import_module(SPECS[env_id].module)


@cache
def sample(env_id: str, seed: int, place: str) -> TaskEpisodes:
    """Sample trials of two episodes of two tasks, in each of two environments, with a memory."""
    _, kwargs, steps = FAMILIES[env_id]
    options = {"observe_last": True, "slots_per_task": 2, "seed": seed, "max_episode_steps": steps, **PLACES[place]}
    with MultiTaskSampler(env_id, kwargs, batch_size=4, policy=policy(env_id), **options) as sampler:
        return sampler.rollout(sampler.sample_tasks(2))


def policy(env_id: str) -> GRUPolicy:
    _, kwargs, _ = FAMILIES[env_id]
    env = MultiTaskSampler.spaces(env_id, kwargs, observe_last=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GRUPolicy(env.observation_space, env.action_space, 8)


def require_plain(env_id: str, seed: int, episodes: TaskEpisodes) -> None:
    from tests.envs import plain_jax_loops as plain_loops

    plain = plain_loops.compiled_once(FAMILIES[env_id][0])
    # As a user of the package finds the seeds of its episodes.
    seeds = PhaseStreams(seed, 0, 0).episode_seeds(2, range(4))
    for task, number in np.ndindex(2, 4):
        actions = episodes.actions[task, :, number].numpy()
        seen, rewards, over = plain_loops.episode(plain, int(seeds[task, number]), episodes.tasks[task], actions)
        length = len(rewards)
        assert int(episodes.lengths[task, number]) == length
        assert bool(episodes.terminated[task, number]) == over
        recorded = episodes.observations[task, :length, number].numpy()
        final = episodes.final_observations[task, number].numpy()
        size = len(seen[0])
        near = {"rtol": 0.0, "atol": ROUNDING.get(env_id, 0.0)}
        np.testing.assert_allclose(recorded[:, :size], np.array(seen[:-1]), **near)
        np.testing.assert_allclose(final[:size], seen[-1], **near)
        np.testing.assert_allclose(episodes.rewards[task, :length, number].numpy(), np.float32(rewards), **near)


@pytest.mark.parametrize("env_id", [pytest.param(name, marks=OF_HEAVY if name in HEAVY else []) for name in FAMILIES])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_family_in_jax_equals_a_plain_loop(env_id: str, seed: int) -> None:
    # Larger families, which take long to compile, on a device once a night.
    places = list(PLACES)[: 2 if env_id.startswith("Gymnax") or seed == 1 else 1]
    for place in places:
        require_plain(env_id, seed, sample(env_id, seed, place))


@pytest.mark.slow
@pytest.mark.parametrize(
    "env_id",
    [
        pytest.param(
            name, marks=OF_HEAVY if name in HEAVY else [] if name == "GymnaxPendulum-v0" else [pytest.mark.nightly]
        )
        for name in FAMILIES
    ],
)
def test_workers_sample_a_family_in_jax_bit_for_bit(env_id: str) -> None:
    for place in list(PLACES)[2:]:
        assert sample(env_id, 0, place).digest() == sample(env_id, 0, "in this process").digest()
