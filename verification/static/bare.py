"""The core's hot paths as code for machines without an operating system, and for an NVIDIA GPU.

Builds the C functions `hp_*` of `verification/noalloc` (the crate behind the link proof) for other targets, by the
compiler of toolchain.py. An rlib proves nothing: it has not been through code generation. So:

- for each CPU, the archive is linked without any library, unused sections dropped. That it links says, there
  too, that no hot path reaches an allocator, a panic, or anything else from outside.
- for the GPU (sm_90), the PTX must hold every function, with none calling out but those listed in `CALLS_OUT`;
  what several processors share must be accessed with system scope. ptxas, where it can be had, turns it into
  machine code, which is the last word on whether it is valid.

Does not prove that the code runs there.
"""

import re
import time
import zipfile

from toolchain import HOME, ROOT, Missing, call, environment, host_library, rustc, version

NOALLOC = ROOT / "verification" / "noalloc"
BUILD = HOME / "build"
CPUS = ("aarch64-unknown-none", "riscv64gc-unknown-none-elf", "x86_64-unknown-none")
GPU = "nvptx64-nvidia-cuda"
PANIC = "a_panic_is_reachable"
# The seeds of the link proof: what each must be found to reach.
SEEDS = {"seed_index": PANIC, "seed_malloc": "malloc"}
# The parser of an address's text form slices a buffer by what it read; on this target the compiler does not see that
# it cannot fail. It is no code for a GPU. Everything else calls nobody.
CALLS_OUT = {"hp_wire_parse_addr": {PANIC, "memcmp"}}
# Relaxed read-modify-writes come out without a scope, which PTX takes for "this GPU": the doorbell, and the tally of stale
# immediates, are not to be shared between a GPU and another processor. Counts and lanes are.
GPU_SCOPE = {"hp_wake_ring": {"atom.exch.b32"}, "hp_imm_add": {"atom.add.u64"}}
SYSTEM_SCOPE = {"hp_imm_add": r"atom\.acq_rel\.sys\.cas\.b64", "hp_lane_push": r"st\.release\.sys\.b64",
                "hp_lane_pop": r"ld\.acquire\.sys\.b64"}
PTXAS = ("nvidia-cuda-nvcc-cu12", "12.9.86")


class Fault(Exception):
    """The claim does not hold."""


def expected():
    """The hot paths by name, as the source has them."""
    text = "".join((NOALLOC / "src" / name).read_text() for name in ("group.rs", "small.rs"))
    return set(re.findall(r"fn (hp_\w+)", text))


def build(target, flags=""):
    env = environment(CARGO_TARGET_DIR=str(BUILD), RUSTFLAGS=flags)
    command = ["cargo", "rustc", "--release", "--quiet", "--locked", "-Zbuild-std=core", "--target", target]
    # Only the newest assembly is looked at; cargo names it by a hash, and makes it only along with what it knows of.
    for name in ("hot_paths-*.s", "libhot_paths*"):
        for old in (BUILD / target / "release" / "deps").glob(name):
            old.unlink()
    (BUILD / target / "release" / "libhot_paths.a").unlink(missing_ok=True)
    done = call([*command, "--", "--emit", "asm,link"], cwd=NOALLOC, env=env)
    if done.returncode != 0:
        raise Fault(f"{target}: does not build\n{done.stderr}")
    return BUILD / target / "release"


def functions(path):
    """Name and bytes of each function in an ELF file or archive, of any machine."""
    lines = (line.split() for line in call(["readelf", "-sW", path]).stdout.splitlines())
    return {f[7]: int(f[2], 0) for f in lines if len(f) == 8 and f[3] == "FUNC" and f[4] == "GLOBAL"}


def link(archive, roots):
    """Links `roots` and what they reach, with nothing else. Returns the file, and the names nobody defines."""
    out = archive.with_name("linked.elf")
    wanted = [flag for root in sorted(roots) for flag in ("-u", root)]
    linker = host_library() / "bin" / "rust-lld"
    if not linker.exists():
        raise Missing("this Rust toolchain comes without rust-lld")
    done = call([linker, "-flavor", "gnu", "--gc-sections", "-e", "0", *wanted, "-o", out, archive])
    missing = set(re.findall(r"undefined symbol: (\S+)", done.stderr))
    if done.returncode != 0 and not missing:
        raise Fault(f"{archive}: does not link\n{done.stderr}")
    return out, missing


def check_cpu(target):
    """Proves one CPU target. Returns a description, and how many seeds were found out."""
    folder, names = build(target), expected()
    linked, missing = link(folder / "libhot_paths.a", names)
    if missing:
        raise Fault(f"{target}: the hot paths reach {', '.join(sorted(missing))}")
    sizes = functions(linked)
    empty = sorted(name for name in names if sizes.get(name, 0) == 0)
    if empty:
        raise Fault(f"{target}: no code for {', '.join(empty)}")
    for seed, reason in SEEDS.items():
        _, missing = link(folder / "libhot_paths.a", [seed])
        if reason not in missing:
            raise Fault(f"{target}: {seed} was not found out")
    return f"{len(names)} functions, {sum(sizes[name] for name in names):,} bytes", len(SEEDS)


