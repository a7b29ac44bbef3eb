/*
 * guard.c: a preloaded library that brings absent pages of trimmed libraries back.
 *
 * A trimmed library has PROT_NONE mappings where pages are absent. An access raises SIGSEGV; the
 * handler here finds the library, has the pager put the bytes into the library's file in the store
 * (docs/pager.md), maps them in place and returns. Without a cold pack it says what is missing, and
 * ends the process. All other faults go to the application's own handlers, as if the guard weren't
 * there. What no preloaded library can see stays the application's own affair: rt_sigaction(2) and
 * rt_sigprocmask(2) without libc (Go), setcontext(3) with an edited mask, and a system call that is
 * handed a pointer into an absent page (EFAULT; trim.py keeps what is likely to be).
 *
 *   RVBUNDLE_ROOT      the payload's root as this process sees it (default "/")
 *   RVBUNDLE_PAGER     the pager's socket (default "/run/rvbundle/pager"; "@NAME": abstract)
 *   RVBUNDLE_PRESENT   which runs are in the store (default "/run/rvbundle/present")
 *
 * No table of absent pages below the root: the guard does nothing.
 *
 * The rule above all others: never a wrong byte. So nothing about mappings is remembered; each
 * fault asks the kernel what is mapped there now, and only what still is a PROT_NONE mapping of the
 * right piece of the right file is replaced.
 */
#define _GNU_SOURCE
#include "absent.h"
#include "signals.h"

#include <elf.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#ifndef PAGER_SECONDS
#define PAGER_SECONDS 60
#endif
#ifndef USE_MAP_QUERY
#define USE_MAP_QUERY 1
#endif
#define CODE_ABSENT 112  /* the process's exit codes */
#define CODE_DAMAGED 107 /* ImageError */
#define REASON_SIZE 200
#define TABLE "/usr/lib/rvbundle/absent.tbl"
#define ABSENT_REASON "no trace used it, and the cold pack is not here"
#define SILENT_PAGER "the pager does not answer"
#define ODD_ANSWER "the pager's answer makes no sense"
#define TOO_MANY_FILES "too many open files"

static struct table table;
static const char *const *paths; /* of libraries, as /proc/self/maps shows them; in order */
static size_t longest_path;
static atomic_bool *seen; /* for each library: see map_all_present() */
static const _Atomic uint8_t *present;
static struct sockaddr_un pager = {.sun_family = AF_UNIX};
static socklen_t pager_size;
static uintptr_t grain = SMALL_PAGE; /* the kernel's page size */

/* ---- descriptors ---- */

/*
 * A system call that makes a descriptor. If there is no room for one more, the soft limit goes up
 * to the hard one for a moment. The lock keeps two threads from putting back what the other had
 * raised; it may stay locked in a child of fork(2), so that nobody waits for it long.
 */
static long new_descriptor(long n, long a, long b, long c)
{
    static atomic_flag lock = ATOMIC_FLAG_INIT;
    struct {
        uint64_t soft, hard;
    } before, more;
    long fd = sys4(n, a, b, c, 0);
    if (fd != -EMFILE)
        return fd;
    for (int i = 0; i < 1000 && atomic_flag_test_and_set(&lock); i++)
        sys4(SYS_sched_yield, 0, 0, 0, 0);
    if (sys4(SYS_prlimit64, 0, 7 /* RLIMIT_NOFILE */, 0, (long)&before) == 0) {
        more = before;
        more.soft = before.hard;
        if (sys4(SYS_prlimit64, 0, 7, (long)&more, 0) == 0) {
            fd = sys4(n, a, b, c, 0);
            sys4(SYS_prlimit64, 0, 7, (long)&before, 0);
        }
    }
    atomic_flag_clear(&lock);
    return fd;
}

static int open_for_reading(const char *path)
{
    return (int)new_descriptor(SYS_openat, AT_FDCWD, (long)path, O_RDONLY | O_CLOEXEC);
}

static bool is_error(long result)
{
    return result < 0 && result > -4096;
}

/* ---- what is mapped at an address ---- */

/* ioctl(2) on /proc/self/maps, Linux 6.11: one mapping without reading all lines before it. */
struct map_query {
    uint64_t size, flags, address, start, end, protection, page_size, offset, inode;
    uint32_t major, minor, name_size, build_id_size;
    uint64_t name, build_id;
};
#define MAP_QUERY 0xc0686611

