/* Two engines in one program: bytes both ways, a thousand shuffled pages both ways, and what must be refused. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "embedded.h"

#define PAGES 1000
#define PAGE_BYTES 4096u
#define ARENA_BYTES (2 * PAGES * PAGE_BYTES)
#define COUNTER 3

#define CHECK(holds) ((holds) ? (void)0 : fail(#holds, __LINE__))

static void fail(const char *what, int line) {
  fprintf(stderr, "main.c:%d: does not hold: %s\n", line, what);
  exit(1);
}

static _Alignas(IW_ENGINE_ALIGN) unsigned char storage[2][IW_ENGINE_BYTES];
static unsigned char arena[2][ARENA_BYTES], before[2][ARENA_BYTES];
static uint32_t src[2][PAGES], dst[2][PAGES];

static uint64_t seed = 1;
static uint32_t below(uint32_t n) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(seed >> 33) % n;
}

static void shuffled(uint32_t *pages, uint32_t first) {
  for (uint32_t i = 0; i < PAGES; i++) pages[i] = first + i;
  for (uint32_t i = PAGES - 1; i > 0; i--) {
    uint32_t other = below(i + 1), page = pages[i];
    pages[i] = pages[other], pages[other] = page;
  }
}

/* Polls until `transfers` have ended, each with one of the numbers from `user` on; returns the calls it took. */
static unsigned finish(iw_engine *engine, unsigned transfers, uint64_t user) {
  unsigned calls = 0, seen = 0;
  for (unsigned ended = 0; ended < transfers; calls++) {
    iw_end end;
    CHECK(calls < 10000);
    if (iw_poll(engine, &end) != IW_OK) continue;
    CHECK(end.done == 1 && end.user >= user && end.user < user + transfers);
    CHECK(!(seen >> (end.user - user) & 1));
    seen |= 1u << (end.user - user);
    ended++;
  }
  return calls;
}

/* What must be refused is, and changes nothing. */
static void refusals(iw_engine *a) {
  iw_end end;
  uint32_t outside = ARENA_BYTES / PAGE_BYTES, page = 0;
  CHECK(iw_write(NULL, 0, 0, 1, COUNTER, 0) == IW_NULL);
  CHECK(iw_write(a, ARENA_BYTES, 0, 1, COUNTER, 0) == IW_BAD_ARGUMENT);
  CHECK(iw_write(a, 0, ARENA_BYTES - 1, 2, COUNTER, 0) == IW_BAD_ARGUMENT);
  CHECK(iw_write(a, 0, UINT64_MAX, 2, COUNTER, 0) == IW_BAD_ARGUMENT);
  CHECK(iw_write(a, 0, 0, 1, IW_COUNTERS, 0) == IW_BAD_ARGUMENT);
  CHECK(iw_write_pages(a, &page, &outside, 1, PAGE_BYTES, COUNTER, 0) == IW_BAD_ARGUMENT);
  CHECK(iw_write_pages(a, NULL, &page, 1, PAGE_BYTES, COUNTER, 0) == IW_NULL);
  CHECK(iw_consume(a, COUNTER, UINT64_MAX) == IW_BAD_ARGUMENT);
  CHECK(iw_consume(a, COUNTER, 1) == IW_NOT_YET);
  CHECK(iw_poll(a, &end) == IW_NOT_YET);
}

/* As many writes as fit, of 1 byte to 3 MiB (more than one message); then one more, which must wait. */
static void singles(iw_engine *from, iw_engine *to, const unsigned char *source, unsigned char *target) {
  uint64_t at = 0, bytes[IW_TRANSFERS];
  for (unsigned i = 0; i < IW_TRANSFERS; i++) {
    bytes[i] = i ? 1 + below(100000) : 3u << 20;
    CHECK(iw_write(from, at, at, bytes[i], COUNTER, 100 + i) == IW_OK);
    at += bytes[i];
  }
  CHECK(iw_write(from, 0, 0, 1, COUNTER, 0) == IW_FULL);
  CHECK(iw_consume(to, COUNTER, 1) == IW_NOT_YET);
  finish(from, IW_TRANSFERS, 100);
  CHECK(iw_consume(to, COUNTER, IW_TRANSFERS) == IW_OK);
  CHECK(iw_consume(to, COUNTER, 1) == IW_NOT_YET);
  CHECK(memcmp(source, target, at) == 0);
}

int main(void) {
  iw_engine *engine[2];
  iw_end end;
  for (int i = 0; i < 2; i++) {
    for (size_t byte = 0; byte < ARENA_BYTES; byte++) arena[i][byte] = (unsigned char)below(256);
    CHECK(iw_init(storage[i], 1, 1, arena[i], ARENA_BYTES, &engine[i]) == IW_BAD_ARGUMENT);
    CHECK(iw_init(storage[i], IW_ENGINE_BYTES, 1 + i, arena[i], ARENA_BYTES, &engine[i]) == IW_OK);
    CHECK(iw_poll(engine[i], &end) == IW_NOT_CONNECTED);
  }
  CHECK(iw_connect(engine[0], engine[0]) == IW_BAD_ARGUMENT);
  CHECK(iw_connect(engine[0], engine[1]) == IW_OK);
  CHECK(iw_connect(engine[1], engine[0]) == IW_CONNECTED);
  refusals(engine[0]);
  singles(engine[0], engine[1], arena[0], arena[1]);
  for (size_t byte = 0; byte < ARENA_BYTES; byte++) arena[1][byte] = (unsigned char)below(256);
  singles(engine[1], engine[0], arena[1], arena[0]);

  /* Both ways at once: the lower half of each arena goes, page by page, to the upper half of the other. */
  for (int i = 0; i < 2; i++) {
    for (size_t byte = 0; byte < ARENA_BYTES; byte++) arena[i][byte] = (unsigned char)below(256);
    memcpy(before[i], arena[i], ARENA_BYTES);
    shuffled(src[i], 0);
    shuffled(dst[i], PAGES);
    CHECK(iw_write_pages(engine[i], src[i], dst[i], PAGES, PAGE_BYTES, COUNTER, 7) == IW_OK);
  }
  unsigned calls = 0;
  for (int i = 0; i < 2; i++) calls += finish(engine[i], 1, 7);
  for (int i = 0; i < 2; i++) {
    CHECK(iw_consume(engine[i], COUNTER, PAGES) == IW_OK);
    CHECK(iw_consume(engine[i], COUNTER, 1) == IW_NOT_YET);
    CHECK(memcmp(arena[i], before[i], PAGES * PAGE_BYTES) == 0);
    for (int p = 0; p < PAGES; p++)
      CHECK(memcmp(arena[1 - i] + (size_t)dst[i][p] * PAGE_BYTES,
                   before[i] + (size_t)src[i][p] * PAGE_BYTES, PAGE_BYTES) == 0);
  }
  printf("embedded: %d writes and %d shuffled pages of %u bytes, both ways: all there, all counted (%u polls)\n",
         IW_TRANSFERS, PAGES, PAGE_BYTES, calls);
  return 0;
}
