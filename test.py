"""Test how fast a trained policy adapts to new tasks; `python test.py --help` lists the options."""

import sys

# A child process imports this file again: whatever is above the guard, every child loads.
if __name__ == "__main__":
    try:
        from maml_rl.command_line import run_test

        code = run_test()
    except KeyboardInterrupt:
        print("test.py: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
