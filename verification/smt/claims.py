"""What is proved of `model.py`, for all inputs, and the wrong transcriptions that the proofs must refute.

Integers with their bounds written out, not bit vectors: z3 answers these in milliseconds, and gave up on the
same claims as bit vectors of 128 bits. Where a claim holds by induction (the cuts of a range, the calls on a
counter), the step is proved here, and the claim says so.
"""

import contextlib
import time

import z3

import model
from model import MAX_MERGED, MAX_NICS, MAX_UNITS, NOTE_UNITS, U16, U32, U64, WRITE_UNITS, both

LIMIT_MS = 300_000
CLAIMS = {}


def claim(clause, text):
    def register(function):
        CLAIMS[function.__name__] = (clause, text, function)
        return function

    return register


def number(name, low=0, high=U64):
    value = z3.Int(name)
    return value, [low <= value, value <= high]


def numbers(names, low=0, high=U64):
    values, bounds = zip(*(number(name, low, high) for name in names.split()))
    return (*values, [bound for each in bounds for bound in each])


class Refuted(Exception):
    """With the numbers for which it does not hold."""


class Undecided(Exception):
    """The solver gave up: nothing is proved."""


def prove(given, goal, label):
    """Proves that `goal` follows from `given`, and that something is given at all."""
    solver = z3.Solver()
    solver.set(timeout=LIMIT_MS)
    solver.add(*given)
    if solver.check() != z3.sat:
        raise Undecided(f"{label}: nothing is known to fulfil what it presupposes")
    solver.add(z3.Not(goal))
    answer = solver.check()
    if answer == z3.sat:
        raise Refuted(f"{label}: {solver.model()}")
    if answer != z3.unsat:
        raise Undecided(f"{label}: {answer}, {solver.reason_unknown()}")


def run(name):
    """Proves one claim; returns how many goals it has, and how long they took."""
    started, goals = time.monotonic(), 0
    for label, given, goal in CLAIMS[name][2]():
        prove(given, goal, label)
        goals += 1
    return goals, time.monotonic() - started


# ---- division by what is not a constant

# z3 reasons badly of it. Where a claim needs more than that a rest is smaller than its divisor, both become
# functions of which nothing is known but what `division_is_unique` proves of the real ones.
QUOTIENT = z3.Function("quotient", z3.IntSort(), z3.IntSort(), z3.IntSort())
REST = z3.Function("rest", z3.IntSort(), z3.IntSort(), z3.IntSort())


@contextlib.contextmanager
def abstract_division():
    kept = model.div, model.rest
    model.div = lambda a, b: QUOTIENT(a, b) if z3.is_expr(b) else kept[0](a, b)
    model.rest = lambda a, b: REST(a, b) if z3.is_expr(b) else kept[1](a, b)
    try:
        yield
    finally:
        model.div, model.rest = kept


@claim("code", "division, as the other proofs use it")
def division_is_unique():
    x, n, q, r, s, d = z3.Ints("x n q r s d")
    w, given = number("w", 1)
    given = [*given, x >= 0, n >= 0]
    spelled = z3.And(x == w * (x / w) + x % w, 0 <= x % w, x % w < w)
    yield "quotient and rest", given, spelled
    two = [q * w + r == d * w + s, 0 <= r, r < w, 0 <= s, s < w]
    yield "are the only such", [*given, *two], q == d
    yield "both of them", [*given, *two, q == d], r == s
    yield "a divisor more is one more", given, (x + w) / w == x / w + 1
    yield "less than the divisor is none", [*given, x < w], x / w == 0
    yield "at most so many", [*given, x <= n * w], x / w <= n
    yield "without its rest, none is left", given, (x - x % w) % w == 0
    # A multiple of w, and a number, leave what the number leaves: its quotient is the sum of both.
    a, b, c, t = z3.Ints("a b c t")
    parts = [x == a * w, n == b * w + s, 0 <= s, s < w, x + n == c * w + t, 0 <= t, t < w]
    yield "a multiple more: the quotient", [*given, *parts], c == a + b
    yield "a multiple more: the rest", [*given, *parts, c == a + b], s == t


