"""Episodes are recorded as a plain loop would, with the infos that a family declares, in every placement."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from maml_rl import MultiTaskSampler
from maml_rl.envs.families.bandit import BernoulliBanditVectorEnv
from maml_rl.envs.meta_env import EnvDescription, InfoKind, RecordedInfos, StepBuffers
from maml_rl.errors import ChildEnvError, NonFiniteError
from maml_rl.policies import NormalMLPPolicy, get_policy_for_env
from maml_rl.samplers.episode_arrays import EpisodeArrays
from maml_rl.samplers.phase import Phase
from maml_rl.samplers.rollout.recorder import EpisodeRecorder, SlotTable
from maml_rl.seeding import PhaseStreams

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


class Made:
    """Episodes that are known: of each its length, how it ends, after how many steps it begins anew, and its numbers.

    What an episode shows depends on how often it began, so that nothing may be left of the first time.
    """

    def __init__(self, phase: Phase, restarts: bool) -> None:
        random, grid = np.random.default_rng(0), phase.sizes[:2]
        # Some would go on beyond the horizon.
        self.lengths, self.dies = random.integers(1, phase.horizon + 3, grid), random.random(grid) < 0.5
        self.anew = np.where(random.random(grid) < 0.4 * restarts, random.integers(1, phase.horizon + 1, grid), 0)
        self.anew[self.anew >= self.lengths] = 0
        self.horizon = phase.horizon

    def number(self, task: int, episode: int, step: int, times: int) -> float:
        return 1000.0 * task + 100.0 * episode + 10.0 * times + step + 1.0

    def expected(self) -> dict[str, Any]:
        """Return the arrays of a phase, filled by a plain loop."""
        tasks, episodes = self.lengths.shape
        grid, steps = (tasks, episodes), np.zeros((tasks, self.horizon, episodes))
        seen, final, terminated = steps.copy(), np.zeros(grid), np.zeros(grid, np.bool_)
        lengths, last = np.minimum(self.lengths, self.horizon), np.zeros(grid)
        for task, episode in np.ndindex(*grid):
            times = int(self.anew[task, episode] > 0)
            for step in range(lengths[task, episode]):
                seen[task, step, episode] = self.number(task, episode, step, times)
            final[task, episode] = last[task, episode] = self.number(task, episode, lengths[task, episode], times)
            terminated[task, episode] = self.dies[task, episode] and self.lengths[task, episode] <= self.horizon
        after = np.where(seen > 0, seen + 1.0, 0.0)
        ends = {"terminated": terminated, "truncated": ~terminated, "lengths": lengths}
        infos = {"now": after, "last": last}
        return {"observations": seen, "actions": -seen, "rewards": after, "final_observations": final, **ends, **infos}


def play(phase: Phase, parts: list[slice], *, by_slot: bool, restarts: bool) -> tuple[Made, EpisodeArrays]:
    """Record known episodes in the slots of a phase, of which some have ended, and then show NaN."""
    made, table, box = Made(phase, restarts), SlotTable(phase), spaces.Box(-1e9, 1e9, (), np.float64)
    infos: RecordedInfos = {"now": "step", "last": "episode"}
    arrays = EpisodeArrays.zeros(EpisodeArrays.layout(EnvDescription(box, box, None, infos), *phase.sizes))
    recorder, buffers = EpisodeRecorder(arrays, table, in_place=False), StepBuffers.allocate(box, parts[-1].stop, infos)
    steps, times = np.zeros((2, parts[-1].stop), np.int64)

    def begin(slots: Any) -> None:
        steps[slots] = times[slots] = 0
        buffers.begin(slots)
        show(np.arange(parts[-1].stop)[slots])

    def show(slots: Any) -> None:
        for slot in slots:
            key = int(table.tasks[slot]), int(table.episodes(np.array([slot]))[0])
            buffers.observations[slot] = made.number(*key, steps[slot], times[slot])

    def step(slots: Any) -> None:
        rows = buffers.observations[slots].copy()
        recorder.write_choice(slots, rows, -rows)
        for slot in np.arange(parts[-1].stop)[slots]:
            if not table.running[slot]:
                buffers.observations[slot] = buffers.rewards[slot] = np.nan
                continue
            key = int(table.tasks[slot]), int(table.episodes(np.array([slot]))[0])
            steps[slot] += 1
            if not times[slot] and steps[slot] == made.anew[key]:
                steps[slot], times[slot] = 0, 1
                buffers.begin(slot, restarted=True)
            else:
                buffers.restarted[slot] = False
                buffers.rewards[slot] = buffers.infos["now"][slot] = made.number(*key, steps[slot], times[slot])
                buffers.infos["last"][slot] = buffers.rewards[slot]
                over = steps[slot] == made.lengths[key]
                buffers.terminated[slot], buffers.truncated[slot] = over & made.dies[key], over & ~made.dies[key]
            show([slot])
        recorder.write_outcome(slots, buffers)

    for _ in range(1 if by_slot else phase.episodes_per_task // phase.per_task):
        if by_slot:
            table.begin(range(parts[-1].stop))
            table.resetting[:] = False
        else:
            table.begin_all()
        begin(slice(None))
        while table.running.any():
            for part in parts:
                ready = np.flatnonzero(table.running[part]) + part.start
                if by_slot and len(ready):
                    step(ready)
                    for slot in ready[~table.running[ready]]:
                        if table.waves[slot] + 1 < phase.episodes_per_task // phase.per_task:
                            table.begin([slot])
                            begin(slice(slot, slot + 1))
                elif len(ready):
                    step(part)
    recorder.finish()
    assert recorder.observations_at(phase.horizon) is None
    return made, arrays


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("parts", [[slice(0, 6)], [slice(0, 1), slice(1, 6)]], ids=["together", "apart"])
def test_episodes_are_recorded_as_a_plain_loop_would(parts: list[slice], by_slot: bool, restarts: bool) -> None:
    policy = NormalMLPPolicy(1, 1, (4,))
    phase = Phase(({},) * 3, policy, None, PhaseStreams(0, 0, 0), 6, 5, slots_per_task=2)
    made, arrays = play(phase, parts, by_slot=by_slot, restarts=restarts)
    found = {**arrays.by_name(), **arrays.infos}
    for name, expected in made.expected().items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


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
