"""KV pages between two GPUs, from a CUDA graph into a CUDA graph, with PyTorch.

    python graph_pages.py                   from GPU 0 to GPU 1; torch, and two GPUs that reach each other
    python graph_pages.py --one-gpu         both processes on GPU 0
    python graph_pages.py --rounds 10000    more of it

A prefiller replays a graph that computes pages; a decoder, in another process, replays one that compares
every bit of those that have arrived. Nothing of the graphs changes from round to round but what is in their
memory: the number of the round, which they count themselves, and a table of pages, as paged attention has it.

Each round goes so:

1. The decoder requests it: a message with the numbers of free pages, and the tag of a counter.
2. The prefiller replays its graph, and submits the pages at once: `after_stream` has the GPU copy them when
   the graph has written them. Nobody waits for the graph.
3. The decoder replays its graph at once, too: `wait_on_stream` holds its stream until the counter has counted
   all pages, whatever their order. Nobody waits for the pages but the GPU.
4. When that graph has ended, its pages are free, and the round after the next is requested.

Two rounds are under way at a time, on pages of their own and with a counter each: two rounds that are counted
together could not be told apart.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time

import immwire
import numpy as np
from immwire import bootstrap

try:
    import torch
except ImportError:
    sys.exit("graph_pages.py needs torch")

PAGES, PAGE_BYTES = 256, 16 * 1024
#: Rounds that may be under way, and pages of each process: as many for each of them, and some to choose from.
DEPTH = 2
POOL_PAGES = (DEPTH + 1) * PAGES
TIMEOUT = 20.0


class Cache:
    """Pages on a GPU, and a graph that works on those of one round."""

    def __init__(self, engine, gpu, work):
        """Capture `work`, which is given the pages, the table of the round's, and what is to be in them."""
        torch.cuda.set_device(gpu)
        self.engine, self.gpu, self.stream = engine, gpu, torch.cuda.Stream()
        self.region = engine.alloc(POOL_PAGES * PAGE_BYTES, device=gpu)
        pages = torch.as_tensor(self.region, device=f"cuda:{gpu}").view(torch.int64).view(POOL_PAGES, -1)
        self.table = torch.arange(PAGES, device=f"cuda:{gpu}")
        count = torch.zeros(1, dtype=torch.int64, device=f"cuda:{gpu}")
        words = torch.arange(PAGES * PAGE_BYTES // 8, device=f"cuda:{gpu}").view(PAGES, -1)

        def step():
            # No two words of any two rounds are alike.
            work(pages, self.table, words + count * words.numel())
            count.add_(1)

        # As torch wants it: some runs on a stream that is not the default one come first.
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                step()
        self.stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # The engine's thread calls CUDA meanwhile: only this thread's calls are to be captured, or refused.
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            step()
        count.zero_()
        torch.cuda.synchronize()

    def replay(self, table, counter=None):
        """Have the graph work on these pages, when they are counted. Returns before it has."""
        pinned = torch.from_numpy(table.astype(np.int64)).pin_memory()
        held = counter and self.engine.wait_on_stream(
            self.stream.cuda_stream, device=self.gpu, counter=counter, writes=PAGES
        )
        with torch.cuda.stream(self.stream):
            self.table.copy_(pinned, non_blocking=True)
            self.graph.replay()
        return held


def prefill(directory, gpu, rounds, ordered):
    """Compute pages, round by round, and write them to whoever requests them."""

    def compute(pages, table, content):
        pages.index_copy_(0, table, content)

    with immwire.TransferEngine(gpus=[gpu], timeout=TIMEOUT) as engine:
        cache = Cache(engine, gpu, compute)
        store = bootstrap.DirectoryStore(directory)
        decoder, _ = bootstrap.join(engine, store, rank=1, world=2)
        desc = immwire.MrDesc.from_bytes(decoder.offers[0])
        random, transfers = np.random.default_rng(), {}
        for number in range(rounds):
            request = np.frombuffer(engine.recv_blocking().data, dtype=np.uint32)
            if number >= DEPTH:  # The pages of that round are needed now: it must have ended.
                transfers.pop(number - DEPTH).wait_blocking()
            mine = number % DEPTH * PAGES + random.permutation(PAGES)
            cache.replay(mine)
            if ordered:
                engine.after_stream(cache.stream.cuda_stream, device=gpu)
            transfers[number] = engine.submit_paged_writes(
                peer=decoder.peer,
                page_bytes=PAGE_BYTES,
                src=cache.region,
                src_pages=mine,
                dst=desc,
                dst_pages=request[1:],
                imm=int(request[0]),
            )
        for transfer in transfers.values():
            transfer.wait_blocking()
        engine.recv_blocking()  # The decoder has looked at all of it.


def decode(directory, gpu, rounds):
    """Request pages, round by round, and compare them. Returns how many words were wrong, and seconds."""
    torch.cuda.set_device(gpu)
    wrong = torch.zeros(1, dtype=torch.int64, device=f"cuda:{gpu}")

    def compare(pages, table, content):
        wrong.add_((pages.index_select(0, table) != content).sum())

    with immwire.TransferEngine(gpus=[gpu], timeout=TIMEOUT) as engine:
        cache = Cache(engine, gpu, compare)
        wrong.zero_()
        torch.cuda.synchronize()
        counters = [engine.counter() for _ in range(DEPTH)]
        store = bootstrap.DirectoryStore(directory)
        offers = [bytes(cache.region.desc)]
        _, prefiller = bootstrap.join(engine, store, rank=0, world=2, offers=offers)
        random, free, tables = np.random.default_rng(), np.arange(POOL_PAGES), {}

        def request(number):
            nonlocal free
            free = random.permutation(free)
            tables[number], free = free[:PAGES], free[PAGES:]
            message = np.array([counters[number % DEPTH].tag, *tables[number]], dtype=np.uint32)
            engine.submit_send(peer=prefiller.peer, data=message)

        began = time.monotonic()
        for number in range(min(DEPTH, rounds)):
            request(number)
        for number in range(rounds):
            held = cache.replay(tables[number], counters[number % DEPTH])
            cache.stream.synchronize()
            held.result()  # Raises if the stream has gone on for another reason: say, too late.
            free = np.concatenate([free, tables.pop(number)])
            if number + DEPTH < rounds:
                request(number + DEPTH)
        took = time.monotonic() - began
        engine.submit_send(peer=prefiller.peer, data=b"seen").wait_blocking()
        return int(wrong), took


def main():
    """Run both. Returns 1 if a word was wrong, or the prefiller failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--one-gpu", action="store_true", help="both processes on GPU 0")
    parser.add_argument("--unordered", action="store_true", help="without after_stream: it is to fail")
    given = parser.parse_args()
    needed = 1 if given.one_gpu else 2
    if torch.cuda.device_count() < needed:
        sys.exit(f"graph_pages.py needs {needed} GPUs; torch finds {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as meeting_place:
        arguments = meeting_place, 0, given.rounds, not given.unordered
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=prefill, args=arguments, daemon=True)
        process.start()
        wrong, took = decode(meeting_place, needed - 1, given.rounds)
        process.join(TIMEOUT)
    rate = given.rounds * PAGES * PAGE_BYTES / took / 1e9
    print(
        f"{given.rounds} rounds of {PAGES} pages of {PAGE_BYTES} bytes: {wrong} words wrong; "
        f"{given.rounds / took:.0f} rounds/s, {rate:.1f} GB/s"
    )
    return 1 if wrong or process.exitcode != 0 else 0


if __name__ == "__main__":
    sys.exit(main())
