"""The task families and the contract that they fulfil."""
