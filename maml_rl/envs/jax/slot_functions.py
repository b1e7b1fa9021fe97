"""The functions of one environment in JAX, compiled for any number of slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from maml_rl.envs.global_generators import KeptGenerators
from maml_rl.envs.meta_env import RecordedInfos
from maml_rl.errors import ConfigError, UsersCode, explain
from maml_rl.machine import forked_from_jax, sharing_gpus
from maml_rl.spaces import PackedSpace, array_layout, array_writer, category_counts, leaves, limits_of, value_at

Tree = Any
_as_32_bits = jax.dtypes.canonicalize_dtype
Functions = tuple[Callable[..., Any], Callable[..., Any]]
# Settings of JAX that decide which numbers a key gives, as they are by default; workers know of no others that a
# program sets.
_SETTINGS = {"jax_threefry_partitionable": True, "jax_default_prng_impl": "threefry2x32", "jax_enable_x64": False}
_REMEDIES = {
    "Tracer": "; a function of JAX has no if, while or int() of its arrays: write jnp.where, jax.lax.cond or scan",
    "UnexpectedTracer": "; a function must not keep what it computes anywhere: return it as part of the state",
}


class Carry(NamedTuple):
    """What N slots carry from step to step; None where the family never has it.

    Attributes:
        keys: (N, 2) uint32, of the episodes.
        steps: (N,) int32, that their episodes have done.
        truncated: (N,) bool, whether the environment itself has cut the episode short.
        faults: (N, 3) int32, of the first observation outside of its space: 1 + the number of the part (0: none), a
            number that is outside, the step.
        state: the leaves (N, ...) of the environments' own. As a list they reach a compiled function faster than as the
            classes of a package.
    """

    keys: Any
    steps: Any
    truncated: Any
    faults: Any
    state: list[Any]


class Outcome(NamedTuple):
    """What a step of N slots returns besides what they carry.

    Attributes:
        observations: (N, *obs).
        rewards: (N,); in slots that were not stepped, of no meaning, as infos.
        terminated: (N,) bool; None if the family never terminates.
        infos: recorded ones by name, (N,).
    """

    observations: Any
    rewards: Any
    terminated: Any
    infos: dict[str, Any]


@contextmanager
def _watched(name: str) -> Iterator[None]:
    """Make one error of what a user's function raises, which runs only to be traced, and refuse draws from generators.

    Tracing would draw once for all episodes.
    """
    # They may have changed since the slots were made, as what is traced again then shows.
    _check_settings()

    def failed(error: BaseException) -> Exception:
        remedy = next((text for kind, text in _REMEDIES.items() if type(error).__name__.startswith(kind)), "")
        return TypeError(f"{name} of the family cannot be compiled: {explain(error)}{remedy}")

    with UsersCode(failed), KeptGenerators() as kept:
        yield
        if drawn := [each for each in kept.drawn() if each != "random"]:
            raise TypeError(
                f"it draws from {' and '.join(drawn)}, once for all episodes; draw by jax.random from its key"
            )


class SlotFunctions:
    """`reset` and `step` of one environment as functions of N slots, which are compiled once for each N.

    An episode's key is made of its seed alone, and that of a step of the episode's key and the number of the step, so
    that nothing depends on other slots. Slots that are not stepped keep their state: a mask is an argument, and no
    other function is compiled for it.

    Args:
        functions: `reset` and `step`; see `JaxFamily`.
        observation_space: of one environment; None for that of what `reset` returns.
        action_space: of one environment.
        tasks: an example, arrays (1, ...) by entry.
        recorded_infos: which infos are returned.

    Attributes:
        space: of the observations as arrays; see `maml_rl.spaces`.
        dtypes: of the entries of a task.
    """

    def __init__(
        self,
        functions: Functions,
        observation_space: spaces.Space[Any] | None,
        action_space: spaces.Space[Any],
        tasks: Mapping[str, NDArray[Any]],
        recorded_infos: RecordedInfos,
    ) -> None:
        self._reset, self._step = functions
        self._actions, self._infos = action_space, tuple(recorded_infos)
        self.dtypes = {name: array.dtype for name, array in tasks.items()}
        key = jax.eval_shape(lambda: _key(jnp.zeros(2, jnp.uint32)))
        task = {name: jax.ShapeDtypeStruct(a.shape[1:], _as_32_bits(a.dtype)) for name, a in tasks.items()}
        shape, dtype = array_layout(action_space)
        action = jax.ShapeDtypeStruct(shape, _as_32_bits(dtype))
        own = observation_space
        if own is None:
            with _watched("reset"):
                own = _space_of(_pair(jax.eval_shape(self._reset, key, task))[1])
        self.space = array_writer(own).flat_space
        self._parts = list(leaves(self.space.own if isinstance(self.space, PackedSpace) else own))
        # Known once the functions have been traced, which happens once for all numbers of slots.
        self._has_bounds = False
        self._begin_one = jax.jit(self._begin_one, inline=True)  # type: ignore[method-assign]
        self._step_one = jax.jit(self._step_one, inline=True)  # type: ignore[method-assign]
        state, _, _ = jax.eval_shape(self._begin_one, key, task)
        *_, truncated, _, _ = jax.eval_shape(self._step_one, key, state, action, task)
        self._truncates = truncated is not None
        self.begin = jax.jit(jax.vmap(self._begin))
        self.begin_some = jax.jit(jax.vmap(self._begin_some), donate_argnums=4)
        self.advance = jax.jit(jax.vmap(self._advance), donate_argnums=0)

    @_watched("reset")
    def _begin_one(self, key: Any, task: Tree) -> tuple[Tree, Any, Any]:
        state, observation = _pair(self._reset(key, task))
        leaves_of, self._structure = jax.tree.flatten(state)
        self._key_impls = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves_of]
        return list(map(_plain, leaves_of)), *self._as_array(observation)

    @_watched("step")
    def _step_one(self, key: Any, own: list[Any], action: Any, task: Tree) -> Any:
        keyed = zip(own, self._key_impls, strict=True)
        before = [leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl) for leaf, impl in keyed]
        result = self._step(key, jax.tree.unflatten(self._structure, before), action, task)
        if not isinstance(result, tuple | list) or len(result) != 6:
            raise TypeError(
                "step must return state, observation, reward, terminated, truncated and a dict of infos, got "
                f"{type(result).__name__} of {len(result) if hasattr(result, '__len__') else 1}"
            )
        new, observation, reward, *ends, infos = result
        for name in self._infos:
            if name not in infos:
                raise TypeError(f"the info {name!r} is in recorded_infos, and step returns {sorted(infos)}")
        numbers = {name: _number(name, infos[name]) for name in self._infos}
        flags = [_number(name, end) for name, end in zip(("terminated", "truncated"), ends, strict=True)]
        if any(flag.dtype != np.bool_ for flag in flags):
            raise TypeError(f"terminated and truncated must be bool, got {flags[0].dtype} and {flags[1].dtype}")
        # An end that never occurs is no array.
        flags = [None if end is False else flag for end, flag in zip(ends, flags, strict=True)]
        array, fault = self._as_array(observation)
        return self._same_kind(new, before), array, _number("reward", reward), *flags, fault, numbers

    def _same_kind(self, new: Tree, before: list[Any]) -> list[Any]:
        """Return the leaves of a state after a step, of the types of those before it.

        The step may have written into the state that it was given.
        """
        if jax.tree.structure(new) != self._structure:
            raise TypeError(f"step returns a state {jax.tree.structure(new)}, and reset {self._structure}")
        for (path, after), old in zip(jax.tree.leaves_with_path(new), before, strict=True):
            after = jnp.asarray(after)
            if after.shape != old.shape or after.dtype != old.dtype:
                raise TypeError(
                    f"state{jax.tree_util.keystr(path)} is {after.dtype}{list(after.shape)} after a step, and "
                    f"{old.dtype}{list(old.shape)} before it; both must be of one shape and type"
                )
        return list(map(_plain, jax.tree.leaves(new)))

    def _as_array(self, observation: Tree) -> tuple[Any, Any]:
        """Return an observation as an array of `self.space`, and its fault (2,); see `Carry`."""
        arrays, fault, packs = [], jnp.zeros(2, jnp.int32), isinstance(self.space, PackedSpace)
        for number, (path, part) in enumerate(self._parts, 1):
            shape, dtype = array_layout(part)
            value = jnp.asarray(value_at(observation, path))
            # Whole numbers are checked by value, whatever their type.
            whole = jnp.issubdtype(value.dtype, jnp.integer) and dtype.kind in "iu"
            if value.shape != shape or not (whole or np.can_cast(value.dtype, dtype, "same_kind")):
                where = "".join(f"[{key!r}]" for key in path)
                raise TypeError(
                    f"the observation{where} has the shape {value.shape} and dtype {value.dtype}; its space is {part}"
                )
            outside, shown = _outside(part, value, finite=packs)
            if outside is not None:
                self._has_bounds = True
                fault = jnp.where((fault[0] == 0) & outside, jnp.stack([jnp.int32(number), shown]), fault)
            if part is self.space:
                return value.astype(_as_32_bits(dtype)), fault
            arrays.append(_bytes(value, dtype) if packs else _vector(part, value))
        return jnp.concatenate(arrays).astype(_as_32_bits(self.space.dtype)), fault

    # The next three are of one slot.
    def _begin(self, words: Any, place: Any, task: Tree) -> tuple[Carry, Any]:
        key = jax.random.fold_in(_key(jax.lax.bitcast_convert_type(words, jnp.uint32)[::-1]), place)
        state, observation, fault = self._begin_one(jax.random.fold_in(key, 0), self._cast(task))
        step = jnp.int32(0)
        truncated, fault = step > 0 if self._truncates else None, self._at(step, fault)
        return Carry(jax.random.key_data(key), step, truncated, fault, state), observation

    def _begin_some(
        self, chosen: Any, words: Any, place: Any, task: Tree, carry: Carry, observation: Any
    ) -> tuple[Carry, Any]:
        begun: tuple[Carry, Any] = _where(chosen, self._begin(words, place, task), (carry, observation))
        return begun

    def _advance(self, carry: Carry, observation: Any, action: Any, active: Any, task: Tree) -> tuple[Carry, Outcome]:
        if isinstance(self._actions, spaces.Box):
            action = jnp.clip(action, self._actions.low, self._actions.high)
        step = carry.steps + 1
        key = jax.random.fold_in(_key(carry.keys), step)
        state, seen, reward, terminated, truncated, fault, infos = self._step_one(
            key, carry.state, action, self._cast(task)
        )
        if (fault := self._at(step, fault)) is not None:
            fault = jnp.where(carry.faults[0] > 0, carry.faults, fault)
        new = Carry(carry.keys, step, truncated, fault, state)
        carry, observation = _where(active, (new, seen), (carry, observation))
        return carry, Outcome(observation, reward, terminated, infos)

    def _at(self, step: Any, fault: Any) -> Any:
        """Return a fault with its step, (3,); None where nothing can be outside of its space."""
        return jnp.append(fault, step) if self._has_bounds else None

    def _cast(self, task: Tree) -> Tree:
        return {name: task[name].astype(_as_32_bits(dtype)) for name, dtype in self.dtypes.items()}

    def describe_fault(self, faults: NDArray[np.int32]) -> str:
        """Return the first fault (N, 3) in words; "" if there is none."""
        if not faults[:, 0].any():
            return ""
        slot = int(np.argmax(faults[:, 0] > 0))
        number, shown, step = faults[slot].tolist()
        path, part = self._parts[number - 1]
        where = " at " + "".join(f"[{key!r}]" for key in path) if path else ""
        what = "numbers that are not finite" if np.issubdtype(part.dtype, np.floating) else f"{shown}"
        return f"slot {slot}, step {step}: an observation with {what}{where}, outside of its space {part}"


def begin_jax(platform: str) -> Any:
    """Return the device for the arrays of slots, and begin to use JAX, if nothing has yet, in its usual settings.

    Args:
        platform: "cpu" or "cuda".
    """
    if forked_from_jax():
        raise ConfigError(
            "this process was forked from one that had used JAX, where JAX would hang; start it by forkserver or spawn"
        )
    _check_settings()
    try:
        with sharing_gpus():
            return jax.devices(platform)[0]
    # If none of those that it may use is there, an assertion fails.
    except (RuntimeError, AssertionError) as error:
        if platform == "cpu":
            told = f"JAX must not use the CPU ({explain(error)}); leave out JAX_PLATFORMS, or add cpu to it"
        else:
            told = (
                f"torch has a GPU, and JAX sees none ({explain(error)}); install its build for GPUs, as in pip install "
                "'jax[cuda12]', or use the CPU: device='cpu'"
            )
        raise ConfigError(told) from error


def _check_settings() -> None:
    for name, usual in _SETTINGS.items():
        if (value := getattr(jax.config, name)) != usual:
            shown = {True: "on", False: "off"}.get(value, value)
            raise ConfigError(
                f"{name} is {shown}, with which the same keys give other numbers; leave it at its default, or make the "
                f"sampler and sample, without prefetch, within 'with jax.{name.removeprefix('jax_')}({usual!r}):'"
            )


def _key(data: Any) -> Any:
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def _pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"reset must return state and observation, got {type(result).__name__}")
    return result[0], result[1]


def _number(name: str, value: Any) -> Any:
    array = jnp.asarray(value)
    if array.shape != ():
        raise TypeError(f"{name} must be one number, as of one environment, got the shape {array.shape}")
    return array


def _is_key(value: Any) -> bool:
    return bool(jnp.issubdtype(jnp.asarray(value).dtype, jax.dtypes.prng_key))


def _plain(value: Any) -> Any:
    """Return a leaf of a state without a weak type, and the words of keys, which leave a compiled function faster."""
    array = jnp.asarray(value)
    return jax.random.key_data(array) if _is_key(array) else jax.lax.convert_element_type(array, array.dtype)


def _where(chosen: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(partial(jnp.where, chosen), new, old)


def _space_of(seen: Tree) -> spaces.Space[Any]:
    """Return the space of observations for their shapes and types."""
    if isinstance(seen, Mapping):
        return spaces.Dict({name: _space_of(part) for name, part in seen.items()})
    if isinstance(seen, Sequence):
        return spaces.Tuple([_space_of(part) for part in seen])
    if seen.dtype == np.bool_:
        return spaces.MultiBinary(seen.shape)
    if not np.issubdtype(seen.dtype, np.floating):
        raise TypeError(f"observations are {seen.dtype}; give observation_space, with the bounds of these numbers")
    return spaces.Box(-np.inf, np.inf, seen.shape, seen.dtype)


def _outside(part: spaces.Space[Any], value: Any, *, finite: bool) -> tuple[Any, Any]:
    """Return whether a part has numbers outside of its space, and one of them; None if it cannot have any."""
    if value.dtype == np.bool_:
        return None, None
    if jnp.issubdtype(value.dtype, jnp.floating):
        return (~jnp.isfinite(value).all(), jnp.int32(0)) if finite else (None, None)
    low, high = (np.asarray(limit) for limit in limits_of(part))
    info = np.iinfo(value.dtype)
    if (low <= info.min).all() and (high >= info.max).all():
        return None, None
    least, most = (np.clip(limit, info.min, info.max).astype(value.dtype) for limit in (low, high))
    outside = (value < least) | (value > most)
    shown = jnp.where(outside, value.astype(jnp.int32), np.iinfo(np.int32).min).max()
    return outside.any(), shown


def _vector(part: spaces.Space[Any], value: Any) -> Any:
    """Return a part as `maml_rl.spaces.write_flat` writes it."""
    counts = category_counts(part)
    if not counts:
        return value.reshape(-1)
    starts = np.resize(getattr(part, "start", 0), len(counts)).tolist()
    entries = value.reshape(len(counts))
    return jnp.concatenate([jax.nn.one_hot(entries[i] - starts[i], count) for i, count in enumerate(counts)])


def _bytes(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return the bytes of an array of a type that JAX may not have."""
    kept = value.astype(_as_32_bits(dtype)).reshape(-1)
    if kept.dtype == np.bool_ or kept.dtype.itemsize == 1:
        return jax.lax.bitcast_convert_type(kept.astype(jnp.int8) if kept.dtype == np.bool_ else kept, jnp.uint8)
    words = [kept] if kept.dtype.itemsize == dtype.itemsize else [kept, kept >> 31]
    if len(words) > 1 and dtype.kind == "f":
        raise TypeError("an observation with images in it has float64 numbers, which JAX has not; use float32")
    return jnp.stack([jax.lax.bitcast_convert_type(word, jnp.uint8) for word in words], 1).reshape(-1)
