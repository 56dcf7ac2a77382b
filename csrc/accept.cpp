// Acceptance of a step where nothing but the temperature shapes the choice:
// forerun/speculative/accept.py.
#include <algorithm>
#include <cstring>

#include "model.h"

namespace forerun {
namespace {

constexpr int64_t kWorthSharing = 1 << 18;  // logits from which on the pool's threads share them

}  // namespace

std::string Model::accept(const Step& step, Walk& walk) {
    for (int row = 0; row < step.rows; row++) {
        if (walk.slots[row] < 0 || walk.slots[row] >= walk.all_slots) {
            return "slot " + std::to_string(walk.slots[row]) + " does not exist";
        }
    }
    memset(walk.choice, -1, sizeof(int32_t) * step.nodes);
    const auto rows = [&](const Share& share) {
        for (int row = share.first; row < share.last; row++) {
            if (!accept_row(step, walk, row)) {
                const int first = step.start[row];
                memset(walk.choice + first, -1, sizeof(int32_t) * (step.start[row + 1] - first));
            }
        }
    };
    if ((int64_t)step.rows * sizes.vocab < kWorthSharing) {
        rows(Share(step.rows, 0, 1));
    } else {
        pool.run([&](int thread) { rows(Share(step.rows, thread, pool.threads())); });
    }
    if (walk.committed < 0) return "";
    std::vector<int32_t> accepted;
    for (int row = 0; row < step.rows; row++) {
        for (int n = step.start[row] + step.known[row]; n < step.start[row + 1]; n++) {
            if (walk.choice[n] >= 0) accepted.push_back(n);
        }
    }
    walk.committed = (int32_t)accepted.size();
    if (accepted.empty()) return "";
    return commit_paths(step.pages, step.page_width, accepted.data(), walk.committed);
}

// False where the specification has to decide the row.
bool Model::accept_row(const Step& step, const Walk& walk, int row) const {
    const int slot = walk.slots[row];
    const float temperature = walk.plain[row] ? walk.temperature[slot] : -1.0f;
    const int root = step.start[row] + step.known[row] - 1, end = step.start[row + 1];
    // Scored nodes ascend, so those of a row from its root on are neighbours.
    const int32_t* const last = step.scored_nodes + step.scored;
    const int32_t* const at = std::lower_bound(step.scored_nodes, last, root);
    if (!(temperature >= 0) || last - at < end - root || at[end - 1 - root] != end - 1) return false;
    const float* const logits = step.logits + (at - step.scored_nodes) * (int64_t)sizes.vocab;
    int node = root;
    const int decided = step.kv_len[row] + step.known[row];
    for (uint32_t position = decided - walk.prompt_len[slot];; position++) {
        const int32_t token = kernels->choose(logits + (node - root) * (int64_t)sizes.vocab,
                                              sizes.vocab, temperature, walk.seed[slot], position);
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
