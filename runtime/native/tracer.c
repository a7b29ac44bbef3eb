/*
 * tracer.c: an LD_AUDIT library that records which pages of the code, of the unwind data and of the
 * constants of shared libraries a process touches.
 *
 * How: la_objopen() runs before a library is relocated and before its constructors run. There the
 * watched pages become PROT_NONE. The first access to each faults; the SIGSEGV handler sets a bit
 * in a file that is mapped MAP_SHARED, gives the page its protection back and returns.
 *
 *   RVBUNDLE_TRACE_PAGES   existing, writable folder (absolute path); unset or unusable: do nothing
 *   RVBUNDLE_TRACE_PREFIX  trace libraries whose canonical path starts with it (default "/usr/")
 *
 * One record per library: its canonical path with '%' for every '/'. Little-endian:
 *   8 bytes "RVPAGES1" | u64 page size (4096) | u64 first page (vaddr / 4096) | u64 pages
 *   bitmap of touched pages | bitmap of watched pages   (bit i: page first + i; low bits first)
 * Pages that are not watched are marked as touched from the start.
 * Of constants, those pages are watched that the folder "constants" lists in a file of the record's
 * name: page numbers (vaddr / 4096) in order, as in "3 5-9", and a newline.
 * A library that is left alone has a line "path<TAB>reason" in the file "skipped" (one per process,
 * so lines repeat); libraries below the size limit and those that are never traced have none.
 *
 * No libc: all system calls are made directly. So no second libc is loaded next to the program's
 * own, errno stays untouched, and everything here is async-signal-safe.
 */
#define _GNU_SOURCE
#include "bare.h"

#include <elf.h>
#include <link.h>
#include <stddef.h>

#define PAGE ((uintptr_t)4096) /* the grain of the record, whatever the kernel's page size */
#define MIN_FILE_SIZE (96 * 1024)
#define MAX_LIBRARIES 1024
#define MAX_LOADS 8      /* read-only or executable PT_LOADs of one library */
#define MAX_HEADERS 64   /* program headers */
#define MAX_SECTIONS 256 /* section headers */
#define MAX_LIST (256 * 1024) /* a library's list of constants: 12000 stretches of it, or more */

/*
 * Threads that fault on one page at the same time each get here once, and find the page usable when
 * they go on. A fault that comes back this often is not ours (a write into code, say).
 */
#define MAX_FAULTS_PER_PAGE 10000

struct load {
    uintptr_t start, end; /* vaddr, not rounded */
    int protection;
};

/* Everything but `base` and `closing` is fixed once the entry is published. */
struct library {
    _Atomic uintptr_t base; /* l_addr; 0: not loaded */
    atomic_bool closing;    /* la_objclose() was called; may still be mapped, and run, at exit */
    uintptr_t first;        /* vaddr / PAGE of bit 0 */
    size_t pages;
    _Atomic uint8_t *touched;  /* in the record */
    uint8_t *watched;          /* own copy: a damaged record must not mislead the handler */
    _Atomic uint16_t *faults;  /* of this process, for each page */
    struct load loads[MAX_LOADS];
    unsigned load_count;
    dev_t device;
    ino_t inode;
    off_t size;
};

/* What is read of a library's file. Static: ld.so holds its load lock around la_objopen(). */
struct image {
    Elf64_Ehdr header;
    Elf64_Phdr segments[MAX_HEADERS];
    Elf64_Shdr sections[MAX_SECTIONS];
};

struct record_header {
    char magic[8];
    uint64_t page_size, first, pages;
};

static struct library libraries[MAX_LIBRARIES];
static atomic_uint library_count;
static struct image image;
static char folder[MAX_PATH], prefix[MAX_PATH] = "/usr/";
static uintptr_t grain = PAGE; /* what mprotect() can work on: the kernel's page size, if larger */
static bool has_bti, enabled;

/* ---- bitmaps and page protection ---- */

static size_t bitmap_bytes(size_t pages)
{
    return (pages + 7) / 8;
}

static bool bit(const uint8_t *map, size_t i)
{
    return map[i / 8] >> (i % 8) & 1;
}

static void set_bit(uint8_t *map, size_t i, bool on)
{
    uint8_t mask = (uint8_t)(1u << (i % 8));
    map[i / 8] = on ? map[i / 8] | mask : map[i / 8] & (uint8_t)~mask;
}

static void mark_touched(struct library *lib, size_t i)
{
    uint8_t mask = (uint8_t)(1u << (i % 8));
    atomic_fetch_or_explicit(&lib->touched[i / 8], mask, memory_order_relaxed);
}

