"""Hosts that are objects of this process; everything reaches them pickled, and they can be lost at any moment."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch

from maml_rl import MultiTaskSampler
from maml_rl.machine import intra_op_threads
from maml_rl.profiling import NULL_TIMER
from maml_rl.samplers.hosting import EpisodeHost, HostedBatch, Request
from maml_rl.samplers.in_process import InProcessBackend


class LostError(Exception):
    """A host is lost during its work."""


class MemoryCarrier:
    """Carries requests to hosts in this process.

    Args:
        make: makes a host, with the function that it calls as a sign of life.
        num_hosts: their number.
        losses: probability that a host is lost at a sign of life.
    """

    def __init__(
        self, make: Callable[[Callable[[Any], Any], Callable[[], None]], EpisodeHost], num_hosts: int, losses: float
    ) -> None:
        self._make, self._losses = make, losses
        self._hosts = [make(self.get, self._beat) for _ in range(num_hosts)]
        self._owners: dict[int, int] = {}
        self._store: list[bytes] = []
        self._random = random.Random(0)
        self.lost = 0
        self.received: list[int] = []
        self.methods: list[str] = []

    @property
    def num_hosts(self) -> int:
        return len(self._hosts)

    def put(self, value: Any) -> int:
        self._store.append(cloudpickle.dumps(value))
        return len(self._store) - 1

    def get(self, held: int) -> Any:
        return pickle.loads(self._store[held])

    def sample(self, request: Request, batch: HostedBatch, phase: Any, timer: Any) -> None:
        list(self.carry_out(request, batch))

    def carry_out(self, request: Request, batch: HostedBatch) -> Iterator[tuple[int, Any]]:
        if request.call is None:
            # Any host may get any block, in any order.
            self._owners = {block: self._random.randrange(len(self._hosts)) for block in request.blocks}
        waiting = list(request.blocks)
        self._random.shuffle(waiting)
        while waiting:
            owner = self._owners[waiting[0]]
            own = tuple(block for block in waiting if self._owners[block] == owner)
            sent = pickle.loads(pickle.dumps(Request(request.batch, own, request.call)))
            try:
                # An actor computes on one thread, too.
                with intra_op_threads(1):
                    reply = pickle.dumps(self._hosts[owner].carry_out(sent))
            except LostError:
                self.lost += 1
                self._hosts[owner] = self._make(self.get, self._beat)
                self._owners.update({block: self._random.randrange(len(self._hosts)) for block in own})
                continue
            self.received.append(len(reply))
            yield from pickle.loads(reply).items()
            waiting = [block for block in waiting if block not in own]

    def read(self, batch: Any) -> None:
        """Return None: hosts have the episodes."""

    def _beat(self) -> None:
        if self._random.random() < self._losses:
            raise LostError


class HostedBackend(InProcessBackend):
    """Samples in this process, and has hosts in it."""

    _carrier: MemoryCarrier | None = None

    @property
    def carrier(self) -> Any:
        return self._carrier


def put_on_hosts(sampler: MultiTaskSampler, num_hosts: int, losses: float = 0.0) -> MemoryCarrier:
    """Make a sampler whose environments are in this process sample on hosts."""
    here = sampler.placement.replace(backend="in-process", num_workers=0, update="auto")
    arguments = here, sampler._recipe, sampler.slots_per_task

    def make(get: Callable[[Any], Any], beat: Callable[[], None]) -> EpisodeHost:
        backend, policy = InProcessBackend(*arguments), copy.deepcopy(sampler.policy)
        with torch.no_grad():
            # A host computes with the parameters that it receives, not with those that it starts with.
            for param in policy.parameters():
                param.fill_(0.123)
        return EpisodeHost(policy, lambda phase: backend.run(phase, NULL_TIMER), get, beat)

    backend = HostedBackend(*arguments)
    backend._carrier = MemoryCarrier(make, num_hosts, losses)
    sampler._workers.backend.close()
    sampler._workers.backend = backend
    sampler.placement = sampler.placement.replace(backend="ray", num_workers=1, update="workers")
    return backend._carrier
