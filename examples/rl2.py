"""RL2 on the same sampler: a recurrent policy that adapts only by its memory.

A trial is one phase of the sampler: all episodes of a task, one after the other in one slot (slots_per_task=1). The
memory lives through the trial, and begins anew with every `reset_task`.

The sampler knows nothing of memories. `RememberingEnv` shows the policy what it remembered at the step before, and the
policy's action holds what it wants to remember next; so every placement of environments, and every recovery from a
fault, works as for any other policy.

    python examples/rl2.py

On the bandit with five arms, after 40 iterations of 100 trials, the mean return of a pull grows within a trial from
0.61 (first four pulls) to 0.74 (last four); it is 0.5 without learning.

Source: Duan et al. 2016, https://arxiv.org/abs/1611.02779; trained here by PPO, https://arxiv.org/abs/1707.06347
"""

import argparse
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from maml_rl import MultiTaskSampler, TaskEpisodes
from maml_rl.functional import categorical_log_prob, generalized_advantages, masked_mean
from maml_rl.policies.policy import Params, Policy


class RememberingEnv(gymnasium.Wrapper):
    """An environment with discrete actions that keeps a memory for its policy.

    Observations are (observation, last action as one-hot, last reward, whether an episode begins, memory); actions are
    (action, next memory).
    """

    def __init__(self, env_name: str, memory_size: int, **env_kwargs: Any) -> None:
        super().__init__(gymnasium.make(env_name, disable_env_checker=True, **env_kwargs))
        self.num_actions, self.memory_size = int(self.env.action_space.n), memory_size
        self.input_size = gymnasium.spaces.flatdim(self.env.observation_space) + self.num_actions + 2
        size = self.input_size + memory_size
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1 + memory_size,), np.float32)
        self._forget()

    def _forget(self) -> None:
        self._last_action, self._last_reward = np.zeros(self.num_actions, np.float32), 0.0
        self._memory = np.zeros(self.memory_size, np.float32)

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        """Draw tasks of the family inside."""
        return self.env.get_wrapper_attr("sample_tasks")(num_tasks)

    def reset_task(self, task: dict[str, Any]) -> None:
        """Begin a trial: another task, and nothing remembered."""
        self.env.get_wrapper_attr("reset_task")(task)
        self._forget()

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode; what was remembered stays."""
        observation, info = self.env.reset(**options)
        return self._shown(observation, begins=True), info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Act, and remember."""
        choice = int(action[0])
        observation, reward, terminated, truncated, info = self.env.step(choice)
        self._last_action, self._last_reward = np.eye(self.num_actions, dtype=np.float32)[choice], float(reward)
        self._memory = np.asarray(action[1:], np.float32)
        return self._shown(observation, begins=False), float(reward), terminated, truncated, info

    def _shown(self, observation: Any, *, begins: bool) -> np.ndarray:
        flat = gymnasium.spaces.flatten(self.env.observation_space, observation)
        parts = (flat, self._last_action, [self._last_reward, float(begins)], self._memory)
        return np.concatenate(parts, dtype=np.float32)


