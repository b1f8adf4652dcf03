"""What can be said of the source text: where `unsafe` is, who names atomics, what the core imports.

Works on a tree given as {path: text}, so that `check` can show each gate a broken tree. Refuses to know what
the code does: the compiler and clippy judge that.
"""

import re
import tomllib

# Comments and literals; what is left is code.
NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\bb?r(\#*)".*?"\1|\bb?"(?:\\.|[^"\\])*"|"(?:\\.|[^"\\])*"|'(?:\\.[^']*|[^\\'\n])'""",
    re.S,
)
UNSAFE = re.compile(r"\bunsafe\b(?!\s*\()")  # `unsafe(no_mangle)` names an attribute.
NEEDS_REASON = re.compile(r"\bunsafe\s*(\{|impl\b)")
# An argument stands above its block, or above the statement that the block is in.
REASON_WITHIN_LINES = 6
CORE_DEPENDENCIES = {"heapless", "static_assertions", "zerocopy"}


def code_of(text):
    """`text` with comments and literals blanked; every line keeps its number."""
    return NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def shipped(path):
    """Whether users of the project run this file; the rest is tests and checks."""
    folders = path.split("/")
    return not (folders[0] in ("verification", "benches") or "tests" in folders or path.endswith("tests.rs"))


def rust(tree):
    return {path: text for path, text in tree.items() if path.endswith(".rs")}


def has_reason(lines, number):
    """Whether a SAFETY argument stands above line `number` (from 0)."""
    if "SAFETY:" in lines[number]:
        return True
    at = number - 1
    while at >= 0 and number - at <= REASON_WITHIN_LINES and not lines[at].lstrip().startswith("//"):
        at -= 1
    while at >= 0 and lines[at].lstrip().startswith(("//", "#[")):
        if "SAFETY:" in lines[at]:
            return True
        at -= 1
    return False


def unsafe_uses(tree):
    """How often each shipped file says `unsafe`."""
    counts = {path: len(UNSAFE.findall(code_of(text))) for path, text in rust(tree).items() if shipped(path)}
    return {path: count for path, count in counts.items() if count}


def check_unsafe(tree):
    """Faults: unsafe code that is not listed, listed wrongly, without a reason, or not denied elsewhere."""
    faults = []
    listed = {entry["path"]: entry for entry in tomllib.loads(tree["verification/static/unsafe.toml"])["file"]}
    uses = unsafe_uses(tree)
    for path in sorted(uses.keys() | listed.keys()):
        found, allowed = uses.get(path, 0), listed.get(path, {"uses": 0})
        if found != allowed["uses"]:
            faults.append(f"{path}: `unsafe` {found} times, {allowed['uses']} listed in verification/static/unsafe.toml")
        elif len(allowed.get("why", "")) < 10:
            faults.append(f"{path}: listed without a reason")
    for path, text in rust(tree).items():
        code, lines = code_of(text), text.splitlines()
        for found in NEEDS_REASON.finditer(code):
            number = code.count("\n", 0, found.start())
            if not has_reason(lines, number):
                faults.append(f"{path}:{number + 1}: unsafe without a SAFETY comment")
        if re.search(r"(allow|expect)\([^)]*(undocumented_unsafe_blocks|missing_safety_doc)", code):
            faults.append(f"{path}: switches off the lint for SAFETY comments")
    if "#![deny(unsafe_code)]" not in tree["core/src/lib.rs"]:
        faults.append("core/src/lib.rs does not deny unsafe code")
    for path, text in rust(tree).items():
        if path.startswith("core/src/") and "allow(unsafe_code" in code_of(text) and path not in listed:
            faults.append(f"{path}: allows unsafe code, and is not listed")
    return faults


def without_tests(code):
    """The code before the tests at the foot of a file."""
    return re.split(r"#\[cfg\((?:all\()?test\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*mod\s+\w+\s*\{", code)[0]


def check_core(tree):
    """Faults: the core names atomics outside `sync`, or anything beyond `core` and its three dependencies."""
    faults = []
    for path, text in rust(tree).items():
        if not path.startswith("core/src/") or path.endswith("tests.rs") or "/tests/" in path:
            continue
        code = without_tests(code_of(text))
        if path != "core/src/sync.rs":
            for name in ("sync::atomic", "UnsafeCell<", "cell::UnsafeCell", "loom::", "core::hint"):
                if name in code and not (name == "UnsafeCell<" and "use crate::sync" in code):
                    faults.append(f"{path}: names {name}; only core/src/sync.rs may")
        for crate in re.findall(r"extern\s+crate\s+(\w+)", code):
            allowed = crate == "std" and re.search(r"#\[cfg\(test\)\]\s*extern\s+crate\s+std", code)
            if not allowed:
                faults.append(f"{path}: extern crate {crate}")
        for found in re.findall(r"(?<![\w:])(std|alloc)::", code):
            # A function for the tests of another file may stand among the shipped ones.
            inside_test = re.search(r"#\[cfg\(test\)\][^{]*" + found + r"::[^{]*\{", code)
            if not inside_test:
                faults.append(f"{path}: names {found}::")
    if "#![no_std]" not in tree["core/src/lib.rs"]:
        faults.append("core/src/lib.rs is not no_std")
    manifest = tomllib.loads(tree["core/Cargo.toml"])
    extra = set(manifest.get("dependencies", {})) - CORE_DEPENDENCIES
    if extra:
        faults.append(f"core/Cargo.toml: depends on {', '.join(sorted(extra))}")
    if set(manifest.get("target", {})) - {"cfg(loom)"}:
        faults.append("core/Cargo.toml: depends on something for some targets")
    return faults


def broken_trees(tree):
    """(name, gate, tree) of trees that a gate must find at fault."""

    def with_text(path, text):
        return {**tree, path: text}

    def after(path, text):
        return with_text(path, tree[path] + text)

    imm, plan, lib = "core/src/imm.rs", "core/src/plan/mod.rs", "core/src/lib.rs"
    shm = next(path for path in unsafe_uses(tree) if path.startswith("platform-linux/src/"))
    reasonless = re.sub(r"// SAFETY:", "// Because:", tree[shm], count=1)
    at_top = lambda path, text: with_text(path, tree[path].replace("\nuse ", f"\n{text}\nuse ", 1))
    return [
        ("new unsafe in a listed file", check_unsafe, after(shm, "\n// SAFETY: none\nunsafe impl Send for X {}\n")),
        ("unsafe in a new file", check_unsafe, with_text("shell-cli/src/new.rs", "// SAFETY: x\nfn f() { unsafe { g() } }")),
        ("a reason taken away", check_unsafe, with_text(shm, reasonless)),
        ("the lint switched off", check_unsafe, after(plan, "\n#[allow(clippy::undocumented_unsafe_blocks)] mod x {}\n")),
        ("the core's denial taken away", check_unsafe, with_text(lib, tree[lib].replace("#![deny(unsafe_code)]", ""))),
        ("atomics beside sync", check_core, at_top(imm, "use core::sync::atomic::AtomicU64;")),
        ("std in the core", check_core, at_top(plan, "use std::vec::Vec;")),
        ("alloc in the core", check_core, with_text(lib, tree[lib].replace("#![no_std]", "#![no_std]\nextern crate alloc;"))),
        ("std for all of the core", check_core, with_text(lib, tree[lib].replace("#![no_std]", ""))),
        ("one more dependency", check_core,
         with_text("core/Cargo.toml", tree["core/Cargo.toml"].replace("[dependencies]", "[dependencies]\nlibc = \"0.2\""))),
    ]
