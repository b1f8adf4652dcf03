// Tokens to the ranks of their experts, and results back, by stores into the memory of other GPUs.
//
// Every rank sends each token once to each rank that has one of its experts, into a slot that needs no agreement: it is
// numbered as the token is at its source. Some blocks send tokens (`Roles`), and others the choices, which go everywhere; from those each
// block that receives works out by itself, and as all others do, how many rows each expert has and where each token's lie. Where
// there are thousands of tokens, blocks share that out among them (`dispatch_many`, `combine_many`), and if a round has few, though there is room for
// that many, they do not (`are_all_few`).
//
// It knows addresses and numbers of ranks, not what is behind them. There is no barrier between ranks, no fence and no flag for
// what they send: what is written announces itself. There is none between blocks, but for two where there are many tokens.
//
// - Slots hold poison, words of 0xffffffff. A word that was written is never that: values that are rounded here never are, and
//   payload that is not looked at is combined with a key, found so that none is (`Raw`). Who waits for a vector looks at
//   it until all of its words are something else, takes it, and puts the poison back.
// - Tables of choices are looked at by all blocks, and so cannot be put back: their vectors carry the number of the round.
//   That alone rests on 16 bytes that one thread stores at once being seen at once.
//
// A launch may begin before those before it in its stream have ended (`machine::follow`): until then it looks at its arguments only. It takes
// room meanwhile, that others may be in need of. So with few tokens one lets those behind it begin (`machine::let_next_begin`) when each of its
// blocks has heard of all ranks' launches that it waits for: they are there, with all of their blocks, and have sent all they have before they
// wait for anybody. Else those behind begin when all blocks have ended, and what these wrote is not seen yet.
//
// Invariants:
// 1. What a launch needs to send is there when it starts. So it sends all it has before it waits for anything, and ranks whose
//    launches overlap at all end.
// 2. A slot is written again only when its reader has put the poison back. Who sent a token waits for its result, which is
//    sent when the reader's dispatch has ended; and nobody sends results of a round without having the table of whom they are
//    for, who has ended the round before. Tables are answered by nothing: a table of round n + 1 says that its rank has ended
//    round n, and nobody begins round n + 2 without it, so two of them take turns.
// 3. No argument changes from round to round but the number of tokens, which may lie in memory too, and no word has to be cleared:
//    the number of the round lies in memory. What all blocks of a launch must read alike there is written by launches of the other
//    kind only. (Who is waited for in a combine they need not: each part of a result is one block's own. In a round in which a rank is
//    missed, which is then reported, parts of one sum may differ in whether it is in them.)
// 4. Every wait ends: at its deadline, or when `abort` is set. Who was late is put down in the report, is absent from then on, and
//    what it did not send counts as zeros. All blocks of a launch agree on whose table counts (`settle`, `count_chunks`), and whether there are few
//    tokens (`are_all_few`).
// 5. Rows lie by expert, source and token; sums are made in float, in the order of choices and then of ranks, rounded
//    once each: the same bits in every run. Exact ones are made where the token is from, of all choices, and rounded once.
// 6. Where a rank has many tokens and one launch sends and receives, its own go through no slot: they are taken to their rows from
//    where they are, and their results are summed, and rounded as others' are, when the tokens' other results are awaited.
//
// Checked by verification/moe on a CPU, with ranks, blocks and threads in any order, and by benches/gpu/run on GPUs.

#include "immwire_moe.h"

#ifdef __CUDACC__
#include "machine.cuh"
#else
#include "machine.h"
#endif

namespace {

constexpr uint32_t WARP = 32;
constexpr uint32_t ALL_LANES = 0xffffffffu;
constexpr uint32_t POISON = 0xffffffffu;
constexpr uint32_t NO_EXPERT = 0xffffu; // Of a choice, as tables have it.
constexpr uint32_t BATCH = IMMWIRE_MOE_BATCH;
constexpr float LARGEST_E4M3 = 448.0f;
constexpr float SMALLEST_PEAK = 1e-4f; // Groups of smaller values are scaled as if this were the largest of them.

using machine::load_once;
using machine::load_shared_vector;
using machine::load_shared_word;
using machine::load_vector;
using machine::store_once;
using machine::store_shared_vector;
using machine::store_shared_word;
using machine::store_whole_vector;
using machine::store_vector;

using Args = immwire_moe_args;

__device__ immwire_moe_control *control_of(const Args &args) {
  return reinterpret_cast<immwire_moe_control *>(args.control);
}
__device__ immwire_moe_report *report_of(const Args &args) { return reinterpret_cast<immwire_moe_report *>(args.report); }

__device__ void put_down(uint32_t &word, uint32_t value) {
  store_shared_word(reinterpret_cast<uint64_t>(&word), value);
}

__device__ uint32_t ranks_below(uint32_t rank) { return rank < 32 ? (1u << rank) - 1 : ALL_LANES; }

__device__ uint4 vector_of(uint32_t word) { return {word, word, word, word}; }

// Divides numbers below 2^22: half a unit off any whole quotient, a product with the inverse is nearer than that.
class Divisor {
 public:
  __device__ explicit Divisor(uint32_t by) : inverse(__fdiv_rn(1.0f, float(by))) {}
  __device__ uint32_t into(uint32_t number) const { return uint32_t(__fmul_rn(float(number) + 0.5f, inverse)); }

 private:
  float inverse;
};

// ---- waiting ----

// Returns when patience ends that lasts so long and, unless that is 0, ends at `end`; 0 if it is over. Not part of each loop that waits:
// what is executed in a launch is not long, and has to be fetched each time.
__device__ __noinline__ uint64_t look_at_clock(uint64_t end, uint64_t lasts, const uint64_t *abort) {
  machine::pause();
  const uint64_t now = machine::now();
  if (end == 0) end = now + lasts;
  return now > end || load_shared_word(reinterpret_cast<uint64_t>(abort)) != 0 ? 0 : end;
}

// One thread's patience. Once it is over, everything is looked at once more, and not again. It begins when some looks have been in
// vain: to read the clock takes longer than most waits.
//
// A rank that waits for a dead one keeps others waiting, who must not take it for dead too. It may wait for tokens while others
// wait for its results already, and for results while others wait for its next table: so for each the patience is longer. That
// covers ranks that die before they send, between tokens, and between results. Of one that dies while its choices reach some
// ranks and not others, those who lack them may in turn be taken for dead by the others: both are named.
class Patience {
 public:
  // Blocks of a launch wait for each other longer than any of them waits for a table.
  enum Kind { FOR_TOKENS = 1, FOR_RESULTS = 2, FOR_TABLES = 3, FOR_BLOCKS = 4 };

  // What it is made of is not kept, where it is known anyway: registers are few.
  __device__ Patience(const Args &args, Kind kind) : args(args), kind(kind) {}

  // To be asked after each look that was in vain.
  __device__ bool is_over() {
    if (over || ++looks % LOOKS != 0) return over;
    end = look_at_clock(end, kind * args.timeout_ns, &control_of(args)->abort);
    over = end == 0;
    return over;
  }
  // Another thread's is, with which this one shares it.
  __device__ void end_too() { over = true; }
  // A warp's lanes, of which some have waited: so none waits longer than the first of them would have.
  __device__ void share() {
#pragma unroll
    for (uint32_t step = 1; step < WARP; step *= 2) {
      const uint32_t high = __shfl_xor_sync(ALL_LANES, uint32_t(end >> 32), step), low = __shfl_xor_sync(ALL_LANES, uint32_t(end), step);
      const uint64_t other = uint64_t(high) << 32 | low;
      if (other != 0 && (end == 0 || other < end)) end = other;
    }
  }
  static constexpr uint32_t LOOKS = 64; // From one at the clock to the next.

 private:
  const Args &args;
  const Kind kind;
  uint64_t end = 0;
  uint32_t looks = 0;
  bool over = false;
};

// What a look is made of, and its highest word: if that is poison, it was in vain.
struct Vector {
  using Held = uint4;
  __device__ static Held look(uint64_t from) { return load_shared_vector(from); }
  __device__ static uint32_t highest(const Held &held) { return max(max(held.x, held.y), max(held.z, held.w)); }
};
struct Word {
  using Held = uint32_t;
  __device__ static Held look(uint64_t from) { return load_shared_word(from); }
  __device__ static uint32_t highest(Held held) { return held; }
};
static_assert(POISON == ~0u, "no word is higher");

// Looks at those of `from` whose bit is set in `wanted`, side by side.
template <typename T, uint32_t COUNT>
__device__ void look_at(typename T::Held (&held)[COUNT], const uint64_t (&from)[COUNT], uint32_t wanted) {
#pragma unroll
  for (uint32_t i = 0; i < COUNT; ++i)
    if (wanted >> i & 1) held[i] = T::look(from[i]);
}

// The same until all are there, which have been looked at once. Returns a bit for each that never was.
template <typename T, uint32_t COUNT>
__device__ uint32_t await_looked(typename T::Held (&held)[COUNT], const uint64_t (&from)[COUNT], uint32_t wanted, Patience &patience) {
  for (;;) {
    // Whether all are there is soon known, which of them are is not.
    uint32_t highest = 0;
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) highest = max(highest, wanted >> i & 1 ? T::highest(held[i]) : 0);
    if (highest != POISON) return 0;
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i)
      if ((wanted >> i & 1) && T::highest(held[i]) != POISON) wanted &= ~(1u << i);
    if (patience.is_over()) return wanted;
    look_at<T>(held, from, wanted);
  }
}

template <typename T, uint32_t COUNT>
__device__ uint32_t await(typename T::Held (&held)[COUNT], const uint64_t (&from)[COUNT], uint32_t wanted, Patience &patience) {
  look_at<T>(held, from, wanted);
  return await_looked<T>(held, from, wanted, patience);
}

// ---- memory ----

// Tokens, rows and results: where there may be many tokens they are more than caches hold, which had better keep what is on its way to
// somebody.
template <bool MANY>
__device__ uint4 load_bulk(uint64_t from) {
  if constexpr (MANY) return load_once(from);
  else return load_vector(from);
}
template <bool MANY>
__device__ void store_bulk(uint64_t to, uint4 held) {
  if constexpr (MANY) store_once(to, held);
  else store_vector(to, held);
}

__device__ uint64_t table_of(const Args &args, uint32_t at, uint32_t from, uint32_t parity) {
  return args.inbox[at] + (uint64_t(parity) * args.world + from) * args.table_bytes;
}

// The `nth` result that a rank sends for a token: 0, unless sums are exact. No rank has another's slots in any round: what comes from
// one that is not waited for any more is never taken for anybody's.
__device__ uint64_t result_slot(const Args &args, uint32_t at, uint32_t from, uint32_t token, uint32_t nth) {
  const uint64_t number = (uint64_t(token) * args.world + from) * args.results_each + nth;
  return args.inbox[at] + args.combine_at + number * args.combine_stride;
}

__device__ uint32_t vectors_per_token(const Args &args) { return (args.top_k + 1) / 2; }

// Which ranks each token of this rank's went to; and behind that, which pair each is that came back to this rank.
__device__ uint32_t *masks_of(const Args &args) { return reinterpret_cast<uint32_t *>(args.masks); }
__device__ uint32_t *own_pairs_of(const Args &args) { return masks_of(args) + args.max_tokens; }

__device__ uint32_t rank_of(const Args &args, uint32_t expert) {
  uint32_t rank = 0;
  for (uint32_t next = 1; next < args.world; ++next) rank += expert >= args.firsts[next];
  return rank;
}

// Rows of one token, in the order of its choices.
struct Rows {
  uint32_t count;
  uint32_t row[IMMWIRE_MOE_MAX_TOP_K];
  float weight[IMMWIRE_MOE_MAX_TOP_K];
};

// A token that this rank was told of, and how many rows it has here.
struct Pair {
  uint32_t source, token, count;
};

// The words of shared memory that every block has, and where the others begin.
struct Fixed {
  uint32_t routes[2];   // Ranks of the token that is sent, and of the next one.
  uint32_t missing;     // Ranks whose tables are not whole.
  uint32_t absent;      // Ranks whose tables do not count.
  uint32_t doubted;     // Ranks whose tables somebody has missed.
  uint32_t words;       // Of each expert's, by the first thread: by this all decide alike how they are counted.
  uint32_t source[2][BATCH];
  uint32_t token[2][BATCH];
  union {
    Rows rows[2][BATCH];
    uint32_t rows_of_warp[IMMWIRE_MOE_THREADS]; // Of the token that each takes to its rows.
  };
  uint32_t of_group[IMMWIRE_MOE_MAX_EXPERTS / WARP + 1]; // How many rows so many experts have together.
  uint8_t nth[2][IMMWIRE_MOE_MAX_TOP_K]; // Where sums are exact: which of its rank's results each is.
};
static_assert(sizeof(Fixed) <= 4 * IMMWIRE_MOE_FIXED_WORDS, "IMMWIRE_MOE_FIXED_WORDS");

// One warp: what the lanes before have, and what all have.
__device__ uint32_t sum_before(uint32_t value, uint32_t &all) {
  uint32_t sum = value;
#pragma unroll
  for (uint32_t step = 1; step < WARP; step *= 2) {
    const uint32_t lower = __shfl_up_sync(ALL_LANES, sum, step);
    if (threadIdx.x % WARP >= step) sum += lower;
  }
  all = __shfl_sync(ALL_LANES, sum, WARP - 1);
  return sum - value;
}

// Exclusive sums of `get`, given to `put`, by one warp; the total. A lane adds up four in a row.
template <typename GET, typename PUT>
__device__ uint32_t prefix(uint32_t count, GET get, PUT put) {
  constexpr uint32_t EACH = 4;
  uint32_t all = 0;
#pragma unroll 1
  for (uint32_t start = 0; start < count; start += WARP * EACH) {
    const uint32_t first = start + threadIdx.x % WARP * EACH;
    uint32_t own[EACH], sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < EACH; ++i) own[i] = first + i < count ? get(first + i) : 0, sum += own[i];
    uint32_t these, so_far = all + sum_before(sum, these);
#pragma unroll
    for (uint32_t i = 0; i < EACH; ++i) {
      if (first + i < count) put(first + i, so_far);
      so_far += own[i];
    }
    all += these;
  }
  return all;
}

// How many times a number may be doubled and not be more than `most`, but no more often than `limit`.
__device__ uint32_t doublings(uint32_t number, uint32_t most, uint32_t limit) {
  const int times = min(int(__clz(number)) - int(__clz(most)), int(limit));
  if (times <= 0) return 0;
  return times - (number << times > most ? 1 : 0);
}

// What blocks work out from the tables: for each expert here a bit for each token that chose it, by source and number; and
// a bit for each token that is here, in the order in which results are sent back: 32 of one source after the other.
//
// Each step of it keeps all that receive waiting: so it is done with few branches and few barriers.
class Routes {
 public:
  // With room for up to so many tokens of each rank.
  __device__ Routes(const Args &args, uint32_t *words, uint32_t most)
      : world(args.world), first(args.firsts[args.rank]), local(args.firsts[args.rank + 1] - first), room(most), rank(args.rank) {
    fixed = reinterpret_cast<Fixed *>(words);
    offsets = words + IMMWIRE_MOE_FIXED_WORDS;
    chosen = offsets + local + 1;
    fit(most);
  }

