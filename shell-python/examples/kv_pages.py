"""KV pages by hand: a prefiller streams the pages of a request to a decoder, layer by layer.

    python kv_pages.py

The decoder owns a pool of pages. It sends the numbers of free ones, and the tag of a counter; the
prefiller writes its pages there as each layer is computed. The decoder starts once all have arrived: it
counts pages, whatever their order.
"""

import asyncio
import json
import multiprocessing
import sys
import tempfile

import immwire
import numpy as np
from immwire import bootstrap

LAYERS, POOL_PAGES, PAGE_TOKENS, HEAD_BYTES = 4, 64, 16, 256
PAGE_BYTES = PAGE_TOKENS * HEAD_BYTES
TOKENS = 100


def key_of(layer: int, token: int) -> int:
    """Return what stands for the key that a model computes."""
    return (7 * layer + token) % 251 + 1


async def prefill(directory: str) -> None:
    """Compute the keys of a request, and stream them to whoever asks."""
    with immwire.TransferEngine() as engine:
        cache = engine.register(np.zeros((LAYERS, POOL_PAGES, PAGE_TOKENS, HEAD_BYTES), dtype=np.uint8))
        tokens = np.frombuffer(cache, dtype=np.uint8).reshape(LAYERS, -1, HEAD_BYTES)
        store = bootstrap.DirectoryStore(directory)
        _, decoder = await asyncio.to_thread(bootstrap.join, engine, store, rank=0, world=2)
        request = json.loads((await engine.recv()).data)
        desc = immwire.MrDesc.from_bytes(bytes.fromhex(request["desc"]))
        mine, theirs = np.arange(len(request["pages"])), np.array(request["pages"])
        layer_bytes, transfers = POOL_PAGES * PAGE_BYTES, []
        for layer in range(LAYERS):
            tokens[layer, :TOKENS] = [[key_of(layer, token)] for token in range(TOKENS)]
            transfers.append(
                engine.submit_paged_writes(
                    peer=decoder.peer,
                    page_bytes=PAGE_BYTES,
                    src=cache,
                    src_pages=mine,
                    src_offset=layer * layer_bytes,
                    dst=desc,
                    dst_pages=theirs,
                    dst_offset=layer * layer_bytes,
                    imm=request["tag"],
                    deadline=10,
                )
            )
        # Only now may the pages be used for another request.
        await asyncio.gather(*transfers)
        del tokens
        # Stays until the decoder has looked.
        await engine.recv()


async def decode(directory: str) -> int:
    """Offer free pages, wait until they are full; return how many tokens are as they should be."""
    with immwire.TransferEngine() as engine:
        cache = engine.alloc(LAYERS * POOL_PAGES * PAGE_BYTES)
        pages = np.random.default_rng().permutation(POOL_PAGES)[: -(-TOKENS // PAGE_TOKENS)]
        store = bootstrap.DirectoryStore(directory)
        prefiller, _ = await asyncio.to_thread(bootstrap.join, engine, store, rank=1, world=2)
        with engine.counter() as counter:
            desc = bytes(cache.desc).hex()
            request = json.dumps({"desc": desc, "pages": pages.tolist(), "tag": counter.tag}).encode()
            await engine.submit_send(peer=prefiller.peer, data=request)
            await counter.wait_from({prefiller.peer: LAYERS * len(pages)}, timeout=10)
        keys = np.frombuffer(cache, dtype=np.uint8).reshape(LAYERS, POOL_PAGES, PAGE_TOKENS, HEAD_BYTES)
        arrived = keys[:, pages].reshape(LAYERS, -1, HEAD_BYTES)[:, :TOKENS]
        expected = np.array([[[key_of(layer, token)] for token in range(TOKENS)] for layer in range(LAYERS)])
        right = int((arrived == expected).all(axis=(0, 2)).sum())
        await engine.submit_send(peer=prefiller.peer, data=b"seen")
        return right


def prefiller(directory: str) -> None:
    """Run the prefiller in a process of its own."""
    asyncio.run(prefill(directory))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as meeting_place:
        process = multiprocessing.get_context("spawn").Process(target=prefiller, args=(meeting_place,))
        process.start()
        right = asyncio.run(decode(meeting_place))
        process.join()
    print(f"{right} of {TOKENS} tokens arrived in all {LAYERS} layers")
    sys.exit(right != TOKENS or process.exitcode)
