// One step: every planned row's nodes through all layers.
//
// Every thread runs the same program (`run`) and takes its share of each phase; a barrier ends a
// phase. The order in which one number is computed never depends on the shares.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "model.h"

namespace forerun {

std::string Model::forward(const Step& step, const Walk* walk) {
    std::string fault = check(step);
    if (fault.empty() && walk) fault = check_slots(step, *walk);
    if (!fault.empty()) return fault;
    prepare(step);
    plan_logits(step, walk);
    const std::function<void(int)> work = [&](int thread) { run(step, thread); };
    pool.run(work);
    row_slots_.clear();
    if (!ring_ || !walk) return "";
    row_slots_.assign(walk->slots, walk->slots + step.rows);
    for (int b = 0; b < step.rows; b++) {
        const int end = step.root_of(b) + 1, kept = std::min(step.known[b], ring_tokens_);
        for (int n = end - kept; n < end; n++) store_in_ring(n);
    }
    return "";
}

void Model::run(const Step& step, int thread) {
    embed(step, thread);
    for (int layer = 0; layer < sizes.layers; layer++) {
        keep_taps(step, layer, thread);
        attention_layer(step, layer, thread);
        ffn_layer(step, layer, thread);
        if (sizes.vectors) add_vectors(layers_[layer], layer, step.nodes, thread);
    }
    keep_taps(step, sizes.layers, thread);
    if (!logits_nodes_.empty()) head(step, thread);
}

Share Model::columns_of(int rows, int thread, int threads) {
    Share share((rows + kLanes - 1) / kLanes, thread, threads);
    share.first *= kLanes;
    share.last = share.last * kLanes < rows ? share.last * kLanes : rows;
    return share;
}

void Model::embed(const Step& step, int thread) {
    const Share share = columns_of(step.nodes, thread, pool.threads());
    for (int node = share.first; node < share.last; node++) {
        float* x = &stream_[(size_t)node * sizes.hidden];
        unpack_row(embedding_, step.tokens[node], x);
        for (int i = 0; embedding_scale_ != 1.0f && i < sizes.hidden; i++) x[i] *= embedding_scale_;
        put_angles(node);
    }
    pool.barrier();
    if (sizes.vectors) make_vectors(step, thread);
}

// A node's cosines and sines, by every rope.
void Model::put_angles(int node) {
    const size_t half = pairs_, count = factors_.size() * half;
    for (size_t i = 0; i < count; i++) {
        const double angle = (float)position_[node] * frequencies_[i];
        const float factor = factors_[i / half];
        cosine_[node * count + i] = (float)std::cos(angle) * (frequencies_[i] ? factor : 1.0f);
        sine_[node * count + i] = (float)std::sin(angle) * factor;
    }
}

// Blocks [first, last) of out = W x.
void Model::multiply_blocks(const Matrix& w, Inputs x, int rows, int first, int last,
                            Target out) const {
    if (first >= last) return;
    if (is_float(w.format)) {
        kernels->float_product(w, x.floats, rows, first, last, out);
    } else {
        kernels->product(w, x.groups, rows, first, last, out);
    }
}

// out = W x for a stack of matrices that share their input; out[i] belongs to matrix i.
void Model::multiply(std::initializer_list<const Matrix*> stack,
                     std::initializer_list<float*> outs, Inputs x, int rows, int stride, bool add,
                     int thread) {
    int total = 0, place = 0;
    for (const Matrix* w : stack) total += w->blocks();
    const bool adapted = lower(stack, x, rows, thread);
    Share share(total, thread, pool.threads());
    auto out = outs.begin();
    for (const Matrix* w : stack) {
        const int first = share.first < 0 ? 0 : share.first;
        const int last = share.last < w->blocks() ? share.last : w->blocks();
        multiply_blocks(*w, x, rows, first, last, {*out, stride, add});
        if (adapted) raise(*w, place++, x, rows, first, last, {*out, stride, true});
        share.first -= w->blocks();
        share.last -= w->blocks();
        ++out;
    }
}

// RMSNorm of one row.
void Model::put_norm(const float* x, const float* weight, float eps, int count, float* out) const {
    kernels->norm(x, weight, kernels->inverse_rms(x, count, eps), count, out);
}
void Model::quantise_norm(const float* x, const float* weight, float eps, int count, Group* out,
                          int lane) const {
    kernels->norm_quantise(x, weight, kernels->inverse_rms(x, count, eps), count, out, lane);
}

// `normed()` of these nodes of the stream (null: all, in order) after RMSNorm, or as they are where
// there is no norm: some groups of a row, so that every thread has some even of one row.
void Model::put_normed(const int32_t* nodes, int rows, const float* weight, Wanted wanted, int thread) {
    const int hidden = sizes.hidden, groups = (hidden + kGroup - 1) / kGroup;
    const Share share((rows + kLanes - 1) / kLanes * groups, thread, pool.threads());
    for (int piece = share.first, last; piece < share.last; piece = last) {
        last = (piece / groups + 1) * groups;
        if (last > share.last) last = share.last;
        const int row = piece / groups * kLanes, begin = piece % groups * kGroup;
        const int end = last % groups ? last % groups * kGroup : hidden;
        for (int i = row; i < row + kLanes && i < rows; i++) {
            const float* x = &stream_[(size_t)(nodes ? nodes[i] : i) * hidden];
            put_part(x, weight, i, begin, end, wanted);
        }
    }
}

// Numbers [begin, end) of row `row` of `normed()`; begin a multiple of kGroup.
void Model::put_part(const float* x, const float* weight, int row, int begin, int end, Wanted wanted) {
    const int hidden = sizes.hidden, count = end - begin;
    Group* groups = column(hidden_q_.data(), row, hidden) + begin / kGroup;
    float* floats = &hidden_f_[(size_t)row * hidden + begin];
    if (!weight) {
        if (wanted.groups) kernels->quantise(x + begin, count, groups, row % kLanes);
        if (wanted.floats) memcpy(floats, x + begin, sizeof(float) * count);
        return;
    }
    const float factor = kernels->inverse_rms(x, hidden, sizes.norm_eps);
    if (wanted.groups) {
        kernels->norm_quantise(x + begin, weight + begin, factor, count, groups, row % kLanes);
    }
    if (wanted.floats) kernels->norm(x + begin, weight + begin, factor, count, floats);
}

// What enters `layer` is kept where a draft head asked for it. No barrier: it does not change before
// attention's last product.
void Model::keep_taps(const Step& step, int layer, int thread) {
    const size_t hidden = sizes.hidden, count = aux_layers_.size();
    const Share mine = columns_of(step.nodes, thread, pool.threads());
    for (size_t which = 0; which < count; which++) {
        if (aux_layers_[which] != layer) continue;
        for (size_t n = mine.first; n < (size_t)mine.last; n++) {
            memcpy(&aux_hidden_states_[(n * count + which) * hidden], &stream_[n * hidden],
                   sizeof(float) * hidden);
        }
    }
}

void Model::attention_layer(const Step& step, int layer, int thread) {
    const Layer& at = layers_[layer];
    const Matrix& first = sizes.query_rank ? at.query_down : at.query;
    const Matrix& second = at.kind.reads ? first : at.key;
    const Matrix& last = sizes.rank || at.kind.reads || at.kind.keyed_values ? second : at.value;
    Wanted wanted = {&first, &second, &last};
    if (at.kind.recurrent && sizes.value_heads) {
        wanted = {&at.query, &at.key, &at.value, &at.gate, &at.beta, &at.alpha};
    } else if (at.kind.recurrent) {
        wanted = {&at.query};
    } else if (sizes.gated) {
        wanted = {&at.query, &at.key, &at.value, &at.gate};
    }
    put_normed(nullptr, step.nodes, at.attention_norm, wanted, thread);
    pool.barrier();
    if (at.kind.recurrent) return recurrent_layer(step, layer, normed(), thread);
    if (sizes.rank) return mix_latent(step, layer, normed(), thread);
    mix(step, layer, normed(), thread);
}

// Attention of `layer` from its input `x` to the residual stream.
void Model::mix(const Step& step, int layer, Inputs x, int thread) {
    find_context(step, layer, x, thread);
    bring_out(layers_[layer], &mixed_[0], step.nodes, thread);
}

// Attention of `layer` from its input `x` to what its last product reads.
void Model::find_context(const Step& step, int layer, Inputs x, int thread) {
    const Layer& at = layers_[layer];
    const int mixed = mixed_width(at), nodes = step.nodes;
    heads_products(at, x, nodes, thread);
    pool.barrier();
    const Share rotated(nodes, thread, pool.threads());
    for (int n = rotated.first; n < rotated.last; n++) rotate_and_store(layer, n);
    pool.barrier();
    attend(layer, thread);
    pool.barrier();
    if (thread == 0) next_unit_.store(0);
    if (sizes.gated) {
        open_context(at, nodes, thread);
    } else if (!divisions_[at.division].in_groups) {
        quantise_context(at, &mixed_[0], mixed, nodes, thread);
    }
}

// Queries, keys, values and, where there is one, the gate of these rows.
void Model::heads_products(const Layer& at, Inputs x, int rows, int thread) {
    const int mixed = mixed_width(at), keys = at.kind.kv_heads * at.kind.head_size;
    float *query = &qkv_[0], *key = query + mixed, *value = key + keys;
    const int width = (int)qkv_width(at);
    if (at.kind.reads) {
        multiply({&at.query}, {query}, x, rows, width, false, thread);
    } else if (at.kind.keyed_values) {
        multiply({&at.query, &at.key}, {query, key}, x, rows, width, false, thread);
    } else if (sizes.gated) {
        multiply({&at.query, &at.key, &at.value, &at.gate}, {query, key, value, value + keys}, x,
                 rows, width, false, thread);
    } else {
        multiply({&at.query, &at.key, &at.value}, {query, key, value}, x, rows, width, false, thread);
    }
}

// Attention's context times the sigmoid of its gate, as what the last product reads.
void Model::open_context(const Layer& at, int nodes, int thread) {
    const int width = mixed_width(at), keys = at.kind.kv_heads * at.kind.head_size;
    const Share mine = columns_of(nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        const float* gate = &qkv_[n * qkv_width(at) + width + 2 * keys];
        float* context = &mixed_[(size_t)n * width];
        if (is_float(at.output.format)) {
            kernels->gates[kSigmoid](gate, context, width, context);
        } else {
            kernels->gates_quantise[kSigmoid](gate, context, width,
                                              column(mixed_q_.data(), n, width), n % kLanes);
        }
    }
    pool.barrier();
}

// What attention found, to what its last product reads.
void Model::quantise_context(const Layer& at, const float* context, int width, int nodes, int thread) {
    if (is_float(at.output.format)) return;
    const Share mine = columns_of(nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        kernels->quantise(context + (size_t)n * width, width, column(mixed_q_.data(), n, width),
                          n % kLanes);
    }
    pool.barrier();
}

// The last product of attention: its context to the residual stream.
void Model::bring_out(const Layer& at, const float* context, int nodes, int thread) {
    const bool add = adds(at, at.attention_end_norm);
    multiply({&at.output}, {add ? &stream_[0] : &branch_[0]}, {mixed_q_.data(), context}, nodes,
             sizes.hidden, add, thread);
    pool.barrier();
    if (!add) end_branch(at, at.attention_end_norm, nodes, thread);
}

// What branch_ holds goes to the stream: normed where there is a norm, times the layer's factor. Then
// `scalar` multiplies the stream.
void Model::end_branch(const Layer& layer, const float* norm, int nodes, int thread, float scalar) {
    const int hidden = sizes.hidden;
    const Share mine = columns_of(nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        float *x = &stream_[(size_t)n * hidden], *branch = &branch_[(size_t)n * hidden];
        if (norm) put_norm(branch, norm, sizes.norm_eps, hidden, branch);
        for (int i = 0; i < hidden; i++) x[i] += branch[i] * layer.kind.residual;
        for (int i = 0; scalar != 1.0f && i < hidden; i++) x[i] *= scalar;
    }
    pool.barrier();
}

void Model::ffn_layer(const Step& step, int layer, int thread) {
    const Layer& at = layers_[layer];
    const int nodes = step.nodes;
    Wanted wanted = {&at.feed.gate, &at.feed.up};
    if (at.kind.experts && !at.kind.beside) wanted.groups = at.reads_groups, wanted.floats = true;
    put_normed(nullptr, nodes, at.ffn_norm, wanted, thread);
    pool.barrier();
    const bool add = adds(at, at.ffn_end_norm);
    if (at.kind.beside) {
        feed_beside(at, nodes, thread);
    } else if (at.kind.experts) {
        mixture(at, nodes, thread);
    } else {
        feed_all(at, nodes, add ? &stream_[0] : &branch_[0], add, thread);
    }
    const float scalar = sizes.vectors ? 1.0f : scalar_of(at);  // Vectors come before it.
    if (!add) end_branch(at, at.ffn_end_norm, nodes, thread, scalar);
}

// The feed-forward that every node visits, from `normed()`.
void Model::feed_all(const Layer& at, int nodes, float* out, bool add, int thread) {
    const int width = at.kind.beside ? at.kind.beside : at.kind.ffn;
    const Visit all = {&at.feed, nodes, width, normed(), &gate_[0], &up_[0], ffn_q_.data(), out};
    multiply_gates(all, at.kind.gate, thread);
    pool.barrier();
    multiply({&at.feed.down}, {out}, {all.between, all.gate}, nodes, sizes.hidden, add, thread);
    pool.barrier();
}

// The gate and up of some groups of numbers, and what activation makes of them: no thread waits for
// what another has multiplied.
void Model::multiply_gates(const Visit& visit, int kind, int thread) {
    const Matrix &gate = visit.feed->gate, &up = visit.feed->up;
    const Share mine((visit.width + kGroup - 1) / kGroup, thread, pool.threads());
    const int each = kGroup / kBlock, blocks = gate.blocks();
    const int last = mine.last * each < blocks ? mine.last * each : blocks;
    const bool adapted = lower({&gate, &up}, visit.x, visit.rows, thread);
    int place = 0;
    for (const auto& [w, out] : {std::pair(&gate, visit.gate), std::pair(&up, visit.up)}) {
        const Target target = {out, visit.width, false};
        multiply_blocks(*w, visit.x, visit.rows, mine.first * each, last, target);
        if (adapted) raise(*w, place++, visit.x, visit.rows, mine.first * each, last, target);
    }
    for (int row = 0; row < visit.rows; row++) activate(visit, kind, row, mine);
}

// silu(gate) * up of these groups of a row, or what the layer has for it, quantised, or in gate's
// place.
void Model::activate(const Visit& visit, int kind, int row, Share groups) const {
    const int begin = groups.first * kGroup, width = visit.width;
    const int count = (groups.last * kGroup < width ? groups.last * kGroup : width) - begin;
    if (count <= 0) return;
    float* gate = visit.gate + (size_t)row * width + begin;
    const float* up = visit.up + (size_t)row * width + begin;
    if (is_float(visit.feed->down.format)) {
        kernels->gates[kind](gate, up, count, gate);
    } else {
        Group* to = column(visit.between, row, width) + groups.first;
        kernels->gates_quantise[kind](gate, up, count, to, row % kLanes);
    }
}

// Norms over all query heads at once, and over all key heads.
void Model::put_wide_norms(const Layer& layer, float* x) const {
    const int queries = mixed_width(layer), keys = layer.kind.kv_heads * layer.kind.head_size;
    put_norm(x, layer.query_norm, sizes.norm_eps, queries, x);
    put_norm(x + queries, layer.key_norm, sizes.norm_eps, keys, x + queries);
}

void Model::rotate_and_store(int layer, int node) {
    const Layer& at = layers_[layer];
    const int size = at.kind.head_size, half = size / 2;
    const bool wide = at.kind.wide_norms;
    const float *cosine = &cosine_[angles(at, node)], *sine = &sine_[angles(at, node)];
    const float *query_norm = wide ? nullptr : at.query_norm, *key_norm = wide ? nullptr : at.key_norm;
    float* x = &qkv_[(size_t)node * qkv_width(at)];
    const int64_t place = (at.windowed ? window_place_of_ : place_of_)[node];
    if (at.kind.keyed_values) {
        const int keys = at.kind.kv_heads * size;
        memcpy(x + mixed_width(at) + keys, x + mixed_width(at), sizeof(float) * keys);
    }
    const auto turn = [&](const float* norm, float scale) {
        if (!norm || !at.kind.late_norms) {
            return kernels->rotate(x, norm, sizes.norm_eps, cosine, sine, half, scale);
        }
        kernels->rotate(x, nullptr, 0.0f, cosine, sine, half, 1.0f);
        kernels->norm(x, norm, kernels->inverse_rms(x, size, sizes.norm_eps) * scale, size, x);
    };
    if (wide) put_wide_norms(at, x);
    for (int head = 0; head < sizes.heads; head++, x += size) turn(query_norm, at.kind.score_scale);
    if (at.kind.reads) return;
    for (int head = 0; head < at.kind.kv_heads; head++, x += size) {
        turn(key_norm, 1.0f);
        keep(x, plane(layer, 0, head), size, place);
    }
    for (int head = 0; head < at.kind.kv_heads; head++, x += size) {
        if (at.kind.normed_values) put_norm(x, ones_.data(), sizes.norm_eps, size, x);
        keep(x, plane(layer, 1, head), size, place);
    }
}

// One head's key or value into its place.
void Model::keep(const float* x, uint8_t* plane, int64_t size, int64_t place) const {
    uint8_t* row = plane + place * row_bytes(sizes.cache_item, (int)size);
    if (sizes.cache_item == kFloats) {
        memcpy(row, x, size * sizeof(float));
    } else if (sizes.cache_item == kBlocks) {
        kernels->to_blocks(x, (int)size, row);
    } else {
        kernels->to_halves(x, (int)size, (uint16_t*)row);
    }
}

// All matrix products of a step of `rows` rows that all want logits, and nothing between them: what
// the rest of a step is measured against.
void Model::products(int rows, float* logits) {
    adapting_ = false;
    pool.run([&](int thread) {
        const int hidden = sizes.hidden;
        for (const Layer& at : layers_) {
            const int ffn = at.kind.ffn;
            const float* context = at.kind.recurrent ? found_.data() : mixed_.data();
            if (sizes.rank) {
                latent_products(at, rows, thread);
            } else if (at.kind.recurrent) {
                net_products(at, normed(), rows, thread);
            } else {
                heads_products(at, normed(), rows, thread);
            }
            pool.barrier();
            multiply({&at.output}, {&stream_[0]}, {mixed_q_.data(), context}, rows, hidden, false,
                     thread);
            pool.barrier();
            if (sizes.vectors) {
                multiply({&at.vector_gate}, {&gate_[0]}, normed(), rows, sizes.vectors, false, thread);
                pool.barrier();
                multiply({&at.vector_out}, {&stream_[0]}, {ffn_q_.data(), gate_.data()}, rows, hidden,
                         false, thread);
                pool.barrier();
            }
            if (at.kind.beside) feed_all(at, rows, &stream_[0], false, thread);
            if (at.kind.experts) {
                multiply({&at.router}, {&scores_of_[0]}, normed(), rows, at.kind.experts + 1, false,
                         thread);
                for (int i = 0; thread == 0 && i < rows * at.kind.top_k; i++) {
                    chosen_[i] = i % at.kind.experts;
                }
                visit_experts(at, rows, thread);
                continue;
            }
            multiply({&at.feed.gate, &at.feed.up}, {&gate_[0], &up_[0]}, normed(), rows, ffn, false,
                     thread);
            pool.barrier();
            multiply({&at.feed.down}, {&stream_[0]}, {ffn_q_.data(), gate_.data()}, rows, hidden,
                     false, thread);
            pool.barrier();
        }
        multiply({&head_}, {logits}, normed(), rows, sizes.vocab, false, thread);
    });
}

}  // namespace forerun