/* The PT_LOAD that holds all of page i; NULL: none does. */
static const struct load *load_of(const struct library *lib, size_t i)
{
    uintptr_t start = (lib->first + i) * PAGE;
    for (unsigned k = 0; k < lib->load_count; k++)
        if (lib->loads[k].start <= start && start + PAGE <= lib->loads[k].end)
            return &lib->loads[k];
    return NULL;
}

/* Protects every run of watched pages: PROT_NONE, or with what their segment had. */
static bool protect_watched(struct library *lib, uintptr_t base, bool hide)
{
    for (size_t i = 0; i < lib->pages;) {
        if (!bit(lib->watched, i)) {
            i++;
            continue;
        }
        size_t start = i;
        const struct load *load = load_of(lib, i);
        while (i < lib->pages && bit(lib->watched, i) && load_of(lib, i) == load)
            i++;
        uintptr_t at = base + (lib->first + start) * PAGE;
        long protection = hide ? PROT_NONE : load->protection;
        if (sys4(SYS_mprotect, (long)at, (long)((i - start) * PAGE), protection, 0) != 0)
            return false;
    }
    return true;
}

/* For when pages can't be followed one by one: all count as touched, all can be used. */
static bool stop_watching(struct library *lib, uintptr_t base)
{
    for (size_t i = 0; i < lib->pages; i++)
        if (bit(lib->watched, i))
            mark_touched(lib, i);
    return protect_watched(lib, base, false);
}

/* ---- SIGSEGV ---- */

/*
 * What the application wants for SIGSEGV. Setters take a slot each and publish its number, so that
 * a handler on another thread never reads a half-written one (unless 64 more are set meanwhile).
 */
#define ACTION_SLOTS 64
static struct sigaction actions[ACTION_SLOTS];
static atomic_uint next_action, current_action;

static struct sigaction application_action(void)
{
    return actions[atomic_load_explicit(&current_action, memory_order_acquire)];
}

static void set_application_action(const struct sigaction *action)
{
    unsigned slot = (atomic_fetch_add(&next_action, 1) + 1) % ACTION_SLOTS;
    actions[slot] = *action;
    atomic_store_explicit(&current_action, slot, memory_order_release);
}

static const unsigned long segv_bit = 1UL << (SIGSEGV - 1);

static void allow_segv(sigset_t *set)
{
    *(unsigned long *)set &= ~segv_bit; /* glibc's sigset_t starts with the kernel's 64 bits */
}

/* Makes page i (or the kernel's larger page around it) usable. False: not a fault of ours. */
static bool touch(struct library *lib, uintptr_t base, size_t i)
{
    if (atomic_load(&lib->faults[i]) >= MAX_FAULTS_PER_PAGE)
        return false;
    atomic_fetch_add(&lib->faults[i], 1);
    const struct load *load = load_of(lib, i);
    uintptr_t vaddr = ((lib->first + i) * PAGE) & ~(grain - 1);
    for (size_t k = 0; k < grain / PAGE; k++)
        mark_touched(lib, vaddr / PAGE - lib->first + k);
    /* ENOMEM: a page apart is a mapping apart, and vm.max_map_count limits these. */
    if (sys4(SYS_mprotect, (long)(base + vaddr), (long)grain, load->protection, 0) != 0)
        return stop_watching(lib, base);
    return true;
}

static bool serve(uintptr_t address)
{
    unsigned count = atomic_load_explicit(&library_count, memory_order_acquire);
    for (unsigned k = 0; k < count; k++) {
        struct library *lib = &libraries[k];
        uintptr_t base = atomic_load_explicit(&lib->base, memory_order_acquire);
        if (!base || address < base + lib->first * PAGE)
            continue;
        size_t i = (address - base) / PAGE - lib->first;
        if (i < lib->pages && bit(lib->watched, i))
            return touch(lib, base, i);
    }
    return false;
}

/* Back to the default: the faulting instruction runs again, and ends the process as it should. */
static void die_by_default(const siginfo_t *info)
{
    set_kernel_action(SIGSEGV, SIG_DFL, 0, 0, NULL);
    if (info->si_code <= 0) { /* sent by kill(2) or raise(3): would not come again */
        long pid = sys4(SYS_getpid, 0, 0, 0, 0), tid = sys4(SYS_gettid, 0, 0, 0, 0);
        sys4(SYS_tgkill, pid, tid, SIGSEGV, 0);
    }
}

