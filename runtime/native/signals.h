/*
 * signals.h: SIGSEGV and SIGBUS as the application sees them, while the guard has both in the
 * kernel.
 *
 * Its handlers for them are remembered here, and never set in the kernel; every mask that it gives
 * goes to the kernel without them, since any code may need an absent page. What it reads back is
 * what it gave. Differences that remain:
 *   - a fault while it blocks the signal, so also in the handler for it, goes to the handler (the
 *     kernel would kill)
 *   - a signal that kill(2) sends to a process may reach a thread that blocks it: it is held there
 *     until it is unblocked; sigpending(2), sigwait(3) and signalfd(2) don't see it
 *   - a thread's mask as pthread_sigmask(3) tells it does not have what its creator had blocked of
 *     the two; a program that execve(2) starts has both unblocked and, if ignored, the default
 *   - siglongjmp(3) doesn't bring the two back into the mask that it restores
 */
#ifndef SIGNALS_H
#define SIGNALS_H

#include "bare.h"

#include <sys/select.h>
#include <time.h>
#include <ucontext.h>

static bool enabled;
static void on_signal(int signal, siginfo_t *info, void *context);

typedef void (*signal_handler)(int);
typedef void (*action_handler)(int, siginfo_t *, void *);

/* ---- what the application wants done about SIGSEGV and SIGBUS ---- */

/*
 * Setters take a slot each and publish its number, so that a handler on another thread never reads
 * a half-written one (unless 64 more are set meanwhile).
 */
#define ACTION_SLOTS 64
static struct {
    struct sigaction slots[ACTION_SLOTS];
    atomic_uint next, current;
} wanted[2];

static const unsigned long our_signals = 1UL << (SIGSEGV - 1) | 1UL << (SIGBUS - 1);

static bool is_ours(int signal)
{
    return signal == SIGSEGV || signal == SIGBUS;
}

static struct sigaction *application_action(int signal)
{
    unsigned i = signal == SIGBUS;
    return &wanted[i].slots[atomic_load_explicit(&wanted[i].current, memory_order_acquire)];
}

static void set_application_action(int signal, const struct sigaction *action)
{
    unsigned i = signal == SIGBUS;
    unsigned slot = (atomic_fetch_add(&wanted[i].next, 1) + 1) % ACTION_SLOTS;
    wanted[i].slots[slot] = *action;
    atomic_store_explicit(&wanted[i].current, slot, memory_order_release);
}

/* glibc's sigset_t starts with the kernel's 64 bits. */
static unsigned long *bits_of(const sigset_t *set)
{
    return (unsigned long *)(uintptr_t)set;
}

/* What this thread asked for by sigprocmask(2); the kernel's mask never has our signals. */
static _Thread_local struct {
    unsigned long blocked, held;
    siginfo_t info[2]; /* of the held ones: sent by kill(2) while they were blocked */
} thread;

/*
 * Other signals wait while a page is brought back: so a handler that leaves by siglongjmp(3) cannot
 * leave a half-done restoration behind, and one signal's frame is all the stack that is needed.
 * Those that tell of a mistake, or that a debugger or a sandbox uses, do not.
 */
static const unsigned long waiting_signals =
    ~(1UL << (SIGSEGV - 1) | 1UL << (SIGBUS - 1) | 1UL << (SIGILL - 1) | 1UL << (SIGFPE - 1) |
      1UL << (SIGTRAP - 1) | 1UL << (SIGSYS - 1));

static void set_mask(int how, unsigned long mask)
{
    sys4(SYS_rt_sigprocmask, how, (long)&mask, 0, 8);
}

static void send_to_self(int signal, const siginfo_t *info)
{
    long pid = sys4(SYS_getpid, 0, 0, 0, 0), tid = sys4(SYS_gettid, 0, 0, 0, 0);
    sys4(SYS_rt_tgsigqueueinfo, pid, tid, signal, (long)info);
}

/*
 * box64 takes no default action for a fault: it would come again and again. It also maps libraries
 * in a way of its own, so that the guard can't tell whether an absent page is the cause.
 */
static _Noreturn void die_under_box64(int signal)
{
    static const char text[] =
        "rvbundle: a fault under box64, which cannot bring back code that was left out of the "
        "image\nhint: use qemu-user (--emulator qemu), or build the image with [trim] level = "
        "\"none\"\n";
    write_all(2, text, sizeof text - 1);
    for (;;)
        sys4(SYS_exit_group, 128 + signal, 0, 0, 0);
}

