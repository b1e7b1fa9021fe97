"""Numbers of the infos that a family declares are recorded with the episodes, in every placement."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from maml_rl import MultiTaskSampler
from maml_rl.envs.families.bandit import BernoulliBanditVectorEnv
from maml_rl.envs.meta_env import InfoKind, RecordedInfos
from maml_rl.errors import ChildEnvError, NonFiniteError
from maml_rl.policies import NormalMLPPolicy, get_policy_for_env

HORIZON = 6
PLACEMENTS: dict[str, dict[str, Any]] = {
    "in process": {"num_workers": 0},
    "waves": {"num_workers": 0, "slots_per_task": 1},
    "central": {"num_workers": 2, "inference": "central", "start_method": "fork"},
    "in children": {"num_workers": 2, "inference": "worker", "start_method": "fork"},
}


class LampEnv(gymnasium.Env):
    """Ends when a lamp lights up; its infos have the step, and at the end the brightness that the task wants."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    recorded_infos: RecordedInfos = {"clock": "step", "success": "episode"}  # noqa: RUF012

    def __init__(self, **infos: Any) -> None:
        self._infos = infos
        self.task = {"brightness": 0.0}

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"brightness": float(task % 40)} for task in range(num_tasks)]

    def reset_task(self, task: dict[str, Any]) -> None:
        self.task = task

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.now, self.length = 0, int(self.np_random.integers(2, HORIZON + 1))
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.now += 1
        over = self.now == self.length
        info: dict[str, Any] = {"clock": 10 * self.now, "ignored": "text"}
        if over:
            info["success"] = np.bool_(True) if self.task["brightness"] == 1 else self.task["brightness"]
        info |= self._infos
        return np.full(1, self.now, np.float32), 1.0, over, False, info


def sample(env: Any = LampEnv, num_tasks: int = 3, **options: Any) -> Any:
    policy = NormalMLPPolicy(1, 1, (4,), "tanh")
    with MultiTaskSampler(env, {}, 4, policy, seed=0, max_episode_steps=HORIZON, **options) as sampler:
        return sampler.rollout(sampler.sample_tasks(num_tasks))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_declared_infos_are_recorded_in_every_placement(placement: str) -> None:
    episodes = sample(**PLACEMENTS[placement])
    clock, success = episodes.infos["clock"], episodes.infos["success"]
    assert clock.shape == episodes.rewards.shape
    expected = 10.0 * torch.arange(1, clock.shape[1] + 1)[None, :, None] * episodes.mask
    torch.testing.assert_close(clock, expected, rtol=0.0, atol=0.0)
    assert success.tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    assert clock.dtype == success.dtype == torch.float32
    if placement != "waves":
        assert episodes.digest() == sample(num_workers=0).digest()


def test_episodes_of_families_that_declare_nothing_have_no_infos() -> None:
    class PlainEnv(LampEnv):
        recorded_infos: RecordedInfos = {}  # noqa: RUF012

    episodes = sample(PlainEnv, num_workers=0)
    assert episodes.infos == {}
    assert episodes.digest() != sample(num_workers=0).digest()


@pytest.mark.parametrize("value", ["bright", [1.0, 2.0], None, {}])
def test_info_that_is_not_a_number_is_an_error(value: Any) -> None:
    with pytest.raises(
        ChildEnvError, match="'clock' in recorded_infos, so its info must have that number at every step"
    ):
        sample(lambda: LampEnv(clock=value), num_workers=0)


def test_slots_that_record_different_infos_are_refused() -> None:
    declared: list[dict[str, InfoKind]] = [{"clock": "step"}, {"clock": "episode"}]

    class FickleEnv(LampEnv):
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


class HugeEnv(LampEnv):
    """Returns a reward that is finite only as a float64."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, over, truncated, info = super().step(action)
        return observation, -1e300 if self.now == 2 and self.task["brightness"] == 1 else 1.0, over, truncated, info


@pytest.mark.timeout(60)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_reward_that_overflows_where_it_is_recorded_is_named(placement: str) -> None:
    message = r"the reward of task 1, episode \d, step 1 is not finite as float32: -1e\+300"
    with pytest.raises(NonFiniteError, match=message):
        sample(HugeEnv, **PLACEMENTS[placement])


def test_action_that_overflows_where_it_is_recorded_is_named() -> None:
    policy = NormalMLPPolicy(1, 1, (4,), "tanh").double()
    with torch.no_grad():
        policy.mu.bias.fill_(1e300)
    with (
        MultiTaskSampler(LampEnv, {}, 4, policy, seed=0, max_episode_steps=HORIZON, num_workers=0) as sampler,
        pytest.raises(NonFiniteError, match=r"the action of task 0, episode 0, step 0 is not finite as float32: \[1"),
    ):
        sampler.rollout(sampler.sample_tasks(2))


def test_ends_of_a_batched_family_that_are_not_flags_are_refused() -> None:
    class Unclear(BernoulliBanditVectorEnv):
        def _step_slots(self, *arguments: Any) -> Any:
            rewards, _ = super()._step_slots(*arguments)
            return rewards, np.full(self.num_envs, np.nan)

    env = Unclear(2)
    env.reset(seed=0)
    with pytest.raises(TypeError, match=r"terminated must be True or False, got array\(\[nan, nan\]\)"):
        env.step(np.zeros(2, np.int64))


class CutEnv(LampEnv):
    """Never ends by itself; once it has told a success, and at the horizon it tells none."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, _, _, info = super().step(action)
        info.pop("success", None)
        return observation, reward, False, False, info | ({"success": 1.0} if self.now == 2 else {})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("placement", [*PLACEMENTS, "threads"])
def test_episode_info_that_a_time_limit_cuts_off_is_nan(placement: str) -> None:
    options = PLACEMENTS.get(placement, {"num_workers": 0, "stepping": "threads"})
    episodes = sample(CutEnv, **options)
    assert episodes.lengths.unique().tolist() == [HORIZON]
    assert episodes.infos["success"].isnan().all()
    assert (episodes.infos["clock"][:, -1] == 10.0 * HORIZON).all()


class FickleLampEnv(LampEnv):
    """Among its infos are some that no array holds; `reset` has none at all."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0], None

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *results, info = super().step(action)
        kinds: list[Any] = [None, 1.5, "text", 2**70, {"inner": 1}, np.zeros(self.now)]
        return *results, info | {"fickle": kinds[self.now % len(kinds)]}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("placement", [*PLACEMENTS, "threads"])
def test_infos_that_are_not_declared_are_not_read(placement: str) -> None:
    options = PLACEMENTS.get(placement, {"num_workers": 0, "stepping": "threads"})
    expected = sample(num_workers=0, slots_per_task=options.get("slots_per_task"))
    assert sample(FickleLampEnv, **options).digest() == expected.digest()


@pytest.mark.parametrize("none", [None, 3, "text"])
def test_info_that_is_no_dict_is_an_error_only_where_one_is_declared(none: Any) -> None:
    class NoInfoEnv(LampEnv):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            *results, _ = super().step(action)
            return *results, none

    with pytest.raises(ChildEnvError, match=f"'clock' in recorded_infos, .*; got None, the info is {none!r}"):
        sample(NoInfoEnv, num_workers=0)

    class PlainEnv(NoInfoEnv):
        recorded_infos: RecordedInfos = {}  # noqa: RUF012

    assert sample(PlainEnv, num_workers=0).infos == {}
