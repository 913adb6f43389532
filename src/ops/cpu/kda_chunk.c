/* The chunked (WY) form of KDA for one head and up to 64 rows: docs/model.md "KDA".
 *
 * With the decay e(i,j) = prod of alpha over rows j+1 .. i (per key channel) and M0 the state before the chunk:
 *   A_ij = beta_i sum_c k_i k_j e(i,j)  (j < i)         B_ij = sum_c q_i k_j e(i,j)  (j <= i)
 *   u_i  = beta_i (v_i - M0^T (k_i e(i,-1))) - sum_{j<i} A_ij u_j                     forward substitution
 *   o_i  = M0^T (q_i e(i,-1)) + sum_{j<=i} B_ij u_j
 *   M    = diag(e(n-1,-1)) M0 + sum_j (k_j e(n-1,j)) u_j^T
 * Decays are products of alpha, never quotients or exponentials of differences: every factor is at most 1, so strong
 * decay ends in 0 and not in infinity times 0. Inside a sub-block of 16 rows e(i,j) is one running product; between
 * sub-blocks it is split at the end of the earlier ones: (k_i e(i, start)) . (k_j e(start, j)), which is what makes it
 * a matrix product. Row i sums over j <= i only, in ascending order: its bits do not depend on rows that follow. */
#include "ops/cpu/kda_impl.h"
#include "ops/cpu/panel.h"

enum { D = TD_KDA_D, C = TD_KDA_ROWS, SUB = 16 };

typedef struct chunk {
    int n;
    const float *q, *k, *v, *alpha, *beta; /* rows of the chunk */
    float *o;
    float *qs, *ks;  /* [64][128] q, k times the decay from the start of the row's sub-block */
    float *kd;       /* [128][64] transposed k_j times the decay from j to the end of the last finished sub-block */
    float *x;        /* [128][128]: rows 0..63 k_i e(i,-1), rows 64..127 q_i e(i,-1) */
    float *y;        /* [128][128]: their products with M0 */
    float *u;        /* [64][128] */
    float *a, *b;    /* [64][64] */
    float before[D]; /* decay from the start of the chunk to the start of the current sub-block */
} chunk;

/* A and B inside the sub-block r0 .. r1-1. */
static void diagonal(chunk *h, int r0, int r1)
{
    for (int j = r0; j < r1; j++) {
        float w[D];
        memcpy(w, h->k + j * D, sizeof w);
        h->b[j * C + j] = td_dot(h->q + j * D, w, D);
        for (int i = j + 1; i < r1; i++) {
            for (int c = 0; c < D; c++) w[c] *= h->alpha[i * D + c];
            h->a[i * C + j] = h->beta[i] * td_dot(h->k + i * D, w, D);
            h->b[i * C + j] = td_dot(h->q + i * D, w, D);
        }
    }
}

/* A and B between the sub-block and all rows before it. */
static void off_diagonal(chunk *h, int r0, int r1)
{
    for (int i = r0; i < r1; i++) {
        memset(h->a + i * C, 0, (size_t)r0 * sizeof(float));
        memset(h->b + i * C, 0, (size_t)r0 * sizeof(float));
    }
    td_tile_matrix(r1 - r0, h->ks + r0 * D, D, h->kd, C, D, r0, h->a + r0 * C, C);
    td_tile_matrix(r1 - r0, h->qs + r0 * D, D, h->kd, C, D, r0, h->b + r0 * C, C);
    for (int i = r0; i < r1; i++)
        for (int j = 0; j < r0; j++) h->a[i * C + j] *= h->beta[i];
}

/* qs, ks, x of the sub-block's rows; afterwards `before` and kd reach to its end. */
static void decays(chunk *h, int r0, int r1, float total[D])
{
    for (int c = 0; c < D; c++) total[c] = 1.0f;
    for (int i = r0; i < r1; i++)
        for (int c = 0; c < D; c++) {
            total[c] *= h->alpha[i * D + c];
            h->ks[i * D + c] = h->k[i * D + c] * total[c];
            h->qs[i * D + c] = h->q[i * D + c] * total[c];
            h->x[i * D + c] = h->ks[i * D + c] * h->before[c];
            h->x[(C + i) * D + c] = h->qs[i * D + c] * h->before[c];
        }
}

