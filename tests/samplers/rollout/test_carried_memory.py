"""A policy's memory is carried through a trial, slot by slot, in every placement and after every fault."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty_env import HORIZON, FaultyEnv
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from maml_rl import MultiTaskSampler, TaskEpisodes
from maml_rl.policies import Memory, MemoryPolicy, NormalMLPPolicy, Params

pytestmark = [pytest.mark.usefixtures("forked_workers"), pytest.mark.timeout(60)]

TASKS = [{"goal": goal} for goal in (0.0, 0.25, 0.5, 0.75, 1.0)]
EPISODES = 4


class TrialEnv(FaultyEnv):
    """Episodes of different lengths, with a fault in a given episode of a trial, or in any."""

    def __init__(self, in_episode: int | None = None, **fault: Any) -> None:
        super().__init__(**fault)
        self._in_episode, self._episode = in_episode, -1

    def reset_task(self, task: dict[str, Any]) -> None:
        super().reset_task(task)
        self._episode = -1

    def reset(self, **options: Any) -> Any:
        self._episode += 1
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or bool(observation[1] > 1.5), truncated, info

    def _misbehave(self, place: str | int) -> None:
        if getattr(self, "_in_episode", None) in (None, getattr(self, "_episode", -1)):
            super()._misbehave(place)


class Counting(MemoryPolicy):
    """Outputs the number of steps that it remembers, or with `tells_count=False` the sum that it has added up."""

    noise_kind, noise_size = "normal", 1

    def __init__(self, tells_count: bool = True) -> None:
        super().__init__()
        self.tells_count, self.weight = tells_count, nn.Parameter(torch.full((2,), 0.5))

    def initial_memory(self, num: int) -> Memory:
        return torch.zeros(num, dtype=torch.int64), torch.zeros(num, 2)

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        weight = self.weight if params is None else params["weight"]
        count, seen = memory
        seen = 0.9 * seen + torch.tanh(observations.float())
        shown = (seen * weight.reshape(-1, 1, 2)).sum(-1, keepdim=True) + noise
        return count.unsqueeze(-1).float() if self.tells_count else shown, (count + 1, seen)


class Recurrent(nn.Module):
    """A recurrent policy as a user would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 5), nn.Linear(5, 1)

    def initial_memory(self, num: int) -> Memory:
        return (torch.zeros(num, 5),)

    def forward(self, observations: Tensor, memory: Memory) -> Any:
        hidden = self.cell(observations, memory[0])
        mean = self.head(hidden)
        return Independent(Normal(mean, torch.ones_like(mean)), 1), (hidden,)


def make_sampler(policy: nn.Module, num_workers: int = 0, fault: Any = None, **options: Any) -> MultiTaskSampler:
    settings = {"slots_per_task": 1, "max_episode_steps": HORIZON, "seed": 3, **options}
    if num_workers:
        settings = {"start_method": "fork", **settings}
    env = partial(TrialEnv, **(fault or {}))
    return MultiTaskSampler(env, {}, EPISODES, policy, num_workers=num_workers, **settings)


def sample(
    policy: nn.Module, num_workers: int = 0, fault: Any = None, params: Any = None, **options: Any
) -> TaskEpisodes:
    with make_sampler(policy, num_workers, fault, **options) as sampler:
        first, second = sampler.rollout(TASKS, params), sampler.rollout(TASKS, params)
        assert first.digest() != second.digest()
        return second


def test_memory_is_kept_through_a_trial_and_reset_for_the_next() -> None:
    episodes = sample(Counting())
    assert len(set(episodes.lengths.flatten().tolist())) > 2
    before = episodes.lengths.cumsum(1) - episodes.lengths
    steps = torch.arange(episodes.rewards.shape[1]).reshape(1, -1, 1) + before.unsqueeze(1)
    assert torch.equal(episodes.actions[..., 0], steps * episodes.mask)


def test_a_memory_that_is_reset_with_every_episode_counts_its_steps() -> None:
    episodes = sample(Counting(), reset_memory_each_episode=True)
    steps = torch.arange(episodes.rewards.shape[1]).reshape(1, -1, 1)
    assert torch.equal(episodes.actions[..., 0], steps * episodes.mask)


