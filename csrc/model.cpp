// What a model holds: weights, the cache of keys and values, buffers.
#include "model.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

namespace forerun {
namespace {

constexpr int kLine = 64;  // bytes of a cache line

int64_t lines_of(const Matrix& w) {
    return w.tiles ? (int64_t)(w.blocks() * w.block_bytes() / kLine) : 0;
}

// The sum of cache lines [first, last), eight bytes at a time; they are asked for ahead, as products
// ask. Vectors that every machine's compiler keeps in registers.
uint64_t sum_of_lines(const uint8_t* from, int64_t first, int64_t last) {
    typedef uint64_t Two __attribute__((vector_size(16)));
    constexpr int kAhead = 8192;
    Two sums[4] = {};
    for (int64_t i = first; i < last; i++) {
        const uint8_t* line = from + i * kLine;
        __builtin_prefetch(line + kAhead, 0, 2);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) sums[k] += ((const Two*)line)[k];
    }
    uint64_t sum = 0;
    for (const Two& two : sums) sum += two[0] + two[1];
    return sum;
}

constexpr int kWorthSharing = 16;  // copied nodes from which on the pool's threads share the work

}  // namespace

Region::Region(size_t bytes, bool huge) : bytes_(bytes) {
    if (bytes == 0) return;
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (huge) madvise(data, bytes, MADV_HUGEPAGE);
#else
    (void)huge;
#endif
    data_ = (uint8_t*)data;
}

Region::~Region() {
    if (data_) munmap(data_, bytes_);
}

Model::Model(const Sizes& given, const Ropes& ropes, size_t weight_bytes, const Kernels* chosen,
             Pool* shared)
    : sizes(given),
      kernels(chosen),
      own_pool(shared ? nullptr : new Pool(given.threads)),
      pool(shared ? *shared : *own_pool),
      layers_(given.layers),
      pairs_(ropes.pairs),
      frequencies_(ropes.frequencies, ropes.frequencies + (size_t)ropes.count * ropes.pairs),
      factors_(ropes.factors, ropes.factors + ropes.count),
      weights_(weight_bytes, true),
      places_((int64_t)given.pages * given.page_size + given.max_nodes),
      cache_((size_t)given.cache_bytes * places_ -
             (size_t)given.window_bytes * (given.pages - given.window_pages) * given.page_size),
      states_(sizeof(float) * (size_t)given.recurrent * given.states * given.net_values() *
              given.key_size),
      windows_(sizeof(float) * (size_t)given.recurrent * given.states * given.channels *
               (given.recurrent ? given.convolved - 1 : 0)) {
    const size_t nodes = given.max_nodes, angles = frequencies_.size();
    const size_t columns = (nodes + kLanes - 1) / kLanes;
    const auto groups = [](int width) { return (size_t)(width + kGroup - 1) / kGroup; };
    sights_.resize(nodes);
    position_.resize(nodes);
    row_of_.resize(nodes);
    place_of_.resize(nodes);
    window_place_of_.resize(given.window_pages ? nodes : 0);
    stream_.resize(nodes * given.hidden);
    gate_.resize(nodes * std::max(given.ffn, given.vectors));
    up_.resize(nodes * given.ffn);
    vectors_.resize(nodes * given.layers * given.vectors);
    cosine_.resize(nodes * angles);
    sine_.resize(nodes * angles);
    hidden_q_.resize(columns * groups(given.hidden));
    hidden_f_.resize(nodes * given.hidden);
    mixed_q_.resize(columns * groups(std::max(given.heads * given.value, given.net_output())));
    ffn_q_.resize(columns * groups(std::max(given.ffn, given.vectors)));
    branch_.resize(nodes * given.hidden);
    scratch_.resize(pool.most());
    if (given.rank) {
        latent_.resize(nodes * latent_width());
        lower_f_.resize(nodes * given.query_rank);
        lower_q_.resize(columns * groups(given.query_rank));
        values_of_.resize(nodes * given.heads * given.value);
    }
    for (Layer& layer : layers_) {
        layer.into.resize(given.rank ? given.heads : 0);
        layer.out_of.resize(layer.into.size());
        layer.kind.ffn = given.ffn;
        layer.kind.score_scale = 1.0f / std::sqrt((float)given.head_size);
        layer.kind.residual = 1.0f;
        layer.place = (int)(&layer - layers_.data());
        shape_layer(layer);
    }
    if (given.recurrent) reserve_nets();
}

