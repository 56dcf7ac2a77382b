// Before a pass of a draft model: checks it, and computes which nodes see which.
#include "draft.h"

#include <algorithm>

namespace forerun {
namespace {

bool within(int64_t value, int64_t end) { return 0 <= value && value < end; }

}  // namespace

Draft::Draft(Model& target, const Sizes& sizes, int slots, bool roots, const Ropes& ropes,
             size_t weight_bytes, int begin)
    : Model(sizes, ropes, weight_bytes, target.kernels, &target.pool),
      slots_(slots),
      depths_(sizes.max_nodes),
      parents_(sizes.max_nodes),
      rows_(sizes.max_nodes),
      roots_(roots),
      most_nodes_(sizes.max_nodes - (roots ? slots : 0)),
      begin_(begin) {}

std::string Draft::step(const DraftStep& step) {
    const std::string fault = check(step);
    if (!fault.empty()) return fault;
    prepare(step);
    const std::function<void(int)> work = [&](int thread) { run(step, thread); };
    pool.run(work);
    return "";
}

std::string Draft::check(const DraftStep& step) {
    if (step.rows < 1 || step.nodes < 1 || step.first < 0 || step.start[0] != 0 ||
        step.start[step.rows] != step.nodes || (int64_t)step.first + step.nodes > most_nodes_) {
        return "draft rows do not cover the nodes, or there are too many";
    }
    if (step.extend && step.first) return "an extension begins at node 0";
    for (int b = 0; b < step.rows; b++) {
        const int64_t kv_len = step.kv_len[b], end = step.start[b + 1];
        if (end <= step.start[b] || end > step.nodes) return "a draft row without nodes";
        if ((step.extend || roots_) && !within(step.slots[b], slots_)) {
            return "a slot that is not there";
        }
        if (!within(kv_len, sizes.context)) return "a draft row beyond the context";
        for (int64_t p = 0; p * sizes.page_size < kv_len; p++) {
            if (p >= step.page_width ||
                !within(step.pages[(int64_t)b * step.page_width + p], sizes.pages)) {
                return "a page that does not exist";
            }
        }
        if (!keeps_window(step.pages + (int64_t)b * step.page_width, (int)kv_len, kv_len)) {
            return "a page of a window that was given back";
        }
        for (int n = step.start[b]; n < end; n++) {
            if (!sound(step, step.sources[n])) return "a source that does not exist";
            if (!step.extend && (step.parents[n] < -1 || step.parents[n] >= step.first)) {
                return "a draft node whose parent is not there";
            }
            if (!within(step.tokens[n], embeddings().channels)) return "a token out of range";
            const int64_t depth = step.extend ? n - step.start[b]
                                  : step.parents[n] < 0 ? roots_ : depths_[step.parents[n]] + 1;
            if (!within(kv_len + depth, sizes.context)) return "a draft node beyond the context";
        }
    }
    if (sizes.vectors && !step.token_rows) return "tokens without their own vectors";
    for (int i = 0; i < step.scored; i++) {
        if (!within(step.scored_nodes[i], step.nodes)) return "a scored node that does not exist";
    }
    return "";
}

// A draft token's depth counts what it sees beyond the cached positions, itself left out: with
// roots, a child of the root has depth 1.
void Draft::prepare(const DraftStep& step) {
    nodes_ = {};
    nodes_.rows = step.rows;
    nodes_.nodes = step.nodes;
    nodes_.start = step.start;
    nodes_.tokens = step.tokens;
    nodes_.token_rows = step.token_rows;
    nodes_.scored = step.scored;
    nodes_.scored_nodes = step.scored_nodes;
    nodes_.logits = step.logits;
    plan_logits(nodes_, nullptr);
    last_nodes_ = step.nodes;
    trunks_.clear();
    window_trunks_.clear();
    trunk_at_.clear();
    size_t steps = 0;  // paths_ must not move while in use
    for (int n = 0; n < step.nodes; n++) {
        const int at = step.first + n;
        parents_[at] = step.extend ? -1 : step.parents[n];
        depths_[at] = parents_[at] < 0 ? (step.extend ? 0 : roots_) : depths_[parents_[at]] + 1;
        steps += depths_[at] + 1;
    }
    paths_.clear();
    paths_.reserve(steps);
    for (int b = 0; b < step.rows; b++) list_places(step, b);
    plan_attention(nodes_);
}

// The places of a row's cached positions from `begin` on.
void Draft::list_cached(const DraftStep& step, int row, int begin) {
    const int32_t* pages = step.pages + (int64_t)row * step.page_width;
    trunk_at_.push_back((int64_t)trunks_.size());
    for (int p = begin; p < step.kv_len[row]; p++) {
        trunks_.push_back(pages[p / sizes.page_size] * sizes.page_size + p % sizes.page_size);
    }
    list_window(pages, step.kv_len[row], step.kv_len[row]);
}

// A node before `begin_` sees itself alone; the others, from there on, what is on their way.
void Draft::list_places(const DraftStep& step, int row) {
    const int kv_len = step.kv_len[row], first = step.start[row], end = step.start[row + 1];
    list_cached(step, row, begin_);
    const bool below_root = roots_ && !step.extend;
    if (below_root) trunks_.push_back(root_place(step.slots[row]));
    for (int n = first; n < end; n++) {
        const int at = step.first + n;
        rows_[n] = row;
        place_of_[n] = scratch_place(at);
        position_[n] = kv_len + (step.extend ? n - first : depths_[at]);
        if (step.extend && position_[n] >= begin_) {
            trunks_.push_back(scratch_place(at));
            sights_[n] = {position_[n] + 1 - begin_, 0, nullptr};
            continue;
        }
        const int trunk = kv_len + below_root - begin_;
        const int sees = position_[n] < begin_ ? 1 : position_[n] + 1 - begin_;
        const int tail = std::min(sees, depths_[at] + 1 - below_root);
        const size_t begin = paths_.size();
        paths_.resize(begin + tail);
        for (int above = at, i = tail - 1; i >= 0; i--, above = parents_[above]) {
            paths_[begin + i] = scratch_place(above);
        }
        sights_[n] = {trunk > 0 ? trunk : 0, tail, paths_.data() + begin};
    }
}

}  // namespace forerun
