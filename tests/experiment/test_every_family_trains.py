"""MAML-TRPO trains families of every kind from configs that come with the package, in small sizes."""

import math
from pathlib import Path

import pytest
import torch

from maml_rl.config import load_config
from maml_rl.config.catalog import find_config, shipped_configs
from maml_rl.envs import FAMILIES
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.train import train
from maml_rl.runs.metrics import read_metrics
from tests.envs.contract import OWN_STEPS, marks

CONFIGS: dict[str, Path] = {}
for path in shipped_configs().values():
    config = load_config(path)
    if config.algorithm == "maml-trpo" and config.tasks is None:
        CONFIGS.setdefault(config.env_name, path)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("env_id", [pytest.param(name, marks=marks(name)) for name in OWN_STEPS])
def test_family_trains_from_its_config(tmp_path: Path, env_id: str) -> None:
    # Families for learners with a memory have only their configs.
    others = load_config(find_config("2d-navigation")).override({"env-name": env_id, "env-kwargs": {}})
    whole = load_config(CONFIGS[env_id]) if env_id in CONFIGS else others
    small = {"num-batches": 3, "meta-batch-size": 3, "fast-batch-size": 4, "hidden-sizes": [8], "cg-iters": 3}
    if FAMILIES[env_id].max_episode_steps is not None:
        small["max-episode-steps"] = 20
    config = whole.override(small)
    initial = make_experiment(config).policy.state_dict()
    trained = train(config, tmp_path, num_workers=0).state_dict()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) == 3
    assert all(math.isfinite(row[f"return/step_{step}"]) for row in rows for step in (0, 1))
    # Where a reward was found, the parameters have changed.
    if any(row["return/step_1"] for row in rows):
        assert any(row["accepted"] and row["kl"] > 0.0 for row in rows)
        assert any(not torch.equal(trained[name], initial[name]) for name in initial)
