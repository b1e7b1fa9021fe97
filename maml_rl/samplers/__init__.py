"""Sampling: child processes that step environments, and the sampler that drives them.

Public names are loaded on first use: a child imports this package, and must not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maml_rl.samplers.multi_task_sampler import MultiTaskSampler as MultiTaskSampler
    from maml_rl.samplers.parent.vector_env import ParallelVectorEnv as ParallelVectorEnv
    from maml_rl.samplers.rollout.rollout import rollout as rollout

_HOMES = {
    "MultiTaskSampler": "maml_rl.samplers.multi_task_sampler",
    "ParallelVectorEnv": "maml_rl.samplers.parent.vector_env",
    "rollout": "maml_rl.samplers.rollout.rollout",
}

__all__ = ["MultiTaskSampler", "ParallelVectorEnv", "rollout"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'maml_rl.samplers' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
