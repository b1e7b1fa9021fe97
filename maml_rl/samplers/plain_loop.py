"""Sampled episodes compared with a plain loop over one environment, value by value, in every placement."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maml_rl.envs.calls import CallRules
from maml_rl.envs.checking import as_sampled, find_method
from maml_rl.envs.family import BatchOfOne
from maml_rl.envs.global_generators import KeptGenerators, construct, key_of_task
from maml_rl.envs.make_env import EnvMaker, Recipe
from maml_rl.envs.meta_env import declarations
from maml_rl.envs.tasks import task_key
from maml_rl.episode.task_episodes import BatchEpisodes, TaskEpisodes
from maml_rl.errors import MamlRLError, UsersCode, explain
from maml_rl.policies import Memory, Policy
from maml_rl.policies.heads import Params
from maml_rl.samplers.multi_task_sampler import MultiTaskSampler
from maml_rl.samplers.work.child import vector_env
from maml_rl.samplers.work.child.process_setup import enter_process, signals_blocked
from maml_rl.seeding import PhaseStreams
from maml_rl.spaces import PackedSpace, own_actions, stored_actions, to_stored

_NUM_TASKS, _EPISODES = 3, 2
# Their episodes must be the same, to the last bit.
_PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "in this process": {"num_workers": 0},
    "with one slot for each task": {"num_workers": 0, "slots_per_task": 1},
    "in threads": {"num_workers": 0, "stepping": "threads"},
    "with one worker": {"num_workers": 1},
    "with two workers": {"num_workers": 2},
    "with central inference": {"num_workers": 2, "inference": "central", "num_groups": 2},
}


class SampledActions(Policy):
    """Acts by `sample` of the action space, so that every element of the space may come."""

    noise_kind = "uniform"
    noise_size = 1
    stateless = True
    reads_text = True

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__()
        self._space, self._stored = copy.deepcopy(space), stored_actions(space)

    def act(
        self, observations: Tensor, noise: Tensor, memory: Memory = (), params: Params | None = None
    ) -> tuple[Tensor, Memory]:
        """Return an element of the space for each number of the noise."""
        rows = np.stack([self._row(float(number)) for number in noise.flatten()])
        return torch.from_numpy(rows).unflatten(0, noise.shape[:-1]), ()

    def _row(self, number: float) -> NDArray[Any]:
        # The noise comes in multiples of 2**-24.
        self._space.seed(int(number * 2**24))
        element = self._space.sample()
        if not isinstance(self._stored, PackedSpace):
            return to_stored(self._stored, np.asarray(element))
        row = np.zeros(self._stored.shape, np.uint8)
        self._stored.write(element, row)
        return row


def compare_with_loop(
    env: EnvMaker,
    make_one: Callable[[], gymnasium.Env[Any, Any]],
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    max_episode_steps: int | None = None,
    seed: int = 0,
) -> str:
    """Compare sampled episodes with those of a plain loop over one environment, in every placement.

    Loop and sampler have a process each, so `env` and `make_one` must be what a module defines. The loop repeats the
    recorded actions, with the seeds and tasks of the sampler. Observations, rewards, ends of episodes and recorded
    infos must be equal, to the last bit.

    Args:
        env: a registered id, "module:id", or a callable that makes a `gymnasium.Env`.
        make_one: makes the environment of the loop.
        env_kwargs: keyword arguments of `env`.
        max_episode_steps: time limit; None for the environment's own.
        seed: of the sampler.

    Returns:
        What was compared, in words.
    """
    names, steps = [], 0
    first: tuple[list[str], str] | None = None
    drawn: list[str] = []
    # Environments may end at `close` what all those of their process need, as the display of pygame.
    with _OwnProcess() as in_loop, _OwnProcess() as in_sampler:
        space, render_mode = in_loop(_described, make_one)
        for name in _placements(env, render_mode):
            if "stepping" in _PLACEMENTS[name] and drawn:  # Threads share them.
                continue
            keys, episodes = in_sampler(_sampled, name, env, dict(env_kwargs or {}), space, max_episode_steps, seed)
            found = keys, episodes.digest()
            if found == first:
                names.append(name)
                continue
            drawn = in_loop(_expect_values_of_loop, make_one, episodes, seed, name)
            if first is not None:
                raise AssertionError(
                    f"the tasks or actions that are drawn {name} are not those that are drawn {names[0]}, so that they "
                    "depend on more than the seed; the order of a set of texts, and hash of a text, change with "
                    "PYTHONHASHSEED: sort, or set it"
                )
            first, steps = found, int(episodes.lengths.sum())
            names.append(name)
    return (
        f"{_NUM_TASKS * _EPISODES} episodes of {_NUM_TASKS} tasks, {steps} steps in all, have the values of a plain "
        f"loop, sampled {', '.join(names)}"
    )


class _OwnProcess:
    """Calls functions in a process of its own, which starts as workers do, and ends with this one."""

    def __enter__(self) -> _OwnProcess:
        """Start the process."""
        context: Any = multiprocessing.get_context(vector_env.START_METHODS[0])
        self._calls, calls = context.Pipe()
        self._process = context.Process(target=_carry_out, args=(calls,))
        with signals_blocked(signal.SIGINT):
            self._process.start()
        calls.close()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """End the process; after an error or Ctrl-C at once, for its environment may hang."""
        if kind is not None:
            self._process.kill()
        with self._calls, suppress(OSError):
            self._calls.send(None)
        self._process.join()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function that a module defines."""
        try:
            self._calls.send((function, arguments))
            outcome = self._calls.recv()
        except (EOFError, OSError) as error:
            raise MamlRLError("the process in which the environment was tried has died") from error
        if isinstance(outcome, Exception):
            raise outcome
        # Not as tensors cross otherwise, whose memory ends with their process.
        return pickle.loads(outcome)