  // All that there is room for, before it is known how much of it is needed: others are waited for meanwhile.
  __device__ void clear() {
    const uint32_t all = local * (world * span_of(room) | 1);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < all; i += blockDim.x) chosen[i] = 0;
  }

  // No rank has more than so many tokens: words that would hold those of more are left out. A warp that misses a rank's may have another number
  // than others; then nothing that follows from it is used.
  __device__ void fit(uint32_t most) {
    span = span_of(most), words = world * span, stride = words | 1, by_span = Divisor(span);
    before = reinterpret_cast<uint16_t *>(chosen + local * stride);
    here = chosen + local * stride + (local * stride + 1) / 2;
  }

  // Takes two choices of a token whose bit that is in word `at` of each expert's, if they are there; as tables have them.
  __device__ void take(uint32_t at, uint32_t bit, uint32_t experts, bool are_there) {
    const uint32_t one = (experts & 0xffff) - first, other = (experts >> 16) - first;
    machine::or_if(are_there && one < local, chosen + one * stride + at, bit);
    machine::or_if(are_there && other < local, chosen + other * stride + at, bit);
  }

  // Once all are taken: how many bits are set before each word, and where each expert's rows begin. All threads call it, and
  // then come to a barrier.
  __device__ void count(uint32_t padding) {
    const uint32_t warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    const bool are_few = fixed->words <= FEW_WORDS;
    if (!are_few) {
      // A warp for each.
      for (uint32_t expert = warp; expert < local; expert += warps) {
        const uint32_t *from = chosen + expert * stride;
        uint16_t *to = before + expert * stride;
        const uint32_t all = prefix(words, [&](uint32_t i) { return __popc(from[i]); }, [&](uint32_t i, uint32_t sum) { to[i] = uint16_t(sum); });
        if (lane == 0) offsets[expert] = all;
      }
      __syncthreads();
    }
    // A thread for each, and for the place behind the last one. Rows begin after those of the group's experts before it, and of groups before.
#pragma unroll 1
    for (uint32_t low = warp * WARP; low <= local; low += blockDim.x) {
      const uint32_t expert = low + lane;
      uint32_t rows = 0, all;
      if (expert < local) rows = are_few ? count_few(expert) : offsets[expert];
      if (padding != 1) rows = (rows + padding - 1) / padding * padding;
      const uint32_t lower = sum_before(rows, all);
      if (expert <= local) offsets[expert] = lower;
      if (lane == 0) fixed->of_group[low / WARP] = all;
    }
    // A warp for 32 tokens of a source. The next rank's first, so that those who send results do not all begin with one.
#pragma unroll 1
    for (uint32_t at = warps - 1 - warp; at < words; at += warps) {
      uint32_t bits = 0;
#pragma unroll 1
      for (uint32_t low = lane; low < local; low += WARP * SIDE) {
#pragma unroll
        for (uint32_t i = 0; i < SIDE; ++i)
          if (low + i * WARP < local) bits |= chosen[(low + i * WARP) * stride + at];
      }
      bits = machine::any_of(bits);
      const uint32_t source = by_span.into(at);
      if (lane == 0) here[(at - source * span) * world + turn_of(source)] = bits;
    }
  }

  // The rows of an expert; after `count`.
  __device__ uint32_t rows_of(uint32_t expert) const {
    const uint32_t last = expert * stride + words - 1;
    return before[last] + __popc(chosen[last]);
  }

  // Where those of an expert begin, or end those of the last.
  __device__ uint32_t offset(uint32_t expert) const {
    uint32_t sum = offsets[expert];
#pragma unroll 1
    for (uint32_t low = 0; low < local / WARP; low += SIDE) {
#pragma unroll
      for (uint32_t i = 0; i < SIDE; ++i)
        if (low + i < expert / WARP) sum += fixed->of_group[low + i];
    }
    return sum;
  }

  // The row of a token that chose expert `mine` of this rank's.
  __device__ uint32_t row(uint32_t mine, uint32_t source, uint32_t token) const {
    const uint32_t at = mine * stride + source * span + token / 32;
    return offset(mine) + before[at] + __popc(chosen[at] & ((1u << token % 32) - 1));
  }

  // Which of the tokens that are here one is, and how many they are; by a whole warp.
  __device__ uint32_t number(uint32_t source, uint32_t token, uint32_t &all) const {
    const uint32_t word = token / 32 * world + turn_of(source);
    uint32_t lower = 0, sum = 0;
#pragma unroll 1
    for (uint32_t at = threadIdx.x % WARP; at < words; at += WARP) {
      const uint32_t bits = here[at];
      sum += __popc(bits);
      if (at <= word) lower += __popc(at == word ? bits & ((1u << token % 32) - 1) : bits);
    }
    all = machine::sum_of(sum);
    return machine::sum_of(lower);
  }

  Fixed *fixed;
  uint32_t world, span, words, stride, first, local, room;

 private:
  __device__ static uint32_t span_of(uint32_t tokens) { return max((tokens + 31) / 32, 1u); }

  // Of an expert: how many bits are set before each of its words, and in all.
  __device__ uint32_t count_few(uint32_t expert) const {
    uint32_t sum = 0;
#pragma unroll 1
    for (uint32_t low = 0; low < words; low += SIDE) {
      uint32_t bits[SIDE];
#pragma unroll
      for (uint32_t i = 0; i < SIDE; ++i) bits[i] = low + i < words ? chosen[expert * stride + low + i] : 0;
#pragma unroll
      for (uint32_t i = 0; i < SIDE; ++i) {
        if (low + i < words) before[expert * stride + low + i] = uint16_t(sum);
        sum += __popc(bits[i]);
      }
    }
    return sum;
  }

  __device__ uint32_t turn_of(uint32_t source) const { return source > rank ? source - rank - 1 : source + world - rank - 1; }

  static constexpr uint32_t FEW_WORDS = 16;
  static constexpr uint32_t SIDE = 4; // Read side by side.

  uint32_t *offsets, *here, *chosen;
  uint16_t *before;
  uint32_t rank;
  Divisor by_span = Divisor(1);
};

// ---- the way out: sending ----

__device__ __noinline__ void refuse(const Args &args, uint32_t epoch, uint32_t token, uint32_t choice, int64_t index) {
  if (atomicExch(&control_of(args)->refused, 1u) != 0) return;
  immwire_moe_report &report = *report_of(args);
  put_down(report.token, token);
  put_down(report.choice, choice);
  // What does not fit is as wrong at either end.
  const int64_t fits = index > INT32_MAX ? INT32_MAX : index < INT32_MIN ? INT32_MIN : index;
  put_down(reinterpret_cast<uint32_t &>(report.index), uint32_t(int32_t(fits)));
  machine::fence_for_all(); // Who finds the epoch finds the rest.
  put_down(report.refused, epoch);
}

// A choice of a token, as it is given: each lane of a warp has one.
struct Choice {
  // Of no token unless it is read, and before `end`.
  __device__ Choice(const Args &args, uint32_t token, bool is_read = true, uint32_t end = ~0u) {
    const uint32_t lane = threadIdx.x % WARP;
    if (!is_read || token >= end || lane >= args.top_k) return;
    const uint64_t at = uint64_t(token) * args.top_k + lane;
    const uint32_t *indices = reinterpret_cast<const uint32_t *>(args.indices);
    const bool wide = args.flags & IMMWIRE_MOE_WIDE_INDICES;
    low = indices[wide ? 2 * at : at];
    if (wide) high = indices[2 * at + 1];
    weight = reinterpret_cast<const uint32_t *>(args.weights)[at];
  }
  __device__ int64_t index(const Args &args) const {
    return args.flags & IMMWIRE_MOE_WIDE_INDICES ? int64_t(uint64_t(high) << 32 | low) : int32_t(low);
  }
  uint32_t weight = 0;

 private:
  // As they lie in memory: what is worked out from them here would be waited for here.
  uint32_t low = 0, high = 0;
};

// The expert that a lane's choice counts for, none if it is no expert, or one that the token has named before. A whole warp has a token's.
__device__ uint32_t expert_of(const Args &args, const Choice &choice, bool &is_wrong) {
  const uint32_t lane = threadIdx.x % WARP;
  uint32_t expert = NO_EXPERT;
  if (lane < args.top_k) {
    const int64_t index = choice.index(args);
    if (uint64_t(index) < args.firsts[args.world]) expert = uint32_t(index);
    else is_wrong = index != -1;
  }
  // Of choices that are the same the first counts.
  const uint32_t same = __match_any_sync(ALL_LANES, expert);
  if (expert == NO_EXPERT || (same & ranks_below(lane)) == 0) return expert;
  is_wrong = true;
  return NO_EXPERT;
}

// The ranks of `present` that have an expert of any lane.
__device__ uint32_t ranks_of(const Args &args, uint32_t expert, uint32_t present) {
  return machine::any_of(expert != NO_EXPERT ? 1u << rank_of(args, expert) : 0) & present;
}

// Which vector of a token's choices a lane tells, and to which ranks: as many side by side as there are lanes for, from one of its own on. Worked out
// before it is known what is told.
struct Telling {
  __device__ explicit Telling(const Args &args) : each(vectors_per_token(args)), side(WARP / each), rank(threadIdx.x % WARP / each) {
    vector = threadIdx.x % WARP - rank * each;
    if (rank >= side) rank = IMMWIRE_MOE_MAX_RANKS; // There is none for it.
  }
  uint32_t each, side, rank, vector;
};

// One warp: checks the choices of a token, tells every rank of `present`, and returns the ranks that the token goes to.
__device__ uint32_t send_choices(const Args &args, Telling telling, uint32_t token, const Choice &choice, uint32_t epoch, uint32_t parity,
                                 uint32_t present) {
  const uint32_t lane = threadIdx.x % WARP, weight = choice.weight;
  bool is_wrong = false;
  const uint32_t expert = expert_of(args, choice, is_wrong);
  if (is_wrong) refuse(args, epoch, token, lane, choice.index(args));
  // This rank's own too, whatever happened to it: exact sums are made by it.
  const uint32_t told = present | 1u << args.rank;
  const uint32_t low = 2 * telling.vector % WARP, high = low + 1;
  uint4 vector;
  vector.x = __shfl_sync(ALL_LANES, weight, low);
  vector.y = __shfl_sync(ALL_LANES, weight, high);
  vector.z = __shfl_sync(ALL_LANES, expert, low) | __shfl_sync(ALL_LANES, expert, high) << 16;
  vector.w = epoch;
  const uint64_t offset = 16 * (1 + uint64_t(token) * telling.each + telling.vector);
  for (uint32_t rank = telling.rank; rank < args.world; rank += telling.side)
    if (told >> rank & 1) store_whole_vector(table_of(args, rank, args.rank, parity) + offset, vector);
  return ranks_of(args, expert, present);
}

// Ranks of a set, beginning with another for each token: those who send do not all begin with one.
class Ranks {
 public:
  __device__ Ranks(uint32_t set, uint32_t first, uint32_t world)
      : rest(first == 0 ? set : (set >> first | set << (world - first)) & ranks_below(world)), first(first), world(world) {}
  __device__ bool any() const { return rest != 0; }
  __device__ uint32_t next() {
    const uint32_t rank = __ffs(rest) - 1 + first;
    rest &= rest - 1;
    return rank < world ? rank : rank - world;
  }

 private:
  uint32_t rest, first, world;
};

// Who sends a token: a block, or where there are many a warp.
struct BlockCrew {
  static constexpr bool MANY = false;
  uint32_t me = threadIdx.x, of = blockDim.x;
  __device__ bool any(bool value) const { return __syncthreads_or(value) != 0; }
};
struct WarpCrew {
  static constexpr bool MANY = true;
  uint32_t me = threadIdx.x % WARP, of = WARP;
  __device__ bool any(bool value) const { return __ballot_sync(ALL_LANES, value) != 0; }
};

// Where a token lies in every inbox.
__device__ uint64_t token_offset(const Args &args, uint32_t from, uint32_t token) {
  return args.dispatch_at + uint64_t(from * args.max_tokens + token) * args.dispatch_stride;
}

__device__ uint4 combined(uint4 held, uint32_t key) { return {held.x ^ key, held.y ^ key, held.z ^ key, held.w ^ key}; }

__device__ void store_everywhere(const Args &args, Ranks ranks, uint64_t offset, uint4 held) {
  while (ranks.any()) store_shared_vector(args.inbox[ranks.next()] + offset, held);
}
__device__ void store_everywhere(const Args &args, Ranks ranks, uint64_t offset, uint4 held, uint64_t word_offset, uint32_t word, bool has_word) {
  while (ranks.any()) {
    const uint64_t inbox = args.inbox[ranks.next()];
    store_shared_vector(inbox + offset, held);
    if (has_word) store_shared_word(inbox + word_offset, word);
  }
}
__device__ void store_everywhere(const Args &args, Ranks ranks, uint64_t offset, uint32_t held) {
  while (ranks.any()) store_shared_word(args.inbox[ranks.next()] + offset, held);
}

// Where a token goes: to its slots at ranks, where somebody waits for it; or to its rows here. All who send it call `know` together, before
// the first of it is stored.
struct Announcing {
  static constexpr bool ANNOUNCES = true;
};
template <typename RANKS>
struct Slots : Announcing {
  __device__ Slots(const Args &args, uint64_t offset, RANKS known) : args(args), offset(offset), known(known) {}
  const Args &args;
  uint64_t offset;
  RANKS known;
  Ranks ranks = Ranks(0, 0, 0);
  __device__ void know() { ranks = known(); }
  // Combined with a key, or 0.
  __device__ void vector(uint32_t v, uint4 held, uint32_t with = 0) const { store_everywhere(args, ranks, offset + 16 * v, combined(held, with)); }
  // And perhaps a word, each place looked up once.
  __device__ void vector(uint32_t v, uint4 held, uint32_t w, uint32_t word, bool has_word) const {
    store_everywhere(args, ranks, offset + 16 * v, held, offset + args.token_bytes + 4 * w, word, has_word);
  }
  __device__ void word(uint32_t w, uint32_t held, uint32_t with = 0) const {
    store_everywhere(args, ranks, offset + args.token_bytes + 4 * w, held ^ with);
  }
  __device__ void key(uint32_t number, uint32_t key) const { word(args.scale_bytes / 4 + number, 0, key); }
};
// The same, and to its one place here, if it has that.
template <typename RANKS>
struct SlotsAndOwn : Slots<RANKS> {
  __device__ SlotsAndOwn(const Args &args, uint64_t offset, RANKS known, uint32_t row) : Slots<RANKS>(args, offset, known), row(row) {}
  uint32_t row;
  __device__ void vector(uint32_t v, uint4 held, uint32_t with = 0) const {
    if (row != IMMWIRE_MOE_NO_ROW) store_once(this->args.rows_x + uint64_t(row) * this->args.token_bytes + 16 * v, held);
    Slots<RANKS>::vector(v, held, with);
  }
  __device__ void word(uint32_t w, uint32_t held, uint32_t with = 0) const {
    if (row != IMMWIRE_MOE_NO_ROW) reinterpret_cast<uint32_t *>(this->args.rows_scales + uint64_t(row) * this->args.scale_bytes)[w] = held;
    Slots<RANKS>::word(w, held, with);
  }
};
struct OwnRows {
  static constexpr bool ANNOUNCES = false;
  const Args &args;
  const uint32_t *rows;
  uint32_t count;
  __device__ void know() const {}
  __device__ void vector(uint32_t v, uint4 held, uint32_t = 0) const {
    for (uint32_t n = 0; n < count; ++n) store_once(args.rows_x + uint64_t(rows[n]) * args.token_bytes + 16 * v, held);
  }
  __device__ void word(uint32_t w, uint32_t held, uint32_t = 0) const {
    for (uint32_t n = 0; n < count; ++n) reinterpret_cast<uint32_t *>(args.rows_scales + uint64_t(rows[n]) * args.scale_bytes)[w] = held;
  }
  __device__ void key(uint32_t, uint32_t) const {}
};

constexpr uint32_t KEYS = IMMWIRE_MOE_KEYS;
static_assert(KEYS <= WARP, "a lane for each key");
constexpr uint32_t PART_STEPS = 2; // Of 32 vectors: what of a token a warp sends at a time.

// Tokens of any bytes. Where they are waited for, words are combined with a key by exclusive or, such that none becomes poison. A block has
// one key for all of a token. A warp has one for each part, so that others can send other parts, and the last part's is that of the scales
// too. A token has `KEYS` of them in its slot, whoever sends it: of a block's all are the same, of a warp's those from the last part on. Who receives
// few tokens takes them to be a block's, and who receives many takes either.
struct Raw {
  static constexpr bool KEYED = true;

  // Steps of 32 vectors that make up a part, as a power of two: so many that there are no more parts than keys.
  __device__ static uint32_t part_shift(const Args &args) {
    const uint32_t steps = (args.token_bytes / 16 + WARP - 1) / WARP;
    uint32_t shift = 1;
    while ((KEYS << shift) < steps) ++shift;
    return shift;
  }
  __device__ static uint32_t part_vectors(const Args &args) { return WARP << part_shift(args); }

  // What of a token can be read before it is known where it goes, from vector `first` on.
  struct Ahead {
    template <typename CREW>
    __device__ Ahead(const Args &args, uint32_t token, CREW crew, bool is_read = true, uint32_t first = 0) {
#pragma unroll
      for (uint32_t k = 0; k < PART_STEPS; ++k) {
        const uint32_t v = first + k * crew.of + crew.me;
        held[k] = vector_of(0);
        if (is_read && v < args.token_bytes / 16) held[k] = load_bulk<CREW::MANY>(args.x + uint64_t(token) * args.token_bytes + 16 * v);
      }
    }
    uint4 held[PART_STEPS];
  };

  template <typename CREW, typename PLACES>
  __device__ static void send(const Args &args, uint32_t token, CREW crew, const Ahead &ahead, PLACES to) {
    if constexpr (CREW::MANY) return send_part(args, token, crew, ahead, to, 0, args.token_bytes / 16);
    else {
      const Sent sent = {args, token, 0, args.token_bytes / 16, args.scale_bytes / 4};
      const uint32_t with = sent.template key<PLACES::ANNOUNCES>(crew, ahead);
      to.know();
      sent.store(crew, ahead, to, with, KEYS);
    }
  }

