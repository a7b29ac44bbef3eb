/*
 * absent.h: what is absent of each trimmed library, and which one an address is in: the table (see
 * rvbundle_runtime/absent.py) and the lines of /proc/self/maps. No system calls here, so that tests
 * can run all of it under sanitizers.
 */
#ifndef ABSENT_H
#define ABSENT_H

#include "bare.h"

#define RUN ((uint64_t)65536) /* what is restored at once: an aligned piece of a file */
#define SMALL_PAGE 4096       /* what all ranges are aligned to */
#define MOST_LIBRARIES 65536
#define LARGEST_ADDRESS ((uint64_t)1 << 46)

struct absent_header {
    char magic[8];
    uint32_t libraries, run_size;
    uint64_t runs;
};

struct absent_library {
    uint64_t path;
    uint32_t path_size, segments;
    uint64_t segments_at, first_run, size;
};

struct absent_segment {
    uint64_t vaddr, offset, size;
    uint32_t protection, ranges;
    uint64_t ranges_at;
};

struct absent_range {
    uint64_t start, stop;
};

/* A table that is_valid() has seen. */
struct table {
    const uint8_t *data;
    uint64_t size;
};

static inline const struct absent_header *header_of(const struct table *t)
{
    return (const struct absent_header *)t->data;
}

static inline const struct absent_library *library_of(const struct table *t, unsigned i)
{
    return (const struct absent_library *)(t->data + sizeof(struct absent_header)) + i;
}

static inline const struct absent_segment *segments_of(const struct table *t,
                                                       const struct absent_library *library)
{
    return (const struct absent_segment *)(t->data + library->segments_at);
}

static inline const struct absent_range *ranges_of(const struct table *t,
                                                   const struct absent_segment *segment)
{
    return (const struct absent_range *)(t->data + segment->ranges_at);
}

static inline const char *path_of(const struct table *t, const struct absent_library *library)
{
    return (const char *)t->data + library->path;
}

static inline uint64_t runs_of(const struct absent_library *library)
{
    return library->size / RUN + (library->size % RUN != 0);
}

/* ---- is the table what it should be? ---- */

static inline bool fits(const struct table *t, uint64_t at, uint64_t count, uint64_t size)
{
    return at <= t->size && at % (size == 1 ? 1 : 8) == 0 && count <= (t->size - at) / size;
}

static inline bool valid_path(const struct table *t, const struct absent_library *library,
                              const struct absent_library *before)
{
    if (library->path_size == 0 || library->path_size >= MAX_PATH ||
        !fits(t, library->path, library->path_size, 1))
        return false;
    const char *path = path_of(t, library);
    for (uint32_t i = 0; i < library->path_size; i++)
        if (path[i] == 0)
            return false;
    if (path[0] == '/' || !before)
        return path[0] != '/';
    const char *other = path_of(t, before);
    uint32_t i = 0; /* strictly in order, as bytes: find_path() counts on it */
    while (i < library->path_size && i < before->path_size && path[i] == other[i])
        i++;
    if (i == library->path_size || i == before->path_size)
        return i < library->path_size;
    return (unsigned char)path[i] > (unsigned char)other[i];
}

static inline bool valid_segment(const struct table *t, const struct absent_library *library,
                                 const struct absent_segment *segment)
{
    uint32_t protection = segment->protection;
    if (protection == 0 || protection & ~(uint32_t)(PROT_READ | PROT_EXEC))
        return false; /* only clean pages of the file may be mapped again and again */
    if (segment->size == 0 || segment->offset > library->size ||
        segment->size > library->size - segment->offset || segment->vaddr > LARGEST_ADDRESS ||
        (segment->vaddr - segment->offset) % SMALL_PAGE != 0 ||
        !fits(t, segment->ranges_at, segment->ranges, sizeof(struct absent_range)))
        return false;
    /* Ranges have whole pages (of 64 KiB on aarch64), so they may exceed the segment. */
    uint64_t low = segment->vaddr / RUN * RUN;
    uint64_t high = (segment->vaddr + segment->size + RUN - 1) / RUN * RUN;
    const struct absent_range *ranges = ranges_of(t, segment);
    for (uint32_t i = 0; i < segment->ranges; i++) {
        if (ranges[i].start % SMALL_PAGE || ranges[i].stop % SMALL_PAGE ||
            ranges[i].start < low || ranges[i].start >= ranges[i].stop || ranges[i].stop > high ||
            ranges[i].start + segment->offset < segment->vaddr)
            return false;
        low = ranges[i].stop;
    }
    return true;
}

static inline bool is_valid(const struct table *t)
{
    static const char magic[8] = {'R', 'V', 'A', 'B', 'S', 'N', 'T', '1'};
    if (t->size < sizeof(struct absent_header) ||
        !same_bytes(header_of(t)->magic, magic, sizeof magic) || header_of(t)->run_size != RUN)
        return false;
    uint32_t count = header_of(t)->libraries;
    if (count > MOST_LIBRARIES ||
        !fits(t, sizeof(struct absent_header), count, sizeof(struct absent_library)))
        return false;
    uint64_t runs = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct absent_library *library = library_of(t, i);
        if (!valid_path(t, library, i ? library_of(t, i - 1) : NULL) || library->size == 0 ||
            library->size > LARGEST_ADDRESS || library->first_run != runs ||
            !fits(t, library->segments_at, library->segments, sizeof(struct absent_segment)))
            return false;
        for (uint32_t k = 0; k < library->segments; k++)
            if (!valid_segment(t, library, &segments_of(t, library)[k]))
                return false;
        runs += runs_of(library);
    }
    return runs == header_of(t)->runs;
}

