/* Picks a token a row of logits, and takes log-probabilities. Greedy rows take one pass; the others are put into buckets by how far a logit
 * lies below the largest, and only the buckets that hold a cut or the picked token are sorted. Masses are
 * doubles, so that cuts and picks fall where the reference puts them. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "native.h"
#include "pool.h"

#define MIN_PARALLEL_LOGITS 32768
#define BUCKETS 1024
#define DEEPEST 42.0 /* the last bucket takes all that is less likely than e^-42 times the likeliest */

typedef struct {
    float logit;
    int32_t id;
    double mass;
} entry;

/* Entries ordered by bucket; inside a bucket by id until it is sorted. start[b] is a bucket's first entry. */
typedef struct {
    entry *entries;
    int32_t start[BUCKETS + 1];
    double mass[BUCKETS];
    unsigned char sorted[BUCKETS];
} ranking;

INLINE vfloat pick(vint mask, vfloat yes, vfloat no) { return (vfloat)(((vint)yes & mask) | ((vint)no & ~mask)); }

/* The largest logit and its lowest index; NaN if any is NaN. */
INLINE float best_as(const void *row, long count, long *index, int kind) {
    vfloat high = splat(-INFINITY), bad = {0};
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        vfloat x = load(at(row, i, kind), kind);
        high = pick((vint)(x > high), x, high);
        bad = (vfloat)((vint)bad | (vint)(x != x));
    }
    float best = -INFINITY;
    int broken = 0;
    for (int l = 0; l < LANES; l++) best = high[l] > best ? high[l] : best, broken |= ((vint)bad)[l];
    for (; i < count; i++) {
        float x = load_one(at(row, i, kind), kind);
        best = x > best ? x : best, broken |= x != x;
    }
    *index = 0;
    if (broken) return NAN;
    for (i = 0; i + LANES <= count; i += LANES) {
        vint equal = (vint)(load(at(row, i, kind), kind) == best);
        int any = 0;
        for (int l = 0; l < LANES; l++) any |= equal[l];
        if (any) break;
    }
    while (i < count && load_one(at(row, i, kind), kind) != best) i++;
    *index = i;
    return best;
}

static float best_of(const void *row, long count, long *index, int kind) {
    if (kind == KIND_F32) return best_as(row, count, index, KIND_F32);
    if (kind == KIND_BF16) return best_as(row, count, index, KIND_BF16);
    return best_as(row, count, index, KIND_F16);
}

/* e^x for x <= 0: x = n ln 2 + r, Taylor to r^13 (error below rounding); 0 below -700. */
INLINE double exp_of(double x) {
    const double shift = 0x1.8p52;
    double inside = x < -700 ? -700 : x, shifted = inside * 0x1.71547652b82fep+0 + shift, n = shifted - shift;
    double r = inside - n * 0x1.62e42fee00000p-1 - n * 0x1.a39ef35793c76p-33, y = 1 / 6227020800.;
    const double terms[] = {1 / 479001600., 1 / 39916800., 1 / 3628800., 1 / 362880., 1 / 40320., 1 / 5040., 1 / 720.,
                            1 / 120., 1 / 24., 1 / 6., 0.5, 1, 1};
    for (int i = 0; i < 13; i++) y = y * r + terms[i];
    int64_t bits, scale;
    memcpy(&bits, &y, 8);
    memcpy(&scale, &shifted, 8);
    bits += (int64_t)((uint64_t)scale << 52);
    memcpy(&y, &bits, 8);
    return x < -700 ? 0 : y;
}

INLINE void widen_as(const void *row, long count, float *out, int kind) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, load(at(row, i, kind), kind), KIND_F32);
    for (; i < count; i++) out[i] = load_one(at(row, i, kind), kind);
}

/* How far below the likeliest the least likely unmasked token lies, in nats, at most DEEPEST. */
static double depth_of(const float *logits, long count, float best, double temperature) {
    float low = best;
    for (long i = 0; i < count; i++) low = logits[i] < low && logits[i] > -INFINITY ? logits[i] : low;
    double depth = ((double)best - low) / temperature;
    return depth < DEEPEST ? depth : DEEPEST;
}

