"""Every row of the page for users of other packages is executed, and what it says in numbers is compared."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

import maml_rl
from maml_rl import (
    MAMLTRPO,
    AdaptationRule,
    LinearFeatureBaseline,
    MultiTaskSampler,
    TaskEpisodes,
    adapt,
    functional,
    get_policy_for_env,
)
from maml_rl.adaptation import reinforce
from maml_rl.cli import main as cli
from maml_rl.config import Config, load_config
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate
from maml_rl.experiment.load_policy import load_policy
from maml_rl.experiment.train import train
from maml_rl.metalearners import find_metalearner
from maml_rl.metalearners.losses import surrogate

PAGE = Path(__file__).resolve().parent.parent / "docs" / "migrating.md"
VALUES = torch.tensor([[1.0, 4.0], [1.0, 7.0], [1.0, 9.0]])
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
NAVIGATION = "2DNavigation-v0"
SMALL = {"env-name": NAVIGATION, "fast-batch-size": 2, "meta-batch-size": 2, "max-episode-steps": 4, "num-batches": 1}


class World:
    """What the rows are about: an environment, a policy, a sampler, and episodes before and after a step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = gymnasium.make(NAVIGATION)
        self.policy = get_policy_for_env(self.env, hidden_sizes=(8,))
        self.baseline = LinearFeatureBaseline.for_space(self.env.observation_space)
        self.sampler = MultiTaskSampler(
            NAVIGATION, {}, 2, self.policy, self.baseline, self.env, 0, 0, max_episode_steps=4
        )
        self.tasks = self.sampler.sample_tasks(3)
        self.train, self.valid = self.sampler.sample(self.tasks, num_steps=1, fast_lr=0.1, gamma=0.95)
        self.episodes = self.train[0]
        self.metalearner = MAMLTRPO(self.policy, fast_lr=0.1, first_order=False, device="cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("migrating"))
    with made.sampler:
        yield made


def samplers(world: World) -> None:
    assert len(world.sampler.sample_tasks(2)) == 2
    with pytest.raises(ValueError, match=r"env is .*2DNavigation-v0.*, which env_name='HalfCheetahDir-v5' does not"):
        MultiTaskSampler("HalfCheetahDir-v5", {}, 2, world.policy, world.baseline, world.env)
    seeds = []
    for _ in range(2):
        with MultiTaskSampler(NAVIGATION, {}, 2, world.policy, world.baseline, seed=None, num_workers=0) as sampler:
            seeds.append(sampler.seed)
    assert seeds[0] != seeds[1]
    assert world.train[0][0].lengths == [4, 4]
    assert isinstance(world.train[0][0].lengths, Tensor)
    assert isinstance(world.train[0][0], maml_rl.BatchEpisodes)
    assert world.valid.rewards.shape == (3, 4, 2)
    assert world.episodes.episode_returns().shape == (3, 2)
    params = adapt(world.policy, world.episodes, step_size=0.1)
    assert isinstance(world.sampler.rollout(world.tasks, params), TaskEpisodes)


def spaces_before_a_policy(world: World) -> None:
    def make() -> gymnasium.Env[Any, Any]:
        return gymnasium.make(NAVIGATION)

    with MultiTaskSampler(make, policy=world.policy, num_workers=0, batch_size=2) as sampler:
        assert sampler.sample_tasks(2)
    spaces = MultiTaskSampler.spaces(make)
    assert spaces.action_space == world.env.action_space
    policy = get_policy_for_env(spaces, hidden_sizes=(8,))
    with MultiTaskSampler(NAVIGATION, policy=policy, num_workers=0) as sampler:
        assert sampler.env.observation_space == spaces.observation_space
    with pytest.raises(TypeError, match=r"needs a policy; make one with get_policy_for_env\(MultiTaskSampler.spaces"):
        MultiTaskSampler(NAVIGATION)
    seen = MultiTaskSampler.spaces(NAVIGATION, observe_last=True).observation_space
    assert seen.shape == (2 + 2 + 1 + 1,)


def updates(world: World) -> None:
    futures = world.sampler.sample_async(world.tasks, num_steps=1, fast_lr=0.1, gamma=0.95)
    world.metalearner.step(*futures, max_kl=1e-3)
    assert world.sampler.sample_wait(futures)[1].digest() == futures.result()[1].digest()
    assert Config.model_validate(SMALL | {"prefetch": 1}).prefetch == 1
    MAMLTRPO(world.policy, fast_lr=0.1, num_steps=1).step(world.train, world.valid)
    with pytest.raises(ValueError, match="the learner has num_steps=2, and these are 1 steps"):
        MAMLTRPO(world.policy, fast_lr=0.1, num_steps=2).step(world.train, world.valid)
    one = world.metalearner.adapt([world.train[0][1]], True)
    every = world.metalearner.adapt(world.train, first_order=True)
    assert all(torch.allclose(one[name], value[1], atol=1e-6) for name, value in every.items())
    logs = world.metalearner.step(world.train, world.valid)
    assert {"kl", "loss/before", "loss/after", "accepted"} <= logs.keys()


def losses(world: World) -> None:
    loss = world.policy.log_prob(torch.zeros(1, 2), torch.zeros(1, 2)).sum()
    updated = world.policy.update_params(loss, None, step_size=0.1, first_order=True)
    assert updated.keys() == dict(world.policy.named_parameters()).keys()
    episodes, params, policy = world.episodes, None, world.policy
    loss = functional.reinforce_loss(
        policy.log_prob(episodes.observations, episodes.actions, params), episodes.advantages, episodes.mask
    )
    assert loss.shape == (3,)
    params = adapt(world.policy, world.episodes, rule=0.1)
    same = adapt(world.policy, world.episodes, step_size=0.1)
    assert all(torch.equal(params[name], value) for name, value in same.items())

    def own(*arguments: Any) -> Tensor:
        called.append(len(arguments))
        return surrogate(*arguments)

    called: list[int] = []
    MAMLTRPO(world.policy, objective=own).step(world.train, world.valid)
    assert called
    rule = AdaptationRule(0.1, inner_loss=lambda outcome: 2.0 * reinforce(outcome))
    adapt(world.policy, world.episodes, rule=rule)


def arrays(world: World) -> None:
    per_episode = functional.masked_mean(VALUES, MASK, dims=(-2,))
    # By a plain formula over the real steps of each episode.
    assert per_episode.tolist() == [VALUES[:3, 0].mean(), VALUES[:1, 1].mean()]
    assert float(per_episode.mean()) == 2.5
    assert float(functional.masked_mean(VALUES, MASK)) == 1.75
    normal = functional.masked_normalize(VALUES, MASK)
    assert float(functional.masked_mean(normal, MASK)) == pytest.approx(0.0, abs=1e-6)
    vector = torch.nn.utils.parameters_to_vector(world.policy.parameters())
    torch.nn.utils.vector_to_parameters(vector, world.policy.parameters())


def state_of_a_baseline(world: World) -> None:
    assert LinearFeatureBaseline.for_space(world.env.observation_space).state_dict() == {}
    assert world.baseline.state_dict()


def older_parameters(world: World) -> None:
    path = world.folder / "policy.th"
    names = {"layer1.weight", "layer1.bias", "mu.weight", "mu.bias", "sigma"}
    assert world.policy.state_dict().keys() == names
    torch.save({name: value + 1 for name, value in world.policy.state_dict().items()}, path)
    policy = get_policy_for_env(world.env, hidden_sizes=(8,))
    policy.load_state_dict(torch.load(path, weights_only=True))
    assert all(torch.equal(policy.state_dict()[name], x + 1) for name, x in world.policy.state_dict().items())


def older_ids(world: World) -> None:
    for old, new in (("HalfCheetahDir-v1", "HalfCheetahDir-v5"), ("AntVel-v1", "AntVel-v5")):
        with pytest.warns(FutureWarning, match=new):
            found = MultiTaskSampler.spaces(old)
        assert found.observation_space == gymnasium.make(new).observation_space


def configs(world: World) -> None:
    path = world.folder / "c.yaml"
    path.write_text("env-name: 2DNavigation-v0\nfast-lr: 0.2\nmax-kl: 0.5\ncg-iters: 3\n")
    assert load_config(path).algorithm_settings == {"max-kl": 0.5, "cg-iters": 3}
    config = Config.model_validate(SMALL | {"fast-lr": 0.3, "num-steps": 2, "meta-batch-size": 5})
    assert (config.fast_lr, config.num_steps, config.meta_batch_size) == (0.3, 2, 5)
    path = world.folder / "config.json"
    path.write_text('{"env-name": "2DNavigation-v0", "use_cuda": false}')
    with pytest.raises(maml_rl.errors.ConfigError, match="remove config, output_folder, num_workers, use_cuda, device"):
        load_config(path)
    for name in ("rl2", "pearl", "maml-ppo", "maml-vpg"):
        find_metalearner(name)


def runs(world: World) -> None:
    path, folder, results = world.folder / "small.yaml", world.folder / "run", world.folder / "r.npz"
    path.write_text("".join(f"{key}: {value}\n" for key, value in SMALL.items()))
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help"])
    assert ended.value.code == 0
    assert cli.main(["train", "--config", str(path), "--output-folder", str(folder), "--num-workers", "0"]) == 0
    options = ["--num-workers", "0", "--meta-batch-size", "2"]
    assert cli.main(["test", str(folder), "--output", str(results), *options]) == 0
    assert "returns" in np.load(results)
    experiment = make_experiment(load_config(folder / "config.json"))
    experiment.restore("last", folder)
    assert evaluate(experiment, tasks=2, num_workers=0).returns.shape[0] == 2
    longer = Config.model_validate(SMALL | {"num-batches": 2})
    assert isinstance(train(longer, folder, resume=True, num_workers=0), torch.nn.Module)
    assert isinstance(load_policy(folder), torch.nn.Module)


def families(world: World) -> None:
    (task,) = world.env.unwrapped.sample_tasks(1)
    world.env.unwrapped.reset_task(task)
    for scale in (10.0, 1.0):
        space = MultiTaskSampler.spaces("HalfCheetahDir-v5", {"normalization_scale": scale}).action_space
        assert isinstance(space, gymnasium.spaces.Box)
        assert set(space.high.tolist()) == {scale}
    for env_id in ("HalfCheetahDir-v5", "AntDir-v5", "AntDir2D-v5"):
        (task,) = gymnasium.make(env_id).unwrapped.sample_tasks(1)  # type: ignore[attr-defined]
    assert task.keys() == {"angle"}


# By the beginning of a row's first cell.
ROWS: dict[str, Callable[[World], None]] = {
    "pytorch-maml-rl: `MultiTaskSampler(": samplers,
    "pytorch-maml-rl: `sampler.sample_async": updates,
    "pytorch-maml-rl: `sampler.env`": spaces_before_a_policy,
    "pytorch-maml-rl: `train_episodes[step]": samplers,
    "pytorch-maml-rl: `episodes.lengths": samplers,
    "pytorch-maml-rl: `policy.update_params": losses,
    "pytorch-maml-rl: `MAMLTRPO(": updates,
    "pytorch-maml-rl: `metalearner.adapt": updates,
    "pytorch-maml-rl: `metalearner.step": updates,
    "pytorch-maml-rl: `reinforce_loss": losses,
    "pytorch-maml-rl: `weighted_mean": arrays,
    "pytorch-maml-rl: `weighted_normalize": arrays,
    "pytorch-maml-rl: `LinearFeatureBaseline": state_of_a_baseline,
    "pytorch-maml-rl: `get_returns": samplers,
    "pytorch-maml-rl: `vector_to_parameters": arrays,
    "pytorch-maml-rl: `baseline.state_dict": state_of_a_baseline,
    "pytorch-maml-rl: `HalfCheetahDir-v1`": older_ids,
    "pytorch-maml-rl: `torch.load": older_parameters,
    "pytorch-maml-rl: `seed=None`": samplers,
    "pytorch-maml-rl: keys `fast-lr`": configs,
    "pytorch-maml-rl: `python train.py": runs,
    "pytorch-maml-rl: `python test.py": runs,
    "pytorch-maml-rl: `config.json`": configs,
    "garage: `LocalSampler`": spaces_before_a_policy,
    "garage: `MetaEvaluator`": runs,
    "garage: `SetTaskSampler`": samplers,
    "garage: `env.sample_tasks": families,
    "garage: `normalize(": families,
    "garage: `EpisodeBatch`": samplers,
    "garage: `GaussianMLPPolicy`": spaces_before_a_policy,
    "garage: `LinearFeatureBaseline`": state_of_a_baseline,
    "garage: `MAMLTRPO(": configs,
    "garage: `RL2PPO`": configs,
    "garage: `Trainer(": runs,
    "garage: snapshots": runs,
    "learn2learn and cherry: `l2l.gym": spaces_before_a_policy,
    "learn2learn and cherry: `env.state_size`": spaces_before_a_policy,
    "learn2learn and cherry: `env.sample_tasks": families,
    "learn2learn and cherry: `MAML(": losses,
    "learn2learn and cherry: a meta-loss": losses,
    "learn2learn and cherry: `cherry.envs.Runner": samplers,
    "learn2learn and cherry: `cherry.envs.ActionSpaceScaler": families,
    "learn2learn and cherry: `cherry.models": state_of_a_baseline,
    "learn2learn and cherry: `cherry.ExperienceReplay`": samplers,
    "learn2learn and cherry: `HalfCheetahForwardBackward": families,
    "learn2learn and cherry: `AntDirection-v1`": families,
    "learn2learn and cherry: `Particles2D-v1`": families,
}


def rows() -> list[str]:
    found = []
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        found += [f"{title}: {cell.strip()}" for cell in re.findall(r"^\| (.*?) \| ", text, re.MULTILINE)]
    return [row for row in found if not row.endswith((": there", ": ---"))]


def test_every_row_is_executed() -> None:
    keys = [[key for key in ROWS if row.startswith(key)] for row in rows()]
    assert [row for row, found in zip(rows(), keys, strict=True) if len(found) != 1] == []
    assert {key for found in keys for key in found} == set(ROWS)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("check", dict.fromkeys(ROWS.values()), ids=lambda check: check.__name__)
def test_rows_are_true(check: Callable[[World], None], world: World) -> None:
    check(world)


def test_loop_of_the_ancestor_runs() -> None:
    env = gymnasium.make(NAVIGATION)
    policy = maml_rl.get_policy_for_env(env, hidden_sizes=(8,))
    baseline = maml_rl.LinearFeatureBaseline.for_space(env.observation_space)
    options = {"seed": 0, "num_workers": 0, "max_episode_steps": 4}
    before = [param.detach().clone() for param in policy.parameters()]
    with maml_rl.MultiTaskSampler(NAVIGATION, {}, 4, policy, baseline, **options) as sampler:  # type: ignore[arg-type]
        metalearner = maml_rl.MAMLTRPO(policy, fast_lr=0.1, first_order=False, device="cpu")
        tasks = sampler.sample_tasks(num_tasks=3)
        futures = sampler.sample_async(tasks, num_steps=2, fast_lr=0.1, gamma=0.95, gae_lambda=1.0, device="cpu")
        assert sampler.phase == 0
        logs = metalearner.step(*futures, max_kl=1e-3, cg_iters=3, cg_damping=1e-2, ls_backtrack_ratio=0.5)
        assert sampler.phase == 3
        train_episodes, valid_episodes = sampler.sample_wait(futures)
        # Nothing was sampled twice.
        assert sampler.phase == 3
        assert sampler.sample_wait(futures)[1] is valid_episodes
        assert len(train_episodes) == 2
        sampler.seek(0)
        expected = sampler.sample(tasks, num_steps=2, fast_lr=0.1, gamma=0.95)
    assert logs["accepted"]
    assert any(not torch.equal(one, other) for one, other in zip(before, policy.parameters(), strict=True))
    assert expected[0][0].digest() != train_episodes[0].digest()