# ---- region


@claim("5 Bounds", "a region admits exactly the ranges that lie inside it and below 2^64, at base + offset")
def bounds_are_exact():
    base, size, offset, length, given = numbers("base size offset length")
    admitted, address = model.region_range(base, size, offset, length)
    inside = z3.And(offset + length <= size, base + offset + length <= U64)
    yield "exactly what lies inside", given, admitted == inside
    yield (
        "where it says",
        [*given, admitted],
        z3.And(address == base + offset, address >= base, address + length <= base + size),
    )


# ---- nic


@claim("code", "route weights fit 32 bits, are never 0, and shares of a speed are exact")
def weights_fit():
    speed, given = number("speed", 1, U32)
    for sharing in range(1, MAX_NICS + 1):
        share = model.share_of_speed(speed, sharing)
        yield f"a share of {sharing}", given, z3.And(share * sharing == speed * model.SHARES, share <= U64)
    share, largest, divisor, given = numbers("share largest divisor", 1)
    for size in range(1, 65):
        reduced = [*given, share <= largest, largest >= 2 ** (size - 1), largest < 2**size]
        # What is divided by the divisor is at most the largest, which has `size` bits.
        weight = model.scaled(share, 1, size)
        yield f"of {size} bits", reduced, z3.And(weight >= 1, weight <= U32)
        unclipped = model.div(share, 2 ** max(size - 32, 0))
        yield f"of {size} bits, not clipped", reduced, unclipped <= U32


@claim("code", "len * part / whole, rounded down, fits 64 bits and is at most len, for part <= whole")
def proportions_are_exact():
    length, given = number("length")
    part, whole, sums = numbers("part whole", 0, MAX_NICS * U32)
    given = [*given, *sums, part <= whole, whole >= 1]
    product = length * part
    at_most = product <= length * whole
    yield "a larger part is larger", given, at_most
    with abstract_division():
        exact = model.proportion(length, part, whole)
    # division_is_unique: "at most so many".
    fact = z3.Implies(at_most, QUOTIENT(product, whole) <= length)
    known = [*given, at_most, fact, QUOTIENT(product, whole) >= 0]
    yield "at most the length", known, z3.And(exact <= length, exact >= 0)
    yield "and never replaced", known, exact == QUOTIENT(product, whole)


@claim("code", "an edge lies on a granule of the destination, at most a granule before where it would be")
def edges_are_aligned():
    dst, offset, given = numbers("dst offset")
    granule, positive = number("granule", 1)
    given += positive
    edge = model.align_down(dst, offset, granule)
    yield "not beyond", given, z3.And(edge >= 0, edge <= offset)
    multiple = dst + edge == granule * model.div(dst + offset, granule)
    yield "aligned, or 0", given, z3.Or(edge == 0, multiple)
    yield "near", given, offset - edge < granule


ALIGNED = z3.Function("aligned", z3.IntSort(), z3.BoolSort())


def any_split(parts):
    """A split into `parts`, its edges by weight and granule being any that the claims above allow."""
    length, dst, given = numbers("length dst")
    minimum, positive = number("minimum", 1)
    wanted = [z3.Int(f"wanted{i}") for i in range(parts - 1)]
    given = [*given, *positive, parts * minimum <= length if parts > 1 else length >= 0]
    for edge in wanted:
        given += [0 <= edge, edge <= length, z3.Or(edge == 0, ALIGNED(edge))]
    edges = model.edges_of(parts, length, model.place(parts, length, minimum, wanted.__getitem__))
    return length, minimum, edges, given


