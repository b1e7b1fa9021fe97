"""The base of slots with extended observations: a vector of the environment's observation and other numbers."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from maml_rl.envs.meta_env import MetaVectorEnv, MetaVectorWrapper, Seeds, StepBuffers
from maml_rl.spaces import PackedSpace, is_image, write_flat


class ObservingVectorEnv(MetaVectorWrapper):
    """Slots whose observations are vectors: the environment's own, flattened, then further numbers.

    A Discrete observation becomes a one-hot vector. An image, and what has text or images in it, becomes the first part
    of a `PackedSpace`, the numbers the second. Everything else is as the environment has it, so that the same seeds
    give the same tasks and, for the same actions, the same episodes.

    Args:
        env: steps its slots in this process.
        low: lowest values of the further numbers.
        high: their highest values.
        dtype: of the observations.
    """

    def __init__(self, env: MetaVectorEnv, low: NDArray[Any], high: NDArray[Any], dtype: "np.dtype[Any]") -> None:
        super().__init__(env)
        space = env.single_observation_space
        flat = spaces.utils.flatten_space(space)
        assert isinstance(flat, spaces.Box)
        self._own_size, self._dtype = flat.shape[0], dtype
        self._packs = isinstance(space, PackedSpace) or is_image(space)
        if self._packs:
            further = spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype.type)
            own = space.own if isinstance(space, PackedSpace) else space
            self.single_observation_space = PackedSpace(spaces.Tuple((own, further)))
        else:
            # A policy observes a vector, without the spaces that its numbers came from.
            self.single_observation_space = spaces.Box(
                np.concatenate([flat.low, low]).astype(dtype),
                np.concatenate([flat.high, high]).astype(dtype),
                dtype=dtype.type,
            )
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.buffers = StepBuffers.allocate(self.single_observation_space, self.num_envs, env.recorded_infos)

    @abstractmethod
    def _further(self) -> NDArray[Any]:
        """Return the further numbers of all slots, (N, numbers)."""

    @property
    def buffers(self) -> StepBuffers:
        """The arrays that every reset and step writes; assigning others makes them write there."""
        return self._buffers

    @buffers.setter
    def buffers(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        # The environment writes its observations into an array of its own, and all else directly into these buffers.
        own = self.env.buffers.observations
        self.env.buffers = replace(buffers, observations=own)

    def reset(
        self, *, seed: Seeds = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset all slots, or those of `options["reset_mask"]`, as the environment does."""
        infos = self.env.reset(seed=seed, options=options)[1]  # type: ignore[arg-type]
        self._observe()
        return self.buffers.observations.copy(), infos

    def reset_buffers(self, seeds: ArrayLike) -> None:
        """Reset all slots, slot i with `seeds[i]`."""
        self.env.reset_buffers(seeds)
        self._observe()

    def first_slots(self, num: int) -> MetaVectorEnv:
        """Return the first slots, which show the same."""
        make: Callable[[MetaVectorEnv], MetaVectorEnv] = type(self)
        return make(self.env.first_slots(num))

    def step_recv(self, timeout: float | None = None, indices: Sequence[int] | None = None) -> list[int]:
        """Run the step and write the buffers."""
        received = self.env.step_recv(timeout, indices)
        self._observe()
        return received

    def _observe(self) -> None:
        out, size = self.buffers.observations, self._own_size
        write_flat(self.env.single_observation_space, self.env.buffers.observations, out[:, :size])
        numbers = self._further()
        out[:, size:] = np.ascontiguousarray(numbers, self._dtype).view(np.uint8) if self._packs else numbers
