from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from maml_rl.cli import main as cli
from maml_rl.config import Config
from maml_rl.config.reference import Setting, describe_settings


class Model(BaseModel):
    needed: Annotated[str, Field(description="a name")]
    share: Annotated[float, Field(gt=0, le=1, description="of the whole")] = 0.5
    limit: Annotated[int | None, Field(ge=1, lt=2**31, description="in seconds")] = None
    kind: Annotated[Literal["a", "b", "c"], Field(alias="the-kind", description="which one")] = "a"
    sizes: Annotated[tuple[int, ...], Field(description="in meters")] = (1, 2)


def test_settings_are_described_with_their_ranges_and_defaults() -> None:
    assert describe_settings(Model) == [
        Setting("needed", "a name", "text", None),
        Setting("share", "of the whole", "a number, more than 0, at most 1", "0.5"),
        Setting("limit", "in seconds", "a whole number, at least 1, or null", "null"),
        Setting("the-kind", "which one", "a, b or c", '"a"'),
        Setting("sizes", "in meters", "a list, each entry a whole number", "[1, 2]"),
    ]


def test_every_setting_of_a_config_says_what_it_means() -> None:
    settings = describe_settings(Config)
    assert {setting.key for setting in settings} == {field.alias for field in Config.model_fields.values()}
    assert [setting.key for setting in settings if not setting.meaning or setting.allowed == "any value"] == []


def test_help_shows_meaning_range_and_default_of_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for setting in describe_settings(Config):
        default = "required in the config" if setting.default is None else f"default {setting.default}"
        assert f"{setting.meaning} [{setting.allowed}; {default}]" in shown, setting.key
