"""Errors of user code are reported on one line."""

import json
import re
import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import maml_rl.errors
from maml_rl.errors import ConfigError, TaskError, UsersCode, explain


def caught(call: Any, *arguments: Any) -> BaseException:
    """Return the error of a call, without the frames of this module."""
    with pytest.raises(Exception) as error:  # noqa: PT011 - whatever it is
        call(*arguments)
    trace = error.value.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.value.with_traceback(trace)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def fail():\n    assert 1 > 2\n", "AssertionError in {}, line 2: assert 1 > 2"),
        (
            "import json\n\ndef fail():\n    json.loads('{')\n",
            r"JSONDecodeError in {}, line 4 \(raised in json/decoder.py, line \d+\): Expecting property name .*",
        ),
        # Python replaces it.
        (
            "def generate():\n    next(iter(()))\n    yield\n\ndef fail():\n    list(generate())\n",
            r"StopIteration in {}, line 2: next\(iter\(\(\)\)\)",
        ),
        (
            "class Mute(Exception):\n    def __str__(self):\n        return self.lost\n\ndef fail():\n    raise Mute\n",
            r"Mute in {}, line 6: no message, because __str__ raises AttributeError",
        ),
    ],
    ids=["bare assert", "of a library", "replaced by Python", "without a message"],
)
def test_error_is_reported_with_the_line_of_the_users_code(code: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(code)
    error = caught(runpy.run_path(str(path))["fail"])
    assert re.fullmatch(told.format(re.escape(str(path))), explain(error))


def test_error_of_a_library_is_reported_by_its_message_or_by_its_line() -> None:
    error = caught(json.loads, 3)
    assert explain(error).startswith("TypeError: the JSON object must be str")
    # Of bytes that are no text at all.
    assert explain(SyntaxError("null bytes")) == "SyntaxError: null bytes"
    error.args = ()
    assert "json" in explain(error)
    assert ", line " in explain(error)
    assert "raise TypeError" in explain(error)


class OfOldGym(gymnasium.Env[Any, Any]):
    def reset(self, **options: Any) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, 0.0, False, {}


def test_step_of_old_gym_below_a_wrapper_is_told_what_it_must_return() -> None:
    env = gymnasium.wrappers.TimeLimit(OfOldGym(), 3)
    env.reset()
    with pytest.raises(ValueError, match=r"expected 5, got 4") as error:
        env.step(0)
    assert "must return the observation, the reward, terminated, truncated, and a dict" in explain(error.value)


@pytest.mark.parametrize(
    "raised", [SystemExit(0), OSError("full"), StopIteration(), GeneratorExit(), TaskError("wrong")]
)
def test_every_error_of_user_code_becomes_one_error(raised: BaseException) -> None:
    guard = UsersCode(lambda error: ValueError(type(error).__name__), ConfigError)
    for _ in range(2):
        with pytest.raises(ValueError, match=type(raised).__name__) as told, guard:
            raise raised
        assert told.value.__cause__ is raised


def test_ctrl_c_and_complete_errors_are_not_wrapped() -> None:
    guard = UsersCode(lambda error: ValueError("never"), (ConfigError, TaskError))
    for raised in (KeyboardInterrupt(), ConfigError("line 3"), TaskError("wrong")):
        with pytest.raises(type(raised)) as told, guard:
            raise raised
        assert told.value is raised
    with guard:
        pass


def test_installed_package_of_other_people_is_the_users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    for package, code in (
        ("grid", "import solver\n\ndef step():\n    solver.solve()\n"),
        ("solver", "def solve():\n    1 / 0\n"),
    ):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("maml_rl.errors._INSTALLED", (str(folder),))
    monkeypatch.setattr("maml_rl.errors._LIBRARIES", (*maml_rl.errors._LIBRARIES, str(folder)))
    told = explain(caught(import_module("grid").step))
    places = "grid/__init__.py, line 4 (raised in solver/__init__.py, line 2)"
    assert told == f"ZeroDivisionError in {places}: division by zero"


def test_frozen_code_of_python_that_this_package_calls_is_not_this_package() -> None:
    guard = UsersCode(lambda error: ValueError(explain(error)))

    def leave() -> None:
        with guard:
            exit(3)

    with pytest.raises(ValueError, match=r"SystemExit in .*test_errors.py, line \d+: 3"):
        leave()
    # As the package calls it: its own frame is the last that has a file.
    code = compile("def call(function):\n    function()\n", f"{maml_rl.errors._PACKAGE}/calling.py", "exec")
    scope: dict[str, Any] = {}
    exec(code, scope)
    with pytest.raises(SystemExit) as caught_exit:
        scope["call"](exit)
    trace = caught_exit.value.__traceback__
    assert trace is not None
    assert explain(caught_exit.value.with_traceback(trace.tb_next)) == "SystemExit: None"
