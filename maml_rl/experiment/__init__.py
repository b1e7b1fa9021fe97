"""From a config to a result: build what it describes, train, evaluate, load a trained policy."""
