/* What is handed to immwire's kernels for mixtures of experts: one structure, by value, what lies in the memory that it
 * names, and the names and limits of the kernels.
 *
 * Plain C11 and C++17, as immwire_cuda.h. `cuda/src/moe/args.rs` is the same in Rust; sizes and offsets are compared by a C
 * compiler (cuda/tests/header.rs).
 *
 * Each rank lends an inbox in memory of its GPU, to which all ranks write. Parts of it, from its first byte on:
 *
 *   tables     [2][world][table_bytes]                           a rank's choices, of this round and of the one before
 *   dispatch   [world][max_tokens][dispatch_stride], from dispatch_at      tokens
 *   combine    [max_tokens][world][results_each][combine_stride], from combine_at        results
 *
 * Before the first round tables hold zeros, and the rest bytes of 0xff: the poison of kernels/moe.cu. */
#ifndef IMMWIRE_MOE_H
#define IMMWIRE_MOE_H

#include <stddef.h>
#include <stdint.h>

/* Sets of ranks are words of 32 bits. */
#define IMMWIRE_MOE_MAX_RANKS 32
#define IMMWIRE_MOE_MAX_TOP_K 32
#define IMMWIRE_MOE_MAX_EXPERTS 1024
/* Threads of a block on a GPU; and of a dispatch for few tokens, which is sooner done with fewer. */
#define IMMWIRE_MOE_THREADS 512
#define IMMWIRE_MOE_FEW_THREADS 256
/* What a block has in hand at a time: tokens whose results it sends, tables that it reads, results that it adds up. */
#define IMMWIRE_MOE_BATCH 4
/* Parts that the results of a token are cut into for different blocks, at the most, where there are few. */
#define IMMWIRE_MOE_PARTS 8
/* Tokens of one source that are counted together where there are many; fewer if there are blocks for them. */
#define IMMWIRE_MOE_CHUNK 64
/* Of tables; 1 comes after it. */
#define IMMWIRE_MOE_LAST_EPOCH 0x7fffffffu
/* Keys that payload may be combined with are multiples of this: odd, so that all are different. */
#define IMMWIRE_MOE_KEY 0x9e3779b1u
/* Of a token whose words may be anything, in its slot. */
#define IMMWIRE_MOE_KEYS 16
/* Values that share a scale. */
#define IMMWIRE_MOE_SCALE_VALUES 128

/* immwire_moe_args.flags */
enum {
  IMMWIRE_MOE_SEND = 1,          /* this launch sends */
  IMMWIRE_MOE_RECEIVE = 2,       /* this launch receives; with the above, first the one and then the other */
  IMMWIRE_MOE_WIDE_INDICES = 4,  /* indices are int64_t, not int32_t */
  IMMWIRE_MOE_CLEAR_PADDING = 8, /* rows that only pad are written with zeros, or have no slot */
  IMMWIRE_MOE_POWER_SCALES = 16, /* scales are powers of two, a byte each (UE8M0), not floats */
  IMMWIRE_MOE_ACCUMULATE = 32    /* combine adds to what is in out */
};

/* No row: in plans, of a choice that ends elsewhere. */
#define IMMWIRE_MOE_NO_ROW 0xffffffffu
/* And of one that there was no room for. Rows are less. */
#define IMMWIRE_MOE_LEFT_OUT 0xfffffffeu

/* What of a rank lasts from launch to launch. In memory of its GPU; zeros before the first round but for next_epoch, 1.
 *
 * What all blocks of a launch must read alike is written by launches of the other kind only. */
