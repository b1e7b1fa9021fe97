"""Every registered family, one after the other."""

from collections.abc import Iterator
from typing import Any

import pytest

from maml_rl.envs import MetaVectorEnv, make_vector_env
from tests.envs.contract import TRIED, marks


@pytest.fixture(params=[pytest.param(name, marks=marks(name)) for name in TRIED])
def env_id(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def vector_env(env_id: str) -> Iterator[MetaVectorEnv]:
    vector_env = make_vector_env(env_id, {}, 4)
    yield vector_env
    vector_env.close()
