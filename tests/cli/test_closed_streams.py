"""Commands work with closed standard streams, as under some schedulers, and write to no wrong file."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from maml_rl.cli.console import Parser, run_command

ALL = "<&- >&- 2>&-"


def run(command: str, streams: str, folder: Path) -> subprocess.CompletedProcess[str]:
    shell = f"exec {sys.executable} -m maml_rl {command} {streams}"
    return subprocess.run(["sh", "-c", shell], cwd=folder, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.timeout(120)
def test_list_with_closed_input_ends_without_an_error(tmp_path: Path) -> None:
    shown = run("configs", "<&-", tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")


def test_closed_descriptor_is_open_while_a_command_runs() -> None:
    def look(options: Namespace) -> None:
        os.fstat(0)

    kept = os.dup(0)
    os.close(0)
    try:
        assert run_command(Parser(prog="look"), [], look) == 0
    finally:
        os.dup2(kept, 0)
        os.close(kept)


@pytest.mark.timeout(120)
def test_error_with_closed_output_is_still_reported(tmp_path: Path) -> None:
    result = run("train --gamma 2 --output-folder run", ">&-", tmp_path)
    assert result.returncode == 2
    assert "gamma" in result.stderr
    assert run("train --gamma 2 --output-folder run", ALL, tmp_path).returncode == 2


@pytest.mark.timeout(200)
def test_training_with_closed_streams_writes_a_complete_run(tmp_path: Path) -> None:
    sizes = "--num-batches 2 --meta-batch-size 2 --fast-batch-size 2 --max-episode-steps 5 --hidden-sizes 4"
    assert run(f"train --output-folder run --num-workers 1 {sizes}", ALL, tmp_path).returncode == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [0, 1]
    # Printed output, even of C libraries, has not gone to a file that reuses the number of a stream.
    assert json.loads((tmp_path / "run" / "config.json").read_text())["num-batches"] == 2
