// Layers with a recurrent state: a gated delta net, or a short convolution (forerun/networks/
// layer_spec.py, GatedDelta and ShortConvolution).
//
// A convolution reads what its tokens' ancestors left, of all nodes at once. A net's states go on node
// by node, a tree's known tokens first; the states of draft tokens are not kept, but what made them,
// so that an accepted path makes the same again (`follow`).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "delta.h"
#include "model.h"

namespace forerun {
namespace {

constexpr int kMostConvolved = 64;
constexpr float kLeast = 1e-6f;  // keeps the length of a query or a key from zero

typedef float Four __attribute__((vector_size(16)));

// a *= b, number by number.
void times(float* a, const float* b, int count) {
    int i = 0;
    for (; i + 4 <= count; i += 4) {
        Four x, y;
        memcpy(&x, a + i, sizeof x);
        memcpy(&y, b + i, sizeof y);
        x = x * y;
        memcpy(a + i, &x, sizeof x);
    }
    for (; i < count; i++) a[i] *= b[i];
}

// Sums of products over the tokens seen, the oldest first.
void convolve(const float* const* seen, const float* kernel, const float* bias, int tokens,
              int64_t channels, int first, int count, float* out) {
    int i = 0;
    for (; i + 4 <= count; i += 4) {
        Four sum = {};
        if (bias) memcpy(&sum, bias + first + i, sizeof sum);
        for (int t = 0; t < tokens; t++) {
            Four x, k;
            memcpy(&x, seen[t] + first + i, sizeof x);
            memcpy(&k, kernel + t * channels + first + i, sizeof k);
            sum = sum + x * k;
        }
        memcpy(out + i, &sum, sizeof sum);
    }
    for (; i < count; i++) {
        float sum = bias ? bias[first + i] : 0.0f;
        for (int t = 0; t < tokens; t++) {
            sum += seen[t][first + i] * kernel[t * channels + first + i];
        }
        out[i] = sum;
    }
}

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

}  // namespace

void Model::reserve_nets() {
    const size_t nodes = sizes.max_nodes, heads = sizes.value_heads;
    net_.resize(nodes * sizes.net_width());
    net_queries_.resize(nodes * sizes.net_keys());
    net_keys_.resize(nodes * sizes.net_keys());
    net_values_.resize(nodes * sizes.net_values());
    found_.resize(nodes * sizes.net_output());
    decay_.resize(nodes * heads);
    beta_.resize(nodes * heads);
    ones_.assign(std::max<size_t>(sizes.channels, ones_.size()), 1.0f);
    draft_of_.resize(nodes);
    net_scratch_.resize(pool.most());
}

float* Model::state(const Layer& at, int64_t row) const {
    const int64_t each = (int64_t)sizes.net_values() * sizes.key_size;
    return (float*)states_.data() + (at.place * (int64_t)sizes.states + row) * each;
}

float* Model::window(const Layer& at, int64_t row) const {
    const int64_t each = (int64_t)(sizes.convolved - 1) * sizes.channels;
    return (float*)windows_.data() + (at.place * (int64_t)sizes.states + row) * each;
}

// Numbers the draft tokens of a step, and makes room for what is kept of them and for threads.
void Model::prepare_nets(const Step& step) {
    drafts_ = 0;
    int most = 0;
    for (int b = 0; b < step.rows; b++) {
        const int root = step.root_of(b);
        for (int n = step.start[b]; n < step.start[b + 1]; n++) {
            draft_of_[n] = n > root ? drafts_++ : -1;
        }
        most = std::max(most, step.start[b + 1] - 1 - root);
    }
    nowhere_.assign(drafts_, -1);
    const auto room = [](Floats& floats, size_t count) {
        if (floats.size() < count) floats.resize(count);
    };
    const size_t rows = (size_t)sizes.recurrent * drafts_;
    room(kept_mixed_, rows * sizes.channels);
    room(kept_keys_, rows * sizes.net_keys());
    room(kept_values_, rows * sizes.net_values());
    room(kept_decay_, rows * sizes.value_heads);
    room(kept_beta_, rows * sizes.value_heads);
    const size_t windows = (size_t)(sizes.convolved - 1) * sizes.channels;
    for (Floats& own : net_scratch_) {
        room(own, std::max(delta_scratch(sizes.key_size, most), windows));
    }
}

void Model::recurrent_layer(const Step& step, int layer, Inputs x, int thread) {
    const Layer& at = layers_[layer];
    net_products(at, x, step.nodes, thread);
    pool.barrier();
    if (sizes.value_heads) {
        delta_layer(step, at, thread);
    } else {
        convolution_layer(step, at, thread);
    }
    bring_out(at, found_.data(), step.nodes, thread);
}

void Model::delta_layer(const Step& step, const Layer& at, int thread) {
    const Share mine(step.nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        enter_net(step, at, n);
        if (draft_of_[n] >= 0) keep_draft(at, n);
    }
    pool.barrier();
    advance_states(step, at, thread);
    keep_windows(step, at, thread);
    pool.barrier();
    leave_net(at, step.nodes, thread);
}

void Model::convolution_layer(const Step& step, const Layer& at, int thread) {
    const Share mine = columns_of(step.nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        float* row = &net_[(size_t)n * sizes.net_width()];
        times(row, row + 2 * (size_t)sizes.channels, sizes.channels);
        if (draft_of_[n] >= 0) keep_draft(at, n);
    }
    pool.barrier();
    for (int n = mine.first; n < mine.last; n++) leave_convolution(step, at, n);
    pool.barrier();
    keep_windows(step, at, thread);
}

void Model::net_products(const Layer& at, Inputs x, int rows, int thread) {
    if (!sizes.value_heads) {
        return multiply({&at.query}, {net_.data()}, x, rows, (int)sizes.net_width(), false, thread);
    }
    const int keys = sizes.net_keys(), values = sizes.net_values();
    float *query = net_.data(), *key = query + keys, *value = key + keys;
    float *gate = value + values, *beta = gate + values, *alpha = beta + sizes.value_heads;
    multiply({&at.query, &at.key, &at.value, &at.gate, &at.beta, &at.alpha},
             {query, key, value, gate, beta, alpha}, x, rows, (int)sizes.net_width(), false, thread);
}

// What the convolution reads of a node: its own row of `net_` last, before it those above it in its
// tree, and before these the row's window.
void Model::list_inputs(const Step& step, const Layer& at, int node, const float** seen) const {
    const float* before = window(at, step.state_rows[row_of_[node]]);
    int above = node, back = sizes.convolved - 2;
    for (int t = sizes.convolved - 1; t >= 0; t--) {
        if (above >= 0) {
            seen[t] = &net_[(size_t)above * sizes.net_width()];
            above = step.parents[above];
        } else {
            seen[t] = before + (size_t)back-- * sizes.channels;
        }
    }
}

// Of a node's row of `net_`: queries and keys of unit length, values, and the gates of its state.
void Model::enter_net(const Step& step, const Layer& at, int node) {
    const int keys = sizes.net_keys(), values = sizes.net_values(), size = sizes.key_size;
    const float* seen[kMostConvolved];
    list_inputs(step, at, node, seen);
    float* const parts[] = {&net_queries_[(size_t)node * keys], &net_keys_[(size_t)node * keys],
                            &net_values_[(size_t)node * values]};
    for (int part = 0; part < 3; part++) {
        const int count = part == 2 ? values : keys;
        convolve(seen, at.kernel, nullptr, sizes.convolved, sizes.channels, part * keys, count, parts[part]);
        kernels->gates[kSilu](parts[part], ones_.data(), count, parts[part]);
    }
    const float root = 1.0f / std::sqrt((float)size);
    for (int part = 0; part < 2; part++) {
        for (int head = 0; head < sizes.key_heads; head++) {
            float* x = parts[part] + (size_t)head * size;
            const float factor = kernels->inverse_rms(x, size, kLeast / (float)size) * root;
            kernels->norm(x, ones_.data(), part ? factor : factor * root, size, x);
        }
    }
    const float* gates = &net_[(size_t)node * sizes.net_width() + sizes.channels + values];
    for (int head = 0; head < sizes.value_heads; head++) {
        const double opened = softplus((double)gates[sizes.value_heads + head] + at.step[head]);
        beta_[(size_t)node * sizes.value_heads + head] = (float)(1 / (1 + std::exp(-(double)gates[head])));
        decay_[(size_t)node * sizes.value_heads + head] = (float)std::exp(at.rate[head] * opened);
    }
}

// What makes a draft token's state of its parent's.
void Model::keep_draft(const Layer& at, int node) {
    const size_t draft = (size_t)at.place * drafts_ + draft_of_[node];
    const auto keep = [&](const float* from, size_t count, Floats& to) {
        memcpy(&to[draft * count], from, sizeof(float) * count);
    };
    const size_t keys = sizes.net_keys(), values = sizes.net_values(), heads = sizes.value_heads;
    keep(&net_[(size_t)node * sizes.net_width()], sizes.channels, kept_mixed_);
    if (!heads) return;
    keep(&net_keys_[node * keys], keys, kept_keys_);
    keep(&net_values_[node * values], values, kept_values_);
    keep(&decay_[node * heads], heads, kept_decay_);
    keep(&beta_[node * heads], heads, kept_beta_);
}

// The states of all trees, some columns of one head at a time.
void Model::advance_states(const Step& step, const Layer& at, int thread) {
    const DeltaStep work = {
        step.rows, sizes.key_heads, sizes.value_heads, sizes.key_size, sizes.value_size, sizes.tiled,
        step.start, step.known, step.parents, step.state_rows, step.state_targets, state(at, 0),
        net_queries_.data(), net_keys_.data(), net_values_.data(), decay_.data(), beta_.data(),
        found_.data()};
    const int blocks = (sizes.value_size + kColumns - 1) / kColumns;
    const Share mine(step.rows * sizes.value_heads * blocks, thread, pool.threads());
    for (int piece = mine.first; piece < mine.last; piece++) {
        const int head = piece / blocks;
        kernels->gated_delta(work, head / sizes.value_heads, head % sizes.value_heads,
                             piece % blocks * kColumns, net_scratch_[thread].data());
    }
}

// The convolution's last inputs of known nodes, where they are to be kept; of a row's root last, for
// its window is read until then.
void Model::keep_windows(const Step& step, const Layer& at, int thread) {
    const size_t channels = sizes.channels, rest = sizes.convolved - 1;
    const Share mine(step.rows, thread, pool.threads());
    float* const inputs = net_scratch_[thread].data();
    const float* seen[kMostConvolved];
    const auto put = [&](int node, int64_t row) {
        list_inputs(step, at, node, seen);
        for (size_t t = 0; t < rest; t++) {
            memcpy(inputs + t * channels, seen[t + 1], sizeof(float) * channels);
        }
        memcpy(window(at, row), inputs, sizeof(float) * rest * channels);
    };
    for (int b = mine.first; b < mine.last; b++) {
        for (int n = step.start[b]; n <= step.root_of(b); n++) {
            if (step.state_targets[n] >= 0) put(n, step.state_targets[n]);
        }
        put(step.root_of(b), step.state_rows[b]);
    }
}

// What was read of the states, normed head by head and opened by its gate, as the last product
// reads it.
void Model::leave_net(const Layer& at, int nodes, int thread) {
    const int size = sizes.value_size, values = sizes.net_values();
    const Share mine = columns_of(nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        const float* gate = &net_[(size_t)n * sizes.net_width() + sizes.channels];
        float* read = &found_[(size_t)n * values];
        for (int head = 0; head < sizes.value_heads; head++) {
            put_norm(read + head * size, at.net_norm, sizes.norm_eps, size, read + head * size);
        }
        if (is_float(at.output.format)) {
            kernels->gates[kSilu](gate, read, values, read);
        } else {
            Group* to = column(mixed_q_.data(), n, values);
            kernels->gates_quantise[kSilu](gate, read, values, to, n % kLanes);
        }
    }
    pool.barrier();
}

// A convolution's sums, opened by their gate, as the last product reads them.
void Model::leave_convolution(const Step& step, const Layer& at, int node) {
    const int channels = sizes.channels;
    const float* seen[kMostConvolved];
    list_inputs(step, at, node, seen);
    float* out = &found_[(size_t)node * channels];
    convolve(seen, at.kernel, at.kernel_bias, sizes.convolved, channels, 0, channels, out);
    times(out, &net_[(size_t)node * sizes.net_width() + channels], channels);
    if (!is_float(at.output.format)) {
        kernels->quantise(out, channels, column(mixed_q_.data(), node, channels), node % kLanes);
    }
}

std::string Model::copy_state(int64_t from, int64_t to) {
    if (from < -1 || from >= sizes.states || to < 0 || to >= sizes.states) return "no such state";
    const size_t numbers = (size_t)sizes.net_values() * sizes.key_size;
    const size_t inputs = (size_t)(sizes.convolved - 1) * sizes.channels;
    for (const Layer& at : layers_) {
        if (!at.kind.recurrent || from == to) continue;
        if (from < 0) {
            if (numbers) memset(state(at, to), 0, sizeof(float) * numbers);
            memset(window(at, to), 0, sizeof(float) * inputs);
        } else {
            if (numbers) memcpy(state(at, to), state(at, from), sizeof(float) * numbers);
            memcpy(window(at, to), window(at, from), sizeof(float) * inputs);
        }
    }
    return "";
}

int64_t Model::state_bytes() const {
    const int64_t numbers = (int64_t)sizes.net_values() * sizes.key_size;
    const int64_t inputs = (int64_t)(sizes.convolved - 1) * sizes.channels;
    int64_t layers = 0;
    for (const Layer& at : layers_) layers += at.kind.recurrent;
    return layers * (numbers + inputs) * (int64_t)sizeof(float);
}

std::string Model::copy_state_outside(int64_t row, uint8_t* outside, bool out) {
    if (row < 0 || row >= sizes.states) return "no such state";
    const size_t numbers = (size_t)sizes.net_values() * sizes.key_size;
    const size_t inputs = (size_t)(sizes.convolved - 1) * sizes.channels;
    const auto copy = [&](float* inside, size_t count) {
        if (count == 0) return;
        void* to = out ? (void*)outside : (void*)inside;
        memcpy(to, out ? (const void*)inside : (const void*)outside, sizeof(float) * count);
        outside += sizeof(float) * count;
    };
    for (const Layer& at : layers_) {
        if (!at.kind.recurrent) continue;
        copy(numbers ? state(at, row) : nullptr, numbers);
        copy(window(at, row), inputs);
    }
    return "";
}

std::string Model::follow(const int64_t* rows, const int32_t* nodes, int count) {
    for (int i = 0; i < count; i++) {
        if (rows[i] < 0 || rows[i] >= sizes.states) return "no such state";
        const bool there = nodes[i] >= 0 && nodes[i] < last_nodes_;
        if (!there || draft_of_[nodes[i]] < 0) return "no draft token of the last step";
    }
    const int blocks = (sizes.value_size + kColumns - 1) / kColumns, heads = sizes.value_heads;
    const size_t channels = sizes.channels, rest = sizes.convolved - 2;
    std::vector<const Layer*> nets;
    for (const Layer& at : layers_) {
        if (at.kind.recurrent) nets.push_back(&at);
    }
    const int32_t one = 1;
    pool.run([&](int thread) {
        const Share mine((int)nets.size() * count * heads * blocks, thread, pool.threads());
        for (int piece = mine.first; piece < mine.last; piece++) {
            const int head = piece / blocks % heads, pair = piece / blocks / heads;
            const Layer& at = *nets[pair / count];
            const int draft = draft_of_[nodes[pair % count]];
            const size_t first = (size_t)at.place * drafts_;
            const int32_t start[] = {draft, draft + 1};
            const DeltaStep work = {1, sizes.key_heads, heads, sizes.key_size, sizes.value_size,
                                    sizes.tiled, start, &one, nullptr, rows + pair % count,
                                    nowhere_.data(), state(at, 0), nullptr,
                                    &kept_keys_[first * sizes.net_keys()],
                                    &kept_values_[first * sizes.net_values()],
                                    &kept_decay_[first * heads], &kept_beta_[first * heads], nullptr};
            kernels->gated_delta(work, 0, head, piece % blocks * kColumns, net_scratch_[thread].data());
        }
        const Share pairs((int)nets.size() * count, thread, pool.threads());
        for (int pair = pairs.first; pair < pairs.last; pair++) {
            const Layer& at = *nets[pair / count];
            float* own = window(at, rows[pair % count]);
            const size_t draft = (size_t)at.place * drafts_ + draft_of_[nodes[pair % count]];
            memmove(own, own + channels, sizeof(float) * rest * channels);
            memcpy(own + rest * channels, &kept_mixed_[draft * channels], sizeof(float) * channels);
        }
    });
    return "";
}

}  // namespace forerun
