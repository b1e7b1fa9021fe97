"""The exceptions that the package raises on purpose; all derive from `MamlRLError`.

Each carries one message that says what happened, where, and what to do about it. They are built from a single string,
so that they survive pickling between processes.
"""


class MamlRLError(Exception):
    """Base of every exception that maml_rl raises on purpose."""


class ConfigError(MamlRLError, ValueError):
    """A config file or a command-line value is wrong; the message names file, line and key where there are any."""


class TaskError(MamlRLError, ValueError):
    """A task is malformed or belongs to another family; the message names the entry."""


class ChildEnvError(MamlRLError, RuntimeError):
    """A child process failed: an environment raised in it, or it died more often than `max_restarts` allows."""


class ChildEnvTimeout(ChildEnvError, TimeoutError):
    """A child did not answer within `step_timeout`; the message holds its stack."""


class ChildLost(ChildEnvError):
    """A worker died; once it is replaced, what it had begun can be done again from the beginning."""


class NonFiniteError(MamlRLError, ArithmeticError):
    """An observation, a reward or an action is NaN or infinite; the message names task, episode and step."""


class CheckpointError(MamlRLError, RuntimeError):
    """A checkpoint is missing, truncated, altered, or of another architecture."""
