"""The settings of an experiment: typed, read from YAML or from a run."""

from maml_rl.config.config import Config, load_config
from maml_rl.config.settings import SettingsModel

__all__ = ["Config", "SettingsModel", "load_config"]