  // One warp: the vectors from `first` on, up to `end`; whole parts of it. The next part is asked for before one is sent.
  template <typename CREW, typename PLACES>
  __device__ static void send_part(const Args &args, uint32_t token, CREW crew, Ahead ahead, PLACES to, uint32_t first, uint32_t end) {
    const uint32_t shift = part_shift(args), len = WARP << shift, vectors = args.token_bytes / 16;
    uint32_t keys = 0;
    for (uint32_t start = first; start < end; start += len) {
      const uint32_t until = min(start + len, end);
      const Ahead now = ahead;
      if (until < end) ahead = Ahead(args, token, crew, true, until);
      const Sent sent = {args, token, start, until, until == vectors ? args.scale_bytes / 4 : 0};
      const uint32_t with = sent.template key<PLACES::ANNOUNCES>(crew, now);
      if (start == first) to.know();
      sent.store(crew, now, to, with, 0);
      if (crew.me >= start / len) keys = with;
    }
    // Together: each by itself would be a packet of its own on the wire.
    if (crew.me >= first / len && crew.me < (end == vectors ? KEYS : end / len)) to.key(crew.me, keys);
  }

 private:
  // A part of a token, or all of it, with so many words of scales.
  struct Sent {
    const Args &args;
    uint32_t token, first, end, words;

    __device__ uint64_t x() const { return args.x + uint64_t(token) * args.token_bytes; }
    __device__ const uint32_t *scales() const { return reinterpret_cast<const uint32_t *>(args.scales + uint64_t(token) * args.scale_bytes); }
    // The others, for whom vectors come last, begin with scales.
    template <typename CREW>
    __device__ static uint32_t first_word(CREW crew) { return crew.of - 1 - crew.me; }

    __device__ static bool is_bad(uint4 held, uint32_t key) {
      return (held.x ^ key) == POISON || (held.y ^ key) == POISON || (held.z ^ key) == POISON || (held.w ^ key) == POISON;
    }

    // The `n`th vector of a thread's, which is `v`. Loops are not unrolled: code that is run once has to be fetched first.
    __device__ uint4 vector(const Ahead &ahead, uint32_t n, uint32_t v) const {
      return n == 0 ? ahead.held[0] : n == 1 ? ahead.held[1] : load_vector(x() + 16 * v);
    }

    // Whether this thread has a word that it makes poison of.
    template <typename CREW>
    __device__ bool is_any_bad(CREW crew, const Ahead &ahead, uint32_t key) const {
      bool bad = false;
#pragma unroll 1
      for (uint32_t n = 0, v = first + crew.me; v < end; ++n, v += crew.of) bad |= is_bad(vector(ahead, n, v), key);
#pragma unroll 1
      for (uint32_t w = first_word(crew); w < words; w += crew.of) bad |= (scales()[w] ^ key) == POISON;
      return bad;
    }

    // The first key that makes poison of no word. Keys to try are all different, and none of them is poison itself before there are more than
    // a token can have words.
    template <bool ANNOUNCES, typename CREW>
    __device__ uint32_t key(CREW crew, const Ahead &ahead) const {
      uint32_t with = 0;
      if constexpr (ANNOUNCES) {
        while (crew.any(is_any_bad(crew, ahead, with))) with += IMMWIRE_MOE_KEY;
      }
      return with;
    }

    // With so many keys, which lie behind the scales.
    template <typename CREW, typename PLACES>
    __device__ void store(CREW crew, const Ahead &ahead, const PLACES &to, uint32_t with, uint32_t keys) const {
#pragma unroll 1
      for (uint32_t n = 0, v = first + crew.me; v < end; ++n, v += crew.of) to.vector(v, vector(ahead, n, v), with);
#pragma unroll 1
      for (uint32_t w = first_word(crew); w < words + keys; w += crew.of) to.word(w, w < words ? scales()[w] : 0, with);
    }
  };
};

struct Bf16 {
  __device__ static float low(uint32_t both) { return __uint_as_float(both << 16); }
  __device__ static float high(uint32_t both) { return __uint_as_float(both & 0xffff0000u); }
  __device__ static uint32_t both(float low, float high) { return machine::to_bf16(low, high); }
};
struct Fp16 {
  __device__ static float low(uint32_t both) { return machine::from_fp16(both & 0xffff); }
  __device__ static float high(uint32_t both) { return machine::from_fp16(both >> 16); }
  __device__ static uint32_t both(float low, float high) { return machine::to_fp16(low, high); }
};

template <typename FORMAT>
__device__ void unpack(float (&values)[8], uint4 held) {
  values[0] = FORMAT::low(held.x), values[1] = FORMAT::high(held.x);
  values[2] = FORMAT::low(held.y), values[3] = FORMAT::high(held.y);
  values[4] = FORMAT::low(held.z), values[5] = FORMAT::high(held.z);
  values[6] = FORMAT::low(held.w), values[7] = FORMAT::high(held.w);
}

// Values of 16 bits, to e4m3 on the way. A thread has 16 of them, eight threads share a scale.
template <typename FORMAT>
struct Quantised {
  static constexpr bool KEYED = false;
  static constexpr uint32_t SHARE = IMMWIRE_MOE_SCALE_VALUES / 16;

  __device__ static uint32_t part_vectors(const Args &) { return PART_STEPS * WARP; }

  struct Ahead {
    // Of the vectors from `first` on.
    template <typename CREW>
    __device__ Ahead(const Args &args, uint32_t token, CREW crew, bool is_read = true, uint32_t first = 0) : low(vector_of(0)), high(vector_of(0)) {
      if (!is_read || first + crew.me >= args.values / 16) return;
      const uint64_t x = args.x + uint64_t(token) * args.values * 2 + 32 * (first + crew.me);
      low = load_bulk<CREW::MANY>(x), high = load_bulk<CREW::MANY>(x + 16);
    }
    uint4 low, high;
  };

  template <typename CREW, typename PLACES>
  __device__ static void send(const Args &args, uint32_t token, CREW crew, const Ahead &ahead, PLACES to) {
    send_part(args, token, crew, ahead, to, 0, args.values / 16);
  }

  // A part of it, from vector `first` on, up to `end`; whole steps of the crew's, but for a token's last.
  template <typename CREW, typename PLACES>
  __device__ static void send_part(const Args &args, uint32_t token, CREW crew, const Ahead &ahead, PLACES to, uint32_t first, uint32_t end) {
    const uint64_t x = args.x + uint64_t(token) * args.values * 2;
    uint4 low = ahead.low, high = ahead.high;
    uint32_t gathered = 0;
    // Whole warps, for eight lanes each find their largest value together; lanes past the end have zeros. The next ones are read while
    // these are worked on.
    for (uint32_t start = first; start < end; start += crew.of) {
      const uint32_t v = start + crew.me, next = v + crew.of;
      float values[2][8];
      unpack<FORMAT>(values[0], low), unpack<FORMAT>(values[1], high);
      low = high = vector_of(0);
      if (next < end) low = load_bulk<CREW::MANY>(x + 32 * next), high = load_bulk<CREW::MANY>(x + 32 * next + 16);
      float peak = SMALLEST_PEAK;
#pragma unroll
      for (uint32_t i = 0; i < 16; ++i) peak = fmaxf(peak, fabsf(values[i / 8][i % 8]));
      for (uint32_t step = 1; step < SHARE; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(ALL_LANES, peak, step));

      float scale = __fmul_rn(peak, 1.0f / LARGEST_E4M3), factor;
      uint32_t exponent = 0;
      const bool powers = (args.flags & IMMWIRE_MOE_POWER_SCALES) != 0;
      if (powers) {
        // The least power of two that is not below; 255 would stand for no number.
        const uint32_t bits = __float_as_uint(scale);
        exponent = min(254u, (bits >> 23) + ((bits & 0x7fffff) != 0));
        factor = __uint_as_float(exponent < 254 ? (254 - exponent) << 23 : 1u << 22);
      } else {
        factor = __fdiv_rn(LARGEST_E4M3, peak);
      }
      uint32_t word[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const float *four = &values[i / 2][i % 2 * 4];
        word[i] = machine::to_e4m3(__fmul_rn(four[0], factor), __fmul_rn(four[1], factor), __fmul_rn(four[2], factor),
                                   __fmul_rn(four[3], factor));
      }
      uint32_t bytes = exponent;
      if (powers) {
        // Four of them make up a word; none where there are no values any more.
        if (v >= end) bytes = 0;
        bytes |= __shfl_down_sync(ALL_LANES, bytes, SHARE) << 8;
        bytes |= __shfl_down_sync(ALL_LANES, bytes, 2 * SHARE) << 16;
      }
      if (start == first) to.know();
      if constexpr (CREW::MANY) gather_scales(args, start / WARP, first, end, powers ? bytes : __float_as_uint(scale), gathered, to);
      if (v >= end) continue;
      const uint4 made = {word[0], word[1], word[2], word[3]};
      if constexpr (CREW::MANY) {
        to.vector(v, made);
      } else {
        const uint32_t share = powers ? WARP : SHARE;
        to.vector(v, made, powers ? v / WARP : v / SHARE, powers ? bytes : __float_as_uint(scale), v % share == 0);
      }
    }
  }

 private:
  // Of step `nth` of a warp, which makes a few words of scales: they go out when each lane has one, or no more will come. Those of each step
  // would be a packet of their own on the wire, of more head than body.
  template <typename PLACES>
  __device__ static void gather_scales(const Args &args, uint32_t nth, uint32_t first, uint32_t end, uint32_t word, uint32_t &gathered, const PLACES &to) {
    const uint32_t each = args.flags & IMMWIRE_MOE_POWER_SCALES ? 1 : WARP / SHARE, steps = WARP / each, lane = threadIdx.x % WARP;
    const uint32_t made = __shfl_sync(ALL_LANES, word, lane % each * SHARE);
    if (lane / each == nth % steps) gathered = made;
    if (nth % steps != steps - 1 && (nth + 1) * WARP < end) return;
    const uint32_t at = nth / steps * WARP + lane;
    if (at * steps >= first && at * steps < end) to.word(at, gathered);
  }
};

// Some blocks of a launch, of which this is one.
struct Share {
  uint32_t index, of;
};

// A share of the tokens is dealt to warps one by one: so they come in about the order in which they are awaited.
struct Dealt {
  __device__ explicit Dealt(Share share) : first(threadIdx.x / WARP * share.of + share.index), step(blockDim.x / WARP * share.of) {}
  uint32_t first, step;
};

// How many tokens this rank is said to have.
__device__ uint32_t tokens_given(const Args &args) {
  return args.tokens_at != 0 ? *reinterpret_cast<const uint32_t *>(args.tokens_at) : args.tokens;
}

// How many of these there is memory for, here and at others; of a number below zero, as which a framework's integers may be read, none.
__device__ uint32_t tokens_there_are(const Args &args, uint32_t given) {
  return int32_t(given) < 0 ? 0 : min(min(given, args.tokens), args.max_tokens);
}

// How many it has, which the last block tells everybody.
__device__ uint32_t announce_tokens(const Args &args, uint32_t given, uint32_t epoch, uint32_t parity, uint32_t present) {
  const uint32_t tokens = tokens_there_are(args, given);
  if (given > tokens && blockIdx.x == 0 && threadIdx.x == 0) put_down(report_of(args)->tokens_left_out, epoch);
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < args.world) {
    if (present >> threadIdx.x & 1)
      store_whole_vector(table_of(args, threadIdx.x, args.rank, parity), {tokens, args.max_tokens, epoch, epoch});
    if (threadIdx.x == 0) control_of(args)->tokens = tokens;
  }
  return tokens;
}

// What a block does in a launch. Where that both sends and receives, a third of the blocks send, and the others tell everybody the choices
// and receive: what waits for the wire holds up all that its SM does, so who has tokens to send would come to receive late. (Among four
// H200s 128 tokens go out in 13.7 us like that, in 17 if all blocks do both, in 14.2 if half of them send.) One that is alone, or of a launch
// that does one thing only, does whatever there is to do.
//
// Those who send come first: where there is no room for all at once, they have gone when the others come.
struct Roles {
  __device__ explicit Roles(const Args &args) : share({blockIdx.x, gridDim.x}) {
    sends = tells = args.flags & IMMWIRE_MOE_SEND, receives = args.flags & IMMWIRE_MOE_RECEIVE;
    if (!sends || !receives || gridDim.x == 1) return;
    const uint32_t senders = (gridDim.x + 2) / 3;
    sends = blockIdx.x < senders, tells = receives = !sends;
    share = sends ? Share{blockIdx.x, senders} : Share{blockIdx.x - senders, gridDim.x - senders};
  }
  bool sends, tells, receives;
  Share share;
};

// What a block can ask for of the first tokens that it sends, or whose choices it tells, before it knows whether there are so many, and which
// round it is: there is memory for args.tokens of them.
template <typename PAYLOAD>
struct First {
  __device__ First(const Args &args, const Roles &roles)
      : given(args.flags & IMMWIRE_MOE_SEND ? tokens_given(args) : 0), telling(args), told(roles.sends ? roles.share.index : Dealt(roles.share).first),
        choice(args, told, roles.sends ? reads_choices() : roles.tells, args.tokens),
        ahead(args, roles.share.index, BlockCrew(), roles.sends && roles.share.index < args.tokens) {}
  // Of those who send: the other warps work on the token meanwhile.
  __device__ static bool reads_choices() { return threadIdx.x / WARP == blockDim.x / WARP - 1; }
  uint32_t given;
  Telling telling;
  uint32_t told;
  Choice choice;
  typename PAYLOAD::Ahead ahead;
};

// Tells everybody the choices of a share.
__device__ void send_choices_of(const Args &args, Dealt dealt, Telling telling, Choice next, uint32_t tokens, uint32_t epoch, uint32_t parity,
                                uint32_t present) {
  for (uint32_t token = dealt.first; token < tokens; token += dealt.step) {
    const uint32_t goes_to = send_choices(args, telling, token, next, epoch, parity, present);
    if (threadIdx.x % WARP == 0) masks_of(args)[token] = goes_to;
    next = Choice(args, token + dealt.step, true, tokens);
  }
}

// Sends the tokens of a share, and tells everybody their choices unless others do.
template <typename PAYLOAD>
__device__ void send_tokens(const Args &args, Fixed &fixed, const Roles &roles, First<PAYLOAD> next, uint32_t tokens, uint32_t epoch,
                            uint32_t parity, uint32_t present) {
  const bool is_last_warp = next.reads_choices();
  uint32_t turn = 0;
  for (uint32_t token = roles.share.index; token < tokens; token += roles.share.of, turn ^= 1) {
    if (is_last_warp) {
      bool is_wrong = false; // Who tells the choice says so.
      const uint32_t goes_to = roles.tells ? send_choices(args, next.telling, token, next.choice, epoch, parity, present)
                                           : ranks_of(args, expert_of(args, next.choice, is_wrong), present);
      if (threadIdx.x % WARP == 0) {
        fixed.routes[turn] = goes_to;
        if (roles.tells) masks_of(args)[token] = goes_to;
      }
    }
    const uint32_t begin = (args.rank + token) % args.world; // Nobody has to wait for that yet.
    const auto ranks = [&] {
      // One for each token is enough: the word of the next one is another. Who has agreed on a key has had it.
      if (!PAYLOAD::KEYED) __syncthreads();
      return Ranks(fixed.routes[turn], begin, args.world);
    };
    // The next one is asked for before this one is sent.
    const uint32_t after = token + roles.share.of;
    const typename PAYLOAD::Ahead ahead = next.ahead;
    if (after < tokens) next.choice = Choice(args, after, is_last_warp), next.ahead = typename PAYLOAD::Ahead(args, after, BlockCrew());
    PAYLOAD::send(args, token, BlockCrew(), ahead, Slots<decltype(ranks)>(args, token_offset(args, args.rank, token), ranks));
  }
}

// ---- the way out: receiving ----

// The heads of the tables of `wanted`, which all threads have the same.
struct Heads {
  // Every warp looks at all of them, a lane at each, until they are there. Of a rank that has more than so many tokens only these count.
  __device__ Heads(const Args &args, uint32_t wanted, uint32_t most, uint32_t epoch, uint32_t parity, Patience &patience) {
    const uint32_t lane = threadIdx.x % WARP;
    const uint64_t own = table_of(args, args.rank, 0, parity) + lane * args.table_bytes;
    bool waits = lane < args.world && (wanted >> lane & 1);
    uint32_t looks = 0;
    while (__ballot_sync(ALL_LANES, waits) != 0) {
      uint4 head;
      if (waits) head = load_shared_vector(own);
      if (waits && head.z == epoch && head.w == epoch) tokens = min(head.x, most), waits = false;
      ++looks;
      if (__ballot_sync(ALL_LANES, waits && patience.is_over()) != 0) break;
    }
    missing = __ballot_sync(ALL_LANES, waits);
    // Choices are not waited for as long again.
    if (missing != 0) patience.end_too();
    else if (looks >= Patience::LOOKS) patience.share();
  }

