// The choice among the tokens that min_p, top_k and top_p leave: forerun/speculative/sampling.py.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "model.h"

namespace forerun {
namespace {

// How far below the best a token may be and still be chosen: noise lies between -3.14 and 22.9.
constexpr float kReach = 32.0f;
// The sums here and the specification's differ by less, relatively: by the last places of e^x, by those of
// 32 additions, and by tokens beyond kReach. Within it a token may or may not be left.
constexpr double kMargin = 2e-6;
constexpr size_t kFew = 256;  // tokens whose noise is computed one by one

// Ascending for descending numbers, of equal ones for ascending tokens.
uint64_t key_of(float x, int32_t token) {
    uint32_t bits;
    x += 0.0f;  // -0 is 0.
    memcpy(&bits, &x, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)~bits << 32 | (uint32_t)token;
}

double mass_of(const float* x, const uint64_t* keys, size_t count, float most) {
    double mass = 0.0;
    for (size_t i = 0; i < count; i++) mass += std::exp((double)x[(int32_t)(uint32_t)keys[i]] - most);
    return mass;
}

// Keeps the keys of the most probable tokens, one at least, whose masses add up to `enough`. Returns how
// many, the first ones, have less than `least` before them. Halves the keys in which that sum is
// reached: sorting all of a flat distribution would take longer than a step.
size_t keep_nucleus(const float* x, float most, double least, double enough,
                    std::vector<uint64_t>& keys) {
    const auto at = keys.begin();
    size_t begin = 0, end = keys.size();
    double mass = 0.0;  // of the keys before `begin`, which are the smallest
    while (end - begin > kFew) {
        const size_t middle = begin + (end - begin) / 2;
        std::nth_element(at + begin, at + middle, at + end);
        const double half = mass_of(x, keys.data() + begin, middle - begin, most);
        if (mass + half >= enough) {
            end = middle;
        } else if (mass + half < least) {
            begin = middle;
            mass += half;
        } else {
            break;
        }
    }
    std::sort(at + begin, at + end);
    size_t certain = begin, kept = begin;
    for (; kept < end && (kept == 0 || mass < enough); kept++) {
        if (kept == 0 || mass < least) certain = kept + 1;
        mass += mass_of(x, keys.data() + kept, 1, most);
    }
    keys.resize(kept);
    return certain;
}

}  // namespace

// Finds candidates: all tokens that could be left and chosen, or at least the most probable ones that
// decide it, in no order. Returns how many.
size_t Model::find_candidates(const CutOffs& cut, const float* x, float most, Likely& likely) const {
    const float reach = most - kReach - std::fabs(most) * 0x1p-20f;
    const float floor = std::max(reach, most + cut.log_min_p);
    // Whose probabilities top_p adds up: of all tokens, or of what the other cut-offs leave.
    const bool by_mass = cut.top_p < 1.0 && cut.of_all();
    const double needed = by_mass ? cut.top_p * kernels->mass(x, sizes.vocab, most) : 0.0;
    likely.candidates.resize(sizes.vocab);
    likely.others.resize(sizes.vocab);
    int32_t* const found = likely.candidates.data();
    float* const theirs = likely.others.data();
    for (float depth = by_mass || cut.top_k > 0 ? 2.0f : kReach;; depth *= 2.0f) {
        const float from = std::max(floor, most - depth);
        const size_t count = (size_t)kernels->at_least(x, sizes.vocab, from, found);
        if (from == floor) return count;
        if (cut.top_k > 0 && count >= (size_t)cut.top_k) return count;
        if (!by_mass) continue;
        for (size_t i = 0; i < count; i++) theirs[i] = x[found[i]];
        if (kernels->mass(theirs, (int)count, most) >= needed * (1.0 + 2.0 * kMargin)) return count;
    }
}

// Puts the candidates that are left into `likely.tokens`, those first that are left for certain. Returns
// how many these are; whether the others are left, the specification would have to say.
size_t Model::cut_off(const CutOffs& cut, const float* x, float most, Likely& likely) const {
    const size_t count = find_candidates(cut, x, most, likely);
    std::vector<uint64_t>& keys = likely.keys;
    keys.resize(count);
    for (size_t i = 0; i < count; i++) {
        keys[i] = key_of(x[likely.candidates[i]], likely.candidates[i]);
    }
    if (cut.top_k > 0 && keys.size() > (size_t)cut.top_k) {
        std::nth_element(keys.begin(), keys.begin() + cut.top_k, keys.end());
        keys.resize(cut.top_k);
    }
    size_t certain = keys.size();
    if (cut.top_p < 1.0) {
        const double all = cut.of_all() ? kernels->mass(x, sizes.vocab, most)
                                        : mass_of(x, keys.data(), keys.size(), most);
        const double needed = cut.top_p * all;
        certain = keep_nucleus(x, most, needed * (1.0 - kMargin), needed * (1.0 + kMargin), keys);
    }
    likely.tokens.resize(keys.size());
    for (size_t i = 0; i < keys.size(); i++) likely.tokens[i] = (int32_t)(uint32_t)keys[i];
    return certain;
}

// The choice by finite logits; -1 where it is a token that may not be left.
int32_t Model::choose_left(const CutOffs& cut, const float* logits, float temperature, uint64_t seed,
                           uint32_t position, Likely& likely) const {
    likely.heated.resize(sizes.vocab);
    const float* x = likely.heated.data();
    const float most = kernels->heat(logits, sizes.vocab, temperature, likely.heated.data());
    if (!std::isfinite(most)) return -1;
    const size_t certain = cut_off(cut, x, most, likely);
    const std::vector<int32_t>& tokens = likely.tokens;
    size_t best = 0;
    if (tokens.size() > kFew) {
        likely.others.assign(sizes.vocab, kExcluded);
        for (int32_t token : tokens) likely.others[token] = x[token];
        const int32_t token =
            kernels->choose(likely.others.data(), sizes.vocab, 1.0f, seed, position);
        best = std::find(tokens.begin(), tokens.end(), token) - tokens.begin();
    } else {
        float scores[kFew];
        kernels->noise(tokens.data(), (int)tokens.size(), seed, position, scores);
        for (size_t i = 0; i < tokens.size(); i++) {
            scores[i] = x[tokens[i]] + scores[i];
            const bool tie = scores[i] == scores[best] && tokens[i] < tokens[best];
            if (scores[i] > scores[best] || tie) best = i;
        }
        if (!std::isfinite(scores[best])) return -1;
    }
    return best < certain ? tokens[best] : -1;
}

}  // namespace forerun
