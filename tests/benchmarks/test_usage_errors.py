"""A wrong command line of a benchmark ends in one line, like that of every other command."""

from importlib import import_module
from pathlib import Path

import pytest

import benchmarks

FILES = Path(benchmarks.__file__).parent.glob("*.py")
COMMANDS = sorted(path.stem for path in FILES if '__name__ == "__main__"' in path.read_text("utf-8"))


@pytest.mark.parametrize("name", COMMANDS)
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
