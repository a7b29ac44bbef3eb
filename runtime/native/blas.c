/*
 * blas: a preloaded library that has large products of matrices computed natively, for emulated programs.
 *
 * It defines sgemm_ and dgemm_ (the reference BLAS: Fortran's interface, 32-bit integers) before all other
 * libraries. Large products go to blasworker.c by shared memory (blas.h); small ones, wrong arguments and
 * whatever fails go to the definition that the caller would have found. No libc is linked: see bare.h.
 * Nothing happens in a process that multiplies no matrices.
 *
 * RVBUNDLE_BLAS is the worker's socket, if it is not /run/rvbundle/blas.
 */
#define _GNU_SOURCE
#include "bare.h"

#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include "blas.h"

#define SOCKET "/run/rvbundle/blas"
#define WORTH_IT 16384.0                /* m n k from which a call of the worker is faster; docs/emulation.md */
#define MAX_MEMORY ((uint64_t)1 << 30)  /* bytes of shared memory for one product */
#define MIN_MEMORY ((uint64_t)1 << 20)
#define PATIENCE 10                     /* seconds that the worker may take for nothing */
#define SLOWEST 1e7                     /* m n k a second: so slow is no worker that lives */
#define CONNECTIONS 16
#define CALLERS 16
#define BY_KERNEL 4096                  /* bytes from which the kernel copies faster than emulated code */
#define ALIGN_UP(n, to) (((n) + (to)-1) & ~((uint64_t)(to)-1))

extern char **environ __attribute__((weak));
extern void *dlsym(void *, const char *) __attribute__((weak));
extern void *dlopen(const char *, int) __attribute__((weak));
extern int dladdr(const void *, Dl_info *) __attribute__((weak));

struct arguments {
    const char *transpose_a, *transpose_b;
    const int *m, *n, *k;
    const void *alpha, *a;
    const int *lda;
    const void *b;
    const int *ldb;
    const void *beta;
    void *c;
    const int *ldc;
};

/* ---- copies ---- */

typedef char chunk __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint32_t word __attribute__((aligned(1), may_alias));

/* 16 bytes at a time: an emulator takes as long for one as for 16. */
static void copy(char *to, const char *from, size_t size)
{
    size_t i = 0;
    for (; i + 64 <= size; i += 64) {
        chunk a = *(const chunk *)(from + i), b = *(const chunk *)(from + i + 16);
        chunk c = *(const chunk *)(from + i + 32), d = *(const chunk *)(from + i + 48);
        *(chunk *)(to + i) = a;
        *(chunk *)(to + i + 16) = b;
        *(chunk *)(to + i + 32) = c;
        *(chunk *)(to + i + 48) = d;
    }
    for (; i + 16 <= size; i += 16)
        *(chunk *)(to + i) = *(const chunk *)(from + i);
    for (; i + 4 <= size; i += 4)
        *(word *)(to + i) = *(const word *)(from + i);
}

/* ---- connections: one for each thread that computes at the moment ---- */

/* An open file, and which one: the program may have closed it, and have opened something else. */
struct file {
    int fd;
    uint64_t device, inode;
};

struct connection {
    _Atomic bool is_busy;
    bool is_open; /* the socket; there is shared memory where `memory` isn't NULL */
    struct file socket, shared;
    char *memory;
    uint64_t size;
};

static struct connection connections[CONNECTIONS];
static _Atomic long user;    /* the process that they are of; -1 while another thread sees to it */
static _Atomic bool is_gone; /* the worker: not tried again */

static bool remember(struct file *file, int fd)
{
    struct stat status;
    *file = (struct file){.fd = fd};
    if (sys4(SYS_fstat, fd, (long)&status, 0, 0) != 0)
        return false;
    file->device = status.st_dev;
    file->inode = status.st_ino;
    return true;
}

static bool is_same(const struct file *file)
{
    struct file now;
    return remember(&now, file->fd) && now.device == file->device && now.inode == file->inode;
}

static void drop_memory(struct connection *c)
{
    if (c->memory && is_same(&c->shared))
        close_file(c->shared.fd);
    unmap_memory(c->memory, c->size);
    c->memory = NULL;
    c->size = 0;
}

static void drop(struct connection *c)
{
    if (c->is_open && is_same(&c->socket))
        close_file(c->socket.fd);
    c->is_open = false;
    drop_memory(c);
}