@claim("2 Counting", "a split covers all bytes, each in one part, whatever the weights, by 1 to 8 routes")
def splits_cover():
    at = z3.Int("at")
    for parts in range(1, MAX_NICS + 1):
        length, _, edges, given = any_split(parts)
        assert len(edges) == MAX_NICS + 1
        ordered = z3.And([a <= b for a, b in zip(edges, edges[1:])])
        yield f"{parts} parts, in order", given, z3.And(edges[0] == 0, ordered, edges[-1] == length)
        owners = z3.Sum([z3.If(z3.And(a <= at, at < b), 1, 0) for a, b in zip(edges, edges[1:])])
        yield f"{parts} parts, each byte once", [*given, 0 <= at, at < length], owners == 1


@claim("code", "a part of a split is empty, the whole, or at least the minimum; inner edges lie on granules")
def parts_are_worthwhile():
    for parts in range(1, MAX_NICS + 1):
        length, minimum, edges, given = any_split(parts)
        pairs = list(zip(edges, edges[1:]))
        good = [z3.Or(a == b, z3.And(a == 0, b == length), b - a >= minimum) for a, b in pairs]
        yield f"{parts} parts", given, z3.And(good)
        inner = [z3.Or(edge == 0, edge == length, ALIGNED(edge)) for edge in edges]
        yield f"{parts} parts, edges", given, z3.And(inner)


@claim("2 Counting", "each part of a split belongs to one route, whoever's turn it is")
def routes_take_all_parts():
    turn, given = number("turn", 0, U32)
    for count in range(1, MAX_NICS + 1):
        first = model.at_turn(turn, count)
        parts = [model.part_of_route(route, first, count) for route in range(count)]
        # So many different ones below their number are all of them.
        good = z3.And(z3.Distinct(parts) if count > 1 else True, *(z3.And(0 <= p, p < count) for p in parts))
        yield f"{count} routes", given, good
        yield f"{count} routes, the first", given, z3.Or([z3.And(first == r, parts[r] == 0) for r in range(count)])


@claim("code", "what is small is exactly what a split would leave whole")
def small_stays_whole():
    length, given = number("length")
    minimum, positive = number("minimum", 1)
    given += positive
    # The quotient, spelled out.
    parts = z3.Int("parts")
    divided = [parts * minimum <= length, length < (parts + 1) * minimum, parts >= 0]
    small = model.is_small(length, minimum)
    yield "small", given, small == (length < 2 * minimum)
    yield "parts", [*given, *divided, small], parts <= 1
    yield "and conversely", [*given, *divided, z3.Not(small)], parts >= 2


# ---- plan


def any_range():
    dst, at, end, given = numbers("dst at end")
    most, granule, positive = numbers("most granule", 1)
    return dst, most, granule, at, end, [*given, *positive, at < end]


@claim("2 Counting", "a cut makes progress, is no longer than a message, and lies on a granule where one fits")
def cuts_are_good():
    dst, most, granule, at, end, given = any_range()
    to = model.cut(dst, most, granule, at, end)
    yield "progress", given, z3.And(to > at, to <= end)
    yield "no longer than a message", given, to - at <= most
    aligned = dst + to == granule * model.div(dst + at + most, granule)
    yield "aligned", given, z3.Or(to == end, most < granule, aligned)