static void advance(chunk *h, int r0, int r1, const float total[D])
{
    for (int c = 0; c < D; c++) {
        float suffix = 1.0f;
        for (int j = 0; j < r0; j++) h->kd[c * C + j] *= total[c];
        for (int j = r1 - 1; j >= r0; j--) {
            h->kd[c * C + j] = h->k[j * D + c] * suffix;
            suffix *= h->alpha[j * D + c];
        }
        h->before[c] *= total[c];
    }
}

/* u by forward substitution and o, 32 value channels at a time; y holds the products with M0 and becomes the right
 * side. */
static void solve(chunk *h)
{
    enum { V = 2, STRIP = V * TD_LANES };
    td_v16 minus = td_v16_splat(-1.0f);
    for (int d = 0; d < D; d += STRIP)
        for (int i = 0; i < h->n; i++) {
            td_v16 u[V], o[V], beta = td_v16_splat(h->beta[i]);
            TD_UNROLL
            for (int s = 0; s < V; s++) {
                size_t at = (size_t)i * D + (size_t)(d + s * TD_LANES);
                td_v16 rest = td_v16_fma(minus, td_v16_load(h->y + at), td_v16_load(h->v + at));
                u[s] = td_v16_mul(beta, rest);
                o[s] = td_v16_load(h->y + (size_t)C * D + at);
            }
            for (int j = 0; j < i; j++) {
                td_v16 aij = td_v16_splat(-h->a[i * C + j]), bij = td_v16_splat(h->b[i * C + j]);
                TD_UNROLL
                for (int s = 0; s < V; s++) {
                    td_v16 uj = td_v16_load(h->u + j * D + d + s * TD_LANES);
                    u[s] = td_v16_fma(aij, uj, u[s]);
                    o[s] = td_v16_fma(bij, uj, o[s]);
                }
            }
            td_v16 bii = td_v16_splat(h->b[i * C + i]);
            TD_UNROLL
            for (int s = 0; s < V; s++) {
                td_v16_store(h->u + i * D + d + s * TD_LANES, u[s]);
                td_v16_store(h->o + i * D + d + s * TD_LANES, td_v16_fma(bii, u[s], o[s]));
            }
        }
}

/* M = diag(e(n-1,-1)) M0 + kd u */
static void update(const chunk *h, const float *from, float *to)
{
    for (int c = 0; c < D; c++)
        for (int d = 0; d < D; d++) to[c * D + d] = h->before[c] * from[c * D + d];
    td_tile_matrix(D, h->kd, C, h->u, D, h->n, D, to, D);
}

void td_kda_chunk(int n, const float *from, float *to, td_kda_rows *rows)
{
    chunk h = { .n = n,
                .q = rows->q,
                .k = rows->k,
                .v = rows->v,
                .alpha = rows->alpha,
                .beta = rows->beta,
                .o = rows->o,
                .qs = rows->qs,
                .ks = rows->ks,
                .kd = rows->kd,
                .x = rows->x,
                .y = rows->y,
                .u = rows->u,
                .a = rows->a,
                .b = rows->b };
    for (int c = 0; c < D; c++) h.before[c] = 1.0f;
    for (int r0 = 0; r0 < n; r0 += SUB) {
        int r1 = r0 + SUB < n ? r0 + SUB : n;
        float total[D];
        decays(&h, r0, r1, total);
        diagonal(&h, r0, r1);
        if (r0) off_diagonal(&h, r0, r1);
        advance(&h, r0, r1, total);
    }
    memset(h.y, 0, (size_t)n * D * sizeof(float));
    memset(h.y + C * D, 0, (size_t)n * D * sizeof(float));
    td_tile_matrix(n, h.x, D, from, D, D, D, h.y, D);
    td_tile_matrix(n, h.x + C * D, D, from, D, D, D, h.y + C * D, D);
    solve(&h);
    update(&h, from, to);
}