/*
 * Back to the default: the faulting instruction runs again, and ends the process as it should. A
 * signal that was sent is sent once more, and comes when the handler has returned.
 */
static void die_by_default(int signal, const siginfo_t *info)
{
    if (is_box64 && info->si_code > 0)
        die_under_box64(signal);
    set_kernel_action(signal, SIG_DFL, 0, 0, NULL);
    if (info->si_code > 0)
        return;
    set_mask(SIG_BLOCK, 1UL << (signal - 1));
    send_to_self(signal, info);
}

/* The handler to go on with, as the kernel would choose it; NULL: none. */
static action_handler prepare_handler(int signal, const siginfo_t *info, const ucontext_t *context)
{
    bool sent = info->si_code <= 0;
    const struct sigaction *action = application_action(signal);
    if (sent && thread.blocked & 1UL << (signal - 1)) {
        thread.info[signal == SIGBUS] = *info;
        thread.held |= 1UL << (signal - 1);
        return NULL;
    }
    if (sent && action->sa_handler == SIG_IGN)
        return NULL; /* only a signal that was sent can be ignored; for a fault the kernel kills */
    if (action->sa_handler == SIG_DFL || action->sa_handler == SIG_IGN) {
        die_by_default(signal, info);
        return NULL;
    }
    action_handler handler = action->sa_sigaction;
    unsigned long mask = *bits_of(&context->uc_sigmask) | *bits_of(&action->sa_mask);
    if (action->sa_flags & SA_RESETHAND)
        set_application_action(signal, &(struct sigaction){.sa_handler = SIG_DFL});
    set_mask(SIG_SETMASK, mask & ~our_signals); /* sigreturn(2) undoes it */
    return handler;
}

/* A fault in the application's handler enters it again: our signals are never blocked. */
static void set_guard_action(int signal, const struct sigaction *action, struct kernel_action *old)
{
    bool has_handler = action->sa_handler != SIG_DFL && action->sa_handler != SIG_IGN;
    int wishes = SA_ONSTACK | SA_RESTART;
    if (has_handler)
        wishes &= action->sa_flags;
    set_kernel_action(signal, (void *)on_signal, (unsigned)(SA_SIGINFO | SA_NODEFER | wishes),
                      waiting_signals, old);
}

/* ---- libc's functions behind ours, or system calls in their stead ---- */

extern void *dlsym(void *, const char *) __attribute__((weak));
extern char *dlerror(void) __attribute__((weak));
extern int *__errno_location(void) __attribute__((weak));

static int fail(long result)
{
    if (result >= 0)
        return (int)result;
    if (__errno_location)
        *__errno_location() = (int)-result;
    return -1;
}

static int raw_sigaction(int signal, const struct sigaction *action, struct sigaction *old)
{
    struct kernel_action new = {0}, before = {0};
    if (action) {
        new.handler = (void *)action->sa_handler;
        new.flags = (unsigned)action->sa_flags;
        new.mask = *bits_of(&action->sa_mask);
#if defined(__x86_64__)
        if (!is_box64) {
            new.flags |= 0x04000000; /* SA_RESTORER */
            new.restorer = (void *)rvb_restore;
        }
#endif
    }
    long result = sys4(SYS_rt_sigaction, signal, (long)(action ? &new : NULL), (long)&before, 8);
    if (result == 0 && old) {
        *old = (struct sigaction){.sa_handler = (signal_handler)before.handler,
                                  .sa_flags = (int)before.flags};
        *bits_of(&old->sa_mask) = before.mask;
    }
    return fail(result);
}

static int raw_pthread_sigmask(int how, const sigset_t *set, sigset_t *old)
{
    unsigned long mask = set ? *bits_of(set) & ~(3UL << 31) : 0; /* 32 and 33 are libc's own */
    return (int)-sys4(SYS_rt_sigprocmask, how, (long)(set ? &mask : NULL), (long)old, 8);
}

static int raw_sigprocmask(int how, const sigset_t *set, sigset_t *old)
{
    return fail(-raw_pthread_sigmask(how, set, old));
}