static struct match any_library(void)
{
    return match_start(paths, header_of(&table)->libraries);
}

enum found { FOUND, NOTHING_THERE, UNKNOWN };

static __attribute__((noinline)) enum found query_map(int fd, uintptr_t address, struct area *area)
{
    char name[1024];
    if (longest_path + sizeof DELETED > sizeof name)
        return UNKNOWN;
    struct map_query query = {.size = sizeof query, .address = address, .name_size = sizeof name,
                              .name = (uintptr_t)name};
    long result = sys4(SYS_ioctl, fd, MAP_QUERY, (long)&query, 0);
    if (result == -ENOENT || result == -ENAMETOOLONG) /* a longer name is none of ours */
        return NOTHING_THERE;
    if (result != 0)
        return UNKNOWN;
    *area = (struct area){.start = query.start, .end = query.end, .offset = query.offset,
                          .inode = query.inode, .major = query.major, .minor = query.minor,
                          .protection = (int)(query.protection & 7),
                          .shared = query.protection & 8, .cheap = true};
    struct match match = any_library();
    for (uint32_t i = 0; i + 1 < query.name_size; i++) /* its size counts the NUL */
        match_next(&match, name[i]);
    match_end(&match, area);
    return FOUND;
}

static long fill(struct reader *r)
{
    long n;
    do
        n = sys4(SYS_read, r->fd, (long)r->data, sizeof r->data, 0);
    while (n == -EINTR);
    return n;
}

static void start_reading(struct reader *r, int fd)
{
    r->fill = fill;
    r->fd = fd;
    r->at = r->end = 0;
    r->any = r->failed = false;
}

static __attribute__((noinline)) enum found read_maps(int fd, uintptr_t address, struct area *area)
{
    struct reader reader;
    area->cheap = false;
    start_reading(&reader, fd);
    if (next_area(&reader, address, any_library(), area) && area->start <= address)
        return FOUND;
    return reader.any ? NOTHING_THERE : UNKNOWN;
}

static bool find_area(uintptr_t address, struct area *area)
{
    static atomic_bool told;
    static const char trouble[] = "rvbundle: a fault cannot be looked into: no /proc/self/maps, "
                                  "or too many open files\n";
    /* The first is empty when the main thread has ended; the second isn't known to QEMU. */
    static const char *const names[] = {"/proc/self/maps", "/proc/thread-self/maps"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        int fd = open_for_reading(names[i]);
        if (fd < 0)
            continue;
        enum found found = USE_MAP_QUERY ? query_map(fd, address, area) : UNKNOWN;
        if (found == UNKNOWN)
            found = read_maps(fd, address, area);
        close_file(fd);
        if (found != UNKNOWN)
            return found == FOUND;
    }
    if (!atomic_exchange(&told, true))
        write_all(2, trouble, sizeof trouble - 1);
    return false;
}

/* What is to be restored: the absent pages around a fault in one mapping, one run, one range. */
struct fault {
    const struct absent_library *library;
    const struct absent_segment *segment;
    struct area area;
    uintptr_t address, base; /* of the fault's page; where the library is loaded */
    uint64_t run;            /* file offset */
    uintptr_t start;         /* where the pages go, and where they are in the file */
    uint64_t offset, size;
};

static uint64_t vaddr_in(const struct absent_segment *segment, uint64_t offset)
{
    return offset - segment->offset + segment->vaddr;
}

/* Is the start of the file mapped where it would be if the library is loaded at `base`? */
static bool is_base(const struct fault *f, uintptr_t base)
{
    const struct absent_segment *first = segments_of(&table, f->library);
    uintptr_t start = base + (first->vaddr & ~(grain - 1));
    struct area area;
    return first->offset == 0 && find_area(start, &area) && area.start == start &&
           area.offset == 0 && area.library == f->area.library;
}

