"""Puts all breaks of the code into one copy of it, each behind a switch, so that they are compiled once.

A break is a text of a file, which is there once, and what comes instead. The function whose body it is in becomes

    if is_switched_on(3) { the body with break 3 } else if is_switched_on(7) { the body with break 7 } else { the body }

and that asks the environment, once for each process, which break is on (`VARIABLE`; none, if it is not set). Of one that
is marked as an `expression`, that alone is chosen: in a function that returns `impl Trait`, two bodies would be of two
types. Nothing outside of bodies can be switched; a `const fn` with breaks is one no longer.

The copy, target-broken/copy, is the same for all lists of breaks, and its files change only when their text does: what
was compiled of it for one is there for the next. Two copies of a package in one target directory can be taken for each
other: what is built of this one goes into target-broken/build.

Knows of Rust and of C++ as much as it takes to find where a body begins and ends. Refuses to know what the breaks mean,
and how they are tried.
"""

import contextlib
import fcntl
import os
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "target-broken"
COPY, BUILD = WORK / "copy", WORK / "build"
# Whatever is built of the copy for this machine is built with it: kernels run on the stand-in for the driver, if at all.
NVCC = COPY / "verification" / "fake-cuda" / "nvcc"
# Each a list in TOML; and what its entries are called.
LISTS = {
    "verification/mutants/mutants.toml": "mutant",
    "verification/protocol/mutants.toml": "mutant",
    "verification/fuzz/mutants.toml": "mutant",
    "verification/faults/bugs.toml": "bug",
}
VARIABLE = "IMMWIRE_BROKEN"
# What has no say in where a body begins: comments, texts, characters. A lifetime is no character.
RUST_ASIDE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\bb?r(?P<hashes>\#*)".*?"(?P=hashes)|b?"(?:\\.|[^"\\])*"|b?'(?:\\[^u]|\\u\{[^}]*\}|\\x..|[^'\\])'""", re.S)
C_ASIDE = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\])+'|^[ \t]*\#(?:[^\n\\]|\\.)*""", re.S | re.M)
BRACES, BRACKETS, ARGUMENT_ENDS = re.compile(r"[{}]"), re.compile(r"[()\[\]{};]"), re.compile(r"\s*[>,]")
NAME = "is_switched_on"
# None is on but by those who say which.
os.environ.pop(VARIABLE, None)
RUST_SWITCH = f'''
/// Whether this break of the code is on.
fn {NAME}(number: u32) -> bool {{
    extern crate std;
    static ON: std::sync::OnceLock<Option<u32>> = std::sync::OnceLock::new();
    *ON.get_or_init(|| std::env::var("{VARIABLE}").ok().and_then(|on| on.parse().ok())) == Some(number)
}}
'''
C_SWITCH = f'''
#include <cstdlib>
/// Whether this break of the code is on.
static inline bool {NAME}(int number) {{
    static const int on = std::getenv("{VARIABLE}") ? std::atoi(std::getenv("{VARIABLE}")) : -1;
    return on == number;
}}
'''


class BadBreak(Exception):
    """A break cannot be put in."""


def blanked(text, aside):
    """`text` with all that matches `aside` made blank, at the same places."""
    return aside.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def closing(bare, start):
    """Where the brace that opens at `start` is closed."""
    depth = 0
    for place in BRACES.finditer(bare, start):
        depth += 1 if place[0] == "{" else -1
        if depth == 0:
            return place.start()
    raise BadBreak("a brace is not closed")


def rust_bodies(text):
    """(opening brace, closing brace, signature) of each function that has a body."""
    bare = blanked(text, RUST_ASIDE)
    for name in re.finditer(r"\bfn\s+\w+", bare):
        depth, past = 0, 0
        for place in BRACKETS.finditer(bare, name.end()):
            at = place.start()
            if place[0] in "([":
                depth += 1
            elif place[0] in ")]":
                depth -= 1
            elif depth == 0 and place[0] == ";":
                break
            elif at < past:
                continue
            elif depth == 0 and place[0] == "{" and ARGUMENT_ENDS.match(bare, (past := closing(bare, at)) + 1):
                continue  # A constant, as an argument of a type.
            elif depth == 0 and place[0] == "{":
                # What stands before `fn`, back to the end of whatever comes before.
                begin = max(bare.rfind(end, 0, name.start()) for end in ";{}]") + 1
                yield at, closing(bare, at), bare[begin:at]
                break


def c_bodies(text):
    """The same for C++: the outermost braces behind a `)`, as of functions and their qualifiers."""
    bare = blanked(text, C_ASIDE)
    past = 0
    for place in re.finditer(r"\)\s*(?:const\s*)?(?:noexcept\s*)?\{", bare):
        at = place.end() - 1
        if at < past:
            continue
        past = closing(bare, at)
        begin = max(bare.rfind(end, 0, place.start()) for end in ";{}") + 1
        yield at, past, bare[begin:at]


