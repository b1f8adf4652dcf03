// The CPU's stand-in for cuda/kernels/machine.cuh, and for what kernels/moe.cu uses of CUDA's own C++.
//
// Every thread of every block is a fiber, all in one thread of the CPU; which goes on is drawn wherever one might notice another:
// at barriers, exchanges of a warp, and accesses to memory that is shared between launches. Stores to such memory are
// performed later, in any order but that of one word, and vectors word by word: at the latest when their launch ends. Loads and
// atomics are performed at once. Threads that wait for each other in vain are found at once.
//
// Either all launches there are run in one call: time is counted in steps, fences do nothing (what would only go wrong without
// them is not found here), and the same seed gives the same run. Or a launch runs among others, in other threads of the CPU and
// in other processes: time is the machine's, fences perform what was stored before them, and who only waits lets others run.
// Memory is used by whole words either way, as atomics do.

#ifndef IMMWIRE_MACHINE_H
#define IMMWIRE_MACHINE_H

#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __grid_constant__
#define __noinline__ [[gnu::noinline]]
#define __launch_bounds__(...)
#define MACHINE_SHARED(name) uint32_t *const name = emulated::shared()

struct uint4 {
  uint32_t x, y, z, w;
};
struct Dimension {
  uint32_t x;
};

namespace emulated {

uint32_t *shared();
const Dimension &thread_index(), &block_index(), &grid_size(), &block_size();
// Lets others go on, perhaps.
void step();
// The same, by whoever does not only wait.
void act();
// Lets others go on, surely.
void rest();
void fence();
void block_barrier();
uint32_t block_or(uint32_t value);
// What lane `from` of the warp gives; all lanes of the warp take part.
uint32_t exchange(uint32_t value, uint32_t from);
uint32_t ballot(bool value);
uint32_t match(uint32_t value);
uint32_t lane();
// The launches before have ended; until then a launch uses no memory but its arguments.
void follow();
// Fails if they are not known to have.
void look();
// Launches behind may begin, and take room.
void let_next_begin();
// Fails if that has been said, and who sends what comes to this place may still be in need of room.
void look_for(uint64_t at);
void store_later(uint64_t to, uint32_t word);
void store_whole_later(uint64_t to, const uint4 &held);
uint64_t clock();

template <typename T>
uint32_t bits(T value) {
  static_assert(sizeof(T) == 4);
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return word;
}
template <typename T>
T of_bits(uint32_t word) {
  T value;
  std::memcpy(&value, &word, 4);
  return value;
}

// Seen at once by whoever loads it so: one instruction on the CPUs we know.
typedef uint32_t Whole __attribute__((vector_size(16), may_alias));
inline void store_whole(uint64_t to, const uint32_t (&words)[4]) {
  *reinterpret_cast<volatile Whole *>(to) = Whole{words[0], words[1], words[2], words[3]};
}
inline uint4 load_whole(uint64_t from) {
  const Whole held = *reinterpret_cast<const volatile Whole *>(from);
  return {held[0], held[1], held[2], held[3]};
}

} // namespace emulated

#define threadIdx (emulated::thread_index())
#define blockIdx (emulated::block_index())
#define gridDim (emulated::grid_size())
#define blockDim (emulated::block_size())

inline void __syncthreads() { emulated::block_barrier(); }
inline int __syncthreads_or(uint32_t value) { return int(emulated::block_or(value)); }
inline void __threadfence() { emulated::fence(); }
inline uint32_t __ballot_sync(uint32_t, bool value) { return emulated::ballot(value); }
inline uint32_t __match_any_sync(uint32_t, uint32_t value) { return emulated::match(value); }
template <typename T>
T __shfl_sync(uint32_t, T value, uint32_t from, uint32_t width = 32) {
  const uint32_t first = emulated::lane() / width * width;
  return emulated::of_bits<T>(emulated::exchange(emulated::bits(value), first + from % width));
}
template <typename T>
T __shfl_up_sync(uint32_t, T value, uint32_t step, uint32_t width = 32) {
  const uint32_t lane = emulated::lane();
  return emulated::of_bits<T>(emulated::exchange(emulated::bits(value), lane % width >= step ? lane - step : lane));
}
template <typename T>
T __shfl_down_sync(uint32_t, T value, uint32_t step) {
  const uint32_t lane = emulated::lane();
  return emulated::of_bits<T>(emulated::exchange(emulated::bits(value), lane + step < 32 ? lane + step : lane));
}
template <typename T>
T __shfl_xor_sync(uint32_t, T value, uint32_t step) {
  return emulated::of_bits<T>(emulated::exchange(emulated::bits(value), emulated::lane() ^ step));
}

inline uint32_t __popc(uint32_t word) { return uint32_t(__builtin_popcount(word)); }
inline int __clz(uint32_t word) { return word == 0 ? 32 : __builtin_clz(word); }
inline uint32_t __ffs(uint32_t word) { return uint32_t(__builtin_ffs(int(word))); }
inline float __uint_as_float(uint32_t word) { return emulated::of_bits<float>(word); }
inline uint32_t __float_as_uint(float value) { return emulated::bits(value); }
// Built without contraction: one rounding each.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
using std::fabs;
using std::fmax;
inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }

