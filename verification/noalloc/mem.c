/* The four functions that compiled code may call without saying so. Nothing else is there to link with. */
#include <stddef.h>

void *memmove(void *to, const void *from, size_t n) {
  unsigned char *t = to;
  const unsigned char *f = from;
  if (t < f)
    for (size_t i = 0; i < n; i++) t[i] = f[i];
  else
    while (n--) t[n] = f[n];
  return to;
}

void *memcpy(void *to, const void *from, size_t n) { return memmove(to, from, n); }

void *memset(void *to, int byte, size_t n) {
  unsigned char *t = to;
  for (size_t i = 0; i < n; i++) t[i] = (unsigned char)byte;
  return to;
}

int memcmp(const void *a, const void *b, size_t n) {
  const unsigned char *x = a, *y = b;
  for (size_t i = 0; i < n; i++)
    if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
  return 0;
}

int bcmp(const void *a, const void *b, size_t n) { return memcmp(a, b, n); }
