"""Layers of a mixture of experts, split over GPUs and replayed as one CUDA graph, with PyTorch.

    python gpu_moe_layer.py                a rank on each GPU, or two on the only one; torch
    python gpu_moe_layer.py --ranks 4      so many, on the GPUs there are
    python gpu_moe_layer.py --rounds 1000  more of it

Each rank is a process with tokens of its own and some of the experts. A layer routes tokens, dispatches
them to their experts' GPUs, has these work on what arrived (two grouped GEMMs, told on the device how many
rows each expert has), and combines the results. All layers are one graph: the host only replays it.

Processes that share a GPU take turns on it, and wait for each other meanwhile: that is for trying it out.

In the end the first rank does the same alone, with all tokens and all experts, and compares.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time

import immwire
from immwire import bootstrap, moe

try:
    import torch
    from torch.nn import functional
except ImportError:
    sys.exit("gpu_moe_layer.py needs torch")

EXPERTS, TOP_K, TOKENS, HIDDEN, INNER, LAYERS = 32, 4, 64, 1024, 512, 4
TIMEOUT = 60.0


def made_up(gpu):
    """The same at every rank: of each layer a router, of each expert two matrices. It keeps only its own."""
    generator = torch.Generator().manual_seed(1)

    def matrix(*shape):
        values = torch.randn(shape, generator=generator) / shape[-2] ** 0.5
        return values.to(gpu, torch.bfloat16)

    routers = [matrix(HIDDEN, EXPERTS) for _ in range(LAYERS)]
    return routers, matrix(EXPERTS, HIDDEN, INNER), matrix(EXPERTS, INNER, HIDDEN)


def tokens(rank, gpu):
    """The tokens of a rank."""
    values = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(2 + rank))
    return values.to(gpu, torch.bfloat16)


def route(x, router):
    """The experts that a token chooses, and how much it trusts each."""
    scores, chosen = torch.topk((x @ router).float(), TOP_K)
    return chosen, torch.softmax(scores, dim=1)


def work(rows, up, down, ends):
    """What experts make of rows that lie one expert's after the other's, up to these ends."""
    inner = functional.silu(functional.grouped_mm(rows, up, offs=ends))
    return functional.grouped_mm(inner, down, offs=ends)


def split(directory, rank, world, gpus, rounds):
    """Be one rank. The first compares, and returns whether all is as it must be, and seconds."""
    device = rank % gpus
    gpu = torch.device("cuda", device)
    torch.cuda.set_device(gpu)
    store = bootstrap.DirectoryStore(directory)
    meet = dict(rank=rank, world=world, timeout=TIMEOUT)
    with immwire.TransferEngine(gpus=[device], timeout=TIMEOUT) as engine:
        joining = moe.GpuAllToAll.open(
            engine,
            rank=rank,
            device=device,
            experts=EXPERTS,
            world=world,
            top_k=TOP_K,
            max_tokens=TOKENS,
            hidden=HIDDEN,
            # Ranks of one GPU wait for each other, and so need room at the same time.
            sms=16,
        )
        exchange = joining.join(bootstrap.exchange(store, value=joining.seat, name="seats", **meet))
        routers, *matrices = made_up(gpu)
        first, last = (EXPERTS // world * number for number in (rank, rank + 1))
        up, down = (matrix[first:last].clone() for matrix in matrices)
        x, given = tokens(rank, gpu), tokens(rank, gpu)
        rows = torch.zeros((exchange.max_rows, HIDDEN), dtype=torch.bfloat16, device=gpu)
        counts = torch.zeros(last - first, dtype=torch.int32, device=gpu)
        offsets = torch.zeros(last - first + 1, dtype=torch.int32, device=gpu)

        def layers():
            x.copy_(given)
            stream = torch.cuda.current_stream().cuda_stream
            for router in routers:
                chosen, weights = route(x, router)
                exchange.dispatch(x, chosen, weights, out=rows, counts=counts, offsets=offsets, stream=stream)
                exchange.combine(work(rows, up, down, offsets[1:]), out=x, stream=stream)

        # As torch wants it: some runs on a stream that is not the default one come first.
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                layers()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The engine's thread calls CUDA meanwhile: only this thread's calls are to be captured, or refused.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            layers()
        bootstrap.exchange(store, value=b"", name="captured", **meet)
        began = time.monotonic()
        for _ in range(rounds):
            graph.replay()
        torch.cuda.synchronize()
        took = time.monotonic() - began
        report = exchange.report()
        value = x.view(torch.uint8).cpu().numpy().tobytes()
        outputs = bootstrap.exchange(store, value=value, name="outputs", **meet)
        if report:
            print(f"rank {rank}: {report}", file=sys.stderr)
        return not report and (rank > 0 or same(outputs, whole(world, gpu))), took


def whole(world, gpu):
    """The same on one GPU. Each rank's experts are summed in float32 and rounded, then the ranks."""
    routers, up, down = made_up(gpu)
    x = torch.cat([tokens(rank, gpu) for rank in range(world)])
    ranks = torch.arange(EXPERTS, device=gpu) // (EXPERTS // world)
    for router in routers:
        # As each rank routes its own: what a token chooses is not to depend on how many there are.
        routes = [route(own, router) for own in x.split(TOKENS)]
        chosen, weights = (torch.cat(parts) for parts in zip(*routes, strict=True))
        # By expert, and of each by token.
        order = torch.argsort(chosen.flatten(), stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32)
        results = torch.empty((len(order), HIDDEN), dtype=torch.bfloat16, device=gpu)
        results[order] = work(x[order // TOP_K], up, down, ends)
        results = results.view(len(x), TOP_K, HIDDEN).float()
        parts = torch.zeros((world, len(x), HIDDEN), device=gpu)
        for choice in range(TOP_K):
            for rank in range(world):
                mine = (ranks[chosen[:, choice]] == rank)[:, None]
                parts[rank] += torch.where(mine, weights[:, choice, None] * results[:, choice], 0)
        total = torch.zeros_like(parts[0])
        for part in parts:
            total += part.to(torch.bfloat16).float()
        x = total.to(torch.bfloat16)
    return x


def same(outputs, expected):
    """Whether all ranks' outputs are what they must be."""
    found = torch.frombuffer(bytearray(b"".join(outputs)), dtype=torch.bfloat16).view(expected.shape)
    differing = int((found != expected.cpu()).sum())
    if differing:
        most = (found.float() - expected.cpu().float()).abs().max()
        print(f"{differing} of {found.numel()} values differ, by {most} at most", file=sys.stderr)
    return differing == 0


def main():
    """Run all ranks. Returns 1 if an output is wrong, or a rank failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, help="2, 4, 8, ...; one on each GPU unless given, and two at least"
    )
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    gpus = torch.cuda.device_count()
    world = given.ranks or max(2, gpus)
    if gpus == 0 or not hasattr(functional, "grouped_mm"):
        sys.exit(
            f"gpu_moe_layer.py needs a GPU, and PyTorch 2.10; torch {torch.__version__} finds {gpus} GPUs"
        )
    if EXPERTS % world:
        sys.exit(f"{EXPERTS} experts cannot be split evenly among {world} ranks")
    with tempfile.TemporaryDirectory() as meeting_place:
        spawn = multiprocessing.get_context("spawn")
        arguments = [(meeting_place, rank, world, gpus, given.rounds) for rank in range(world)]
        processes = [spawn.Process(target=be, args=arguments[rank]) for rank in range(1, world)]
        for process in processes:
            process.start()
        right, took = split(*arguments[0])
        for process in processes:
            process.join(TIMEOUT)
    right &= all(process.exitcode == 0 for process in processes)
    found = "the same as" if right else "other than"
    a_layer = took / given.rounds / LAYERS * 1e6
    print(f"{LAYERS} layers over {world} ranks on {gpus} GPUs: {found} on one; {a_layer:.0f} us a layer")
    return 0 if right else 1


def be(*arguments):
    """Be one of the other ranks."""
    right, _ = split(*arguments)
    sys.exit(not right)


if __name__ == "__main__":
    sys.exit(main())
