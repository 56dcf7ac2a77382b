// Which nodes' logits are computed, and when. A draft token's are needed only where its row's path
// reaches it, which most paths do not: the forward pass computes those of the roots and as
// many more as pay (HeadTimes), `accept` the others as paths reach them.
#include <time.h>

#include <algorithm>

#include "model.h"

namespace forerun {
namespace {

constexpr int64_t kWorthTiming = 1 << 22;  // numbers of an output matrix
// The more rows, the surer some path goes on and needs another product. Gemma 3 270M, 16 rows, 62 % of
// whose weights are the output matrix: acceptance took 8.1 ms a step, 2.3 with these.
constexpr double kReached = 0.4;   // products that a row's draft tokens need, and
constexpr double kProducts = 1.5;  // those of many rows
constexpr double kLearn = 0.2, kForget = 0.998;
// A shorter time says more: memory is slow when it is first written (17 rows of Gemma 28 ms, then 9).
constexpr double kLearnLess = 0.5;

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

}  // namespace

void HeadTimes::observe(int columns, double seconds) {
    if (columns > kMost) return;
    double& known = seconds_[columns];
    // A thread that lost its core says nothing about products.
    const double learn = seconds < known ? kLearnLess : kLearn;
    known = known > 0.0 ? known + learn * (std::min(seconds, 1.5 * known) - known) : seconds;
}

int HeadTimes::worthwhile(int least, int most, int rows) {
    most = std::min(most, kMost);
    if (least >= most || seconds_[least] <= 0.0) return least;
    const double* another = seconds_ + 1;  // What a small product takes, as far as that is known.
    while (*another <= 0.0) another++;
    const double worth = *another * std::min(kProducts, kReached * rows);
    // None takes longer than a larger one.
    for (int columns = most, above = 0; columns > least; columns--) {
        double& known = seconds_[columns];
        if (known > 0.0 && above && seconds_[above] < known) known = seconds_[above];
        if (known > 0.0) above = columns;
    }
    int best = least;
    for (int columns = least + 1; columns <= most; columns++) {
        if (seconds_[columns] <= 0.0) return columns;
        if (seconds_[columns] - seconds_[least] <= worth) {
            best = columns;
        } else {
            seconds_[columns] *= kForget;
        }
    }
    return best;
}

int Step::index_of(int node) const {
    return (int)(std::lower_bound(scored_nodes, scored_nodes + scored, node) - scored_nodes);
}

// What the forward pass computes. Rows that the specification decides ask for their nodes' one by
// one, so these are computed together here.
void Model::plan_logits(const Step& step, const Walk* walk) {
    begin_logits(0);
    if (!step.logits_row || !walk) {
        logits_nodes_.assign(step.scored_nodes, step.scored_nodes + step.scored);
        for (int i = 0; step.logits_row && i < step.scored; i++) step.logits_row[i] = i;
        return;
    }
    for (int i = 0; i < step.scored; i++) {
        const int node = step.scored_nodes[i], row = row_of_[node];
        step.logits_row[i] = -1;
        if (node <= step.root_of(row) || !decides(step, *walk, row)) add_logits_row(step, i);
    }
    add_descendants(step, 1);
}

// What comes next is written from this row of the step's logits on.
void Model::begin_logits(int64_t first) {
    logits_nodes_.clear();
    logits_first_ = first;
}

void Model::add_logits_row(const Step& step, int index) {
    step.logits_row[index] = (int32_t)(logits_first_ + (int64_t)logits_nodes_.size());
    logits_nodes_.push_back(step.scored_nodes[index]);
}

// Adds descendants of the nodes that are computed, one of each row in turn, until there are `times` as
// many and the last column of the product is full: it takes as long as a whole one.
void Model::add_descendants(const Step& step, int times) {
    int columns = ((int)logits_nodes_.size() * times + kLanes - 1) / kLanes;
    if ((int64_t)sizes.vocab * sizes.hidden >= kWorthTiming) {
        const int most = (step.scored - (int)logits_first_ + kLanes - 1) / kLanes;
        columns = head_times_.worthwhile(columns, most, (int)logits_nodes_.size());
    }
    const int wanted = columns * kLanes;
    below_.assign((size_t)step.nodes, 0);
    for (int32_t node : logits_nodes_) below_[node] = 1;
    descended_.resize(step.rows);
    for (int row = 0; row < step.rows; row++) descended_[row] = step.index_of(step.root_of(row));
    for (bool found = true; found;) {
        found = false;
        for (int row = 0; row < step.rows; row++) {
            if ((int)logits_nodes_.size() >= wanted) return;
            found |= add_descendant(step, row);
        }
    }
}

// The row's next descendant of those that are computed. False where it has no more.
bool Model::add_descendant(const Step& step, int row) {
    const int end = step.start[row + 1];
    while (++descended_[row] < step.scored && step.scored_nodes[descended_[row]] < end) {
        const int at = descended_[row], node = step.scored_nodes[at];
        if (below_[node] || !below_[step.parents[node]]) continue;
        below_[node] = 1;
        if (step.logits_row[at] >= 0) continue;
        add_logits_row(step, at);
        return true;
    }
    return false;
}

// Computes what the paths wait for: of each so many nodes, or all that are left. False where none
// waits.
bool Model::compute_path_ends(const Step& step, int nodes) {
    begin_logits(rows_of_logits(step));
    for (int32_t node : path_end_) {
        if (node >= 0) add_logits_row(step, step.index_of(node));
    }
    if (logits_nodes_.empty()) return false;
    add_descendants(step, nodes);
    pool.run([&](int thread) { head(step, thread); });
    return true;
}

int64_t Model::rows_of_logits(const Step& step) {
    if (!step.logits_row) return step.scored;
    return std::count_if(step.logits_row, step.logits_row + step.scored,
                         [](int32_t row) { return row >= 0; });
}

std::string Model::logits_row_of(const Step& step, int node, int& row) {
    const int index = step.index_of(node);
    if (index == step.scored || step.scored_nodes[index] != node || step.nodes != last_nodes_) {
        return "node " + std::to_string(node) + " is none of those scored in the last step";
    }
    if (step.logits_row && step.logits_row[index] < 0) {
        begin_logits(rows_of_logits(step));
        add_logits_row(step, index);
        pool.run([&](int thread) { head(step, thread); });
    }
    row = step.logits_row ? step.logits_row[index] : index;
    return "";
}

std::string Model::copy_final_hidden_states(const int32_t* nodes, int count, float* out) {
    for (int i = 0; i < count; i++) {
        if (nodes[i] < 0 || nodes[i] >= last_nodes_) return "a node that the last step did not run";
    }
    const int hidden = sizes.hidden;
    pool.run([&](int thread) {
        const Share mine(count, thread, pool.threads());
        for (int i = mine.first; i < mine.last; i++) {
            const float* x = &stream_[(size_t)nodes[i] * hidden];
            put_norm(x, final_norm_, sizes.norm_eps, hidden, out + (size_t)i * hidden);
        }
    });
    return "";
}

// The logits of `logits_nodes_`.
void Model::head(const Step& step, int thread) {
    const int rows = (int)logits_nodes_.size();
    float* const logits = step.logits + logits_first_ * sizes.vocab;
    put_normed(logits_nodes_.data(), rows, final_norm_, {&head_}, thread);
    pool.barrier();
    const double begin = now();
    multiply({&head_}, {logits}, normed(), rows, sizes.vocab, false, thread);
    if (thread == 0) head_times_.observe((rows + kLanes - 1) / kLanes, now() - begin);
    if (logit_scale_ != 1.0f || logit_cap_ != 0.0f) bend_logits(logits, rows, thread);
}

// Scaled and softened, some numbers of a row at a time, so that threads have some even of one row.
void Model::bend_logits(float* all, int rows, int thread) {
    constexpr int kPiece = 4096;
    const int pieces = (sizes.vocab + kPiece - 1) / kPiece;
    pool.barrier();
    const Share share(rows * pieces, thread, pool.threads());
    for (int piece = share.first; piece < share.last; piece++) {
        const int first = piece % pieces * kPiece, rest = sizes.vocab - first;
        const int count = rest < kPiece ? rest : kPiece;
        float* logits = all + (size_t)(piece / pieces) * sizes.vocab + first;
        for (int i = 0; logit_scale_ != 1.0f && i < count; i++) logits[i] *= logit_scale_;
        if (logit_cap_ != 0.0f) kernels->soften(logits, count, logit_cap_);
    }
}

}  // namespace forerun
