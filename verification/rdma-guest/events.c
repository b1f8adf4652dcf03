// A libibverbs for Soft-RoCE whose devices tell of faults that they do not have: by itself Soft-RoCE tells of none.
//
// Whoever moves a file of a device's name, `rxe0` say, into the folder that $IMMWIRE_RDMA_EVENTS names, has one process that uses the device
// be told once what is written there. The file becomes `rxe0.told` then, and `rxe0.gone` when the queue pair that was named is destroyed.
//
//     qp_fatal|qp_req_err|qp_access_err lane|line|inlet [cut]     of a live queue pair that writes, takes notes, or is written by;
//                                                                 which is put in error before, or is as it was
//     cq_err|srq_err|device_fatal
//     port_err|port_active                                        which goes on working either way
//     hold                                                        of nothing yet: what has come is not polled until it tells of something
//
// After `device_fatal`, queue pairs of the device are changed as they should be, but the calls fail, as all that asks for events or registers
// memory does; and the descriptor of events is readable for good. Other queue pairs than those named, and queues, go on as if nothing were the matter: who is to
// leave them has to do that by itself.
//
// The descriptor of a context is an epoll's, of the real one and of what wakes us; the real library has its own whenever it looks.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <unistd.h>

#define CONTEXTS_MAX 64
#define PAIRS_MAX 4096

static void *real(const char *name, const char *version) {
    void *library = dlopen("libibverbs.so.1", RTLD_NOLOAD | RTLD_LAZY);
    void *found = library ? dlvsym(library, name, version) : NULL;
    if (!found) {
        fprintf(stderr, "events.c: no %s\n", name);
        abort();
    }
    return found;
}
#define REAL(name, version) ((__typeof__(&name))real(#name, version))

// An open device. A place without a context is free.
static struct known {
    struct ibv_context *context;
    int shown, real, moved, failed; // Descriptors.
    int is_asked, is_dead, holds;
    int (*start_poll)(struct ibv_cq_ex *, struct ibv_poll_cq_attr *);
    struct ibv_cq_ex *(*create_cq_ex)(struct ibv_context *, struct ibv_cq_init_attr_ex *);
    struct ibv_qp *(*create_qp_ex)(struct ibv_context *, struct ibv_qp_init_attr_ex *);
} contexts[CONTEXTS_MAX];
// Queue pairs that are connected, and what they are for; places are used again. Those without a role were cut.
static struct pair {
    struct ibv_qp *qp;
    const char *role;
    int is_named;
} pairs[PAIRS_MAX];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int is_ours; // The event that was got last.

static struct known *known(struct ibv_context *context) {
    struct known *found = NULL;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < CONTEXTS_MAX && !found; at++)
        if (contexts[at].context == context)
            found = &contexts[at];
    pthread_mutex_unlock(&lock);
    if (!found) {
        fprintf(stderr, "events.c: no such context, or no room for one\n");
        abort();
    }
    return found;
}

static const char *file_of(struct ibv_context *context, const char *ending) {
    static _Thread_local char path[2][PATH_MAX];
    static _Thread_local unsigned turn;
    char *into = path[turn++ & 1];
    const char *device = REAL(ibv_get_device_name, "IBVERBS_1.1")(context->device);
    snprintf(into, PATH_MAX, "%s/%s%s", getenv("IMMWIRE_RDMA_EVENTS"), device, ending);
    return into;
}

// What the real library makes on a context, it makes with the real descriptor.
#define WITH_REAL(of, type, call)                                                                                                        \
    struct known *it = known(of);                                                                                                        \
    it->context->async_fd = it->real;                                                                                                    \
    type made = call;                                                                                                                    \
    it->context->async_fd = it->shown;                                                                                                   \
    return made

static struct ibv_cq_ex *real_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr) {
    WITH_REAL(context, struct ibv_cq_ex *, it->create_cq_ex(context, attr));
}

static int start_poll(struct ibv_cq_ex *queue, struct ibv_poll_cq_attr *attr) {
    struct known *it = known(queue->context);
    return it->holds ? ENOENT : it->start_poll(queue, attr);
}

static struct ibv_cq_ex *create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr) {
    struct ibv_cq_ex *made = real_cq_ex(context, attr);
    if (made) {
        known(context)->start_poll = made->start_poll; // The same of all.
        made->start_poll = start_poll;
    }
    return made;
}

