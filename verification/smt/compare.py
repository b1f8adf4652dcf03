"""The transcription beside the shipped code, on vectors that `vectors/` made: is every answer the same?

A test, not a proof: it is what ties the proofs of `claims.py` to the Rust.
"""

import model

NONE = model.U64  # Of an immediate that is not there.
TAG = (9, 3)  # Slot and generation that every plan announces at.


def routes_of(numbers):
    """(local NIC, remote NIC, weight) of each."""
    return [tuple(numbers[i : i + 3]) for i in range(0, len(numbers), 3)]


def flat(rows):
    return [number for row in rows for number in row]


def region_range(question):
    admitted, address = model.region_range(*question)
    return [1, address] * 2 if admitted else [0, 0] * 2


def tag(question):
    slot, generation, units, bits = question
    fits = slot < model.SLOTS and generation < model.GENERATIONS and units <= model.MAX_IMM_UNITS
    made = [1, model.imm_bits(slot, generation, units)] if fits else [0, 0]
    fields = model.imm_fields(bits)
    return [*made, *fields, int(bits < 2**20), model.imm_bits(*fields)]


def count(question):
    *before, operation, asked, argument = question
    operations = [model.add, model.arm, model.disarm, model.consume, model.retire]
    return list(operations[operation](tuple(before), asked, argument))


def routes(question):
    locals_, *speeds = question
    return flat(model.routes(speeds[:locals_], speeds[locals_:]) or [])


def split(question):
    length, dst, minimum, granule, turn, *ways = question
    weights = [weight for _, _, weight in routes_of(ways)]
    return flat(model.split(length, dst, weights, minimum, granule, turn))


def imm(units):
    return NONE if units is None else model.imm_bits(*TAG, units)


def single(question):
    src, src_offset, dst, dst_offset, length, turn, announced, most, minimum, granule, *ways = question
    ways = routes_of(ways)
    weights = [weight for _, _, weight in ways]
    limits = most, minimum, granule
    to = dst + dst_offset
    made, owed = model.item_pieces(length, to, weights, limits, turn, announced)
    rows = []
    for route, at, end, units in made:
        nics = ways[route][:2]
        # Without bytes, a piece points to the start of the region.
        where = (src + src_offset + at, to + at) if end > at else (0, dst)
        rows.append((*nics, *where, end - at, imm(units)))
    for route, units in owed:
        rows.append((*ways[route][:2], 0, dst, 0, imm(units)))
    return sorted(rows)


def page_starts(base, size, stride, offset, pages, page_bytes):
    """The addresses of all pages; or the first place in the list of one that is refused."""
    starts = []
    for place, page in enumerate(pages):
        expressed, start = model.page_offset(stride, page, offset)
        if not expressed or not model.region_range(base, size, start, page_bytes)[0]:
            return place, None
        starts.append(model.page_address(base, stride, page, offset))
    return None, starts


def paged(question):
    pages, page_bytes, turn, announced, most, minimum, granule, *rest = question
    src_stride, src, src_offset, src_len, dst_stride, dst, dst_offset, dst_len, *rest = rest
    src_pages, dst_pages, ways = rest[:pages], rest[pages : 2 * pages], routes_of(rest[2 * pages :])
    refused, sources = page_starts(src, src_len, src_stride, src_offset, src_pages, page_bytes)
    if refused is not None:
        return [(0, 0, refused)]
    refused, places = page_starts(dst, dst_len, dst_stride, dst_offset, dst_pages, page_bytes)
    if refused is not None:
        return [(0, 1, refused)]
    weights = [weight for _, _, weight in ways]
    limits = most, minimum, granule
    rows, notes = [], []
    owed = [0] * len(ways)
    small = model.is_small(page_bytes, minimum)
    if page_bytes == 0:
        notes = model.notes(pages * model.WRITE_UNITS if announced else 0, weights, turn)
    elif page_bytes <= most and (small or pages >= len(ways)):
        starts = list(zip(sources, places))
        for route, from_, to, many in model.page_runs(starts, page_bytes, weights, limits, turn):
            units = model.merged(many)[1] if announced else None
            rows.append((*ways[route][:2], from_, to, many * page_bytes, imm(units)))
    else:
        for item, (from_, to) in enumerate(zip(sources, places)):
            made, late = model.item_pieces(page_bytes, to, weights, limits, turn + item, announced)
            for route, units in late:
                owed[route] += units
            for route, at, end, units in made:
                rows.append((*ways[route][:2], from_ + at, to + at, end - at, imm(units)))
    for route, units in notes or [note for way, units in enumerate(owed) for note in model.notes_on(way, 0, units)]:
        rows.append((*ways[route][:2], 0, dst, 0, imm(units)))
    return sorted(rows)