ALIGN_STACK static void on_fault(int signal, siginfo_t *info, void *context)
{
    if (info->si_code > 0 && serve((uintptr_t)info->si_addr))
        return;
    struct sigaction *now = &actions[atomic_load_explicit(&current_action, memory_order_acquire)];
    void (*handler)(int, siginfo_t *, void *) = now->sa_sigaction;
    if (now->sa_handler == SIG_IGN && info->si_code <= 0)
        return; /* only a signal that was sent can be ignored; for a fault the kernel kills */
    if (now->sa_handler == SIG_DFL || now->sa_handler == SIG_IGN) {
        die_by_default(info);
        return;
    }
    unsigned long mask = *(unsigned long *)&now->sa_mask & ~segv_bit;
    sys4(SYS_rt_sigprocmask, SIG_BLOCK, (long)&mask, 0, 8); /* sigreturn(2) undoes it */
    if (now->sa_flags & SA_RESETHAND)
        set_application_action(&(struct sigaction){.sa_handler = SIG_DFL});
    /* A handler without SA_SIGINFO takes one argument: the others are ignored. */
    TAIL_CALL handler(signal, info, context);
}

/* ---- what the application sees instead of libc's functions ---- */

typedef void (*signal_handler)(int);
static int (*real_sigaction)(int, const struct sigaction *, struct sigaction *);
static signal_handler (*real_signal)(int, signal_handler);
static signal_handler (*real_sysv_signal)(int, signal_handler);
static int (*real_sigprocmask)(int, const sigset_t *, sigset_t *);
static int (*real_pthread_sigmask)(int, const sigset_t *, sigset_t *);

/* A vfork child returns from its caller's frame, so that ours must be gone before: a tail call. */
#if __has_attribute(musttail)
static pid_t (*real_vfork)(void);

static pid_t our_vfork(void)
{
    is_vfork_child(); /* for its effect: the owner is known before there is a child */
    TAIL_CALL real_vfork();
}
#endif

static int our_sigaction(int signal, const struct sigaction *action, struct sigaction *old)
{
    struct sigaction copy = {0};
    if (action) {
        copy = *action;
        allow_segv(&copy.sa_mask); /* any handler may run code that was not touched yet */
    }
    if (signal != SIGSEGV)
        return real_sigaction(signal, action ? &copy : NULL, old);
    struct sigaction before = application_action();
    if (action && !is_vfork_child())
        set_application_action(&copy);
    if (old)
        *old = before;
    return 0;
}

static signal_handler replace_handler(signal_handler handler, int flags)
{
    signal_handler before = application_action().sa_handler;
    if (!is_vfork_child())
        set_application_action(&(struct sigaction){.sa_handler = handler, .sa_flags = flags});
    return before;
}

static signal_handler our_signal(int signal, signal_handler handler)
{
    if (signal != SIGSEGV || handler == SIG_ERR)
        return real_signal(signal, handler);
    return replace_handler(handler, SA_RESTART);
}

static signal_handler our_sysv_signal(int signal, signal_handler handler)
{
    if (signal != SIGSEGV || handler == SIG_ERR)
        return real_sysv_signal(signal, handler);
    return replace_handler(handler, (int)(SA_RESETHAND | SA_NODEFER));
}

static int our_sigprocmask(int how, const sigset_t *set, sigset_t *old)
{
    sigset_t copy;
    if (!set || how == SIG_UNBLOCK)
        return real_sigprocmask(how, set, old);
    copy = *set;
    allow_segv(&copy);
    return real_sigprocmask(how, &copy, old);
}

static int our_pthread_sigmask(int how, const sigset_t *set, sigset_t *old)
{
    sigset_t copy;
    if (!set || how == SIG_UNBLOCK)
        return real_pthread_sigmask(how, set, old);
    copy = *set;
    allow_segv(&copy);
    return real_pthread_sigmask(how, &copy, old);
}

static const struct {
    const char *name;
    void *ours;
    void **real;
} replacements[] = {
    {"sigaction", (void *)our_sigaction, (void **)&real_sigaction},
    {"__sigaction", (void *)our_sigaction, (void **)&real_sigaction},
    {"signal", (void *)our_signal, (void **)&real_signal},
    {"bsd_signal", (void *)our_signal, (void **)&real_signal},
    {"ssignal", (void *)our_signal, (void **)&real_signal},
    {"sysv_signal", (void *)our_sysv_signal, (void **)&real_sysv_signal},
    {"__sysv_signal", (void *)our_sysv_signal, (void **)&real_sysv_signal},
    {"sigprocmask", (void *)our_sigprocmask, (void **)&real_sigprocmask},
    {"pthread_sigmask", (void *)our_pthread_sigmask, (void **)&real_pthread_sigmask},
#if __has_attribute(musttail)
    {"vfork", (void *)our_vfork, (void **)&real_vfork},
#endif
};

/* ---- reading a library's file: all functions return NULL, or the reason to leave it alone ---- */

