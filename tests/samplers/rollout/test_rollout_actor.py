"""What acts in a phase: for some slots as for all, with a memory of each slot, here or on an accelerator."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributions import Distribution, Normal
from trials import TASKS, Counting, make_sampler

from maml_rl import MultiTaskSampler
from maml_rl.baseline import LinearFeatureBaseline
from maml_rl.envs.make_env import ObservedLastStep, make_vector_env
from maml_rl.errors import NonFiniteError
from maml_rl.policies import (
    GRUPolicy,
    Memory,
    NormalMLPPolicy,
    Params,
    Policy,
    as_policy,
    get_policy_for_env,
    performed,
)
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.actor import Actor, DeviceLink, EpisodeNoise, chosen, phase_parameters
from maml_rl.samplers.rollout.recorder import SlotIndex
from maml_rl.seeding import PhaseStreams
from tests.envs.third_party import WalkEnv

NUM_TASKS, SLOTS = 3, 2
ALL = slice(0, NUM_TASKS * SLOTS)
OBSERVATIONS = np.random.default_rng(0).normal(size=(3, ALL.stop, 2))


def phase_of(policy: Policy, params: Params | None = None, **options: Any) -> Phase:
    """Return a phase of tasks 5 to 7, after one inner step."""
    tasks = tuple({"goal": float(goal)} for goal in range(NUM_TASKS))
    return Phase(tasks, policy, params, PhaseStreams(0, 0, 1, first_task=5), SLOTS, 4, **options)


def spread(policy: Policy) -> dict[str, Tensor]:
    """Return parameters that differ from task to task."""
    params = policy.stack_parameters(NUM_TASKS)
    return {
        name: value.detach() + torch.arange(float(NUM_TASKS)).reshape(-1, *(1,) * (value.dim() - 1))
        for name, value in params.items()
    }


def play(
    actor: Actor, parts: Sequence[SlotIndex], observations: NDArray[Any] = OBSERVATIONS, first: int = 0
) -> list[NDArray[Any]]:
    """Act for parts of the slots in turn, at every step; the slots that are left out see something else meanwhile."""
    seen = np.empty_like(observations[0])
    actor.observe(seen)
    actor.begin_trial()
    actions = []
    for step, of_step in enumerate(observations):
        of_slots: dict[int, NDArray[Any]] = {}
        for slots in parts:
            numbers = np.arange(len(seen))[slots]
            seen[:] = 100.0
            seen[first + numbers] = of_step[first + numbers]
            chosen = actor.act(slots, 0, step, np.ones(len(numbers), np.bool_))
            of_slots |= dict(zip(numbers.tolist(), chosen.copy(), strict=True))
        actions.append(np.stack([of_slots[slot] for slot in sorted(of_slots)]))
    return actions


PARTS: list[list[SlotIndex]] = [
    [slice(0, 1), slice(1, 4), slice(4, 6)],
    [slice(2, 4), slice(0, 2), slice(4, 6)],
    [np.array([5, 0]), np.array([3]), np.array([1, 2, 4])],
]


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("policy", [NormalMLPPolicy(2, 1, (4,)), Counting(tells_count=False)], ids=["plain", "memory"])
def test_actions_for_some_slots_are_those_for_all(policy: Policy, is_stacked: bool) -> None:
    phase = phase_of(policy, spread(policy) if is_stacked else None)
    whole = Actor(phase, "cpu")
    expected = play(whole, [ALL])
    for parts in PARTS:
        actor = Actor(phase, "cpu")
        np.testing.assert_array_equal(play(actor, parts), expected)
        assert all(torch.equal(*kept) for kept in zip(actor.memory, whole.memory, strict=True))
    # A unit of the slots, which cuts both of its tasks.
    unit = Actor(phase.unit(slice(3, 5)), "cpu")
    actions = play(unit, [slice(0, 1), np.array([1])], OBSERVATIONS[:, 2:], first=1)
    np.testing.assert_array_equal(actions, [of_step[3:5] for of_step in expected])


def test_parameters_of_all_tasks_are_one_view_whose_actions_are_those_of_copies() -> None:
    policy = NormalMLPPolicy(2, 1, (64, 64), "tanh")
    params, is_stacked = phase_parameters(policy, NUM_TASKS, None)
    assert is_stacked
    for name, own in policy.named_parameters():
        assert (params[name].shape, params[name].data_ptr()) == ((NUM_TASKS, *own.shape), own.data_ptr())
    copies = phase_of(policy, policy.stack_parameters(NUM_TASKS))
    np.testing.assert_array_equal(*(play(Actor(phase, "cpu"), [ALL]) for phase in (phase_of(policy), copies)))


class Folding(NormalMLPPolicy):
    """Reshapes its parameters by a view, as a grouped convolution does."""

    def act(self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None) -> Any:
        assert params is not None
        folded = params["layer1.weight"].view(-1, 2).unflatten(0, (len(observations), -1))
        return super().act(observations, noise, memory, {**params, "layer1.weight": folded})


def test_policy_with_an_act_of_its_own_gets_contiguous_parameters() -> None:
    own, policy = Folding(2, 1, (4,), seed=3), NormalMLPPolicy(2, 1, (4,), seed=3)
    expected = play(Actor(phase_of(policy), "cpu"), [ALL])
    np.testing.assert_allclose(play(Actor(phase_of(own), "cpu"), [ALL]), expected, rtol=1e-6)


class Remembering(Counting):
    """Is told which slots act; outputs what it remembers: how often each did."""

    told_who_acts = True

    def actor(self, params: Params | None, first_task: int = 0) -> Any:
        def act(observations: Tensor, noise: Tensor, memory: Memory, acts: Tensor) -> tuple[Tensor, Memory]:
            # Slots that do not act must keep their memory anyway.
            told.append(acts.flatten().tolist())
            return memory[0].float().unsqueeze(-1), (memory[0] + 1, memory[1])

        told = self.told = getattr(self, "told", [])
        self.first_task = first_task
        return act


def test_memory_changes_where_a_step_is_taken_and_returns_to_the_start_of_an_episode() -> None:
    policy = Remembering()
    actor = Actor(phase_of(policy), "cpu")
    actor.observe(OBSERVATIONS[0])
    actor.begin_trial()
    actor.begin_episodes()
    yes = np.ones(ALL.stop, np.bool_)

    def counts() -> list[int]:
        return actor.memory[0].flatten().tolist()

    running = np.array([True, False, True, True, True, True])
    actor.act(ALL, 0, 0, running)
    assert (policy.told[-1], counts(), policy.first_task) == (running.tolist(), [1, 0, 1, 1, 1, 1], 5)
    actor.act(np.array([1, 4]), 0, 0, yes[:2])
    assert (policy.told[-1], counts()) == ([False, True, False, False, True, False], [1, 1, 1, 1, 2, 1])
    actor.act(slice(2, 4), 0, 1, yes[:2])
    assert (policy.told[-1], counts()) == ([False, False, True, True, False, False], [1, 1, 2, 2, 2, 1])
    actor.begin_episodes(np.array([2, 3]))
    actor.begin_episodes(np.array([4]), forget=True)
    assert counts() == [1, 1, 2, 2, 0, 1]
    actor.act(ALL, 0, 2, yes)
    actor.begin_anew(np.array([0, 2, 4]))
    assert counts() == [0, 2, 2, 3, 0, 2]
    actor.begin_episodes()
    actor.act(ALL, 0, 3, yes)
    actor.begin_anew(np.array([1, 3]))
    assert counts() == [1, 2, 3, 3, 1, 3]
    unit = Actor(phase_of(policy).unit(slice(3, 5)), "cpu")
    unit.observe(OBSERVATIONS[0, 2:])
    unit.begin_trial()
    unit.begin_episodes()
    unit.act(slice(0, 2), 0, 0, yes[:2])
    unit.begin_anew(np.array([1]))
    assert unit.memory[0].tolist() == [[0, 1], [0, 0]]


class Comparing(Counting):
    """Remembers the observation as it was given, and outputs what has changed since."""

    def initial_memory(self, num: int) -> Memory:
        return (torch.zeros(num, 2, dtype=torch.float64),)

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        return (observations - memory[0]).sum(-1, keepdim=True).float(), (observations,)


def bits(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return random bits, some of which are no numbers."""
    drawn = np.random.default_rng(seed).bytes(torch.empty(shape, dtype=dtype).nbytes)
    return torch.tensor(list(drawn), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("row", [(), (0,), (3,), (16,), (2, 32)], ids=str)
def test_rows_are_chosen_to_the_last_bit_wherever_they_are(row: tuple[int, ...], dtype: torch.dtype) -> None:
    which = torch.tensor([[True, False], [False, False], [True, True]])
    ones = torch.ones((3, 2, *row), dtype=dtype)
    of_both = chosen(which, ones, torch.zeros_like(ones, dtype=torch.float64))
    assert (of_both.shape, of_both.dtype) == (ones.shape, torch.promote_types(dtype, torch.float64))
    one, other = bits(0, (3, 2, *row), dtype), bits(1, (3, 2, *row), dtype)
    places = [torch.empty(1 + one.numel(), dtype=dtype)[1:].reshape(one.shape), torch.empty_like(one.mT).mT]
    for place in [torch.empty_like(one), *places[: 1 if row == () else 2]]:
        rows = chosen(which, place.copy_(one), other)
        for task, slot in np.ndindex(3, 2):
            expected = one if which[task, slot] else other
            assert (
                rows[task, slot].flatten().view(torch.uint8).tolist()
                == expected[task, slot].flatten().view(torch.uint8).tolist()
            )


def test_policy_may_remember_what_it_was_given() -> None:
    """The next step overwrites the observations, but not the memory."""
    changes = np.diff(OBSERVATIONS, axis=0, prepend=0.0).sum(-1, keepdims=True)
    np.testing.assert_allclose(play(Actor(phase_of(Comparing()), "cpu"), [ALL]), changes, atol=1e-6)


class Shrinking(Counting):
    def act(self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None) -> Any:
        return noise, (memory[0], memory[1][..., :1])


def test_policy_that_returns_less_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Shrinking returned the shapes \(\(3, 2\) int64, \(3, 2, 1\) float32\), got"):
        play(Actor(phase_of(Shrinking()), "cpu"), [ALL])


class Flat(NormalMLPPolicy):
    """As many numbers as there must be, in another shape."""

    def act(self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None) -> Any:
        actions, memory = super().act(observations, noise, memory, params)
        return actions.flatten(0, 1), memory


def test_actions_of_another_shape_are_refused_by_the_name_of_the_policy() -> None:
    message = r"Flat returned actions of the shape \(6, 2\); return a tensor of the shape \(2, 3, 2\) from act"
    for backend in ("in-process", "device"):
        options: dict[str, Any] = {"num_workers": 0, "max_episode_steps": 3, "backend": backend, "device": "cpu"}
        with (
            MultiTaskSampler("2DNavigation-v0", {}, 3, Flat(2, 2, (4,)), **options) as sampler,
            pytest.raises(ValueError, match=message),
        ):
            sampler.rollout(sampler.sample_tasks(2))


def test_missing_parameter_of_a_policy_with_a_memory_is_named() -> None:
    policy = GRUPolicy(spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-1.0, 1.0, (1,)), 4)
    (name, _), *others = policy.named_parameters()
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        Actor(phase_of(policy, dict(others)), "cpu")


