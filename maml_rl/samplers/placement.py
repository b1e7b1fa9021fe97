"""Where episodes are sampled: one frozen value with the place of the workers, their number, and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from maml_rl.arguments import check_count
from maml_rl.envs.calls import CallRules, Stepping
from maml_rl.machine import usable_cores

if TYPE_CHECKING:
    import torch

# Where the policy acts: in the parent for all workers, in each worker, or where it is faster.
Inference = Literal["auto", "central", "worker"]
# Where the update is: in the process that learns, or in the workers, which then keep the episodes.
Update = Literal["auto", "driver", "workers"]
# How Ray lays a placement group out over nodes.
Layout = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
BACKENDS = ("auto", "in-process", "processes", "ray")
# Ray counts in ten-thousandths.
_LEAST_AMOUNT = 1e-4


class PlacementOptions(TypedDict, total=False):
    """The fields of `Placement` that are keyword arguments of a sampler; see there."""

    backend: str
    device: torch.device | str
    inference: Inference
    recv_timeout: float | None
    num_groups: int
    start_method: str | None
    stepping: Stepping
    stepping_threads: int | None
    step_timeout: float
    max_retries: int
    max_restarts: int
    ray_address: str | None
    strict: bool
    ray_start_timeout: float
    ray_head_timeout: float
    ray_num_cpus: float
    ray_resources: Mapping[str, float] | None
    ray_placement_group: Layout | None
    ray_runtime_env: Mapping[str, Any] | None
    ray_log_to_driver: bool
    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where workers are, how many, with which deadlines and restarts. The episodes are the same for all of them.

    A sampler takes the fields as keyword arguments; see `PlacementOptions`.

    Attributes:
        backend: where the environments are: "in-process"; "processes"; "ray", in actors on a Ray cluster, which need
            the extra `ray`; or "auto", which is the first if `num_workers` is 0 and else the second.
        num_workers: None for one per usable core, or per CPU of a Ray cluster, or none where there are no workers.
        device: where the policy acts; episodes stay on the CPU.
        inference: "central": the policy acts in this process, for all workers; "worker": in each worker, which samples
            whole episodes of its tasks by itself; "auto": in the workers, which is faster, if they can load the
            policy (its class is in a module, not in a notebook), there is a task for every worker, `device` is the
            CPU, and neither `recv_timeout` nor `num_groups` is given.
        recv_timeout: seconds to wait for workers that have not finished a step; the policy then acts for those that
            have, at least one. None waits for all; only then are results bit-identical.
        num_groups: groups of workers that take turns: while one steps, the policy acts for another.
        start_method: "fork", "forkserver" or "spawn"; None for one that is safe with threads.
        stepping: "serial": a worker steps its slots one after the other; "threads": concurrently, each waiting for
            itself alone, in threads, or awaited where `reset` and `step` are coroutines; "auto": as the class of the
            environment says.
        stepping_threads: how many slots of a worker may wait at once, at most as many as there are; None for all.
        step_timeout: seconds that one call of an environment may take before its worker counts as hung.
        max_retries: how often one episode may restart because its environment raises `Retry`.
        max_restarts: how often one worker may be replaced within one phase; on Ray, how often one range of tasks may
            lose its worker, and how often actors may fail to start on a node.
        ray_address: "host:port" of the Ray cluster; None for the one that this machine belongs to, or a new one on it.
        strict: refuse a Ray cluster that has room for fewer actors than `num_workers`, instead of using fewer.
        ray_start_timeout: seconds that the first Ray actor may take to start, or with `strict` all of them.
        ray_head_timeout: seconds for which the head node of the Ray cluster may be away before the sampler gives up.
        ray_num_cpus: CPUs that each Ray actor requests; a fraction has several actors share one.
        ray_resources: further resources that each Ray actor requests, by name: "GPU", "memory" in bytes, or resources
            of its nodes' own.
        ray_placement_group: reserve the CPUs and resources of all `num_workers` actors at once, laid out in this way;
            None to place each actor separately, evenly over the nodes.
        ray_runtime_env: Ray's `runtime_env` of the actors.
        ray_log_to_driver: show the output of actors, and Ray's messages about the cluster.
        update: for metalearners on a Ray cluster: "workers" keep the episodes and compute the update; the "driver" gets
            the episodes; "auto": the workers where learner and baseline allow it.

    Raises:
        ValueError: If a value is out of range, or two of them exclude each other.
    """

    backend: str = "auto"
    num_workers: int | None = None
    device: torch.device | str = "cpu"
    inference: Inference = "auto"
    recv_timeout: float | None = None
    num_groups: int = 1
    start_method: str | None = None
    stepping: Stepping = "auto"
    stepping_threads: int | None = None
    step_timeout: float = 60.0
    max_retries: int = 3
    max_restarts: int = 3
    ray_address: str | None = None
    strict: bool = False
    ray_start_timeout: float = 120.0
    ray_head_timeout: float = 10.0
    ray_num_cpus: float = 1.0
    ray_resources: Mapping[str, float] | None = None
    ray_placement_group: Layout | None = None
    ray_runtime_env: Mapping[str, Any] | None = None
    ray_log_to_driver: bool = False
    update: Update = "auto"

    def __post_init__(self) -> None:
        if self.update not in get_args(Update):
            raise ValueError(f"update must be one of {', '.join(get_args(Update))}, got {self.update!r}")
        if self.update == "workers" and self.backend != "ray":
            raise ValueError(
                f"update='workers' needs backend='ray', got backend={self.backend!r}; leave it out: on one machine the "
                "update uses all cores anyway"
            )
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")
        if self.backend == "ray":
            check_count("num_workers", 1 if self.num_workers is None else self.num_workers)
            self._check_ray()
        elif self.num_workers is not None:
            if check_count("num_workers", self.num_workers, 0) == 0 and self.backend == "processes":
                raise ValueError(
                    "backend='processes' needs workers, but num_workers is 0; raise it, or use 'in-process'"
                )
            if self.num_workers and self.backend == "in-process":
                raise ValueError(
                    f"backend='in-process' has no workers, but num_workers is {self.num_workers}; use 'processes'"
                )
        check_count("max_restarts", self.max_restarts, 0)
        self._check_asked()
        for name in ("step_timeout", "ray_start_timeout", "ray_head_timeout"):
            if not 0.0 < getattr(self, name) < inf:
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        self.call_rules  # noqa: B018 - refuses what makes no sense
        if self.backend != "ray":
            self._check_mode()

    @property
    def asked(self) -> dict[str, float]:
        """The requests of each Ray actor, by Ray's names of resources."""
        return {"CPU": self.ray_num_cpus, **(self.ray_resources or {})}

    @property
    def call_rules(self) -> CallRules:
        """How a worker carries out the calls of its environment objects."""
        return CallRules(
            stepping=self.stepping,
            threads=self.stepping_threads,
            timeout=self.step_timeout,
            max_retries=self.max_retries,
        )

    @property
    def workers(self) -> int:
        """Number of child processes; 0 in this process."""
        if self.num_workers is not None:
            return self.num_workers
        return 0 if self.backend == "in-process" else usable_cores()

    @property
    def acts_on_cpu(self) -> bool:
        """Whether the policy acts on the CPU."""
        return str(self.device).split(":")[0] == "cpu"

    def _check_ray(self) -> None:
        """Refuse ways of sampling that need the workers to be on this machine."""
        for name, given in (
            ("inference='central'", self.inference == "central"),
            ("recv_timeout", self.recv_timeout is not None),
            ("num_groups", self.num_groups != 1),
        ):
            if given:
                raise ValueError(
                    f"{name} and backend='ray' exclude each other: they share memory at every step, and actors on "
                    "other machines cannot; leave it out, or use backend='processes'"
                )
        if self.start_method is not None:
            raise ValueError("start_method is how child processes start; with backend='ray' leave it out")
        if not self.acts_on_cpu:
            raise ValueError(
                f"backend='ray' acts on the CPU, in every actor, got device={str(self.device)!r}; use device='cpu', or "
                "another backend"
            )

    def _check_asked(self) -> None:
        """Refuse requests that are invalid in Ray, or that no node could meet."""
        if "CPU" in (self.ray_resources or ()):
            raise ValueError("ray_resources names CPU; give ray_num_cpus instead")
        for name, amount in self.asked.items():
            of = "ray_num_cpus" if name == "CPU" else f"ray_resources[{name!r}]"
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not _LEAST_AMOUNT <= amount < inf:
                raise ValueError(f"{of} must be a positive number, got {amount!r}")
            if amount > 1 and amount != int(amount):
                raise ValueError(f"{of} must be whole or less than 1, as Ray shares single units alone, got {amount!r}")
        if self.ray_placement_group not in (None, *get_args(Layout)):
            layouts = ", ".join(get_args(Layout))
            raise ValueError(f"ray_placement_group must be one of {layouts}, got {self.ray_placement_group!r}")
        if self.backend == "ray" and self.ray_placement_group is not None and self.num_workers is None:
            raise ValueError(
                f"ray_placement_group={self.ray_placement_group!r} reserves all actors at once; say how many by "
                "num_workers"
            )

    def _check_mode(self) -> None:
        """Refuse invalid combinations of ways of sampling."""
        if self.inference not in get_args(Inference):
            raise ValueError(f"inference must be one of {', '.join(get_args(Inference))}, got {self.inference!r}")
        if self.recv_timeout is not None and not self.recv_timeout >= 0.0:
            raise ValueError(f"recv_timeout must be None or a number of seconds, got {self.recv_timeout}")
        check_count("num_groups", self.num_groups)
        if self.inference == "worker":
            if self.workers == 0:
                raise ValueError(
                    "inference='worker' needs workers to act in, but num_workers is 0; raise it, or use "
                    "inference='central'"
                )
            for name, given in (("recv_timeout", self.recv_timeout is not None), ("num_groups", self.num_groups > 1)):
                if given:
                    raise ValueError(
                        f"{name} and inference='worker' exclude each other: a worker that acts by itself is waited for "
                        "once a phase, not once a step"
                    )
            if not self.acts_on_cpu:
                raise ValueError(
                    f"inference='worker' acts on the CPU, in every worker, got device={str(self.device)!r}; use "
                    "device='cpu', or inference='central'"
                )
        elif self.num_groups > max(self.workers, 1):
            raise ValueError(
                f"num_groups={self.num_groups} needs at least as many workers to take turns, but num_workers is "
                f"{self.workers}; raise num_workers, or leave num_groups at 1"
            )
        elif self.recv_timeout is not None and self.num_groups > 1:
            raise ValueError("recv_timeout and num_groups exclude each other: a group is waited for as a whole")
        elif self.recv_timeout is not None and self.workers == 0:
            raise ValueError("recv_timeout needs workers to wait for, but num_workers is 0; raise it")
