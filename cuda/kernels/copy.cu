// Copies pages from anywhere to anywhere that the GPU can reach, and says when they are there.
//
// Three kernels for whole requests, one contract (immwire_cuda.h). `immwire_copy_vector` moves 16 bytes a thread and instruction through
// registers; `immwire_copy_any` does the same where it can, and takes any address and size. `immwire_copy_bulk` has the SM's
// copy unit move whole pieces through shared memory (cp.async.bulk): one thread of a warp keeps many KiB in flight.
// A fourth, `immwire_standby`, makes short copies that it is asked for while it is there.
//
// The kernels know addresses, not whose they are: pushing to a peer, pulling from one, and copying within a GPU or to
// pinned host memory are the same code. They wait for nothing but their own loads, and the fourth for no longer than it was told, so a
// launch ends, or faults.
//
// Invariants:
// 1. Each piece is copied by exactly one warp: immwire_share cuts [0, turns.dealt) into disjoint blocks that cover it, the rest is cut into
//    turns, and each turn's number is given out once (enumerated in cuda/src/geometry.rs, which has the same functions).
// 2. No byte outside of a source page is read, and none outside of a target page is written.
// 3. The word is released once, by one thread, after every write of the launch: see `announce`.
// 4. A copy that was asked for at a seat is made once, by its warp, before the warp says so: see `immwire_standby`.
// Checked, bit by bit and with canaries, by benches/gpu/run on a machine with GPUs.

#include "immwire_cuda.h"

namespace {

constexpr uint32_t WARP = 32;
static_assert(IMMWIRE_TURN_MAX_PIECES <= WARP, "each lane looks one page of a turn up");
constexpr uint32_t ALL_LANES = 0xffffffffu;

// A block of pieces, [first, first + count), for worker `worker` of `workers`. They differ by at most one in length.
struct Share {
  uint32_t first, count;
};

__device__ Share immwire_share(uint32_t pieces, uint32_t workers, uint32_t worker) {
  const uint32_t each = pieces / workers, extra = pieces % workers;
  return {worker * each + min(worker, extra), each + (worker < extra ? 1 : 0)};
}

// A warp's pieces, one after the other: those that it is dealt, then turns, as long as there are any. All lanes of the warp call all of it together.
//
// Page tables may lie in host memory, a microsecond away: so each lane holds the entries of one page, and 32 pages are
// looked up in one access for each side. Those of a turn are looked up a turn before, and its number is asked for two before.
//
// Numbers of turns come from a counter. Each warp asks until it is given one past the last turn, and then no more. So together they ask
// turns.count + warps times, which wraps the counter to zero, as the next launch finds it.
class Pieces {
 public:
  __device__ Pieces(const immwire_copy_args &args, uint32_t worker, uint32_t workers, uint32_t lane)
      : args(args), lane(lane), workers(workers), asks(args.turns.count > 0) {
    const Share share = immwire_share(args.turns.dealt, workers, worker);
    if (asks) ask();
    if (share.count > 0) {
      begin(share.first, share.count);
      look_up(page, WARP, source_page, target_page);
    }
    if (left <= args.turns.pieces) prepare();
    if (left == 0) take_turn();
  }

  // Whether there is a current piece.
  __device__ bool any() const { return left > 0; }

  // The current piece. Every lane gets the same.
  __device__ void get(uint64_t &source, uint64_t &target, uint32_t &bytes) const {
    const uint64_t offset = uint64_t(piece) * args.piece_bytes;
    source = __shfl_sync(ALL_LANES, source_page, page - window) + offset;
    target = __shfl_sync(ALL_LANES, target_page, page - window) + offset;
    bytes = uint32_t(min(args.page_bytes - offset, uint64_t(args.piece_bytes)));
  }

  __device__ void advance() {
    if (--left == 0) return take_turn();
    if (left == args.turns.pieces) prepare();
    if (++piece < args.pieces_per_page) return;
    piece = 0;
    if (++page == window + WARP) window = page, look_up(page, WARP, source_page, target_page);
  }

 private:
  __device__ void begin(uint32_t first, uint32_t count) {
    page = window = first / args.pieces_per_page;
    piece = first % args.pieces_per_page;
    left = count;
  }

  __device__ void ask() {
    if (lane == 0)
      asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                   : "=r"(number)
                   : "l"(args.turns.asked), "r"(args.turns.count + workers - 1)
                   : "memory");
  }

  // Looks up the pages of the turn that was asked for, and asks for another.
  __device__ void prepare() {
    if (!asks) return;
    const uint32_t turn = __shfl_sync(ALL_LANES, number, 0);
    asks = turn < args.turns.count;
    if (!asks) return;
    next_first = args.turns.dealt + turn * args.turns.pieces;
    next_count = min(args.turns.pieces, args.piece_count - next_first);
    look_up(next_first / args.pieces_per_page, next_count + 1, next_source, next_target);
    ask();
  }

