/* What is handed to immwire's kernels that copy: one structure each, by value, and the names and limits of the kernels.
 *
 * Plain C11 and C++17. No framework and no CUDA header is included, so that any program can fill the structure and
 * launch the kernels with the driver's API. `cuda/src/args.rs` is the same in Rust; sizes and offsets are asserted on
 * both sides.
 *
 * Addresses are those of the launching GPU's (unified) address space: its own memory, a peer's that it has access to,
 * or pinned host memory. */
#ifndef IMMWIRE_CUDA_H
#define IMMWIRE_CUDA_H

#include <stddef.h>
#include <stdint.h>

/* Where the pages of one side are: page i starts at base + stride * (table ? table[i] : i). */
typedef struct immwire_pages {
  uint64_t base;   /* bytes */
  uint64_t stride; /* bytes */
  uint64_t table;  /* const uint32_t[page_count], a multiple of 4; 0: none */
} immwire_pages;

/* immwire_release.kind */
enum {
  IMMWIRE_RELEASE_NONE = 0,
  IMMWIRE_RELEASE_STORE = 1, /* *word = value: one writer at a time; device or host memory */
  IMMWIRE_RELEASE_ADD = 2    /* *word += value, atomically; in host memory only where the link has atomics */
};

/* What is announced when every byte of the launch is visible to the whole system. */
typedef struct immwire_release {
  uint64_t word;     /* uint64_t *, a multiple of 8; anywhere */
  uint64_t value;
  uint64_t arrivals; /* uint32_t * in memory of the launching GPU: 0 before the launch, and 0 again after it. No other
                        launch may use it at the same time */
  uint32_t kind;
  uint32_t reserved; /* 0 */
} immwire_release;

/* Who copies which pieces: the first `dealt` are dealt to the warps in blocks (immwire_share in copy.cu). The others make up turns of `pieces` each,
 * but for the last, and warps take one after the other as they come to them. */
typedef struct immwire_turns {
  uint64_t asked;    /* uint32_t * in memory of the launching GPU: 0 before the launch, and 0 again after it. No other launch may use it at
                        the same time. Not used if there are no turns */
  uint32_t dealt;    /* all pieces if there are no turns */
  uint32_t pieces;   /* 1 to IMMWIRE_TURN_MAX_PIECES if there are turns */
  uint32_t count;    /* ceil((piece_count - dealt) / pieces), 0 if there are none; with the grid's warps less than 2^32 */
  uint32_t reserved; /* 0 */
} immwire_turns;
#define IMMWIRE_TURN_MAX_PIECES 32

/* One launch of immwire_copy_any, immwire_copy_vector or immwire_copy_bulk.
 *
 * Each page is cut into pieces of piece_bytes (the last may be shorter), which are numbered page by page. */
typedef struct immwire_copy_args {
  immwire_pages source;
  immwire_pages target;
  immwire_release release;
  uint64_t page_bytes;
  uint32_t piece_bytes; /* a multiple of 16, not 0; for bulk at most stage_bytes */
  uint32_t pieces_per_page; /* ceil(page_bytes / piece_bytes) */
  uint32_t piece_count; /* page_count * pieces_per_page; 0: nothing is copied, only announced */
  uint32_t page_count;
  uint32_t stage_bytes; /* bulk: bytes of shared memory for each piece in flight, a multiple of 128 */
  uint32_t stage_count; /* bulk: pieces in flight for each warp, IMMWIRE_BULK_LAG + 1 to IMMWIRE_BULK_MAX_STAGES */
  immwire_turns turns;
} immwire_copy_args;

/* These kernels take one immwire_copy_args, in a grid and blocks of one dimension; the number of threads of a block is
 * fixed, the number of blocks is free: a block takes what an SM has, so it is the number of SMs. */

/* immwire_copy_any: any address and size. */
#define IMMWIRE_ANY_THREADS 512
/* immwire_copy_vector: every page address and page_bytes a multiple of 16. */
#define IMMWIRE_VECTOR_THREADS 768
/* immwire_copy_bulk: likewise, and compute capability 9.0. IMMWIRE_BULK_WARPS * stage_bytes * stage_count bytes of dynamic
 * shared memory. */
