/*
 * gemm.h: the product of two matrices, for one type and one set of vector instructions.
 *
 * Included once for each kind, with these defined: KIND (a suffix for names), REAL, VECTOR_BYTES, and a
 * tile of C that fits the registers: TILE_VECTORS x TILE_N vectors; TARGET (a function attribute, or empty).
 *
 * Blocked as in Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): a block
 * of B is packed for the outer cache, one of A for the inner one, in the order in which the kernel reads.
 */
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(name) JOIN(name, KIND)
#define LANES (VECTOR_BYTES / sizeof(REAL))
#define TILE_M ((long)(TILE_VECTORS * LANES))

typedef REAL NAME(vector) __attribute__((vector_size(VECTOR_BYTES)));

/* Packs `count` rows of op(A), or columns of op(B), `depth` long, in groups of `tile`; 0 fills the last. */
TARGET static void NAME(pack)(const REAL *from, long across, long along, long count, long depth, long tile,
                              REAL *to)
{
    for (long start = 0; start < count; start += tile, to += tile * depth) {
        const REAL *x = from + start * across;
        long n = count - start < tile ? count - start : tile;
        if (n < tile)
            memset(to, 0, sizeof(REAL) * (size_t)(tile * depth));
        if (across == 1) {
            for (long p = 0; p < depth; p++)
                for (long i = 0; i < n; i++)
                    to[p * tile + i] = x[p * along + i];
        } else {
            for (long i = 0; i < n; i++)
                for (long p = 0; p < depth; p++)
                    to[p * tile + i] = x[i * across + p * along];
        }
    }
}

/* The product of a packed group of A and one of B: all of it stays in registers until the end. */
TARGET static void NAME(kernel)(long depth, const REAL *a, const REAL *b, REAL *tile)
{
    NAME(vector) sum[TILE_N][TILE_VECTORS] = {0}, *out = (NAME(vector) *)tile;
    const NAME(vector) *x = (const NAME(vector) *)a;
    for (long p = 0; p < depth; p++, x += TILE_VECTORS, b += TILE_N)
#pragma clang loop unroll(full)
        for (int j = 0; j < TILE_N; j++)
#pragma clang loop unroll(full)
            for (int i = 0; i < TILE_VECTORS; i++)
                sum[j][i] += x[i] * b[j];
#pragma clang loop unroll(full)
    for (int j = 0; j < TILE_N; j++)
#pragma clang loop unroll(full)
        for (int i = 0; i < TILE_VECTORS; i++)
            out[j * TILE_VECTORS + i] = sum[j][i];
}

/* What of C is to be kept; 0 times NaN is not, as in the reference BLAS. */
TARGET static void NAME(scale)(REAL *c, long ld, long m, long n, REAL beta)
{
    for (long j = 0; j < n; j++)
        for (long i = 0; i < m; i++)
            c[j * ld + i] = beta == 0 ? 0 : beta * c[j * ld + i];
}

/* The packed blocks of A (m x depth) and B (depth x n): adds alpha times their product to C. */
TARGET static void NAME(block)(const REAL *a, const REAL *b, REAL *c, long ld, long m, long n, long depth,
                               REAL alpha)
{
    REAL tile[TILE_M * TILE_N] __attribute__((aligned(64)));
    for (long j = 0; j < n; j += TILE_N)
        for (long i = 0; i < m; i += TILE_M) {
            long columns = n - j < TILE_N ? n - j : TILE_N, rows = m - i < TILE_M ? m - i : TILE_M;
            NAME(kernel)(depth, a + i * depth, b + j * depth, tile);
            for (long y = 0; y < columns; y++) {
                REAL *to = c + (j + y) * ld + i;
                const REAL *from = tile + y * TILE_M;
                if (rows == TILE_M)
                    for (long x = 0; x < TILE_M; x++)
                        to[x] += alpha * from[x];
                else
                    for (long x = 0; x < rows; x++)
                        to[x] += alpha * from[x];
            }
        }
}

/* The rows and columns of C that `part` says. */
TARGET static void NAME(gemm)(const struct product *p, const struct part *part, struct buffers *buffers)
{
    const REAL *a = p->a, *b = p->b;
    REAL *c = (REAL *)p->c + part->column * p->ldc + part->row, *packed_a = buffers->a, *packed_b = buffers->b;
    long a_across = p->transpose_a ? p->lda : 1, a_along = p->transpose_a ? 1 : p->lda;
    long b_across = p->transpose_b ? 1 : p->ldb, b_along = p->transpose_b ? p->ldb : 1;
    long block_m = BLOCK_M / TILE_M * TILE_M, block_n = BLOCK_N / TILE_N * TILE_N;
    REAL alpha = (REAL)p->alpha;
    if (p->beta != 1)
        NAME(scale)(c, p->ldc, part->rows, part->columns, (REAL)p->beta);
    if (alpha == 0)
        return;
    for (long j = 0; j < part->columns; j += block_n)
        for (long q = 0; q < p->k; q += BLOCK_K) {
            long n = MINIMUM(block_n, part->columns - j), depth = MINIMUM(BLOCK_K, p->k - q);
            const REAL *from_b = b + (part->column + j) * b_across + q * b_along;
            NAME(pack)(from_b, b_across, b_along, n, depth, TILE_N, packed_b);
            for (long i = 0; i < part->rows; i += block_m) {
                long m = MINIMUM(block_m, part->rows - i);
                const REAL *from_a = a + (part->row + i) * a_across + q * a_along;
                NAME(pack)(from_a, a_across, a_along, m, depth, TILE_M, packed_a);
                NAME(block)(packed_a, packed_b, c + j * p->ldc + i, p->ldc, m, n, depth, alpha);
            }
        }
}

#undef JOIN_
#undef JOIN
#undef NAME
#undef LANES
#undef TILE_M
#undef KIND
#undef REAL
#undef VECTOR_BYTES
#undef TILE_VECTORS
#undef TILE_N
#undef TARGET
