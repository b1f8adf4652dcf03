"""Processes, threads, memory and the end."""

import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import immwire
import numpy as np
import pytest
from conftest import PATIENCE, Pair, join, stop
from test_gpu import counted


def test_configurations_that_make_no_sense_are_refused():
    with pytest.raises(immwire.ConfigError, match='no provider "rdma"; there is "shm"'):
        immwire.TransferEngine(provider="rdma")
    for wrong in (dict(nics=0), dict(nics=9), dict(transfers=0), dict(foreign_path="x"), dict(timeout=-1)):
        with pytest.raises(ValueError):
            immwire.TransferEngine(**wrong)
    with pytest.raises(TypeError):
        immwire.TransferEngine("shm")


def pinned(cpu):
    """Whether a thread of this process is pinned to that CPU."""
    for thread in os.listdir("/proc/self/task"):
        # It may have ended.
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getaffinity(int(thread)) == {cpu}:
                return True
    return False


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="every thread is on the only CPU")
def test_an_engine_is_pinned():
    cpu = min(os.sched_getaffinity(0))
    with immwire.TransferEngine(pin_cpu=cpu):
        until = time.monotonic() + PATIENCE
        while not pinned(cpu):
            assert time.monotonic() < until


def test_a_cpu_that_is_not_there_is_refused():
    mine = os.sched_getaffinity(0)
    for absent in (1023, 1024, 1 << 40):
        with pytest.raises(immwire.ConfigError, match=f"one of the machine's, .* not {absent}"):
            immwire.TransferEngine(pin_cpu=absent)
    assert os.sched_getaffinity(0) == mine


def frozen(connection):
    """Engines whose process is stopped by whoever asked for them."""
    with immwire.TransferEngine() as one, immwire.TransferEngine() as other:
        connection.send((os.getpid(), bytes(one.address), bytes(other.address)))
        connection.recv()


def test_how_long_a_peer_may_be_silent_is_said_in_seconds(partner):
    for wrong in ("heartbeat", "suspect_after", "down_after", "connect_deadline"):
        with pytest.raises(ValueError, match="not a time"):
            immwire.TransferEngine(**{wrong: -1})
    with pytest.raises(ValueError, match=r"down_after\) must be two heartbeats or more, not 999"):
        immwire.TransferEngine(heartbeat=0.5, down_after=0.999)
    immwire.TransferEngine(heartbeat=0.5, down_after=1).close()
    connection = partner(frozen)
    process, *addresses = connection.recv()
    times = dict(heartbeat=0.05, suspect_after=0.2, down_after=0.6)
    try:
        # With "shm" nobody is given up for being silent, unless told.
        with (
            immwire.TransferEngine(**times) as engine,
            immwire.TransferEngine(**times | {"down_after": None}) as other,
            immwire.TransferEngine(connect_deadline=0.3) as brief,
        ):
            peer, patient = engine.add_peer(addresses[0]), other.add_peer(addresses[0])
            other.wait_peer_blocking(patient)
            until = time.monotonic() + PATIENCE
            # It is up, or was: that process may have stood still for as long already.
            while engine.peer_state(peer) == "connecting":
                assert time.monotonic() < until
                time.sleep(0.001)
            stop(process)
            until = time.monotonic() + PATIENCE
            while not engine.peer_state(peer).startswith("down"):
                assert not other.peer_state(patient).startswith("down")
                assert time.monotonic() < until
                time.sleep(0.01)
            # Less than the usual time, and not the call's.
            late = brief.add_peer(addresses[1])
            with pytest.raises(immwire.PeerError, match="never answered"):
                brief.wait_peer_blocking(late, timeout=5)
            while (state := other.peer_state(patient)) != "suspect":
                assert not state.startswith("down")
                assert time.monotonic() < until
                time.sleep(0.01)
    finally:
        os.kill(process, signal.SIGCONT)
        connection.send(None)


def test_a_group_key_of_nothing_is_refused():
    with pytest.raises(immwire.ConfigError, match="group key"):
        immwire.TransferEngine(group_key=b"")


def test_a_group_key_is_proven():
    with (
        immwire.TransferEngine(group_key=b"one") as one,
        immwire.TransferEngine(group_key=b"two") as two,
    ):
        with pytest.raises(immwire.PeerError):
            one.wait_peer_blocking(one.add_peer(two.address))
        with pytest.raises(immwire.PeerError, match="itself"):
            one.add_peer(one.address)


