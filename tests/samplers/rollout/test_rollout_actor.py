"""Transfers to an accelerator, tested on the CPU: the packing is the same, and the episodes must be, too."""

from typing import Any

import numpy as np
import pytest
import torch

from maml_rl import MultiTaskSampler
from maml_rl.envs import make_vector_env
from maml_rl.policies import NormalMLPPolicy, get_policy_for_env
from maml_rl.samplers.rollout import actor as acting
from maml_rl.samplers.rollout.actor import DeviceLink

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "row", "rows"),
    [
        *((dtype, (3,), 5) for dtype in (np.uint8, np.bool_, np.int64, np.float32, np.float64)),
        (np.float32, (2, 3), 1),
        (np.uint8, (), 7),
    ],
)
def test_observations_and_noise_arrive_as_they_were_sent(dtype: Any, row: tuple[int, ...], rows: int) -> None:
    random = np.random.default_rng(0)
    link = DeviceLink(np.empty((7, *row), dtype), 2, CPU)
    for _ in range(2):
        observations = random.integers(0, 2, (rows, *row)).astype(dtype)
        noise = random.normal(size=(rows, 2)).astype(np.float32)
        there, noise_there = link.send(observations, noise)
        np.testing.assert_array_equal(there.numpy(), observations)
        assert there.numpy().dtype == observations.dtype
        np.testing.assert_array_equal(noise_there.numpy(), noise)


def test_actions_of_a_range_come_back_as_they_are() -> None:
    link = DeviceLink(np.empty((4, 2), np.float32), 1, CPU)
    for actions in (torch.arange(12.0).reshape(4, 3), torch.full((2, 3), 7.0)):
        np.testing.assert_array_equal(link.fetch(actions), actions.numpy())


class CountingLink(DeviceLink):
    """Counts what is sent and fetched."""

    sent = fetched = 0

    def send(self, observations: Any, noise: Any) -> Any:
        CountingLink.sent += 1
        return super().send(observations, noise)

    def fetch(self, actions: Any) -> Any:
        CountingLink.fetched += 1
        return super().fetch(actions)


class LinkedActor(acting.Actor):
    """Transfers as to an accelerator, whatever the device."""

    def observe(self, observations: Any) -> None:
        self._link = self._link or CountingLink(observations, self._policy.noise_size, CPU)
        super().observe(observations)


@pytest.mark.slow
@pytest.mark.parametrize("env_name", ["2DNavigation-v0", "TabularMDP-v0"])
@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 3, "num_groups": 2}])
def test_episodes_are_bit_identical_with_one_transfer_each_way_per_step(
    env_name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest() -> str:
        env = make_vector_env(env_name)
        policy = get_policy_for_env(env, (8,), "tanh")
        env.close()
        with MultiTaskSampler(env_name, {}, 3, policy, seed=0, max_episode_steps=6, **options) as sampler:
            return sampler.rollout(sampler.sample_tasks(5)).digest()

    expected = digest()
    monkeypatch.setattr("maml_rl.samplers.rollout.loop.Actor", LinkedActor)
    monkeypatch.setattr(CountingLink, "sent", 0)
    monkeypatch.setattr(CountingLink, "fetched", 0)
    assert digest() == expected
    assert CountingLink.sent == CountingLink.fetched == 6 * options.get("num_groups", 1)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_episodes_on_cuda_agree_with_those_on_the_cpu() -> None:
    policy = NormalMLPPolicy(2, 2, (8,), "tanh")
    found = []
    for device in ("cpu", "cuda"):
        options: dict[str, Any] = {"num_workers": 2, "max_episode_steps": 6, "device": device}
        with MultiTaskSampler("2DNavigation-v0", {}, 3, policy, seed=0, **options) as sampler:
            found.append(sampler.rollout(sampler.sample_tasks(5)))
    np.testing.assert_allclose(found[0].actions, found[1].actions, atol=1e-4)
