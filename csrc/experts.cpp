// A mixture of experts: which of them a node visits, and the products of all that one of them has in
// a step. Weights of experts that no node visits are not read.
//
// A node's choice, its rows' bits and the order in which they are added follow from its own numbers
// (forerun/executors/torch/decoder/experts.py, `routes`), so its bits are the same in any company.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "model.h"

namespace forerun {
namespace {

constexpr float kLeast = 1e-20f;  // keeps a sum of sigmoids from zero

// Takes the greatest of what is not taken: the first of equals, and where none can be compared the
// first that is left.
int take_best(const float* values, int count, uint8_t* taken) {
    int best = -1;
    for (int i = 0; i < count; i++) {
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    }
    taken[best] = 1;
    return best;
}

// Logits become scores.
void score(float* logits, int count, bool sigmoid) {
    if (sigmoid) {
        for (int i = 0; i < count; i++) logits[i] = 1.0f / (1.0f + std::exp(-logits[i]));
        return;
    }
    float largest = logits[0], total = 0.0f;
    for (int i = 1; i < count; i++) largest = logits[i] > largest ? logits[i] : largest;
    for (int i = 0; i < count; i++) total += logits[i] = std::exp(logits[i] - largest);
    for (int i = 0; i < count; i++) logits[i] /= total;
}

// Marks the experts of all groups but the `kept` whose `summed` greatest numbers have the greatest sums.
void leave_groups(const float* ranked, const LayerKind& kind, uint8_t* taken) {
    const int count = kind.experts, groups = kind.groups, each = count / groups;
    std::vector<float> sums(groups);
    std::vector<uint8_t> chosen(groups, 0);
    for (int g = 0; g < groups; g++) {
        const float* of = ranked + g * each;
        float first = -INFINITY, second = -INFINITY;
        for (int i = 0; i < each; i++) {
            if (of[i] > first) {
                second = first;
                first = of[i];
            } else if (of[i] > second) {
                second = of[i];
            }
        }
        sums[g] = kind.summed == 1 ? first : first + second;
    }
    for (int i = 0; i < kind.kept; i++) take_best(sums.data(), groups, chosen.data());
    for (int i = 0; i < count; i++) taken[i] = !chosen[i / each];
}

void copy_lane(const Group* from, int from_lane, Group* to, int to_lane, int groups) {
    for (int g = 0; g < groups; g++) {
        memcpy(to[g].q[to_lane], from[g].q[from_lane], kGroup);
        to[g].scale[to_lane] = from[g].scale[from_lane];
        to[g].sum[to_lane] = from[g].sum[from_lane];
        to[g].excess[to_lane] = from[g].excess[from_lane];
        memcpy(to[g].excess32[to_lane], from[g].excess32[from_lane], sizeof to[g].excess32[0]);
    }
}

int in_columns(int rows) { return (rows + kLanes - 1) / kLanes; }
int groups_in(int width) { return (width + kGroup - 1) / kGroup; }

}  // namespace

// Rows that all experts may have in a step, each one's filled up to whole columns.
size_t Model::expert_rows(const LayerKind& kind) const {
    const size_t rows = (size_t)sizes.max_nodes * kind.top_k;
    const size_t visited = std::min((size_t)kind.experts, rows);
    return (rows + visited * (kLanes - 1)) / kLanes * kLanes;
}

// Room for what a layer of experts needs between its products.
void Model::reserve_for(const LayerKind& kind) {
    const auto reach = [](auto& room, size_t size) {
        if (room.size() < size) room.resize(size);
    };
    const size_t nodes = sizes.max_nodes, rows = expert_rows(kind), columns = rows / kLanes;
    const size_t alone = in_columns((int)nodes);  // columns of the expert that every node visits
    reach(scores_of_, nodes * (kind.experts + 1));
    reach(chosen_, nodes * kind.top_k);
    reach(share_, nodes * kind.top_k);
    reach(row_at_, nodes * kind.top_k);
    reach(rows_of_, kind.experts);
    reach(gathered_q_, columns * groups_in(sizes.hidden));
    reach(expert_out_, (rows + alone * kLanes) * sizes.hidden);
    reach(gate_, rows * kind.ffn + alone * kLanes * kind.shared);
    reach(up_, rows * kind.ffn + alone * kLanes * kind.shared);
    reach(ffn_q_, columns * groups_in(kind.ffn) + alone * groups_in(kind.shared));
    visits_.reserve(kind.experts + 1);
}

void Model::note_format(int layer, int which, int format) {
    if (layer < 0) return;
    Layer& at = layers_[layer];
    if (sizes.rank && which > 9 + 3 * (int)at.experts.size()) reserve_heads(is_float(format));
    const bool feeds = which >= 4 && which < 9 + 3 * (int)at.experts.size();
    if (feeds && !is_float(format)) at.reads_groups = true;
    if (!feeds || which < 9 || !is_float(format)) return;
    at.gathers_floats = true;
    const size_t floats = expert_rows(at.kind) * sizes.hidden;
    if (gathered_f_.size() < floats) gathered_f_.resize(floats);
}

// The feed-forward of a layer of experts from `normed()` to the stream, or to branch_.
void Model::mixture(const Layer& layer, int nodes, int thread) {
    route_all(layer, nodes, thread);
    visit_experts(layer, nodes, thread);
    mix_experts(layer, nodes, thread);
}

// Every node's experts, from `normed()`.
void Model::route_all(const Layer& layer, int nodes, int thread) {
    const int experts = layer.kind.experts;
    const Share mine(nodes, thread, pool.threads());
    if (layer.shared_gate.tiles) {
        multiply({&layer.router, &layer.shared_gate}, {&scores_of_[0], &scores_of_[experts]},
                 normed(), nodes, experts + 1, false, thread);
    } else {
        multiply({&layer.router}, {&scores_of_[0]}, normed(), nodes, experts + 1, false, thread);
    }
    pool.barrier();
    for (int n = mine.first; n < mine.last; n++) route(layer, n);
}

// The experts of one node, best first, and their weights.
void Model::route(const Layer& layer, int node) {
    const LayerKind& kind = layer.kind;
    const int count = kind.experts;
    float* scores = &scores_of_[(size_t)node * (count + 1)];
    score(scores, count, kind.sigmoid);
    std::vector<float> ranked(scores, scores + count);
    for (int i = 0; layer.correction && i < count; i++) ranked[i] += layer.correction[i];
    std::vector<uint8_t> taken(count, 0);
    if (kind.groups > 1) leave_groups(ranked.data(), kind, taken.data());
    int32_t* chosen = &chosen_[(size_t)node * kind.top_k];
    float *weights = &share_[(size_t)node * kind.top_k], total = kLeast;
    for (int i = 0; i < kind.top_k; i++) {
        chosen[i] = take_best(ranked.data(), count, taken.data());
        weights[i] = scores[chosen[i]];
    }
    for (int i = 0; i < kind.top_k; i++) total += weights[i];
    for (int i = 0; i < kind.top_k; i++) {
        if (kind.normalised) weights[i] /= total;
        weights[i] *= kind.router_scale;
        if (layer.expert_scale) weights[i] *= layer.expert_scale[chosen[i]];
    }
}

// Who is visited, by how many, and where each node's rows are.
void Model::list_visits(const Layer& layer, int nodes) {
    const LayerKind& kind = layer.kind;
    const int hidden = sizes.hidden, choices = nodes * kind.top_k;
    visits_.clear();
    std::fill_n(rows_of_.begin(), kind.experts, 0);
    for (int i = 0; i < choices; i++) rows_of_[chosen_[i]]++;
    float *gate = &gate_[0], *up = &up_[0];
    Group* between = ffn_q_.data();
    int first = 0;  // of the rows of the next one
    if (adapting_) gathered_adapters_.resize(expert_rows(kind));
    const auto visit = [&](const FeedForward& feed, int rows, int width, Inputs x) {
        visits_.push_back({&feed, rows, width, x, gate, up, between,
                           &expert_out_[(size_t)first * hidden]});
        const int columns = in_columns(rows);
        gate += (size_t)columns * kLanes * width;
        up += (size_t)columns * kLanes * width;
        between += (size_t)columns * groups_in(width);
        first += columns * kLanes;
    };
    for (int e = 0; e < kind.experts; e++) {
        const int rows = rows_of_[e];
        rows_of_[e] = first;
        if (!rows) continue;
        const float* floats = gathered_f_.empty() ? nullptr : &gathered_f_[(size_t)first * hidden];
        visit(layer.experts[e], rows, kind.ffn,
              {&gathered_q_[(size_t)(first / kLanes) * groups_in(hidden)], floats,
               adapting_ ? &gathered_adapters_[first] : nullptr});
    }
    for (int i = 0; i < choices; i++) row_at_[i] = rows_of_[chosen_[i]]++;
    if (kind.shared) visit(layer.feed, nodes, kind.shared, normed());
}

// Every choice's row of `normed()` to the rows of its expert.
void Model::gather(const Layer& layer, int nodes, int thread) {
    const int hidden = sizes.hidden, groups = groups_in(hidden), top_k = layer.kind.top_k;
    const Share mine(nodes * top_k, thread, pool.threads());
    for (int i = mine.first; i < mine.last; i++) {
        const int node = i / top_k, row = row_at_[i];
        if (adapting_) gathered_adapters_[row] = adapter_of_[node];
        if (layer.reads_groups) {
            Group* to = &gathered_q_[(size_t)(row / kLanes) * groups];
            copy_lane(column(hidden_q_.data(), node, hidden), node % kLanes, to, row % kLanes,
                      groups);
        }
        if (layer.gathers_floats) {
            memcpy(&gathered_f_[(size_t)row * hidden], &hidden_f_[(size_t)node * hidden],
                   sizeof(float) * hidden);
        }
    }
}

// From the choices to what each visited expert makes of its rows.
void Model::visit_experts(const Layer& layer, int nodes, int thread) {
    pool.barrier();
    if (thread == 0) list_visits(layer, nodes);
    pool.barrier();
    gather(layer, nodes, thread);
    pool.barrier();
    // Where adapters add, a visit writes what threads may still read of the one before (`lower`).
    for (const Visit& at : visits_) {
        multiply_gates(at, layer.kind.gate, thread);
        if (adapting_) pool.barrier();
    }
    pool.barrier();
    for (const Visit& at : visits_) {
        multiply({&at.feed->down}, {at.out}, {at.between, at.gate, at.x.adapters}, at.rows, sizes.hidden,
                 false, thread);
        if (adapting_) pool.barrier();
    }
    pool.barrier();
}

// A node's rows times their weights, the best first, the shared expert's last.
void Model::mix_experts(const Layer& layer, int nodes, int thread) {
    constexpr int kPiece = 64;  // numbers of a node, so that every thread has some even of one
    const LayerKind& kind = layer.kind;
    const int hidden = sizes.hidden, pieces = (hidden + kPiece - 1) / kPiece, top_k = kind.top_k;
    const bool add = adds(layer, layer.ffn_end_norm);
    const Share mine(nodes * pieces, thread, pool.threads());
    for (int piece = mine.first; piece < mine.last; piece++) {
        const int node = piece / pieces, begin = piece % pieces * kPiece;
        const int count = std::min(kPiece, hidden - begin);
        float sum[kPiece];
        for (int k = 0; k < top_k; k++) {
            const size_t choice = (size_t)node * top_k + k;
            const float* row = &expert_out_[(size_t)row_at_[choice] * hidden + begin];
            const float weight = share_[choice];
            for (int i = 0; i < count; i++) sum[i] = (k ? sum[i] : 0.0f) + row[i] * weight;
        }
        if (kind.shared) {
            const float* row = visits_.back().out + (size_t)node * hidden + begin;
            const float* gate = &scores_of_[(size_t)node * (kind.experts + 1) + kind.experts];
            const float share = layer.shared_gate.tiles ? 1.0f / (1.0f + std::exp(-*gate)) : 1.0f;
            for (int i = 0; i < count; i++) sum[i] += row[i] * share;
        }
        float* out = &(add ? stream_ : branch_)[(size_t)node * hidden + begin];
        for (int i = 0; i < count; i++) out[i] = add ? out[i] + sum[i] : sum[i];
    }
    pool.barrier();
}

}  // namespace forerun
