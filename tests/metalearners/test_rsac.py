"""Recurrent SAC: its losses against plain loops over single trials and steps, learning, and refusals."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Normal

from maml_rl.episode import TaskEpisodes
from maml_rl.experience import Steps
from maml_rl.experiment.build import make_experiment
from maml_rl.experiment.sampling import make_sampler
from maml_rl.metalearners.rsac import RSAC
from maml_rl.metalearners.stepper import Stepper
from maml_rl.plan import Plan
from maml_rl.policies import EncoderSizes
from maml_rl.policies.soft_actors import RecurrentActor
from tests.metalearners.plain_two_hot import cross_entropy, decoded
from tests.metalearners.small_algorithms import small

GAMMA = 0.8
BOX = spaces.Box(np.array([-0.5, 0.0], np.float32), np.array([0.5, 2.0], np.float32))
ACTIONS = {"box": BOX, "discrete": spaces.Discrete(3)}
SIZE = 3


def make(kind: str, **settings: Any) -> RSAC:
    action = ACTIONS[kind]
    observation = spaces.Box(-np.inf, np.inf, (SIZE + spaces.flatdim(action) + 2,), np.float32)
    policy = RecurrentActor(observation, action, EncoderSizes(5, (4, 3, 2), "gru"), (6, 4)).double()
    learner = RSAC(policy, None, settings=RSAC.Settings(**settings), plan=Plan(gamma=GAMMA))
    generator = torch.Generator().manual_seed(3)
    for network in (learner.policy, learner.critics, learner.targets):
        network.double()
        with torch.no_grad():
            for param in network.parameters():
                param.add_(0.5 * torch.randn(param.shape, generator=generator, dtype=torch.float64))
    learner.networks.double()
    with torch.no_grad():
        learner.networks.log_temperature.fill_(-0.7)
    return learner


def make_trials(learner: RSAC, lengths: list[int], ends_terminal: list[bool]) -> Steps:
    """Random trials; the first half of each is an episode of its own."""
    generator = torch.Generator().manual_seed(1)
    longest, num = max(lengths), len(lengths)
    real = torch.arange(longest).unsqueeze(1) < torch.tensor(lengths)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn((longest, num, *shape), generator=generator, dtype=torch.float64)
        return drawn * real.reshape(longest, num, *(1,) * len(shape))

    (width,) = learner.policy.observation_shape
    if learner.policy.noise_kind == "normal":
        actions = draw(2).tanh() * torch.tensor([0.5, 1.0]) + torch.tensor([0.0, 1.0])
    else:
        actions = torch.randint(3, (longest, num), generator=generator) * real
    terminations = torch.zeros((longest, num), dtype=torch.bool)
    for number, (length, terminal) in enumerate(zip(lengths, ends_terminal, strict=True)):
        # The end of an episode in the middle of a trial is not the end of the trial.
        terminations[length // 2 - 1, number] = True
        terminations[length - 1, number] = terminal
    return Steps(actions=actions, observations=draw(width), rewards=draw(), next_observations=draw(width),
                 terminations=terminations, truncations=~terminations, mask=real.double())  # fmt: skip


def through(network: nn.Module, names: list[str], inputs: Tensor) -> Tensor:
    """Apply linear layers with ReLU between them, row by row."""
    params = dict(network.named_parameters())
    for name in names:
        inputs = params[f"{name}.weight"] @ inputs + params[f"{name}.bias"]
        inputs = inputs.relu() if name != names[-1] else inputs
    return inputs


def remember(encoder: nn.Module, observations: Tensor) -> list[Tensor]:
    """Return the memory of a GRU after each observation, by its textbook equations."""
    params = dict(encoder.named_parameters())
    width = observations.shape[1] - SIZE - 2
    state, units = torch.zeros(5, dtype=torch.float64), []
    for seen in observations:
        own, did, got, ended = seen.split((SIZE, width, 1, 1))
        if width == 2:
            did = did / torch.tensor([0.5, 1.0])
        parts = {"seen": torch.cat((own, ended)), "did": did, "got": got}
        x = torch.cat([(params[f"{k}.weight"] @ v + params[f"{k}.bias"]).relu() for k, v in parts.items()])
        reset, keep, new = (params["core.weight_ih_l0"] @ x + params["core.bias_ih_l0"]).split(5)
        of_reset, of_keep, of_new = (params["core.weight_hh_l0"] @ state + params["core.bias_hh_l0"]).split(5)
        keep = torch.sigmoid(keep + of_keep)
        new = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
        state = (1.0 - keep) * new + keep * state
        units.append(state)
    return units


def own_part(seen: Tensor) -> Tensor:
    return torch.cat((seen[:SIZE], seen[-1:]))


def critics_of(network: nn.Module, units: Tensor, seen: Tensor, action: Tensor | None) -> Tensor:
    """Return the outputs (2, O) for an action, or (2, K, O)."""
    present = own_part(seen) if action is None else torch.cat((own_part(seen), action))
    params = dict(network.named_parameters())
    hidden = torch.cat((units, (params["present.weight"] @ present + params["present.bias"]).relu()))
    values = []
    for head in range(2):
        out = hidden
        for index in range(3):
            weight, bias = params[f"heads.weight{index}"], params[f"heads.bias{index}"]
            if index == 0:
                weight, bias = weight.unflatten(1, (2, -1)).transpose(0, 1), bias.reshape(2, 1, -1)
            out = out @ weight[head] + bias[head, 0]
            out = out.relu() if index < 2 else out
        values.append(out)
    return torch.stack(values).reshape(2, *((3,) if action is None else ()), -1)


def plain_losses(learner: RSAC, trials: Steps, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of critics, actor and temperature, trial by trial and step by step."""
    policy, squashes = learner.policy, learner.policy.noise_kind == "normal"
    alpha = learner.networks.log_temperature.detach().exp()
    value_of = decoded if learner.settings.value == "two-hot" else lambda outputs: outputs.squeeze(-1)
    of_critics, of_actor, entropies = [], [], []
    for number in range(trials.mask.shape[1]):
        length = int(trials.mask[:, number].sum())
        shown = torch.cat((trials.observations[:length, number], trials.next_observations[length - 1 : length, number]))
        memories = [remember(network.encoder, shown) for network in (policy, learner.critics, learner.targets)]

        def decide(step: int, shown: Tensor = shown, memory: list[Tensor] = memories[0], number: int = number) -> Any:
            """Return an action and its log-density, or None and those of all actions."""
            present = through(policy, ["present"], own_part(shown[step])).relu()
            units = through(policy, ["layer0", "layer1", "head"], torch.cat((memory[step], present)))
            if not squashes:
                return None, units.log_softmax(0)
            mean, log_std = units[:2], units[2:].clamp(-20.0, 2.0)
            before = mean + log_std.exp() * noise[step, number]
            density = Normal(mean, log_std.exp()).log_prob(before) + 2.0 * torch.log(torch.cosh(before))
            return torch.tanh(before), density.sum()

        for step in range(length):
            with torch.no_grad():
                action, log_prob = decide(step + 1)
                values = value_of(critics_of(learner.targets, memories[2][step + 1], shown[step + 1], action))
                following = values.min(0).values - alpha * log_prob
                following = following if squashes else (log_prob.exp() * following).sum()
                is_terminal = step == length - 1 and bool(trials.terminations[step, number])
                goal = learner.settings.goal_reward
                is_terminal = is_terminal or (goal is not None and bool(trials.rewards[step, number] >= goal))
                target = trials.rewards[step, number] + (0.0 if is_terminal else GAMMA * following)
            done = trials.actions[step, number]
            unit = (done - torch.tensor([0.0, 1.0])) / torch.tensor([0.5, 1.0]) if squashes else None
            taken = critics_of(learner.critics, memories[1][step], shown[step], unit)
            taken = taken if squashes else taken[:, done]
            if learner.settings.value == "two-hot":
                of_critics.append(sum(cross_entropy(each, float(target)) for each in taken))
            else:
                of_critics.append((taken - target).square().sum())
            action, log_prob = decide(step)
            values = value_of(critics_of(learner.critics, memories[1][step], shown[step], action))
            values = (values if squashes else values.detach()).min(0).values
            loss = alpha * log_prob - values
            of_actor.append(loss if squashes else (log_prob.exp() * loss).sum())
            entropies.append(-(log_prob if squashes else (log_prob.exp() * log_prob).sum()).detach())
    target_entropy = -2.0 if squashes else 0.98 * math.log(3.0)
    of_temperature = learner.networks.log_temperature.exp() * (torch.stack(entropies).mean() - target_entropy)
    return torch.stack(of_critics).mean(), torch.stack(of_actor).mean(), of_temperature


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("box", {"goal_reward": 0.3}),
        ("discrete", {}),
        ("box", {"value": "two-hot"}),
        ("discrete", {"value": "two-hot"}),
    ],
)
def test_losses_and_gradients_agree_with_plain_loops(kind: str, settings: dict[str, Any]) -> None:
    learner = make(kind, **settings)
    trials = make_trials(learner, [4, 2, 7, 5], [True, False, False, True])
    noise = torch.randn((8, 4, 2), generator=make(kind).torch_generator("actions"))
    critics, actor, temperature = plain_losses(learner, trials, noise)
    found = learner.losses(trials)
    for mine, wanted in zip(found, (critics, actor, temperature), strict=False):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
    sum(found[:3]).backward()
    # Each network learns only from its own loss.
    for network, loss in ((learner.critics, critics), (learner.policy, actor)):
        params = list(network.parameters())
        wanted = torch.autograd.grad(loss, params, retain_graph=True)
        torch.testing.assert_close([param.grad for param in params], list(wanted), rtol=1e-11, atol=1e-12)
    (wanted,) = torch.autograd.grad(temperature, learner.networks.log_temperature)
    torch.testing.assert_close(learner.networks.log_temperature.grad, wanted, check_dtype=False)
    assert all(param.grad is None for param in learner.targets.parameters())


