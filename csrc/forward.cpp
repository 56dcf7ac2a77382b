// One step: every planned row's nodes through all layers.
//
// Every thread runs the same program (`run`) and takes its share of each phase; a barrier ends a
// phase. The order in which one number is computed never depends on the shares.
#include <cmath>
#include <cstring>

#include "model.h"

namespace forerun {

std::string Model::forward(const Step& step) {
    const std::string fault = check(step);
    if (!fault.empty()) return fault;
    prepare(step);
    const std::function<void(int)> work = [&](int thread) { run(step, thread); };
    pool.run(work);
    return "";
}

void Model::run(const Step& step, int thread) {
    embed(step, thread);
    for (int layer = 0; layer < sizes.layers; layer++) {
        keep_taps(step, layer, thread);
        attention_layer(step, layer, thread);
        ffn_layer(step, layer, thread);
    }
    keep_taps(step, sizes.layers, thread);
    if (step.scored) head(step, thread);
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
}

// A node's cosines and sines, by every rope.
void Model::put_angles(int node) {
    const size_t half = rope_size() / 2, count = factors_.size() * half;
    for (size_t i = 0; i < count; i++) {
        const double angle = (float)position_[node] * frequencies_[i];
        const float factor = factors_[i / half];
        cosine_[node * count + i] = (float)std::cos(angle) * (frequencies_[i] ? factor : 1.0f);
        sine_[node * count + i] = (float)std::sin(angle) * factor;
    }
}

// out = W x for a stack of matrices that share their input; out[i] belongs to matrix i.
void Model::multiply(std::initializer_list<const Matrix*> stack,
                     std::initializer_list<float*> outs, Inputs x, int rows, int stride, bool add,
                     int thread) {
    int total = 0;
    for (const Matrix* w : stack) total += w->blocks();
    Share share(total, thread, pool.threads());
    auto out = outs.begin();
    for (const Matrix* w : stack) {
        const int first = share.first < 0 ? 0 : share.first;
        const int last = share.last < w->blocks() ? share.last : w->blocks();
        const Target target = {*out, stride, add};
        if (first < last && is_float(w->format)) {
            kernels->float_product(*w, x.floats, rows, first, last, target);
        } else if (first < last) {
            kernels->product(*w, x.groups, rows, first, last, target);
        }
        share.first -= w->blocks();
        share.last -= w->blocks();
        ++out;
    }
}

// Row `row` of `normed()`: x after RMSNorm, or as it is where there is no norm.
void Model::put_normed(const float* x, const float* weight, int row, Wanted wanted) {
    const int hidden = sizes.hidden;
    Group* groups = column(hidden_q_.data(), row, hidden);
    float* floats = &hidden_f_[(size_t)row * hidden];
    if (!weight) {
        if (wanted.groups) kernels->quantise(x, hidden, groups, row % kLanes);
        if (wanted.floats) memcpy(floats, x, sizeof(float) * hidden);
        return;
    }
    if (wanted.groups) {
        kernels->norm_quantise(x, weight, sizes.norm_eps, hidden, groups, row % kLanes);
    }
    if (wanted.floats) kernels->norm(x, weight, sizes.norm_eps, hidden, floats);
}

// What enters `layer` is kept where a draft head asked for it. No barrier: a thread copies the
// columns that it reads itself.
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
    const int hidden = sizes.hidden, nodes = step.nodes;
    const Share mine = columns_of(nodes, thread, pool.threads());
    const Layer& at = layers_[layer];
    const Matrix& first = sizes.query_rank ? at.query_down : at.query;
    const Matrix& last = sizes.rank ? at.key : at.value;
    for (int n = mine.first; n < mine.last; n++) {
        put_normed(&stream_[(size_t)n * hidden], at.attention_norm, n, {&first, &at.key, &last});
    }
    pool.barrier();
    if (sizes.rank) return mix_latent(step, layer, normed(), thread);
    mix(step, layer, normed(), thread);
}

