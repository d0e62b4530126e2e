/* Paged causal attention on a CPU, prefill and decode through the same code.
 *
 * The keys a row has cached are cut into blocks of BLOCK positions. For a block and a handful of query rows
 * (one KV head's group of query heads x a few tokens) the partial result is its score maximum, the sum of
 * its weights and the weighted sum of its values; partials are merged in block order. A query's arithmetic
 * is therefore the same whatever its chunk, its neighbours and the number of threads: the work may be split
 * anywhere between blocks. Sinks before a query's window are blocks of their own, ahead of the others: nothing
 * between sinks and window is read. */
#include <math.h>
#include <stdlib.h>

#include "native.h"
#include "pool.h"

#define BLOCK 64
#define QUERY_ROWS 64 /* query rows (tokens x heads of a group) that share one pass over the keys */
#define KEPT_FLOATS (8l << 20) /* most memory for partials when blocks are shared out */
#define SERIAL_PRODUCTS 100000 /* less work than this costs less than waking threads */
#define ALIGNMENT 64
#define STACK_BYTES 65536l /* what a token or two of one row need */
#define JOINED_FLOATS 16384 /* merged before a thread goes for more */
#define TILE 4
#if LANES == 16
#define WIDE 4
#else
#define WIDE 2
#endif

/* Sizes and strides are in elements; `window` is at least 1. */
typedef struct {
    const void *q;
    void *out;
    const void *pool;
    const int32_t *table, *starts, *lens;
    long q_token, q_head, table_row;
    long rows, tokens, heads, kv_heads, page, dim, window, sinks;
    float scale, softcap; /* no cap: 0 */
    int q_kind, pool_kind, threads;
} job;

/* Some queries of one row: tokens [first, first + count) of the packed step, the first at `position`. Sinks up to
 * `sink_to` lie before the last one's window; they make up the first `sink_blocks` blocks. */
typedef struct {
    long row, first, count, position, block_from, block_to, sink_to, sink_blocks;
} queries;

static long blocks_of(const queries *u) { return u->sink_blocks + u->block_to - u->block_from; }

/* A softmax in progress for up to `m` query rows: values[m][padded], top[m], mass[m]. */
typedef struct {
    float *values, *top, *mass;
} partial;

typedef struct {
    float *q, *keys, *values, *scores;
    partial block, total;
} scratch;

static long padded(long dim) { return (dim + LANES - 1) / LANES * LANES; }
static long smaller(long a, long b) { return a < b ? a : b; }
static long larger(long a, long b) { return a > b ? a : b; }

static long partial_floats(long m, long dim) { return m * (padded(dim) + 2); }

static partial partial_at(float *memory, long m, long dim) {
    return (partial){memory, memory + m * padded(dim), memory + m * padded(dim) + m};
}