static const char *read_image(int fd)
{
    Elf64_Ehdr *header = &image.header;
    if (!read_at(fd, header, sizeof *header, 0) || !same_bytes(header->e_ident, ELFMAG, SELFMAG) ||
        header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_type != ET_DYN)
        return "not a 64-bit ELF shared library";
    if (header->e_phentsize != sizeof(Elf64_Phdr) || header->e_phnum > MAX_HEADERS ||
        !read_at(fd, image.segments, header->e_phnum * sizeof(Elf64_Phdr), header->e_phoff))
        return "unusual program headers";
    if (header->e_shoff == 0 || header->e_shnum == 0)
        return "no section headers";
    if (header->e_shentsize != sizeof(Elf64_Shdr) || header->e_shnum > MAX_SECTIONS ||
        header->e_shstrndx >= header->e_shnum ||
        !read_at(fd, image.sections, header->e_shnum * sizeof(Elf64_Shdr), header->e_shoff))
        return "unusual section headers";
    return NULL;
}

/* ld.so makes code writable for text relocations, and all of its pages usable afterwards. */
static const char *check_dynamic(const ElfW(Dyn) *dynamic)
{
    for (; dynamic->d_tag != DT_NULL; dynamic++)
        if (dynamic->d_tag == DT_TEXTREL ||
            (dynamic->d_tag == DT_FLAGS && dynamic->d_un.d_val & DF_TEXTREL))
            return "text relocations";
    return NULL;
}

static const char *find_loads(struct library *lib)
{
    uintptr_t first = UINTPTR_MAX, end = 0;
    for (unsigned i = 0; i < image.header.e_phnum; i++) {
        const Elf64_Phdr *segment = &image.segments[i];
        /* Where BTI works, ld.so calls mprotect() on the code once more after la_objopen(). */
        if (segment->p_type == PT_GNU_PROPERTY && has_bti)
            return "branch protection (BTI)";
        if (segment->p_type != PT_LOAD || segment->p_flags & PF_W || segment->p_filesz == 0)
            continue;
        if (lib->load_count == MAX_LOADS)
            return "too many read-only segments";
        struct load *load = &lib->loads[lib->load_count++];
        load->start = segment->p_vaddr;
        load->end = segment->p_vaddr + segment->p_filesz;
        load->protection = (segment->p_flags & PF_R ? PROT_READ : 0) |
                           (segment->p_flags & PF_X ? PROT_EXEC : 0);
        if (load->end < load->start || load->end > UINT32_MAX) /* 4 GiB: larger is damaged */
            return "unusual segment addresses";
        first = load->start < first ? load->start : first;
        end = load->end > end ? load->end : end;
    }
    if (end == 0)
        return "no read-only segment";
    lib->first = (first & ~(grain - 1)) / PAGE;
    lib->pages = ((end + grain - 1) & ~(grain - 1)) / PAGE - lib->first;
    return NULL;
}

/* Marks all pages that [start, start + size) has a byte in. */
static void mark_range(struct library *lib, uintptr_t start, uintptr_t size, bool on)
{
    if (size == 0 || start + size < start)
        return;
    uintptr_t page = start / PAGE, last = (start + size - 1) / PAGE;
    if (page < lib->first)
        page = lib->first;
    for (; page <= last && page - lib->first < lib->pages; page++)
        set_bit(lib->watched, page - lib->first, on);
}

/*
 * Code and unwind data are only ever read by the CPU and by unwinders. Other data may be handed to
 * a system call, which fails with EFAULT on a PROT_NONE page instead of raising SIGSEGV: of it, only
 * what mark_constants() finds is watched. .init and
 * .fini are code as any other: ld.so jumps there, which is no system call.
 */
static bool is_watchable(int fd, const Elf64_Shdr *section)
{
    static const char *const unwind[] = {".eh_frame", ".eh_frame_hdr", ".gcc_except_table"};
    if (!(section->sh_flags & SHF_ALLOC) || section->sh_flags & SHF_WRITE ||
        section->sh_type == SHT_NOBITS)
        return false;
    if (section->sh_flags & SHF_EXECINSTR)
        return true;
    char name[24] = "";
    const Elf64_Shdr *names = &image.sections[image.header.e_shstrndx];
    sys4(SYS_pread64, fd, (long)name, sizeof name - 1, (long)(names->sh_offset + section->sh_name));
    for (size_t i = 0; i < sizeof unwind / sizeof *unwind; i++)
        if (length(unwind[i]) == length(name) && starts_with(name, unwind[i]))
            return true;
    return false;
}

/* The path of a library's file in the folder for records, or in one below it ("/NAME"). */
static bool path_in_folder(char to[MAX_PATH], const char *below, const char *library)
{
    to[0] = 0;
    if (!append(to, folder) || !append(to, below) || !append(to, "/"))
        return false;
    size_t start = length(to);
    if (!append(to, library))
        return false;
    for (char *c = to + start; *c; c++)
        if (*c == '/')
            *c = '%';
    return true;
}

