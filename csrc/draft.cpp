// One pass of a draft head: fuse, read beside the embedding, one layer, output head.
#include "draft.h"

#include <cmath>
#include <cstring>

namespace forerun {

Draft::Draft(Model& target, const Sizes& sizes, const HeadKind& kind, const float* frequencies,
             size_t weight_bytes)
    : Model(sizes, frequencies, weight_bytes, target.kernels, &target.pool),
      target_(target),
      kind_(kind),
      feature_norms_(kind.features) {
    const size_t nodes = sizes.max_nodes, columns = (nodes + kLanes - 1) / kLanes;
    const auto groups = [](int width) { return (size_t)(width + kGroup - 1) / kGroup; };
    fuse_q_.resize(columns * groups(kind.features * kind.width));
    input_q_.resize(columns * groups(2 * sizes.hidden));
    embedded_.resize(nodes * sizes.hidden);
    outputs_.resize(nodes * sizes.hidden);
    kept_.resize((size_t)kind.slots * sizes.hidden);
    depths_.resize(nodes);
    parents_.resize(nodes);
    rows_.resize(nodes);
}

Matrix* Draft::matrix(int layer, int which) {
    return layer == -1 && which == 2 ? &fuse_ : Model::matrix(layer, which);
}

const float** Draft::vector(int layer, int which) {
    if (layer != -1 || which == 0) return Model::vector(layer, which);
    if (which == 1) return &hidden_norm_;
    if (which == 2) return &joint_norm_;
    return which >= 3 && which < 3 + kind_.features ? &feature_norms_[which - 3] : nullptr;
}

std::string Draft::step(const DraftStep& step) {
    const std::string fault = check(step);
    if (!fault.empty()) return fault;
    prepare(step);
    const std::function<void(int)> work = [&](int thread) { run(step, thread); };
    pool.run(work);
    return "";
}

std::string Draft::check(const DraftStep& step) const {
    const auto within = [](int64_t value, int64_t end) { return 0 <= value && value < end; };
    if (step.rows < 1 || step.nodes < 1 || step.first < 0 || step.start[0] != 0 ||
        step.start[step.rows] != step.nodes ||
        (int64_t)step.first + step.nodes > sizes.max_nodes) {
        return "draft rows do not cover the nodes, or there are too many";
    }
    if (step.extend && step.first) return "an extension begins at node 0";
    for (int b = 0; b < step.rows; b++) {
        const int64_t kv_len = step.kv_len[b], end = step.start[b + 1];
        if (end <= step.start[b] || end > step.nodes) return "a draft row without nodes";
        if (step.extend && !within(step.slots[b], kind_.slots)) return "a slot that is not there";
        if (!within(kv_len, sizes.context)) return "a draft row beyond the context";
        for (int64_t p = 0; p * sizes.page_size < kv_len; p++) {
            if (p >= step.page_width ||
                !within(step.pages[(int64_t)b * step.page_width + p], sizes.pages)) {
                return "a page that does not exist";
            }
        }
        for (int n = step.start[b]; n < end; n++) {
            const int source = step.sources[n];
            const bool sound = step.extend ? step.features || within(source, target_.sizes.max_nodes)
                               : source < 0 ? within(-1 - (int64_t)source, kind_.slots)
                                            : source < step.first;
            if (!sound) return "a source that does not exist";
            if (!step.extend && (step.parents[n] < -1 || step.parents[n] >= step.first)) {
                return "a draft node whose parent is not there";
            }
            if (!within(step.tokens[n], target_.sizes.vocab)) return "a token out of range";
            const int64_t depth = step.extend ? n - step.start[b]
                                  : step.parents[n] < 0 ? 0 : depths_[step.parents[n]] + 1;
            if (!within(kv_len + depth, sizes.context)) return "a draft node beyond the context";
        }
    }
    for (int i = 0; i < step.scored; i++) {
        if (!within(step.scored_nodes[i], step.nodes)) return "a scored node that does not exist";
    }
    return "";
}

void Draft::prepare(const DraftStep& step) {
    nodes_ = {};
    nodes_.rows = step.rows;
    nodes_.nodes = step.nodes;
    nodes_.start = step.start;
    const int32_t scratch = (int32_t)(places_ - sizes.max_nodes);
    trunks_.clear();
    trunk_at_.clear();
    size_t steps = 0;
    for (int n = 0; n < step.nodes; n++) {
        const int at = step.first + n;
        parents_[at] = step.extend ? -1 : step.parents[n];
        depths_[at] = parents_[at] < 0 ? 0 : depths_[parents_[at]] + 1;
        steps += depths_[at] + 1;
    }
    paths_.clear();
    paths_.reserve(steps);
    for (int b = 0; b < step.rows; b++) {
        const int kv_len = step.kv_len[b], first = step.start[b], end = step.start[b + 1];
        const int32_t* pages = step.pages + (int64_t)b * step.page_width;
        trunk_at_.push_back((int64_t)trunks_.size());
        for (int p = 0; p < kv_len; p++) {
            trunks_.push_back(pages[p / sizes.page_size] * sizes.page_size + p % sizes.page_size);
        }
        for (int n = first; n < end; n++) {
            const int at = step.first + n;
            rows_[n] = b;
            place_of_[n] = scratch + at;
            if (step.extend) {
                trunks_.push_back(scratch + at);
                position_[n] = kv_len + n - first;
                sights_[n] = {position_[n] + 1, 0, nullptr};
                continue;
            }
            position_[n] = kv_len + depths_[at];
            const int tail = depths_[at] + 1;
            const size_t begin = paths_.size();
            paths_.resize(begin + tail);
            for (int above = at, i = tail - 1; i >= 0; i--, above = parents_[above]) {
                paths_[begin + i] = scratch + above;
            }
            sights_[n] = {kv_len, tail, &paths_[begin]};
        }
    }
    plan_attention(nodes_);
}

void Draft::run(const DraftStep& step, int thread) {
    fuse(step, thread);
    read(step, thread);
    mix(nodes_, 0, kind_.first_kind ? hidden_q_.data() : input_q_.data(), thread);
    ffn_layer(nodes_, 0, thread);
    keep(step, thread);
    if (step.scored) score(step, thread);
}

// The hidden state of every node into the residual stream.
void Draft::fuse(const DraftStep& step, int thread) {
    const int hidden = sizes.hidden, wide = kind_.features * kind_.width;
    const Share mine = columns_of(step.nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        const int source = step.sources[n];
        float* x = &stream_[(size_t)n * hidden];
        const float* features = !step.extend    ? nullptr
                                : step.features ? step.features + (size_t)n * wide
                                                : target_.aux_hidden_states(source);
        if (!step.extend) {
            const float* from = source < 0 ? &kept_[(size_t)(-1 - source) * hidden]
                                           : &outputs_[(size_t)source * hidden];
            memcpy(x, from, sizeof(float) * hidden);
        } else if (kind_.first_kind) {
            norm(features, *target_.vector(-1, 0), hidden, x);
        } else {
            Group* to = column(fuse_q_.data(), n, wide);
            if (kind_.feature_norm == 1) {
                kernels->norm_quantise(features, joint_norm_, sizes.norm_eps, wide, to, n % kLanes);
            } else if (kind_.feature_norm == 2) {
                for (int i = 0; i < kind_.features; i++) {
                    kernels->norm_quantise(features + i * kind_.width, feature_norms_[i],
                                           sizes.norm_eps, kind_.width,
                                           to + i * (kind_.width / kGroup), n % kLanes);
                }
            } else {
                kernels->quantise(features, wide, to, n % kLanes);
            }
        }
    }
    pool.barrier();
    if (!step.extend || kind_.first_kind) return;
    multiply({&fuse_}, {&stream_[0]}, fuse_q_.data(), step.nodes, hidden, false, thread);
    pool.barrier();
}

// What the layer reads: embedding beside hidden state, or for EAGLE-1 the two fused.
void Draft::read(const DraftStep& step, int thread) {
    const int hidden = sizes.hidden, half = sizes.head_size / 2, beside = hidden / kGroup;
    const Share mine = columns_of(step.nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        float *x = &stream_[(size_t)n * hidden], *e = &embedded_[(size_t)n * hidden];
        unpack_row(*target_.matrix(-1, 0), step.tokens[n], e);
        Group* to = column(input_q_.data(), n, 2 * hidden);
        if (kind_.first_kind) {
            kernels->quantise(e, hidden, to, n % kLanes);
            kernels->quantise(x, hidden, to + beside, n % kLanes);
        } else {
            kernels->norm_quantise(e, layers_[0].attention_norm, sizes.norm_eps, hidden, to,
                                   n % kLanes);
            kernels->norm_quantise(x, hidden_norm_, sizes.norm_eps, hidden, to + beside,
                                   n % kLanes);
            if (kind_.normed_residual) norm(x, hidden_norm_, hidden, x);
        }
        for (int i = 0; i < half; i++) {
            const double angle = (float)position_[n] * frequencies_[i];
            cosine_[(size_t)n * half + i] = (float)std::cos(angle) * sizes.rope_factor;
            sine_[(size_t)n * half + i] = (float)std::sin(angle) * sizes.rope_factor;
        }
    }
    pool.barrier();
    if (!kind_.first_kind) return;
    multiply({&fuse_}, {&stream_[0]}, input_q_.data(), step.nodes, hidden, false, thread);
    pool.barrier();
    for (int n = mine.first; n < mine.last; n++) {
        kernels->quantise(&stream_[(size_t)n * hidden], hidden,
                          column(hidden_q_.data(), n, hidden), n % kLanes);
    }
    pool.barrier();
}

// What later steps receive.
void Draft::keep(const DraftStep& step, int thread) {
    const size_t hidden = sizes.hidden;
    const Share mine = columns_of(step.nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        const float* x = &stream_[n * hidden];
        float* out = &outputs_[(step.first + n) * hidden];
        if (kind_.normed_feedback) {
            norm(x, final_norm_, sizes.hidden, out);
        } else {
            memcpy(out, x, sizeof(float) * hidden);
        }
        const int row = rows_[n];
        if (step.extend && n + 1 == step.start[row + 1]) {
            memcpy(&kept_[step.slots[row] * hidden], out, sizeof(float) * hidden);
        }
    }
}

void Draft::score(const DraftStep& step, int thread) {
    const int hidden = sizes.hidden;
    const Share mine = columns_of(step.scored, thread, pool.threads());
    for (int i = mine.first; i < mine.last; i++) {
        const float* x = &stream_[(size_t)step.scored_nodes[i] * hidden];
        Group* to = column(hidden_q_.data(), i, hidden);
        if (kind_.first_kind) {
            kernels->quantise(x, hidden, to, i % kLanes);
        } else {
            kernels->norm_quantise(x, final_norm_, sizes.norm_eps, hidden, to, i % kLanes);
        }
    }
    pool.barrier();
    multiply({&head_}, {step.logits}, hidden_q_.data(), step.scored, sizes.vocab, false, thread);
}

// RMSNorm in place or not.
void Draft::norm(const float* x, const float* weight, int count, float* out) const {
    float sum = 0;
    for (int i = 0; i < count; i++) sum += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(sum / (float)count + sizes.norm_eps);
    for (int i = 0; i < count; i++) out[i] = x[i] * scale * weight[i];
}

}  // namespace forerun