/* What is restored at once. */
static void clip(struct fault *f, const struct absent_range *range, uint64_t offset)
{
    uint64_t end = f->area.offset + (f->area.end - f->area.start);
    uint64_t low = range->start - f->segment->vaddr + f->segment->offset;
    uint64_t high = range->stop - f->segment->vaddr + f->segment->offset;
    f->run = offset / RUN * RUN;
    low = low > f->run ? low : f->run;
    low = low > f->area.offset ? low : f->area.offset;
    high = high < f->run + RUN ? high : f->run + RUN;
    high = high < end ? high : end;
    f->start = f->address - (uintptr_t)(offset - low);
    f->offset = low;
    f->size = high - low;
}

/* Finds the absent page. False: it isn't one. */
static bool find_absent(struct fault *f)
{
    f->library = library_of(&table, (unsigned)f->area.library);
    const struct absent_segment *segments = segments_of(&table, f->library);
    uint64_t offset = f->area.offset + (f->address - f->area.start);
    unsigned candidates = 0;
    for (uint32_t i = 0; i < f->library->segments; i++)
        if (find_range(&table, &segments[i], vaddr_in(&segments[i], offset)))
            candidates++;
    for (uint32_t i = 0; i < f->library->segments; i++) {
        uint64_t vaddr = vaddr_in(&segments[i], offset);
        const struct absent_range *range = find_range(&table, &segments[i], vaddr);
        /* A page of the file that two segments share is mapped twice: which one is it? */
        if (!range || (candidates > 1 && !is_base(f, f->address - vaddr)))
            continue;
        f->segment = &segments[i];
        f->base = f->address - vaddr;
        clip(f, range, offset);
        return true;
    }
    return false;
}

/* ---- the pager ---- */

static int64_t seconds(void)
{
    struct timespec now = {0, 0};
    sys4(SYS_clock_gettime, CLOCK_MONOTONIC, (long)&now, 0, 0);
    return now.tv_sec;
}

static bool transfer(int fd, bool out, void *from, uint64_t size, int64_t deadline)
{
    for (char *at = from; size > 0;) {
        long n = out ? sys6(SYS_sendto, fd, (long)at, (long)size, MSG_NOSIGNAL, 0, 0)
                     : sys6(SYS_recvfrom, fd, (long)at, (long)size, 0, 0, 0);
        if (n > 0) {
            at += n;
            size -= (uint64_t)n;
        } else if (n != -EINTR && n != -EAGAIN) {
            return false;
        }
        if (size > 0 && seconds() >= deadline)
            return false;
    }
    return true;
}

/* Why not, in the pager's words. */
static const char *receive_text(int fd, uint32_t size, char text[REASON_SIZE], int64_t deadline)
{
    size = size < REASON_SIZE ? size : REASON_SIZE - 1;
    if (!transfer(fd, false, text, size, deadline))
        return SILENT_PAGER;
    for (uint32_t i = 0; i < size; i++)
        if ((unsigned char)text[i] < ' ' || text[i] == 127)
            text[i] = ' ';
    text[size] = 0;
    return size ? text : "the pager could not restore it";
}

/* The run's bytes, in memory of RUN bytes that the caller gets in *data. */
static const char *receive_bytes(int fd, uint64_t size, void **data, int64_t deadline)
{
    *data = map_memory(RUN, -1);
    if (!*data)
        return "out of memory";
    if (transfer(fd, false, *data, size, deadline))
        return NULL;
    unmap_memory(*data, RUN);
    *data = NULL;
    return SILENT_PAGER;
}

static const char *converse(int fd, const struct fault *f, bool bytes, char text[REASON_SIZE],
                            void **data, int64_t deadline)
{
    struct __attribute__((packed)) {
        uint32_t size;
        uint8_t kind;
        uint64_t offset;
        uint8_t flags;
    } request = {10 + f->library->path_size, 0, f->run, bytes};
    struct __attribute__((packed)) {
        uint8_t status;
        uint32_t size;
    } answer;
    if (!transfer(fd, true, &request, sizeof request, deadline) ||
        !transfer(fd, true, (void *)path_of(&table, f->library), f->library->path_size, deadline) ||
        !transfer(fd, false, &answer, sizeof answer, deadline))
        return SILENT_PAGER;
    uint64_t left = f->library->size - f->run;
    switch (answer.status) {
    case 0:
        return bytes || answer.size != 0 ? ODD_ANSWER : NULL;
    case 1:
    case 2:
        return receive_text(fd, answer.size, text, deadline);
    case 3:
        if (answer.size == (left < RUN ? left : RUN))
            return receive_bytes(fd, answer.size, data, deadline);
        return ODD_ANSWER;
    default:
        return ODD_ANSWER;
    }
}

