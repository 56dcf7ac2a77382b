// Latent attention, absorbed (forerun/networks/layer_spec.py, `Latent`): a head's query is brought into
// the latent's space by a matrix of its own, attends to what is kept of all positions once for all
// heads, and what it finds is brought out of that space by another.
#include <algorithm>
#include <cstring>

#include "model.h"

namespace forerun {
namespace {

int in_columns(int rows) { return (rows + kLanes - 1) / kLanes; }

}  // namespace

// Room for what every head's own matrices read.
void Model::reserve_heads(bool floats) {
    const int widest = std::max(sizes.nope, sizes.rank), nodes = sizes.max_nodes;
    if (floats) {
        heads_f_.resize((size_t)nodes * sizes.heads * widest);
    } else {
        const size_t groups = (widest + kGroup - 1) / kGroup;
        heads_q_.resize(in_columns(nodes) * sizes.heads * groups);
    }
}

// Attention of `layer` from its input `x` to the residual stream.
void Model::mix_latent(const Step& step, int layer, Inputs x, int thread) {
    const Layer& at = layers_[layer];
    const int nodes = step.nodes, values = sizes.heads * sizes.value;
    latent_queries(at, x, nodes, thread);
    const Share kept(nodes, thread, pool.threads());
    for (int n = kept.first; n < kept.last; n++) keep_latent(layer, n);
    enter_heads(at, nodes, thread);
    pool.barrier();
    multiply_heads(at.into, {&qkv_[0], qkv_width(at), false}, sizes.head_size, nodes, thread);
    pool.barrier();
    attend(layer, thread);
    pool.barrier();
    if (thread == 0) next_unit_.store(0);
    leave_heads(at, nodes, thread);
    pool.barrier();
    multiply_heads(at.out_of, {&values_of_[0], values, false}, sizes.value, nodes, thread);
    pool.barrier();
    quantise_context(at, &values_of_[0], values, nodes, thread);
    bring_out(at, &values_of_[0], nodes, thread);
}

// Rows of latent_: what is kept of each node, and its queries, neither normed nor turned yet.
void Model::latent_queries(const Layer& at, Inputs x, int nodes, int thread) {
    const int lower = sizes.query_rank, stride = (int)latent_width();
    float *kept = &latent_[lower], *queries = kept + sizes.head_size;
    const Matrix& first = lower ? at.query_down : at.query;
    multiply({&first, &at.key}, {lower ? &latent_[0] : queries, kept}, x, nodes, stride, false, thread);
    pool.barrier();
    if (!lower) return;
    const bool floats = is_float(at.query.format);
    const Share mine = columns_of(nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        const float* from = &latent_[(size_t)n * stride];
        if (floats) {
            put_norm(from, at.query_norm, sizes.latent_eps, lower, &lower_f_[(size_t)n * lower]);
        } else {
            quantise_norm(from, at.query_norm, sizes.latent_eps, lower,
                          column(lower_q_.data(), n, lower), n % kLanes);
        }
    }
    pool.barrier();
    multiply({&at.query}, {queries}, {lower_q_.data(), lower_f_.data()}, nodes, stride, false, thread);
    pool.barrier();
}

// The normed latent and its turned key into the node's place.
void Model::keep_latent(int layer, int node) {
    const int half = rope_size() / 2;
    float* kept = &latent_[node * latent_width() + sizes.query_rank];
    put_norm(kept, layers_[layer].key_norm, sizes.latent_eps, sizes.rank, kept);
    const size_t turn = angles(layers_[layer], node);
    kernels->rotate(kept + sizes.rank, nullptr, 0.0f, &cosine_[turn], &sine_[turn], half, 1.0f);
    keep(kept, plane(layer, 0, 0), sizes.head_size, place_of_[node]);
}

// Of every head's query what is turned goes to its place behind the latent, and the rest, scaled, to
// where its matrix reads: some columns of a head at a time, so that threads have some even of one row.
void Model::enter_heads(const Layer& at, int nodes, int thread) {
    const int rope = rope_size(), half = rope / 2, nope = sizes.nope, columns = in_columns(nodes);
    const Share mine(sizes.heads * columns, thread, pool.threads());
    for (int piece = mine.first; piece < mine.last; piece++) {
        const int head = piece / columns, first = piece % columns * kLanes;
        for (int n = first; n < first + kLanes && n < nodes; n++) {
            float* query = &latent_[n * latent_width() + sizes.query_rank + sizes.head_size +
                                    (size_t)head * (nope + rope)];
            float* turned = &qkv_[n * qkv_width(at) + (size_t)head * sizes.head_size + sizes.rank];
            memcpy(turned, query + nope, sizeof(float) * rope);
            const size_t turn = angles(at, n);
            kernels->rotate(turned, nullptr, 0.0f, &cosine_[turn], &sine_[turn], half,
                            at.kind.score_scale);
            for (int i = 0; i < nope; i++) query[i] *= at.kind.score_scale;
            put_head(at.into[head], query, head, n, nodes);
        }
    }
}

// What every head found in the latents of others to where its matrix reads.
void Model::leave_heads(const Layer& at, int nodes, int thread) {
    const int columns = in_columns(nodes);
    const Share mine(sizes.heads * columns, thread, pool.threads());
    for (int piece = mine.first; piece < mine.last; piece++) {
        const int head = piece / columns, first = piece % columns * kLanes;
        for (int n = first; n < first + kLanes && n < nodes; n++) {
            const float* found = &mixed_[((size_t)n * sizes.heads + head) * sizes.head_size];
            put_head(at.out_of[head], found, head, n, nodes);
        }
    }
}

// One row of a head's own product.
void Model::put_head(const Matrix& w, const float* x, int head, int node, int nodes) {
    if (is_float(w.format)) {
        memcpy(&heads_f_[((size_t)head * nodes + node) * w.inputs], x, sizeof(float) * w.inputs);
    } else {
        Group* columns = &heads_q_[(size_t)head * in_columns(nodes) * w.groups()];
        kernels->quantise(x, w.inputs, column(columns, node, w.inputs), node % kLanes);
    }
}

// Every head's own product. `out` is the first head's; the next one's begins `apart` numbers on.
void Model::multiply_heads(const std::vector<Matrix>& each, Target out, int apart, int nodes,
                           int thread) {
    const int blocks = each[0].blocks(), inputs = each[0].inputs;
    const Share share((int)each.size() * blocks, thread, pool.threads());
    for (int head = share.first / blocks; head * blocks < share.last; head++) {
        const Matrix& w = each[head];
        const int begin = head * blocks, first = share.first > begin ? share.first - begin : 0;
        const int last = share.last - begin < blocks ? share.last - begin : blocks;
        const Target target = {out.data + (int64_t)head * apart, out.stride, out.add};
        if (is_float(w.format)) {
            const float* x = &heads_f_[(size_t)head * nodes * inputs];
            kernels->float_product(w, x, nodes, first, last, target);
        } else {
            const Group* x = &heads_q_[(size_t)head * in_columns(nodes) * w.groups()];
            kernels->product(w, x, nodes, first, last, target);
        }
    }
}

// The products of a layer's attention but the last, for measurements.
void Model::latent_products(const Layer& at, int rows, int thread) {
    latent_queries(at, normed(), rows, thread);
    multiply_heads(at.into, {&qkv_[0], qkv_width(at), false}, sizes.head_size, rows, thread);
    pool.barrier();
    const int values = sizes.heads * sizes.value;
    multiply_heads(at.out_of, {&values_of_[0], values, false}, sizes.value, rows, thread);
}

}  // namespace forerun
