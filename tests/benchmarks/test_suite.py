"""The suite's trainings, and the time to a result."""

import numpy as np
import pytest

from benchmarks import suite
from benchmarks.learning.overview import spread
from benchmarks.learning.plan import ROOT, Family, Method, env_steps_of
from maml_rl.config import load_config
from maml_rl.config.catalog import find_config
from maml_rl.experiment.build import make_experiment
from maml_rl.results.scales import Axis
from tests.envs.contract import marks

FAMILIES = [
    pytest.param(family, id=family.name, marks=marks(suite.SUITE.methods["maml-trpo"].config(family, 0).env_name))
    for family in suite.SUITE.families.values()
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_training_of_a_family_can_be_made(family: Family) -> None:
    for name in family.methods:
        make_experiment(suite.SUITE.methods[name].config(family, 0))


def test_maml_trpo_has_the_settings_of_the_shipped_config_of_the_family() -> None:
    lengths = {"num_batches", "checkpoint_every", "keep_checkpoints", "evaluate_every"}
    for family in suite.SUITE.families.values():
        planned = suite.SUITE.methods["maml-trpo"].config(family, 0)
        shipped = load_config(ROOT / "configs" / "maml" / family.config)
        # These have another horizon, and velocities up to 3; Meta-World has one config for all of its ML1.
        if family.name.endswith("-2x200"):
            continue
        others = lengths | ({"env_name"} if family.name.startswith("ml1-") else set())
        assert planned.model_dump(exclude=others) == shipped.model_dump(exclude=others), family.name


@pytest.mark.parametrize("name", ["varibad", "pearl"])
def test_learners_of_experience_have_the_settings_of_a_config_for_the_family(name: str) -> None:
    for family in ("halfcheetah-dir", "halfcheetah-vel"):
        shipped = load_config(find_config(f"{name}/{family}"))
        planned = suite.SUITE.methods[name].config(suite.SUITE.families[f"{family}-2x200"], 0)
        assert planned.algorithm_settings == shipped.algorithm_settings
        assert planned.hidden_sizes == shipped.hidden_sizes
        assert planned.num_steps == shipped.num_steps


@pytest.mark.parametrize("name", ["2d-navigation", "halfcheetah-dir", "halfcheetah-vel", "ant-dir"])
def test_rl2_has_as_many_training_episodes_as_gradient_based_methods(name: str) -> None:
    family, methods = suite.SUITE.families[name], suite.SUITE.methods
    trials, steps = (methods[name].config(family, 3) for name in ("rl2", "promp"))
    assert trials.meta_batch_size * trials.fast_batch_size == steps.meta_batch_size * steps.fast_batch_size * (
        1 + steps.num_steps
    )


def test_methods_of_a_family_are_trained_for_as_many_environment_steps() -> None:
    for family in suite.SUITE.families.values():
        for method in [suite.SUITE.methods[name] for name in family.methods]:
            if method.trained and method.steps is None:
                whole = env_steps_of(method.config(family, 0)) * method.points(family)[-1]
                assert 0.98 * family.steps < whole <= family.steps, (family.name, method.name)


def test_settings_of_an_algorithm_on_a_family_override_others() -> None:
    changes = {"promp": {"fast-lr": 0.3}, "maml-trpo": {"max-kl": 0.5}}
    family = Family("f", "F", "halfcheetah-vel.yaml", 10**6, changes={"fast-lr": 0.7}, algorithm_changes=changes)
    promp, trpo = Method("promp", "promp", {"fast-lr": 0.9}).config(family, 0), Method("trpo").config(family, 0)
    assert (promp.fast_lr, trpo.fast_lr) == (0.3, 0.7)
    assert trpo.algorithm_settings["max-kl"] == 0.5
    assert "max-kl" not in promp.algorithm_settings


def test_names_at_lines_are_apart_in_order_and_within_the_chart() -> None:
    ends = np.array([1.0, 9.9, 1.1, 9.8, 5.0])
    places = spread(ends, Axis(0.0, 10.0), 1.0)
    assert np.argsort(places).tolist() == np.argsort(ends).tolist()
    assert np.diff(np.sort(places)).min() >= 1.0 - 1e-9
    assert 0.0 <= places.min() <= places.max() <= 10.0
    assert places[4] == 5.0
