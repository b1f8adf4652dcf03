"""The arithmetic of the core, transcribed: one text, for numbers and for z3's integers alike.

Each function stands for the one of the same name in core/src; where Rust wraps, saturates or checks, so does
this. Integers here have no width of their own, so every width is written out.

Proves nothing: `claims.py` proves things of it, and `compare.py` compares it with the shipped code. It must
be read beside that code.
"""

import math

import z3

U16, U32, U64 = 2**16 - 1, 2**32 - 1, 2**64 - 1

WRITE_UNITS = 16
MAX_MERGED = 255
NOTE_UNITS = MAX_MERGED * WRITE_UNITS
MAX_IMM_UNITS = 2**12 - 1
SLOTS, GENERATIONS = 2**14, 2**6
ARMED_BIT = 2**57
MAX_UNITS = ARMED_BIT - 1
GENERATION_UNIT = 2**58
MAX_NICS = 8
SHARES = 840


# ---- numbers of either kind


def ite(condition, then, other):
    # Numbers first: they are compared by the ten thousand, and asking z3 takes longer than all else.
    if condition is True:
        return then
    if condition is False:
        return other
    return z3.If(condition, then, other)


def both(*conditions):
    holds = True
    for condition in conditions:
        if condition is False:
            holds = False
        elif condition is not True:
            return z3.And(*conditions)
    return holds


def div(a, b):
    """Rounded down, of numbers that are not negative."""
    return a // b if type(a) is int and type(b) is int else a / b


def rest(a, b):
    """What `div` leaves."""
    return a % b


def least(a, b):
    return ite(a <= b, a, b)


def minus(a, b):
    """saturating_sub"""
    return ite(a >= b, a - b, 0)


def wrap(a):
    """wrapping_add, wrapping_mul: what is left of a result in 64 bits"""
    return a % (U64 + 1)


# ---- region


def region_range(base, region_len, offset, length):
    """(whether it is admitted, the address)"""
    fits = both(offset + length <= U64, offset + length <= region_len)
    address = base + offset
    return both(fits, address <= U64, address + length <= U64), address


# ---- nic


def share_of_speed(speed, sharing):
    return div(speed * SHARES, sharing)


def bits(number):
    """Significant bits, of a number that is not z3's."""
    return number.bit_length()


def scaled(share, divisor, largest_bits):
    """A weight: `share` over the common divisor, halved until the largest fits 32 bits."""
    weight = div(div(share, divisor), 2 ** max(largest_bits - 32, 0))
    return ite(weight < 1, 1, ite(weight > U32, U32, weight))


