"""Metrics of a run for the monitoring of its Ray cluster: numbers that every node exports."""

from ray.util.metrics import Counter, Gauge

_TAGS = ("environment",)


class PoolMetrics:
    """Metrics of one pool of actors, with the tag `environment`."""

    def __init__(self, name: str) -> None:
        tags = {"environment": name}
        self._actors = Gauge("maml_rl_actors", "actors that work for this run", _TAGS)
        self._units = Counter("maml_rl_units", "units of work whose results have come back", _TAGS)
        self._lost = Counter("maml_rl_actors_lost", "actors that died or hung, and were replaced", _TAGS)
        for metric in (self._actors, self._units, self._lost):
            metric.set_default_tags(tags)

    def note_actors(self, number: int) -> None:
        """Report the current number of actors."""
        self._actors.set(number)

    def note_unit(self) -> None:
        """Count a unit of work."""
        self._units.inc()

    def note_loss(self) -> None:
        """Count a lost actor."""
        self._lost.inc()
