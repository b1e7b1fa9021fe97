"""The benchmark of families in JAX runs from end to end with tiny sizes, and writes its rows."""

import json
from pathlib import Path

import pytest

from maml_rl.envs.global_generators import KeptGenerators

pytestmark = [pytest.mark.jax, pytest.mark.nightly, pytest.mark.timeout(600)]


def test_sampling_is_compared_with_a_loop_by_hand_and_written(tmp_path: Path) -> None:
    with KeptGenerators():
        pytest.importorskip("jax")
        from benchmarks import jax_families

        path = tmp_path / "jax.json"
        sizes = ["--families", "pendulum", "--slots", "8", "--steps", "5", "--repeats", "1"]
        jax_families.main([*sizes, "--json", str(path)])
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    for kind in ("mlp", "gru"):
        of_both = [rows[f"pendulum, 8 slots: {who} {kind}, steps/s"]["median"] for who in ("maml_rl", "by hand")]
        assert rows[f"pendulum, 8 slots: maml_rl {kind} / by hand {kind}"]["median"] == of_both[0] / of_both[1]
