// Attention of one node over places, in two passes.
//
// A place is where one position's key or value lies: the pool's slots, then this step's scratch.
// A node's list of places in the order of positions is all that attention knows, so pages, trees
// and chunks cannot change a bit: each score is one fixed sum, the largest is exact, weights are
// added lane by position mod 8, and values are added in the order of positions.
//
// Up to three query heads that share a key/value head go together, so that every half is turned
// to float32 once for all of them and twelve sums are under way at a time. Where more share it, all
// read some positions before the next, which come from afar once.

namespace {

using forerun::Attend;
using forerun::kPositions;

constexpr int kFetch = 24;       // positions to fetch ahead while scoring
constexpr int kRows = 4;         // positions whose sums are under way at a time
constexpr int kNear = 1 << 17;   // numbers of values that stay near until they are mixed
constexpr int kTogether = 1 << 15;  // numbers of keys or values that all heads read before the next

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

using Half = uint16_t;  // a key's or value's number, or float

FORERUN_INLINE F8 load_number8(const Half* at) { return load_half8(at); }
FORERUN_INLINE F8 load_number8(const float* at) { return load8(at); }

// Brings eight positions' rows near.
template <class Number>
FORERUN_INLINE void fetch(const uint8_t* plane, const int32_t* places, int size) {
    const int bytes = size * (int)sizeof(Number);
    for (int p = 0; p < kPositions; p++) {
        const uint8_t* row = plane + (int64_t)places[p] * bytes;
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 3);
    }
}

// scores[q * stride + position] of Q heads at positions [first, last). Size is the head size where
// it is known, else 0.
template <class Number, int Size, int Q>
static void score(const Attend& job, int head, int first, int last, float* scores,
                  int64_t stride) {
    const int size = Size ? Size : job.size;
    const float* queries = job.queries + head * size;
    int32_t buffer[kPositions];
    for (; first < last; first += kPositions) {
        const int32_t* places = places_at(job, first, buffer);
        if (job.cold && head == 0) {
            if (first + kFetch + kPositions <= job.sight.trunk) {
                fetch<Number>(job.keys, job.trunk + first + kFetch, size);
            }
            if (first < kNear / size && job.values != job.keys) {
                fetch<Number>(job.values, places, size);
            }
        }
        F8 dots[Q][8];
        for (int p = 0; p < kPositions; p += kRows) {
            const Number* rows[kRows];
            F8 dot[Q][kRows];
            for (int i = 0; i < kRows; i++) {
                rows[i] = (const Number*)job.keys + (int64_t)places[p + i] * size;
                for (int q = 0; q < Q; q++) dot[q][i] = splat8(0.0f);
            }
            for (int e = 0; e < size; e += 8) {
                for (int i = 0; i < kRows; i++) {
                    const F8 key = load_number8(rows[i] + e);
                    for (int q = 0; q < Q; q++) {
                        dot[q][i] = fma8(load8(queries + q * size + e), key, dot[q][i]);
                    }
                }
            }
            for (int q = 0; q < Q; q++) {
                for (int i = 0; i < kRows; i++) dots[q][p + i] = dot[q][i];
            }
        }
        for (int q = 0; q < Q; q++) store8(scores + q * stride + first, sum8_each(dots[q]));
    }
}

