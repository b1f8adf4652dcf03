"""Memory of GPUs, on the stand-in for the CUDA driver (`verification/fake-cuda`): it aborts at a broken rule.

Each case is a process of its own, for the loader has to find the stand-in as the driver: in the folder that
`IMMWIRE_FAKE_CUDA` names; NICs are those of the library that `IMMWIRE_FAKE_EFA` names. `shell-python/check`
sets both. A machine's own GPUs are not used.
"""

import asyncio
import ctypes
import itertools
import mmap
import multiprocessing
import os
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import ClassVar

import immwire
import pytest
from conftest import PATIENCE, Pair

BYTES = 1_000_003
PAGE, PAGES = 4096, 300


def interface(address, **more):
    """Something that offers __cuda_array_interface__ alone."""

    class Array:
        __cuda_array_interface__: ClassVar = {
            "data": (address, False),
            "shape": (BYTES,),
            "typestr": "|u1",
            "version": 3,
            **more,
        }

    return Array()


class _Tensor(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


def dlpack(address, device, nbytes=BYTES, kind=(1, 8)):
    """Something that offers DLPack alone, without a version: bytes of a GPU, or items of that code, bits."""
    shape = (ctypes.c_int64 * 1)(nbytes * 8 // kind[1])
    tensor = _Tensor(address, 2, device, 1, *kind, 1, shape, None, 0, None, None)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

    class Tensor:
        keep = tensor, shape

        def __dlpack__(self):
            return new(ctypes.addressof(tensor), b"dltensor", None)

        def __dlpack_device__(self):
            return 2, device

    return Tensor()


def raising(tensor=None, error=None):
    """Something whose __cuda_array_interface__ raises, as some tensors' does.

    It has DLPack if there is a ``tensor``, which raises ``error`` if there is one.
    """

    class Strange:
        @property
        def __cuda_array_interface__(self):
            raise KeyError("float8_e4m3fn")

    class WithDlpack(Strange):
        def __dlpack__(self):
            if error is not None:
                raise error
            return tensor.__dlpack__()

        def __dlpack_device__(self):
            return tensor.__dlpack_device__()

    return Strange() if tensor is None else WithDlpack()


def counted(counter, writes):
    """Waits until ``writes`` writes have been counted."""
    until = time.monotonic() + PATIENCE
    while counter.available != writes:
        assert time.monotonic() < until, f"{counter.available} of {writes} writes were counted"
        time.sleep(0.001)


def driver(device, calls):
    """Calls the driver as another library does that uses this GPU."""
    # The one that the engine has loaded: another copy would know nothing of its memory.
    maps = Path("/proc/self/maps").read_text().splitlines()
    cuda = ctypes.CDLL(next(line.split()[-1] for line in maps if "libcuda.so" in line))
    context = ctypes.c_void_p()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    for name, *arguments in calls:
        assert getattr(cuda, name)(*arguments) == 0, name
    assert cuda.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0


def allocated(device, nbytes):
    """The address of memory of a GPU that another library has allocated."""
    address = ctypes.c_uint64()
    driver(device, [("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))])
    return address.value


def over_two(device, handle_types=1):
    """The address of as much memory over two allocations that adjoin, as PyTorch's expandable segments are;
    and where the second begins."""
    part, address, parts = ctypes.c_size_t(2 << 20), ctypes.c_uint64(), [ctypes.c_uint64() for _ in range(2)]
    wanted = struct.pack("<iiiiQQ", 1, handle_types, 1, device, 0, 0)
    zero = ctypes.c_uint64(0)
    whole = ctypes.c_size_t(2 * part.value)
    reserve = ("cuMemAddressReserve", ctypes.byref(address), whole, ctypes.c_size_t(0), zero, zero)
    create = [("cuMemCreate", ctypes.byref(physical), part, wanted, zero) for physical in parts]
    driver(device, [reserve, *create])
    border = address.value + part.value
    access = struct.pack("<iii", 1, device, 3)
    driver(
        device,
        [
            ("cuMemMap", address, part, ctypes.c_size_t(0), parts[0], zero),
            ("cuMemMap", ctypes.c_uint64(border), part, ctypes.c_size_t(0), parts[1], zero),
            ("cuMemSetAccess", address, whole, access, ctypes.c_size_t(1)),
            *[("cuMemRelease", physical) for physical in parts],
        ],
    )
    return border - BYTES // 2, border


def sent(pair, src, dst):
    """Whether all of a write arrives, bit by bit."""
    data = random.randbytes(src.nbytes)
    src.write(0, data)
    with pair.receiver.counter() as counter:
        transfer = pair.sender.submit_single_write(peer=pair.peer, src=src, dst=dst.desc, imm=counter.tag)
        counter.wait_blocking(1)
        transfer.wait_blocking()
    return dst.read() == data


def case_every_way_between_two_gpus_and_the_host():
    pair = Pair(gpus=[0, 1], sms=4)
    for here in (None, 0, 1):
        for there in (None, 0, 1):
            src, dst = pair.sender.alloc(BYTES, device=here), pair.receiver.alloc(BYTES, device=there)
            assert (src.device, dst.device) == (here, there)
            assert dst.read() == bytes(BYTES)
            assert sent(pair, src, dst), (here, there)
            src.close()
            dst.close()
    src, dst = pair.sender.register(bytearray(BYTES)), pair.receiver.alloc(BYTES, device=1)
    assert src.device is None
    assert sent(pair, src, dst)
    pair.close()


def case_nics_read_and_write():
    # The library of `verification/fake-efa`: NICs that reach GPUs' memory by themselves.
    pair = Pair(provider="libfabric", fabric="efa", library=os.environ["IMMWIRE_FAKE_EFA"], gpus=[0, 1])
    for here in (None, 0, 1):
        for there in (None, 0, 1):
            with (
                pair.sender.alloc(BYTES, device=here) as src,
                pair.receiver.alloc(BYTES, device=there) as dst,
            ):
                assert (src.device, dst.device) == (here, there)
                assert sent(pair, src, dst), (here, there)
    for offered in (
        dlpack(allocated(1, BYTES), 1),
        interface(allocated(0, BYTES)),
        (allocated(0, BYTES), BYTES),
    ):
        with pair.sender.register(offered) as src, pair.receiver.alloc(BYTES, device=1) as dst:
            assert src.device in (0, 1)
            assert sent(pair, src, dst)
    pair.close()


def case_gpus_have_their_nics():
    def names(pairing=None, topology=None, gpus=(0,), nics=1):
        options = dict(provider="libfabric", fabric="efa", library=os.environ["IMMWIRE_FAKE_EFA"])
        with immwire.TransferEngine(
            gpus=gpus, nics=nics, pairing=pairing, topology=topology, **options
        ) as engine:
            return [nic.name.removeprefix("efa:").removesuffix("-rdm") for nic in engine.nics]

    # This machine's table has none of the stand-in's GPUs: all NICs, in turn.
    assert names(nics=2) == ["rdmap0s0", "rdmap1s0"]
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table"
        with pytest.raises(immwire.ConfigError, match="table: No such file"):
            names(topology=table)
        # The stand-in's GPUs are on buses 10 and 11.
        table.write_text(
            "pci0000:00/0000:10:00.0 vendor=10de class=030200\n"
            "pci0000:00/0000:20:00.0 rdma=rdmap3s0\n"
            "pci0000:01/0000:11:00.0 vendor=10de class=030200\n"
            "pci0000:01/0000:21:00.0 rdma=rdmap2s0\n"
        )
        assert names(topology=table) == ["rdmap3s0"]
        assert names(topology=table, gpus=(1, 0), nics=2) == ["rdmap2s0", "rdmap3s0"]
        assert names("gpu0=rdmap2s0", table, nics=2) == ["rdmap2s0", "rdmap2s0"]
        with pytest.raises(immwire.ConfigError, match="column 6: no such NIC"):
            names("gpu0=rdmap0s0", table)
        table.write_text("virtual/a up\n")
        with pytest.raises(immwire.ConfigError, match="line 1, column 11: not a field"):
            names(topology=table)


def case_tcp_reaches_no_gpu():
    pair = Pair(provider="libfabric", interface="lo", gpus=[0])
    with pytest.raises(immwire.UnsupportedMemory, match="host memory only"):
        pair.sender.alloc(BYTES, device=0)
    with pytest.raises(immwire.UnsupportedMemory, match="host memory only"):
        pair.sender.register((allocated(0, BYTES), BYTES))
    assert sent(pair, pair.sender.alloc(BYTES), pair.receiver.alloc(BYTES))
    pair.close()
    # Beside shared memory it is not refused: peers on this host are written to.
    pair = Pair(provider="libfabric", interface="lo", gpus=[0, 1], shm_on_host=True)
    assert sent(pair, pair.sender.alloc(BYTES, device=0), pair.receiver.alloc(BYTES, device=1))
    pair.close()


def case_staging_reaches_gpus_over_tcp():
    usual = dict(provider="libfabric", interface="lo", gpus=[0, 1], staging=16 << 20)
    pair = Pair(**usual)
    registered = pair.sender.register((allocated(1, BYTES), BYTES))
    for here in (pair.sender.alloc(BYTES, device=0), pair.sender.alloc(BYTES), registered):
        assert sent(pair, here, pair.receiver.alloc(BYTES, device=1))
        assert sent(pair, here, pair.receiver.alloc(BYTES))
    pair.close()
    over_shm = dict(provider="shm", interface=None)
    for options in (dict(staging=1 << 20), dict(gpus=None), over_shm):
        for more in ({}, dict(shm_on_host=options is not over_shm)):
            with pytest.raises(immwire.ConfigError, match="staging"):
                immwire.TransferEngine(**(usual | options | more))


def case_staging_goes_beside_shared_memory():
    """One scatter to GPUs of this host, and of another, and one counter for what both write back."""
    usual = dict(provider="libfabric", interface="lo", gpus=[0, 1], staging=16 << 20, shm_on_host=True)
    hosts = ("here", "here", "there")
    me, near, far = engines = [immwire.TransferEngine(timeout=PATIENCE, **usual, host=host) for host in hosts]
    data = random.randbytes(BYTES)
    back, counter = me.alloc(2 * BYTES, device=1), me.counter(slot=9)
    src = me.alloc(BYTES, device=0)
    src.write(0, data)
    targets, places, counters = [], [], []
    for other in (near, far):
        peer = me.add_peer(other.address)
        me.wait_peer_blocking(peer)
        places.append(other.alloc(BYTES, device=1))
        counters.append(other.counter(slot=9))
        targets.append(immwire.Target(peer=peer, dst=places[-1].desc, len=BYTES))
    assert [me.transport_to(other.address) for other in (near, far)] == ["shm", "libfabric"]
    transfer = me.submit_scatter(src=src, targets=targets, imm=counters[0].tag)
    for place, count in zip(places, counters, strict=True):
        count.wait_blocking(1)
        assert place.read() == data
    transfer.wait_blocking()
    for n, (other, place) in enumerate(zip((near, far), places, strict=True)):
        (peer,) = other.peers
        written = other.submit_single_write(
            peer=peer, src=place, dst=back.desc, dst_offset=n * BYTES, imm=counter.tag
        )
        written.wait_blocking()
    counter.wait_blocking(2)
    assert back.read() == 2 * data
    for one in engines:
        one.close()


def case_pages_go_where_the_lists_say():
    pair = Pair(gpus=[0, 1])
    src, dst = pair.sender.alloc(PAGE * PAGES, device=0), pair.receiver.alloc(PAGE * PAGES, device=1)
    data = random.randbytes(PAGE * PAGES)
    src.write(0, data)
    pages = range(PAGES)
    here, there = random.sample(pages, PAGES), random.sample(pages, PAGES)
    counter = pair.receiver.counter()
    pair.sender.submit_paged_writes(
        peer=pair.peer,
        page_bytes=PAGE,
        src=src,
        src_pages=here,
        dst=dst.desc,
        dst_pages=there,
        imm=counter.tag,
    ).wait_blocking()
    counter.wait_blocking(PAGES)
    for one, other in zip(here, there, strict=True):
        assert dst.read(other * PAGE, PAGE) == data[one * PAGE : (one + 1) * PAGE]
    pair.close()


def receive(connection):
    """The other process: says where to write, and then what is there."""
    with immwire.TransferEngine(gpus=[1], timeout=PATIENCE) as engine:
        memory, counter = engine.alloc(BYTES, device=1), engine.counter()
        connection.send((bytes(engine.address), bytes(memory.desc), counter.tag))
        counter.wait_blocking(1)
        connection.send_bytes(memory.read())
        connection.recv()


def case_another_process_is_written_to():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    with immwire.TransferEngine(gpus=[0, 1], timeout=PATIENCE) as engine:
        assert ours.poll(PATIENCE)
        address, desc, tag = ours.recv()
        src, data = engine.alloc(BYTES, device=0), random.randbytes(BYTES)
        src.write(0, data)
        peer, dst = engine.add_peer(address), immwire.MrDesc.from_bytes(desc)
        engine.submit_single_write(peer=peer, src=src, dst=dst, imm=tag).wait_blocking()
        assert ours.poll(PATIENCE)
        assert ours.recv_bytes() == data
        ours.send(None)
        process.join(PATIENCE)
    assert process.exitcode == 0


def case_memory_of_other_libraries_is_registered():
    pair = Pair(gpus=[0, 1])
    region = pair.receiver.alloc(BYTES, device=1)
    fields = region.__cuda_array_interface__
    assert fields["data"] == (region.ptr, False)
    assert (fields["shape"], fields["typestr"], fields["version"]) == ((BYTES,), "|u1", 3)
    assert fields["stream"] is None
    here, there = allocated(0, BYTES), allocated(1, BYTES)
    for src, dst in (
        (interface(here), region),
        (interface(here, stream=1), dlpack(there, 1)),
        (dlpack(here, 0), interface(there, strides=None, mask=None)),
        ((here, BYTES), (there, BYTES)),
        (interface(over_two(0)[0]), interface(over_two(1)[0])),
        (dlpack(over_two(0)[0], 0), dlpack(over_two(1)[0], 1)),
    ):
        src, dst = pair.sender.register(src), pair.receiver.register(dst)
        assert (src.device, dst.device) == (0, 1), (src, dst)
        assert sent(pair, src, dst)
        dst.close()
        src.close()
    source = pair.sender.register(interface(here, data=(here, True)))
    assert not source.desc.remote_write
    with pytest.raises(immwire.RequestError, match="read only"):
        source.write(0, b"x")
    with pytest.raises(immwire.RequestError, match="contiguous"):
        pair.sender.register(interface(here, strides=(2,)))
    with pytest.raises(immwire.UnsupportedMemory, match="mask"):
        pair.sender.register(interface(here, mask=object()))
    # Some have the interface, but not for all element types.
    with pair.receiver.register(raising(dlpack(there, 1))) as dst:
        assert dst.device == 1
        assert sent(pair, pair.sender.alloc(BYTES, device=0), dst)
    neither = raising(dlpack(there, 1), BufferError("no such type"))
    for strange, why in (
        (raising(), "raised KeyError: 'float8_e4m3fn': pass a view of its bytes"),
        (neither, "raised KeyError: .*, and DLPack BufferError: no such type: pass a view of its bytes"),
    ):
        with pytest.raises(immwire.UnsupportedMemory, match=why):
            pair.receiver.register(strange)
    # What is not one range is refused, with the address that is to blame.
    middle, border = over_two(0)
    with pytest.raises(immwire.RegionError, match=f"{border + (2 << 20):#x}, is not allocated"):
        pair.sender.register((middle, 3 << 20))
    middle, border = over_two(0, handle_types=0)
    with pytest.raises(immwire.RegionError, match=f"{border - (2 << 20):#x} was not allocated to be shared"):
        pair.sender.register((middle, BYTES))
    pair.close()


class Stream:
    """Something that has __cuda_stream__ alone."""

    def __init__(self, handle, version=0):
        self.pair = version, handle

    def __cuda_stream__(self):
        return self.pair


def case_a_write_waits_for_a_stream():
    pair = Pair(gpus=[0, 1])
    src, dst = pair.sender.alloc(BYTES, device=0), pair.receiver.alloc(BYTES, device=1)
    assert sent(pair, src, dst)
    word, stream = ctypes.c_uint64(), ctypes.c_uint64()
    driver(0, [("cuMemHostAlloc", ctypes.byref(word), ctypes.c_size_t(8), 0)])
    driver(0, [("cuStreamCreate", ctypes.byref(stream), 0)])
    released = ctypes.c_uint64.from_address(word.value)
    for number, given in enumerate((Stream(stream.value), stream.value), 1):
        # Until the word is as high.
        driver(0, [("cuStreamWaitValue64_v2", stream, word, ctypes.c_uint64(number), 0)])
        pair.sender.after_stream(given, device=0)
        before, data = dst.read(), random.randbytes(BYTES)
        src.write(0, data)
        transfer = pair.sender.submit_single_write(peer=pair.peer, src=src, dst=dst.desc)
        with pytest.raises(TimeoutError):
            transfer.wait_blocking(timeout=0.2)
        assert dst.read() == before
        released.value = number
        transfer.wait_blocking()
        assert dst.read() == data
    with pytest.raises(immwire.UnsupportedMemory, match="version 1"):
        pair.sender.after_stream(Stream(stream.value, version=1), device=0)
    with pytest.raises(immwire.UnsupportedMemory, match="GPU 7"):
        pair.sender.after_stream(stream.value, device=7)
    with pytest.raises(TypeError, match="__cuda_stream__"):
        pair.sender.after_stream("0", device=0)
    pair.close()


def case_a_stream_waits_for_writes():
    pair = Pair(gpus=[0, 1])
    src, dst = pair.sender.alloc(BYTES, device=0), pair.receiver.alloc(BYTES, device=1)
    assert sent(pair, src, dst)
    seen, stream = pair.receiver.alloc(BYTES, device=1), ctypes.c_uint64()
    driver(1, [("cuStreamCreate", ctypes.byref(stream), 0)])
    copy = (
        "cuMemcpyAsync",
        ctypes.c_uint64(seen.ptr),
        ctypes.c_uint64(dst.ptr),
        ctypes.c_size_t(BYTES),
        stream,
    )
    with pair.receiver.counter() as counter:

        def write():
            pair.sender.submit_single_write(
                peer=pair.peer, src=src, dst=dst.desc, imm=counter.tag
            ).wait_blocking()

        def hold(given=stream.value, timeout=None):
            return pair.receiver.wait_on_stream(given, device=1, counter=counter, writes=2, timeout=timeout)

        for given in (Stream(stream.value), stream.value):
            src.write(0, random.randbytes(BYTES))
            write()
            held = hold(given)
            driver(1, [copy])
            with pytest.raises(immwire.WaitTimeout, match="held still"):
                held.result(timeout=0.1)
            assert not held.done()
            assert "held" in repr(held)
            with pytest.raises(immwire.CounterError, match="one waits at a time"):
                hold()
            write()
            driver(1, [("cuStreamSynchronize", stream)])
            held.result(timeout=0)
            assert seen.read() == src.read()
        # What is there already is not waited for. A write that the sender is done with lies in our memory;
        # our engine counts it when it looks.
        write()
        write()
        counted(counter, 2)
        assert hold().done()
        write()
        counted(counter, 1)
        late = hold(timeout=0.05)
        driver(1, [("cuStreamSynchronize", stream)])
        with pytest.raises(immwire.WaitTimeout, match="1 of 2 writes") as error:
            late.result()
        assert (error.value.target, error.value.missing) == (2, 1)
        write()
        hold().result()
        with pytest.raises(immwire.UnsupportedMemory, match="GPU 7"):
            pair.receiver.wait_on_stream(stream.value, device=7, counter=counter, writes=1)
        with pytest.raises(TypeError, match="__cuda_stream__"):
            hold("0")
        last = hold()
        # This one first: the other's end waits for streams that are held.
        pair.receiver.close()
        driver(1, [("cuStreamSynchronize", stream)])
        with pytest.raises(immwire.EngineClosed):
            last.result()
    pair.close()


def case_who_waits_for_the_driver_holds_up_no_other_thread():
    """The driver lets nobody through before another thread of Python's has run."""
    pair = Pair(gpus=[0])
    word, held, other = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
    driver(0, [("cuMemHostAlloc", ctypes.byref(word), ctypes.c_size_t(8), 0)])
    driver(0, [("cuStreamCreate", ctypes.byref(stream), 0) for stream in (held, other)])
    released, numbers = ctypes.c_uint64.from_address(word.value), itertools.count(1)
    # A thread that is attached stays so until it detaches or waits.
    sys.setswitchinterval(1000)

    def hold():
        """Holds the stream until the word is as high."""
        number = next(numbers)
        driver(0, [("cuStreamWaitValue64_v2", held, word, ctypes.c_uint64(number), 0)])
        return number

    def kept_waiting(call):
        page = mmap.mmap(-1, mmap.PAGESIZE)
        start = ctypes.c_uint64(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        driver(0, [("cuMemHostRegister_v2", start, ctypes.c_size_t(len(page)), 0)])
        number, go = hold(), threading.Event()

        def release():
            go.wait()
            released.value = number

        # This one waits for the stream, and all other calls of the driver's for this one.
        unregister = [("cuMemHostUnregister", start)]
        threads = [threading.Thread(target=driver, args=(0, unregister)), threading.Thread(target=release)]
        for thread in threads:
            thread.start()
        # For it to begin. If it has not, nobody waits, and this says nothing.
        time.sleep(0.1)
        go.set()
        result = call()
        for thread in threads:
            thread.join()
        return result

    def leave():
        """Drops a region in use, which lingers until memory is asked for again."""
        number = hold()
        pair.sender.after_stream(held.value, device=0)
        src = pair.sender.register(bytearray(BYTES))
        transfer = pair.sender.submit_single_write(peer=pair.peer, src=src, dst=dst.desc)
        del src
        assert not transfer.done()
        released.value = number
        transfer.wait_blocking()

    dst, counter = pair.receiver.alloc(BYTES, device=0), pair.receiver.counter()
    regions = [kept_waiting(lambda: pair.sender.register(bytearray(8)))]
    kept_waiting(regions.clear)
    leave()
    # Kept: memory of the engine's own is given back by another thread, when that comes to it.
    regions.append(kept_waiting(lambda: pair.sender.alloc(8)))
    leave()
    regions.append(kept_waiting(lambda: pair.sender.register(bytearray(8))))
    kept_waiting(lambda: pair.sender.after_stream(other.value, device=0))
    wait = dict(device=0, counter=counter, writes=1)
    waiting = kept_waiting(lambda: pair.receiver.wait_on_stream(other.value, **wait))
    pair.sender.submit_imm(peer=pair.peer, imm=counter.tag)
    waiting.result()
    pair.close()


def case_a_region_is_closed_while_the_driver_keeps_another_one():
    pair = Pair(gpus=[0])
    word, streams = ctypes.c_uint64(), [ctypes.c_uint64() for _ in range(2)]
    driver(0, [("cuMemHostAlloc", ctypes.byref(word), ctypes.c_size_t(16), 0)])
    driver(0, [("cuStreamCreate", ctypes.byref(stream), 0) for stream in streams])
    released = (ctypes.c_uint64 * 2).from_address(word.value)

    def hold(which):
        """Holds a stream until its word is 1."""
        at = ctypes.c_uint64(word.value + 8 * which)
        driver(0, [("cuStreamWaitValue64_v2", streams[which], at, ctypes.c_uint64(1), 0)])

    def release(which):
        released[which] = 1

    dst, memory = pair.receiver.alloc(BYTES, device=0), bytearray(BYTES)
    forgotten, region = pair.sender.register(memory), pair.sender.register(memory)
    src = pair.sender.register(bytearray(BYTES))
    hold(0)
    pair.sender.after_stream(streams[0].value, device=0)
    transfer = pair.sender.submit_single_write(peer=pair.peer, src=src, dst=dst.desc)
    # Both linger: a transfer uses the one, and the other is the region's, too.
    del src, forgotten
    hold(1)
    release(0)
    transfer.wait_blocking()
    # For the first to be let go of, for which the driver takes as long as a stream is held. If that has not
    # begun, this says nothing.
    time.sleep(0.2)
    later = threading.Timer(1.5, release, [1])
    later.start()
    region.close(timeout=0.5)
    assert region.closed
    memory.extend(b"nobody holds it")
    later.join()
    pair.close()


def case_words_that_a_gpu_stores_to_are_watched():
    told, over = [], threading.Event()

    def note(before, now):
        told.append((before, now))
        if now == 9:
            watcher.close()
            over.set()

    with immwire.TransferEngine(gpus=[0]) as engine, engine.alloc_uvm_watcher(note) as watcher:
        assert watcher.address % 8 == 0
        assert watcher.value == 0
        word, stream = ctypes.c_uint64(watcher.address), ctypes.c_uint64()
        driver(0, [("cuStreamCreate", ctypes.byref(stream), 0)])
        for number in (5, 9):
            driver(0, [("cuStreamWriteValue64_v2", stream, word, ctypes.c_uint64(number), 0)])
        assert over.wait(PATIENCE)
        # Both, or what was between two looks is left out.
        assert told in ([(0, 5), (5, 9)], [(0, 9)])
        with pytest.raises(immwire.ImmwireError, match="closed"):
            watcher.value  # noqa: B018
        driver(0, [("cuStreamSynchronize", stream)])
        # Its place may be this one's already.
        silent = engine.alloc_uvm_watcher(note)
        assert silent.value == 0
        with pytest.raises(TypeError, match="call"):
            engine.alloc_uvm_watcher(3)
        count = len(told)
    assert len(told) == count
    with immwire.TransferEngine() as engine, pytest.raises(immwire.UnsupportedMemory, match="no GPU"):
        engine.alloc_uvm_watcher(note)


def closed_meanwhile(wait):
    """Closes an engine while a watcher's callback waits, by ``wait``, for what does not come."""
    engine, begun, ended = immwire.TransferEngine(gpus=[0]), threading.Event(), []
    counter = engine.counter()

    def note(_before, _now):
        begun.set()
        try:
            wait(engine, counter)
        except immwire.EngineClosed as error:
            ended.append(error)

    watcher = engine.alloc_uvm_watcher(note)
    ctypes.c_uint64.from_address(watcher.address).value = 1
    assert begun.wait(PATIENCE)
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 5, "it waited for the callback's time to be up"
    assert len(ended) == 1


def case_closing_does_not_wait_for_what_a_watchers_callback_waits_for():
    async def receive(engine):
        await engine.recv(timeout=PATIENCE)

    closed_meanwhile(lambda engine, _: engine.recv_blocking(timeout=PATIENCE))
    closed_meanwhile(lambda engine, _: asyncio.run(receive(engine)))
    closed_meanwhile(lambda _, counter: counter.wait_blocking(1, timeout=PATIENCE))


def case_flags_are_words_that_kernels_read():
    by_gdrcopy = os.environ.get("IMMWIRE_GDRAPI")
    with immwire.TransferEngine(gpus=[0, 1]) as engine:
        with engine.alloc_gpu_flag(device=0) as one, engine.alloc_gpu_flag(device=0) as two:
            assert (one.value, one.device, one.place) == (0, 0, "gpu" if by_gdrcopy else "host")
            assert one.address % 8 == two.address % 8 == 0
            assert abs(one.address - two.address) >= 8
            one.set(7)
            assert (one.value, two.value) == (7, 0)
            assert "of GPU 0" in repr(one)
            with pytest.raises(OverflowError):
                one.set(-1)
        with pytest.raises(immwire.ImmwireError, match="closed"):
            one.set(1)
        with pytest.raises(immwire.UnsupportedMemory, match="GPU 2"):
            engine.alloc_gpu_flag(device=2)
    with immwire.TransferEngine() as engine, pytest.raises(immwire.UnsupportedMemory):
        engine.alloc_gpu_flag(device=0)


def case_flags_follow_counters():
    with immwire.TransferEngine(gpus=[0]) as there, immwire.TransferEngine() as here:
        peer, counter = here.add_peer(there.address), there.counter()
        flag = there.alloc_gpu_flag(device=0)
        with pytest.raises(immwire.RequestError, match="1 at least"):
            flag.follow(counter, writes=0)
        with flag.follow(counter, writes=3) as following:
            assert (flag.value, following.active) == (0, True)
            for step in range(1, 20):
                for _ in range(3):
                    assert flag.value == step - 1
                    here.submit_imm(peer=peer, imm=counter.tag).wait_blocking()
                while flag.value < step:
                    time.sleep(0)
                assert flag.value == step
            with pytest.raises(immwire.ImmwireError, match="wait"):
                counter.wait_blocking(1)
            here.submit_imm(peer=peer, imm=counter.tag).wait_blocking()
        # What was left over is there, and what comes now is nobody's step.
        assert not following.active
        here.submit_imm(peer=peer, imm=counter.tag).wait_blocking()
        counter.wait_blocking(2)
        assert flag.value == 19
        following = flag.follow(counter, writes=1)
        there.close()
        assert not following.active


def case_closed_words_say_so_to_many_threads():
    def often(call):
        try:
            for _ in range(2000):
                with pytest.raises(immwire.EngineClosed):
                    call()
            ended.append(call)
        except BaseException as error:
            failures.append(error)

    failures, ended = [], []
    with immwire.TransferEngine(gpus=[0]) as engine:
        watcher, flag = engine.alloc_uvm_watcher(print), engine.alloc_gpu_flag(device=0)
        watcher.close()
        flag.close()
        # Wherever Python code runs another thread may go on: under a lock, too, if any is held.
        sys.setswitchinterval(1e-6)
        for call in (lambda: watcher.value, lambda: flag.set(1)):
            threads = [threading.Thread(target=often, args=(call,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert not failures
    assert len(ended) == 6


def case_what_cannot_be_is_refused():
    with pytest.raises(immwire.ImmwireError, match="GPU 9"):
        immwire.TransferEngine(gpus=[9])
    with pytest.raises(immwire.ImmwireError, match="once"):
        immwire.TransferEngine(gpus=[0, 0])
    with immwire.TransferEngine(gpus=[0]) as engine:
        with pytest.raises(immwire.UnsupportedMemory, match="GPU 1"):
            engine.alloc(BYTES, device=1)
        with pytest.raises(immwire.UnsupportedMemory, match="GPU 1"):
            engine.register((allocated(1, BYTES), BYTES))
        with pytest.raises(immwire.RequestError, match="zero"):
            engine.alloc(0, device=0)
        region = engine.alloc(BYTES, device=0)
        for part in (region, region.slice(5, 100)):
            with pytest.raises(BufferError, match=r"torch\.as_tensor"):
                memoryview(part)
            assert part.__cuda_array_interface__["data"] == (part.ptr, False)
            assert "of GPU 0" in repr(part)
        del part
        region.write(10, b"abc")
        assert region.slice(9, 5).read() == b"\0abc\0"
        for outside in (BYTES - 2, BYTES + 1, 2**63):
            with pytest.raises(immwire.RequestError):
                region.write(outside, b"abc")
            with pytest.raises(immwire.RequestError):
                region.read(outside, 3)
        # A view that was refused is not counted.
        region.close()
        with pytest.raises(immwire.RegionError, match="closed"):
            region.__cuda_array_interface__  # noqa: B018
    with immwire.TransferEngine() as engine:
        with pytest.raises(immwire.UnsupportedMemory, match="GPU 0"):
            engine.alloc(BYTES, device=0)
        with pytest.raises(immwire.UnsupportedMemory, match=r"gpus=\[0\]"):
            engine.register(dlpack(allocated(0, BYTES), 0))


CASES = [name for name in dir() if name.startswith("case_")]


def on_the_stand_in(program, case, tmp_path):
    """Runs one case of a program in a process of its own."""
    place = os.environ.get("IMMWIRE_FAKE_CUDA")
    assert place, "IMMWIRE_FAKE_CUDA must name the folder that verification/fake-cuda/check --place prints"
    assert (Path(place) / "libcuda.so.1").exists()
    log = tmp_path / "broken-rules"
    environment = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= dict(LD_LIBRARY_PATH=place, IMMWIRE_FAKE_CUDA_GPUS="2", IMMWIRE_FAKE_CUDA_LOG=str(log))
    ran = subprocess.run(
        [sys.executable, program, case],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{case} holds\n"
    assert not log.exists(), log.read_text()


@pytest.mark.parametrize("case", CASES)
def test_on_the_stand_in(case, tmp_path):
    on_the_stand_in(__file__, case, tmp_path)


def test_options_that_contradict_each_other_are_refused():
    for none_copies in ({}, {"provider": "libfabric", "gpus": [0]}):
        with pytest.raises(immwire.ConfigError, match="sms"):
            immwire.TransferEngine(sms=4, **none_copies)
    with pytest.raises(immwire.ConfigError, match="SMs"):
        immwire.TransferEngine(gpus=[0], sms=0)
    for nothing_to_pair in ({}, {"gpus": [0]}, {"provider": "verbs"}):
        for options in ({"pairing": "gpu0=mlx5_0"}, {"topology": "table"}):
            with pytest.raises(immwire.ConfigError, match="pairing"):
                immwire.TransferEngine(**options, **nothing_to_pair)


def test_memory_of_the_host_is_of_no_gpu(pair):
    region = pair.sender.alloc(8)
    assert region.device is None
    assert not hasattr(region, "__cuda_array_interface__")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print(sys.argv[1], "holds")
