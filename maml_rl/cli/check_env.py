"""The command `maml-rl check-env`: whether an environment keeps the contract of a task family."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

from maml_rl.cli.console import Parser, ending_in_order, run_command
from maml_rl.cli.run_options import mapping_option
from maml_rl.errors import ConfigError, MamlRLError, UsersCode, explain

# Steps of an episode that are compared with a loop.
_MOST_COMPARED_STEPS = 100
# Shorter steps than this end before another thread has started.
_LEAST_WAITING_SECONDS, _LEAST_WAITING_SHARE = 2e-3, 0.5
_MEASURED_STEPS, _MEASURED_SECONDS = 50, 2.0
_THREAD, _WAITS = Path("/proc/thread-self"), b"voluntary_ctxt_switches"


def run_check_env(arguments: Sequence[str], prog: str) -> int:
    """Check a user's environment, and return the exit code."""
    parser = Parser(prog=prog, description="Check that an environment keeps the contract of a task family.")
    parser.add_argument("env", help="a registered id, module:Id-v0, or module:Class")
    parser.add_argument("--env-kwargs", default="{}", help="arguments of the environment, as YAML: '{size: 3}'")
    parser.add_argument(
        "--against-loop",
        action="store_true",
        help="also sample episodes, in this process, in threads and in workers, and compare every value with a loop",
    )
    return run_command(parser, arguments, _check_env)


@ending_in_order()
def _check_env(options: Namespace) -> None:
    from maml_rl.envs import FAMILIES
    from maml_rl.envs.global_generators import construct
    from maml_rl.envs.make_env import Recipe
    from maml_rl.samplers.env_recipe import pickled_recipe

    kwargs = mapping_option(options.env_kwargs, "--env-kwargs", "{size: 3}")
    with UsersCode(lambda error: ConfigError(f"{options.env} cannot be made: {explain(error)}")):
        recipe = Recipe.of(_maker(options.env), kwargs)
        is_vector_family = recipe.is_vector_family
    if is_vector_family:
        _check_vector_family(options, recipe)
        return
    make = partial(_make_env, options.env, kwargs)
    env, _ = construct(make)
    try:
        with UsersCode(lambda error: MamlRLError(f"{options.env}: {explain(error)}"), BrokenPipeError):
            # As a run refuses it, whose workers make the environments.
            pickled_recipe(recipe)
            _check_contract(env, make)
            if env.spec is None or env.spec.id not in FAMILIES:
                # The slots of this package's families are one batch.
                print(_advise_stepping(env))
            if options.against_loop:
                print(f"ok: {_compare_with_loop(env, make, _maker(options.env), kwargs)}")
    except BaseException:
        with suppress(Exception):
            env.close()
        raise
    with UsersCode(lambda error: MamlRLError(f"{options.env}: close() raises {explain(error)}")):
        env.close()
    print(f"{options.env} is a task family; {_usage(env, options.env)}")


def _check_vector_family(options: Namespace, recipe: Any) -> None:
    """Check a family of vector environments, whose batches are compared with each other instead of with a loop."""
    from maml_rl.envs.checking import check_vector_family
    from maml_rl.samplers.env_recipe import pickled_recipe

    with (
        UsersCode(lambda error: MamlRLError(f"{options.env}: {explain(error)}"), BrokenPipeError),
        warnings.catch_warnings(record=True) as remarks,
    ):
        warnings.simplefilter("always")
        pickled_recipe(recipe)
        check_vector_family(recipe.make)
    for note in dict.fromkeys(str(remark.message) for remark in remarks):
        print(f"note: {note}")
    print("ok: tasks are drawn and set, and a slot does the same in batches of any size and order")
    name = repr(options.env) if isinstance(recipe.env, str) else options.env.rpartition(":")[2]
    print(f"{options.env} is a task family of vector environments; MultiTaskSampler({name}, ...) samples it")


def _check_contract(env: Any, make: Any) -> None:
    """Check an environment, and print which rules it follows."""
    from maml_rl.envs import check_meta_env
    from maml_rl.envs.checking import GYMNASIUM

    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        check_meta_env(env, make_another=make)
    notes = list(dict.fromkeys(str(remark.message) for remark in remarks))
    for note in notes:
        print(f"note: {note}")
    print("ok: tasks are drawn, set, and kept over resets")
    if not any(note.startswith(GYMNASIUM) for note in notes):
        print("ok: Gymnasium's own rules are kept")


