"""Why a curve is flat: causes that the metrics of a run show, the most likely first, each with a setting to try.

Every cause has a weight. What explains other symptoms has more: without a reward there is no signal either, and a
policy that does not move cannot get better. A cause that the metrics only hint at has less. A return that has clearly
risen, or is the greatest possible one, is not flat: then only adaptation can be at fault, or a collapse.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from maml_rl.config.config import Config
from maml_rl.envs import FAMILIES
from maml_rl.results.comparable import Run
from maml_rl.results.evaluation import possible_ranges
from maml_rl.runs.metrics import return_keys

Values = NDArray[np.float64]

# Mean divergences of one meta-update, in nats: below the first the policy hardly moves, above the second it jumps.
_STANDS_STILL, _JUMPS = 1e-5, 0.1
# Entropy in nats of discrete actions that are always the same; and a share of the first deviation of continuous ones.
_NO_ENTROPY, _NO_DEVIATION = 0.05, 0.1
# A last layer this many times its usual size begins with extreme actions; usual entropy coefficients are 0.001 to 0.05.
_LARGE_OUTPUT, _LARGE_COEFFICIENT = 5.0, 0.1
# Share of the possible returns within which a return is the least or the greatest one.
_AT_AN_END = 0.02
# Fewer tasks, or fewer episodes of all tasks, give mostly noise.
_FEW_TASKS, _FEW_EPISODES = 5, 40
# Standard errors from which on a difference is one.
_CLEAR = 2.0
# With fewer iterations there is no trend.
_FEW_ITERATIONS = 10


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that keeps a curve flat.

    Attributes:
        name: as in docs/flat-curves.md.
        weight: in [0, 1], how likely it is the first cause.
        seen: the sentence about what the metrics show.
        remedy: what to try.
    """

    name: str
    weight: float
    seen: str
    remedy: str


def diagnose(run: Run) -> list[Cause]:
    """Return the causes that the metrics of a run show, the most likely first; none where nothing stands out."""
    if not run.metrics:
        return []
    series = _Series(run)
    checks = () if series.is_best else _ALWAYS if series.rises else (*_ALWAYS, *_IF_FLAT)
    causes = [cause for check in checks for cause in check(series)]
    return sorted(causes, key=lambda cause: -cause.weight)


