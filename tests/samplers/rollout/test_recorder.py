"""Episodes are recorded as a plain loop would, with the infos that a family declares, in every placement."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from placements import PLACEMENTS
from slow_env import HORIZON, SlowEnv

from maml_rl import MultiTaskSampler
from maml_rl.envs.families.bandit import BernoulliBanditVectorEnv
from maml_rl.envs.meta_env import InfoKind, RecordedInfos
from maml_rl.errors import ChildEnvError, NonFiniteError
from maml_rl.policies import NormalMLPPolicy, get_policy_for_env
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.recorder import SlotTable, check_finite
from maml_rl.seeding import PhaseStreams

EVERYWHERE: dict[str, dict[str, Any]] = {
    "waves": {"num_workers": 0, "slots_per_task": 1},
    "threads": {"num_workers": 0, "stepping": "threads"},
    "central": PLACEMENTS["central"],
    "in children": PLACEMENTS["in children"],
}


def sample(env: Any = SlowEnv, num_tasks: int = 3, **options: Any) -> Any:
    policy = NormalMLPPolicy(2, 1, (4,), "tanh", seed=0)
    with MultiTaskSampler(env, {}, 4, policy, seed=0, max_episode_steps=HORIZON, **options) as sampler:
        return sampler.rollout(sampler.sample_tasks(num_tasks))


def test_episodes_of_families_that_declare_nothing_have_no_infos() -> None:
    class PlainEnv(SlowEnv):
        recorded_infos: RecordedInfos = {}  # noqa: RUF012

        def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
            return *super().step(action)[:4], None

    episodes = sample(PlainEnv, num_workers=0)
    assert episodes.infos == {}
    assert episodes.digest() != sample(num_workers=0).digest()


def test_slots_that_record_different_infos_are_refused() -> None:
    declared: list[dict[str, InfoKind]] = [{"clock": "step"}, {"clock": "episode"}]

    class FickleEnv(SlowEnv):
        def __init__(self) -> None:
            super().__init__()
            self.recorded_infos = declared.pop()

    with pytest.raises(ChildEnvError, match="all slots must have the same recorded infos"):
        sample(FickleEnv, num_workers=0, num_tasks=1)


class CountedBanditVectorEnv(BernoulliBanditVectorEnv):
    """A batched family that records the reward of its arm, at every step and at the end."""

    recorded_infos: RecordedInfos = {"reward_arm": "step"}  # noqa: RUF012


def test_batched_family_records_its_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Counted-v0", None, vector_entry_point=CountedBanditVectorEnv)
    monkeypatch.setitem(gymnasium.registry, "Counted-v0", spec)
    env = CountedBanditVectorEnv(1)
    policy = get_policy_for_env(env, (4,), "tanh", seed=0)
    for workers in (0, 2):
        with MultiTaskSampler("Counted-v0", {}, 5, policy, seed=0, num_workers=workers, start_method="fork") as sampler:
            episodes = sampler.rollout(sampler.sample_tasks(3))
        torch.testing.assert_close(episodes.infos["reward_arm"], episodes.rewards)
        assert 0.0 < episodes.rewards.mean() < 1.0


class HugeEnv(SlowEnv):
    """Returns a reward that is finite only as a float64."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, over, truncated, info = super().step(action)
        return observation, -1e300 if self._steps == 2 and self._task["goal"] == 1 else 1.0, over, truncated, info


@pytest.mark.timeout(60)
@pytest.mark.parametrize("placement", ["threads", "in children"])
def test_reward_that_overflows_where_it_is_recorded_is_named(placement: str) -> None:
    message = r"the reward of task 1, episode \d, step 1 is not finite as float32: -1e\+300"
    with pytest.raises(NonFiniteError, match=message):
        sample(HugeEnv, **EVERYWHERE[placement])


def test_action_that_overflows_where_it_is_recorded_is_named() -> None:
    policy = NormalMLPPolicy(2, 1, (4,), "tanh").double()
    with torch.no_grad():
        policy.mu.bias.fill_(1e300)
    with (
        MultiTaskSampler(SlowEnv, {}, 4, policy, seed=0, max_episode_steps=HORIZON, num_workers=0) as sampler,
        pytest.raises(NonFiniteError, match=r"the action of task 0, episode 0, step 0 is not finite as float32: \[1"),
    ):
        sampler.rollout(sampler.sample_tasks(2))


class CutEnv(SlowEnv):
    """Never ends by itself; once it has told a length, and at the horizon it tells none."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, _, _, info = super().step(action)
        del info["length"]
        return observation, reward, False, False, info | ({"length": 1.0} if self._steps == 2 else {})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("placement", EVERYWHERE)
def test_episode_info_that_a_time_limit_cuts_off_is_nan(placement: str) -> None:
    episodes = sample(CutEnv, **EVERYWHERE[placement])
    assert episodes.lengths.unique().tolist() == [HORIZON]
    assert episodes.infos["length"].isnan().all()
    assert (episodes.infos["clock"][:, -1] == HORIZON).all()


class FickleInfosEnv(SlowEnv):
    """Among its infos are some that no array holds; `reset` has none at all."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0], None

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *results, info = super().step(action)
        kinds: list[Any] = [None, 1.5, "text", 2**70, {"inner": 1}, np.zeros(self._steps)]
        return *results, info | {"fickle": kinds[self._steps % len(kinds)]}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("placement", EVERYWHERE)
def test_infos_that_are_not_declared_are_not_read(placement: str) -> None:
    options = EVERYWHERE[placement]
    expected = sample(num_workers=0, slots_per_task=options.get("slots_per_task"))
    assert sample(FickleInfosEnv, **options).digest() == expected.digest()


def test_numbers_of_slots_whose_episode_is_over_need_not_be_finite() -> None:
    phase = Phase(({},) * 2, NormalMLPPolicy(1, 1, (4,)), None, PhaseStreams(0, 0, 0), 1, 5)
    table, rewards = SlotTable(phase), np.array([1.0, np.nan])
    table.begin_all()
    table.running[1] = False
    check_finite(table, "reward", rewards, slice(0, 2))
    table.running[1] = True
    with pytest.raises(NonFiniteError, match="the reward of task 1, episode 0, step 0 is not finite: nan"):
        check_finite(table, "reward", rewards, slice(0, 2))