def test_values_travel_and_are_checked(pair):
    address, desc = pair.receiver.address, pair.receiver.alloc(100).desc
    assert immwire.NetAddr(str(address)) == immwire.NetAddr.from_bytes(bytes(address)) == address
    assert hash(immwire.NetAddr(str(address))) == hash(address)
    assert immwire.MrDesc.from_bytes(bytes(desc)) == desc
    assert (address.provider, address.nics, desc.nbytes) == ("shm", 1, 100)
    for damaged in (b"", bytes(desc)[:-1], bytes(desc) + b"\0", b"\xff" * 40):
        with pytest.raises(immwire.RequestError):
            immwire.MrDesc.from_bytes(damaged)
        with pytest.raises(immwire.RequestError):
            immwire.NetAddr.from_bytes(damaged)
    with pytest.raises(immwire.RequestError):
        immwire.NetAddr("iw1:shm:nonsense")
    with pytest.raises(TypeError):
        pair.sender.add_peer(5)
    with pytest.raises(immwire.RequestError, match="20 bits"):
        pair.sender.submit_imm(peer=pair.peer, imm=1 << 20)


def all_below(kind):
    """A class and all that are made of it."""
    return {kind}.union(*map(all_below, kind.__subclasses__()))


def test_errors_travel_between_processes(pair):
    fields = dict(peer=pair.peer, nic=3, missing=4, deadline=0.5, capacity=6, started=True, target=7)
    fields |= dict(
        shares=[immwire.PeerShare(pair.peer, 1, None, "up")], ranks=(1, 2), phase="combine", chunk=8
    )
    kinds = all_below(immwire.ImmwireError)
    assert immwire.PeerDown in kinds and immwire.MoeTimeout in kinds
    for kind in kinds:
        error = kind("what it says")
        for name in vars(error):
            setattr(error, name, fields[name])
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            again = pickle.loads(pickle.dumps(error, protocol))
            assert (type(again), again.args, vars(again)) == (kind, error.args, vars(error))
    with pytest.raises(immwire.WaitTimeout) as late, pair.sender.counter() as counter:
        counter.wait_from_blocking({pair.peer: 2}, timeout=0)
    again = pickle.loads(pickle.dumps(late.value))
    assert (again.peer, again.shares) == (pair.peer, late.value.shares)
    assert again.shares[0].peer == pair.peer


def test_reprs_say_what_it_is(pair):
    region, counter = pair.receiver.alloc(100), pair.receiver.counter(slot=3)
    target = immwire.Target(peer=pair.peer, dst=region.desc, len=5)
    texts = [pair.sender, pair.peer, region, region.desc, counter, target, pair.sender.nics[0]]
    words = ["1 peers", "0.0", "100 bytes", "writable", "3, tag=", "5 bytes", "shm0"]
    for thing, word in zip(texts, words, strict=True):
        assert word in repr(thing)
    with pytest.raises(immwire.CounterError, match="3 is in use"):
        pair.receiver.counter(slot=3)
    counter.close()
    assert "closed" in repr(counter)
    with pair.receiver.counter(slot=3) as again:
        assert again.tag != counter.tag
    assert immwire.Waiting[None] == immwire.Waiting[None]
    pair.close()
    assert "closed" in repr(pair.sender)
    assert pair.sender.closed


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_hundred_thousand_transfers_leave_nothing_behind(pair):
    region, counter = pair.receiver.alloc(4096), pair.receiver.counter()
    src = pair.sender.alloc(4096)
    write = dict(peer=pair.peer, src=src, dst=region.desc, len=8, imm=counter.tag)

    def some(count):
        for _ in range(count // 100):
            for _ in range(100):
                pair.sender.submit_single_write(**write)
            counter.wait_blocking(100)
        # The last transfers have given their places back.
        assert pair.sender.wait_capacity_blocking()
        gc.collect()

    some(20_000)
    before, objects = resident(), len(gc.get_objects())
    some(100_000)
    assert resident() - before < 1 << 20
    assert len(gc.get_objects()) - objects < 100


def test_awaits_leave_nothing_behind(pair):
    import asyncio

    counter = pair.receiver.counter()

    async def some(count):
        for _ in range(count):
            transfer = pair.sender.submit_imm(peer=pair.peer, imm=counter.tag)
            await counter.wait(1, timeout=100)
            await transfer

    async def main():
        await some(2_000)
        before = resident()
        await some(10_000)
        assert resident() - before < 1 << 20

    asyncio.run(main())


def test_garbage_is_collected_during_transfers(pair):
    """Sources are dropped, and their owners with them, while they are written from."""
    size = 1 << 20
    there, counter = pair.receiver.alloc(size), pair.receiver.counter()
    array = np.frombuffer(there, dtype=np.uint8)
    for value in range(1, 60):
        source = pair.sender.register(np.full(size, value, dtype=np.uint8))
        pair.sender.submit_single_write(peer=pair.peer, src=source, dst=there.desc, imm=counter.tag)
        del source
        gc.collect()
        # Whatever takes the memory's place would be seen.
        noise = [np.full(size, 255, dtype=np.uint8) for _ in range(2)]
        counter.wait_blocking(1)
        assert (array == value).all()
        del noise


def test_threads_share_an_engine(pair):
    counters = [pair.receiver.counter() for _ in range(4)]
    failures = []

    def work(counter):
        try:
            there, src = pair.receiver.alloc(64), pair.sender.alloc(64)
            for i in range(500):
                src.write(0, i.to_bytes(4, "little"))
                write = dict(peer=pair.peer, src=src, dst=there.desc, imm=counter.tag)
                transfer = pair.sender.submit_single_write(**write)
                counter.wait_blocking(1)
                transfer.wait_blocking()
                assert there.read(0, 4) == i.to_bytes(4, "little")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(counter,)) for counter in counters]
    for thread in threads:
        thread.start()
    join(*threads)
    assert not failures