/* What a process has after fork(2) is its parent's: both would speak at once. */
static bool take_over(long pid)
{
    long before = atomic_load(&user);
    if (before == pid)
        return true;
    if (before == -1 || !atomic_compare_exchange_strong(&user, &before, -1))
        return false;
    for (int i = 0; i < CONNECTIONS; i++) {
        drop(&connections[i]);
        atomic_store(&connections[i].is_busy, false);
    }
    atomic_store(&user, pid);
    return true;
}

/* A connection for this thread, perhaps one that is not open yet; NULL if all are in use. */
static struct connection *take_connection(void)
{
    if (!take_over(sys4(SYS_getpid, 0, 0, 0, 0)))
        return NULL;
    for (int i = 0; i < CONNECTIONS; i++)
        if (!atomic_exchange(&connections[i].is_busy, true))
            return &connections[i];
    return NULL;
}

static bool connect_to_worker(struct connection *c)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const char *path = &environ && environ ? variable(environ, "RVBUNDLE_BLAS") : NULL;
    struct timeval patience = {.tv_sec = PATIENCE};
    path = path ? path : SOCKET;
    if (length(path) >= sizeof address.sun_path)
        return false;
    memcpy(address.sun_path, path, length(path));
    long fd = sys4(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, 0);
    if (fd < 0)
        return false;
    /* The one for sending also limits connect(2), which waits while too many others do. */
    if (sys6(SYS_setsockopt, fd, SOL_SOCKET, SO_SNDTIMEO, (long)&patience, sizeof patience, 0) != 0 ||
        sys6(SYS_setsockopt, fd, SOL_SOCKET, SO_RCVTIMEO, (long)&patience, sizeof patience, 0) != 0 ||
        sys4(SYS_connect, fd, (long)&address, sizeof address, 0) != 0 ||
        !remember(&c->socket, (int)fd)) {
        close_file((int)fd);
        return false;
    }
    c->is_open = true;
    return true;
}

static long retry(long call, long fd, void *message, size_t size, int flags)
{
    long result;
    do
        result = sys6(call, fd, (long)message, (long)size, flags, 0, 0);
    while (result == -EINTR);
    return result;
}

/* Waits for the answer, at least for so many seconds; true if all is done. */
static bool is_done(const struct connection *c, double seconds)
{
    int32_t result;
    for (double waited = PATIENCE;; waited += PATIENCE) {
        long size = retry(SYS_recvfrom, c->socket.fd, &result, sizeof result, 0);
        if (size != -EAGAIN)
            return size == sizeof result && result == 0;
        if (waited >= seconds)
            return false;
    }
}

/* Hands memory over to the worker. */
static bool send_memory(const struct connection *c, int fd)
{
    struct blas_request request = {.what = BLAS_MAP};
    struct iovec iov = {&request, sizeof request};
    union {
        char bytes[CMSG_SPACE(sizeof fd)];
        struct cmsghdr header;
    } control = {{0}};
    struct msghdr message = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control,
    };
    control.header.cmsg_len = CMSG_LEN(sizeof fd);
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    return retry(SYS_sendmsg, c->socket.fd, &message, MSG_NOSIGNAL, 0) == sizeof request && is_done(c, 0);
}

static bool reserve(struct connection *c, uint64_t size)
{
    if (size <= c->size)
        return true;
    uint64_t larger = MIN_MEMORY;
    while (larger < size)
        larger *= 2;
    long fd = sys4(SYS_memfd_create, (long)"rvbundle-blas", MFD_CLOEXEC | MFD_ALLOW_SEALING, 0, 0);
    if (fd < 0)
        return false;
    char *memory = NULL;
    struct file shared;
    if (sys4(SYS_ftruncate, fd, (long)larger, 0, 0) == 0 &&
        sys4(SYS_fcntl, fd, F_ADD_SEALS, F_SEAL_SHRINK, 0) == 0 && remember(&shared, (int)fd))
        memory = map_memory(larger, (int)fd);
    if (!memory || !send_memory(c, (int)fd)) {
        unmap_memory(memory, larger);
        close_file((int)fd);
        return false;
    }
    drop_memory(c);
    c->shared = shared;
    c->memory = memory;
    c->size = larger;
    return true;
}

/* ---- copies to and from the shared memory, in bytes ---- */

/*
 * The kernel copies natively, but a system call takes as long as some 3 KiB by emulated instructions do. What
 * it did not copy, for whatever reason, is left.
 */
