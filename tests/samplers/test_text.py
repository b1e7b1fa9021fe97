"""Observations and actions as text: a user's policy reads and writes strings, and the episodes hold bytes."""

import string
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from text_env import WORDS, Forgetful, GuessingEnv, PlainTextEnv, Reader

from maml_rl import MultiTaskSampler, TaskEpisodes, get_policy_for_env
from maml_rl.baseline import LinearFeatureBaseline
from maml_rl.config.config import Config
from maml_rl.config.yaml_source import Mapping
from maml_rl.envs import ObservedTask, make_vector_env
from maml_rl.errors import ChildEnvError, ConfigError
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.evaluate import evaluate_trials
from maml_rl.policies import NormalMLPPolicy
from maml_rl.policies.external_policy import ExternalPolicy
from maml_rl.spaces import PackedSpace

TASKS, EPISODES = 5, 3


def trials(env: Any, reader: Any, **options: Any) -> tuple[TaskEpisodes, Any]:
    """Sample trials; return them, and their space."""
    policy = ExternalPolicy(reader, GuessingEnv.observation_space, GuessingEnv.action_space)
    settings = {"seed": 0, "slots_per_task": 1, "observe_last": True, "max_episode_steps": 5, "max_retries": 100}
    with MultiTaskSampler(env, {}, EPISODES, policy, **settings, start_method="fork", **options) as sampler:
        return sampler.rollout_trials(sampler.sample_tasks(TASKS)), sampler.single_observation_space


@pytest.fixture(scope="module")
def serial() -> tuple[TaskEpisodes, Any]:
    return trials(GuessingEnv, Reader(), num_workers=0)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2, "stepping": "threads"},
        {"num_workers": 2, "inference": "central"},
    ],
    ids=str,
)
def test_texts_are_the_same_bytes_in_every_placement(options: dict[str, Any], serial: Any) -> None:
    env = partial(GuessingEnv, wait=0.002) if options.get("stepping") else GuessingEnv
    assert trials(env, Reader(), **options)[0].digest() == serial[0].digest()


@pytest.mark.parametrize("stepping", ["serial", "threads"])
def test_policy_is_called_once_for_every_step(stepping: Any) -> None:
    reader = Reader()
    episodes, _ = trials(partial(GuessingEnv, wait=0.002), reader, num_workers=0, stepping=stepping)
    assert episodes.lengths.unique().numel() > 1
    assert reader.answered == episodes.num_steps


def test_recorded_bytes_are_read_as_texts(serial: Any) -> None:
    episodes, space = serial
    seen, _ = space.read(episodes.observations)
    said = PackedSpace(GuessingEnv.action_space).read(episodes.actions)
    assert seen["answer"].shape == seen["guesses"].shape == said.shape == tuple(episodes.rewards.shape)
    real = episodes.mask.numpy() > 0
    # At every step except the first, the environment repeats the last action.
    for task, step, episode in np.argwhere(real):
        answer, guesses = seen["answer"][task, step, episode], seen["guesses"][task, step, episode]
        before = said[task, step - 1, episode]
        assert answer == ("a fruit, s'il te plaét" if step == 0 else f"{before} is wrong")
        assert guesses == step
    assert set(seen["answer"][~real]) == set(said[~real]) == {""}
    assert set(said[real]) == set(WORDS)


def test_right_answer_of_one_episode_is_repeated_in_the_next() -> None:
    evaluation = evaluate_trials(Reader(), GuessingEnv, 6, 4, max_episode_steps=5, seed=1)
    assert evaluation.env_name == "text_env.GuessingEnv"
    assert evaluation.returns.shape == (6, 4, 1)
    assert (evaluation.returns[:, -1] == 1.0).all()
    assert not (evaluation.returns[:, 0] == 1.0).all()


class Listens(Reader):
    def act(self, observations: Any, *others: Any) -> Any:
        return super().act({"answer": observations}, *others)


def test_observation_that_is_a_single_text_is_read() -> None:
    evaluation = evaluate_trials(Listens(), PlainTextEnv, 6, 4, max_episode_steps=5, seed=1)
    assert (evaluation.returns[:, -1] == 1.0).all()


