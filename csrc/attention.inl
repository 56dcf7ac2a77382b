// Attention of nodes over places, in two passes.
//
// A place is where one position's key or value lies: the pool's slots, then this step's scratch.
// A node's list of places in the order of positions is all that attention knows, so pages, trees
// and chunks cannot change a bit: each score is one fixed sum, the largest is exact, weights are
// added lane by position mod 8, and values are added in the order of positions.
//
// Some positions at a time are brought near as float32, once for all that reads them: every query
// head that shares the key/value head, of every node of a row that sees these positions. Up to three
// of these queries go together, so that what is near is loaded once for them.

namespace {

using forerun::Alike;
using forerun::Attend;
using forerun::kNodesTogether;
using forerun::kPositions;

constexpr int kFetch = 32;       // positions to fetch ahead while scoring
constexpr int kNear = 1 << 17;   // numbers of values that stay near until they are mixed
constexpr int kKeyVectors = 8 * kPositions / kWide;    // of eight numbers of all positions' keys
constexpr int kDots = kWide == 16 ? kKeyVectors : 4;   // of them whose sums are under way at a time
constexpr int kMixed = 4 * kWide;                      // numbers of a value that are mixed at a time

__attribute__((noinline)) static const int32_t* last_places(const Attend& job, int first,
                                                            int32_t* buffer) {
    for (int i = 0; i < kPositions; i++) {
        const int p = first + i < job.sight.length() ? first + i : job.sight.length() - 1;
        buffer[i] = p < job.sight.trunk ? job.trunk[p] : job.sight.path[p - job.sight.trunk];
    }
    return buffer;
}

// Places of positions [first, first + kPositions). What is beyond the end repeats the last place:
// its score is not used and its weight is zero.
FORERUN_INLINE const int32_t* places_at(const Attend& job, int first, int32_t* buffer) {
    if (first + kPositions <= job.sight.trunk) return job.trunk + first;
    return last_places(job, first, buffer);
}

using Half = uint16_t;  // a key's or value's number, or float

// Brings rows into the near cache.
template <class Number>
FORERUN_INLINE void fetch(const uint8_t* plane, const int32_t* places, int size) {
    const int bytes = size * (int)sizeof(Number);
    for (int p = 0; p < kPositions; p++) {
        const uint8_t* row = plane + (int64_t)places[p] * bytes;
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 3);
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

// What one query reads and writes.
struct Query {
    const float* x;
    float *scores, *out;
};

// call(queries) for the heads of all nodes, node after node: three at a time, or two, so that few are
// left alone.
template <class Call>
FORERUN_INLINE void by_queries(const Attend* nodes, int count, Call call) {
    const int heads = nodes->heads;
    int node = 0, head = 0;
    for (int left = count * heads, some; left > 0; left -= some) {
        some = left == 2 || left == 4 ? 2 : left == 1 ? 1 : 3;
        Query queries[3];
        for (int q = 0; q < some; q++) {
            const Attend& job = nodes[node];
            queries[q] = {job.queries + head * job.size, job.scores + head * job.stride,
                          job.out + head * job.size};
            if (++head == heads) head = 0, node++;
        }
        if (some == 3) {
            call(Count<3>(), queries);
        } else if (some == 2) {
            call(Count<2>(), queries);
        } else {
            call(Count<1>(), queries);
        }
    }
}

// Keys of kPositions where they are.
template <class Number>
struct KeysThere {
    const Number* rows[kKeyVectors][2];

    KeysThere(const Attend& job, const int32_t* places, int size) {
        for (int v = 0; v < kKeyVectors; v++) {
            for (int half = 0; half < 2; half++) {
                const int position = row_position(v, kWide == 16 ? half : 0);
                rows[v][half] = (const Number*)job.keys + (int64_t)places[position] * size;
            }
        }
    }
    // Eight numbers from `e` on of the positions of vector `v`.
    FORERUN_MEMBER W load(int v, int e) const { return load_rows(rows[v][0] + e, rows[v][1] + e); }
};

// The same brought near, as float32[size / 8][kKeyVectors][kWide].
struct KeysNear {
    float* near;

    template <class Number>
    FORERUN_MEMBER void bring(const KeysThere<Number>& there, int size) {
        for (int v = 0; v < kKeyVectors; v++) {
            for (int e = 0; e < size; e += 8) storew(at(v, e), there.load(v, e));
        }
    }
    FORERUN_MEMBER float* at(int v, int e) const { return near + (e / 8 * kKeyVectors + v) * kWide; }
    FORERUN_MEMBER W load(int v, int e) const { return loadw(at(v, e)); }
};

// Scores of Q queries from position `first` on. A function of its own: within its caller's loops
// compilers keep what they need of them in memory, which takes longer than this.
template <int Q, class Keys>
__attribute__((noinline)) static void score_some(const Keys& keys, int size, const Query* queries,
                                                 int first) {
    W dots[Q][kKeyVectors];
    for (int v = 0; v < kKeyVectors; v += kDots) {
        W dot[Q][kDots];
#pragma GCC unroll 8
        for (int i = 0; i < kDots; i++) {
            for (int q = 0; q < Q; q++) dot[q][i] = splatw<W>(0.0f);
        }
        for (int e = 0; e < size; e += 8) {
            W query[Q];
            for (int q = 0; q < Q; q++) query[q] = load_eight(queries[q].x + e);
#pragma GCC unroll 8
            for (int i = 0; i < kDots; i++) {
                W key = keys.load(v + i, e);
                FORERUN_PIN(key);
                for (int q = 0; q < Q; q++) dot[q][i] = fmaw(query[q], key, dot[q][i]);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < kDots; i++) {
            for (int q = 0; q < Q; q++) dots[q][v + i] = dot[q][i];
        }
    }
    for (int q = 0; q < Q; q++) store_row_sums(queries[q].scores + first, dots[q]);
}

// Scores of all heads of `count` nodes at positions [first, last) of `job`, one of them; first a
// multiple of kPositions.
template <class Number, int Size>
static void score(const Attend* nodes, int count, const Attend& job, int first, int last) {
    const int size = Size ? Size : job.size;
    int32_t buffer[kPositions];
    for (; first < last; first += kPositions) {
        const int32_t* places = places_at(job, first, buffer);
        if (first + kFetch + kPositions <= job.sight.trunk) {
            fetch<Number>(job.keys, job.trunk + first + kFetch, size);
        }
        if (first < kNear / size && job.values != job.keys) fetch<Number>(job.values, places, size);
        const KeysThere<Number> there(job, places, size);
        KeysNear near = {job.near};
        const bool few = count * job.heads <= 3;
        if (!few) near.bring(there, size);
        by_queries(nodes, count, [&](auto some, const Query* queries) {
            if (few) return score_some<decltype(some)::value>(there, size, queries, first);
            score_some<decltype(some)::value>(near, size, queries, first);
        });
    }
}

// The largest of scores[count] and a sink's; count a multiple of 8. By eights that take turns, which
// shows where some are NaN.
FORERUN_INLINE float largest_of(const float* scores, int count, const float* sink) {
    F8 most[2] = {load8(scores), load8(scores)};
    int i = 0;
    for (; i + 16 <= count; i += 16) {
        most[0] = max8(most[0], load8(scores + i));
        most[1] = max8(most[1], load8(scores + i + 8));
    }
    if (i < count) most[0] = max8(most[0], load8(scores + i));
    float lanes[8], largest;
    store8(lanes, max8(most[0], most[1]));
    largest = lanes[0];
    for (i = 1; i < 8; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    return sink && *sink > largest ? *sink : largest;
}

// scores[length], softened where there is a cap, become e^(score - largest), zero up to a multiple of
// 8. Returns their sum, a sink's with them.
static float weigh(float* scores, int length, const float* sink, float cap) {
    const int padded = (length + 7) / 8 * 8;
    for (int i = length; i < padded; i++) scores[i] = scores[0];
    if (cap != 0.0f) soften(scores, padded, cap);
    const float largest = largest_of(scores, padded, sink);
    const W shift = splatw<W>(largest);
    F8 total = splat8(0.0f);
    int at = 0;
    for (; at + kWide <= length; at += kWide) {
        storew(scores + at, exp_of(subw(loadw(scores + at), shift)));
        for (int i = 0; i < kWide; i += 8) total = add8(total, load8(scores + at + i));
    }
    for (; at < padded; at += 8) {
        store8(scores + at, exp_of(sub8(load8(scores + at), splat8(largest))));
        for (int i = length; i < at + 8; i++) scores[i] = 0.0f;
        total = add8(total, load8(scores + at));
    }
    if (!sink) return sum8(total);
    float lanes[8];
    store8(lanes, exp_of(sub8(splat8(*sink), splat8(largest))));
    return sum8(total) + lanes[0];
}

template <class Number>
FORERUN_INLINE void load_vector(const Number* at, F8& a) {
    a = load_number8(at);
}
#ifdef FORERUN_WIDE
template <class Number>
FORERUN_INLINE void load_vector(const Number* at, F16& a) {
    a = load_numberw(at);
}
#endif

// What `some` positions from `first` on add to numbers [e, e + Vectors of V) of Q queries' output; the
// values have these numbers at rows[some] + i.
template <class V, int Vectors, int Q, class Number>
FORERUN_INLINE void mix_vectors(const Number* const* rows, int i, const Query* queries, int e, int first,
                                int some) {
    constexpr int wide = sizeof(V) / sizeof(float);
    V sum[Q][Vectors];
    for (int q = 0; q < Q; q++) {
        for (int k = 0; k < Vectors; k++) {
            sum[q][k] = splatw<V>(0.0f);
            if (first) load_vector(queries[q].out + e + wide * k, sum[q][k]);
        }
    }
    for (int p = 0; p < some; p++) {
        const Number* row = rows[p] + i;
        V weight[Q];
        for (int q = 0; q < Q; q++) weight[q] = splatw<V>(queries[q].scores[first + p]);
        for (int k = 0; k < Vectors; k++) {
            V value;
            load_vector(row + wide * k, value);
            FORERUN_PIN(value);  // Else each query loads it.
            for (int q = 0; q < Q; q++) sum[q][k] = fmaw(weight[q], value, sum[q][k]);
        }
    }
    for (int q = 0; q < Q; q++) {
        for (int k = 0; k < Vectors; k++) storew(queries[q].out + e + wide * k, sum[q][k]);
    }
}

// The same for `width` numbers, a multiple of 8.
template <int Q, class Number>
__attribute__((noinline)) static void mix_rows(const Number* const* rows, int width, const Query* queries, int e,
                             int first, int some) {
    int i = 0;
    for (; i + 4 * kWide <= width; i += 4 * kWide) {
        mix_vectors<W, 4, Q>(rows, i, queries, e + i, first, some);
    }
    for (; i + 2 * kWide <= width; i += 2 * kWide) {
        mix_vectors<W, 2, Q>(rows, i, queries, e + i, first, some);
    }
    for (; i < width; i += 8) mix_vectors<F8, 1, Q>(rows, i, queries, e + i, first, some);
}

// What positions [begin, end), where all these nodes see the same places, add to numbers
// [first, last) of all heads' output; begin a multiple of 8. Values that more than three queries read
// are brought near.
template <class Number, int Size>
static void mix(const Attend* nodes, int count, int first, int last, int begin, int end) {
    const Attend& job = *nodes;
    const int size = Size ? Size : job.size;
    const bool there = count * job.heads <= 3;
    int32_t buffer[kPositions];
    const Number* rows[kPositions];
    const float* near[kPositions];
    for (int e = first; e < last; e += kMixed) {
        const int width = last - e < kMixed ? last - e : kMixed;
        for (int p = 0; p < kPositions; p++) near[p] = job.near + p * width;
        for (int at = begin; at < end; at += kPositions) {
            const int32_t* places = places_at(job, at, buffer);
            const int some = end - at < kPositions ? (end - at + 7) / 8 * 8 : kPositions;
            for (int p = 0; p < some; p++) {
                rows[p] = (const Number*)job.values + (int64_t)places[p] * size + e;
                if (there) continue;
                float* to = job.near + p * width;
                int i = 0;
                for (; i + kWide <= width; i += kWide) storew(to + i, load_numberw(rows[p] + i));
                for (; i < width; i += 8) store8(to + i, load_number8(rows[p] + i));
            }
            by_queries(nodes, count, [&](auto queries_together, const Query* queries) {
                constexpr int together = decltype(queries_together)::value;
                if (there) return mix_rows<together>(rows, width, queries, e, at, some);
                mix_rows<together>(near, width, queries, e, at, some);
            });
        }
    }
}

// Numbers [first, last) of all heads' output, divided by the sums of their weights.
FORERUN_INLINE void divide(const Attend& job, int first, int last) {
    for (int head = 0; head < job.heads; head++) {
        float* out = job.out + head * job.size;
        const F8 total = splat8(job.totals[head]);
        for (int e = first; e < last; e += 8) store8(out + e, div8(load8(out + e), total));
    }
}

static void attend_some_positions(const Attend& job, int first, int last) {
    by_kind(job, [&](auto number, auto size) {
        score<decltype(number), decltype(size)::value>(&job, 1, job, first, last);
    });
}

static void attend_some_numbers(const Attend& job, int first, int last) {
    by_kind(job, [&](auto number, auto size) {
        mix<decltype(number), decltype(size)::value>(&job, 1, first, last, 0, job.sight.length());
    });
    divide(job, first, last);
}

template <class Number, int Size>
static void attend_heads(const Attend* nodes, int count, Alike alike) {
    const Attend& longest = nodes[alike.longest];
    const int scored = alike.nested ? longest.sight.length() : alike.positions / kPositions * kPositions;
    const int mixed = alike.positions / 8 * 8;
    score<Number, Size>(nodes, count, longest, 0, scored);
    for (int n = 0; n < count; n++) {
        const Attend& one = nodes[n];
        const int length = one.sight.length();
        score<Number, Size>(&one, 1, one, scored, length);
        for (int h = 0; h < one.heads; h++) {
            const float* sink = one.sinks ? one.sinks + h : nullptr;
            one.totals[h] = weigh(one.scores + h * one.stride, length, sink, one.cap);
        }
    }
    mix<Number, Size>(nodes, count, 0, nodes->mixed, 0, mixed);
    for (int n = 0; n < count; n++) {
        mix<Number, Size>(&nodes[n], 1, 0, nodes->mixed, mixed, nodes[n].sight.length());
        divide(nodes[n], 0, nodes->mixed);
    }
}

static void attend(const Attend* nodes, int count, Alike alike) {
    Attend some[kNodesTogether];
    for (int head = 0; head < nodes->heads; head += nodes->room) {
        const int left = nodes->heads - head;
        for (int n = 0; n < count; n++) {
            some[n] = nodes[n];
            some[n].heads = left < nodes->room ? left : nodes->room;
            some[n].queries += head * nodes->size;
            some[n].out += head * nodes->size;
            some[n].sinks = nodes->sinks ? nodes->sinks + head : nullptr;
        }
        by_kind(*nodes, [&](auto number, auto size) {
            attend_heads<decltype(number), decltype(size)::value>(some, count, alike);
        });
    }
}

}  // namespace
