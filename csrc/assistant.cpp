// One pass of Gemma 4's assistant (forerun/drafts/assistant.py).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "draft.h"

namespace forerun {

Assistant::Assistant(Model& target, const Sizes& sizes, const AssistantKind& kind,
                     const Ropes& ropes, size_t weight_bytes)
    : Draft(target, sizes, kind.slots, false, ropes, weight_bytes),
      target_(target),
      kind_(kind),
      width_(target.sizes.hidden) {
    lender_ = &target;
    const size_t nodes = sizes.max_nodes, columns = (nodes + kLanes - 1) / kLanes;
    const auto groups = [](int width) { return (size_t)(width + kGroup - 1) / kGroup; };
    inputs_.resize(nodes * 2 * width_);
    inputs_q_.resize(columns * groups(2 * width_));
    outputs_.resize(nodes * width_);
    kept_.resize((size_t)kind.slots * width_);
    cluster_scores_.resize(nodes * kind.clusters);
    if (kind.clusters) alone_q_.resize(nodes * groups(sizes.hidden));
}

Matrix* Assistant::matrix(int layer, int which) {
    if (layer != -1 || which < 2) return Model::matrix(layer, which);
    return which == 2 ? &before_ : which == 3 ? &behind_ : which == 4 ? &centroids_ : nullptr;
}

bool Assistant::sound(const DraftStep& step, int source) const {
    const auto within = [](int64_t value, int64_t end) { return 0 <= value && value < end; };
    if (step.extend) return step.features || within(source, target_.sizes.max_nodes);
    return source < 0 ? within(-1 - (int64_t)source, slots_) : source < step.first;
}

// All nodes of a row stand at one position, the root's, and see what the target has before it.
void Assistant::list_places(const DraftStep& step, int row) {
    list_cached(step, row, 0);
    for (int n = step.start[row]; n < step.start[row + 1]; n++) {
        rows_[n] = row;
        position_[n] = step.kv_len[row];
        sights_[n] = {step.kv_len[row], 0, nullptr};
    }
}

void Assistant::run(const DraftStep& step, int thread) {
    read(step, thread);
    for (int layer = 0; layer < sizes.layers; layer++) {
        attention_layer(nodes_, layer, thread);
        ffn_layer(nodes_, layer, thread);
    }
    keep(step, thread);
    if (step.scored && kind_.clusters) {
        score_clusters(step, thread);
    } else if (step.scored) {
        score(step, thread);
    }
}

// The embedding beside the hidden state, and their product into the residual stream.
void Assistant::read(const DraftStep& step, int thread) {
    const int wide = 2 * width_;
    const float scale = target_.embedding_scale();
    const Share mine = columns_of(step.nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        float* x = &inputs_[(size_t)n * wide];
        unpack_row(*target_.matrix(-1, 0), step.tokens[n], x);
        for (int i = 0; i < width_; i++) x[i] *= scale;
        put_hidden(step, n, x + width_);
        if (!is_float(before_.format)) {
            kernels->quantise(x, wide, column(inputs_q_.data(), n, wide), n % kLanes);
        }
        put_angles(n);
    }
    pool.barrier();
    multiply({&before_}, {&stream_[0]}, {inputs_q_.data(), inputs_.data()}, step.nodes,
             sizes.hidden, false, thread);
    pool.barrier();
}

// A node's hidden state: the target's after its final norm, or what an earlier pass has left.
void Assistant::put_hidden(const DraftStep& step, int node, float* out) const {
    const int source = step.sources[node];
    const size_t width = width_;
    if (!step.extend) {
        const float* from = source < 0 ? &kept_[(-1 - (int64_t)source) * width]
                                       : &outputs_[(size_t)source * width];
        memcpy(out, from, sizeof(float) * width);
        return;
    }
    const float* x = step.features ? step.features + node * width : target_.aux_hidden_states(source);
    put_norm(x, *target_.vector(-1, 0), target_.sizes.norm_eps, width_, out);
}

// What later steps receive, and the stream after the final norm, which logits are made of.
void Assistant::keep(const DraftStep& step, int thread) {
    const size_t width = width_;
    float* outputs = &outputs_[step.first * width];
    put_normed(nullptr, step.nodes, final_norm_, {&behind_}, thread);
    pool.barrier();
    multiply({&behind_}, {outputs}, normed(), step.nodes, width_, false, thread);
    pool.barrier();
    const Share mine = columns_of(step.nodes, thread, pool.threads());
    for (int n = mine.first; step.extend && n < mine.last; n++) {
        memcpy(&kept_[step.slots[rows_[n]] * width], outputs + n * width, sizeof(float) * width);
    }
}

void Assistant::score(const DraftStep& step, int thread) {
    put_normed(step.scored_nodes, step.scored, final_norm_, {&head_}, thread);
    pool.barrier();
    multiply({&head_}, {step.logits}, normed(), step.scored, sizes.vocab, false, thread);
}

// Logits of the tokens of the clusters that score most: logits[scored][top_k * tokens of a cluster].
void Assistant::score_clusters(const DraftStep& step, int thread) {
    const int hidden = sizes.hidden, each = sizes.vocab / kind_.clusters, top_k = kind_.top_k;
    const int groups = (hidden + kGroup - 1) / kGroup;
    put_normed(step.scored_nodes, step.scored, final_norm_, {&centroids_, &head_}, thread);
    pool.barrier();
    multiply({&centroids_}, {&cluster_scores_[0]}, normed(), step.scored, kind_.clusters, false,
             thread);
    pool.barrier();
    const Share mine(step.scored, thread, pool.threads());
    for (int i = mine.first; i < mine.last; i++) {
        choose_clusters(&cluster_scores_[(size_t)i * kind_.clusters], step.clusters + i * top_k);
        if (is_float(head_.format)) continue;
        const size_t node = step.scored_nodes[i];
        kernels->norm_quantise(&stream_[node * hidden], final_norm_,
                               kernels->inverse_rms(&stream_[node * hidden], hidden, sizes.norm_eps),
                               hidden, &alone_q_[(size_t)i * groups], 0);
    }
    pool.barrier();
    const Share products(step.scored * top_k, thread, pool.threads());
    for (int at = products.first; at < products.last; at++) {
        const int row = at / top_k, first = step.clusters[at] * each;
        float* out = step.logits + (int64_t)at * each - first;
        const Inputs x = {is_float(head_.format) ? nullptr : &alone_q_[(size_t)row * groups],
                          &hidden_f_[(size_t)row * hidden]};
        multiply_blocks(head_, x, 1, first / kBlock, (first + each) / kBlock, {out, 0, false});
    }
}

// The best clusters, best first; of equal ones the first.
void Assistant::choose_clusters(const float* scores, int32_t* chosen) const {
    std::vector<int32_t> order(kind_.clusters);
    std::iota(order.begin(), order.end(), 0);
    const auto better = [&](int32_t a, int32_t b) {
        return scores[a] > scores[b] || (!(scores[a] < scores[b]) && a < b);
    };
    std::partial_sort(order.begin(), order.begin() + kind_.top_k, order.end(), better);
    std::copy_n(order.begin(), kind_.top_k, chosen);
}

}  // namespace forerun
