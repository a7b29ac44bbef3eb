/* Prints as JSON what CPUID says: maker, model, name, and the flags by the names of Linux's /proc/cpuinfo
   (arch/x86/include/asm/cpufeatures.h). */
#include <cpuid.h>
#include <stdio.h>
#include <string.h>

static const char *const edx1[32] = {
    "fpu", "vme", "de", "pse", "tsc", "msr", "pae", "mce", "cx8", "apic", 0, "sep", "mtrr", "pge", "mca", "cmov",
    "pat", "pse36", "pn", "clflush", 0, "dts", "acpi", "mmx", "fxsr", "sse", "sse2", "ss", "ht", "tm", "ia64", "pbe",
};
static const char *const ecx1[32] = {
    "pni", "pclmulqdq", "dtes64", "monitor", "ds_cpl", "vmx", "smx", "est", "tm2", "ssse3", "cid", "sdbg", "fma",
    "cx16", "xtpr", "pdcm", 0, "pcid", "dca", "sse4_1", "sse4_2", "x2apic", "movbe", "popcnt", "tsc_deadline_timer",
    "aes", "xsave", "osxsave", "avx", "f16c", "rdrand", "hypervisor",
};
static const char *const edx8[32] = {[11] = "syscall", [20] = "nx", [22] = "mmxext", [25] = "fxsr_opt",
                                     [26] = "pdpe1gb", [27] = "rdtscp", [29] = "lm", [30] = "3dnowext", [31] = "3dnow"};
static const char *const ecx8[32] = {
    [0] = "lahf_lm", [1] = "cmp_legacy", [2] = "svm", [4] = "cr8_legacy", [5] = "abm", [6] = "sse4a",
    [7] = "misalignsse", [8] = "3dnowprefetch", [9] = "osvw", [11] = "xop", [16] = "fma4", [22] = "topoext",
};
static const char *const ebx7[32] = {
    [0] = "fsgsbase", [1] = "tsc_adjust", [3] = "bmi1", [4] = "hle", [5] = "avx2", [7] = "smep", [8] = "bmi2",
    [9] = "erms", [10] = "invpcid", [11] = "rtm", [14] = "mpx", [16] = "avx512f", [18] = "rdseed", [19] = "adx",
    [20] = "smap", [22] = "pcommit", [23] = "clflushopt", [24] = "clwb", [29] = "sha_ni",
};
static const char *const ecx7[32] = {
    [2] = "umip", [3] = "pku", [4] = "ospke", [8] = "gfni", [9] = "vaes", [10] = "vpclmulqdq", [16] = "la57", [22] = "rdpid",
};
static const char *const edx7[32] = {[4] = "fsrm"};
static const char *const eaxd[32] = {[0] = "xsaveopt", [1] = "xsavec", [2] = "xgetbv1", [3] = "xsaves"};
static const char *const ebx8[32] = {[0] = "clzero", [2] = "xsaveerptr", [9] = "wbnoinvd"};

static void flags(const char *const names[], unsigned bits)
{
    for (int i = 0; i < 32; i++)
        if (bits >> i & 1 && names[i])
            printf(", \"%s\"", names[i]);
}

int main(void)
{
    unsigned a, b, c, d, name[13] = {0}, vendor[4] = {0};
    __cpuid(0, a, vendor[0], vendor[2], vendor[1]);
    for (unsigned i = 0; i < 3; i++)
        __cpuid(0x80000002 + i, name[4 * i], name[4 * i + 1], name[4 * i + 2], name[4 * i + 3]);
    __cpuid(1, a, b, c, d);
    printf("{\"vendor\": \"%s\", \"name\": \"%s\", \"family\": %u, \"model\": %u, \"stepping\": %u, \"flags\": [\"%s\"",
           (char *)vendor, (char *)name, (a >> 8 & 15) == 15 ? 15 + (a >> 20 & 255) : a >> 8 & 15,
           (a >> 4 & 15) | (a >> 12 & 0xf0), a & 15, d & 1 ? "fpu" : "");
    flags(ecx1, c);
    flags(edx1, d & ~1u);
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        flags(ebx7, b);
        flags(ecx7, c);
        flags(edx7, d);
    }
    if (__get_cpuid_count(13, 1, &a, &b, &c, &d))
        flags(eaxd, a);
    __cpuid(0x80000008, a, b, c, d);
    flags(ebx8, b);
    __cpuid(0x80000001, a, b, c, d);
    flags(ecx8, c);
    flags(edx8, d);
    puts("]}");
    return 0;
}
