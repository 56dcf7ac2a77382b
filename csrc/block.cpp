// A block drafter: keys and values of the target's features, and passes over blocks that read them.
#include <cstring>

#include "draft.h"

namespace forerun {

BlockHead::BlockHead(Model& target, const Sizes& sizes, const BlockKind& kind, const Ropes& ropes,
                     size_t weight_bytes)
    : Draft(target, sizes, kind.slots, false, ropes, weight_bytes), target_(target), kind_(kind) {
    if (!kind.group) return;
    const size_t nodes = sizes.max_nodes;
    convolutions_.resize(2 * (size_t)sizes.layers);
    dynamic_.resize(nodes * Convolution::kSides * Convolution::kTaps * (sizes.hidden / kind.group));
    convolved_.resize(nodes * sizes.hidden);
}

Matrix* BlockHead::matrix(int layer, int which) {
    if (layer == -1 && which == 2) return &fuse_;
    const bool convolves = layer >= 0 && layer < sizes.layers && kind_.group;
    if (convolves && (which == 20 || which == 21)) return &convolutions_[2 * layer + which - 20].projection;
    return Model::matrix(layer, which);
}

const float** BlockHead::vector(int layer, int which) {
    const bool convolves = layer >= 0 && layer < sizes.layers && kind_.group;
    if (convolves && (which == 20 || which == 21)) return &convolutions_[2 * layer + which - 20].base;
    if (layer != -1 || which == 0) return Model::vector(layer, which);
    return which == 1 ? &hidden_norm_ : which == 2 ? &mask_ : nullptr;
}

bool BlockHead::sound(const DraftStep& step, int source) const {
    if (!step.extend || step.features) return true;
    return 0 <= source && source < target_.sizes.max_nodes;
}

// A place sees what is cached, and all of its block or what comes before it there. A token of an
// extension attends to nothing.
void BlockHead::list_places(const DraftStep& step, int row) {
    const int kv_len = step.kv_len[row], first = step.start[row], end = step.start[row + 1];
    const int32_t* block = paths_.data() + paths_.size();
    for (int n = first; n < end; n++) paths_.push_back(scratch_place(n));
    for (int n = first; n < end; n++) {
        rows_[n] = row;
        place_of_[n] = scratch_place(n);
        position_[n] = kv_len + n - first;
        const int ahead = kind_.causal ? 0 : end - 1 - n;
        sights_[n] = {kv_len, n - first + 1 + ahead, block, ahead};
        if (step.extend) sights_[n] = {0, 1, block + (n - first)};
    }
    if (step.extend) {
        trunk_at_.push_back((int64_t)trunks_.size());
    } else {
        list_cached(step, row, 0);
    }
}

void BlockHead::run(const DraftStep& step, int thread) {
    if (step.extend) {
        read_features(step, thread);
        for (int layer = 0; layer < sizes.layers; layer++) keep_context(step, layer, thread);
        return;
    }
    read_blocks(step, thread);
    for (int layer = 0; layer < sizes.layers; layer++) {
        if (kind_.group) {
            convolved_layer(layer, thread);
        } else {
            attention_layer(nodes_, layer, thread);
            ffn_layer(nodes_, layer, thread);
        }
    }
    score(step, thread);
}

// The input of every layer's keys and values, from the features of each node.
void BlockHead::read_features(const DraftStep& step, int thread) {
    const int wide = kind_.features * kind_.width;
    const bool floats = is_float(fuse_.format);
    if (thread == 0) {
        const size_t columns = (step.nodes + kLanes - 1) / kLanes, groups = (wide + kGroup - 1) / kGroup;
        if (floats) fuse_f_.resize((size_t)step.nodes * wide);
        else fuse_q_.resize(columns * groups);
    }
    pool.barrier();
    const Share mine = columns_of(step.nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        const float* features = step.features ? step.features + (size_t)n * wide
                                              : target_.aux_hidden_states(step.sources[n]);
        if (floats) {
            memcpy(&fuse_f_[(size_t)n * wide], features, sizeof(float) * wide);
        } else {
            kernels->quantise(features, wide, column(fuse_q_.data(), n, wide), n % kLanes);
        }
        put_angles(n);
    }
    pool.barrier();
    multiply({&fuse_}, {&stream_[0]}, {fuse_q_.data(), fuse_f_.data()}, step.nodes, sizes.hidden, false,
             thread);
    pool.barrier();
    const Layer& any = layers_[0];
    put_normed(nullptr, step.nodes, hidden_norm_, {&any.key, &any.value}, thread);
    pool.barrier();
}

// One layer's keys and values of all nodes.
void BlockHead::keep_context(const DraftStep& step, int layer, int thread) {
    const Layer& at = layers_[layer];
    const int size = at.kind.head_size, heads = at.kind.kv_heads, width = (int)qkv_width(at);
    float *keys = &qkv_[mixed_width(at)], *values = keys + heads * size;
    multiply({&at.key, &at.value}, {keys, values}, normed(), step.nodes, width, false, thread);
    pool.barrier();
    const Share mine(step.nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        const size_t angle = angles(at, n);
        for (int head = 0; head < heads; head++) {
            float *key = keys + (size_t)n * width + head * size, *value = key + heads * size;
            kernels->rotate(key, at.key_norm, sizes.norm_eps, &cosine_[angle], &sine_[angle], size / 2,
                            1.0f);
            keep(key, plane(layer, 0, head), size, place_of_[n]);
            keep(value, plane(layer, 1, head), size, place_of_[n]);
        }
    }
    pool.barrier();
}

// Embeddings of roots and masks.
void BlockHead::read_blocks(const DraftStep& step, int thread) {
    const size_t hidden = sizes.hidden;
    const Share mine = columns_of(step.nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        float* x = &stream_[n * hidden];
        if (mask_ && n != step.start[rows_[n]]) {
            memcpy(x, mask_, sizeof(float) * hidden);
        } else {
            unpack_row(embeddings(), step.tokens[n], x);
            for (size_t i = 0; embedding_scale_ != 1.0f && i < hidden; i++) x[i] *= embedding_scale_;
        }
        put_angles(n);
    }
    pool.barrier();
}

void BlockHead::score(const DraftStep& step, int thread) {
    if (step.outputs) {
        const Share mine(step.scored, thread, pool.threads());
        for (int i = mine.first; i < mine.last; i++) {
            const float* x = &stream_[(size_t)step.scored_nodes[i] * sizes.hidden];
            put_norm(x, final_norm_, sizes.norm_eps, sizes.hidden, step.outputs + (size_t)i * sizes.hidden);
        }
    }
    if (step.scored) head(nodes_, thread);
}

// A layer whose attention and feed-forward stand between convolutions.
void BlockHead::convolved_layer(int layer, int thread) {
    const Layer& at = layers_[layer];
    const int nodes = nodes_.nodes;
    const Convolution *by = &convolutions_[2 * layer], *fed_by = by + 1;
    enter(*by, at.attention_norm, {&at.query, &at.key, &at.value}, thread);
    find_context(nodes_, layer, normed(), thread);
    multiply({&at.output}, {&branch_[0]}, {mixed_q_.data(), &mixed_[0]}, nodes, sizes.hidden, false, thread);
    pool.barrier();
    leave(*by, thread);
    enter(*fed_by, at.ffn_norm, {&at.feed.gate, &at.feed.up}, thread);
    feed_all(at, nodes, &branch_[0], false, thread);
    leave(*fed_by, thread);
}

// `normed()`, convolved, as products read it; and the dynamic kernels.
void BlockHead::enter(const Convolution& by, const float* norm, Wanted wanted, int thread) {
    const int hidden = sizes.hidden, nodes = nodes_.nodes;
    const int width = Convolution::kSides * Convolution::kTaps * (hidden / kind_.group);
    Wanted first = {&by.projection};
    first.floats = true;
    put_normed(nullptr, nodes, norm, first, thread);
    pool.barrier();
    multiply({&by.projection}, {&dynamic_[0]}, normed(), nodes, width, false, thread);
    pool.barrier();
    const Share mine = columns_of(nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        float* out = &convolved_[(size_t)n * hidden];
        convolve(by, 0, hidden_f_.data(), n, out, false);
        if (wanted.groups) kernels->quantise(out, hidden, column(hidden_q_.data(), n, hidden), n % kLanes);
    }
    pool.barrier();
    if (!wanted.floats) return;
    for (int n = mine.first; n < mine.last; n++) {
        const size_t row = (size_t)n * hidden;
        memcpy(&hidden_f_[row], &convolved_[row], sizeof(float) * hidden);
    }
    pool.barrier();
}

// branch_, convolved, to the stream.
void BlockHead::leave(const Convolution& by, int thread) {
    const Share mine = columns_of(nodes_.nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        convolve(by, 1, branch_.data(), n, &stream_[(size_t)n * sizes.hidden], true);
    }
    pool.barrier();
}

// One place of rows x[nodes][hidden]; what stands before its block counts as zeros.
void BlockHead::convolve(const Convolution& by, int side, const float* x, int node, float* out,
                         bool add) const {
    const int hidden = sizes.hidden, groups = hidden / kind_.group, taps = Convolution::kTaps;
    const float* base = by.base + (size_t)side * taps * hidden;
    const float* dynamic = &dynamic_[((size_t)node * Convolution::kSides + side) * taps * groups];
    const float* here = x + (size_t)node * hidden;
    const bool first = node == nodes_.start[rows_[node]];
    for (int c = 0; c < hidden; c++) {
        const int group = c / kind_.group;
        float sum = (base[c] + dynamic[group]) * here[c];
        if (!first) sum += (base[hidden + c] + dynamic[groups + group]) * here[c - hidden];
        out[c] = add ? out[c] + sum : sum;
    }
}

}  // namespace forerun
