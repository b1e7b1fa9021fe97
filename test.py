"""Test how fast a trained policy adapts to new tasks; `python test.py --help` lists the options."""

import signal
import sys

# A child process imports this file again: every child loads what is above the guard.
if __name__ == "__main__":
    # While libraries load there is nothing to clean up, and not all of them take a KeyboardInterrupt for what it is:
    # until its work begins, Ctrl-C ends the command at once. An ignored signal, as in a background job, stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from maml_rl.cli.evaluate import run_test
    except (ImportError, SyntaxError) as error:
        hint = "`make install` sets up .venv, and `. .venv/bin/activate` makes it this shell's python"
        print(f"test.py: error: {sys.executable} cannot load maml_rl ({error}); {hint}", file=sys.stderr)
        sys.exit(2)

    sys.exit(run_test())