static size_t copy_by_kernel(const struct connection *c, long call, uint64_t at, char *own, size_t size)
{
    size_t done = 0;
    while (size - done >= BY_KERNEL) {
        long n = sys4(call, c->shared.fd, (long)(own + done), (long)(size - done), (long)(at + done));
        if (n <= 0)
            break;
        done += (size_t)n;
    }
    return done;
}

/* A matrix of `columns`, so many bytes each; in the program they are `ld` bytes apart. */
static void copy_in(const struct connection *c, uint64_t at, const char *own, size_t ld, size_t rows,
                    size_t columns)
{
    if (ld == rows) {
        rows *= columns;
        columns = 1;
    }
    for (size_t i = 0; i < columns; i++, at += rows, own += ld) {
        size_t done = copy_by_kernel(c, SYS_pwrite64, at, (char *)own, rows);
        copy(c->memory + at + done, own + done, rows - done);
    }
}

static void copy_out(const struct connection *c, uint64_t at, char *own, size_t ld, size_t rows, size_t columns)
{
    if (ld == rows) {
        rows *= columns;
        columns = 1;
    }
    for (size_t i = 0; i < columns; i++, at += rows, own += ld) {
        size_t done = copy_by_kernel(c, SYS_pread64, at, own, rows);
        copy(own + done, c->memory + at + done, rows - done);
    }
}

/* ---- products ---- */

static bool is_transposed(char how, uint32_t *is)
{
    how |= 0x20; /* a small letter */
    *is = how == 't' || how == 'c';
    return *is || how == 'n';
}

/* Computes C on a connection; false if it could not be done, with C untouched. */
static bool compute(struct connection *c, struct blas_request *r, const struct arguments *x, uint64_t element)
{
    uint64_t m = (uint64_t)r->m, n = (uint64_t)r->n, k = (uint64_t)r->k;
    uint64_t a_rows = r->transpose_a ? k : m, b_rows = r->transpose_b ? n : k;
    uint64_t a_size = ALIGN_UP(m * k * element, 64), b_size = ALIGN_UP(k * n * element, 64);
    r->a = (struct blas_matrix){0, (int64_t)a_rows};
    r->b = (struct blas_matrix){a_size, (int64_t)b_rows};
    r->c = (struct blas_matrix){a_size + b_size, (int64_t)m};
    if (c->is_open && (!is_same(&c->socket) || (c->memory && !is_same(&c->shared))))
        drop(c);
    if ((!c->is_open && !connect_to_worker(c)) || !reserve(c, r->c.at + m * n * element))
        return false;
    copy_in(c, r->a.at, x->a, (size_t)*x->lda * element, a_rows * element, r->transpose_a ? m : k);
    copy_in(c, r->b.at, x->b, (size_t)*x->ldb * element, b_rows * element, r->transpose_b ? k : n);
    if (r->beta != 0)
        copy_in(c, r->c.at, x->c, (size_t)*x->ldc * element, m * element, n);
    if (retry(SYS_sendto, c->socket.fd, r, sizeof *r, MSG_NOSIGNAL) != sizeof *r)
        return false;
    if (!is_done(c, (double)m * (double)n * (double)k / SLOWEST))
        return false;
    copy_out(c, r->c.at, x->c, (size_t)*x->ldc * element, m * element, n);
    return true;
}

/* Has the worker compute a product that is worth it; false if the next definition is to do it. */
static bool computed(const struct arguments *x, struct blas_request *r, uint64_t element)
{
    double work = (double)*x->m * *x->n * *x->k;
    if (*x->m < 1 || *x->n < 1 || *x->k < 1 || work < WORTH_IT || atomic_load(&is_gone))
        return false;
    if (!is_transposed(*x->transpose_a, &r->transpose_a) || !is_transposed(*x->transpose_b, &r->transpose_b))
        return false;
    r->m = *x->m;
    r->n = *x->n;
    r->k = *x->k;
    int a_rows = r->transpose_a ? r->k : r->m, b_rows = r->transpose_b ? r->n : r->k;
    if (*x->lda < a_rows || *x->ldb < b_rows || *x->ldc < r->m || r->alpha == 0)
        return false;
    double size = (double)r->m * r->k + (double)r->k * r->n + (double)r->m * r->n;
    if (size * (double)element > (double)MAX_MEMORY - 128)
        return false;
    struct connection *c = take_connection();
    if (!c)
        return false;
    bool is_computed = compute(c, r, x, element);
    if (!is_computed) {
        drop(c);
        atomic_store(&is_gone, true);
    }
    atomic_store(&c->is_busy, false);
    return is_computed;
}

