/*
 * traceall.c: a preloaded library that has every process of a trace audited by tracer.c.
 *
 * LD_AUDIT is a variable: a child that is started with an environment of its own would go untraced.
 * /etc/ld.so.preload reaches every process. There, before any other constructor, this one executes
 * the program once more with the tracer's variables; in the second life it takes them away again,
 * so that the program sees the environment that it was started with.
 */
#define _GNU_SOURCE
#include "bare.h"

/* Where the trace stage mounts the tracer and the folder for its records. */
#define TRACER "/trace/tracer.so"
#define RECORDS "/trace/pages"
#define MAX_VARIABLES 8192

/* libc's, or that of emulate.c, which starts the program by its emulator; a program without libc has neither. */
extern int execve(const char *, char *const *, char *const *)
    __attribute__((weak, visibility("default")));

static char audit[] = "LD_AUDIT=" TRACER, records[] = "RVBUNDLE_TRACE_PAGES=" RECORDS;
static char *variables[MAX_VARIABLES + 3];

/* Tell whether the tracer is at work here, and take its variables out of the environment. */
static bool take_out(char **environment)
{
    char **to = environment;
    bool audited = false;
    for (char **from = environment; *from; from++) {
        bool is_audit = length(*from) == sizeof audit - 1 && same_bytes(*from, audit, sizeof audit);
        audited = audited || is_audit;
        if (!is_audit && !starts_with(*from, "RVBUNDLE_TRACE_PAGES="))
            *to++ = *from;
    }
    *to = 0;
    return audited;
}

__attribute__((constructor)) static void begin(int count, char **arguments, char **environment)
{
    (void)count;
    char program[MAX_PATH];
    size_t n = 0;
    if (take_out(environment))
        return;
    long size = sys4(SYS_readlinkat, AT_FDCWD, (long)"/proc/self/exe", (long)program, MAX_PATH - 1);
    if (size <= 0)
        return; /* no /proc yet: this process goes untraced */
    program[size] = 0;
    for (; environment[n]; n++) {
        if (n == MAX_VARIABLES)
            return;
        variables[n] = environment[n];
    }
    variables[n++] = audit;
    variables[n++] = records;
    variables[n] = 0;
    if (execve)
        execve(program, arguments, variables);
    else
        sys4(SYS_execve, (long)program, (long)arguments, (long)variables, 0);
}
