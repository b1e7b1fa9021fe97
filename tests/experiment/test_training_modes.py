"""Training with every way of collecting that must agree bit for bit, and with batches collected ahead of time."""

import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from maml_rl.config import Config
from maml_rl.errors import ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.experiment.train import digest_of, train
from maml_rl.runs.checkpoint import latest_intact
from maml_rl.runs.metrics import Metrics
from tests import small_runs
from tests.small_runs import untimed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("forked_workers")]


def config_of(**values: Any) -> Config:
    return small_runs.config_of(**{"meta_batch_size": 4, "num_batches": 4, **values})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(config_of(), folder, num_workers=0)
    return folder


@pytest.mark.parametrize("mode", [{"num_groups": 2}, {"inference": "worker"}, {"inference": "central"}])
def test_run_resumed_in_a_mode_that_must_agree_is_bit_identical(
    mode: dict[str, Any], tmp_path: Path, undisturbed: Path
) -> None:
    train(config_of(num_batches=2), tmp_path, num_workers=0)
    train(config_of(**mode), tmp_path, num_workers=2, resume=True)
    assert untimed(tmp_path) == untimed(undisturbed)
    with pytest.raises(ConfigError, match="was made with another 'prefetch'"):
        train(config_of(prefetch=1), tmp_path, num_workers=0, resume=True)


def lagging(config: Config, lag: int) -> list[str]:
    """Train without a thread, each batch with parameters that are `lag` updates old; return digests of the batches."""
    experiment = make_experiment(config)
    learner, versions, digests = experiment.metalearner, [], []
    with make_sampler(experiment, num_workers=0) as sampler:
        for number in range(config.num_batches):
            versions.append({name: value.clone() for name, value in learner.policy.state_dict().items()})
            sampler.policy.load_state_dict(versions[max(number - lag, 0)])
            batch = learner.collect(sampler, sampler.sample_tasks(config.meta_batch_size))
            digests.append(digest_of(batch))
            learner.learn(batch, number)
    return digests


@pytest.mark.parametrize(("prefetch", "num_workers"), [(1, 0), (3, 2)])
def test_prefetched_batches_have_the_same_age_in_updates_for_any_timing(
    prefetch: int, num_workers: int, tmp_path: Path
) -> None:
    threads, config = threading.active_count(), config_of(prefetch=prefetch, num_batches=6)
    train(config, tmp_path, num_workers=num_workers)
    assert threading.active_count() == threads
    rows = untimed(tmp_path)
    assert [row["iteration"] for row in rows] == list(range(6))
    assert [row["staleness"] for row in rows] == [min(number, prefetch) for number in range(6)]
    assert [row["digest"] for row in rows] == lagging(config, prefetch)


def test_first_update_on_recorded_log_probabilities_is_that_on_computed_ones(tmp_path: Path, undisturbed: Path) -> None:
    train(config_of(prefetch=1, num_batches=1), tmp_path, num_workers=0)
    found, wanted = untimed(tmp_path)[0], untimed(undisturbed)[0]
    assert [found.get("staleness"), wanted.get("staleness")] == [0, None]
    for name in ("loss/before", "loss/after", "kl", "grad_norm"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-6), name


def test_interrupted_run_with_prefetch_ends_with_the_same_bytes_when_resumed(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = config_of(prefetch=2, num_batches=6)
    train(config, whole, num_workers=0)

    def stop(metrics: Metrics) -> None:
        if metrics["iteration"] == 2:
            raise ZeroDivisionError

    # Python keeps a process of its own once something has spawned another.
    threads, children = threading.active_count(), psutil.Process().children()
    with pytest.raises(ZeroDivisionError):
        train(config, parts, num_workers=2, on_iteration=stop)
    assert threading.active_count() == threads
    assert psutil.Process().children() == children
    train(config, parts, num_workers=3, resume=True)
    assert untimed(parts) == untimed(whole)
    mine, theirs = (latest_intact(folder / "checkpoints")[1] for folder in (parts, whole))
    assert mine.earlier.keys() == theirs.earlier.keys() == {4, 5}
    for found, wanted in ((mine.tensors, theirs.tensors), (mine.earlier[5], theirs.earlier[5])):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
