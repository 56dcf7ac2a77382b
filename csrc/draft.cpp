// One pass of an EAGLE head: fuse, read beside the embedding, one layer, output head.
#include "draft.h"

#include <cmath>
#include <cstring>

namespace forerun {

EagleHead::EagleHead(Model& target, const Sizes& sizes, const HeadKind& kind,
                     const Ropes& ropes, size_t weight_bytes)
    : Draft(target, sizes, kind.slots, false, ropes, weight_bytes, kind.begin),
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
}

Matrix* EagleHead::matrix(int layer, int which) {
    return layer == -1 && which == 2 ? &fuse_ : Model::matrix(layer, which);
}

const float** EagleHead::vector(int layer, int which) {
    if (layer != -1 || which == 0) return Model::vector(layer, which);
    if (which == 1) return &hidden_norm_;
    if (which == 2) return &joint_norm_;
    return which >= 3 && which < 3 + kind_.features ? &feature_norms_[which - 3] : nullptr;
}

bool EagleHead::sound(const DraftStep& step, int source) const {
    const auto within = [](int64_t value, int64_t end) { return 0 <= value && value < end; };
    if (step.hidden) return true;
    if (step.extend) return step.features || within(source, target_.sizes.max_nodes);
    return source < 0 ? within(-1 - (int64_t)source, slots_) : source < step.first;
}

void EagleHead::run(const DraftStep& step, int thread) {
    fuse(step, thread);
    read(step, thread);
    if (kind_.fusion >= kEmbeddingFirst) {
        attention_layer(nodes_, 0, thread);
    } else {
        const std::vector<Group>& x = kind_.fusion == kFused ? hidden_q_ : input_q_;
        mix(nodes_, 0, {x.data(), nullptr}, thread);
    }
    ffn_layer(nodes_, 0, thread);
    keep(step, thread);
    if (step.scored) score(step, thread);
}

// The hidden state of every node into the residual stream.
void EagleHead::fuse(const DraftStep& step, int thread) {
    const int hidden = sizes.hidden, wide = kind_.features * kind_.width;
    const Share mine = columns_of(step.nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        const int source = step.sources[n];
        float* x = &stream_[(size_t)n * hidden];
        const float* features = !step.extend || step.hidden ? nullptr
                                : step.features ? step.features + (size_t)n * wide
                                                : target_.aux_hidden_states(source);
        if (step.hidden) {
            memcpy(x, step.hidden + (size_t)n * hidden, sizeof(float) * hidden);
        } else if (!step.extend) {
            const float* from = source < 0 ? &kept_[(size_t)(-1 - source) * hidden]
                                           : &outputs_[(size_t)source * hidden];
            memcpy(x, from, sizeof(float) * hidden);
        } else if (kind_.fusion != kBeside) {
            norm(features, *target_.vector(-1, 0), hidden, x);
        } else {
            Group* to = column(fuse_q_.data(), n, wide);
            if (kind_.feature_norm == 1) {
                quantise_norm(features, joint_norm_, sizes.norm_eps, wide, to, n % kLanes);
            } else if (kind_.feature_norm == 2) {
                for (int i = 0; i < kind_.features; i++) {
                    quantise_norm(features + i * kind_.width, feature_norms_[i],
                                           sizes.norm_eps, kind_.width,
                                           to + i * (kind_.width / kGroup), n % kLanes);
                }
            } else {
                kernels->quantise(features, wide, to, n % kLanes);
            }
        }
    }
    pool.barrier();
    if (!step.extend || step.hidden || kind_.fusion != kBeside) return;
    multiply({&fuse_}, {&stream_[0]}, {fuse_q_.data(), nullptr}, step.nodes, hidden, false, thread);
    pool.barrier();
}

// What the layer reads: embedding beside hidden state, or the two fused.
void EagleHead::read(const DraftStep& step, int thread) {
    const int hidden = sizes.hidden, beside = hidden / kGroup;
    const Share mine = columns_of(step.nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        float *x = &stream_[(size_t)n * hidden], *e = &embedded_[(size_t)n * hidden];
        unpack_row(*target_.matrix(-1, 0), step.tokens[n], e);
        Group* to = column(input_q_.data(), n, 2 * hidden);
        if (kind_.fusion == kFused) {
            kernels->quantise(e, hidden, to, n % kLanes);
            kernels->quantise(x, hidden, to + beside, n % kLanes);
        } else if (kind_.fusion != kBeside) {
            const bool turned = kind_.fusion == kHiddenFirst;
            if (kind_.zeroed && position_[n] == 0) memset(e, 0, sizeof(float) * hidden);
            quantise_norm(e, joint_norm_, sizes.norm_eps, hidden,
                                   turned ? to + beside : to, n % kLanes);
            quantise_norm(x, hidden_norm_, sizes.norm_eps, hidden,
                                   turned ? to : to + beside, n % kLanes);
        } else {
            quantise_norm(e, layers_[0].attention_norm, sizes.norm_eps, hidden, to,
                                   n % kLanes);
            quantise_norm(x, hidden_norm_, sizes.norm_eps, hidden, to + beside,
                                   n % kLanes);
            if (kind_.normed_residual) norm(x, hidden_norm_, hidden, x);
        }
        put_angles(n);
    }
    pool.barrier();
    if (kind_.fusion == kBeside) return;
    multiply({&fuse_}, {&stream_[0]}, {input_q_.data(), nullptr}, step.nodes, hidden, false,
             thread);
    pool.barrier();
    if (kind_.fusion != kFused) return;
    for (int n = mine.first; n < mine.last; n++) {
        kernels->quantise(&stream_[(size_t)n * hidden], hidden,
                          column(hidden_q_.data(), n, hidden), n % kLanes);
    }
    pool.barrier();
}

// What later steps receive.
void EagleHead::keep(const DraftStep& step, int thread) {
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
        if (step.outputs) memcpy(step.outputs + n * hidden, out, sizeof(float) * hidden);
        const int row = rows_[n];
        if (step.extend && n + 1 == step.start[row + 1]) {
            memcpy(&kept_[step.slots[row] * hidden], out, sizeof(float) * hidden);
        }
    }
}

void EagleHead::score(const DraftStep& step, int thread) {
    const float* weight = kind_.fusion == kFused ? nullptr : final_norm_;
    put_normed(step.scored_nodes, step.scored, weight, {&head_}, thread);
    pool.barrier();
    multiply({&head_}, {step.logits}, normed(), step.scored, sizes.vocab, false, thread);
}

// RMSNorm in place or not.
void EagleHead::norm(const float* x, const float* weight, int count, float* out) const {
    float sum = 0;
    for (int i = 0; i < count; i++) sum += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(sum / (float)count + sizes.norm_eps);
    for (int i = 0; i < count; i++) out[i] = x[i] * scale * weight[i];
}

}  // namespace forerun