typedef struct immwire_moe_control {
  /* Written by combine, for the next dispatch. */
  uint32_t next_epoch;  /* of its round, never 0: what tables carry */
  uint32_t next_parity; /* which half of tables */
  uint32_t missed;      /* ranks whose results did not come */
  uint32_t left_out;    /* ranks whose choices or tokens did not, in the dispatch before */
  /* Written by dispatch, for the combine after it. */
  uint32_t epoch;
  uint32_t parity;
  uint32_t absent;   /* ranks whose choices or tokens did not come */
  uint32_t tokens;   /* of this rank, in this round */
  uint32_t pairs;    /* tokens that this rank received, in this round */
  uint32_t of_others; /* of these, where there are many: other ranks', which come first */
  uint32_t summed;   /* where there are many tokens: how many slices of this rank's results the combine has taken to sum; 0 before it */
  uint32_t sent;     /* likewise, of other ranks' that it has taken to send */
  uint32_t few;      /* 2 * epoch + whether a round with room for many tokens was one of few; where that is in doubt, blocks of the dispatch agree by it */
  /* Within a dispatch; zero again after the combine. */
  uint32_t suspects; /* ranks whose table somebody has missed */
  uint32_t gathered; /* blocks that have counted, where there are many tokens; and the highest bit if they have given up */
  uint32_t planned;  /* of them, those that have planned */
  uint32_t received; /* how many tokens have been taken to be received */
  uint32_t parts;    /* how many parts of tokens have been taken to be sent, where there are many */
  uint32_t unheard;  /* ranks whose choices a block that counts has missed, where there are many tokens: whole once all have gathered */
  /* For good. */
  uint32_t refused;  /* set by the first who reports a choice that is none */
  uint64_t abort;    /* not 0: nobody waits any more */
  uint32_t decisions[IMMWIRE_MOE_MAX_RANKS]; /* 2 * epoch + whether its table counts */
} immwire_moe_control;

/* What went wrong, in pinned host memory; zeros before the first round. Words become the epoch in which it did, the last one of
 * some; what is refused is put down once. */
typedef struct immwire_moe_report {
  uint32_t late_table[IMMWIRE_MOE_MAX_RANKS];
  uint32_t late_tokens[IMMWIRE_MOE_MAX_RANKS];
  uint32_t late_results[IMMWIRE_MOE_MAX_RANKS];
  uint32_t refused; /* put down after the three below: the epoch, of the first choice that is no expert, or one that the token names twice; it was dropped */
  uint32_t token;
  uint32_t choice;
  int32_t index;
  uint32_t rows_left_out; /* the epoch in which more rows came than there is room for, or than have results */
  uint32_t tokens_left_out; /* the epoch in which there were more than there may be */
  uint32_t reserved[2];
} immwire_moe_report;

/* A token received, with its rows: one for each pair of source and token, in the order in which results are sent back.
 * Followed by top_k rows (IMMWIRE_MOE_NO_ROW for choices that end elsewhere, IMMWIRE_MOE_LEFT_OUT), and top_k weights. */
typedef struct immwire_moe_pair {
  uint32_t source;
  uint32_t token;
  uint32_t reserved[2];
} immwire_moe_pair;

/* One launch, of either kind. Addresses are those of the launching GPU's address space: inboxes at multiples of 128, x, rows_x, y, out
 * and plan of 16, all others of their elements. */
