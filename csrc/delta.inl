// States of a gated delta net: the arithmetic of forerun/executors/torch/decoder/delta.py, number
// for number, with kColumns columns of a state together, which no other column meets.
#include "delta.h"

namespace {

using forerun::DeltaStep;
using forerun::kColumns;

typedef float Columns __attribute__((vector_size(4 * FORERUN_COLUMNS)));

FORERUN_INLINE Columns all_columns(float a) { return a - Columns{}; }

// The rows of `x`, added by halves until one is left; `x` is spent.
FORERUN_INLINE Columns by_halves(Columns* x, int rows) {
    while (rows > 1) {
        const int half = rows / 2;
        for (int k = 0; k < half; k++) x[k] = x[k] + x[half + k];
        if (rows % 2) x[half] = x[2 * half];
        rows = half + rows % 2;
    }
    return x[0];
}

// after = before * decay; the sum by halves of after * key. `after` may be `before`.
FORERUN_INLINE Columns decayed(const Columns* before, Columns* after, const float* key, float decay,
                               int rows, Columns* sums) {
    const int half = rows / 2;
    const Columns share = all_columns(decay);
    for (int k = 0; k < half; k++) {
        const Columns a = before[k] * share, b = before[half + k] * share;
        after[k] = a, after[half + k] = b;
        sums[k] = a * all_columns(key[k]) + b * all_columns(key[half + k]);
    }
    if (rows % 2) {
        after[rows - 1] = before[rows - 1] * share;
        sums[half] = after[rows - 1] * all_columns(key[rows - 1]);
    }
    return by_halves(sums, half + rows % 2);
}

// state += key * change.
FORERUN_INLINE void changed(Columns* state, const float* key, Columns change, int rows) {
    for (int k = 0; k < rows; k++) state[k] = state[k] + all_columns(key[k]) * change;
}

// The same, and then the sum by halves of state * query.
FORERUN_INLINE Columns changed_and_read(Columns* state, const float* key, Columns change,
                                        const float* query, int rows, Columns* sums) {
    const int half = rows / 2;
    for (int k = 0; k < half; k++) {
        const Columns a = state[k] + all_columns(key[k]) * change;
        const Columns b = state[half + k] + all_columns(key[half + k]) * change;
        state[k] = a, state[half + k] = b;
        sums[k] = a * all_columns(query[k]) + b * all_columns(query[half + k]);
    }
    if (rows % 2) {
        state[rows - 1] = state[rows - 1] + all_columns(key[rows - 1]) * change;
        sums[half] = state[rows - 1] * all_columns(query[rows - 1]);
    }
    return by_halves(sums, half + rows % 2);
}

// The sums of two rows, `apart` from each other, in `one_pass`.
struct TwoSums {
    Columns read, there;

    FORERUN_MEMBER TwoSums operator+(const TwoSums& other) const {
        return {read + other.read, there + other.there};
    }
};

// Do for a token what `changed_and_read` does and for the token after it what `decayed` does, in one
// pass over the state: a token of a prompt reads and writes it once instead of twice. Returns the
// same sums, for eight rows that are added up before any others are, `rows / 8` apart from each
// other, are added up as they are made. `rows` is a multiple of 8.
FORERUN_INLINE TwoSums one_pass(Columns* state, const float* key, Columns change, const float* query,
                                const float* next_key, float next_decay, int rows, Columns* sums) {
    const int apart = rows / 8;
    const Columns share = all_columns(next_decay);
    Columns* const read = sums;
    Columns* const there = sums + apart;
    for (int k = 0; k < apart; k++) {
        Columns before[8];  // All are read first: rows that are 4 kB apart wait for each other.
        for (int i = 0; i < 8; i++) before[i] = state[k + i * apart];
        const auto one = [&](int i) {
            const int row = k + i * apart;
            const Columns now = before[i] + all_columns(key[row]) * change;
            const Columns next = now * share;
            state[row] = next;
            return TwoSums{now * all_columns(query[row]), next * all_columns(next_key[row])};
        };
        const auto two = [&](int i) { return one(i) + one(i + 4); };
        const TwoSums all = (two(0) + two(2)) + (two(1) + two(3));
        read[k] = all.read;
        there[k] = all.there;
    }
    return {by_halves(read, apart), by_halves(there, apart)};
}

// Columns [first, first + FORERUN_COLUMNS) of one head of the states of one tree.
FORERUN_INLINE void some_columns(const DeltaStep& s, int tree, int head, int first, float* scratch) {
    const int rows = s.key_size, begin = s.start[tree], known = s.known[tree];
    const int rest = s.value_size - first;
    const int columns = rest < FORERUN_COLUMNS ? rest : FORERUN_COLUMNS;
    const int key_head = s.key_head(head);
    const size_t bytes = sizeof(float) * (size_t)columns;
    Columns* const sums = (Columns*)scratch;
    Columns* const root = sums + rows;  // Of known tokens; then those of draft tokens.
    auto stored = [&](int64_t row) {
        return s.states + ((row * s.value_heads + head) * rows) * s.value_size + first;
    };
    auto store = [&](int64_t row) {
        float* at = stored(row);
        for (int k = 0; k < rows; k++) memcpy(at + (size_t)k * s.value_size, &root[k], bytes);
    };
    const float* at = stored(s.slots[tree]);
    for (int k = 0; k < rows; k++) {
        root[k] = Columns{};
        memcpy(&root[k], at + (size_t)k * s.value_size, bytes);
    }
    Columns there{};  // The products of the state with the key of the node that comes.
    bool passed = false;
    for (int node = begin; node < s.start[tree + 1]; node++) {
        const int draft = node - begin - known;
        Columns *state = root, *before = root;
        if (draft >= 0) {
            const int parent = s.parents[node] - begin - known;
            if (parent >= 0) before = root + (size_t)(1 + parent) * rows;
            state = root + (size_t)(1 + draft) * rows;
        }
        const size_t of_key = ((size_t)node * s.key_heads + key_head) * rows;
        const size_t of_head = (size_t)node * s.value_heads + head;
        const size_t of_value = of_head * s.value_size + first;
        const float* key = s.keys + of_key;
        Columns value{};
        memcpy(&value, s.values + of_value, bytes);
        if (!passed) there = decayed(before, state, key, s.decay[of_head], rows, sums);
        const Columns change = (value - there) * all_columns(s.beta[of_head]);
        passed = draft < -1 && s.targets[node] < 0 && s.queries && rows % 8 == 0;
        if (passed) {
            const size_t next = of_key + (size_t)s.key_heads * rows;
            const TwoSums both = one_pass(root, key, change, s.queries + of_key, s.keys + next,
                                          s.decay[of_head + s.value_heads], rows, sums);
            memcpy(s.out + of_value, &both.read, bytes);
            there = both.there;
        } else if (s.queries) {
            const Columns found =
                changed_and_read(state, key, change, s.queries + of_key, rows, sums);
            memcpy(s.out + of_value, &found, bytes);
        } else {
            changed(state, key, change, rows);
        }
        if (draft < 0 && s.targets[node] >= 0) store(s.targets[node]);
        if (draft == -1) store(s.slots[tree]);
    }
}

// See GatedDelta in kernels.h.
static void gated_delta(const DeltaStep& s, int tree, int head, int first, float* scratch) {
    for (int at = first; at < first + kColumns && at < s.value_size; at += FORERUN_COLUMNS) {
        some_columns(s, tree, head, at, scratch);
    }
}

}  // namespace
