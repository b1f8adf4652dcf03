/* A small transfer engine: writes with immediate between two arenas of one address space.
 *
 * Conventions. Every function returns an `iw_status`, whose numbers never change; output goes through
 * pointers and only with IW_OK. NULL is refused where a pointer is needed. Nothing allocates, blocks or
 * starts a thread. All calls that concern an engine, or the one it is connected to, come from one thread.
 */
#ifndef EMBEDDED_H
#define EMBEDDED_H

#include <stddef.h>
#include <stdint.h>

typedef enum iw_status {
  IW_OK = 0,
  IW_NULL = 1,          /* A pointer was NULL. */
  IW_BAD_ARGUMENT = 2,  /* Out of bounds, or not possible; nothing was posted. */
  IW_FULL = 3,          /* IW_TRANSFERS are under way: poll until one has ended, then try again. */
  IW_NOT_YET = 4,       /* Nothing has ended; not enough has arrived. */
  IW_NOT_CONNECTED = 5, /* There is no other engine yet. */
  IW_CONNECTED = 6      /* There is another engine already. */
} iw_status;

/* Room for one engine. */
#define IW_ENGINE_BYTES 16384
#define IW_ENGINE_ALIGN 64
/* Transfers that can be under way at once; counters that writes can be counted at. */
#define IW_TRANSFERS 16
#define IW_COUNTERS 16

typedef struct iw_engine iw_engine;

typedef struct iw_end {
  uint64_t user; /* As given with the transfer. */
  uint32_t done; /* 1: all of it was written. 0: it was given up. Its memory is the caller's again. */
} iw_end;

/* Makes engine number `id` in `storage` (IW_ENGINE_BYTES, aligned to IW_ENGINE_ALIGN). Writes come from,
 * and go to, the `arena_bytes` at `arena`. Both must stay where they are for as long as the engine, and
 * the one that it is connected to, are used. */
iw_status iw_init(void *storage, size_t storage_bytes, uint64_t id, void *arena, size_t arena_bytes,
                  iw_engine **out);

/* Connects two engines, each with the other. Their numbers differ. */
iw_status iw_connect(iw_engine *a, iw_engine *b);

/* Writes `bytes` bytes at offset `src` of this engine's arena to offset `dst` of the other's, and counts one
 * write there at `counter`. */
iw_status iw_write(iw_engine *engine, uint64_t src, uint64_t dst, uint64_t bytes, uint16_t counter,
                   uint64_t user);

/* Writes page `src[i]` of this arena to page `dst[i]` of the other's, for all i below `pages`, and counts one
 * write there at `counter` for each. The lists must not change before the end of the transfer. */
iw_status iw_write_pages(iw_engine *engine, const uint32_t *src, const uint32_t *dst, size_t pages,
                         uint64_t page_bytes, uint16_t counter, uint64_t user);

/* Moves what can be moved, and says how one transfer ended. IW_NOT_YET: none has. */
iw_status iw_poll(iw_engine *engine, iw_end *out);

/* Takes `writes` writes from `counter` of this engine. IW_NOT_YET: fewer have arrived. */
iw_status iw_consume(iw_engine *engine, uint16_t counter, uint64_t writes);

#endif
