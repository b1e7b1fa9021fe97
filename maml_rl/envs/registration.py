"""The families by id, and their registration with Gymnasium."""

import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from maml_rl.errors import UsersCode, explain
from maml_rl.named_modules import import_named


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """One registered family.

    Attributes:
        module: where its classes are.
        name: of the classes: `<name>Env` for one slot, `<name>VectorEnv` for many.
        max_episode_steps: time limit by default; None where episodes end by themselves.
        kwargs: keyword arguments that belong to the id.
        has_physics: whether its steps take long enough to be worth several processes or threads.
        extra: of this package, without which it cannot be made; "" for none.
        slots_per_task: environments per task that a sampler makes by default; None for one per episode.
        dynamics: whether its tasks differ in what follows an action, not in the rewards alone.
        task_description: what a task is, where the module cannot be imported without the extra; else "", and its
            classes say it.
    """

    module: str
    name: str
    max_episode_steps: int | None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    has_physics: bool = False
    extra: str = ""
    slots_per_task: int | None = None
    dynamics: bool = False
    task_description: str = ""


def _mujoco(module: str, name: str) -> FamilySpec:
    return FamilySpec(f"maml_rl.envs.mujoco.{module}", name, 200, has_physics=True, dynamics="RandParams" in name)


def _metaworld(benchmark: str) -> FamilySpec:
    return FamilySpec(
        "maml_rl.envs.metaworld",
        "MetaWorld",
        500,
        {"benchmark": benchmark},
        extra="metaworld",
        # Each holds some twenty megabytes, and takes half a second to make.
        slots_per_task=1,
    )


def _jax(module: str, name: str, max_episode_steps: int, tasks: str, /, **kwargs: Any) -> FamilySpec:
    place = f"maml_rl.envs.jax.{module}"
    return FamilySpec(
        place, name, max_episode_steps, kwargs, extra="jax", dynamics=name != "BraxVel", task_description=tasks
    )


_METAWORLD_ENVIRONMENTS = """
    assembly basketball bin-picking box-close button-press-topdown button-press-topdown-wall button-press
    button-press-wall coffee-button coffee-pull coffee-push dial-turn disassemble door-close door-lock door-open
    door-unlock hand-insert drawer-close drawer-open faucet-open faucet-close hammer handle-press-side handle-press
    handle-pull-side handle-pull lever-pull pick-place-wall pick-out-of-hole pick-place plate-slide plate-slide-side
    plate-slide-back plate-slide-back-side peg-insert-side peg-unplug-side soccer stick-push stick-pull push
    push-wall push-back reach reach-wall shelf-place sweep-into sweep window-open window-close
"""