/* ---- the definition that the caller would have found ---- */

typedef void gemm_function(const char *, const char *, const int *, const int *, const int *, const void *,
                           const void *, const int *, const void *, const int *, const void *, void *,
                           const int *, size_t, size_t);

struct caller {
    _Atomic(void *) from; /* an address in it */
    _Atomic(gemm_function *) next;
};

/*
 * It is among what every library finds, or among what the caller depends on: a library that was opened with
 * RTLD_LOCAL, as Python opens extensions, is found through itself alone.
 */
static gemm_function *look_up(const char *name, void *from)
{
    Dl_info info;
    if (!dlsym)
        return NULL;
    gemm_function *found = (gemm_function *)dlsym(RTLD_NEXT, name);
    if (found || !dlopen || !dladdr || !dladdr(from, &info) || !info.dli_fname)
        return found;
    void *library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return library ? (gemm_function *)dlsym(library, name) : NULL;
}

static gemm_function *next_for(struct caller *known, const char *name, void *from)
{
    for (int i = 0; i < CALLERS; i++) {
        void *other = atomic_load(&known[i].from);
        if (other == from) {
            gemm_function *next = atomic_load(&known[i].next);
            if (next)
                return next;
            break;
        }
        if (!other) {
            gemm_function *next = look_up(name, from);
            if (next && atomic_compare_exchange_strong(&known[i].from, &other, from))
                atomic_store(&known[i].next, next);
            return next;
        }
    }
    return look_up(name, from);
}

/* For a process in which no definition can be found (a libc without dlsym): slow, but right. */
#define DEFINE_PLAIN(name, real)                                                                             \
    static void name(const struct arguments *x, bool is_a, bool is_b)                                        \
    {                                                                                                        \
        const real *a = x->a, *b = x->b, alpha = *(const real *)x->alpha, beta = *(const real *)x->beta;     \
        real *c = x->c;                                                                                      \
        for (long j = 0; j < *x->n; j++)                                                                     \
            for (long i = 0; i < *x->m; i++) {                                                               \
                real sum = 0, *to = &c[j * *x->ldc + i];                                                     \
                for (long p = 0; p < *x->k && alpha != 0; p++)                                               \
                    sum += a[is_a ? i * *x->lda + p : p * *x->lda + i] *                                     \
                           b[is_b ? p * *x->ldb + j : j * *x->ldb + p];                                      \
                *to = (alpha == 0 ? 0 : alpha * sum) + (beta == 0 ? 0 : beta * *to);                         \
            }                                                                                                \
    }
DEFINE_PLAIN(plain_float, float)
DEFINE_PLAIN(plain_double, double)

static struct caller callers[2][CALLERS];

static void pass_on(const struct arguments *x, bool is_double, void *from)
{
    gemm_function *next = next_for(callers[is_double], is_double ? "dgemm_" : "sgemm_", from);
    uint32_t is_a, is_b;
    if (next)
        next(x->transpose_a, x->transpose_b, x->m, x->n, x->k, x->alpha, x->a, x->lda, x->b, x->ldb, x->beta,
             x->c, x->ldc, 1, 1);
    else if (is_transposed(*x->transpose_a, &is_a) && is_transposed(*x->transpose_b, &is_b))
        (is_double ? plain_double : plain_float)(x, is_a, is_b);
}

#define DEFINE_GEMM(name, real, is_double)                                                                   \
    EXPORT void name(const char *transpose_a, const char *transpose_b, const int *m, const int *n,           \
                     const int *k, const real *alpha, const real *a, const int *lda, const real *b,          \
                     const int *ldb, const real *beta, real *c, const int *ldc)                              \
    {                                                                                                        \
        struct arguments x = {                                                                               \
            transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc,                          \
        };                                                                                                   \
        struct blas_request r = {                                                                            \
            .what = (is_double) ? BLAS_DOUBLE : BLAS_FLOAT, .alpha = *alpha, .beta = *beta,                  \
        };                                                                                                   \
        if (!computed(&x, &r, sizeof(real)))                                                                 \
            pass_on(&x, is_double, __builtin_return_address(0));                                             \
    }
DEFINE_GEMM(sgemm_, float, false)
DEFINE_GEMM(dgemm_, double, true)
