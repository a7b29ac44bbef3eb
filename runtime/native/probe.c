/*
 * probe.c: a small static program that tells whether an emulator (or a kernel) runs guests rightly.
 *
 * It does what payloads rely on and what broken emulators get wrong, writes one line,
 *
 *   rvbundle probe MACHINE PAGESIZE
 *
 * and exits with 0. Arguments, in any order:
 *
 *   pages    check also what the guard (guard.c) does with code that is absent
 *   box64    this is box64, which returns from signal handlers in a way of its own
 *
 * A check that fails ends it with the check's number, without that line:
 *
 *    2  the stack that the program starts with has no page size
 *    3  uname(2) names another machine
 *   10  memory cannot be mapped
 *   11  a store to a page without access raises no SIGSEGV
 *   12  the handler is told a wrong address
 *   13  after the handler has brought the page back, the store is not done, or done twice
 *   14  pages that the handler moved there have wrong bytes
 *   20  no process can be started
 *   21  waiting for it tells a wrong code
 *   22  memory is not copied for it
 *   30  no thread can be started
 *   31  two threads lose each other's atomic additions
 *   40  floating-point arithmetic is not IEEE 754's
 *   41  conversions between numbers are wrong
 *   50  a signal does not interrupt the program and return to it
 *   60  (pages) code in a page without access is not executed after the handler has brought it
 *
 * A signal that it does not expect kills it; one that hangs is for the caller to notice. Only system
 * calls that box64 knows (it knows no setitimer(2)) are used.
 */
#define _GNU_SOURCE
#include "bare.h"

#include <elf.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <ucontext.h>

#if defined(__x86_64__)
#define MACHINE "x86_64"
__asm__(".globl _start\n_start: xor %ebp, %ebp\nmov %rsp, %rdi\nand $-16, %rsp\ncall begin\n");
/* start_thread(flags, stack, tid): the child takes the function and its argument from the stack. */
__asm__(".globl start_thread\nstart_thread: mov $56, %eax\nmov %rdx, %r10\nxor %r8d, %r8d\nsyscall\n"
        "test %rax, %rax\njnz 1f\nxor %ebp, %ebp\npop %rax\npop %rdi\ncall *%rax\n"
        "1: ret\n");
static const uint32_t add_42[] = {0xc32a478d}; /* lea 42(%rdi), %eax; ret */
#elif defined(__aarch64__)
#define MACHINE "aarch64"
__asm__(".globl _start\n_start: mov x29, #0\nmov x30, #0\nmov x0, sp\nb begin\n");
__asm__(".globl start_thread\nstart_thread: mov x4, x2\nmov x2, x4\nmov x3, #0\nmov x8, #220\nsvc #0\n"
        "cbnz x0, 1f\nmov x29, #0\nldp x1, x0, [sp], #16\nblr x1\n1: ret\n");
static const uint32_t add_42[] = {0x1100a800, 0xd65f03c0}; /* add w0, w0, #42; ret */
#else
#define MACHINE "riscv64"
__asm__(".globl _start\n_start: li s0, 0\nmv a0, sp\nandi sp, sp, -16\ntail begin\n");
__asm__(".globl start_thread\nstart_thread: mv a4, a2\nli a3, 0\nli a7, 220\necall\n"
        "bnez a0, 1f\nli s0, 0\nld a1, 0(sp)\nld a0, 8(sp)\naddi sp, sp, 16\njalr a1\n1: ret\n");
static const uint32_t add_42[] = {0x02a5051b, 0x00008067}; /* addiw a0, a0, 42; ret */
#endif
#define ROUNDS 20000
#define STACK 16384

long start_thread(unsigned long flags, void *stack, _Atomic int *tid);

static _Noreturn void leave(int code)
{
    for (;;)
        sys4(SYS_exit_group, code, 0, 0, 0);
}

static void check(int number, bool is_right)
{
    if (!is_right)
        leave(number);
}

static size_t page;

/* ---- pages without access ---- */

static char *absent;
static const void *content; /* what the handler puts at the page's start */
static size_t content_size;
static int bring_protection, wrong_number;
static volatile int faults;

/* As the guard does it: the page is filled elsewhere, and moved. */
ALIGN_STACK static void bring(int signal, siginfo_t *info, void *context)
{
    (void)signal;
    (void)context;
    check(12, ((uintptr_t)info->si_addr & ~(page - 1)) == (uintptr_t)absent);
    check(wrong_number, ++faults == 1);
    char *data = map_memory(page, -1);
    check(10, data);
    memcpy(data, content, content_size);
    for (size_t i = content_size; i < page; i++)
        data[i] = (char)(i * 7);
    synchronize_code(data, page);
    check(10, sys4(SYS_mprotect, (long)data, (long)page, bring_protection, 0) == 0);
    check(10, sys6(SYS_mremap, (long)data, (long)page, (long)page, MREMAP_MAYMOVE | MREMAP_FIXED,
                   (long)absent, 0) == (long)absent);
}

static void prepare(int number, int protection, const void *bytes, size_t size)
{
    absent = map_memory(page, -1);
    check(10, absent && sys4(SYS_mprotect, (long)absent, (long)page, PROT_NONE, 0) == 0);
    content = bytes;
    content_size = size;
    bring_protection = protection;
    wrong_number = number;
    faults = 0;
    set_kernel_action(SIGSEGV, (void *)bring, SA_SIGINFO | SA_NODEFER | SA_RESTART, 0, NULL);
}