/*
 * NULL: the run is in the store's file now, or its bytes are in *data. Otherwise why not. One
 * connection for each fault: there is nothing that fork(2), close(2) or another thread could break.
 */
static const char *ask_pager(const struct fault *f, bool bytes, char text[REASON_SIZE], void **data)
{
    if (pager_size == 0)
        return ABSENT_REASON;
    int fd = (int)new_descriptor(SYS_socket, AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return fd == -EMFILE || fd == -ENFILE ? TOO_MANY_FILES : "a socket cannot be made";
    int64_t deadline = seconds() + PAGER_SECONDS;
    struct timeval second = {1, 0}; /* so that every wait comes back to look at the deadline */
    sys6(SYS_setsockopt, fd, SOL_SOCKET, SO_RCVTIMEO, (long)&second, sizeof second, 0);
    sys6(SYS_setsockopt, fd, SOL_SOCKET, SO_SNDTIMEO, (long)&second, sizeof second, 0);
    long result;
    do
        result = sys4(SYS_connect, fd, (long)&pager, pager_size, 0);
    while ((result == -EINTR || result == -EAGAIN) && seconds() < deadline);
    const char *reason = result == -ENOENT ? ABSENT_REASON : SILENT_PAGER;
    if (result == 0)
        reason = converse(fd, f, bytes, text, data, deadline);
    close_file(fd);
    return reason;
}

/* ---- bringing pages back ---- */

/* How often pages were put in place: see may_retry(). */
static atomic_uint restorations;

static bool is_same(const struct area *a, uint64_t inode, unsigned major, unsigned minor)
{
    return a->inode == inode && a->major == major && a->minor == minor;
}

/* Is this the file that is mapped? */
static bool is_mapped_file(const struct fault *f, int fd, const struct stat *status)
{
    uint64_t device = status->st_dev;
    unsigned major = (device >> 8 & 0xfff) | (unsigned)(device >> 32 & ~(uint64_t)0xfff);
    unsigned minor = (device & 0xff) | (unsigned)(device >> 12 & ~(uint64_t)0xff);
    if (is_same(&f->area, status->st_ino, major, minor))
        return true;
    /* On btrfs and overlayfs stat(2) has other numbers than /proc/self/maps: map it to compare. */
    long probe = sys6(SYS_mmap, 0, (long)grain, PROT_NONE, MAP_PRIVATE, fd, 0);
    if (is_error(probe))
        return false;
    struct area area;
    bool same = find_area((uintptr_t)probe, &area) && area.library == f->area.library &&
                !area.deleted && is_same(&f->area, area.inode, area.major, area.minor);
    unmap_memory((void *)probe, grain);
    return same;
}

/* NULL, or what is wrong with the library's file. */
static const char *check_file(const struct fault *f, int fd)
{
    struct stat status;
    if (sys4(SYS_fstat, fd, (long)&status, 0, 0) != 0 || !S_ISREG(status.st_mode) ||
        !is_mapped_file(f, fd, &status))
        return "its file in the store is another one now";
    if ((uint64_t)status.st_size < f->library->size)
        return "its file in the store is cut short";
    return NULL;
}

static long map_piece(const struct fault *f, int fd)
{
    atomic_fetch_add(&restorations, 1); /* before it can be seen */
    return sys6(SYS_mmap, (long)f->start, (long)f->size, f->segment->protection,
                MAP_PRIVATE | MAP_FIXED, fd, (long)f->offset);
}

static bool is_whole_pages(const struct fault *f)
{
    return ((f->offset | f->size) & (grain - 1)) == 0;
}

static bool is_present(const struct fault *f)
{
    uint64_t number = f->library->first_run + f->run / RUN;
    return present && atomic_load(&present[number / 8]) >> (number % 8) & 1;
}

/*
 * Maps all that the store has of a library. Where the kernel can't be asked for one mapping, a
 * fault costs a millisecond in a process with thousands of them: so all in one go, the first time.
 */
static __attribute__((noinline)) void map_all_present(const struct fault *f, int fd)
{
    struct reader reader;
    struct fault piece;
    int maps = open_for_reading("/proc/self/maps");
    if (maps < 0)
        return;
    start_reading(&reader, maps);
    while (next_area(&reader, 0, any_library(), &piece.area)) {
        if (piece.area.library != f->area.library || piece.area.protection != PROT_NONE ||
            piece.area.shared || piece.area.deleted ||
            !is_same(&f->area, piece.area.inode, piece.area.major, piece.area.minor))
            continue;
        for (piece.address = piece.area.start; piece.address < piece.area.end;) {
            bool found = find_absent(&piece);
            if (found && is_present(&piece) && is_whole_pages(&piece))
                map_piece(&piece, fd);
            piece.address = found ? piece.start + piece.size : piece.address + grain;
        }
    }
    close_file(maps);
}

static const char *map_from_store(const struct fault *f)
{
    int fd = open_for_reading(paths[f->area.library]);
    if (fd < 0)
        return fd == -EMFILE || fd == -ENFILE ? TOO_MANY_FILES
                                              : "its file in the store cannot be opened";
    const char *reason = check_file(f, fd);
    if (!reason) {
        long result = map_piece(f, fd);
        if (result == -ENOMEM)
            reason = "the kernel refuses one more mapping (vm.max_map_count, or memory)";
        else if (is_error(result))
            reason = "its file in the store cannot be mapped";
        else if (!f->area.cheap && !atomic_exchange(&seen[f->area.library], true))
            map_all_present(f, fd);
    }
    close_file(fd);
    return reason;
}

/* Moves the bytes of a run in place, all at once: no thread sees half of them. Takes `data`. */
static const char *place(const struct fault *f, char *data)
{
    char *from = data + (f->offset - f->run), *end = data + RUN;
    synchronize_code(data, RUN);
    long result = sys4(SYS_mprotect, (long)data, RUN, f->segment->protection, 0);
    if (result == 0) {
        atomic_fetch_add(&restorations, 1);
        result = sys6(SYS_mremap, (long)from, (long)f->size, (long)f->size,
                      MREMAP_MAYMOVE | MREMAP_FIXED, (long)f->start, 0);
    }
    if (is_error(result)) {
        unmap_memory(data, RUN);
        return result == -ENOMEM ? "the kernel refuses one more mapping (vm.max_map_count)"
                                 : "its bytes cannot be put in place";
    }
    /* Not all of it in one: where `from` was, another thread may have mapped something by now. */
    if (from > data)
        unmap_memory(data, (size_t)(from - data));
    if (from + f->size < end)
        unmap_memory(from + f->size, (size_t)(end - from) - f->size);
    return NULL;
}

/* NULL: done. Otherwise why not: `why` for the store's part, if any, and the result. */
static const char *restore(const struct fault *f, bool from_store, const char **why,
                           char text[REASON_SIZE])
{
    void *data = NULL;
    if (f->area.deleted)
        return "its file was deleted or replaced while it is in use";
    if (!is_whole_pages(f))
        return "the kernel's pages are larger than those of the build";
    if (from_store) {
        if (!is_present(f)) {
            const char *reason = ask_pager(f, false, text, &data);
            if (reason)
                return reason;
        }
        if (data)
            return place(f, data);
        *why = map_from_store(f);
        if (!*why)
            return NULL;
    } else {
        *why = "its file in the store cannot be read";
    }
    const char *reason = ask_pager(f, true, text, &data);
    return reason ? reason : place(f, data);
}

/* ---- the end, when pages can't be brought back ---- */

struct python_thread;
extern void _Py_DumpTraceback(int, struct python_thread *) __attribute__((weak));
extern struct python_thread *PyGILState_GetThisThreadState(void) __attribute__((weak));

static atomic_int dying; /* the thread that writes the message */
static char message[2 * MAX_PATH], hint[MAX_PATH];

static _Noreturn void leave(int code)
{
    for (;;)
        sys4(SYS_exit_group, code, 0, 0, 0);
}

static void append_hex(char *to, unsigned long n)
{
    char digits[20] = "0x";
    int at = 2;
    for (int shift = 60; shift >= 0; shift -= 4)
        if (n >> shift || shift == 0)
            digits[at++] = "0123456789abcdef"[n >> shift & 15];
    digits[at] = 0;
    append(to, digits);
}

/* The exported symbol at or below an address, from the library's file. */
static bool nearest_symbol(int fd, uint64_t vaddr, char name[256], uint64_t *value)
{
    Elf64_Ehdr header;
    Elf64_Shdr symbols, names;
    Elf64_Sym some[16];
    uint32_t best = 0;
    if (!read_at(fd, &header, sizeof header, 0) || header.e_shentsize != sizeof symbols)
        return false;
    unsigned i = 0;
    for (; i < header.e_shnum; i++)
        if (!read_at(fd, &symbols, sizeof symbols, header.e_shoff + i * sizeof symbols))
            return false;
        else if (symbols.sh_type == SHT_DYNSYM)
            break;
    if (i == header.e_shnum || symbols.sh_link >= header.e_shnum ||
        !read_at(fd, &names, sizeof names, header.e_shoff + symbols.sh_link * sizeof names))
        return false;
    *value = 0;
    for (uint64_t at = 0; at + sizeof *some <= symbols.sh_size; at += sizeof some) {
        long size = sys4(SYS_pread64, fd, (long)some, sizeof some, (long)(symbols.sh_offset + at));
        for (long k = 0; k < size / (long)sizeof *some; k++) {
            unsigned kind = ELF64_ST_TYPE(some[k].st_info);
            if (at + (unsigned long)k * sizeof *some < symbols.sh_size && some[k].st_shndx &&
                kind <= STT_FUNC + 0u && some[k].st_value <= vaddr && some[k].st_value > *value) {
                *value = some[k].st_value;
                best = some[k].st_name;
            }
        }
    }
    memset(name, 0, 256);
    if (best && best < names.sh_size)
        sys4(SYS_pread64, fd, (long)name, 255, (long)(names.sh_offset + best));
    return name[0] != 0;
}

static void append_symbol(const struct fault *f, uint64_t vaddr)
{
    static char name[256];
    uint64_t value;
    int fd = open_for_reading(paths[f->area.library]);
    if (fd < 0)
        return;
    if (nearest_symbol(fd, vaddr, name, &value)) {
        append(message, ", near ");
        append(message, name);
        append(message, "+");
        append_hex(message, vaddr - value);
    }
    close_file(fd);
}

static _Noreturn void finish(void)
{
    write_all(2, hint, length(hint));
    leave(CODE_ABSENT);
}

/* One thread writes; others wait for the end. One that gets here twice has met another fault. */
static void be_the_only_one(void)
{
    int own = (int)sys4(SYS_gettid, 0, 0, 0, 0), before = 0;
    for (int i = 0; !atomic_compare_exchange_strong(&dying, &before, own); i++) {
        struct timespec pause = {0, 10000000};
        if (before == own)
            finish();
        if (i == 500)
            leave(CODE_ABSENT);
        /* A vfork(2) child, or a thread of the parent before fork(2), was the one. */
        if (sys4(SYS_tgkill, sys4(SYS_getpid, 0, 0, 0, 0), before, 0, 0) == -ESRCH)
            atomic_compare_exchange_strong(&dying, &before, 0);
        else
            sys4(SYS_nanosleep, (long)&pause, 0, 0, 0);
        before = 0;
    }
}

static _Noreturn void die(const struct fault *f, uintptr_t address, const char *why,
                          const char *reason)
{
    be_the_only_one();
    const char *name = base_name(paths[f->area.library]);
    message[0] = hint[0] = 0;
    append(hint, "hint: put the cold pack (.cold.rvb) beside the image; or add a [[trace]] that "
                 "does this to the recipe and build again; or keep the library whole with [keep] "
                 "files = [\"*/");
    append(hint, name);
    append(hint, "\"]\n");
    append(message, "rvbundle: the agent needs code that was left out of its image: ");
    append(message, name);
    append_symbol(f, address - f->base);
    append(message, " (address ");
    append_hex(message, address - f->base);
    append(message, "): ");
    append(message, why ? why : "");
    append(message, why ? "; " : "");
    append(message, reason);
    append(message, "\n");
    if (_Py_DumpTraceback && PyGILState_GetThisThreadState) {
        /* As faulthandler does. Python's code may be absent, too: then finish() comes next. */
        write_all(2, message, length(message));
        struct python_thread *thread = PyGILState_GetThisThreadState();
        if (thread)
            _Py_DumpTraceback(2, thread);
        finish();
    }
    size_t size = length(message);
    memcpy(message + size, hint, length(hint) + 1);
    write_all(2, message, length(message));
    leave(CODE_ABSENT);
}

/* ---- faults ---- */

static bool is_dying(void)
{
    int thread = atomic_load(&dying);
    return thread && thread == (int)sys4(SYS_gettid, 0, 0, 0, 0);
}

/* Brings back what is absent at the address. False: nothing is, so the fault isn't ours. */
static bool serve(int signal, uintptr_t address)
{
    struct fault fault = {.address = address & ~(grain - 1)};
    char text[REASON_SIZE];
    const char *why = NULL;
    if (!find_area(fault.address, &fault.area) || fault.area.library < 0 || fault.area.shared)
        return false;
    /* SIGBUS: the page is mapped, but the file has lost it. */
    int protection = fault.area.protection;
    if (signal == SIGSEGV ? protection != PROT_NONE
                          : protection == PROT_NONE || protection & PROT_WRITE)
        return false;
    if (!find_absent(&fault))
        return false;
    const char *reason = restore(&fault, signal == SIGSEGV, &why, text);
    if (reason)
        die(&fault, address, why, reason);
    return true;
}

/*
 * Another thread may have restored the page after this one's access, so that a fault finds nothing
 * wrong: the instruction is run once more. If it comes back, and no page was restored meanwhile,
 * the fault is not ours. `retried` has the last of such faults of (about) each thread.
 */
static bool may_retry(uintptr_t address)
{
    static _Atomic uint64_t retried[256];
    uint64_t thread = (uint64_t)sys4(SYS_gettid, 0, 0, 0, 0);
    uint64_t key = address / SMALL_PAGE;
    key = (key ^ key >> 29) * 0xbf58476d1ce4e5b9 + atomic_load(&restorations);
    key = (key ^ key >> 32) * 0x94d049bb133111eb + thread + 1;
    return atomic_exchange(&retried[thread % 256], key) != key;
}

static bool handle_fault(int signal, const siginfo_t *info)
{
    uintptr_t address = (uintptr_t)info->si_addr;
    if (signal == SIGSEGV ? info->si_code != SEGV_MAPERR && info->si_code != SEGV_ACCERR
                          : info->si_code != BUS_ADRERR)
        return false;
    if (is_dying())
        finish();
    if (serve(signal, address))
        return true;
    return info->si_code != SEGV_MAPERR && may_retry(address);
}

ALIGN_STACK static void on_signal(int signal, siginfo_t *info, void *context)
{
    if (handle_fault(signal, info))
        return;
    action_handler handler = prepare_handler(signal, info, context);
    if (!handler)
        return;
    /* A handler without SA_SIGINFO takes one argument: the others are ignored. */
    TAIL_CALL handler(signal, info, context);
}

/* ---- the start ---- */

extern unsigned long getauxval(unsigned long) __attribute__((weak));

/* The canonical path of a folder, as /proc/self/maps will show it; "" for "/". */
static bool find_root(const char *root, char path[MAX_PATH])
{
    char link[MAX_PATH] = "/proc/self/fd/";
    int fd = open_file(root, O_PATH | O_DIRECTORY);
    if (fd < 0)
        return false;
    append_number(link, (unsigned long)fd);
    long n = sys4(SYS_readlinkat, AT_FDCWD, (long)link, (long)path, MAX_PATH - 1);
    close_file(fd);
    if (n <= 0 || path[0] != '/')
        return false;
    path[n == 1 ? 0 : n] = 0;
    return true;
}

/* Maps a file for reading; NULL: it can't be. */
static const void *map_file(const char *path, uint64_t *size)
{
    struct stat status = {0};
    long at = -1;
    int fd = open_for_reading(path);
    if (fd < 0)
        return NULL;
    if (sys4(SYS_fstat, fd, (long)&status, 0, 0) == 0 && S_ISREG(status.st_mode) &&
        status.st_size > 0)
        at = sys6(SYS_mmap, 0, status.st_size, PROT_READ, MAP_SHARED, fd, 0);
    close_file(fd);
    *size = (uint64_t)status.st_size;
    return is_error(at) ? NULL : (const void *)at;
}

/* Makes the list of the libraries' paths. */
static bool make_paths(const char *root)
{
    uint32_t count = header_of(&table)->libraries;
    size_t size = count * (sizeof *paths + sizeof *seen), prefix = length(root);
    for (uint32_t i = 0; i < count; i++)
        size += prefix + 1 + library_of(&table, i)->path_size + 1;
    const char **list = map_memory(size, -1);
    if (!list)
        return false;
    char *text = (char *)(list + count);
    for (uint32_t i = 0; i < count; i++) {
        const struct absent_library *library = library_of(&table, i);
        list[i] = text;
        memcpy(text, root, prefix);
        text[prefix] = '/';
        memcpy(text + prefix + 1, path_of(&table, library), library->path_size);
        size_t whole = prefix + 1 + library->path_size;
        text += whole + 1; /* the memory is zeroed */
        longest_path = whole > longest_path ? whole : longest_path;
    }
    paths = list;
    seen = (atomic_bool *)text;
    return true;
}

static bool open_table(const char *root)
{
    char path[MAX_PATH];
    if (!find_root(root, path))
        return false;
    size_t end = length(path);
    if (!append(path, TABLE))
        return false;
    table.data = map_file(path, &table.size);
    if (!table.data)
        return false;
    if (!is_valid(&table)) {
        append(message, "rvbundle: the image is damaged: its table of absent pages (");
        append(message, path);
        append(message, ") is none\nhint: unpack the image again, or get it anew\n");
        write_all(2, message, length(message));
        leave(CODE_DAMAGED);
    }
    path[end] = 0;
    return header_of(&table)->libraries > 0 && make_paths(path);
}

static void set_pager(const char *address)
{
    size_t size = length(address);
    if (size == 0 || size >= sizeof pager.sun_path)
        return;
    memcpy(pager.sun_path, address, size);
    pager_size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + size);
    if (address[0] == '@')
        pager.sun_path[0] = 0;
    else
        pager_size++;
}