/* Reads a page number; NULL if there is none, or it is that of no library. */
static const char *read_page(const char *c, uintptr_t *page)
{
    if (*c < '0' || *c > '9')
        return NULL;
    for (*page = 0; *c >= '0' && *c <= '9'; c++) {
        *page = *page * 10 + (uintptr_t)(*c - '0');
        if (*page > UINT32_MAX / PAGE)
            return NULL;
    }
    return c;
}

static bool holds_constants(const Elf64_Shdr *section, uintptr_t start, uintptr_t end)
{
    return section->sh_type == SHT_PROGBITS && section->sh_flags & SHF_ALLOC &&
           !(section->sh_flags & (SHF_WRITE | SHF_EXECINSTR)) && section->sh_addr <= start &&
           end - section->sh_addr <= section->sh_size;
}

/* Marks listed pages; all of a run must lie in one section of constants. */
static const char *mark_listed(struct library *lib, const char *c, const char *end)
{
    uintptr_t least = 0, first, last;
    do {
        c = read_page(c, &first);
        last = first;
        if (c && *c == '-')
            c = read_page(c + 1, &last);
        if (!c || first < least || last < first)
            return "the list of its constants is malformed";
        least = last + 1;
        bool found = false;
        for (unsigned i = 0; i < image.header.e_shnum && !found; i++)
            found = holds_constants(&image.sections[i], first * PAGE, (last + 1) * PAGE);
        if (!found)
            return "the list of its constants is of another library";
        mark_range(lib, first * PAGE, (last + 1 - first) * PAGE, true);
    } while (*c++ == ' ');
    return c[-1] == '\n' && c == end ? NULL : "the list of its constants is malformed";
}

/*
 * Which constants are never handed to a system call is for the build to say. It reads all of them;
 * that would be too slow here, for every process.
 */
static const char *mark_constants(struct library *lib, const char *library)
{
    static char list[MAX_LIST + 1];
    char path[MAX_PATH];
    if (!path_in_folder(path, "/constants", library))
        return "path too long";
    int fd = open_file(path, O_RDONLY);
    if (fd == -ENOENT || fd == -ENAMETOOLONG)
        return NULL;
    long n = fd < 0 ? fd : sys4(SYS_pread64, fd, (long)list, sizeof list, 0);
    if (fd >= 0)
        close_file(fd);
    if (n < 0 || n > MAX_LIST)
        return n < 0 ? "cannot read the list of its constants" : "the list of its constants is too long";
    list[n] = 0;
    return mark_listed(lib, list, list + n);
}

/* Where the first bytes of the file up to `size` are mapped: the ELF header and what follows. */
static void unmark_headers(struct library *lib, uint64_t offset, uint64_t size)
{
    for (unsigned i = 0; i < image.header.e_phnum; i++) {
        const Elf64_Phdr *segment = &image.segments[i];
        if (segment->p_type == PT_LOAD && segment->p_offset < offset + size &&
            offset < segment->p_offset + segment->p_filesz)
            mark_range(lib, segment->p_vaddr + (offset - segment->p_offset), size, false);
    }
}

/* Only pages that lie wholly in a read-only segment; and all pages of a kernel page, or none. */
static bool unmark_partial(struct library *lib)
{
    size_t step = grain / PAGE;
    bool any = false;
    for (size_t i = 0; i < lib->pages; i += step) {
        bool whole = true;
        for (size_t k = i; k < i + step; k++)
            whole = whole && bit(lib->watched, k) && load_of(lib, k) &&
                    load_of(lib, k) == load_of(lib, i);
        for (size_t k = i; k < i + step; k++)
            set_bit(lib->watched, k, whole);
        any = any || whole;
    }
    return any;
}

static const char *find_watched(int fd, struct library *lib, const char *path)
{
    lib->watched = map_memory(bitmap_bytes(lib->pages), -1);
    lib->faults = map_memory(lib->pages * sizeof *lib->faults, -1);
    if (!lib->watched || !lib->faults)
        return "out of memory";
    bool watchable[MAX_SECTIONS];
    for (unsigned i = 0; i < image.header.e_shnum; i++) {
        const Elf64_Shdr *section = &image.sections[i];
        watchable[i] = is_watchable(fd, section);
        if (watchable[i])
            mark_range(lib, section->sh_addr, section->sh_size, true);
    }
    for (unsigned i = 0; i < image.header.e_shnum; i++) {
        const Elf64_Shdr *section = &image.sections[i];
        /* .tbss has an address, but takes no room there. */
        bool tbss = section->sh_type == SHT_NOBITS && section->sh_flags & SHF_TLS;
        if (section->sh_flags & SHF_ALLOC && !watchable[i] && !tbss)
            mark_range(lib, section->sh_addr, section->sh_size, false);
    }
    const char *reason = mark_constants(lib, path);
    if (reason)
        return reason;
    unmark_headers(lib, 0, sizeof image.header);
    unmark_headers(lib, image.header.e_phoff, image.header.e_phnum * sizeof(Elf64_Phdr));
    return unmark_partial(lib) ? NULL : "no whole page that can be watched";
}

