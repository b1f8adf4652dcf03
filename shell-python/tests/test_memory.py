"""Memory: what can be registered, what a region gives out, and who keeps it until when."""

import array
import contextlib
import ctypes
import gc
import mmap
import os
import signal
import threading
import time
import weakref
from typing import ClassVar

import immwire
import numpy as np
import pytest
from conftest import PATIENCE, join, stop


def test_an_allocated_region_is_zeroed_and_has_a_buffer(pair):
    region = pair.receiver.alloc(5000)
    assert len(region) == region.nbytes == 5000
    assert region.read() == bytes(5000)
    view = memoryview(region)
    assert (view.nbytes, view.readonly, view.format) == (5000, False, "B")
    view[10:13] = b"abc"
    assert region.read(9, 5) == b"\0abc\0"
    numbers = np.frombuffer(region, dtype=np.uint16, count=100)
    numbers[50] = 0x4142
    assert region.read(100, 2) == b"BA"
    assert region.ptr == numbers.ctypes.data


def test_a_region_with_views_stays_open(pair):
    region = pair.receiver.alloc(64)
    views = [memoryview(region), np.frombuffer(region, dtype=np.uint8)]
    with pytest.raises(immwire.RegionInUse, match="2 views"):
        region.close()
    # Still as it was.
    views[1][0] = 7
    assert region.read(0, 1) == b"\7"
    views.clear()
    region.close()
    assert region.closed
    region.close()
    with pytest.raises(immwire.RegionError, match="closed"):
        memoryview(region)
    with pytest.raises(immwire.RegionError, match="closed"):
        region.read()
    with pytest.raises(immwire.RegionInUse), pair.receiver.alloc(64) as region:
        view = memoryview(region)
    view.release()
    region.close()


class RawView(ctypes.Structure):
    """``Py_buffer``."""

    _fields_: ClassVar = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("rest", ctypes.c_void_p * 5),
    ]


@pytest.mark.parametrize("registered", [False, True])
def test_who_keeps_but_the_object_of_a_view_keeps_the_region_open(pair, registered):
    """As ``torch.frombuffer`` does."""
    region = pair.receiver.register(bytearray(64)) if registered else pair.receiver.alloc(64)
    view = RawView()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(region), ctypes.byref(view), 1)
    assert (view.buf, view.len) == (region.ptr, 64)
    held = view.obj
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    with pytest.raises(immwire.RegionInUse, match="1 views"):
        region.close()
    del held
    region.close()


def test_a_view_that_cannot_be_does_not_count(pair):
    region = pair.receiver.register(bytes(64))
    view = RawView()
    with pytest.raises(BufferError):
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(region), ctypes.byref(view), 1)
    region.close()


def test_a_view_keeps_the_memory_of_a_forgotten_region_and_engine():
    engine = immwire.TransferEngine()
    view = memoryview(engine.alloc(1 << 20))
    engine.close()
    del engine
    gc.collect()
    view[:] = b"x" * len(view)
    assert bytes(view[-1:]) == b"x"


def dlpack_of(array, **wanted):
    """Something that offers DLPack alone."""

    class Tensor:
        def __dlpack__(self, **kwargs):
            if kwargs and "old" in wanted:
                raise TypeError("unexpected keyword argument")
            return array.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return wanted.get("device", array.__dlpack_device__())

    return Tensor()


def interface_of(array):
    """Something that offers __array_interface__ alone."""

    class Array:
        __array_interface__ = array.__array_interface__
        keep = array

    return Array()


@pytest.mark.parametrize(
    "kind", ["numpy", "array", "bytearray", "mmap", "ctypes", "interface", "dlpack", "dlpack-old", "address"]
)
def test_everything_with_memory_is_written_to(pair, kind):
    numbers = np.arange(300, dtype=np.int16).reshape(3, 100)
    memory = {
        "numpy": lambda: numbers,
        "array": lambda: array.array("d", range(75)),
        "bytearray": lambda: bytearray(600),
        "mmap": lambda: mmap.mmap(-1, 600),
        "ctypes": lambda: (ctypes.c_int * 150)(),
        "interface": lambda: interface_of(numbers),
        "dlpack": lambda: dlpack_of(numbers),
        "dlpack-old": lambda: dlpack_of(numbers, old=True),
        "address": lambda: (numbers.ctypes.data, numbers.nbytes),
    }[kind]()
    region = pair.receiver.register(memory)
    assert region.nbytes == 600
    assert region.desc.remote_write
    src = pair.sender.alloc(600)
    data = bytes(i % 256 for i in range(600))
    src.write(0, data)
    counter = pair.receiver.counter()
    pair.sender.submit_single_write(peer=pair.peer, src=src, dst=region.desc, imm=counter.tag)
    counter.wait_blocking(1)
    plain = numbers if kind in ("interface", "dlpack", "dlpack-old", "address") else memory
    assert bytes(memoryview(plain).cast("B")) == data
    region.close()


