"""Callbacks: on a thread of the engine's, once, and never lost."""

import asyncio
import gc
import queue
import sys
import threading
import time

import immwire
import pytest
from conftest import PATIENCE, Pair


def imm(pair, counter):
    return pair.sender.submit_imm(peer=pair.peer, imm=counter.tag)


def test_done_callbacks(pair):
    counter, called = pair.receiver.counter(), queue.Queue()
    transfer = imm(pair, counter)
    for i in range(3):
        transfer.add_done_callback(lambda ended, i=i: called.put((i, ended, threading.get_ident())))
    calls = [called.get(timeout=PATIENCE) for _ in range(3)]
    assert {i for i, _, _ in calls} == {0, 1, 2}
    assert all(ended is transfer and ended.done() for _, ended, _ in calls)
    assert threading.get_ident() not in {thread for _, _, thread in calls}
    transfer.add_done_callback(lambda ended: called.put(ended.end))
    assert called.get(timeout=PATIENCE) == "done"
    with pytest.raises(TypeError):
        transfer.add_done_callback(None)


def test_who_waits_as_well_does_not_keep_a_callback_from_being_called(pair):
    counter, called = pair.receiver.counter(), queue.Queue()
    for turn in range(1000):
        transfer = imm(pair, counter)
        transfer.add_done_callback(called.put)
        # The one that sees the end first may be this thread.
        if turn % 2:
            transfer.wait_blocking()
        else:
            while not transfer.done():
                pass
        assert called.get(timeout=PATIENCE) is transfer


def test_counts_call_back(pair):
    counter, called = pair.receiver.counter(), queue.Queue()
    pair.receiver.expect_imm_count(counter=counter, writes=2, callback=called.put)
    with pytest.raises(immwire.CounterError):
        pair.receiver.expect_imm_count(counter=counter, writes=2, callback=called.put)
    imm(pair, counter).wait_blocking()
    assert called.empty()
    imm(pair, counter).wait_blocking()
    assert called.get(timeout=PATIENCE) is None
    pair.receiver.expect_imm_count(counter=counter, writes=1, callback=called.put)
    pair.receiver.close()
    assert isinstance(called.get(timeout=PATIENCE), immwire.EngineClosed)


def test_a_counts_callback_may_wait_for_a_message(pair):
    counter, begun, results = pair.receiver.counter(), threading.Event(), queue.Queue()

    def answer(_error):
        # From here on messages are asked for.
        with pytest.raises(immwire.WaitTimeout):
            pair.receiver.recv_blocking(timeout=0)
        begun.set()
        try:
            results.put(pair.receiver.recv_blocking(timeout=5).data)
        except immwire.ImmwireError as error:
            results.put(error)

    pair.receiver.expect_imm_count(counter=counter, writes=1, callback=answer)
    imm(pair, counter).wait_blocking()
    assert begun.wait(PATIENCE)
    pair.sender.submit_send(peer=pair.peer, data=b"for the callback").wait_blocking()
    assert results.get(timeout=PATIENCE) == b"for the callback"


def test_a_counts_callback_that_takes_long_holds_up_no_message(pair):
    counter, begun, go = pair.receiver.counter(), threading.Event(), threading.Event()

    def slow(_error):
        begun.set()
        go.wait(PATIENCE)

    # From here on messages are asked for.
    with pytest.raises(immwire.WaitTimeout):
        pair.receiver.recv_blocking(timeout=0.01)
    pair.receiver.expect_imm_count(counter=counter, writes=1, callback=slow)
    imm(pair, counter).wait_blocking()
    assert begun.wait(PATIENCE)
    try:
        for data in (b"one", b"two"):
            pair.sender.submit_send(peer=pair.peer, data=data).wait_blocking()
            assert pair.receiver.recv_blocking(timeout=5).data == data
    finally:
        go.set()


@pytest.mark.parametrize("awaited", [False, True], ids=["blocking", "awaited"])
def test_closing_does_not_wait_for_what_a_callback_waits_for(pair, awaited):
    counter, begun, results = pair.receiver.counter(), threading.Event(), queue.Queue()

    async def receive():
        begun.set()
        await pair.receiver.recv(timeout=4 * PATIENCE)

    def forever(_error):
        try:
            if awaited:
                asyncio.run(receive())
            else:
                begun.set()
                pair.receiver.recv_blocking(timeout=4 * PATIENCE)
        except immwire.ImmwireError as error:
            results.put(error)

    pair.receiver.expect_imm_count(counter=counter, writes=1, callback=forever)
    imm(pair, counter).wait_blocking()
    assert begun.wait(PATIENCE)
    start = time.monotonic()
    pair.receiver.close()
    assert time.monotonic() - start < PATIENCE / 2
    assert isinstance(results.get(timeout=PATIENCE), immwire.EngineClosed)


def test_messages_call_back(pair):
    called = queue.Queue()
    with pytest.raises(immwire.WaitTimeout):
        pair.receiver.recv_blocking(timeout=0.01)
    pair.receiver.submit_recvs(count=3, callback=called.put)
    for i in range(5):
        pair.sender.submit_send(peer=pair.peer, data=bytes([i])).wait_blocking()
    assert [called.get(timeout=PATIENCE).data for _ in range(3)] == [b"\0", b"\1", b"\2"]
    assert pair.receiver.recv_blocking().data == b"\3"
    pair.receiver.submit_recvs(count=1, callback=called.put)
    assert called.get(timeout=PATIENCE).data == b"\4"