  uint32_t tokens = 0; // Each lane: how many the rank of its number has.
  uint32_t missing;    // Whose heads were not there.
};

// The tables of `wanted`, which all threads have the same.
struct Tables : Heads {
  // After the heads every thread looks at a vector of choices of each of the first tables: while that is under way there is something else to do.
  __device__ Tables(const Args &args, uint32_t wanted, uint32_t most, uint32_t epoch, uint32_t parity, Patience &patience)
      : Heads(args, wanted, most, epoch, parity, patience), each(vectors_per_token(args)), by_each(each), first(table_of(args, args.rank, 0, parity)) {
#pragma unroll
    for (uint32_t i = 0; i < BATCH; ++i)
      if (threadIdx.x < vectors(i)) early[i] = choices(args, i, threadIdx.x);
  }
  // How many vectors of choices a rank has: none that is not there, or that there is not.
  __device__ uint32_t vectors(uint32_t rank) const { return __shfl_sync(ALL_LANES, tokens, rank) * each; }
  __device__ uint4 choices(const Args &args, uint32_t rank, uint32_t v) const {
    return load_shared_vector(first + rank * args.table_bytes + 16 * (1 + uint64_t(v)));
  }

  uint32_t each;
  uint4 early[BATCH];
  Divisor by_each;
  uint64_t first;
};

// Takes a vector of choices of each table from `low` on whose bit is set in `wanted`, which have been looked at once. Returns a bit for each that never
// was there.
__device__ uint32_t take_choices(const Args &args, Routes &routes, const Tables &tables, uint32_t low, uint32_t v, uint4 (&held)[BATCH], uint32_t wanted,
                                 uint32_t epoch, Patience &patience) {
  uint32_t missing = 0;
  for (;;) {
    uint32_t differ = 0;
#pragma unroll
    for (uint32_t i = 0; i < BATCH; ++i) differ |= wanted >> i & 1 ? held[i].w ^ epoch : 0;
    if (differ == 0) break;
    if (patience.is_over()) {
#pragma unroll
      for (uint32_t i = 0; i < BATCH; ++i)
        if ((wanted >> i & 1) && held[i].w != epoch) missing |= 1u << i;
      wanted &= ~missing;
      break;
    }
#pragma unroll
    for (uint32_t i = 0; i < BATCH; ++i)
      if (wanted >> i & 1) held[i] = tables.choices(args, low + i, v);
  }
  const uint32_t token = tables.by_each.into(v);
#pragma unroll
  for (uint32_t i = 0; i < BATCH; ++i) routes.take((low + i) * routes.span + token / 32, 1u << token % 32, held[i].z, wanted >> i & 1);
  return missing;
}

// Takes the choices of all tables, up to BATCH of them side by side. Returns who is missing, to all threads.
__device__ uint32_t read_choices(const Args &args, Routes &routes, const Tables &tables, uint32_t epoch, uint32_t &missing_word, Patience &patience) {
  uint32_t missing = tables.missing;
  for (uint32_t low = 0; low < args.world; low += BATCH) {
    uint32_t vectors[BATCH], most = 0;
#pragma unroll
    for (uint32_t i = 0; i < BATCH; ++i) {
      vectors[i] = tables.vectors(low + i);
      most = max(most, vectors[i]);
    }
    for (uint32_t start = 0; start < most; start += blockDim.x) {
      const uint32_t v = start + threadIdx.x;
      uint4 held[BATCH];
      uint32_t wanted = 0;
#pragma unroll
      for (uint32_t i = 0; i < BATCH; ++i) {
        wanted |= (v < vectors[i] ? 1u : 0u) << i;
        held[i] = tables.early[i];
      }
      if (low + start != 0) {
#pragma unroll
        for (uint32_t i = 0; i < BATCH; ++i)
          if (wanted >> i & 1) held[i] = tables.choices(args, low + i, v);
      }
      missing |= take_choices(args, routes, tables, low, v, held, wanted, epoch, patience) << low;
    }
  }
  if (missing != 0) atomicOr(&missing_word, missing);
  if (threadIdx.x == 0) routes.fixed->words = routes.words;
  __syncthreads();
  return missing_word;
}

// Somebody's table was missed, by this block or by another: `settle` decides for all blocks alike whose tables count, after another
// look at them; to be called by all threads.
//
// Who misses a table says so first, and then looks again. So if it is still missing, then no block has found it whole before
// that was said: those who find it whole later hear of it, and ask for the decision as well. The first to decide does. That rests
// on a thread's look at the word coming after its looks at the table, which it begins when they have ended; no fence says so.
__device__ __noinline__ void doubt(const Args &args, Fixed &fixed, uint32_t missing, uint32_t doubted) {
  if (threadIdx.x == 0) {
    fixed.doubted = missing | doubted;
    fixed.absent = 0;
    atomicOr(&control_of(args)->suspects, missing);
    __threadfence();
  }
  __syncthreads();
}

// Returns whose tables do not count, of those that are doubted or still missing.
__device__ __noinline__ uint32_t settle(const Args &args, Fixed &fixed, uint32_t missing, uint32_t epoch) {
  immwire_moe_control &control = *control_of(args);
  const uint32_t rank = threadIdx.x;
  if (rank < args.world && ((fixed.doubted | missing) >> rank & 1)) {
    const uint32_t mine = 2 * epoch + (missing >> rank & 1 ? 0 : 1);
    uint32_t found = atomicAdd(&control.decisions[rank], 0u);
    while (found / 2 != (2 * epoch) / 2) {
      const uint32_t other = atomicCAS(&control.decisions[rank], found, mine);
      found = other == found ? mine : other;
    }
    if (found % 2 == 0) {
      atomicOr(&fixed.absent, 1u << rank);
      atomicOr(&control.absent, 1u << rank);
      put_down(report_of(args)->late_table[rank], epoch);
    }
  }
  __syncthreads();
  return fixed.absent;
}

// Where a token goes that lies once for all its rows.
__device__ uint32_t slot_of(const Args &args, uint32_t source, uint32_t token) { return source * args.max_tokens + token; }

// Writes zeros to rows, or says that they have no slot; by a whole block.
__device__ void clear_padding(const Args &args, uint32_t row, uint32_t end) {
  if (args.slots != 0) {
    for (uint32_t r = row + threadIdx.x; r < end; r += blockDim.x) reinterpret_cast<uint32_t *>(args.slots)[r] = IMMWIRE_MOE_NO_ROW;
    return;
  }
  const uint32_t vectors = args.token_bytes / 16, scale_words = args.scale_bytes / 4;
  for (; row < end; ++row) {
    for (uint32_t v = threadIdx.x; v < vectors; v += blockDim.x)
      store_vector(args.rows_x + uint64_t(row) * args.token_bytes + 16 * v, vector_of(0));
    for (uint32_t w = threadIdx.x; w < scale_words; w += blockDim.x)
      reinterpret_cast<uint32_t *>(args.rows_scales + uint64_t(row) * args.scale_bytes)[w] = 0;
  }
}

__device__ uint64_t slot_at(const Args &args, const Pair &pair) {
  return args.inbox[args.rank] + token_offset(args, pair.source, pair.token);
}

// One warp: lists the rows of a token of which each lane has one, or none. Or its one place.
__device__ uint32_t list_rows(const Args &args, uint32_t source, uint32_t token, uint32_t row, uint32_t *rows) {
  const uint32_t lane = threadIdx.x % WARP;
  if (args.slots != 0) row = lane == 0 ? slot_of(args, source, token) : IMMWIRE_MOE_NO_ROW;
  const uint32_t has = __ballot_sync(ALL_LANES, row < IMMWIRE_MOE_LEFT_OUT);
  if (row < IMMWIRE_MOE_LEFT_OUT) rows[__popc(has & ranks_below(lane))] = row;
  machine::meet();
  return __popc(has);
}

// Tokens that were told of, source by source: a warp knows by the number of one whose it is, and where it lies, before it is known whether
// it is for here.
struct Told {
  // Each lane has how many the rank of its number told of.
  __device__ explicit Told(uint32_t tokens) { before = sum_before(tokens, all); }
  // The `n`-th, of more than so many.
  __device__ Pair token(const Args &args, uint32_t n) const {
    const uint32_t source = __popc(__ballot_sync(ALL_LANES, threadIdx.x % WARP < args.world && before <= n)) - 1;
    return {source, n - __shfl_sync(ALL_LANES, before, source), 0};
  }
  uint32_t before, all;
};

// The choice of a token that each lane has, as this rank was told.
struct Heard {
  // Of none unless it is read.
  __device__ Heard(const Args &args, const Pair &pair, uint32_t parity, bool is_read) : two(vector_of(POISON)) {
    const uint32_t lane = threadIdx.x % WARP;
    if (is_read && lane < args.top_k)
      two = load_shared_vector(table_of(args, args.rank, pair.source, parity) + 16 * (1 + uint64_t(pair.token) * vectors_per_token(args) + lane / 2));
  }
  __device__ uint32_t expert() const { return threadIdx.x % 2 == 0 ? two.z & 0xffff : two.z >> 16; }
  __device__ uint32_t weight() const { return threadIdx.x % 2 == 0 ? two.x : two.y; }

 private:
  uint4 two;
};

// A token and what its way back needs: each lane has the row of one of its choices, and the weight.
struct Found {
  // One warp: lists its rows. Nobody else sees anything of it.
  __device__ Found(const Args &args, const Routes &routes, const Pair &told, const Heard &heard, uint32_t *rows)
      : pair(told), row(IMMWIRE_MOE_NO_ROW), weight(heard.weight()) {
    const uint32_t mine = heard.expert() - routes.first;
    if (threadIdx.x % WARP < args.top_k && mine < routes.local) row = routes.row(mine, pair.source, pair.token);
    if (row != IMMWIRE_MOE_NO_ROW && row >= args.rows) row = IMMWIRE_MOE_LEFT_OUT;
    is_here = __ballot_sync(ALL_LANES, row != IMMWIRE_MOE_NO_ROW) != 0;
    pair.count = list_rows(args, pair.source, pair.token, row, rows);
  }

  // One warp: keeps that for the combine.
  __device__ void keep(const Args &args, const Routes &routes, uint32_t epoch) const {
    const uint32_t lane = threadIdx.x % WARP;
    uint32_t all;
    const uint64_t plan = args.plan + uint64_t(routes.number(pair.source, pair.token, all)) * args.plan_stride;
    if (lane == 0) store_vector(plan, {pair.source, pair.token, 0, 0});
    if (lane >= args.top_k) return;
    if (row == IMMWIRE_MOE_LEFT_OUT) put_down(report_of(args)->rows_left_out, epoch);
    uint32_t *planned = reinterpret_cast<uint32_t *>(plan + sizeof(immwire_moe_pair));
    planned[lane] = row;
    planned[args.top_k + lane] = weight;
    if (args.slots != 0 && row < IMMWIRE_MOE_LEFT_OUT)
      reinterpret_cast<uint32_t *>(args.slots)[row] = slot_of(args, pair.source, pair.token);
  }

  Pair pair;
  uint32_t row, weight;
  bool is_here;
};

constexpr uint32_t AHEAD = 7; // Vectors that a lane looks at side by side, at most: half of 7,168 bytes.
constexpr uint32_t SOME = 4;  // Where warps share a token: no more is looked at than there is.
constexpr uint32_t PAIR = 2;  // And words of scales.

// Which of a token's vectors are a warp's, and whether its scales are: of 2^shift warps, each the same number of rows of vectors.
struct Part {
  __device__ Part() : most(0), first(0), end(0), is_first(false), is_last(false) {} // Nothing.
  __device__ Part(uint32_t index, uint32_t shift, uint32_t vectors) {
    most = (((vectors + WARP - 1) / WARP + (1u << shift) - 1) >> shift) * WARP;
    first = index * most, end = min(first + most, vectors), is_first = index == 0, is_last = index + 1 == 1u << shift;
  }
  uint32_t most; // Of any part.
  uint32_t first, end;
  bool is_first, is_last;
};

// What a lane looks at first of a token, up to COUNT vectors; so early that nothing has to wait for it.
template <uint32_t COUNT>
struct Looked {
  __device__ Looked(uint64_t slot, const Part &part) { from_on(slot, part, part.first); }
  __device__ void from_on(uint64_t slot, const Part &part, uint32_t low) {
    wanted = 0;
#pragma unroll
    for (uint32_t k = 0; k < COUNT; ++k) {
      const uint32_t v = low + k * WARP + threadIdx.x % WARP;
      from[k] = slot + 16 * v;
      wanted |= (v < part.end ? 1u : 0u) << k;
    }
    look_at<Vector>(held, from, wanted);
  }
  uint4 held[COUNT];
  uint64_t from[COUNT];
  uint32_t wanted;
};

__device__ uint64_t keys_at(const Args &args, uint64_t slot) { return slot + args.token_bytes + args.scale_bytes; }

// One warp: takes a part of a token, which it has looked at, to its rows, or to its one place. Says who is late. Keys stay.
template <typename PAYLOAD, bool MANY, uint32_t COUNT>
__device__ void take_token(const Args &args, const Pair &pair, const uint32_t *rows, const Part &part, Looked<COUNT> &now, uint32_t epoch,
                           Patience &patience) {
  const uint32_t lane = threadIdx.x % WARP, scale_words = args.scale_bytes / 4;
  const uint64_t slot = slot_at(args, pair);
  uint32_t key[1] = {}, late = 0, shift = 0;
  bool has_key = !PAYLOAD::KEYED;
  if constexpr (PAYLOAD::KEYED && MANY) shift = PAYLOAD::part_shift(args);
  // With few tokens all keys are the same: any will do, but each is to have come before it is forgotten, which the first part sees to. (So if only
  // some have come from a rank that is left out, the other parts of that token may be there, and the first one zeros.)
  const auto read_key = [&] {
    if (has_key) return;
    const uint64_t key_at[1] = {keys_at(args, slot) + 4 * (MANY || part.is_first ? min(lane, KEYS - 1) : 0)};
    late |= await<Word>(key, key_at, 1, patience);
    late = __ballot_sync(ALL_LANES, late != 0); // Lanes need others' keys.
    has_key = true;
  };
  const auto key_of = [&](uint32_t number) { return PAYLOAD::KEYED && MANY ? __shfl_sync(ALL_LANES, key[0], number) : key[0]; };
  for (uint32_t low = part.first; low < part.end; low += WARP * COUNT) {
    if (low != part.first) now.from_on(slot, part, low);
    late |= await_looked<Vector>(now.held, now.from, now.wanted, patience);
    read_key();
#pragma unroll
    for (uint32_t k = 0; k < COUNT; ++k) {
      uint4 &held = now.held[k];
      held = combined(held, key_of((low / WARP + k) >> shift));
      if (late != 0) held = vector_of(0);
      if (now.wanted >> k & 1) store_bulk<MANY>(now.from[k], vector_of(POISON));
    }
    for (uint32_t n = 0; n < pair.count; ++n) {
      const uint64_t to = args.rows_x + uint64_t(rows[n]) * args.token_bytes + 16 * (low + lane);
#pragma unroll
      for (uint32_t k = 0; k < COUNT; ++k)
        if (now.wanted >> k & 1) store_bulk<MANY>(to + 16 * k * WARP, now.held[k]);
    }
  }
  for (uint32_t low = 0; part.is_last && low < scale_words; low += WARP * PAIR) {
    uint32_t held[PAIR], wanted = 0;
    uint64_t from[PAIR];
#pragma unroll
    for (uint32_t k = 0; k < PAIR; ++k) {
      const uint32_t w = low + k * WARP + lane;
      from[k] = slot + args.token_bytes + 4 * w;
      wanted |= (w < scale_words ? 1u : 0u) << k;
    }
    late |= await<Word>(held, from, wanted, patience);
    read_key();
    const uint32_t with = key_of(KEYS - 1);
#pragma unroll
    for (uint32_t k = 0; k < PAIR; ++k) {
      held[k] = late != 0 ? 0 : held[k] ^ with;
      if (wanted >> k & 1) *reinterpret_cast<uint32_t *>(from[k]) = POISON;
    }
    for (uint32_t n = 0; n < pair.count; ++n) {
      const uint64_t to = args.rows_scales + uint64_t(rows[n]) * args.scale_bytes + 4 * (low + lane);
#pragma unroll
      for (uint32_t k = 0; k < PAIR; ++k)
        if (wanted >> k & 1) *reinterpret_cast<uint32_t *>(to + 4 * k * WARP) = held[k];
    }
  }
  if (__ballot_sync(ALL_LANES, late != 0) == 0 || lane != 0) return;
  atomicOr(&control_of(args)->absent, 1u << pair.source);
  put_down(report_of(args)->late_tokens[pair.source], epoch);
}

