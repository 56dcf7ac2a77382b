// Trees, heads and columns of states, over threads: none of them meets another.
#include "delta.h"

#include <algorithm>

namespace forerun {

void Delta::run(const DeltaStep& step) {
    int most = 0;
    for (int row = 0; row < step.rows; row++) most = std::max(most, step.drafts(row));
    // Whole vectors, wherever the allocation begins.
    const size_t wanted = delta_scratch(step.key_size, most) + kColumns;
    scratch_.resize((size_t)pool_.most());
    const int blocks = (step.value_size + kColumns - 1) / kColumns;
    const int pieces = step.rows * step.value_heads * blocks;
    pool_.run([&](int id) {
        std::vector<float>& mine = scratch_[(size_t)id];
        if (mine.size() < wanted) mine.resize(wanted);
        void* at = mine.data();
        size_t room = mine.size() * sizeof(float);
        float* scratch = (float*)std::align(kColumns * sizeof(float), sizeof(float), at, room);
        const Share share(pieces, id, pool_.threads());
        for (int piece = share.first; piece < share.last; piece++) {
            const int head = piece / blocks, first = piece % blocks * kColumns;
            kernels_->gated_delta(step, head / step.value_heads, head % step.value_heads, first,
                                  scratch);
        }
    });
}

}  // namespace forerun
