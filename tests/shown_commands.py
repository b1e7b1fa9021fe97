"""Command lines that are shown to users."""

import re
import shlex
from pathlib import Path

import pytest

from maml_rl.cli import main as cli

ROOT = Path(__file__).resolve().parent.parent


def check_command(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the options and configs in a line of train.py, test.py or maml-rl exist."""
    words = shlex.split(line)
    name = words[1].removesuffix(".py")
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {word for word in words if word.startswith("--")} <= known
    for word in words:
        if word.startswith("configs/"):
            assert (ROOT / word).is_file()
