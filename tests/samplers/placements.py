"""The placements on this machine, for what holds in each of them."""

from typing import Any

# Forked children share the torch of this process, and so start at once.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "in process": {"num_workers": 0},
    "central": {"num_workers": 2, "inference": "central", "start_method": "fork"},
    "in children": {"num_workers": 2, "inference": "worker", "start_method": "fork"},
}
