"""The parent checks the recipe of a child's environment before any process starts."""

import pickle
import sys
import threading
from contextlib import closing
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
from faulty_env import FaultyEnv

from maml_rl import MultiTaskSampler
from maml_rl.config.placement import Placement
from maml_rl.envs import make_vector_env
from maml_rl.envs.make_env import Recipe
from maml_rl.errors import ConfigError
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers.env_recipe import maker_of, pickled_recipe, placed
from maml_rl.samplers.work.child.vector_env import ParallelVectorEnv


class InstanceOfSomething:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


def in_a_circle() -> SimpleNamespace:
    whole = SimpleNamespace()
    whole.part, whole.lock = SimpleNamespace(whole=whole), threading.Lock()
    return whole


@pytest.mark.parametrize(
    ("env", "env_kwargs", "message"),
    [
        (lambda: FaultyEnv(), {}, "the environment .*<lambda>.env cannot be pickled.*top level.*or an id"),
        (FaultyEnv(), {}, "got the environment .*pass its id, its class, or a function"),
        (3, {}, "registered id or a callable.*got 3"),
        (FaultyEnv, {"marker": InstanceOfSomething()}, "FaultyEnv.env_kwargs.marker cannot be pickled.*not me"),
        (FaultyEnv, {"marker": in_a_circle()}, "FaultyEnv.env_kwargs.marker.lock cannot be pickled"),
        (partial(FaultyEnv, marker=InstanceOfSomething()), {}, "the environment faulty_env.FaultyEnv.env cannot be"),
    ],
)
def test_recipe_that_cannot_reach_a_child_is_refused_before_any_process_starts(
    env: Any, env_kwargs: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "maml_rl.samplers.work.child.launcher.Launcher.launch", lambda self: pytest.fail("a process started")
    )
    with pytest.raises(TypeError, match=message):
        ParallelVectorEnv(env, env_kwargs, 2, 2)


def test_vector_environment_instead_of_an_id_is_refused() -> None:
    vector_env = make_vector_env("2DNavigation-v0", {}, 1)
    with pytest.raises(TypeError, match="itself, which cannot cross"):
        ParallelVectorEnv(vector_env, {}, 2, 2)  # type: ignore[arg-type]
    vector_env.close()


def test_environment_of_another_id_than_the_name_beside_it_is_refused() -> None:
    env = gymnasium.make("2DNavigation-v0")
    assert maker_of("2DNavigation-v0", env) == "2DNavigation-v0"
    assert maker_of("2DNavigation-v0", FaultyEnv) is FaultyEnv
    assert maker_of(None, env) is env
    with pytest.raises(ValueError, match="which env_name='Bandit-K5-v0' does not make"):
        maker_of("Bandit-K5-v0", env)
    env.close()


@pytest.mark.parametrize(
    ("env", "kwargs", "steps", "engine", "message"),
    [
        ("2DNavigation-v0", {}, 0, "auto", "max_episode_steps must be an integer of at least 1"),
        ("2DNavigation-v0", {}, 5, "mujoco", "engine='mujoco' is for the MuJoCo families"),
        ("HopperRandParams-v5", {"engine": "mjbatch"}, 5, "mujoco", "engine='mujoco' contradicts env_kwargs='mjbatch'"),
    ],
)
def test_number_or_engine_that_does_not_fit_is_refused(
    env: str, kwargs: dict[str, Any], steps: int, engine: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        placed(Recipe.of(env, kwargs, steps), Placement(engine=engine))


def test_recipe_has_the_engine_of_a_placement_and_makes_slots_with_its_limit() -> None:
    recipe = placed(Recipe.of("HopperRandParams-v5", {}, 5), Placement(engine="mujoco"))
    assert recipe.env_kwargs == {"engine": "mujoco"}
    with closing(Recipe.of("2DNavigation-v0", {}, 5).make(2)) as env:
        assert env.max_episode_steps == 5


def test_process_that_has_used_jax_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe.of("2DNavigation-v0", {}, 5)
    monkeypatch.setattr("maml_rl.samplers.env_recipe.uses_jax", lambda: True)
    assert pickled_recipe(recipe, "spawn")
    with pytest.raises(ConfigError, match="start_method='fork' copies a process that has used JAX"):
        pickled_recipe(recipe, "fork")


def test_environment_that_only_the_parent_has_registered_can_be_made_elsewhere() -> None:
    gymnasium.register("Elsewhere-v0", FaultyEnv, max_episode_steps=9)
    recipe = pickled_recipe(Recipe.of("Elsewhere-v0", {"place": "nowhere"}), "fork")
    del gymnasium.registry["Elsewhere-v0"]
    vector_env = pickle.loads(recipe).make(2)
    assert vector_env.num_envs == 2
    assert vector_env.max_episode_steps == 9
    vector_env.close()
    del gymnasium.registry["Elsewhere-v0"]


@pytest.mark.parametrize("name", ["Newcomer-v0", "newcomer:Newcomer-v0"])
def test_module_that_registers_its_id_itself_is_imported_elsewhere_without_a_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = 'gymnasium.register("Newcomer-v0", entry_point="newcomer:FaultyEnv", max_episode_steps=9)'
    (tmp_path / "newcomer.py").write_text(f"import gymnasium\nfrom faulty_env import FaultyEnv\n\n{register}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import_module("newcomer")
    recipe = pickled_recipe(Recipe.of(name, {"place": "nowhere"}), "fork")
    # As in a child that has imported nothing yet.
    del gymnasium.registry["Newcomer-v0"], sys.modules["newcomer"]
    vector_env = pickle.loads(recipe).make(2)
    assert vector_env.max_episode_steps == 9
    vector_env.close()
    del gymnasium.registry["Newcomer-v0"], sys.modules["newcomer"]


def test_registration_that_cannot_be_pickled_is_named() -> None:
    gymnasium.register("Lambda-v0", lambda: FaultyEnv())
    with pytest.raises(TypeError, match=r"the environment 'Lambda-v0'\.spec\.entry_point cannot be pickled"):
        ParallelVectorEnv("Lambda-v0")
    del gymnasium.registry["Lambda-v0"]


@pytest.mark.parametrize("wrap", [lambda env: env, partial], ids=["class", "partial"])
def test_environment_of_a_notebook_is_refused_with_the_remedy(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultyEnv, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "FaultyEnv", FaultyEnv, raising=False)
    recipe = Recipe.of(wrap(FaultyEnv), {}, 5)
    # The main module of a parallel test run has no file.
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    pickled_recipe(recipe)
    message = r"needs FaultyEnv, which workers.*notebook.*move it to a module.*num_workers=0 or start_method='fork'"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>")
    with pytest.raises(TypeError, match=message):
        pickled_recipe(recipe, "spawn")
    assert pickled_recipe(recipe, "fork")
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    with pytest.raises(TypeError, match=message):
        pickled_recipe(recipe)
    # Before a sampler starts any process.
    with pytest.raises(TypeError, match=message):
        MultiTaskSampler(wrap(FaultyEnv), {}, 2, NormalMLPPolicy(2, 1, (4,)), num_workers=2)