def test_memory_that_is_read_only_is_a_source_only(pair):
    constant = np.zeros(10)
    constant.flags.writeable = False
    for memory in (b"hello", constant, interface_of(constant), dlpack_of(constant)):
        region = pair.sender.register(memory)
        assert not region.desc.remote_write
        assert memoryview(region).readonly
        with pytest.raises(immwire.RequestError, match="read only"):
            region.write(0, b"x")
        with pytest.raises(immwire.RequestError, match="read only"):
            pair.sender.register(memory, remote_write=True)
    source_only = pair.receiver.register(bytearray(8), remote_write=False)
    with pytest.raises(immwire.RequestError, match="right"):
        pair.sender.submit_single_write(peer=pair.peer, src=pair.sender.alloc(8), dst=source_only.desc)


def test_gpu_memory_is_refused_by_name(pair):
    class OnTheGpu:
        __cuda_array_interface__: ClassVar = {
            "data": (4096, False),
            "shape": (4,),
            "typestr": "<f4",
            "version": 3,
        }

    for tensor in (OnTheGpu(), dlpack_of(np.zeros(4), device=(2, 0))):
        with pytest.raises(immwire.UnsupportedMemory, match=r"GPU memory.*gpus="):
            pair.sender.register(tensor)


def test_gpu_memory_whose_interface_raises_is_refused_by_name(pair):
    class Strange:
        """As tensors of some element types are."""

        @property
        def __cuda_array_interface__(self):
            raise KeyError("float8_e4m3fn")

    class WithDlpack(Strange):
        def __dlpack_device__(self):
            return 2, 0

    for tensor in (Strange(), WithDlpack()):
        with pytest.raises(immwire.UnsupportedMemory, match=r"GPU memory.*gpus="):
            pair.sender.register(tensor)
    shape = dict(experts=1, world=1, rank=0, top_k=1, max_tokens=1, hidden=8)
    joining = immwire.moe.HostAllToAll.open(pair.sender, **shape)
    exchange = joining.join([joining.seat])
    ours = dict(indices=np.zeros((1, 1), np.int32), weights=np.ones((1, 1), np.float32))
    with pytest.raises(immwire.UnsupportedMemory, match="GPU memory: copy it to the host"):
        exchange.dispatch(Strange(), **ours, out=np.zeros((exchange.max_rows, 8), np.uint16))


@pytest.mark.parametrize(
    "memory",
    [
        3.5,
        "text",
        None,
        [1, 2],
        (1, 2, 3),
        ("a", 1),
        (-1, 5),
        np.zeros((4, 4))[:, 1],
        np.zeros(0),
        (0, 8),
        (2**64 - 4, 8),
    ],
    ids=repr,
)
def test_what_has_no_memory_is_refused(pair, memory):
    with pytest.raises((immwire.ImmwireError, TypeError, ValueError, BufferError, OverflowError)):
        pair.sender.register(memory)


def test_strides_of_an_array_interface_are_looked_at(pair):
    wide = np.arange(100, dtype=np.int32).reshape(10, 10)
    with pytest.raises(immwire.RequestError, match="contiguous"):
        pair.sender.register(interface_of(wide[:, ::2]))
    with pytest.raises(immwire.RequestError, match="contiguous"):
        pair.sender.register(dlpack_of(wide.T))
    # Axes of one element may have any stride.
    assert pair.sender.register(interface_of(wide[3:4, :])).nbytes == 40
    assert pair.sender.register(dlpack_of(wide[2:5])).nbytes == 120


def test_a_registered_object_is_held_until_the_region_is_closed(pair):
    class Held(bytearray):
        pass

    memory = Held(4096)
    gone = weakref.ref(memory)
    region = pair.sender.register(memory)
    with pytest.raises(BufferError):
        memory.extend(b"more")
    del memory
    gc.collect()
    assert gone() is not None
    region.close()
    assert gone() is None


def test_a_region_can_be_closed_once_the_part_made_of_its_own_memory_is_gone(pair):
    whole = pair.sender.alloc(1 << 20)
    for own in (lambda: whole, lambda: np.frombuffer(whole, "f4")):
        part = pair.sender.register(own())
        with pytest.raises(immwire.RegionInUse, match="1 views"):
            whole.close()
        del part
    whole.close()
    assert whole.closed


