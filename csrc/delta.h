// A gated delta net's states (forerun/networks/layer_spec.py, GatedDelta), advanced node by node.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace forerun {

constexpr int kColumns = 16;  // of a state, that are advanced together

// One layer's share of a step; native.py has the same structure. Trees of nodes, each a chain of
// known tokens first and then its draft tokens; nothing overlaps.
struct DeltaStep {
    int32_t rows, key_heads, value_heads, key_size, value_size;
    int32_t tiled;           // value head j has key head j % key_heads; else those of one key head
                             // follow each other
    const int32_t* start;    // [rows + 1] nodes of each tree
    const int32_t* known;    // [rows] known tokens of each
    const int32_t* parents;  // [nodes] numbers of nodes
    const int64_t* slots;    // [rows] whose state a tree begins with, and its root's becomes
    const int64_t* targets;  // [nodes] where a known node's state goes as well, or -1
    float* states;           // [...][value_heads][key_size][value_size]
    const float* queries;    // [nodes][key_heads][key_size]; null: nothing is read
    const float* keys;       // the same
    const float* values;     // [nodes][value_heads][value_size]
    const float* decay;      // [nodes][value_heads]
    const float* beta;       // the same
    float* out;              // as values: what each node reads

    FORERUN_MEMBER int key_head(int head) const {
        return tiled ? head % key_heads : head / (value_heads / key_heads);
    }
    FORERUN_MEMBER int drafts(int row) const { return start[row + 1] - start[row] - known[row]; }
};

// Floats of scratch for a tree with so many draft tokens: a state of kColumns for each and one of the
// known tokens, and one for sums.
static inline size_t delta_scratch(int key_size, int drafts) {
    return (size_t)(drafts + 2) * key_size * kColumns;
}

// Who advances states: kernels and threads. One caller at a time.
class Delta {
public:
    Delta(const Kernels* kernels, int threads) : kernels_(kernels), pool_(threads) {}
    void run(const DeltaStep& step);

private:
    const Kernels* kernels_;
    Pool pool_;
    std::vector<std::vector<float>> scratch_;  // of each thread
};

}  // namespace forerun
