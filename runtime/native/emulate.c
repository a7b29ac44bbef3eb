/*
 * emulate.c: a preloaded library that has the children of an emulated program emulated, too.
 *
 * A guest that runs under a user-mode emulator starts other programs by execve(2) and the like; the
 * kernel can't run these itself. Where no binfmt_misc does it (Linux before 6.7 has none in a user
 * namespace), libc's functions are replaced here: they execute the emulator with the program as its
 * argument. docs/emulation.md has the rules and the format of the file that names the emulator:
 *
 *   RVBUNDLE_EMULATOR_FILE   where it is (default "/run/rvbundle/emulator")
 *
 *   emulator PATH            first line; the emulator as seen by this process
 *   word WORD                an argument before the program, at most 64
 *   argv0 OPTION             the emulator's option that sets the program's argv[0]
 *   argv0-variable NAME      the same by an environment variable
 *   variable NAME=VALUE      what a child's environment must have, at most 16
 *
 * No such file: all calls pass through.
 *
 * In exec*() all is done on the stack or in pages of its own, by system calls of its own: it may be
 * called in a child of vfork(2) and in signal handlers, as execve(2).
 */
#define _GNU_SOURCE
#include "bare.h"

#include <elf.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/wait.h>

#if defined(__x86_64__)
#define MACHINE EM_X86_64
#elif defined(__aarch64__)
#define MACHINE EM_AARCH64
#else
#define MACHINE 243 /* EM_RISCV */
#endif

#define CODE_DAMAGED 107 /* ImageError */
#define MAX_WORDS 64
#define MAX_VARIABLES 16
#define MAX_SCRIPTS 5      /* exec_binprm() in Linux's fs/exec.c: one more is ELOOP */
#define FIRST_BYTES 256    /* BINPRM_BUF_SIZE since Linux 5.1: the kernel looks at no more */
#define ON_STACK 500       /* longer lists of arguments get pages */
#define MAX_STREAMS 256
#define SHELL "/bin/sh"    /* _PATH_BSHELL */
#define OWN_EXE "/proc/self/exe"

typedef char *const *strings;

static char config[MAX_PATH];
static const char *emulator; /* NULL: everything passes through */
static const char *words[MAX_WORDS], *variables[MAX_VARIABLES];
static size_t word_count, variable_count;
static const char *argv0_option, *argv0_variable;

#define WEAK(function) extern __typeof__(function) function __attribute__((weak))
extern char **environ __attribute__((weak));
extern int *__errno_location(void) __attribute__((weak));
extern void *dlsym(void *, const char *) __attribute__((weak));
extern char *dlerror(void) __attribute__((weak));
/* glibc before 2.34 has dlsym() in a library of its own, which not every program needs. */
extern void *__libc_dlopen_mode(const char *, int) __attribute__((weak));
extern void *__libc_dlsym(void *, const char *) __attribute__((weak));
WEAK(faccessat);
WEAK(fdopen);
WEAK(fclose);
WEAK(sigaction);
WEAK(sigprocmask);
WEAK(posix_spawnattr_init);
WEAK(posix_spawnattr_setsigmask);
WEAK(posix_spawnattr_setsigdefault);
WEAK(posix_spawnattr_setflags);
WEAK(posix_spawn_file_actions_init);
WEAK(posix_spawn_file_actions_destroy);
WEAK(posix_spawn_file_actions_adddup2);
WEAK(posix_spawn_file_actions_addclose);

static int fail(long result)
{
    if (result >= 0)
        return (int)result;
    if (__errno_location)
        *__errno_location() = (int)-result;
    return -1;
}

/* The headers promise that no argument is NULL, so that the compiler takes a test for it away. */
static inline strings any(strings list)
{
    __asm__("" : "+r"(list));
    return list;
}

static size_t count(strings list)
{
    size_t n = 0;
    while (list && list[n])
        n++;
    return n;
}

static bool is_same(const char *a, const char *b)
{
    size_t n = length(a);
    return n == length(b) && same_bytes(a, b, n);
}

/* libc's function behind ours. */
static void *find_next(const char *name)
{
    void *found = NULL;
    if (dlsym) {
        found = dlsym((void *)-1 /* RTLD_NEXT */, name);
        if (!found && dlerror)
            dlerror(); /* the program must not see an error that is ours */
    } else if (__libc_dlopen_mode && __libc_dlsym) {
        void *libc = __libc_dlopen_mode("libc.so.6", 0x80000002 /* __RTLD_DLOPEN | RTLD_NOW */);
        found = libc ? __libc_dlsym(libc, name) : NULL;
    }
    return found;
}

/* ---- what the kernel would make of a file ---- */

/* FOR_KERNEL: the emulator, and what is for its own machine. */
enum kind { FOR_KERNEL, FOR_EMULATOR, SCRIPT };

/* A file, how it is reached, and what it starts with. */
struct file {
    int folder; /* as for execveat(2) */
    const char *path;
    int flags;
    int fd; /* open for reading */
    struct stat status;
    char start[FIRST_BYTES + 1];
};

