from pathlib import Path

import pytest

from maml_rl.results.identity import identity, identity_now, sources
from tests.small_runs import config_of


@pytest.mark.parametrize(
    ("key", "of_training"), [("histories", True), ("evaluation-tasks", True), ("env-kwargs.rulesets", False)]
)
def test_policy_is_another_after_a_change_of_a_file_that_not_only_training_reads(
    key: str, of_training: bool, tmp_path: Path
) -> None:
    file = tmp_path / "recording" / "recording.json"
    file.parent.mkdir()
    file.write_text("[]")
    values = {
        "histories": {"algorithm": "dpt", "algorithm_settings": {"histories": str(tmp_path)}},
        "evaluation-tasks": {"evaluate_every": 1, "evaluation_tasks": str(file)},
        "env-kwargs.rulesets": {"env_kwargs": {"rulesets": str(file)}},
    }
    config = config_of(**values[key])
    system = {"sources": sources(config)}
    assert key in system["sources"]
    assert identity_now(config, system) == identity(config, system)
    file.write_text("[1]")
    assert (identity_now(config, system) == identity(config, system)) == of_training
