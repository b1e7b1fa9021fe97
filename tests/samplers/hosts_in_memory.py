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
from maml_rl.machine import single_threaded
from maml_rl.profiling import NULL_TIMER
from maml_rl.samplers.in_process import InProcessBackend
from maml_rl.samplers.remote_store import KeptBlocks, Reference, RemoteBatch, RemoteStore, Request


class LostError(Exception):
    """A host is lost during its work."""


class Hosts:
    """Hosts in this process.

    Args:
        make: makes a host, with the function that it calls as a sign of life.
        num: their number.
        losses: probability that a host is lost at a sign of life.
    """

    def __init__(
        self, make: Callable[[Callable[[Any], Any], Callable[[], None]], KeptBlocks], num: int, losses: float
    ) -> None:
        self._make, self._losses = make, losses
        self.objects: list[bytes] = []
        self.hosts = [make(self.get, self._beat) for _ in range(num)]
        self.random = random.Random(0)
        self.lost = 0
        self.received: list[int] = []

    def get(self, reference: Reference) -> Any:
        return pickle.loads(self.objects[reference.held])

    def replace(self, number: int) -> None:
        self.lost += 1
        self.hosts[number] = self._make(self.get, self._beat)

    def _beat(self) -> None:
        if self.random.random() < self._losses:
            raise LostError


class MemoryStore(RemoteStore):
    """A batch on hosts in this process."""

    def __init__(self, of: Hosts, batch: RemoteBatch) -> None:
        self._of = of
        super().__init__(batch)
        list(self._carry_out(Request(self._reference, self._blocks)))

    def _put(self, value: Any) -> Reference:
        self._of.objects.append(cloudpickle.dumps(value))
        return Reference(next(self._numbers), len(self._of.objects) - 1)

    def _carry_out(self, request: Request) -> Iterator[tuple[int, Any]]:
        of = self._of
        if request.call is None:
            # Any host may get any block, in any order.
            self._owners = {block: of.random.randrange(len(of.hosts)) for block in request.blocks}
        waiting = list(request.blocks)
        of.random.shuffle(waiting)
        while waiting:
            owner = self._owners[waiting[0]]
            own = tuple(block for block in waiting if self._owners[block] == owner)
            sent = pickle.loads(pickle.dumps(Request(request.batch, own, request.call)))
            try:
                # An actor computes on one thread, too.
                with single_threaded(1):
                    reply = pickle.dumps(of.hosts[owner].carry_out(sent))
            except LostError:
                of.replace(owner)
                self._owners.update({block: of.random.randrange(len(of.hosts)) for block in own})
                continue
            of.received.append(len(reply))
            yield from pickle.loads(reply).items()
            waiting = [block for block in waiting if block not in own]


class HostedBackend(InProcessBackend):
    """Samples in this process, and has hosts in it."""

    hosts: Hosts | None = None

    @property
    def num_stores(self) -> int:
        return 0 if self.hosts is None else len(self.hosts.hosts)

    def collect(self, batch: RemoteBatch, phase: Any, timer: Any) -> RemoteStore:
        assert self.hosts is not None
        return MemoryStore(self.hosts, batch)


def put_on_hosts(sampler: MultiTaskSampler, num_hosts: int, losses: float = 0.0) -> Hosts:
    """Make a sampler whose environments are in this process sample on hosts."""
    here = sampler.placement.replace(backend="in-process", num_workers=0, update="auto")
    arguments = here, sampler._recipe, sampler.slots_per_task

    def make(get: Callable[[Any], Any], beat: Callable[[], None]) -> KeptBlocks:
        backend, policy = InProcessBackend(*arguments), copy.deepcopy(sampler.policy)
        with torch.no_grad():
            # A host computes with the parameters that it receives, not with those that it starts with.
            for param in policy.parameters():
                param.fill_(0.123)
        return KeptBlocks(policy, lambda phase: backend.run(phase, NULL_TIMER), get, beat)

    backend = HostedBackend(*arguments)
    backend.hosts = Hosts(make, num_hosts, losses)
    sampler._workers.backend.close()
    sampler._workers.backend = backend
    sampler.placement = sampler.placement.replace(backend="ray", num_workers=1, update="workers")
    return backend.hosts
