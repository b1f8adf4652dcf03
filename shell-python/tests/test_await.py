"""Awaiting, on asyncio's event loop and uvloop's."""

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from collections import UserDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import immwire
import pytest
import uvloop
from conftest import PATIENCE, Pair, join, stop
from test_gpu import counted


@pytest.fixture(params=[0.0, 20e-6], ids=["suspends", "spins"])
def pair(request):
    pair = Pair(spin=request.param)
    pair.regions = (pair.receiver.alloc(64), pair.sender.alloc(64))
    yield pair
    pair.close()


def write(pair, counter):
    """One small write, that counts."""
    there, src = pair.regions
    imm = counter.tag
    return pair.sender.submit_single_write(peer=pair.peer, src=src, dst=there.desc, imm=imm)


def test_transfers_and_counts_are_awaited(pair, run):
    async def main():
        counter = pair.receiver.counter()
        for _ in range(300):
            transfer = write(pair, counter)
            assert await counter.wait(1) is None
            assert await transfer is None
            assert transfer.end == "done"
            assert transfer.exception() is None
        assert await transfer is None, "awaited again"
        assert counter.available == 0

    run(main())


def test_many_tasks_wait_at_once(pair, run):
    async def main():
        counters = [pair.receiver.counter() for _ in range(100)]
        waits = [asyncio.create_task(wait(counter)) for counter in counters]
        await asyncio.sleep(0)
        transfers = [write(pair, counter) for counter in reversed(counters)]
        # Several tasks wait for each transfer.
        gathered = await asyncio.gather(*transfers, *transfers)
        assert gathered == [None] * 200
        assert await asyncio.gather(*waits) == list(range(100))

    async def wait(counter):
        await counter.wait(1)
        return counter.slot

    run(main())


def test_a_count_that_does_not_come_is_late(pair, run):
    async def main():
        counter = pair.receiver.counter()
        await write(pair, counter)
        # That it is done does not say that it is counted.
        counted(counter, 1)
        start = time.monotonic()
        with pytest.raises(immwire.WaitTimeout) as caught:
            await counter.wait(3, timeout=0.05)
        assert 0.05 <= time.monotonic() - start < PATIENCE / 2
        error = caught.value
        assert isinstance(error, TimeoutError)
        assert (error.target, error.missing, error.deadline) == (3, 2, 0.05)
        assert [share.arrived for share in error.shares] == [1]
        # Nothing was consumed, and the counter can be waited on again.
        assert counter.available == 1
        await counter.wait(1)
        with pytest.raises(immwire.WaitTimeout):
            await counter.wait(1, timeout=0)

    run(main())


def test_a_wait_that_names_nobody_blames_nobody(run):
    async def main():
        with immwire.TransferEngine() as receiver, immwire.TransferEngine() as one:
            counter = receiver.counter()
            await one.wait_peer(one.add_peer(receiver.address))
            # A second one is to send as much, and has not connected.
            await one.submit_imm(peer=one.peers[0], imm=counter.tag)
            counted(counter, 1)
            (first,) = receiver.peers
            for wait in (counter.wait, counter.wait_blocking):
                with pytest.raises(immwire.WaitTimeout) as caught:
                    awaitable = wait(2, timeout=0.02)
                    await awaitable
                assert (caught.value.peer, caught.value.missing) == (None, 1)
                assert [share[:3] for share in caught.value.shares] == [(first, 1, None)]

    run(main())


def test_what_waits_for_shares_have_consumed_has_not_arrived_for_others(run):
    async def main():
        with immwire.TransferEngine() as receiver, immwire.TransferEngine() as one:
            counter = receiver.counter()
            await one.wait_peer(one.add_peer(receiver.address))
            for wait in (counter.wait_from, counter.wait_from_blocking):
                await one.submit_imm(peer=one.peers[0], imm=counter.tag, writes=3)
                (first,) = receiver.peers
                awaitable = wait({first: 3})
                if awaitable is not None:
                    await awaitable
                for late in (counter.wait, counter.wait_blocking):
                    with pytest.raises(immwire.WaitTimeout, match=r"sent 0\)") as caught:
                        awaitable = late(1, timeout=0.01)
                        await awaitable
                    assert [share[:3] for share in caught.value.shares] == [(first, 0, None)]

    run(main())


