"""What ends with a `with` block."""

from abc import abstractmethod
from types import TracebackType
from typing import Self


class Closing:
    """Closes itself at the end of a `with` block, whatever ended it."""

    @abstractmethod
    def close(self) -> None:
        """End all that it holds; safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
