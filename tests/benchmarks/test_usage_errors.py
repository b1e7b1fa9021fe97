"""A wrong command line of a benchmark ends in one line, like that of every other command."""

from importlib import import_module

import pytest

from maml_rl.cli.main import _benchmarks


@pytest.mark.parametrize("name", [name for name in _benchmarks() if name != "learning"])
def test_wrong_option_of_a_benchmark_ends_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`learning` has the parser of `suite`."""
    try:
        module = import_module(f"benchmarks.{name}")
    except ImportError as error:
        pytest.skip(f"{name} needs {error.name}")
    with pytest.raises(SystemExit) as ended:
        module.main(["--no-such-option"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ": error: " in line