def test_late_peers_are_named(run):
    async def main():
        with (
            # A sender that stands still is suspect, but for this.
            immwire.TransferEngine(suspect_after=PATIENCE) as receiver,
            immwire.TransferEngine() as one,
            immwire.TransferEngine() as two,
        ):
            counter, peers = receiver.counter(), {}
            for engine in (one, two):
                peer = engine.add_peer(receiver.address)
                await engine.wait_peer(peer)
                known = set(peers)
                peers |= {peer: engine for peer in receiver.peers if peer not in known}
            first, second = peers
            for _round in range(2):
                target = next(peer for peer in one.peers)
                await one.submit_imm(peer=target, imm=counter.tag, writes=3)
                counted(counter, 3)
                for wait in (counter.wait_from, counter.wait_from_blocking):
                    with pytest.raises(immwire.WaitTimeout) as caught:
                        awaitable = wait({first: 3, second: 2}, timeout=0.02)
                        await awaitable
                    assert caught.value.peer == second
                    assert caught.value.missing == 2
                    assert [share[1:] for share in caught.value.shares] == [(3, 3, "up"), (0, 2, "up")]
                await two.submit_imm(peer=next(iter(two.peers)), imm=counter.tag, writes=2)
                await counter.wait_from({first: 3, second: 2})

    run(main())


def test_shares_are_any_mapping(pair, run):
    class Own(Mapping):
        def __init__(self, shares):
            self.shares = shares

        def __getitem__(self, peer):
            return self.shares[peer]

        def __iter__(self):
            return iter(self.shares)

        def __len__(self):
            return len(self.shares)

    async def main():
        counter = pair.receiver.counter()
        (sender,) = pair.receiver.peers
        for kind in (dict, MappingProxyType, UserDict, Own):
            for wait in (counter.wait_from, counter.wait_from_blocking):
                await write(pair, counter)
                awaitable = wait(kind({sender: 1}))
                if awaitable is not None:
                    await awaitable
                with pytest.raises(immwire.WaitTimeout) as caught:
                    awaitable = wait(kind({sender: 1}), timeout=0)
                    await awaitable
                assert (caught.value.peer, caught.value.missing) == (sender, 1)
        for wrong in ([(sender, 1)], {sender}, {sender: "1"}, {1: 1}, MappingProxyType({1: 1}), None):
            for wait in (counter.wait_from, counter.wait_from_blocking):
                with pytest.raises(TypeError):
                    wait(wrong)

    run(main())


def test_what_was_refused_does_not_keep_late_peers_from_being_named():
    async def main():
        with immwire.TransferEngine() as receiver, immwire.TransferEngine() as one:
            counter = receiver.counter()
            await one.wait_peer(one.add_peer(receiver.address))
            (first,) = receiver.peers
            with pytest.raises(TypeError):
                receiver.expect_imm_count(counter=counter, writes=1, callback=None)
            under_way = asyncio.ensure_future(counter.wait_from({first: 1}))
            await asyncio.sleep(0)
            with pytest.raises(immwire.CounterError, match="another wait"):
                receiver.expect_imm_count(counter=counter, writes=1, callback=print)
            under_way.cancel()
            await asyncio.wait([under_way])
            on_stream = dict(device=0, counter=counter, writes=1)
            with pytest.raises(TypeError):
                receiver.wait_on_stream("0", **on_stream)
            with pytest.raises(immwire.UnsupportedMemory):
                receiver.wait_on_stream(0, **on_stream)
            await one.submit_imm(peer=one.peers[0], imm=counter.tag)
            counted(counter, 1)
            for wait in (counter.wait_from, counter.wait_from_blocking):
                with pytest.raises(immwire.WaitTimeout) as caught:
                    awaitable = wait({first: 2}, timeout=0.02)
                    await awaitable
                assert caught.value.peer == first
                assert [share[:3] for share in caught.value.shares] == [(first, 1, 2)]

    asyncio.run(main())


