"""A wrong command line of a benchmark ends in one line, like that of every other command."""

from importlib import import_module
from pathlib import Path

import pytest

import benchmarks

FILES = Path(benchmarks.__file__).parent.glob("*.py")
COMMANDS = sorted(path.stem for path in FILES if '__name__ == "__main__"' in path.read_text("utf-8"))


def test_wrong_option_of_a_benchmark_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """`learning` has the parser of `suite`."""
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            import_module(f"benchmarks.{name}").main(["--no-such-option"])
        assert ended.value.code == 2, name
        (line,) = capsys.readouterr().err.splitlines()
        assert ": error: " in line
