"""Learning histories in memory: sequences in the form that a policy sees, and best actions."""

import json
import math
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from maml_rl import MultiTaskSampler
from maml_rl.envs.observing import LastStepParts
from maml_rl.episode import TaskEpisodes
from maml_rl.errors import ConfigError
from maml_rl.experience import Histories
from maml_rl.experience.histories import Distinct, EnvKind
from maml_rl.experience.recording import space_as_json, space_from_json
from maml_rl.policies.classical import RandomPolicy

OBSERVATIONS, ACTIONS = spaces.Box(-np.inf, np.inf, (1,), np.float32), spaces.Discrete(3)


def small_histories(**ends: Any) -> Histories:
    """Two histories of four and three episodes; a step's observation and reward are its number among all."""
    lengths = [2, 3, 1, 2, 4, 2, 3]
    steps = np.arange(sum(lengths), dtype=np.float32)
    return Histories(
        [{"goal": np.array([0.0])}, {"goal": np.array([1.0])}],
        [lengths[:4], lengths[4:]],
        steps[:, None],
        steps.astype(np.int64) % 3,
        steps,
        EnvKind(OBSERVATIONS, ACTIONS),
        **ends,
    )


def dark_room() -> Histories:
    """Return histories of two iterations in the dark room."""
    with MultiTaskSampler("DarkRoom-v0", {}, 3, RandomPolicy(5), num_workers=0, seed=0) as sampler:
        tasks = sampler.sample_tasks(6)
        episodes = [sampler.rollout(tasks), sampler.rollout(tasks)]
        return Histories.of(episodes, EnvKind(sampler.env.observation_space, sampler.env.action_space, "DarkRoom-v0"))


def test_sequence_of_all_episodes_is_the_history() -> None:
    histories = small_histories()
    histories.sequences(np.random.default_rng(5), 3, 2, keep=2)
    # What is drawn depends only on the generator, not on earlier draws.
    drawn, again = (source.sequences(np.random.default_rng(0), 50, 8) for source in (histories, small_histories()))
    assert torch.equal(again.observations, drawn.observations)
    first = drawn.tasks == 0
    assert first.any()
    assert drawn.rewards[:, first][:, 0].tolist() == list(range(8))
    ends = drawn.terminations | drawn.truncations
    assert ends[:, first][:, 0].tolist() == [0, 1, 0, 0, 1, 1, 0, 1]
    assert drawn.episodes[:, first][:, 0].tolist() == [0, 0, 1, 1, 1, 2, 3, 3]
    assert set(drawn.rewards[0, ~first].tolist()) == {8.0, 9.0}
    assert torch.equal(drawn.actions, drawn.rewards.long() % 3)


def test_normalized_rewards_are_those_over_the_mean_square_of_the_family() -> None:
    histories = small_histories()
    histories.tasks = [{"family": "first"}, {"family": "second"}]
    plain, drawn = (histories.sequences(np.random.default_rng(0), 50, 8, normalize=each) for each in (False, True))
    scales = torch.tensor(
        [math.sqrt(sum(n**2 for n in numbers) / len(numbers)) for numbers in (range(8), range(8, 17))]
    )
    torch.testing.assert_close(drawn.rewards, plain.rewards / scales[plain.tasks])
    assert torch.equal(drawn.observations, plain.observations)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("repeated", [False, True])
def test_terminations_and_what_follows_are_those_of_the_history(keep: int, repeated: bool) -> None:
    terminated, final = [True, False, True, False, False, True, True], -1.0 - np.arange(7.0)[:, None]
    last = {1: 0, 4: 1, 5: 2, 7: 3, 11: 4, 13: 5, 16: 6}
    ends: dict[str, Any] = {"terminated": terminated, "final_observations": final}
    histories = small_histories(**ends)
    if repeated:
        table = np.concatenate((np.arange(17.0)[:, None], final)).astype(np.float32)
        steps = np.arange(17)
        lengths = np.split(histories.lengths, [4])
        ends["final_observations"] = 17 + np.arange(7)
        histories = Histories(
            histories.tasks, lengths, steps, steps % 3, steps, EnvKind(OBSERVATIONS, ACTIONS), distinct=table, **ends
        )
    parts = LastStepParts.of(OBSERVATIONS, ACTIONS)
    drawn = histories.sequences(np.random.default_rng(0), 200, 2, keep=keep)
    assert (drawn.mask == 1.0).all()
    followers = set()
    for column in range(200):
        for row in range(2):
            step = int(drawn.rewards[row, column])
            assert drawn.terminations[row, column].item() == (step in last and terminated[last[step]])
        # Every keep-th episode follows, in the same history.
        following = step + 1
        if step in last:
            episode = last[step] + keep
            following = None if episode >= (4 if step < 8 else 7) else 1 + [*last][episode - 1]
        seen = drawn.next_observations[-1][column]
        expected = float(final[last[step]][0]) if following is None else float(following)
        followers.add(expected)
        assert seen[parts.observation].tolist() == [expected]
        assert seen[parts.last_reward].item() == step
        assert seen[parts.last_action].tolist() == [float(step % 3 == action) for action in range(3)]
        assert seen[parts.last_termination].item() == (step in last)
    assert {-4.0, -7.0} <= followers


