import subprocess
import sys
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from maml_rl.cli import main as cli
from maml_rl.config import Config
from maml_rl.config.settings import CATALOG, Setting, algorithm_settings, describe_settings
from maml_rl.metalearners import algorithms
from scripts.describe_algorithms import catalog


class Model(BaseModel):
    needed: Annotated[str, Field(description="a name")]
    share: Annotated[float, Field(gt=0, le=1, description="of the whole")] = 0.5
    limit: Annotated[int | None, Field(ge=1, lt=2**31, description="in seconds")] = None
    kind: Annotated[Literal["a", "b", "c"], Field(alias="the-kind", description="which one")] = "a"
    sizes: Annotated[tuple[int, ...], Field(description="in meters")] = (1, 2)


def test_settings_are_described_with_their_ranges_and_defaults() -> None:
    assert describe_settings(Model) == [
        Setting("needed", "a name", "TEXT", None),
        Setting("share", "of the whole", "0<NUMBER<=1", "0.5"),
        Setting("limit", "in seconds", "INT>=1 or null", "null"),
        Setting("the-kind", "which one", "a, b or c", '"a"'),
        Setting("sizes", "in meters", "LIST of INT", "[1, 2]"),
    ]


def test_catalog_of_the_algorithms_is_that_of_their_classes() -> None:
    assert CATALOG.read_text() == catalog(), "python -m scripts.describe_algorithms writes it again"
    assert set(algorithm_settings()) == set(algorithms())


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--algorithm", "rl2", "--help"], "--value-lambda"),
        (["promp/halfcheetah-dir", "--help"], "settings of the algorithm promp"),
        (["--algorithm", "promp", "--learnin-rate", "3"], "did you mean '--learning-rate'"),
    ],
)
def test_options_of_training_are_known_without_torch(words: list[str], shown: str) -> None:
    code = "import sys; from maml_rl.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    result = subprocess.run(
        [sys.executable, "-c", code, "train", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert "AssertionError" not in result.stderr
    assert shown in result.stdout + result.stderr
    assert result.returncode == (0 if "--help" in words else 2)


def test_every_setting_of_a_config_has_a_description() -> None:
    settings = describe_settings(Config)
    assert {setting.key for setting in settings} == set(Config.fields_by_key())
    assert [setting.key for setting in settings if not setting.meaning or setting.allowed == "any value"] == []


def test_help_shows_meaning_range_and_default_of_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for setting in describe_settings(Config):
        default = "required in the config" if setting.default is None else f"default {setting.default}"
        assert f"{setting.meaning} [{setting.allowed}; {default}]" in shown, setting.key
