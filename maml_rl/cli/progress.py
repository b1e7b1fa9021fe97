"""Progress of training: a bar in a terminal, elsewhere a line at intervals, and a summary at the end."""

import logging
import math
from contextlib import suppress
from time import monotonic
from typing import Any, Self

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from maml_rl.envs.meta_env import SlotCounts
from maml_rl.runs.metrics import Metrics, counted_by, return_keys

logger = logging.getLogger(__name__)

_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


class _Progress:
    """A progress bar in a terminal, above which the log appears; elsewhere lines of the log, at intervals."""

    def __init__(self, seconds_between_lines: float, *, shown: bool = True, **settings: Any) -> None:
        # disable=None is off unless standard error is a terminal.
        self._bar: tqdm[Any] = tqdm(dynamic_ncols=True, disable=None if shown else True, **settings)
        self._redirected = logging_redirect_tqdm()
        self._seconds_between_lines = seconds_between_lines
        self._started = self._last_line = monotonic()

    def __enter__(self) -> Self:
        self._redirected.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._redirected.__exit__(*error)
        # A terminal that was closed must not hide why the command has ended.
        with suppress(OSError):
            self._bar.close()

    def _begins_line(self, *, has_news: bool = True) -> bool:
        """Whether it is time for a line of the log, which is then the last one."""
        now = monotonic()
        if not has_news or not self._bar.disable or now - self._last_line < self._seconds_between_lines:
            return False
        self._last_line = now
        return True

    def _left(self, done: int, remaining: int) -> str:
        """Return how long the remaining steps take at the speed of those that were done until the last line."""
        return str(tqdm.format_interval((self._last_line - self._started) / done * remaining))


class TrainingProgress(_Progress):
    """A progress bar with the returns before and after adaptation, and the steps per second of the sampling.

    Args:
        num_batches: meta-updates in all.
        name: of the run, if it is one of several.
        seconds_between_lines: how often to log a line, where standard error is no terminal.
        shown: whether there is a bar in a terminal.
    """

    def __init__(
        self, num_batches: int, name: str | None = None, seconds_between_lines: float = 30.0, *, shown: bool = True
    ) -> None:
        super().__init__(seconds_between_lines, shown=shown, desc=name, total=num_batches, bar_format=_BAR)
        self._num_batches, self._whose = num_batches, f"{name}, " if name else ""
        self._seconds: dict[str, float] = {}
        self._env_steps = 0.0
        self.first: Metrics | None = None
        self.latest: Metrics | None = None
        self._best: tuple[float, int] | None = None
        self._evaluated: Metrics | None = None

    def __call__(self, metrics: Metrics) -> None:
        """Show one more iteration."""
        if self.latest is None:
            self.first = metrics
            self._bar.update(metrics["iteration"])
        self.latest = metrics
        for key, value in metrics.items():
            if key.startswith("time/"):
                self._seconds[key] = self._seconds.get(key, 0.0) + value
        if evaluated := return_keys(metrics, evaluated=True):
            self._best = max(self._best or (-math.inf, 0), (metrics[evaluated[-1]], metrics["iteration"]))
            self._evaluated = metrics
        self._env_steps += metrics.get("time/steps_per_s", 0.0) * metrics["time/sample_s"]
        state = _state(metrics)
        self._bar.set_postfix_str(state, False)
        self._bar.update()
        if self._begins_line():
            self._log(state)

    def show_slots(self, counts: SlotCounts) -> None:
        """Show the activity of slow environments' slots, until the iteration ends; any thread may call this."""
        if not self._bar.disable:
            self._bar.set_postfix_str(str(counts))
        elif self._begins_line():
            done = 0 if self.latest is None else self.latest["iteration"] + 1
            logger.info("%siteration %d of %d: %s", self._whose, done + 1, self._num_batches, counts)

    def _log(self, state: str) -> None:
        assert self.first is not None
        assert self.latest is not None
        done = self.latest["iteration"] + 1
        left = self._left(done - self.first["iteration"], self._num_batches - done)
        logger.info("%siteration %d of %d: %s, %s left", self._whose, done, self._num_batches, state, left)

    def summary(self) -> str:
        """Return the returns of the first and the latest iteration, for the end of a run."""
        if self.first is None or self.latest is None:
            return "no iteration was left to do"
        ends = [self.first] if self.first is self.latest else [self.first, self.latest]
        lines = [f"iteration {metrics['iteration']:>5}: {_in_words(metrics)}" for metrics in ends]
        count = self.latest["iteration"] - self.first["iteration"] + 1
        sample, update = (self._seconds[key] / count for key in ("time/sample_s", "time/update_s"))
        sampling = ""
        if sample > 0.0:
            speed = self._env_steps / (sample * count)
            sampling = f"{sample:.2f} s of sampling, at {speed:,.0f} steps/s, and "
        lines.append(f"each iteration took {sampling}{update:.2f} s of updating")
        if self._evaluated is not None:
            lines.append(
                f"evaluated after {self._evaluated['iteration'] + 1} iterations: " + _by_column(self._evaluated)
            )
        if self._best is not None:
            value, iteration = self._best
            lines.append(
                f"the best evaluation was after {iteration + 1} iterations: return {value:.1f} after "
                "adaptation (--checkpoint best)"
            )
        return "\n".join(lines)

    def profile(self) -> str:
        """Return the mean share of every stage as a table of text."""
        if self.first is None or self.latest is None:
            return ""
        count = self.latest["iteration"] - self.first["iteration"] + 1
        prefix = "time/share/"
        shares = {key.removeprefix(prefix): self._seconds[key] / count for key in self._seconds if prefix in key}
        rows = sorted(shares.items(), key=lambda entry: -entry[1])
        return "\n".join(f"{stage:>12}  {share:6.1%}" for stage, share in rows)