KINDS = {
    "range": region_range,
    "tag": tag,
    "count": count,
    "routes": routes,
    "split": split,
    "single": single,
    "paged": paged,
}


def rows_of(answer):
    """The pieces of a plan, in one order: which NIC yields first is not part of it."""
    if answer[:1] == [0]:
        return [tuple(answer)]
    pieces = answer[1:]
    return sorted(tuple(pieces[i : i + 6]) for i in range(0, len(pieces), 6))


def parse(line):
    kind, question, answer = line.split("|")
    question, answer = [int(n) for n in question.split()], [int(n) for n in answer.split()]
    return kind, question, answer


def agrees(kind, question, answer):
    if kind in ("single", "paged"):
        answer = rows_of(answer)
    return KINDS[kind](question) == answer


def notices_wrong_answers(kind, question, answer):
    """Whether every single number of an answer, made wrong by one, is noticed."""
    for place in range(len(answer)):
        wrong = list(answer)
        wrong[place] ^= 1
        if agrees(kind, question, wrong):
            return False
    return True


def features(kind, question, answer):
    """What a vector exercises. Each must be met by some vector, or the comparison has lost its subject."""
    if kind == "range":
        return ["range admitted" if answer[0] else "range refused"]
    if kind == "count":
        return [f"{('add', 'arm', 'disarm', 'consume', 'retire')[question[3]]} -> outcome {answer[0]}"]
    if kind == "split":
        runs = sum(start < end for start, end in zip(answer[::2], answer[1::2]))
        return [f"split into {runs}"]
    if kind == "routes":
        return ["routes" if answer else "no routes"]
    if kind == "tag":
        return ["tag made" if answer[0] else "tag refused"]
    rows = rows_of(answer)
    if rows and len(rows[0]) == 3:
        return [f"page of {('source', 'destination')[rows[0][1]]} refused"]
    units = [row[5] % 4096 for row in rows if row[5] != NONE]
    plain = sum(row[5] == NONE for row in rows)
    shape = "plain" if not units else "trailing" if plain else "announced"
    merged = ", merged" if any(unit > 16 for unit in units) else ""
    many = "several" if len(rows) > 1 else "one" if rows else "no"
    return [f"{kind}: {many}, {shape}{merged}"]


EXPECTED = {
    *("range admitted", "range refused", "tag made", "tag refused", "routes", "no routes"),
    *(f"split into {parts}" for parts in range(9)),
    *(f"add -> outcome {outcome}" for outcome in (model.COUNTED, model.FIRED, model.STALE, model.OVERFLOW)),
    *(
        f"{operation} -> outcome {outcome}"
        for operation, outcomes in {
            "arm": (model.READY, model.WAITING, model.ALREADY_ARMED),
            "disarm": (model.ALREADY_FIRED, model.WITHDRAWN, model.WRONG_TARGET),
            "consume": (model.CONSUMED, model.NOT_THERE, model.ALREADY_ARMED),
        }.items()
        for outcome in (*outcomes, model.STALE, model.TOO_LARGE)
    ),
    *(f"retire -> outcome {outcome}" for outcome in (model.STALE, model.ALREADY_ARMED, model.RETIRED)),
    *("page of source refused", "page of destination refused"),
    *(f"{kind}: {many}, {shape}" for kind in ("single", "paged") for many, shape in (
        ("one", "announced"), ("several", "announced"), ("several", "trailing"), ("several", "plain"))),
    *("paged: one, announced, merged", "paged: several, announced, merged"),
}