/* ---- the record ---- */

static struct record_header record_header(const struct library *lib)
{
    return (struct record_header){.magic = {'R', 'V', 'P', 'A', 'G', 'E', 'S', '1'},
                                  .page_size = PAGE, .first = lib->first, .pages = lib->pages};
}

static bool write_record(int fd, const struct library *lib)
{
    struct record_header header = record_header(lib);
    size_t bytes = bitmap_bytes(lib->pages);
    uint8_t *touched = map_memory(bytes, -1);
    if (!touched)
        return false;
    for (size_t i = 0; i < lib->pages; i++)
        set_bit(touched, i, !bit(lib->watched, i));
    bool done = write_all(fd, &header, sizeof header) && write_all(fd, touched, bytes) &&
                write_all(fd, lib->watched, bytes);
    unmap_memory(touched, bytes);
    return done;
}

/*
 * Writes a temporary file and links it to its name: never half-written for others to see, and,
 * unlike after rename(2), a record that another process made meanwhile stays. All bytes are
 * written, not left as a hole: a full disk must show here, not as SIGBUS in the handler.
 */
static const char *create_record(const char *path, const struct library *lib)
{
    char temporary[MAX_PATH];
    int fd = -EEXIST;
    for (unsigned long i = 0; fd == -EEXIST && i < 1000; i++) { /* left over by a killed process */
        temporary[0] = 0;
        if (!append(temporary, folder) || !append(temporary, "/.new-") ||
            !append_number(temporary, (unsigned long)sys4(SYS_getpid, 0, 0, 0, 0)) ||
            !append(temporary, "-") || !append_number(temporary, i))
            return "path too long";
        fd = open_file(temporary, O_WRONLY | O_CREAT | O_EXCL);
    }
    if (fd < 0)
        return "cannot create a record";
    bool written = write_record(fd, lib);
    long linked = 0;
    close_file(fd);
    if (written)
        linked = sys6(SYS_linkat, AT_FDCWD, (long)temporary, AT_FDCWD, (long)path, 0, 0);
    sys4(SYS_unlinkat, AT_FDCWD, (long)temporary, 0, 0);
    if (!written)
        return "cannot write a record";
    return linked == 0 || linked == -EEXIST ? NULL : "cannot link a record into the folder";
}

static const char *map_record(int fd, struct library *lib)
{
    struct record_header header = record_header(lib);
    struct stat status;
    size_t bytes = bitmap_bytes(lib->pages), size = sizeof header + 2 * bytes;
    if (sys4(SYS_fstat, fd, (long)&status, 0, 0) != 0 || status.st_size != (off_t)size)
        return "the record there is of another library";
    uint8_t *record = map_memory(size, fd);
    if (!record)
        return "cannot map the record";
    if (!same_bytes(record, &header, sizeof header) ||
        !same_bytes(record + sizeof header + bytes, lib->watched, bytes)) {
        unmap_memory(record, size);
        return "the record there is of another library";
    }
    lib->touched = (_Atomic uint8_t *)(record + sizeof header);
    return NULL;
}

static const char *open_record(const char *library, struct library *lib)
{
    char path[MAX_PATH];
    if (!path_in_folder(path, "", library))
        return "path too long";
    int fd = open_file(path, O_RDWR);
    if (fd == -ENOENT) {
        const char *reason = create_record(path, lib);
        if (reason)
            return reason;
        fd = open_file(path, O_RDWR);
    }
    if (fd < 0)
        return fd == -ENAMETOOLONG ? "path too long" : "cannot open the record";
    const char *reason = map_record(fd, lib);
    close_file(fd);
    return reason;
}

/* One write(2) with O_APPEND: lines of several processes don't mix. */
static void note_skipped(const char *library, const char *reason)
{
    char path[MAX_PATH] = "", line[MAX_PATH] = "";
    if (!append(path, folder) || !append(path, "/skipped") || !append(line, library) ||
        !append(line, "\t") || !append(line, reason) || !append(line, "\n"))
        return;
    int fd = open_file(path, O_WRONLY | O_CREAT | O_APPEND);
    if (fd < 0)
        return;
    write_all(fd, line, length(line));
    close_file(fd);
}

/* ---- the table of libraries; ld.so's load lock makes us the only writer ---- */

