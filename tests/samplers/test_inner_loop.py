"""Advantages of chunks of tasks: computed in parallel, and the same for any number of threads."""

from typing import Any

import pytest
import torch

from maml_rl import LinearFeatureBaseline
from maml_rl.adaptation import AdaptationRule, adapt
from maml_rl.baseline import ZeroBaseline
from maml_rl.derivatives import ChunkWorkers, chunks_of
from maml_rl.episode import TaskEpisodes
from maml_rl.errors import NonFiniteError
from maml_rl.plan import Plan
from maml_rl.policies import NormalMLPPolicy
from maml_rl.samplers.inner_loop import InnerPhases
from tests.synthetic import OBSERVATION_SIZE

# Wide enough that a chunk has 2 to 3 tasks.
POLICY = NormalMLPPolicy(OBSERVATION_SIZE, 2, (512,))
HORIZON, EPISODES = 16, 8


def sampled(num_tasks: int = 11, *, horizon: int = HORIZON) -> TaskEpisodes:
    """Episodes; those of later tasks end earlier."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, horizon - num_tasks + 2, (num_tasks, EPISODES), generator=generator)
    lengths += torch.arange(num_tasks - 1, -1, -1).unsqueeze(1)
    grid = (num_tasks, horizon, EPISODES)
    real = torch.arange(horizon).reshape(1, -1, 1) < lengths.unsqueeze(1)
    truncated = torch.rand(lengths.shape, generator=generator) < 0.5
    return TaskEpisodes(
        torch.randn((*grid, OBSERVATION_SIZE), generator=generator) * real.unsqueeze(-1),
        torch.randn((*grid, 2), generator=generator) * real.unsqueeze(-1),
        torch.randn(grid, generator=generator) * real,
        lengths,
        ~truncated,
        truncated,
        torch.randn((num_tasks, EPISODES, OBSERVATION_SIZE), generator=generator),
    )


def advantages(baseline: Any, episodes: TaskEpisodes, threads: int = 1) -> torch.Tensor:
    plan = Plan(rule=AdaptationRule(0.1), num_steps=0, gamma=0.9, gae_lambda=0.95)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        inner = InnerPhases(plan, POLICY, baseline)
        inner.take(episodes)
        assert inner.is_over
        return inner.phases[0].advantages
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_phases_lead_to_gradient_steps_of_their_own_sizes_as_by_hand(bootstrap: bool) -> None:
    policy, estimation = NormalMLPPolicy(OBSERVATION_SIZE, 2, (4,)), {"gamma": 0.9, "bootstrap": bootstrap}
    by_name = {name: torch.full_like(value, 0.2) for name, value in policy.named_parameters()}
    for step_size, sizes in (((0.5, 0.25), [0.5, 0.25]), (by_name, [None, None])):
        rule, params = AdaptationRule(step_size), None  # type: ignore[arg-type]
        plan = Plan(rule=rule, num_steps=2, for_update=False, **estimation)  # type: ignore[arg-type]
        inner = InnerPhases(plan, policy, LinearFeatureBaseline(OBSERVATION_SIZE))
        for step in range(2):
            inner.take(sampled())
            episodes = sampled()
            episodes.compute_advantages(LinearFeatureBaseline(OBSERVATION_SIZE), **estimation)  # type: ignore[arg-type]
            params = adapt(policy, episodes, params, rule=rule, step=step, create_graph=False)
            assert inner.params is not None
            for name, value in params.items():
                torch.testing.assert_close(inner.params[name], value)
        assert [episodes.fast_lr for episodes in inner.phases] == sizes
        inner.take(sampled())
        # Nothing is learned from the last.
        with pytest.raises(RuntimeError, match="no advantages yet"):
            _ = inner.phases[-1].advantages


def test_chunks_are_cut_by_the_horizon_not_by_the_longest_episode_that_happened() -> None:
    short, long = sampled(horizon=HORIZON), sampled(horizon=40 * HORIZON)
    assert short.rewards.shape[1] <= HORIZON
    device, width = torch.device("cpu"), 512
    early = TaskEpisodes(
        *(torch.nn.functional.pad(each, (0, 0) * (each.dim() - 2) + (0, 39 * HORIZON)) for each in
          (short.observations, short.actions, short.rewards)),
        short.lengths, short.terminated, short.truncated, short.final_observations,
    )  # fmt: skip
    assert early.rewards.shape == short.rewards.shape
    assert chunks_of([early], width, device) == chunks_of([long], width, device)
    assert chunks_of([early], width, device) != chunks_of([short], width, device)


@pytest.mark.parametrize("baseline", [LinearFeatureBaseline(OBSERVATION_SIZE), ZeroBaseline()])
def test_advantages_of_chunks_are_those_of_each_alone_for_any_number_of_threads(baseline: Any) -> None:
    episodes = sampled()
    chunks = chunks_of([episodes], 512, torch.device("cpu"))
    assert len(chunks) > 2
    found = advantages(baseline, episodes)
    for tasks in chunks:
        part = episodes.part(tasks)
        assert part.rewards.shape[1] == int(part.lengths.max())
        alone = part.compute_advantages(baseline.apart(), gamma=0.9, gae_lambda=0.95)
        assert torch.equal(found[tasks, : alone.shape[1]], alone)
        assert not found[tasks, alone.shape[1] :].any()
    for threads in (2, 4):
        assert torch.equal(advantages(baseline, sampled(), threads), found)


def test_baseline_has_the_fits_of_all_tasks_afterwards() -> None:
    episodes, baseline = sampled(), LinearFeatureBaseline(OBSERVATION_SIZE)
    advantages(baseline, episodes, threads=2)
    whole = LinearFeatureBaseline(OBSERVATION_SIZE)
    episodes.gamma = 0.9
    torch.testing.assert_close(baseline(episodes), whole.fit(episodes)(episodes))


def test_baseline_that_is_not_taskwise_is_fitted_to_all_tasks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared:
        """One value for all tasks."""

        fits = 0

        def fit(self, episodes: Any) -> None:
            self.fits += 1
            self.value = episodes.returns.mean()

        def __call__(self, episodes: Any) -> torch.Tensor:
            return torch.full_like(episodes.rewards, self.value) * episodes.mask

        def final_values(self, episodes: Any) -> torch.Tensor:
            return torch.zeros_like(episodes.rewards[:, 0])

    monkeypatch.setattr(ChunkWorkers, "map", lambda *_: pytest.fail("it was fitted to chunks"))
    baseline = Shared()
    episodes = sampled()
    found = advantages(baseline, episodes)
    assert baseline.fits == 1
    assert torch.equal(found, sampled().compute_advantages(baseline, gamma=0.9, gae_lambda=0.95))


def test_a_reward_that_is_not_finite_is_named_by_its_task_of_the_batch() -> None:
    episodes = sampled()
    episodes.rewards[9, 1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match="task 9, episode 2, step 1"):
        advantages(ZeroBaseline(), episodes)
    with pytest.raises(NonFiniteError, match="task 9, episode 2, step 1"):
        episodes.part(slice(7, 11)).compute_advantages(None, gamma=0.9)
