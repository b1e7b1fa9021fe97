"""`python -m maml_rl.report`, which is `maml-rl report`."""

import sys

from maml_rl.cli.main import run_report

if __name__ == "__main__":
    sys.exit(run_report(prog="python -m maml_rl.report"))