def test_a_blocking_wait_lets_other_threads_run_and_ends_with_the_engine(pair):
    counter, ended = pair.receiver.counter(), []

    def wait(blocking):
        try:
            blocking(timeout=PATIENCE)
        except immwire.EngineClosed as error:
            ended.append(error)

    waits = [lambda timeout: counter.wait_blocking(1, timeout=timeout), pair.receiver.recv_blocking]
    threads = [threading.Thread(target=wait, args=(blocking,)) for blocking in waits]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert not ended
    start = time.monotonic()
    pair.receiver.close()
    join(*threads)
    assert len(ended) == 2
    assert time.monotonic() - start < PATIENCE / 2


def test_ctrl_c_ends_a_blocking_wait(pair):
    # Whoever runs the tests in the background has the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    counter = pair.receiver.counter()
    pair.sender.submit_imm(peer=pair.peer, imm=counter.tag)
    counted(counter, 1)

    def interrupt():
        # While a wait is under way nothing is left for others.
        until = time.monotonic() + PATIENCE
        while counter.available and time.monotonic() < until:
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupting.start()
            counter.wait_blocking(2, timeout=PATIENCE)
        join(interrupting)
    finally:
        signal.signal(signal.SIGINT, before)
    pair.sender.submit_imm(peer=pair.peer, imm=counter.tag)
    counter.wait_blocking(2)


def test_ctrl_c_ends_a_close_that_waits_for_another_thread():
    engine, inside, go_on = immwire.TransferEngine(), threading.Event(), threading.Event()
    memory = np.zeros(64, np.uint8)

    class Slow:
        @property
        def __array_interface__(self):
            inside.set()
            assert go_on.wait(PATIENCE)
            return memory.__array_interface__

    def interrupt():
        # Closed is what it is from when `close` begins to wait.
        until = time.monotonic() + PATIENCE
        while not engine.closed and time.monotonic() < until:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    told = []
    engine.expect_imm_count(counter=engine.counter(), writes=1, callback=told.append)
    thread = threading.Thread(target=engine.register, args=(Slow(),))
    thread.start()
    assert inside.wait(PATIENCE)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupting = threading.Thread(target=interrupt)
            interrupting.start()
            engine.close()
        assert not go_on.is_set() and not told
    finally:
        go_on.set()
        interrupting.join()
        signal.signal(signal.SIGINT, before)
    join(thread)
    assert engine.closed
    # Stopped by whoever used it last.
    until = time.monotonic() + PATIENCE
    while not told and time.monotonic() < until:
        time.sleep(0.01)
    assert [type(error) for error in told] == [immwire.EngineClosed]