def test_slots_of_a_task_have_memories_of_their_own() -> None:
    episodes = sample(Counting(), slots_per_task=2)
    # Episodes 0 and 1 run at once, then 2 and 3 in their slots.
    before = torch.cat((torch.zeros(len(TASKS), 2), episodes.lengths[:, :2]), 1)
    steps = torch.arange(episodes.rewards.shape[1]).reshape(1, -1, 1) + before.unsqueeze(1)
    assert torch.equal(episodes.actions[..., 0], steps * episodes.mask)


PLACEMENTS: list[dict[str, Any]] = [
    {"num_workers": 2, "inference": "worker"},
    {"num_workers": 5, "inference": "worker"},
    {"num_workers": 2, "inference": "central"},
    {"num_workers": 3, "inference": "central", "num_groups": 2},
    {"num_workers": 2, "inference": "central", "recv_timeout": 0.0},
]


@pytest.fixture(scope="module")
def recurrent() -> Recurrent:
    torch.manual_seed(0)
    return Recurrent()


@pytest.mark.slow
@pytest.mark.parametrize("slots_per_task", [1, 2])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("own", marks=pytest.mark.nightly),
        pytest.param("module", marks=pytest.mark.nightly),
        "stacked module",
        "stacked",
    ],
)
def test_trials_are_bit_identical_for_any_placement(kind: str, slots_per_task: int, recurrent: Recurrent) -> None:
    policy: nn.Module = recurrent if "module" in kind else Counting(tells_count=False)
    params = None
    if "stacked" in kind:
        scale = torch.linspace(0.5, 1.5, len(TASKS))
        params = {
            name: param.detach() * scale.reshape(-1, *(1,) * param.dim()) for name, param in policy.named_parameters()
        }
    expected = sample(policy, params=params, slots_per_task=slots_per_task).digest()
    for placement in PLACEMENTS:
        assert sample(policy, params=params, slots_per_task=slots_per_task, **placement).digest() == expected, placement


@pytest.mark.slow
@pytest.mark.parametrize("inference", ["worker", "central"])
@pytest.mark.parametrize(("fault", "episode", "step"), [("kill", 2, 2), ("segfault", 1, 0), ("kill", 3, "reset")])
def test_trials_are_bit_identical_after_a_worker_died_during_one(
    inference: Any, fault: str, episode: int, step: Any, recurrent: Recurrent, tmp_path: Path
) -> None:
    for policy in (recurrent, Counting(tells_count=False)):
        marker = tmp_path / type(policy).__name__
        faulty = {"fault": fault, "place": step, "marker": str(marker), "in_episode": episode}
        found = sample(policy, 2, faulty, inference=inference)
        assert marker.exists()
        assert found.digest() == sample(policy).digest()


def test_rollout_trials_needs_one_slot_for_each_task() -> None:
    with make_sampler(Counting()) as sampler:
        digest = sampler.rollout_trials(TASKS).digest()
    with make_sampler(Counting()) as sampler:
        assert sampler.rollout(TASKS).digest() == digest
    with make_sampler(Counting(), slots_per_task=2) as sampler, pytest.raises(ValueError, match="slots_per_task=1"):
        sampler.rollout_trials(TASKS)


def remembered(policy: nn.Module, num_workers: int = 0, **options: Any) -> TaskEpisodes:
    return sample(policy, num_workers, record_memory=True, **options)


def test_recorded_memory_is_that_before_each_action() -> None:
    episodes = remembered(Counting())
    assert episodes.memory is not None
    count, seen = episodes.memory
    grid = episodes.rewards.shape
    assert (count.shape, count.dtype, seen.shape) == (grid, torch.int64, (*grid, 2))
    # The policy outputs its count before it increases it.
    assert torch.equal(count.float(), episodes.actions[..., 0])
    by_hand = torch.zeros(len(TASKS), 2)
    for episode in range(EPISODES):
        for step in range(grid[1]):
            real = episodes.mask[:, step, episode].bool()
            assert torch.equal(seen[:, step, episode], torch.where(real[:, None], by_hand, 0.0))
            observed = torch.tanh(episodes.observations[:, step, episode].float())
            by_hand = torch.where(real[:, None], 0.9 * by_hand + observed, by_hand)


def test_memory_is_recorded_only_on_request_and_changes_no_episode() -> None:
    plain, recorded = sample(Counting(tells_count=False)), remembered(Counting(tells_count=False))
    assert plain.memory is None
    assert plain.digest() == recorded.digest()
    with pytest.raises(ValueError, match="NormalMLPPolicy has no memory; leave it out") as caught:
        make_sampler(NormalMLPPolicy(2, 1), record_memory=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"reset_memory_each_episode": True}, {"slots_per_task": 2}])
