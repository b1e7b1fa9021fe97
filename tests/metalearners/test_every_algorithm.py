"""The guarantees of every registered algorithm: runs repeat, resume, and can be tested and adapted."""

import copy
import gc
from contextlib import nullcontext
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TransformAction

from maml_rl.adaptation import AdaptationRule
from maml_rl.config import load_config
from maml_rl.errors import CheckpointError, ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.load_policy import adapt_to_task, load_policy
from maml_rl.experiment.train import train
from maml_rl.metalearners import algorithms, find_metalearner
from maml_rl.runs.metrics import Metrics
from tests.metalearners.small_algorithms import OF_CONTEXTS, OF_HISTORIES, OF_TRIALS, once_a_kind, small
from tests.small_runs import assert_same_run, train_until, untimed

pytestmark = pytest.mark.usefixtures("forked_workers", "histories")
GOAL = {"goal": [0.3, -0.2]}
WITH_NETWORKS = [name for name in algorithms() if "hidden-sizes" in find_metalearner(name).uses]
# What they collect with is in the policy, besides it, in a memory, or left by updates.
COLLECTING = ("maml-trpo", "meta-sgd", "rl2", "rsac", "pearl")


@pytest.fixture(scope="module")
def tensors_left() -> dict[str, list[tuple[int, ...]]]:
    """Shapes of the tensors that the garbage collector had to free during the runs of the algorithms."""
    return {}


@pytest.fixture(scope="module", params=once_a_kind(algorithms()))
def run(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tensors_left: dict[str, list[tuple[int, ...]]],
) -> tuple[str, Path]:
    """An algorithm, and a finished run of it; tests must not write to it."""
    left = tensors_left[request.param] = []

    def look(metrics: Metrics) -> None:
        if metrics["iteration"] == 0:
            # What was there before is not looked at.
            gc.freeze()
            gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left.extend(tuple(kept.shape) for kept in gc.garbage if isinstance(kept, torch.Tensor))
        gc.garbage.clear()

    folder = tmp_path_factory.mktemp(request.param) / "run"
    try:
        train(small(request.param), folder, num_workers=0, on_iteration=look)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
    return request.param, folder