def test_actions_recorded_before_squashing_reach_the_environment_squashed() -> None:
    env = make_vector_env(ObservedLastStep("PointGoal-v0"), {}, 1)
    policy = GRUPolicy(env.single_observation_space, env.single_action_space, 8, squash=True, seed=1)
    with torch.no_grad():
        policy.head.bias += torch.tensor([4.0, -0.5, 0.3, 0.0])
    settings: dict[str, Any] = {"seed": 0, "observe_last": True, "slots_per_task": 1, "max_episode_steps": 6}
    with MultiTaskSampler("PointGoal-v0", {}, 2, policy, num_workers=0, **settings) as sampler:
        episodes = sampler.rollout_trials(sampler.sample_tasks(3))
    own, seen, after = episodes.actions, episodes.observations, episodes.next_observations
    assert (own[..., 0] > 3.0).any()
    moves = 0.1 * torch.tanh(own)
    torch.testing.assert_close(after[..., :2] - seen[..., :2], moves, rtol=0, atol=1e-6)
    # As the policy remembers them.
    torch.testing.assert_close(after[:, :-1, :, 2:4], moves[:, :-1], rtol=0, atol=1e-7)
    torch.testing.assert_close(performed(policy, episodes).actions, moves, rtol=0, atol=1e-7)
    # Outside of a sampler a policy says what the environment gets.
    chosen, _ = policy.choose(seen[0, 0, 0].numpy(), rng=np.random.default_rng(0))
    assert env.single_action_space.contains(chosen)
    env.close()