def test_a_region_and_the_part_made_of_its_own_memory_are_let_go(pair):
    whole = pair.sender.alloc(1 << 20)
    view = np.frombuffer(whole, "f4")
    gone, part = weakref.ref(view), pair.sender.register(view)
    del view, whole, part
    gc.collect()
    assert gone() is None


def test_a_dropped_region_lets_go_once_nothing_uses_it(pair):
    class Held(bytearray):
        pass

    memory = Held(4096)
    gone = weakref.ref(memory)
    whole = pair.sender.register(memory)
    part = whole.slice(1024, 1024)
    del memory, whole
    gc.collect()
    assert gone() is not None, "the part is still registered"
    part.write(0, b"here")
    del part
    # Nobody asks the engine for anything meanwhile.
    until = time.monotonic() + PATIENCE
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.001)
    assert gone() is None
    # The engine's end lets go of what is left, but for what can be read by a part.
    memory = [Held(b"here"), Held(4096)]
    there, gone = map(weakref.ref, memory)
    part = pair.sender.register(memory[0]).slice(1, 3)
    other = pair.sender.register(memory[1])
    memory.clear()
    pair.close()
    assert part.read() == b"ere"
    assert there() is not None
    del other, part
    assert there() is None
    assert gone() is None


def test_memory_that_is_mapped_read_only_is_not_written_to(pair):
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    at = libc.mmap(None, ctypes.c_size_t(4096), mmap.PROT_READ, flags, -1, ctypes.c_long(0))
    region = pair.sender.register((at, 4096), remote_write=False)
    with pytest.raises(immwire.RegionError, match="read only"):
        region.write(0, b"x")
    assert region.read(0, 4) == bytes(4)
    # What may be written is, in the middle of it.
    memory = bytearray(4096)
    region = pair.sender.register(memory, remote_write=False)
    region.write(5, b"here")
    assert memory[4:10] == b"\0here\0"


def flooding(connection):
    """Writes to each region that is told of, until that fails."""
    with immwire.TransferEngine(foreign_path="kernel") as engine:
        peer = engine.add_peer(connection.recv())
        engine.wait_peer_blocking(peer)
        src = engine.alloc(1 << 20)
        src.write(0, b"x" * len(src))
        connection.send(os.getpid())
        while desc := connection.recv():
            dst, flying = immwire.MrDesc.from_bytes(desc), []
            with contextlib.suppress(immwire.ImmwireError):
                while True:
                    flying.append(engine.submit_single_write(peer=peer, src=src, dst=dst))
                    if len(flying) == 4:
                        flying.pop(0).wait_blocking()


@pytest.mark.parametrize("dropped", ["before", "after"])
def test_what_a_peer_may_still_write_to_is_held_for_good(partner, dropped):
    class Held(bytearray):
        pass

    connection = partner(flooding)
    engine = immwire.TransferEngine(drain=0)
    connection.send(bytes(engine.address))
    process = connection.recv()
    # Where only parents may write to their children (Yama), be it that one asks for it.
    ctypes.CDLL(None).prctl(0x59616D61, process, 0, 0, 0)  # PR_SET_PTRACER
    until = time.monotonic() + PATIENCE
    while True:
        memory = Held(1 << 20)
        gone, region = weakref.ref(memory), engine.register(memory)
        connection.send(bytes(region.desc))
        while memory[-1] == 0:
            assert time.monotonic() < until
        stop(process)
        try:
            # Between two writes, it seems.
            region.close(timeout=0)
        except immwire.RegionInUse as error:
            assert "still writing" in str(error)
            break
        assert time.monotonic() < until
        os.kill(process, signal.SIGCONT)
    try:
        del memory
        told = pytest.warns(RuntimeWarning, match="middle of a write .* held for good")
        if dropped == "before":
            del region
            with told:
                engine.close()
        else:
            engine.close()
            assert gone() is not None
            with pytest.raises(immwire.RegionInUse, match="still writing"):
                region.close(timeout=0)
            with told:
                del region
        gc.collect()
        assert gone() is not None
    finally:
        os.kill(process, signal.SIGCONT)
        connection.send(None)


def test_a_region_can_be_closed_after_its_engine(pair):
    memory = bytearray(100)
    region = pair.receiver.register(memory)
    pair.close()
    with pytest.raises(BufferError):
        memory.extend(b"held")
    region.close()
    memory.extend(b"nobody holds it")


