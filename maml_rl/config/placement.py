"""Where episodes are sampled: one frozen value with the place of the workers, their number, and their limits."""

from collections.abc import Callable, Mapping
from inspect import signature
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypedDict

from pydantic import BeforeValidator, Field, JsonValue

from maml_rl.arguments import suggest
from maml_rl.config.settings import MOST, Count, Positive, SettingsModel, finite, none_is_empty
from maml_rl.machine import usable_cores

if TYPE_CHECKING:
    import torch

Backend = Literal["auto", "in-process", "processes", "ray", "device"]
Engine = Literal["auto", "mjbatch", "mujoco", "warp"]
Update = Literal["auto", "driver", "workers"]
Inference = Literal["auto", "central", "worker"]
Stepping = Literal["auto", "serial", "threads"]
StartMethod = Literal["forkserver", "spawn", "fork"]
# How Ray lays a placement group out over nodes.
Layout = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
# Ray counts in ten-thousandths.
_LEAST_AMOUNT = 1e-4


class Placement(SettingsModel):
    """Where workers are, how many, with which deadlines and restarts. The episodes are the same for all of them.

    A sampler takes the fields as keyword arguments, or a placement as a whole. In a config they are keys beside the
    others, and on the command line options.
    """

    backend: Annotated[
        Backend,
        Field(
            description="where environments are; auto: on the GPU that is given as device, if all can be there, else in"
            " child processes, or in this one if there are no workers"
        ),
    ] = "auto"
    engine: Annotated[
        Engine,
        Field(description="what computes MuJoCo's physics; warp: on the device, with the extra gpu; auto: the fastest"),
    ] = "auto"
    num_workers: Annotated[
        Annotated[int, Field(ge=0, le=MOST)] | None,
        Field(
            description="child processes or Ray actors; null: one for each usable core, or CPU of the cluster; 0: none"
        ),
    ] = None
    ray_address: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Field(description="host:port of the Ray cluster; null: the one of this machine, or a new one on it"),
    ] = None
    strict: Annotated[
        bool,
        Field(description="refuse a Ray cluster with room for fewer actors than num-workers, instead of using fewer"),
    ] = False
    ray_start_timeout: Annotated[
        Positive, Field(description="seconds that the first Ray actor may take to start; with strict, all of them")
    ] = 120.0
    ray_head_timeout: Annotated[
        Positive, Field(description="seconds for which the head node of the Ray cluster may be away")
    ] = 10.0
    ray_num_cpus: Annotated[
        Positive, Field(description="CPUs that each Ray actor requests; with a fraction, several actors share one")
    ] = 1.0
    ray_resources: Annotated[
        dict[str, Positive],
        BeforeValidator(none_is_empty),
        Field(
            description="what else each Ray actor requests: GPU, memory in bytes, or names that nodes were started with"
        ),
    ] = {}  # noqa: RUF012 - pydantic copies it
    ray_placement_group: Annotated[
        Layout | None,
        Field(
            description="reserve places for all num-workers Ray actors at once, laid out so; null: place each by itself"
        ),
    ] = None
    ray_runtime_env: Annotated[
        dict[str, JsonValue],
        BeforeValidator(finite),
        BeforeValidator(none_is_empty),
        Field(description="Ray's runtime_env of the actors, as {pip: [simulator]}"),
    ] = {}  # noqa: RUF012 - pydantic copies it
    ray_log_to_driver: Annotated[
        bool, Field(description="show what Ray actors print, and what Ray says of the cluster")
    ] = False
    update: Annotated[
        Update,
        Field(
            description="where updates are: main process (driver) or workers, which keep the episodes (workers);"
            " auto: workers if the algorithm supports it and, on one machine, there are at least 4; else driver"
        ),
    ] = "auto"
    inference: Annotated[
        Inference,
        Field(description="where the policy acts: main process (central), each worker (worker), the faster one (auto)"),
    ] = "auto"
    num_groups: Annotated[Count, Field(description="groups of workers that take turns")] = 1
    recv_timeout: Annotated[
        Annotated[float, Field(ge=0)] | None, Field(description="seconds to wait for slow workers; null: wait for all")
    ] = None
    stepping: Annotated[
        Stepping,
        Field(
            description="how a worker steps slots: one by one (serial), at once (threads), the family's default (auto)"
        ),
    ] = "auto"
    stepping_threads: Annotated[
        Count | None, Field(description="slots of a worker that may wait at once; null: all (with stepping: threads)")
    ] = None
    step_timeout: Annotated[
        Positive, Field(description="seconds that one call of an environment may take before it counts as hung")
    ] = 60.0
    max_retries: Annotated[
        int, Field(ge=0, le=MOST, description="how often one episode may restart when its environment raises Retry")
    ] = 3
    max_restarts: Annotated[
        int, Field(ge=0, le=MOST, description="how often a worker that dies is replaced within one phase")
    ] = 3
    # Of one process, so no keys of a config.
    device: Annotated[
        str,
        BeforeValidator(str),
        Field(
            exclude=True,
            description="where all environments are with backend device, and where the policy acts with inference"
            " central; else all of it is on the CPU",
        ),
    ] = "cpu"
    start_method: Annotated[
        StartMethod | None,
        Field(exclude=True, description="how child processes start; None: in one of the ways that suit threads"),
    ] = None

    @classmethod
    def of_call(
        cls, function: Callable[..., Any], given: Self | None, num_workers: int | None, options: Mapping[str, Any]
    ) -> Self:
        """Return the placement that a call describes: as a whole, by loose keyword arguments, or by both.

        Args:
            function: that was called.
            given: the argument `placement`.
            num_workers: the argument of this name; None for that of `placement`.
            options: further arguments, which replace its fields.

        Raises:
            TypeError: If there is no such argument.
            ValueError: If one is out of range, or two exclude each other.
        """
        for name in options:
            if name not in cls.model_fields:
                known = [*list(signature(function).parameters)[:-1], *cls.model_fields]
                raise TypeError(f"a {function.__name__} has no argument {name!r}{suggest(name, known)}")
        if given is None:
            return cls(num_workers=num_workers, **options)
        return given.replace(**options, **({} if num_workers is None else {"num_workers": num_workers}))

    def for_evaluation(self, **changes: Any) -> Self:
        """Return this placement with the default way of collecting: the others are for training only."""
        return self.replace(**{name: type(self).model_fields[name].default for name in WAYS_OF_COLLECTING} | changes)

    @property
    def chosen(self) -> list[str]:
        """The fields that have not their defaults."""
        return [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]

    @property
    def asked(self) -> dict[str, float]:
        """The requests of each Ray actor, by Ray's names of resources."""
        return {"CPU": self.ray_num_cpus, **self.ray_resources}

    @property
    def workers(self) -> int:
        """Number of child processes; 0 in this process."""
        if self.num_workers is not None:
            return self.num_workers
        return 0 if self.backend in ("in-process", "device") else usable_cores()

    @property
    def acts_on_cpu(self) -> bool:
        """Whether the policy acts on the CPU."""
        return self.device.split(":")[0] == "cpu"

    @property
    def workers_act(self) -> bool:
        """Whether the policy acts in workers, if it can be sent there."""
        return self.workers > 0 and self.inference != "central" and self.waits_for_all and self.acts_on_cpu

    @property
    def waits_for_all(self) -> bool:
        """Whether a step of the policy is for all slots."""
        return self.recv_timeout is None and self.num_groups == 1

    def check_together(self) -> None:
        """Refuse values that exclude each other.

        Raises:
            ValueError: If some do.
        """
        for name in self.chosen if self.backend != "ray" else ():
            if name in OF_RAY:
                raise ValueError(
                    f"{name} is a setting of backend='ray', got backend={self.backend!r}; leave it out, or use "
                    "backend='ray'"
                )
        if self.stepping == "serial" and self.stepping_threads is not None:
            raise ValueError("stepping='serial' steps slots one by one without stepping_threads; leave one out")
        if self.update == "workers" and self.backend != "ray" and not self.workers_act:
            raise ValueError(
                "update='workers' needs workers in which the policy acts: at least 1, and the defaults of inference, "
                "recv_timeout, num_groups and device; or leave it out"
            )
        if self.num_workers == 0 and self.backend in ("processes", "ray"):
            remedy = "raise it, or leave it out" if self.backend == "ray" else "raise it, or use 'in-process'"
            raise ValueError(f"backend={self.backend!r} needs workers, but num_workers is 0; {remedy}")
        if self.num_workers and self.backend in ("in-process", "device"):
            raise ValueError(
                f"backend={self.backend!r} has no workers, but num_workers is {self.num_workers}; use 'processes'"
            )
        if self.engine == "warp" and (self.num_workers or self.backend not in ("auto", "device")):
            given = f"num_workers={self.num_workers}" if self.num_workers else f"backend={self.backend!r}"
            raise ValueError(
                f"engine='warp' steps all environments on the device, and {given} steps them elsewhere; leave it out"
            )
        if self.backend == "device" and self.engine not in ("auto", "warp"):
            raise ValueError(f"backend='device' has the engine 'warp', got engine={self.engine!r}; leave it out")
        if self.backend == "ray":
            self._check_ray()
        else:
            self._check_mode()

    def _check_ray(self) -> None:
        """Refuse ways of sampling that need the workers to be on this machine, and requests that Ray does not know."""
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
                f"backend='ray' acts on the CPU, in every actor, got device={self.device!r}; use device='cpu', or "
                "another backend"
            )
        if "CPU" in self.ray_resources:
            raise ValueError("ray_resources names CPU; give ray_num_cpus instead")
        for name, amount in self.asked.items():
            of = "ray_num_cpus" if name == "CPU" else f"ray_resources[{name!r}]"
            if not _LEAST_AMOUNT <= amount < inf:
                raise ValueError(f"{of} must be at least {_LEAST_AMOUNT}, the least that Ray counts, got {amount!r}")
            if amount > 1 and amount != int(amount):
                raise ValueError(f"{of} must be whole or less than 1, as Ray shares single units alone, got {amount!r}")
        if self.ray_placement_group is not None and self.num_workers is None:
            raise ValueError(
                f"ray_placement_group={self.ray_placement_group!r} reserves all actors at once; say how many by "
                "num_workers"
            )

    def _check_mode(self) -> None:
        """Refuse invalid combinations of ways of sampling."""
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
                    f"inference='worker' acts on the CPU, in every worker, got device={self.device!r}; use "
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


