"""Every operation, between two processes."""

import time

import immwire
import numpy as np
import pytest
from conftest import PATIENCE

PAGE = 256
PAGES = 64


def receive(connection):
    """The other process: offers memory and a counter, counts, and says what it has."""
    with immwire.TransferEngine(timeout=PATIENCE) as engine:
        memory = engine.alloc(PAGE * PAGES)
        array = np.frombuffer(memory, dtype=np.uint8)
        counter = engine.counter(slot=5)
        connection.send((str(engine.address), bytes(memory.desc), counter.tag))
        while True:
            try:
                command, value = connection.recv()
            except EOFError:
                break
            if command == "count":
                counter.wait_blocking(value)
                found = array.copy()
                array[:] = 0
                connection.send(found)
            elif command == "answer":
                peer = engine.add_peer(value)
                message = engine.recv_blocking()
                assert message.peer == peer
                engine.submit_send(peer=peer, data=message.data[::-1]).wait_blocking()
        del array
        memory.close()


class Remote:
    """The other process, as this one knows it."""

    def __init__(self, engine, connection):
        self.connection = connection
        address, desc, self.tag = connection.recv()
        self.address = address
        self.desc = immwire.MrDesc.from_bytes(desc)
        self.peer = engine.add_peer(address)

    def count(self, writes):
        """Waits there for ``writes``; returns the memory then, and clears it."""
        self.connection.send(("count", writes))
        assert self.connection.poll(PATIENCE)
        return self.connection.recv()


@pytest.fixture(params=[1, 3], ids=["1-nic", "3-nics"])
def engine(request):
    with immwire.TransferEngine(timeout=PATIENCE, nics=request.param) as engine:
        yield engine


@pytest.fixture
def remote(engine, partner):
    return Remote(engine, partner(receive))


def source(engine):
    data = np.random.default_rng(1).integers(1, 255, PAGE * PAGES, dtype=np.uint8)
    return data, engine.register(data)


def test_single(engine, remote):
    data, src = source(engine)
    write = dict(peer=remote.peer, src=src, dst=remote.desc, imm=remote.tag)
    engine.submit_single_write(**write).wait_blocking()
    assert (remote.count(1) == data).all()
    engine.submit_single_write(**write, src_offset=10, dst_offset=20, len=5).wait_blocking()
    there = remote.count(1)
    assert (there[20:25] == data[10:15]).all()
    assert there.sum() == data[10:15].sum()