@claim("2 Counting", "the number of pieces that is announced is the number that is made (by induction over cuts)")
def pieces_are_counted():
    dst, most, granule, at, end, given = any_range()
    first = model.cut(dst, most, granule, at, end)
    count = model.pieces(dst, most, granule, at, end)
    yield "none", [*given[:-1], at >= end], model.pieces(dst, most, granule, at, end) == 0
    yield "one", [*given, first == end], count == 1
    # More: one, and those of what is left.
    with abstract_division():
        first = model.cut(dst, most, granule, at, end)
        second = model.cut(dst, most, granule, first, end)
        step = model.ite(most < granule, most, model.align_down(0, most, granule))
        count = model.pieces(dst, most, granule, at, end)
        others = model.pieces(dst, most, granule, first, end)
    limit, after = dst + at + most, dst + first + most
    whole = REST(dst + first, granule) == 0
    # What lies beyond a message: behind the first cut, and behind the second.
    big, left = end - first - most, end - second - most
    facts = [
        *(z3.And(0 <= REST(x, granule), REST(x, granule) < granule) for x in (limit, after, most)),
        # "without its rest, none is left": where the first cut is on a granule.
        z3.Implies(dst + first == limit - REST(limit, granule), whole),
        # "a multiple more"
        z3.Implies(whole, REST(after, granule) == REST(most, granule)),
        # "a divisor more is one more", "less than the divisor is none"
        z3.Implies(z3.And(left >= 0, left == big - step), QUOTIENT(big + step - 1, step) == QUOTIENT(left + step - 1, step) + 1),
        z3.Implies(big <= step, QUOTIENT(big + step - 1, step) == QUOTIENT(big - 1, step) + 1),
        z3.Implies(z3.And(1 <= big, big <= step), QUOTIENT(big - 1, step) == 0),
        QUOTIENT(step - 1, step) == 0,
        *(QUOTIENT(x + step - 1, step) >= 0 for x in (big, left)),
    ]
    yield "one and the others", [*given, first < end, *facts], count == model.least(1 + others, U64)
    stepped = z3.Implies(second < end, second == first + step)
    yield "equal steps", [*given, first < end, *facts], z3.And(step >= 1, stepped)


@claim("2 Counting", "the units of 1 to 16 pieces of a write add up to 16, each at least 1, and none overflows")
def units_add_up():
    piece, given = number("piece", 0, 254)
    for count in range(1, 256):
        if count > WRITE_UNITS and count % 17:
            continue  # More than 16 pieces carry none: a few, for the absence of overflow.
        inside = [*given, piece < count]
        good, units = model.share(piece, count)
        whole = z3.And(model.unit_edge(0, count) == 0, model.unit_edge(count, count) == WRITE_UNITS)
        step = units == model.unit_edge(piece + 1, count) - model.unit_edge(piece, count)
        yield f"{count} pieces", inside, z3.And(good, step, whole)  # A telescope: 16 - 0.
        if count <= WRITE_UNITS:
            yield f"{count} pieces, all count", inside, z3.And(units >= 1, units <= WRITE_UNITS)


@claim("2 Counting", "pieces are numbered over all routes without gap or double")
def pieces_are_numbered():
    counts = [z3.Int(f"count{route}") for route in range(MAX_NICS)]
    at = z3.Int("at")
    total = z3.Sum(counts)
    given = [*(count >= 0 for count in counts), total <= WRITE_UNITS, 0 <= at, at < total]
    before = [z3.Sum(counts[:route]) if route else z3.IntVal(0) for route in range(MAX_NICS)]
    owners = [z3.If(z3.And(b <= at, at < b + count), 1, 0) for b, count in zip(before, counts)]
    yield "each number once", given, z3.Sum(owners) == 1


@claim("2 Counting", "k merged writes carry 16k units, for exactly k <= 255, and 16k <= 4080")
def merged_units_fit():
    writes, given = number("writes")
    good, units = model.merged(writes)
    yield "exactly", given, good == (writes <= MAX_MERGED)
    yield "units", [*given, good], z3.And(units == WRITE_UNITS * writes, units <= 4080)


