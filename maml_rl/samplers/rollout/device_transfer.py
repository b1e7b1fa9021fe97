"""Transfers to an accelerator and back at every step of a rollout: one each way, through pinned memory."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# A tensor may begin wherever its largest number may.
_ALIGNMENT = 16


class DeviceLink:
    """Carries observations and noise to a device, packed as bytes into one transfer, and brings actions back.

    Pages that are pinned cannot be swapped out, so that the device copies from and to them directly. The workers'
    shared memory is not pinned: its pages belong to several processes.

    Args:
        observations: (N, *obs), for its shape and type.
        noise_size: numbers of noise per row.
        device: any but the CPU.
    """

    def __init__(self, observations: NDArray[Any], noise_size: int, device: torch.device) -> None:
        self._device, self._pinned = device, device.type == "cuda"
        self._row, self._dtype = observations.shape[1:], observations.dtype
        self._row_bytes = math.prod(self._row) * self._dtype.itemsize
        self._noise_size = noise_size
        num_rows = len(observations)
        size = self._noise_start(num_rows) + num_rows * noise_size * np.dtype(np.float32).itemsize
        self._outbox = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        self._arrived = torch.empty(size, dtype=torch.uint8, device=device)
        self._bytes: NDArray[np.uint8] = self._outbox.numpy()
        self._torch_dtype = torch.from_numpy(np.empty(0, self._dtype)).dtype
        self._num_rows = num_rows
        self._inbox: Tensor | None = None

    def send(self, observations: NDArray[Any], noise: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
        """Return both on the device, valid until the next call.

        Args:
            observations: (n, *obs), n at most N.
            noise: (n, noise_size).
        """
        rows = len(observations)
        end, start = rows * self._row_bytes, self._noise_start(rows)
        stop = start + noise.nbytes
        self._bytes[:end].view(self._dtype).reshape(observations.shape)[...] = observations
        self._bytes[start:stop].view(np.float32).reshape(noise.shape)[...] = noise
        arrived = self._arrived[:stop]
        arrived.copy_(self._outbox[:stop], non_blocking=self._pinned)
        return (
            arrived[:end].view(self._torch_dtype).view(rows, *self._row),
            arrived[start:].view(torch.float32).view(rows, self._noise_size),
        )

    def fetch(self, actions: Tensor) -> NDArray[Any]:
        """Wait for `actions` (n, *act), and return them in host memory, where the next call overwrites them."""
        if self._inbox is None:
            shape = (self._num_rows, *actions.shape[1:])
            self._inbox = torch.empty(shape, dtype=actions.dtype, pin_memory=self._pinned)
        landed = self._inbox[: len(actions)]
        landed.copy_(actions, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream(self._device).synchronize()
        result: NDArray[Any] = landed.numpy()
        return result

    def _noise_start(self, num_rows: int) -> int:
        return -(-num_rows * self._row_bytes // _ALIGNMENT) * _ALIGNMENT
