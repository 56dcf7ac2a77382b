// Attention over places, in two passes.
//
// A place is where one position's key or value lies: the pool's slots, then this step's scratch.
// A node's list of places in the order of positions is all that attention knows, so pages, trees
// and chunks cannot change a bit: each score is one fixed sum, the largest is exact, weights are
// added lane by position mod 8, and values are added in the order of positions.

namespace {

using forerun::Attend;
using forerun::kPositions;
using forerun::Sight;

// Eight positions' rows as float32[8][size]; absent ones are zero.
FORERUN_INLINE void widen(const uint16_t* plane, const int32_t* places, int count, int size,
                          float* rows) {
    for (int p = 0; p < kPositions; p++, rows += size) {
        if (p >= count) {
            memset(rows, 0, sizeof(float) * size);
            continue;
        }
        const uint16_t* from = plane + (int64_t)places[p] * size;
        for (int e = 0; e < size; e += 8) store8(rows + e, load_half8(from + e));
    }
}

// Scores of one query against eight rows.
FORERUN_INLINE F8 scores8(const float* query, const float* rows, int size) {
    F8 dot[8];
    for (int p = 0; p < 8; p++) dot[p] = splat8(0.0f);
    for (int e = 0; e < size; e += 8) {
        const F8 q = load8(query + e);
#pragma GCC unroll 8
        for (int p = 0; p < 8; p++) dot[p] = fma8(q, load8(rows + p * size + e), dot[p]);
    }
    return sum8_each(dot);
}

// out[size] += weights[8] . rows[8][size], position after position; four vectors at a time.
FORERUN_INLINE void add_values(const float* weights, const float* rows, int size, float* out) {
    int e = 0;
    for (; e + 32 <= size; e += 32) {
        F8 a = load8(out + e), b = load8(out + e + 8);
        F8 c = load8(out + e + 16), d = load8(out + e + 24);
#pragma GCC unroll 8
        for (int p = 0; p < 8; p++) {
            const F8 weight = splat8(weights[p]);
            const float* row = rows + p * size + e;
            a = fma8(weight, load8(row), a);
            b = fma8(weight, load8(row + 8), b);
            c = fma8(weight, load8(row + 16), c);
            d = fma8(weight, load8(row + 24), d);
        }
        store8(out + e, a), store8(out + e + 8, b);
        store8(out + e + 16, c), store8(out + e + 24, d);
    }
    for (; e < size; e += 8) {
        F8 a = load8(out + e);
        for (int p = 0; p < 8; p++) a = fma8(splat8(weights[p]), load8(rows + p * size + e), a);
        store8(out + e, a);
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

// Places of positions [first, first + 8) as one node sees them; returns how many there are.
FORERUN_INLINE int places_of(const Attend& job, const Sight& sight, int first, int32_t* places) {
    int count = 0;
    for (int p = first; p < first + kPositions && p < sight.length(); p++) {
        places[count++] = p < sight.trunk ? job.trunk[p] : sight.path[p - sight.trunk];
    }
    return count;
}

// Runs visit(node range, first position, float rows) over every block of positions: blocks that
// lie in the trunk of all nodes once for all, the rest node by node.
template <class Visit>
FORERUN_INLINE void over_positions(const Attend& job, const uint16_t* plane, float* rows,
                                   Visit visit) {
    int shared = job.sights[0].trunk;
    for (int n = 1; n < job.nodes; n++) {
        shared = job.sights[n].trunk < shared ? job.sights[n].trunk : shared;
    }
    shared = shared / kPositions * kPositions;
    for (int p = 0; p < shared; p += kPositions) {
        widen(plane, job.trunk + p, kPositions, job.size, rows);
        visit(0, job.nodes, p);
    }
    for (int n = 0; n < job.nodes; n++) {
        for (int p = shared; p < job.sights[n].length(); p += kPositions) {
            int32_t places[kPositions];
            const int count = places_of(job, job.sights[n], p, places);
            widen(plane, places, count, job.size, rows);
            visit(n, n + 1, p);
        }
    }
}

static void attend(const Attend& job) {
    int longest = 0;
    for (int n = 0; n < job.nodes; n++) {
        longest = job.sights[n].length() > longest ? job.sights[n].length() : longest;
    }
    const int64_t padded = (longest + kPositions - 1) / kPositions * kPositions;
    const int size = job.size, heads = job.heads;
    float* const rows = job.scratch;
    float* const scores = rows + kPositions * size;
    float* const sums = scores + job.nodes * heads * (padded + size);
    float* const mixed = scores + job.nodes * heads * padded;

    over_positions(job, job.keys, rows, [&](int first, int last, int p) {
        for (int q = first * heads; q < last * heads; q++) {
            const float* query = job.queries + q / heads * job.query_stride + q % heads * size;
            store8(scores + q * padded + p, scores8(query, rows, size));
        }
    });
    for (int q = 0; q < job.nodes * heads; q++) {
        sums[q] = weigh(scores + q * padded, job.sights[q / heads].length());
    }
    memset(mixed, 0, sizeof(float) * job.nodes * heads * size);
    over_positions(job, job.values, rows, [&](int first, int last, int p) {
        for (int q = first * heads; q < last * heads; q++) {
            add_values(scores + q * padded + p, rows, size, mixed + (int64_t)q * size);
        }
    });
    for (int q = 0; q < job.nodes * heads; q++) {
        float* out = job.out + q / heads * job.out_stride + q % heads * size;
        for (int e = 0; e < size; e++) out[e] = mixed[(int64_t)q * size + e] / sums[q];
    }
}

}  // namespace
