"""Observations of several parts with images among them: encoded by kind, stored as bytes, learned from."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.baseline import LinearFeatureBaseline, make_baseline
from maml_rl.envs import make_vector_env
from maml_rl.envs.observing import LastStepVectorEnv
from maml_rl.episode import TaskEpisodes
from maml_rl.experiment.load_policy import load_policy
from maml_rl.experiment.train import train
from maml_rl.metalearners.rl2 import RL2
from maml_rl.plan import Plan
from maml_rl.policies import Attention, BeliefPolicy, CNNPolicy, GRUPolicy, MultiInputPolicy, Policy, TransformerPolicy
from maml_rl.policies.heads import SquashedGaussianHead
from maml_rl.policies.soft_actors import ContextActor, RecurrentActor, head_of
from maml_rl.spaces import PackedSpace, flat_observation_space
from tests.looking_env import LookingEnv
from tests.small_runs import config_of
from tests.synthetic import update

SPACE, ACTIONS = LookingEnv.observation_space, LookingEnv.action_space
LAYERS = ((5, 4, 4), (6, 2, 1))
# Of the space with the last action, reward and end of the episode, as rl2 sees it.
WITH_LAST = PackedSpace(spaces.Tuple((SPACE, spaces.Box(-np.inf, np.inf, (4,), np.float32))))


def sampler_of(policy: Policy, **options: Any) -> MultiTaskSampler:
    settings: dict[str, Any] = {"batch_size": 4, "seed": 0, "max_episode_steps": 6, "num_workers": 0} | options
    baseline = make_baseline("linear", SPACE)
    return MultiTaskSampler(LookingEnv, {}, policy=policy, baseline=baseline, **settings)


def sampled(policy: Policy, **options: Any) -> tuple[list[TaskEpisodes], TaskEpisodes]:
    with sampler_of(policy, **options) as sampler:
        return sampler.sample(sampler.sample_tasks(3), num_steps=1, fast_lr=0.1)


def elements(count: int) -> list[dict[str, Any]]:
    space = spaces.Dict(dict(SPACE.spaces), seed=0)
    return [space.sample() for _ in range(count)]


def rows_of(observations: list[dict[str, Any]]) -> Tensor:
    packed = PackedSpace(SPACE)
    rows = np.zeros((len(observations), *packed.shape), np.uint8)
    for row, observation in zip(rows, observations, strict=True):
        packed.write(observation, row)
    return torch.from_numpy(rows)


def reference_features(params: dict[str, Tensor], observation: dict[str, Any]) -> Tensor:
    """Features of one observation by plain modules of torch: the image first, then direction and position."""
    units = torch.from_numpy(observation["image"]).permute(2, 0, 1).unsqueeze(0).to(torch.float64) / 255.0
    for index, (_, _, stride) in enumerate(LAYERS, start=1):
        weight, bias = params[f"conv{index}.weight"], params[f"conv{index}.bias"]
        units = torch.relu(nn.functional.conv2d(units, weight, bias, stride))
    one_hot = nn.functional.one_hot(torch.tensor(int(observation["direction"]) - 1), 4)
    position = torch.from_numpy(observation["position"])
    return torch.cat((units.permute(0, 2, 3, 1).flatten(), one_hot, position))


def test_each_part_is_encoded_by_its_kind_as_plain_torch_does_also_when_stacked() -> None:
    policy = get_policy_for_env(LookingEnv(), (7,), "relu", conv_layers=LAYERS).double()
    assert isinstance(policy, MultiInputPolicy)
    observations = elements(6)
    found = policy.features(rows_of(observations))
    params = dict(policy.named_parameters())
    expected = torch.stack([reference_features(params, observation) for observation in observations])
    torch.testing.assert_close(found, expected)
    hidden = torch.relu(expected @ params["head.layer1.weight"].T + params["head.layer1.bias"])
    logits = hidden @ params["head.layer2.weight"].T + params["head.layer2.bias"]
    torch.testing.assert_close(policy.distribution_parameters(rows_of(observations))[0], logits)
    stacked = {name: torch.stack((param, 2.0 * param, -param)).detach() for name, param in params.items()}
    (of_tasks,) = policy.distribution_parameters(rows_of(observations).unflatten(0, (3, 2)), stacked)
    for task in range(3):
        own = {name: value[task] for name, value in stacked.items()}
        (alone,) = policy.distribution_parameters(rows_of(observations[2 * task : 2 * task + 2]), own)
        torch.testing.assert_close(of_tasks[task], alone)


def test_observations_and_actions_that_start_at_one_have_their_own_probabilities() -> None:
    policy = get_policy_for_env(LookingEnv(), (7,))
    rows = rows_of(elements(5))
    (logits,) = policy.distribution_parameters(rows)
    actions = torch.tensor([0, 1, 0, 1, 1])
    expected = torch.log_softmax(logits, -1)[torch.arange(5), actions]
    torch.testing.assert_close(policy.log_prob(rows, actions), expected)
    distribution = policy(rows)
    torch.testing.assert_close(distribution.log_prob(actions), expected)
    with torch.random.fork_rng():
        assert set(distribution.sample((50,)).unique().tolist()) == {0, 1}
    assert torch.equal(distribution.mode, logits.argmax(-1))
    with pytest.raises(ValueError, match="does not fit the action space"):
        policy.check_spaces(flat_observation_space(SPACE), spaces.Discrete(3))
    with pytest.raises(ValueError, match="the policy is for the observations"):
        policy.check_spaces(PackedSpace(spaces.Dict(dict(SPACE.spaces) | {"direction": spaces.Discrete(4)})), ACTIONS)


def test_linear_baseline_sees_every_category_of_observations_that_start_at_one() -> None:
    space = spaces.Discrete(3, start=1)
    observations = torch.tensor([1, 2, 3]).reshape(1, 3, 1)
    ones = torch.ones(1, 1, dtype=torch.long)
    rewards = torch.tensor([5.0, 0.0, 2.0]).reshape(1, 3, 1)
    episodes = TaskEpisodes(observations, observations, rewards, 3 * ones, ones, 0 * ones, ones, gamma=0.0)
    baseline = LinearFeatureBaseline.for_space(space, 1e-9).fit(episodes)
    torch.testing.assert_close(baseline(episodes), episodes.returns, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (get_policy_for_env(LookingEnv(), (8,), conv_layers=LAYERS), {}),
        (GRUPolicy(WITH_LAST, ACTIONS, 8, conv_layers=LAYERS), {"observe_last": True, "slots_per_task": 1}),
    ],
    ids=["without a memory", "with one"],
)
def test_episodes_are_bit_identical_for_any_number_of_workers(policy: Policy, options: dict[str, Any]) -> None:
    def digests(**place: Any) -> str:
        with sampler_of(policy, **options, **place) as sampler:
            return sampler.rollout(sampler.sample_tasks(5)).digest()

    in_process = digests()
    assert digests(num_workers=2, inference="worker") == in_process
    assert digests(num_workers=2, inference="central") == in_process


def test_episodes_take_a_byte_for_each_number_of_an_image_and_read_back_as_they_were() -> None:
    _, episodes = sampled(get_policy_for_env(LookingEnv(), (8,)))
    assert episodes.observations.dtype == torch.uint8
    # Beside the image an integer of 8 bytes, and two numbers of 4 bytes.
    assert episodes.observations.shape[3:] == (8 * 12 * 3 + 8 + 2 * 4,)
    parts = PackedSpace(SPACE).read(episodes.observations)
    assert parts["image"].shape == (3, 6, 4, 8, 12, 3)
    assert set(np.unique(parts["direction"])) == {1, 2, 3, 4}
    assert set(np.unique(episodes.actions)) == {0, 1}
    # The task and the lit half determine the reward of each step.
    lit = parts["image"][..., 6:, :].mean((-3, -2, -1)) > parts["image"][..., :6, :].mean((-3, -2, -1))
    left = np.array([task["left"] for task in episodes.tasks]).reshape(-1, 1, 1)
    assert np.array_equal((1 + episodes.actions.numpy() == left) == ~lit, episodes.rewards.numpy() > 0.0)


@pytest.mark.parametrize("memory", ["gru", "transformer"])
def test_rl2_updates_the_convolutions_and_acting_agrees_with_unrolling(memory: str) -> None:
    policy: Policy = (
        GRUPolicy(WITH_LAST, ACTIONS, 8, conv_layers=LAYERS)
        if memory == "gru"
        else TransformerPolicy(WITH_LAST, ACTIONS, 8, Attention(4, num_heads=2), token_shift=True, conv_layers=LAYERS)
    )
    before = {name: param.detach().clone() for name, param in policy.named_parameters()}
    with sampler_of(policy, observe_last=True, slots_per_task=1) as sampler:
        trials = sampler.rollout(sampler.sample_tasks(4))
    update(RL2(policy, plan=Plan(gamma=0.9)), [trials])
    changed = {name for name, param in policy.named_parameters() if not torch.equal(param, before[name])}
    assert {"conv1.weight", "conv2.weight"} <= changed
    rows = trials.observations[:, :, 0].movedim(1, 0)
    unrolled = policy.unroll(rows)
    memory_of = policy.initial_memory(4)
    state = tuple(kept.unsqueeze(1) for kept in memory_of)
    for step in range(len(rows)):
        noise = torch.full((4, 1, 1), 0.5)
        actions, state = policy.act(rows[step].unsqueeze(1), noise, state)
        chances = torch.softmax(unrolled.distribution[0][step], -1)
        assert torch.equal(actions[:, 0], (chances[:, 0] <= 0.5).long())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "maml-trpo", "method": "oracle"},
        {"algorithm": "maml-trpo", "memory": "gru"},
        {"algorithm": "rl2", "observe-last": True, "algorithm-settings": {"hidden-size": 8}},
    ],
    ids=["oracle", "memory", "rl2"],
)
def test_training_uses_conv_layers_and_its_policy_is_loaded_from_the_checkpoint(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    own: dict[str, Any] = {"env-name": "tests.looking_env:Looking-v0", "conv-layers": [[3, 5, 2]]}
    config = config_of(num_batches=1).override(own | settings)
    trained = train(config, tmp_path / "run", num_workers=0)
    assert trained.get_parameter("conv1.weight").shape == (3, 3, 5, 5)
    loaded = load_policy(tmp_path / "run")
    for name, param in trained.named_parameters():
        assert torch.equal(loaded.get_parameter(name), param), name


def test_image_with_further_numbers_stays_bytes() -> None:
    class Seeing(LookingEnv):
        observation_space = SPACE["image"]  # type: ignore[assignment]

        def _look(self) -> Any:
            return super()._look()["image"]

    with closing(LastStepVectorEnv(make_vector_env(Seeing))) as env:
        space = env.single_observation_space
    assert isinstance(space, PackedSpace)
    assert space.shape == (8 * 12 * 3 + 4 * 4,)
    assert isinstance(get_policy_for_env(Seeing(), (4,)), CNNPolicy)
    policy = GRUPolicy(space, ACTIONS, 4)
    assert policy.get_parameter("conv1.weight").shape == (16, 3, 4, 4)
    flat = GRUPolicy(space, ACTIONS, 4, conv_layers=())
    assert flat.input_size == 8 * 12 * 3 + 4


def test_options_for_images_are_refused_without_images() -> None:
    env = spaces.Box(-1.0, 1.0, (3,))
    given = type("Spaces", (), {"observation_space": env, "action_space": spaces.Discrete(2)})()
    with pytest.raises(ValueError, match="conv_layers is for images"):
        get_policy_for_env(given, conv_layers=LAYERS)
    with pytest.raises(ValueError, match="conv_layers is for images"):
        GRUPolicy(env, spaces.Discrete(2), 4, conv_layers=LAYERS)


def test_learners_of_vectors_name_the_one_that_takes_images_and_several_choices() -> None:
    box = spaces.Box(-1.0, 1.0, (2,))
    for make in (
        lambda: BeliefPolicy(WITH_LAST, ACTIONS),
        lambda: RecurrentActor(WITH_LAST, ACTIONS),
        lambda: ContextActor(flat_observation_space(SPACE), box),
    ):
        with pytest.raises(TypeError, match="rl2 takes all kinds, images among them"):
            make()
    with pytest.raises(TypeError, match="take rl2"):
        head_of(spaces.MultiDiscrete([2, 3]))
    with pytest.raises(TypeError, match="rl2 and maml-trpo take all kinds"):
        SquashedGaussianHead(spaces.MultiDiscrete([2, 3]))
