"""Fixtures of the tests of sampling."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from script_runs import PREAMBLE, Run

HERE = Path(__file__).parent


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of few tasks, and blocks of several of them."""
    monkeypatch.setattr("maml_rl.derivatives.chunks._CPU_CHUNK", (1 << 10, 1 << 12))
    monkeypatch.setattr("maml_rl.derivatives.store._FEW_BLOCKS", 4)
    monkeypatch.setattr("maml_rl.metalearners.trial_ppo._CHUNK", 1)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start scripts, each in a session of its own."""
    scripts: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(PREAMBLE + textwrap.dedent(code))
        paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        scripts.append(
            subprocess.Popen(
                [sys.executable, str(script)],
                # Output is buffered, as by default: children must not repeat it.
                env={**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": ""},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return scripts[-1]

    yield start
    for script in scripts:
        script.kill()
        script.communicate()
