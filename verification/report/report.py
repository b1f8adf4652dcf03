"""What a check reports, and the table that is made of it.

A check appends one line of JSON for each claim to the file that `IMMWIRE_REPORT` names, in a single write, so
that lines of checks which run at the same time do not mix. `verification/run` reads them, adds what it
measured itself, and renders the table. Standard library only.

Fields: `clause` (of ARCHITECTURE.md's contract, or "code"), `claim`, `method`, `bound`, `seconds`, and, only if
the check was shown to fail on broken code, `mutants` ("7/7": caught of tried). A check that could not run says
why in `skipped`.

# Invariant

Nothing is claimed that was not read: a line that lacks a field, or has one of the wrong kind, is an error,
and so is a mutant that survived. The tests in `test_report.py` check the parsing and the table.
"""

import json
import os
import re

CLAUSES = {
    "1": "Transport", "2": "Counting", "3": "Ends", "4": "Time", "5": "Bounds", "6": "Peers",
    "7": "Steady state", "code": "The code itself",
}
# What each method says about a claim, strongest first: a newcomer reads this before the table.
METHODS = {
    "link proof": "proved of the compiled code: what is not there cannot be reached",
    "SMT": "proved for all 64-bit inputs, of a transcription that is compared with the code",
    "loom": "every interleaving and weak-memory outcome of the shipped source, within the bound",
    "explored": "every reachable state of the shipped state machines in a modelled network, within the bound",
    "enumerated": "every input or program up to the bound, on the shipped code",
    "property": "random inputs against an oracle",
    "fault programs": "random programs with injected faults, checked against an oracle",
    "fuzzed": "coverage-guided random bytes",
    "sanitizer": "no fault seen by an instrumented build, in what was run",
    "build": "checked by building, or by reading what was built",
    "tested": "only tested: by the cases that the tests have",
}


class BadLine(ValueError):
    """A report line that cannot be believed."""


