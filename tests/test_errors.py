"""Errors of user code are reported on one line."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from maml_rl.errors import ConfigError, TaskError, UsersCode, explain


def caught(call: Any, *arguments: Any) -> BaseException:
    """Return the error of a call, without the frames of this module."""
    with pytest.raises(Exception) as error:  # noqa: PT011 - whatever it is
        call(*arguments)
    trace = error.value.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.value.with_traceback(trace)


def test_bare_assert_is_reported_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bare.py"
    path.write_text("def fail():\n    assert 1 > 2\n")
    told = explain(caught(runpy.run_path(str(path))["fail"]))
    assert told == f"AssertionError in {path}, line 2: assert 1 > 2"


def test_error_of_a_library_is_reported_by_its_message_or_by_its_line() -> None:
    error = caught(json.loads, 3)
    assert explain(error).startswith("TypeError: the JSON object must be str")
    error.args = ()
    assert "json" in explain(error)
    assert ", line " in explain(error)
    assert "raise TypeError" in explain(error)


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