def routes(local, remote):
    """(local NIC, remote NIC, weight) of each route between NICs of these speeds; numbers only."""
    local = [(nic, speed) for nic, speed in enumerate(local) if speed > 0]
    remote = [(nic, speed) for nic, speed in enumerate(remote) if speed > 0]
    if not local or not remote:
        return None
    count = max(len(local), len(remote))

    def end(nics, r):
        nic, speed = nics[r % len(nics)]
        sharing = sum(other % len(nics) == r % len(nics) for other in range(count))
        return nic, share_of_speed(speed, sharing)

    ends = [(end(local, r), end(remote, r)) for r in range(count)]
    shares = [min(here[1], there[1]) for here, there in ends]
    divisor = math.gcd(*shares)
    largest_bits = bits(max(shares) // divisor)
    return [
        (here[0], there[0], scaled(share, divisor, largest_bits))
        for (here, there), share in zip(ends, shares)
    ]


def at_turn(turn, count):
    return turn % count


def proportion(length, part, whole):
    exact = div(length * part, whole)
    return ite(exact <= U64, exact, length)


def align_down(dst, offset, granule):
    return minus(offset, rest(dst + offset, granule))


def place(parts, length, minimum, edge_at):
    """The inner edges of `parts` parts; `edge_at(i)` is where the i-th would be by weight and granule."""
    start, edges = 0, []
    for i in range(parts - 1):
        start = ite(minus(edge_at(i), start) >= minimum, edge_at(i), start)
        edges.append(start)
    too_small = minus(length, start) < minimum
    return [ite(both(too_small, edge == start), length, edge) for edge in edges]


def edges_of(parts, length, inner):
    return [0, *inner, *[length] * (MAX_NICS + 1 - max(parts, 1))]


def part_of_route(route, first, count):
    return minus(route + ite(route < first, count, 0), first)


def worthwhile(length, minimum):
    return div(length, minimum)


def split(length, dst, weights, minimum, granule, turn):
    """What each route carries, as (start, end); numbers only."""
    count = len(weights)
    first = at_turn(turn, count)
    parts = min(worthwhile(length, minimum), count)
    in_turn = weights[first:] + weights[:first]
    total = sum(in_turn[:parts])

    def edge_at(i):
        return align_down(dst, proportion(length, sum(in_turn[: i + 1]), total), granule)

    edges = edges_of(parts, length, place(parts, length, minimum, edge_at))
    part = [part_of_route(route, first, count) for route in range(count)]
    return [(edges[p], edges[p + 1]) for p in part]


def is_small(length, minimum):
    return div(length, 2) < minimum


# ---- plan: one item, cut into pieces


def cut(dst, most, granule, at, end):
    """Where the piece ends that starts at `at`."""
    limit = at + most
    whole = limit >= end  # As in Rust, where a limit past 64 bits is past every end.
    return ite(whole, end, ite(most < granule, limit, align_down(dst, limit, granule)))


def pieces(dst, most, granule, at, end):
    first = cut(dst, most, granule, at, end)
    step = ite(most < granule, most, align_down(0, most, granule))
    step = ite(step < 1, 1, step)
    beyond = minus(minus(end, first), most)
    many = least(div(beyond + step - 1, step) + 2, U64)
    return ite(at >= end, 0, ite(first == end, 1, many))


def unit_edge(piece, count):
    return div(WRITE_UNITS * piece, count)


def share(piece, count):
    """(whether no step of it overflows, the units of one of `count` pieces)"""
    after, before = unit_edge(piece + 1, count), unit_edge(piece, count)
    return both(WRITE_UNITS * (piece + 1) <= U16, after >= before), after - before


def merged(writes):
    """(whether an immediate can count for so many writes, its units)"""
    units = writes * WRITE_UNITS
    return both(writes <= U16, units <= U16, units <= MAX_IMM_UNITS), units


def merge_limit(most, page_bytes):
    return least(div(most, page_bytes), MAX_MERGED)


def note_run(start, end, units):
    """The units announced by the notes `start..end`, each for NOTE_UNITS."""
    return start * NOTE_UNITS, least(end * NOTE_UNITS, units)


def note_units(at, end):
    return least(NOTE_UNITS, minus(end, at))


# ---- plan: pages


def page_offset(stride, page, offset):
    """(whether it can be expressed, how far from the region's base the page starts)"""
    product = stride * page
    return both(product <= U64, product + offset <= U64), product + offset


def page_address(base, stride, page, offset):
    return wrap(base + wrap(wrap(stride * page) + offset))


def next_in_run(address, run_bytes):
    """Where a page must lie to be merged with the run before it."""
    return wrap(address + run_bytes)


# ---- imm


def imm_bits(slot, generation, units):
    return (slot * GENERATIONS + generation) * (MAX_IMM_UNITS + 1) + units


def imm_fields(imm):
    tag, units = div(imm, MAX_IMM_UNITS + 1), imm % (MAX_IMM_UNITS + 1)
    return div(tag, GENERATIONS), tag % GENERATIONS, units


def count_of(word):
    """(generation, whether armed: 0 or 1, units that arrived or are missing)"""
    return div(word, GENERATION_UNIT), div(word, ARMED_BIT) % 2, word % ARMED_BIT


def pack(generation, armed, value):
    return generation * GENERATION_UNIT + armed * ARMED_BIT + value


# What an operation on a counter did.
COUNTED, FIRED, STALE, OVERFLOW = 0, 1, 2, 3
READY, WAITING, ALREADY_ARMED, TOO_LARGE = 4, 5, 6, 7
ALREADY_FIRED, WITHDRAWN, WRONG_TARGET = 8, 9, 10
CONSUMED, NOT_THERE, RETIRED = 11, 12, 13


def cases(*choices):
    """The first choice whose condition holds; the last one has none."""
    *choices, result = choices
    for condition, values in reversed(choices):
        result = tuple(ite(condition, value, other) for value, other in zip(values, result))
    return result


def too_large(writes):
    return writes * WRITE_UNITS > MAX_UNITS


# Each takes a count and returns (outcome, detail, generation, armed, value).


def add(count, generation, units):
    now, armed, value = count
    return cases(
        (now != generation, (STALE, 0, now, armed, value)),
        (both(armed == 1, units >= value), (FIRED, 0, now, 0, units - value)),
        (armed == 1, (COUNTED, 0, now, 1, value - units)),
        (value + units > MAX_UNITS, (OVERFLOW, 0, now, armed, value)),
        (COUNTED, 0, now, 0, value + units),
    )


def arm(count, generation, writes):
    now, armed, value = count
    target = writes * WRITE_UNITS
    return cases(
        (too_large(writes), (TOO_LARGE, writes, now, armed, value)),
        (now != generation, (STALE, now, now, armed, value)),
        (armed == 1, (ALREADY_ARMED, value, now, armed, value)),
        (value >= target, (READY, 0, now, 0, value - target)),
        (WAITING, target - value, now, 1, target - value),
    )


def disarm(count, generation, writes):
    now, armed, value = count
    target = writes * WRITE_UNITS
    return cases(
        (too_large(writes), (TOO_LARGE, writes, now, armed, value)),
        (now != generation, (STALE, now, now, armed, value)),
        (armed == 0, (ALREADY_FIRED, 0, now, armed, value)),
        (target >= value, (WITHDRAWN, value, now, 0, target - value)),
        (WRONG_TARGET, value, now, armed, value),
    )


def consume(count, generation, writes):
    now, armed, value = count
    target = writes * WRITE_UNITS
    return cases(
        (too_large(writes), (TOO_LARGE, writes, now, armed, value)),
        (now != generation, (STALE, now, now, armed, value)),
        (armed == 1, (ALREADY_ARMED, value, now, armed, value)),
        (value >= target, (CONSUMED, 0, now, armed, value - target)),
        (NOT_THERE, 0, now, armed, value),
    )


def retire(count, generation, _=0):
    now, armed, value = count
    return cases(
        (now != generation, (STALE, now, now, armed, value)),
        (armed == 1, (ALREADY_ARMED, value, now, armed, value)),
        (RETIRED, value, (now + 1) % GENERATIONS, 0, 0),
    )


# ---- whole plans; numbers only


def item_pieces(length, dst, weights, limits, turn, announced):
    """The pieces of one item: (route, start, end, units or None), and what notes are to announce: (route, units)."""
    most, minimum, granule = limits
    count = len(weights)
    whole = at_turn(turn, count)
    if length == 0:
        return [(whole, 0, 0, WRITE_UNITS)] if announced else [], []
    if is_small(length, minimum):
        ranges = [(0, length) if route == whole else (0, 0) for route in range(count)]
    else:
        ranges = split(length, dst, weights, minimum, granule, turn)
    counts = [pieces(dst, most, granule, *run) for run in ranges]
    plain = not announced or sum(counts) > WRITE_UNITS
    made, number = [], 0
    for route, (at, end) in enumerate(ranges):
        while at < end:
            to = cut(dst, most, granule, at, end)
            made.append((route, at, to, None if plain else share(number, sum(counts))[1]))
            at, number = to, number + 1
    ways = [route for route, (at, end) in enumerate(ranges) if at < end]
    owed = [(route, share(way, len(ways))[1]) for way, route in enumerate(ways)]
    return made, owed if announced and plain else []


def notes(units, weights, turn):
    """(route, units) of the immediates that announce so many units of pages without bytes."""
    ranges = split(-(-units // NOTE_UNITS), 0, weights, 1, 1, turn)
    return [note for route, run in enumerate(ranges) for note in notes_on(route, *note_run(*run, units))]


def notes_on(route, at, end):
    """(route, units) of the immediates that announce the units `at..end` on one route."""
    made = []
    while at < end:
        made.append((route, note_units(at, end)))
        at += made[-1][1]
    return made


def page_runs(addresses, page_bytes, weights, limits, turn):
    """(route, source, destination, pages) of each piece of a paged write that goes by runs of pages."""
    made = []
    for route, (at, end) in enumerate(split(len(addresses), 0, weights, 1, 1, turn)):
        while at < end:
            (src, dst), many = addresses[at], 1
            room = min(merge_limit(limits[0], page_bytes), end - at)
            while many < room and addresses[at + many] == (
                next_in_run(src, many * page_bytes),
                next_in_run(dst, many * page_bytes),
            ):
                many += 1
            made.append((route, src, dst, many))
            at += many
    return made
