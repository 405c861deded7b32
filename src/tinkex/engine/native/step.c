/* One decode step of a dense decoder on the CPU in fp32: each row is the newest token of one sequence.

   Computes what `models.decoder.Decoder` does with `kv.PagedAttend` and `lora.LoraBatch`, in one call: the overhead of a
   few hundred small tensor operations is several times the arithmetic of a small model. Results are batch-invariant
   and do not depend on the number of threads. `step.py` mirrors the structs.

   Standard C and GNU vectors only: any CPU that GCC or Clang compiles for. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define TILE 8
#elif defined(__AVX2__)
#define LANES 8
#define TILE 4
#else
#define LANES 4
#define TILE 4
#endif
#define PANEL (2 * LANES) /* outputs of a product that are computed together */
#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    const float *weight; /* as `pack` lays it out */
    const float *bias;   /* or null */
    int32_t in, out, parts;
    int32_t outs[3]; /* of the Hugging Face modules side by side in it */
} Linear;

typedef struct {
    const float *attention_norm, *mlp_norm, *q_norm, *k_norm; /* the last two may be null */
    float *keys, *values;                                     /* [pages, page, kv_heads, head_dim] */
    int64_t window;                                           /* positions that a token sees; 0: all */
    Linear qkv, o, gate_up, down;
} Layer;

typedef struct {
    int32_t layers, width, heads, kv_heads, head_dim, page;
    float eps;
    const float *embedding, *norm;
    const Layer *layer;
    Linear head;
} Model;

typedef struct {
    const float *a; /* [parts * rank, in]; null where the adapter does not sit */
    const float *b; /* of each part [rank, out of the part] */
} Site;

typedef struct {
    const Site *sites; /* four of each layer, then the head's */
    int32_t rank;
    float scale;
} Adapter;

typedef struct {
    int32_t rows, threads, table_width;
    const int64_t *tokens, *positions;
    const float *cos, *sin;         /* [rows, head_dim / 2] */
    const int32_t *table;           /* [rows, table_width]: each sequence's pages */
    const Adapter *const *adapters; /* one of each row, or null */
    float *scratch;                 /* `scratch_floats` of them */
    float *logits;                  /* [rows, vocabulary] */
} Step;

/* -- small pieces -------------------------------------------------------------------------------------- */

INLINE lanes load(const float *x) { return *(const lanes *)x; }

INLINE float fold(lanes x) {
    float part[LANES];
    memcpy(part, &x, sizeof x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

INLINE float dot(const float *x, const float *y, int n) {
    lanes total[4] = {0};
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int k = 0; k < 4; k++) total[k] += load(x + i + k * LANES) * load(y + i + k * LANES);
    for (; i + LANES <= n; i += LANES) total[0] += load(x + i) * load(y + i);
    float folded = fold((total[0] + total[1]) + (total[2] + total[3]));
    for (; i < n; i++) folded += x[i] * y[i];
    return folded;
}

/* y += factor * x */
INLINE void add_scaled(float *y, float factor, const float *x, int n) {
    for (int i = 0; i < n; i++) y[i] += factor * x[i];
}

/* y += u[0] * x[0] + u[1] * x[1] ..., of `count` rows of length n, with the sums in registers */
INLINE void add_combined(float *y, const float *u, const float *x, int count, int n) {
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        lanes sum[4] = {0};
        for (int r = 0; r < count; r++)
            for (int k = 0; k < 4; k++) sum[k] += u[r] * load(x + (size_t)r * n + i + k * LANES);
        for (int k = 0; k < 4; k++) *(lanes *)(y + i + k * LANES) += sum[k];
    }
    for (int r = 0; r < count; r++)
        for (int j = i; j < n; j++) y[j] += u[r] * x[(size_t)r * n + j];
}

/* e^x to the last bit or two; written so that a loop over it becomes vector code. */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f; /* the nearest integer is in the low bits now */
    float n = shifted - 12582912.0f;
    float r = x - n * 0.693145752f - n * 1.42860677e-6f;
    float p = 1.98756912e-4f;
    p = p * r + 1.39819994e-3f;
    p = p * r + 8.33345205e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666657e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits << 23) + 0x3f800000u;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

