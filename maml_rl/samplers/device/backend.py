"""Samples whole phases on a device, where the episodes stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from maml_rl.config.placement import Placement
from maml_rl.envs.meta_env import EnvDescription, MetaVectorEnv, Task
from maml_rl.episode.task_episodes import TaskEpisodes
from maml_rl.errors import ConfigError
from maml_rl.profiling import StageTimer
from maml_rl.samplers.backend import RolloutBackend
from maml_rl.samplers.device.phase_loop import DeviceLoop
from maml_rl.samplers.device.slots import DeviceSlots, reason_against
from maml_rl.samplers.env_recipe import Recipe
from maml_rl.samplers.phase import Phase

# Loops that are kept: one for each shape of a phase and way of acting.
_LOOPS_KEPT = 4


class DeviceBackend(RolloutBackend):
    """Carries out phases on one device; tasks are drawn on the CPU."""

    def __init__(self, placement: Placement, recipe: Recipe, slots_per_task: int) -> None:
        self._device, self._slots_per_task = torch.device(placement.device), slots_per_task
        self._recipe = recipe
        # One slot on the CPU, which describes the others and draws their tasks.
        own = {name: value for name, value in recipe.env_kwargs.items() if name != "engine"}
        self._host: MetaVectorEnv = replace(recipe, env_kwargs=own).make(1)
        against = reason_against(self._host)
        if against:
            raise ConfigError(f"backend 'device' cannot sample {recipe.env}: {against}; use backend 'auto'")
        self._slots: DeviceSlots | None = None
        self._loops: list[DeviceLoop] = []

    @property
    def slots(self) -> DeviceSlots:
        """The slots of the last phase."""
        assert self._slots is not None
        return self._slots

    def prepare(self, num_tasks: int) -> None:
        num_slots = num_tasks * self._slots_per_task
        if self._slots is None or self._slots.num_envs != num_slots:
            self._loops = []
            self._slots = DeviceSlots(self._on_device().make(num_slots), self._device)

    def _on_device(self) -> Recipe:
        """Return the recipe of slots whose physics, if they have any, is on the device."""
        family = self._recipe.family
        if family is None or not family.has_physics:
            return self._recipe
        own: dict[str, Any] = {"engine": "warp", "device": str(self._device)}
        return replace(self._recipe, env_kwargs={**self._recipe.env_kwargs, **own})

    def describe(self) -> EnvDescription:
        return EnvDescription.of(self._host)

    def sample_tasks(self, num_tasks: int, seed: int, evaluation: bool = False) -> list[Task]:
        return self._host.sample_tasks(num_tasks, seed=seed, evaluation=evaluation)

    def run(self, phase: Phase, timer: StageTimer) -> TaskEpisodes:
        self.prepare(len(phase.tasks))
        assert self._slots is not None
        with timer.stage("physics"):
            loop = next((candidate for candidate in self._loops if candidate.fits(phase)), None)
            if loop is None:
                loop = DeviceLoop(self._slots, self.describe(), phase)
                self._loops = [loop, *self._loops[: _LOOPS_KEPT - 1]]
            return loop.run(phase)

    def close(self) -> None:
        self._loops, self._slots = [], None
        self._host.close()
