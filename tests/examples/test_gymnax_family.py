"""The family of the example trains, and its id makes slots."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from maml_rl.envs import make_vector_env
from maml_rl.envs.global_generators import KeptGenerators

pytestmark = pytest.mark.jax


@pytest.mark.timeout(120)
def test_example_in_jax_trains_and_registers_an_id(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jax")
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "examples")
    monkeypatch.setattr(sys, "argv", ["gymnax_family.py", "--iterations", "1"])
    # Importing JAX draws from the process's generators, which a test must not.
    with KeptGenerators():
        module = import_module("gymnax_family")
    module.main()
    assert "iteration 0: return -" in capsys.readouterr().out
    assert make_vector_env("JaxPendulum-v0", {}, 2).max_episode_steps == 200