class OwnDeviation(nn.Module):
    """Learns its deviation without keeping it positive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 1))
        self.deviation = nn.Parameter(torch.ones(1))

    def forward(self, observations: Tensor) -> Distribution:
        return Normal(observations.float() @ self.weight, self.deviation.expand(len(observations), 1))


class WithAMemory(OwnDeviation):
    def initial_memory(self, num: int) -> tuple[Tensor, ...]:
        return (torch.zeros(num, 1),)

    def forward(self, observations: Tensor, memory: tuple[Tensor, ...]) -> Any:
        return super().forward(observations), memory


@pytest.mark.parametrize(("made", "value", "shown"), [(OwnDeviation, -2.5, "-2.5"), (WithAMemory, float("nan"), "NaN")])
def test_parameter_out_of_its_range_is_named_with_value_and_task(made: Any, value: float, shown: str) -> None:
    policy = as_policy(made(), (2,))
    policy.check_spaces(spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-1.0, 1.0, (1,)))
    params = policy.stack_parameters(NUM_TASKS)
    params["deviation"] = torch.tensor([[1.0], [value], [value]])
    for parts in ([ALL], [slice(2, 6)]):
        with pytest.raises(NonFiniteError) as caught:
            play(Actor(phase_of(policy, params), "cpu"), parts)
        message = str(caught.value)
        assert message.startswith(
            f"in task 6 after 1 inner step, the parameter scale of the distribution Normal of {made.__name__} is "
            f"{shown}, and must satisfy Gr"
        )
        assert "\n" not in message
        assert "softplus" in message
        assert caught.value.tasks == (6, 7)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "inference": "worker"}], ids=str)
def test_inner_step_after_which_a_parameter_is_out_of_its_range_is_named(
    options: dict[str, Any], forked_workers: None
) -> None:
    settings: dict[str, Any] = {"seed": 0, "max_episode_steps": 3, **options}
    tasks = [{"slope": slope} for slope in (0.5, -0.5, 1.0)]
    with (
        MultiTaskSampler(WalkEnv, {}, 4, OwnDeviation(), LinearFeatureBaseline(2), **settings) as sampler,
        pytest.raises(NonFiniteError, match=r"^in task \d after [12] inner steps?, the parameter scale of .* is -\d"),
    ):
        sampler.sample(tasks, num_steps=3, fast_lr=100.0, gamma=0.99, gae_lambda=1.0)


# Transfers to an accelerator, tried on the CPU: the packing is the same, and the episodes must be, too.


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "row", "rows"),
    [
        *((dtype, (3,), 5) for dtype in (np.bool_, np.int64, np.float64)),
        (np.float32, (2, 3), 1),
        (np.uint8, (), 7),
    ],
)
def test_observations_and_noise_arrive_as_they_were_sent(dtype: Any, row: tuple[int, ...], rows: int) -> None:
    random = np.random.default_rng(0)
    link = DeviceLink(np.empty((7, *row), dtype), 2, CPU)
    for _ in range(2):
        observations = random.integers(0, 2, (rows, *row)).astype(dtype)
        noise = random.normal(size=(rows, 2)).astype(np.float32)
        there, noise_there = link.send(observations, noise)
        np.testing.assert_array_equal(there.numpy(), observations)
        assert there.numpy().dtype == observations.dtype
        np.testing.assert_array_equal(noise_there.numpy(), noise)


class CountingLink(DeviceLink):
    """Counts what is sent and fetched."""

    sent = fetched = 0

    def send(self, observations: Any, noise: Any) -> Any:
        CountingLink.sent += 1
        return super().send(observations, noise)

    def fetch(self, actions: Any) -> Any:
        CountingLink.fetched += 1
        return super().fetch(actions)


class LinkedActor(Actor):
    """Transfers as to an accelerator, whatever the device."""

    def observe(self, observations: Any) -> None:
        self._link = self._link or CountingLink(observations, self._policy.noise_size, CPU)
        super().observe(observations)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_name", "options"),
    [("2DNavigation-v0", {"num_workers": 0}), ("TabularMDP-v0", {"num_workers": 3, "num_groups": 2})],
)
def test_episodes_are_bit_identical_with_one_transfer_each_way_per_step(
    env_name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest() -> str:
        policy = get_policy_for_env(MultiTaskSampler.spaces(env_name), (8,), "tanh")
        with MultiTaskSampler(env_name, {}, 3, policy, seed=0, max_episode_steps=6, **options) as sampler:
            return sampler.rollout(sampler.sample_tasks(5)).digest()

    expected = digest()
    monkeypatch.setattr("maml_rl.samplers.rollout.loop.Actor", LinkedActor)
    monkeypatch.setattr(CountingLink, "sent", 0)
    monkeypatch.setattr(CountingLink, "fetched", 0)
    assert digest() == expected
    assert CountingLink.sent == CountingLink.fetched == 6 * options.get("num_groups", 1)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_episodes_on_cuda_agree_with_those_on_the_cpu() -> None:
    policy = NormalMLPPolicy(2, 2, (8,), "tanh")
    found = []
    for device in ("cpu", "cuda"):
        options: dict[str, Any] = {"num_workers": 2, "max_episode_steps": 6, "device": device}
        with MultiTaskSampler("2DNavigation-v0", {}, 3, policy, seed=0, **options) as sampler:
            found.append(sampler.rollout(sampler.sample_tasks(5)))
    np.testing.assert_allclose(found[0].actions, found[1].actions, atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_noise_of_slots_at_many_steps_is_rarely_drawn_again(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws: list[Any] = []

    def draw(streams: PhaseStreams, kind: str, num_tasks: int, episodes: range, steps: range, size: int) -> Any:
        draws.append(steps)
        return np.full((len(steps), num_tasks, len(episodes), size), float(episodes.start))

    monkeypatch.setattr(PhaseStreams, "action_noise", draw)
    streams = PhaseStreams(0, 0, 0)
    phase = Phase(TASKS[:1], NormalMLPPolicy(2, 1), None, streams, 40, 50, False, deterministic, slots_per_task=1)
    noise, places = EpisodeNoise(phase), 40
    slots = np.zeros(places, np.int64)
    for step in range(50):
        rows = noise.rows(slots, np.arange(places), np.full(places, step))
        np.testing.assert_array_equal(rows[:, 0], np.zeros(places) if deterministic else np.arange(places))
    assert len(draws) == 0 if deterministic else len(draws) < 50 * places // 3


class Shapeless(Counting):
    """Returns a memory of a wrong shape, at a given place."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def initial_memory(self, num: int) -> Memory:
        memory = (torch.zeros(1 if self.place == "rows" else num, 4),)
        return list(memory) if self.place == "list" else memory  # type: ignore[return-value]

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