/* NULL: it isn't one. Else what follows the descriptor's number. */
static const char *descriptor_path(const char *path, int *fd)
{
    const char *at = starts_with(path, "/proc/self/fd/") ? path + 14
                     : starts_with(path, "/dev/fd/")     ? path + 8
                                                         : NULL;
    if (!at || *at < '0' || *at > '9')
        return NULL;
    for (*fd = 0; *at >= '0' && *at <= '9' && *fd < 1 << 24; at++)
        *fd = 10 * *fd + (*at - '0');
    return *at ? NULL : at;
}

/* By libc, which knows what the kernel has; and box64 knows no faccessat(2) as a system call. */
static long is_executable(int folder, const char *path)
{
    if (!faccessat || !__errno_location || faccessat(folder, path, X_OK, AT_EACCESS) == 0)
        return 0;
    return -*__errno_location();
}

/* Opens what the kernel would execute; a negative error if it wouldn't. */
static long open_program(struct file *file)
{
    char link[64] = "/proc/self/fd/";
    int folder = file->folder, options = file->flags & (AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW);
    const char *path = file->path;
    long result = sys4(SYS_newfstatat, folder, (long)path, (long)&file->status, options);
    if (result != 0)
        return result;
    if (S_ISLNK(file->status.st_mode))
        return -ELOOP; /* AT_SYMLINK_NOFOLLOW */
    if (!S_ISREG(file->status.st_mode))
        return -EACCES;
    if (!*path) {
        append_number(link, (unsigned)folder);
        path = link;
    }
    result = is_executable(folder, path);
    if (result != 0)
        return result;
    file->fd = (int)sys4(SYS_openat, folder, (long)path, O_RDONLY | O_CLOEXEC | O_NOCTTY, 0);
    if (file->fd < 0)
        return file->fd;
    result = sys4(SYS_pread64, file->fd, (long)file->start, FIRST_BYTES, 0);
    if (result < 0) {
        close_file(file->fd);
        return result;
    }
    memset(file->start + result, 0, sizeof file->start - (size_t)result);
    return 0;
}

static long check_interpreter(int fd, const Elf64_Phdr *header)
{
    char path[MAX_PATH];
    struct stat status;
    if (header->p_filesz < 2 || header->p_filesz > sizeof path)
        return -ENOEXEC;
    if (!read_at(fd, path, header->p_filesz, header->p_offset))
        return -EIO;
    if (path[header->p_filesz - 1])
        return -ENOEXEC;
    long result = sys4(SYS_newfstatat, AT_FDCWD, (long)path, (long)&status, 0);
    if (result == 0 && !S_ISREG(status.st_mode))
        result = -EACCES;
    return result == 0 ? is_executable(AT_FDCWD, path) : result;
}

/* What an emulator would only complain about, the kernel refuses. */
static long check_program(const struct file *file)
{
    const Elf64_Ehdr *elf = (const void *)file->start;
    Elf64_Phdr header;
    if ((elf->e_type != ET_EXEC && elf->e_type != ET_DYN) || elf->e_phentsize != sizeof header ||
        elf->e_phnum == 0 || elf->e_phnum > 65536 / sizeof header)
        return -ENOEXEC;
    for (unsigned i = 0; i < elf->e_phnum; i++) {
        if (!read_at(file->fd, &header, sizeof header, elf->e_phoff + i * sizeof header))
            return -ENOEXEC;
        if (header.p_type == PT_INTERP)
            return check_interpreter(file->fd, &header);
    }
    return 0;
}

static bool is_emulator(const struct stat *status)
{
    struct stat own;
    return sys4(SYS_newfstatat, AT_FDCWD, (long)emulator, (long)&own, 0) == 0 &&
           own.st_dev == status->st_dev && own.st_ino == status->st_ino;
}

/* The machine that this ELF file is for; 0: it is none. */
static unsigned machine_of(const char start[FIRST_BYTES])
{
    const Elf64_Ehdr *elf = (const void *)start;
    bool is_elf = same_bytes(start, ELFMAG, SELFMAG) && elf->e_ident[EI_CLASS] == ELFCLASS64;
    return is_elf ? elf->e_machine : EM_NONE;
}

static unsigned machine_of_emulator(void)
{
    char start[FIRST_BYTES] = {0};
    int fd = open_file(emulator, O_RDONLY);
    if (fd < 0)
        return EM_NONE;
    sys4(SYS_pread64, fd, (long)start, sizeof start, 0);
    close_file(fd);
    return machine_of(start);
}

/* An enum kind, or a negative error. */
static long kind_of(const struct file *file)
{
    unsigned machine = machine_of(file->start);
    if (file->start[0] == '#' && file->start[1] == '!')
        return SCRIPT;
    if (machine == EM_NONE)
        return -ENOEXEC;
    if (is_emulator(&file->status))
        return FOR_KERNEL;
    if (machine != MACHINE)
        return machine == machine_of_emulator() ? FOR_KERNEL : -ENOEXEC;
    long result = check_program(file);
    return result == 0 ? FOR_EMULATOR : result;
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\t';
}