@pytest.mark.parametrize("algorithm", ["rl2", "rsac", "amago", "pearl"])
def test_actions_may_be_single_numbers_in_double_precision(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(gymnasium.registry, "Scalar-v0", raising=False)
    gymnasium.register("Scalar-v0", _with_one_number, max_episode_steps=5)
    config = small(algorithm, env_name="Scalar-v0", num_batches=2)
    settings = {"reward-prediction-coefficient": 0.1} if algorithm == "rl2" else {}
    train(config.override({"algorithm-settings": settings}), tmp_path / "run", num_workers=0)
    assert load_policy(tmp_path / "run").distributions.action_shape == ()


def _with_one_number() -> gymnasium.Env:
    env = gymnasium.make("2DNavigation-v0").unwrapped
    return TransformAction(env, lambda action: np.full(2, action), gymnasium.spaces.Box(-0.1, 0.1, (), np.float64))


@pytest.mark.parametrize("algorithm", once_a_kind(WITH_NETWORKS, ("maml-trpo", "cavia", "varibad", "rsac", "pearl")))
def test_networks_without_hidden_layers_are_learned(algorithm: str, tmp_path: Path) -> None:
    config = small(algorithm, hidden_sizes=[], num_batches=1)
    train(config, tmp_path / "run", num_workers=0)
    assert len(untimed(tmp_path / "run")) == 1


def test_tensors_of_an_iteration_are_freed_without_the_garbage_collector(
    run: tuple[str, Path], tensors_left: dict[str, list[tuple[int, ...]]]
) -> None:
    algorithm, _ = run
    assert tensors_left[algorithm] == []


@pytest.mark.timeout(60)
def test_run_resumed_in_workers_is_bit_identical_whatever_torchs_generator_holds(
    run: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, folder = run
    # Without the block that seeds users' code, only a learner with its own random streams repeats.
    for module in ("maml_rl.experiment.build", "maml_rl.metalearners.metalearner"):
        monkeypatch.setattr(f"{module}.seeded_generators", lambda *_: nullcontext())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        train_until(0, small(algorithm, checkpoint_every=1), tmp_path / "run")
        train(small(algorithm), tmp_path / "run", num_workers=2, resume=True)
        assert torch.equal(torch.get_rng_state(), before)
    assert_same_run(tmp_path / "run", folder)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("algorithm", once_a_kind(sorted({*algorithms()} - {*OF_HISTORIES}), COLLECTING))
def test_batches_collected_ahead_are_the_same_for_any_workers_and_after_resuming(
    algorithm: str, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(small(algorithm, prefetch=1), whole, num_workers=0)
    train(small(algorithm, prefetch=1, num_batches=2), parts, num_workers=0)
    train(small(algorithm, prefetch=1), parts, num_workers=2, resume=True)
    assert_same_run(parts, whole)
    assert [row["staleness"] for row in untimed(whole)] == [0, 1, 1]


def test_saved_run_is_evaluated_with_the_rule_that_it_was_trained_with(run: tuple[str, Path]) -> None:
    algorithm, folder = run
    experiment = make_experiment(load_config(folder / "config.json"))
    experiment.restore("latest", folder)
    evaluation = evaluate(experiment, tasks=2, num_steps=2, num_workers=0)
    policy = load_policy(folder)
    initial = make_experiment(small(algorithm)).policy.state_dict()
    assert any(not torch.equal(initial[name], tensor) for name, tensor in policy.state_dict().items()), "it has moved"
    if algorithm in OF_HISTORIES:
        assert evaluation.returns.shape == (2, 1, 1)
        adapted = adapt_to_task(policy, "Bandit-K5-v0", {"mean": [0.1, 0.2, 0.3, 0.4, 0.5]})
        assert int(adapted.initial_memory(1)[1]) == 8
        return
    if algorithm in OF_TRIALS:
        # Four episodes of one trial.
        assert evaluation.returns.shape == (2, 4, 1)
        refused = f"'{algorithm}' does not adapt by gradient steps; leave out rule and"
        with pytest.raises(ConfigError, match=refused):
            adapt_to_task(policy, "2DNavigation-v0", GOAL, step_size=0.1)
        adapted = adapt_to_task(policy, "2DNavigation-v0", GOAL)
        assert all(torch.equal(x, adapted.inner.get_parameter(name)) for name, x in policy.named_parameters())
        assert not torch.equal(adapted.initial_memory(1)[0], policy.initial_memory(1)[0])
        return
    assert evaluation.returns.shape == (2, 3, 4)
    if algorithm in OF_CONTEXTS:
        before = copy.deepcopy(policy.state_dict())
        adapted, again = (adapt_to_task(policy, "2DNavigation-v0", GOAL, 2, seed=3) for _ in range(2))
        changed = {name for name, x in adapted.state_dict().items() if not torch.equal(x, before[name])}
        assert changed == {"context"}
        assert torch.equal(adapted.context, again.context)
        assert all(torch.equal(x, before[name]) for name, x in policy.state_dict().items())
        with pytest.raises(ConfigError, match="does not adapt by gradient steps; leave out rule"):
            adapt_to_task(policy, "2DNavigation-v0", GOAL, rule=AdaptationRule(0.1))
        return
    assert policy.origin.rule.name() == make_experiment(small(algorithm)).metalearner.rule.name()
    adapted = adapt_to_task(policy, "2DNavigation-v0", GOAL).state_dict()
    changed = {name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, adapted[name])}
    names = policy.origin.rule.parameters
    assert changed
    assert names is None or changed <= set(names)


@pytest.mark.parametrize("run", ["maml-trpo"], indirect=True, scope="module")
def test_checkpoint_of_another_algorithm_is_refused(run: tuple[str, Path], tmp_path: Path) -> None:
    algorithm, folder = run
    other = next(name for name in algorithms() if name != algorithm)
    with pytest.raises(CheckpointError, match=f"is of the algorithm '{algorithm}', not '{other}'") as caught:
        make_experiment(small(other)).restore("latest", folder)
    assert "\n" not in str(caught.value)


# Episodes are the same bytes (`test_kinds_of_spaces.py`), in which actions are inputs for critics and memories.
@pytest.mark.parametrize("algorithm", ["rsac", "amago"])
def test_actions_that_start_at_one_are_learned_as_those_that_start_at_zero(algorithm: str, tmp_path: Path) -> None:
    for start in (0, 1):
        family = {"env_name": "tests.numbered_env:Numbered-v0", "env_kwargs": {"start": start}, "num_batches": 1}
        train(small(algorithm, **family), tmp_path / str(start), num_workers=0)
    assert_same_run(tmp_path / "1", tmp_path / "0")
