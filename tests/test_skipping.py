import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skipping import judge

ROOT = Path(__file__).resolve().parent.parent
SELENIUM = "Skipped: could not import 'selenium': No module named 'selenium'"


def skipped(reason: str) -> pytest.TestReport:
    return pytest.TestReport("test_x", ("x.py", 1, "test_x"), {}, "skipped", ("x.py", 1, reason), "setup")


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        (SELENIUM, "; to install it: pip install -e '.[dev]'"),
        ("Skipped: could not import 'stable_baselines3.common'", "; to install it: pip install -e '.[dev]'"),
        ("Skipped: could not import 'imageio_ffmpeg'", "; to install it: pip install -e '.[report]'"),
        ("Skipped: could not import 'fcntl'", ""),
    ],
)
def test_skip_for_lack_of_a_package_names_the_command_to_install_it(
    reason: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAML_RL_NO_SKIPS", raising=False)
    report = judge(skipped(reason))
    assert (report.outcome, report.longrepr) == ("skipped", ("x.py", 1, reason + remedy))


@pytest.mark.parametrize(("reason", "outcome"), [(SELENIUM, "failed"), ("Skipped: needs a CUDA device", "skipped")])
def test_refused_skip_is_a_failure_unless_hardware_is_missing(
    reason: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAML_RL_NO_SKIPS", "1")
    assert judge(skipped(reason)).outcome == outcome


@pytest.mark.slow
def test_without_chromium_pages_are_skipped_with_the_remedy(tmp_path: Path) -> None:
    pytest.importorskip("selenium")
    test = tmp_path / "test_page.py"
    test.write_text("def test_page(browser):\n    raise AssertionError\n")
    environment = {**os.environ, "PATH": str(tmp_path)}
    environment.pop("MAML_RL_NO_SKIPS", None)
    options = ["-p", "no:cacheprovider", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    command = [sys.executable, "-m", "pytest", "-q", *options, str(test)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout
    assert "1 skipped" in ended.stdout
    assert "no Chromium on this machine; scripts/install-system-packages installs it" in ended.stdout