def _advise_stepping(env: Any) -> str:
    """Advise whether slots of an environment should wait concurrently, by how long its steps take and wait."""
    from maml_rl.envs.calls import Awaited, CallRules
    from maml_rl.envs.checking import family_of
    from maml_rl.envs.make_env import steps_in_threads
    from maml_rl.envs.meta_env import declared

    seconds, share = measure_waiting(env)
    measured = f"a step takes {1e3 * seconds:.3g} ms, {share:.0%} of it waiting"
    name = type(family_of(env)).__name__
    if isinstance(env, Awaited):
        return f"ok: {measured}; its slots are awaited concurrently"
    if not declared(env, "thread_safe", True):
        return f"ok: {measured}; it declares that it is not thread-safe, so its slots are stepped one after the other"
    pays = seconds >= _LEAST_WAITING_SECONDS and share >= _LEAST_WAITING_SHARE
    if pays == steps_in_threads(env, CallRules()):
        return (
            f"ok: {measured}; its slots are stepped {'concurrently' if pays else 'one after the other'}, which suits it"
        )
    if pays:
        return (
            f"note: {measured}; with 'stepping: threads' slots wait concurrently (docs/slow-environments.md); "
            f'for a permanent choice, set stepping = "threads" in {name}'
        )
    return f'note: {measured}; threads do not help with that, but {name} sets stepping = "threads"; remove it'


def _compare_with_loop(env: Any, make: Any, maker: Any, kwargs: dict[str, Any]) -> str:
    """Compare sampled episodes with a plain loop, and return what was compared."""
    from maml_rl.envs.calls import time_limit
    from maml_rl.samplers.plain_loop import compare_with_loop

    limits = [time_limit(env), getattr(env.unwrapped, "max_episode_steps", None), _MOST_COMPARED_STEPS]
    most = min(limit for limit in limits if limit is not None)
    return compare_with_loop(maker, make, env_kwargs=kwargs, max_episode_steps=most)


def _usage(env: Any, name: str) -> str:
    from maml_rl.envs.calls import time_limit
    from maml_rl.policies import get_policy_for_env

    # A class has no id that a config could name.
    arguments = [repr(name) if env.spec is not None else name.rpartition(":")[2]]
    remarks = []
    if time_limit(env) is None and getattr(env.unwrapped, "max_episode_steps", None) is None:
        arguments.append("max_episode_steps=...")
        remarks.append("it has no time limit of its own")
    try:
        get_policy_for_env(env, hidden_sizes=(1,))
    except TypeError as error:
        arguments.append("policy=...")
        remarks.append(f"the policy must be your own, since the package has {error}")
    text = f"MultiTaskSampler({', '.join([*arguments, '...'])}) samples it"
    return "; ".join([text, *remarks])


def _make_env(name: str, kwargs: dict[str, Any]) -> Any:
    import gymnasium

    from maml_rl.envs.calls import Awaited, async_methods, needs_loop
    from maml_rl.envs.registration import find_spec

    with UsersCode(lambda error: ConfigError(f"{name} cannot be made: {explain(error)}")):
        maker = _maker(name)
        make = (
            partial(gymnasium.make, find_spec(maker).id, **kwargs)
            if isinstance(maker, str)
            else partial(maker, **kwargs)
        )
        try:
            env = make()
        except RuntimeError as error:
            if not needs_loop(error):
                raise
            return Awaited.made(make)
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"{name} makes {type(env).__name__}, which is not a gymnasium.Env; derive it from that")
    return Awaited(env) if async_methods(env) else env


def _maker(name: str) -> Any:
    """Return the class or function of the name `module:Class`; any other name as it is."""
    from maml_rl.envs.registration import import_module_of

    module, _, attribute = name.rpartition(":")
    found = getattr(import_module_of(module, name), attribute, None) if module else None
    return found if callable(found) else name


def measure_waiting(env: Any) -> tuple[float, float]:
    """Return the seconds that a step takes, and the share of them that it waits of its own accord.

    On Linux, a step that waits for a core because other processes have it does not count as waiting: threads would not
    make it faster.

    Args:
        env: a `gymnasium.Env`, which is reset and stepped with random actions, for a second or two.
    """
    env.action_space.seed(0)
    env.reset(seed=0)
    wall: list[float] = []
    waiting: list[float] = []
    while len(wall) < _MEASURED_STEPS and sum(wall) < _MEASURED_SECONDS:
        action = env.action_space.sample()
        began, busy, waits = _clocks()
        _, _, terminated, truncated, _ = env.step(action)
        ended, busy_since, waits_since = _clocks()
        wall.append(ended - began)
        has_waited = waits is None or waits_since != waits
        waiting.append(max(0.0, wall[-1] - (busy_since - busy)) if has_waited else 0.0)
        if terminated or truncated:
            env.reset()
    # Medians, because on a busy machine a few steps take long for other reasons.
    seconds = median(wall)
    return seconds, min(1.0, median(waiting) / seconds)


def _clocks() -> tuple[float, float, int | None]:
    """Return the seconds now, those that were computed or spent in a queue, and how often the thread gave up the core.

    The last is None where the system does not say.
    """
    try:
        # The thread could have run, and another had the core.
        queueing = 1e-9 * int(_THREAD.joinpath("schedstat").read_bytes().split()[1])
        (line,) = (line for line in _THREAD.joinpath("status").read_bytes().splitlines() if line.startswith(_WAITS))
        waits = int(line.split()[1])
    except (OSError, ValueError, IndexError):
        queueing, waits = 0.0, None
    return perf_counter(), process_time() + queueing, waits