static void check_data(void)
{
    static const uint64_t start = 41;
    prepare(13, PROT_READ | PROT_WRITE, &start, sizeof start);
    ++*(volatile uint64_t *)(void *)absent;
    check(11, faults == 1);
    check(13, *(volatile uint64_t *)(void *)absent == 42);
    for (size_t i = sizeof start; i < page; i++)
        check(14, absent[i] == (char)(i * 7));
    unmap_memory(absent, page);
}

static void check_code(void)
{
    prepare(60, PROT_READ | PROT_EXEC, add_42, sizeof add_42);
    int (*volatile function)(int) = (int (*)(int))(uintptr_t)absent;
    check(60, function(0) == 42 && function(-50) == -8 && faults == 1);
}

/* ---- processes and threads ---- */

static volatile int copied = 1;

static void check_process(void)
{
    int status = -1;
    long pid = sys6(SYS_clone, SIGCHLD, 0, 0, 0, 0, 0);
    check(20, pid >= 0);
    if (pid == 0) {
        copied = 2;
        leave(7);
    }
    check(21, sys4(SYS_wait4, pid, (long)&status, 0, 0) == pid && WIFEXITED(status) &&
                  WEXITSTATUS(status) == 7);
    check(22, copied == 1);
}

static _Atomic long sum;
static _Atomic int tid = 1;

static void add(void)
{
    for (int i = 0; i < ROUNDS; i++)
        atomic_fetch_add(&sum, 1);
}

static void run_thread(void)
{
    add();
    for (;;)
        sys4(SYS_exit, 0, 0, 0, 0);
}

static void check_threads(void)
{
    static _Alignas(16) char stack[STACK];
    unsigned long flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD |
                          CLONE_SYSVSEM | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID;
    void **top = (void **)(void *)(stack + STACK) - 2;
    top[0] = (void *)(uintptr_t)run_thread;
    check(30, start_thread(flags, top, &tid) > 0);
    add();
    for (int now; (now = atomic_load(&tid));) /* the kernel sets it to 0, and wakes us */
        sys6(SYS_futex, (long)&tid, FUTEX_WAIT, now, 0, 0, 0);
    check(31, sum == 2 * ROUNDS);
}

/* ---- numbers ---- */

static uint64_t bits_of(double x)
{
    union {
        double x;
        uint64_t bits;
    } both = {x};
    return both.bits;
}

static void check_arithmetic(void)
{
#pragma STDC FP_CONTRACT OFF
    volatile double x = 0, tiny = 1e-308, huge = 1e308, zero = 0;
    volatile float y = 0;
    for (int i = 1; i <= 1000; i++) {
        x = x + 1.0 / i;
        y = y + 1.0f / (float)i;
    }
    check(40, bits_of(x) == 0x401df11f45f4e618 && bits_of(y) == bits_of(7.485478401184082));
    check(40, tiny / 1024 > 0 && tiny / 1024 * 1024 != 0 && huge * 10 > huge);
    check(40, zero / zero != zero / zero && bits_of(-zero) == 1UL << 63);
    volatile long big = (1L << 53) + 1;
    volatile double less = -2.75, large = 1e18;
    volatile unsigned long most = ~0UL;
    check(41, (long)less == -2 && (long)large == 1000000000000000000 &&
                  (double)big == 9007199254740992.0 && (float)big == 9007199254740992.0f &&
                  (double)most == 18446744073709551616.0);
}

/* ---- signals ---- */

static volatile int signals;

ALIGN_STACK static void on_signal(int signal)
{
    signals += signal;
}

static void check_signal(void)
{
    set_kernel_action(SIGUSR1, (void *)on_signal, SA_RESTART, 0, NULL);
    sys4(SYS_tgkill, sys4(SYS_getpid, 0, 0, 0, 0), sys4(SYS_gettid, 0, 0, 0, 0), SIGUSR1, 0);
    check(50, signals == SIGUSR1);
}

/* ---- the start ---- */

static size_t page_size(long *stack)
{
    long *at = stack + 1 + stack[0] + 1; /* the environment is behind the arguments */
    while (*at++)
        ;
    for (; at[0] != AT_NULL; at += 2)
        if (at[0] == AT_PAGESZ)
            return (size_t)at[1];
    return 0;
}

static bool has_argument(const long *stack, const char *argument)
{
    for (long i = 1; i < stack[0]; i++)
        if (starts_with((const char *)stack[1 + i], argument) &&
            length((const char *)stack[1 + i]) == length(argument))
            return true;
    return false;
}

/* `stack` is as the kernel hands it over: the number of arguments, these, the environment... */
__attribute__((used)) _Noreturn void begin(long *stack)
{
    char line[MAX_PATH];
    struct utsname names;
    bool with_code = has_argument(stack, "pages");
    is_box64 = has_argument(stack, "box64");
    page = page_size(stack);
    check(2, page >= 4096 && (page & (page - 1)) == 0);
    check(3, sys4(SYS_uname, (long)&names, 0, 0, 0) == 0 &&
                 same_bytes(names.machine, MACHINE, sizeof MACHINE));
    check_data();
    check_process();
    check_threads();
    check_arithmetic();
    check_signal();
    if (with_code)
        check_code();
    line[0] = 0;
    append(line, "rvbundle probe " MACHINE " ");
    append_number(line, page);
    append(line, "\n");
    leave(write_all(1, line, length(line)) ? 0 : 1);
}