inline uint32_t atomicOr(uint32_t *word, uint32_t bits) {
  emulated::act();
  return __atomic_fetch_or(word, bits, __ATOMIC_SEQ_CST);
}
inline uint32_t atomicAdd(uint32_t *word, uint32_t more) {
  emulated::act();
  return __atomic_fetch_add(word, more, __ATOMIC_SEQ_CST);
}
inline uint32_t atomicExch(uint32_t *word, uint32_t value) {
  emulated::act();
  return __atomic_exchange_n(word, value, __ATOMIC_SEQ_CST);
}
inline uint32_t atomicCAS(uint32_t *word, uint32_t expected, uint32_t value) {
  emulated::act();
  __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}

namespace machine {

inline uint32_t load_shared_word(uint64_t from) {
  emulated::look_for(from);
  emulated::step();
  return __atomic_load_n(reinterpret_cast<const uint32_t *>(from), __ATOMIC_RELAXED);
}
inline uint4 load_shared_vector(uint64_t from) {
  emulated::look_for(from);
  emulated::step();
  return emulated::load_whole(from);
}
inline void store_shared_word(uint64_t to, uint32_t held) { emulated::store_later(to, held); }
inline void store_shared_vector(uint64_t to, uint4 held) {
  emulated::store_later(to, held.x);
  emulated::store_later(to + 4, held.y);
  emulated::store_later(to + 8, held.z);
  emulated::store_later(to + 12, held.w);
}
inline void store_whole_vector(uint64_t to, uint4 held) { emulated::store_whole_later(to, held); }
inline uint4 load_vector(uint64_t from) {
  emulated::look();
  uint4 held;
  std::memcpy(&held, reinterpret_cast<const void *>(from), 16);
  return held;
}
inline void store_vector(uint64_t to, uint4 held) { store_shared_vector(to, held); }
// Caches are not told of here.
inline uint4 load_once(uint64_t from) { return load_vector(from); }
inline void store_once(uint64_t to, uint4 held) { store_vector(to, held); }
inline void fence_for_all() { emulated::fence(); }
inline uint64_t now() { return emulated::clock(); }
template <typename T>
inline void bring(const T &) {}
template <typename T>
inline void bring_apart(const T &) {}
inline void follow() { emulated::follow(); }
inline void let_next_begin() { emulated::let_next_begin(); }
inline uint32_t any_of(uint32_t word) {
  for (uint32_t step = 1; step < 32; step *= 2) word |= __shfl_xor_sync(~0u, word, step);
  return word;
}
inline uint32_t sum_of(uint32_t word) {
  for (uint32_t step = 1; step < 32; step *= 2) word += __shfl_xor_sync(~0u, word, step);
  return word;
}
inline uint32_t most_of(uint32_t word) {
  for (uint32_t step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_xor_sync(~0u, word, step);
    word = other > word ? other : word;
  }
  return word;
}
inline void or_if(bool holds, uint32_t *word, uint32_t bits) {
  if (holds) atomicOr(word, bits);
}
inline void pause() { emulated::rest(); }
inline void meet() { emulated::ballot(true); }

// To nearest, ties to even.
inline uint32_t to_bf16(float value) {
  const uint32_t word = emulated::bits(value);
  if (std::isnan(value)) return 0x7fff;
  return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}
inline uint32_t to_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }

inline float from_fp16(uint32_t half) {
  const float sign = half & 0x8000 ? -1.0f : 1.0f;
  const int exponent = int(half >> 10 & 31), fraction = int(half & 1023);
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(float(fraction), -24) : std::ldexp(float(1024 + fraction), exponent - 25));
}
inline uint32_t to_fp16(float value) {
  if (std::isnan(value)) return 0x7fff;
  const uint32_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size == 0.0f) return sign;
  int exponent = std::max(std::ilogb(size), -14);
  // In units of the last place: an integer of at most 11 bits, or one more if it carries.
  const uint32_t units = uint32_t(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return sign + (uint32_t(exponent + 14) << 10) + units;
}
inline uint32_t to_fp16(float low, float high) { return to_fp16(low) | to_fp16(high) << 16; }

inline uint32_t to_e4m3(float value) {
  if (std::isnan(value)) return 0x7f;
  const uint32_t sign = std::signbit(value) ? 0x80 : 0;
  const float size = std::fmin(std::fabs(value), 448.0f);
  if (size == 0.0f) return sign;
  int exponent = std::max(std::ilogb(size), -6);
  const uint32_t units = uint32_t(std::nearbyint(std::ldexp(size, 3 - exponent)));
  return sign + std::min((uint32_t(exponent + 6) << 3) + units, 0x7eu);
}
inline uint32_t to_e4m3(float a, float b, float c, float d) {
  return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | to_e4m3(d) << 24;
}

} // namespace machine

#endif