static pid_t raw_vfork(void)
{
    return fail(sys6(SYS_clone, SIGCHLD, 0, 0, 0, 0, 0)); /* fork(2) does, but for its cost */
}

struct pollfd;
struct epoll_event;
typedef int sigaction_function(int, const struct sigaction *, struct sigaction *);
typedef signal_handler signal_function(int, signal_handler);
typedef int mask_function(int, const sigset_t *, sigset_t *);
typedef int sigsuspend_function(const sigset_t *);
typedef int ppoll_function(struct pollfd *, unsigned long, const struct timespec *,
                           const sigset_t *);
typedef int pselect_function(int, fd_set *, fd_set *, fd_set *, const struct timespec *,
                             const sigset_t *);
typedef int epoll_pwait_function(int, struct epoll_event *, int, int, const sigset_t *);
typedef int epoll_pwait2_function(int, struct epoll_event *, int, const struct timespec *,
                                  const sigset_t *);
typedef int setsigmask_function(void *, const sigset_t *);
typedef pid_t vfork_function(void);

static sigaction_function *next_sigaction = raw_sigaction;
static signal_function *next_signal, *next_sysv_signal, *next_sigset;
static mask_function *next_sigprocmask = raw_sigprocmask;
static mask_function *next_pthread_sigmask = raw_pthread_sigmask;
static sigsuspend_function *next_sigsuspend;
static ppoll_function *next_ppoll;
static pselect_function *next_pselect;
static epoll_pwait_function *next_epoll_pwait;
static epoll_pwait2_function *next_epoll_pwait2;
static setsigmask_function *next_setsigmask;
static vfork_function *next_vfork = raw_vfork;

static void find_next(void)
{
    static const struct {
        const char *name;
        void **function;
    } all[] = {
        {"sigaction", (void **)&next_sigaction},
        {"signal", (void **)&next_signal},
        {"__sysv_signal", (void **)&next_sysv_signal},
        {"sigset", (void **)&next_sigset},
        {"sigprocmask", (void **)&next_sigprocmask},
        {"pthread_sigmask", (void **)&next_pthread_sigmask},
        {"sigsuspend", (void **)&next_sigsuspend},
        {"ppoll", (void **)&next_ppoll},
        {"pselect", (void **)&next_pselect},
        {"epoll_pwait", (void **)&next_epoll_pwait},
        {"epoll_pwait2", (void **)&next_epoll_pwait2},
        {"pthread_attr_setsigmask_np", (void **)&next_setsigmask},
        {"vfork", (void **)&next_vfork},
    };
    for (size_t i = 0; dlsym && i < sizeof all / sizeof *all; i++) {
        void *found = dlsym((void *)-1 /* RTLD_NEXT */, all[i].name);
        if (found)
            *all[i].function = found;
        else if (dlerror)
            dlerror(); /* the program must not see an error that is ours */
    }
}

/* ---- what the application calls instead ---- */

/* Which of our signals the application put into the masks of its other handlers. */
static _Atomic uint8_t left_out[_NSIG];

static sigset_t without_ours(const sigset_t *set)
{
    sigset_t copy = {0};
    *bits_of(&copy) = *bits_of(set) & ~our_signals;
    return copy;
}

/* Any handler may need absent pages. */
static int other_sigaction(int signal, const struct sigaction *action, struct sigaction *old)
{
    struct sigaction copy;
    unsigned long added = 0;
    if (action) {
        copy = *action;
        copy.sa_mask = without_ours(&action->sa_mask);
        added = *bits_of(&action->sa_mask) & our_signals;
    }
    int result = next_sigaction(signal, action ? &copy : NULL, old);
    if (result != 0 || signal < 1 || signal >= _NSIG)
        return result;
    if (old)
        *bits_of(&old->sa_mask) |= (unsigned long)left_out[signal] << (SIGBUS - 1);
    if (action && !is_vfork_child())
        left_out[signal] = (uint8_t)(added >> (SIGBUS - 1));
    return 0;
}

EXPORT int sigaction(int signal, const struct sigaction *action, struct sigaction *old)
{
    if (!enabled)
        return next_sigaction(signal, action, old);
    if (!is_ours(signal))
        return other_sigaction(signal, action, old);
    struct sigaction before = *application_action(signal);
    if (action && !is_vfork_child()) {
        set_application_action(signal, action);
        set_guard_action(signal, action, NULL);
    }
    if (old)
        *old = before;
    return 0;
}
EXPORT sigaction_function __sigaction __attribute__((alias("sigaction")));