class RecurrentPolicy(Policy):
    """A GRU with a head for the actions and one for the value of what is left of the trial."""

    noise_kind = "uniform"
    noise_size = 1
    stateless = True  # What it remembers goes through the environment, so that its copies in children act alike.

    def __init__(self, input_size: int, num_actions: int, memory_size: int, seed: int = 0) -> None:
        super().__init__()
        self.input_size, self.num_actions, self.memory_size = input_size, num_actions, memory_size
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
            return nn.Parameter(nn.init.orthogonal_(torch.empty(rows, columns), gain, generator))

        self.encoder, self.encoder_bias = weight(input_size, memory_size, 2.0), nn.Parameter(torch.zeros(memory_size))
        self.from_input, self.from_memory = weight(memory_size, 3 * memory_size), weight(memory_size, 3 * memory_size)
        # Memories fade slowly from the beginning: the first third are the gates that keep them.
        self.bias = nn.Parameter(torch.cat([torch.ones(memory_size), torch.zeros(2 * memory_size)]))
        self.to_logits, self.to_value = weight(memory_size, num_actions, 0.01), weight(memory_size, 1)

    def remember(self, inputs: Tensor, memory: Tensor, params: Params | None = None) -> Tensor:
        """Return the next memory (..., H) of a gated recurrent unit, of inputs (..., I) and the memory (..., H)."""
        params = dict(self.named_parameters()) if params is None else params
        # Products broadcast: weights (I, 3 H), or (M, I, 3 H) where every task has its own.
        encoded = torch.relu(inputs @ params["encoder"] + params["encoder_bias"].unsqueeze(-2))
        seen = encoded @ params["from_input"] + params["bias"].unsqueeze(-2)
        recalled = memory @ params["from_memory"]
        (seen_gates, seen_new), (old_gates, old_new) = (
            (units[..., : 2 * self.memory_size], units[..., 2 * self.memory_size :]) for units in (seen, recalled)
        )
        update, reset = torch.sigmoid(seen_gates + old_gates).chunk(2, dim=-1)
        return update * memory + (1 - update) * torch.tanh(seen_new + reset * old_new)

    def act(self, observations: Tensor, noise: Tensor, params: Params | None = None) -> Tensor:
        """Return (action, next memory), (..., 1 + H)."""
        inputs, memory = observations.split([self.input_size, self.memory_size], dim=-1)
        memory = self.remember(inputs, memory, params)
        logits = memory @ (self.to_logits if params is None else params["to_logits"])
        chosen = (noise > torch.softmax(logits, -1).cumsum(-1)[..., :-1]).sum(-1, keepdim=True)
        return torch.cat([chosen.to(memory.dtype), memory], dim=-1)

    def distribution_parameters(self, observations: Tensor, params: Params | None = None) -> tuple[Tensor]:
        """Return the logits (..., K), given the memories that the observations show."""
        memory = self.remember(*observations.split([self.input_size, self.memory_size], dim=-1), params)
        return (memory @ (self.to_logits if params is None else params["to_logits"]),)

    def distribution_from(self, parameters: tuple[Tensor, ...]) -> Categorical:
        """Return the distribution over actions."""
        return Categorical(logits=parameters[0])

    def through_trials(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (L, M, K) and values (L, M) of trials of inputs (L, M, I), differentiable through time."""
        memory, memories = inputs.new_zeros(inputs.shape[1], self.memory_size), []
        for step in inputs:
            memory = self.remember(step, memory)
            memories.append(memory)
        stacked = torch.stack(memories)
        return stacked @ self.to_logits, (stacked @ self.to_value).squeeze(-1)

    def log_prob_from(self, distribution: tuple[Tensor, ...], actions: Tensor) -> Tensor:
        """Return the log-probability (...) of the actions' first entries; memories are no choice."""
        return categorical_log_prob(distribution[0], actions[..., 0].long())


def as_trials(episodes: TaskEpisodes, policy: RecurrentPolicy) -> dict[str, Tensor]:
    """Put the episodes (M, T, B, ...) of each task after each other: tensors (L, M, ...), padded at the end."""
    mask = episodes.mask.transpose(1, 2).flatten(1)
    order = torch.argsort(1 - mask, dim=1, stable=True)[:, : int(mask.sum(1).max())]

    def in_order(tensor: Tensor) -> Tensor:
        flat = tensor.transpose(1, 2).flatten(1, 2)
        return torch.stack([rows[places] for rows, places in zip(flat, order, strict=True)], dim=1)

    inputs = in_order(episodes.observations[..., : policy.input_size])
    actions = in_order(episodes.actions)
    return {
        "inputs": inputs,
        "actions": actions,
        "rewards": in_order(episodes.rewards),
        "mask": in_order(episodes.mask),
    }


def update(
    policy: RecurrentPolicy, optimizer: torch.optim.Optimizer, trials: dict[str, Tensor], epochs: int = 6
) -> None:
    """Improve the policy by PPO on whole trials, so that exploring early is worth what it brings later."""
    mask = trials["mask"]
    with torch.no_grad():
        logits, values = policy.through_trials(trials["inputs"])
        old_log_probs = policy.log_prob_from((logits,), trials["actions"])
        next_values = torch.cat([values[1:], torch.zeros_like(values[:1])]) * mask.roll(-1, 0)
        advantages = generalized_advantages(trials["rewards"], values, next_values, mask, discount=0.9, gae_lambda=0.3)
        targets = values + advantages
        deviation = (masked_mean(advantages**2, mask) - masked_mean(advantages, mask) ** 2).sqrt()
        advantages = (advantages - masked_mean(advantages, mask)) / (deviation + 1e-8)
    for _ in range(epochs):
        logits, values = policy.through_trials(trials["inputs"])
        ratio = torch.exp(policy.log_prob_from((logits,), trials["actions"]) - old_log_probs)
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        # Values are sums of many rewards: with more weight, their error would drown what the actions have to learn.
        loss = masked_mean(0.05 * (values - targets) ** 2 - gain, mask)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()


def main(arguments: list[str] | None = None) -> None:
    """Train on a bandit, and print how the reward grows within a trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Bandit-K5-v0", help="id of a family with discrete actions")
    parser.add_argument("--episodes", type=int, default=20, help="in a trial (default: 20)")
    parser.add_argument("--tasks", type=int, default=100, help="in each iteration (default: 100)")
    parser.add_argument("--iterations", type=int, default=40, help="meta-updates (default: 40)")
    parser.add_argument("--memory-size", type=int, default=48, help="units of the memory (default: 48)")
    parser.add_argument("--num-workers", type=int, default=0, help="child processes (default: 0)")
    options = parser.parse_args(arguments)

    env_kwargs = {"env_name": options.env, "memory_size": options.memory_size}
    env = RememberingEnv(**env_kwargs)
    policy = RecurrentPolicy(env.input_size, env.num_actions, options.memory_size)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    with MultiTaskSampler(
        RememberingEnv,
        env_kwargs,
        batch_size=options.episodes,
        policy=policy,
        slots_per_task=1,
        seed=0,
        num_workers=options.num_workers,
        # A bandit has no limit, because every pull ends an episode.
        max_episode_steps=env.env.spec.max_episode_steps or 1,
    ) as sampler:
        for iteration in range(options.iterations):
            episodes = sampler.rollout(sampler.sample_tasks(options.tasks))
            update(policy, optimizer, as_trials(episodes, policy))
            returns, fifth = episodes.episode_returns(), -(-options.episodes // 5)
            first, last = returns[:, :fifth].mean(), returns[:, -fifth:].mean()
            print(f"iteration {iteration:3}: mean return {first:5.2f} early and {last:5.2f} late in a trial")


if __name__ == "__main__":
    main()
