"""The ``immwire`` command: measures, moves files, and says which path each pair takes."""

import os
import signal
import sys


def _again() -> list[str]:
    """How the command starts itself.

    Not by ``-m``, which looks for modules first where the command was called: there may be anything, files
    that were received not least. By the package that this is: there may be several.
    """
    package = os.path.dirname(os.path.abspath(__file__))
    lines = [
        "import sys",
        "sys.path[:1] = filter(None, sys.path[:1])",
        "from importlib.util import module_from_spec, spec_from_file_location",
        f"package = {package!r}",
        "found = dict(location=package + '/__init__.py', submodule_search_locations=[package])",
        "spec = spec_from_file_location('immwire', **found)",
        "sys.modules['immwire'] = module_from_spec(spec)",
        "spec.loader.exec_module(sys.modules['immwire'])",
        "from immwire.__main__ import main",
        "sys.exit(main())",
    ]
    return [sys.executable, "-c", "\n".join(lines)]


def main() -> int:
    """Run the command line of this process; return its exit code."""
    from ._immwire import _run_cli

    # The command has handlers of its own, which do not raise KeyboardInterrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _run_cli(["immwire", *sys.argv[1:]], _again())


if __name__ == "__main__":
    sys.exit(main())
