"""Phases on a device, which on the CPU have the episodes of the backend there."""

from typing import Any

import gymnasium
import numpy as np
import torch

from maml_rl import MultiTaskSampler
from maml_rl.envs.family import BatchedFamily
from maml_rl.envs.tasks import TaskEntry
from maml_rl.policies import get_policy_for_env
from tests.recorded_steps import record_on_the_cpu


def policy_for(env: Any, env_kwargs: Any = None) -> Any:
    return get_policy_for_env(MultiTaskSampler.spaces(env, env_kwargs), hidden_sizes=(16,))


def sample(backend: str, env: Any, policy: Any = None, *, phases: int = 1, device: str = "cpu", **options: Any) -> Any:
    given = {"batch_size": 4, "slots_per_task": 2, "seed": 3, "max_episode_steps": 12} | options
    kwargs = given.pop("env_kwargs", {})
    policy = policy or policy_for(env, kwargs)
    with MultiTaskSampler(env, kwargs, policy=policy, backend=backend, device=device, **given) as sampler:
        tasks = sampler.sample_tasks(3)
        return [sampler.rollout(tasks) for _ in range(phases)]


def require_as_on_the_cpu(env: Any, policy: Any = None, **options: Any) -> Any:
    """Require that a device has the episodes of the CPU in a phase, and return them."""
    policy = policy or policy_for(env)
    (ours,), (theirs,) = (sample(backend, env, policy, **options) for backend in ("device", "in-process"))
    require_close(ours, theirs)
    return ours


def require_close(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    for name in ("lengths", "terminated", "truncated"):
        torch.testing.assert_close(getattr(ours, name).cpu(), getattr(theirs, name), rtol=0, atol=0)
    for name in SAMPLED:
        torch.testing.assert_close(getattr(ours, name).cpu(), getattr(theirs, name), rtol=tolerance, atol=tolerance)
    assert ours.infos.keys() == theirs.infos.keys()
    for name, info in theirs.infos.items():
        torch.testing.assert_close(ours.infos[name].cpu(), info, rtol=tolerance, atol=tolerance)


def require_same_when_recorded(env: Any, monkeypatch: Any) -> None:
    """Require that recorded steps have the episodes and the tasks of the CPU, in two phases."""
    record_on_the_cpu(monkeypatch)
    policy = policy_for(env)
    options = {"phases": 2, "max_episode_steps": 8}
    for ours, theirs in zip(
        *(sample(place, env, policy, **options) for place in ("device", "in-process")), strict=True
    ):
        require_close(ours, theirs)
        assert repr(ours.tasks) == repr(theirs.tasks)


SAMPLED = ("observations", "actions", "rewards", "final_observations")


class Counting(BatchedFamily):
    """Pays its own count of steps, kept as a subclass says; some slots terminate at the third."""

    def __init__(self, num_envs: int, **options: Any) -> None:
        box = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        super().__init__(num_envs, box, box, {"first": TaskEntry()}, max_episode_steps=5, **options)

    def draw_tasks(self, random: Any, num_tasks: int) -> list[dict[str, Any]]:
        return [{"first": float(first)} for first in random.uniform(0.0, 1.0, num_tasks)]

    def _reset_slots(self, mask: Any, streams: Any) -> None:
        self._count = self.xp.zeros_like(self.tasks["first"])

    def _write_observations(self, out: Any) -> None:
        out[:] = self.tasks["first"][:, None]

    def _step_slots(self, actions: Any, active: Any, streams: Any) -> Any:
        return self._next(), self._count >= 3.0 + self.tasks["first"].round()

    def _next(self) -> Any:
        self._count = self._count + 1.0
        return self._count + 0.0


def perturbed(policy: Any, num_tasks: int, scale: float) -> Any:
    generator = torch.Generator().manual_seed(1)
    return {
        name: value.detach() + scale * torch.randn(value.shape, generator=generator).to(value)
        for name, value in policy.stack_parameters(num_tasks).items()
    }


def sample_adapted(
    backend: str, env_id: str, policy: Any, device: str = "cpu", deterministic: bool = False, **options: Any
) -> Any:
    """One phase under the policy's own parameters, one under those of each task, and one under its own again."""
    given = {"batch_size": 4, "slots_per_task": 2, "seed": 3, "max_episode_steps": 6} | options
    with (
        MultiTaskSampler(env_id, {}, policy=policy, backend=backend, device=device, **given) as sampler,
        torch.no_grad(),
    ):
        tasks = sampler.sample_tasks(3)
        adapted = perturbed(policy, 3, 0.5)
        return [sampler.rollout(tasks, params, deterministic=deterministic) for params in (None, adapted, None)]