def test_recorded_memory_starts_with_that_of_the_slots(options: dict[str, Any]) -> None:
    episodes = remembered(Counting(), **options)
    assert episodes.memory is not None
    assert torch.equal(episodes.memory[0].float(), episodes.actions[..., 0])


def test_recorded_memory_goes_with_the_episodes_of_a_task() -> None:
    episodes = remembered(Counting())
    assert episodes.memory is not None
    again = TaskEpisodes.stack(list(episodes)).memory
    assert again is not None
    assert all(torch.equal(one, other) for one, other in zip(again, episodes.to("cpu").memory or (), strict=True))
    assert len(again) == len(episodes.memory)
    forgetful = list(episodes)
    forgetful[1].memory = None
    with pytest.raises(ValueError, match="either all episodes must have memory, or none; 4 of 5 have"):
        TaskEpisodes.stack(forgetful)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "module"])
def test_recorded_memory_is_the_same_for_any_placement_and_after_a_death(
    kind: str, recurrent: Recurrent, tmp_path: Path
) -> None:
    policy: nn.Module = recurrent if kind == "module" else Counting(tells_count=False)
    expected = remembered(policy).memory
    assert expected is not None
    faults = {"fault": {"fault": "kill", "place": 2, "marker": str(tmp_path / "killed"), "in_episode": 1}}
    for placement in (*PLACEMENTS, {"num_workers": 2, **faults}):
        found = remembered(policy, **placement).memory or ()
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), placement
    assert (tmp_path / "killed").exists()


class Shapeless(Counting):
    """Returns a memory of a wrong shape, at a given place."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def initial_memory(self, num: int) -> Any:
        match self.place:
            case "rows":
                return (torch.zeros(1, 4),)
            case "list":
                return [torch.zeros(num, 4)]
        return (torch.zeros(num, 4),)

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        after = {"size": memory[0][..., :3], "type": memory[0].double(), "none": None}.get(self.place, memory[0])
        return noise, () if after is None else (after,)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("rows", r"initial_memory\(3\) of Shapeless returned the shape \(1, 4\) float32; .*\(3, \.\.\.\)"),
        ("list", r"initial_memory\(3\) of Shapeless returned a list; return a tuple"),
        ("size", r"the shape \(1, 3, 3\) float32, got the shape \(1, 3, 4\) float32"),
        ("type", r"the shape \(1, 3, 4\) float64, got the shape \(1, 3, 4\) float32"),
        ("none", r"Shapeless returned no memory, got the shape"),
    ],
)
def test_a_memory_of_the_wrong_shape_is_refused(place: str, message: str) -> None:
    with make_sampler(Shapeless(place)) as sampler, pytest.raises(ValueError, match=message) as caught:
        sampler.rollout_trials(TASKS)
    assert "\n" not in str(caught.value)


def test_a_policy_steps_through_a_trial_by_itself_as_in_the_sampler() -> None:
    policy, memory = Counting(), None
    for step in range(4):
        action, memory = policy.choose(np.zeros(2), memory)
        assert action.tolist() == [step]
    with pytest.raises(TypeError, match="Counting has a memory"):
        policy(torch.zeros(1, 2))
    assert policy.has_memory
    assert not NormalMLPPolicy(2, 1).has_memory


class Comparing(MemoryPolicy):
    """Remembers the observation as it was given, and outputs what has changed since."""

    noise_kind, noise_size = "normal", 1

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def initial_memory(self, num: int) -> Memory:
        return (torch.zeros(num, 2, dtype=torch.float64),)

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        return (observations - memory[0]).sum(-1, keepdim=True).float(), (observations,)


@pytest.mark.parametrize("place", [{}, {"num_workers": 2}, {"num_workers": 2, "inference": "central"}])
def test_policy_may_remember_what_it_was_given(place: dict[str, Any]) -> None:
    """The next step overwrites the observations, but not the memory."""
    episodes = sample(Comparing(), **place, slots_per_task=EPISODES)
    before = torch.cat([torch.zeros_like(episodes.observations[:, :1]), episodes.observations[:, :-1]], 1)
    changes = (episodes.observations - before).sum(-1).float() * episodes.mask
    assert torch.equal(episodes.actions[..., 0], changes)
