"""The seconds of an update of every learner on one device.

    python -m benchmarks.updates --device cuda --json cuda.json

The configs are in `benchmarks.device_updates`. A row is printed, and written, as soon as it is known.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.device_updates import LEARNERS, run
from maml_rl.cli.console import Parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="such as cuda (default: cpu)")
    parser.add_argument("--only", nargs="+", choices=list(LEARNERS), default=list(LEARNERS), help="configs")
    parser.add_argument("--repeats", type=int, default=3, help="updates that count (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the learners (default: 0)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, not how fast")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows to this file")
    options = parser.parse_args(arguments)
    run(options.device, options.json, options.only, options.repeats, options.seed, small=options.quick)


if __name__ == "__main__":
    main()
