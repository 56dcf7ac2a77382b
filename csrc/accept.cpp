// Acceptance of a step where nothing but the temperature, cut-offs and a mask shape the choice:
// forerun/speculative/accept.py.
#include <cstring>

#include "model.h"

namespace forerun {
namespace {

constexpr int64_t kWorthSharing = 1 << 18;  // logits from which on the pool's threads share them

}  // namespace

std::string Model::check_slots(const Step& step, const Walk& walk) {
    for (int row = 0; row < step.rows; row++) {
        if (walk.slots[row] < 0 || walk.slots[row] >= walk.all_slots) {
            return "slot " + std::to_string(walk.slots[row]) + " does not exist";
        }
    }
    return "";
}

// Whether a row is decided here: nothing but these shape its choices, and the logits
// of all its nodes from the root on may be asked for.
bool Model::decides(const Step& step, const Walk& walk, int row) {
    const int root = step.root_of(row), end = step.start[row + 1];
    const int last = step.index_of(root) + end - 1 - root;
    return walk.samples[row] && last < step.scored && step.scored_nodes[last] == end - 1;
}

std::string Model::accept(const Step& step, const Walk& walk) {
    const std::string fault = check_slots(step, walk);
    if (!fault.empty()) return fault;
    if (step.logits_row && step.nodes != last_nodes_) return "it is not the last step";
    memset(walk.choice, -1, sizeof(int32_t) * step.nodes);
    path_end_.resize(step.rows);
    for (int row = 0; row < step.rows; row++) {
        path_end_[row] = decides(step, walk, row) ? step.root_of(row) : -1;
    }
    // Twice as many each time: a long path does not read the output matrix once for each column.
    for (int nodes = 1;; nodes *= 2) {
        extend_paths(step, walk);
        if (!compute_path_ends(step, nodes)) return "";
    }
}

void Model::extend_paths(const Step& step, const Walk& walk) {
    likely_.resize(pool.most());
    const auto rows = [&](const Share& share, Likely& likely) {
        for (int row = share.first; row < share.last; row++) {
            if (path_end_[row] >= 0) extend_path(step, walk, row, likely);
        }
    };
    if ((int64_t)step.rows * sizes.vocab < kWorthSharing) {
        rows(Share(step.rows, 0, 1), likely_[0]);
    } else {
        pool.run([&](int thread) {
            rows(Share(step.rows, thread, pool.threads()), likely_[thread]);
        });
    }
}

// The choice of a slot's request among all tokens, or among those that are `allowed`; -1 where the
// specification has to make it: some logit is not finite, nothing is allowed, or a cut-off is close.
int32_t Model::choose(const Walk& walk, int slot, const float* logits, const uint32_t* allowed,
                      uint32_t position, Likely& likely) const {
    const int count = sizes.vocab;
    const float temperature = walk.temperature[slot];
    const uint64_t seed = walk.seed[slot];
    const CutOffs& cut = walk.cut_offs[slot];
    const bool cuts = temperature > 0.0f && !cut.off();
    if (!allowed && !cuts) return kernels->choose(logits, count, temperature, seed, position);
    if (kernels->choose(logits, count, 0.0f, 0, 0) < 0) return -1;
    if (allowed) {
        likely.allowed.resize(count);
        kernels->exclude(logits, allowed, count, likely.allowed.data());
        logits = likely.allowed.data();
    }
    const int32_t token = cuts ? choose_left(cut, logits, temperature, seed, position, likely)
                               : kernels->choose(logits, count, temperature, seed, position);
    return token < 0 || !allowed || (allowed[token / 32] >> token % 32 & 1) ? token : -1;
}

// A row's path goes on as far as logits are computed; then path_end_ is the node whose are not, or
// -1 where the path is over.
void Model::extend_path(const Step& step, const Walk& walk, int row, Likely& likely) {
    const int slot = walk.slots[row], root = step.root_of(row), end = step.start[row + 1];
    const int first = step.index_of(root);  // A row's scored nodes from its root on are neighbours.
    const int decided = step.kv_len[row] + step.known[row] - walk.prompt_len[slot];
    int node = path_end_[row];
    while (node < end) {
        const int at = first + node - root;
        const int64_t logits_row = step.logits_row ? step.logits_row[at] : at;
        path_end_[row] = node;
        if (logits_row < 0) return;
        const int mask = walk.mask_row ? walk.mask_row[node] : -1;
        const int32_t token = choose(walk, slot, step.logits + logits_row * sizes.vocab,
                                     mask < 0 ? nullptr : walk.masks + (int64_t)mask * walk.mask_words,
                                     (uint32_t)(decided + step.depth[node] - step.depth[root]), likely);
        if (token < 0) {  // The specification has to decide the row.
            memset(walk.choice + step.start[row], -1, sizeof(int32_t) * (end - step.start[row]));
            break;
        }
        walk.choice[node] = token;
        int child = node + 1;
        while (child < end && !(step.parents[child] == node && step.tokens[child] == token)) {
            child++;
        }
        node = child;
    }
    path_end_[row] = -1;
}

}  // namespace forerun