FAMILIES: dict[str, FamilySpec] = {
    **{
        f"Bandit-K{k}-v0": FamilySpec("maml_rl.envs.families.bandit", "BernoulliBandit", None, {"k": k})
        for k in (5, 10, 50)
    },
    **{
        f"GaussianBandit-K{k}-v0": FamilySpec("maml_rl.envs.families.bandit", "GaussianBandit", None, {"k": k})
        for k in (5, 10, 50)
    },
    "TabularMDP-v0": FamilySpec("maml_rl.envs.families.tabular_mdp", "TabularMDP", 10, dynamics=True),
    "2DNavigation-v0": FamilySpec("maml_rl.envs.families.navigation", "Navigation2D", 100),
    "PixelNavigation-v0": FamilySpec("maml_rl.envs.families.navigation", "PixelNavigation", 50),
    "HalfCheetahVel-v5": _mujoco("planar", "HalfCheetahVel"),
    "HalfCheetahDir-v5": _mujoco("planar", "HalfCheetahDir"),
    "HalfCheetahVel-finn2017-v0": _mujoco("finn2017", "Finn2017HalfCheetahVel"),
    "HalfCheetahDir-finn2017-v0": _mujoco("finn2017", "Finn2017HalfCheetahDir"),
    "AntVel-finn2017-v0": _mujoco("finn2017", "Finn2017AntVel"),
    "AntDir-finn2017-v0": _mujoco("finn2017", "Finn2017AntDir"),
    "AntPos-finn2017-v0": _mujoco("finn2017", "Finn2017AntPos"),
    "AntVel-v5": _mujoco("ant", "AntVel"),
    "AntDir-v5": _mujoco("ant", "AntDir"),
    "AntPos-v5": _mujoco("ant", "AntPos"),
    "Walker2DRandParams-v5": _mujoco("planar", "Walker2DRandParams"),
    "HopperRandParams-v5": _mujoco("planar", "HopperRandParams"),
    "HalfCheetahRandParams-v5": _mujoco("planar", "HalfCheetahRandParams"),
    "AntRandParams-v5": _mujoco("ant", "AntRandParams"),
    "Walker2DDir-v5": _mujoco("planar", "Walker2DDir"),
    "Walker2DVel-v5": _mujoco("planar", "Walker2DVel"),
    "HopperVel-v5": _mujoco("planar", "HopperVel"),
    "SwimmerVel-v5": _mujoco("planar", "SwimmerVel"),
    "HumanoidDir-v5": _mujoco("humanoid", "HumanoidDir"),
    "AntDir2D-v5": _mujoco("ant", "AntDir2D"),
    "AntGoal-v5": _mujoco("ant", "AntGoal"),
    "PointGoal-v0": FamilySpec("maml_rl.envs.families.point", "PointGoal", 20),
    "SparsePointGoal-v0": FamilySpec("maml_rl.envs.families.point", "SparsePointGoal", 20),
    "PointCorner-v0": FamilySpec("maml_rl.envs.families.point", "PointCorner", 100),
    "SparsePointCorner-v0": FamilySpec("maml_rl.envs.families.point", "PointCorner", 100, {"sparse": True}),
    "SemiCircle-v0": FamilySpec("maml_rl.envs.families.point", "SemiCircle", 60),
    "Wind-v0": FamilySpec("maml_rl.envs.families.point", "Wind", 75, dynamics=True),
    "GridNavi-v0": FamilySpec("maml_rl.envs.families.grids", "GridNavi", 15),
    "DarkRoom-v0": FamilySpec("maml_rl.envs.families.grids", "DarkRoom", 20),
    "DarkKeyDoor-v0": FamilySpec("maml_rl.envs.families.grids", "DarkKeyDoor", 50),
    **{
        f"Gymnax{name.replace('-v1', '-v0')}": _jax(
            "gymnax_control", "Gymnax", steps, f"{tasks}, all equally likely", name=name
        )
        for name, steps, tasks in (
            ("Pendulum-v1", 200, "g, m, l: gravity, mass and length"),
            ("CartPole-v1", 500, "gravity, masspole, length: gravity, and the pole's mass and half its length"),
            ("Acrobot-v1", 500, "link_length_1, link_mass_1, link_mass_2: of its two links"),
            ("MountainCar-v0", 200, "force, gravity: of the car"),
        )
    },
    "XLand-v0": _jax("xland", "XLand", 50, "goal, rules, init_tiles: a ruleset, as XLand-MiniGrid encodes it"),
    "CraftaxClassic-v0": _jax(
        "craftax_worlds", "Craftax", 1000, "world: the seed of a world, the same in all episodes"
    ),
    "JumanjiMaze-v0": _jax("jumanji_maze", "Maze", 100, "maze: the seed of a maze, with its start and its target"),
    "BraxHalfCheetahVel-v0": _jax(
        "brax_locomotion", "BraxVel", 200, "velocity: m/s, all of [low, high] equally likely"
    ),
    "Mixture-v0": FamilySpec("maml_rl.envs.mixture", "Mixture", None, has_physics=True, dynamics=True),
    **{f"MetaWorld/ML1-{name}-v3": _metaworld(f"ML1-{name}-v3") for name in _METAWORLD_ENVIRONMENTS.split()},
    **{f"MetaWorld/{benchmark}-v3": _metaworld(benchmark) for benchmark in ("ML10", "ML25", "ML45")},
}


def register_families() -> None:
    """Register every family that is not registered in Gymnasium yet."""
    for env_id, family in FAMILIES.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(
                env_id,
                entry_point=f"{family.module}:{family.name}Env",
                vector_entry_point=f"{family.module}:{family.name}VectorEnv",
                max_episode_steps=family.max_episode_steps,
                kwargs=dict(family.kwargs),
            )


def find_spec(env_id: str) -> EnvSpec:
    """Return the registration of an id, or of "module:id", after importing the module.

    An id with an earlier version of a family makes the current version, with a `FutureWarning`.
    """
    module, _, name = env_id.rpartition(":")
    imported = None
    if module:
        imported = import_module_of(module, env_id)
    if name not in gymnasium.registry and callable(getattr(imported, name, None)):
        raise ValueError(
            f"{env_id!r} is not an id but something that makes an environment; pass it itself, or give it an id in "
            f"{module}: gymnasium.register('{name}-v0', entry_point='{env_id}', max_episode_steps=...)"
        )
    if name not in gymnasium.registry and (newer := _newer_version(name)):
        warnings.warn(
            f"{name} is an earlier version of {newer}, which is used instead; write {newer}", FutureWarning, 2
        )
        name = newer
    if name not in gymnasium.registry:
        close = difflib.get_close_matches(name, [*FAMILIES, *gymnasium.registry], 1)
        hint = f"did you mean {close[0]!r}?" if close else "`maml-rl envs` lists the families"
        own = "" if module else f"; an id of your own needs its module: 'your_module:{name}'"
        raise ValueError(f"unknown family {name!r}; {hint}{own}")
    return gymnasium.registry[name]


def _newer_version(env_id: str) -> str | None:
    """Return the family that differs from `env_id` only in a higher version."""
    base, _, version = env_id.rpartition("-v")
    for family in FAMILIES:
        known, _, newer = family.rpartition("-v")
        if base == known and version.isdecimal() and int(version) < int(newer):
            return family
    return None


def import_module_of(module: str, name: str) -> ModuleType:
    """Import the module that the name of an environment begins with."""
    if module.startswith("."):
        raise ValueError(f"{name!r} names a module relative to another; give its full name, as in package.module:Id-v0")
    file = "/" in module or module.endswith(".py")
    hint = "; give the name of the module, not of its file" if file else ""
    with UsersCode(lambda error: ValueError(f"cannot import the module of {name!r}: {explain(error)}{hint}")):
        return import_named(module)