def test_a_region_is_not_closed_while_somebody_still_waits_for_that(pair):
    region = pair.sender.register(bytearray(4096))
    part, there = region.slice(0, 8), pair.receiver.alloc(8)
    thread = threading.Thread(target=region.close, kwargs=dict(timeout=2 * PATIENCE))
    thread.start()
    until = time.monotonic() + PATIENCE
    while "being closed" not in repr(region):
        assert time.monotonic() < until
        time.sleep(0.001)
    with pytest.raises(immwire.RegionInUse, match="another thread"):
        region.close(timeout=0.05)
    for use in (
        region.read,
        lambda: region.write(0, b"x"),
        lambda: memoryview(region),
        lambda: region.slice(0, 8),
        lambda: pair.sender.submit_single_write(peer=pair.peer, src=region, dst=there.desc, len=8),
    ):
        with pytest.raises(immwire.RegionInUse, match="another thread is closing the region"):
            use()
    assert not region.closed
    part.close()
    join(thread)
    assert region.closed


def test_a_region_that_was_not_closed_in_time_is_as_before(pair):
    region = pair.sender.register(bytearray(4096))
    part, refused = region.slice(0, 8), []

    def close():
        with pytest.raises(immwire.RegionInUse) as caught:
            region.close(timeout=1)
        refused.append(caught.value)

    thread = threading.Thread(target=close)
    thread.start()
    join(thread)
    assert refused
    assert not region.closed
    # It can be used, and closed.
    region.write(0, b"here")
    assert region.read(0, 4) == b"here"
    closers = [threading.Thread(target=region.close) for _ in range(4)]
    part.close()
    for thread in closers:
        thread.start()
    join(*closers)
    assert region.closed


def test_a_dropped_region_gives_its_object_back(pair):
    memory = interface_of(np.zeros(4096, dtype=np.uint8))
    gone = weakref.ref(memory)
    region = pair.sender.register(memory)
    del memory
    gc.collect()
    assert gone() is not None
    del region
    assert gone() is None


def test_a_slice_is_part_of_its_region(pair):
    region = pair.receiver.alloc(100)
    part = region.slice(40, 20)
    part.write(5, b"hi")
    assert region.read(45, 2) == b"hi"
    assert part.desc.nbytes == 20
    with pytest.raises(immwire.RegionInUse, match="another handle"):
        region.close(timeout=0.05)
    part.close()
    part.close()
    region.close()
    memory = bytearray(100)
    with pair.sender.register(memory) as whole, pair.sender.register(memory) as again:
        again.write(0, b"same")
        assert whole.read(0, 4) == b"same"
    memory.extend(b"nobody holds it")
    for offset, length in ((90, 20), (2**64 - 1, 2), (0, 0)):
        with pytest.raises(immwire.ImmwireError):
            pair.receiver.alloc(100).slice(offset, length)


def test_ranges_are_checked(pair):
    region = pair.sender.alloc(100)
    with pytest.raises(immwire.RequestError, match="100 bytes"):
        region.read(90, 20)
    with pytest.raises(immwire.RequestError):
        region.read(101)
    with pytest.raises(immwire.RequestError):
        region.write(99, b"ab")
    with pytest.raises(immwire.RequestError):
        pair.sender.alloc(0)
    there = pair.receiver.alloc(100).desc
    with pytest.raises(immwire.RequestError):
        pair.sender.submit_single_write(peer=pair.peer, src=region, dst=there, dst_offset=1)


@pytest.mark.parametrize(
    "pages",
    [
        np.array([1.0]),
        np.array([-1]),
        np.array([2**32], dtype=np.uint64),
        np.array([2**63], dtype=np.uint64),
        np.array([-(2**31)], dtype=np.int32),
        np.zeros((2, 2), dtype=np.uint32),
        np.array([1], dtype=np.uint16),
        np.array([1], dtype=">u4"),
        [-1],
        [2**32],
        ["a"],
        5,
    ],
    ids=repr,
)
def test_what_is_no_page_number_is_refused(pages):
    with pytest.raises((immwire.RequestError, TypeError)):
        immwire.PageIndices(pages)


def test_pages_outside_of_a_region_are_named(pair):
    src, there = pair.sender.alloc(4096), pair.receiver.alloc(4096).desc
    pages = dict(peer=pair.peer, page_bytes=1024, src=src, dst=there)
    with pytest.raises(immwire.RequestError, match="source page 4 of 1024 bytes, number 1 in its list"):
        pair.sender.submit_paged_writes(**pages, src_pages=[0, 4], dst_pages=[0, 1])
    with pytest.raises(immwire.RequestError, match="destination page 5 of 1024 bytes, number 0 in its list"):
        pair.sender.submit_paged_writes(**pages, src_pages=[0, 1], dst_pages=[5, 1])
    with pytest.raises(immwire.RequestError, match="2 source pages for 1 destination pages"):
        pair.sender.submit_paged_writes(**pages, src_pages=[0, 1], dst_pages=[0])
