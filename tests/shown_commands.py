"""Code and command lines that are shown to users."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from maml_rl.cli import main as cli
from maml_rl.config.catalog import shipped_configs

ROOT = Path(__file__).resolve().parent.parent


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and code of every block of a page, except for those that include a file.

    The language of "``` { .python .example }", a block that no test runs, is "python example".
    """
    opened: tuple[str, str] | None = None
    body: list[str] = []
    for line in text.splitlines(keepends=True):
        fence = re.fullmatch(r"( *)```(.*)\n?", line)
        if opened is None and fence:
            opened, body = (fence[1], " ".join(re.findall(r"\w+", fence[2]))), []
        elif opened is not None and fence and (fence[1], fence[2]) == (opened[0], ""):
            code, language, opened = textwrap.dedent("".join(body)), opened[1], None
            if not code.startswith("--8<--"):
                yield language, code
        elif opened is not None:
            body.append(line)
    assert opened is None, f"a block of {opened} is not closed"


def check_command(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the options and configs in a line of train.py, test.py or maml-rl exist."""
    words = shlex.split(line)
    name = words[1].removesuffix(".py")
    configs = [word for word in words[2:3] if word in shipped_configs()]
    with pytest.raises(SystemExit):
        cli.main([name, *configs, "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {word for word in words if word.startswith("--")} <= known
    for word in words:
        if word.startswith("configs/"):
            assert (ROOT / word).is_file()
