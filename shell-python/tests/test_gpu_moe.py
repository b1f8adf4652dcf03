"""The exchange among GPUs, on the stand-in for the CUDA driver, which runs the kernels' own text on the CPU.

Cases are processes of their own, as in test_gpu. On a machine with two GPUs they run on these as well:
`python test_gpu_moe.py` runs all, and `python test_gpu_moe.py case_...` one.
"""

import ctypes
import multiprocessing.pool
import os
import random
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress

import immwire
import numpy as np
import pytest
from conftest import PATIENCE, join
from immwire import moe
from test_gpu import allocated, dlpack, driver, interface, on_the_stand_in
from test_moe import FORMATS, HIDDEN, MAX_TOKENS, TOP_K, expected_results, from_bf16, made_up, to_bf16

EXPERTS, SCALES, PADDING = 6, 8, 4


class Array:
    """Memory of a GPU, to be passed as a framework's tensor is."""

    def __init__(self, engine, device, content):
        content = np.ascontiguousarray(content)
        self.dtype, self.shape = content.dtype, content.shape
        self.region = engine.alloc(max(content.nbytes, 1), device=device)
        self.region.write(0, content)
        self.__cuda_array_interface__ = dict(
            data=(self.region.ptr if content.nbytes else 0, False),
            shape=self.shape,
            typestr=self.dtype.str,
            version=3,
        )

    def read(self):
        count = int(np.prod(self.shape))
        return np.frombuffer(self.region.read(), self.dtype, count).reshape(self.shape)


class Rank:
    """One rank: an engine, of its own or another's, and an exchange on its GPU."""

    def __init__(self, number, world, engine=None, **shape):
        self.number, self.device = number, number % 2
        self.engine = engine or immwire.TransferEngine(gpus=[self.device], timeout=PATIENCE)
        options = dict(experts=EXPERTS, world=world, top_k=TOP_K, max_tokens=MAX_TOKENS, hidden=HIDDEN, sms=2)
        options |= dict(patience=PATIENCE) | shape
        self.joining = moe.GpuAllToAll.open(self.engine, rank=number, device=self.device, **options)
        self.first = EXPERTS // world * number
        self.experts = EXPERTS // world

    def join(self, seats):
        self.exchange = self.joining.join(seats)
        return self

    def array(self, content):
        return Array(self.engine, self.device, content)

    def space(self, *shape, dtype=np.uint8):
        return self.array(np.full(shape, 77, dtype))

    def settle(self):
        driver(self.device, [("cuCtxSynchronize",)])

    def stream(self):
        """A stream of another library's, which does not wait for the default one. It is never destroyed."""
        stream = ctypes.c_void_p()
        driver(self.device, [("cuStreamCreate", ctypes.byref(stream), 1)])
        return stream.value

    def close(self):
        self.engine.close()


def start(*ranks):
    """Ranks of this process, joined in threads of their own."""
    seats = [rank.joining.seat for rank in ranks]
    with multiprocessing.pool.ThreadPool(len(ranks)) as pool:
        return pool.map(lambda rank: rank.join(seats), ranks)