// scores[length], softened where there is a cap, become e^(score - largest), zero up to a multiple of
// 8. Returns their sum, a sink's with them.
static float weigh(float* scores, int length, const float* sink, float cap) {
    const int padded = (length + 7) / 8 * 8;
    for (int i = length; i < padded; i++) scores[i] = scores[0];
    if (cap != 0.0f) soften(scores, padded, cap);
    F8 most = load8(scores);
    for (int i = 8; i < padded; i += 8) most = max8(most, load8(scores + i));
    float lanes[8], largest;
    store8(lanes, most);
    largest = lanes[0];
    for (int i = 1; i < 8; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    if (sink && *sink > largest) largest = *sink;
    const F8 shift = splat8(largest);
    for (int i = 0; i < padded; i += 8) store8(scores + i, exp8(sub8(load8(scores + i), shift)));
    for (int i = length; i < padded; i++) scores[i] = 0.0f;
    F8 total = splat8(0.0f);
    for (int i = 0; i < padded; i += 8) total = add8(total, load8(scores + i));
    if (!sink) return sum8(total);
    store8(lanes, exp8(sub8(splat8(*sink), shift)));
    return sum8(total) + lanes[0];
}

// Numbers [e, e + 8 * Eights) of Q heads' output: what positions [begin, end) add to it. It is
// divided by the totals once the last are there.
template <class Number, int Size, int Q, int Eights>
FORERUN_INLINE void mix_eights(const Attend& job, int head, int e, int begin, int end,
                               const float* weights, int64_t stride, const float* totals) {
    const int size = Size ? Size : job.size;
    float* outs = job.out + head * size + e;
    int32_t buffer[kPositions];
    F8 sum[Q][Eights];
    for (int q = 0; q < Q; q++) {
        for (int i = 0; i < Eights; i++) {
            sum[q][i] = begin ? load8(outs + q * size + 8 * i) : splat8(0.0f);
        }
    }
    for (int first = begin; first < end; first += kPositions) {
        const int32_t* places = places_at(job, first, buffer);
        for (int p = 0; p < kPositions; p++) {
            const Number* row = (const Number*)job.values + (int64_t)places[p] * size + e;
            F8 weight[Q];
            for (int q = 0; q < Q; q++) weight[q] = splat8(weights[q * stride + first + p]);
            for (int i = 0; i < Eights; i++) {
                const F8 value = load_number8(row + 8 * i);
                for (int q = 0; q < Q; q++) sum[q][i] = fma8(weight[q], value, sum[q][i]);
            }
        }
    }
    const bool whole = end >= job.sight.length();
    for (int q = 0; q < Q; q++) {
        for (int i = 0; i < Eights; i++) {
            const F8 all = whole ? div8(sum[q][i], splat8(totals[q])) : sum[q][i];
            store8(outs + q * size + 8 * i, all);
        }
    }
}

// Numbers [first, last), of positions [begin, end).
template <class Number, int Size, int Q>
static void mix(const Attend& job, int head, int first, int last, int begin, int end) {
    const float *weights = job.scores + head * job.stride, *totals = job.totals + head;
    int e = first;
    for (; e + 32 <= last; e += 32) {
        mix_eights<Number, Size, Q, 4>(job, head, e, begin, end, weights, job.stride, totals);
    }
    for (; e < last; e += 8) {
        mix_eights<Number, Size, Q, 1>(job, head, e, begin, end, weights, job.stride, totals);
    }
}

template <int N>
struct Count {
    static constexpr int value = N;
};

// call(number, size) with the kind of the cache's numbers and the head size as types, 0 where there
// is no version for it.
template <class Call>
FORERUN_INLINE void by_kind(const Attend& job, Call call) {
    if (job.floats) return job.size == 64 ? call(0.0f, Count<64>()) : call(0.0f, Count<0>());
    if (job.size == 64) return call(Half(), Count<64>());
    if (job.size == 128) return call(Half(), Count<128>());
    call(Half(), Count<0>());
}

// call(count, head) for all heads, three at a time, or two, so that few are left alone.
template <class Call>
FORERUN_INLINE void by_heads(int heads, Call call) {
    int head = 0;
    for (int left; (left = heads - head) > 0;) {
        if (left == 1) {
            call(Count<1>(), head);
            head += 1;
        } else if (left == 2 || left == 4) {
            call(Count<2>(), head);
            head += 2;
        } else {
            call(Count<3>(), head);
            head += 3;
        }
    }
}

// call(begin, end) for positions [first, last), of which so many at a time stay near that all heads
// find them there.
template <class Call>
FORERUN_INLINE void by_blocks(const Attend& job, int first, int last, Call call) {
    const int some = kTogether / job.size / kPositions * kPositions;
    const int block = job.heads <= 3 ? last - first : some > kPositions ? some : kPositions;
    for (; first < last; first += block) call(first, first + block < last ? first + block : last);
}

static void attend_some_positions(const Attend& job, int first, int last) {
    by_kind(job, [&](auto number, auto size) {
        by_blocks(job, first, last, [&](int begin, int end) {
            by_heads(job.heads, [&](auto count, int head) {
                score<decltype(number), decltype(size)::value, decltype(count)::value>(
                    job, head, begin, end, job.scores + head * job.stride, job.stride);
            });
        });
    });
}

static void attend_some_numbers(const Attend& job, int first, int last) {
    by_kind(job, [&](auto number, auto size) {
        by_blocks(job, 0, job.sight.length(), [&](int begin, int end) {
            by_heads(job.heads, [&](auto count, int head) {
                mix<decltype(number), decltype(size)::value, decltype(count)::value>(
                    job, head, first, last, begin, end);
            });
        });
    });
}

static void attend(const Attend& job) {
    const int length = job.sight.length();
    Attend some = job;
    for (int head = 0; head < job.heads; head += job.room) {
        some.heads = job.heads - head < job.room ? job.heads - head : job.room;
        some.queries = job.queries + head * job.size;
        some.out = job.out + head * job.size;
        some.cold = job.cold && head == 0;
        attend_some_positions(some, 0, length);
        for (int h = 0; h < some.heads; h++) {
            const float* sink = job.sinks ? job.sinks + head + h : nullptr;
            some.totals[h] = weigh(some.scores + h * job.stride, length, sink, job.cap);
        }
        attend_some_numbers(some, 0, job.mixed);
    }
}

}  // namespace