static struct ibv_qp *create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr) {
    WITH_REAL(context, struct ibv_qp *, it->create_qp_ex(context, attr));
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *own, struct ibv_comp_channel *channel, int vector) {
    WITH_REAL(context, struct ibv_cq *, REAL(ibv_create_cq, "IBVERBS_1.1")(context, cqe, own, channel, vector));
}

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr) {
    WITH_REAL(pd->context, struct ibv_srq *, REAL(ibv_create_srq, "IBVERBS_1.1")(pd, attr));
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
    WITH_REAL(pd->context, struct ibv_qp *, REAL(ibv_create_qp, "IBVERBS_1.1")(pd, attr));
}

struct ibv_context *ibv_open_device(struct ibv_device *device) {
    struct ibv_context *context = REAL(ibv_open_device, "IBVERBS_1.1")(device);
    struct verbs_context *whole = context ? verbs_get_ctx(context) : NULL;
    const char *folder = getenv("IMMWIRE_RDMA_EVENTS");
    if (!whole || !folder)
        return context;
    struct known *it = known(NULL);
    *it = (struct known){context, epoll_create1(EPOLL_CLOEXEC), context->async_fd, inotify_init1(IN_NONBLOCK | IN_CLOEXEC),
                         eventfd(0, EFD_CLOEXEC), 0, 0, 0, NULL, whole->create_cq_ex, whole->create_qp_ex};
    int bad = inotify_add_watch(it->moved, folder, IN_MOVED_TO) < 0;
    int all[] = {it->real, it->moved, it->failed};
    for (int at = 0; at < 3; at++)
        bad |= epoll_ctl(it->shown, EPOLL_CTL_ADD, all[at], &(struct epoll_event){.events = EPOLLIN});
    bad |= fcntl(it->real, F_SETFL, fcntl(it->real, F_GETFL) | O_NONBLOCK);
    if (bad) {
        perror("events.c");
        abort();
    }
    context->async_fd = it->shown;
    whole->create_cq_ex = create_cq_ex;
    whole->create_qp_ex = create_qp_ex;
    return context;
}

int ibv_close_device(struct ibv_context *context) {
    struct known *it = known(context);
    context->async_fd = it->real;
    close(it->shown), close(it->moved), close(it->failed);
    it->context = NULL;
    return REAL(ibv_close_device, "IBVERBS_1.1")(context);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *at, size_t length, uint64_t iova, unsigned int access) {
    if (known(pd->context)->is_dead) {
        errno = EIO;
        return NULL;
    }
    return REAL(ibv_reg_mr_iova2, "IBVERBS_1.8")(pd, at, length, iova, access);
}

static struct pair *pair_of(struct ibv_qp *qp) {
    for (int at = 0; at < PAIRS_MAX; at++)
        if (pairs[at].qp == qp)
            return &pairs[at];
    fprintf(stderr, "events.c: no room for a queue pair\n");
    abort();
}

// By how many writes or notes it holds.
static const char *role_of(struct ibv_qp *qp) {
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    if (REAL(ibv_query_qp, "IBVERBS_1.1")(qp, &attr, IBV_QP_CAP, &init) != 0)
        return NULL;
    return init.cap.max_send_wr > 64 ? "lane" : init.cap.max_send_wr > 4 ? "line" : "inlet";
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask) {
    int code = REAL(ibv_modify_qp, "IBVERBS_1.1")(qp, attr, mask);
    if (qp->qp_type == IBV_QPT_RC && code == 0 && mask & IBV_QP_STATE) {
        pthread_mutex_lock(&lock);
        if (attr->qp_state == IBV_QPS_RTS)
            *pair_of(NULL) = (struct pair){qp, role_of(qp), 0};
        for (int at = 0; at < PAIRS_MAX && attr->qp_state == IBV_QPS_ERR; at++)
            if (pairs[at].qp == qp)
                pairs[at].role = NULL;
        pthread_mutex_unlock(&lock);
    }
    return known(qp->context)->is_dead ? EIO : code;
}