/*
 * Finds a script's interpreter and its one argument as fs/binfmt_script.c does: trailing blanks
 * don't count, and a line that is longer than what the kernel reads loses the end of its argument,
 * but not of its interpreter.
 */
static bool split_line(char line[FIRST_BYTES + 1], const char **name, const char **argument)
{
    char *end = line, *at = line + 2;
    while (end < line + FIRST_BYTES && *end != '\n')
        end++;
    bool is_cut = end == line + FIRST_BYTES;
    if (is_cut)
        end--;
    while (at < end && is_blank(*at))
        at++;
    if (at == end)
        return false;
    char *stop = at, *last = end;
    while (stop < end && *stop && !is_blank(*stop))
        stop++;
    if (is_cut && stop == end && *end && !is_blank(*end))
        return false;
    while (last > stop && is_blank(last[-1]))
        last--;
    *last = 0;
    *name = at;
    *argument = NULL;
    at = stop;
    while (at < last && is_blank(*at))
        at++;
    if (at > stop && at < last)
        *argument = at;
    *stop = 0;
    return true;
}

/* ---- what is executed instead ---- */

struct program {
    const char *path;
    const char *argv0;                     /* NULL: the caller's */
    const char *more[2 * MAX_SCRIPTS + 1]; /* between argv[0] and the caller's argv[1] */
    size_t more_count;
    int leaked; /* a descriptor that stays open for the emulator, or -1 */
    bool is_emulated;
    char lines[MAX_SCRIPTS + 1][FIRST_BYTES + 1];
    char name[MAX_PATH], script_name[MAX_PATH];
};

/* A path for a file that is given by a descriptor: the emulator opens it after execve(2). */
static long name_by_descriptor(struct program *p, const struct file *file)
{
    char link[64] = "/proc/self/fd/";
    struct stat status;
    append_number(link, (unsigned)file->fd);
    long n = sys4(SYS_readlinkat, AT_FDCWD, (long)link, (long)p->name, sizeof p->name - 1);
    if (n < 0)
        return n;
    p->name[n] = 0;
    p->path = p->name;
    if (p->name[0] == '/' &&
        sys4(SYS_newfstatat, AT_FDCWD, (long)p->name, (long)&status, 0) == 0 &&
        status.st_dev == file->status.st_dev && status.st_ino == file->status.st_ino)
        return 0;
    /* It has no name any more. */
    p->leaked = (int)sys4(SYS_fcntl, file->fd, F_DUPFD, 3, 0);
    if (p->leaked < 0)
        return p->leaked;
    memcpy(p->name, "/proc/self/fd/", 15);
    append_number(p->name, (unsigned)p->leaked);
    return 0;
}

/* What a script that is given by a descriptor is called for its interpreter, see execveat(2). */
static long script_by_descriptor(struct program *p, int fd, const char *path)
{
    if (sys4(SYS_fcntl, fd, F_GETFD, 0, 0) & FD_CLOEXEC)
        return -ENOENT;
    memcpy(p->script_name, "/dev/fd/", 9);
    append_number(p->script_name, (unsigned)fd);
    if (*path && !(append(p->script_name, "/") && append(p->script_name, path)))
        return -ENAMETOOLONG;
    return 0;
}

/* Puts a script's interpreter and argument in front of what was to be executed so far. */
static long add_script(struct program *p, struct file *file, unsigned depth, const char *script)
{
    const char *name, *argument, **more = p->more;
    char *line = p->lines[depth];
    memcpy(line, file->start, sizeof file->start);
    if (!split_line(line, &name, &argument))
        return -ENOEXEC;
    if (!*name)
        return -EACCES; /* for the kernel it is the working directory */
    size_t by = argument ? 2 : 1;
    if (depth == MAX_SCRIPTS)
        by = 0; /* for the error that its interpreter may have before ELOOP */
    for (size_t i = p->more_count; by && i > 0; i--)
        more[i - 1 + by] = more[i - 1];
    if (by) {
        p->more_count += by;
        more[by - 1] = script;
        if (argument)
            more[0] = argument;
    }
    p->path = p->argv0 = name;
    return 0;
}

/* Of what the file is part when it is found: with file actions, the emulator looks for it later. */
enum relative_to { DESCRIPTOR, WORKING_DIRECTORY };

/* Finds out what to execute for a file. A negative error, or 0. */
static long find_program(struct program *p, struct file file, enum relative_to meaning)
{
    int fd, given = file.folder;
    bool is_given = meaning == DESCRIPTOR && given != AT_FDCWD && file.path[0] != '/';
    bool has_number = is_given || descriptor_path(file.path, &fd);
    p->path = file.path;
    p->argv0 = NULL;
    p->more_count = 0;
    p->leaked = -1;
    p->is_emulated = false;
    for (unsigned depth = 0;; depth++) {
        const char *script = p->path;
        long result = open_program(&file);
        if (result < 0)
            return result;
        result = depth > MAX_SCRIPTS ? -ELOOP : kind_of(&file);
        if (result >= 0 && result != SCRIPT && has_number && depth == 0 &&
            name_by_descriptor(p, &file) < 0)
            result = -ENOENT;
        close_file(file.fd);
        if (result != SCRIPT) {
            p->is_emulated = result == FOR_EMULATOR;
            return result < 0 ? result : 0;
        }
        if (is_given && depth == 0) {
            result = script_by_descriptor(p, given, file.path);
            script = p->script_name;
        }
        if (result >= 0)
            result = add_script(p, &file, depth, script);
        if (result < 0)
            return result;
        file.path = p->path;
        file.flags = 0;
        if (meaning == DESCRIPTOR)
            file.folder = AT_FDCWD;
    }
}

