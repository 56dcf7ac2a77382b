// Attention of one node over places, in two passes.
//
// A place is where one position's key or value lies: the pool's slots, then this step's scratch.
// A node's list of places in the order of positions is all that attention knows, so pages, trees
// and chunks cannot change a bit: each score is one fixed sum, the largest is exact, weights are
// added lane by position mod 8, and values are added in the order of positions.
//
// Up to three query heads that share a key/value head go together, so that every half is turned
// to float32 once for all of them and twelve sums are under way at a time.

namespace {

using forerun::Attend;
using forerun::kPositions;

constexpr int kFetch = 24;       // positions to fetch ahead while scoring
constexpr int kNear = 1 << 17;   // numbers of values that stay near until they are mixed

__attribute__((noinline)) static const int32_t* last_places(const Attend& job, int first,
                                                            int32_t* buffer) {
    for (int i = 0; i < kPositions; i++) {
        const int p = first + i < job.sight.length() ? first + i : job.sight.length() - 1;
        buffer[i] = p < job.sight.trunk ? job.trunk[p] : job.sight.path[p - job.sight.trunk];
    }
    return buffer;
}

// Places of positions [first, first + 8). What is beyond the end repeats the last place: its
// score is not used and its weight is zero.
FORERUN_INLINE const int32_t* places_at(const Attend& job, int first, int32_t* buffer) {
    if (first + kPositions <= job.sight.trunk) return job.trunk + first;
    return last_places(job, first, buffer);
}

// Brings eight positions' rows near.
FORERUN_INLINE void fetch(const uint16_t* plane, const int32_t* places, int size) {
    for (int p = 0; p < kPositions; p++) {
        const uint16_t* row = plane + (int64_t)places[p] * size;
        for (int e = 0; e < size; e += 32) __builtin_prefetch(row + e, 0, 3);
    }
}

// scores[q * stride + position] of Q heads. Size is the head size where it is known, else 0.
template <int Size, int Q>
FORERUN_INLINE void score(const Attend& job, int head, float* scores, int64_t stride) {
    const int size = Size ? Size : job.size;
    const float* queries = job.queries + head * size;
    int32_t buffer[kPositions];
    for (int first = 0; first < job.sight.length(); first += kPositions) {
        const int32_t* places = places_at(job, first, buffer);
        if (job.cold && head == 0) {
            if (first + kFetch + kPositions <= job.sight.trunk) {
                fetch(job.keys, job.trunk + first + kFetch, size);
            }
            if (first < kNear / size) fetch(job.values, places, size);
        }
        F8 dots[Q][8];
        for (int p = 0; p < kPositions; p++) {
            const uint16_t* row = job.keys + (int64_t)places[p] * size;
            F8 dot[Q];
            for (int q = 0; q < Q; q++) dot[q] = splat8(0.0f);
            for (int e = 0; e < size; e += 8) {
                const F8 key = load_half8(row + e);
                for (int q = 0; q < Q; q++) {
                    dot[q] = fma8(load8(queries + q * size + e), key, dot[q]);
                }
            }
            for (int q = 0; q < Q; q++) dots[q][p] = dot[q];
        }
        for (int q = 0; q < Q; q++) store8(scores + q * stride + first, sum8_each(dots[q]));
    }
}

// scores[length] become e^(score - largest), zero up to a multiple of 8. Returns their sum.
FORERUN_INLINE float weigh(float* scores, int length) {
    const int padded = (length + 7) / 8 * 8;
    for (int i = length; i < padded; i++) scores[i] = scores[0];
    F8 most = load8(scores);
    for (int i = 8; i < padded; i += 8) most = max8(most, load8(scores + i));
    float lanes[8], largest;
    store8(lanes, most);
    largest = lanes[0];
    for (int i = 1; i < 8; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    const F8 shift = splat8(largest);
    for (int i = 0; i < padded; i += 8) store8(scores + i, exp8(sub8(load8(scores + i), shift)));
    for (int i = length; i < padded; i++) scores[i] = 0.0f;
    F8 total = splat8(0.0f);
    for (int i = 0; i < padded; i += 8) total = add8(total, load8(scores + i));
    return sum8(total);
}

// Numbers [e, e + 8 * Eights) of Q heads' output.
template <int Size, int Q, int Eights>
FORERUN_INLINE void mix(const Attend& job, int head, int e, const float* weights, int64_t stride,
                        const float (&totals)[Q]) {
    const int size = Size ? Size : job.size;
    int32_t buffer[kPositions];
    F8 sum[Q][Eights];
    for (int q = 0; q < Q; q++) {
        for (int i = 0; i < Eights; i++) sum[q][i] = splat8(0.0f);
    }
    for (int first = 0; first < job.sight.length(); first += kPositions) {
        const int32_t* places = places_at(job, first, buffer);
        for (int p = 0; p < kPositions; p++) {
            const uint16_t* row = job.values + (int64_t)places[p] * size + e;
            F8 weight[Q];
            for (int q = 0; q < Q; q++) weight[q] = splat8(weights[q * stride + first + p]);
            for (int i = 0; i < Eights; i++) {
                const F8 value = load_half8(row + 8 * i);
                for (int q = 0; q < Q; q++) sum[q][i] = fma8(weight[q], value, sum[q][i]);
            }
        }
    }
    for (int q = 0; q < Q; q++) {
        float* out = job.out + (head + q) * size + e;
        for (int i = 0; i < Eights; i++) store8(out + 8 * i, div8(sum[q][i], splat8(totals[q])));
    }
}

template <int Size, int Q>
FORERUN_INLINE void heads_together(const Attend& job, int head) {
    const int size = Size ? Size : job.size, length = job.sight.length();
    const int64_t stride = forerun::padded_positions(length);
    score<Size, Q>(job, head, job.scratch, stride);
    float totals[Q];
    for (int q = 0; q < Q; q++) totals[q] = weigh(job.scratch + q * stride, length);
    int e = 0;
    for (; e + 32 <= size; e += 32) mix<Size, Q, 4>(job, head, e, job.scratch, stride, totals);
    for (; e < size; e += 8) mix<Size, Q, 1>(job, head, e, job.scratch, stride, totals);
}

template <int Size>
static void attend_sized(const Attend& job) {
    int head = 0;
    while (head < job.heads) {
        const int left = job.heads - head;
        if (left == 1) {
            heads_together<Size, 1>(job, head);
            head += 1;
        } else if (left == 2 || left == 4) {
            heads_together<Size, 2>(job, head);
            head += 2;
        } else {
            heads_together<Size, 3>(job, head);
            head += 3;
        }
    }
}

static void attend(const Attend& job) {
    switch (job.size) {
        case 64: return attend_sized<64>(job);
        case 128: return attend_sized<128>(job);
        default: return attend_sized<0>(job);
    }
}

}  // namespace