// Puts the poison back in the keys' places; by one warp, when all who need a key have it.
__device__ void forget_keys(const Args &args, const Pair &pair) {
  const uint32_t lane = threadIdx.x % WARP;
  if (lane < KEYS) reinterpret_cast<uint32_t *>(keys_at(args, slot_at(args, pair)))[lane] = POISON;
}

// What a warp does when tokens are received: it takes a part of one to its rows, and keeps for the combine what is known of one. As many warps share
// a token as there are for it; and those to whom no part falls keep, if they are enough, so that nobody else is later for that.
struct Task {
  // Of more tokens than there are for all at a time, the first.
  __device__ Task(const Args &args, const Told &told, Share share)
      : shift(doublings(told.all, share.of * (blockDim.x / WARP), 31 - __clz(blockDim.x / WARP))),
        part(threadIdx.x / WARP & ((1u << shift) - 1), shift, args.token_bytes / 16) {
    const uint32_t warp = threadIdx.x / WARP, nth = warp >> shift;
    at_a_time = (blockDim.x / WARP) >> shift;
    n = share.index + nth * share.of;
    const bool is_one = nth < at_a_time;
    is_mine = is_one && n < told.all;
    const uint32_t places = at_a_time * share.of, left = places > told.all ? (places - told.all) << shift : 0;
    const uint32_t other = ((n - told.all) << shift) + (warp & ((1u << shift) - 1));
    const bool is_apart = left >= told.all;
    is_kept = is_apart ? is_one && !is_mine && other < told.all : is_mine && part.is_first;
    about = is_mine ? n : is_kept ? other : 0;
  }
  __device__ bool any() const { return is_mine || is_kept; }

  uint32_t shift;
  Part part;
  uint32_t at_a_time; // Tokens that a block takes side by side.
  uint32_t n;         // The token whose part is this warp's,
  uint32_t about;     // or which it knows something of.
  bool is_mine, is_kept;
};

// Takes tokens to their rows, once it is known where these are; a lane looks at COUNT vectors side by side.
template <typename PAYLOAD, uint32_t COUNT>
__device__ void take_tokens(const Args &args, const Routes &routes, const Told &told, Task task, Pair pair, const Heard &heard, Share share, uint32_t epoch,
                            uint32_t parity) {
  uint32_t *rows = routes.fixed->rows_of_warp + threadIdx.x / WARP * WARP;
  const Part &part = task.part;
  bool is_mine = task.is_mine;
  Looked<COUNT> now(slot_at(args, pair), is_mine ? part : Part());
  if (task.any()) {
    const Found found(args, routes, pair, heard, rows);
    pair = found.pair, is_mine = is_mine && found.is_here;
    if (task.is_kept && found.is_here) found.keep(args, routes, epoch);
  }
  // By the last block, which has the least to do.
  if (share.index == share.of - 1) {
    uint32_t *counts = reinterpret_cast<uint32_t *>(args.counts), *offsets = reinterpret_cast<uint32_t *>(args.offsets);
    for (uint32_t e = threadIdx.x; e <= routes.local; e += blockDim.x) {
      if (e < routes.local) counts[e] = routes.rows_of(e);
      offsets[e] = routes.offset(e);
    }
    if (threadIdx.x / WARP == 0) {
      uint32_t all;
      routes.number(0, 0, all);
      if (threadIdx.x == 0) control_of(args)->pairs = all;
    }
  }
  if (args.flags & IMMWIRE_MOE_CLEAR_PADDING) {
    for (uint32_t e = share.index; e < routes.local; e += share.of)
      clear_padding(args, routes.offset(e) + routes.rows_of(e), min(routes.offset(e + 1), args.rows));
  }
  Patience patience(args, Patience::FOR_TOKENS);
  for (uint32_t low = 0, n = task.n;;) {
    if (is_mine) take_token<PAYLOAD, false>(args, pair, rows, part, now, epoch, patience);
    if (PAYLOAD::KEYED) {
      __syncthreads(); // All have the keys.
      if (is_mine && part.is_first) forget_keys(args, pair);
    }
    low += task.at_a_time;
    if (share.index + low * share.of >= told.all) break;
    // Never so where warps share a token, of which there are as many in a block as halves can be made: each has one of its own.
    n += task.at_a_time * share.of, is_mine = n < told.all;
    machine::meet(); // Nobody looks at the rows of the last one any more.
    if (is_mine) {
      const Pair next = told.token(args, n);
      const Heard next_heard(args, next, parity, true);
      now.from_on(slot_at(args, next), part, part.first);
      const Found found(args, routes, next, next_heard, rows);
      pair = found.pair, is_mine = found.is_here;
      if (is_mine) found.keep(args, routes, epoch);
    }
  }
}

// Takes tokens to their rows, of which no rank has more than so many.
template <typename PAYLOAD>
__device__ void receive_tokens(const Args &args, uint32_t *shared, Share share, uint32_t epoch, uint32_t parity, uint32_t present,
                               Patience for_tables, uint32_t most) {
  immwire_moe_control &control = *control_of(args);
  Routes routes(args, shared, most);
  Fixed &fixed = *routes.fixed;
  // Once; again if that leaves a doubt, and then those that count.
  uint32_t wanted = present;
  for (uint32_t look = 0;; ++look) {
    routes.clear();
    if (threadIdx.x == 0) fixed.missing = 0;
    __syncthreads();
    const Tables tables(args, wanted, most, epoch, parity, for_tables);
    routes.fit(machine::most_of(tables.tokens));
    // How many tokens there are is known before the choices are: so is what is whose to do.
    const Told told(tables.tokens);
    const Task task(args, told, share);
    const Pair pair = told.token(args, task.about);
    const uint32_t missing = read_choices(args, routes, tables, epoch, fixed.missing, for_tables);
    if (look == 1) {
      wanted &= ~settle(args, fixed, missing, epoch);
      continue;
    }
    // Read after the tables (see `doubt`), and not waited for before it is needed: so by all threads, of which one's counts.
    const uint32_t suspects = load_shared_word(reinterpret_cast<uint64_t>(&control.suspects));
    const Heard heard(args, pair, parity, task.any());
    routes.count(args.padding);
    // Before it is known whether there are doubts, nothing is done that another block would see.
    const uint32_t doubted = threadIdx.x == 0 ? suspects & present : 0;
    if (__syncthreads_or(look == 0 ? missing | doubted : 0) != 0) {
      doubt(args, fixed, missing, doubted);
      continue;
    }
    if (threadIdx.x == 0) machine::let_next_begin();
    if (task.part.most <= WARP) take_tokens<PAYLOAD, 1>(args, routes, told, task, pair, heard, share, epoch, parity);
    else if (task.part.most <= SOME * WARP) take_tokens<PAYLOAD, SOME>(args, routes, told, task, pair, heard, share, epoch, parity);
    else take_tokens<PAYLOAD, AHEAD>(args, routes, told, task, pair, heard, share, epoch, parity);
    return;
  }
}

// Sends what a share has, as few tokens are sent: choices by some blocks, tokens by others.
template <typename PAYLOAD>
__device__ void send_few(const Args &args, uint32_t *shared, const Roles &roles, const First<PAYLOAD> &first, uint32_t epoch, uint32_t parity,
                         uint32_t present) {
  const uint32_t tokens = announce_tokens(args, first.given, epoch, parity, present);
  if (roles.sends) send_tokens<PAYLOAD>(args, *reinterpret_cast<Fixed *>(shared), roles, first, tokens, epoch, parity, present);
  else send_choices_of(args, Dealt(roles.share), first.telling, first.choice, tokens, epoch, parity, present);
}

template <typename PAYLOAD>
__device__ void dispatch(const Args &args) {
  MACHINE_SHARED(shared);
  machine::bring(args);
  machine::follow();
  immwire_moe_control &control = *control_of(args);
  // Not those found absent meanwhile: all blocks need the same. Asked for first, as nothing is sent before.
  const uint32_t epoch = control.next_epoch, parity = control.next_parity, gone = control.left_out | control.missed;
  const Roles roles(args);
  const First<PAYLOAD> first(args, roles);
  const Patience patience(args, Patience::FOR_TABLES);
  const uint32_t present = ranks_below(args.world) & ~gone;
  if (blockIdx.x == 0 && threadIdx.x == 0) control.epoch = epoch, control.parity = parity, control.summed = 0;
  if (args.flags & IMMWIRE_MOE_SEND) send_few<PAYLOAD>(args, shared, roles, first, epoch, parity, present);
  if (roles.receives) {
    __syncthreads();
    receive_tokens<PAYLOAD>(args, shared, roles.share, epoch, parity, present, patience, args.max_tokens);
  }
}

// ---- the way back ----

template <typename FORMAT>
__device__ uint4 pack(const float (&values)[8]) {
  return {FORMAT::both(values[0], values[1]), FORMAT::both(values[2], values[3]), FORMAT::both(values[4], values[5]),
          FORMAT::both(values[6], values[7])};
}

// A token received, as dispatch planned its way back. A lane of the warp that reads it has one of its choices.
struct Planned {
  __device__ Planned(const Args &args, uint32_t n, uint32_t epoch) : row(IMMWIRE_MOE_NO_ROW), weight(0.0f) {
    const uint32_t lane = threadIdx.x % WARP;
    const uint64_t plan = args.plan + uint64_t(n) * args.plan_stride;
    pair = load_vector(plan);
    if (lane < args.top_k) {
      row = reinterpret_cast<const uint32_t *>(plan + sizeof(immwire_moe_pair))[lane];
      weight = reinterpret_cast<const float *>(plan + sizeof(immwire_moe_pair))[args.top_k + lane];
    }
    if (row != IMMWIRE_MOE_NO_ROW && row >= args.rows) put_down(report_of(args)->rows_left_out, epoch);
  }

  // Keeps the row of each lane that has one to be kept, and its weight, for the block.
  __device__ void keep_rows(Rows &kept, bool is_kept) const {
    const uint32_t lane = threadIdx.x % WARP, has = __ballot_sync(ALL_LANES, is_kept), place = __popc(has & ranks_below(lane));
    if (is_kept) kept.row[place] = row, kept.weight[place] = weight;
    if (lane == 0) kept.count = __popc(has);
  }
  // Tells the block whose token it is.
  __device__ void keep_token(Fixed &fixed, uint32_t turn, uint32_t i) const {
    if (threadIdx.x % WARP == 0) fixed.source[turn][i] = source(), fixed.token[turn][i] = token();
  }
  __device__ uint32_t source() const { return pair.x; }
  __device__ uint32_t token() const { return pair.y; }

  uint32_t row;
  float weight;

 private:
  uint4 pair;
};

// Vectors that a lane has side by side: the first one, and each so many behind the one before. Where that number is known when this is compiled,
// their addresses are one and constants.
struct Side {
  __device__ uint32_t at(uint32_t j) const { return first + j * step; }
  __device__ uint64_t bytes(uint32_t j) const { return uint64_t(first) * 16 + uint64_t(step) * 16 * j; }
  uint32_t first, step;
};

// Adds vectors of `count` rows, those before `end`, times their weights, to sums; `rows` tells which. All of up to ROWS of them are read
// before any is used.
template <typename FORMAT, bool MANY, uint32_t ROWS, uint32_t SIDE, typename GET>
__device__ void sum_rows(const Args &args, float (&sum)[SIDE][8], Side side, uint32_t end, uint32_t count, GET rows) {
  for (uint32_t low = 0; low < count; low += ROWS) {
    uint4 held[ROWS][SIDE];
    float weight[ROWS];
#pragma unroll
    for (uint32_t i = 0; i < ROWS; ++i) {
      if (low + i >= count) continue;
      uint32_t row;
      rows(low + i, row, weight[i]);
#pragma unroll
      for (uint32_t j = 0; j < SIDE; ++j)
        if (side.at(j) < end) held[i][j] = load_bulk<MANY>(args.y + uint64_t(row) * args.values * 2 + side.bytes(j));
    }
#pragma unroll
    for (uint32_t i = 0; i < ROWS; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < SIDE; ++j) {
        if (low + i >= count || side.at(j) >= end) continue;
        float values[8];
        unpack<FORMAT>(values, held[i][j]);
#pragma unroll
        for (uint32_t k = 0; k < 8; ++k) sum[j][k] = __fadd_rn(sum[j][k], __fmul_rn(weight[i], values[k]));
      }
    }
  }
}

// Of rows that a block has kept.
__device__ auto kept(const Rows &rows) {
  return [&rows](uint32_t n, uint32_t &row, float &weight) { row = rows.row[n], weight = rows.weight[n]; };
}

// Vectors of tokens, cut into parts for different blocks where there are fewer tokens than blocks: so they are sooner done.
class Cut {
 public:
  __device__ Cut(uint32_t tokens, uint32_t blocks, uint32_t vectors) : vectors(vectors), shift(doublings(tokens, blocks, MOST)) {
    items = tokens << shift;
    len = (vectors + (1u << shift) - 1) >> shift;
  }
  // The token that part number `item` is of, and the vectors that it is.
  __device__ uint32_t token(uint32_t item) const { return item >> shift; }
  __device__ uint32_t first(uint32_t item) const { return (item & ((1u << shift) - 1)) * len; }
  __device__ uint32_t end(uint32_t item) const { return min(first(item) + len, vectors); }
  uint32_t items;

 private:
  static constexpr uint32_t MOST = 3;
  static_assert(1u << MOST == IMMWIRE_MOE_PARTS, "so many times in two");
  uint32_t vectors, len, shift;
};

// Sends, for each of the tokens received that are cut, the weighted sum of its rows.
template <typename FORMAT, bool MANY>
__device__ void send_results(const Args &args, Fixed &fixed, Share share, const Cut &pairs, uint32_t epoch, uint32_t present) {
  const uint32_t warps = blockDim.x / WARP;
  uint32_t turn = 0;
  for (uint32_t first = share.index; first < pairs.items; first += share.of * BATCH, turn ^= 1) {
    for (uint32_t i = threadIdx.x / WARP; i < BATCH; i += warps) {
      const uint32_t item = first + i * share.of;
      if (item >= pairs.items) continue;
      const Planned planned(args, pairs.token(item), epoch);
      planned.keep_rows(fixed.rows[turn][i], planned.row < args.rows);
      planned.keep_token(fixed, turn, i);
    }
    __syncthreads(); // One for each batch is enough: the next one is kept elsewhere.
    for (uint32_t i = 0; i < BATCH; ++i) {
      const uint32_t item = first + i * share.of;
      if (item >= pairs.items) break;
      const uint32_t source = fixed.source[turn][i], end = pairs.end(item);
      if (!(present >> source & 1)) continue;
      const uint64_t to = result_slot(args, source, args.rank, fixed.token[turn][i], 0);
      // Two vectors side by side.
      for (uint32_t v = pairs.first(item) + threadIdx.x; v < end; v += 2 * blockDim.x) {
        const Side side = {v, blockDim.x};
        float sum[2][8] = {};
        sum_rows<FORMAT, MANY, BATCH>(args, sum, side, end, fixed.rows[turn][i].count, kept(fixed.rows[turn][i]));
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j)
          if (side.at(j) < end) store_shared_vector(to + side.bytes(j), pack<FORMAT>(sum[j]));
      }
    }
  }
}