/* ---- the call with other arguments ---- */

typedef int spawn_function(pid_t *, const char *, const posix_spawn_file_actions_t *,
                           const posix_spawnattr_t *, strings, strings);

/* What a caller wants; with `spawn` it is libc's posix_spawn(3) that is called in the end. */
struct call {
    strings arguments, environment;
    spawn_function *spawn;
    pid_t *pid;
    const posix_spawn_file_actions_t *actions;
    const posix_spawnattr_t *attributes;
    int folder; /* what relative paths of `spawn` refer to */
    bool try_shell;
};

static long make_call(const struct call *call, const char *path, strings arguments,
                      strings environment)
{
    if (!call->spawn)
        return sys4(SYS_execve, (long)path, (long)arguments, (long)environment, 0);
    return -call->spawn(call->pid, path, call->actions, call->attributes, arguments, environment);
}

static bool has_variable(strings environment, const char *setting)
{
    size_t n = 0;
    while (setting[n] && setting[n] != '=')
        n++;
    for (; environment && *environment; environment++)
        if (length(*environment) > n && same_bytes(*environment, setting, n) &&
            (*environment)[n] == '=')
            return true;
    return false;
}

/* The environment for a child: the caller's own if it has all that it must. */
static strings add_variables(const char **list, strings environment, const char *argv0_setting)
{
    size_t n = 0;
    bool is_more = argv0_setting;
    for (size_t i = 0; i < variable_count; i++)
        is_more = is_more || !has_variable(environment, variables[i]);
    if (!is_more)
        return environment;
    for (; environment && environment[n]; n++)
        list[n] = environment[n];
    for (size_t i = 0; i < variable_count; i++)
        if (!has_variable(environment, variables[i]))
            list[n++] = variables[i];
    if (argv0_setting)
        list[n++] = argv0_setting;
    list[n] = NULL;
    return (strings)list;
}

/* "./-x" for "-x", which would be an option. */
static bool protect_dash(struct program *p)
{
    if (p->path[0] != '-')
        return true;
    memcpy(p->name, "./", 3);
    bool fits = append(p->name, p->path);
    p->path = p->name;
    return fits;
}

/* Writes what comes before the program's own arguments. */
static size_t add_emulator(struct program *p, const char **list, const char *argv0)
{
    size_t n = 0;
    list[n++] = emulator;
    for (size_t i = 0; i < word_count; i++)
        list[n++] = words[i];
    if (argv0_option) {
        list[n++] = argv0_option;
        list[n++] = argv0;
    }
    list[n++] = p->path;
    return n;
}

/* `list` has room for all arguments, and for the environment after them. */
static long call_with(struct program *p, const struct call *call, const char **list, size_t given)
{
    char setting[MAX_PATH];
    const char *argv0 = p->argv0 ? p->argv0 : given ? call->arguments[0] : "";
    size_t n = 1;
    strings environment = call->environment;
    list[0] = argv0;
    setting[0] = 0;
    if (argv0_variable && !is_same(argv0, p->path) &&
        !(append(setting, argv0_variable) && append(setting, "=") && append(setting, argv0)))
        return -E2BIG;
    if (p->is_emulated) {
        if (!protect_dash(p))
            return -ENAMETOOLONG;
        n = add_emulator(p, list, argv0);
    }
    for (size_t i = 0; i < p->more_count; i++)
        list[n++] = p->more[i];
    for (size_t i = 1; i < given; i++)
        list[n++] = call->arguments[i];
    list[n++] = NULL;
    if (p->is_emulated)
        environment = add_variables(list + n, environment, *setting ? setting : NULL);
    return make_call(call, p->is_emulated ? emulator : p->path, (strings)list, environment);
}

static long call_other(struct program *p, const struct call *call)
{
    const char *on_stack[ON_STACK];
    size_t given = count(call->arguments);
    size_t size = sizeof *on_stack * (MAX_WORDS + 2 * MAX_SCRIPTS + MAX_VARIABLES + 10 + given +
                                      count(call->environment));
    const char **list = size <= sizeof on_stack ? on_stack : map_memory(size, -1);
    if (!list)
        return -ENOMEM;
    long result = call_with(p, call, list, given);
    if (list != on_stack)
        unmap_memory(list, size);
    return result;
}

static bool is_own_exe(const char *path)
{
    return starts_with(path, "/proc/") &&
           (is_same(path, OWN_EXE) || is_same(path, "/proc/thread-self/exe"));
}

