// Attention of nodes over places, in two passes.
//
// A place is where one position's key or value lies: the pool's slots, then this step's scratch.
// A node's list of places in the order of positions is all that attention knows, so pages, trees
// and chunks cannot change a bit: each score is one fixed sum, the largest is exact, weights are
// added lane by position mod 8, and values are added in the order of positions.
//
// Up to three queries go together, so that what they read is loaded once for them: query heads that
// share the key/value head, of nodes of a row that see the same positions. Where converting halves costs
// something, some positions at a time are brought near as float32 first, once for all
// of these queries (`read_in_place`). Numbers of blocks are multiplied by their scale where they are
// read: what is computed is attention over the float32 numbers that the blocks stand for.

namespace {

using forerun::Alike;
using forerun::Attend;
using forerun::blocks_of;
using forerun::kNearNumbers;
using forerun::kNodesTogether;
using forerun::kPositions;
using forerun::near_scales;
using forerun::row_bytes;

constexpr int kFetch = 32;       // positions to fetch ahead while scoring
constexpr int kNear = 1 << 17;   // numbers of values that stay near until they are mixed
constexpr int kKeyVectors = 8 * kPositions / kWide;    // of eight numbers of all positions' keys
constexpr int kDots = kWide / 2;                       // of them whose sums are under way at a time
constexpr int kMixed = 4 * kWide;                      // numbers of a value that are mixed at a time
constexpr int kMixedPositions = kNearNumbers / kMixed / kPositions * kPositions;  // at a time

__attribute__((noinline)) static const int32_t* last_places(const Attend& job, int first, int some,
                                                            int32_t* buffer) {
    for (int i = 0; i < some; i++) {
        const int p = first + i;
        buffer[i] = p < job.sight.trunk ? job.trunk[p] : job.sight.path[p - job.sight.trunk];
    }
    for (int i = some; i < kPositions; i++) buffer[i] = buffer[some - 1];
    return buffer;
}

// Places of `some` positions from `first` on, at most kPositions. Up to so many follow, of other
// positions or of the last one.
FORERUN_INLINE const int32_t* places_at(const Attend& job, int first, int some, int32_t* buffer) {
    if (first + kPositions <= job.sight.trunk) return job.trunk + first;
    return last_places(job, first, some, buffer);
}

using Half = uint16_t;  // a key's or value's number, or float
using Byte = uint8_t;   // or one of a block's (kernels.h, `Item`)

template <class Number>
constexpr bool kInBlocks = sizeof(Number) == forerun::kBlocks;

template <class Number>
FORERUN_INLINE const Number* row_at(const uint8_t* plane, int32_t place, int size) {
    return (const Number*)(plane + place * row_bytes(sizeof(Number), size));
}

// Fetches rows into the second cache (a forward pass of 1, 4 and 8 nodes behind 1,900 tokens takes
// .94, .84 and .89 of the time that it takes with the first; Zen 4).
template <class Number>
FORERUN_INLINE void fetch(const uint8_t* plane, const int32_t* places, int some, int size) {
    const int bytes = (int)row_bytes(sizeof(Number), size);
    for (int p = 0; p < some; p++) {
        const uint8_t* row = plane + (int64_t)places[p] * bytes;
        for (int i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
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
    if (job.item == forerun::kFloats) {
        return job.size == 64 ? call(0.0f, Count<64>()) : call(0.0f, Count<0>());
    }
    if (job.item == forerun::kBlocks) {
        if (job.size == 64) return call(Byte(), Count<64>());
        if (job.size == 128) return call(Byte(), Count<128>());
        return call(Byte(), Count<0>());
    }
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

// Whether so many queries read keys and values where they are, each three of them converting halves
// again. With AVX2 that costs next to nothing (.76 to .94 of the cycles, with 6 to 24
// queries); 512 bits take two operations on the ports that multiply, plain C++ takes many, and a
// block's scale is one more multiplication everywhere.
template <class Number>
FORERUN_INLINE bool read_in_place(int queries) {
    return (kWide == 8 && kConvertsBeside && !kInBlocks<Number>) || queries <= 3;
}

// Keys of kPositions where they are.
template <class Number>
struct KeysThere {
    const Number* rows[kKeyVectors][2];
    float* scales = nullptr;  // [blocks][kKeyVectors][kWide] each position's, eight times

    KeysThere(const Attend& job, const int32_t* places, int size) {
        for (int v = 0; v < kKeyVectors; v++) {
            for (int half = 0; half < 2; half++) {
                const int position = row_position(v, kWide == 16 ? half : 0);
                rows[v][half] = row_at<Number>(job.keys, places[position], size);
            }
        }
        if (!kInBlocks<Number>) return;
        scales = job.near + near_scales(size);
        for (int block = 0; block < blocks_of(size); block++) {
            for (int v = 0; v < kKeyVectors; v++) {
                float* to = scales + kWide * (block * kKeyVectors + v);
                for (int half = 0; half < kWide / 8; half++) {
                    store8(to + 8 * half, splat_half8((const uint8_t*)(rows[v][half] + size) + 2 * block));
                }
            }
        }
    }
    // Eight numbers from `e` on of the positions of vector `v + i`.
    FORERUN_MEMBER W load(int v, int i, int e) const {
        const W numbers = load_rows(rows[v + i][0] + e, rows[v + i][1] + e);
        if (!kInBlocks<Number>) return numbers;
        return mulw(numbers, loadw(scales + kWide * (e / kGroup * kKeyVectors + v + i)));
    }
};

// The same brought near, as float32[size / 8][kKeyVectors][kWide].
struct KeysNear {
    float* near;

    template <class Number>
    FORERUN_MEMBER void bring(const KeysThere<Number>& there, int size) {
        for (int v = 0; v < kKeyVectors; v++) {
            for (int e = 0; e < size; e += 8) storew(at(v, 0, e), there.load(v, 0, e));
        }
    }
    FORERUN_MEMBER float* at(int v, int i, int e) const {
        return near + kWide * (v + i) + kPositions * e;
    }
    FORERUN_MEMBER W load(int v, int i, int e) const { return loadw(at(v, i, e)); }
};

// Of kDots vectors of keys from `v` on: eight sums of products with each of Q queries.
template <int Q, class Keys>
FORERUN_INLINE void dots_of(const Keys& keys, int v, int size, const float* const* x,
                            W (&dots)[Q][kDots]) {
#pragma GCC unroll 8
    for (int i = 0; i < kDots; i++) {
        for (int q = 0; q < Q; q++) dots[q][i] = splatw<W>(0.0f);
    }
#pragma GCC unroll 1
    for (int e = 0; e < size; e += 8) {
        W query[Q];
        for (int q = 0; q < Q; q++) {
            query[q] = load_eight(x[q] + e);
            FORERUN_PIN(query[q]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kDots; i++) {
            W key = keys.load(v, i, e);
            FORERUN_PIN(key);
            for (int q = 0; q < Q; q++) dots[q][i] = fmaw(query[q], key, dots[q][i]);
        }
    }
}

// Scores of Q queries at `some` positions from `first` on, at most kPositions. A function of its own:
// within its caller's loops compilers keep what they need of them in memory, which takes longer than
// this.
template <int Q, class Keys>
__attribute__((noinline)) static void score_some(const Keys& keys, int size, const Query* queries,
                                                 int first, int some) {
    const float* x[Q];
    for (int q = 0; q < Q; q++) x[q] = queries[q].x;
    constexpr int kTiles = 8 / kDots;  // a vector of scores takes so many
    for (int at = 0; at < some; at += kWide) {
        W parts[Q][kTiles];
#pragma GCC unroll 2
        for (int tile = 0; tile < kTiles; tile++) {
            if (tile && some - at <= kDots) {
                for (int q = 0; q < Q; q++) parts[q][tile] = parts[q][0];
                break;
            }
            W dots[Q][kDots];
            dots_of<Q>(keys, at / kWide * 8 + tile * kDots, size, x, dots);
#pragma GCC unroll 3
            for (int q = 0; q < Q; q++) {
                parts[q][tile] = first_sums(dots[q]);
                FORERUN_PIN(parts[q][tile]);  // Else compilers keep the dots until all tiles are done.
            }
        }
        for (int q = 0; q < Q; q++) {
            const W scores = last_sums(parts[q]);
            float* to = queries[q].scores + first + at;
            if (some - at >= kWide) {
                storew(to, scores);
                continue;
            }
            float lanes[kWide];
            storew(lanes, scores);
            memcpy(to, lanes, sizeof(float) * (some - at));
        }
    }
}

// Scores of all heads of `count` nodes at positions [first, last) of `job`, one of them.
template <class Number, int Size>
static void score(const Attend* nodes, int count, const Attend& job, int first, int last) {
    const int size = Size ? Size : job.size;
    int32_t buffer[kPositions];
    for (; first < last; first += kPositions) {
        const int some = last - first < kPositions ? last - first : kPositions;
        const int32_t* places = places_at(job, first, some, buffer);
        if (first + kFetch + kPositions <= job.sight.trunk) {
            fetch<Number>(job.keys, job.trunk + first + kFetch, kPositions, size);
        }
        if (first < kNear / size && job.values != job.keys) {
            fetch<Number>(job.values, places, some, size);
        }
        const KeysThere<Number> there(job, places, size);
        KeysNear near = {job.near};
        const bool in_place = read_in_place<Number>(count * job.heads);
        if (!in_place) near.bring(there, size);
        by_queries(nodes, count, [&](auto together, const Query* queries) {
            if (in_place) return score_some<decltype(together)::value>(there, size, queries, first, some);
            score_some<decltype(together)::value>(near, size, queries, first, some);
        });
    }
}

// The largest of scores[length] and a sink's. By eights that take turns, which shows where some are NaN.
FORERUN_INLINE float largest_of(const float* scores, int length, const float* sink) {
    const int whole = length / 8 * 8;
    const F8 first = splat8(scores[0]);
    F8 most[2] = {first, first};
    int i = 0;
    for (; i + 16 <= whole; i += 16) {
        most[0] = max8(most[0], load8(scores + i));
        most[1] = max8(most[1], load8(scores + i + 8));
    }
    if (i < whole) most[0] = max8(most[0], load8(scores + i)), i += 8;
    if (i < length) most[1] = max8(most[1], first8(length - i, load8(scores + i), first));
    float lanes[8], largest;
    store8(lanes, max8(most[0], most[1]));
    largest = lanes[0];
    for (i = 1; i < 8; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    return sink && *sink > largest ? *sink : largest;
}

// scores[length] become e^(score - largest). Returns their sum, a sink's with them. What follows them
// up to a multiple of 8 is written, too.
FORERUN_INLINE float weigh_by(float* scores, int length, const float* sink, float largest) {
    const W shift = splatw<W>(largest);
    F8 total = splat8(0.0f);
    int at = 0;
    for (; at + kWide <= length; at += kWide) {
        storew(scores + at, exp_of(subw(loadw(scores + at), shift)));
        for (int i = 0; i < kWide; i += 8) total = add8(total, load8(scores + at + i));
    }
    for (; at < length; at += 8) {
        F8 weights = exp_of(sub8(load8(scores + at), splat8(largest)));
        if (length - at < 8) weights = first8(length - at, weights, splat8(0.0f));
        store8(scores + at, weights);
        total = add8(total, weights);
    }
    if (!sink) return sum8(total);
    float lanes[8];
    store8(lanes, exp_of(sub8(splat8(*sink), splat8(largest))));
    return sum8(total) + lanes[0];
}

// The same of scores that are softened where there is a cap, and whose largest is not known.
static float weigh(float* scores, int length, const float* sink, float cap) {
    if (cap != 0.0f) soften(scores, length, cap);
    return weigh_by(scores, length, sink, largest_of(scores, length, sink));
}

template <class Number>
FORERUN_INLINE void load_vector(const Number* at, F8& a) {
    a = load_number8(at);
}
FORERUN_INLINE void splat_half(const uint8_t* at, F8& a) { a = splat_half8(at); }
#ifdef FORERUN_WIDE
template <class Number>
FORERUN_INLINE void load_vector(const Number* at, F16& a) {
    a = load_numberw(at);
}
FORERUN_INLINE void splat_half(const uint8_t* at, F16& a) { a = splat_half16(at); }
#endif

// Values of positions where they are, from number `first` on.
template <class Number>
struct ValuesThere {
    static constexpr bool kScaled = kInBlocks<Number>;
    const Number* rows[kMixedPositions];
    int first, size;

    // Number `i` of a position and following ones, which lie within one block.
    template <class V>
    FORERUN_MEMBER void load(int p, int i, V scale, V& value) const {
        load_vector(rows[p] + first + i, value);
        if (kScaled) value = mulw(value, scale);
    }
    // What multiplies them.
    template <class V>
    FORERUN_MEMBER void load_scale(int p, int i, V& scale) const {
        if (kScaled) splat_half((const uint8_t*)(rows[p] + size) + (first + i) / kGroup * 2, scale);
    }
};

// The same brought near, `width` numbers of each.
struct ValuesNear {
    static constexpr bool kScaled = false;
    float* near;
    int width;

    FORERUN_MEMBER float* at(int p) const { return near + p * width; }
    template <class V>
    FORERUN_MEMBER void load(int p, int i, V, V& value) const {
        load_vector(at(p) + i, value);
    }
    template <class V>
    FORERUN_MEMBER void load_scale(int, int, V&) const {}
};

// What `some` positions from `first` on add to numbers [e, e + Vectors of V) of Q queries' output; these
// are numbers i and following of `values`.
template <class V, int Vectors, int Q, class Values>
FORERUN_INLINE void mix_vectors(const Values& values, int i, const Query* queries, int e, int first,
                                int some) {
    constexpr int wide = sizeof(V) / sizeof(float);
    V sum[Q][Vectors];
    const float* weights[Q];
    for (int q = 0; q < Q; q++) {
        weights[q] = queries[q].scores + first;
        for (int k = 0; k < Vectors; k++) {
            sum[q][k] = splatw<V>(0.0f);
            if (first) load_vector(queries[q].out + e + wide * k, sum[q][k]);
        }
    }
    for (int p = 0; p < some; p++) {
        V weight[Q], scale = splatw<V>(0.0f);
        for (int q = 0; q < Q; q++) weight[q] = splatw<V>(weights[q][p]);
        for (int k = 0; k < Vectors; k++) {
            V value;
            if (k * wide % kGroup == 0) values.load_scale(p, i + wide * k, scale);
            values.load(p, i + wide * k, scale, value);
            FORERUN_PIN(value);  // Else each query loads it.
            for (int q = 0; q < Q; q++) sum[q][k] = fmaw(weight[q], value, sum[q][k]);
        }
    }
    for (int q = 0; q < Q; q++) {
        for (int k = 0; k < Vectors; k++) storew(queries[q].out + e + wide * k, sum[q][k]);
    }
}

// The same for `width` numbers, a multiple of 8.
template <int Q, class Values>
__attribute__((noinline)) static void mix_rows(const Values& values, int width, const Query* queries,
                                               int e, int first, int some) {
    int i = 0;
    // More than eight numbers share their scales where they begin as a block begins.
    for (; Values::kScaled && (e + i) % kGroup && i < width; i += 8) {
        mix_vectors<F8, 1, Q>(values, i, queries, e + i, first, some);
    }
    for (; i + 4 * kWide <= width; i += 4 * kWide) {
        mix_vectors<W, 4, Q>(values, i, queries, e + i, first, some);
    }
    for (; i + 2 * kWide <= width; i += 2 * kWide) {
        mix_vectors<W, 2, Q>(values, i, queries, e + i, first, some);
    }
    for (; i < width; i += 8) mix_vectors<F8, 1, Q>(values, i, queries, e + i, first, some);
}

// The values of `some` positions from `first` on, from number `e` on: where they are.
template <class Number>
FORERUN_INLINE void find(const Attend& job, int first, int some, int size, int e,
                         ValuesThere<Number>& values) {
    values.first = e, values.size = size;
    int32_t buffer[kPositions];
    for (int at = 0; at < some; at += kPositions) {
        const int left = some - at < kPositions ? some - at : kPositions;
        const int32_t* places = places_at(job, first + at, left, buffer);
        for (int p = 0; p < kPositions; p++) {
            values.rows[at + p] = row_at<Number>(job.values, places[p], size);
        }
    }
}

// The same, brought near.
template <class Number>
FORERUN_INLINE void bring(const ValuesThere<Number>& there, int some, ValuesNear values) {
    for (int p = 0; p < some; p++) {
        float* to = values.at(p);
        int i = 0;
        const auto take = [&](auto value) {
            auto scale = value;
            there.load_scale(p, i, scale);
            there.load(p, i, scale, value);
            storew(to + i, value);
        };
        for (; (there.first + i) % kWide == 0 && i + kWide <= values.width; i += kWide) {
            take(splatw<W>(0.0f));
        }
        for (; i < values.width; i += 8) take(splat8(0.0f));
    }
}

// What positions [begin, end), where all these nodes see the same places, add to numbers
// [first, last) of all heads' output. Values that more than three queries read are brought near.
template <class Number, int Size>
static void mix(const Attend* nodes, int count, int first, int last, int begin, int end) {
    const Attend& job = *nodes;
    const int size = Size ? Size : job.size;
    const bool in_place = read_in_place<Number>(count * job.heads);
    const int most = in_place ? last - first : kMixed;
    ValuesThere<Number> there;
    for (int e = first; e < last; e += most) {
        const int width = last - e < most ? last - e : most;
        const ValuesNear near = {job.near, width};
        for (int at = begin; at < end; at += kMixedPositions) {
            const int some = end - at < kMixedPositions ? end - at : kMixedPositions;
            find(job, at, some, size, e, there);
            if (!in_place) bring(there, some, near);
            by_queries(nodes, count, [&](auto together, const Query* queries) {
                constexpr int Q = decltype(together)::value;
                if (in_place) return mix_rows<Q>(there, width, queries, e, at, some);
                mix_rows<Q>(near, width, queries, e, at, some);
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
    const int scored = alike.nested ? longest.sight.length() : alike.positions;
    score<Number, Size>(nodes, count, longest, 0, scored);
    for (int n = 0; n < count; n++) {
        const Attend& one = nodes[n];
        const int length = one.sight.length();
        score<Number, Size>(&one, 1, one, scored, length);
        for (int h = 0; h < one.heads; h++) {
            float* scores = one.scores + h * one.stride;
            if (one.cap != 0.0f) soften(scores, length, one.cap);
            one.totals[h] = largest_of(scores, length, one.sinks ? one.sinks + h : nullptr);
        }
    }
    // All that is largest is known by now, so that nothing waits for it.
    for (int n = 0; n < count; n++) {
        const Attend& one = nodes[n];
        for (int h = 0; h < one.heads; h++) {
            float* scores = one.scores + h * one.stride;
            const float* sink = one.sinks ? one.sinks + h : nullptr;
            one.totals[h] = weigh_by(scores, one.sight.length(), sink, one.totals[h]);
        }
    }
    mix<Number, Size>(nodes, count, 0, nodes->mixed, 0, alike.positions);
    for (int n = 0; n < count; n++) {
        mix<Number, Size>(&nodes[n], 1, 0, nodes->mixed, alike.positions, nodes[n].sight.length());
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
