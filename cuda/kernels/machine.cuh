// What kernels/moe.cu asks of a GPU beyond CUDA's own C++: loads and stores of a certain strength, the clock, and numbers of
// 16 and 8 bits.
//
// verification/moe/machine.h is the same for a CPU. Kept apart, so that the kernels' own text is what is checked there.

#ifndef IMMWIRE_MACHINE_CUH
#define IMMWIRE_MACHINE_CUH

#include <stdint.h>

// The launch's dynamic shared memory, as words.
#define MACHINE_SHARED(name) extern __shared__ __align__(16) uint32_t name[]

namespace machine {

// Words that other GPUs write, or that are written for them. Relaxed: each word is seen whole, in any order.
__device__ inline uint4 load_shared_vector(uint64_t from) {
  uint4 held;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(held.x), "=r"(held.y), "=r"(held.z), "=r"(held.w)
               : "l"(from)
               : "memory");
  return held;
}
__device__ inline void store_shared_vector(uint64_t to, uint4 held) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(held.x), "r"(held.y), "r"(held.z),
               "r"(held.w)
               : "memory");
}
// The same, where it matters that the 16 bytes are seen at once. GPUs do it with every store of a vector, and NCCL rests on it;
// what CUDA promises is words.
__device__ inline void store_whole_vector(uint64_t to, uint4 held) { store_shared_vector(to, held); }
__device__ inline uint32_t load_shared_word(uint64_t from) {
  uint32_t held;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(held) : "l"(from) : "memory");
  return held;
}
__device__ inline void store_shared_word(uint64_t to, uint32_t held) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(held) : "memory");
}

// Memory that only this launch uses, or launches before and after it.
__device__ inline uint4 load_vector(uint64_t from) {
  uint4 held;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(held.x), "=r"(held.y), "=r"(held.z), "=r"(held.w)
               : "l"(from));
  return held;
}
__device__ inline void store_vector(uint64_t to, uint4 held) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(held.x), "r"(held.y), "r"(held.z), "r"(held.w)
               : "memory");
}

// The same, where a launch goes through so much memory that caches had better keep what it comes back to. What is seen of memory, and when,
// is no other.
__device__ inline uint4 load_once(uint64_t from) {
  uint4 held;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(held.x), "=r"(held.y), "=r"(held.z), "=r"(held.w)
               : "l"(from));
  return held;
}
__device__ inline void store_once(uint64_t to, uint4 held) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(held.x), "r"(held.y), "r"(held.z), "r"(held.w)
               : "memory");
}

// What was stored before is seen by whoever sees what is stored after.
__device__ inline void fence_for_all() { __threadfence_system(); }

// Nanoseconds, of one clock for all blocks.
__device__ inline uint64_t now() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// A warp's lanes meet here: what each stored to shared memory before, the others find after.
__device__ inline void meet() { __syncwarp(); }

// Asks for a launch's arguments, each warp for a line of them: else each line is waited for by itself, when it is first needed.
template <typename T>
__device__ inline void bring(const T &args) {
  constexpr uint32_t LINE = 64, UNLIKELY = 0x9e3779b9;
  const uint32_t at = threadIdx.x / 32 * LINE;
  if (at < sizeof(T) && *reinterpret_cast<const uint32_t *>(reinterpret_cast<const char *>(&args) + at) == UNLIKELY) __nanosleep(0);
}

// The same for functions of their own, which do not know where arguments lie, and read them as other memory.
template <typename T>
__device__ inline void bring_apart(const T &args) {
  const T *somewhere = &args;
  asm volatile("" : "+l"(somewhere));
  bring(*somewhere);
}

// Waits until the launches before this one in its stream have ended, and what they wrote is seen: where this one was allowed to begin
// before that (programmatic dependent launch).
__device__ inline void follow() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches behind this one in its stream that may begin early do, once each block has had a thread say so, or ended.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Of a whole warp's words, the bits that any of them has.
__device__ inline uint32_t any_of(uint32_t word) { return __reduce_or_sync(0xffffffffu, word); }

// Their sum.
__device__ inline uint32_t sum_of(uint32_t word) { return __reduce_add_sync(0xffffffffu, word); }

// The largest of a warp's words.
__device__ inline uint32_t most_of(uint32_t word) { return __reduce_max_sync(0xffffffffu, word); }

// Sets bits of a word of shared memory if a condition holds; without a branch.
__device__ inline void or_if(bool holds, uint32_t *word, uint32_t bits) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p red.shared.or.b32 [%0], %1; }" ::"r"(uint32_t(__cvta_generic_to_shared(word))),
               "r"(bits), "r"(uint32_t(holds))
               : "memory");
}

// Between looks at something that takes long.
__device__ inline void pause() {}

// To nearest, ties to even, the first in the lower half; what is not a number becomes 0x7fff.
__device__ inline uint32_t to_bf16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ inline uint32_t to_fp16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ inline float from_fp16(uint32_t half) {
  float value;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(half));
  return value;
}

// Four values to e4m3, to nearest, ties to even; past the largest, the largest.
__device__ inline uint32_t to_e4m3(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return uint32_t(high) << 16 | low;
#else
  __trap(); // Never launched: the host asks for the capability first.
  return 0;
#endif
}

} // namespace machine

#endif
