"""The decision-pretrained transformer: its targets, its predictions, and its actions."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maml_rl.experience import Histories
from maml_rl.experience.histories import EnvKind
from maml_rl.experiment.build import make_experiment
from tests.metalearners.histories import ARMS, PULLS, bandit_config, bandit_histories


def test_target_is_the_best_arm_at_every_step_for_any_pull() -> None:
    learner = make_experiment(bandit_config("dpt")).metalearner
    learner.learn_from(bandit_histories())
    observations, best = learner.draw(np.random.default_rng(0))
    assert best.shape == (PULLS, 16)
    # A learner that continues until an arm pays ends at the best arm, after pulling others.
    assert torch.equal(best, best[-1:].expand(PULLS, -1))
    assert torch.equal(observations[-1, :, 1 : 1 + ARMS].argmax(-1), best[-1])
    assert len(best.unique()) == ARMS


@pytest.mark.slow
def test_prediction_is_the_posterior_of_the_best_arm() -> None:
    learner = make_experiment(bandit_config("dpt", num_updates=120, batch_size=32, anneal_over=1)).metalearner
    learner.learn_from(bandit_histories())
    learner.learn(learner.store_of(()), 0)
    seen = bandit_histories().sequences(np.random.default_rng(0), 64, PULLS)
    with torch.no_grad():
        found = learner.policy.unroll(seen.observations).distribution[0].softmax(-1)
    for step in range(PULLS):
        for column, history in enumerate(seen.tasks.tolist()):
            # An arm that did not pay is ruled out; one that paid is the best.
            possible = np.arange(ARMS) == history if step > history else np.arange(ARMS) >= step
            assert np.allclose(found[step, column], possible / possible.sum(), atol=0.2)


@pytest.mark.parametrize(("acts", "deterministic"), [("sampled", False), ("likeliest", True)])
def test_tests_draw_actions_or_take_the_most_probable_one(acts: str, deterministic: bool) -> None:
    learner = make_experiment(bandit_config("dpt", acts=acts)).metalearner
    sampler = Mock()
    learner.test(sampler, [{}])
    _, plan = sampler.collect.call_args.args
    assert (plan.whole_trials, plan.deterministic) == (True, deterministic)


def test_family_that_does_not_know_its_best_actions_is_refused_in_one_line() -> None:
    learner = make_experiment(bandit_config("dpt", context=2)).metalearner
    unknown = Histories(
        [{}],
        [[2]],
        np.zeros((2, 1), np.float32),
        [0, 1],
        [0.0, 1.0],
        EnvKind(spaces.Box(0.0, 1.0, (1,), np.float32), spaces.Discrete(ARMS)),
    )
    with pytest.raises(ValueError, match="the family does not know its best actions") as error:
        learner.learn_from(unknown)
    assert "\n" not in str(error.value)
