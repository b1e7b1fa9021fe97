"""What code written for pytorch-maml-rl calls and nothing else needs; the classes that it calls derive from these."""
