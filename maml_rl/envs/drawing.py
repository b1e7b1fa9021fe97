"""Small pictures of planes and grids, for the families that have no renderer of their own."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Color = tuple[int, int, int]

START_COLOR, GOAL_COLOR, PATH_COLOR = (110, 110, 110), (200, 60, 50), (40, 90, 180)

# Pixels of a picture of a grid along its longer side; colors of the floor and the walker.
_GRID_PIXELS = 256
_FLOOR, _WALKER = (40, 40, 48), (240, 240, 240)


def draw_grid(
    shape: tuple[int, int], cells: Mapping[tuple[int, int], Color], walker: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Return a picture (height, width, 3) of a grid seen from above.

    Args:
        shape: rows and columns; the first row is the uppermost.
        cells: colors of some cells, by (row, column).
        walker: (2,) row and column of the walker.
    """
    side = _GRID_PIXELS // max(shape)
    grid = np.full((*shape, 3), _FLOOR, np.uint8)
    for cell, color in cells.items():
        grid[cell] = color
    pixels = grid.repeat(side, 0).repeat(side, 1)
    (row, column), margin = walker * side, side // 4
    pixels[row + margin : row + side - margin, column + margin : column + side - margin] = _WALKER
    return pixels


class Canvas:
    """A white square picture of the plane, y upward.

    Args:
        size: pixels along each side.
        reach: the picture shows [-reach, reach] on both axes.
    """

    def __init__(self, size: int, reach: float) -> None:
        self.pixels = np.full((size, size, 3), 255, np.uint8)
        self._reach = reach
        self._rows, self._columns = np.mgrid[:size, :size]

    def disc(self, center: NDArray[np.float64], radius: int, color: Color) -> None:
        """Fill a disc; `radius` in pixels."""
        row, column = self._to_pixel(center)
        self.pixels[(self._rows - row) ** 2 + (self._columns - column) ** 2 <= radius**2] = color

    def line(self, points: NDArray[np.float64], color: Color) -> None:
        """Connect `points` (n, 2)."""
        size = len(self.pixels)
        for start, stop in pairwise(points):
            ends = np.array([self._to_pixel(start), self._to_pixel(stop)])
            count = int(np.abs(ends[1] - ends[0]).max()) + 1
            rows, columns = np.rint(np.linspace(ends[0], ends[1], count)).astype(int).T
            inside = (rows >= 0) & (rows < size) & (columns >= 0) & (columns < size)
            self.pixels[rows[inside], columns[inside]] = color

    def _to_pixel(self, point: NDArray[np.float64]) -> tuple[float, float]:
        scale = (len(self.pixels) - 1) / (2.0 * self._reach)
        return (self._reach - float(point[1])) * scale, (self._reach + float(point[0])) * scale