@claim("2 Counting", "pages merge into no more than a message, and into exactly the same bytes")
def merging_is_exact():
    most, page, given = numbers("most page", 1)
    many, fits = number("many", 1)
    given += fits
    with abstract_division():
        limit = model.merge_limit(most, page)
    quotient = QUOTIENT(most, page)
    spelled = [quotient * page <= most, quotient >= 0]
    fewer = many * page <= quotient * page
    yield "fewer pages are fewer bytes", [*given, many <= quotient], fewer
    known = [*given, *spelled, many <= limit, z3.Implies(many <= quotient, fewer)]
    yield "no longer than a message", known, z3.And(many * page <= most, many <= MAX_MERGED)
    # A run from `src` to `dst`, and a page behind both ends of it.
    src, dst, run, bounds = numbers("src dst run")
    page_src, page_dst, more = numbers("page_src page_dst")
    at = z3.Int("at")
    inside = [src + run <= U64, dst + run <= U64, page_src + page <= U64, page_dst + page <= U64]
    behind = [page_src == model.next_in_run(src, run), page_dst == model.next_in_run(dst, run)]
    every = [*bounds, *more, page >= 1, page <= U64, *inside, *behind, 0 <= at, at < run + page]
    moved = z3.If(at < run, z3.And(src + at < src + run), z3.And(page_src <= src + at, src + at < page_src + page))
    yield "each byte from its place", every, moved
    to = z3.If(at < run, dst + at, page_dst + (src + at - page_src))
    yield "each byte to its place", every, to == dst + at


@claim("2 Counting", "notes announce every unit once, 1 to 4,080 each")
def notes_are_exact():
    units, given = number("units", 1, 2**35)
    chunk, start, end = z3.Ints("chunk start end")
    count = model.div(units + NOTE_UNITS - 1, NOTE_UNITS)
    given = [*given, 0 <= start, start <= chunk, chunk < end, end <= count]
    first, last = model.note_run(start, end, units)
    at = first + (chunk - start) * NOTE_UNITS
    many = model.note_units(at, last)
    yield "its units", given, z3.And(many >= 1, many <= model.MAX_IMM_UNITS, at == chunk * NOTE_UNITS)
    next_at = z3.If(chunk + 1 == end, last, at + NOTE_UNITS)
    yield "up to the next", given, at + many == next_at
    yield "no overflow", given, z3.And(first <= U64, end * NOTE_UNITS <= U64)
    yield "from the first", [*given, start == 0], first == 0
    yield "to the last", [*given, end == count], last == units
    following = z3.Int("following")
    runs = [*given, following > end, following <= count]
    yield "runs join", runs, model.note_run(end, following, units)[0] == last


@claim("5 Bounds", "if the largest page lies in its region, so does every page, and no address wraps")
def pages_are_inside():
    base, size, stride, offset, page, largest, given = numbers("base size stride offset page largest")
    length, more = number("length")
    given = [*given, *more, page <= largest]
    lemma = stride * page <= stride * largest
    yield "earlier pages lie before", given, lemma
    expressed, top = model.page_offset(stride, largest, offset)
    admitted, _ = model.region_range(base, size, top, length)
    given = [*given, lemma, expressed, admitted]
    here, start = model.page_offset(stride, page, offset)
    inside, address = model.region_range(base, size, start, length)
    yield "admitted", given, both(here, inside)
    yield "where it says", given, model.page_address(base, stride, page, offset) == address
    yield "which is inside", given, z3.And(address >= base, address + length <= base + size)


@claim("5 Bounds", "distinct pages are disjoint where the stride is at least a page")
def pages_are_disjoint():
    stride, offset, page, other, given = numbers("stride offset page other")
    length, more = number("length", 1)
    base, region = number("base")
    given = [*given, *more, *region, length <= stride, page < other]
    lemma = stride * (page + 1) <= stride * other
    yield "a stride apart", given, lemma
    yield "expanded", given, stride * (page + 1) == stride * page + stride
    inside = [base + stride * other + offset + length <= U64, stride * (page + 1) == stride * page + stride]
    first = model.page_address(base, stride, page, offset)
    second = model.page_address(base, stride, other, offset)
    yield "disjoint", [*given, lemma, *inside], first + length <= second


