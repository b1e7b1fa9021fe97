"""`with` blocks around what has workers."""

from typing import Any, Self


class ClosesAtExit:
    """Is closed at the end of a `with` block, however the block ended."""

    def close(self) -> Any:
        """End all workers."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
