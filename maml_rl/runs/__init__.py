"""Run folders: where a run writes its config, metrics and checkpoints, and reads them again."""