@claim("code", "the turns of items do not wrap, and each small item is one lane's to look at")
def turns_do_not_wrap():
    turn, item, given = numbers("turn item", 0, U32)
    given = [*given, item < 2**31]
    for count in range(1, MAX_NICS + 1):
        own = model.at_turn(turn, count)
        yield f"{count} lanes, no wrap", given, own + item <= U32
        # Lane (own + r) % count starts at item r and goes on by `count`.
        r, round_, rest = item % count, model.div(item, count), z3.Int("rest")
        lane = (own + r) % count
        yield f"{count} lanes", [*given, rest == r + round_ * count], z3.And(
            rest == item, lane == model.at_turn(own + item, count)
        )


# ---- imm


@claim("2 Counting", "an immediate of any slot, generation and units gives back the three; every word is one")
def immediates_survive():
    slot, given = number("slot", 0, model.SLOTS - 1)
    generation, more = number("generation", 0, model.GENERATIONS - 1)
    units, last = number("units", 0, model.MAX_IMM_UNITS)
    given = [*given, *more, *last]
    word = model.imm_bits(slot, generation, units)
    yield "32 bits", given, z3.And(word >= 0, word <= U32)
    back = model.imm_fields(word)
    yield "back", given, z3.And(back[0] == slot, back[1] == generation, back[2] == units)
    word, any_word = number("word", 0, U32)
    fields = model.imm_fields(word)
    in_range = z3.And(fields[0] < model.SLOTS, fields[1] < model.GENERATIONS, fields[2] <= model.MAX_IMM_UNITS)
    yield "every word", any_word, z3.And(in_range, model.imm_bits(*fields) == word)
    # Rust joins the fields by `|`: as there is no carry, that is a sum.
    s, g, u = z3.BitVecs("s g u", 32)
    fit = [z3.ULT(s, model.SLOTS), z3.ULT(g, model.GENERATIONS), z3.ULE(u, model.MAX_IMM_UNITS)]
    tag = s << 6 | g
    summed = (s * 64 + g) * 4096 + u
    yield "joined without carry", fit, z3.And((tag << 12 | u) == summed, z3.LShR(tag << 12 | u, 12) == tag)


def any_counter():
    """Any word that keeps the invariant: while armed, something is missing."""
    word, given = number("word")
    generation, armed, value = count = model.count_of(word)
    return word, count, [*given, z3.Implies(armed == 1, value > 0)]


def operations():
    """Each operation's name, what it did to any counter, with any arguments, and what was given."""
    generation, tenant = number("asked", 0, model.GENERATIONS - 1)
    units, few = number("units", 0, model.MAX_IMM_UNITS)
    writes, many = number("writes")
    for operation, argument, bounds in [
        (model.add, units, few),
        (model.arm, writes, many),
        (model.disarm, writes, many),
        (model.consume, writes, many),
        (model.retire, writes, many),
    ]:
        word, count, given = any_counter()
        after = operation(count, generation, argument)
        yield operation.__name__, count, argument, after, [*given, *tenant, *bounds]


@claim("2 Counting", "a counter's word is its fields: no transition carries from one into another, for all words")
def fields_do_not_carry():
    word, given = number("word")
    generation, armed, value = model.count_of(word)
    fit = z3.And(generation < model.GENERATIONS, armed <= 1, value <= MAX_UNITS)
    yield "every word", given, z3.And(fit, model.pack(generation, armed, value) == word)
    g, a, v = z3.BitVecs("g a v", 64)
    small = [z3.ULT(g, model.GENERATIONS), z3.ULE(a, 1), z3.ULE(v, MAX_UNITS)]
    yield "joined without carry", small, (g << 58 | a << 57 | v) == g * 2**58 + a * 2**57 + v
    generation, given = number("generation", 0, model.GENERATIONS - 1)
    armed, flag = number("armed", 0, 1)
    value, units = number("value", 0, MAX_UNITS)
    back = model.count_of(model.pack(generation, armed, value))
    survive = z3.And(back[0] == generation, back[1] == armed, back[2] == value)
    yield "and back", [*given, *flag, *units], survive
    for name, before, _, after, given in operations():
        _, _, generation, armed, value = after
        fit = [0 <= generation, generation < model.GENERATIONS, 0 <= armed, armed <= 1, 0 <= value, value <= MAX_UNITS]
        yield f"{name}: in range", given, z3.And(fit)
        same = z3.And([new == old for new, old in zip(after[2:], before)])
        yield f"{name}: of another tenant", [*given, before[0] != z3.Int("asked")], same
        kept = z3.Or(generation == before[0], after[0] == model.RETIRED)
        yield f"{name}: the tenant stays, unless retired", given, kept


