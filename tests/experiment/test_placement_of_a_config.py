"""The placement settings of a config reach the sampler."""

from dataclasses import fields
from typing import Any

import pytest

from maml_rl.config.config import Config
from maml_rl.experiment import build
from maml_rl.experiment.build import make_experiment
from maml_rl.samplers.placement import Placement, PlacementOptions

OTHERS: dict[str, Any] = {
    "backend": "processes",
    "num_workers": 3,
    "inference": "central",
    "recv_timeout": 0.5,
    "num_groups": 2,
    "stepping": "threads",
    "stepping_threads": 3,
    "step_timeout": 7.0,
    "max_retries": 7,
    "max_restarts": 1,
    "ray_address": "10.0.0.1:6379",
    "strict": True,
    "ray_start_timeout": 11.0,
    "ray_head_timeout": 12.0,
    "ray_num_cpus": 2.0,
    "ray_resources": {"simulator": 0.5},
    "ray_placement_group": "PACK",
    "ray_runtime_env": {"env_vars": {"A": "1"}},
    "ray_log_to_driver": True,
    "update": "driver",
}


def test_every_field_of_a_placement_is_an_argument_of_the_sampler() -> None:
    # The number of workers has a place of its own, as in pytorch-maml-rl.
    assert {field.name for field in fields(Placement)} == {*PlacementOptions.__annotations__, "num_workers"}


@pytest.mark.parametrize("name", [field.name for field in fields(Placement) if field.name in Config.model_fields])
def test_every_setting_of_a_placement_reaches_the_sampler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Sampler:
        def __init__(self, *args: Any, **options: Any) -> None:
            given.update(options)

        def check_threads(self, num_tasks: int) -> None:
            assert num_tasks == 20

    monkeypatch.setattr(build, "MultiTaskSampler", Sampler)
    config = {"env-name": "2DNavigation-v0", name.replace("_", "-"): OTHERS[name]}
    experiment = make_experiment(Config.model_validate(config))
    experiment.make_sampler()
    assert given[name] == OTHERS[name]
    given.clear()
    experiment.make_sampler(evaluation=True)
    assert (name in given) is (name not in ("inference", "recv_timeout", "num_groups"))