/* Fills the ranking with a counting sort. `best` is the largest logit, all others are finite or -inf. */
static void rank_row(ranking *r, const float *logits, long count, float best, double temperature, double *masses,
                     int16_t *places) {
    double depth = depth_of(logits, count, best, temperature), buckets_a_nat = depth > 0 ? (BUCKETS - 1) / depth : 0;
    memset(r->start, 0, sizeof r->start);
    memset(r->mass, 0, sizeof r->mass);
    memset(r->sorted, 0, sizeof r->sorted);
    for (long i = 0; i < count; i++) masses[i] = exp_of(((double)logits[i] - best) / temperature);
    for (long i = 0; i < count; i++) {
        double place = ((double)best - logits[i]) / temperature * buckets_a_nat;
        places[i] = place < BUCKETS - 1 ? (int16_t)place : BUCKETS - 1;
    }
    for (long i = 0; i < count; i++) {
        r->start[places[i] + 1]++;
    }
    for (int b = 0; b < BUCKETS; b++) r->start[b + 1] += r->start[b];
    int32_t next[BUCKETS];
    memcpy(next, r->start, sizeof next);
    for (long i = 0; i < count; i++) {
        r->entries[next[places[i]]++] = (entry){logits[i], (int32_t)i, masses[i]};
        r->mass[places[i]] += masses[i];
    }
}