class PlacementOptions(TypedDict, total=False):
    """The fields of `Placement` as keyword arguments, except `num_workers`, which is an argument by itself."""

    backend: Backend
    engine: Engine
    ray_address: str | None
    strict: bool
    ray_start_timeout: float
    ray_head_timeout: float
    ray_num_cpus: float
    ray_resources: dict[str, float]
    ray_placement_group: Layout | None
    ray_runtime_env: dict[str, Any]
    ray_log_to_driver: bool
    update: Update
    inference: Inference
    num_groups: int
    recv_timeout: float | None
    stepping: Stepping
    stepping_threads: int | None
    step_timeout: float
    max_retries: int
    max_restarts: int
    device: "str | torch.device"
    start_method: StartMethod | None


PLACEMENT_KEYS = tuple(Placement.fields_by_key())
# For the Ray cluster and the place in it where a run samples: settings that no other backend has.
OF_RAY = tuple(name for name in Placement.model_fields if name == "strict" or name.startswith("ray_"))
RAY_KEYS = tuple(name.replace("_", "-") for name in OF_RAY)
# How batches are collected and where updates are, in training.
WAYS_OF_COLLECTING = ("inference", "num_groups", "recv_timeout", "update")
# What evaluations that are commands of their own do not take from a run, and their defaults: a reservation was made
# for the training, and a runtime_env may execute anything.
ELSEWHERE: dict[str, Any] = {
    key: Placement.fields_by_key()[key].default
    for key in ("backend", "engine", "num-workers", "ray-address", "strict", "ray-placement-group", "ray-runtime-env")
}
