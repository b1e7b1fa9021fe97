"""Vector environments of other code as slots, compared with the same environments stepped one by one."""

from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import ClipReward, NormalizeObservation

from maml_rl import MultiTaskSampler, get_policy_for_env
from maml_rl.baseline import ZeroBaseline
from maml_rl.envs import ObservedLastStep, make_vector_env
from maml_rl.envs.threaded import ThreadedVectorEnv
from maml_rl.errors import ChildEnvError, ConfigError
from tests.envs.third_party import DictEnv, PixelEnv, WalkEnv
from tests.looking_env import LookingEnv


class Walking(WalkEnv):
    """Ends early, so that slots of a batch end at different steps."""

    recorded_infos = {"place": "step", "last": "episode"}  # noqa: RUF012

    def step(self, action: Any) -> Any:
        observation, reward, _, truncated, info = super().step(np.clip(action, -0.5, 0.5))
        terminated = bool(abs(self.place) > 0.6)
        return observation, reward, terminated, truncated, info | ({"last": self.place} if terminated else {})


class Glancing(LookingEnv):
    """Is cut short, so that its last observation counts, when the right half is lit."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, self.lit == 1, info


class Batch(SyncVectorEnv):
    """As another package might have it: no class of this one, slots that go on by themselves."""

    # That of SyncVectorEnv is a tuple of the generators of its environments.
    np_random: Any = None
    made: type[gymnasium.Env[Any, Any]] = Walking
    recorded_infos = {"place": "step", "last": "episode"}  # noqa: RUF012

    def __init__(self, num_envs: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> None:
        super().__init__([self.made] * num_envs, autoreset_mode=mode)

    def sample_tasks(self, num_tasks: int) -> list[dict[str, Any]]:
        return [{"slope": float(slope)} for slope in self.np_random.uniform(-1.0, 1.0, num_tasks)]

    def reset_task(self, tasks: list[dict[str, Any]]) -> None:
        for env, task in zip(self.envs, tasks, strict=True):
            env.reset_task(task)


def batch(name: str, **members: Any) -> type[Batch]:
    """Return a `Batch` with these methods and attributes instead of its own."""
    return type(name, (Batch,), members)


def left_or_right(self: Batch, num_tasks: int) -> list[dict[str, Any]]:
    return [{"left": int(left)} for left in self.np_random.integers(1, 3, num_tasks)]


def with_stacked_last_pictures(self: Batch, actions: Any) -> Any:
    *results, infos = SyncVectorEnv.step(self, actions)
    if (last := infos.get("final_obs")) is not None:
        known = next(filter(None, last))
        infos["final_obs"] = {name: np.stack([(each or known)[name] for each in last]) for name in known}
    return *results, infos


gymnasium.register("BatchedWalk-v0", vector_entry_point=Batch)


def digest_of(env: Any, one: Any, **options: Any) -> str:
    policy = get_policy_for_env(one(), (8,), "tanh")
    settings: dict[str, Any] = {"batch_size": 3, "seed": 0, "num_workers": 0, "max_episode_steps": 7} | options
    with MultiTaskSampler(env, {}, policy=policy, baseline=ZeroBaseline(), **settings) as sampler:
        return sampler.rollout(sampler.sample_tasks(4)).digest()


@pytest.mark.parametrize(
    ("batch", "one", "mode"),
    [
        *(
            (Batch, Walking, mode)
            for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)
        ),
        (batch("OfDicts", made=DictEnv, recorded_infos={}), DictEnv, AutoresetMode.NEXT_STEP),
        (batch("OfPixels", made=PixelEnv, recorded_infos={}), PixelEnv, AutoresetMode.SAME_STEP),
        (
            batch(
                "Glances",
                made=Glancing,
                recorded_infos={},
                sample_tasks=left_or_right,
                step=with_stacked_last_pictures,
            ),
            Glancing,
            AutoresetMode.SAME_STEP,
        ),
    ],
)
def test_episodes_are_those_of_single_environments(batch: Any, one: Any, mode: AutoresetMode) -> None:
    assert digest_of(lambda num_envs: batch(num_envs, mode), one) == digest_of(one, one)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.timeout(90)
def test_episodes_are_bit_identical_in_every_placement() -> None:
    expected = digest_of(Walking, Walking)
    assert digest_of(Batch, Walking, num_workers=2) == expected
    assert digest_of("BatchedWalk-v0", Walking, num_workers=2, inference="central") == expected
    assert digest_of("BatchedWalk-v0", Walking, slots_per_task=1) == digest_of(Walking, Walking, slots_per_task=1)


class Clipped(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        observation, reward, *rest = self.env.step(action)
        return observation, float(np.clip(reward, -0.05, 0.05)), *rest


def test_family_below_a_vector_wrapper_has_the_episodes_of_single_environments() -> None:
    wrapped = digest_of(lambda num_envs: ClipReward(Batch(num_envs), -0.05, 0.05), Walking)
    assert wrapped == digest_of(lambda: Clipped(Walking()), Walking)
    assert wrapped != digest_of(Walking, Walking)
    env = make_vector_env(lambda num_envs: ClipReward(gymnasium.make_vec("PointGoal-v0", num_envs), -1.0, 0.0), {}, 2)
    goals = [float(env.sample_tasks(1, seed=seed)[0]["goal"][0]) for seed in (3, 3, 4)]
    assert goals[0] == goals[1] != goals[2]
    assert env.max_episode_steps == make_vector_env("PointGoal-v0").max_episode_steps
    assert env.task_space is not None
    env.close()


def test_vector_wrapper_that_keeps_running_statistics_is_refused() -> None:
    with pytest.raises(ConfigError, match="Batch is wrapped in NormalizeObservation, whose running statistics"):
        make_vector_env(lambda num_envs: NormalizeObservation(Batch(num_envs)), {}, 2)


def paying(name: str, pay: Any) -> type[Batch]:
    def step(self: Batch, actions: Any) -> Any:
        observations, rewards, *rest = Batch.step(self, actions)
        return observations, pay(rewards), *rest

    return batch(name, step=step)


class Forgetful(Batch):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, AutoresetMode.SAME_STEP)

    def step(self, actions: Any) -> Any:
        *rest, infos = super().step(actions)
        return *rest, {name: info for name, info in infos.items() if name != "final_obs"}


class WithoutInfos(Batch):
    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0]


class OfOldGym(Batch):
    def step(self, actions: Any) -> Any:
        observations, rewards, terminated, truncated, infos = super().step(actions)
        return observations, rewards, terminated | truncated, infos


class Taskless(SyncVectorEnv):
    def __init__(self, num_envs: int) -> None:
        super().__init__([Walking] * num_envs)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            batch("Vague", metadata=property(lambda self: {}, lambda self, _: None)),
            "Vague does not say what its slots do at the end of an episode; set metadata",
        ),
        (
            batch("Fixed", np_random=property(lambda self: np.random.default_rng(0))),
            "np_random of Fixed cannot be set, and sample_tasks draws from it",
        ),
        (Taskless, "Taskless is not a task family of vector environments; a VectorEnv needs sample_tasks"),
    ],
)
def test_vector_environment_without_a_mode_or_tasks_is_refused(made: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make_vector_env(made, {}, 2).sample_tasks(1, seed=0)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            paying("Several", lambda rewards: np.stack((rewards, rewards), 1)),
            r"rewards of shape \(2, 2\).*make several objectives one number, with their weights as part",
        ),
        (paying("Columns", lambda rewards: rewards[:, None]), r"of shape \(2, 1\) .*; return rewards.reshape\(-1\)"),
        (Forgetful, "has begun the next episode without the last observation; add the info 'final_obs'"),
        (WithoutInfos, "reset of WithoutInfos returned array.*; it must return the observation and a dict of infos"),
        (OfOldGym, r"step of OfOldGym returned 4 values, .*\(four values are those of old versions of Gym\)"),
    ],
)
def test_wrong_results_are_refused(made: Any, message: str) -> None:
    env = make_vector_env(made, {}, 2)

    def play() -> None:
        env.reset_buffers(np.arange(2))
        for _ in range(4):
            env.step(np.array([[0.5], [0.0]], np.float32))

    with pytest.raises((TypeError, ValueError), match=message):
        play()
    env.close()


class Limited(Walking):
    """Ends at a limit that it keeps itself, without the info of an episode that has terminated."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, self.steps >= 3, info