def write(entry):
    """Appends `entry` to the report, if there is one."""
    path = os.environ.get("IMMWIRE_REPORT")
    if not path:
        return
    line = (json.dumps(entry) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError(f"{path}: the line was cut")
    finally:
        os.close(descriptor)


def claim(clause, text, method, bound, seconds, mutants=None):
    """Reports what was established; `mutants` is (caught, tried)."""
    entry = {"clause": clause, "claim": text, "method": method, "bound": bound, "seconds": round(seconds, 1)}
    if mutants is not None:
        entry["mutants"] = "%d/%d" % mutants
    write(entry)


def skipped(clause, text, method, reason):
    """Reports what was not established, and why."""
    write({"clause": clause, "claim": text, "method": method, "skipped": reason, "seconds": 0})


def parse(line):
    """One line as an entry, or `BadLine`."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise BadLine(f"not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise BadLine("not an object")
    for field in ("clause", "claim", "method"):
        if not isinstance(entry.get(field), str) or not entry[field].strip():
            raise BadLine(f"no {field}")
    if not isinstance(entry.get("seconds"), (int, float)) or isinstance(entry["seconds"], bool):
        raise BadLine("no seconds")
    if entry["clause"].split()[0] not in CLAUSES:
        raise BadLine(f"no clause of the contract: {entry['clause']}")
    if entry["method"] not in METHODS:
        raise BadLine(f"no such method: {entry['method']}")
    if "skipped" not in entry and not isinstance(entry.get("bound"), str):
        raise BadLine("no bound")
    if "mutants" in entry:
        mutant_counts(entry)
    return entry


def mutant_counts(entry):
    """(caught, tried), or (0, 0) where nothing was tried."""
    if "mutants" not in entry:
        return 0, 0
    caught, slash, tried = str(entry["mutants"]).partition("/")
    if not (slash and caught.isdigit() and tried.isdigit()) or int(caught) > int(tried) or int(tried) == 0:
        raise BadLine(f"mutants: {entry['mutants']}")
    return int(caught), int(tried)


def mutants_of(printed):
    """(package, test, caught) for each mutant that a runner of verification/mutants printed."""
    found = re.findall(r"^\S+\s+(caught|SURVIVED|NO END in \d+ s)\s+[\d.]+ s\s+([^\s/]+)/(\S+)\s*$", printed, re.M)
    return [(package, test, outcome == "caught") for outcome, package, test in found]


def credit(entries, mutants):
    """Adds to each claim the mutants that its check was tried on; returns an entry for those of no claim.

    A check that is a module's, `name::`, is of the core's tests: what breaks another package, they cannot see.
    """

    def is_of(check, package, test):
        return test == check or (check.endswith("::") and package == "immwire-core" and test.startswith(check))

    left = []
    for package, test, caught in mutants:
        owner = next((e for e in entries if e.get("check") and is_of(e["check"], package, test)), None)
        if owner is None or "skipped" in owner:
            left.append(caught)
            continue
        before = mutant_counts(owner)
        owner["mutants"] = f"{before[0] + caught}/{before[1] + 1}"
    if not left:
        return []
    return [{"clause": "code", "claim": "each named break of the code is noticed by the test that claims to (those not "
             "counted above)", "method": "tested", "bound": f"{len(left)} mutants", "seconds": 0,
             "mutants": f"{sum(left)}/{len(left)}"}]


def survived(entry):
    """Whether a mutant of this entry was not caught."""
    caught, tried = mutant_counts(entry)
    return caught < tried


def order(entry):
    """Sorts by clause, then by how much the method says."""
    clause = entry["clause"].split()[0]
    return list(CLAUSES).index(clause), list(METHODS).index(entry["method"]), entry["claim"]


def cell(text):
    """`text` as a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def duration(seconds):
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def status(entry):
    if entry.get("failed"):
        return "FAILED"
    return "not run" if "skipped" in entry else "holds"


def rows(entries):
    """(clause, claim, method, bound, mutants, time) of each entry, in the order of the table."""
    for entry in sorted(entries, key=order):
        number = entry["clause"].split()[0]
        clause = "code" if number == "code" else f"{number} {CLAUSES[number]}"
        method, bound = entry["method"], entry.get("bound", "")
        if "skipped" in entry:
            method, bound = f"NOT RUN ({method})", entry["skipped"]
        if entry.get("failed"):
            method = f"FAILED ({entry['method']})"
        yield clause, entry["claim"], method, bound, entry.get("mutants", "-"), duration(entry["seconds"])


HEAD = ("clause", "claim", "method", "bound", "mutants killed", "time")


def markdown(entries):
    """The table in Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(map(cell, row)) + " |" for row in rows(entries)]
    return "\n".join(lines)


def plain(entries, width=56):
    """The table for a terminal: long cells are cut."""
    cut = lambda text: text if len(text) <= width else text[: width - 1] + "…"
    table = [HEAD] + [tuple(cut(" ".join(str(c).split())) for c in row) for row in rows(entries)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(text.ljust(wide) for text, wide in zip(row, widths)).rstrip() for row in table
    )


def summary(entries):
    """For each clause, what its claims rest on, in a line a newcomer can read."""
    lines = []
    for number, name in CLAUSES.items():
        mine = [entry for entry in entries if entry["clause"].split()[0] == number]
        held = [entry for entry in mine if status(entry) == "holds"]
        title = name if number == "code" else f"{number}. {name}"
        if not mine:
            lines.append(f"- **{title}**: no check reports on it.")
            continue
        methods = [m for m in METHODS if any(entry["method"] == m for entry in held)]
        caught = sum(mutant_counts(entry)[0] for entry in held)
        tried = sum(mutant_counts(entry)[1] for entry in held)
        said = f"- **{title}**: {len(held)} claims hold" + (f" ({', '.join(methods)})" if methods else "")
        said += f"; broken on purpose {tried} times, noticed {caught} times" if tried else "; not broken on purpose in this run"
        missing = [f"{len([e for e in mine if status(e) == s])} {s}" for s in ("FAILED", "not run")]
        missing = [text for text in missing if not text.startswith("0 ")]
        lines.append(said + ("" if not missing else "; " + ", ".join(missing)) + ".")
    return "\n".join(lines)
