"""Chooses the backend that samples the phases of a sampler."""

from __future__ import annotations

from importlib.util import find_spec

from maml_rl.config.placement import Placement
from maml_rl.envs.make_env import Recipe
from maml_rl.errors import ConfigError
from maml_rl.policies import Policy
from maml_rl.samplers.backend import RolloutBackend
from maml_rl.samplers.in_process import InProcessBackend
from maml_rl.samplers.work.child.backend import ProcessBackend


def choose(placement: Placement, recipe: Recipe, policy: Policy) -> Placement:
    """Return a placement whose "auto" is decided: whether phases are on a device, and if not, where the policy acts."""
    if placement.backend == "auto" and (placement.engine == "warp" or _is_fastest_on_device(placement, recipe, policy)):
        return placement.replace(backend="device", num_workers=None)
    if placement.backend != "device" and placement.inference == "auto" and placement.waits_for_all:
        # A device has little to do in a step, and every step would wait for it.
        return placement.replace(device="cpu")
    return placement


def _is_fastest_on_device(placement: Placement, recipe: Recipe, policy: Policy) -> bool:
    """Return whether a GPU samples phases fastest, as far as that is known before anything is made."""
    family = recipe.family
    possible = (
        not placement.acts_on_cpu
        and placement.engine == "auto"
        and placement.inference == "auto"
        and placement.waits_for_all
        and not placement.num_workers
        and (family.extra in ("", "jax") if family is not None else getattr(recipe.env, "is_array_code", False))
        and recipe.env_kwargs.get("engine", "auto") in ("auto", "warp")
        and (family is None or not family.has_physics or find_spec("mujoco_warp") is not None)
        and policy.stateless
        and not policy.told_who_acts
    )
    if not possible:
        return False
    from maml_rl.samplers.device.slots import reason_against

    env = recipe.make(1)
    try:
        return not reason_against(env)
    finally:
        env.close()


def make_backend(
    placement: Placement, recipe: Recipe, policy: Policy, slots_per_task: int, episodes_per_task: int
) -> RolloutBackend:
    """Make the backend of a sampler, without starting a worker."""
    if placement.backend in ("ray", "device") or placement.workers or slots_per_task < episodes_per_task:
        _check_stateless(policy)
    if policy.told_who_acts and not placement.acts_on_cpu:
        raise ValueError(
            f"{policy.class_name} is told on the CPU which slots act, got device={placement.device!r}; leave it out"
        )
    if placement.backend == "ray":
        # Only users of the backend need the package.
        try:
            from maml_rl.samplers.work.ray.backend import RayBackend
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise ConfigError(
                "backend 'ray' needs the package ray; install the extra: pip install 'maml-rl[ray]'"
            ) from None
        return RayBackend(placement, recipe, policy, slots_per_task)
    if placement.backend == "device":
        from maml_rl.samplers.device.backend import DeviceBackend

        return DeviceBackend(placement, recipe, slots_per_task)
    if placement.workers:
        return ProcessBackend(placement, recipe, policy, slots_per_task)
    return InProcessBackend(placement, recipe, slots_per_task)


def _check_stateless(policy: Policy) -> None:
    """Refuse a policy whose copies must not act."""
    if not policy.stateless:
        raise ValueError(
            f"{policy.class_name} is not stateless: its actions may depend on earlier calls, but it is not told "
            "when a phase begins, is cut into waves or repeated, nor for which slots it acts; use num_workers=0 "
            "without slots_per_task, have it remember through initial_memory and act, or declare "
            "`stateless = True` in its class if an action depends on observation, noise and parameters alone"
        )
