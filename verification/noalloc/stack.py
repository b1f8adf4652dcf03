"""How much stack the linked hot paths can need: the frames of all functions along every chain of calls.

Read from the disassembly (x86-64), on the safe side. A frame is all that a function pushes and subtracts from the stack
pointer, wherever it does. A jump to another function counts as a call of it, and so does taking its address. A chain that
comes back to itself more often than its caller can argue for, a frame whose size is computed, and an indirect call with no address in sight have no bound. An
indirect *jump* is taken for what compilers make of `match`: a jump within the function.
"""

import re
import subprocess

WORD_BYTES = 8  # What a push takes, and a call, for the return address.


class NoBound(Exception):
    """The stack that a function needs cannot be told."""


def output(*command):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def read(library):
    """For each function of `library`, by name: its frame in bytes, and whom it may call.

    `None` among those called: somebody unknown. A frame of `None`: its size is computed.
    """
    text = output("objdump", "-d", "--no-show-raw-insn", library).splitlines()
    heads = [found for found in (re.match(r"([0-9a-f]+) <(.+)>:$", line) for line in text) if found]
    functions = {int(head[1], 16): head[2] for head in heads}
    # Words that the loader fills with a function's address: calls go by way of them.
    relocations = output("objdump", "-R", library)
    slots = {int(slot, 16): functions.get(int(value, 16)) for slot, value in
             re.findall(r"^([0-9a-f]+) R_X86_64_RELATIVE\s+\*ABS\*\+0x([0-9a-f]+)$", relocations, re.M)}
    slots |= {int(slot, 16): name for slot, name in
              re.findall(r"^([0-9a-f]+) R_X86_64_(?:GLOB_DAT|JUMP_SLOT)\s+([^@\s]+)", relocations, re.M)}
    frames, calls, taken, indirect, here = {}, {}, {}, set(), None
    for line in text:
        found = re.match(r"[0-9a-f]+ <(.+)>:$", line)
        if found:
            here = found[1]
            frames[here], calls[here], taken[here] = 0, set(), set()
            continue
        found = re.search(r"\t(?:notrack |bnd )?(call|j\w+)\s+(?:[0-9a-f]+ <([^>+]+)(\+0x[0-9a-f]+)?>|\*)", line)
        if found and found[2] is None:
            indirect |= {here} if found[1] == "call" else set()
        elif found and (found[2] != here or found[1] == "call"):
            if found[3]:
                raise NoBound(f"{here} goes into the middle of {found[2]}")
            calls[here].add(found[2])
        elif re.search(r"\tpush", line) and frames[here] is not None:
            frames[here] += WORD_BYTES
        elif re.search(r"\t(sub|and|lea|add|cmp)\s.*,%rsp$", line):
            found = re.search(r"\t(sub|add)\s+\$(-?0x[0-9a-f]+),%rsp$", line)
            if not found:
                frames[here] = None
            elif frames[here] is not None:
                # Going back up is an addition; a few compilers write a subtraction as one of a negative number.
                bytes_down = int(found[2], 16) * (1 if found[1] == "sub" else -1)
                frames[here] += max(bytes_down, 0)
        found = re.search(r"# ([0-9a-f]+) <", line)
        if found:
            address = int(found[1], 16)
            name = slots.get(address) or functions.get(address)
            taken[here] |= {name} if name else set()
    for name in calls:
        calls[name] |= taken[name]
        if name in indirect and not taken[name]:
            calls[name].add(None)
    return frames, calls


def bounds(library, roots, turns):
    """The most stack that each of `roots` can need, in bytes, its return address included.

    `turns`: pairs of a pattern of names, and how often such a function can be under way at the same time. Raises
    `NoBound`, naming the function.
    """
    frames, calls = read(library)
    limited = [[name for name in calls if re.search(pattern, name)] for pattern, _ in turns]
    if not all(limited):
        raise NoBound("a function that is said to call itself is not there")
    done = {}

    def bound(name, chain):
        under_way = tuple(sum(other in names for other in [*chain, name]) for names in limited)
        if any(name in names and now > most for names, now, (_, most) in zip(limited, under_way, turns)):
            return 0  # Its caller argues that this cannot be.
        if name in chain and not any(name in names for names in limited):
            raise NoBound(f"{name} calls itself")
        if (name, under_way) not in done:
            if None in calls.get(name, {None}):
                raise NoBound(f"{name} calls somebody unknown")
            if frames[name] is None:
                raise NoBound(f"{name} has a frame of computed size")
            below = max((bound(other, [*chain, name]) for other in sorted(calls[name])), default=0)
            done[name, under_way] = WORD_BYTES + frames[name] + below
        return done[name, under_way]

    return {root: bound(root, []) for root in roots}
