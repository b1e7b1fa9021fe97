"""From a config to a result: build an experiment, train, evaluate, load a trained policy."""