static void rms_norm(const float *x, const float *weight, float eps, int n, float *y) {
    float scale = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (int i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

/* -- products ------------------------------------------------------------------------------------------ */

/* How many floats `pack` writes. */
int64_t packed_floats(int64_t in, int64_t out) { return (out + PANEL - 1) / PANEL * PANEL * in; }

/* weight[o * out_stride + i * in_stride] as panels of PANEL outputs, in by in; zeros where there is none. */
void pack(const float *weight, int64_t in, int64_t out, int64_t in_stride, int64_t out_stride, float *packed) {
    for (int64_t panel = 0; panel < out; panel += PANEL)
        for (int64_t i = 0; i < in; i++)
            for (int64_t o = panel; o < panel + PANEL; o++)
                *packed++ = o < out ? weight[o * out_stride + i * in_stride] : 0.0f;
}

/* n rows of x with one panel; n is a constant wherever this is inlined, so that sums stay in registers. */
INLINE void multiply(int n, const float *x, int in, const float *panel, lanes sums[][2]) {
    for (int r = 0; r < n; r++) sums[r][0] = sums[r][1] = (lanes){0};
    for (int i = 0; i < in; i++) {
        lanes low = load(panel + i * PANEL), high = load(panel + i * PANEL + LANES);
        for (int r = 0; r < n; r++) {
            sums[r][0] += x[r * in + i] * low;
            sums[r][1] += x[r * in + i] * high;
        }
    }
}

#define ROWS(n) case n: multiply(n, x, in, panel, sums); break;

static void multiply_rows(int n, const float *x, int in, const float *panel, lanes sums[][2]) {
    switch (n) {
        ROWS(1) ROWS(2) ROWS(3) ROWS(4)
#if TILE == 8
        ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#endif
    }
}

/* y[rows, out] = x[rows, in] W' + bias */
static void product(const Step *s, const Linear *l, const float *x, float *y) {
    int panels = (l->out + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1)
    for (int p = 0; p < panels; p++) {
        const float *panel = l->weight + (size_t)p * PANEL * l->in;
        int first = p * PANEL, width = l->out - first < PANEL ? l->out - first : PANEL;
        for (int row = 0; row < s->rows; row += TILE) {
            int n = s->rows - row < TILE ? s->rows - row : TILE;
            lanes sums[TILE][2];
            multiply_rows(n, x + (size_t)row * l->in, l->in, panel, sums);
            for (int r = 0; r < n; r++) {
                float *to = y + (size_t)(row + r) * l->out + first;
                memcpy(to, sums[r], (size_t)width * sizeof(float));
                if (l->bias)
                    for (int o = 0; o < width; o++) to[o] += l->bias[first + o];
            }
        }
    }
}

/* y += scale * x A' B', each row with its own adapter */
static void add_adapters(const Step *s, const Linear *l, int site, const float *x, float *y) {
#pragma omp parallel for num_threads(s->threads) if (s->threads > 1)
    for (int row = 0; row < s->rows; row++) {
        const Adapter *adapter = s->adapters[row];
        if (!adapter || !adapter->sites[site].a) continue;
        const float *a = adapter->sites[site].a, *b = adapter->sites[site].b;
        float *to = y + (size_t)row * l->out, u[adapter->rank];
        for (int part = 0; part < l->parts; part++) {
            for (int r = 0; r < adapter->rank; r++, a += l->in)
                u[r] = adapter->scale * dot(a, x + (size_t)row * l->in, l->in);
            add_combined(to, u, b, adapter->rank, l->outs[part]);
            to += l->outs[part];
            b += (size_t)adapter->rank * l->outs[part];
        }
    }
}

static void project(const Step *s, const Linear *l, int site, const float *x, float *y) {
    product(s, l, x, y);
    add_adapters(s, l, site, x, y);
}

/* -- attention ----------------------------------------------------------------------------------------- */

static void rotate(const float *cos, const float *sin, int half, float *x) {
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

/* Normalise and rotate the row's queries and keys in place, and put keys and values into the sequence's page. */
static void place(const Model *m, const Layer *l, const Step *s, int row, float *qkv) {
    int c = m->head_dim, width = m->kv_heads * c;
    for (int h = 0; h < m->heads + m->kv_heads; h++) {
        const float *norm = h < m->heads ? l->q_norm : l->k_norm;
        if (norm) rms_norm(qkv + h * c, norm, m->eps, c, qkv + h * c);
        rotate(s->cos + (size_t)row * (c / 2), s->sin + (size_t)row * (c / 2), c / 2, qkv + h * c);
    }
    int64_t at = s->positions[row];
    int32_t page = s->table[(size_t)row * s->table_width + at / m->page];
    size_t slot = ((size_t)page * m->page + at % m->page) * width;
    memcpy(l->keys + slot, qkv + m->heads * c, (size_t)width * sizeof(float));
    memcpy(l->values + slot, qkv + m->heads * c + width, (size_t)width * sizeof(float));
}

/* The queries that share kv head g, over the pages of their sequence: page by page, with a running maximum. */
static void attend(const Model *m, const Layer *l, const Step *s, int row, int g, const float *q, float *o) {
    int c = m->head_dim, group = m->heads / m->kv_heads, page = m->page;
    size_t stride = (size_t)m->kv_heads * c;
    int64_t last = s->positions[row], first = 0;
    if (l->window && last >= l->window) first = last - l->window + 1;
    float most[group], mass[group], p[page], scale = 1.0f / sqrtf((float)c);
    for (int h = 0; h < group; h++) most[h] = -INFINITY, mass[h] = 0.0f;
    memset(o, 0, (size_t)group * c * sizeof(float));
    for (int64_t block = first / page; block <= last / page; block++) {
        int begin = block * page < first ? (int)(first - block * page) : 0;
        int end = last - block * page < page ? (int)(last - block * page) + 1 : page;
        size_t at = (size_t)s->table[(size_t)row * s->table_width + block] * page * stride + (size_t)g * c;
        const float *k = l->keys + at, *v = l->values + at;
        for (int h = 0; h < group; h++) {
            float high = most[h];
            for (int t = begin; t < end; t++) {
                p[t] = dot(q + h * c, k + t * stride, c) * scale;
                high = p[t] > high ? p[t] : high;
            }
            float faded = exponential(most[h] - high);
            for (int t = begin; t < end; t++) p[t] = exponential(p[t] - high);
            mass[h] *= faded;
            for (int i = 0; i < c; i++) o[h * c + i] *= faded;
            for (int t = begin; t < end; t++) {
                mass[h] += p[t];
                add_scaled(o + h * c, p[t], v + t * stride, c);
            }
            most[h] = high;
        }
    }
    for (int h = 0; h < group; h++)
        for (int i = 0; i < c; i++) o[h * c + i] /= mass[h];
}

static void attention(const Model *m, const Layer *l, const Step *s, float *qkv, float *o) {
    int group = m->heads / m->kv_heads * m->head_dim;
    for (int row = 0; row < s->rows; row++) place(m, l, s, row, qkv + (size_t)row * l->qkv.out);
#pragma omp parallel for collapse(2) num_threads(s->threads) if (s->threads > 1)
    for (int row = 0; row < s->rows; row++)
        for (int g = 0; g < m->kv_heads; g++)
            attend(m, l, s, row, g, qkv + (size_t)row * l->qkv.out + g * group,
                   o + (size_t)row * l->o.in + g * group);
}

/* -- the step ------------------------------------------------------------------------------------------ */

static int64_t larger(int64_t x, int64_t y) { return x > y ? x : y; }

/* What a step of so many rows needs for itself: the stream, its norm, and a projection's output and input. */
int64_t scratch_floats(const Model *m, int64_t rows) {
    const Layer *l = m->layer;
    return rows * (2 * (int64_t)m->width + larger(l->qkv.out, l->gate_up.out) + larger(l->o.in, l->down.in));
}

/* x += y; y = norm of x */
static void add_norm(const Model *m, const Step *s, const float *weight, float *x, float *y, int add) {
    for (int row = 0; row < s->rows; row++, x += m->width, y += m->width) {
        if (add) add_scaled(x, 1.0f, y, m->width);
        rms_norm(x, weight, m->eps, m->width, y);
    }
}

static void swiglu(const Step *s, int width, const float *gate_up, float *y) {
    for (int row = 0; row < s->rows; row++, gate_up += 2 * width, y += width)
        for (int i = 0; i < width; i++)
            y[i] = gate_up[i] / (1.0f + exponential(-gate_up[i])) * gate_up[width + i];
}

void decode(const Model *m, const Step *s) {
    size_t rows = (size_t)s->rows, width = (size_t)m->width;
    const Layer *l = m->layer;
    float *x = s->scratch, *h = x + rows * width, *wide = h + rows * width;
    float *inner = wide + rows * (size_t)larger(l->qkv.out, l->gate_up.out);
    for (size_t row = 0; row < rows; row++)
        memcpy(x + row * width, m->embedding + (size_t)s->tokens[row] * width, width * sizeof(float));
    for (int i = 0; i < m->layers; i++, l++) {
        add_norm(m, s, l->attention_norm, x, h, i > 0);
        project(s, &l->qkv, 4 * i, h, wide);
        attention(m, l, s, wide, inner);
        project(s, &l->o, 4 * i + 1, inner, h);
        add_norm(m, s, l->mlp_norm, x, h, 1);
        project(s, &l->gate_up, 4 * i + 2, h, wide);
        swiglu(s, l->down.in, wide, inner);
        project(s, &l->down, 4 * i + 3, inner, h);
    }
    add_norm(m, s, m->norm, x, h, 1);
    project(s, &m->head, 4 * m->layers, h, s->logits);
}

/* -- drawing: what `next_tokens.draw` does with rows that have no top-k or top-p ------------------------------ */

#define BLOCK 256 /* sample.BLOCK */

/* The counter-th standard exponential of a stream, as in engine/rng.py. */
INLINE float wait_of(uint64_t key, uint64_t counter) {
    uint64_t x = key + counter * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    return (float)-log(((double)(x >> 12) + 0.5) * 0x1p-52);
}

INLINE float sum_of(const float *x, int n) {
    lanes total = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES) total += load(x + i);
    float folded = fold(total);
    for (; i < n; i++) folded += x[i];
    return folded;
}

/* A race of `count` runners of speeds p, with the waits of the stream from `counter` on; the first wins. */
static int race(const float *p, int count, uint64_t key, uint64_t counter) {
    int winner = 0;
    float best = -1.0f;
    for (int i = 0; i < count; i++) {
        float reached = p[i] / wait_of(key, counter + (uint64_t)i);
        if (reached > best) best = reached, winner = i;
    }
    return winner;
}

/* e^(x / scale) of a block's ids over that of the highest; returns how many there are. */
INLINE int speeds(const float *x, int block, int vocab, float high, float scale, float *p) {
    int first = block * BLOCK, count = vocab - first < BLOCK ? vocab - first : BLOCK;
    for (int i = 0; i < count; i++) p[i] = exponential((x[first + i] - high) / scale);
    return count;
}

/* A token of one row and its logprob. Ids from `vocab` to `padded` are padding: their logits are not read. */
static void draw_row(const float *x, int vocab, int padded, float t, uint64_t key, int64_t *token, float *logprob) {
    float scale = t == 0.0f ? 1.0f : t < 1e-5f ? 1e-5f : t, high = x[0], mass = 0.0f;
    int blocks = (vocab + BLOCK - 1) / BLOCK, chosen = 0;
    for (int i = 1; i < vocab; i++) high = x[i] > high ? x[i] : high;
    float sums[blocks], p[BLOCK];
    for (int b = 0; b < blocks; b++) {
        int count = speeds(x, b, vocab, high, scale, p);
        sums[b] = sum_of(p, count);
        mass += sums[b];
    }
    if (t == 0.0f) {
        while (chosen < vocab - 1 && x[chosen] < high) chosen++;
    } else {
        int block = race(sums, blocks, key, 1), count = speeds(x, block, vocab, high, scale, p);
        chosen = block * BLOCK + race(p, count, key, (uint64_t)((padded + BLOCK - 1) / BLOCK) + 1);
    }
    *token = chosen;
    *logprob = (x[chosen] - high) / scale - logf(mass);
}

void draw(const float *logits, int64_t rows, int64_t vocab, int64_t padded, const float *temperature,
          const uint64_t *keys, int64_t *tokens, float *logprobs) {
    for (int64_t row = 0; row < rows; row++)
        draw_row(logits + row * padded, (int)vocab, (int)padded, temperature[row], keys[row], tokens + row,
                 logprobs + row);
}