@pytest.mark.parametrize("consume", ["wait", "wait_blocking", "try_take", "expect_imm_count"])
def test_nobody_is_named_whose_share_is_not_known(consume):
    async def main():
        with (
            immwire.TransferEngine() as receiver,
            immwire.TransferEngine() as one,
            immwire.TransferEngine() as two,
        ):
            counter, peers = receiver.counter(), []
            for engine in (one, two):
                await engine.wait_peer(engine.add_peer(receiver.address))
                peers += set(receiver.peers) - set(peers)
            first, second = peers
            # Of the first one's writes a wait consumes some without saying so.
            await one.submit_imm(peer=one.peers[0], imm=counter.tag, writes=2)
            counted(counter, 2)
            if consume == "expect_imm_count":
                told = threading.Event()
                receiver.expect_imm_count(counter=counter, writes=2, callback=lambda _: told.set())
                assert told.wait(PATIENCE)
            else:
                ended = getattr(counter, consume)(2)
                if consume == "wait":
                    await ended
            await two.submit_imm(peer=two.peers[0], imm=counter.tag, writes=1)
            counted(counter, 1)
            for wait in (counter.wait_from, counter.wait_from_blocking):
                # The first has sent nothing of it, and the second half.
                with pytest.raises(immwire.WaitTimeout) as caught:
                    awaitable = wait({first: 2, second: 2}, timeout=0.02)
                    await awaitable
                assert (caught.value.peer, caught.value.missing) == (None, 3)
                assert [share[:3] for share in caught.value.shares] == [(first, 2, None), (second, 1, None)]
                with pytest.raises(immwire.WaitTimeout) as caught:
                    awaitable = wait({second: 2}, timeout=0.02)
                    await awaitable
                assert caught.value.peer == second

    asyncio.run(main())


def test_a_cancelled_wait_gives_back_what_had_come(pair, run):
    async def main():
        counter = pair.receiver.counter()
        await write(pair, counter)
        counted(counter, 1)
        for give_up in (cancel, time_out):
            await give_up(counter)
            assert counter.available == 1
        await write(pair, counter)
        await counter.wait(2)

    async def cancel(counter):
        task = asyncio.create_task(forever(counter))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def time_out(counter):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(counter.wait(2), 0.01)

    async def forever(counter):
        await counter.wait(2)

    run(main())


def test_one_wait_at_a_time(pair, run):
    async def main():
        counter = pair.receiver.counter()
        task = asyncio.ensure_future(counter.wait(1))
        await asyncio.sleep(0.01)
        with pytest.raises(immwire.CounterError, match="another wait"):
            await counter.wait(1)
        await write(pair, counter)
        await task
        wait = counter.wait(1)
        await write(pair, counter)
        await wait
        with pytest.raises(RuntimeError, match="awaited already"):
            await wait

    run(main())


def test_one_engine_serves_one_loop_after_another(pair, run):
    counter = pair.receiver.counter()

    async def main():
        transfer = write(pair, counter)
        await counter.wait(1)
        await transfer
        # Left behind by the loop.
        waiting = asyncio.ensure_future(counter.wait(1))
        await asyncio.sleep(0)
        return waiting

    for _ in range(5):
        assert run(main()).cancelled()
        assert counter.available == 0


def test_without_a_loop_it_says_so(pair):
    counter = pair.receiver.counter()
    with pytest.raises(RuntimeError, match="no running event loop"):
        counter.wait(1).__await__().__next__()
    assert counter.try_take(1) is False


def test_messages_are_awaited_in_turn(pair, run):
    async def main():
        receives = [asyncio.ensure_future(pair.receiver.recv()) for _ in range(3)]
        await asyncio.sleep(0.01)
        receives[1].cancel()
        await asyncio.sleep(0)
        for i in range(3):
            await pair.sender.submit_send(peer=pair.peer, data=bytes([i]))
        assert (await receives[0]).data == b"\0"
        assert (await receives[2]).data == b"\1"
        assert (await pair.receiver.recv()).data == b"\2"
        with pytest.raises(immwire.WaitTimeout):
            await pair.receiver.recv(timeout=0.02)
        # What the one that timed out was to get is for the next.
        await pair.sender.submit_send(peer=pair.peer, data=bytearray(b"late"))
        message = await pair.receiver.recv()
        assert (message.data, message.peer) == (b"late", pair.receiver.peers[0])

    run(main())


