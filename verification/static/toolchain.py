"""A Rust compiler with the source of its standard library, from Debian's packages, unpacked under target/bare.

Stable Rust from rustup comes without that source, so it can build neither for a machine without an operating
system nor an instrumented standard library. Debian's `rustc-web` has both, at a version of its own: good for
"does it build, and what is in it", not for the product. Nothing is installed. The download is kept; where it
cannot be had, `Missing` says why, and the caller reports that its check did not run.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "target" / "bare"
OLDEST = (1, 88)  # The project's own `rust-version`.


class Missing(Exception):
    """Something that is not part of the project, and could not be had."""


def call(command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)


def host_library():
    """The folder of rustup's own toolchain that holds its linker and its sanitizers' runtimes."""
    found = call(["rustc", "--print", "sysroot"])
    if found.returncode != 0:
        raise Missing("rustc does not answer")
    return Path(found.stdout.strip()) / "lib" / "rustlib" / "x86_64-unknown-linux-gnu"


def packages():
    """The compiler, its source, and the libraries it is linked with, whose names carry versions."""
    wanted, queue = ["rust-web-src"], ["rustc-web"]
    while queue:
        name = queue.pop()
        wanted.append(name)
        depends = call(["apt-cache", "depends", name]).stdout
        for other in re.findall(r"Depends: (libstd-rust-web\S+|libllvm\d+)$", depends, re.M):
            if other not in wanted + queue:
                queue.append(other)
    return wanted


def candidate():
    """The version that apt would fetch, as two numbers; (0, 0) if it knows none."""
    found = re.search(r"Candidate: (\d+)\.(\d+)", call(["apt-cache", "policy", "rustc-web"]).stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def download():
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Missing("no apt-get and dpkg: Debian's rustc-web packages cannot be unpacked here")
    if candidate() < OLDEST:
        call(["apt-get", "-q", "update"])
    if candidate() < OLDEST:
        raise Missing("apt-get knows no rustc-web of %d.%d or later" % OLDEST)
    debs, root = HOME / "debs", HOME / "root"
    for folder in (debs, root):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    print("fetching Debian's rustc-web packages (140 MB)", flush=True)
    fetched = call(["apt-get", "-q", "download", *packages()], cwd=debs)
    if fetched.returncode != 0:
        raise Missing(f"apt-get download rustc-web: {fetched.stderr.strip().splitlines()[-1:]}")
    for deb in sorted(debs.glob("*.deb")):
        if call(["dpkg", "-x", deb, root]).returncode != 0:
            raise Missing(f"dpkg cannot unpack {deb.name}")
        deb.unlink()


def rustc():
    """The path of the compiler, fetched if need be. Its own libraries are found through a wrapper."""
    wrapper, root = HOME / "rustc", HOME / "root"
    text = (f'#!/bin/sh\nLD_LIBRARY_PATH="{root}/usr/lib/x86_64-linux-gnu" exec "{root}/usr/bin/rustc" "$@"\n')
    for attempt in ("kept", "fetched"):
        if wrapper.exists() and wrapper.read_text() == text and call([wrapper, "-vV"]).returncode == 0:
            return wrapper
        if attempt == "kept":
            if not (root / "usr" / "bin" / "rustc").exists():
                download()
            wrapper.write_text(text)
            wrapper.chmod(0o755)
    raise Missing("Debian's rustc does not start")


def version():
    return call([rustc(), "--version"]).stdout.split()[1]


def environment(**more):
    """The environment to run cargo in with this compiler: flags of the caller's would change what is built."""
    env = {k: v for k, v in os.environ.items() if "RUSTFLAGS" not in k and "CARGO_PROFILE" not in k}
    return env | {"RUSTC": str(rustc()), "RUSTC_BOOTSTRAP": "1", "CARGO_TERM_COLOR": "never"} | more