int ibv_destroy_qp(struct ibv_qp *qp) {
    pthread_mutex_lock(&lock);
    for (int at = 0; at < PAIRS_MAX; at++)
        if (pairs[at].qp == qp) {
            if (pairs[at].is_named)
                rename(file_of(qp->context, ".told"), file_of(qp->context, ".gone"));
            pairs[at] = (struct pair){0};
        }
    pthread_mutex_unlock(&lock);
    return REAL(ibv_destroy_qp, "IBVERBS_1.1")(qp);
}

static const struct kind {
    const char *name;
    enum ibv_event_type type;
} kinds[] = {
    {"qp_fatal", IBV_EVENT_QP_FATAL}, {"qp_req_err", IBV_EVENT_QP_REQ_ERR}, {"qp_access_err", IBV_EVENT_QP_ACCESS_ERR},
    {"cq_err", IBV_EVENT_CQ_ERR},     {"srq_err", IBV_EVENT_SRQ_ERR},       {"device_fatal", IBV_EVENT_DEVICE_FATAL},
    {"port_err", IBV_EVENT_PORT_ERR}, {"port_active", IBV_EVENT_PORT_ACTIVE},
};

// The first live queue pair of this role, or of any.
static struct pair *first(struct ibv_context *context, const char *role) {
    for (int at = 0; at < PAIRS_MAX; at++)
        if (pairs[at].qp && pairs[at].qp->context == context && pairs[at].role && (!*role || strcmp(pairs[at].role, role) == 0))
            return &pairs[at];
    return NULL;
}

// What is asked for, if it can be had now, and nobody else was told of it.
static int take(struct known *it, struct ibv_async_event *event) {
    char name[32] = "", role[32] = "", how[32] = "";
    FILE *file = fopen(file_of(it->context, ""), "re");
    if (!file)
        return it->is_asked = 0;
    int words = fscanf(file, "%31s %31s %31s", name, role, how);
    fclose(file);
    pthread_mutex_lock(&lock);
    struct pair *pair = first(it->context, role);
    // A port is there without any.
    int is_there = pair || strncmp(name, "port_", 5) == 0;
    int is_ready = words > 0 && is_there && rename(file_of(it->context, ""), file_of(it->context, ".told")) == 0;
    if (is_ready && pair)
        pair->is_named = *role != 0;
    pthread_mutex_unlock(&lock);
    if (!is_ready)
        return 0;
    it->is_asked = 0;
    it->holds = strcmp(name, "hold") == 0;
    if (it->holds)
        return 0;
    for (size_t at = 0; at < sizeof(kinds) / sizeof(*kinds); at++)
        if (strcmp(kinds[at].name, name) == 0) {
            event->event_type = kinds[at].type;
            if (*role)
                event->element.qp = pair->qp;
            else if (event->event_type == IBV_EVENT_CQ_ERR)
                event->element.cq = pair->qp->recv_cq;
            else if (event->event_type == IBV_EVENT_SRQ_ERR)
                event->element.srq = pair->qp->srq;
            else if (event->event_type == IBV_EVENT_PORT_ERR || event->event_type == IBV_EVENT_PORT_ACTIVE)
                event->element.port_num = 1;
            else
                it->is_dead = eventfd_write(it->failed, 1) == 0;
            if (strcmp(how, "cut") == 0)
                REAL(ibv_modify_qp, "IBVERBS_1.1")(pair->qp, &(struct ibv_qp_attr){.qp_state = IBV_QPS_ERR}, IBV_QP_STATE);
            return 1;
        }
    fprintf(stderr, "events.c: there is no %s\n", name);
    abort();
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
    struct known *it = known(context);
    char moved[4096];
    if (it->is_dead) {
        errno = EIO;
        return -1;
    }
    while (read(it->moved, moved, sizeof(moved)) > 0)
        it->is_asked = 1;
    is_ours = it->is_asked && take(it, event);
    if (is_ours)
        return 0;
    context->async_fd = it->real;
    int code = REAL(ibv_get_async_event, "IBVERBS_1.1")(context, event);
    context->async_fd = it->shown;
    return code;
}

void ibv_ack_async_event(struct ibv_async_event *event) {
    // The real one waits for as many as the kernel has told of.
    if (!is_ours)
        REAL(ibv_ack_async_event, "IBVERBS_1.1")(event);
    is_ours = 0;
}