static void map_present(const char *path)
{
    uint64_t size;
    const void *at = map_file(path, &size);
    if (at && size >= (header_of(&table)->runs + 7) / 8)
        present = at;
}

static void take_over(int signal)
{
    struct kernel_action before = {0};
    struct sigaction action = {0};
    set_guard_action(signal, &action, &before);
    /* After execve(2) it is the default, or ignored when the parent ignored it. */
    action.sa_handler = (signal_handler)before.handler;
    action.sa_flags = (int)before.flags;
    *bits_of(&action.sa_mask) = before.mask;
    set_application_action(signal, &action);
    set_guard_action(signal, &action, NULL);
}

/* glibc hands main()'s arguments to constructors. With -z initfirst this one is the first. */
__attribute__((constructor)) static void start(int count, char **arguments, char **environment)
{
    (void)count;
    (void)arguments;
    const char *root = variable(environment, "RVBUNDLE_ROOT");
    const char *address = variable(environment, "RVBUNDLE_PAGER");
    const char *bits = variable(environment, "RVBUNDLE_PRESENT");
    find_next();
    is_box64 = variable(environment, "BOX64_LD_PRELOAD"); /* nothing else loads it there */
    if (!open_table(root && *root ? root : "/"))
        return;
    set_pager(address && *address ? address : "/run/rvbundle/pager");
    map_present(bits && *bits ? bits : "/run/rvbundle/present");
    if (getauxval && getauxval(AT_PAGESZ) > grain)
        grain = getauxval(AT_PAGESZ);
#ifdef TEST_GRAIN
    grain = TEST_GRAIN;
#endif
    map_owner(grain);
    is_vfork_child(); /* for its effect: we are the owner */
    unsigned long mask = 0;
    take_over(SIGSEGV);
    take_over(SIGBUS);
    sys4(SYS_rt_sigprocmask, SIG_UNBLOCK, (long)&our_signals, (long)&mask, 8);
    thread.blocked = mask & our_signals; /* inherited */
    enabled = true;
}
