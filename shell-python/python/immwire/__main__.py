"""The ``immwire`` command: measures, moves files, and says which path each pair takes."""

import os
import signal
import sys


def _again() -> list[str]:
    """How the command starts itself.

    Not by ``-m``, which looks for modules first where the command was called: there may be anything, files
    that were received not least.
    """
    package = os.path.dirname(os.path.abspath(__file__))
    return [
        sys.executable,
        "-c",
        "import sys; sys.path[:1] = filter(None, sys.path[:1]); "
        f"sys.path.append({os.path.dirname(package)!r}); from immwire.__main__ import main; sys.exit(main())",
    ]


def main() -> int:
    """Run the command line of this process; return its exit code."""
    from ._immwire import _run_cli

    # The command has handlers of its own, which do not raise KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _run_cli(["immwire", *sys.argv[1:]], _again())


if __name__ == "__main__":
    sys.exit(main())
