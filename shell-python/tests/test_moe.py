"""The exchange of a mixture of experts, against a gather by routes in numpy, whose numbers are all exact."""

import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import immwire
import numpy as np
import pytest
from conftest import PATIENCE
from immwire import moe

HIDDEN = 16
TOP_K = 4
MAX_TOKENS = 12


def to_bf16(values):
    """Values that bf16 has exactly, as its bits."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


#: How numbers are stored, and read again.
FORMATS = {
    "bfloat16": (to_bf16, from_bf16),
    "float16": (lambda values: np.asarray(values, np.float16), lambda stored: stored.astype(np.float32)),
}


def made_up(seed, tokens, experts, scale_bytes=0):
    """Small whole numbers, distinct experts or none, weights that are powers of two."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, (tokens, HIDDEN)).astype(np.float32)
    indices = np.array([rng.permutation(experts)[:TOP_K] for _ in range(tokens)], np.int32)
    indices = indices.reshape(tokens, TOP_K)
    indices[rng.random(indices.shape) < 0.25] = -1
    weights = rng.choice([0.25, 0.5, 1, 2], indices.shape).astype(np.float32)
    return x, indices, weights, rng.integers(0, 256, (tokens, scale_bytes), np.uint8)


def expected_results(x, indices, weights):
    """What experts make of it that multiply by their number and one more."""
    factors = np.where(indices < 0, 0, (indices + 1) * weights).sum(axis=1, dtype=np.float32)
    return factors[:, None] * x


class World:
    """Ranks of this process, each with an engine and, while it works, a thread of its own."""

    def __init__(self, ranks, **shape):
        self.shape = dict(top_k=TOP_K, max_tokens=MAX_TOKENS, hidden=HIDDEN) | shape
        self.engines = [immwire.TransferEngine(timeout=PATIENCE) for _ in range(ranks)]
        opened = [
            moe.HostAllToAll.open(engine, rank=i, **self.shape) for i, engine in enumerate(self.engines)
        ]
        self.seats = [bytes(joining.seat) for joining in opened]
        self.pool = ThreadPoolExecutor(ranks)
        self.exchanges = list(self.pool.map(lambda joining: joining.join(self.seats), opened))

    def each(self, function):
        """``function(rank, exchange)`` at every rank."""
        return list(self.pool.map(function, range(len(self.exchanges)), self.exchanges))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pool.shutdown()
        for exchange in self.exchanges:
            exchange.close()
        for engine in self.engines:
            engine.close()


def layer(
    exchange, inputs, first, dtype="bfloat16", scale_bytes=0, padding=1, halves=False, onto=None, slots=False
):
    """One round; returns what was received, its rows and scales, and the results."""
    to, back = FORMATS[dtype]
    x, indices, weights, scales = inputs
    stored = to(x)
    room = exchange.max_slots if slots else exchange.max_rows
    rows = np.full((room, HIDDEN), 77, stored.dtype)
    row_scales = np.full((room, scale_bytes), 77, np.uint8)
    with_scales = dict(scales=scales, out_scales=row_scales) if scale_bytes else {}
    named = np.full(exchange.max_rows, 55, np.int32)
    lent = dict(out=rows, **with_scales, **(dict(slots=named) if slots else {}))
    if halves:
        sent = stored.copy()
        assert exchange.dispatch(sent, indices, weights, **lent, half="send") is None
        # What counts is what it was.
        sent[:] = 0
        received = exchange.dispatch(sent, indices, weights, **lent, half="receive")
    else:
        received = exchange.dispatch(stored, indices, weights, **lent)
    if slots:
        # As if they had come by rows.
        end = received.offsets[-1]
        assert (named[end:] == 55).all() and (named[:end] < room).all()
        unused = np.setdiff1d(np.arange(room), named[:end])
        assert (rows[unused] == 77).all() and (row_scales[unused] == 77).all()
        gathered = np.full((exchange.max_rows, HIDDEN), 77, stored.dtype)
        gathered[:end] = np.where(named[:end, None] < 0, np.zeros_like(rows[:1]), rows[named[:end]])
        row_scales = np.concatenate([row_scales[named[:end]], row_scales[:0]])
        rows = gathered
    y = np.full_like(rows, 99)
    bounds = zip(received.offsets, received.offsets[1:], received.counts, strict=False)
    for expert, (start, stop, count) in enumerate(bounds, first):
        assert start % padding == 0
        y[start : start + count] = to(back(rows[start : start + count]) * (expert + 1))
        assert not rows[start + count : stop].any()
    assert (rows[received.offsets[-1] :] == 77).all()
    out = np.full_like(stored, 55) if onto is None else to(onto)
    how = dict(out=out, accumulate=onto is not None)
    if halves:
        exchange.combine(y, **how, half="send")
        y[:] = 0
        exchange.combine(y, **how, half="receive")
    else:
        exchange.combine(y, **how)
    return received, rows, row_scales, back(out)


