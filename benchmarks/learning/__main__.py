"""Makes docs/results/comparison.md: `python -m benchmarks.learning`; with `--train` it trains first."""

from benchmarks.learning.command import run
from benchmarks.learning.plan import COMPARISON

if __name__ == "__main__":
    run(COMPARISON)
