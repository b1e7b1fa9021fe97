"""Gradient steps on an accelerator, compared with those of the ordinary path."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from maml_rl.errors import NonFiniteError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.metalearners import EpisodeStore, MetaLearner, stepper
from maml_rl.metalearners.stepper import Stepper, set_step_size
from maml_rl.policies.heads import SquashedGaussianHead
from tests.device_alone import device_alone
from tests.metalearners.histories import bandit_config, bandit_histories
from tests.metalearners.recorded_graphs import Graphs
from tests.small_runs import config_of

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TRANSFORMER = {"cell": "transformer", "context": 6, "num-layers": 1, "num-heads": 2}
POINT = {"env-name": "SemiCircle-v0", "max-episode-steps": 6}
POINT_GOAL = {"env-name": "PointGoal-v0", "max-episode-steps": 6}
GRID = {"env-name": "GridNavi-v0", "env-kwargs": {"width": 3, "height": 2}, "max-episode-steps": 4}
RSAC = {"hidden-size": 8, "batch-size": 5, "num-updates": 6, "warmup-trials": 1, "buffer-steps": 1000}
PEARL = {"encoder-sizes": [8], "tasks-per-update": 3, "batch-size": 7, "context-batch": 5, "num-updates": 6}
PEARL |= {"warmup-steps": 1, "buffer-steps": 1000}
VARIBAD = {"encoder-size": 8, "belief-trials": 6, "decoder-sizes": [8], "replay-steps": 1000, "belief-updates": 6}
AMAGO = {"hidden-size": 8, "critic-layers": [8], "num-bins": 9, "num-critics": 3, "batch-size": 5, "num-updates": 6}
AMAGO |= {"warmup-trials": 1, "buffer-steps": 1000, "policy-gradient-share": 0.25}
NORMALIZED = {"normalize-observations": True, "largest-value": 10.0}
RL2 = {"hidden-size": 8, "num-epochs": 6, "learning-rate": 1e-3}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "rsac gru": ("rsac", POINT, RSAC),
    "rsac lstm": ("rsac", POINT, RSAC | {"cell": "lstm", "sequence-length": 4}),
    "rsac discrete": ("rsac", GRID, RSAC),
    "rsac two-hot": ("rsac", POINT, RSAC | {"value": "two-hot"}),
    "pearl": ("pearl", POINT, PEARL),
    "varibad": ("varibad", GRID, VARIBAD),
    "varibad cells": ("varibad", GRID, VARIBAD | {"reward-decoder": "cells", "belief-steps": 2}),
    "rl2 gru": ("rl2", POINT, RL2 | {"reward-prediction-coefficient": 1.0, "normalize-observations": True}),
    "rl2 lstm": ("rl2", GRID, RL2 | {"cell": "lstm", "value": "network", "anneal-over": 4, "entropy-coefficient": 0.1}),
    "rl2 transformer": ("rl2", GRID, RL2 | TRANSFORMER | {"num-minibatches": 2, "token-shift": True}),
    "ad": ("ad", {}, {"anneal-over": 5, "warmup": 3}),
    # With values of up to 10,000, rounding would decide at first which actions are better than the policy's.
    "amago": ("amago", GRID, AMAGO | TRANSFORMER | {"largest-value": 10.0}),
    "amago gru": ("amago", POINT, AMAGO | NORMALIZED | {"cell": "gru", "sequence-length": 4, "learning-rate": 0.003}),
    "amago hindsight": ("amago", POINT_GOAL, AMAGO | TRANSFORMER | {"hindsight-share": 0.5, "filter-temperature": 1.0}),
    "amago offline": ("amago-offline", {}, {"num-updates": 5, "critic-layers": [8], "num-bins": 9, "anneal-over": 4}),
}


# One of each kind of step is recorded as a graph, too.
RECORDED = ("rsac lstm", "pearl", "ad", "amago gru", "amago offline")


def make(name: str, device: str = "cpu") -> tuple[MetaLearner, EpisodeStore]:
    """Return a learner, and a batch on this device."""
    algorithm, family, settings = CASES[name]
    if algorithm in ("ad", "amago-offline"):
        given = {key.replace("-", "_"): value for key, value in settings.items()}
        learner = make_experiment(bandit_config(algorithm, **given), device).metalearner
        learner.learn_from(bandit_histories())
        return learner, learner.store_of([])
    values = {"meta-batch-size": 5, "observe-last": algorithm != "pearl", "algorithm": algorithm, "num-batches": 4}
    values |= {"fast-batch-size": 1 if algorithm == "rsac" else 2}
    sizes = {"hidden-sizes": [6]} if algorithm not in ("rl2", "amago") else {}
    config = config_of().override({**values, **sizes, **family, "algorithm-settings": settings})
    experiment = make_experiment(config, device)
    with make_sampler(experiment, num_workers=0) as sampler:
        return experiment.metalearner, experiment.metalearner.collect(sampler, sampler.sample_tasks(5))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Take the steps of new learners as on a device, by the same buffers, but without graphs."""
    monkeypatch.setattr(stepper, "_KINDS", ("cpu", "cuda"))
    monkeypatch.setattr("maml_rl.experience.replay._COPIED_TO", ("cpu",))
    return monkeypatch