LimitedBatch = batch("LimitedBatch", made=Limited, max_episode_steps=3)


class OfDicts(LimitedBatch):  # type: ignore[misc, valid-type]
    """Its final_info is an array of dicts, as in Gymnasium before 1.0."""

    def step(self, actions: Any) -> Any:
        *rest, infos = super().step(actions)
        if "final_info" in infos:
            final, has = infos["final_info"], infos["_final_info"]
            infos["final_info"] = np.full(self.num_envs, None, object)
            for slot in np.flatnonzero(has):
                names = [name for name in ("place", "last") if name in final and final[f"_{name}"][slot]]
                infos["final_info"][slot] = {name: final[name][slot] for name in names}
        return *rest, infos


class Tells(Walking):
    """Has the info of the end at every step, and no limit of its own."""

    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return *rest, info | {"last": np.float32(self.place)}


class TellsBatch(Batch):
    made = Tells


def sampled_to_a_limit(env: Any, *, observe_last: bool = False) -> Any:
    settings: dict[str, Any] = {"batch_size": 3, "seed": 0, "num_workers": 0, "max_episode_steps": 3}
    host = make_vector_env(ObservedLastStep(Walking) if observe_last else Walking, {}, 1)
    settings |= {"policy": get_policy_for_env(host, (8,), "tanh"), "observe_last": observe_last}
    with MultiTaskSampler(env, {}, baseline=ZeroBaseline(), **settings) as sampler:
        return sampler.rollout(sampler.sample_tasks(6))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_time_limit_ends_episodes_of_a_batch_that_does_not_know_it(mode: AutoresetMode) -> None:
    for observe_last in (False, True):
        single = sampled_to_a_limit(Tells, observe_last=observe_last)
        batch = sampled_to_a_limit(lambda num_envs: TellsBatch(num_envs, mode), observe_last=observe_last)
        assert batch.digest() == single.digest()
        assert batch.truncated.any()
        assert not batch.infos["last"].isnan().any()
    with closing(make_vector_env(TellsBatch, {}, 2, max_episode_steps=2)) as env:
        env.reset_buffers(np.arange(2))
        assert [env.step(np.zeros((2, 1), np.float32))[3].tolist() for _ in range(2)] == [[False] * 2, [True] * 2]


