"""The benchmarks of Meta-World."""

from maml_rl.envs.metaworld.benchmark import MetaWorldEnv, MetaWorldVectorEnv

__all__ = ["MetaWorldEnv", "MetaWorldVectorEnv"]


def __dir__() -> list[str]:
    return sorted(__all__)
