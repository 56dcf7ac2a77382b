// Before a step: checks it, and computes which nodes see which.
#include <string>

#include "model.h"

namespace forerun {
namespace {

bool within(int64_t value, int64_t low, int64_t high) { return low <= value && value < high; }

}  // namespace

std::string Model::check(const Step& step) const {
    const auto say = [](const char* what, int64_t where) {
        return std::string(what) + " (at " + std::to_string(where) + ")";
    };
    if (step.rows < 1 || step.start[0] != 0 || step.start[step.rows] != step.nodes) {
        return "row starts do not cover the nodes";
    }
    if (!within(step.nodes, 1, (int64_t)sizes.max_nodes + 1)) {
        return say("more nodes than the step may have", step.nodes);
    }
    for (int b = 0; b < step.rows; b++) {
        const int first = step.start[b], end = step.start[b + 1], kv_len = step.kv_len[b];
        const int64_t trunk = (int64_t)kv_len + step.known[b];
        if (end <= first || end > step.nodes || !within(step.known[b], 1, end - first + 1)) {
            return say("a row without known tokens", b);
        }
        if (!within(kv_len, 0, sizes.context)) return say("a row beyond the context", b);
        if (trunk > (int64_t)step.page_width * sizes.page_size) {
            return say("a row longer than its pages", b);
        }
        for (int p = 0; p * (int64_t)sizes.page_size < trunk; p++) {
            if (!within(step.pages[(int64_t)b * step.page_width + p], 0, sizes.pages)) {
                return say("a page that does not exist, row", b);
            }
        }
        if (!keeps_window(step.pages + (int64_t)b * step.page_width, kv_len, trunk)) {
            return say("a page of a window that was given back, row", b);
        }
        for (int n = first; n < end; n++) {
            if (!within(step.tokens[n], 0, sizes.vocab)) return say("a token out of range", n);
            if (!within((int64_t)kv_len + step.depth[n], 0, sizes.context)) {
                return say("a node beyond the context", n);
            }
            const int parent = step.parents[n], known = n - first < step.known[b];
            const bool sound = known ? parent == (n == first ? -1 : n - 1)
                                     : within(parent, first + step.known[b] - 1, n);
            if (!sound) return say("a parent that is not above its child", n);
            const int above = n == first ? -1 : step.depth[parent];
            if (step.depth[n] != above + 1) return say("a depth that is not its parent's + 1", n);
        }
    }
    for (int b = 0; sizes.recurrent && b < step.rows; b++) {
        if (!within(step.state_rows[b], 0, sizes.states)) return say("a state that is not there, row", b);
    }
    for (int n = 0; sizes.recurrent && n < step.nodes; n++) {
        if (!within(step.state_targets[n], -1, sizes.states)) return say("a state's target", n);
    }
    if (sizes.vectors && !step.token_rows) return "tokens without their own vectors";
    if (const std::string fault = check_adapters(step); !fault.empty()) return fault;
    for (int i = 0; i < step.scored; i++) {
        if (!within(step.scored_nodes[i], 0, step.nodes)) return say("a scored node", i);
    }
    return "";
}

void Model::prepare(const Step& step) {
    trunks_.clear();
    window_trunks_.clear();
    trunk_at_.clear();
    size_t draft_tokens = 0;  // an upper bound of what paths_ will hold: it must not move while in
                              // use
    for (int b = 0; b < step.rows; b++) {
        const int root = step.start[b] + step.known[b] - 1;
        for (int n = root + 1; n < step.start[b + 1]; n++) {
            draft_tokens += step.depth[n] - step.depth[root];
        }
    }
    paths_.clear();
    paths_.reserve(draft_tokens);
    for (int b = 0; b < step.rows; b++) list_places(step, b);
    last_nodes_ = step.nodes;
    if (sizes.recurrent) prepare_nets(step);
    prepare_adapters(step);
    plan_attention(step);
}

std::string Model::commit_paths(const int32_t* pages, int page_width, const int32_t* nodes,
                                int count) {
    std::vector<int32_t> slots(count), window_slots(sizes.window_pages ? count : 0);
    for (int i = 0; i < count; i++) {
        if (!within(nodes[i], 0, last_nodes_)) return "a node that is not of the last step";
        const int position = position_[nodes[i]], line = position / sizes.page_size;
        const int64_t at = (int64_t)row_of_[nodes[i]] * page_width + line;
        if (line >= page_width || !within(pages[at], 0, sizes.pages)) {
            return "a page that does not exist";
        }
        slots[i] = pages[at] * sizes.page_size + position % sizes.page_size;
        if (!sizes.window_pages) continue;
        const int32_t* row = pages + (int64_t)row_of_[nodes[i]] * page_width;
        if (!keeps_window(row, position, position + 1)) return "a page of a window that was given back";
        window_slots[i] = window_place(row, position);
    }
    commit(nodes, slots.data(), count, window_slots.data());
    for (int i = 0; !row_slots_.empty() && i < count; i++) store_in_ring(nodes[i]);
    return "";
}

// The first of a row's kv_len positions that window pages still hold.
int Model::first_kept(int kv_len) const {
    return kv_len > lender_->sizes.window ? kv_len - lender_->sizes.window : 0;
}

// Whether all positions of a row from there up to `end` have window pages, if layers have any.
bool Model::keeps_window(const int32_t* pages, int kv_len, int64_t end) const {
    const Model& keeper = *lender_;
    if (!keeper.sizes.window_pages) return true;
    if (!keeper.window_pages_) return false;
    const int size = sizes.page_size;
    for (int64_t p = first_kept(kv_len) / size; p * size < end; p++) {
        if (!within(keeper.window_pages_[pages[p]], 0, keeper.sizes.window_pages)) return false;
    }
    return true;
}

int32_t Model::window_place(const int32_t* pages, int position) const {
    const int size = sizes.page_size;
    const int32_t page = lender_->window_pages_[pages[position / size]];
    return (int32_t)((lender_->missing_pages() + page) * size + position % size);
}

// The places in window pages of the row that trunks_ ends with.
void Model::list_window(const int32_t* pages, int kv_len, int end) {
    if (!lender_->sizes.window_pages) return;
    window_trunks_.resize(trunk_at_.back() + end);
    for (int p = first_kept(kv_len); p < end; p++) {
        window_trunks_[trunk_at_.back() + p] = window_place(pages, p);
    }
}

// Known nodes become permanent whatever happens: their keys and values go to their pages at once.
// The row's trunk is the slots of its prefix and of its known chain. Draft tokens go to scratch
// places;
// a draft token sees the trunk and the places from below the root down to itself.
void Model::list_places(const Step& step, int row) {
    const int first = step.start[row], kv_len = step.kv_len[row];
    const int root = first + step.known[row] - 1;
    const int32_t scratch = (int32_t)(places_ - sizes.max_nodes);
    const int32_t* pages = step.pages + (int64_t)row * step.page_width;
    trunk_at_.push_back((int64_t)trunks_.size());
    for (int p = 0; p < kv_len + step.known[row]; p++) {
        trunks_.push_back(pages[p / sizes.page_size] * sizes.page_size + p % sizes.page_size);
    }
    list_window(pages, kv_len, kv_len + step.known[row]);
    for (int n = first; n < step.start[row + 1]; n++) {
        position_[n] = kv_len + step.depth[n];
        row_of_[n] = row;
        if (sizes.window_pages) {
            window_place_of_[n] = n <= root ? window_place(pages, position_[n]) : scratch + n;
        }
        if (n <= root) {
            place_of_[n] = trunks_[trunk_at_.back() + position_[n]];
            sights_[n] = {position_[n] + 1, 0, nullptr};
            continue;
        }
        place_of_[n] = scratch + n;
        const int tail = step.depth[n] - step.depth[root];
        const size_t begin = paths_.size();
        paths_.resize(begin + tail);
        for (int at = n, i = tail - 1; i >= 0; i--, at = step.parents[at]) {
            paths_[begin + i] = scratch + at;
        }
        sights_[n] = {kv_len + step.known[row], tail, paths_.data() + begin};
    }
}

}  // namespace forerun
