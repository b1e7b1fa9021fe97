"""What an experiment is: typed settings, read from YAML or from a run."""

from maml_rl.config.config import Config, load_config

__all__ = ["Config", "load_config"]