// Adds up vectors of a token: what those of `ranks` have sent, ACROSS of them awaited side by side, and where this rank's is not sent,
// what it has itself; and keeps the sums, if there is memory for the token's. `is_last`: then all ranks have been heard of.
template <typename FORMAT, bool MANY, uint32_t ACROSS, uint32_t SIDE>
__device__ void sum_token(const Args &args, uint32_t token, uint32_t ranks, Side side, bool has_own, const uint4 (&own)[SIDE],
                          uint32_t epoch, Patience &patience, bool is_last) {
  const uint32_t vectors = args.values / 8, kept = token < args.tokens ? vectors : 0;
  const uint64_t to = args.out + uint64_t(token) * args.values * 2;
  float sum[SIDE][8] = {};
  if (args.flags & IMMWIRE_MOE_ACCUMULATE) {
#pragma unroll
    for (uint32_t j = 0; j < SIDE; ++j)
      if (side.at(j) < kept) unpack<FORMAT>(sum[j], load_vector(to + side.bytes(j)));
  }
  for (uint32_t rest = ranks; rest != 0;) {
    uint4 held[ACROSS * SIDE];
    uint64_t from[ACROSS * SIDE];
    uint32_t rank[ACROSS], wanted = 0, has = 0;
#pragma unroll
    for (uint32_t i = 0; i < ACROSS; ++i) {
      rank[i] = rest != 0 ? __ffs(rest) - 1 : args.rank;
      const uint64_t slot = result_slot(args, args.rank, rank[i], token, 0);
#pragma unroll
      for (uint32_t j = 0; j < SIDE; ++j) {
        const uint32_t bit = (rest != 0 && side.at(j) < vectors ? 1u : 0u) << (i * SIDE + j);
        from[i * SIDE + j] = slot + side.bytes(j);
        has |= bit;
        if (has_own && rank[i] == args.rank) held[i * SIDE + j] = own[j];
        else wanted |= bit;
      }
      rest &= rest - 1;
    }
    const uint32_t lost = await<Vector>(held, from, wanted, patience);
    if (is_last && rest == 0) machine::let_next_begin();
#pragma unroll
    for (uint32_t i = 0; i < ACROSS; ++i) {
      if ((lost >> (i * SIDE) & ((1u << SIDE) - 1)) != 0) {
        atomicOr(&control_of(args)->missed, 1u << rank[i]);
        put_down(report_of(args)->late_results[rank[i]], epoch);
      }
#pragma unroll
      for (uint32_t j = 0; j < SIDE; ++j) {
        if (!((has & ~lost) >> (i * SIDE + j) & 1)) continue;
        if (wanted >> (i * SIDE + j) & 1) store_bulk<MANY>(from[i * SIDE + j], vector_of(POISON));
        float values[8];
        unpack<FORMAT>(values, held[i * SIDE + j]);
#pragma unroll
        for (uint32_t k = 0; k < 8; ++k) sum[j][k] = __fadd_rn(sum[j][k], values[k]);
      }
    }
  }
#pragma unroll
  for (uint32_t j = 0; j < SIDE; ++j)
    if (side.at(j) < kept) store_bulk<MANY>(to + side.bytes(j), pack<FORMAT>(sum[j]));
}

// How many tokens of this rank's have results: all that it sent, also those whose sums there is no memory for. They are awaited, too, so that
// nothing lies in their slots in the next round.
__device__ uint32_t tokens_to_sum(const Args &args, uint32_t epoch) {
  const uint32_t sent = control_of(args)->tokens;
  if (sent > args.tokens && blockIdx.x == 0 && threadIdx.x == 0) put_down(report_of(args)->tokens_left_out, epoch);
  return sent;
}

// Adds up what ranks sent for this rank's tokens.
template <typename FORMAT>
__device__ void receive_results(const Args &args, uint32_t tokens, uint32_t epoch, uint32_t present, Patience &patience) {
  const Cut cut(tokens, gridDim.x, args.values / 8);
  for (uint32_t item = blockIdx.x; item < cut.items; item += gridDim.x) {
    const uint32_t token = cut.token(item), ranks = masks_of(args)[token] & present;
    // The first thread has a vector of each item that has any.
    const bool is_last = threadIdx.x == 0 && item + gridDim.x >= cut.items;
    for (uint32_t v = cut.first(item) + threadIdx.x; v < cut.end(item); v += blockDim.x)
      sum_token<FORMAT, false, BATCH, 1>(args, token, ranks, {v, WARP}, false, {}, epoch, patience, is_last);
  }
}

// Sends the results of all rows of each token received, in the order of its choices. Zeros for rows that there was no room for.
template <typename FORMAT>
__device__ void send_each_result(const Args &args, Fixed &fixed, uint32_t epoch, uint32_t present) {
  const uint32_t pairs = control_of(args)->pairs, vectors = args.values / 8, warps = blockDim.x / WARP;
  uint32_t turn = 0;
  for (uint32_t first = blockIdx.x; first < pairs; first += gridDim.x * BATCH, turn ^= 1) {
    for (uint32_t i = threadIdx.x / WARP; i < BATCH; i += warps) {
      const uint32_t n = first + i * gridDim.x;
      if (n >= pairs) continue;
      const Planned planned(args, n, epoch);
      planned.keep_rows(fixed.rows[turn][i], planned.row != IMMWIRE_MOE_NO_ROW);
      planned.keep_token(fixed, turn, i);
    }
    __syncthreads(); // One for each batch is enough: the next one is kept elsewhere.
    for (uint32_t i = 0; i < BATCH; ++i) {
      if (first + i * gridDim.x >= pairs) break;
      const uint32_t source = fixed.source[turn][i], token = fixed.token[turn][i];
      const Rows &rows = fixed.rows[turn][i];
      if (!(present >> source & 1)) continue;
      for (uint32_t v = threadIdx.x; v < vectors; v += 2 * blockDim.x) {
        const uint32_t at[2] = {v, v + blockDim.x};
        for (uint32_t low = 0; low < rows.count; low += BATCH) {
          uint4 held[2][BATCH];
#pragma unroll
          for (uint32_t j = 0; j < 2 * BATCH; ++j) {
            const uint32_t n = low + j % BATCH, of = at[j / BATCH];
            held[j / BATCH][j % BATCH] = vector_of(0);
            if (n < rows.count && of < vectors && rows.row[n] < args.rows)
              held[j / BATCH][j % BATCH] = load_vector(args.y + uint64_t(fixed.rows[turn][i].row[n]) * args.values * 2 + 16 * of);
          }
#pragma unroll
          for (uint32_t j = 0; j < 2 * BATCH; ++j) {
            const uint32_t n = low + j % BATCH, of = at[j / BATCH];
            if (n >= rows.count || of >= vectors) continue;
            // There and back nothing changes but what is no number, which might be poison.
            float values[8];
            unpack<FORMAT>(values, held[j / BATCH][j % BATCH]);
            store_shared_vector(result_slot(args, source, args.rank, token, n) + 16 * of, pack<FORMAT>(values));
          }
        }
      }
    }
  }
}

// Adds up the results of this rank's tokens' choices, times their weights, in their order; and keeps the sums of as many tokens as there is memory for.
template <typename FORMAT>
__device__ void receive_each_result(const Args &args, Fixed &fixed, uint32_t tokens, uint32_t epoch, uint32_t present, Patience &patience) {
  immwire_moe_control &control = *control_of(args);
  const uint32_t vectors = args.values / 8, lane = threadIdx.x % WARP;
  const uint64_t table = table_of(args, args.rank, args.rank, control.parity);
  uint32_t turn = 0;
  __syncthreads(); // Who sent may read those words still.
  for (uint32_t token = blockIdx.x; token < tokens; token += gridDim.x, turn ^= 1) {
    // A warp finds out what is to come. Ranks and weights lie where rows and theirs do otherwise.
    if (threadIdx.x < WARP) {
      uint32_t expert = NO_EXPERT, rank = 0, weight = 0;
      if (lane < args.top_k) {
        const uint4 two = load_shared_vector(table + 16 * (1 + uint64_t(token) * vectors_per_token(args) + lane / 2));
        // Blocks that found no room to send from have said nothing in this round.
        if (two.w == epoch) expert = lane % 2 == 0 ? two.z & 0xffff : two.z >> 16;
        weight = lane % 2 == 0 ? two.x : two.y;
      }
      if (expert != NO_EXPERT) rank = rank_of(args, expert);
      const bool comes = expert != NO_EXPERT && (present >> rank & 1);
      const uint32_t coming = __ballot_sync(ALL_LANES, comes), place = __popc(coming & ranks_below(lane));
      const uint32_t same = __match_any_sync(ALL_LANES, comes ? rank : IMMWIRE_MOE_MAX_RANKS);
      if (comes) {
        fixed.nth[turn][place] = uint8_t(__popc(same & ranks_below(lane)));
        fixed.rows[turn][0].row[place] = rank;
        fixed.rows[turn][0].weight[place] = __uint_as_float(weight);
      }
      if (lane == 0) fixed.rows[turn][0].count = __popc(coming);
    }
    __syncthreads(); // One for each token is enough: the next one is kept elsewhere.
    const Rows &rows = fixed.rows[turn][0];
    const bool is_last = threadIdx.x == 0 && token + gridDim.x >= tokens, is_kept = token < args.tokens;
    for (uint32_t v = threadIdx.x; v < vectors; v += blockDim.x) {
      const uint64_t to = args.out + (uint64_t(token) * args.values + 8 * v) * 2;
      float sum[8] = {};
      if (is_kept && args.flags & IMMWIRE_MOE_ACCUMULATE) unpack<FORMAT>(sum, load_vector(to));
      for (uint32_t low = 0; low < rows.count; low += BATCH) {
        uint4 held[BATCH];
        uint64_t from[BATCH];
        uint32_t wanted = 0;
#pragma unroll
        for (uint32_t i = 0; i < BATCH; ++i) {
          const uint32_t n = low + i < rows.count ? low + i : low;
          from[i] = result_slot(args, args.rank, rows.row[n], token, fixed.nth[turn][n]) + 16 * v;
          wanted |= (low + i < rows.count ? 1u : 0u) << i;
        }
        const uint32_t lost = await<Vector>(held, from, wanted, patience);
        if (is_last && low + BATCH >= rows.count) machine::let_next_begin();
#pragma unroll
        for (uint32_t i = 0; i < BATCH; ++i) {
          if (!(wanted >> i & 1)) continue;
          if (lost >> i & 1) {
            const uint32_t rank = rows.row[low + i];
            atomicOr(&control.missed, 1u << rank);
            put_down(report_of(args)->late_results[rank], epoch);
            continue;
          }
          store_vector(from[i], vector_of(POISON));
          const float weight = rows.weight[low + i];
          float values[8];
          unpack<FORMAT>(values, held[i]);
#pragma unroll
          for (uint32_t k = 0; k < 8; ++k) sum[k] = __fadd_rn(sum[k], __fmul_rn(weight, values[k]));
        }
      }
      if (is_kept) store_vector(to, pack<FORMAT>(sum));
    }
  }
}

// Prepares the next round, whose dispatch reads these; no block of this launch does.
__device__ void end_round(immwire_moe_control &control, uint32_t epoch) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  control.next_epoch = epoch == IMMWIRE_MOE_LAST_EPOCH ? 1 : epoch + 1;
  control.next_parity = control.parity ^ 1;
  control.left_out = control.absent;
  control.suspects = control.unheard = 0;
  control.gathered = control.planned = control.received = control.parts = 0;
}

template <typename FORMAT, bool EXACT>
__device__ void combine_few(const Args &args, Fixed &fixed) {
  immwire_moe_control &control = *control_of(args);
  const Share all = {blockIdx.x, gridDim.x};
  Patience patience(args, Patience::FOR_RESULTS);
  const uint32_t epoch = control.epoch, present = ranks_below(args.world) & ~(control.absent | control.left_out | control.missed);
  if (args.flags & IMMWIRE_MOE_SEND) {
    if constexpr (EXACT) send_each_result<FORMAT>(args, fixed, epoch, present);
    else send_results<FORMAT, false>(args, fixed, all, Cut(control.pairs, gridDim.x, args.values / 8), epoch, present);
  }
  if (!(args.flags & IMMWIRE_MOE_RECEIVE)) return;
  const uint32_t tokens = tokens_to_sum(args, epoch);
  end_round(control, epoch);
  if constexpr (EXACT) receive_each_result<FORMAT>(args, fixed, tokens, epoch, present, patience);
  else receive_results<FORMAT>(args, tokens, epoch, present, patience);
}

template <typename FORMAT, bool EXACT>
__device__ void combine(const Args &args) {
  MACHINE_SHARED(shared);
  machine::bring(args);
  machine::follow();
  combine_few<FORMAT, EXACT>(args, *reinterpret_cast<Fixed *>(shared));
}

// ---- many tokens ----
//
// With thousands of tokens, no block can look at all choices, and a round must not first send and then receive. So some blocks
// send, and others receive meanwhile: not warps of one block, for what waits for the wire holds up all that its SM does. Each block
// that receives counts the choices of its own chunks, up to IMMWIRE_MOE_CHUNK tokens of one source; from the counts of all it works
// out where the rows of its chunks begin. That needs a barrier among those blocks, after which they also know alike whose tables count,
// and another when all have planned. Then every warp takes the next token, whoever's it is; those of blocks that have sent all they have,
// too. What is on the wire is the same as with few tokens, but for keys (`Raw`): ranks agree on which way a round goes, as it goes by their shape and by
// what they tell each other.

constexpr uint32_t CHUNK_WORDS = IMMWIRE_MOE_CHUNK / 32;
constexpr uint32_t COUNTS = 8;   // Words of counts that a thread reads at a time.
constexpr uint32_t COUNTS_IN_WORD = 4;
static_assert(IMMWIRE_MOE_CHUNK < 256, "a count is a byte");
constexpr uint32_t LOOKED_UP = 4; // Tokens whose choices a warp reads at a time.
constexpr uint32_t GAVE_UP = 0x80000000u; // Of the number of blocks that have counted: somebody does not wait for the others any more.
constexpr uint32_t ALL_RANKS = 0xffffffffu;
constexpr uint32_t SUMS = 4; // Vectors of a token that a lane sums side by side,
constexpr uint32_t OWN = 2;  // and of how many rows.

// Which tokens are in a chunk. Chunks are dealt to blocks by number of token first and source then, the next rank's first.
struct Chunk {
  __device__ Chunk(const Args &args, uint32_t number) : number(number), turn(number % args.world) {
    const uint32_t next = args.rank + 1 + turn;
    source = next < args.world ? next : next - args.world;
    first = number / args.world * args.chunk_tokens;
  }
  uint32_t number, turn, source, first;
};

// The words of shared memory of a block that receives many tokens.
struct Many {
  __device__ Many(const Args &args, Share share, uint32_t *words)
      : share(share), local(args.firsts[args.rank + 1] - args.firsts[args.rank]), per_source((args.max_tokens + args.chunk_tokens - 1) / args.chunk_tokens),
        chunks(args.world * per_source), mine((chunks + share.of - 1) / share.of), words((local + COUNTS_IN_WORD - 1) / COUNTS_IN_WORD) {
    missing = words, absent = words + 1, total = words + 2, others = words + 3;
    first_pair = words + IMMWIRE_MOE_MANY_WORDS;
    here = first_pair + mine;
    offsets = here + mine * CHUNK_WORDS;
    totals = offsets + local + 1;
    starts = totals + local;
    chosen = starts + mine * local;
    pairs = chosen + mine * local * CHUNK_WORDS;
    sums = pairs + chunks;
  }
  // Where the counts of a chunk are: of each expert here a byte, and then of tokens.
  __device__ uint64_t counts_at(const Args &args, uint32_t number) const { return args.scratch + 4 * uint64_t(number) * (words + 1); }
  // The `m`-th chunk of this block's.
  __device__ uint32_t number(uint32_t m) const { return share.index + m * share.of; }

  Share share;

  uint32_t local, per_source, chunks, mine, words;
  uint32_t *missing, *absent, *total, *others;
  uint32_t *first_pair; // [mine]
  uint32_t *here;       // [mine][CHUNK_WORDS]: tokens that are for here
  uint32_t *offsets;    // [local + 1]: where experts' rows begin
  uint32_t *totals;     // [local]: how many they are
  uint32_t *starts;     // [mine][local]: how many come before the chunk's
  uint32_t *chosen;     // [mine][local][CHUNK_WORDS]: tokens that chose the expert
  uint32_t *pairs;      // [chunks]: how many tokens of each are for here
  uint32_t *sums;       // [groups][words][2]: of experts two by two; later the rows of a token for each warp
};

// What the warps of a launch share out, one after the other. Each asks for its next one before it has done this one.
class Turns {
 public:
  __device__ explicit Turns(uint32_t &next) : next(&next) { ask(); }
  __device__ uint32_t take() {
    const uint32_t number = __shfl_sync(ALL_LANES, asked, 0);
    ask();
    return number;
  }

 private:
  __device__ void ask() { asked = threadIdx.x % WARP == 0 ? atomicAdd(next, 1u) : 0; }
  uint32_t *next, asked;
};

__device__ uint32_t bits_of(const uint32_t *words) {
  uint32_t count = 0;
  for (uint32_t w = 0; w < CHUNK_WORDS; ++w) count += __popc(words[w]);
  return count;
}
__device__ uint32_t bits_before(const uint32_t *words, uint32_t bit) {
  uint32_t count = 0;
  for (uint32_t w = 0; w < bit / 32; ++w) count += __popc(words[w]);
  return count + __popc(words[bit / 32] & ((1u << bit % 32) - 1));
}