def body_around(text, start, end, *, rust):
    """(opening brace, closing brace, signature) of the innermost body that holds all from `start` to `end`."""
    around = [body for body in (rust_bodies if rust else c_bodies)(text) if body[0] < start and end <= body[1]]
    if not around:
        raise BadBreak(f"in no body, so that it cannot be switched: {text[start:end].strip()[:60]}")
    return max(around)


def difference(text, old, new):
    """Where `text` changes if `old` becomes `new`, without what they begin and end with both; and what comes there."""
    same = len(os.path.commonprefix([old, new]))
    rest = len(os.path.commonprefix([old[same:][::-1], new[same:][::-1]]))
    start = text.index(old)
    return start + same, start + len(old) - rest, new[same : len(new) - rest]


def switched(text, breaks, *, rust=True):
    """`text` with `breaks`, which have a `number`, an `old` and a `new` text, behind switches."""
    places = {}
    for one in breaks:
        old, new = one["old"], one["new"]
        if text.count(old) != 1:
            raise BadBreak(f"the old text is there {text.count(old)} times, not once: {old.strip()[:60]}")
        if one.get("expression"):
            place = text.index(old), text.index(old) + len(old)
            if place in places:
                raise BadBreak(f"another break is at the same place: {old.strip()[:60]}")
            places[place] = [f"(if {NAME}({one['number']}) {{ {new} }} else {{ {old} }})"]
            continue
        start, end, instead = difference(text, old, new)
        opening, closed, signature = body_around(text, start, end, rust=rust)
        if re.search(r"->\s*impl\b", signature) or re.search(r"\bconstexpr\b", signature):
            raise BadBreak(f"can only be switched as an expression: {old.strip()[:60]}")
        condition = f"if ({NAME}({one['number']})) "
        body = text[opening:start] + instead + text[end : closed + 1]
        places.setdefault((opening, closed + 1), []).append(f"{condition}{body} else ")
        for const in re.finditer(r"\bconst\s+(?=(?:unsafe\s+)?fn\b)", signature):
            first = opening - len(signature) + const.start()
            places[first, first + len(const[0])] = [""]
    # From the last to the first, so that places stay true; one within another would not.
    behind = len(text)
    for (start, end), variants in sorted(places.items(), reverse=True):
        if end > behind:
            raise BadBreak(f"a place with a break is within another that has one, too: {text[start:end].strip()[:60]}")
        behind = start
        if text[start] == "{":
            variants = ["{ ", *variants, text[start:end], " }"]
        text = text[:start] + "".join(variants) + text[end:]
    return text + RUST_SWITCH if rust else C_SWITCH + text


def load_all():
    """The breaks of all lists, in their order, with their numbers."""
    found = []
    for name, entry in LISTS.items():
        mine = tomllib.loads((ROOT / name).read_text())[entry]
        if len({one["name"] for one in mine}) != len(mine):
            raise BadBreak(f"{name}: two have the same name")
        found += ({**one, "list": name} for one in mine)
    return [{**one, "number": number} for number, one in enumerate(found)]


def files(folder):
    """Relative paths of the project's files: no history, no build outputs."""
    for path, names, found in os.walk(folder):
        names[:] = [name for name in names if not name.startswith((".", "target")) and name != "__pycache__"]
        yield from (os.path.relpath(os.path.join(path, name), folder) for name in found)


def sync(copy, texts):
    """Makes `copy` equal to the checkout but for these texts of files, touching only what differs."""
    wanted = {name for name in files(ROOT) if (ROOT / name).is_file() and not (ROOT / name).is_symlink()}
    for name in set(files(copy)) - wanted:
        (copy / name).unlink()
    for name in wanted:
        content = texts[name].encode() if name in texts else (ROOT / name).read_bytes()
        path = copy / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod((ROOT / name).stat().st_mode)


def broken_texts(breaks):
    """What the files become that `breaks` are of."""
    texts = {}
    for file in {one["file"] for one in breaks}:
        mine = [one for one in breaks if one["file"] == file]
        try:
            texts[file] = switched((ROOT / file).read_text(), mine, rust=file.endswith(".rs"))
        except BadBreak as error:
            raise BadBreak(f"{file}: {error}") from error
    return texts


@contextlib.contextmanager
def broken_copy():
    """All breaks, and the copy that has them for as long as this is held, which only one process does at a time."""
    WORK.mkdir(exist_ok=True)
    with open(WORK / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another check that uses target-broken", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        breaks = load_all()
        sync(COPY, broken_texts(breaks))
        yield breaks
