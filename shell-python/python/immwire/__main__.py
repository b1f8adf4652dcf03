"""The ``immwire`` command: measures, moves files, and says which path each pair takes."""

import signal
import sys


def main() -> int:
    """Run the command line of this process; return its exit code."""
    from ._immwire import _run_cli

    # The command has handlers of its own, which do not raise KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _run_cli(["immwire", *sys.argv[1:]], [sys.executable, "-m", "immwire"])


if __name__ == "__main__":
    sys.exit(main())