def _carry_out(calls: Connection) -> None:
    """Call the functions that the parent sends, until it sends None."""
    enter_process()
    # Interrupted while it started this process, the parent is gone before it could send None.
    with suppress(EOFError):
        while (call := calls.recv()) is not None:
            function, arguments = call
            try:
                with UsersCode(lambda error: MamlRLError(explain(error)), (AssertionError, MamlRLError)):
                    outcome = pickle.dumps(function(*arguments), pickle.HIGHEST_PROTOCOL)
            except (AssertionError, MamlRLError) as error:
                # Not kept: with its traceback the environment of the call would live until the next one.
                calls.send(error)
            else:
                calls.send(outcome)


def _described(make_one: Callable[[], gymnasium.Env[Any, Any]]) -> tuple[gymnasium.Space[Any], Any]:
    """Return the action space of an environment, and its render mode."""
    with closing(construct(make_one)[0]) as env:
        return env.action_space, env.render_mode


def _sampled(
    placement: str,
    env: EnvMaker,
    env_kwargs: Mapping[str, Any],
    action_space: gymnasium.Space[Any],
    max_episode_steps: int | None,
    seed: int,
) -> tuple[list[str], TaskEpisodes]:
    """Return the tasks, and sampled episodes, of a placement."""
    with MultiTaskSampler(
        env,
        env_kwargs,
        batch_size=_EPISODES,
        policy=SampledActions(action_space),
        seed=seed,
        max_episode_steps=max_episode_steps,
        **_PLACEMENTS[placement],
    ) as sampler:
        tasks = sampler.sample_tasks(_NUM_TASKS)
        return [task_key(task) for task in tasks], sampler.rollout(tasks)


def _placements(env: EnvMaker, render_mode: Any) -> Iterator[str]:
    """Yield the names of the placements that an environment allows."""
    for name, options in _PLACEMENTS.items():
        if "stepping" in options:
            try:
                Recipe.of(env).check_stepping(CallRules(stepping=options["stepping"]))
            except (TypeError, ValueError):
                continue
            if render_mode is not None:  # A renderer belongs to one thread.
                continue
        yield name


