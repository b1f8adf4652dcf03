// Runs the kernels of cuda/kernels/moe.cu on a CPU: see machine.h for what is kept and what is left to chance.

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <ctime>
#include <deque>
#include <memory>
#include <string>
#include <ucontext.h>
#include <vector>

#include "moe.cu"

namespace {

using Kernel = void (*)(immwire_moe_args);
const Kernel KERNELS[] = {immwire_moe_dispatch_raw, immwire_moe_dispatch_fp8_bf16, immwire_moe_dispatch_fp8_fp16,
                          immwire_moe_combine_bf16, immwire_moe_combine_fp16,
                          immwire_moe_dispatch_many_raw, immwire_moe_dispatch_many_fp8_bf16, immwire_moe_dispatch_many_fp8_fp16,
                          immwire_moe_combine_exact_bf16, immwire_moe_combine_exact_fp16,
                          immwire_moe_combine_many_bf16, immwire_moe_combine_many_fp16};

constexpr size_t STACK_BYTES = 64 << 10;
constexpr uint32_t LANES = 32;
// Of threads in a row, before others in this machine are let run, and for how long.
constexpr uint32_t RESTS = 8;
constexpr long PAUSE_NS = 20000;

// Splitmix64.
struct Random {
  uint64_t state;
  uint64_t next() {
    state += 0x9e3779b97f4a7c15u;
    uint64_t z = (state ^ state >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  uint64_t below(uint64_t limit) { return next() % limit; }
};

// What one thread waits for.
enum class Wait { NOTHING, BLOCK, WARP };

struct Block;

struct Thread {
  jmp_buf at;
  std::unique_ptr<char[]> stack;
  bool started = false;
  Block *block;
  Dimension index;
  Wait wait = Wait::NOTHING;
  uint32_t exchanges = 0;
  bool followed = false; // It has waited for the launches before its own.
  bool done = false;
};

struct Stream;

struct Block {
  Stream *stream;
  Dimension index, grid, size;
  immwire_moe_args args;
  Kernel kernel;
  std::vector<uint32_t> shared;
  std::vector<std::unique_ptr<Thread>> threads;
  uint32_t at_barrier = 0, gathered = 0, result = 0, ended = 0;
  bool lets_next_begin = false;
  struct Warp {
    uint32_t arrived = 0;
    uint32_t given[2][LANES];
  };
  std::vector<Warp> warps;
  uint64_t sleeps_until = 0;
};

// A store under way, of one word or of four that are seen at once.
struct Store {
  uint64_t to;
  uint32_t words[4];
  uint32_t count;
};

extern "C" struct Launch {
  uint32_t stream, kernel, blocks, threads, shared_bytes, missing;
  immwire_moe_args args;
};

// Stores under way, oldest first. How many there are to each word is counted: one alone needs no look at those before it.
class Stores {
public:
  size_t size() const { return order.size(); }
  void push(const Store &store) {
    if (free.empty()) {
      free.push_back(uint32_t(held.size()));
      held.emplace_back();
    }
    order.push_back(free.back());
    free.pop_back();
    held[order.back()] = store;
    count(store, 1);
  }
  // The store `at` of the oldest ones, unless one before it is to some of the same bytes.
  const Store *first_there(size_t at) const {
    const Store &chosen = held[order[at]];
    auto overlaps = [&](uint32_t it) {
      const Store &other = held[it];
      return other.to < chosen.to + 4 * chosen.count && chosen.to < other.to + 4 * other.count;
    };
    if (!alone(chosen) && std::any_of(order.begin(), order.begin() + long(at), overlaps)) return nullptr;
    return &chosen;
  }
  void take(size_t at) {
    free.push_back(order[at]);
    count(held[order[at]], -1);
    order.erase(order.begin() + long(at));
  }
  template <typename Perform> void take_all(Perform perform) {
    for (uint32_t it : order) {
      perform(held[it]);
      count(held[it], -1);
      free.push_back(it);
    }
    order.clear();
  }

private:
  static constexpr int BITS = 13;
  // Words of other places may be counted there, too: then it is looked at what has none before it.
  static size_t place(uint64_t word) { return word * 0x9e3779b97f4a7c15u >> (64 - BITS); }
  void count(const Store &store, uint32_t more) {
    for (uint32_t i = 0; i < store.count; ++i) to_word[place(store.to / 4 + i)] += more;
  }
  bool alone(const Store &store) const {
    for (uint32_t i = 0; i < store.count; ++i)
      if (to_word[place(store.to / 4 + i)] != 1) return false;
    return true;
  }

  std::vector<Store> held;
  std::vector<uint32_t> free;
  std::deque<uint32_t> order;
  std::vector<uint32_t> to_word = std::vector<uint32_t>(1 << BITS);
};

struct Stream {
  std::deque<const Launch *> launches;
  std::vector<std::unique_ptr<Block>> blocks;
  Stores stores;
  uint32_t running = 0;
  std::vector<const Launch *> begun;
  uint64_t began_at = 0; // The last of them.
};

struct World {
  Random random;
  std::vector<Stream> streams;
  std::vector<Thread *> ready;
  Thread *current = nullptr;
  jmp_buf scheduler;
  uint64_t time = 0;
  std::string failure;
  // Whether others run beside this one, in other threads of the CPU.
  bool among_others = false;
  // How often threads have rested since one did more than wait.
  uint32_t rests = 0;
};

thread_local World *world;

// Not gone on with after that.
[[noreturn]] void switch_for_good() { _longjmp(world->scheduler, 1); }

void perform(const Store &store) {
  if (store.count == 4) return emulated::store_whole(store.to, store.words);
  __atomic_store_n(reinterpret_cast<uint32_t *>(store.to), store.words[0], __ATOMIC_RELAXED);
}

void perform_all(Stream &stream) {
  stream.stores.take_all(perform);
}

// Performs the first of the stores to a place that is drawn: those to one word keep their order.
void perform_any(Stream &stream) {
  if (stream.stores.size() == 0) return;
  // Of the older ones: the others' turn comes. Of fewer where it matters how long it takes.
  const size_t older = world->among_others ? 32 : 256;
  const size_t drawn = world->random.below(std::min(stream.stores.size(), older));
  const Store *chosen = stream.stores.first_there(drawn);
  if (chosen == nullptr) return; // Another time.
  perform(*chosen);
  stream.stores.take(drawn);
}

void give_up(bool ready) {
  Thread *self = world->current;
  if (ready) world->ready.push_back(self);
  if (_setjmp(self->at) == 0) _longjmp(world->scheduler, 1);
}

void wake(Block &block, uint32_t first, uint32_t last) {
  for (uint32_t i = first; i < last; ++i) {
    Thread &thread = *block.threads[i];
    if (thread.done || thread.wait == Wait::NOTHING) continue;
    thread.wait = Wait::NOTHING;
    world->ready.push_back(&thread);
  }
}

// Whether all that go on have come to the barrier.
void release_barrier(Block &block) {
  if (block.at_barrier == 0 || block.at_barrier + block.ended < block.size.x) return;
  for (auto &thread : block.threads) {
    if (!thread->done && thread->wait == Wait::WARP && world->failure.empty())
      world->failure = "a warp's exchange and a barrier wait for each other";
  }
  world->rests = 0;
  block.result = block.gathered;
  block.gathered = 0;
  block.at_barrier = 0;
  wake(block, 0, block.size.x);
}

void warp_barrier(Block::Warp &warp, uint32_t number) {
  Thread *self = world->current;
  if (++warp.arrived == LANES) {
    warp.arrived = 0;
    wake(*self->block, number * LANES, (number + 1) * LANES);
    give_up(true);
    return;
  }
  self->wait = Wait::WARP;
  give_up(false);
}

Block::Warp &own_warp() { return world->current->block->warps[world->current->index.x / LANES]; }

// Everybody's values, once all have come. They stay until all have come to the next but one.
const uint32_t *gather(uint32_t value) {
  Block::Warp &warp = own_warp();
  uint32_t *given = warp.given[world->current->exchanges++ % 2];
  given[emulated::lane()] = value;
  warp_barrier(warp, world->current->index.x / LANES);
  return given;
}

void thread_main() {
  Thread *self = world->current;
  self->block->kernel(self->block->args);
  self->done = true;
  world->rests = 0;
  Block &block = *self->block;
  ++block.ended;
  release_barrier(block);
  if (block.ended == block.size.x) --block.stream->running;
  switch_for_good();
}

// Goes on with a thread, until it gives up. Only its first step costs system calls.
__attribute__((noinline)) void go_on(Thread *thread) {
  world->current = thread;
  if (_setjmp(world->scheduler) != 0) return;
  if (thread->started) _longjmp(thread->at, 1);
  thread->started = true;
  ucontext_t first;
  getcontext(&first);
  first.uc_stack.ss_sp = thread->stack.get();
  first.uc_stack.ss_size = STACK_BYTES;
  first.uc_link = nullptr;
  makecontext(&first, thread_main, 0);
  setcontext(&first);
}

void start(Stream &stream) {
  const Launch &launch = *stream.launches.front();
  stream.launches.pop_front();
  stream.begun.push_back(&launch);
  stream.began_at = world->time;
  stream.blocks.clear();
  const uint32_t blocks = launch.blocks - launch.missing;
  for (uint32_t b = 0; b < blocks; ++b) {
    auto block = std::make_unique<Block>();
    block->stream = &stream;
    block->index = {b}, block->grid = {launch.blocks}, block->size = {launch.threads};
    block->args = launch.args;
    block->kernel = KERNELS[launch.kernel];
    // What lies there at first is anybody's.
    block->shared.resize((launch.shared_bytes + 3) / 4 + 64);
    for (auto &word : block->shared) word = uint32_t(world->random.next());
    for (size_t i = block->shared.size() - 64; i < block->shared.size(); ++i) block->shared[i] = 0xc0ffee;
    block->warps.resize(launch.threads / LANES);
    for (uint32_t t = 0; t < launch.threads; ++t) {
      auto thread = std::make_unique<Thread>();
      thread->stack.reset(new char[STACK_BYTES]); // Not touched before it is used.
      thread->block = block.get();
      thread->index = {t};
      world->ready.push_back(thread.get());
      block->threads.push_back(std::move(thread));
    }
    stream.blocks.push_back(std::move(block));
  }
  stream.running = blocks;
}

void finish(Stream &stream) {
  perform_all(stream);
  for (auto &block : stream.blocks) {
    for (size_t i = block->shared.size() - 64; i < block->shared.size(); ++i)
      if (block->shared[i] != 0xc0ffee && world->failure.empty()) world->failure = "more shared memory was used than launched with";
  }
  stream.blocks.clear();
}

} // namespace

namespace emulated {

uint32_t *shared() { return world->current->block->shared.data(); }
const Dimension &thread_index() { return world->current->index; }
const Dimension &block_index() { return world->current->block->index; }
const Dimension &grid_size() { return world->current->block->grid; }
const Dimension &block_size() { return world->current->block->size; }
uint32_t lane() { return world->current->index.x % LANES; }

void rest() {
  if (world->among_others && ++world->rests >= RESTS) {
    world->rests = 0;
    // They may be what is waited for.
    for (Stream &stream : world->streams) perform_all(stream);
    const timespec pause = {0, PAUSE_NS};
    nanosleep(&pause, nullptr);
  }
  give_up(true);
}
void follow() { world->current->followed = true; }
void look() {
  if (!world->current->followed) world->failure = "memory is used before the launches before have ended";
}
void let_next_begin() { world->current->block->lets_next_begin = true; }
// All blocks of a launch are there when it has begun, and wait for nobody before they have sent what they have. So who lets others take room
// looks only for what comes from ranks that have begun to send in this round; whoever is late enough may have been left out.
void look_for(uint64_t at) {
  const Block &block = *world->current->block;
  const Args &args = block.args;
  const uint64_t place = at - args.inbox[args.rank], results = uint64_t(args.max_tokens) * args.world * args.results_each;
  if (!block.lets_next_begin || world->among_others || world->time - block.stream->began_at >= args.timeout_ns) return;
  if (at < args.inbox[args.rank] || place >= args.combine_at + results * args.combine_stride) return;
  const uint64_t rank = place < args.dispatch_at ? place / args.table_bytes % args.world
                        : place < args.combine_at ? (place - args.dispatch_at) / args.dispatch_stride / args.max_tokens
                                                  : (place - args.combine_at) / args.combine_stride / args.results_each % args.world;
  const auto has_sent = [&](const Stream &stream) {
    const auto sends = [&](const Launch *it) { return it->args.inbox[0] == args.inbox[0] && (it->args.flags & IMMWIRE_MOE_SEND); };
    return std::count_if(stream.begun.begin(), stream.begun.end(), sends);
  };
  const Stream &sender = world->streams[rank];
  if (!sender.launches.empty() && has_sent(sender) < has_sent(*block.stream))
    world->failure = "launches behind may begin before one has that is waited for";
}
void step() {
  look();
  ++world->time;
  if (world->random.below(8) == 0) give_up(true);
}
void act() {
  world->rests = 0;
  step();
}
void fence() {
  if (world->among_others) perform_all(*world->current->block->stream);
  step();
}

void block_barrier() { block_or(0); }
uint32_t block_or(uint32_t value) {
  Thread *self = world->current;
  Block &block = *self->block;
  block.gathered |= value;
  ++block.at_barrier;
  self->wait = Wait::BLOCK;
  release_barrier(block); // If it is the last one, it is among those who may go on.
  give_up(false);
  return block.result;
}

uint32_t exchange(uint32_t value, uint32_t from) { return gather(value)[from]; }
uint32_t ballot(bool value) {
  const uint32_t *given = gather(value ? 1 : 0);
  uint32_t all = 0;
  for (uint32_t i = 0; i < LANES; ++i) all |= given[i] << i;
  return all;
}
uint32_t match(uint32_t value) {
  const uint32_t *given = gather(value);
  uint32_t same = 0;
  for (uint32_t i = 0; i < LANES; ++i) same |= uint32_t(given[i] == value) << i;
  return same;
}

void store_later(uint64_t to, uint32_t word) {
  act();
  world->current->block->stream->stores.push({to, {word}, 1});
}
void store_whole_later(uint64_t to, const uint4 &held) {
  act();
  world->current->block->stream->stores.push({to, {held.x, held.y, held.z, held.w}, 4});
}

uint64_t clock() {
  ++world->time;
  if (!world->among_others) return world->time;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1000000000 + uint64_t(now.tv_nsec);
}

} // namespace emulated

// Runs the launches of each stream one after the other, and those of different streams at the same time. `among_others`: others run
// beside them, in other threads and processes. Returns 0, or 1 and why not.
extern "C" int immwire_moe_emulate(const Launch *launches, uint32_t count, uint32_t streams, uint64_t seed, uint32_t among_others,
                                   char *why, uint32_t why_bytes) {
  World here;
  here.among_others = among_others != 0;
  here.random.state = seed;
  here.streams = std::vector<Stream>(streams);
  for (uint32_t i = 0; i < count; ++i) here.streams[launches[i].stream].launches.push_back(&launches[i]);
  world = &here;
  auto fail = [&](const std::string &text) {
    std::snprintf(why, why_bytes, "%s", text.c_str());
    world = nullptr;
    return 1;
  };
  for (;;) {
    bool any = false;
    for (auto &stream : here.streams) {
      if (stream.running == 0) {
        finish(stream);
        if (!stream.launches.empty() && here.random.below(4) == 0) start(stream);
      }
      any |= stream.running != 0 || !stream.launches.empty();
    }
    if (!here.failure.empty()) return fail(here.failure);
    if (!any) break;
    if (here.ready.empty()) {
      for (auto &stream : here.streams)
        if (stream.running != 0) return fail("threads wait for each other at barriers");
      continue;
    }
    // For a while, between looks at what has ended.
    for (uint32_t turn = 0; turn < 256 && !here.ready.empty(); ++turn) {
      ++here.time;
      const size_t drawn = here.random.below(here.ready.size());
      Thread *thread = here.ready[drawn];
      // Now and then a block is left alone for long, while the others go on.
      Block &block = *thread->block;
      if (block.sleeps_until > here.time && here.random.below(64) != 0) continue;
      if (here.random.below(5000) == 0) block.sleeps_until = here.time + here.random.below(20000);
      here.ready[drawn] = here.ready.back();
      here.ready.pop_back();
      go_on(thread);
      Stream &stream = here.streams[here.random.below(here.streams.size())];
      for (int i = 0; i < 4; ++i) perform_any(stream);
      if (thread->block->stream->running == 0) break;
    }
  }
  world = nullptr;
  return 0;
}