class OwnThreads(ThreadedVectorEnv):
    """Slots of somebody else that advance by themselves."""


def test_time_limit_counts_the_steps_of_each_slot_that_advances_by_itself() -> None:
    with closing(make_vector_env(lambda num_envs: OwnThreads(Walking, num_envs), {}, 2, max_episode_steps=2)) as env:
        env.reset_task([{"slope": 0.1}] * 2)
        for _ in range(2):
            for slot in range(2):
                env.reset_send(slot, 2**40 + slot)
            assert env.step_recv() == [0, 1]
            # Slot 1 begins a step later.
            for moving, ends in (([0], [False, False]), ([0, 1], [True, False]), ([1], [True, True])):
                for slot in moving:
                    env.step_send(slot, np.zeros((1, 1), np.float32))
                assert env.step_recv() == moving
                assert env.buffers.truncated.tolist() == ends


@pytest.mark.parametrize(
    ("made", "mode"), [*((LimitedBatch, mode) for mode in AutoresetMode), (OfDicts, AutoresetMode.SAME_STEP)]
)
def test_info_of_an_episode_that_a_limit_ended_is_nan_and_else_an_error(made: Any, mode: AutoresetMode) -> None:
    # Of single environments Gymnasium's own wrapper cuts the episodes.
    single, batch = sampled_to_a_limit(Walking), sampled_to_a_limit(lambda num_envs: made(num_envs, mode))
    assert batch.digest() == single.digest()
    last = batch.infos["last"]
    assert torch.equal(last.isnan(), ~batch.terminated)
    assert set(batch.terminated.flatten().tolist()) == {True, False}
    places = batch.infos["place"].gather(1, (batch.lengths - 1).unsqueeze(1)).squeeze(1)
    assert torch.equal(last[batch.terminated], places[batch.terminated])


class EndsWrong(Walking):
    """Ends the episode of one task with an observation that has too many numbers."""

    def step(self, action: Any) -> Any:
        observation, *_, info = super().step(action)
        return np.zeros(5, np.float32) if self.slope == 1.0 else observation, 0.0, True, False, info | {"last": 0.0}


class EndsSilently(Walking):
    """Ends the episode of one task without its info."""

    def step(self, action: Any) -> Any:
        observation, *_, info = super().step(action)
        return observation, 0.0, True, False, info | ({} if self.slope == 1.0 else {"last": 0.0})


class CutSilently(EndsSilently):
    """Truncates it by itself, long before any time limit."""

    def step(self, action: Any) -> Any:
        observation, reward, *_, info = super().step(action)
        return observation, reward, False, True, info


class WithFinal(Batch):
    """Takes the last observations from its environments as they are."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, AutoresetMode.SAME_STEP)

    def step(self, actions: Any) -> Any:
        results = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        final = np.array([*(result[0] for result in results), None], object)[:-1]
        terminated, truncated = np.array([result[2:4] for result in results]).T
        infos: dict[str, Any] = {}
        for slot, result in enumerate(results):
            infos = self._add_info(infos, result[4], slot)
        observations = np.stack([env.reset()[0] for env in self.envs])
        told = infos | {"final_obs": final, "final_info": infos}
        return observations, np.zeros(self.num_envs), terminated, truncated, told


def with_final(made: Any, num_envs: int) -> Batch:
    ending: Batch = type("Ending", (WithFinal,), {"made": made})(num_envs)
    return ending


@pytest.mark.parametrize(
    ("made", "message", "num_workers"),
    [
        (EndsWrong, r"an observation of shape \(5,\).*as a final_obs", 0),
        (EndsSilently, "declares 'last'", 2),
        (CutSilently, "declares 'last'", 0),
    ],
)
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.timeout(60)
def test_error_about_the_end_of_an_episode_names_slot_and_task(made: Any, message: str, num_workers: int) -> None:
    policy = get_policy_for_env(Walking(), (8,), "tanh")
    settings: dict[str, Any] = {"batch_size": 1, "num_workers": num_workers, "max_episode_steps": 7}
    with (
        MultiTaskSampler(partial(with_final, made), {}, policy=policy, seed=0, **settings) as sampler,
        pytest.raises(ChildEnvError, match=rf"in slot 2 with the task {{'slope': 1.0}}.*in step 0.*{message}"),
    ):
        sampler.rollout([{"slope": 0.5}, {"slope": 0.7}, {"slope": 1.0}])
