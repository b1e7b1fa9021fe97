"""`python -m maml_rl`, which is `maml-rl`."""

import sys

from maml_rl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