// Counts the choices of this block's chunks, and tells the other blocks. Returns the ranks whose tables do not count, the same to all blocks.
__device__ uint32_t count_chunks(const Args &args, Many &many, uint32_t epoch, uint32_t parity, uint32_t present, Patience &patience) {
  immwire_moe_control &control = *control_of(args);
  const uint32_t each = vectors_per_token(args), first = args.firsts[args.rank], local = many.local;
  for (uint32_t i = threadIdx.x; i < many.mine * CHUNK_WORDS; i += blockDim.x) many.here[i] = 0;
  for (uint32_t i = threadIdx.x; i < many.mine * local * CHUNK_WORDS; i += blockDim.x) many.chosen[i] = 0;
  if (threadIdx.x == 0) *many.missing = 0;
  __syncthreads();
  uint32_t missing = 0;
  for (uint32_t m = 0; m < many.mine; ++m) {
    if (many.number(m) >= many.chunks) break;
    const Chunk chunk(args, many.number(m));
    if (!(present >> chunk.source & 1)) continue;
    const uint64_t table = table_of(args, args.rank, chunk.source, parity);
    uint4 head;
    for (;;) {
      head = load_shared_vector(table);
      if (head.z == epoch && head.w == epoch) break;
      if (patience.is_over()) {
        missing |= 1u << chunk.source;
        head.x = 0;
        break;
      }
    }
    const uint32_t tokens = min(head.x, args.max_tokens);
    const uint32_t count = chunk.first < tokens ? min(tokens - chunk.first, args.chunk_tokens) : 0;
    for (uint32_t v = threadIdx.x; v < count * each; v += blockDim.x) {
      uint4 held;
      for (;;) {
        held = load_shared_vector(table + 16 * (1 + uint64_t(chunk.first) * each + v));
        if (held.w == epoch) break;
        if (patience.is_over()) {
          missing |= 1u << chunk.source;
          held.z = NO_EXPERT | NO_EXPERT << 16;
          break;
        }
      }
      const uint32_t token = v / each, bit = 1u << token % 32;
      for (uint32_t shift = 0; shift < 32; shift += 16) {
        const uint32_t expert = (held.z >> shift & 0xffff) - first;
        if (expert >= local) continue;
        atomicOr(&many.chosen[(m * local + expert) * CHUNK_WORDS + token / 32], bit);
        atomicOr(&many.here[m * CHUNK_WORDS + token / 32], bit);
      }
    }
  }
  if (missing != 0) atomicOr(many.missing, missing);
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < many.mine * (many.words + 1); i += blockDim.x) {
    const uint32_t m = i / (many.words + 1), word = i - m * (many.words + 1), end = min((word + 1) * COUNTS_IN_WORD, local);
    if (many.number(m) >= many.chunks) break;
    uint32_t counts = word < many.words ? 0 : bits_of(many.here + m * CHUNK_WORDS);
    for (uint32_t expert = word * COUNTS_IN_WORD; expert < end; ++expert)
      counts |= bits_of(many.chosen + (m * local + expert) * CHUNK_WORDS) << expert % COUNTS_IN_WORD * 8;
    reinterpret_cast<uint32_t *>(many.counts_at(args, many.number(m)))[word] = counts;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    // Who finds all blocks here finds their counts, and whom they miss: in a word that nobody else writes to, as blocks that send do to `suspects`.
    if (*many.missing != 0) atomicOr(&control.unheard, *many.missing);
    __threadfence();
    atomicAdd(&control.gathered, 1u);
    // A block that finds no room on the GPU never comes. Then nobody's table counts, for all blocks alike: once all are here, nobody can
    // give up any more, and once somebody has, all find that.
    Patience for_blocks(args, Patience::FOR_BLOCKS);
    uint32_t gathered;
    for (;;) {
      gathered = load_shared_word(reinterpret_cast<uint64_t>(&control.gathered));
      if (gathered >= many.share.of) break;
      if (for_blocks.is_over()) atomicCAS(&control.gathered, gathered, gathered | GAVE_UP);
    }
    __threadfence();
    *many.absent = gathered & GAVE_UP ? ALL_RANKS : load_shared_word(reinterpret_cast<uint64_t>(&control.unheard));
  }
  __syncthreads();
  return *many.absent;
}

// Works out where rows are, and makes the plan of this block's chunks.
__device__ void plan_chunks(const Args &args, Many &many, uint32_t epoch, uint32_t parity, uint32_t present) {
  immwire_moe_control &control = *control_of(args);
  immwire_moe_report &report = *report_of(args);
  const uint32_t warp = threadIdx.x / WARP, warps = blockDim.x / WARP, lane = threadIdx.x % WARP, local = many.local;
  const uint32_t words = many.words, groups = words == 0 || words > blockDim.x ? 1 : blockDim.x / words, len = (many.chunks + groups - 1) / groups;
  // Chunks by source and then by token, as rows lie.
  auto number_at = [&](uint32_t place, bool &is_there) {
    const uint32_t source = place / many.per_source, turn = source > args.rank ? source - args.rank - 1 : source + args.world - args.rank - 1;
    is_there = place < many.chunks && (present >> source & 1);
    return (place - source * many.per_source) * args.world + turn;
  };
  auto place_of = [&](uint32_t m) {
    const uint32_t number = many.number(m);
    return number < many.chunks ? Chunk(args, number).source * many.per_source + number / args.world : many.chunks;
  };
  auto pairs_at = [&](uint32_t number) {
    return number < many.chunks && (present >> Chunk(args, number).source & 1) ? load_shared_word(many.counts_at(args, number) + 4 * words) : 0;
  };
  // Asked for here, and waited for with the rest.
  const uint32_t first_pairs = pairs_at(threadIdx.x);
  for (uint32_t i = threadIdx.x; i < groups * words; i += blockDim.x) {
    const uint32_t group = i / words, word = i - group * words, end = min((group + 1) * len, many.chunks);
    uint32_t even = 0, odd = 0; // Halves of words: no expert has more tokens.
    for (uint32_t start = group * len; start < end; start += COUNTS) {
      uint32_t counts[COUNTS];
#pragma unroll
      for (uint32_t k = 0; k < COUNTS; ++k) {
        bool is_there;
        const uint32_t number = number_at(start + k, is_there);
        counts[k] = is_there && start + k < end ? load_shared_word(many.counts_at(args, number) + 4 * word) : 0;
      }
      for (uint32_t m = 0; m < many.mine; ++m) {
        const uint32_t place = place_of(m) - start;
        if (place >= COUNTS || start + place >= end) continue;
        uint32_t even_before = even, odd_before = odd;
#pragma unroll
        for (uint32_t k = 0; k < COUNTS; ++k)
          if (k < place) even_before += counts[k] & 0xff00ff, odd_before += counts[k] >> 8 & 0xff00ff;
        for (uint32_t k = 0; k < COUNTS_IN_WORD; ++k) {
          const uint32_t expert = word * COUNTS_IN_WORD + k;
          if (expert < local) many.starts[m * local + expert] = (k % 2 == 0 ? even_before : odd_before) >> k / 2 * 16 & 0xffff;
        }
      }
#pragma unroll
      for (uint32_t k = 0; k < COUNTS; ++k) even += counts[k] & 0xff00ff, odd += counts[k] >> 8 & 0xff00ff;
    }
    many.sums[2 * i] = even, many.sums[2 * i + 1] = odd;
  }
  if (threadIdx.x < many.chunks) many.pairs[threadIdx.x] = first_pairs;
  for (uint32_t i = threadIdx.x + blockDim.x; i < many.chunks; i += blockDim.x) many.pairs[i] = pairs_at(i);
  __syncthreads();
  for (uint32_t expert = threadIdx.x; expert < local; expert += blockDim.x) {
    const uint32_t word = expert / COUNTS_IN_WORD, k = expert % COUNTS_IN_WORD;
    auto sum_of = [&](uint32_t group) { return many.sums[2 * (group * words + word) + k % 2] >> k / 2 * 16 & 0xffff; };
    for (uint32_t m = 0; m < many.mine; ++m) {
      if (many.number(m) >= many.chunks) break;
      const uint32_t own = place_of(m) / len;
      uint32_t before = 0;
      for (uint32_t group = 0; group < own; ++group) before += sum_of(group);
      many.starts[m * local + expert] += before;
    }
    uint32_t sum = 0;
    for (uint32_t group = 0; group < groups; ++group) sum += sum_of(group);
    many.totals[expert] = sum;
  }
  // Pairs are numbered as chunks are dealt, but this rank's own come last.
  if (warp == warps - 1) {
    const uint32_t own_from = many.chunks - many.per_source;
    auto chunk_at = [&](uint32_t i) {
      if (i >= own_from) return (i - own_from) * args.world + args.world - 1;
      return i / (args.world - 1) * args.world + i % (args.world - 1);
    };
    const uint32_t all = prefix(many.chunks, [&](uint32_t i) { return many.pairs[chunk_at(i)]; }, [&](uint32_t i, uint32_t sum) {
      const uint32_t number = chunk_at(i);
      if (number % many.share.of == many.share.index) many.first_pair[number / many.share.of] = sum;
      if (i == own_from) *many.others = sum;
    });
    if (lane == 0) *many.total = all;
  }
  __syncthreads();
  if (warp == 0) {
    const uint32_t all = prefix(local, [&](uint32_t i) { return (many.totals[i] + args.padding - 1) / args.padding * args.padding; },
                                [&](uint32_t i, uint32_t sum) { many.offsets[i] = sum; });
    if (lane == 0) many.offsets[local] = all;
  }
  __syncthreads();
  if (many.share.index == 0) {
    uint32_t *counts = reinterpret_cast<uint32_t *>(args.counts), *offsets = reinterpret_cast<uint32_t *>(args.offsets);
    for (uint32_t e = threadIdx.x; e <= local; e += blockDim.x) {
      if (e < local) counts[e] = many.totals[e];
      offsets[e] = many.offsets[e];
    }
    if (threadIdx.x == 0) control.pairs = *many.total, control.of_others = *many.others;
  }
  for (uint32_t m = 0; m < many.mine; ++m) {
    if (many.number(m) >= many.chunks) break;
    const Chunk chunk(args, many.number(m));
    if (!(present >> chunk.source & 1)) continue;
    const uint32_t *here = many.here + m * CHUNK_WORDS;
    // Up to so many tokens of a warp are looked up at once.
    for (uint32_t low = warp; low < args.chunk_tokens; low += LOOKED_UP * warps) {
      uint4 two[LOOKED_UP];
#pragma unroll
      for (uint32_t k = 0; k < LOOKED_UP; ++k) {
        const uint32_t i = low + k * warps;
        if (i < args.chunk_tokens && (here[i / 32] >> i % 32 & 1) && lane < args.top_k)
          two[k] = load_shared_vector(table_of(args, args.rank, chunk.source, parity) +
                                      16 * (1 + uint64_t(chunk.first + i) * vectors_per_token(args) + lane / 2));
      }
#pragma unroll
      for (uint32_t k = 0; k < LOOKED_UP; ++k) {
        const uint32_t i = low + k * warps;
        if (i >= args.chunk_tokens || !(here[i / 32] >> i % 32 & 1)) continue;
        const uint32_t n = many.first_pair[m] + bits_before(here, i);
        const uint64_t plan = args.plan + uint64_t(n) * args.plan_stride;
        const uint32_t token = chunk.first + i;
        if (lane < args.top_k) {
          const uint32_t mine = (lane % 2 == 0 ? two[k].z & 0xffff : two[k].z >> 16) - args.firsts[args.rank];
          uint32_t row = IMMWIRE_MOE_NO_ROW;
          if (mine < local)
            row = many.offsets[mine] + many.starts[m * local + mine] + bits_before(many.chosen + (m * local + mine) * CHUNK_WORDS, i);
          if (row != IMMWIRE_MOE_NO_ROW && row >= args.rows) {
            put_down(report.rows_left_out, epoch);
            row = IMMWIRE_MOE_LEFT_OUT;
          }
          if (args.slots != 0 && row < args.rows) reinterpret_cast<uint32_t *>(args.slots)[row] = slot_of(args, chunk.source, token);
          uint32_t *rows = reinterpret_cast<uint32_t *>(plan + sizeof(immwire_moe_pair));
          rows[lane] = row;
          rows[args.top_k + lane] = lane % 2 == 0 ? two[k].x : two[k].y;
        }
        if (lane == 0) {
          *reinterpret_cast<immwire_moe_pair *>(plan) = {chunk.source, token, {0, 0}}; // For all blocks.
          if (chunk.source == args.rank) own_pairs_of(args)[token] = n;
        }
      }
    }
  }
}

// One warp: a token that this block or another has planned, its rows listed.
__device__ Pair planned_pair(const Args &args, uint32_t n, uint32_t *rows) {
  const uint32_t lane = threadIdx.x % WARP;
  const uint64_t plan = args.plan + uint64_t(n) * args.plan_stride;
  const uint4 pair = load_shared_vector(plan);
  const uint32_t row = lane < args.top_k ? load_shared_word(plan + sizeof(immwire_moe_pair) + 4 * lane) : IMMWIRE_MOE_NO_ROW;
  return {pair.x, pair.y, list_rows(args, pair.x, pair.y, row, rows)};
}

// One warp: takes a token to its rows.
template <typename PAYLOAD>
__device__ void receive_pair(const Args &args, uint32_t n, uint32_t *rows, uint32_t epoch, Patience &patience) {
  const Pair pair = planned_pair(args, n, rows);
  const Part all(0, 0, args.token_bytes / 16);
  Looked<AHEAD> now(slot_at(args, pair), all);
  take_token<PAYLOAD, true>(args, pair, rows, all, now, epoch, patience);
  if (PAYLOAD::KEYED) forget_keys(args, pair);
  machine::meet(); // Nobody looks at these rows any more.
}

// Waits until all of so many blocks have planned; by a whole block. Returns whether they have: if not, they have given up, or never will.
__device__ bool await_plans(const Args &args, uint32_t blocks, uint32_t *word) {
  immwire_moe_control &control = *control_of(args);
  if (threadIdx.x == 0) {
    Patience patience(args, Patience::FOR_BLOCKS);
    *word = 1;
    while (load_shared_word(reinterpret_cast<uint64_t>(&control.planned)) < blocks) {
      if (!(load_shared_word(reinterpret_cast<uint64_t>(&control.gathered)) & GAVE_UP) && !patience.is_over()) continue;
      *word = 0;
      break;
    }
    __threadfence();
  }
  __syncthreads();
  return *word != 0;
}

// One warp: takes a token of this rank's own, which was not sent, to its rows.
template <typename PAYLOAD>
__device__ void take_own(const Args &args, uint32_t n, uint32_t *rows) {
  const Pair pair = planned_pair(args, n, rows);
  PAYLOAD::send(args, pair.token, WarpCrew(), typename PAYLOAD::Ahead(args, pair.token, WarpCrew()), OwnRows{args, rows, pair.count});
  machine::meet(); // Nobody looks at these rows any more.
}

// Whether a rank's own tokens are at their places once they are sent: where each has one only, which no choice of another decides.
__device__ bool are_left_here(const Args &args, bool is_direct) { return is_direct && args.slots != 0; }

// One warp after the other, of all blocks: take tokens to their rows; this rank's own first, which nobody has to wait for. `words`: one
// for each thread.
template <typename PAYLOAD>
__device__ void receive_pairs(const Args &args, uint32_t epoch, bool is_direct, uint32_t *words) {
  immwire_moe_control &control = *control_of(args);
  Patience patience(args, Patience::FOR_TOKENS);
  const uint32_t others = load_shared_word(reinterpret_cast<uint64_t>(&control.of_others));
  const uint32_t pairs = are_left_here(args, is_direct) ? others : load_shared_word(reinterpret_cast<uint64_t>(&control.pairs));
  const uint32_t own = pairs - others;
  uint32_t *rows = words + threadIdx.x / WARP * WARP;
  Turns turns(control.received);
  for (uint32_t turn = turns.take(); turn < pairs; turn = turns.take()) {
    if (turn >= own) receive_pair<PAYLOAD>(args, turn - own, rows, epoch, patience);
    else if (is_direct) take_own<PAYLOAD>(args, others + turn, rows);
    else receive_pair<PAYLOAD>(args, others + turn, rows, epoch, patience);
  }
}

// One warp: sends a token, or vectors of it.
template <typename PAYLOAD>
__device__ void send_token(const Args &args, uint32_t token, uint32_t first, uint32_t end, uint32_t present, bool is_direct) {
  bool is_wrong = false; // Who sends the choice says so.
  const uint32_t all = ranks_of(args, expert_of(args, Choice(args, token), is_wrong), present);
  const uint32_t goes_to = all & ~(is_direct ? 1u << args.rank : 0);
  const bool is_left = are_left_here(args, is_direct) && goes_to != all;
  if (goes_to == 0 && !is_left) return;
  const auto ranks = [&] { return Ranks(goes_to, (args.rank + token) % args.world, args.world); };
  const uint64_t offset = token_offset(args, args.rank, token);
  const uint32_t row = is_left ? slot_of(args, args.rank, token) : IMMWIRE_MOE_NO_ROW;
  const typename PAYLOAD::Ahead ahead(args, token, WarpCrew(), true, first);
  PAYLOAD::send_part(args, token, WarpCrew(), ahead, SlotsAndOwn<decltype(ranks)>(args, offset, ranks, row), first, end);
}