def updates(learner: MetaLearner, batch: EpisodeStore) -> list[dict[str, Any]]:
    return [learner.learn(batch, number) for number in range(3)]


def steppers(learner: MetaLearner) -> list[Stepper]:
    found = [getattr(learner, name, None) for name in ("stepper", "belief_stepper")]
    return [each for each in found if each is not None]


def assert_same(one: MetaLearner, other: MetaLearner, tolerance: float) -> None:
    for (name, mine), theirs in zip(one.policy.state_dict().items(), other.policy.state_dict().values(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs.cpu(), rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", CASES)
def test_steps_on_a_device_are_those_of_the_ordinary_path(name: str, request: pytest.FixtureRequest) -> None:
    ordinary, batch = make(name)
    expected = updates(ordinary, batch)
    patch = request.getfixturevalue("on_cpu")
    learner, batch = make(name)
    graphs = None
    if name in RECORDED:
        steps = learner.stepper
        graphs = Graphs(steps, patch, [] if learner.networks is None else list(learner.networks.parameters()))
    assert updates(learner, batch) == [pytest.approx(each, rel=1e-6, abs=1e-6) for each in expected]
    if graphs is not None:
        taken = expected[-1]["updates"] if name == "ad" else 3 * expected[0]["updates"]
        assert (steps.num_recorded, graphs.num_launched) == (1, taken - 3)
        # Each on a stream of its own device, whichever is current.
        assert graphs.devices == [steps._device]
    # Adam divides gradients near zero by themselves.
    assert_same(learner, ordinary, 5e-5)
    begun = make(name)[0].policy.parameters()
    assert any(not torch.equal(one, two) for one, two in zip(learner.policy.parameters(), begun, strict=True))
    # What a checkpoint holds continues on the ordinary path; a state that is loaded is in other tensors.
    source, loaded = (ordinary, learner) if graphs else (learner, ordinary)
    loaded.load_state_dict(source.state_dict())
    loaded.policy.load_state_dict(source.policy.state_dict())
    tolerance = 1e-6 if graphs else 1e-4
    assert learner.learn(batch, 3) == pytest.approx(ordinary.learn(batch, 3), rel=tolerance, abs=tolerance)
    assert_same(learner, ordinary, 5e-5)


@pytest.mark.parametrize("name", CASES)
def test_loss_on_a_device_neither_waits_for_it_nor_copies_to_it(name: str, on_cpu: pytest.MonkeyPatch) -> None:
    """Tensors of the device `meta` have no values: whatever reads one, as for a branch, raises."""
    learner, batch = make(name)
    calls: dict[int, tuple[Stepper, tuple[Tensor, ...]]] = {}
    take = Stepper.__call__

    def noted(self: Stepper, *inputs: Tensor) -> Tensor:
        calls[id(self)] = self, inputs
        return take(self, *inputs)

    on_cpu.setattr(Stepper, "__call__", noted)
    learner.learn(batch, 0)
    modules = [module for module in (learner.policy, learner.networks) if module is not None]
    for module in modules:
        module.to("meta")
    learner.device = torch.device("meta")
    for name in {"_unit", "discounts"} & vars(learner).keys():
        setattr(learner, name, getattr(learner, name).to("meta"))
    heads = [vars(each).values() for module in modules for each in module.modules()]
    for head in {each for parts in heads for each in parts if isinstance(each, SquashedGaussianHead)}:
        # They go to the device with the first step, which is not recorded.
        head.bounds(torch.empty(0, device="meta"))
    params = [param for module in modules for param in module.parameters() if param.requires_grad]
    for steps, inputs in calls.values():
        given = [each.to("meta") for each in inputs]
        with device_alone():
            loss, statistics = steps._loss(*given)
            gradients = torch.autograd.grad(loss, params, allow_unused=True)
        assert statistics.device.type == "meta"
        assert sum(each is not None for each in gradients) >= 5
    assert calls


def test_shorter_trials_are_padded_and_graphs_freed_when_a_longer_one_comes(request: pytest.FixtureRequest) -> None:
    ordinary, batch = make("rsac gru")
    ordinary.experience["trials"].append(batch.phases[0])
    patch = request.getfixturevalue("on_cpu")
    learner, _ = make("rsac gru")
    Graphs(learner.stepper, patch, list(learner.networks.parameters()))
    rng, numbers = np.random.default_rng(0), []
    for length in (3, 3, 3, 3, 2, 4, 4, 4, 4, 3, 6):
        trials = ordinary.experience["trials"].sample_sequences(rng, 5, length=length)
        found, expected = (each.stepper(*each.inputs_of(trials)) for each in (learner, ordinary))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        numbers.append(learner.stepper.num_recorded)
    assert numbers == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0]
    assert learner.stepper._longest == 6


def test_shapes_beyond_the_most_graphs_are_told_of_once(
    on_cpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_cpu.setattr(stepper, "_MOST_GRAPHS", 2)
    param = nn.Parameter(torch.ones(3))
    steps = Stepper(lambda given: ((param * given.sum()).sum(), param[:1]), torch.optim.SGD([param], 0.1), name="one")
    Graphs(steps, on_cpu)
    for length in (1, 2, 3, 4):
        for _ in range(5):
            steps(torch.ones(length))
    assert steps.num_recorded == 2
    (told,) = [each.getMessage() for each in caplog.records]
    assert "gradient steps of 2 shapes are recorded" in told


def test_step_that_cannot_be_recorded_is_taken_and_one_warning_says_why(on_cpu: pytest.MonkeyPatch) -> None:
    loss = Quadratic()
    optimizer = torch.optim.SGD([loss.param], lr=0.1)
    steps = Stepper(loss, optimizer, name="one")
    graphs = Graphs(steps, on_cpu, error=RuntimeError("no graph of this"))
    for _ in range(3):
        steps(torch.zeros(2))
    with pytest.warns(RuntimeWarning, match="not recorded as CUDA graphs: RuntimeError: no graph of this") as warned:
        steps(torch.zeros(2))
    steps(torch.zeros(2))
    assert len(warned) == graphs.num_refused == 1
    torch.testing.assert_close(loss.param.detach(), 0.8**5 * torch.tensor([3.0, 4.0]))


@contextmanager
def never_waiting() -> Iterator[None]:
    """Have CUDA refuse to wait."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_steps_on_cuda_are_recorded_and_agree_with_the_cpu(name: str) -> None:
    ordinary, batch = make(name)
    expected = updates(ordinary, batch)
    learner, batch = make(name, "cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = updates(learner, batch)
    assert found == [pytest.approx(each, rel=2e-2, abs=2e-2) for each in expected]
    assert_same(learner, ordinary, 2e-2)
    if hasattr(learner, "draw_inputs"):
        with never_waiting():
            learner.stepper(*learner.draw_inputs())
    for steps in steppers(learner):
        assert steps.refusal is None
        assert steps.num_recorded >= 1


class Quadratic:
    """The squared distance of a parameter from a target, as a loss with one statistic."""

    def __init__(self) -> None:
        self.param = nn.Parameter(torch.tensor([3.0, 4.0]))

    def __call__(self, target: Tensor) -> tuple[Tensor, Tensor]:
        loss = (self.param - target).square().sum()
        return loss, loss.detach().reshape(1)


def test_step_returns_statistics_loss_and_norm_and_clips(on_cpu: pytest.MonkeyPatch) -> None:
    loss = Quadratic()
    optimizer = torch.optim.SGD([loss.param], lr=0.1)
    steps = Stepper(loss, optimizer, name="one", max_norm=1.0)
    found = steps(torch.zeros(2))
    torch.testing.assert_close(found, torch.tensor([25.0, 25.0, 10.0]))
    torch.testing.assert_close(loss.param.detach(), torch.tensor([3.0 - 0.06, 4.0 - 0.08]))
    set_step_size(optimizer, 0.5)
    steps(torch.zeros(2))
    torch.testing.assert_close(loss.param.detach(), torch.tensor([2.94 - 0.3, 3.92 - 0.4]))


@pytest.mark.parametrize("recorded", [False, True])
def test_gradient_that_two_parameters_share_is_clipped_once(recorded: bool, request: pytest.FixtureRequest) -> None:
    if recorded:
        request.getfixturevalue("on_cpu")
    one, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))

    def loss(weights: Tensor) -> tuple[Tensor, Tensor]:
        total = (weights * (one + other)).sum()
        return total, total.reshape(1)

    optimizer = torch.optim.SGD([one, other], lr=1.0)
    steps = Stepper(loss, optimizer, name="one", max_norm=0.5)
    found = steps(torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 50.0**0.5]))
    for param in (one, other):
        torch.testing.assert_close(param.detach(), -0.5 * torch.tensor([3.0, 4.0]) / 50.0**0.5)


def test_chunks_of_a_step_add_up_to_the_whole() -> None:
    found = []
    for chunks in (None, lambda values: [slice(0, 1), slice(1, len(values))]):
        param = nn.Parameter(torch.tensor([1.0, 2.0]))

        def loss(values: Tensor, share: float = 1.0, param: nn.Parameter = param) -> tuple[Tensor, Tensor]:
            total = share * (values * param).square().sum(1).mean()
            return total, 2.0 * total.reshape(1)

        optimizer = torch.optim.SGD([param], lr=0.1)
        steps = Stepper(loss, optimizer, name="one", chunks=chunks)
        found.append((steps(torch.arange(6.0).reshape(3, 2)), param.detach()))
    torch.testing.assert_close(*found)
    # By hand: means of squares of the columns are 20 / 3 and 35 / 3.
    torch.testing.assert_close(found[0][1], torch.tensor([1.0 - 0.2 * 20 / 3, 2.0 - 0.4 * 35 / 3]))
    assert found[0][0][:2].tolist() == pytest.approx([2 * 160 / 3, 160 / 3])


def test_step_that_is_not_finite_is_not_taken_and_ends_the_update(request: pytest.FixtureRequest) -> None:
    loss = Quadratic()
    steps = Stepper(loss, torch.optim.SGD([loss.param], lr=0.1), name="one")
    with pytest.raises(NonFiniteError, match="a loss of one or its gradient is not finite; lower learning-rate"):
        steps(torch.full((2,), torch.inf))
    assert loss.param.tolist() == [3.0, 4.0]
    request.getfixturevalue("on_cpu")
    learner, batch = make("rsac gru")
    batch.phases[0].rewards[0, 0, 0] = np.inf
    with pytest.raises(NonFiniteError, match="a loss of rsac or its gradient is not finite"):
        learner.learn(batch, 0)