SHAPES = {
    "two ranks": (2, dict(experts=8, world=2), [0, 4, 8]),
    "three ranks, uneven": (3, dict(firsts=[0, 5, 5, 9], padding=4, chunk_tokens=5), [0, 5, 5, 9]),
    "three ranks, fp16, scales": (3, dict(experts=7, world=3, dtype="float16", scale_bytes=8), [0, 3, 5, 7]),
    "alone": (1, dict(experts=4, world=1), [0, 4]),
    "three ranks, exact": (3, dict(firsts=[0, 1, 5, 9], exact=True, chunk_tokens=5), [0, 1, 5, 9]),
}


@pytest.mark.parametrize(("world", "shape", "firsts"), SHAPES.values(), ids=SHAPES.keys())
def test_rounds_are_as_a_gather_by_routes(world, shape, firsts):
    options = {key: shape[key] for key in ("dtype", "scale_bytes", "padding") if key in shape}
    _, back = FORMATS[shape.get("dtype", "bfloat16")]
    with World(world, **shape) as ranks:
        for turn in range(3):
            # In the second round rank 0 has no tokens, in the third none has but one.
            tokens = [0 if turn == 1 and rank == 0 else MAX_TOKENS - rank for rank in range(world)]
            if turn == 2:
                tokens = [0] * (world - 1) + [1]
            inputs = [
                made_up(10 * turn + rank, tokens[rank], firsts[-1], shape.get("scale_bytes", 0))
                for rank in range(world)
            ]
            # From the second round on in halves; in the third onto what it brings: twice that is exact.
            wanted_results = [expected_results(*own[:3]) for own in inputs]
            ways = [
                dict(halves=turn > 0, slots=turn != 1, onto=wanted_results[rank] if turn == 2 else None)
                | options
                for rank in range(world)
            ]
            rounds = ranks.each(
                lambda rank, exchange, inputs=inputs, ways=ways: layer(
                    exchange, inputs[rank], firsts[rank], **ways[rank]
                )
            )
            for rank, (received, rows, row_scales, results) in enumerate(rounds):
                local = range(firsts[rank], firsts[rank + 1])
                assert len(received.counts) == len(local)
                assert len(received.offsets) == len(local) + 1
                for start, count, expert in zip(received.offsets, received.counts, local, strict=False):
                    # By source, then by token.
                    chosen = [(indices == expert).any(axis=1) for _, indices, _, _ in inputs]
                    wanted = np.concatenate([x[mask] for (x, *_), mask in zip(inputs, chosen, strict=True)])
                    assert count == len(wanted)
                    assert (back(rows[start : start + count]) == wanted).all()
                    wanted = np.concatenate([own[3][mask] for own, mask in zip(inputs, chosen, strict=True)])
                    assert (row_scales[start : start + count] == wanted).all()
                assert (results == wanted_results[rank] * (2 if turn == 2 else 1)).all()
        assert [exchange.rounds for exchange in ranks.exchanges] == [3] * world