static signal_handler replace_handler(int signal, signal_handler handler, int flags)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags}, old;
    if (handler == SIG_ERR) {
        fail(-EINVAL);
        return SIG_ERR;
    }
    return sigaction(signal, &action, &old) == 0 ? old.sa_handler : SIG_ERR;
}

#define SIGNAL_FUNCTION(name, next, flags)                                                         \
    EXPORT signal_handler name(int signal, signal_handler handler)                                 \
    {                                                                                              \
        if ((enabled && is_ours(signal)) || !next)                                                 \
            return replace_handler(signal, handler, flags);                                        \
        return next(signal, handler);                                                              \
    }
SIGNAL_FUNCTION(signal, next_signal, SA_RESTART)
SIGNAL_FUNCTION(bsd_signal, next_signal, SA_RESTART)
SIGNAL_FUNCTION(ssignal, next_signal, SA_RESTART)
SIGNAL_FUNCTION(sysv_signal, next_sysv_signal, (int)(SA_RESETHAND | SA_NODEFER))
SIGNAL_FUNCTION(__sysv_signal, next_sysv_signal, (int)(SA_RESETHAND | SA_NODEFER))

/* What was sent while it was blocked comes now. */
static void deliver_held(void)
{
    for (int signal = SIGBUS;; signal = SIGSEGV) {
        unsigned long bit = 1UL << (signal - 1);
        if (thread.held & bit & ~thread.blocked) {
            thread.held &= ~bit;
            send_to_self(signal, &thread.info[signal == SIGBUS]);
        }
        if (signal == SIGSEGV)
            return;
    }
}

static int change_mask(mask_function *next, int how, const sigset_t *set, sigset_t *old)
{
    if (!enabled)
        return next(how, set, old);
    unsigned long before = thread.blocked, named = 0;
    sigset_t copy;
    if (set) {
        named = *bits_of(set) & our_signals;
        copy = without_ours(set);
    }
    int result = next(how, set ? &copy : NULL, old);
    if (result != 0)
        return result;
    if (old)
        *bits_of(old) |= before;
    if (!set)
        return 0;
    unsigned long after = how == SIG_BLOCK     ? before | named
                          : how == SIG_UNBLOCK ? before & ~named
                                               : named;
    if (after != before && !is_vfork_child())
        thread.blocked = after;
    if (thread.held)
        deliver_held();
    return 0;
}

EXPORT int sigprocmask(int how, const sigset_t *set, sigset_t *old)
{
    return change_mask(next_sigprocmask, how, set, old);
}

EXPORT int pthread_sigmask(int how, const sigset_t *set, sigset_t *old)
{
    return change_mask(next_pthread_sigmask, how, set, old);
}

/* The older ways to block signals, by the new one. */
static int change_bits(int how, unsigned long bits, unsigned long *old)
{
    sigset_t set = {0}, before = {0};
    *bits_of(&set) = bits;
    int result = sigprocmask(how, &set, &before);
    *old = *bits_of(&before);
    return result;
}

EXPORT int sigblock(int mask)
{
    unsigned long old;
    return change_bits(SIG_BLOCK, (unsigned)mask, &old) == 0 ? (int)old : -1;
}

EXPORT int sigsetmask(int mask)
{
    unsigned long old;
    return change_bits(SIG_SETMASK, (unsigned)mask, &old) == 0 ? (int)old : -1;
}

static int change_one(int how, int signal, unsigned long *old)
{
    if (signal < 1 || signal >= _NSIG)
        return fail(-EINVAL);
    return change_bits(how, 1UL << (signal - 1), old);
}

EXPORT int sighold(int signal)
{
    unsigned long old;
    return change_one(SIG_BLOCK, signal, &old);
}

EXPORT int sigrelse(int signal)
{
    unsigned long old;
    return change_one(SIG_UNBLOCK, signal, &old);
}

EXPORT int sigignore(int signal)
{
    return sigaction(signal, &(struct sigaction){.sa_handler = SIG_IGN}, NULL);
}

