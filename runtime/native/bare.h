/*
 * bare.h: what the C here needs of a libc, without one.
 *
 * All system calls are made directly: so no second libc is loaded next to the program's own, errno
 * stays untouched, and everything here is async-signal-safe. For one source file per library or
 * program.
 */
#ifndef BARE_H
#define BARE_H

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18 /* Linux 4.14, glibc 2.27 */
#endif

#define EXPORT __attribute__((visibility("default")))
#define MAX_PATH 4096

#if defined(__x86_64__)
static inline long sys6(long n, long a, long b, long c, long d, long e, long f)
{
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
/* Exactly these instructions: unwinders and gdb know a signal frame by their bytes. */
__asm__(".text\n.type rvb_restore,@function\n.hidden rvb_restore\n"
        "rvb_restore: .byte 0x48,0xc7,0xc0,0x0f,0,0,0,0x0f,0x05\n"); /* mov $15,%rax; syscall */
void rvb_restore(void);
#elif defined(__aarch64__)
static inline long sys6(long n, long a, long b, long c, long d, long e, long f)
{
    register long x8 __asm__("x8") = n;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
                     : "memory");
    return x0;
}
#elif defined(__riscv) && __riscv_xlen == 64
static inline long sys6(long n, long a, long b, long c, long d, long e, long f)
{
    register long a7 __asm__("a7") = n;
    register long a0 __asm__("a0") = a;
    register long a1 __asm__("a1") = b;
    register long a2 __asm__("a2") = c;
    register long a3 __asm__("a3") = d;
    register long a4 __asm__("a4") = e;
    register long a5 __asm__("a5") = f;
    __asm__ volatile("ecall"
                     : "+r"(a0)
                     : "r"(a7), "r"(a1), "r"(a2), "r"(a3), "r"(a4), "r"(a5)
                     : "memory");
    return a0;
}
#else
#error "unknown architecture"
#endif

static inline long sys4(long n, long a, long b, long c, long d)
{
    return sys6(n, a, b, c, d, 0, 0);
}

#ifdef BARE_WITH_LIBC /* tests that run parts of this under sanitizers */
#include <string.h>
#else
/* The compiler may call these by itself. */
void *memcpy(void *restrict to, const void *restrict from, size_t size)
{
    for (size_t i = 0; i < size; i++)
        ((char *)to)[i] = ((const char *)from)[i];
    return to;
}

void *memset(void *to, int value, size_t size)
{
    for (size_t i = 0; i < size; i++)
        ((char *)to)[i] = (char)value;
    return to;
}
#endif

static inline bool same_bytes(const void *a, const void *b, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if (((const char *)a)[i] != ((const char *)b)[i])
            return false;
    return true;
}

static inline size_t length(const char *s)
{
    size_t n = 0;
    while (s[n])
        n++;
    return n;
}

static inline bool starts_with(const char *s, const char *start)
{
    while (*start)
        if (*s++ != *start++)
            return false;
    return true;
}

static inline const char *base_name(const char *path)
{
    const char *base = path;
    for (; *path; path++)
        if (*path == '/')
            base = path + 1;
    return base;
}

/* Appends to a string in a buffer of MAX_PATH bytes; false when it doesn't fit. */
static inline bool append(char *to, const char *s)
{
    size_t have = length(to), more = length(s);
    if (have + more >= MAX_PATH)
        return false;
    memcpy(to + have, s, more + 1);
    return true;
}

static inline bool append_number(char *to, unsigned long n)
{
    char digits[24];
    size_t at = sizeof digits - 1;
    digits[at] = 0;
    do
        digits[--at] = (char)('0' + n % 10);
    while (n /= 10);
    return append(to, digits + at);
}

static inline int open_file(const char *path, int flags)
{
    return (int)sys4(SYS_openat, AT_FDCWD, (long)path, flags | O_CLOEXEC, 0644);
}

static inline void close_file(int fd)
{
    sys4(SYS_close, fd, 0, 0, 0);
}

static inline bool read_at(int fd, void *to, size_t size, uint64_t offset)
{
    return sys4(SYS_pread64, fd, (long)to, (long)size, (long)offset) == (long)size;
}

static inline bool write_all(int fd, const void *from, size_t size)
{
    for (size_t done = 0; done < size;) {
        long n = sys4(SYS_write, fd, (long)((const char *)from + done), (long)(size - done), 0);
        if (n == -EINTR)
            continue;
        if (n <= 0)
            return false;
        done += (size_t)n;
    }
    return true;
}