std::string Model::set_layer(int layer, const LayerKind& kind) {
    if (layer < 0 || layer >= sizes.layers) return "no such layer";
    const int64_t ffn = kind.experts ? (int64_t)kind.top_k * kind.ffn + kind.shared : kind.ffn;
    if (kind.experts && (kind.top_k < 1 || kind.top_k > kind.experts)) return "a top k of no node";
    if (std::max<int64_t>(ffn, kind.beside) > sizes.ffn) return "a feed-forward that is wider than the model's widest";
    const int groups = kind.groups > 1 ? kind.groups : 1;
    if (kind.experts % groups || kind.kept > groups) return "groups that cannot be";
    if (kind.gate < 0 || kind.gate >= kGates) return "a gate that is not known";
    if (kind.rope < 0 || kind.rope >= (int)factors_.size()) return "a rope that is not there";
    Layer& at = layers_[layer];
    at.kind = kind;
    at.place = 0;
    for (int i = 0; i < layer; i++) at.place += layers_[i].kind.recurrent != 0;
    if (kind.recurrent && at.place >= sizes.recurrent) return "a recurrent layer too many";
    if (lender_ == this && kind.reads > layer) {
        return "keys and values of a layer that does not come before it";
    }
    shape_layer(at);
    if (lender_ != this) {
        if (const std::string fault = lends(at.kind); !fault.empty()) return fault;
    }
    if (sizes.heads % at.kind.kv_heads || at.kind.head_size % 8) return "heads that cannot be";
    const int64_t end = at.begin + own_bytes(at) * places_of(at);
    if (at.source == layer && !kind.recurrent && end > (int64_t)cache_.bytes()) {
        return "keys and values too many";
    }
    if (source_of(at).windowed && (!kind.window || kind.window > lender_->sizes.window)) {
        return "keys and values that are given back";
    }
    at.experts.resize(kind.experts);
    if (kind.experts) reserve_for(kind);
    if (kind.beside) beside_.resize((size_t)sizes.max_nodes * sizes.hidden);
    return "";
}

// What is wrong with a layer that reads keys and values of the lender's. Empty: nothing.
std::string Model::lends(const LayerKind& kind) const {
    if (kind.reads < 1 || kind.reads > (int)lender_->layers_.size()) {
        return "keys and values of a layer that the target does not have";
    }
    const Layer& source = lender_->layers_[kind.reads - 1];
    if (source.kind.recurrent || source.kind.reads) return "keys and values of a layer without any";
    if (source.kind.kv_heads != kind.kv_heads || source.kind.head_size != kind.head_size) {
        return "keys and values of another shape than the target's";
    }
    return "";
}

// Bytes of a position's keys and values that are a layer's own.
int64_t Model::own_bytes(const Layer& at) const {
    if (at.kind.recurrent || at.kind.reads) return 0;
    return (int64_t)kinds() * at.kind.kv_heads * head_bytes(at);
}

// What follows from the shape of a layer's keys and values: where they are, who else has it, and room
// for what is between products.
void Model::shape_layer(Layer& at) {
    if (!at.kind.kv_heads) at.kind.kv_heads = sizes.kv_heads;
    if (!at.kind.head_size) at.kind.head_size = sizes.head_size;
    const int number = (int)(&at - layers_.data());
    at.source = at.kind.reads ? at.kind.reads - 1 : number;
    at.windowed = sizes.window_pages && at.kind.window && own_bytes(at);
    at.begin = 0;
    for (int i = 0; i < number; i++) at.begin += own_bytes(layers_[i]) * places_of(layers_[i]);
    const auto same = [&](const Division& division) {
        return division.kv_heads == at.kind.kv_heads && division.head_size == at.kind.head_size;
    };
    const auto found = std::find_if(divisions_.begin(), divisions_.end(), same);
    at.division = (int)(found - divisions_.begin());
    if (found == divisions_.end()) {
        divisions_.emplace_back();
        divisions_.back().kv_heads = at.kind.kv_heads;
        divisions_.back().head_size = at.kind.head_size;
    }
    const auto reach = [](auto& room, size_t size) {
        if (room.size() < size) room.resize(size);
    };
    const size_t nodes = sizes.max_nodes, columns = (nodes + kLanes - 1) / kLanes;
    reach(qkv_, nodes * qkv_width(at));
    reach(mixed_, nodes * mixed_width(at));
    reach(ones_, at.kind.head_size);
    std::fill(ones_.begin(), ones_.end(), 1.0f);
    if (!sizes.rank) reach(mixed_q_, columns * ((mixed_width(at) + kGroup - 1) / kGroup));
}

