"""The placement settings of a config reach the sampler."""

import json
import re
from inspect import signature
from typing import Any

import pytest

from maml_rl.config.config import Config
from maml_rl.config.placement import ELSEWHERE, OF_RAY, PLACEMENT_KEYS, WAYS_OF_COLLECTING, Placement, PlacementOptions
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.errors import ConfigError
from maml_rl.experiment import sampling
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.machine import usable_cores
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers import MultiTaskSampler, ParallelVectorEnv

OTHERS: dict[str, Any] = {
    "backend": "processes",
    "engine": "mujoco",
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


def sampler_with(**options: Any) -> MultiTaskSampler:
    return MultiTaskSampler("2DNavigation-v0", {}, 2, NormalMLPPolicy(2, 2, (4,)), num_workers=0, **options)


def test_sampler_takes_a_placement_as_a_whole_and_its_fields_one_by_one() -> None:
    whole = Placement(num_workers=3, step_timeout=7.0, max_retries=7)
    sampler = sampler_with(placement=whole, max_retries=9)
    assert sampler.placement == Placement(num_workers=0, step_timeout=7.0, max_retries=9)
    assert sampler_with(step_timeout=7.0).placement == Placement(num_workers=0, step_timeout=7.0)


@pytest.mark.parametrize("function", [MultiTaskSampler, ParallelVectorEnv])
def test_keyword_arguments_are_the_fields_of_a_placement_without_a_second_default(function: Any) -> None:
    defaults = {name: each.default for name, each in signature(function).parameters.items()}
    assert {name: value for name, value in defaults.items() if name in Placement.model_fields} == {"num_workers": None}
    assert PlacementOptions.__optional_keys__ | {"num_workers"} == Placement.model_fields.keys()


# One of every kind.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"step_timeout": 0.0}, "step_timeout must be greater than 0, got 0.0"),
    ({"step_timeout": float("inf")}, "step_timeout must be a finite number, got inf"),
    ({"ray_num_cpus": "2"}, "ray_num_cpus must be a valid number, got '2'"),
    ({"ray_resources": {"simulator": -1}}, "ray_resources['simulator'] must be greater than 0, got -1"),
    ({"start_method": "thread"}, "start_method must be 'forkserver', 'spawn' or 'fork', got 'thread'"),
    ({"num_workers": 0, "update": "workers"}, "update='workers' needs workers in which the policy acts"),
    ({"num_workers": 2, "update": "workers", "inference": "central"}, "update='workers' needs workers in which"),
    ({"num_workers": 2, "update": "workers", "num_groups": 2}, "update='workers' needs workers in which"),
    ({"num_workers": 0, "backend": "processes"}, "backend='processes' needs workers, but num_workers is 0; raise it"),
    ({"num_workers": 0, "backend": "ray"}, "backend='ray' needs workers, but num_workers is 0; raise it, or leave it"),
    ({"num_workers": 2, "backend": "in-process"}, "has no workers, but num_workers is 2; use 'processes'"),
    ({"engine": "warp", "num_workers": 2}, "engine='warp' steps all environments on the device, and num_workers=2"),
    ({"engine": "warp", "backend": "processes"}, "steps all environments on the device, and backend='processes' steps"),
    ({"backend": "device", "num_workers": 2}, "backend='device' has no workers, but num_workers is 2; use 'processes'"),
    ({"engine": "mujoco", "backend": "device"}, "backend='device' has the engine 'warp', got engine='mujoco'"),
    ({"ray_address": "a:1"}, "ray_address is a setting of backend='ray', got backend='auto'; leave it out, or use"),
    ({"backend": "processes", "strict": True}, "strict is a setting of backend='ray', got backend='processes'"),
    ({"stepping": "serial", "stepping_threads": 2}, "slots one by one without stepping_threads; leave one out"),
    ({"backend": "ray", "recv_timeout": 1.0}, "recv_timeout and backend='ray' exclude each other: they share memory"),
    ({"backend": "ray", "num_groups": 2}, "num_groups and backend='ray' exclude each other"),
    ({"backend": "ray", "inference": "central"}, "inference='central' and backend='ray' exclude each other"),
    ({"backend": "ray", "start_method": "fork"}, "start_method is how child processes start; with backend='ray' leave"),
    ({"backend": "ray", "device": "meta"}, "backend='ray' acts on the CPU, in every actor, got device='meta'"),
    ({"backend": "ray", "ray_resources": {"CPU": 2}}, "ray_resources names CPU; give ray_num_cpus instead"),
    ({"backend": "ray", "ray_num_cpus": 1e-9}, "ray_num_cpus must be at least 0.0001, the least that Ray counts"),
    ({"backend": "ray", "ray_num_cpus": 1.5}, "ray_num_cpus must be whole or less than 1, as Ray shares single units"),
    ({"backend": "ray", "ray_placement_group": "PACK"}, "reserves all actors at once; say how many by num_workers"),
    ({"num_workers": 0, "inference": "worker"}, "inference='worker' needs workers to act in, but num_workers is 0"),
    ({"num_workers": 2, "inference": "worker", "recv_timeout": 0.1}, "recv_timeout and inference='worker' exclude"),
    ({"num_workers": 2, "inference": "worker", "num_groups": 2}, "num_groups and inference='worker' exclude each"),
    ({"num_workers": 2, "inference": "worker", "device": "cuda"}, "on the CPU, in every worker, got device='cuda'"),
    ({"num_workers": 0, "num_groups": 2}, "num_groups=2 needs at least as many workers to take turns"),
    ({"num_workers": 2, "num_groups": 2, "recv_timeout": 0.1}, "recv_timeout and num_groups exclude each other"),
    ({"num_workers": 0, "recv_timeout": 0.1}, "recv_timeout needs workers to wait for, but num_workers is 0"),
]