def test_targets_follow_the_critics() -> None:
    learner = make("box", tau=0.25)
    trials = make_trials(learner, [4, 2], [True, False])
    before = [param.clone() for param in learner.targets.parameters()]
    learner.stepper(*learner.inputs_of(trials))
    for old, target, critic in zip(before, learner.targets.parameters(), learner.critics.parameters(), strict=True):
        torch.testing.assert_close(target, 0.75 * old + 0.25 * critic.detach())


def test_update_uses_sequences_from_anywhere_in_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make("box", sequence_length=3, batch_size=40, num_updates=1, warmup_trials=1)
    drawn: list[Steps] = []
    monkeypatch.setattr(learner, "inputs_of", lambda trials: drawn.append(trials) or ())
    monkeypatch.setattr(Stepper, "__call__", lambda self: torch.zeros(7))
    tasks, length = 2, 6
    # The observations are the numbers of the steps.
    numbers = torch.arange(float(length)).reshape(1, length, 1, 1).expand(tasks, length, 1, SIZE + 4)
    grid, ends = (tasks, length, 1), torch.ones((tasks, 1), dtype=torch.bool)
    episodes = TaskEpisodes(
        numbers, torch.zeros((*grid, 2)), torch.zeros(grid), length * ends.long(), ~ends, ends, numbers[:, 0] + length
    )
    learner.update(learner.store_of([episodes]))
    (sequences,) = drawn
    assert sequences.mask.shape == (3, 40)
    firsts = sequences.observations[0, :, 0]
    assert set(firsts.tolist()) == {0.0, 1.0, 2.0, 3.0}
    assert torch.equal(sequences.observations[:, :, 0], firsts + torch.arange(3.0).unsqueeze(1))


