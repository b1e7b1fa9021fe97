"""Meta-train a policy; `python train.py --help` lists the options."""

import sys

# A child process imports this file again: whatever is above the guard, every child loads.
if __name__ == "__main__":
    try:
        from maml_rl.command_line import run_train

        code = run_train()
    except KeyboardInterrupt:
        print("train.py: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