def test_values_that_are_out_of_range_or_exclude_each_other_are_refused_by_name() -> None:
    for options, message in REFUSED:
        with pytest.raises(ValueError, match=re.escape(message)):
            Placement(**options)
    with pytest.raises(ValueError, match="step_timeout must be greater than 0, got 0"):
        sampler_with(step_timeout=0.0)


def test_keys_of_a_placement_are_beside_the_others_in_a_config_and_what_it_writes() -> None:
    config = Config.model_validate({"env-name": "2DNavigation-v0", "step-timeout": 7.0})
    assert config.placement == Placement(step_timeout=7.0)
    written = json.loads(config.to_json())
    assert written["step-timeout"] == 7.0
    assert set(PLACEMENT_KEYS) < set(written)
    assert not {"placement", "device", "start-method"} & set(written)
    with pytest.raises(ConfigError, match=r"unknown key 'placement' in x\.yaml, line 2; its settings are keys"):
        Config.from_mapping(parse_mapping("env-name: 2DNavigation-v0\nplacement: {backend: ray}", "x.yaml"))
    for key in ("device", "start-method"):
        with pytest.raises(ConfigError, match=f"unknown key '{key}' in x.yaml, line 2"):
            Config.from_mapping(parse_mapping(f"env-name: 2DNavigation-v0\n{key}: fork", "x.yaml"))


def test_every_setting_of_a_placement_reaches_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Sampler:
        def __init__(self, *args: Any, **options: Any) -> None:
            given.update(options)

        def check_threads(self, num_tasks: int) -> None:
            assert num_tasks == 20

    monkeypatch.setattr(sampling, "MultiTaskSampler", Sampler)
    for name in [key.replace("-", "_") for key in PLACEMENT_KEYS]:
        config = {"env-name": "2DNavigation-v0", name.replace("_", "-"): OTHERS[name]}
        if name in OF_RAY:
            config |= {"backend": "ray", "num-workers": 2}
        experiment = make_experiment(Config.model_validate(config))
        make_sampler(experiment)
        assert getattr(given["placement"], name) == OTHERS[name]
        make_sampler(experiment, evaluation=True)
        in_evaluation = Placement.model_fields[name].default if name in WAYS_OF_COLLECTING else OTHERS[name]
        assert getattr(given["placement"], name) == ("driver" if name == "update" else in_evaluation)


def test_number_of_workers_and_who_acts_follow_from_the_rest() -> None:
    assert [Placement(backend=backend).workers for backend in ("auto", "processes", "in-process", "device")] == [
        *(usable_cores(), usable_cores(), 0, 0)
    ]
    two = Placement(num_workers=2)
    assert two.workers_act
    for change in ({"inference": "central"}, {"num_groups": 2}, {"recv_timeout": 0.5}, {"device": "cuda"}):
        changed = two.replace(**change)
        assert not changed.workers_act
        assert changed.for_evaluation(device="cpu").workers_act
    assert two.replace(backend="ray", ray_num_cpus=0.5, ray_resources={"GPU": 1.0}).asked == {"CPU": 0.5, "GPU": 1.0}
    assert ELSEWHERE["num-workers"] is None
    assert ELSEWHERE["backend"] == "auto"


def test_backend_that_replaces_ray_leaves_its_settings_behind() -> None:
    config = Config.from_mapping(
        parse_mapping("env-name: 2DNavigation-v0\nbackend: ray\nray-num-cpus: 2\nstrict: true", "x.yaml")
    )
    assert config.override({"num-workers": 3}).placement.ray_num_cpus == 2.0
    assert config.override({"backend": "processes"}).placement == Placement(backend="processes")
    assert config.override(ELSEWHERE | {"backend": "ray"}).placement == Placement(backend="ray", ray_num_cpus=2.0)
    asked = config.override({"backend": "processes", "ray-num-cpus": 3.0})
    with pytest.raises(ConfigError, match="'ray-num-cpus' in the command line: ray_num_cpus is a setting of backend"):
        make_sampler(make_experiment(asked))