/* What execve(2), execveat(2) or posix_spawn(3) do; a negative error. */
static long call_program(const struct call *call, int folder, const char *path, int flags)
{
    struct program p;
    struct file file = {.folder = folder, .path = path, .flags = flags};
    if (!emulator)
        return make_call(call, path, call->arguments, call->environment);
    if (!path)
        return -EFAULT;
    if (is_own_exe(path)) { /* for the kernel it is the emulator */
        long n = sys4(SYS_readlinkat, AT_FDCWD, (long)OWN_EXE, (long)p.script_name, MAX_PATH - 1);
        if (n < 0)
            return n;
        p.script_name[n] = 0;
        file.path = p.script_name;
    }
    long result = find_program(&p, file, call->spawn ? WORKING_DIRECTORY : DESCRIPTOR);
    if (result < 0)
        return result;
    result = call_other(&p, call);
    if (p.leaked >= 0)
        close_file(p.leaked);
    return result;
}

/* execvp(3) has the shell execute what the kernel can't, posix_spawnp(3) doesn't. */
static long call_or_shell(const struct call *call, const char *path)
{
    const char *on_stack[ON_STACK];
    long result = call_program(call, call->folder, path, 0);
    if (result != -ENOEXEC || !call->try_shell)
        return result;
    size_t given = count(call->arguments), n = 0, size = sizeof *on_stack * (given + 3);
    const char **list = size <= sizeof on_stack ? on_stack : map_memory(size, -1);
    if (!list)
        return -ENOMEM;
    list[n++] = SHELL;
    list[n++] = path;
    for (size_t i = 1; i < given; i++)
        list[n++] = call->arguments[i];
    list[n] = NULL;
    struct call shell = *call;
    shell.arguments = (strings)list;
    result = call_program(&shell, AT_FDCWD, SHELL, 0);
    if (list != on_stack)
        unmap_memory(list, size);
    return result;
}

/* Tell whether the search goes on after this error, as in glibc's execvpe(3). */
static bool is_not_there(long error)
{
    return error == -EACCES || error == -ENOENT || error == -ESTALE || error == -ENOTDIR ||
           error == -ENODEV || error == -ETIMEDOUT;
}

static long search_program(const struct call *call, const char *name)
{
    char path[MAX_PATH + 257];
    bool is_denied = false;
    long result = -ENOENT;
    size_t name_size = length(name) + 1;
    if (name_size == 1)
        return -ENOENT;
    for (const char *at = name; *at; at++)
        if (*at == '/')
            return call_or_shell(call, name);
    if (name_size > 256)
        return -ENAMETOOLONG;
    const char *at = environ ? variable(environ, "PATH") : NULL;
    for (at = at ? at : "/bin:/usr/bin";; at++) {
        size_t n = 0;
        while (at[n] && at[n] != ':')
            n++;
        if (n < MAX_PATH) { /* glibc ignores longer ones */
            memcpy(path, at, n);
            if (n > 0)
                path[n] = '/';
            memcpy(path + n + (n > 0), name, name_size);
            result = call_or_shell(call, path);
            if (!is_not_there(result))
                return result;
            is_denied = is_denied || result == -EACCES;
        }
        at += n;
        if (!*at)
            return is_denied ? -EACCES : result;
    }
}

/* ---- exec*() ---- */

static void begin(strings environment);

static int execute(const char *path, strings arguments, strings environment)
{
    struct call call = {.arguments = arguments, .environment = environment, .folder = AT_FDCWD};
    begin(environment); /* another preload's constructor may come before ours */
    return fail(call_program(&call, AT_FDCWD, path, 0));
}

static int search_and_execute(const char *name, strings arguments, strings environment)
{
    struct call call = {.arguments = arguments, .environment = environment, .folder = AT_FDCWD,
                        .try_shell = true};
    return fail(search_program(&call, name));
}

EXPORT int execve(const char *path, strings arguments, strings environment)
{
    return execute(path, any(arguments), any(environment));
}

EXPORT int execv(const char *path, strings arguments)
{
    return execute(path, any(arguments), environ);
}

EXPORT int execvpe(const char *name, strings arguments, strings environment)
{
    return search_and_execute(name, any(arguments), any(environment));
}

EXPORT int execvp(const char *name, strings arguments)
{
    return search_and_execute(name, any(arguments), environ);
}

EXPORT int execveat(int folder, const char *path, strings arguments, strings environment, int flags)
{
    struct call call = {.arguments = any(arguments), .environment = any(environment)};
    if (!emulator)
        return fail(sys6(SYS_execveat, folder, (long)path, (long)arguments, (long)environment,
                         flags, 0));
    if (flags & ~(AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW))
        return fail(-EINVAL);
    return fail(call_program(&call, folder, path, flags));
}

EXPORT int fexecve(int fd, strings arguments, strings environment)
{
    if (fd < 0 || !any(arguments) || !any(environment))
        return fail(-EINVAL);
    return execveat(fd, "", arguments, environment, AT_EMPTY_PATH);
}

enum last { NO_MORE, THEN_ENVIRONMENT };

