/*
 * starter.c: what the kernel executes for each program of an emulated payload (binfmt_misc, flags F
 * and P). It executes the emulator with its options.
 *
 * The kernel can only put one word before a program; an emulator's options would have to be
 * variables, which a child that is started with an empty environment does not have.
 *
 * The launcher (binfmt.py) writes the settings into a copy of this program, in the place of the text
 * below: strings, each with a zero byte behind it, the first letter of each telling what it is:
 *
 *    w    a word that comes before the program, the emulator itself being the first
 *    0    the option, after the words, whose value is the program's argv[0]
 *    a    the variable that tells argv[0], where this is not the program's path
 *    v    NAME=VALUE, for an environment without NAME
 *    p    this program is executed by name, in the emulator's place; the words after its own follow
 *
 * and an empty string at the end. With p, which comes first, it makes an emulator of what has to be
 * started in another way (by an ld.so that lies elsewhere); box64 executes its own name for children.
 */
#define _GNU_SOURCE
#include "bare.h"

#define SIZE 8192 /* binfmt.py knows it */
#define MAX_WORDS 64
#define MAX_VARIABLES 32

#if defined(__x86_64__)
__asm__(".globl _start\n_start: xor %ebp, %ebp\nmov %rsp, %rdi\nand $-16, %rsp\ncall begin\n");
#elif defined(__aarch64__)
__asm__(".globl _start\n_start: mov x29, #0\nmov x30, #0\nmov x0, sp\nb begin\n");
#else
__asm__(".globl _start\n_start: li s0, 0\nmv a0, sp\nandi sp, sp, -16\ntail begin\n");
#endif

static char settings[SIZE] = "rvbundle starter: the settings go here\n";
static char told[MAX_PATH + 64];

static _Noreturn void leave(const char *message)
{
    write_all(2, message, length(message));
    for (;;)
        sys4(SYS_exit_group, 127, 0, 0, 0);
}

/* Tell whether `setting`, NAME=VALUE, is the variable of the same name as `other`. */
static bool same_name(const char *setting, const char *other)
{
    size_t n = 0;
    while (setting[n] && setting[n] != '=')
        n++;
    return same_bytes(setting, other, n) && other[n] == '=';
}

static bool has_variable(char **environment, const char *setting)
{
    for (; *environment; environment++)
        if (same_name(setting, *environment))
            return true;
    return false;
}

/* Put what is there already behind what is new; a variable of the same name goes. */
static size_t take_over(char **to, size_t n, char **environment, const char *instead)
{
    for (; *environment; environment++)
        if (!instead || !same_name(instead, *environment))
            to[n++] = *environment;
    to[n] = NULL;
    return n;
}

static bool is_same(const char *a, const char *b)
{
    size_t n = length(a);
    return n == length(b) && same_bytes(a, b, n);
}

/* argv: what this program is called; from the kernel the program's path, its argv[0]; the arguments */
__attribute__((used)) _Noreturn void begin(long *stack)
{
    long count = stack[0];
    char **argv = (char **)(stack + 1), **environment = argv + count + 1;
    size_t variables = 0, words = 0, others = 0;
    const char *instead = NULL;
    while (environment[variables])
        variables++;
    char *at = settings;
    __asm__("" : "+r"(at)); /* they are not what the compiler sees */
    bool is_plain = *at == 'p';
    if (count < (is_plain ? 1 : 3))
        leave("rvbundle: the emulator's starter is not to be called by hand\n");
    char *call[(size_t)count + MAX_WORDS + 3], *with[variables + MAX_VARIABLES + 2];
    for (; *at; at += length(at) + 1) {
        char *value = at + 1;
        if (words == MAX_WORDS || others == MAX_VARIABLES)
            leave("rvbundle: too many settings of the emulator\n");
        if (*at == 'w') {
            call[words++] = value;
        } else if (*at == '0') {
            call[words++] = value;
            call[words++] = argv[2];
        } else if (*at == 'a' && !is_same(argv[1], argv[2]) && length(argv[2]) < MAX_PATH) {
            append(told, value);
            append(told, "=");
            append(told, argv[2]);
            instead = told;
            with[others++] = told;
        } else if (*at == 'v' && !has_variable(environment, value)) {
            with[others++] = value;
        }
    }
    if (!is_plain)
        call[words++] = argv[1];
    for (long i = is_plain ? 1 : 3; i <= count; i++) /* with the NULL at the end */
        call[words++] = argv[i];
    take_over(with, others, environment, instead);
    long result = sys4(SYS_execve, (long)call[0], (long)call, (long)with, 0);
    leave(result == -E2BIG ? "rvbundle: the emulator's command line is too long\n"
                           : "rvbundle: the emulator can't be started\n");
}
