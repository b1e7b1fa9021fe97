from pathlib import Path

import pytest
import torch
import yaml

from maml_rl.config import load_config
from maml_rl.envs import FAMILIES
from maml_rl.experiment.build import make_experiment
from maml_rl.metalearners import algorithms, find_metalearner
from tests.envs.contract import marks

ROOT = Path(__file__).resolve().parents[2] / "configs"
CONFIGS = {path: load_config(path) for path in sorted(ROOT.rglob("*.yaml"))}
PATHS = list(CONFIGS)
NAMES = [str(path.relative_to(ROOT)) for path in PATHS]

# The keys of pytorch-maml-rl's configs, which every config spells out.
FAMILIAR = {
    "env-name",
    "gamma",
    "gae-lambda",
    "hidden-sizes",
    "nonlinearity",
    "fast-batch-size",
    "num-steps",
    "fast-lr",
    "num-batches",
    "meta-batch-size",
}
# Its keys that are settings of maml-trpo, and stand below these here.
FAMILIAR_OF_TRPO = {"first-order", "max-kl", "cg-iters", "cg-damping", "ls-max-steps", "ls-backtrack-ratio"}
# Settings of an inner loop, and of networks or advantages, by the algorithms that have none.
NOT_OF = {
    "rl2": {"hidden-sizes", "nonlinearity", "num-steps", "fast-lr"},
    "varibad": {"num-steps", "fast-lr"},
    "rsac": {"gae-lambda", "nonlinearity", "num-steps", "fast-lr"},
    "amago": {"gae-lambda", "hidden-sizes", "nonlinearity", "num-steps", "fast-lr"},
    "pearl": {"gae-lambda", "nonlinearity", "fast-lr"},
}
# Learners of histories do not sample in training, either.
OF_SAMPLING = {"gamma", "gae-lambda", "hidden-sizes", "nonlinearity", "num-steps", "fast-lr", "meta-batch-size"}
NOT_OF |= {"ad": OF_SAMPLING, "dpt": OF_SAMPLING, "amago-offline": OF_SAMPLING - {"gamma"}}
# Settings of one kind of memory.
OF_TRANSFORMERS, OF_RECURRENT_LAYERS = {"context", "num-layers", "num-heads", "token-shift"}, {"memory-span"}
# Every other algorithm has a folder of its own name.
ALGORITHMS = [name for name in algorithms() if name != "maml-trpo"]


def test_every_family_and_every_algorithm_has_a_config() -> None:
    # Each class of families in JAX has a config.
    names = {config.env_name for config in CONFIGS.values()}
    in_jax = {family.name for name, family in FAMILIES.items() if family.extra == "jax" and name in names}
    assert in_jax == {family.name for family in FAMILIES.values() if family.extra == "jax"}
    # MAML-TRPO has a config for every other family, and for the benchmarks of Meta-World.
    trained = {CONFIGS[path].env_name for path in PATHS if path.parent.name in ("maml", "bandit", "finn2017")}
    assert [name for name, family in FAMILIES.items() if not family.extra and name not in trained] == []
    assert set(NAMES) >= {f"metaworld/{benchmark}.yaml" for benchmark in ("ml1-reach", "ml10", "ml25", "ml45")}
    folders = {path.parent.name for path in PATHS}
    assert folders == {"maml", "bandit", "finn2017", "metaworld", *ALGORITHMS}
    # Those that take gradient steps are compared on two families.
    compared = {f"{name}/{family}.yaml" for name in ALGORITHMS for family in ("2d-navigation", "halfcheetah-dir")}
    assert {name for name in compared if name.split("/")[0] not in NOT_OF} <= set(NAMES)


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=marks(config.env_name)) for path, config in CONFIGS.items()], ids=NAMES
)
def test_config_can_be_made_and_spells_out_the_familiar_keys_under_comments(path: Path) -> None:
    lines = path.read_text().splitlines()
    keys = [line.split(":")[0] for line in lines if line and line[0] not in "# "]
    config = CONFIGS[path]
    algorithm = path.parent.name if path.parent.name in ALGORITHMS else "maml-trpo"
    assert config.algorithm == algorithm
    if algorithm == "maml-trpo":
        # A recurrent layer has its own nonlinearity.
        assert set(keys) >= FAMILIAR - ({"nonlinearity"} if config.memory else set())
        assert set(yaml.safe_load(path.read_text())["algorithm-settings"]) >= FAMILIAR_OF_TRPO
    else:
        assert set(keys) >= FAMILIAR - NOT_OF.get(algorithm, set())
        settings = {field.alias for field in find_metalearner(algorithm).Settings.model_fields.values()}
        # A setting of another kind of memory would have no effect.
        if "cell" in settings:
            has_transformer = config.algorithm_settings["cell"] == "transformer"
            settings -= OF_RECURRENT_LAYERS if has_transformer else OF_TRANSFORMERS
        # A trial ends in a terminal state, as in the published RL2; PEARL decides by the family; a memory multiplies
        # and embeds what it sees where symbols are to be matched.
        usual = {"bootstrap-trials", "next-observations", "products", "embedding-size"}
        assert set(config.algorithm_settings) | usual == settings | usual
    for number, line in enumerate(lines):
        if line and not line.startswith("#"):
            # A comment may also cover the next keys, but no key after an empty line lacks one.
            assert lines[number - 1], f"line {number + 1} has no comment: {line}"
    experiment = make_experiment(config)
    assert all(torch.isfinite(parameter).all() for parameter in experiment.policy.parameters())


def test_configs_of_finn_2017_have_its_network_batch_and_horizon() -> None:
    configs = {path.stem: config for path, config in CONFIGS.items() if path.parent.name == "finn2017"}
    navigation, cheetah = configs.pop("2d-navigation"), configs["halfcheetah-dir"]
    for config in configs.values():
        assert config.env_name.endswith("-finn2017-v0")
        assert (config.max_episode_steps, config.meta_batch_size, config.fast_lr) == (200, 40, 0.1)
        assert config.halve_step_size == "once"
    for config in (navigation, *configs.values()):
        assert config.hidden_sizes == (100, 100)
        assert config.nonlinearity == "relu"
        assert (config.fast_batch_size, config.gamma, config.evaluation_steps) == (20, 0.99, 3)
        assert config.bootstrap is False
    assert navigation.algorithm_settings["max-kl"] == 0.01
    assert cheetah.algorithm_settings["max-kl"] == 0.02
    assert cheetah.env_name == "HalfCheetahDir-finn2017-v0"
    assert (navigation.max_episode_steps, navigation.meta_batch_size, navigation.num_batches) == (100, 40, 100)
    assert (navigation.fast_lr, navigation.env_kwargs["normalization_scale"]) == (0.5, 1.0)
    assert cheetah.num_batches == 100