static int execute_list(int (*way)(const char *, strings, strings), const char *path,
                        const char *first, va_list *more, enum last last)
{
    const char *on_stack[ON_STACK];
    size_t n = 1;
    va_list counted;
    if (first) {
        va_copy(counted, *more);
        for (n = 2; va_arg(counted, const char *); n++)
            ;
        va_end(counted);
    }
    size_t size = n * sizeof *on_stack;
    const char **list = size <= sizeof on_stack ? on_stack : map_memory(size, -1);
    if (!list)
        return fail(-ENOMEM);
    list[0] = first;
    for (size_t i = 1; i < n; i++)
        list[i] = va_arg(*more, const char *);
    int result = way(path, (strings)list, last == NO_MORE ? environ : va_arg(*more, char **));
    if (list != on_stack)
        unmap_memory(list, size); /* makes its system call directly: errno stays */
    return result;
}

#define EXEC_LIST(name, way, last)                                                                 \
    EXPORT int name(const char *path, const char *first, ...)                                      \
    {                                                                                              \
        va_list more;                                                                              \
        va_start(more, first);                                                                     \
        int result = execute_list(way, path, first, &more, last);                                  \
        va_end(more);                                                                              \
        return result;                                                                             \
    }
EXEC_LIST(execl, execute, NO_MORE)
EXEC_LIST(execle, execute, THEN_ENVIRONMENT)
EXEC_LIST(execlp, search_and_execute, NO_MORE)

/* ---- posix_spawn() ---- */

/* glibc's, the same since chdir came into it (2.29): sysdeps/posix/spawn_int.h */
struct spawn_action {
    int kind;
    union {
        int fd;
        const char *path;
        struct {
            int fd;
            char *path;
            int flags, mode;
        } open;
    } what;
};
#define ACTION_CHDIR 3
#define ACTION_FCHDIR 4