def in_child(function):
    """Runs ``function`` in a forked child, which then ends as a program does; returns its exit code."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            function()
            gc.collect()
            os.write(write, b"ok")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        found = answer.read()
    os.waitpid(child, 0)
    return found


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_and_can_go_on(pair):
    region, counter = pair.receiver.alloc(64), pair.receiver.counter()
    view = memoryview(region)
    view[:5] = b"there"
    transfer = pair.sender.submit_imm(peer=pair.peer, imm=counter.tag)
    transfer.wait_blocking()
    mine = [region, counter, transfer]

    def child():
        region, counter, transfer = mine
        attempts = [
            pair.sender.stats,
            lambda: pair.sender.submit_imm(peer=pair.peer, imm=0),
            lambda: pair.sender.alloc(10),
            pair.sender.close,
            transfer.done,
            transfer.wait_blocking,
            lambda: mine[1].available,
            lambda: mine[1].wait_blocking(1),
            counter.close,
            region.read,
            region.close,
            lambda: memoryview(mine[0]),
        ]
        for attempt in attempts:
            with pytest.raises(immwire.ForkedError, match="parent"):
                attempt()
        assert "parent" in repr(pair.sender)
        assert "parent" in repr(transfer)
        assert "parent" in repr(region)
        # What was a view before is one.
        assert view[:5] == b"there"
        view[:5] = b"child"
        # Dropped, they leave the parent's alone.
        view.release()
        mine.clear()
        del region, counter, transfer, attempts, attempt
        pair.sender = pair.receiver = None
        gc.collect()
        fresh = Pair()
        fresh.sender.submit_imm(peer=fresh.peer, imm=fresh.receiver.counter().tag).wait_blocking()
        fresh.close()

    assert in_child(child) == b"ok"
    assert view[:5] == b"child"
    # The parent goes on.
    counter.wait_blocking(1)
    pair.sender.submit_imm(peer=pair.peer, imm=counter.tag).wait_blocking()
    counter.wait_blocking(1)
    view.release()
    mine.clear()
    region.close()


PROGRAM = """
import immwire, os, sys, gc
a, b = immwire.TransferEngine(), immwire.TransferEngine()
peer = a.add_peer(b.address)
a.wait_peer_blocking(peer)
counter, there = b.counter(), b.alloc(1 << 20)
src = a.register(bytearray(1 << 20))
transfers = [a.submit_single_write(peer=peer, src=src, dst=there.desc, imm=counter.tag) for _ in range(50)]
for transfer in transfers:
    transfer.add_done_callback(lambda ended: None)
b.expect_imm_count(counter=counter, writes=10**6, callback=lambda error: print("told:", type(error).__name__))
b.submit_recvs(count=10, callback=print)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("a.close(); b.close()", 0),
        ("raise RuntimeError('on purpose')", 1),
        ("sys.exit(3)", 3),
        ("del a, b, src, there, counter", 0),
        ("if os.fork() == 0: sys.exit(0)\nassert os.wait()[1] == 0", 0),
        ("transfers.append(transfers)", 0),
    ],
)
def test_a_program_ends_whatever_it_leaves_behind(end, code):
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM + end]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.count("told: EngineClosed") == 1
    if code == 0:
        assert not ended.stderr


STUCK = """
import queue, sys, time, immwire
a, b = immwire.TransferEngine(), immwire.TransferEngine()
peer = a.add_peer(b.address)
a.wait_peer_blocking(peer)
held = queue.Queue(maxsize=1)

def stay(*_):
    while True:
        time.sleep(0.001)

class Stuck:
    __del__ = stay

sys.unraisablehook = stay

def take(message):
    held.put(message)
    {stuck}

b.submit_recvs(count=10, callback=take)
for n in range(3):
    a.submit_send(peer=peer, data=bytes(4)).wait_blocking()
while not held.full():
    time.sleep(0.01)
"""


def test_a_program_ends_though_a_callback_does_not():
    stuck = ["held.put(None)", "while True: pass", "stay()", "raise ValueError", "return Stuck()"]
    ends = [(how, "sys.exit(3)") for how in stuck] + [(stuck[0], "del a, b\nsys.exit(3)")]
    programs = [STUCK.format(stuck=how) + end for how, end in ends]
    # Most of their time is waiting.
    started = [
        subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
        for program in programs
    ]
    try:
        for end, program in zip(ends, started, strict=True):
            _, errors = program.communicate(timeout=2 * PATIENCE)
            assert (program.returncode, errors) == (3, ""), end
    finally:
        for program in started:
            program.kill()
            program.wait()