// Attention of `layer` from its input `x` to the residual stream.
void Model::mix(const Step& step, int layer, Inputs x, int thread) {
    const Layer& at = layers_[layer];
    const int mixed = sizes.heads * sizes.head_size;
    const int keys = sizes.kv_heads * sizes.head_size, nodes = step.nodes;
    multiply({&at.query, &at.key, &at.value},
             {&qkv_[0], &qkv_[mixed], &qkv_[mixed + keys]}, x, nodes,
             (int)qkv_width(), false, thread);
    pool.barrier();
    const Share rotated(nodes, thread, pool.threads());
    for (int n = rotated.first; n < rotated.last; n++) rotate_and_store(layer, n);
    pool.barrier();
    attend(layer, thread);
    pool.barrier();
    if (thread == 0) next_unit_.store(0);
    bring_out(at, &mixed_[0], mixed, nodes, thread);
}

// The last product of attention: context float32[nodes][width] to the residual stream.
void Model::bring_out(const Layer& at, float* context, int width, int nodes, int thread) {
    const Share mine = columns_of(nodes, thread, pool.threads());
    for (int n = mine.first; !is_float(at.output.format) && n < mine.last; n++) {
        kernels->quantise(context + (size_t)n * width, width, column(mixed_q_.data(), n, width),
                          n % kLanes);
    }
    pool.barrier();
    const bool add = adds(at, at.attention_end_norm);
    multiply({&at.output}, {add ? &stream_[0] : &branch_[0]}, {mixed_q_.data(), context}, nodes,
             sizes.hidden, add, thread);
    pool.barrier();
    if (!add) end_branch(at, at.attention_end_norm, nodes, thread);
}

// What branch_ holds goes to the stream: normed where there is a norm, times the layer's factor.
void Model::end_branch(const Layer& layer, const float* norm, int nodes, int thread) {
    const int hidden = sizes.hidden;
    const Share mine = columns_of(nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        float *x = &stream_[(size_t)n * hidden], *branch = &branch_[(size_t)n * hidden];
        if (norm) kernels->norm(branch, norm, sizes.norm_eps, hidden, branch);
        for (int i = 0; i < hidden; i++) x[i] += branch[i] * layer.kind.residual;
    }
    pool.barrier();
}

void Model::ffn_layer(const Step& step, int layer, int thread) {
    const Layer& at = layers_[layer];
    const int hidden = sizes.hidden, nodes = step.nodes;
    const Share mine = columns_of(nodes, thread, pool.threads());
    Wanted wanted = {&at.feed.gate, &at.feed.up};
    if (at.kind.experts) wanted.groups = at.reads_groups, wanted.floats = true;
    for (int n = mine.first; n < mine.last; n++) {
        put_normed(&stream_[(size_t)n * hidden], at.ffn_norm, n, wanted);
    }
    pool.barrier();
    const bool add = adds(at, at.ffn_end_norm);
    if (at.kind.experts) {
        mixture(at, nodes, thread);
    } else {
        const Visit all = {&at.feed,  nodes,         at.kind.ffn, normed(), &gate_[0],
                           &up_[0], ffn_q_.data(), add ? &stream_[0] : &branch_[0]};
        multiply({&at.feed.gate, &at.feed.up}, {all.gate, all.up}, all.x, nodes, all.width, false,
                 thread);
        pool.barrier();
        activate(all, at.kind.gate, thread);
        pool.barrier();
        multiply({&at.feed.down}, {all.out}, {all.between, all.gate}, nodes, hidden, add, thread);
        pool.barrier();
    }
    if (!add) end_branch(at, at.ffn_end_norm, nodes, thread);
}

// silu(gate) * up, or what the layer has for it, quantised, or in gate's place: group by group, so
// that every thread has some even of one row.
void Model::activate(const Visit& visit, int kind, int thread) {
    const Joined as_floats = kernels->gates[kind];
    const JoinedQuantised as_groups = kernels->gates_quantise[kind];
    const bool floats = is_float(visit.feed->down.format);
    const int width = visit.width, groups = (width + kGroup - 1) / kGroup;
    const Share share((visit.rows + kLanes - 1) / kLanes * groups, thread, pool.threads());
    for (int piece = share.first; piece < share.last; piece++) {
        const int begin = piece % groups * kGroup, first = piece / groups * kLanes;
        const int count = width - begin < kGroup ? width - begin : kGroup;
        for (int n = first; n < first + kLanes && n < visit.rows; n++) {
            float* gate = visit.gate + (size_t)n * width + begin;
            const float* up = visit.up + (size_t)n * width + begin;
            if (floats) {
                as_floats(gate, up, count, gate);
            } else {
                as_groups(gate, up, count, visit.between + piece, n % kLanes);
            }
        }
    }
}