def test_slots_of_no_token_are_anybodys_while_the_call_waits():
    with World(2, experts=4, world=2, scale_bytes=8) as ranks:
        inputs = [made_up(rank, 3, 4, 8) for rank in range(2)]
        room = ranks.exchanges[0].max_slots
        outs = [np.full((room, HIDDEN), 77, np.uint16) for _ in range(2)]
        out_scales = [np.full((room, 8), 77, np.uint8) for _ in range(2)]
        # Behind the three tokens of either rank.
        unused = [MAX_TOKENS - 1, 2 * MAX_TOKENS - 1]
        before = ranks.engines[1].stats().immediates

        def work(rank, exchange):
            x, indices, weights, scales = inputs[rank]
            if rank == 1:
                # The other's call has sent all that it sends, a table and tokens, and waits for this one's.
                until = time.monotonic() + PATIENCE
                while ranks.engines[1].stats().immediates < before + 2:
                    assert time.monotonic() < until, "it sends nothing"
                    time.sleep(0.001)
                outs[0][unused] = 5
                out_scales[0][unused] = 5
            slots = np.zeros(exchange.max_rows, np.int32)
            lent = dict(out=outs[rank], out_scales=out_scales[rank], slots=slots)
            received = exchange.dispatch(to_bf16(x), indices, weights, scales, **lent)
            used = set(slots[: received.offsets[-1]])
            for source, (theirs, chosen, _, their_scales) in enumerate(inputs):
                for token in range(3):
                    slot = source * MAX_TOKENS + token
                    assert (slot in used) == bool((chosen[token] // 2 == rank).any())
                    if slot in used:
                        assert (from_bf16(outs[rank][slot]) == theirs[token]).all()
                        assert (out_scales[rank][slot] == their_scales[token]).all()
            exchange.combine(np.zeros((exchange.max_rows, HIDDEN), np.uint16), out=np.zeros_like(to_bf16(x)))

        ranks.each(work)
        assert (outs[0][unused] == 5).all() and (out_scales[0][unused] == 5).all()
        assert (outs[1][unused] == 77).all()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_exact_sums_are_those_of_one_machine_wherever_experts_are(world):
    def work(rank, exchange):
        rng = np.random.default_rng(rank)
        x = rng.standard_normal((MAX_TOKENS, HIDDEN)).astype(np.float16)
        _, indices, _, _ = made_up(rank, MAX_TOKENS, 6)
        weights = rng.random(indices.shape, np.float32)
        rows, out = np.empty((exchange.max_rows, HIDDEN), np.float16), np.empty_like(x)
        received = exchange.dispatch(x, indices, weights, out=rows)
        first = 6 // world * rank
        for expert, row, count in zip(range(first, 6), received.offsets, received.counts, strict=False):
            rows[row : row + count] = np.tanh(rows[row : row + count] * np.float16(expert + 0.3))
        exchange.combine(rows, out=out)
        # In the order of choices, in float32, rounded once.
        total = np.zeros(x.shape, np.float32)
        for choice in range(TOP_K):
            expert = indices[:, choice, None]
            y = np.tanh(x * (expert + 0.3).astype(np.float16)).astype(np.float32)
            total += np.where(expert < 0, np.float32(0), weights[:, choice, None] * y)
        return (out.view(np.uint16) == total.astype(np.float16).view(np.uint16)).all()

    with World(world, experts=6, world=world, dtype="float16", exact=True) as ranks:
        assert ranks.each(work) == [True] * world
    if world > 1:
        with World(world, experts=6, world=world, dtype="float16") as ranks:
            assert not all(ranks.each(work)), "sums of each rank are rounded once more"


def process(connection, rank, world):
    with immwire.TransferEngine(timeout=PATIENCE) as engine:
        shape = dict(experts=6, world=world, top_k=TOP_K, max_tokens=MAX_TOKENS, hidden=HIDDEN)
        joining = moe.HostAllToAll.open(engine, rank=rank, **shape)
        connection.send(joining.seat)
        with joining.join(connection.recv()) as exchange:
            for turn in range(3):
                inputs = made_up(10 * turn + rank, 3 * rank, 6)
                _, _, _, results = layer(exchange, inputs, 6 // world * rank)
                connection.send(bool((results == expected_results(*inputs[:3])).all()))
            connection.recv()


def test_three_processes():
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(3)]
    started = [
        context.Process(target=process, args=(theirs, rank, 3), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for each in started:
        each.start()
    ours = [mine for mine, _ in pipes]
    seats = [connection.recv() for connection in ours]
    for connection in ours:
        connection.send(seats)
    for _ in range(3):
        assert [connection.recv() for connection in ours] == [True] * 3
    for connection in ours:
        connection.send(None)
    for each in started:
        each.join(PATIENCE)
        assert each.exitcode == 0


def member(connection, rank, world):
    """Does what it is told, until it is told nothing more."""
    shape = dict(experts=2 * world, world=world, top_k=TOP_K, max_tokens=MAX_TOKENS, hidden=HIDDEN)
    with immwire.TransferEngine(timeout=PATIENCE) as engine:
        joining, exchange = None, None
        for order, given in iter(connection.recv, None):
            if order == "open":
                if exchange is not None:
                    exchange.close()
                joining = moe.HostAllToAll.open(engine, rank=rank, **shape)
                connection.send(joining.seat)
            elif order == "join":
                exchange = joining.join(given)
                connection.send(exchange.active_ranks)
            else:
                x, indices, weights, scales = made_up(given + rank, 5, 2 * world)
                _, _, _, results = layer(exchange, (x, indices, weights, scales), 2 * rank)
                active = exchange.active_ranks
                theirs = np.where(np.isin(indices // 2, active), indices, -1)
                connection.send((active, bool((results == expected_results(x, theirs, weights)).all())))


def test_a_process_that_is_killed_is_left_out_and_another_takes_its_place():
    context = multiprocessing.get_context("spawn")

    def start(rank):
        mine, theirs = context.Pipe()
        started = context.Process(target=member, args=(theirs, rank, 3), daemon=True)
        started.start()
        return started, mine

    def tell(order, given=None, ranks=range(3)):
        for rank in ranks:
            ranks_of[rank][1].send((order, given))
        return [ranks_of[rank][1].recv() for rank in ranks]

    ranks_of = [start(rank) for rank in range(3)]
    assert tell("join", tell("open")) == [[0, 1, 2]] * 3
    assert tell("round", 0) == [([0, 1, 2], True)] * 3
    ranks_of[2][0].kill()
    ranks_of[2][0].join(PATIENCE)
    begun = time.monotonic()
    for seed in (10, 20):
        assert tell("round", seed, range(2)) == [([0, 1], True)] * 2
    assert time.monotonic() - begun < PATIENCE / 2
    # No other process starts again.
    ranks_of[2] = start(2)
    assert tell("join", tell("open")) == [[0, 1, 2]] * 3
    assert tell("round", 30) == [([0, 1, 2], True)] * 3
    for started, connection in ranks_of:
        connection.send(None)
        started.join(PATIENCE)
        assert started.exitcode == 0


def test_whatever_has_memory_is_taken():
    class Interface:
        def __init__(self, array):
            self.array = array
            self.__array_interface__ = array.__array_interface__

    class Tensor:
        def __init__(self, array):
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    with World(1, experts=4, world=1) as ranks:
        (exchange,) = ranks.exchanges
        x, indices, weights, _ = made_up(1, 5, 4)
        rows = np.zeros((exchange.max_rows, HIDDEN), np.uint16)
        for lent in (bytes, bytearray, memoryview, Interface, Tensor, lambda a: (a.ctypes.data, a.nbytes)):
            stored, out = to_bf16(x), np.zeros((5, HIDDEN), np.uint16)
            exchange.dispatch(lent(stored), indices, weights, out=rows)
            exchange.combine(lent(rows), out=memoryview(out))
            factors = np.where(indices < 0, 0, weights).sum(axis=1)
            assert (from_bf16(out) == factors[:, None] * x).all()
        # Regions of an engine, too.
        engine = ranks.engines[0]
        source, rows = engine.alloc(stored.nbytes), engine.alloc(rows.nbytes)
        source.write(0, stored)
        exchange.dispatch(source, indices, weights, out=rows)
        exchange.combine(rows, out=source)
        assert (source.read() == out.tobytes()) and out.any()


def test_what_does_not_fit_is_refused_and_the_round_can_go_on():
    with World(1, experts=4, world=1) as ranks:
        (exchange,) = ranks.exchanges
        x, indices, weights, _ = made_up(3, 6, 4)
        x = to_bf16(x)
        rows, out = np.zeros((exchange.max_rows, HIDDEN), np.uint16), np.zeros((6, HIDDEN), np.uint16)

        def refused(error, match, x=x, indices=indices, weights=weights, out=rows, **more):
            with pytest.raises(error, match=match):
                exchange.dispatch(x, indices, weights, out=out, **more)

        refused(TypeError, 'indices are int32, not "l" of 8 bytes', indices=indices.astype(np.int64))
        refused(TypeError, "indices are int32", indices=indices.astype(np.uint32))
        refused(TypeError, "indices are int32", indices=indices.astype(">i4"))
        refused(TypeError, 'weights are float32, not "d"', weights=weights.astype(np.float64))
        refused(TypeError, "weights are float32", weights=weights.view(np.int32))
        refused(TypeError, "bytes-like", indices=indices.tolist())
        refused(immwire.RequestError, r"indices have the shape \[24\]", indices=indices.ravel())
        refused(immwire.RequestError, r"weights have the shape \[6, 3\]", weights=weights[:, :3].copy())
        refused(immwire.RequestError, "weights has 20 entries instead of 24", weights=weights[:5])
        refused(immwire.RequestError, "x has 160 entries instead of 192", x=x[:5])
        refused(ValueError, "contiguous", x=np.asfortranarray(x))
        refused(ValueError, "contiguous", weights=np.asfortranarray(weights))
        refused(immwire.RequestError, "of 4 experts", indices=indices + 9)
        refused(immwire.RequestError, "once more", indices=np.zeros_like(indices))
        refused(immwire.RequestError, "out is read only", out=bytes(rows))
        slots = np.zeros(exchange.max_rows, np.int32)
        refused(TypeError, 'slots are int32, not "l"', slots=slots.astype(np.int64))
        refused(immwire.RequestError, "slots is read only", slots=memoryview(slots).toreadonly())
        refused(immwire.RequestError, "bytes of slots for tokens has 96", slots=slots, out=rows[:3])
        refused(immwire.UnsupportedMemory, "no memory", x=17)
        refused(immwire.RequestError, "scales was given", scales=x)
        refused(immwire.RequestError, "out_scales was given", out_scales=rows)
        refused(ValueError, "not a time", timeout=-1)
        many = made_up(3, MAX_TOKENS + 1, 4)
        refused(immwire.RequestError, "tokens", to_bf16(many[0]), many[1], many[2])
        refused(immwire.RequestError, 'half is "left"', half="left")
        refused(immwire.RequestError, "dispatch comes next", half="receive")
        with pytest.raises(immwire.RequestError, match="dispatch comes next"):
            exchange.combine(rows, out=out)
        # Nothing of all that was sent.
        received = exchange.dispatch(x, indices, weights, out=rows)
        with pytest.raises(immwire.RequestError, match="combine comes next"):
            exchange.dispatch(x, indices, weights, out=rows)
        with pytest.raises(immwire.RequestError, match="out has 160 entries"):
            exchange.combine(rows, out=out[:5])
        with pytest.raises(immwire.RequestError, match="y has"):
            exchange.combine(rows[: received.offsets[-1] - 1], out=out)
        exchange.combine(rows, out=out)
        assert exchange.rounds == 1


def test_calls_refused_between_halves_change_nothing():
    shape = dict(experts=4, world=2, chunk_tokens=2)
    with World(2, **shape) as ranks:
        inputs = [made_up(rank, 7, 4) for rank in range(2)]
        rubbish = made_up(9, 7, 4)

        def rank(rank, exchange):
            x, indices, weights, _ = inputs[rank]
            stored = to_bf16(x)
            rows = np.zeros((exchange.max_rows, HIDDEN), np.uint16)

            def refused(call, *arguments, **more):
                with pytest.raises(immwire.RequestError):
                    call(*arguments, **more)

            exchange.dispatch(stored, indices, weights, out=rows, half="send")
            refused(exchange.dispatch, to_bf16(rubbish[0]), *rubbish[1:3], out=rows)
            refused(
                exchange.dispatch,
                to_bf16(rubbish[0][:3]),
                rubbish[1][:3],
                rubbish[2][:3],
                out=rows,
                half="send",
            )
            refused(exchange.combine, np.full_like(rows, 9), out=np.zeros_like(stored))
            received = exchange.dispatch(stored, indices, weights, out=rows, half="receive")
            y = rows.copy()
            for start, count, expert in zip(
                received.offsets, received.counts, range(2 * rank, 9), strict=False
            ):
                y[start : start + count] = to_bf16(from_bf16(rows[start : start + count]) * (expert + 1))
            out = np.zeros_like(stored)
            exchange.combine(y, out=out, half="send")
            refused(exchange.combine, np.full_like(rows, 9), out=out)
            refused(exchange.dispatch, to_bf16(rubbish[0]), *rubbish[1:3], out=rows, half="send")
            refused(exchange.combine, y, out=out[:3], half="receive")
            exchange.combine(y, out=out, half="receive")
            assert (from_bf16(out) == expected_results(x, indices, weights)).all()

        ranks.each(rank)


def test_scales_are_missed_before_anything_is_sent():
    with World(1, experts=4, world=1, scale_bytes=8) as ranks:
        (exchange,) = ranks.exchanges
        x, indices, weights, scales = made_up(3, 2, 4, 8)
        rows = np.zeros((exchange.max_rows, HIDDEN), np.uint16)
        call = dict(x=to_bf16(x), indices=indices, weights=weights, out=rows)
        with pytest.raises(immwire.RequestError, match="scales is missing"):
            exchange.dispatch(**call, out_scales=bytearray(1000))
        with pytest.raises(immwire.RequestError, match="out_scales is missing"):
            exchange.dispatch(**call, scales=scales)
        exchange.dispatch(**call, scales=scales, out_scales=bytearray(1000))


def test_memory_for_too_few_rows_ends_the_exchange():
    with World(1, experts=4, world=1) as ranks:
        (exchange,) = ranks.exchanges
        x, _, weights, _ = made_up(3, 2, 4)
        indices = np.tile(np.arange(4, dtype=np.int32), (2, 1))
        rows = np.full((7, HIDDEN), 3, np.uint16)
        with pytest.raises(moe.MoeError, match="8 rows arrived, memory was lent for 7"):
            exchange.dispatch(to_bf16(x), indices, weights, out=rows)
        assert (rows == 3).all()
        with pytest.raises(moe.MoeError, match="earlier round failed"):
            exchange.dispatch(to_bf16(x), indices, weights, out=rows)


def test_shapes_that_cannot_be():
    with immwire.TransferEngine() as engine:

        def refused(match, **shape):
            given = dict(rank=0, top_k=2, max_tokens=4, hidden=8, experts=4, world=2) | shape
            with pytest.raises(immwire.ConfigError, match=match):
                moe.HostAllToAll.open(engine, **given)

        refused("rank 2 of 2", rank=2)
        refused("choices", top_k=0)
        refused("16", hidden=7)
        refused("float16", dtype="float32")
        refused("give the two, or the one", firsts=[0, 2, 4])
        refused("give the two, or the one", world=None)
        refused("experts", experts=0)
        refused("1 entries|ranks", world=0)
        refused("entries|ranks", world=2**32 - 1)
        refused("padding is 1", padding=0)
        refused("chunk_tokens is 1", chunk_tokens=0)
        joining = moe.HostAllToAll.open(engine, rank=0, top_k=2, max_tokens=4, hidden=8, firsts=[0, 3, 4])
        assert repr(joining).startswith("<Joining rank 0 of 2, 3 of 4 experts from 0 on")
        with pytest.raises(immwire.RequestError, match="seat 1: a seat does not have 3 bytes"):
            joining.join([joining.seat, b"abc"])
        with pytest.raises(immwire.RequestError, match="1 seats for 2 ranks"):
            joining.join([joining.seat])
        # Neither has begun anything: it can be called with the right ones, whose ranks do not come here.
        with pytest.raises(immwire.MoeError, match="1"):
            joining.join([joining.seat, joining.seat], timeout=0.05)
        with pytest.raises(immwire.EngineClosed, match="exchange is closed"):
            joining.join([joining.seat, joining.seat])


def test_a_second_join_says_that_there_was_a_first():
    with immwire.TransferEngine() as engine:
        joining = moe.HostAllToAll.open(engine, rank=0, top_k=1, max_tokens=4, hidden=8, experts=2, world=1)
        exchange = joining.join([joining.seat])
        with pytest.raises(immwire.RequestError, match="joined already"):
            joining.join([joining.seat])
        assert not exchange.closed
        exchange.close()
        with pytest.raises(immwire.EngineClosed, match="exchange is closed"):
            joining.join([joining.seat])


def test_another_shape_is_told_by_its_rank():
    with immwire.TransferEngine() as one, immwire.TransferEngine() as other:
        shape = dict(top_k=2, max_tokens=4, hidden=8, world=2)
        mine = moe.HostAllToAll.open(one, rank=0, experts=4, **shape)
        theirs = moe.HostAllToAll.open(other, rank=1, experts=6, **shape)
        with pytest.raises(moe.MoeError, match="another shape") as raised:
            mine.join([mine.seat, theirs.seat])
        assert raised.value.ranks == (1,)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_rank_that_does_not_come_is_left_out_and_named(phase):
    with World(3, experts=6, world=3) as ranks:
        inputs = [made_up(rank, 4, 6) for rank in range(3)]
        rows = [np.zeros((exchange.max_rows, HIDDEN), np.uint16) for exchange in ranks.exchanges]
        back, all_dispatched, both = (threading.Barrier(count) for count in (3, 3, 2))

        def come(send, writes):
            """Sends, as the other one does that comes; returns once as many writes of each have come to the
            other, and to rank 2: from then on that one alone is waited for."""

            def immediates():
                return [engine.stats().immediates for engine in ranks.engines]

            before = immediates()
            both.wait(PATIENCE)
            send()
            until = time.monotonic() + PATIENCE
            while any(
                now < then + times * writes
                for now, then, times in zip(immediates(), before, (1, 1, 2), strict=True)
            ):
                assert time.monotonic() < until, "not all has come"
                time.sleep(0.001)
            both.wait(PATIENCE)

        def dispatch(rank, exchange, timeout=None):
            x, indices, weights, _ = inputs[rank]
            call = dict(x=to_bf16(x), indices=indices, weights=weights, out=rows[rank])
            if timeout is None:
                received = exchange.dispatch(**call)
            else:
                # A table, and tokens.
                come(lambda: exchange.dispatch(**call, half="send"), 2)
                begun = time.monotonic()
                received = exchange.dispatch(**call, half="receive", timeout=timeout)
                assert 0.9 < time.monotonic() - begun < PATIENCE / 2
            for expert, start, count in zip(range(2), received.offsets, received.counts, strict=False):
                values = from_bf16(rows[rank][start : start + count])
                rows[rank][start : start + count] = to_bf16(values * (2 * rank + expert + 1))
            return received

        def combine(rank, exchange, timeout=None):
            results = np.full((4, HIDDEN), 9, np.uint16)
            call = dict(y=rows[rank], out=results)
            if timeout is None:
                exchange.combine(**call)
            else:
                come(lambda: exchange.combine(**call, half="send"), 1)
                exchange.combine(**call, half="receive", timeout=timeout)
            return from_bf16(results)

        def work(rank, exchange):
            if phase == "combine":
                dispatch(rank, exchange)
                all_dispatched.wait(PATIENCE)
            if rank == 2:
                back.wait(PATIENCE)
                # It comes late, and learns that the others go on without it.
                if phase == "dispatch":
                    dispatch(rank, exchange)
                combine(rank, exchange)
                # All that it needed had come before: word of one of them may be under way still. The next
                # round waits for it.
                if set(exchange.report().left_by) != {0, 1}:
                    dispatch(rank, exchange)
                assert set(exchange.report().left_by) == {0, 1}
                assert exchange.active_ranks == [2]
                return
            if phase == "dispatch":
                dispatch(rank, exchange, 1)
            x, indices, weights, _ = inputs[rank]
            theirs = np.where(indices < 4, indices, -1)
            # Who was left out by the dispatch is not waited for.
            results = combine(rank, exchange, 1 if phase == "combine" else None)
            assert (results == expected_results(x, theirs, weights)).all()
            report = exchange.report()
            late = {"dispatch": report.late_tables, "combine": report.late_results}
            assert report
            assert late == {name: {2: 1} if name == phase else {} for name in late}
            assert (report.late_tokens, report.left_by, report.refused) == ({}, {}, None)
            assert report.reasons == {2: "nothing came within 1s"}
            assert "{2: 1}" in repr(report)
            assert exchange.active_ranks == [0, 1]
            back.wait(PATIENCE)
            # It is not waited for, and what it does meanwhile is in nobody's way.
            for _ in range(3):
                received = dispatch(rank, exchange)
                assert sum(received.counts) == sum(
                    (inputs[source][1] // 2 == rank).sum() for source in range(2)
                )
                assert (combine(rank, exchange) == expected_results(x, theirs, weights)).all()

        assert [exchange.active_ranks for exchange in ranks.exchanges] == [[0, 1, 2]] * 3
        assert not ranks.exchanges[0].report()
        assert repr(ranks.exchanges[0].report()) == "MoeReport(nothing went wrong)"
        ranks.each(work)


def test_a_rank_that_is_gone_is_named():
    with World(2, experts=4, world=2) as ranks:
        ranks.engines[1].close()
        x, indices, weights, _ = made_up(1, 4, 4)
        rows = np.full((ranks.exchanges[0].max_rows, HIDDEN), 7, np.uint16)
        begun = time.monotonic()
        received = ranks.exchanges[0].dispatch(to_bf16(x), indices, weights, out=rows)
        assert time.monotonic() - begun < PATIENCE / 2
        assert sum(received.counts) == ((indices >= 0) & (indices < 2)).sum()
        assert ranks.exchanges[0].active_ranks == [0]
        assert list(ranks.exchanges[0].report().reasons) == [1]
        assert ranks.exchanges[1].closed
        with pytest.raises(immwire.EngineClosed):
            ranks.exchanges[1].dispatch(to_bf16(x), indices, weights, out=rows)


def under_way(ranks, call):
    """A call of rank 0's in a thread of its own, once something of it has come to rank 1."""

    def come():
        return ranks.engines[1].stats().immediates

    before, until = come(), time.monotonic() + PATIENCE
    begun = ranks.pool.submit(call)
    while come() == before:
        assert time.monotonic() < until, "it sends nothing"
        time.sleep(0.001)
    return begun


def test_an_abort_ends_the_waits_of_its_rank():
    with World(2, experts=4, world=2) as ranks:
        exchange = ranks.exchanges[0]
        x, indices, weights, _ = made_up(1, 4, 4)
        rows = np.zeros((exchange.max_rows, HIDDEN), np.uint16)
        call = under_way(ranks, lambda: exchange.dispatch(to_bf16(x), indices, weights, out=rows))
        # For it to wait. If it does not yet, it is not to begin.
        time.sleep(0.1)
        # Neither waits for the call.
        assert not call.done()
        assert exchange.active_ranks == [0, 1]
        begun = time.monotonic()
        exchange.abort()
        call.result(PATIENCE)
        assert time.monotonic() - begun < PATIENCE / 2
        assert exchange.report().reasons == {1: "the wait for it was aborted"}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told():
    with World(1, experts=4, world=1) as ranks:
        (exchange,) = ranks.exchanges
        x, indices, weights, _ = made_up(1, 2, 4)
        rows = np.zeros((exchange.max_rows, HIDDEN), np.uint16)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for attempt in (
                    lambda: exchange.dispatch(to_bf16(x), indices, weights, out=rows),
                    lambda: exchange.combine(rows, out=rows[:2]),
                    exchange.report,
                    lambda: exchange.active_ranks,
                    exchange.abort,
                    exchange.close,
                ):
                    with pytest.raises(immwire.ForkedError):
                        attempt()
                os.write(write, b"told")
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as answer:
            assert answer.read() == b"told"
        os.waitpid(child, 0)
        exchange.dispatch(to_bf16(x), indices, weights, out=rows)


def test_two_threads_do_not_share_a_call_and_others_run_meanwhile():
    with World(2, experts=4, world=2) as ranks:
        exchange = ranks.exchanges[0]
        x, indices, weights, _ = made_up(1, 4, 4)
        x = to_bf16(x)
        rows = bytearray(exchange.max_rows * HIDDEN * 2)
        call = under_way(ranks, lambda: exchange.dispatch(x, indices, weights, out=rows))
        with pytest.raises(immwire.RequestError, match="another thread"):
            exchange.dispatch(x, indices, weights, out=bytearray(len(rows)))
        with pytest.raises(BufferError):
            rows.append(0)  # It stays where it is while it may be written to.
        assert not exchange.closed
        assert not call.done()
        exchange.abort()
        call.result(PATIENCE)
        rows.append(0)


def test_the_engine_lives_as_long_as_its_exchange_and_closes_it():
    def alone():
        joining = moe.HostAllToAll.open(
            immwire.TransferEngine(), rank=0, top_k=1, max_tokens=4, hidden=8, experts=1, world=1
        )
        return joining.join([joining.seat])

    exchange = alone()
    x, indices, weights = np.ones((1, 8), np.uint16), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    rows = np.zeros((exchange.max_rows, 8), np.uint16)
    assert repr(exchange) == "<HostAllToAll rank 0 of 1, 1 of 1 experts from 0 on, 0 rounds>"
    received = exchange.dispatch(x, indices, weights, out=rows)
    assert repr(received) == "Received(counts=[1], offsets=[0, 1])"
    exchange.close()
    exchange.close()
    assert repr(exchange).endswith("0 rounds, closed>")
    with pytest.raises(immwire.EngineClosed, match="exchange"):
        exchange.combine(rows, out=x)

    with ExitStack() as stack:
        engine = stack.enter_context(immwire.TransferEngine())
        joining = moe.HostAllToAll.open(engine, rank=0, top_k=1, max_tokens=4, hidden=8, experts=1, world=1)
        exchange = joining.join([joining.seat])
        stack.enter_context(exchange)
        engine.close()
        assert exchange.closed
