// A libibverbs for Soft-RoCE whose devices have two ports each, and offer on-demand paging if they are asked to.
//
// Soft-RoCE's devices have one port, and the guest's kernel pins what they are given. This library is the real one (it needs
// it, and the loader looks there for all other names), but lists every other device alone: rxe1 is port 2 of rxe0, rxe3 of
// rxe2. Whoever opens a device for the second time (in one thread) has its second port, the third time the first again. Every
// port that is named must be the one of the context that it is named with, or the call fails: so nobody gets by with port 1.
//
// If IMMWIRE_RDMA_ON_DEMAND is set, devices offer on-demand paging, and memory that peers write to must be registered for it;
// else none may be. The real library is not told of it, and pins.
//
// Of the extended calls rxe0 offers both, as Soft-RoCE does; second ports have none to read completions, and rxe2 and rxe3 none
// to post: so each has others.
//
// If IMMWIRE_RDMA_INLINE is set, no queue pair is made whose sends may carry more bytes themselves than it says.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr_iova2

#define DEVICES_MAX 64

static void *real(const char *name, const char *version) {
    void *library = dlopen("libibverbs.so.1", RTLD_NOLOAD | RTLD_LAZY);
    void *found = library ? dlvsym(library, name, version) : NULL;
    if (!found) {
        fprintf(stderr, "ports.c: no %s\n", name);
        abort();
    }
    return found;
}
#define REAL(name, version) ((__typeof__(&name))real(#name, version))

// N of rxeN, or -1.
static int number_of(struct ibv_device *device) {
    int number;
    const char *name = REAL(ibv_get_device_name, "IBVERBS_1.1")(device);
    return sscanf(name, "rxe%d", &number) == 1 && number >= 0 && number < DEVICES_MAX ? number : -1;
}

static uint8_t port_of(struct ibv_context *context) { return (uint8_t)(1 + (number_of(context->device) & 1)); }

struct ibv_device **ibv_get_device_list(int *count) {
    struct ibv_device **list = REAL(ibv_get_device_list, "IBVERBS_1.1")(count);
    int kept = 0;
    for (int at = 0; list && list[at]; at++)
        if ((number_of(list[at]) & 1) == 0)
            list[kept++] = list[at];
    if (list)
        list[kept] = NULL;
    if (list && count)
        *count = kept;
    return list;
}

static int offer(struct ibv_context *context, const struct ibv_query_device_ex_input *input, struct ibv_device_attr_ex *attr,
                 size_t size) {
    (void)input;
    if (size < offsetof(struct ibv_device_attr_ex, odp_caps) + sizeof(attr->odp_caps))
        return EINVAL;
    memset(attr, 0, size);
    attr->odp_caps.general_caps = IBV_ODP_SUPPORT;
    attr->odp_caps.per_transport_caps.rc_odp_caps = IBV_ODP_SUPPORT_WRITE;
    return REAL(ibv_query_device, "IBVERBS_1.1")(context, &attr->orig_attr);
}

static struct ibv_cq_ex *refuse(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr) {
    (void)context, (void)attr;
    errno = EOPNOTSUPP;
    return NULL;
}

// Whether sends may carry so many bytes themselves.
static int carries(uint32_t bytes) {
    const char *most = getenv("IMMWIRE_RDMA_INLINE");
    int is_refused = most && bytes > strtoul(most, NULL, 10);
    if (is_refused)
        errno = EINVAL;
    return !is_refused;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
    return carries(attr->cap.max_inline_data) ? REAL(ibv_create_qp, "IBVERBS_1.1")(pd, attr) : NULL;
}

static struct ibv_qp *(*real_qp_ex)(struct ibv_context *, struct ibv_qp_init_attr_ex *); // The same of all.

static struct ibv_qp *create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr) {
    return carries(attr->cap.max_inline_data) ? real_qp_ex(context, attr) : NULL;
}

static struct ibv_device *second_of(int number) {
    struct ibv_device *found = NULL, **list = REAL(ibv_get_device_list, "IBVERBS_1.1")(NULL);
    for (int at = 0; list && list[at]; at++)
        if (number_of(list[at]) == number + 1)
            found = list[at];
    return found; // The list is kept: so is the device.
}

struct ibv_context *ibv_open_device(struct ibv_device *device) {
    static _Thread_local unsigned opened[DEVICES_MAX];
    int number = number_of(device);
    if (number >= 0 && opened[number]++ & 1)
        device = second_of(number);
    struct ibv_context *context = device ? REAL(ibv_open_device, "IBVERBS_1.1")(device) : NULL;
    struct verbs_context *whole = context ? verbs_get_ctx(context) : NULL;
    if (whole && getenv("IMMWIRE_RDMA_ON_DEMAND"))
        whole->query_device_ex = offer;
    if (whole && number_of(context->device) & 1)
        whole->create_cq_ex = refuse;
    if (whole && number_of(context->device) & 2) {
        whole->create_qp_ex = NULL;
    } else if (whole && whole->create_qp_ex) {
        real_qp_ex = whole->create_qp_ex;
        whole->create_qp_ex = create_qp_ex;
    }
    return context;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr) {
    int code = REAL(ibv_query_device, "IBVERBS_1.1")(context, attr);
    attr->phys_port_cnt = 2;
    return code;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr) {
    if (port != port_of(context))
        return EINVAL;
    return REAL(ibv_query_port, "IBVERBS_1.1")(context, 1, attr);
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry, uint32_t flags,
                      size_t size) {
    if (port != port_of(context))
        return EINVAL;
    return REAL(_ibv_query_gid_ex, "IBVERBS_1.11")(context, 1, index, entry, flags, size);
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask) {
    uint8_t port = port_of(qp->context);
    struct ibv_qp_attr theirs = *attr;
    if ((mask & IBV_QP_PORT && attr->port_num != port) || (mask & IBV_QP_AV && attr->ah_attr.port_num != port))
        return EINVAL;
    theirs.port_num = theirs.ah_attr.port_num = 1;
    return REAL(ibv_modify_qp, "IBVERBS_1.1")(qp, &theirs, mask);
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr) {
    struct ibv_ah_attr theirs = *attr;
    if (attr->port_num != port_of(pd->context)) {
        errno = EINVAL;
        return NULL;
    }
    theirs.port_num = 1;
    return REAL(ibv_create_ah, "IBVERBS_1.1")(pd, &theirs);
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
    int code = REAL(ibv_get_async_event, "IBVERBS_1.1")(context, event);
    if (code == 0 && (event->event_type == IBV_EVENT_PORT_ACTIVE || event->event_type == IBV_EVENT_PORT_ERR))
        event->element.port_num = port_of(context);
    return code;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *at, size_t length, uint64_t iova, unsigned int access) {
    int on_demand = (access & IBV_ACCESS_ON_DEMAND) != 0, is_offered = getenv("IMMWIRE_RDMA_ON_DEMAND") != NULL;
    if (is_offered ? !on_demand && access & IBV_ACCESS_REMOTE_WRITE : on_demand) {
        errno = EPROTO;
        return NULL;
    }
    return REAL(ibv_reg_mr_iova2, "IBVERBS_1.8")(pd, at, length, iova, access & ~(unsigned int)IBV_ACCESS_ON_DEMAND);
}
