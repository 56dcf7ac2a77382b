// Attention of a step: which thread does what. The numbers are those of attention.inl.
#include <algorithm>

#include "model.h"

namespace forerun {
namespace {

constexpr int kWorthSharing = 128;    // positions from which on threads share a node
constexpr int64_t kMostScores = 1 << 24;  // numbers that they keep for it at most
constexpr int64_t kOwnScores = 1 << 19;   // the same of a thread alone, but for three heads at least
constexpr int kUnitsEach = 3;             // units for each thread that are sought

}  // namespace

// A unit is some nodes of a row under one key/value head. Usually there are many, and each thread
// takes the next one that is free. Where there are few, as in plain decoding, all threads work on
// each of them, on different positions first and on different numbers of the output last.
void Model::plan_attention(const Step& step) {
    int longest = 0;
    for (int n = 0; n < step.nodes; n++) {
        longest = sights_[n].length() > longest ? sights_[n].length() : longest;
    }
    stride_ = padded_positions(longest);
    next_unit_.store(0);
    int64_t own = 0, all_scores = (int64_t)step.nodes * sizes.heads * stride_;
    bool together = false;
    for (Division& division : divisions_) {
        own = std::max(own, plan_division(step, division));
        together = together || division.together;
    }
    for (Floats& floats : scratch_) {
        if ((int64_t)floats.size() < own) floats.resize(own);
    }
    if (!together) return;
    if ((int64_t)scores_.size() < all_scores) scores_.resize(all_scores);
    totals_.resize((size_t)step.nodes * sizes.heads);
}

// The same in layers of one shape. Returns how many numbers a thread needs for itself.
int64_t Model::plan_division(const Step& step, Division& by) {
    const int64_t whole = (int64_t)step.nodes * by.kv_heads, threads = pool.most();
    const int64_t shared = sizes.heads / by.kv_heads, fit = kOwnScores / stride_;
    const int64_t fair = (whole + kUnitsEach * threads - 1) / (kUnitsEach * threads);
    const int64_t most = std::min({fair, fit / shared, (int64_t)kNodesTogether});
    const int count = (int)std::max(most, (int64_t)1);
    by.units.clear();
    for (int row = 0; row < step.rows; row++) {
        const int first = step.start[row], nodes = step.start[row + 1] - first;
        const int parts = (nodes + count - 1) / count;
        for (int part = 0; part < parts; part++) {
            const Share mine(nodes, part, parts);
            const int n = first + mine.first, last = first + mine.last;
            const Alike some = alike(row, n, last);
            for (int head = 0; head < by.kv_heads; head++) {
                by.units.push_back({row, n, last, head, some});
            }
        }
    }
    const int64_t near = near_numbers(by.head_size);
    const int64_t all_scores = (int64_t)step.nodes * sizes.heads * stride_;
    by.together = threads > 1 && whole < 3 * threads && stride_ >= kWorthSharing &&
                  all_scores <= kMostScores;
    by.room = (int)std::max((int64_t)3, std::min(fit, shared));
    if (by.together || count > 1) by.room = (int)shared;
    const int size = value_size(by.head_size);
    int pieces = kGroup;  // Fewer where threads would have none.
    while (pieces > 8 && whole * (size / pieces) < threads) pieces /= 2;
    by.mixed_at_a_time = pieces;
    const int64_t mixed = by.together ? pieces : shared * size;
    by.in_groups =
        !sizes.rank && !sizes.gated && mixed % kGroup == 0 && (!by.together || size % kGroup == 0);
    return by.together ? near : near + count * by.room * (stride_ + 1);
}

int32_t Model::place_at(int row, const Sight& sight, int position) const {
    if (position < sight.trunk) return trunks_[trunk_at_[row] + position];
    return sight.path[position - sight.trunk];
}

// What nodes [first, last) of a row see alike.
Alike Model::alike(int row, int first, int last) const {
    Alike found = {sights_[first].length(), 0, true};
    for (int n = first + 1; n < last; n++) {
        if (sights_[n].length() > sights_[first + found.longest].length()) found.longest = n - first;
    }
    const Sight& longest = sights_[first + found.longest];
    for (int n = first; n < last; n++) {
        const Sight& sight = sights_[n];
        int same = std::min(sight.trunk, longest.trunk);
        while (same < sight.length() &&
               place_at(row, sight, same) == place_at(row, longest, same)) {
            same++;
        }
        found.nested = found.nested && same == sight.length();
        found.positions = std::min(found.positions, same);
    }
    return found;
}

// What a node sees in a layer: without what lies before the window.
Sight Model::seen(const Layer& layer, int node) const {
    Sight sight = sights_[node];
    const int window = layer.kind.window;
    const int hidden = window ? sight.length() - sight.ahead - window : 0;
    if (hidden <= 0) return sight;
    const int beyond = hidden - sight.trunk;  // of its own path
    sight.trunk = beyond > 0 ? 0 : -beyond;
    if (beyond > 0) {
        sight.path += beyond;
        sight.tail -= beyond;
    }
    return sight;
}

Attend Model::job(int layer, const Unit& unit, int node, int thread) {
    const Layer& at = layers_[layer];
    const int size = at.kind.head_size, shared = sizes.heads / at.kind.kv_heads;
    const int64_t first_query = (int64_t)unit.head * shared * size;
    Attend job = {};
    job.keys = plane(layer, 0, unit.head);
    job.values = plane(layer, kinds() - 1, unit.head);
    job.item = sizes.cache_item;
    job.sight = seen(at, node);
    // There may be none to point at.
    const int32_t* trunks = source_of(at).windowed ? window_trunks_.data() : trunks_.data();
    job.trunk = trunks + trunk_at_[unit.row] + (sights_[node].trunk - job.sight.trunk);
    if (at.sinks) job.sinks = at.sinks + unit.head * shared;
    job.cap = at.kind.softcap;
    job.heads = shared;
    job.size = size;
    job.mixed = value_size(size);
    job.queries = &qkv_[node * qkv_width(at) + first_query];
    job.out = &mixed_[(int64_t)node * mixed_width(at) + first_query];
    job.stride = stride_;
    job.room = divisions_[at.division].room;
    job.near = scratch_[thread].data();
    return job;
}

void Model::attend(int layer, int thread) {
    const Layer& at = layers_[layer];
    const Division& by = divisions_[at.division];
    if (by.together) return attend_together(layer, thread);
    Attend nodes[kNodesTogether];
    for (int u; (u = next_unit_.fetch_add(1)) < (int)by.units.size();) {
        const Unit& unit = by.units[u];
        const int count = unit.last - unit.first;
        float* scores = scratch_[thread].data() + near_numbers(by.head_size);
        float* totals = scores + count * by.room * stride_;
        for (int n = 0; n < count; n++, scores += by.room * stride_, totals += by.room) {
            nodes[n] = job(layer, unit, unit.first + n, thread);
            nodes[n].scores = scores;
            nodes[n].totals = totals;
        }
        const int window = at.kind.window;
        const bool whole = !window || sights_[unit.first + unit.alike.longest].length() <= window;
        kernels->attend(nodes, count, whole ? unit.alike : Alike{0, 0, false});
        const int numbers = sizes.heads / by.kv_heads * by.head_size;
        for (int n = unit.first; by.in_groups && n < unit.last; n++) {
            put_context(at, n, unit.head * numbers, numbers);
        }
    }
}

// Some numbers of what a node found, whole groups, to what attention's last product reads.
void Model::put_context(const Layer& at, int node, int first, int count) {
    if (is_float(at.output.format)) return;
    const int width = mixed_width(at);
    Group* groups = column(mixed_q_.data(), node, width) + first / kGroup;
    kernels->quantise(&mixed_[(size_t)node * width + first], count, groups, node % kLanes);
}

void Model::attend_together(int layer, int thread) {
    const Division& by = divisions_[layers_[layer].division];
    const int threads = pool.threads(), whole = (int)by.units.size();
    const int size = value_size(by.head_size), shared = sizes.heads / by.kv_heads;
    const auto job_of = [&](int unit) {
        Attend all = job(layer, by.units[unit], by.units[unit].first, thread);
        all.scores = &scores_[(int64_t)unit * shared * stride_];
        all.totals = &totals_[(size_t)unit * shared];
        return all;
    };
    const Share scored(whole * threads, thread, threads);
    for (int piece = scored.first; piece < scored.last; piece++) {
        const Attend all = job_of(piece / threads);
        const int length = all.sight.length(), blocks = (length + kPositions - 1) / kPositions;
        const Share mine(blocks, piece % threads, threads);
        const int last = mine.last * kPositions < length ? mine.last * kPositions : length;
        kernels->score(all, mine.first * kPositions, last);
    }
    pool.barrier();
    const Share weighed(whole * shared, thread, threads);
    for (int query = weighed.first; query < weighed.last; query++) {
        const Unit& unit = by.units[query / shared];
        const int length = seen(layers_[layer], unit.first).length();
        const float* sinks = layers_[layer].sinks;
        const float* sink = sinks ? sinks + unit.head * shared + query % shared : nullptr;
        const float cap = layers_[layer].kind.softcap;
        totals_[query] = kernels->weigh(&scores_[query * stride_], length, sink, cap);
    }
    pool.barrier();
    const int width = by.mixed_at_a_time;
    const int pieces = (size + width - 1) / width;
    const Share mixed(whole * pieces, thread, threads);
    for (int piece = mixed.first; piece < mixed.last; piece++) {
        const int first = piece % pieces * width;
        kernels->mix(job_of(piece / pieces), first, first + width < size ? first + width : size);
        const Unit& unit = by.units[piece / pieces];
        for (int query = 0; by.in_groups && query < shared; query++) {
            put_context(layers_[layer], unit.first, (unit.head * shared + query) * size + first, width);
        }
    }
}

}  // namespace forerun