class Round:
    """One rank's part of a round, half by half."""

    def __init__(
        self,
        rank,
        seed,
        tokens,
        scale_bytes=SCALES,
        wide=False,
        counted=False,
        slots=False,
        dtype="bfloat16",
        stream=0,
    ):
        self.rank, (self.to, self.back) = rank, FORMATS[dtype]
        self.inputs = x, indices, weights, scales = made_up(seed, tokens, EXPERTS, scale_bytes)
        self.tokens = tokens
        if counted:  # There is memory for one more, of which nothing is to be seen.
            x, indices, weights, scales = made_up(seed + 1, tokens + 1, EXPERTS, scale_bytes)
            for array, content in zip((x, indices, weights, scales), self.inputs, strict=True):
                array[:tokens] = content
        rows = rank.exchange.max_slots if slots else rank.exchange.max_rows
        self.x = rank.array(self.to(x))
        self.out = rank.space(rows, HIDDEN * 2)
        self.counts, self.offsets = (
            rank.space(rank.experts, dtype=np.int32),
            rank.space(rank.experts + 1, dtype=np.int32),
        )
        self.call = dict(
            x=self.x,
            indices=rank.array(indices.astype(np.int64) if wide else indices),
            weights=rank.array(weights),
            out=self.out,
            counts=self.counts,
            offsets=self.offsets,
            stream=stream,
        )
        self.stream = stream
        self.scales = None
        if scale_bytes:
            self.scales = rank.space(rows, scale_bytes)
            self.call |= dict(scales=rank.array(scales), out_scales=self.scales)
        self.slots = rank.space(rank.exchange.max_rows, dtype=np.int32) if slots else None
        if slots:
            self.call["slots"] = self.slots
        if counted:
            self.call["count"] = rank.array(np.array([tokens], np.int32))
        self.results = rank.space(len(x), HIDDEN, dtype=np.uint16)

    def dispatch(self, half="both"):
        self.rank.exchange.dispatch(**self.call, half=half)

    def work(self):
        """What the experts do: they multiply by their number and one more."""
        self.rank.settle()
        stored = self.to(np.zeros(0)).dtype
        self.rows, scales = self.out.read().view(stored), self.scales.read() if self.scales else None
        if self.slots:
            # As if they had come by rows.
            slots, blank = self.slots.read(), np.full_like(self.rows[:1], 77)
            blank.view(np.uint8)[:] = 77
            used = slots != 77
            named = np.where(used & (slots >= 0), slots, 0)
            self.rows = np.where((slots < 0)[:, None], 0, np.where(used[:, None], self.rows[named], blank))
            scales = scales[named] if scales is not None else None
        self.row_scales = scales
        y = np.full_like(self.rows, 99)
        offsets, counts = self.offsets.read(), self.counts.read()
        for expert, (row, count) in enumerate(zip(offsets, counts, strict=False), self.rank.first):
            y[row : row + count] = self.to(self.back(self.rows[row : row + count]) * (expert + 1))
        # Rows that nobody needs have no results.
        self.y = self.rank.array(y[: max(offsets[-1], 1)])

    def combine(self, half="both"):
        self.rank.exchange.combine(self.y, out=self.results, stream=self.stream, half=half)

    def check(self, others):
        """Rows and results are what follows from all ranks' inputs."""
        self.rank.settle()
        assert not self.rank.exchange.report(), self.rank.exchange.report()
        offsets, counts = self.offsets.read(), self.counts.read()
        for number in range(self.rank.experts):
            expert, row = self.rank.first + number, offsets[number]
            chosen = [(indices == expert).any(axis=1) for _, indices, _, _ in others]
            wanted = [
                np.concatenate([own[i][mask] for own, mask in zip(others, chosen, strict=True)])
                for i in (0, 3)
            ]
            assert (counts[number], row % PADDING) == (len(wanted[0]), 0)
            assert offsets[number + 1] == row + -(-counts[number] // PADDING) * PADDING
            found = self.back(self.rows[row : row + counts[number]])
            assert (found == wanted[0]).all(), (number, found, wanted[0])
            assert not self.rows[row + counts[number] : offsets[number + 1]].any()
            if wanted[1].size:
                assert (self.row_scales[row : row + counts[number]] == wanted[1]).all()
        assert (self.rows[offsets[-1] :].view(np.uint16) == 0x4D4D).all(), "rows that nobody sent"
        found = self.results.read()
        assert (self.back(found[: self.tokens]) == expected_results(*self.inputs[:3])).all()
        assert (found[self.tokens :] == 77).all(), "results of no token"


#: Whether indices have 64 bits, whether the number of tokens is in memory, and whether in halves.
STYLES = [(False, False, False), (True, True, True), (False, True, False)]

#: And whether each token is received once, in a slot.
SLOTS = [False, True, True]


def tokens_of(turn, rank):
    return (5, 0, MAX_TOKENS, 1)[(turn + rank) % 4]


def another(connection, number, world):
    """A rank in a process of its own."""
    rank = Rank(number, world, scale_bytes=SCALES, padding=PADDING, exact=world == 3)
    connection.send(rank.joining.seat)
    rank.join(connection.recv())
    for turn, ((wide, counted, halves), slots) in enumerate(zip(STYLES, SLOTS, strict=True)):
        tokens = tokens_of(turn, number)
        own = Round(rank, 10 * turn + number, tokens, wide=wide, counted=counted, slots=slots)
        for step in (own.dispatch, own.combine):
            for half in ("send", "receive") if halves else ("both",):
                step(half=half)
            if step == own.dispatch:
                own.work()
        own.check([made_up(10 * turn + i, tokens_of(turn, i), EXPERTS, SCALES) for i in range(world)])
        connection.send(f"round {turn}")
    connection.recv()
    rank.close()


def processes(world, function, *more):
    """One for each rank, with the seats of all; returns them and their pipes."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(world)]
    started = []
    for number, (_, theirs) in enumerate(pipes):
        process = context.Process(target=function, args=(theirs, number, world, *more), daemon=True)
        process.start()
        theirs.close()
        started.append(process)
    ours = [mine for mine, _ in pipes]
    seats = [connection.recv() for connection in ours]
    for connection in ours:
        connection.send(seats)
    return started, ours


def case_ranks_in_processes():
    for world in (2, 3):  # On two GPUs.
        started, ours = processes(world, another)
        for turn in range(len(STYLES)):
            assert [connection.recv() for connection in ours] == [f"round {turn}"] * world
        for connection in ours:
            connection.send(None)
        for process in started:
            process.join(PATIENCE)
            assert process.exitcode == 0


def case_ranks_in_one_process():
    with ExitStack() as stack:
        ranks = start(*(Rank(number, 2, dtype="float16") for number in range(2)))
        for rank in ranks:
            stack.callback(rank.close)
        assert repr(ranks[1].exchange) == "<GpuAllToAll rank 1 of 2, 3 of 6 experts from 3 on, GPU 1>"
        assert ranks[0].exchange.token_bytes == HIDDEN * 2
        assert ranks[0].exchange.nbytes > 2 * MAX_TOKENS * HIDDEN * 4
        for turn in range(2):
            both = [Round(rank, turn + rank.number, 4, 0, dtype="float16") for rank in ranks]
            for step in ("dispatch", "work", "combine"):
                for one in both:
                    getattr(one, step)()
            for one in both:
                one.rank.settle()
                found = one.back(one.results.read().view(np.float16))
                assert (found == expected_results(*one.inputs[:3])).all()
        # Once more, onto what is there.
        for step in ("dispatch", "work"):
            for one in both:
                getattr(one, step)()
        for one in both:
            one.rank.exchange.combine(one.y, out=one.results, accumulate=True, stream=0)
        for one in both:
            one.rank.settle()
            found = one.back(one.results.read().view(np.float16))
            assert (found == 2 * expected_results(*one.inputs[:3])).all()
        ranks[0].exchange.close()
        assert ranks[0].exchange.closed
        assert "closed" in repr(ranks[0].exchange)
        with pytest.raises(immwire.EngineClosed):
            both[0].dispatch()


def case_two_micro_batches_overlap():
    """Two exchanges on the same GPUs, each with a stream: either sends while the other's tokens travel."""
    drawn = random.Random(4)
    with ExitStack() as stack:
        shape = dict(world=2, padding=PADDING, scale_bytes=SCALES)
        first = start(*(Rank(number, **shape) for number in range(2)))
        for rank in first:
            stack.callback(rank.close)
        second = start(*(Rank(rank.number, engine=rank.engine, exact=True, **shape) for rank in first))
        streams = [rank.stream() for rank in (*first, *second)]
        for turn in range(8):
            batches = [
                Round(rank, 100 * turn + at, tokens_of(turn, at), slots=turn % 2 == 1, stream=streams[at])
                for at, rank in enumerate((*first, *second))
            ]
            for step in (Round.dispatch, Round.combine):
                # By rank: all that it sends, and all that it receives, of either first.
                for half in ("send", "receive"):
                    for one in drawn.sample(batches, 4):
                        step(one, half=half)
                if step is Round.dispatch:
                    for one in batches:
                        one.work()
            for at, one in enumerate(batches):
                both = range(2 * (at // 2), 2 * (at // 2) + 2)
                one.check([made_up(100 * turn + i, tokens_of(turn, i), EXPERTS, SCALES) for i in both])


def case_quantised():
    with ExitStack() as stack:
        ranks = start(*(Rank(number, 2, quantize="float32", hidden=256) for number in range(2)))
        for rank in ranks:
            stack.callback(rank.close)
        assert (ranks[0].exchange.token_bytes, ranks[0].exchange.scale_bytes) == (256, 8)
        # Exactly what e4m3 has: the largest of each 128 is 448, or 448 / 4.
        values = np.tile(np.array([1, -2, 0.5, 448], np.float32), (3, 64))
        values[:, 128:] /= 4
        codes = np.tile(np.array([0x38, 0xC0, 0x30, 0x7E], np.uint8), (3, 64))
        arrived = []
        for rank in ranks:
            out, scales = (
                rank.space(rank.exchange.max_rows, 256),
                rank.space(rank.exchange.max_rows, 2, dtype=np.float32),
            )
            counts, offsets = rank.space(3, dtype=np.int32), rank.space(4, dtype=np.int32)
            indices = rank.array(np.tile(np.array([0, 3, -1, -1], np.int32), (3, 1)))
            weights = rank.array(np.ones((3, TOP_K), np.float32))
            # They stay until the kernels have ended.
            call = dict(
                x=rank.array(to_bf16(values)), indices=indices, weights=weights, out=out, out_scales=scales
            )
            call |= dict(counts=counts, offsets=offsets, stream=0)
            rank.exchange.dispatch(**call)
            arrived.append((rank, call))
        results = [rank.space(3, 256, dtype=np.uint16) for rank in ranks]
        y = [rank.array(np.tile(to_bf16(values), (2, 1))) for rank in ranks]
        for rank, call in arrived:
            rank.settle()
            assert call["counts"].read().tolist() == [6, 0, 0]
            assert (call["out"].read()[:6].reshape(2, 3, 256) == codes).all()
            assert (call["out_scales"].read()[:6] == [1, 0.25]).all()
            rank.exchange.combine(y[rank.number], out=results[rank.number], stream=0)
        for rank in ranks:
            rank.settle()
            assert (from_bf16(results[rank.number].read()) == 2 * values).all()


def case_a_rank_that_is_late_is_named_and_all_start_over():
    with ExitStack() as stack:
        # For longer than this thread may be kept from having the second rank come after the first, below.
        ranks = start(*(Rank(number, 2, patience=4) for number in range(2)))
        for rank in ranks:
            stack.callback(rank.close)
        alone, never = (Round(rank, 3, 4, 0) for rank in ranks)
        assert ranks[0].exchange.active_ranks == [0, 1]
        alone.dispatch()
        ranks[0].settle()
        report = ranks[0].exchange.report()
        assert report
        assert (report.late_tables, report.late_tokens) == ({1: 1}, {})
        assert ranks[0].exchange.active_ranks == [0]
        assert "late_tables={1: 1}" in repr(report)
        alone.work()
        alone.combine()
        ranks[0].settle()
        # The results of the other's experts count as zeros.
        x, indices, weights, _ = alone.inputs
        mine = np.where(indices < ranks[1].first, indices, -1)
        assert (from_bf16(alone.results.read()) == expected_results(x, mine, weights)).all()
        # In the next round it is not waited for.
        begun = time.monotonic()
        alone.dispatch()
        alone.combine()
        ranks[0].settle()
        waited = time.monotonic() - begun
        assert ranks[0].exchange.report().late_tables == {1: 1}, waited
        with multiprocessing.pool.ThreadPool(2) as pool:
            pool.map(lambda rank: rank.exchange.start_over(), ranks)
        assert not ranks[0].exchange.report()
        assert ranks[0].exchange.active_ranks == [0, 1]
        for step in ("dispatch", "work", "combine"):
            for one in (alone, never):
                getattr(one, step)()
        for one in (alone, never):
            one.rank.settle()
            assert not one.rank.exchange.report()
            assert (from_bf16(one.results.read()) == expected_results(*one.inputs[:3])).all()
        # An abort ends waits at once.
        ranks[0].exchange.abort()
        alone.dispatch()
        ranks[0].settle()
        assert ranks[0].exchange.active_ranks == [0]
        with pytest.raises(moe.MoeTimeout) as raised:
            ranks[0].exchange.start_over(timeout=0.2)
        assert raised.value.ranks == (1,)
        with pytest.raises(moe.MoeError, match="earlier round failed"):
            alone.dispatch()


def case_what_goes_on_can_be_asked_for_and_aborted_at_any_time():
    with ExitStack() as stack:
        ranks = start(*(Rank(number, 2) for number in range(2)))
        for rank in ranks:
            stack.callback(rank.close)
        asked, done = [0], threading.Event()

        def ask():
            while not done.is_set():
                for rank in ranks:
                    assert not rank.exchange.report()
                    assert rank.exchange.active_ranks == [0, 1]
                asked[0] += 1

        with multiprocessing.pool.ThreadPool(1) as pool:
            asking = pool.apply_async(ask)
            turn = 0
            while turn < 20 or asked[0] < 100:
                rounds = [Round(rank, turn + rank.number, 3, 0) for rank in ranks]
                for step in ("dispatch", "work", "combine"):
                    for one in rounds:
                        getattr(one, step)()
                turn += 1
            for rank in ranks:
                rank.settle()
            done.set()
            asking.get(PATIENCE)

        # Rank 1 does not come: rank 0 would be kept waiting for three times the patience.
        def wait(alone, end):
            few = alone.rank.space(1, HIDDEN, dtype=np.uint16)
            alone.dispatch()
            thread = threading.Thread(target=end)
            thread.start()
            until = time.monotonic() + PATIENCE
            while True:
                # Refused in any case; for another reason while the thread is in its call.
                with pytest.raises(immwire.RequestError) as refused:
                    alone.rank.exchange.combine(alone.results, out=few, stream=0)
                if "another thread" in str(refused.value):
                    break
                assert time.monotonic() < until, "it does not begin"
                time.sleep(0.001)
            time.sleep(0.2)
            assert thread.is_alive()
            return thread

        failed = []

        def start_over():
            with pytest.raises(moe.MoeTimeout):
                while True:
                    # It is refused itself while that is asked.
                    with suppress(immwire.RequestError):
                        ranks[0].exchange.start_over(timeout=0.1)
                        break
            failed.append(True)

        alone = Round(ranks[0], 1, 3, 0)
        waiting = wait(alone, start_over)
        with pytest.raises(immwire.RequestError, match="another thread"):
            alone.dispatch()
        assert not ranks[0].exchange.report()
        ranks[0].exchange.abort()
        join(waiting)
        assert failed
        assert ranks[0].exchange.active_ranks == [0]
    with ExitStack() as stack:
        ranks = start(*(Rank(number, 2) for number in range(2)))
        for rank in ranks:
            stack.callback(rank.close)
        exchange = ranks[0].exchange
        waiting = wait(Round(ranks[0], 1, 3, 0), exchange.close)
        assert not exchange.closed
        assert exchange.active_ranks == [0, 1]
        exchange.abort()
        join(waiting)
        assert exchange.closed
        for call in (exchange.report, exchange.abort, lambda: exchange.active_ranks):
            with pytest.raises(immwire.EngineClosed, match="exchange is closed"):
                call()


def victim(connection, number, world):
    rank = Rank(number, world, patience=0.3)
    connection.send(rank.joining.seat)
    rank.join(connection.recv())
    connection.send("joined")
    if number == 1:
        time.sleep(PATIENCE)
    assert connection.recv() == "it is dead"
    own = Round(rank, 3, 4, 0)
    own.dispatch()
    own.work()
    own.combine()
    rank.settle()
    with pytest.raises(moe.RankError) as raised:
        rank.exchange.start_over()
    connection.send((rank.exchange.active_ranks, raised.value.ranks))
    rank.close()


def case_a_process_that_is_killed_is_named():
    started, ours = processes(2, victim)
    assert [connection.recv() for connection in ours] == ["joined", "joined"]
    os.kill(started[1].pid, signal.SIGKILL)
    started[1].join(PATIENCE)
    ours[0].send("it is dead")
    assert ours[0].recv() == ([0], (1,))
    started[0].join(PATIENCE)
    assert started[0].exitcode == 0


def case_what_does_not_fit_is_refused():
    with ExitStack() as stack:
        (rank,) = start(Rank(0, 1, scale_bytes=SCALES))
        stack.callback(rank.close)
        own = Round(rank, 1, 5)

        def refused(match, error=immwire.RequestError, **more):
            with pytest.raises(error, match=match):
                rank.exchange.dispatch(**own.call | more)

        refused("x has 31 bytes, which are no whole rows of 32", x=rank.space(31))
        refused(
            "indices has 64 bytes instead of 80: int32 or int64", indices=rank.space(4, TOP_K, dtype=np.int32)
        )
        refused(
            "weights has 160 bytes instead of 80: float32", weights=rank.space(5, TOP_K, dtype=np.float64)
        )
        refused("scales has 39 bytes instead of 40", scales=rank.space(39))
        refused("scales is missing", scales=None)
        refused("out_scales is missing", out_scales=None)
        refused("out_scales has 8 bytes", out_scales=rank.space(8))
        refused("counts has 20 bytes instead of 24", counts=rank.space(5, dtype=np.int32))
        refused("offsets has 24 bytes instead of 28", offsets=rank.space(6, dtype=np.int32))
        refused("count has 8 bytes instead of 4", count=rank.space(1, dtype=np.int64))
        refused('half is "all"', half="all")
        refused(
            "counts is read only", counts=interface(rank.engine.alloc(99, device=0).ptr, data=(4096, True))
        )
        refused("not in GPU memory", immwire.UnsupportedMemory, x=np.zeros((5, HIDDEN), np.uint16))
        refused("not in GPU memory", immwire.UnsupportedMemory, out=bytearray(100))
        refused("__cuda_stream__", TypeError, stream="0")
        # What says that it is of another type, though it is long enough.
        for name, dtype in [
            ("counts", "int64"),
            ("offsets", "int64"),
            ("slots", "int64"),
            ("slots", "float32"),
        ]:
            wide = rank.space(99, dtype=dtype)
            refused(f"{name} has {dtype} instead of int32: convert it", **{name: wide})
        refused("counts has int64 instead of int32", counts=dlpack(wide.region.ptr, 0, 80, (0, 64)))
        refused("counts has items of 4 bytes instead", counts=dlpack(wide.region.ptr, 0, 80, (3, 32)))
        refused("count has float32 instead of int32", count=rank.space(1, dtype=np.float32))
        for dtype in (np.float32, ">i4"):
            refused("indices has .* instead of int32", indices=rank.space(5, TOP_K, dtype=dtype))
        refused("indices has float64 instead of int64", indices=rank.space(5, TOP_K, dtype=np.float64))
        refused("weights has int32 instead of float32", weights=rank.space(5, TOP_K, dtype=np.int32))
        refused("weights has float16 instead of float32", weights=rank.space(5, 2 * TOP_K, dtype=np.float16))
        # Whose type tells how wide it is; x says of how many tokens.
        words = f"indices has {5 * TOP_K * 4} bytes instead of {10 * TOP_K * 4}: .*, and x has 10 rows of"
        refused(words, x=rank.space(5, HIDDEN, dtype=np.float32))
        words = f"indices has {5 * TOP_K * 8} bytes instead of {10 * TOP_K * 8}: .*, and x has 10 rows"
        long = rank.space(5, TOP_K, dtype=np.int64)
        refused(words, x=rank.space(5, HIDDEN, dtype=np.float32), indices=long)
        elsewhere = allocated(1, 5 * HIDDEN * 2)
        refused("x is not in the memory of GPU 0", x=(elsewhere, 5 * HIDDEN * 2))
        many = dict(x=rank.space(13, HIDDEN * 2), indices=rank.space(13, TOP_K, dtype=np.int32))
        many |= dict(weights=rank.space(13, TOP_K, dtype=np.float32), scales=rank.space(13, SCALES))
        refused("13 tokens, max_tokens is 12", **many)

        class Strange:
            @property
            def __cuda_array_interface__(self):
                raise KeyError("float8_e4m3fn")

        refused("x: .* raised KeyError.*view of its bytes", immwire.UnsupportedMemory, x=Strange())
        own.dispatch()
        own.work()
        with pytest.raises(immwire.RequestError, match="out has 128 bytes instead of 160"):
            rank.exchange.combine(own.y, out=rank.space(4, HIDDEN, dtype=np.uint16), stream=0)
        # Numbers of other sizes are none of the exchange's, though there are bytes enough.
        wide = rank.space(99, HIDDEN, dtype=np.float32)
        with pytest.raises(immwire.RequestError, match="y has float32 instead of bfloat16: convert it"):
            rank.exchange.combine(wide, out=own.results, stream=0)
        with pytest.raises(immwire.RequestError, match="out has float32 instead of bfloat16: convert it"):
            rank.exchange.combine(own.y, out=wide, stream=0)
        own.combine()
        rank.settle()
        assert (from_bf16(own.results.read()) == expected_results(*own.inputs[:3])).all()
        # Halves that do not agree: no more than there is memory for.
        few = Round(rank, 1, 2)
        own.dispatch("send")
        rank.exchange.dispatch(**few.call, half="receive")
        with pytest.raises(immwire.RequestError, match="out has 64 bytes instead of 160"):
            rank.exchange.combine(own.y, out=few.results, stream=0)
        own.out, own.counts, own.offsets = few.out, few.counts, few.offsets
        own.work()
        own.combine()
        rank.settle()
        assert (from_bf16(own.results.read()) == expected_results(*own.inputs[:3])).all()
        own = Round(rank, 1, 5)
        # Too few rows of results are no results; the rank says so.
        own.dispatch()
        own.work()
        own.y = rank.array(own.y.read()[:1])
        own.combine()
        rank.settle()
        assert rank.exchange.report().rows_left_out == 3
        own = Round(rank, 1, 5)
        # Bytes, addresses and numbers without a sign say nothing of what they are.
        counts, choices = rank.space(4 * EXPERTS), own.inputs[1]
        lent = dict(counts=counts, offsets=dlpack(own.offsets.region.ptr, 0, 4 * EXPERTS + 4, (1, 32)))
        lent |= dict(indices=rank.array(choices.astype(np.uint32)))
        lent |= dict(weights=(own.call["weights"].region.ptr, own.call["weights"].region.nbytes))
        rank.exchange.dispatch(**own.call | lent)
        rank.settle()
        assert counts.read().view(np.int32).sum() == (choices >= 0).sum()
        own.counts.region.write(0, counts.read())
        own.work()
        own.combine()
        rank.settle()
        assert (from_bf16(own.results.read()) == expected_results(*own.inputs[:3])).all()

        # Of a number below zero no token is sent.
        none = Round(rank, 1, 5)
        none.call["count"] = rank.array(np.array([-1], np.int32))
        none.dispatch()
        rank.settle()
        assert not none.counts.read().any()
        assert rank.exchange.report().tokens_left_out
        none.work()
        none.combine()
        rank.settle()

        def impossible(match, error=immwire.ConfigError, **shape):
            given = dict(rank=0, device=0, top_k=2, max_tokens=4, hidden=16, experts=4, world=2) | shape
            with pytest.raises(error, match=match):
                moe.GpuAllToAll.open(rank.engine, **given)

        impossible("rank 2 of 2", rank=2)
        impossible("16", hidden=24, quantize="float32")
        impossible("scale_bytes is 90, .* pad .* to 92 bytes, and say scale_bytes=92", scale_bytes=90)
        impossible("scale_bytes is 1, .* scale_bytes=4", scale_bytes=1)
        impossible("scale_bytes=4294967296", scale_bytes=2**32 - 1)
        impossible("not quantised", quantize="ue8m0", token_bytes=16)
        impossible('scales of "e4m3"', quantize="e4m3")
        impossible('numbers of "float32"', dtype="float32")
        impossible("GPU 1", immwire.UnsupportedMemory, device=1)
        impossible("not a time", ValueError, patience=-1)
        with immwire.TransferEngine() as engine, pytest.raises(immwire.UnsupportedMemory, match="GPU 0"):
            moe.GpuAllToAll.open(
                engine, rank=0, device=0, top_k=2, max_tokens=4, hidden=16, experts=4, world=2
            )
        joining = moe.GpuAllToAll.open(
            rank.engine, rank=0, device=0, top_k=2, max_tokens=4, hidden=16, firsts=[0, 1, 4]
        )
        host = moe.HostAllToAll.open(rank.engine, rank=1, top_k=2, max_tokens=4, hidden=16, firsts=[0, 1, 4])
        with pytest.raises(moe.MoeError, match="another shape"):
            joining.join([joining.seat, host.seat])
        with pytest.raises(immwire.EngineClosed, match="exchange is closed"):
            joining.join([joining.seat, host.seat])


CASES = [name for name in dir() if name.startswith("case_")]


@pytest.mark.parametrize("case", CASES)
def test_on_the_stand_in(case, tmp_path):
    on_the_stand_in(__file__, case, tmp_path)


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        globals()[name]()
        print(name, "holds")