static bool overlaps(const struct library *lib, uintptr_t base, const struct library *other)
{
    uintptr_t other_base = atomic_load(&other->base);
    uintptr_t start = base + lib->first * PAGE, other_start = other_base + other->first * PAGE;
    return other_base && start < other_start + other->pages * PAGE &&
           other_start < start + lib->pages * PAGE;
}

/* Shows the library to the handler, then hides its pages. Returns its number + 1. */
static uintptr_t publish(struct library *lib, uintptr_t base)
{
    unsigned count = atomic_load(&library_count);
    for (unsigned i = 0; i < count; i++)
        if (overlaps(lib, base, &libraries[i]))
            atomic_store(&libraries[i].base, 0); /* its range was unmapped and used again */
    atomic_store(&lib->closing, false);
    atomic_store_explicit(&lib->base, base, memory_order_release);
    unsigned number = (unsigned)(lib - libraries);
    if (number == count)
        atomic_store_explicit(&library_count, count + 1, memory_order_release);
    if (!protect_watched(lib, base, true))
        stop_watching(lib, base);
    return number + 1;
}

/* The same file once more after dlclose(): its entry is right but for the address. */
static struct library *find_closed(const struct stat *status)
{
    unsigned count = atomic_load(&library_count);
    for (unsigned i = 0; i < count; i++) {
        struct library *lib = &libraries[i];
        if (!atomic_load(&lib->base) && lib->device == status->st_dev &&
            lib->inode == status->st_ino && lib->size == status->st_size) {
            memset((void *)lib->faults, 0, lib->pages * sizeof *lib->faults);
            return lib;
        }
    }
    return NULL;
}

static const char *fill_entry(int fd, const struct link_map *map, const char *path,
                              struct library *lib)
{
    const char *reason = read_image(fd);
    if (!reason)
        reason = check_dynamic(map->l_ld);
    if (!reason)
        reason = find_loads(lib);
    if (!reason)
        reason = find_watched(fd, lib, path);
    if (!reason)
        reason = open_record(path, lib);
    return reason;
}

static uintptr_t trace_open_file(int fd, const struct link_map *map, const char *path)
{
    struct stat status;
    if (sys4(SYS_fstat, fd, (long)&status, 0, 0) != 0 || !S_ISREG(status.st_mode) ||
        status.st_size < MIN_FILE_SIZE)
        return 0;
    struct library *lib = find_closed(&status);
    if (lib)
        return publish(lib, map->l_addr);
    unsigned count = atomic_load(&library_count);
    if (count == MAX_LIBRARIES || map->l_addr == 0) {
        note_skipped(path, map->l_addr ? "too many libraries" : "loaded at address 0");
        return 0;
    }
    lib = &libraries[count];
    lib->device = status.st_dev;
    lib->inode = status.st_ino;
    lib->size = status.st_size;
    const char *reason = fill_entry(fd, map, path, lib);
    if (!reason)
        return publish(lib, map->l_addr);
    note_skipped(path, reason);
    unmap_memory(lib->watched, bitmap_bytes(lib->pages));
    unmap_memory((void *)lib->faults, lib->pages * sizeof *lib->faults);
    memset(lib, 0, sizeof *lib);
    return 0;
}

/* The canonical path: two names of one file must not become two records. See proc_pid_fd(5). */
static bool canonical_path(int fd, char path[MAX_PATH])
{
    char link[MAX_PATH] = "/proc/self/fd/";
    append_number(link, (unsigned long)fd);
    long n = sys4(SYS_readlinkat, AT_FDCWD, (long)link, (long)path, MAX_PATH - 1);
    if (n <= 0 || path[0] != '/')
        return false;
    path[n] = 0;
    return true;
}

static uintptr_t trace_library(const struct link_map *map)
{
    static const char *const never[] = {"ld-", "ld.", "libgcc_s", "libdl"};
    const char *name = base_name(map->l_name);
    for (size_t i = 0; i < sizeof never / sizeof *never; i++)
        if (starts_with(name, never[i]))
            return 0;
    if (name == map->l_name) /* the program itself (""), the vdso, or a name without a folder */
        return 0;
    int fd = open_file(map->l_name, O_RDONLY);
    if (fd < 0)
        return 0;
    char path[MAX_PATH];
    uintptr_t cookie = 0;
    if (canonical_path(fd, path) && starts_with(path, prefix))
        cookie = trace_open_file(fd, map, path);
    close_file(fd);
    return cookie;
}

/* ---- the audit interface, see rtld-audit(7) ---- */