  __device__ void take_turn() {
    if (next_count == 0) return;
    begin(next_first, next_count);
    source_page = next_source, target_page = next_target;
    next_count = 0;
    prepare();
  }

  __device__ void look_up(uint32_t first, uint32_t most, uint64_t &source, uint64_t &target) const {
    const uint32_t mine = first + lane;
    if (mine >= args.page_count || lane >= most) return; // Never asked for.
    source = start(args.source, mine);
    target = start(args.target, mine);
  }

  __device__ static uint64_t start(const immwire_pages &pages, uint32_t page) {
    const uint32_t index = pages.table ? reinterpret_cast<const uint32_t *>(pages.table)[page] : page;
    return pages.base + pages.stride * index;
  }

  const immwire_copy_args &args;
  const uint32_t lane, workers;
  bool asks;
  uint32_t page = 0, piece = 0, window = 0, left = 0, number = 0, next_first = 0, next_count = 0;
  uint64_t source_page = 0, target_page = 0, next_source = 0, next_target = 0;
};

// Loads and stores of global memory. Volatile, so that they are issued in the order written: loads first.
__device__ void load(uint4 &held, const uint4 *from) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(held.x), "=r"(held.y), "=r"(held.z), "=r"(held.w) : "l"(from));
}
__device__ void store(uint4 *to, const uint4 &held) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(held.x), "r"(held.y), "r"(held.z), "r"(held.w)
               : "memory");
}
__device__ void load(uint32_t &held, const uint32_t *from) {
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(held) : "l"(from));
}
__device__ void store(uint32_t *to, const uint32_t &held) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(held) : "memory");
}
__device__ void load(uint8_t &held, const uint8_t *from) {
  uint32_t wide;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(wide) : "l"(from));
  held = uint8_t(wide);
}
__device__ void store(uint8_t *to, const uint8_t &held) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(to), "r"(uint32_t(held)) : "memory");
}

// Copies `count` elements, the lanes of a warp side by side, up to eight loads in flight for each.
template <typename T>
__device__ void copy_elements(uint64_t target, uint64_t source, uint32_t count, uint32_t lane) {
  constexpr uint32_t DEPTH = 8;
  const T *from = reinterpret_cast<const T *>(source) + lane;
  T *to = reinterpret_cast<T *>(target) + lane;
  T held[DEPTH];
  for (; count >= WARP * DEPTH; count -= WARP * DEPTH, from += WARP * DEPTH, to += WARP * DEPTH) {
#pragma unroll
    for (uint32_t i = 0; i < DEPTH; ++i) load(held[i], from + i * WARP);
#pragma unroll
    for (uint32_t i = 0; i < DEPTH; ++i) store(to + i * WARP, held[i]);
  }
#pragma unroll
  for (uint32_t i = 0; i < DEPTH; ++i)
    if (lane + i * WARP < count) load(held[i], from + i * WARP);
#pragma unroll
  for (uint32_t i = 0; i < DEPTH; ++i)
    if (lane + i * WARP < count) store(to + i * WARP, held[i]);
}

__device__ void copy_byte(uint64_t target, uint64_t source) {
  uint8_t held;
  load(held, reinterpret_cast<const uint8_t *>(source));
  store(reinterpret_cast<uint8_t *>(target), held);
}

// Source and target lie alike on the grid of T: bytes up to the grid, elements, the bytes that are left.
template <typename T>
__device__ void copy_alike(uint64_t target, uint64_t source, uint32_t bytes, uint32_t lane) {
  const uint32_t head = min(bytes, uint32_t(-target % sizeof(T)));
  const uint32_t body = (bytes - head) / sizeof(T) * sizeof(T);
  if (lane < head) copy_byte(target + lane, source + lane);
  copy_elements<T>(target + head, source + head, body / sizeof(T), lane);
  if (lane < bytes - head - body) copy_byte(target + head + body + lane, source + head + body + lane);
}

__device__ void copy_any(uint64_t target, uint64_t source, uint32_t bytes, uint32_t lane) {
  const uint64_t apart = target ^ source;
  if (apart % 16 == 0)
    copy_alike<uint4>(target, source, bytes, lane);
  else if (apart % 4 == 0)
    copy_alike<uint32_t>(target, source, bytes, lane);
  else
    copy_elements<uint8_t>(target, source, bytes, lane);
}

