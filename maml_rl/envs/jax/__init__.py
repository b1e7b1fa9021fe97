"""Families whose functions are in JAX, which steps all slots as one compiled batch. It needs the extra jax."""

from gymnasium.error import DependencyNotInstalled

try:
    import jax as _  # noqa: F401
except ImportError as error:
    raise DependencyNotInstalled(
        f"families in JAX need the package jax ({error}); run pip install 'maml-rl[jax]'"
    ) from error

from maml_rl.envs.jax.jax_family import JaxFamily, JaxVectorEnv

__all__ = ["JaxFamily", "JaxVectorEnv"]


def __dir__() -> list[str]:
    return sorted(__all__)
