"""How the contract tests play a family, and how they compare the results."""

import importlib.util
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maml_rl.envs import FAMILIES, MetaVectorEnv, Task

# One of each kind; `make test-fast` tries these, and `make test` all.
QUICK = {
    "Bandit-K5-v0",
    "TabularMDP-v0",
    "2DNavigation-v0",
    "PixelNavigation-v0",
    "HalfCheetahVel-v5",
    "Walker2DRandParams-v5",
    "DarkRoom-v0",
    "GridNavi-v0",
    "Wind-v0",
}
# One of each base class, for guarantees that a base keeps for all of its families: array code with discrete and with
# continuous actions, MuJoCo, Meta-World, and JAX.
BASES = ("Bandit-K5-v0", "2DNavigation-v0", "HalfCheetahVel-v5", "MetaWorld/ML1-reach-v3", "GymnaxPendulum-v0")
# Representatives of the families that need an extra, which take seconds to create.
OF_EXTRAS = {"MetaWorld/ML1-reach-v3", "MetaWorld/ML10-v3", "GymnaxPendulum-v0"}
# Those that take long to compile, minutes on a busy core; Brax calls what is deprecated, and says that nobody develops
# it.
HEAVY = ("CraftaxClassic-v0", "BraxHalfCheetahVel-v0")
OF_HEAVY = [
    *(pytest.mark.nightly, pytest.mark.timeout(900)),
    *(pytest.mark.filterwarnings(f"ignore:{what}") for what in (":DeprecationWarning", "Brax System")),
]
# Ids of the same code as another: its arguments have more arms.
MORE_ARMS = {"Bandit-K10-v0", "Bandit-K50-v0", "GaussianBandit-K10-v0", "GaussianBandit-K50-v0"}
TRIED = [name for name, family in FAMILIES.items() if (not family.extra or name in OF_EXTRAS) and name not in MORE_ARMS]
# Those that step, reset and take tasks by code of their own: those of physics share that of `MujocoFamily`.
OWN_STEPS = [name for name in TRIED if not FAMILIES[name].has_physics or name in QUICK or name == "Mixture-v0"]
# With one of each other kind of task that a body has.
OWN_TASKS = [*OWN_STEPS, "HalfCheetahDir-v5", "AntDir2D-v5", "AntPos-v5", "AntGoal-v5"]


def marks(env_id: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a family's tests."""
    extra = FAMILIES[env_id].extra
    if extra:
        missing = importlib.util.find_spec(extra) is None
        kinds = [getattr(pytest.mark, extra), *(OF_HEAVY if env_id in HEAVY else [])]
        return [*kinds, pytest.mark.skipif(missing, reason=f"could not import '{extra}'")]
    return [] if env_id in QUICK else [pytest.mark.slow]


# Enough steps for every reward to occur, few enough for physics.
STEPS = 6
# Actions are drawn for this many slots, whatever the number of slots.
_ROWS = 8


def random_actions(env: MetaVectorEnv, steps: int, seed: int = 0) -> list[NDArray[Any]]:
    """Actions that do not depend on the number of slots: slot i always gets the same."""
    env.single_action_space.seed(seed)
    rows = [env.single_action_space.sample() for _ in range(steps * _ROWS)]
    return [np.array(rows[step * _ROWS : step * _ROWS + env.num_envs]) for step in range(steps)]


def play(env: MetaVectorEnv, seed: Any, steps: int = STEPS) -> list[NDArray[Any]]:
    """Return everything observable in one run: arrays of observations, rewards and flags."""
    history = [env.reset(seed=seed)[0]]
    for actions in random_actions(env, steps):
        history += env.step(actions)[:4]
    return history


def same(first: list[NDArray[Any]], second: list[NDArray[Any]]) -> bool:
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def assert_same_tasks(first: list[Task], second: list[Task]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


def assert_same_slot(slot: int, batch: tuple[Any, ...], single: tuple[Any, ...]) -> None:
    for array, value in zip(batch[:-1], single[:-1], strict=True):
        np.testing.assert_array_equal(array[slot], value, strict=isinstance(value, np.ndarray))
    assert_same_infos(slot, batch[-1], single[-1])


def assert_same_infos(slot: int, batch: dict[str, Any], single: dict[str, Any]) -> None:
    assert {name for name in batch if not name.startswith("_") and batch[f"_{name}"][slot]} == set(single)
    for name, value in single.items():
        assert batch[f"_{name}"][slot]
        if isinstance(value, dict):
            assert_same_infos(slot, batch[name], value)
        else:
            np.testing.assert_array_equal(batch[name][slot], value)