def test_ctrl_c_ends_a_close_that_waits_for_a_callback(pair):
    inside, go_on, came = threading.Event(), threading.Event(), []

    def stuck(message):
        inside.set()
        assert go_on.wait(PATIENCE)
        came.append(message)

    def interrupt():
        until = time.monotonic() + PATIENCE
        while not pair.receiver.closed and time.monotonic() < until:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    pair.receiver.submit_recvs(count=1, callback=stuck)
    pair.sender.submit_send(peer=pair.peer, data=b"word").wait_blocking()
    assert inside.wait(PATIENCE)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupting = threading.Thread(target=interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupting.start()
            pair.receiver.close()
        assert pair.receiver.closed
        assert not came
    finally:
        go_on.set()
        interrupting.join(PATIENCE)
        signal.signal(signal.SIGINT, before)
    # It goes on by itself.
    until = time.monotonic() + PATIENCE
    while not came and time.monotonic() < until:
        time.sleep(0.01)
    assert len(came) == 1
    pair.receiver.close()


THROWING = """
import ctypes, time, immwire
a, b = immwire.TransferEngine(), immwire.TransferEngine()
peer = a.add_peer(b.address)
a.wait_peer_blocking(peer)
# The interpreter is held meanwhile.
b.submit_recvs(count=1, callback=lambda message: ctypes.PyDLL(None).pthread_exit(None))
a.submit_send(peer=peer, data=bytes(4)).wait_blocking()
time.sleep(60)
"""


def test_a_callback_that_ends_its_thread_ends_the_program_with_a_word():
    command = [sys.executable, "-c", THROWING]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == -signal.SIGABRT
    assert "a callback ends its thread" in ended.stderr


INSIDE = """
import ctypes, immwire
engine, told = immwire.TransferEngine(counters=1), []
memory, counter = ctypes.create_string_buffer(64), engine.counter()
engine.expect_imm_count(counter=counter, writes=1, callback=told.append)
initialize = immwire.CapacityError.__init__

class Closing:
    @property
    def __array_interface__(self):
        engine.close()
        return dict(shape=(64,), typestr="|u1", data=(ctypes.addressof(memory), False), version=3)

def closing(self, *args, **fields):
    engine.close()
    initialize(self, *args, **fields)

immwire.CapacityError.__init__ = closing
try:
    {call}
except immwire.CapacityError:
    pass
assert engine.closed
assert [type(error) for error in told] == [immwire.EngineClosed]
try:
    engine.stats()
except immwire.EngineClosed:
    print("closed")
"""


@pytest.mark.parametrize("call", ["engine.register(Closing())", "engine.counter()"])
def test_an_engine_may_be_closed_inside_of_a_call_on_it(call):
    command = [sys.executable, "-c", INSIDE.format(call=call)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "closed\n", "")


WAITING = """
import contextlib, threading, time
def wait(peer):
    with contextlib.suppress(immwire.EngineClosed):
        b.wait_peer_blocking(peer, timeout=60)
peer = b.add_peer(bytes.fromhex("{address}"))
threading.Thread(target=wait, args=(peer,), daemon=True).start()
time.sleep(0.3)
assert b.peer_state(peer) == "connecting"
"""


def test_a_program_ends_as_well_while_a_thread_waits_for_a_peer(partner):
    connection = partner(frozen)
    process, address, _ = connection.recv()
    stop(process)
    try:
        command = [sys.executable, "-c", PROGRAM + WAITING.format(address=address.hex())]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    finally:
        os.kill(process, signal.SIGCONT)
        connection.send(None)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("told: EngineClosed") == 1


LAST = """
import contextlib, os, time, immwire
engine = immwire.TransferEngine()

class Held(bytearray):
    {end}

memory = Held(1 << 20)
memory.engine = engine
region = engine.register(memory)
peer, dst = engine.add_peer(bytes.fromhex("{address}")), immwire.MrDesc.from_bytes(bytes.fromhex("{desc}"))
transfer = engine.submit_single_write(peer=peer, src=region, dst=dst, imm={tag})
assert not transfer.done()
del region, memory, engine, transfer
print("in use", flush=True)
input()

def own():
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{{thread}}/comm") as name:
            if name.read().strip() in ("immwire-linger", "immwire-reaper"):
                yield thread

# Those that let go of memory and stop engines, of which neither waits for the other.
until = time.monotonic() + {soon}
while list(own()):
    assert time.monotonic() < until, "they wait for each other"
    time.sleep(0.01)
"""


def left(connection):
    """An engine whose process is stopped by whoever asked for it; says whether who wrote to it has left."""
    with immwire.TransferEngine(timeout=PATIENCE) as engine, engine.alloc(1 << 20) as memory:
        counter = engine.counter()
        connection.send((os.getpid(), bytes(engine.address), bytes(memory.desc), counter.tag))
        counter.wait_blocking(1)
        until = time.monotonic() + PATIENCE / 2
        while engine.peers and time.monotonic() < until:
            time.sleep(0.01)
        connection.send(not engine.peers)
        connection.recv()


@pytest.mark.parametrize("end", ["pass", "def __del__(self): self.engine.close()"])
def test_memory_that_is_in_use_may_hold_the_last_reference_to_its_engine(end, partner):
    connection = partner(left)
    process, address, desc, tag = connection.recv()
    stop(process)
    program = LAST.format(address=address.hex(), desc=desc.hex(), tag=tag, soon=4, end=end)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as started:
        try:
            told = started.stdout.readline()
        finally:
            os.kill(process, signal.SIGCONT)
        assert told == "in use\n", started.stderr.read()
        assert connection.poll(PATIENCE)
        assert connection.recv(), "the engine was not stopped"
        connection.send(None)
        _, errors = started.communicate("\n", timeout=PATIENCE)
    assert (started.returncode, errors) == (0, "")


QUARREL = """
import immwire, sys, threading
engine, gone = immwire.TransferEngine(), immwire.TransferEngine()
region, counter, lent = engine.alloc(64), engine.counter(), engine.alloc(64)
region.close(); counter.close(); gone.close()
view, failures = memoryview(lent), []

def often():
    try:
        for _ in range(2000):
            try:
                {call}
            except {error}:
                continue
            raise AssertionError("nothing was raised")
    except BaseException as error:
        failures.append(error)

# Wherever Python code runs another thread may go on: under a lock, too, if any is held.
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=often) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
"""

GARBAGE = """
import gc, immwire
with immwire.TransferEngine() as engine:
    region, refused = engine.alloc(64), 0
    gc.set_threshold(1)
    for _ in range(200):
        cycle = [memoryview(region)]
        cycle.append(cycle)
        del cycle
        try:
            region.close()
        except immwire.RegionInUse:
            refused += 1
        else:
            region = engine.alloc(64)
    assert refused
"""


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("gone.stats()", "immwire.EngineClosed"),
        ("counter.available", "immwire.EngineClosed"),
        ("region.read()", "immwire.RegionError"),
        ("memoryview(region)", "immwire.RegionError"),
        ("lent.close()", "immwire.RegionInUse"),
    ],
)
def test_threads_that_are_refused_do_not_lock_each_other_out(call, error):
    command = [sys.executable, "-c", QUARREL.format(call=call, error=error)]
    subprocess.run(command, timeout=PATIENCE, check=True)


