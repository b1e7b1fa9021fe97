"""Skipped tests name the remedy; where MAML_RL_NO_SKIPS is set, they fail.

A machine without a browser, OpenGL or an extra passes the tests. `.ci/run` installs all of these and refuses skips.
"""

import os
import re
import tomllib
from pathlib import Path
from typing import TypeVar

import pytest

# Reasons without a remedy: missing hardware and rights, and tests of `make test-metaworld`, `test-jax` and `test-ray`.
# Also packages that only a page of the documentation or an example needs.
ADMITTED = (
    *("CUDA", "accelerator", "NVIDIA driver", "no file system can be mounted"),
    *("'metaworld'", "'jax'", "'ray'", "'wandb'", "'mlflow'", "'pyarrow'", "'argcomplete'"),
)
_PROJECT = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
_MISSING = re.compile(r"could not import '([\w.]+)'")
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def judge(report: Report) -> Report:
    """Return the report of a skipped test with the remedy, or as a failure where skips are refused."""
    if not report.skipped or hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
        return report
    path, line, reason = report.longrepr
    if os.environ.get("MAML_RL_NO_SKIPS") and not any(words in reason for words in ADMITTED):
        report.outcome = "failed"
        report.longrepr = f"{path}:{line}: {reason}; but MAML_RL_NO_SKIPS refuses skips"
    else:
        report.longrepr = (path, line, reason + _remedy(reason))
    return report


def _remedy(reason: str) -> str:
    """Return how to install the package that could not be imported, where it is one of an extra."""
    match = _MISSING.search(reason)
    if match is None:
        return ""
    package = match[1].partition(".")[0].replace("_", "-")
    extras = _PROJECT["project"]["optional-dependencies"]
    found = [extra for extra, needed in extras.items() if any(re.match(rf"{package}\b", name) for name in needed)]
    return f"; to install it: pip install -e '.[{found[-1]}]'" if found else ""
