"""No general setting is ignored: changed alone, it changes what an algorithm computes, or it is refused."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maml_rl.config import Config, load_config
from maml_rl.config.config import OF_LEARNERS
from maml_rl.config.yaml_source import parse_mapping
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import train
from maml_rl.metalearners import MetaLearner, algorithms, find_metalearner
from maml_rl.metalearners.registry import replacements
from maml_rl.policies import GRUPolicy
from tests.metalearners.small_algorithms import OF_HISTORIES, OF_TRIALS, once_a_kind, small
from tests.small_runs import SMALL, config_of, untimed

pytestmark = pytest.mark.usefixtures("histories")

# Another value of each setting than that of `small`.
OTHERS: dict[str, Any] = {
    "gamma": 0.7,
    "gae-lambda": 0.5,
    "bootstrap": False,
    "baseline": "zero",
    "hidden-sizes": [7],
    "memory": "gru",
    "conv-layers": [[3, 2, 1]],
    "image-scale": 7.0,
    "nonlinearity": "relu",
    "output-scale": 0.3,
    "num-steps": 3,
    "fast-lr": 0.3,
    "meta-batch-size": 2,
    "evaluation-steps": 1,
    "halve-step-size": "once",
}
OF_POLICIES = ("hidden-sizes", "memory", "conv-layers", "image-scale", "nonlinearity", "output-scale")
# Settings of runs, and those that every algorithm uses.
OF_ALL = {
    *("env-name", "env-kwargs", "algorithm", "algorithm-settings", "method", "tasks", "max-episode-steps", "policy"),
    *("fast-batch-size", "num-batches", "seed", "observe-last", "slots-per-task", "backend", "num-workers"),
    *("strict", "update", "inference", "num-groups", "recv-timeout", "stepping", "stepping-threads", "step-timeout"),
    *("max-retries", "max-restarts", "prefetch", "checkpoint-every", "keep-checkpoints", "evaluate-every"),
    *("evaluation-tasks", "ray-address", "ray-start-timeout", "ray-head-timeout", "ray-num-cpus", "ray-resources"),
    *("ray-placement-group", "ray-runtime-env", "ray-log-to-driver", "engine"),
}
PIXELS = {"env-name": "PixelNavigation-v0", "max-episode-steps": 4, "fast-batch-size": 2}


def config_for(algorithm: str, key: str) -> Config:
    """Return a small config in which the key could matter."""
    values: dict[str, Any] = {"num-batches": 1} | ({} if algorithm in OF_HISTORIES else {"fast-batch-size": 3})
    of_images = key in ("conv-layers", "image-scale") and key in find_metalearner(algorithm).uses
    config = small(algorithm).override(values | (PIXELS if of_images else {}))
    if not (of_images and "normalize-observations" in OF_TRIALS.get(algorithm, {})):
        return config
    return config.override({"algorithm-settings": OF_TRIALS[algorithm] | {"normalize-observations": False}})


def digest_of(config: Config) -> str:
    """Return a digest of policy and learner after an update, and of the returns of a test."""
    experiment = make_experiment(config)
    learner = experiment.metalearner
    experiment.open_data()
    if learner.samples:
        # Replays need two batches before the first update.
        with make_sampler(experiment, num_workers=0) as sampler:
            for number in range(2 if learner.experience else 1):
                learner.learn(learner.collect(sampler, sampler.sample_tasks(config.meta_batch_size)), number)
    else:
        learner.learn(learner.store_of(()), 0)
    tested = evaluate(experiment, tasks=2, num_workers=0)
    digest = hashlib.sha256(np.ascontiguousarray(tested.returns).tobytes())
    for name, value in {**learner.policy.state_dict(), **learner.state_dict()}.items():
        content = value.detach().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        digest.update(name.encode() + content)
    return digest.hexdigest()


def test_every_setting_is_one_that_all_use_or_one_that_learners_declare() -> None:
    keys = set(Config.fields_by_key())
    assert set(OTHERS) == set(OF_LEARNERS)
    assert keys == OF_ALL | set(OF_LEARNERS)
    assert not OF_ALL & set(OF_LEARNERS)


def test_every_general_setting_that_a_learner_does_not_use_is_refused_with_a_remedy() -> None:
    for algorithm in algorithms():
        learner = find_metalearner(algorithm)
        instead = replacements(learner)
        assert set(learner.uses) <= set(OF_LEARNERS)
        for key in OTHERS.keys() - learner.uses:
            with pytest.raises(ConfigError) as caught:
                make_experiment(config_for(algorithm, key).override({key: OTHERS[key]}))
            remedy = f"use {instead[key]!r} instead" if key in instead else "leave it out"
            assert str(caught.value) == f"{key!r} in the command line: {algorithm} does not use it; {remedy}"
            # A remedy is a setting that there is.
            known = [key for model in (Config, learner.Settings) for key in model.fields_by_key()]
            assert instead.get(key, known[0]) in known


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", once_a_kind(algorithms()))
def test_every_general_setting_that_a_learner_uses_changes_what_is_computed(algorithm: str) -> None:
    before: dict[str, str] = {}
    learner = find_metalearner(algorithm)
    # The policy of many is that of MAML-TRPO.
    is_shared = algorithm != "maml-trpo" and learner.make_policy.__func__ is MetaLearner.make_policy.__func__
    for key in [key for key in OTHERS if key in learner.uses and not (is_shared and key in OF_POLICIES)]:
        base = config_for(algorithm, key)
        changed = base.override({key: OTHERS[key]})
        if base.env_name not in before:
            before[base.env_name] = digest_of(base)
            assert len(before) > 1 or digest_of(base) == before[base.env_name], "the computation is reproducible"
        assert digest_of(changed) != before[base.env_name], f"{algorithm} ignores {key}"


def message_of(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_experiment(config_of(**values))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_setting_that_a_policy_does_not_use_is_refused_where_it_was_given() -> None:
    images = "it is for images, and 2DNavigation-v0 has none; leave it out"
    assert message_of(conv_layers=[[3, 2, 1]]).endswith(images)
    assert message_of(image_scale=3.0).endswith(images)
    assert "'nonlinearity' in x.yaml, line 1: a policy with a 'memory'" in message_of(memory="gru", nonlinearity="relu")
    own = {**SMALL, "policy": "tests.experiment.own_policy:Squashed"}
    with pytest.raises(ConfigError, match=r"'hidden-sizes' in x.yaml, line 1: 'policy' makes a policy of its own"):
        make_experiment(Config.from_mapping(parse_mapping(json.dumps(own), "x.yaml")))
    without = r"'evaluation-tasks' in x.yaml, line 1: without 'evaluate-every' nothing is evaluated; add that, or"
    with pytest.raises(ConfigError, match=without):
        make_experiment(config_of(evaluation_tasks="no.json"))
    # Null says that there is none, and a default nothing.
    make_experiment(config_of(evaluation_tasks=40))
    make_experiment(config_of(conv_layers=None, image_scale=None, memory=None))


def test_settings_meant_for_what_an_option_replaces_are_dropped() -> None:
    before = config_of(num_steps=2, output_scale=0.3)
    config = make_experiment(before.override({"algorithm": "rl2", "observe-last": True})).config
    assert (config.num_steps, config.hidden_sizes) == (1, (64, 64))
    with pytest.raises(
        ConfigError, match="'num-steps' in the command line: rl2 does not use it; use 'fast-batch-size'"
    ):
        make_experiment(before.override({"algorithm": "rl2", "observe-last": True, "num-steps": 2}))
    assert make_experiment(before.override({"memory": "gru"})).config.output_scale == 1.0
    text = "algorithm: rl2\nobserve-last: true\nalgorithm-settings: {cell: transformer, context: 7}"
    attending = Config.from_mapping(parse_mapping(f"env-name: 2DNavigation-v0\n{text}", "x.yaml"))
    assert isinstance(make_experiment(attending.override({"algorithm-settings": {"cell": "gru"}})).policy, GRUPolicy)
    with pytest.raises(ConfigError, match=r"settings\.context' in the command line: it is for a transformer"):
        make_experiment(attending.override({"algorithm-settings": {"cell": "gru", "context": 9}}))
    evaluated = config_of(evaluate_every=2, evaluation_tasks=7)
    assert make_experiment(evaluated.override({"evaluate-every": None})).config.evaluation_tasks == 40


def test_a_run_records_what_it_uses_and_one_of_an_earlier_version_continues(tmp_path: Path) -> None:
    config = small("rl2")
    train(config, tmp_path / "whole", num_workers=0)
    recorded = load_config(tmp_path / "whole" / "config.json")
    text = (tmp_path / "whole" / "config.json").read_text()
    assert "hidden-sizes" not in text
    assert "gamma" in text
    train(config.override({"num-batches": 2}), tmp_path / "run", num_workers=0)
    # Earlier versions recorded every setting, also those that were given and ignored.
    everything = recorded.override(
        {"num-batches": 2, "hidden-sizes": [5], "num-steps": 3, "bootstrap": False}
    ).to_json()
    assert '"hidden-sizes"' in everything
    (tmp_path / "run" / "config.json").write_text(everything)
    (tmp_path / "run" / "SHA256SUMS").unlink()
    evaluate(make_experiment(load_config(tmp_path / "run" / "config.json")), tasks=2, num_workers=0)
    again = load_config(tmp_path / "run" / "config.json").override({"num-batches": 3})
    train(again, tmp_path / "run", num_workers=0, resume=True)
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")
    assert (tmp_path / "run" / "config.json").read_text() == text
