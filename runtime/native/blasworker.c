/*
 * blasworker: multiplies matrices for emulated programs, natively. blasworker SOCKET THREADS
 *
 * A static program in the sandbox of a payload (docs/emulation.md): blas.c sends it large products, in
 * shared memory. It trusts no request: a guest can make it fail or end, no more, and it has no more
 * rights than the guest. It ends with the process that started it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "blas.h"

#define MAX_CONNECTIONS 256
#define MAX_THREADS 64
#define BLOCK_M 144L /* elements; a block of A, in float64, takes 288 KiB of the inner cache */
#define BLOCK_K 256L
#define BLOCK_N 1024L
#define MINIMUM(a, b) ((a) < (b) ? (a) : (b))
#define SHARED_WORK (1L << 21) /* m n k from which other threads help: waking one takes some 50 us */

struct product {
    const void *a, *b;
    void *c;
    long m, n, k, lda, ldb, ldc;
    bool transpose_a, transpose_b, is_double;
    double alpha, beta;
};

struct part {
    long row, rows, column, columns;
};

struct buffers {
    void *a, *b;
};

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx2,fma")))
#define KIND float_wide
#define REAL float
#define VECTOR_BYTES 32
#define TILE_VECTORS 2
#define TILE_N 6
#define TARGET WIDE
#include "gemm.h"
#define KIND double_wide
#define REAL double
#define VECTOR_BYTES 32
#define TILE_VECTORS 2
#define TILE_N 6
#define TARGET WIDE
#include "gemm.h"
#define BYTES 16 /* SSE2: 16 registers */
#define VECTORS 2
#define COLUMNS 4
#elif defined(__aarch64__)
#define BYTES 16 /* NEON: 32 registers */
#define VECTORS 2
#define COLUMNS 8
#else
#define BYTES sizeof(REAL) /* 32 scalar registers */
#define VECTORS 4
#define COLUMNS 4
#endif
#define KIND float_plain
#define REAL float
#define VECTOR_BYTES BYTES
#define TILE_VECTORS VECTORS
#define TILE_N COLUMNS
#define TARGET
#include "gemm.h"
#define KIND double_plain
#define REAL double
#define VECTOR_BYTES BYTES
#define TILE_VECTORS VECTORS
#define TILE_N COLUMNS
#define TARGET
#include "gemm.h"

#if defined(__x86_64__)
static bool is_wide;

/* AVX2 and FMA, and the kernel saves their registers: Intel's manual, volume 1, 14.3 and 14.7. */
static bool has_wide_vectors(void)
{
    unsigned a, b, c, d, enabled, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_AVX) || !(c & bit_FMA))
        return false;
    __asm__("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
    return (enabled & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}
#endif

static void multiply(const struct product *p, const struct part *part, struct buffers *buffers)
{
#if defined(__x86_64__)
    if (is_wide) {
        (p->is_double ? gemm_double_wide : gemm_float_wide)(p, part, buffers);
        return;
    }
#endif
    (p->is_double ? gemm_double_plain : gemm_float_plain)(p, part, buffers);
}

/* Room for packed blocks, a tile more than they are large; ends the worker where there is none. */
static struct buffers make_buffers(void)
{
    struct buffers made = {
        aligned_alloc(64, sizeof(double) * BLOCK_K * BLOCK_M),
        aligned_alloc(64, sizeof(double) * BLOCK_K * BLOCK_N),
    };
    if (!made.a || !made.b)
        exit(1);
    return made;
}

/* ---- threads ---- */

/*
 * Helpers wait for a job, and take one part of it after the other, as does the thread whose job it is. One
 * job has the helpers at a time; others are done by their own threads.
 */
static struct {
    pthread_mutex_t use, lock;
    pthread_cond_t start, end;
    const struct product *product;
    long parts, taken, done;
    long threads;
} pool = {
    .use = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .start = PTHREAD_COND_INITIALIZER,
    .end = PTHREAD_COND_INITIALIZER,
    .threads = 1,
};

/* The larger of C's sides is split, in multiples of 48: each tile's sides divide it. */
static struct part part_of(const struct product *p, long number, long parts)
{
    bool by_rows = p->m > p->n;
    long side = by_rows ? p->m : p->n, step = ((side + parts - 1) / parts + 47) / 48 * 48;
    long start = MINIMUM(side, number * step), size = MINIMUM(step, side - start);
    return by_rows ? (struct part){start, size, 0, p->n} : (struct part){0, p->m, start, size};
}

/* Takes parts until there are none left. The pool is locked, but while it computes. */
static void take_parts(struct buffers *buffers)
{
    while (pool.taken < pool.parts) {
        const struct product *product = pool.product;
        struct part part = part_of(product, pool.taken++, pool.parts);
        pthread_mutex_unlock(&pool.lock);
        if (part.rows && part.columns)
            multiply(product, &part, buffers);
        pthread_mutex_lock(&pool.lock);
        if (++pool.done == pool.parts)
            pthread_cond_signal(&pool.end);
    }
}

static void *help(void *unused)
{
    (void)unused;
    struct buffers buffers = make_buffers();
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        take_parts(&buffers);
        pthread_cond_wait(&pool.start, &pool.lock);
    }
    return NULL;
}

