"""Every registered family, one after the other, those that step by themselves, or one of each base class."""

import copy
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import mujoco
import pytest

from maml_rl.envs import MetaVectorEnv, make_vector_env
from tests.envs.contract import BASES, OWN_STEPS, OWN_TASKS, TRIED, marks


@pytest.fixture(autouse=True, scope="session")
def models_are_compiled_once() -> Iterator[None]:
    """MuJoCo compiles a file once, then copies the model: compiling is most of the cost of a Meta-World environment."""
    compiled = lru_cache(maxsize=16)(mujoco.MjModel.from_xml_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mujoco.MjModel, "from_xml_path", staticmethod(lambda path: copy.copy(compiled(path))))
        yield


@pytest.fixture(params=[pytest.param(name, marks=marks(name)) for name in TRIED])
def env_id(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=[pytest.param(name, marks=marks(name)) for name in OWN_STEPS])
def stepping_env_id(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def stepping_vector_env(stepping_env_id: str) -> Iterator[MetaVectorEnv]:
    vector_env = make_vector_env(stepping_env_id, {}, 4)
    yield vector_env
    vector_env.close()


@pytest.fixture(params=[pytest.param(name, marks=marks(name)) for name in OWN_TASKS])
def tasked_vector_env(request: pytest.FixtureRequest) -> Iterator[MetaVectorEnv]:
    vector_env = make_vector_env(request.param, {}, 4)
    yield vector_env
    vector_env.close()


@pytest.fixture(params=[pytest.param(name, marks=marks(name)) for name in BASES])
def base_env_id(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def base_vector_env(base_env_id: str) -> Iterator[MetaVectorEnv]:
    vector_env = make_vector_env(base_env_id, {}, 4)
    yield vector_env
    vector_env.close()


@pytest.fixture
def vector_env(env_id: str) -> Iterator[MetaVectorEnv]:
    vector_env = make_vector_env(env_id, {}, 4)
    yield vector_env
    vector_env.close()