static int by_rank(const void *left, const void *right) {
    const entry *a = left, *b = right;
    if (a->logit != b->logit) return a->logit > b->logit ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

static const entry *sorted_bucket(ranking *r, int b) {
    entry *first = r->entries + r->start[b];
    if (!r->sorted[b]) qsort(first, (size_t)(r->start[b + 1] - r->start[b]), sizeof(entry), by_rank);
    r->sorted[b] = 1;
    return first;
}

/* Mass of the first `count` entries. */
static double mass_of_first(ranking *r, long count) {
    double sum = 0;
    int b = 0;
    for (; b < BUCKETS && r->start[b + 1] <= count; b++) sum += r->mass[b];
    if (b == BUCKETS || r->start[b] >= count) return sum;
    const entry *entries = sorted_bucket(r, b);
    for (long i = 0; i < count - r->start[b]; i++) sum += entries[i].mass;
    return sum;
}

/* Index of the first entry at which the running mass reaches `goal` (passes it, with `beyond`), below `count`;
 * count - 1 where rounding lets none. */
static long reach(ranking *r, double goal, int beyond, long count) {
    double sum = 0;
    for (int b = 0; b < BUCKETS && r->start[b] < count; b++) {
        double after = sum + r->mass[b];
        if (beyond ? after <= goal : after < goal) {
            sum = after;
            continue;
        }
        const entry *entries = sorted_bucket(r, b);
        for (long i = r->start[b]; i < r->start[b + 1] && i < count; i++) {
            sum += entries[i - r->start[b]].mass;
            if (beyond ? sum > goal : sum >= goal) return i;
        }
    }
    return count - 1;
}

/* logits: [rows, count], strides in elements; the other inputs and both outputs: [rows]. */
typedef struct {
    const void *logits;
    const float *temperature;
    const int32_t *top_k;
    const float *top_p, *min_p, *uniform;
    int64_t *ids;
    unsigned char *finite;
    long row_stride, rows, count;
    int kind, threads;
} batch;

static long draw(const batch *in, ranking *r, long row, float best, double *masses, float *widened) {
    const void *data = at(in->logits, row * in->row_stride, in->kind);
    if (in->kind == KIND_BF16) widen_as(data, in->count, widened, KIND_BF16);
    if (in->kind == KIND_F16) widen_as(data, in->count, widened, KIND_F16);
    rank_row(r, in->kind == KIND_F32 ? data : widened, in->count, best, in->temperature[row], masses,
             (int16_t *)(widened + in->count));
    long kept = in->count;
    if (in->top_k[row] > 0 && in->top_k[row] < kept) kept = in->top_k[row];
    double floor = in->min_p[row];
    if (in->top_p[row] < 1) kept = reach(r, in->top_p[row] * mass_of_first(r, kept), 0, kept) + 1;
    if (floor > 0) {
        long likely = 0;
        for (long i = 0; i < in->count; i++) likely += masses[i] >= floor;
        kept = likely < kept ? likely : kept;
    }
    if (kept < 1) kept = 1;
    long chosen = reach(r, in->uniform[row] * mass_of_first(r, kept), 1, kept);
    int b = 0;
    while (r->start[b + 1] <= chosen) b++;
    return sorted_bucket(r, b)[chosen - r->start[b]].id;
}

/* What a thread needs to draw; made for its first row that is not greedy. */
typedef struct {
    ranking *ranked;
    double *masses; /* [count], then floats [count], then places [count] */
} workspace;

static int workspace_open(workspace *space, long count) {
    if (space->ranked && space->masses) return 1;
    if (!space->ranked) space->ranked = malloc(sizeof(ranking) + (size_t)count * sizeof(entry));
    if (!space->masses) space->masses = malloc((size_t)count * (sizeof(double) + sizeof(float) + sizeof(int16_t)));
    if (!space->ranked || !space->masses) return 0;
    space->ranked->entries = (entry *)(space->ranked + 1);
    return 1;
}

typedef struct {
    const batch *in;
    workspace *spaces; /* a seat each */
    atomic_int failed;
} job;

static void some_rows(void *context, long first, long last, int seat) {
    job *j = context;
    const batch *in = j->in;
    workspace *space = j->spaces + seat;
    for (long row = first; row < last; row++) {
        long index;
        float best = best_of(at(in->logits, row * in->row_stride, in->kind), in->count, &index, in->kind);
        in->finite[row] = isfinite(best) != 0;
        in->ids[row] = in->finite[row] ? index : 0;
        if (!in->finite[row] || in->temperature[row] == 0) continue;
        if (workspace_open(space, in->count))
            in->ids[row] = draw(in, space->ranked, row, best, space->masses, (float *)(space->masses + in->count));
        else atomic_store(&j->failed, 1);
    }
}

/* Returns 0, or 1 when memory ran out. Rows are independent. */
int camshaft_sample(const batch *in) {
    workspace alone = {0}, *spaces = &alone;
    int threads = in->rows * in->count > MIN_PARALLEL_LOGITS && in->rows > 1 ? in->threads : 1;
    if (threads > 1 && !(spaces = calloc((size_t)threads, sizeof *spaces))) return 1;
    job j = {in, spaces, 0};
    pool_run(in->rows, 1, threads, some_rows, &j);
    for (int i = 0; i < threads; i++) free(spaces[i].ranked), free(spaces[i].masses);
    if (spaces != &alone) free(spaces);
    return atomic_load(&j.failed);
}

/* logits: [rows, count], strides in elements; targets, logprobs, ranks, finite: [rows]; tops: [rows, num_top]. */
typedef struct {
    const void *logits;
    const int64_t *targets;
    float *logprobs;
    int64_t *ranks, *top_ids;
    float *top_logprobs;
    unsigned char *finite;
    long row_stride, rows, count, num_top;
    int kind, threads;
} logprob_batch;

/* Sum of e^(x - best): lanes of fp32 for a while, then into a double. */
INLINE double mass_as(const void *row, long count, float best, int kind) {
    double sum = 0;
    long i = 0;
    while (i + LANES <= count) {
        vfloat some = {0};
        for (long stop = i + 64 * LANES; i + LANES <= count && i < stop; i += LANES)
            some += exp_lanes(load(at(row, i, kind), kind) - best);
        for (int l = 0; l < LANES; l++) sum += some[l];
    }
    for (; i < count; i++) sum += exp_of((double)load_one(at(row, i, kind), kind) - best);
    return sum;
}

/* How many of [first, last) lie above `bar`; with `level`, or on it. */
INLINE long above_as(const void *row, long first, long last, float bar, int level, int kind) {
    long found = 0, i = first;
    vint counts = {0};
    for (; i + LANES <= last; i += LANES) {
        vfloat x = load(at(row, i, kind), kind);
        counts -= level ? (vint)(x >= bar) : (vint)(x > bar);
    }
    for (int l = 0; l < LANES; l++) found += counts[l];
    for (; i < last; i++) {
        float x = load_one(at(row, i, kind), kind);
        found += level ? x >= bar : x > bar;
    }
    return found;
}

/* Puts a logit into `kept` sorted ones: behind its equals, which have lower ids. The last falls out when full. */
static void insert(float *logits, int64_t *ids, long *kept, long most, float logit, long id) {
    long low = 0, high = *kept;
    while (low < high) {
        long middle = (low + high) / 2;
        if (logits[middle] >= logit) low = middle + 1;
        else high = middle;
    }
    if (low == most) return;
    long moved = (*kept < most ? *kept : most - 1) - low;
    memmove(logits + low + 1, logits + low, (size_t)moved * sizeof *logits);
    memmove(ids + low + 1, ids + low, (size_t)moved * sizeof *ids);
    logits[low] = logit, ids[low] = id;
    *kept += *kept < most;
}

INLINE void top_as(const void *row, long count, float *logits, int64_t *ids, long most, int kind) {
    long kept = 0, i = 0;
    for (; i < count && kept < most; i++) insert(logits, ids, &kept, most, load_one(at(row, i, kind), kind), i);
    while (i < count) {
        long stop = i + 8 * LANES < count ? i + 8 * LANES : count;
        if (stop - i == 8 * LANES) {
            vint over = {0};
            for (long j = i; j < stop; j += LANES) over |= (vint)(load(at(row, j, kind), kind) > logits[most - 1]);
            int any = 0;
            for (int l = 0; l < LANES; l++) any |= over[l];
            if (!any) {
                i = stop;
                continue;
            }
        }
        for (; i < stop; i++) {
            float x = load_one(at(row, i, kind), kind);
            if (x > logits[most - 1]) insert(logits, ids, &kept, most, x, i);
        }
    }
}

INLINE void logprobs_as(const logprob_batch *in, long row, int kind) {
    const void *data = at(in->logits, row * in->row_stride, kind);
    long index, target = in->targets[row], most = in->num_top;
    float best = best_as(data, in->count, &index, kind);
    float *tops = in->top_logprobs + row * most;
    int64_t *ids = in->top_ids + row * most;
    in->finite[row] = isfinite(best) != 0;
    if (!in->finite[row]) {
        in->logprobs[row] = 0, in->ranks[row] = 0;
        memset(tops, 0, (size_t)most * sizeof *tops);
        memset(ids, 0, (size_t)most * sizeof *ids);
        return;
    }
    double normaliser = log(mass_as(data, in->count, best, kind));
    float logit = load_one(at(data, target, kind), kind);
    in->logprobs[row] = (float)((double)logit - best - normaliser);
    in->ranks[row] = 1 + above_as(data, 0, target, logit, 1, kind) + above_as(data, target, in->count, logit, 0, kind);
    if (most) top_as(data, in->count, tops, ids, most, kind);
    for (long i = 0; i < most; i++) tops[i] = (float)((double)tops[i] - best - normaliser);
}

static void logprob_rows(void *context, long first, long last, int seat) {
    const logprob_batch *in = context;
    (void)seat;
    for (long row = first; row < last; row++) {
        if (in->kind == KIND_F32) logprobs_as(in, row, KIND_F32);
        else if (in->kind == KIND_BF16) logprobs_as(in, row, KIND_BF16);
        else logprobs_as(in, row, KIND_F16);
    }
}

/* Returns 0. Rows are independent. */
int camshaft_logprobs(logprob_batch *in) {
    int threads = in->rows * in->count > MIN_PARALLEL_LOGITS && in->rows > 1 ? in->threads : 1;
    pool_run(in->rows, 1, threads, logprob_rows, in);
    return 0;
}