/* Page size and BTI. False: unknown, so better not to trace. */
static bool read_auxiliary_vector(void)
{
    Elf64_auxv_t entries[64];
    uintptr_t page_size = 0;
    int fd = open_file("/proc/self/auxv", O_RDONLY);
    if (fd < 0)
        return false;
    long n = sys4(SYS_read, fd, (long)entries, sizeof entries, 0);
    close_file(fd);
    for (long i = 0; i < n / (long)sizeof *entries; i++) {
        if (entries[i].a_type == AT_PAGESZ)
            page_size = entries[i].a_un.a_val;
#if defined(__aarch64__)
        if (entries[i].a_type == AT_HWCAP2)
            has_bti = entries[i].a_un.a_val >> 17 & 1; /* HWCAP2_BTI */
#endif
    }
    if (page_size > grain)
        grain = page_size;
    return page_size != 0;
}

static void take_over_segv(void)
{
    struct kernel_action before = {0};
    set_kernel_action(SIGSEGV, (void *)on_fault, SA_SIGINFO | SA_NODEFER | SA_ONSTACK, 0, &before);
    /* After execve(2) it is the default, or ignored when the parent ignored it. */
    actions[0].sa_handler = (signal_handler)before.handler;
    sys4(SYS_rt_sigprocmask, SIG_UNBLOCK, (long)&segv_bit, 0, 8); /* inherited, too */
}

/* glibc hands main()'s arguments to constructors. We run before la_version(). */
__attribute__((constructor)) static void start(int count, char **arguments, char **environment)
{
    (void)count;
    (void)arguments;
    const char *to = variable(environment, "RVBUNDLE_TRACE_PAGES");
    const char *from = variable(environment, "RVBUNDLE_TRACE_PREFIX");
    if (!to || to[0] != '/' || !append(folder, to))
        return;
    if (from && *from) {
        prefix[0] = 0;
        if (!append(prefix, from))
            return;
    }
    int fd = open_file(folder, O_RDONLY | O_DIRECTORY);
    if (fd < 0)
        return;
    close_file(fd);
    if (sys4(SYS_faccessat, AT_FDCWD, (long)folder, W_OK | X_OK, 0) != 0)
        return;
#ifdef TEST_GRAIN
    grain = TEST_GRAIN;
#endif
    if (!read_auxiliary_vector())
        return;
    map_owner(grain);
    take_over_segv();
    enabled = true;
}

/* We use nothing that differs between versions; newer glibc refuses older ones on some machines. */
EXPORT unsigned int la_version(unsigned int version)
{
    return version;
}

EXPORT unsigned int la_objopen(struct link_map *map, Lmid_t namespace, uintptr_t *cookie)
{
    (void)namespace;
    *cookie = 0;
    if (!enabled)
        return 0;
    const char *name = base_name(map->l_name);
    if (starts_with(name, "libc.so") || starts_with(name, "libc-") ||
        starts_with(name, "libpthread"))
        return LA_FLG_BINDTO; /* la_symbind64() then sees the symbols of these only */
    *cookie = trace_library(map);
    return LA_FLG_BINDFROM;
}

EXPORT unsigned int la_objclose(uintptr_t *cookie)
{
    if (enabled && *cookie)
        atomic_store(&libraries[*cookie - 1].closing, true);
    return 0;
}

/*
 * At exit, la_objclose() is called too, but code still runs there: other threads and later
 * destructors. Only when the library is gone from memory its range is no longer ours: mincore(2)
 * then fails with ENOMEM.
 */
EXPORT void la_activity(uintptr_t *cookie, unsigned int flag)
{
    (void)cookie;
    if (!enabled || flag != LA_ACT_CONSISTENT)
        return;
    unsigned count = atomic_load(&library_count);
    for (unsigned i = 0; i < count; i++) {
        struct library *lib = &libraries[i];
        uintptr_t base = atomic_load(&lib->base);
        unsigned char resident[16]; /* one byte a page of the kernel's, at most 64 KiB / 4 KiB */
        if (base && atomic_load(&lib->closing) &&
            sys4(SYS_mincore, (long)(base + lib->first * PAGE), (long)grain, (long)resident, 0) ==
                -ENOMEM)
            atomic_store(&lib->base, 0);
    }
}

EXPORT uintptr_t la_symbind64(Elf64_Sym *symbol, unsigned int index, uintptr_t *from, uintptr_t *to,
                              unsigned int *flags, const char *name)
{
    (void)index;
    (void)from;
    (void)to;
    (void)flags;
    if (!enabled)
        return symbol->st_value;
    for (size_t i = 0; i < sizeof replacements / sizeof *replacements; i++) {
        const char *known = replacements[i].name;
        if (length(name) != length(known) || !starts_with(name, known))
            continue;
        if (!*replacements[i].real) /* the first one: of the program's own libc */
            *replacements[i].real = (void *)symbol->st_value;
        return (uintptr_t)replacements[i].ours;
    }
    return symbol->st_value;
}