def test_what_was_given_to_a_cancelled_task_goes_to_the_next(pair, run):
    async def main():
        for _ in range(50):
            receives = [asyncio.ensure_future(pair.receiver.recv()) for _ in range(2)]
            await asyncio.sleep(0)
            # Arrives while the loop does not look.
            pair.sender.submit_send(peer=pair.peer, data=b"one").wait_blocking()
            time.sleep(0.002)
            receives[0].cancel()
            assert (await receives[1]).data == b"one"
            with pytest.raises(asyncio.CancelledError):
                await receives[0]

    run(main())


def test_messages_that_are_given_back_keep_their_order(pair, run):
    async def main():
        for _ in range(50):
            receives = [asyncio.ensure_future(pair.receiver.recv()) for _ in range(3)]
            await asyncio.sleep(0)
            # They arrive while the loop does not look.
            for data in (b"first", b"second", b"third"):
                pair.sender.submit_send(peer=pair.peer, data=data).wait_blocking()
            time.sleep(0.002)
            for receive in receives:
                receive.cancel()
            await asyncio.wait(receives)
            given = [not receive.cancelled() for receive in receives]
            assert given == [False] * 3
            assert [(await pair.receiver.recv()).data for _ in range(3)] == [b"first", b"second", b"third"]

    run(main())


def test_no_time_to_wait_is_time_to_take_what_lies_there(pair, run):
    async def taken(data):
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                message = await pair.receiver.recv(timeout=0)
            except immwire.WaitTimeout as late:
                assert late.deadline == 0
                await asyncio.sleep(0.001)
            else:
                return message.data == data
        return False

    async def main():
        # What the engine has not been asked for; then what it has, by the looks before.
        for data in (b"one", b"two", b"three"):
            await pair.sender.submit_send(peer=pair.peer, data=data)
        assert await taken(b"one")
        assert await taken(b"two")
        assert await taken(b"three")
        with pytest.raises(immwire.WaitTimeout):
            await pair.receiver.recv(timeout=0)
        await pair.sender.submit_send(peer=pair.peer, data=b"four")
        assert await taken(b"four")
        # One that was given back.
        receive = asyncio.ensure_future(pair.receiver.recv())
        await asyncio.sleep(0)
        pair.sender.submit_send(peer=pair.peer, data=b"five").wait_blocking()
        time.sleep(0.002)
        receive.cancel()
        await asyncio.wait([receive])
        assert receive.cancelled()
        assert await taken(b"five")

    run(main())


def test_without_a_loop_too_what_lies_there_is_taken_at_once(pair):
    pair.sender.submit_send(peer=pair.peer, data=b"there").wait_blocking()
    until = time.monotonic() + PATIENCE
    while True:
        try:
            message = pair.receiver.recv_blocking(timeout=0)
            break
        except immwire.WaitTimeout:
            assert time.monotonic() < until
    assert message.data == b"there"


def test_a_wait_is_awaited_by_one_task(pair, run):
    async def main():
        counter = pair.receiver.counter()
        for outcome in ("late", "there"):
            wait = counter.wait(1, timeout=0.05 if outcome == "late" else PATIENCE)
            first = asyncio.ensure_future(forward(wait))
            await asyncio.sleep(0.001)
            with pytest.raises(RuntimeError, match="awaited already"):
                await wait
            # The first one's is as it was.
            if outcome == "late":
                with pytest.raises(immwire.WaitTimeout):
                    await asyncio.wait_for(first, PATIENCE)
            else:
                await write(pair, counter)
                assert await asyncio.wait_for(first, PATIENCE) is None

    async def forward(wait):
        return await wait

    run(main())