#define IMMWIRE_BULK_THREADS 256
#define IMMWIRE_BULK_WARPS 8
#define IMMWIRE_BULK_MAX_STAGES 16
#define IMMWIRE_BULK_LAG 2

/* One launch of immwire_standby: a warp for each seat, which makes the copies that it is asked for there, until none has been for
 * idle_ns, or shift_ns are over.
 *
 * A seat is IMMWIRE_SEAT_BYTES of pinned host memory, zero at first. Words 0 to 4 of 64 bits are the asker's; the upper half of each is
 * the copy's tag, the lower halves are the low and high half of the source, those of the target, and the bytes. Word IMMWIRE_SEAT_STATUS
 * is the warp's: the tag of the last copy that was made here, then the launch, then two bits, 1: up, 3: gone. A copy is
 * made when all five words carry the tag that follows the last one's. core/src/standby.rs has the whole protocol. */
typedef struct immwire_standby_args {
  uint64_t seats; /* IMMWIRE_STANDBY_SEATS of them; a multiple of IMMWIRE_SEAT_BYTES */
  uint64_t idle_ns;
  uint64_t shift_ns;
  uint32_t launch; /* below 2^30 */
  uint32_t reserved; /* 0 */
} immwire_standby_args;

/* immwire_standby: one block. */
#define IMMWIRE_STANDBY_SEATS 4
#define IMMWIRE_STANDBY_THREADS 128
#define IMMWIRE_SEAT_BYTES 128
#define IMMWIRE_SEAT_STATUS 8

#ifdef __cplusplus
#define IMMWIRE_ASSERT(what) static_assert(what, #what)
#else
#define IMMWIRE_ASSERT(what) _Static_assert(what, #what)
#endif
IMMWIRE_ASSERT(sizeof(immwire_pages) == 24);
IMMWIRE_ASSERT(offsetof(immwire_pages, stride) == 8);
IMMWIRE_ASSERT(offsetof(immwire_pages, table) == 16);
IMMWIRE_ASSERT(sizeof(immwire_release) == 32);
IMMWIRE_ASSERT(offsetof(immwire_release, value) == 8);
IMMWIRE_ASSERT(offsetof(immwire_release, arrivals) == 16);
IMMWIRE_ASSERT(offsetof(immwire_release, kind) == 24);
IMMWIRE_ASSERT(offsetof(immwire_release, reserved) == 28);
IMMWIRE_ASSERT(sizeof(immwire_turns) == 24);
IMMWIRE_ASSERT(offsetof(immwire_turns, dealt) == 8);
IMMWIRE_ASSERT(offsetof(immwire_turns, pieces) == 12);
IMMWIRE_ASSERT(offsetof(immwire_turns, count) == 16);
IMMWIRE_ASSERT(offsetof(immwire_turns, reserved) == 20);
IMMWIRE_ASSERT(sizeof(immwire_copy_args) == 136);
IMMWIRE_ASSERT(offsetof(immwire_copy_args, target) == 24);
IMMWIRE_ASSERT(offsetof(immwire_copy_args, release) == 48);
IMMWIRE_ASSERT(offsetof(immwire_copy_args, page_bytes) == 80);
IMMWIRE_ASSERT(offsetof(immwire_copy_args, piece_bytes) == 88);
IMMWIRE_ASSERT(offsetof(immwire_copy_args, pieces_per_page) == 92);
IMMWIRE_ASSERT(offsetof(immwire_copy_args, piece_count) == 96);
IMMWIRE_ASSERT(offsetof(immwire_copy_args, page_count) == 100);
IMMWIRE_ASSERT(offsetof(immwire_copy_args, stage_bytes) == 104);
IMMWIRE_ASSERT(offsetof(immwire_copy_args, stage_count) == 108);
IMMWIRE_ASSERT(offsetof(immwire_copy_args, turns) == 112);
IMMWIRE_ASSERT(sizeof(immwire_standby_args) == 32);
IMMWIRE_ASSERT(offsetof(immwire_standby_args, idle_ns) == 8);
IMMWIRE_ASSERT(offsetof(immwire_standby_args, shift_ns) == 16);
IMMWIRE_ASSERT(offsetof(immwire_standby_args, launch) == 24);
IMMWIRE_ASSERT(offsetof(immwire_standby_args, reserved) == 28);
#undef IMMWIRE_ASSERT

#endif
