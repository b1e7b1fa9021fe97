"""Adaptation as a hook of the learner: parameters, a context or a memory, the same for every caller."""

import gymnasium
import numpy as np
import pytest
import torch

from maml_rl.adaptation import AdaptationRule
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.policies import GRUPolicy
from maml_rl.policies.memory_policy import PolicyWithMemory
from tests.metalearners.small_algorithms import small

NAVIGATION = gymnasium.make("2DNavigation-v0")


def test_parameters_adapted_by_the_hook_are_those_of_the_inner_loop() -> None:
    experiment = make_experiment(small("maml-trpo"))
    with make_sampler(experiment, num_workers=0, evaluation=True) as sampler:
        tasks = sampler.sample_tasks(3)
        adapted = experiment.metalearner.adapt(sampler, tasks, 2)
        sampler.seek(sampler.iteration)
        tested = experiment.metalearner.test(sampler, tasks, 2)
        sampler.seek(sampler.iteration)
        train_episodes, params = sampler.adapt(tasks, 2, AdaptationRule(0.1), gamma=0.99)
        assert [each.digest() for each in adapted.phases] == [each.digest() for each in train_episodes]
        assert [each.digest() for each in tested.phases[:-1]] == [each.digest() for each in train_episodes]
        assert adapted.params is not None
        assert params is not None
        for name, value in params.items():
            assert torch.equal(adapted.params[name], value)
            assert torch.equal(adapted.policy_of(experiment.policy, 1).get_parameter(name), value[1])


def test_memory_adapted_by_the_hook_is_that_after_the_trial() -> None:
    experiment = make_experiment(small("rl2"))
    with make_sampler(experiment, num_workers=0, evaluation=True) as sampler:
        tasks = sampler.sample_tasks(3)
        adapted = experiment.metalearner.adapt(sampler, tasks)
    (trials,) = adapted.phases
    steps = trials.observations.transpose(1, 2).flatten(1, 2).transpose(0, 1)
    memory = experiment.policy.unroll(steps).memory
    torch.testing.assert_close(adapted.memory[0], memory[0].detach())
    ready = adapted.policy_of(experiment.policy, 2)
    assert torch.equal(ready.initial_memory(2)[0], adapted.memory[0][2].expand(2, -1))
    seen = trials.observations[0, 0, 0].numpy()
    action, after = ready.choose(seen)
    expected, expected_after = experiment.policy.choose(seen, (adapted.memory[0][2:],))
    np.testing.assert_array_equal(action, expected)
    assert torch.equal(after[0], expected_after[0])


def test_started_policy_acts_in_a_sampler_as_after_its_trial() -> None:
    policy = GRUPolicy(NAVIGATION.observation_space, NAVIGATION.action_space, 4)
    started = PolicyWithMemory(policy, [torch.full((4,), 0.5)])
    rows, noise = torch.linspace(-1.0, 1.0, 12).reshape(2, 3, 2), torch.zeros(2, 3, 2)
    memory = tuple(kept.unflatten(0, (2, 3)) for kept in started.initial_memory(6))
    actions, _ = started.act(rows, noise, memory)
    expected, _ = policy.act(rows, noise, (torch.full((2, 3, 4), 0.5),))
    assert torch.equal(actions, expected)
    unrolled, plain = started.unroll(rows), policy.unroll(rows, (torch.full((3, 4), 0.5),))
    assert torch.equal(unrolled.memory[0], plain.memory[0])
    assert not torch.equal(unrolled.memory[0], policy.unroll(rows).memory[0])
    with pytest.raises(ValueError, match=r"GRUPolicy remembers tensors of the shapes \[\(4,\)\], got \[\(3,\)\]"):
        PolicyWithMemory(policy, [torch.zeros(3)])
