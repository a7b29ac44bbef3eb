/*
 * blas.h: what blas.c (in a guest) and blasworker.c (native) say to each other; docs/emulation.md.
 *
 * A connection is a Unix socket that keeps messages apart (SOCK_SEQPACKET). Each request is one message
 * and is answered by one: 0, or a negative error. Numbers are little-endian: so are all machines here.
 */
#ifndef BLAS_H
#define BLAS_H

#include <stdint.h>

enum {
    BLAS_MAP = 1, /* with a descriptor: a memfd, sealed against shrinking, in the place of the one before */
    BLAS_FLOAT,   /* C = alpha op(A) op(B) + beta C, float32 */
    BLAS_DOUBLE,  /* the same in float64 */
};

/* A matrix lies in the memfd by columns: at a byte, a multiple of 8, `ld` elements from column to column. */
struct blas_matrix {
    uint64_t at;
    int64_t ld;
};

struct blas_request {
    uint32_t what;
    uint32_t transpose_a, transpose_b; /* 0 or 1 */
    int32_t m, n, k;                   /* of op(A), m x k, and op(B), k x n; m, n at least 1, k at least 0 */
    struct blas_matrix a, b, c;
    double alpha, beta; /* C is not read where beta is 0 */
};

_Static_assert(sizeof(struct blas_request) == 88, "the same for all machines");

#endif