/* The working directory after the file actions: AT_FDCWD, a new descriptor, or an error. */
static int folder_after(const posix_spawn_file_actions_t *actions)
{
    int folder = AT_FDCWD;
    const struct spawn_action *action = actions ? (const void *)actions->__actions : NULL;
    for (int i = 0; actions && i < actions->__used; i++, action++) {
        if (action->kind != ACTION_CHDIR && action->kind != ACTION_FCHDIR)
            continue;
        bool by_path = action->kind == ACTION_CHDIR;
        int next = (int)sys4(SYS_openat, by_path ? folder : action->what.fd,
                             (long)(by_path ? action->what.path : "."),
                             O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
        if (folder >= 0)
            close_file(folder);
        if (next < 0)
            return next;
        folder = next;
    }
    return folder;
}

static int spawn(spawn_function *next, bool search, pid_t *pid, const char *path,
                 const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes,
                 strings arguments, strings environment)
{
    int folder = folder_after(actions);
    if (folder < 0 && folder != AT_FDCWD)
        return -folder;
    struct call call = {.arguments = arguments, .environment = environment, .spawn = next,
                        .pid = pid, .actions = actions, .attributes = attributes,
                        .folder = folder};
    long result = search ? search_program(&call, path) : call_program(&call, folder, path, 0);
    if (folder >= 0)
        close_file(folder);
    return (int)-result;
}

/* `plain` is what posix_spawnp() calls once it has found the program. */
#define SPAWN_FUNCTION(name, plain, first, search)                                                 \
    EXPORT int name(first *pid, const char *path, const posix_spawn_file_actions_t *actions,       \
                    const posix_spawnattr_t *attributes, strings arguments, strings environment)   \
    {                                                                                              \
        spawn_function *next = (spawn_function *)find_next(emulator ? plain : #name);              \
        if (!next)                                                                                 \
            return ENOSYS;                                                                         \
        if (!emulator)                                                                             \
            return next(pid, path, actions, attributes, arguments, environment);                   \
        return spawn(next, search, pid, path, actions, attributes, any(arguments),                 \
                     any(environment));                                                            \
    }
SPAWN_FUNCTION(posix_spawn, "posix_spawn", pid_t, false)
SPAWN_FUNCTION(posix_spawnp, "posix_spawn", pid_t, true)
SPAWN_FUNCTION(pidfd_spawn, "pidfd_spawn", int, false)
SPAWN_FUNCTION(pidfd_spawnp, "pidfd_spawn", int, true)

/* ---- system() and popen(): libc's use a posix_spawn() of its own ---- */

/* Waits not for long: after fork(2) in another thread nobody opens it in the child. */
static void lock(atomic_flag *flag)
{
    for (int i = 0; i < 10000 && atomic_flag_test_and_set(flag); i++)
        sys4(SYS_sched_yield, 0, 0, 0, 0);
}

static int spawn_shell(const char *line, pid_t *pid, const posix_spawn_file_actions_t *actions,
                       const posix_spawnattr_t *attributes)
{
    const char *arguments[] = {"sh", "-c", "--", line, NULL};
    spawn_function *next = (spawn_function *)find_next("posix_spawn");
    return next ? spawn(next, false, pid, SHELL, actions, attributes, (strings)arguments, environ)
                : ENOSYS;
}

/* glibc's sigset_t starts with the kernel's 64 bits. */
static unsigned long *bits_of(sigset_t *set)
{
    return (unsigned long *)(void *)set;
}

static int wait_for(pid_t pid)
{
    int status;
    long result;
    do
        result = sys4(SYS_wait4, pid, (long)&status, 0, 0);
    while (result == -EINTR);
    return result < 0 ? fail(result) : status;
}

/* Threads may call system() side by side: the first ignores the signals, the last puts them back. */
static struct {
    atomic_flag lock;
    int calls;
    struct sigaction interrupt, quit;
} ignored = {.lock = ATOMIC_FLAG_INIT};

static void ignore_keys(void)
{
    struct sigaction ignore;
    memset(&ignore, 0, sizeof ignore);
    ignore.sa_handler = SIG_IGN;
    lock(&ignored.lock);
    if (ignored.calls++ == 0) {
        sigaction(SIGINT, &ignore, &ignored.interrupt);
        sigaction(SIGQUIT, &ignore, &ignored.quit);
    }
    atomic_flag_clear(&ignored.lock);
}

static void put_keys_back(void)
{
    lock(&ignored.lock);
    if (--ignored.calls == 0) {
        sigaction(SIGINT, &ignored.interrupt, NULL);
        sigaction(SIGQUIT, &ignored.quit, NULL);
    }
    atomic_flag_clear(&ignored.lock);
}

/* Starts the shell with the signals as they were before system(). An errno. */
static int spawn_with_keys(const char *line, pid_t *pid, const sigset_t *mask)
{
    posix_spawnattr_t attributes;
    sigset_t by_default = {0};
    unsigned long *bits = bits_of(&by_default);
    *bits |= ignored.interrupt.sa_handler != SIG_IGN ? 1UL << (SIGINT - 1) : 0;
    *bits |= ignored.quit.sa_handler != SIG_IGN ? 1UL << (SIGQUIT - 1) : 0;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, mask);
    posix_spawnattr_setsigdefault(&attributes, &by_default);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    return spawn_shell(line, pid, NULL, &attributes);
}

static int run_shell(const char *line)
{
    sigset_t mask = {0}, before;
    pid_t pid;
    *bits_of(&mask) = 1UL << (SIGCHLD - 1);
    ignore_keys();
    sigprocmask(SIG_BLOCK, &mask, &before);
    /* POSIX: without a shell it is as if the shell had ended with 127. */
    int result = spawn_with_keys(line, &pid, &before) == 0 ? wait_for(pid) : 127 << 8;
    put_keys_back();
    sigprocmask(SIG_SETMASK, &before, NULL);
    return result;
}

EXPORT int system(const char *line)
{
    typedef int system_function(const char *);
    system_function *next = emulator ? NULL : (system_function *)find_next("system");
    if (next)
        return next(line);
    return line ? run_shell(line) : run_shell("exit 0") == 0;
}

/* The streams of popen(). The pipe's inode tells whether a descriptor still is what it was. */
static struct stream {
    FILE *file;
    pid_t pid;
    int fd;
    uint64_t inode;
} streams[MAX_STREAMS];
static atomic_flag streams_lock = ATOMIC_FLAG_INIT;

static uint64_t inode_of(int fd)
{
    struct stat status;
    return sys4(SYS_fstat, fd, (long)&status, 0, 0) == 0 ? status.st_ino : 0;
}

static struct stream *free_stream(void)
{
    for (struct stream *s = streams; s < streams + MAX_STREAMS; s++)
        if (!s->file || inode_of(s->fd) != s->inode) /* fclose() instead of pclose() */
            return s;
    return NULL;
}

/* Starts the shell with one end of a pipe, which is none of 0 and 1. An errno. */
static int spawn_piped(const char *line, pid_t *pid, int end, int target)
{
    posix_spawn_file_actions_t actions;
    int error = posix_spawn_file_actions_init(&actions);
    if (error != 0)
        return error;
    error = posix_spawn_file_actions_adddup2(&actions, end, target);
    for (struct stream *s = streams; s < streams + MAX_STREAMS && error == 0; s++)
        if (s->file && s->fd != target && inode_of(s->fd) == s->inode)
            error = posix_spawn_file_actions_addclose(&actions, s->fd);
    if (error == 0)
        error = spawn_shell(line, pid, &actions, NULL);
    posix_spawn_file_actions_destroy(&actions);
    return error;
}

/* Before glibc 2.29 dup2() of a descriptor to itself leaves it close-on-exec: away from 0 and 1. */
static int move_up(int fd)
{
    if (fd > 1)
        return fd;
    int moved = (int)sys4(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 2, 0);
    close_file(fd);
    return moved;
}

struct mode {
    bool reads, writes, close_on_exec;
};

static bool read_mode(const char *text, struct mode *mode)
{
    *mode = (struct mode){0};
    for (; *text; text++)
        if (*text == 'r')
            mode->reads = true;
        else if (*text == 'w')
            mode->writes = true;
        else if (*text == 'e')
            mode->close_on_exec = true;
        else
            return false;
    return mode->reads != mode->writes;
}

static FILE *start_stream(struct stream *stream, const char *line, struct mode mode, int ends[2])
{
    pid_t pid;
    int own = ends[mode.writes], other = move_up(ends[!mode.writes]);
    FILE *file = other < 0 ? NULL : fdopen(own, mode.reads ? "r" : "w");
    if (!file) {
        close_file(own);
        close_file(other);
        return NULL;
    }
    int error = spawn_piped(line, &pid, other, mode.reads ? 1 : 0);
    close_file(other);
    if (error != 0) {
        fclose(file);
        fail(-error);
        return NULL;
    }
    if (!mode.close_on_exec)
        sys4(SYS_fcntl, own, F_SETFD, 0, 0);
    *stream = (struct stream){.file = file, .pid = pid, .fd = own, .inode = inode_of(own)};
    return file;
}

EXPORT FILE *popen(const char *line, const char *mode_text)
{
    typedef FILE *popen_function(const char *, const char *);
    popen_function *next = emulator ? NULL : (popen_function *)find_next("popen");
    struct mode mode;
    int ends[2];
    FILE *file = NULL;
    if (next)
        return next(line, mode_text);
    if (!read_mode(mode_text, &mode)) {
        fail(-EINVAL);
        return NULL;
    }
    lock(&streams_lock);
    struct stream *stream = free_stream();
    long result = !fdopen || !fclose ? -ENOSYS
                  : stream           ? sys4(SYS_pipe2, (long)ends, O_CLOEXEC, 0, 0)
                                     : -EMFILE;
    if (result == 0)
        file = start_stream(stream, line, mode, ends);
    else
        fail(result);
    atomic_flag_clear(&streams_lock);
    return file;
}

EXPORT int pclose(FILE *file)
{
    typedef int pclose_function(FILE *);
    pid_t pid = 0;
    lock(&streams_lock);
    for (struct stream *s = streams; s < streams + MAX_STREAMS && pid == 0; s++)
        if (s->file == file) {
            pid = s->pid;
            s->file = NULL;
        }
    atomic_flag_clear(&streams_lock);
    if (pid > 0) {
        fclose(file);
        return wait_for(pid);
    }
    pclose_function *next = (pclose_function *)find_next("pclose");
    return next ? next(file) : fail(-EINVAL);
}

/* ---- the start ---- */

static _Noreturn void refuse(const char *path, size_t line)
{
    char message[MAX_PATH];
    message[0] = 0;
    append(message, "rvbundle: ");
    append(message, path);
    append(message, ", line ");
    append_number(message, line);
    append(message, ": it does not name an emulator as docs/emulation.md has it\n");
    write_all(2, message, length(message));
    for (;;)
        sys4(SYS_exit_group, CODE_DAMAGED, 0, 0, 0);
}

/* The value of a line with this keyword, or NULL. */
static const char *value_of(const char *line, const char *keyword)
{
    size_t n = length(keyword);
    return starts_with(line, keyword) && line[n] == ' ' && line[n + 1] ? line + n + 1 : NULL;
}

static bool set_once(const char **variable, const char *value)
{
    bool is_new = !*variable;
    *variable = value;
    return is_new;
}

static bool read_line(const char *line)
{
    const char *value;
    if ((value = value_of(line, "emulator")))
        return value[0] == '/' && set_once(&emulator, value);
    if (!emulator)
        return false;
    if (starts_with(line, "word ") && word_count < MAX_WORDS)
        return (words[word_count++] = line + 5); /* may be empty */
    if ((value = value_of(line, "argv0")))
        return set_once(&argv0_option, value);
    if ((value = value_of(line, "argv0-variable")))
        return set_once(&argv0_variable, value);
    if ((value = value_of(line, "variable")) && variable_count < MAX_VARIABLES) {
        variables[variable_count++] = value;
        while (*value && *value != '=')
            value++;
        return *value && value != variables[variable_count - 1];
    }
    return false;
}

static void read_config(const char *path)
{
    size_t number = 1;
    int fd = open_file(path, O_RDONLY);
    if (fd == -ENOENT || fd == -ENOTDIR)
        return;
    long size = fd < 0 ? fd : sys4(SYS_pread64, fd, (long)config, sizeof config, 0);
    if (fd >= 0)
        close_file(fd);
    if (size <= 0 || size == sizeof config || config[size - 1] != '\n')
        refuse(path, 1);
    for (char *line = config, *at = config; at < config + size; at++) {
        if (!*at)
            refuse(path, number);
        if (*at != '\n')
            continue;
        *at = 0;
        if (!read_line(line))
            refuse(path, number);
        line = at + 1;
        number++;
    }
}

static void begin(strings environment)
{
    static bool has_begun;
    if (has_begun)
        return;
    has_begun = true;
    const char *path = environment ? variable((char **)environment, "RVBUNDLE_EMULATOR_FILE") : NULL;
    read_config(path && *path ? path : "/run/rvbundle/emulator");
}

/* glibc hands main()'s arguments to constructors. */
__attribute__((constructor)) static void start(int argument_count, char **arguments,
                                               char **environment)
{
    (void)argument_count;
    (void)arguments;
    begin(environment);
}
