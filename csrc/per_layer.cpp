// What some layers have besides (forerun/networks/layer_spec.py): vectors of each token's own, and a
// feed-forward beside experts.
#include <cmath>

#include "model.h"

namespace forerun {

// The tokens' vectors for all layers: what the step brought, and a product of the embeddings.
void Model::make_vectors(const Step& step, int thread) {
    const int each = sizes.vectors, all = sizes.layers * each, nodes = step.nodes;
    const float shrink = 1.0f / std::sqrt((float)sizes.hidden), scale = std::sqrt((float)each);
    const float half = std::sqrt(0.5f);
    put_normed(nullptr, nodes, nullptr, {&vector_projection_}, thread);
    pool.barrier();
    multiply({&vector_projection_}, {&vectors_[0]}, normed(), nodes, all, false, thread);
    pool.barrier();
    const Share mine(nodes * sizes.layers, thread, pool.threads());
    for (int i = mine.first; i < mine.last; i++) {
        float* x = &vectors_[(size_t)i * each];
        const float* row = step.token_rows + (size_t)i * each;
        for (int k = 0; k < each; k++) x[k] *= shrink;
        put_norm(x, vector_norm_, sizes.norm_eps, each, x);
        for (int k = 0; k < each; k++) x[k] = (x[k] + row[k] * scale) * half;
    }
    pool.barrier();
}

// The stream after layer `number`: what its vectors make is added, and its scalar multiplies all.
void Model::add_vectors(const Layer& at, int number, int nodes, int thread) {
    const int each = sizes.vectors, hidden = sizes.hidden;
    put_normed(nullptr, nodes, nullptr, {&at.vector_gate}, thread);
    pool.barrier();
    multiply({&at.vector_gate}, {&gate_[0]}, normed(), nodes, each, false, thread);
    pool.barrier();
    const Share mine = columns_of(nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        const float* vector = &vectors_[((size_t)n * sizes.layers + number) * each];
        float* gate = &gate_[(size_t)n * each];
        if (is_float(at.vector_out.format)) {
            kernels->gates[at.kind.gate](gate, vector, each, gate);
        } else {
            kernels->gates_quantise[at.kind.gate](gate, vector, each,
                                                  column(ffn_q_.data(), n, each), n % kLanes);
        }
    }
    pool.barrier();
    multiply({&at.vector_out}, {&branch_[0]}, {ffn_q_.data(), gate_.data()}, nodes, hidden, false,
             thread);
    pool.barrier();
    end_branch(at, at.vector_norm, nodes, thread, scalar_of(at));
}

// A feed-forward, from `normed()`, and experts, from the stream: together into branch_.
void Model::feed_beside(const Layer& at, int nodes, int thread) {
    const int hidden = sizes.hidden;
    feed_all(at, nodes, &beside_[0], false, thread);
    if (at.router_norm) {
        put_normed(nullptr, nodes, at.router_norm, {&at.router}, thread);
        pool.barrier();
        route_all(at, nodes, thread);
        pool.barrier();
    }
    Wanted wanted = {&at.router};
    wanted.groups = at.reads_groups, wanted.floats = true;
    put_normed(nullptr, nodes, at.experts_norm, wanted, thread);
    pool.barrier();
    if (!at.router_norm) route_all(at, nodes, thread);
    visit_experts(at, nodes, thread);
    mix_experts(at, nodes, thread);
    const Share mine = columns_of(nodes, thread, pool.threads());
    for (int n = mine.first; n < mine.last; n++) {
        float *fed = &beside_[(size_t)n * hidden], *mixed = &branch_[(size_t)n * hidden];
        put_norm(fed, at.fed_norm, sizes.norm_eps, hidden, fed);
        put_norm(mixed, at.mixed_norm, sizes.norm_eps, hidden, mixed);
        for (int i = 0; i < hidden; i++) mixed[i] += fed[i];
    }
    // The branch's end divides the rows among threads alike, so no barrier is needed.
}

}  // namespace forerun