def _expect_values_of_loop(
    make_one: Callable[[], gymnasium.Env[Any, Any]], episodes: TaskEpisodes, seed: int, placement: str
) -> list[str]:
    """Expect that sampled episodes have the values of a loop, and return from which global generators it draws.

    One environment takes all tasks and episodes one after the other.
    """
    seeds = PhaseStreams(seed, 0, 0).episode_seeds(_NUM_TASKS, range(_EPISODES))
    slots_per_task = _PLACEMENTS[placement].get("slots_per_task", _EPISODES)
    kinds = {name: "step" if info.dim() == 3 else "episode" for name, info in episodes.infos.items()}
    with closing(construct(make_one)[0]) as env, KeptGenerators() as generators:
        if not isinstance(env.unwrapped, BatchOfOne):
            seeds &= declarations(env).seed_mask
        for task, own in enumerate(episodes):
            generators.begin(key_of_task(episodes.tasks[task]))
            find_method(env, "reset_task")(copy.deepcopy(episodes.tasks[task]))
            for episode, episode_seed in enumerate(seeds[task].tolist()):
                actions = own.actions[: int(own.lengths[episode]), episode].numpy()
                generators.seed(episode_seed)
                looped = _loop(env, episode_seed, actions, episodes.horizon, kinds)
                for (what, step, recorded), value in zip(_record(own, episode, kinds), looped, strict=True):
                    if difference := _difference(np.asarray(recorded), value):
                        slot = task * slots_per_task + episode % slots_per_task
                        raise AssertionError(
                            f"sampled {placement}, the {what} of slot {slot} (task {task}, episode {episode}, step "
                            f"{step}) is {difference} in a plain loop; an episode may depend only on its task, seed "
                            "and actions: look for state that outlives a reset, or that environments share, or for "
                            "the order of a set of texts, which changes with PYTHONHASHSEED"
                        )
        return generators.drawn()


def _record(episodes: BatchEpisodes, episode: int, kinds: Mapping[str, str]) -> Iterator[tuple[str, int, Any]]:
    """Yield the recorded values of an episode, each with its name and step, in the order of `_loop`."""
    length = int(episodes.lengths[episode])
    for step in range(length):
        yield "observation", step, episodes.observations[step, episode]
        yield "reward", step, episodes.rewards[step, episode]
        is_last = step == length - 1
        yield "flag terminated", step, is_last and bool(episodes.terminated[episode])
        yield "end of the episode", step, is_last
        for name, info in episodes.infos.items():
            if kinds[name] == "step":
                yield f"info {name!r}", step, info[step, episode]
    yield "last observation", length, episodes.final_observations[episode]
    for name, info in episodes.infos.items():
        if kinds[name] == "episode":
            yield f"info {name!r}", length - 1, info[episode]


def _loop(
    env: gymnasium.Env[Any, Any], seed: int, actions: NDArray[Any], horizon: int, kinds: Mapping[str, str]
) -> Iterator[Any]:
    """Yield the values of an episode of `env` with the given actions: the loop that anybody would write."""
    action_space = stored_actions(env.action_space)
    observation, _ = env.reset(seed=seed)
    for step, action in enumerate(actions):
        yield as_sampled(env, observation)
        observation, reward, terminated, truncated, info = env.step(own_actions(action_space, action))
        yield reward
        yield bool(terminated)
        yield bool(terminated or truncated or step == horizon - 1)
        yield from (info[name] for name, kind in kinds.items() if kind == "step")
    yield as_sampled(env, observation)
    yield from (info.get(name, np.nan) for name, kind in kinds.items() if kind == "episode")


def _difference(recorded: NDArray[Any], value: Any) -> str:
    """Return a recorded value and that of a loop, in words; "" if they are equal once both are recorded."""
    looped = np.asarray(value).astype(recorded.dtype).reshape(recorded.shape)
    if np.array_equal(recorded, looped, equal_nan=recorded.dtype.kind == "f"):
        return ""
    index = tuple(np.argwhere(recorded != looped)[0].tolist())
    return f"{recorded[index]}{f' at {list(index)}' if index else ''}, but {looped[index]}"