/* The absent range of a segment that has this address; NULL: none has. */
static inline const struct absent_range *find_range(const struct table *t,
                                                    const struct absent_segment *segment,
                                                    uint64_t vaddr)
{
    const struct absent_range *ranges = ranges_of(t, segment);
    uint32_t low = 0, high = segment->ranges;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (vaddr < ranges[middle].start)
            high = middle;
        else if (vaddr >= ranges[middle].stop)
            low = middle + 1;
        else
            return &ranges[middle];
    }
    return NULL;
}

/* ---- which library is at an address? ---- */

/* A mapping, as the kernel tells of it. */
struct area {
    uint64_t start, end, offset, inode;
    unsigned major, minor;
    int protection;
    bool shared;
    bool deleted; /* its file has no name any more */
    int library;  /* number in the table; -1: none of it */
    bool cheap;   /* to find out */
};

/* Paths in order, compared with another one as its characters come: no room for it is needed. */
struct match {
    const char *const *paths;
    unsigned low, high; /* those that agree so far */
    size_t at;
    int whole;     /* the one that agrees from start to end; -1: none */
    size_t suffix; /* how much of DELETED came after that */
};

#define DELETED " (deleted)"

static inline struct match match_start(const char *const *paths, unsigned count)
{
    return (struct match){.paths = paths, .high = count, .whole = -1};
}

static inline void match_next(struct match *m, char c)
{
    if (m->whole >= 0)
        m->suffix = m->suffix < sizeof DELETED && DELETED[m->suffix] == c ? m->suffix + 1
                                                                           : sizeof DELETED;
    while (m->low < m->high && m->paths[m->low][m->at] != c)
        m->low++;
    while (m->low < m->high && m->paths[m->high - 1][m->at] != c)
        m->high--;
    m->at++;
    if (m->low < m->high && m->paths[m->low][m->at] == 0) {
        m->whole = (int)m->low;
        m->suffix = 0;
    }
}

static inline void match_end(const struct match *m, struct area *area)
{
    area->deleted = m->whole >= 0 && m->suffix == sizeof DELETED - 1;
    area->library = area->deleted || m->suffix == 0 ? m->whole : -1;
}

/* A text that comes piece by piece. */
struct reader {
    long (*fill)(struct reader *); /* bytes put into `data`; 0 at the end, negative on failure */
    int fd;
    long at, end;
    bool any, failed;
    char data[1024];
};

static inline int next_char(struct reader *r)
{
    if (r->at == r->end) {
        r->at = 0;
        r->end = r->failed ? -1 : r->fill(r);
        if (r->end <= 0) {
            r->failed = true;
            r->end = 0;
            return -1;
        }
        r->any = true;
    }
    return (unsigned char)r->data[r->at++];
}

/* Reads digits and the character behind them, which must be `stop`. */
static inline bool next_number(struct reader *r, unsigned base, int stop, uint64_t *number)
{
    uint64_t value = 0;
    for (int digits = 0;; digits++) {
        int c = next_char(r), digit = c >= 'a' ? c - 'a' + 10 : c - '0';
        if (c == stop && digits > 0) {
            *number = value;
            return true;
        }
        if (c < '0' || (c > '9' && c < 'a') || (unsigned)digit >= base || digits == 16)
            return false;
        value = value * base + (unsigned)digit;
    }
}

static inline bool next_protection(struct reader *r, struct area *area)
{
    int read = next_char(r), write = next_char(r), exec = next_char(r), kind = next_char(r);
    area->protection = (read == 'r' ? PROT_READ : 0) | (write == 'w' ? PROT_WRITE : 0) |
                       (exec == 'x' ? PROT_EXEC : 0);
    area->shared = kind == 's';
    return (kind == 's' || kind == 'p') && next_char(r) == ' ';
}

/* The next mapping in /proc/self/maps that ends above an address; see proc_pid_maps(5). */
static inline bool next_area(struct reader *r, uint64_t above, struct match match,
                             struct area *area)
{
    uint64_t major, minor;
    for (int c;;) {
        if (!next_number(r, 16, '-', &area->start) || !next_number(r, 16, ' ', &area->end))
            return false;
        if (above < area->end)
            break;
        do
            c = next_char(r);
        while (c >= 0 && c != '\n');
    }
    if (!next_protection(r, area) || !next_number(r, 16, ' ', &area->offset) ||
        !next_number(r, 16, ':', &major) || !next_number(r, 16, ' ', &minor))
        return false;
    area->major = (unsigned)major;
    area->minor = (unsigned)minor;
    int c = next_char(r);
    for (area->inode = 0; c >= '0' && c <= '9'; c = next_char(r))
        area->inode = area->inode * 10 + (unsigned)(c - '0');
    while (c == ' ')
        c = next_char(r);
    for (; c >= 0 && c != '\n'; c = next_char(r))
        match_next(&match, (char)c);
    match_end(&match, area);
    return c == '\n'; /* anything else is half a line */
}

#endif