EXPORT signal_handler sigset(int signal, signal_handler handler)
{
    signal_handler hold = (signal_handler)2; /* SIG_HOLD */
    if (next_sigset && !(enabled && is_ours(signal)))
        return next_sigset(signal, handler);
    unsigned long bit = 1UL << (signal - 1), old;
    if (change_one(handler == hold ? SIG_BLOCK : SIG_UNBLOCK, signal, &old) != 0)
        return SIG_ERR;
    struct sigaction before;
    if (handler == hold)
        before.sa_handler = sigaction(signal, NULL, &before) == 0 ? before.sa_handler : SIG_ERR;
    else
        before.sa_handler = replace_handler(signal, handler, 0);
    return old & bit ? hold : before.sa_handler;
}

/*
 * Calls that wait with another mask: a handler runs with it, too. libc's own functions, where there
 * are any, since these are cancellation points.
 */
static const sigset_t *lend(const sigset_t *given, sigset_t *own)
{
    if (!enabled || !given)
        return given;
    *own = without_ours(given);
    return own;
}

EXPORT int sigsuspend(const sigset_t *mask)
{
    sigset_t own;
    mask = lend(mask, &own);
    return next_sigsuspend ? next_sigsuspend(mask)
                           : fail(sys4(SYS_rt_sigsuspend, (long)mask, 8, 0, 0));
}
EXPORT sigsuspend_function __sigsuspend __attribute__((alias("sigsuspend")));

EXPORT int ppoll(struct pollfd *fds, unsigned long count, const struct timespec *timeout,
                 const sigset_t *mask)
{
    sigset_t own;
    struct timespec left;
    mask = lend(mask, &own);
    if (next_ppoll)
        return next_ppoll(fds, count, timeout, mask);
    if (timeout)
        left = *timeout;
    return fail(sys6(SYS_ppoll, (long)fds, (long)count, (long)(timeout ? &left : NULL), (long)mask,
                     8, 0));
}

/* Behind ppoll() when a program is compiled with _FORTIFY_SOURCE. */
EXPORT int __ppoll_chk(struct pollfd *fds, unsigned long count, const struct timespec *timeout,
                       const sigset_t *mask, size_t size)
{
    if (size / 8 < count) /* sizeof(struct pollfd) */
        __builtin_trap();
    return ppoll(fds, count, timeout, mask);
}

EXPORT int pselect(int count, fd_set *read, fd_set *write, fd_set *except,
                   const struct timespec *timeout, const sigset_t *mask)
{
    sigset_t own;
    struct timespec left;
    mask = lend(mask, &own);
    if (next_pselect)
        return next_pselect(count, read, write, except, timeout, mask);
    if (timeout)
        left = *timeout;
    struct {
        const sigset_t *set;
        size_t size;
    } both = {mask, 8};
    return fail(sys6(SYS_pselect6, count, (long)read, (long)write, (long)except,
                     (long)(timeout ? &left : NULL), (long)&both));
}

EXPORT int epoll_pwait(int fd, struct epoll_event *events, int most, int timeout,
                       const sigset_t *mask)
{
    sigset_t own;
    mask = lend(mask, &own);
    return next_epoll_pwait
               ? next_epoll_pwait(fd, events, most, timeout, mask)
               : fail(sys6(SYS_epoll_pwait, fd, (long)events, most, timeout, (long)mask, 8));
}

EXPORT int epoll_pwait2(int fd, struct epoll_event *events, int most,
                        const struct timespec *timeout, const sigset_t *mask)
{
    sigset_t own;
    mask = lend(mask, &own);
    return next_epoll_pwait2
               ? next_epoll_pwait2(fd, events, most, timeout, mask)
               : fail(sys6(441 /* SYS_epoll_pwait2 */, fd, (long)events, most, (long)timeout,
                           (long)mask, 8));
}

EXPORT int pthread_attr_setsigmask_np(void *attributes, const sigset_t *mask)
{
    sigset_t own;
    return next_setsigmask ? next_setsigmask(attributes, lend(mask, &own)) : ENOSYS;
}

/* A vfork child returns from its caller's frame, so that ours must be gone before: a tail call. */
#if __has_attribute(musttail)
EXPORT pid_t vfork(void)
{
    is_vfork_child(); /* for its effect: the owner is known before there is a child */
    TAIL_CALL next_vfork();
}
#endif

#endif