// Norms over all query heads at once, and over all key heads.
void Model::put_wide_norms(const Layer& layer, float* x) const {
    const int queries = sizes.heads * sizes.head_size, keys = sizes.kv_heads * sizes.head_size;
    kernels->norm(x, layer.query_norm, sizes.norm_eps, queries, x);
    kernels->norm(x + queries, layer.key_norm, sizes.norm_eps, keys, x + queries);
}

void Model::rotate_and_store(int layer, int node) {
    const Layer& at = layers_[layer];
    const int size = sizes.head_size, half = size / 2;
    const bool wide = at.kind.wide_norms;
    const float *cosine = &cosine_[angles(at, node)], *sine = &sine_[angles(at, node)];
    const float *query_norm = wide ? nullptr : at.query_norm, *key_norm = wide ? nullptr : at.key_norm;
    float* x = &qkv_[(size_t)node * qkv_width()];
    const int64_t place = place_of_[node];
    if (wide) put_wide_norms(at, x);
    for (int head = 0; head < sizes.heads; head++, x += size) {
        kernels->rotate(x, query_norm, sizes.norm_eps, cosine, sine, half, at.kind.score_scale);
    }
    for (int head = 0; head < sizes.kv_heads; head++, x += size) {
        kernels->rotate(x, key_norm, sizes.norm_eps, cosine, sine, half, 1.0f);
        keep(x, plane(layer, 0, head), place);
    }
    for (int head = 0; head < sizes.kv_heads; head++, x += size) {
        keep(x, plane(layer, 1, head), place);
    }
}

// One head's key or value into its place.
void Model::keep(const float* x, uint8_t* plane, int64_t place) const {
    const int64_t size = sizes.head_size;
    if (sizes.cache_item == sizeof(float)) {
        memcpy(plane + place * size * sizeof(float), x, size * sizeof(float));
    } else {
        kernels->to_halves(x, (int)size, (uint16_t*)plane + place * size);
    }
}

// All matrix products of a step of `rows` rows that all want logits, and nothing between them: what
// the rest of a step is measured against.
void Model::products(int rows, float* logits) {
    pool.run([&](int thread) {
        const int hidden = sizes.hidden, mixed = sizes.heads * sizes.head_size;
        const int keys = sizes.kv_heads * sizes.head_size;
        for (const Layer& at : layers_) {
            const int ffn = at.kind.ffn;
            if (sizes.rank) {
                latent_products(at, rows, thread);
            } else {
                multiply({&at.query, &at.key, &at.value},
                         {&qkv_[0], &qkv_[mixed], &qkv_[mixed + keys]}, normed(), rows,
                         (int)qkv_width(), false, thread);
            }
            pool.barrier();
            multiply({&at.output}, {&stream_[0]}, {mixed_q_.data(), mixed_.data()}, rows, hidden,
                     false, thread);
            pool.barrier();
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

void Model::head(const Step& step, int thread) {
    const int hidden = sizes.hidden;
    const Share mine = columns_of(step.scored, thread, pool.threads());
    for (int i = mine.first; i < mine.last; i++) {
        const float* x = &stream_[(size_t)step.scored_nodes[i] * hidden];
        put_normed(x, final_norm_, i, {&head_});
    }
    pool.barrier();
    multiply({&head_}, {step.logits}, normed(), step.scored, sizes.vocab, false, thread);
    if (logit_scale_ != 1.0f || logit_cap_ != 0.0f) bend_logits(step, thread);
}

// Scaled and softened, some numbers of a row at a time, so that threads have some even of one row.
void Model::bend_logits(const Step& step, int thread) {
    constexpr int kPiece = 4096;
    const int pieces = (sizes.vocab + kPiece - 1) / kPiece;
    pool.barrier();
    const Share share(step.scored * pieces, thread, pool.threads());
    for (int piece = share.first; piece < share.last; piece++) {
        const int first = piece % pieces * kPiece, rest = sizes.vocab - first;
        const int count = rest < kPiece ? rest : kPiece;
        float* logits = step.logits + (size_t)(piece / pieces) * sizes.vocab + first;
        for (int i = 0; logit_scale_ != 1.0f && i < count; i++) logits[i] *= logit_scale_;
        if (logit_cap_ != 0.0f) kernels->soften(logits, count, logit_cap_);
    }
}

}  // namespace forerun
