// Acceptance of a step where nothing but the temperature and a mask shape the choice:
// forerun/speculative/accept.py.
#include <algorithm>
#include <cstring>

#include "model.h"

namespace forerun {
namespace {

constexpr int64_t kWorthSharing = 1 << 18;  // logits from which on the pool's threads share them

}  // namespace

std::string Model::accept(const Step& step, const Walk& walk) {
    for (int row = 0; row < step.rows; row++) {
        if (walk.slots[row] < 0 || walk.slots[row] >= walk.all_slots) {
            return "slot " + std::to_string(walk.slots[row]) + " does not exist";
        }
    }
    memset(walk.choice, -1, sizeof(int32_t) * step.nodes);
    const auto rows = [&](const Share& share, Floats& room) {
        for (int row = share.first; row < share.last; row++) {
            if (!accept_row(step, walk, row, room)) {
                const int first = step.start[row];
                memset(walk.choice + first, -1, sizeof(int32_t) * (step.start[row + 1] - first));
            }
        }
    };
    if ((int64_t)step.rows * sizes.vocab < kWorthSharing) {
        rows(Share(step.rows, 0, 1), scratch_[0]);
    } else {
        pool.run([&](int thread) {
            rows(Share(step.rows, thread, pool.threads()), scratch_[thread]);
        });
    }
    return "";
}

// The choice among all tokens, or among those that are `allowed`; -1 where the specification has to
// make it: some logit is not finite, or nothing is allowed.
int32_t Model::choose(const float* logits, const uint32_t* allowed, float temperature, uint64_t seed,
                      uint32_t position, Floats& room) const {
    const int count = sizes.vocab;
    if (!allowed) return kernels->choose(logits, count, temperature, seed, position);
    if (kernels->choose(logits, count, 0.0f, 0, 0) < 0) return -1;
    if ((int)room.size() < count) room.resize(count);
    kernels->exclude(logits, allowed, count, room.data());
    const int32_t token = kernels->choose(room.data(), count, temperature, seed, position);
    return token >= 0 && (allowed[token / 32] >> token % 32 & 1) ? token : -1;
}

// False where the specification has to decide the row.
bool Model::accept_row(const Step& step, const Walk& walk, int row, Floats& room) const {
    const int slot = walk.slots[row];
    const float temperature = walk.samples[row] ? walk.temperature[slot] : -1.0f;
    const int root = step.start[row] + step.known[row] - 1, end = step.start[row + 1];
    // Scored nodes ascend, so those of a row from its root on are neighbours.
    const int32_t* const last = step.scored_nodes + step.scored;
    const int32_t* const at = std::lower_bound(step.scored_nodes, last, root);
    if (!(temperature >= 0) || last - at < end - root || at[end - 1 - root] != end - 1) return false;
    const float* const logits = step.logits + (at - step.scored_nodes) * (int64_t)sizes.vocab;
    int node = root;
    const int decided = step.kv_len[row] + step.known[row];
    for (uint32_t position = decided - walk.prompt_len[slot];; position++) {
        const int mask = walk.mask_row ? walk.mask_row[node] : -1;
        const int32_t token = choose(logits + (node - root) * (int64_t)sizes.vocab,
                                     mask < 0 ? nullptr : walk.masks + (int64_t)mask * walk.mask_words,
                                     temperature, walk.seed[slot], position, room);
        if (token < 0) return false;
        walk.choice[node] = token;
        int child = node + 1;
        while (child < end && !(step.parents[child] == node && step.tokens[child] == token)) {
            child++;
        }
        if (child == end) return true;
        node = child;
    }
}

}  // namespace forerun
