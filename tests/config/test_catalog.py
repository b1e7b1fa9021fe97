from pathlib import Path

import pytest

from maml_rl.config.catalog import SHIPPED, find_config, name_of, shipped_configs

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in ROOT.glob("configs/**/*.yaml")}


@pytest.mark.slow
def test_every_config_of_the_repository_is_shipped_under_its_path_and_a_short_name() -> None:
    assert {name_of(find_config(name)) for name in CONFIGS} == CONFIGS
    assert {name_of(path) for path in shipped_configs().values()} == CONFIGS
    for name, path in shipped_configs().items():
        assert find_config(name) == path
        assert find_config(f"{name}.yaml") == path


def test_short_name_means_the_config_of_maml(tmp_path: Path) -> None:
    assert find_config("2d-navigation") == SHIPPED / "maml" / "2d-navigation.yaml"
    assert find_config("bandit-k5-n10") == SHIPPED / "maml" / "bandit" / "bandit-k5-n10.yaml"
    assert find_config("finn2017/2d-navigation") == SHIPPED / "finn2017" / "2d-navigation.yaml"
    # A run is named after its config.
    assert name_of(ROOT / "configs" / "finn2017" / "2d-navigation.yaml") == "finn2017/2d-navigation"
    assert name_of(tmp_path / "configs" / "tram.yaml") == "tram"
