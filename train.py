"""Meta-train a policy; `python train.py --help` lists the options."""

import sys

# A child process imports this file again: whatever is above the guard, every child loads.
if __name__ == "__main__":
    from maml_rl.command_line import run_train

    sys.exit(run_train())
