"""Ids, their registration, and the environments that are made from them."""

import subprocess
import sys

import gymnasium
import pytest

from maml_rl.envs import FAMILIES, make_vector_env
from maml_rl.envs.make_env import Recipe
from maml_rl.envs.registration import find_spec, register_families

BODIES = {
    "HalfCheetah": ("Vel", "Dir", "RandParams"),
    "Ant": ("Vel", "Dir", "Pos", "RandParams", "Dir2D", "Goal"),
    "Walker2D": ("RandParams", "Dir", "Vel"),
    "Hopper": ("RandParams", "Vel"),
    "Swimmer": ("Vel",),
    "Humanoid": ("Dir",),
}
POINTS = ("PointGoal", "SparsePointGoal", "PointCorner", "SparsePointCorner", "SemiCircle", "Wind", "2DNavigation")
GRIDS = ("TabularMDP", "GridNavi", "DarkRoom", "DarkKeyDoor", "PixelNavigation", "Mixture")
IN_JAX = ("XLand", "CraftaxClassic", "JumanjiMaze", "BraxHalfCheetahVel")
OF_GYMNAX = ("Pendulum", "CartPole", "Acrobot", "MountainCar")
IDS = {
    *(f"{kind}-K{k}-v0" for kind in ("Bandit", "GaussianBandit") for k in (5, 10, 50)),
    *(f"{body}{task}-v5" for body, tasks in BODIES.items() for task in tasks),
    *(f"{family}-finn2017-v0" for family in ("HalfCheetahVel", "HalfCheetahDir", "AntVel", "AntDir", "AntPos")),
    *(f"{family}-v0" for family in (*POINTS, *GRIDS, *IN_JAX)),
    *(f"Gymnax{family}-v0" for family in OF_GYMNAX),
    *(f"MetaWorld/ML{number}-v3" for number in (10, 25, 45)),
}


def test_the_families_have_the_ids_that_users_expect() -> None:
    of_ml1 = {env_id for env_id in FAMILIES if env_id.startswith("MetaWorld/ML1-")}
    assert set(FAMILIES) == IDS | of_ml1
    assert len(of_ml1) == 50
    assert set(gymnasium.registry) >= IDS


def test_registering_again_changes_nothing() -> None:
    specs = {env_id: gymnasium.registry[env_id] for env_id in IDS}
    register_families()
    assert all(gymnasium.registry[env_id] is spec for env_id, spec in specs.items())


@pytest.mark.timeout(60)
def test_importing_the_package_loads_neither_torch_nor_a_family() -> None:
    program = (
        "import sys, maml_rl, gymnasium; "
        "names = ('bandit', 'navigation', 'tabular_mdp'); "
        "families = {f'maml_rl.envs.families.{name}' for name in names}; "
        "heavy = families | {'torch', 'mujoco', 'mjbatch'}; "
        "loaded = heavy & set(sys.modules); assert not loaded, loaded; "
        "gymnasium.make('2DNavigation-v0'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_bandit_ids_have_their_number_of_arms() -> None:
    for env_id in IDS:
        if "Bandit" in env_id:
            k = int(env_id.split("-")[1][1:])
            assert make_vector_env(env_id).single_action_space == gymnasium.spaces.Discrete(k)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("2DNavigaton-v0", "unknown family '2DNavigaton-v0'; did you mean '2DNavigation-v0'?"),
        ("HalfCheetahDirection-v5", "unknown family 'HalfCheetahDirection-v5'; did you mean 'HalfCheetahDir-v5'?"),
        *(
            (name, f"unknown family '{name}'")
            for name in ("HalfCheetahDir-v6", "HalfCheetahDir-vx", "HalfCheetahTurn-v1")
        ),
        ("qqqqq", "unknown family 'qqqqq'; `maml-rl envs` lists the families; an id of your own needs its"),
        ("tests.envs.third_party:Nowhere-v0", "unknown family 'Nowhere-v0'; "),
        ("no_such_module:Thing-v0", "cannot import the module of 'no_such_module:Thing-v0'"),
        ("tests.envs.third_party:WalkEnv", "'tests.envs.third_party:WalkEnv' is not an id but something that makes an"),
    ],
)
def test_unknown_id_is_refused_with_the_closest(env_id: str, message: str) -> None:
    for find in (find_spec, make_vector_env):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
            find(env_id)
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("old", "new"), [("HalfCheetahDir-v1", "HalfCheetahDir-v5"), ("AntVel-v0", "AntVel-v5")])
def test_id_of_an_earlier_version_makes_the_family_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=f"{old} is an earlier version of {new}"):
        assert find_spec(old).id == new
    with pytest.warns(FutureWarning, match=old):
        recipe = Recipe.of(old, {}, None)
    assert recipe.env == new