@claim("2 Counting", "an armed target ends once: an add fires, or a disarm withdraws (each transition, all words)")
def targets_end_once():
    for name, before, argument, after, given in operations():
        outcome, detail, _, armed, value = after
        was = before[1]
        ends = z3.Or(outcome == model.FIRED, outcome == model.WITHDRAWN)
        yield f"{name}: ends", given, z3.And(was == 1, armed == 0) == ends
        yield f"{name}: begins", given, z3.And(was == 0, armed == 1) == (outcome == model.WAITING)
        yield f"{name}: while armed, something is missing", given, z3.Implies(armed == 1, value > 0)
        waits = z3.Implies(outcome == model.WAITING, z3.And(detail == value, detail > 0))
        yield f"{name}: is told how much", given, waits
    name, before, units, after, given = next(operations())
    tenant = [*given, before[0] == z3.Int("asked"), before[1] == 1]
    yield "fires exactly when enough has come", tenant, (after[0] == model.FIRED) == (units >= before[2])


@claim("2 Counting", "units are conserved by each transition, over all words: nothing lost, nothing counted twice")
def units_are_conserved():
    def there(armed, value):
        """Units that are there; negative while some are missing."""
        return z3.If(armed == 1, -value, value)

    for name, before, argument, after, given in operations():
        outcome, detail, generation, armed, value = after
        change = there(armed, value) - there(before[1], before[2])
        counted = z3.Or(outcome == model.COUNTED, outcome == model.FIRED)
        took = z3.Or(outcome == model.READY, outcome == model.WAITING, outcome == model.CONSUMED)
        expected = z3.If(
            z3.And(counted, generation == z3.Int("asked"), name == "add"),
            argument,
            z3.If(
                took,
                -WRITE_UNITS * argument,
                z3.If(
                    outcome == model.WITHDRAWN,
                    WRITE_UNITS * argument,
                    z3.If(outcome == model.RETIRED, -detail, 0),
                ),
            ),
        )
        yield name, given, change == expected
        yield f"{name}: in 64 bits", given, z3.And(before[2] + argument <= 2 * U64, value <= U64)
        if name == "add":
            yield "add: its sum does not wrap", given, before[2] + argument <= U64


# ---- wrong transcriptions, each with the claim that must refute it


def wrapping_range(base, region_len, offset, length):
    fits = model.wrap(offset + length) <= region_len
    return fits, base + offset


def no_fix(parts, length, minimum, edge_at):
    start, edges = 0, []
    for i in range(parts - 1):
        start = model.ite(model.minus(edge_at(i), start) >= minimum, edge_at(i), start)
        edges.append(start)
    return edges


def unordered(parts, length, minimum, edge_at):
    return [edge_at(i) for i in range(parts - 1)]


def always_on_granules(dst, most, granule, at, end):
    limit = at + most
    return model.ite(limit >= end, end, model.align_down(dst, limit, granule))


def carrying_add(count, generation, units):
    now, armed, value = count
    word = model.pack(now, armed, value) + units
    return (model.COUNTED, 0, *model.count_of(word))


def late_add(count, generation, units):
    now, armed, value = count
    return model.cases(
        (now != generation, (model.STALE, 0, now, armed, value)),
        (both(armed == 1, units > value), (model.FIRED, 0, now, 0, units - value)),
        (armed == 1, (model.COUNTED, 0, now, 1, value - units)),
        (value + units > MAX_UNITS, (model.OVERFLOW, 0, now, armed, value)),
        (model.COUNTED, 0, now, 0, value + units),
    )


