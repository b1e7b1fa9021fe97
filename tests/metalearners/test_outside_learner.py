"""A learner from outside, one loss of tensors, runs in every placement."""

import pytest
import torch

from maml_rl.metalearners import stepper
from tests.metalearners.outside_learner import learned, make_learner
from tests.metalearners.recorded_graphs import Graphs
from tests.recorded_steps import record_on_the_cpu

pytestmark = pytest.mark.timeout(100)


@pytest.mark.usefixtures("forked_workers")
def test_loss_from_outside_learns_the_same_bytes_in_two_workers() -> None:
    here = learned(make_learner(), 0)
    begun = make_learner().metalearner.policy.state_dict()
    assert not any(torch.equal(here[name], value) for name, value in begun.items() if name.endswith("weight"))
    for others in (learned(make_learner(), 2), learned(make_learner("AsBefore"), 0)):
        for name, value in others.items():
            assert torch.equal(value, here[name]), name


def test_loss_from_outside_is_recorded_on_a_device_with_its_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = learned(make_learner(), 0)
    record_on_the_cpu(monkeypatch)
    monkeypatch.setattr(stepper, "_KINDS", ("cpu",))
    experiment = make_learner(backend="device")
    graphs = Graphs(experiment.metalearner.stepper, monkeypatch)
    found = learned(experiment, 0)
    # Three steps are taken as they are before the fourth is recorded.
    assert graphs.num_launched == 2 * 6 - 3
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)