def test_last_step_of_a_history_without_a_final_observation_is_not_real() -> None:
    drawn = small_histories().sequences(np.random.default_rng(0), 100, 2)
    assert torch.equal(drawn.mask[1] == 0.0, (drawn.rewards[1] == 7.0) | (drawn.rewards[1] == 16.0))
    assert (drawn.mask[0] == 1.0).all()
    assert not drawn.terminations.any()


def test_histories_of_episodes_have_their_ends_and_final_observations() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([[2, 3], [1, 3]])
    iterations = [
        TaskEpisodes(
            observations=torch.randn(2, 3, 2, 1, generator=generator),
            actions=torch.zeros(2, 3, 2, dtype=torch.int64),
            rewards=torch.arange(12.0).reshape(2, 3, 2),
            lengths=lengths,
            terminated=lengths < 3 if number else torch.zeros_like(lengths, dtype=torch.bool),
            truncated=lengths == 3,
            final_observations=torch.randn(2, 2, 1, generator=generator),
            tasks=[{"goal": 0.0}, {"goal": 1.0}],
        )
        for number in range(2)
    ]
    histories = Histories.of(iterations, EnvKind(OBSERVATIONS, ACTIONS))
    assert histories.terminated.tolist() == [False, False, True, False, False, False, True, False]
    first, second = ((each.rewards * each.mask).sum(1).tolist() for each in iterations)
    assert [returns.tolist() for returns in histories.returns()] == [first[0] + second[0], first[1] + second[1]]
    drawn = histories.sequences(np.random.default_rng(0), 20, 8)
    for column, history in enumerate(drawn.tasks.tolist()):
        if history == 1:
            # The whole history of the second task, 1 + 3 + 1 + 3 steps.
            assert drawn.next_observations[-1][column, 0] == iterations[1].final_observations[1, 1, 0]


def test_actions_outside_of_a_box_are_those_that_the_environment_got() -> None:
    box = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 0.5], np.float32))
    actions = [[-3.0, 0.2], [0.4, 0.9]]
    histories = Histories([{}], [[2]], [[0.0], [0.0]], actions, [0.0, 0.0], EnvKind(OBSERVATIONS, box))
    drawn = histories.sequences(np.random.default_rng(0), 1, 2)
    expected = torch.tensor([[-1.0, 0.2], [0.4, 0.5]])
    assert torch.equal(drawn.actions[:, 0], expected)
    assert torch.equal(torch.cat((drawn.observations[1:, 0, 1:3], drawn.next_observations[-1][:, 1:3])), expected)


def test_kept_episodes_are_every_second_one_from_either_of_the_first_two() -> None:
    drawn = small_histories().sequences(np.random.default_rng(0), 200, 2, keep=2)
    windows = {tuple(window) for window in drawn.rewards.T.tolist()}
    # 0 1 | 5 and 2 3 4 | 6 7 of the first history; 8 to 11 | 14 15 16 and 12 13 of the second.
    assert windows == {
        *((0.0, 1.0), (1.0, 5.0), (2.0, 3.0), (3.0, 4.0), (4.0, 6.0), (6.0, 7.0)),
        *((8.0, 9.0), (9.0, 10.0), (10.0, 11.0), (11.0, 14.0), (14.0, 15.0), (15.0, 16.0), (12.0, 13.0)),
    }


def test_last_step_is_that_of_the_step_before_and_zero_where_a_history_begins() -> None:
    histories = small_histories()
    parts = LastStepParts.of(OBSERVATIONS, ACTIONS)
    drawn = histories.sequences(np.random.default_rng(0), 100, 3, keep=1)
    for column in range(100):
        for row in range(3):
            step = int(drawn.rewards[row, column])
            seen = drawn.observations[row, column]
            assert seen[parts.observation].tolist() == [step]
            if step in (0, 8):
                assert not seen[1:].any()
                continue
            assert seen[parts.last_action].tolist() == [float((step - 1) % 3 == action) for action in range(3)]
            assert seen[parts.last_reward].item() == step - 1
            assert seen[parts.last_termination].item() == (step - 1 in {1, 4, 5, 7, 11, 13, 16})


def test_observations_are_those_that_a_policy_sees_with_observe_last() -> None:
    # The same streams give the same episodes with and without the last step among the observations.
    options = {"batch_size": 3, "policy": RandomPolicy(5), "num_workers": 0, "seed": 0, "slots_per_task": 1}
    found = []
    for observe_last in (False, True):
        with MultiTaskSampler("DarkRoom-v0", {}, observe_last=observe_last, **options) as sampler:
            found.append(sampler.rollout(sampler.sample_tasks(4)))
            space = sampler.env.observation_space
    assert space.shape == (81 + 5 + 2,)
    env = gymnasium.make("DarkRoom-v0")
    histories = Histories.of([found[0]], EnvKind(env.observation_space, env.action_space))
    drawn = histories.sequences(np.random.default_rng(0), 5, 60)
    seen = found[1].observations.transpose(1, 2).flatten(1, 2)
    for column, history in enumerate(drawn.tasks):
        assert torch.equal(drawn.observations[:, column], seen[history])