// 0 to 6: attention and feed-forward; 7 the router, 8 the shared expert's gate, then each expert's
// gate, up and down; then what latent attention has besides: query_down, `into` and `out_of`; or a
// gate, beta and alpha of a delta net, and the two of the tokens' own vectors.
Matrix* Model::matrix(int layer, int which) {
    if (layer == -1) {
        return which == 0 ? &embedding_ : which == 1 ? &head_ : which == 3 ? &vector_projection_ : nullptr;
    }
    if (layer < 0 || layer >= sizes.layers || which < 0) return nullptr;
    Layer& at = layers_[layer];
    Matrix* const all[] = {&at.query,   &at.key,     &at.value,     &at.output,     &at.feed.gate,
                           &at.feed.up, &at.feed.down, &at.router, &at.shared_gate};
    if (which < 9) return all[which];
    const int more = which - 9 - 3 * (int)at.experts.size(), heads = (int)at.into.size();
    Matrix* const gates[] = {&at.gate, &at.beta, &at.alpha, &at.vector_gate, &at.vector_out};
    if (more >= 0 && more < 5 && !heads) return gates[more];
    if (more >= 1 + 2 * heads || (more >= 0 && !heads)) return nullptr;
    if (more >= 0) {
        return !more ? &at.query_down : more <= heads ? &at.into[more - 1] : &at.out_of[more - 1 - heads];
    }
    FeedForward& expert = at.experts[(which - 9) / 3];
    Matrix* const parts[] = {&expert.gate, &expert.up, &expert.down};
    return parts[which % 3];
}

const float** Model::vector(int layer, int which) {
    if (layer == -1) return which == 0 ? &final_norm_ : which == 1 ? &vector_norm_ : nullptr;
    if (layer < 0 || layer >= sizes.layers) return nullptr;
    Layer& at = layers_[layer];
    const float** const all[] = {&at.attention_norm, &at.ffn_norm,           &at.query_norm,
                                 &at.key_norm,       &at.attention_end_norm, &at.ffn_end_norm,
                                 &at.correction,     &at.sinks,
                                 &at.kernel,         &at.rate,
                                 &at.step,           &at.net_norm,
                                 &at.kernel_bias,
                                 &at.vector_norm,    &at.scalar,
                                 &at.router_norm,    &at.expert_scale,
                                 &at.fed_norm,       &at.experts_norm,
                                 &at.mixed_norm};
    return which < 0 || which >= 20 ? nullptr : all[which];
}

void Model::request_aux_hidden_states(const int32_t* layers, int count) {
    set_ring(nullptr, 0, 0);  // Its rows may be of another width.
    aux_layers_.assign(layers, layers + count);
    aux_hidden_states_.resize((size_t)sizes.max_nodes * count * sizes.hidden);
}

std::string Model::copy_aux_hidden_states(int count, float* out) const {
    if (count < 0 || count > last_nodes_) return "more nodes than the last step had";
    const size_t numbers = (size_t)count * aux_layers_.size() * sizes.hidden;
    if (numbers) memcpy(out, aux_hidden_states_.data(), numbers * sizeof(float));
    return "";
}

std::string Model::set_ring(float* ring, int tokens, int width) {
    row_slots_.clear();
    ring_ = nullptr;
    if (ring && (size_t)width != aux_layers_.size() * sizes.hidden) return "features of another width";
    ring_ = ring, ring_tokens_ = tokens;
    return "";
}

void Model::store_in_ring(int node) {
    const size_t slot = row_slots_[row_of_[node]], numbers = aux_layers_.size() * sizes.hidden;
    const size_t place = slot * ring_tokens_ + position_[node] % ring_tokens_;
    memcpy(ring_ + place * numbers, aux_hidden_states(node), numbers * sizeof(float));
}

uint8_t* Model::take(size_t bytes) {
    const size_t begin = (used_ + 63) / 64 * 64;
    if (begin + bytes > weights_.bytes()) return nullptr;
    used_ = begin + bytes;
    return weights_.data() + begin;
}