def test_all_messages_there_will_be_can_be_asked_for(pair):
    first, later = queue.Queue(), queue.Queue()
    pair.receiver.submit_recvs(count=0, callback=later.put)
    pair.receiver.submit_recvs(count=sys.maxsize, callback=first.put)
    pair.receiver.submit_recvs(count=2 * sys.maxsize + 1, callback=later.put)
    for i in range(40):
        pair.sender.submit_send(peer=pair.peer, data=bytes([i])).wait_blocking()
    assert [first.get(timeout=PATIENCE).data for _ in range(40)] == [bytes([i]) for i in range(40)]
    pair.receiver.close()
    assert later.empty()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_callback_that_raises_is_reported(pair, monkeypatch):
    reported = queue.Queue()
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: reported.put(unraisable.exc_value))

    def fail(argument):
        raise ValueError("in a callback")

    counter = pair.receiver.counter()
    imm(pair, counter).add_done_callback(fail)
    assert str(reported.get(timeout=PATIENCE)) == "in a callback"
    pair.receiver.expect_imm_count(counter=counter, writes=1, callback=fail)
    assert str(reported.get(timeout=PATIENCE)) == "in a callback"
    pair.receiver.submit_recvs(count=1, callback=fail)
    pair.sender.submit_send(peer=pair.peer, data=b"x").wait_blocking()
    assert str(reported.get(timeout=PATIENCE)) == "in a callback"
    # The threads go on.
    called = queue.Queue()
    imm(pair, counter).add_done_callback(called.put)
    assert called.get(timeout=PATIENCE).end == "done"


def test_a_callback_may_submit_wait_and_drop_but_not_close(pair):
    counter, results = pair.receiver.counter(), queue.Queue()

    def again(_ended):
        try:
            imm(pair, counter).wait_blocking(timeout=PATIENCE)
            results.put("waited")
            pair.sender.close()
        except immwire.ImmwireError as error:
            results.put(str(error))

    imm(pair, counter).add_done_callback(again)
    assert results.get(timeout=PATIENCE) == "waited"
    assert "callback" in results.get(timeout=PATIENCE)


def test_a_callback_may_close_other_engines_and_what_is_closed(pair):
    counter, results = pair.receiver.counter(), queue.Queue()
    gone = immwire.TransferEngine()
    gone.close()

    def close(_ended):
        try:
            pair.receiver.close()
            gone.close()
            with immwire.TransferEngine() as made:
                results.put(made.closed)
            results.put(made.closed and pair.receiver.closed)
            pair.sender.close()
        except immwire.ImmwireError as error:
            results.put(str(error))

    imm(pair, counter).add_done_callback(close)
    assert results.get(timeout=PATIENCE) is False
    assert results.get(timeout=PATIENCE) is True
    assert "one of its callbacks" in results.get(timeout=PATIENCE)
    assert not pair.sender.closed


def close_in_a_ring():
    """A callback of each of three engines closes the next; returns what they raised."""
    engines = [immwire.TransferEngine(timeout=PATIENCE) for _ in range(3)]
    meeting, results = threading.Barrier(3), queue.Queue()

    def close(other):
        meeting.wait(PATIENCE)
        try:
            other.close()
            results.put(None)
        except immwire.ImmwireError as error:
            results.put(error)

    for at, engine in enumerate(engines):
        other = engines[at - 1]
        engine.expect_imm_count(
            counter=engine.counter(), writes=0, callback=lambda _error, other=other: close(other)
        )
    ended = [results.get(timeout=PATIENCE) for _ in range(3)]
    for engine in engines:
        engine.close()
    return [error for error in ended if error is not None]


def test_callbacks_that_close_each_others_engines_do_not_wait_for_each_other():
    for _ in range(10):
        (refused,) = close_in_a_ring()
        assert "this callback" in str(refused)


def test_the_last_handle_may_go_in_a_callback():
    with immwire.TransferEngine(timeout=PATIENCE) as witness:
        pair, dropped = Pair(), threading.Event()
        for engine in (pair.sender, pair.receiver):
            engine.wait_peer_blocking(engine.add_peer(witness.address))
        assert len(witness.peers) == 2
        counter = pair.receiver.counter()
        transfer = imm(pair, counter)
        transfer.wait_blocking()
        holder = [pair]
        del pair, engine

        def drop(_ended):
            holder.clear()
            gc.collect()
            dropped.set()

        transfer.add_done_callback(drop)
        assert dropped.wait(PATIENCE)
        # Both engines end, and leave their peers.
        until = time.monotonic() + PATIENCE
        while witness.peers:
            assert time.monotonic() < until, "an engine was not stopped"
            time.sleep(0.001)


def test_closing_waits_for_callbacks_under_way(pair):
    counter, begun, ended = pair.receiver.counter(), threading.Event(), []

    def slow(_ended):
        begun.set()
        threading.Event().wait(0.1)
        ended.append(True)

    imm(pair, counter).add_done_callback(slow)
    assert begun.wait(PATIENCE)
    pair.sender.close()
    assert ended