def test_best_action_of_every_step_leads_towards_the_goal_of_its_task() -> None:
    histories = dark_room()
    drawn = histories.sequences(np.random.default_rng(0), 8, 50)
    best = histories.optimal_actions(drawn)
    assert best.shape == (50, 8)
    goals = np.stack([histories.tasks[int(history)]["goal"] for history in drawn.tasks])
    moves = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])
    cells = np.stack(np.divmod(drawn.observations[..., :81].argmax(-1).numpy(), 9), -1)
    distance = np.abs(cells - goals).sum(-1)
    closer = np.abs(cells + moves[best.numpy()] - goals).sum(-1)
    assert (closer == np.maximum(distance - 1, 0)).all()


def test_best_arm_is_that_of_the_largest_mean() -> None:
    with MultiTaskSampler("Bandit-K5-v0", {}, 5, RandomPolicy(5), num_workers=0, seed=0) as sampler:
        episodes = sampler.rollout(sampler.sample_tasks(4))
        env = sampler.env
    histories = Histories.of([episodes], EnvKind(env.observation_space, env.action_space, "Bandit-K5-v0"))
    drawn = histories.sequences(np.random.default_rng(0), 10, 5)
    best = [int(np.argmax(histories.tasks[int(history)]["mean"])) for history in drawn.tasks]
    assert histories.optimal_actions(drawn).tolist() == [best] * 5


def test_distinct_observations_are_kept_once() -> None:
    rows = np.eye(5, dtype=np.float32)[[3, 1, 3, 3, 0]]
    distinct = Distinct(spaces.Box(0.0, 1.0, (5,), np.float32))
    assert distinct.encode(rows).tolist() == [0, 1, 0, 0, 2]
    assert (distinct.table()[distinct.encode(rows)] == rows).all()
    many = Distinct(spaces.Box(-np.inf, np.inf, (1,), np.float32))
    assert many.encode(np.arange(70_000, dtype=np.float32)[:, None]) is None


def test_wrong_requests_are_refused_in_one_line() -> None:
    histories = small_histories()
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="has 8 steps, fewer than length=9; lower length or keep"):
        histories.sequences(rng, 2, 9)
    with pytest.raises(ValueError, match="has 3 episodes, of which keep=4 leaves none"):
        histories.sequences(rng, 2, 1, keep=4)
    with pytest.raises(ValueError, match="does not know its best actions"):
        histories.optimal_actions(histories.sequences(rng, 2, 1))
    with pytest.raises(ValueError, match=r"rewards must have the shape \(2,\), got \(3,\)"):
        Histories([{}], [[2]], [[0.0], [0.0]], [0, 0], [0] * 3, EnvKind(OBSERVATIONS, ACTIONS))
    for nothing in ([], [[0]]):
        with pytest.raises(ValueError, match="expected at least one history, one episode in each and one step"):
            Histories([{}] * len(nothing), nothing, np.zeros((0, 1)), [], [], EnvKind(OBSERVATIONS, ACTIONS))
    with pytest.raises(ValueError, match="expected the lengths of 2 histories, got 1"):
        Histories([{}, {}], [[2]], [[0.0], [0.0]], [0, 0], [0] * 2, EnvKind(OBSERVATIONS, ACTIONS))


def test_another_family_and_other_spaces_are_refused_in_one_line() -> None:
    histories = dark_room()
    histories.check_fits(replace(histories.env, observation_space=None))
    with pytest.raises(ConfigError, match="of the family DarkRoom-v0, and the learner is for GridNavi-v0"):
        histories.check_fits(replace(histories.env, env_id="GridNavi-v0"))
    with pytest.raises(ConfigError, match=r"of actions Discrete\(5\), and the learner is for Discrete\(3\)"):
        histories.check_fits(replace(histories.env, action_space=ACTIONS))


def test_space_that_is_recorded_is_read_again_and_another_kind_is_refused() -> None:
    for space in (spaces.MultiBinary(3), spaces.MultiBinary([2, 3]), spaces.MultiDiscrete([2, 3])):
        assert space_from_json(json.loads(json.dumps(space_as_json(space)))) == space
    with pytest.raises(ConfigError, match="cannot be recorded; expected Box, Discrete, MultiDiscrete or MultiBinary"):
        space_as_json(spaces.Tuple([OBSERVATIONS]))
    with pytest.raises(ValueError, match=r"is not a space \(ValueError\)"):
        space_from_json({"kind": "MultiBinary", "n": 10**12})
