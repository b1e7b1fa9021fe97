"""Ray's token authentication: what a cluster asks for, and the token of a cluster that this process starts."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from maml_rl.errors import ConfigError, causes

_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_SAME_TOKEN = "give this process the token of the cluster in RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
# Of all clusters that this process starts: Ray remembers the first.
_OWN = secrets.token_hex(32)


@contextmanager
def own_token() -> Iterator[bool]:
    """Have a cluster that is started here accept only this process, by a token that its processes inherit.

    Ray itself would keep one in the home folder of the user, where `ray start` would find it later. Yields whether
    there is one; not if the environment has a mode or a token.
    """
    if _MODE in os.environ or _TOKEN in os.environ:
        yield False
        return
    os.environ[_TOKEN] = _OWN
    try:
        yield True
    finally:
        # Ray sets the mode when it starts a cluster.
        for name in (_MODE, _TOKEN):
            os.environ.pop(name, None)


def check_token() -> None:
    """Refuse a token with white space in it, for which Ray would abort this process."""
    if any(character.isspace() for character in os.environ.get(_TOKEN, "")):
        raise ConfigError("RAY_AUTH_TOKEN has a space or a line break in it; give the token alone")


def require_token(address: str) -> None:
    """Refuse the mode "token" without a token, for which Ray would abort this process."""
    if os.environ.get(_MODE, "").lower() != "token" or os.environ.get(_TOKEN):
        return
    file = Path(os.environ.get(_PATH) or "~/.ray/auth_token").expanduser()
    with suppress(OSError):
        if file.read_text(encoding="utf-8", errors="replace").strip():
            return
    raise ConfigError(f"RAY_AUTH_MODE=token, but there is no token for the Ray cluster at {address}; {_SAME_TOKEN}")


def require_accepted(address: str, error: BaseException) -> None:
    """Turn Ray's error about a token that is missing or wrong into one line."""
    if any(type(cause).__name__ == "AuthenticationError" for cause in causes(error)):
        has_mode = os.environ.get(_MODE, "").lower() == "token"
        remedy = _SAME_TOKEN if has_mode else f"set RAY_AUTH_MODE=token, and {_SAME_TOKEN}"
        raise ConfigError(f"the Ray cluster at {address} accepts only requests with its token; {remedy}") from None
