// A libibverbs for Soft-RoCE whose ibv_reg_dmabuf_mr takes the DMA-BUFs of verification/fake-cuda.
//
// Soft-RoCE registers memory that the CPU has mapped, and no DMA-BUF. This library is the real one (it needs it, and the
// loader looks there for all other names) but for that call: it asks the stand-in for a GPU's driver where the bytes of the
// file are, and has them registered under the address that was asked for. So a queue pair of the kernel reads and writes what
// the program calls a GPU's memory, and whoever mistakes the file's beginning for the range's writes to the wrong place. Memory
// over several allocations is mapped in one range for the call: the kernel pins its pages and does without the addresses then.

#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#define PAGE 4096

typedef uint64_t (*shadow_call)(int file, uint64_t offset, uint64_t bytes, uint64_t *mapped);

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
    shadow_call shadow = driver ? (shadow_call)dlsym(driver, "immwire_fake_cuda_shadow") : NULL;
    uint64_t mapped = 0;
    uint64_t at = shadow ? shadow(fd, offset, length, &mapped) : 0;
    if (at == 0) {
        errno = EINVAL;
        return NULL;
    }
    struct ibv_mr *mr = ibv_reg_mr_iova2(pd, (void *)(uintptr_t)at, length, iova, (unsigned int)access);
    if (mapped != 0) {
        int why = errno;
        munmap((void *)(uintptr_t)(at / PAGE * PAGE), mapped);
        errno = why;
    }
    return mr;
}