def test_a_view_may_be_collected_while_a_close_is_refused():
    subprocess.run([sys.executable, "-c", GARBAGE], timeout=PATIENCE, check=True)


def test_the_import_needs_and_loads_nothing_else():
    program = (
        "import sys; before = set(sys.modules); import immwire; print(*sorted(set(sys.modules) - before))"
    )
    command = [sys.executable, "-I", "-S", "-c", "import sys; sys.path.insert(0, sys.argv[1]);" + program]
    where = os.path.dirname(os.path.dirname(immwire.__file__))
    loaded = subprocess.run([*command, where], capture_output=True, text=True, check=True).stdout.split()
    outside = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert outside == {"immwire"}


LOGGED = """
import immwire
with immwire.TransferEngine() as a, immwire.TransferEngine() as b:
    a.wait_peer_blocking(a.add_peer(b.address))
"""


@pytest.mark.parametrize(("told", "says"), [(None, False), ("warn", False), ("immwire=info", True)])
def test_a_log_is_written_where_one_is_asked_for(told, says):
    environment = {name: value for name, value in os.environ.items() if name != "IMMWIRE_LOG"}
    if told is not None:
        environment["IMMWIRE_LOG"] = told
    command = [sys.executable, "-c", LOGGED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ("a peer has changed" in done.stderr) is says, done.stderr
    assert done.stdout == ""
