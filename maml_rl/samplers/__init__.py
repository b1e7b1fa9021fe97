"""Sampling: tasks and episodes, in this process or in workers.

Public names are loaded on first use: a worker imports this package, and must not load torch. `MultiTaskSampler.rollout`
is the primitive for other algorithms; the function behind it is private, like all modules of this package.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from maml_rl.samplers.multi_task_sampler import MultiTaskSampler as MultiTaskSampler
    from maml_rl.samplers.population import PopulationEvaluator as PopulationEvaluator
    from maml_rl.samplers.work.child.vector_env import ParallelVectorEnv as ParallelVectorEnv

_HOMES = {
    "MultiTaskSampler": "maml_rl.samplers.multi_task_sampler",
    "ParallelVectorEnv": "maml_rl.samplers.work.child.vector_env",
    "PopulationEvaluator": "maml_rl.samplers.population",
}

__all__ = ["MultiTaskSampler", "ParallelVectorEnv", "PopulationEvaluator"]


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'maml_rl.samplers' has no attribute {name!r}")
    return getattr(_importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