// Releases the word once all writes of the grid are visible system-wide. Called by every thread of the grid.
//
// Why this is right, in terms of the PTX memory model (PTX ISA 9.0, "Memory Consistency Model"):
// - Each thread's writes precede its arrival at the block's barrier, which synchronizes with thread 0's departure from
//   it; so they precede, in causality order, what thread 0 does next. (Bulk copies count as writes of the thread that
//   issued them once it has waited for their completion, which immwire_copy_bulk does first: waiting includes the
//   proxy fence from the asynchronous to the generic proxy.)
// - The increments of `arrivals` are acquire-release at gpu scope, morally strong among the blocks of one grid. Each is
//   a release pattern that synchronizes with the acquire of every later one, through the chain of read-modify-writes.
//   So the last one's thread has all blocks' writes before it in causality order, which is transitive.
// - Its release at system scope is cumulative: whoever reads the word with an acquire at system scope (a GPU, the CPU,
//   or a stream that waits for the value) has all of them before it. No order between the writes themselves is assumed.
// The increment wraps to zero at the last block, so that the next launch finds what this one did.
__device__ void announce(const immwire_release &release) {
  if (release.kind == IMMWIRE_RELEASE_NONE) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (gridDim.x > 1) {
    uint32_t before;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(release.arrivals), "r"(gridDim.x - 1)
                 : "memory");
    if (before != gridDim.x - 1) return;
  }
  if (release.kind == IMMWIRE_RELEASE_ADD)
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(release.word), "l"(release.value) : "memory");
  else
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(release.word), "l"(release.value) : "memory");
}

// Workers are numbered across the blocks first: where pieces are fewer than warps, all SMs take part.
__device__ uint32_t worker(uint32_t warp) { return warp * gridDim.x + blockIdx.x; }

template <uint32_t THREADS, typename CopyPiece>
__device__ void through_registers(const immwire_copy_args &args, CopyPiece copy_piece) {
  const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  for (Pieces pieces(args, worker(warp), gridDim.x * (THREADS / WARP), lane); pieces.any(); pieces.advance()) {
    uint64_t source, target;
    uint32_t bytes;
    pieces.get(source, target, bytes);
    copy_piece(target, source, bytes, lane);
  }
  announce(args.release);
}

#if __CUDA_ARCH__ >= 900
__device__ uint32_t shared_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ void barrier_init(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// Returns when the phase of `parity` has ended: all bytes of the load are in shared memory.
__device__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
}

__device__ void bulk_load(uint32_t stage, uint64_t source, uint32_t bytes, uint32_t barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(stage),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ void bulk_store(uint64_t target, uint32_t stage, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(stage), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
#endif

__device__ uint64_t now() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// What a seat's warp says of itself, in the two lowest bits of its status.
enum Phase : uint32_t { UP = 1, GONE = 3 };

// The words of a seat, seen by its warp. All lanes call all of it, together.
class Seat {
 public:
  __device__ Seat(uint64_t words, uint32_t launch, uint32_t lane) : words(words), launch(launch), lane(lane) {
    // Left by the warp before, of a launch that has ended.
    uint64_t status;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(status) : "l"(words + 8 * IMMWIRE_SEAT_STATUS) : "memory");
    done = uint32_t(status >> 32);
  }

  // Whether there is a copy to be made. Acquire, by each lane that reads a word; and what one lane has acquired comes before what all
  // others do after they have met: so the source is read as the asker had it, and not from lines that this SM has kept.
  __device__ bool look(uint64_t &source, uint64_t &target, uint32_t &bytes) const {
    uint64_t word = 0;
    if (lane < ASKED)
      asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(words + 8 * lane) : "memory");
    if (!__all_sync(ALL_LANES, lane >= ASKED || uint32_t(word >> 32) == done + 1)) return false;
    const uint32_t half = uint32_t(word);
    const auto both = [&](uint32_t low) {
      return uint64_t(__shfl_sync(ALL_LANES, half, low + 1)) << 32 | __shfl_sync(ALL_LANES, half, low);
    };
    source = both(0), target = both(2), bytes = __shfl_sync(ALL_LANES, half, 4);
    __syncwarp();
    return true;
  }

  // All lanes have written their part, which comes before what lane 0 releases.
  __device__ void has_done() {
    ++done;
    __syncwarp();
    say(UP);
  }

  // Release, at system scope: whoever acquires the status has every copy up to its tag.
  __device__ void say(Phase phase) const {
    if (lane != 0) return;
    const uint64_t status = uint64_t(done) << 32 | launch << 2 | phase;
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(words + 8 * IMMWIRE_SEAT_STATUS), "l"(status) : "memory");
  }

 private:
  static constexpr uint32_t ASKED = 5;
  const uint64_t words;
  const uint32_t launch, lane;
  uint32_t done;
};

} // namespace

