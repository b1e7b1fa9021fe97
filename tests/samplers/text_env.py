"""An environment with text observations, and a policy that reads them, for the processes of the tests of sampling."""

import random
import string
import time
from typing import Any

import gymnasium
from gymnasium import spaces

from maml_rl.envs import Retry

WORDS = ("apple", "pear", "quince")
# Latencies and faults are drawn from the operating system: no sampled value may depend on them.
_CHANCE = random.SystemRandom()


class GuessingEnv(gymnasium.Env[Any, Any]):
    """A guessing game about fruits; the answer comes after a while, in words that are not all ASCII.

    Args:
        wait: longest seconds of a call.
        retry: probability that a step raises `Retry`.
    """

    observation_space = spaces.Dict(
        {"answer": spaces.Text(40, charset=string.printable + "é"), "guesses": spaces.Discrete(9)}
    )
    action_space = spaces.Text(12, charset=string.ascii_letters)

    def __init__(self, wait: float = 0.0, retry: float = 0.0) -> None:
        self._wait, self._retry = wait, retry
        self._word, self._guesses = WORDS[0], 0

    def sample_tasks(self, num_tasks: int) -> list[dict[str, int]]:
        return [{"word": int(word)} for word in self.np_random.integers(len(WORDS), size=num_tasks)]

    def reset_task(self, task: dict[str, int]) -> None:
        self._word = WORDS[task["word"]]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._guesses, self._limit = 0, int(self.np_random.integers(2, 6))
        return {"answer": "a fruit, s'il te plaît".replace("î", "é"), "guesses": 0}, {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._wait * _CHANCE.random())
        if _CHANCE.random() < self._retry:
            raise Retry
        self._guesses += 1
        right = action == self._word
        seen = {"answer": f"{action} is {'right' if right else 'wrong'}", "guesses": self._guesses}
        return seen, float(right), right, self._guesses == self._limit, {}


class PlainTextEnv(GuessingEnv):
    """The same, with a single text as observation."""

    observation_space = GuessingEnv.observation_space["answer"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        return observation["answer"], info

    def step(self, action: str) -> Any:
        observation, *others = super().step(action)
        return observation["answer"], *others


class Reader:
    """Guesses fruits that it has not tried in the trial, and repeats a right one, like a policy that calls a model.

    Attributes:
        answered: number of its answers.
    """

    def __init__(self) -> None:
        self.answered = 0

    def reset(self, num_tasks: int) -> None:
        self._said: list[list[str]] = [[] for _ in range(num_tasks)]
        self._before: list[int] = [0] * num_tasks

    def act(self, observations: Any, rewards: Any, dones: Any) -> list[str | None]:
        return [self._answer(*each) for each in enumerate(zip(observations["answer"], rewards, dones, strict=True))]

    def _answer(self, task: int, shown: tuple[str | None, float, bool]) -> str | None:
        text, reward, done = shown
        if text is None:
            return None
        said = self._said[task]
        if done:
            self._before[task] = len(said)
        if reward == 0.0 and len(said):
            # A wrong guess does not affect others.
            assert done or text == f"{said[-1]} is wrong"
        self.answered += 1
        said.append(said[-1] if reward else WORDS[len(said) % len(WORDS)])
        return said[-1]

    def begin_anew(self, tasks: Any) -> None:
        for task in tasks:
            del self._said[task][self._before[task] :]


class Forgetful(Reader):
    """The same, but it cannot restore an earlier memory."""

    begin_anew = None  # type: ignore[assignment]


gymnasium.register("Guessing-v0", entry_point="text_env:GuessingEnv")
