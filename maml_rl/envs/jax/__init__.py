"""Families whose functions are in JAX, which steps all slots as one compiled batch. It needs the extra jax."""

from collections.abc import Iterator
from contextlib import contextmanager

from gymnasium.error import DependencyNotInstalled

from maml_rl.envs.global_generators import KeptGenerators
from maml_rl.machine import sharing_gpus


@contextmanager
def of_the_extra() -> Iterator[None]:
    """Say, where an import fails, how to install what is missing; what it draws is not drawn from the process.

    Some packages use JAX while they are imported.
    """
    try:
        with KeptGenerators(), sharing_gpus():
            yield
    except ImportError as error:
        raise DependencyNotInstalled(
            f"this family in JAX needs a package ({error}); run pip install 'maml-rl[jax]'"
        ) from error


with of_the_extra():
    import jax as _  # noqa: F401

from maml_rl.envs.jax.jax_family import Arrays, JaxFamily, JaxVectorEnv, ReadyMade, drawn_evenly  # noqa: E402

__all__ = ["Arrays", "JaxFamily", "JaxVectorEnv", "ReadyMade", "drawn_evenly"]


def __dir__() -> list[str]:
    return sorted(__all__)