typedef struct immwire_moe_args {
  uint64_t inbox[IMMWIRE_MOE_MAX_RANKS]; /* of each rank, its own too */
  uint32_t firsts[IMMWIRE_MOE_MAX_RANKS + 2]; /* rank r has the experts from firsts[r] to before firsts[r + 1] */
  uint64_t control;     /* immwire_moe_control */
  uint64_t report;      /* immwire_moe_report */
  uint64_t plan;        /* [world * max_tokens][plan_stride] */
  uint64_t masks;       /* uint32_t[2][max_tokens]: which ranks each token of this rank went to; and where there are many, which pair it is here */
  uint64_t scratch;     /* uint32_t[chunks][ceil(local / 4) + 1], for many tokens */
  uint64_t tokens_at;   /* uint32_t in memory of the GPU: how many tokens there are; 0: as many as tokens says */
  uint64_t x;           /* [tokens][token_bytes], or [tokens][values] of 16 bits where the kernel quantises */
  uint64_t scales;      /* [tokens][scale_bytes]; 0 where the kernel quantises */
  uint64_t indices;     /* [tokens][top_k] */
  uint64_t weights;     /* float[tokens][top_k] */
  uint64_t rows_x;      /* [rows][token_bytes]; or [world][max_tokens][token_bytes], each token once */
  uint64_t rows_scales; /* [rows][scale_bytes], or the like */
  uint64_t slots;       /* uint32_t[rows]: which of the latter each row is, IMMWIRE_MOE_NO_ROW where it pads; 0 for the former */
  uint64_t counts;      /* uint32_t[local experts] */
  uint64_t offsets;     /* uint32_t[local experts + 1] */
  uint64_t y;           /* [rows][values] of 16 bits */
  uint64_t out;         /* [tokens][values] of 16 bits */
  uint64_t timeout_ns;  /* for tokens, once all choices are there; twice that for results, three times for choices */
  uint64_t table_bytes;
  uint64_t dispatch_at;
  uint64_t combine_at;
  uint32_t dispatch_stride; /* token_bytes, then scale_bytes, then keys of any payload; a multiple of 128 */
  uint32_t combine_stride;  /* a multiple of 128 */
  uint32_t plan_stride;     /* a multiple of 16 */
  uint32_t rank;
  uint32_t world;
  uint32_t top_k;
  uint32_t max_tokens;
  uint32_t tokens;      /* no more than these, whatever lies at tokens_at; so many may be read of x, indices and weights; for combine, room in out */
  uint32_t token_bytes; /* a multiple of 16, not 0 */
  uint32_t scale_bytes; /* a multiple of 4 */
  uint32_t values;      /* a multiple of 8, where the kernel quantises of 16 */
  uint32_t padding;     /* not 0 */
  uint32_t rows;        /* room in rows_x, or in slots; for combine, rows in y */
  uint32_t flags;
  uint32_t chunk_tokens; /* 1 to IMMWIRE_MOE_CHUNK, for many tokens */
  uint32_t results_each; /* of a token, from each rank: 1, or where sums are exact the most choices that it can have there */
  uint32_t few_tokens;   /* where there is room for many: up to how many of each rank's, no more than max_tokens, are exchanged as few are; 0: never so */
  uint32_t reserved;
} immwire_moe_args;

/* The kernels. All take one immwire_moe_args, in a grid and blocks of one dimension; blocks of IMMWIRE_MOE_THREADS threads, or of a
 * dispatch that is none of the many of IMMWIRE_MOE_FEW_THREADS; one an SM. All
 * blocks of a launch that receives, and of what else the ranks of a GPU launch at the same time, must find room at once.
 *
 *   immwire_moe_dispatch_raw          tokens of any bytes
 *   immwire_moe_dispatch_fp8_bf16     from bf16 to e4m3, a scale for each 128 values
 *   immwire_moe_dispatch_fp8_fp16     from fp16
 *   immwire_moe_combine_bf16, _fp16   results
 *   immwire_moe_combine_exact_...     each choice's result by itself, summed where the token is from: all ranks use it or none
 *   immwire_moe_dispatch_many_..., _combine_many_...   the same for thousands of tokens, the one with the other: other ranks may use either
 *
 * Dynamic shared memory: IMMWIRE_MOE_FIXED_WORDS + (local + 1) + local * stride + ceil(local * stride / 2) + words words;
 * words = world * ceil(max_tokens / 32), stride = words, or one more if that is even. Combine takes the first term only.
 * For many tokens: IMMWIRE_MOE_MANY_WORDS + mine * (1 + 2) + 2 * local + 1 + mine * local * (1 + 2) + chunks + 2 * IMMWIRE_MOE_THREADS words;
 * mine = ceil(chunks / receiving), chunks = world * ceil(max_tokens / chunk_tokens). Of a launch that sends and receives half of the blocks receive,
 * rounded down, or more; of others, or if there is one, all. But no less than the first sum with few_tokens in the place of max_tokens. */
#define IMMWIRE_MOE_FIXED_WORDS 640
#define IMMWIRE_MOE_MANY_WORDS 16

#endif