class StepProgress(_Progress):
    """A progress bar over the steps of a command: policies of a report to evaluate, iterations to record.

    Args:
        unit: of the steps.
        seconds_between_lines: how often to log a line, where standard error is no terminal.
    """

    def __init__(self, unit: str = "step", seconds_between_lines: float = 30.0) -> None:
        super().__init__(seconds_between_lines, total=1, unit=unit)
        self._unit = unit
        self._first: int | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show the next step, after `done` of `total` steps."""
        self._bar.total = total
        self._bar.set_description_str(what, False)
        self._bar.update(done - self._bar.n)
        self._bar.refresh()
        # A command that continues has done some before.
        self._first = done if self._first is None else self._first
        if self._begins_line(has_news=done > self._first):
            left = self._left(done - self._first, total - done)
            logger.info("%s: %s %d of %d is done, %s left", what, self._unit, done, total, left)


def _returns(metrics: Metrics) -> list[float]:
    """Return the mean returns from before adaptation to after it; a single one where training does not adapt."""
    return [metrics[key] for key in return_keys(metrics)]


def _by_column(metrics: Metrics) -> str:
    """Return the mean returns of an evaluation, from the first column to the last."""
    keys = return_keys(metrics, evaluated=True)
    shown = "return " + ", ".join(f"{metrics[key]:.1f}" for key in keys)
    if len(keys) == 1:
        return shown
    counted, last = counted_by(keys[0]), len(keys) - 1
    return (
        f"{shown} after 0 to {last} gradient steps" if counted == "step" else f"{shown} in the {counted}s 0 to {last}"
    )


def _state(metrics: Metrics) -> str:
    """Return the state of training, short enough for a bar on one line of 80 columns."""
    returns = _returns(metrics)
    if not returns:
        return f"loss {metrics.get('loss', metrics.get('loss/actor', math.nan)):.3f}"
    shown = " -> ".join(f"{value:.1f}" for value in (returns if len(returns) < 3 else (returns[0], returns[-1])))
    return f"return {shown}, {metrics['time/steps_per_s']:,.0f} steps/s"


def _in_words(metrics: Metrics) -> str:
    returns = _returns(metrics)
    if not returns:
        return _state(metrics)
    if len(returns) == 1:
        return f"return {returns[0]:.1f}"
    return f"return {returns[0]:.1f} before and {returns[-1]:.1f} after adaptation"
