"""What the program and our shared objects ask of the machine: the C library, and nothing of anybody's drivers.

Drivers and fabrics (libfabric, libibverbs, libcuda, gdrapi) are loaded at run time, where there are any. What is looked at is what
cargo says that it has just built: no file that an older build has left, and none fewer.
"""

import json
import os
import re
from pathlib import Path

from toolchain import ROOT, call

ALLOWED = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
PROGRAM = "immwire"
# The shared objects that other programs load: the module for Python, and the stand-in for EFA. That for a GPU's driver, which is in
# part C++, is for our own tests alone.
LIBRARIES = {"lib_immwire.so", "libfake_efa.so"}
LEFT_OUT = {"libfake_cuda.so"}


class NotBuilt(Exception):
    """What is to be looked at is not there."""


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


def made(messages):
    """(the program, the shared objects) of what cargo says that it has built, in JSON."""
    lines = [json.loads(line) for line in messages.splitlines() if line.startswith("{")]
    built = [line for line in lines if line.get("reason") == "compiler-artifact"]
    ours = [line for line in built if Path(line["manifest_path"]).is_relative_to(ROOT)]
    programs = [Path(line["executable"]) for line in ours if line.get("executable") and line["target"]["name"] == PROGRAM]
    libraries = {Path(name) for line in ours for name in line["filenames"] if name.endswith(".so")
                 # Macros are the compiler's to load.
                 and "proc-macro" not in line["target"]["kind"]}
    libraries = sorted(path for path in libraries if path.name not in LEFT_OUT)
    found = {path.name for path in libraries}
    if len(programs) != 1 or found != LIBRARIES:
        raise NotBuilt(f"of programs {[str(path) for path in programs]}, of shared objects {sorted(found)} were built: "
                       f"{PROGRAM} and {sorted(LIBRARIES)} were to be")
    return programs[0], libraries


def build():
    """Builds the program, and all libraries of the workspace; returns what `made` finds."""
    env = {k: v for k, v in os.environ.items() if "RUSTFLAGS" not in k}
    done = call(["cargo", "build", "--quiet", "--locked", "--workspace", "--bin", PROGRAM, "--lib", "--message-format", "json"],
                cwd=ROOT, env=env)
    if done.returncode != 0:
        raise NotBuilt(f"the program and the libraries do not build:\n{done.stderr}")
    return made(done.stdout)
