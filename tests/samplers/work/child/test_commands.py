"""Messages between parent and child are data: frozen, picklable, and numbered by generation."""

import dataclasses
import pickle
from typing import get_args

import pytest
from gymnasium import spaces

from maml_rl.envs.meta_env import EnvDescription
from maml_rl.samplers.describing import describe_exit, describe_task, describe_tasks, shorten
from maml_rl.samplers.work.child import messages
from maml_rl.samplers.work.child.messages import describe_command

MESSAGES = [*get_args(messages.Command), *get_args(messages.Reply)]


def test_every_message_is_frozen_picklable_and_numbered() -> None:
    for message in MESSAGES:
        fields = dataclasses.fields(message)
        assert fields[0].name == "generation"
        example = message(*range(len(fields)))
        assert pickle.loads(pickle.dumps(example)) == example
        with pytest.raises(dataclasses.FrozenInstanceError):
            example.generation = 3


def test_spaces_reach_the_parent_unchanged() -> None:
    ready = messages.Done(0, EnvDescription(spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(3, start=-1), 100, {}))
    assert pickle.loads(pickle.dumps(ready)) == ready


def test_descriptions_stay_on_one_line_and_within_bounds() -> None:
    task = {"a": 1.5, "b": [1, 2], "c": list(range(1000)), "d": "x\ny" * 1000}
    text = describe_task(task)
    assert text.startswith("{'a': 1.5, 'b': [1, 2], 'c': <1000 numbers of shape (1000,)>, 'd': ")
    assert len(text) < 250
    assert "\n" not in text
    other = {"a": 2}
    assert describe_tasks([task, task, other, other]).endswith("{'a': 2}")
    assert describe_tasks([{"a": number} for number in range(9)]) == "{'a': 0}, {'a': 1}, {'a': 2}, ... (9 in all)"
    assert describe_task(3) == "3"


def test_shortened_text_keeps_both_ends() -> None:
    assert shorten("short", 10) == "short"
    text = shorten("begin" + "x" * 10_000 + "end", 100)
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "9908 characters left out" in text


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "killed by SIGKILL (by a user, or by the kernel when memory ran out)"),
        (-11, "killed by SIGSEGV (Segmentation fault)"),
        (-50, "killed by signal 50"),
        (3, "exited with status 3"),
        (None, "unknown reason"),
    ],
)
def test_cause_of_death_is_reported(code: int | None, text: str) -> None:
    assert text in describe_exit(code)


def test_activity_of_a_child_is_reported() -> None:
    assert describe_command(messages.Step(1), 17) == "in step 17"
    assert describe_command(None, None) == "between commands"
    assert describe_command(messages.Close(0), 3) == "in Close"