/* NULL on failure. fd -1: zeroed private memory. */
static inline void *map_memory(size_t size, int fd)
{
    int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    long at = sys6(SYS_mmap, 0, (long)size, PROT_READ | PROT_WRITE, flags, fd, 0);
    return at < 0 && at > -4096 ? NULL : (void *)at;
}

static inline void unmap_memory(void *at, size_t size)
{
    if (at)
        sys4(SYS_munmap, (long)at, (long)size, 0, 0);
}

/* For code that came as data; the kernel does it for a file's pages. */
static inline void synchronize_code(char *start, size_t size)
{
#if defined(__aarch64__)
    uint64_t sizes;
    __asm__ volatile("mrs %0, ctr_el0" : "=r"(sizes));
    size_t data_line = (size_t)4 << (sizes >> 16 & 15), code_line = (size_t)4 << (sizes & 15);
    for (size_t i = 0; i < size; i += data_line)
        __asm__ volatile("dc cvau, %0" : : "r"(start + i) : "memory");
    __asm__ volatile("dsb ish" : : : "memory");
    for (size_t i = 0; i < size; i += code_line)
        __asm__ volatile("ic ivau, %0" : : "r"(start + i) : "memory");
    __asm__ volatile("dsb ish; isb" : : : "memory");
#elif defined(__riscv)
    sys4(259 /* riscv_flush_icache */, (long)start, (long)(start + size), 0, 0);
#else
    (void)start;
    (void)size;
#endif
}

static inline const char *variable(char **environment, const char *name)
{
    size_t n = length(name);
    for (; *environment; environment++)
        if (starts_with(*environment, name) && (*environment)[n] == '=')
            return *environment + n + 1;
    return NULL;
}

/* ---- signals ---- */

/* The kernel's struct sigaction, see rt_sigaction(2); only some architectures have a restorer. */
struct kernel_action {
    void *handler;
    unsigned long flags;
#if defined(__x86_64__) || defined(__aarch64__)
    void *restorer;
#endif
    unsigned long mask;
#if defined(__riscv)
    unsigned long spare; /* QEMU 7.2 takes the mask for a restorer, and this word for the mask */
#endif
};

/*
 * box64 returns from handlers by itself, and calls a restorer as a function, with no frame that
 * sigreturn(2) could take. It can't be told from within: who knows that it is box64 sets this.
 */
static bool is_box64;

/* The handler runs with the signals of `mask` blocked. */
static inline void set_kernel_action(int signal, void *handler, unsigned long flags,
                                     unsigned long mask, struct kernel_action *old)
{
    struct kernel_action action = {.handler = handler, .flags = flags, .mask = mask};
#if defined(__riscv)
    action.spare = mask;
#endif
#if defined(__x86_64__)
    if (!is_box64) {
        action.flags |= 0x04000000; /* SA_RESTORER: obligatory there */
        action.restorer = (void *)rvb_restore;
    }
#endif
    sys4(SYS_rt_sigaction, signal, (long)&action, (long)old, 8);
}

/*
 * A tail call leaves no frame of ours below the application's handler. An unwinder couldn't pass
 * it: dl_iterate_phdr() doesn't tell about libraries in the audit namespace.
 */
#if __has_attribute(musttail)
#define TAIL_CALL __attribute__((musttail)) return
#else
#define TAIL_CALL
#endif

/* QEMU 7.2 enters handlers on x86_64 with a stack that is not aligned as the ABI has it. */
#if defined(__x86_64__)
#define ALIGN_STACK __attribute__((force_align_arg_pointer))
#else
#define ALIGN_STACK
#endif

/*
 * After vfork(2) the child runs in its parent's memory, but has signal handlers of its own. What it
 * sets (CPython: all to the default, before exec) must not change what we remember for the parent.
 * `owner` is the process that this memory belongs to; fork(2) zeroes it for the child, see
 * MADV_WIPEONFORK in madvise(2). Before Linux 4.14 it stays NULL, and the child's setting is taken
 * for the parent's.
 */
static _Atomic long *owner;

static inline bool is_vfork_child(void)
{
    long pid = sys4(SYS_getpid, 0, 0, 0, 0), before = 0;
    if (!owner || atomic_compare_exchange_strong(owner, &before, pid))
        return false;
    return before != pid;
}

static inline void map_owner(size_t page)
{
    owner = map_memory(page, -1);
    if (owner && sys4(SYS_madvise, (long)owner, (long)page, MADV_WIPEONFORK, 0) != 0)
        owner = NULL;
}

#endif