static long scratch_floats(long m, long dim) {
    long floats = m * padded(dim) + 2 * BLOCK * padded(dim) + m * BLOCK + 2 * partial_floats(m, dim);
    return (floats + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static scratch scratch_at(float *q, long m, long dim) {
    float *keys = q + m * padded(dim), *values = keys + BLOCK * padded(dim), *scores = values + BLOCK * padded(dim);
    float *block = scores + m * BLOCK, *total = block + partial_floats(m, dim);
    return (scratch){q, keys, values, scores, partial_at(block, m, dim), partial_at(total, m, dim)};
}

INLINE vfloat get(const float *from) { return load(from, KIND_F32); }
INLINE void put(float *to, vfloat lanes) { store(to, lanes, KIND_F32); }
INLINE vfloat pick(vint mask, vfloat yes, vfloat no) { return (vfloat)(((vint)yes & mask) | ((vint)no & ~mask)); }

INLINE vint lane_ids(void) {
    vint ids;
    for (int i = 0; i < LANES; i++) ids[i] = i;
    return ids;
}

/* tanh: where 1 - 2 / (e^2x + 1) would cancel, an odd polynomial fitted at Chebyshev nodes (relative error 2e-8). */
INLINE vfloat vtanh(vfloat x) {
    vint sign = (vint)x & INT32_MIN;
    vfloat a = (vfloat)((vint)x & INT32_MAX), square = a * a;
    vfloat y = square * -0.00610454f + 0.02100336f;
    y = y * square - 0.05385244f;
    y = y * square + 0.13332782f;
    y = y * square - 0.33333329f;
    vfloat near = a + a * square * y;
    vfloat far = 1.f - 2.f / (exp_lanes(2.f * pick((vint)(a > 10.f), splat(10.f), a)) + 1.f);
    return (vfloat)((vint)pick((vint)(a < 0.625f), near, far) | sign);
}

#ifdef __clang__
INLINE void transpose(vfloat *x) {
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            float kept = x[i][j];
            x[i][j] = x[j][i];
            x[j][i] = kept;
        }
}
#else
/* Swaps bit `step` of the row index with the same bit of the lane index. */
INLINE void exchange(vfloat *x, int step) {
    vint ids = lane_ids(), odd = (ids & step) != 0;
    vint even_mask = ids + (odd & (LANES - step)), odd_mask = ids + step + (odd & (LANES - step));
    for (int i = 0; i < LANES; i++) {
        if (i & step) continue;
        vfloat a = x[i], b = x[i + step];
        x[i] = __builtin_shuffle(a, b, even_mask);
        x[i + step] = __builtin_shuffle(a, b, odd_mask);
    }
}

INLINE void transpose(vfloat *x) {
    exchange(x, 1);
    exchange(x, 2);
    exchange(x, 4);
#if LANES == 16
    exchange(x, 8);
#endif
}
#endif

/* fp32 values of whole vectors are read from their pages; others are copied first. */
static int values_in_place(const job *j) { return j->pool_kind == KIND_F32 && j->dim % LANES == 0; }

/* Where the keys of one head and position lie in the pool, in elements; its values lie `half` further. */
INLINE long key_index(const job *j, long row, long head, long position) {
    long page = j->table[row * j->table_row + position / j->page];
    return ((2 * page * j->kv_heads + head) * j->page + position % j->page) * j->dim;
}

INLINE long half_page(const job *j) { return j->kv_heads * j->page * j->dim; }

INLINE vfloat load_upto(const void *from, long count, int kind) {
    return count >= LANES ? load(from, kind) : load_part(from, count, kind);
}

/* Copies positions [from, to) of block `base`: keys transposed to [dim][BLOCK], values as [BLOCK][padded]. */
INLINE void gather_as(const job *j, scratch *s, long row, long head, long base, long from, long to, int kind) {
    const void *keys[BLOCK] = {0};
    long dim = j->dim, wide = padded(dim), half = half_page(j);
    for (long p = from, run; p < to; p += run) {
        const void *first = at(j->pool, key_index(j, row, head, p), kind);
        run = smaller(to - p, j->page - p % j->page);
        for (long i = 0; i < run; i++) keys[p - base + i] = at(first, i * dim, kind);
    }
    for (long c = (from - base) / LANES * LANES; c < to - base; c += LANES) {
        int full = c >= from - base && c + LANES <= to - base;
        for (long d = 0; d < dim; d += LANES) {
            vfloat x[LANES];
            if (full && d + LANES <= dim)
                for (int i = 0; i < LANES; i++) x[i] = load(at(keys[c + i], d, kind), kind);
            else
                for (int i = 0; i < LANES; i++)
                    x[i] = keys[c + i] ? load_upto(at(keys[c + i], d, kind), dim - d, kind) : (vfloat){0};
            transpose(x);
            for (int i = 0; i < LANES; i++) put(s->keys + (d + i) * BLOCK + c, x[i]);
        }
    }
    if (values_in_place(j)) return;
    for (long c = from - base; c < to - base; c++)
        for (long d = 0; d < dim; d += LANES)
            put(s->values + c * wide + d, load_upto(at(keys[c], half + d, kind), dim - d, kind));
}

static void gather(const job *j, scratch *s, long row, long head, long base, long from, long to) {
    if (j->pool_kind == KIND_F32) gather_as(j, s, row, head, base, from, to, KIND_F32);
    else if (j->pool_kind == KIND_BF16) gather_as(j, s, row, head, base, from, to, KIND_BF16);
    else gather_as(j, s, row, head, base, from, to, KIND_F16);
}

/* out[r][0..n lanes) += sum over i in [0, count) of left[r][i] * right[i][0..n lanes), i in order; `more` says
 * whether out holds anything yet. */
INLINE void tile(const float *left, long left_row, const float *right, long right_row, long count, float *out,
                 long out_row, int more, int r_count, int n) {
    vfloat sums[TILE][WIDE];
    for (int r = 0; r < r_count; r++)
        for (int w = 0; w < n; w++) sums[r][w] = more ? get(out + r * out_row + w * LANES) : (vfloat){0};
    for (long i = 0; i < count; i++) {
        vfloat lanes[WIDE];
        for (int w = 0; w < n; w++) {
            lanes[w] = get(right + i * right_row + w * LANES);
            PIN(lanes[w]);
        }
        for (int r = 0; r < r_count; r++)
            for (int w = 0; w < n; w++) sums[r][w] += splat(left[r * left_row + i]) * lanes[w];
    }
    for (int r = 0; r < r_count; r++)
        for (int w = 0; w < n; w++) put(out + r * out_row + w * LANES, sums[r][w]);
}

INLINE void tile_rows(const float *left, long left_row, const float *right, long right_row, long count, float *out,
                      long out_row, int more, long rows, int n) {
    if (rows >= 4) tile(left, left_row, right, right_row, count, out, out_row, more, 4, n);
    else if (rows == 3) tile(left, left_row, right, right_row, count, out, out_row, more, 3, n);
    else if (rows == 2) tile(left, left_row, right, right_row, count, out, out_row, more, 2, n);
    else tile(left, left_row, right, right_row, count, out, out_row, more, 1, n);
}

/* out[m][columns] (+)= left[m][count] * right[count][columns]; columns is a multiple of LANES. */
static void product(const float *left, long left_row, const float *right, long right_row, long count, float *out,
                    long out_row, int more, long m, long columns) {
    long c = 0;
    for (; c + WIDE * LANES <= columns; c += WIDE * LANES)
        for (long r = 0; r < m; r += TILE)
            tile_rows(left + r * left_row, left_row, right + c, right_row, count, out + r * out_row + c, out_row,
                      more, m - r, WIDE);
    for (; c < columns; c += LANES)
        for (long r = 0; r < m; r += TILE)
            tile_rows(left + r * left_row, left_row, right + c, right_row, count, out + r * out_row + c, out_row,
                      more, m - r, 1);
}

/* Turns scores of columns [begin, end) into weights relative to the largest of those a query sees, which are
 * [from, to); the others get 0. The largest is -inf only where the query sees none. */
static void weigh(float *scores, long begin, long end, long from, long to, float softcap, float *top, float *mass) {
    vint ids = lane_ids();
    vfloat high = splat(-INFINITY), sum = {0};
    for (long c = begin; c < end; c += LANES) {
        vint seen = (ids >= (int)(from - c)) & (ids < (int)(to - c));
        vfloat x = get(scores + c);
        if (softcap > 0) x = softcap * vtanh(x / softcap);
        x = pick(seen, x, splat(-INFINITY));
        put(scores + c, x);
        high = pick((vint)(x > high), x, high);
    }
    float peak = -INFINITY;
    for (int i = 0; i < LANES; i++) peak = high[i] > peak ? high[i] : peak;
    if (from < to && peak == -INFINITY) peak = 0; /* every score is NaN or -inf: NaN must come through */
    for (long c = begin; c < end; c += LANES) {
        vint seen = (ids >= (int)(from - c)) & (ids < (int)(to - c));
        vfloat weight = (vfloat)((vint)exp_lanes(get(scores + c) - peak) & seen);
        put(scores + c, weight);
        sum += weight;
    }
    *top = peak;
    *mass = lane_sum(sum);
}

/* The weighted values of positions [from, to) of block `base`, for `m` query rows from `row`. */
static void mix(const job *j, scratch *s, const queries *u, long head, long base, long from, long to, long row, long m,
                partial into) {
    long wide = padded(j->dim), whole = values_in_place(j) ? j->page : BLOCK;
    float *out = into.values + row * wide;
    for (long p = from, run; p < to; p += run) {
        const float *values = s->values + (p - base) * wide;
        if (values_in_place(j)) values = (const float *)j->pool + key_index(j, u->row, head, p) + half_page(j);
        run = smaller(to - p, whole - p % whole);
        product(s->scores + row * BLOCK + p - base, BLOCK, values, wide, run, out, wide, p > from, m, wide);
    }
}

static int is_finite(const float *values, long count) {
    vfloat odd = {0};
    for (long i = 0; i < count; i += LANES) odd += get(values + i) - get(values + i);
    return lane_sum(odd) == 0;
}

/* The partial of queries `u` (loaded in s->q) over their block `index` for one KV head. A weight of 0 does not hide
 * NaN: where there is some, every query is done again over what it sees. */
static void attend_block(const job *j, scratch *s, const queries *u, long head, long index, partial into) {
    int sink = index < u->sink_blocks;
    long base = (sink ? index : u->block_from + index - u->sink_blocks) * BLOCK;
    long group = j->heads / j->kv_heads, m = u->count * group, wide = padded(j->dim);
    long from = sink ? base : larger(base, u->position - j->window + 1);
    long to = smaller(base + BLOCK, sink ? u->sink_to : u->position + u->count);
    gather(j, s, u->row, head, base, from, to);
    long begin = (from - base) / LANES * LANES, end = (to - base + LANES - 1) / LANES * LANES;
    product(s->q, wide, s->keys + begin, BLOCK, j->dim, s->scores + begin, BLOCK, 0, m, end - begin);
    for (int apart = 0;; apart = 1) {
        for (long i = 0; i < m; i++) {
            long position = u->position + i / group, lowest = position - j->window + 1;
            long first = sink ? from : larger(from, lowest), last = smaller(to, sink ? lowest : position + 1);
            float *scores = s->scores + i * BLOCK, *top = into.top + i, *mass = into.mass + i;
            if (apart) mix(j, s, u, head, base, first, last, i, 1, into);
            else weigh(scores, begin, end, first - base, last - base, j->softcap, top, mass);
        }
        if (apart) return;
        mix(j, s, u, head, base, from, to, 0, m, into);
        if (u->count == 1 || is_finite(into.values, m * wide)) return;
    }
}

static void start(partial total, long m, long dim) {
    memset(total.values, 0, (size_t)(m * padded(dim)) * sizeof(float));
    for (long i = 0; i < m; i++) total.top[i] = -INFINITY, total.mass[i] = 0;
}

/* Never inlined: one instruction sequence, so that splitting the work cannot change a rounding. */
static __attribute__((noinline)) void merge(partial total, partial block, long m, long dim) {
    long wide = padded(dim);
    for (long i = 0; i < m; i++) {
        float old = total.top[i], new = block.top[i], top = old > new ? old : new;
        if (new == -INFINITY) continue;
        vfloat keep = splat(exp_lanes(splat(old - top))[0]), add = splat(exp_lanes(splat(new - top))[0]);
        float *values = total.values + i * wide;
        for (long d = 0; d < wide; d += LANES)
            put(values + d, get(values + d) * keep + get(block.values + i * wide + d) * add);
        total.mass[i] = total.mass[i] * keep[0] + block.mass[i] * add[0];
        total.top[i] = top;
    }
}

static void load_queries(const job *j, scratch *s, const queries *u, long head) {
    long group = j->heads / j->kv_heads, wide = padded(j->dim);
    for (long i = 0; i < u->count * group; i++) {
        long index = (u->first + i / group) * j->q_token + (head * group + i % group) * j->q_head;
        for (long d = 0; d < j->dim; d += LANES) {
            put(s->q + i * wide + d, load_upto(at(j->q, index + d, j->q_kind), j->dim - d, j->q_kind) * j->scale);
        }
    }
}

static void finish(const job *j, const queries *u, long head, partial total) {
    long group = j->heads / j->kv_heads, wide = padded(j->dim);
    for (long i = 0; i < u->count * group; i++) {
        long index = ((u->first + i / group) * j->heads + head * group + i % group) * j->dim;
        vfloat inverse = splat(total.mass[i] == 0 && total.top[i] == -INFINITY ? 0 : 1 / total.mass[i]);
        for (long d = 0; d < j->dim; d += LANES) {
            vfloat lanes = get(total.values + i * wide + d) * inverse;
            if (d + LANES <= j->dim) store(at_mut(j->out, index + d, j->q_kind), lanes, j->q_kind);
            else store_part(at_mut(j->out, index + d, j->q_kind), lanes, j->dim - d, j->q_kind);
        }
    }
}

/* A step on its way: its queries, what each seat works in, and kept partials where blocks are shared out. */
typedef struct {
    const job *j;
    queries *units;
    float *seats, *kept;
    long count, blocks, m; /* queries, their blocks in all, and most query rows of one */
} step;

static long tokens_together(const job *j) { return larger(1, QUERY_ROWS * j->kv_heads / j->heads); }

/* Cuts the step into queries, writing them where there is room, and counts them. */
static void cut(step *s) {
    const job *j = s->j;
    long tokens = tokens_together(j), group = j->heads / j->kv_heads;
    s->count = s->blocks = s->m = 0;
    for (long row = 0; row < j->rows; row++) {
        long end = j->starts[row + 1], before = j->lens[row] - end;
        for (long first = j->starts[row]; first < end; first += tokens) {
            queries u = {row, first, smaller(tokens, end - first), before + first, 0, 0, 0, 0};
            u.block_from = larger(0, u.position - j->window + 1) / BLOCK;
            u.block_to = (u.position + u.count + BLOCK - 1) / BLOCK;
            u.sink_to = larger(0, smaller(j->sinks, u.position + u.count - j->window));
            u.sink_blocks = (u.sink_to + BLOCK - 1) / BLOCK;
            s->blocks += blocks_of(&u);
            s->m = larger(s->m, u.count * group);
            if (s->units) s->units[s->count] = u;
            s->count++;
        }
    }
}

static scratch seat_of(const step *s, int seat) {
    return scratch_at(s->seats + seat * scratch_floats(s->m, s->j->dim), s->m, s->j->dim);
}

/* Enough independent work for every thread: each (queries, KV head) goes through its blocks alone. */
static void whole(void *context, long first, long last, int seat) {
    const step *s = context;
    const job *j = s->j;
    scratch space = seat_of(s, seat);
    for (long index = first; index < last; index++) {
        const queries *u = s->units + s->count - 1 - index / j->kv_heads; /* long ones first, to end together */
        long head = index % j->kv_heads, rows = u->count * (j->heads / j->kv_heads);
        load_queries(j, &space, u, head);
        start(space.total, rows, j->dim);
        for (long b = 0; b < blocks_of(u); b++) {
            attend_block(j, &space, u, head, b, space.block);
            merge(space.total, space.block, rows, j->dim);
        }
        finish(j, u, head, space.total);
    }
}

/* Little independent work: threads share out (queries, KV head, block), and what they keep is merged afterwards. */
static void split(void *context, long first, long last, int seat) {
    const step *s = context;
    const job *j = s->j;
    scratch space = seat_of(s, seat);
    const queries *loaded = 0;
    for (long task = first; task < last; task++) {
        long head = task / s->blocks, block = task % s->blocks;
        const queries *u = s->units;
        for (; block >= blocks_of(u); u++) block -= blocks_of(u);
        if (task == first || block == 0 || loaded != u) load_queries(j, &space, u, head);
        loaded = u;
        attend_block(j, &space, u, head, block,
                     partial_at(s->kept + task * partial_floats(s->m, j->dim), s->m, j->dim));
    }
}

static void join(void *context, long first, long last, int seat) {
    const step *s = context;
    const job *j = s->j;
    scratch space = seat_of(s, seat);
    for (long index = first; index < last; index++) {
        const queries *u = s->units + index % s->count;
        long head = index / s->count, rows = u->count * (j->heads / j->kv_heads), task = head * s->blocks;
        for (const queries *before = s->units; before < u; before++) task += blocks_of(before);
        start(space.total, rows, j->dim);
        for (long b = 0; b < blocks_of(u); b++, task++)
            merge(space.total, partial_at(s->kept + task * partial_floats(s->m, j->dim), s->m, j->dim), rows, j->dim);
        finish(j, u, head, space.total);
    }
}

/* Returns 0, or 1 when memory ran out. */
int camshaft_paged_attention(const job *j) {
    char stack[STACK_BYTES], *memory = stack;
    step s = {j, 0, 0, 0, 0, 0, 0};
    cut(&s);
    if (!s.count) return 0;
    long each = partial_floats(s.m, j->dim), items = s.count * j->kv_heads, tasks = s.blocks * j->kv_heads;
    int threads = tasks * s.m * BLOCK * j->dim < SERIAL_PRODUCTS ? 1 : j->threads;
    int few = threads > 1 && items < 4 * threads && tasks * each < KEPT_FLOATS;
    long floats = threads * scratch_floats(s.m, j->dim) + (few ? tasks * each : 0);
    size_t bytes = (size_t)floats * sizeof(float) + (size_t)s.count * sizeof(queries) + ALIGNMENT;
    if (bytes > STACK_BYTES && !(memory = malloc(bytes))) return 1;
    s.seats = (float *)(((uintptr_t)memory + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    s.kept = s.seats + threads * scratch_floats(s.m, j->dim);
    s.units = (queries *)(((uintptr_t)(s.seats + floats)));
    cut(&s);
    if (few) {
        pool_run(tasks, 1, threads, split, &s);
        pool_run(items, pool_grain(JOINED_FLOATS, s.m * each * s.blocks / s.count), threads, join, &s);
    } else pool_run(items, 1, threads, whole, &s);
    if (memory != stack) free(memory);
    return 0;
}