// Sends the tokens of a share. Warps are dealt as many as there are for all of them, and take turns with the rest, a token and a half or less
// for each, part by part: SMs that share a part of the GPU's way out are slower than others.
template <typename PAYLOAD>
__device__ void send_tokens_of(const Args &args, Dealt dealt, uint32_t tokens, uint32_t present, bool is_direct) {
  const uint32_t half = dealt.step / 2, until = tokens > half ? (tokens - half) / dealt.step * dealt.step : 0;
  const uint32_t vectors = args.token_bytes / 16, len = PAYLOAD::part_vectors(args), parts = (vectors + len - 1) / len;
  for (uint32_t token = dealt.first; token < until; token += dealt.step) send_token<PAYLOAD>(args, token, 0, vectors, present, is_direct);
  Turns turns(control_of(args)->parts);
  for (uint32_t turn = turns.take(); turn < (tokens - until) * parts; turn = turns.take()) {
    const uint32_t first = turn % parts * len;
    send_token<PAYLOAD>(args, until + turn / parts, first, min(first + len, vectors), present, is_direct);
  }
}

// Whether no rank has more tokens in this round than few: the same to all blocks, also where some miss a rank. So whoever misses one says so
// first, and then looks again (see `doubt`): if nobody has, all go by what all see. Else the first to decide does, and who still misses one
// is for many, where it is absent.
__device__ bool are_all_few(const Args &args, Fixed &fixed, uint32_t epoch, uint32_t parity, uint32_t present, Patience &patience) {
  immwire_moe_control &control = *control_of(args);
  for (bool is_first_look = true;; is_first_look = false) {
    if (threadIdx.x == 0) fixed.missing = 0;
    __syncthreads();
    const Heads heads(args, present, args.max_tokens, epoch, parity, patience);
    if (heads.missing != 0 && threadIdx.x % WARP == 0) atomicOr(&fixed.missing, heads.missing);
    const bool are_few = machine::most_of(heads.tokens) <= args.few_tokens;
    const uint32_t suspects = load_shared_word(reinterpret_cast<uint64_t>(&control.suspects));
    __syncthreads();
    const uint32_t missing = fixed.missing;
    if (is_first_look) {
      const uint32_t said = threadIdx.x == 0 ? suspects & present : 0;
      if (__syncthreads_or(missing | said) == 0) return are_few;
      doubt(args, fixed, missing, said);
      continue;
    }
    if (threadIdx.x == 0) {
      const uint32_t mine = 2 * epoch + (are_few && missing == 0 ? 1 : 0);
      uint32_t found = atomicAdd(&control.few, 0u);
      while (found / 2 != (2 * epoch) / 2) {
        const uint32_t other = atomicCAS(&control.few, found, mine);
        found = other == found ? mine : other;
      }
      fixed.absent = found % 2;
    }
    __syncthreads();
    const bool is_decided = fixed.absent != 0;
    __syncthreads(); // Its memory is for something else now.
    return is_decided;
  }
}

// Receives many tokens, with all blocks of a share; others that have sent take tokens to their rows, too, once all of these have planned.
template <typename PAYLOAD>
__device__ void receive_many(const Args &args, uint32_t *shared, Share share, uint32_t epoch, uint32_t parity, uint32_t present, Patience for_tables,
                             bool is_direct) {
  immwire_moe_control &control = *control_of(args);
  Many many(args, share, shared);
  const uint32_t absent = count_chunks(args, many, epoch, parity, present, for_tables) & present;
  plan_chunks(args, many, epoch, parity, present & ~absent);
  if (share.index == 0 && threadIdx.x < args.world && (absent >> threadIdx.x & 1)) {
    atomicOr(&control.absent, 1u << threadIdx.x);
    put_down(report_of(args)->late_table[threadIdx.x], epoch);
  }
  if (args.flags & IMMWIRE_MOE_CLEAR_PADDING) {
    for (uint32_t e = share.index; e < many.local; e += share.of)
      clear_padding(args, many.offsets[e] + many.totals[e], min(many.offsets[e + 1], args.rows));
  }
  __syncthreads(); // This block's part of the plan is there.
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(&control.planned, 1u);
  }
  if (await_plans(args, share.of, many.missing)) receive_pairs<PAYLOAD>(args, epoch, is_direct, many.sums);
}

// This rank has few tokens, and the others do, or not. A function of its own, so that it takes no registers from the other rounds.
template <typename PAYLOAD>
__device__ __noinline__ void dispatch_few_apart(const Args &args, uint32_t *shared, uint32_t epoch, uint32_t parity, uint32_t present, Patience for_tables) {
  const Roles roles(args);
  if (args.flags & IMMWIRE_MOE_SEND) send_few<PAYLOAD>(args, shared, roles, First<PAYLOAD>(args, roles), epoch, parity, present);
  if (!(args.flags & IMMWIRE_MOE_RECEIVE)) return;
  __syncthreads();
  const bool are_few = are_all_few(args, *reinterpret_cast<Fixed *>(shared), epoch, parity, present, for_tables);
  if (!roles.receives) {
    if (!are_few && await_plans(args, gridDim.x - roles.share.of, shared)) receive_pairs<PAYLOAD>(args, epoch, false, shared + IMMWIRE_MOE_MANY_WORDS);
    return;
  }
  if (roles.share.index == 0 && threadIdx.x == 0)
    store_shared_word(reinterpret_cast<uint64_t>(&control_of(args)->few), 2 * epoch + (are_few ? 1 : 0));
  if (are_few) receive_tokens<PAYLOAD>(args, shared, roles.share, epoch, parity, present, for_tables, args.few_tokens);
  else receive_many<PAYLOAD>(args, shared, roles.share, epoch, parity, present, for_tables, false);
}

template <typename PAYLOAD>
__device__ void dispatch_many(const Args &args) {
  MACHINE_SHARED(shared);
  machine::bring_apart(args);
  machine::follow();
  immwire_moe_control &control = *control_of(args);
  const bool sends = args.flags & IMMWIRE_MOE_SEND, receives = args.flags & IMMWIRE_MOE_RECEIVE;
  Patience for_tables(args, Patience::FOR_TABLES);
  const uint32_t epoch = control.next_epoch, parity = control.next_parity;
  const uint32_t present = ranks_below(args.world) & ~(control.left_out | control.missed);
  // Who only receives was told by the launch that has sent.
  const uint32_t given = sends ? tokens_given(args) : control.tokens, own = sends ? tokens_there_are(args, given) : given;
  if (blockIdx.x == 0 && threadIdx.x == 0) control.epoch = epoch, control.parity = parity, control.summed = control.sent = 0;
  if (args.few_tokens != 0 && own <= args.few_tokens) return dispatch_few_apart<PAYLOAD>(args, shared, epoch, parity, present, for_tables);
  if (blockIdx.x == 0 && threadIdx.x == 0) control.few = 2 * epoch;
  const bool is_direct = sends && receives;
  // Every other block sends; only every third where most of the work is to lay out rows. One that is alone, or of a launch that does one
  // thing only, does whatever there is to do.
  const uint32_t one_of = args.slots != 0 ? 2 : 3;
  const bool is_shared_out = is_direct && gridDim.x > 1, is_sender = blockIdx.x % one_of == 0;
  const Share all = {blockIdx.x, gridDim.x}, senders = {blockIdx.x / one_of, (gridDim.x + one_of - 1) / one_of};
  const Share receivers = {blockIdx.x - senders.index - 1, gridDim.x - senders.of};
  if (sends) {
    const uint32_t tokens = announce_tokens(args, given, epoch, parity, present);
    // Where it is known at once where tokens go, only those tell choices who have nothing else to do yet.
    const bool do_all = !is_shared_out || args.slots == 0;
    if (do_all || !is_sender) {
      const Dealt dealt(do_all ? all : receivers);
      send_choices_of(args, dealt, Telling(args), Choice(args, dealt.first, true, tokens), tokens, epoch, parity, present);
    }
    if (!is_shared_out || is_sender) send_tokens_of<PAYLOAD>(args, Dealt(is_shared_out ? senders : all), tokens, present, is_direct);
  }
  if (!receives) return;
  if (is_shared_out && is_sender) {
    if (await_plans(args, receivers.of, shared)) receive_pairs<PAYLOAD>(args, epoch, is_direct, shared + IMMWIRE_MOE_MANY_WORDS);
    return;
  }
  receive_many<PAYLOAD>(args, shared, is_shared_out ? receivers : all, epoch, parity, present, for_tables, is_direct);
}

// The rows of a token that a warp has the plan of, one for each lane from the first on.
struct WarpRows {
  WarpRows() = default;
  __device__ WarpRows(const Args &args, const Planned &planned) {
    uint32_t bits = __ballot_sync(ALL_LANES, planned.row < args.rows);
    count = __popc(bits);
    for (uint32_t skip = threadIdx.x % WARP; skip > 0 && bits != 0; --skip) bits &= bits - 1;
    const uint32_t lane = bits != 0 ? __ffs(bits) - 1 : 0;
    row = __shfl_sync(ALL_LANES, planned.row, lane);
    weight = __shfl_sync(ALL_LANES, planned.weight, lane);
  }
  // To be called by all lanes.
  __device__ void operator()(uint32_t n, uint32_t &its_row, float &its_weight) const {
    its_row = __shfl_sync(ALL_LANES, row, n);
    its_weight = __shfl_sync(ALL_LANES, weight, n);
  }
  uint32_t count = 0, row = 0;
  float weight = 0.0f;
};

// Results, slice by slice: what a warp sums at a time. So the last ones are sooner done than if each had a token.
struct Slices {
  __device__ explicit Slices(uint32_t vectors) : of_token((vectors + LEN - 1) / LEN) {}
  __device__ uint32_t token(uint32_t turn) const { return turn / of_token; }
  __device__ Side vectors(uint32_t turn) const { return {turn % of_token * LEN + threadIdx.x % WARP, WARP}; }
  static constexpr uint32_t LEN = WARP * SUMS;
  uint32_t of_token;
};

// One warp after the other, of the blocks that send: sends the weighted sums of the tokens received, from the `first` on.
template <typename FORMAT>
__device__ void send_slices(const Args &args, uint32_t first, uint32_t pairs, uint32_t epoch, uint32_t present) {
  const uint32_t vectors = args.values / 8;
  const Slices slices(vectors);
  Turns turns(control_of(args)->sent);
  for (uint32_t turn = turns.take(); turn < (pairs - first) * slices.of_token; turn = turns.take()) {
    const Planned planned(args, first + slices.token(turn), epoch);
    const WarpRows rows(args, planned);
    if (!(present >> planned.source() & 1)) continue;
    const Side side = slices.vectors(turn);
    float sum[SUMS][8] = {};
    sum_rows<FORMAT, true, OWN>(args, sum, side, vectors, rows.count, rows);
    const uint64_t to = result_slot(args, planned.source(), args.rank, planned.token(), 0);
#pragma unroll
    for (uint32_t j = 0; j < SUMS; ++j)
      if (side.at(j) < vectors) store_shared_vector(to + side.bytes(j), pack<FORMAT>(sum[j]));
  }
}

// One warp after the other, of all blocks: add up what ranks have for this rank's tokens.
template <typename FORMAT>
__device__ void sum_tokens(const Args &args, uint32_t tokens, uint32_t epoch, uint32_t present, bool is_direct, Patience &patience) {
  const uint32_t vectors = args.values / 8;
  const Slices slices(vectors);
  Turns turns(control_of(args)->summed);
  // Of the next slice, what has to be known first.
  uint32_t ranks_of_next = 0, pair_of_next = 0;
  const auto ask = [&](uint32_t turn) {
    if (turn >= tokens * slices.of_token) return;
    ranks_of_next = masks_of(args)[slices.token(turn)] & present;
    if (is_direct) pair_of_next = own_pairs_of(args)[slices.token(turn)];
  };
  uint32_t next = turns.take();
  ask(next);
  while (next < tokens * slices.of_token) {
    const uint32_t turn = next, ranks = ranks_of_next;
    const bool has_own = is_direct && (ranks >> args.rank & 1);
    WarpRows rows;
    if (has_own) rows = WarpRows(args, Planned(args, pair_of_next, epoch));
    next = turns.take();
    ask(next);
    uint4 own[SUMS] = {};
    const Side side = slices.vectors(turn);
    if (has_own) {
      float sum[SUMS][8] = {};
      sum_rows<FORMAT, true, OWN>(args, sum, side, vectors, rows.count, rows);
#pragma unroll
      for (uint32_t j = 0; j < SUMS; ++j) own[j] = pack<FORMAT>(sum[j]);
    }
    sum_token<FORMAT, true, 1>(args, slices.token(turn), ranks, side, has_own, own, epoch, patience, false);
  }
}

// A function of its own, so that it takes no registers from the other rounds.
template <typename FORMAT>
__device__ __noinline__ void combine_few_apart(const Args &args, Fixed &fixed) {
  machine::bring(args);
  combine_few<FORMAT, false>(args, fixed);
}

template <typename FORMAT>
__device__ void combine_many(const Args &args) {
  MACHINE_SHARED(shared);
  machine::follow();
  immwire_moe_control &control = *control_of(args);
  if (control.few % 2 == 1) return combine_few_apart<FORMAT>(args, *reinterpret_cast<Fixed *>(shared));
  Patience patience(args, Patience::FOR_RESULTS);
  const uint32_t epoch = control.epoch, present = ranks_below(args.world) & ~(control.absent | control.left_out | control.missed);
  const bool sends = args.flags & IMMWIRE_MOE_SEND, receives = args.flags & IMMWIRE_MOE_RECEIVE, is_direct = sends && receives;
  // As in dispatch, but that who sends goes on to receive.
  const bool is_shared_out = is_direct && gridDim.x > 1;
  const Share all = {blockIdx.x, gridDim.x}, even = {blockIdx.x / 2, (gridDim.x + 1) / 2};
  const uint32_t tokens = receives ? tokens_to_sum(args, epoch) : 0;
  if (sends && (!is_shared_out || blockIdx.x % 2 == 0)) {
    // Blocks are dealt half of the tokens, and take turns with the rest: SMs that share a part of the GPU's way out are slower than others,
    // by a quarter.
    const uint32_t pairs = is_direct ? control.of_others : control.pairs, dealt = pairs / 2;
    send_results<FORMAT, true>(args, *reinterpret_cast<Fixed *>(shared), is_shared_out ? even : all, Cut(dealt, 0, args.values / 8), epoch, present);
    send_slices<FORMAT>(args, dealt, pairs, epoch, present);
  }
  if (!receives) return;
  end_round(control, epoch);
  sum_tokens<FORMAT>(args, tokens, epoch, present, is_direct, patience);
}

} // namespace

#define IMMWIRE_MOE_KERNEL(name, body)                                                        \
  extern "C" __global__ void __launch_bounds__(IMMWIRE_MOE_THREADS, 1) name(const __grid_constant__ immwire_moe_args args) { \
    body(args);                                                                        \
  }

IMMWIRE_MOE_KERNEL(immwire_moe_dispatch_raw, dispatch<Raw>)
IMMWIRE_MOE_KERNEL(immwire_moe_dispatch_fp8_bf16, dispatch<Quantised<Bf16>>)
IMMWIRE_MOE_KERNEL(immwire_moe_dispatch_fp8_fp16, dispatch<Quantised<Fp16>>)
IMMWIRE_MOE_KERNEL(immwire_moe_combine_bf16, (combine<Bf16, false>))
IMMWIRE_MOE_KERNEL(immwire_moe_combine_fp16, (combine<Fp16, false>))
IMMWIRE_MOE_KERNEL(immwire_moe_combine_exact_bf16, (combine<Bf16, true>))
IMMWIRE_MOE_KERNEL(immwire_moe_combine_exact_fp16, (combine<Fp16, true>))

IMMWIRE_MOE_KERNEL(immwire_moe_dispatch_many_raw, dispatch_many<Raw>)
IMMWIRE_MOE_KERNEL(immwire_moe_dispatch_many_fp8_bf16, dispatch_many<Quantised<Bf16>>)
IMMWIRE_MOE_KERNEL(immwire_moe_dispatch_many_fp8_fp16, dispatch_many<Quantised<Fp16>>)
IMMWIRE_MOE_KERNEL(immwire_moe_combine_many_bf16, combine_many<Bf16>)
IMMWIRE_MOE_KERNEL(immwire_moe_combine_many_fp16, combine_many<Fp16>)
