"""The settings of an experiment: typed, read from YAML or from a run."""

from maml_rl.config.config import Config, SettingsModel, load_config

__all__ = ["Config", "SettingsModel", "load_config"]