static void compute(const struct product *p, struct buffers *buffers)
{
    double work = (double)p->m * (double)p->n * (double)p->k;
    if (pool.threads == 1 || work < SHARED_WORK || pthread_mutex_trylock(&pool.use) != 0) {
        multiply(p, &(struct part){0, p->m, 0, p->n}, buffers);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    pool.product = p;
    pool.taken = pool.done = 0;
    pool.parts = pool.threads;
    pthread_cond_broadcast(&pool.start);
    take_parts(buffers);
    while (pool.done < pool.parts)
        pthread_cond_wait(&pool.end, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.use);
}

/* ---- connections ---- */

struct connection {
    int fd;
    char *memory;
    size_t size;
    struct buffers buffers;
};

static atomic_int connections;

static int map(struct connection *c, int fd)
{
    struct stat status;
    int seals = fcntl(fd, F_GET_SEALS);
    /* Without that seal, the guest could have this process die by SIGBUS. */
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &status) != 0 || status.st_size <= 0)
        return -EINVAL;
    void *memory = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        return -errno;
    if (c->memory)
        munmap(c->memory, c->size);
    c->memory = memory;
    c->size = (size_t)status.st_size;
    return 0;
}

/* Finds a matrix in the memory; false if it isn't all there. No sum here can overflow: see the types. */
static bool find(const struct connection *c, const struct blas_matrix *matrix, int64_t rows, int64_t columns,
                 size_t element, void *found)
{
    if (rows < 1 || columns < 1)
        return true; /* nobody looks at it */
    if (matrix->ld < rows || matrix->ld > INT32_MAX || matrix->at % 8 || matrix->at > c->size)
        return false;
    if ((uint64_t)((columns - 1) * matrix->ld + rows) > (c->size - matrix->at) / element)
        return false;
    *(char **)found = c->memory + matrix->at;
    return true;
}

static int answer(struct connection *c, const struct blas_request *r)
{
    bool is_double = r->what == BLAS_DOUBLE;
    size_t element = is_double ? sizeof(double) : sizeof(float);
    struct product p = {
        .m = r->m, .n = r->n, .k = r->k, .lda = r->a.ld, .ldb = r->b.ld, .ldc = r->c.ld,
        .transpose_a = r->transpose_a, .transpose_b = r->transpose_b, .is_double = is_double,
        .alpha = r->alpha, .beta = r->beta,
    };
    if ((r->what != BLAS_FLOAT && !is_double) || p.m < 1 || p.n < 1 || p.k < 0)
        return -EINVAL;
    if (!find(c, &r->a, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, element, &p.a) ||
        !find(c, &r->b, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, element, &p.b) ||
        !find(c, &r->c, p.m, p.n, element, &p.c))
        return -EINVAL;
    compute(&p, &c->buffers);
    return 0;
}

/* Receives a request; the descriptor that came with it, or -1. False at the connection's end. */
static bool receive(int from, struct blas_request *request, int *fd)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr header;
    } control;
    struct iovec iov = {request, sizeof *request};
    struct msghdr message = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control,
    };
    ssize_t size = recvmsg(from, &message, MSG_CMSG_CLOEXEC);
    struct cmsghdr *header = size >= 0 ? CMSG_FIRSTHDR(&message) : NULL;
    *fd = -1;
    if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
        header->cmsg_len == CMSG_LEN(sizeof *fd))
        memcpy(fd, CMSG_DATA(header), sizeof *fd);
    return size == sizeof *request;
}

static void *serve(void *argument)
{
    struct connection *c = argument;
    struct blas_request request;
    int fd;
    c->buffers = make_buffers();
    while (receive(c->fd, &request, &fd)) {
        int32_t result = request.what != BLAS_MAP ? answer(c, &request) : fd < 0 ? -EINVAL : map(c, fd);
        if (fd >= 0)
            close(fd);
        fd = -1;
        if (send(c->fd, &result, sizeof result, MSG_NOSIGNAL) != sizeof result)
            break;
    }
    if (fd >= 0)
        close(fd);
    close(c->fd);
    if (c->memory)
        munmap(c->memory, c->size);
    free(c->buffers.a);
    free(c->buffers.b);
    free(c);
    atomic_fetch_sub(&connections, 1);
    return NULL;
}

/* A socket that is ready once its name is there. */
static int listen_at(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char *name = address.sun_path;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    int size = snprintf(name, sizeof address.sun_path, "%s.new", path);
    if (fd < 0 || size >= (int)sizeof address.sun_path)
        return -1;
    if (bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 64) != 0)
        return -1;
    return rename(name, path) == 0 ? fd : -1;
}

static bool start_thread(void *(*function)(void *), void *argument)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, function, argument) != 0)
        return false;
    pthread_detach(thread);
    return true;
}

static void accept_one(int listening)
{
    int fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) {
        usleep(10000); /* no descriptors or no memory: perhaps later */
        return;
    }
    struct connection *c = calloc(1, sizeof *c);
    if (c && atomic_fetch_add(&connections, 1) < MAX_CONNECTIONS) {
        c->fd = fd;
        if (start_thread(serve, c))
            return;
    }
    if (c)
        atomic_fetch_sub(&connections, 1);
    free(c);
    close(fd);
}

int main(int count, char **argv)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGPIPE, SIG_IGN);
    if (count != 3)
        return 2;
    long threads = strtol(argv[2], NULL, 10);
    int listening = listen_at(argv[1]);
    if (listening < 0)
        return 1;
#if defined(__x86_64__)
    is_wide = has_wide_vectors();
#endif
    while (pool.threads < MINIMUM(threads, MAX_THREADS) && start_thread(help, NULL))
        pool.threads++;
    for (;;)
        accept_one(listening);
}
