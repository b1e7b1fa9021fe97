"""Ray's token authentication: what a cluster asks for, and the token of a cluster that this process starts."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

import ray

from maml_rl.errors import ConfigError, causes

_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_SAME_TOKEN = "give this process the token of the cluster in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"


def make_own_token() -> bool:
    """Give a cluster that this process starts a token, which its processes inherit in the environment.

    Ray itself would keep one in the home folder of the user, where `ray start` would find it later.

    Returns:
        Whether it has one; not if the environment has a mode or a token, or this version of Ray starts without a token.
    """
    if _MODE in os.environ or _TOKEN in os.environ or not _has_mode_by_default():
        return False
    os.environ[_TOKEN] = secrets.token_hex(32)
    return True


def remove_own_token() -> None:
    """Make the environment, and what Ray remembers of it, what they were before `make_own_token`."""
    # Ray sets the mode when it starts a cluster.
    for name in (_MODE, _TOKEN):
        os.environ.pop(name, None)
    # Ray has no public function for this.
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _has_mode_by_default() -> bool:
    """Return whether this version of Ray starts clusters with a token unless the user says otherwise."""
    return tuple(map(int, ray.__version__.split(".")[:2])) >= (2, 59)


def require_token(address: str) -> None:
    """Refuse the mode "token" without a token, for which Ray would abort this process.

    Raises:
        ConfigError: With the remedy.
    """
    if os.environ.get(_MODE, "").lower() != "token" or os.environ.get(_TOKEN):
        return
    file = Path(os.environ.get(_PATH) or "~/.ray/auth_token").expanduser()
    with suppress(OSError):
        if file.read_text(encoding="utf-8", errors="replace").strip():
            return
    raise ConfigError(f"RAY_AUTH_MODE=token, but there is no token for the Ray cluster at {address}; {_SAME_TOKEN}")


def require_accepted(address: str, error: BaseException) -> None:
    """Turn Ray's error about a token that is missing or wrong into one line.

    Raises:
        ConfigError: If `error`, or one that it comes from, is such an error.
    """
    if any(type(each).__name__ == "AuthenticationError" for each in causes(error)):
        has_mode = os.environ.get(_MODE, "").lower() == "token"
        remedy = _SAME_TOKEN if has_mode else f"set RAY_AUTH_MODE=token, and {_SAME_TOKEN}"
        raise ConfigError(f"the Ray cluster at {address} accepts only requests with its token; {remedy}") from None