def test_a_wait_that_nobody_awaits_is_warned_of(pair):
    counter, transfer = pair.receiver.counter(), pair.sender.submit_imm(peer=pair.peer, imm=0)
    calls = {
        "Transfer.wait": lambda: transfer.wait(),
        "ImmCounter.wait": lambda: counter.wait(1),
        "ImmCounter.wait_from": lambda: counter.wait_from({pair.peer: 1}),
        "TransferEngine.recv": lambda: pair.receiver.recv(),
        "TransferEngine.wait_peer": lambda: pair.sender.wait_peer(pair.peer),
        "TransferEngine.wait_capacity": lambda: pair.sender.wait_capacity(),
    }
    for name, call in calls.items():
        with pytest.warns(RuntimeWarning, match=f"^{name} was never awaited$"):
            call()
    # An exception that is on its way goes on.
    with pytest.warns(RuntimeWarning), pytest.raises(ZeroDivisionError):
        [counter.wait(1), 1 // 0]


def test_a_task_is_made_of_a_wait(pair, run):
    async def main():
        counter = pair.receiver.counter()
        task = asyncio.create_task(counter.wait(1))
        assert "Waiting" in repr(task)
        await write(pair, counter)
        assert await task is None
        # What is given up before it has begun was not forgotten.
        transfer = write(pair, pair.receiver.counter())
        waits = [counter.wait(1), pair.receiver.recv(), transfer.wait()]
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(counter.wait(1), 0)
        counter.wait(1).close()
        # It is gone through by hand as a coroutine is.
        wait = pair.sender.wait_capacity()
        with pytest.raises(StopIteration) as ended:
            wait.send(None)
        assert ended.value.value is True
        wait = pair.sender.wait_peer(pair.peer)
        with pytest.raises(StopIteration) as ended:
            wait.send(None)
        assert ended.value.value is None
        with pytest.raises(immwire.WaitTimeout):
            counter.wait(1, timeout=0).send(None)
        waits.clear()
        tasks.clear()
        gc.collect()

    run(main())


@pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_a_loop_that_is_closed_leaves_no_wait_behind(pair, new_loop):
    counter = pair.receiver.counter()

    async def wait():
        await counter.wait(1)

    for _ in range(3):
        event_loop = new_loop()
        task = event_loop.create_task(wait())
        event_loop.run_until_complete(asyncio.sleep(0))
        with pytest.raises(immwire.CounterError, match="another wait"):
            counter.wait_blocking(1)
        # Nobody has cancelled it.
        event_loop.close()
        gone = weakref.ref(task)
        del event_loop, task
        gc.collect()
        assert gone() is None
        write(pair, counter).wait_blocking()
        second = new_loop()
        second.run_until_complete(wait())
        second.close()


def frozen(connection):
    """An engine with memory, whose process is stopped by whoever asked for it."""
    with immwire.TransferEngine() as engine, engine.alloc(4096) as memory:
        connection.send((os.getpid(), bytes(engine.address), bytes(memory.desc)))
        connection.recv()


def test_peers_and_capacity_are_awaited(run, partner):
    connection = partner(frozen)
    process, address, _ = connection.recv()
    stop(process)

    async def main():
        with immwire.TransferEngine(transfers=2) as engine, immwire.TransferEngine() as other:
            peer = engine.add_peer(bytes(other.address))
            await engine.wait_peer(peer)
            silent, held = engine.add_peer(address), []
            with pytest.raises(immwire.CapacityError, match="all 2 transfers are under way") as caught:
                for _ in range(3):
                    held.append(engine.submit_imm(peer=silent, imm=0))
            assert caught.value.capacity == 2
            assert await engine.wait_capacity(timeout=0.01) is False
            assert engine.wait_capacity_blocking(timeout=0.01) is False
            os.kill(process, signal.SIGCONT)
            await asyncio.gather(*held)
            assert await engine.wait_capacity() is True

    try:
        run(main())
    finally:
        os.kill(process, signal.SIGCONT)
        connection.send(None)


def accepted(submit):
    """What is submitted, once there is room."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return submit()
        except immwire.CapacityError:
            assert time.monotonic() < until, "there is no room"
            time.sleep(0.001)


def test_ended_transfers_that_are_kept_take_no_room(run):
    async def main():
        with immwire.TransferEngine(transfers=4) as engine, immwire.TransferEngine() as other:
            peer, counter = engine.add_peer(other.address), other.counter()
            await engine.wait_peer(peer)

            def submit():
                return engine.submit_imm(peer=peer, imm=counter.tag)

            # Nobody looks at any of them.
            kept = [accepted(submit) for _ in range(20)]
            kept += [accepted(submit) for _ in range(4)]
            assert await engine.wait_capacity(timeout=5) is True
            kept += [accepted(submit) for _ in range(4)]
            assert engine.wait_capacity_blocking(timeout=5) is True
            counted(counter, 28)
            # They are counted there before it is known here.
            until = time.monotonic() + 5
            while any(transfer.end is None for transfer in kept) and time.monotonic() < until:
                await asyncio.sleep(0.001)
            assert [transfer.end for transfer in kept] == ["done"] * 28

    run(main())


def test_who_waits_for_room_is_woken_by_an_end_that_nobody_looks_at(run, partner):
    connection = partner(frozen)
    process, address, _ = connection.recv()
    stop(process)

    async def main():
        with immwire.TransferEngine(transfers=2) as engine:
            peer = engine.add_peer(address)
            kept = [engine.submit_imm(peer=peer, imm=0) for _ in range(2)]
            with ThreadPoolExecutor(1) as executor:
                waits = [asyncio.ensure_future(engine.wait_capacity()) for _ in range(3)]
                await asyncio.sleep(0.05)
                waits[0].cancel()
                blocked = executor.submit(engine.wait_capacity_blocking, timeout=PATIENCE)
                await asyncio.sleep(0.05)
                assert not blocked.done()
                assert not any(wait.done() for wait in waits[1:])
                os.kill(process, signal.SIGCONT)
                assert await asyncio.wait_for(asyncio.gather(*waits[1:]), PATIENCE) == [True] * 2
                assert blocked.result(PATIENCE) is True
            del kept

    try:
        run(main())
    finally:
        os.kill(process, signal.SIGCONT)
        connection.send(None)


def test_tasks_and_threads_that_keep_all_they_submit_share_the_room(run):
    kept = []

    async def main():
        with immwire.TransferEngine(transfers=2) as engine, immwire.TransferEngine() as other:
            peer, counter = engine.add_peer(other.address), other.counter()
            await engine.wait_peer(peer)

            def submitted():
                try:
                    kept.append(engine.submit_imm(peer=peer, imm=counter.tag))
                except immwire.CapacityError:
                    return False
                return True

            def in_a_thread():
                for _ in range(100):
                    while not submitted():
                        assert engine.wait_capacity_blocking()

            async def in_a_task():
                for _ in range(100):
                    while not submitted():
                        assert await engine.wait_capacity()

            with ThreadPoolExecutor(2) as executor:
                threads = [executor.submit(in_a_thread) for _ in range(2)]
                tasks = [in_a_task() for _ in range(3)]
                await asyncio.wait_for(asyncio.gather(*tasks), 2 * PATIENCE)
                for thread in threads:
                    thread.result(2 * PATIENCE)
            counted(counter, 500)

    run(main())
    assert len(kept) == 500


def test_waits_for_a_peer_and_for_room_take_no_thread(run, partner):
    connection = partner(frozen)
    process, address, _ = connection.recv()
    stop(process)
    held = threading.Event()

    async def main():
        event_loop = asyncio.get_running_loop()
        # Its only thread has something to do.
        executor = ThreadPoolExecutor(1)
        event_loop.set_default_executor(executor)
        busy = event_loop.run_in_executor(None, held.wait, PATIENCE)
        with immwire.TransferEngine(transfers=1) as engine:
            peer = engine.add_peer(address)
            with pytest.raises(immwire.WaitTimeout) as late:
                await engine.wait_peer(peer, timeout=0.1)
            assert (late.value.peer, late.value.deadline) == (peer, 0.1)
            with pytest.raises(immwire.WaitTimeout):
                await engine.wait_peer(peer, timeout=0)
            assert await engine.wait_capacity(timeout=0) is True
            engine.submit_imm(peer=peer, imm=0)
            for timeout in (0, 0.1):
                assert await engine.wait_capacity(timeout=timeout) is False
            # Many wait at once, and some give up.
            waits = [asyncio.ensure_future(engine.wait_peer(peer)) for _ in range(20)]
            waits += [asyncio.ensure_future(engine.wait_capacity()) for _ in range(20)]
            await asyncio.sleep(0)
            for wait in waits[::2]:
                wait.cancel()
            os.kill(process, signal.SIGCONT)
            ended = await asyncio.gather(*waits, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ended[::2])
            assert ended[1::2] == [None] * 10 + [True] * 10
        assert not busy.done(), "they waited for the thread"
        held.set()
        await busy

    try:
        run(main())
    finally:
        held.set()
        os.kill(process, signal.SIGCONT)
        connection.send(None)


def test_the_end_of_an_engine_ends_the_waits_for_its_peers(run, partner):
    connection = partner(frozen)
    process, address, _ = connection.recv()
    stop(process)

    async def main():
        engine = immwire.TransferEngine(transfers=1)
        peer = engine.add_peer(address)
        engine.submit_imm(peer=peer, imm=0)
        waits = [asyncio.ensure_future(wait) for wait in (engine.wait_peer(peer), engine.wait_capacity())]
        await asyncio.sleep(0.01)
        assert not any(wait.done() for wait in waits)
        engine.close()
        ended = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(end) for end in ended] == [immwire.EngineClosed] * 2

    try:
        run(main())
    finally:
        os.kill(process, signal.SIGCONT)
        connection.send(None)


def test_the_end_of_the_engine_ends_all_waits(run):
    async def main():
        pair = Pair()
        counter = pair.receiver.counter()
        waits = [counter.wait(1), pair.receiver.recv(), pair.receiver.wait_capacity(timeout=0)]
        waits = [asyncio.ensure_future(wait) for wait in waits]
        await asyncio.sleep(0.05)
        pair.close()
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(result) for result in results] == [immwire.EngineClosed, immwire.EngineClosed, bool]
        with pytest.raises(immwire.EngineClosed):
            pair.sender.alloc(1)
        with pytest.raises(immwire.EngineClosed):
            await counter.wait(1)

    run(main())


def test_who_begins_to_wait_while_the_engine_ends_is_told(run):
    async def main():
        others = [immwire.TransferEngine() for _ in range(4)]
        for turn in range(50):
            engine = immwire.TransferEngine(timeout=PATIENCE)
            for other in others:
                engine.wait_peer_blocking(engine.add_peer(other.address))
            wait = engine.recv()
            closing = threading.Thread(target=engine.close)
            closing.start()
            # At any moment of the end.
            time.sleep(turn * 20e-6)
            begun = time.monotonic()
            with pytest.raises(immwire.EngineClosed):
                await wait
            assert time.monotonic() - begun < PATIENCE / 2, "it waited for its time to be up"
            join(closing)
        for other in others:
            other.close()

    run(main())


def test_cancel_and_deadline_stop_a_transfer(run, partner):
    connection = partner(frozen)
    process, address, desc = connection.recv()
    stop(process)

    async def main():
        with immwire.TransferEngine() as engine, immwire.TransferEngine() as other:
            peer = engine.add_peer(other.address)
            await engine.wait_peer(peer)
            size = 1 << 20
            src, there = engine.alloc(size), other.alloc(size)
            # The same page again and again: nobody is kept from cancelling it for as long as that takes.
            pages = immwire.PageIndices([0] * (1 << 18))
            write = dict(
                peer=peer, page_bytes=size, src=src, src_pages=pages, dst=there.desc, dst_pages=pages
            )
            transfer = engine.submit_paged_writes(**write)
            transfer.cancel()
            with pytest.raises(immwire.TransferCancelled) as caught:
                await transfer
            assert transfer.end in ("never_started", "quiesced")
            assert caught.value.started == (transfer.end == "quiesced")
            assert isinstance(transfer.exception(), immwire.TransferCancelled)
            assert "cancelled" in repr(transfer)
            with pytest.raises(immwire.DeadlineExceeded) as caught:
                await engine.submit_paged_writes(**write, deadline=1e-4)
            assert caught.value.deadline == 1e-4
            # What is for a peer that stands still does not end by itself.
            dst = immwire.MrDesc.from_bytes(desc)
            write = dict(peer=engine.add_peer(address), src=src, dst=dst, len=dst.nbytes)
            transfer = engine.submit_single_write(**write)
            transfer.cancel()
            with pytest.raises(immwire.TransferCancelled) as caught:
                await transfer
            assert (transfer.end, caught.value.started) == ("never_started", False)
            # Cancelling the task leaves the transfer alone.
            transfer = engine.submit_single_write(**write)
            task = asyncio.ensure_future(transfer.wait())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(immwire.WaitTimeout, match="still in use"):
                await transfer.wait(timeout=0)
            os.kill(process, signal.SIGCONT)
            await transfer
            assert transfer.end == "done"

    try:
        run(main())
    finally:
        os.kill(process, signal.SIGCONT)
        connection.send(None)