def ptx_functions(ptx):
    """For each function that PTX defines: whom it calls, and its atomic operations."""
    calls, atomics, here = {}, {}, None
    for line in ptx.splitlines():
        found = re.match(r"(?:\.visible |\.weak )?\.func\s+(?:\([^)]*\)\s*)?([\w$]+)\(", line)
        if found:
            here = found[1]
            calls[here], atomics[here] = set(), set()
        elif line.startswith("}"):
            here = None
        elif here:
            found = re.search(r"\bcall(?:\.uni)?\s+(?:\([^)]*\),\s*)?([\w$%]+)", line)
            if found:
                calls[here].add(found[1])
            found = re.search(r"\b((?:atom|red|ld\.acquire|ld\.relaxed|st\.release|st\.relaxed|fence)\.[\w.]+)", line)
            if found:
                atomics[here].add(found[1])
    return calls, atomics


def reach(calls, name):
    """Everything called from `name`, directly or not."""
    seen, queue = set(), [name]
    while queue:
        for other in calls.get(queue.pop(), ()):
            if other not in seen:
                seen.add(other)
                queue.append(other)
    return seen


def check_ptx(ptx, names):
    """Proves the text. Returns the number of system-scope atomics in the hot paths."""
    calls, atomics = ptx_functions(ptx)
    absent = sorted(names - calls.keys())
    if absent or ".target sm_90" not in ptx:
        raise Fault(f"PTX without sm_90, or without {', '.join(absent)}")
    for name in sorted(names):
        outside = {other for other in reach(calls, name) if other not in calls}
        if outside - CALLS_OUT.get(name, set()):
            raise Fault(f"PTX: {name} calls {', '.join(sorted(outside))}")
        narrow = {op for op in atomics[name] if op.startswith(("atom.", "red.")) and ".sys" not in op}
        if narrow - GPU_SCOPE.get(name, set()):
            raise Fault(f"PTX: {name} has {', '.join(sorted(narrow))}, which other processors do not see as one step")
    for name, pattern in SYSTEM_SCOPE.items():
        if not any(re.fullmatch(pattern, op) for op in atomics[name]):
            raise Fault(f"PTX: {name} has no {pattern}")
    for seed, reason in SEEDS.items():
        if reason not in reach(calls, seed):
            raise Fault(f"PTX: {seed} was not found out")
    return sum(".sys" in op for name in names for op in atomics[name])


def ptxas():
    """The path of NVIDIA's assembler, fetched if need be."""
    folder = HOME / "ptxas"
    if not (folder / "ptxas").exists():
        folder.mkdir(parents=True, exist_ok=True)
        wanted = "%s==%s" % PTXAS
        done = call(["python3", "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, wanted])
        wheels = list(folder.glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise Missing(f"{wanted} cannot be had")
        with zipfile.ZipFile(wheels[0]) as wheel:
            (folder / "ptxas").write_bytes(wheel.read("nvidia/cuda_nvcc/bin/ptxas"))
        (folder / "ptxas").chmod(0o755)
        wheels[0].unlink()
    return folder / "ptxas"


def check_gpu():
    """Proves the GPU target. Returns a description, and how many seeds were found out."""
    folder, names = build(GPU, "-Ctarget-cpu=sm_90"), expected()
    files = list((folder / "deps").glob("hot_paths-*.s"))
    if len(files) != 1:
        raise Fault(f"{GPU}: {len(files)} files of PTX")
    ptx = files[0].read_text()
    atomics = check_ptx(ptx, names)
    said = f"sm_90, {len(names)} functions, {len(ptx.splitlines()):,} lines of PTX, {atomics} kinds of system-scope access"
    try:
        cubin = folder / "hot_paths.cubin"
        done = call([ptxas(), "-arch=sm_90", "-c", "-o", cubin, files[0]])
        if done.returncode != 0:
            raise Fault(f"ptxas refuses the PTX:\n{done.stderr}")
        absent = names - functions(cubin).keys()
        if absent:
            raise Fault(f"no machine code for {', '.join(sorted(absent))}")
        said += f", {cubin.stat().st_size:,} bytes assembled by ptxas {PTXAS[1]}"
    except Missing as why:
        said += f" (not assembled: {why})"
    return said, len(SEEDS)


def main(report):
    """Checks all targets, and reports. Raises `Fault`; says so if the compiler cannot be had."""
    started = time.monotonic()
    for_cpus = "the core's hot paths are code for bare-metal CPUs, and reach no allocator and no panic there"
    for_gpu = "the core's hot paths are code for an NVIDIA GPU (sm_90), with system-scope counts"
    try:
        rustc()
    except Missing as why:
        print(f"SKIPPED: bare-metal builds: {why}")
        report.skipped("code", for_cpus, "link proof", str(why))
        report.skipped("code", for_gpu, "build", str(why))
        return
    said, caught = [], 0
    for target in CPUS:
        text, seeds = check_cpu(target)
        print(f"{target:28} {text}", flush=True)
        said.append(f"{target.split('-')[0]}: {text}")
        caught += seeds
    report.claim("code", for_cpus, "link proof", f"rustc {version()}; " + "; ".join(said),
                 time.monotonic() - started, (caught, caught))
    started = time.monotonic()
    text, seeds = check_gpu()
    print(f"{GPU:28} {text}", flush=True)
    report.claim("code", for_gpu, "build", f"rustc {version()}; {text}", time.monotonic() - started, (seeds, seeds))
