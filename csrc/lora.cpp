// LoRA adapters: what they add to a product, row by row. y = W x + B (A x), where B is scaled.
//
// Every product of a stack of matrices first makes A x of the rows that have an adapter, then each
// thread adds B (A x) to the channels that it has multiplied. Both are products of floats, whose bits
// do not depend on what other rows there are; x is what the base's product reads, so that quantised
// weights and their adapters see the same numbers.
#include <algorithm>
#include <tuple>

#include "model.h"

namespace forerun {
namespace {

// The first row behind `row` with another adapter, at most `end`.
int end_of_run(const int32_t* adapters, int row, int end) {
    int last = row + 1;
    while (last < end && adapters[last] == adapters[row]) last++;
    return last;
}

}  // namespace

std::string Model::open_adapters(int count, int rank) {
    if (count < 1 || rank < 1) return "no adapters";
    adapters_ = count;
    rank_ = (rank + kGroup - 1) / kGroup * kGroup;
    return "";
}

std::string Model::set_adapter(int adapter, int layer, int which, const float* down, const float* up,
                               int rank) {
    Matrix* const w = matrix(layer, which);
    if (!w || layer < 0) return "a matrix that is not adapted";
    if (adapter < 0 || adapter >= adapters_ || rank < 1 || rank > rank_) return "no such adapter";
    if (w->adapted < 0) {
        w->adapted = (int32_t)low_ranks_.size();
        low_ranks_.emplace_back(adapters_);
    }
    LowRank& at = low_ranks_[w->adapted][adapter];
    // Ranks are padded with zeros to the greatest, which changes no bit.
    std::vector<float> first((size_t)rank_ * w->inputs), last((size_t)w->channels * rank_);
    std::copy(down, down + (size_t)rank * w->inputs, first.begin());
    for (int c = 0; c < w->channels; c++) {
        std::copy(up + (size_t)c * rank, up + (size_t)(c + 1) * rank, &last[(size_t)c * rank_]);
    }
    for (const auto& [to, rows, channels, inputs] :
         {std::tuple(&at.down, &first, rank_, w->inputs), std::tuple(&at.up, &last, w->channels, rank_)}) {
        to->format = kF32;
        to->channels = channels;
        to->inputs = inputs;
        at.tiles.emplace_back(packed_bytes(kF32, channels, inputs));
        pack(kFileF32, kF32, (const uint8_t*)rows->data(), channels, inputs, 0, to->blocks(),
             at.tiles.back().data());
        to->tiles = at.tiles.back().data();
    }
    return "";
}

// Which adapter each node of the step has; whether one has any.
void Model::prepare_adapters(const Step& step) {
    adapting_ = false;
    if (!adapters_ || !step.adapters) return;
    adapter_of_.assign((size_t)step.nodes, -1);
    for (int row = 0; row < step.rows; row++) {
        if (step.adapters[row] < 0) continue;
        adapting_ = true;
        std::fill(&adapter_of_[step.start[row]], &adapter_of_[0] + step.start[row + 1],
                  step.adapters[row]);
    }
    if (!adapting_) return;
    lowered_.resize((size_t)kStack * sizes.max_nodes * rank_);
    widened_.resize(pool.most());
}

std::string Model::check_adapters(const Step& step) const {
    for (int row = 0; step.adapters && row < step.rows; row++) {
        if (step.adapters[row] < -1 || step.adapters[row] >= adapters_) {
            return "an adapter that is not there (at " + std::to_string(row) + ")";
        }
    }
    return "";
}

const LowRank* Model::low_rank(const Matrix& w, int adapter) const {
    if (w.adapted < 0 || adapter < 0) return nullptr;
    const LowRank& found = low_ranks_[w.adapted][adapter];
    return found.tiles.empty() ? nullptr : &found;
}

// A x of these matrices, for rows of a step. All threads; true where there was something to do, and
// then the threads have met.
bool Model::lower(std::initializer_list<const Matrix*> stack, Inputs x, int rows, int thread) {
    if (!adapting_) return false;
    bool any = false;
    for (const Matrix* w : stack) any |= w->adapted >= 0;
    if (!any) return false;
    const Share mine = columns_of(rows, thread, pool.threads());
    const int32_t* const adapters = x.adapters ? x.adapters : adapter_of_.data();
    int place = 0;
    for (const Matrix* w : stack) {
        float* const to = &lowered_[(size_t)place++ * sizes.max_nodes * rank_];
        for (int row = mine.first, last; row < mine.last; row = last) {
            last = end_of_run(adapters, row, mine.last);
            const LowRank* at = low_rank(*w, adapters[row]);
            if (!at) continue;
            const float* from = floats_of(*w, x, row, last, thread);
            kernels->float_product(at->down, from, last - row, 0, at->down.blocks(),
                                   {to + (size_t)row * rank_, rank_, false});
        }
    }
    pool.barrier();
    return true;
}

// Rows [first, last) of what a matrix reads, as floats.
const float* Model::floats_of(const Matrix& w, Inputs x, int first, int last, int thread) {
    if (is_float(w.format)) return x.floats + (size_t)first * w.inputs;
    Floats& room = widened_[thread];
    room.resize((size_t)(last - first) * w.inputs);
    for (int row = first; row < last; row++) {
        const Group* column = x.groups + (int64_t)(row / kLanes) * w.groups();
        for (int i = 0; i < w.inputs; i++) {
            const Group& group = column[i / kGroup];
            room[(size_t)(row - first) * w.inputs + i] =
                group.scale[row % kLanes] * group.q[row % kLanes][i % kGroup];
        }
    }
    return room.data();
}

// Adds B (A x) to blocks [first, last) of matrix number `place` of the stack that `lower` saw.
void Model::raise(const Matrix& w, int place, Inputs x, int rows, int first, int last,
                  Target out) const {
    if (first >= last) return;
    const int32_t* const adapters = x.adapters ? x.adapters : adapter_of_.data();
    const float* const from = &lowered_[(size_t)place * sizes.max_nodes * rank_];
    for (int row = 0, end; row < rows; row = end) {
        end = end_of_run(adapters, row, rows);
        const LowRank* at = low_rank(w, adapters[row]);
        if (!at) continue;
        kernels->float_product(at->up, from + (size_t)row * rank_, end - row, first, last,
                               {out.data + (size_t)row * out.stride, out.stride, true});
    }
}

}  // namespace forerun