class _Series:
    """The metrics of a run by name.

    Attributes:
        run: the run.
        before: (n,) return before adaptation, in each iteration; empty for a learner that samples nothing.
        after: (n,) return after adaptation.
        possible: the least and greatest return of an episode; infinite where they are not known.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        keys = return_keys(run.metrics[0])
        self.before, self.after = (self[keys[0]], self[keys[-1]]) if keys else (np.zeros(0), np.zeros(0))
        self.adapts = len(keys) > 1
        self.possible = _possible_returns(run.config)

    def __getitem__(self, key: str) -> Values:
        """Return the finite values of a metric."""
        values = [row.get(key) for row in self.run.metrics]
        numbers = np.array([value for value in values if isinstance(value, int | float)], np.float64)
        return numbers[np.isfinite(numbers)]

    def has(self, key: str) -> bool:
        """Return whether any iteration has this metric."""
        return len(self[key]) > 0

    def with_value(self, key: str, form: str = "g") -> str:
        """Return a setting of the algorithm with its value, in a format of numbers: "max-kl (now 0.01)"."""
        value = self.run.config.algorithm_settings.get(key)
        return f"{key} (now {value:{form}})" if isinstance(value, int | float) else key

    @property
    def trend(self) -> tuple[float, float]:
        """How much the return after adaptation has risen from the first third to the last, and the standard error."""
        third = max(len(self.after) // 3, 1)
        return float(self.after[-third:].mean() - self.after[:third].mean()), self.noise * math.sqrt(2.0 / third)

    @property
    def noise(self) -> float:
        """Deviation of the return from one iteration to the next."""
        return float(np.std(np.diff(self.after))) / math.sqrt(2.0) if len(self.after) > 2 else math.inf

    @property
    def rises(self) -> bool:
        """Whether the return has clearly risen."""
        if len(self.after) < _FEW_ITERATIONS:
            return False
        rise, error = self.trend
        return rise > _CLEAR * error

    @property
    def is_best(self) -> bool:
        """Whether the return after adaptation is the greatest possible one in the second half of the run."""
        low, high = self.possible
        if not len(self.after) or not math.isfinite(high):
            return False
        width = high - (low if math.isfinite(low) else min(float(self.before.min()), high))
        return float(_late(self.after).mean()) >= high - _AT_AN_END * width

    def is_least(self, value: float) -> bool:
        """Whether a return is one without any reward: the least possible one, or none above 0 where that is unknown."""
        low, high = self.possible
        if not math.isfinite(low):
            return value <= 0.0 and value < high
        return value <= low + (_AT_AN_END * (high - low) if math.isfinite(high) else 0.0)


def _possible_returns(config: Config) -> tuple[float, float]:
    """Return the least and greatest return of an episode; those of families outside the package are not known."""
    family = FAMILIES.get(config.env_name)
    if family is None:
        return -math.inf, math.inf
    made = getattr(import_module(family.module), f"{family.name}VectorEnv", None)
    if made is not None and not family.has_physics and not family.extra:
        # Some arguments change rewards, or the number of steps; an edited config may have others.
        with suppress(TypeError, ValueError):
            made = made(1, **{**family.kwargs, **config.env_kwargs})
    limits = (
        config.max_episode_steps,
        config.env_kwargs.get("max_episode_steps"),
        getattr(made, "longest_episode", None),
    )
    longest = filter(None, limits)
    steps = min(longest, default=family.max_episode_steps)
    return possible_ranges(getattr(made, "value_ranges", {}), steps).get("return", (-math.inf, math.inf))


def _late(values: Values) -> Values:
    """Return the values of the second half of the run."""
    return values[len(values) // 2 :]


def _mean(values: Values) -> float:
    return float(values.mean()) if len(values) else 0.0


def _no_reward(series: _Series) -> Iterator[Cause]:
    if len(series.after) < 2:
        return
    values, counts = np.unique(np.concatenate([series.before, series.after]), return_counts=True)
    share = counts.max() / counts.sum()
    # A batch without any reward, and most tasks without a signal: rewards are rare.
    is_rare = 0.0 in values and counts.sum() > 2 and _mean(series["no_signal"]) > 0.5
    if (share > 0.8 or is_rare) and series.is_least(float(values[counts.argmax()])):
        yield Cause(
            "no reward",
            max(share, 0.97),
            f"{share:.0%} of the mean returns are exactly {values[counts.argmax()]:g}: hardly an episode gets a reward",
            "let episodes reach one: a larger max-episode-steps, more exploration (output-scale 1, an "
            "entropy-coefficient), more episodes (fast-batch-size), or a family with dense rewards first (--init RUN)",
        )


def _no_update(series: _Series) -> Iterator[Cause]:
    updates = series["updates"]
    if len(updates) and not updates.any():
        key = "warmup-trials" if "warmup-trials" in series.run.config.algorithm_settings else "warmup-steps"
        yield Cause(
            "no update",
            0.99,
            f"not one update was made in {len(updates)} iterations",
            f"a smaller {series.with_value(key, ',.0f')}, or a longer run (num-batches)",
        )


def _no_signal(series: _Series) -> Iterator[Cause]:
    share = _mean(series["no_signal"])
    if share > 0.3:
        yield Cause(
            "no signal",
            0.6 + 0.38 * share,
            f"{share:.0%} of the tasks give no signal: all their episodes get the same rewards, so advantages are zero",
            f"more episodes of each task (fast-batch-size, now {series.run.config.fast_batch_size}), more exploration "
            "(output-scale 1), or a baseline that fits less (baseline zero)",
        )


def _line_search(series: _Series) -> Iterator[Cause]:
    if not series.has("accepted"):
        return
    share = 1.0 - float(series["accepted"].mean())
    if share > 0.3:
        yield Cause(
            "line search",
            0.5 + 0.45 * share,
            f"the line search refuses {share:.0%} of the meta-updates",
            f"a smaller {series.with_value('max-kl')}, more tries: a larger {series.with_value('ls-max-steps')}, "
            "cg-damping 0.1, or more episodes (meta-batch-size)",
        )


def _inner_step(series: _Series) -> Iterator[Cause]:
    if not series.adapts or series.run.config.method != "maml":
        return
    gain = _late(series.after - series.before)
    error = float(np.std(gain, ddof=1)) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
    takes_steps = return_keys(series.run.metrics[0])[-1].rpartition("/")[2].startswith("step")
    scale = float(np.abs(_late(series.before)).mean())
    if takes_steps and gain.mean() < -_CLEAR * error and gain.mean() < -0.05 * scale:
        yield Cause(
            "inner step too large",
            0.88,
            f"adaptation makes policies worse: the return falls from {_late(series.before).mean():.4g} to "
            f"{_late(series.after).mean():.4g}",
            f"a smaller fast-lr (now {series.run.config.fast_lr:g}): a tenth of it",
        )
    elif math.isfinite(error) and not gain.mean() > max(_CLEAR * error, 0.01 * scale):
        seen = f"adaptation changes the return by {gain.mean():.3g}, with a standard error of {error:.2g}"
        if takes_steps:
            yield Cause(
                "adaptation does nothing",
                0.55 if series.rises else 0.72,
                seen,
                f"a larger fast-lr (now {series.run.config.fast_lr:g}): ten times it; more episodes before each step "
                "(fast-batch-size), or more steps (num-steps)",
            )
        elif not series.rises:
            yield Cause(
                "adaptation does nothing",
                0.55,
                f"{seen}: the policy does not use what it has seen of the task",
                "a larger hidden-size or context, more episodes of a trial (fast-batch-size), a longer run; PEARL: a "
                "smaller kl-weight, a larger context-batch",
            )


def _size(series: _Series) -> str:
    """Return the setting on which the size of an update depends."""
    known = "max-kl" if series.has("accepted") else "learning-rate", "meta-step-size"
    return next((key for key in known if key in series.run.config.algorithm_settings), known[0])


def _size_of_updates(series: _Series) -> Iterator[Cause]:
    # That of PEARL's replay learners is the divergence of its posterior.
    kl = np.zeros(0) if series.has("replay/steps") else series["kl"]
    accepted = series["accepted"]
    kl = kl[accepted > 0.0] if len(accepted) == len(kl) else kl
    key = _size(series)
    # A policy that jumps at the beginning may stand still for the rest of the run.
    usual = float(np.median(kl)) if len(kl) else math.nan
    early = float(kl[: max(len(kl) // 4, 1)].max(initial=0.0))
    if usual > _JUMPS or early > 2.0 * _JUMPS:
        yield Cause(
            "updates too large",
            0.87,
            f"a meta-update moves the policy by {usual:.2g} nats, one of the first by {early:.2g}; 0.001 to 0.05 is "
            "usual",
            f"a smaller {series.with_value(key)}: a tenth of it; fewer num-epochs, a smaller clip",
        )
    elif usual < _STANDS_STILL:
        yield Cause(
            "updates too small",
            0.8,
            f"a meta-update moves the policy by {usual:.1e} nats, where 0.001 to 0.05 is usual",
            f"a larger {series.with_value(key)}: ten or a hundred times it, or more steps on each batch",
        )


def _collapse(series: _Series) -> Iterator[Cause]:
    if len(series.after) >= _FEW_ITERATIONS:
        key = _size(series)
        smooth = np.convolve(series.after, np.ones(5) / 5.0, "valid")
        rise, fall = smooth.max() - smooth[0], smooth.max() - smooth[-1]
        if fall > 0.5 * rise and fall > 3.0 * _CLEAR * series.noise / math.sqrt(5.0):
            yield Cause(
                "updates too large",
                0.7,
                f"the return collapses from {smooth.max():.4g} to {smooth[-1]:.4g}",
                f"a smaller {series.with_value(key)}; --checkpoint best has the policy before it",
            )


def _entropy(series: _Series) -> Iterator[Cause]:
    if series.has("policy/std"):
        first, last = series["policy/std"][0], float(_late(series["policy/std"]).mean())
        gone, what = last < _NO_DEVIATION * first or last < 0.01, f"the actions' standard deviation is {last:.2g}"
    else:
        key = "policy/entropy" if series.has("policy/entropy") else "entropy"
        if not series.has(key):
            return
        last = float(_late(series[key]).mean())
        # Soft actor-critics with continuous actions have negative entropies, too.
        gone, what = 0.0 <= last < _NO_ENTROPY, f"the entropy of the actions is {last:.2g} nats"
    if gone:
        yield Cause(
            "no exploration",
            0.86,
            f"{what}: the policy does not explore any more",
            "a larger entropy-coefficient (rl2, varibad: 0.01) or target-entropy (pearl, rsac), a smaller "
            "learning-rate or max-kl, and output-scale 1 or less",
        )


def _too_much_exploration(series: _Series) -> Iterator[Cause]:
    scale = series.run.config.output_scale
    if scale is not None and scale > _LARGE_OUTPUT:
        yield Cause(
            "actions too large",
            0.79,
            f"the last layer of the policy is {scale:g} times its usual size, so the first actions are extreme ones",
            "output-scale 1 or less",
        )
    coefficient = series.run.config.algorithm_settings.get("entropy-coefficient")
    entropy = next((series[key] for key in ("policy/entropy", "entropy") if series.has(key)), np.zeros(0))
    stays = not len(entropy) or float(_late(entropy).mean()) > 0.95 * float(entropy[0])
    if isinstance(coefficient, int | float) and coefficient > _LARGE_COEFFICIENT and stays:
        seen = f", and the entropy stays high: {entropy[0]:.2g}, then {_late(entropy).mean():.2g} nats" * bool(
            len(entropy)
        )
        yield Cause(
            "too much exploration",
            0.85,
            f"the entropy coefficient is {coefficient:g}, where 0.001 to 0.05 is usual{seen}",
            "a smaller entropy-coefficient: a hundredth of it, or 0",
        )


def _values(series: _Series) -> Iterator[Cause]:
    if series.has("explained_variance"):
        share = float(np.median(_late(series["explained_variance"])))
        if share < 0.1:
            yield Cause(
                "values do not fit",
                0.76,
                f"the values explain {share:.0%} of the variance of the returns",
                f"a larger {series.with_value('value-coefficient')}, value: network, more "
                "num-epochs, or more trials (meta-batch-size)",
            )
    losses = series["loss/critics"]
    if len(losses) >= _FEW_ITERATIONS:
        early, late = np.median(losses[: len(losses) // 2]), np.median(losses[-len(losses) // 4 :])
        if late > 10.0 * early:
            yield Cause(
                "values do not fit",
                0.78,
                f"the critics' loss grows from {early:.2g} to {late:.2g}",
                "a smaller learning-rate, reward-scale or gamma, and a smaller tau",
            )


def _imitation(series: _Series) -> Iterator[Cause]:
    losses = series["loss"]
    if len(series.after) or len(losses) < 2:
        return
    early, late = losses[0], float(_late(losses).mean())
    if late > 0.95 * early:
        yield Cause(
            "updates too small",
            0.8,
            f"the loss stays where it began: {early:.3g}, then {late:.3g}",
            f"a larger {series.with_value('learning-rate')}, a shorter "
            f"{series.with_value('warmup', '')}, a longer run, or histories whose learner improves (maml-rl record)",
        )


def _noise(series: _Series) -> Iterator[Cause]:
    if len(series.after) < 3:
        return
    config = series.run.config
    episodes = config.meta_batch_size * config.fast_batch_size
    rise, error = series.trend
    moves = (
        f"the return scatters by {series.noise:.3g} from one iteration to the next, and moves by {rise:.3g} ± "
        f"{error:.2g} over the run"
    )
    if config.meta_batch_size < _FEW_TASKS or episodes < _FEW_EPISODES:
        yield Cause(
            "too few tasks",
            0.74 if config.meta_batch_size < _FEW_TASKS else 0.6,
            f"an update sees {config.meta_batch_size} tasks with {config.fast_batch_size} episodes each; {moves}",
            "a larger meta-batch-size (20 to 40) or fast-batch-size",
        )
    elif len(series.after) < _FEW_ITERATIONS:
        yield Cause(
            "too short",
            0.4,
            f"{len(series.after)} iterations are too few for a trend",
            "a longer run: num-batches",
        )
    elif abs(rise) < _CLEAR * error:
        yield Cause(
            "noise",
            0.3,
            moves,
            "a larger meta-batch-size, a longer run, and evaluations on the same tasks (evaluate-every)",
        )


# Also for a return that rises.
_ALWAYS: Sequence[Callable[[_Series], Iterator[Cause]]] = (_no_update, _inner_step, _collapse, _imitation)
_IF_FLAT: Sequence[Callable[[_Series], Iterator[Cause]]] = (
    _no_reward,
    _no_signal,
    _line_search,
    _size_of_updates,
    _entropy,
    _too_much_exploration,
    _values,
    _noise,
)
