/* AdamW in one pass over memory: each number is read once and written once.
 *
 * Per element it reads the parameter, the gradient and both moments, and writes the parameter, both
 * moments and, where one is wanted, a copy of the parameter in another precision. All arithmetic is
 * float, in the order of operations of torch.optim.AdamW. Tensors come as addresses in rows of
 * int64, so that one call serves hundreds of them. Built by kernel.py, without any header of torch.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

enum { NOTHING, FLOAT32, BFLOAT16, FLOAT16 }; /* kernel.py's KINDS */
enum { BLOCK = 1024 }; /* elements converted at a time: two buffers of 4 KiB, which stay in L1 */
enum { LINE = 16 };    /* floats in a cache line: no two threads write to one */
enum { GRAIN = 1 << 15 }; /* elements for which a second thread is worth waking */

/* One rounding where the processor can, as in torch's vector code; else two. */
#if defined(FP_FAST_FMAF) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define MULTIPLY_ADD(a, b, c) fmaf(a, b, c)
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif

typedef struct { /* one tensor: addresses, elements, and what kind of number lies there */
    int64_t param, grad, exp_avg, exp_avg_sq, copy, numel, param_kind, grad_kind, copy_kind;
} row;

typedef struct { /* kernel.py's Rule */
    float factor, decay, weight1, beta2, weight2, root2, eps, step_size;
} rule;

static void update(float *restrict p, const float *restrict g, float *restrict m,
                   float *restrict v, int64_t n, rule r) {
    const int near = r.weight1 < 0.5f; /* as torch.lerp: exact at both ends */
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float grad = g[i] * r.factor;
        const float way = grad - m[i];
        m[i] = near ? MULTIPLY_ADD(r.weight1, way, m[i]) : grad - way * (1.0f - r.weight1);
        v[i] = MULTIPLY_ADD(r.weight2 * grad, grad, v[i] * r.beta2);
        const float denom = sqrtf(v[i]) / r.root2 + r.eps;
        p[i] = p[i] * r.decay - r.step_size * m[i] / denom;
    }
}

static float widen(uint16_t bits) { /* bfloat16 is the upper half of a float */
    const uint32_t whole = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &whole, sizeof value);
    return value;
}

static uint16_t narrow(float value) { /* round to nearest, ties to even; NaN stays NaN */
    uint32_t whole;
    memcpy(&whole, &value, sizeof whole);
    const uint32_t rounded = (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
    return value == value ? (uint16_t)rounded : 0x7fc0;
}

#ifdef __FLT16_MAX__ /* the compiler knows float16 */
static void widen16(const _Float16 *source, int64_t n, float *restrict values) {
    int64_t i = 0;
#ifdef __F16C__ /* eight at a time, which gcc 12 does not do by itself */
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(values + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(source + i))));
#endif
    for (; i < n; i++)
        values[i] = source[i];
}

static void narrow16(_Float16 *target, int64_t n, const float *restrict values) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((void *)(target + i), _mm256_cvtps_ph(_mm256_loadu_ps(values + i), 0));
#endif
    for (; i < n; i++)
        target[i] = (_Float16)values[i];
}
#endif

/* n numbers of this kind from element `at` on, as float: in place, or converted into the buffer. */
static float *load(int64_t from, int64_t kind, int64_t at, int64_t n, float *restrict buffer) {
    if (kind == FLOAT32)
        return (float *)from + at;
    if (kind == BFLOAT16) {
        const uint16_t *source = (const uint16_t *)from + at;
        for (int64_t i = 0; i < n; i++)
            buffer[i] = widen(source[i]);
    }
#ifdef __FLT16_MAX__
    if (kind == FLOAT16)
        widen16((const _Float16 *)from + at, n, buffer);
#endif
    return buffer;
}

static void store(int64_t to, int64_t kind, int64_t at, int64_t n, const float *restrict values) {
    if (kind == FLOAT32 && (float *)to + at != values)
        memcpy((float *)to + at, values, n * sizeof(float));
    if (kind == BFLOAT16) {
        uint16_t *target = (uint16_t *)to + at;
        for (int64_t i = 0; i < n; i++)
            target[i] = narrow(values[i]);
    }
#ifdef __FLT16_MAX__
    if (kind == FLOAT16)
        narrow16((_Float16 *)to + at, n, values);
#endif
}

static void step(const row *t, int64_t begin, int64_t end, rule r) {
    float params[BLOCK], grads[BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) {
        const int64_t n = end - at < BLOCK ? end - at : BLOCK;
        float *p = load(t->param, t->param_kind, at, n, params);
        const float *g = load(t->grad, t->grad_kind, at, n, grads);
        update(p, g, (float *)t->exp_avg + at, (float *)t->exp_avg_sq + at, n, r);
        store(t->param, t->param_kind, at, n, p);
        store(t->copy, t->copy_kind, at, n, p);
    }
}

/* The elements [begin, end) of all tensors one behind the other. */
static void share(const row *rows, int64_t count, int64_t begin, int64_t end, rule r) {
    for (int64_t i = 0, first = 0; i < count && first < end; first += rows[i++].numel) {
        const int64_t from = begin > first ? begin - first : 0;
        const int64_t to = end - first < rows[i].numel ? end - first : rows[i].numel;
        if (from < to)
            step(&rows[i], from, to, r);
    }
}

static int64_t cut(int64_t total, int part, int parts) {
    return part == parts ? total : total / parts * part / LINE * LINE;
}

void pdt_adamw(const row *rows, int64_t count, const rule *r, int threads) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++)
        total += rows[i].numel;
    threads = threads < 1 + total / GRAIN ? threads : (int)(1 + total / GRAIN);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int i = 0; i < threads; i++)
        share(rows, count, cut(total, i, threads), cut(total, i + 1, threads), *r);
}

/* STREAM's triad, a = b + s * c: what memory gives to the same compiler and the same threads. */
void pdt_triad(float *restrict a, const float *restrict b, const float *restrict c, float s,
               int64_t n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int i = 0; i < threads; i++) {
        const int64_t end = cut(n, i + 1, threads);
#pragma omp simd
        for (int64_t j = cut(n, i, threads); j < end; j++)
            a[j] = b[j] + s * c[j];
    }
}

int pdt_has_float16(void) {
#ifdef __FLT16_MAX__
    return 1;
#else
    return 0;
#endif
}