@pytest.mark.parametrize("stepping", ["serial", "threads"])
def test_restarted_episode_is_undone_in_the_policy(stepping: Any, serial: Any) -> None:
    found, _ = trials(partial(GuessingEnv, retry=0.2), Reader(), num_workers=0, stepping=stepping)
    assert found.digest() == serial[0].digest()
    with pytest.raises(ValueError, match=r"restarted.*Forgetful may remember.*give it a method begin_anew\(tasks\)"):
        trials(partial(GuessingEnv, retry=0.5), Forgetful(), num_workers=0, stepping=stepping)


@pytest.mark.parametrize(
    ("own", "element", "num_bytes"),
    [
        (spaces.Text(5), "abc", 5),
        (spaces.Text(5, min_length=0), "", 5),
        (spaces.Text(3, charset="aé€😀"), "€é😀", 12),
        (spaces.Tuple((spaces.Text(2), spaces.Box(-1, 1, (3,), np.float64))), ("x", np.array([0.1, -1, 1])), 26),
    ],
)
def test_bytes_hold_an_element(own: Any, element: Any, num_bytes: int) -> None:
    space = PackedSpace(own)
    row = np.full(space.shape, 255, np.uint8)
    space.write(element, row)
    assert space.shape == (num_bytes,)
    found, stacked = space.element(row), space.read(torch.from_numpy(np.stack([row, row])))
    if isinstance(own, spaces.Tuple):
        np.testing.assert_array_equal(found[1], element[1])
        np.testing.assert_array_equal(stacked[1], [element[1]] * 2)
        found, stacked, element = found[0], stacked[0], element[0]
    assert found == element
    assert stacked.dtype == object
    assert stacked.tolist() == [element] * 2


class Says:
    """Always gives the same answer."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def reset(self, num_tasks: int) -> None: ...

    def act(self, observations: Any, rewards: Any, dones: Any) -> Any:
        return self._answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (["pear"] * 4, "Says returned 4 actions; expected 5 actions, one for each task"),
        ("apple", "Says returned a single text; expected 5 actions"),
        (["x" * 13] * 5, "a text of 13 characters, and its space has 1 to 12, as the action of task 0"),
        (
            ["pear", "two pears", *["pear"] * 3],
            "a text with ' ', which is not in the charset .*, as the action of task 1",
        ),
        ([None] * 5, "None instead of a text, as the action of task 0"),
    ],
)
def test_an_answer_that_is_not_in_the_action_space_is_named(answer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        trials(GuessingEnv, Says(answer), num_workers=0)
    assert "\n" not in str(error.value)


def test_an_observation_that_is_not_in_its_space_is_named() -> None:
    class Shouting(GuessingEnv):
        def step(self, action: str) -> Any:
            observation, *others = super().step(action)
            return {**observation, "answer": "no! " * 11}, *others

    with pytest.raises(ChildEnvError, match=r"returned a text of 44 characters, .* 1 to 40 at \['answer"):
        trials(Shouting, Reader(), num_workers=0)


def test_text_is_refused_where_numbers_are_needed() -> None:
    message = "computes with numbers, and the environment has text; evaluate a policy of your own"
    env = GuessingEnv()
    with pytest.raises(TypeError, match=message):
        get_policy_for_env(env)
    with pytest.raises(TypeError, match=message):
        LinearFeatureBaseline.for_space(PackedSpace(env.observation_space))
    with (
        MultiTaskSampler(GuessingEnv, {}, 2, NormalMLPPolicy(3, 1), num_workers=0, max_episode_steps=3) as sampler,
        pytest.raises(TypeError, match=f"NormalMLPPolicy {message}"),
    ):
        sampler.rollout([{"word": 0}])
    with pytest.raises(TypeError, match=f"what observes its task {message}"):
        make_vector_env(ObservedTask(GuessingEnv))
    with pytest.raises(TypeError, match="its charset has the character 0"):
        PackedSpace(spaces.Text(3, charset=string.ascii_letters + "\0"))


def test_a_config_cannot_train_on_text() -> None:
    config = Config.from_mapping(Mapping("the test", {"env-name": "text_env:Guessing-v0", "max-episode-steps": 3}))
    with pytest.raises(ConfigError, match=r"env-name.*training computes with numbers"):
        make_experiment(config)
