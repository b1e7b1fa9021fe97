"""Observations as tensors, part by part: images, and the numbers of all other parts as one vector."""

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from maml_rl.spaces import PackedSpace, category_counts, is_image, require_numbers

Space = spaces.Space[Any]


class ObservationParts:
    """Splits observations (..., *observation shape) into images and numbers.

    The numbers are what `gymnasium.spaces.flatten` gives for the parts that are not images: Boxes flattened, discrete
    parts as one-hot vectors.

    Args:
        space: of the observations as arrays, as samplers and vector environments have it: Box, Discrete or
            `PackedSpace`.

    Attributes:
        image_spaces: of the images, in the order of the space.
        num_numbers: of all other parts together.
    """

    def __init__(self, space: Space) -> None:
        require_numbers("the package", space)
        self.observation_shape = tuple(space.shape or ())
        if isinstance(space, PackedSpace):
            fields: list[tuple[Space, slice | None]] = [(field.space, field.place) for field in space.fields]
        else:
            fields = [(space, None)]
        self.image_spaces = [part for part, _ in fields if is_image(part)]
        self._images = [field for field in fields if is_image(field[0])]
        self._others = [field for field in fields if not is_image(field[0])]
        self._tables: dict[Any, tuple[Tensor, ...]] = {}
        self.num_numbers = sum(spaces.flatdim(part) for part, _ in self._others)

    def images(self, observations: Tensor) -> list[Tensor]:
        """Return the images, each (..., *image shape) uint8."""
        return [self._read(observations, *field) for field in self._images]

    def numbers(self, observations: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers of the other parts, (..., num_numbers)."""
        lead = observations.shape[: observations.dim() - len(self.observation_shape)]
        vectors = [
            self._flat(number, part, self._read(observations, part, place), dtype)
            for number, (part, place) in enumerate(self._others)
        ]
        return torch.cat(vectors, -1) if vectors else observations.new_zeros((*lead, 0), dtype=dtype)

    def _read(self, observations: Tensor, part: Space, place: slice | None) -> Tensor:
        """Return a part (..., *its shape) in its own type."""
        if place is None:
            return observations
        rows, dtype = observations[..., place], getattr(torch, np.dtype(part.dtype).name)
        if dtype != torch.uint8 and rows.shape[-1]:
            # In memory of its own, where numbers of several bytes are aligned.
            rows = rows.clone(memory_format=torch.contiguous_format).view(dtype)
        return rows.reshape((*observations.shape[:-1], *(part.shape or ())))

    def _flat(self, number: int, part: Space, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return values (..., *shape) of a part, one of those that are not images, as vectors."""
        shape = part.shape or ()
        lead = values.shape[: values.dim() - len(shape)]
        counts = category_counts(part)
        if not counts:
            return values.reshape(*lead, math.prod(shape)).to(dtype)
        # All entries at once: those of a grid are many. What is no category, as after an episode, is zeros.
        least, most, places = self._categories(number, part, counts, values.device)
        numbers = values.reshape(*lead, len(counts)).long()
        near = torch.clamp(numbers, least, most)
        zeros = torch.zeros((*lead, sum(counts)), dtype=dtype, device=values.device)
        return zeros.scatter(-1, near + places, (near == numbers).to(dtype))

    def _categories(self, number: int, part: Space, counts: list[int], device: torch.device) -> tuple[Tensor, ...]:
        """Return of each entry of a part its least and its greatest number, and where 0 is among all vectors.

        They are made on the device, since nothing is copied there while a graph is recorded.
        """
        # Not by identity: a copy in another process may have another part there.
        key = number, device
        if key not in self._tables:
            starts, sizes = np.resize(part.start, len(counts)), np.array(counts)  # type: ignore[attr-defined]
            self._tables[key] = tuple(
                torch.cat([torch.full((1,), number, device=device) for number in numbers.tolist()])
                for numbers in (starts, starts + sizes - 1, sizes.cumsum() - sizes - starts)
            )
        return self._tables[key]