def test_tests_act_without_the_noise_of_training() -> None:
    experiment = make_experiment(small("rsac"))
    learner = experiment.metalearner
    with make_sampler(experiment, num_workers=0) as sampler:
        same = sampler.sample_tasks(1) * 2
        # Points start at the origin, so that only noise can make the two trials of one task differ.
        first, second = learner.test(sampler, same, 0).phases[0].observations
        assert torch.equal(first, second)
        adapted = learner.adapt(sampler, same)
        assert torch.equal(*adapted.phases[0].observations)
        assert torch.equal(*adapted.memory[0])
        assert not torch.equal(*learner.collect(sampler, same).phases[0].observations)


def test_policy_without_its_critics_loads_and_one_with_a_part_of_them_does_not() -> None:
    learner, other = make("box"), make("box")
    state = learner.state_dict()
    before = other.critics.state_dict()
    acting = {name: value for name, value in state.items() if name.partition(".")[0] not in learner.training_state}
    assert set(acting) == {"log_temperature"}
    other.load_state_dict(acting)
    assert all(map(torch.equal, before.values(), other.critics.state_dict().values()))
    del state["critic.present.weight"]
    with pytest.raises(ValueError, match=r"does not fit: .*critic\.present\.weight"):
        other.load_state_dict(state)