uint64_t Model::read_weights() {
    std::vector<const Matrix*> read;
    for (const Layer& at : layers_) {
        for (const Matrix* w : {&at.query_down, &at.query, &at.key, &at.value, &at.output, &at.router,
                                &at.shared_gate, &at.feed.gate, &at.feed.up, &at.feed.down,
                                &at.gate, &at.beta, &at.alpha, &at.vector_gate, &at.vector_out}) {
            read.push_back(w);
        }
        for (const Matrix& w : at.into) read.push_back(&w);
        for (const Matrix& w : at.out_of) read.push_back(&w);
        for (int e = 0; e < (at.kind.experts ? at.kind.top_k : 0); e++) {
            const FeedForward& expert = at.experts[e];
            for (const Matrix* w : {&expert.gate, &expert.up, &expert.down}) read.push_back(w);
        }
    }
    read.push_back(&vector_projection_);
    read.push_back(&head_);
    int64_t all = 0;
    for (const Matrix* w : read) all += lines_of(*w);
    std::atomic<uint64_t> total{0};
    pool.run([&](int thread) {
        // Of all lines, one after the other, so that no thread begins anew in every matrix.
        int64_t first = all * thread / pool.threads(), last = all * (thread + 1) / pool.threads();
        uint64_t sum = 0;
        for (const Matrix* w : read) {
            const int64_t here = lines_of(*w);
            sum += sum_of_lines(w->tiles, std::max<int64_t>(first, 0), std::min(last, here));
            first -= here;
            last -= here;
        }
        total += sum;
    });
    return total;
}

uint8_t* Model::plane(int layer, int kind, int head) const {
    const Model& holder = layers_[layer].kind.reads ? *lender_ : *this;
    const Layer& at = source_of(layers_[layer]);
    const int64_t places = holder.places_of(at), first = holder.places_ - places;
    const int64_t before = (kind * at.kind.kv_heads + head) * places - first;
    return holder.cache_.data() + at.begin + before * holder.head_bytes(at);
}

int64_t Model::qkv_width(const Layer& at) const {
    const int64_t gates = sizes.gated ? sizes.heads : 0, own = at.kind.reads ? 0 : 2 * at.kind.kv_heads;
    return (sizes.heads + own + gates) * at.kind.head_size;
}

// Every layer's planes of keys and values: [places][head_bytes()].
std::vector<Plane> Model::planes() const {
    std::vector<Plane> found;
    for (int layer = 0; layer < sizes.layers; layer++) {
        const Layer& at = layers_[layer];
        const size_t bytes = head_bytes(at), count = own_bytes(at) / bytes;
        for (size_t i = 0; i < count; i++) {
            found.push_back({plane(layer, 0, 0) + i * places_of(at) * bytes, bytes, at.windowed});
        }
    }
    return found;
}

void Model::commit(const int32_t* nodes, const int32_t* slots, int count,
                   const int32_t* window_slots) {
    const std::vector<Plane> all = planes();
    const auto copy = [&](int begin, int end) {
        for (int index = begin; index < end; index++) {
            const auto [at, bytes, windowed] = all[index];
            const int32_t* places = windowed ? window_place_of_.data() : place_of_.data();
            for (int i = 0; i < count; i++) {
                const int64_t from = places[nodes[i]], to = (windowed ? window_slots : slots)[i];
                if (from != to) memcpy(at + to * bytes, at + from * bytes, bytes);
            }
        }
    };
    if (count < kWorthSharing) return copy(0, (int)all.size());
    pool.run([&](int thread) {
        const Share share((int)all.size(), thread, pool.threads());
        copy(share.first, share.last);
    });
}

std::string Model::copy_page(int page, bool window, uint8_t* outside, bool out) {
    if (page < 0 || page >= (window ? sizes.window_pages : sizes.pages)) return "no such page";
    for (const auto& [plane, position, windowed] : planes()) {
        if (windowed != window) continue;
        const size_t bytes = sizes.page_size * position;
        uint8_t* at = plane + (page + (window ? missing_pages() : 0)) * bytes;
        memcpy(out ? outside : at, out ? at : outside, bytes);
        outside += bytes;
    }
    return "";
}

}  // namespace forerun
