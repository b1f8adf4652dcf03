"""What the program and our shared objects ask of the machine: the C library, and nothing of anybody's drivers.

Drivers and fabrics (libfabric, libibverbs, libcuda, gdrapi) are loaded at run time, where there are any.
"""

import os
import re

from toolchain import ROOT, call

ALLOWED = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
PROGRAM = ROOT / "target" / "debug" / "immwire"


def libraries():
    """The shared objects that building the workspace left: what other programs load. The stand-in for a GPU's driver, which is
    in part C++, is for our own tests alone."""
    found = (path for profile in ("debug", "release") for path in (ROOT / "target" / profile).glob("*.so"))
    return sorted(path for path in found if path.name != "libfake_cuda.so")


def needed(path):
    """The libraries that the loader must find for `path`; `None` if it is no dynamic program."""
    done = call(["readelf", "-d", path])
    if done.returncode != 0 or "Dynamic section" not in done.stdout:
        return None
    return set(re.findall(r"\(NEEDED\).*\[([^\]]+)\]", done.stdout))


def faults(path):
    found = needed(path)
    if not found:
        return [f"{path}: no dynamic program"]
    return [f"{path} needs {name}" for name in sorted(found - ALLOWED)]


def build():
    env = {k: v for k, v in os.environ.items() if "RUSTFLAGS" not in k}
    return call(["cargo", "build", "--quiet", "--locked", "--workspace", "--bin", "immwire"], cwd=ROOT, env=env)