@pytest.mark.parametrize("kind", ["uint32", "int32", "uint64", "int64", "list", "made", "strided"])
def test_paged(engine, remote, kind):
    data, src = source(engine)
    shuffled = np.random.default_rng(2).permutation(PAGES)
    src_pages, dst_pages = shuffled[: PAGES // 2], np.arange(PAGES // 2)[::-1]
    as_kind = {
        "list": lambda pages: pages.tolist(),
        "made": immwire.PageIndices,
        "strided": lambda pages: np.repeat(pages, 3)[::3],
    }.get(kind, lambda pages: pages.astype(kind))
    transfer = engine.submit_paged_writes(
        peer=remote.peer,
        page_bytes=PAGE,
        src=src,
        src_pages=as_kind(src_pages),
        dst=remote.desc,
        dst_pages=as_kind(dst_pages),
        imm=remote.tag,
    )
    there = remote.count(PAGES // 2).reshape(PAGES, PAGE)
    transfer.wait_blocking()
    assert (there[dst_pages] == data.reshape(PAGES, PAGE)[src_pages]).all()
    assert not there[PAGES // 2 :].any()


def test_the_health_of_a_nic_that_is_not_there_is_refused(engine):
    nics = len(engine.nics)
    for absent in (nics, 255):
        with pytest.raises(immwire.RequestError, match=f"no NIC {absent}: the engine has {nics}"):
            engine.set_nic_health(absent, healthy=False)
    engine.set_nic_health(nics - 1, healthy=True)


def test_pages_with_strides_and_offsets(engine, remote):
    data, src = source(engine)
    pages = np.arange(8, dtype=np.uint32)
    engine.submit_paged_writes(
        peer=remote.peer,
        page_bytes=16,
        src=src,
        src_pages=pages,
        src_stride=100,
        src_offset=7,
        dst=remote.desc,
        dst_pages=pages,
        dst_stride=32,
        dst_offset=1000,
        imm=remote.tag,
    ).wait_blocking()
    there = remote.count(8)
    for page in range(8):
        src_at, dst_at = 7 + 100 * page, 1000 + 32 * page
        assert (there[dst_at : dst_at + 16] == data[src_at : src_at + 16]).all()


def test_scatter_barrier_and_imm(engine, partner):
    remotes = [Remote(engine, partner(receive)) for _ in range(2)]
    data, src = source(engine)
    tag = remotes[0].tag
    targets = [
        immwire.Target(peer=remote.peer, dst=remote.desc, src_offset=100 * i, dst_offset=i, len=50)
        for i, remote in enumerate(remotes)
    ]
    engine.submit_scatter(src=src, targets=targets, imm=tag).wait_blocking()
    for i, remote in enumerate(remotes):
        assert (remote.count(1)[i : i + 50] == data[100 * i : 100 * i + 50]).all()
    group = engine.add_peer_group([remote.peer for remote in remotes])
    assert len(group) == 2
    assert group.peers == [remote.peer for remote in remotes]
    engine.submit_barrier(group=group, imm=tag).wait_blocking()
    for remote in remotes:
        engine.submit_imm(peer=remote.peer, imm=tag, writes=7).wait_blocking()
        assert not remote.count(8).any()


@pytest.mark.parametrize("size", [0, 1, 40_000])
def test_messages(engine, remote, size):
    remote.connection.send(("answer", str(engine.address)))
    data = bytes(i % 251 for i in range(size))
    engine.submit_send(peer=remote.peer, data=data).wait_blocking()
    message = engine.recv_blocking()
    assert message.peer == remote.peer
    assert message.data == data[::-1]


def test_a_peer_that_is_not_used_is_let_go():
    with immwire.TransferEngine(idle_after=1) as engine, immwire.TransferEngine() as other:
        first = engine.add_peer(other.address)
        deadline = time.monotonic() + 20
        while not engine.peer_state(first).startswith("down") and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(immwire.PeerError, match="not used for as long"):
            engine.wait_peer_blocking(first)
        begun = time.monotonic()
        again = engine.add_peer(other.address)
        try:
            engine.wait_peer_blocking(again)
        except immwire.PeerError as error:
            # It was up: who is kept from looking for as long finds it let go once more.
            assert "not used for as long" in str(error)
            assert time.monotonic() - begun >= 1
        assert again != first
    with pytest.raises(ValueError, match="not a time to wait"):
        immwire.TransferEngine(idle_after=-1)


def test_a_peer_that_ends_is_told_by_name(engine, partner):
    remote = Remote(engine, partner(receive))
    engine.wait_peer_blocking(remote.peer)
    until = time.monotonic() + PATIENCE
    # It is suspect for as long as it stands still.
    while engine.peer_state(remote.peer) != "up":
        assert time.monotonic() < until
        time.sleep(0.001)
    remote.connection.close()
    src = engine.alloc(8)
    write = dict(peer=remote.peer, src=src, dst=remote.desc)
    with pytest.raises(immwire.PeerDown) as caught:
        while time.monotonic() < until:
            try:
                engine.submit_single_write(**write).wait_blocking()
            except immwire.PeerDown:
                raise
            except immwire.TransferError:
                time.sleep(0.001)  # It has closed its region, and is about to go.
    assert caught.value.peer == remote.peer
    with pytest.raises(immwire.PeerError) as caught:
        engine.wait_peer_blocking(remote.peer)
    assert caught.value.peer == remote.peer