extern "C" __global__ void __launch_bounds__(IMMWIRE_VECTOR_THREADS, 1)
    immwire_copy_vector(const __grid_constant__ immwire_copy_args args) {
  through_registers<IMMWIRE_VECTOR_THREADS>(args, [](uint64_t target, uint64_t source, uint32_t bytes, uint32_t lane) {
    copy_elements<uint4>(target, source, bytes / 16, lane);
  });
}

extern "C" __global__ void __launch_bounds__(IMMWIRE_ANY_THREADS, 1)
    immwire_copy_any(const __grid_constant__ immwire_copy_args args) {
  through_registers<IMMWIRE_ANY_THREADS>(args, copy_any);
}

// Each warp runs a ring of its own, of `stage_count` stages: a piece is loaded into a stage, stored from it, and the
// stage is loaded again once the copy unit has read it. A stage's refill comes IMMWIRE_BULK_LAG pieces after its store, so
// that the reading of one store and the issue of the next overlap.
extern "C" __global__ void __launch_bounds__(IMMWIRE_BULK_THREADS, 1)
    immwire_copy_bulk(const __grid_constant__ immwire_copy_args args) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char stages[];
  __shared__ __align__(8) uint64_t barriers[IMMWIRE_BULK_WARPS][IMMWIRE_BULK_MAX_STAGES];
  const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  Pieces pieces(args, worker(warp), gridDim.x * IMMWIRE_BULK_WARPS, lane);
  if (pieces.any()) {
    const uint32_t ring = shared_address(stages) + warp * args.stage_count * args.stage_bytes;
    const uint32_t loaded = shared_address(barriers[warp]);
    if (lane == 0) {
      for (uint32_t i = 0; i < args.stage_count; ++i) barrier_init(loaded + 8 * i);
      // The copy unit must see them initialised.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();

    // Where the piece in stage i goes, and its size: held by lane i.
    uint64_t goes_to = 0;
    uint32_t size = 0;
    auto fill = [&](uint32_t stage) {
      uint64_t source, target;
      uint32_t bytes;
      pieces.get(source, target, bytes);
      pieces.advance();
      if (lane == stage) goes_to = target, size = bytes;
      if (lane == 0) bulk_load(ring + stage * args.stage_bytes, source, bytes, loaded + 8 * stage);
    };

    uint32_t filled = 0;
    for (; filled < args.stage_count && pieces.any(); ++filled) fill(filled);
    uint32_t stage = 0, parity = 0, refill = 0;
    for (uint32_t i = 0; i < filled; ++i) {
      const uint64_t target = __shfl_sync(ALL_LANES, goes_to, stage);
      const uint32_t bytes = __shfl_sync(ALL_LANES, size, stage);
      if (lane == 0) {
        barrier_wait(loaded + 8 * stage, parity);
        bulk_store(target, ring + stage * args.stage_bytes, bytes);
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(IMMWIRE_BULK_LAG) : "memory");
      }
      // All but the last IMMWIRE_BULK_LAG stores have been read: the stage of the one before them is free.
      if (i >= IMMWIRE_BULK_LAG && pieces.any()) {
        fill(refill);
        ++filled;
        if (++refill == args.stage_count) refill = 0;
      }
      if (++stage == args.stage_count) stage = 0, parity ^= 1;
    }
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  announce(args.release);
#else
  __trap(); // Never launched: the host asks for the capability first.
#endif
}

// Each warp looks at its seat until, for so long, nothing was asked for at any, or its time is up; then it says that it has gone. What it was
// asked for since it looked last is the asker's to have done otherwise.
extern "C" __global__ void __launch_bounds__(IMMWIRE_STANDBY_THREADS, 1)
    immwire_standby(const __grid_constant__ immwire_standby_args args) {
  constexpr uint32_t LOOKS = 8; // Between two at the clock.
  __shared__ unsigned long long last; // When anything was done: all warps' word, and so from the barrier on read and written by atomics only.
  const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const uint64_t began = now();
  if (threadIdx.x == 0) last = began;
  __syncthreads();
  Seat seat(args.seats + uint64_t(warp) * IMMWIRE_SEAT_BYTES, args.launch, lane);
  seat.say(UP);
  for (uint32_t looks = 1;; ++looks) {
    uint64_t source, target;
    uint32_t bytes;
    if (seat.look(source, target, bytes)) {
      copy_any(target, source, bytes, lane);
      seat.has_done();
      if (lane == 0) atomicMax(&last, now());
    } else if (looks % LOOKS == 0) {
      bool is_over = false;
      if (lane == 0) {
        const uint64_t time = now();
        is_over = time > began + args.shift_ns || time > atomicMax(&last, 0ull) + args.idle_ns;
      }
      if (__any_sync(ALL_LANES, is_over)) break;
    }
  }
  seat.say(GONE);
}