def forgetful_add(count, generation, units):
    outcome, detail, now, armed, value = RIGHT["add"](count, generation, units)
    return outcome, detail, now, armed, model.ite(outcome == model.FIRED, 0, value)


def forgetful_arm(count, generation, writes):
    outcome, detail, now, armed, value = RIGHT["arm"](count, generation, writes)
    target = writes * WRITE_UNITS
    waiting = outcome == model.WAITING
    return outcome, model.ite(waiting, target, detail), now, armed, model.ite(waiting, target, value)


def overflowing_retire(count, generation, writes):
    outcome, detail, now, armed, value = RIGHT["retire"](count, generation, writes)
    return outcome, detail, model.ite(outcome == model.RETIRED, count[0] + 1, now), armed, value


RIGHT = {name: getattr(model, name) for name in ("add", "arm", "retire")}

# name: (function of the model, what it is replaced by, the claim that must fail)
MUTANTS = {
    "bounds: offset + len wraps": ("region_range", wrapping_range, "bounds_are_exact"),
    "split: no last look at the minimum": ("place", no_fix, "parts_are_worthwhile"),
    "split: edges out of order": ("place", unordered, "splits_cover"),
    "split: routes before the turn take the same parts": (
        "part_of_route",
        lambda route, first, count: model.ite(route < first, first - route, route - first),
        "routes_take_all_parts",
    ),
    "split: aligned in the source, not the destination": (
        "align_down",
        lambda dst, offset, granule: offset - offset % granule,
        "edges_are_aligned",
    ),
    "cut: on granules that do not fit a message": ("cut", always_on_granules, "cuts_are_good"),
    "cut: a message may be a byte longer": (
        "cut",
        lambda dst, most, granule, at, end: model.least(at + most + 1, end),
        "cuts_are_good",
    ),
    "units: 16 / pieces, the rest lost": (
        "unit_edge",
        lambda piece, count: model.div(WRITE_UNITS, count) * piece,
        "units_add_up",
    ),
    "merged: 256 of them": ("MAX_MERGED", 256, "merging_is_exact"),
    "merged: without the check against 12 bits": (
        "merged",
        lambda writes: (both(writes <= U16, writes * WRITE_UNITS <= U16), writes * WRITE_UNITS),
        "merged_units_fit",
    ),
    "merged: one page more than a message": (
        "merge_limit",
        lambda most, page: model.least(model.div(most, page) + 1, MAX_MERGED),
        "merging_is_exact",
    ),
    "notes: the last is not cut to what is left": (
        "note_run",
        lambda start, end, units: (start * NOTE_UNITS, end * NOTE_UNITS),
        "notes_are_exact",
    ),
    "pages: the product wraps when checked": (
        "page_offset",
        lambda stride, page, offset: (z3.BoolVal(True), model.wrap(model.wrap(stride * page) + offset)),
        "pages_are_inside",
    ),
    "imm: 13 bits of generation and units overlap": (
        "imm_bits",
        lambda slot, generation, units: (slot * 64 + generation) * 2048 + units,
        "immediates_survive",
    ),
    "counter: add as one addition to the word": ("add", carrying_add, "fields_do_not_carry"),
    "counter: fires one too late": ("add", late_add, "targets_end_once"),
    "counter: what is beyond the target is lost": ("add", forgetful_add, "units_are_conserved"),
    "counter: arm forgets what had arrived": ("arm", forgetful_arm, "units_are_conserved"),
    "counter: the last generation overflows": ("retire", overflowing_retire, "fields_do_not_carry"),
}


def refutes(name):
    """Whether the claim that is named for this wrong transcription fails for it."""
    attribute, wrong, against = MUTANTS[name]
    right = getattr(model, attribute)
    setattr(model, attribute, wrong)
    try:
        run(against)
    except Refuted:
        return True
    finally:
        setattr(model, attribute, right)
    return False
