#include "ngram_cache.h"

#include <algorithm>
#include <cstring>
#include <random>

namespace forerun {

constexpr uint16_t kMostCount = 0xFFFF;
constexpr uint64_t kEmpty = 0xD1B54A32D192ED03u;  // The key of no token: large, unlike a token's.

uint64_t hash_secret() {
    static const uint64_t secret = [] {
        std::random_device device;
        return (uint64_t)device() << 32 | device();
    }();
    return secret;
}

// The key of the context of no token, by tenant: spread over all bits, so that no token of another
// tenant makes up for the difference.
static uint64_t beginning(uint64_t tenant) {
    const uint64_t spread = tenant * 0xC2B2AE3D27D4EB4Fu;
    return hash_secret() ^ kEmpty ^ spread ^ (spread >> 31);
}

// The key of a context that is one token longer; never 0.
static uint64_t longer(uint64_t key, int32_t token) {
    key = (key ^ (uint32_t)token) * 0x9E3779B97F4A7C15u;
    key ^= key >> 29;
    return key ? key : kEmpty;
}

void scale(std::vector<Usual>& usual, double rest) {
    for (Usual& known : usual) known.chance *= rest;
}

void add_share(std::vector<Usual>& usual, int32_t token, double share) {
    const auto found = std::find_if(usual.begin(), usual.end(),
                                    [&](const Usual& known) { return known.token == token; });
    if (found == usual.end()) {
        usual.push_back({token, share});
    } else {
        found->chance += share;
    }
}

void NgramCache::Context::halve() {
    for (uint16_t& each : counts) each /= 2;
    total /= 2;
}

// A token that is not among the followers takes a free place, or that of the rarest (the last of
// them) once this has been missed as often as it came.
void NgramCache::Context::count(int32_t token) {
    if (++total == kMostCount) halve();
    int rarest = 0;
    for (int i = 0; i < kFollowers; i++) {
        if (counts[i] && tokens[i] == token) {
            counts[i]++;
            return;
        }
        if (counts[i] <= counts[rarest]) rarest = i;
    }
    if (counts[rarest] > 1) {
        counts[rarest]--;
        return;
    }
    tokens[rarest] = token;
    counts[rarest] = 1;
}

const NgramCache::Context* NgramCache::Half::find(uint64_t key) const {
    if (places.empty()) return nullptr;
    const size_t mask = places.size() - 1;
    for (size_t at = (key >> 32) & mask;; at = (at + 1) & mask) {
        if (places[at].key == key) return &places[at];
        if (!places[at].key) return nullptr;
    }
}

NgramCache::Context& NgramCache::Half::make(uint64_t key) {
    if (2 * (used + 1) > places.size()) widen();
    const size_t mask = places.size() - 1;
    size_t at = (key >> 32) & mask;
    while (places[at].key) at = (at + 1) & mask;
    used++;
    places[at].key = key;
    return places[at];
}

void NgramCache::Half::widen() {
    std::vector<Context> old(std::max<size_t>(1024, 2 * places.size()));
    old.swap(places);
    used = 0;
    for (const Context& each : old) {
        if (each.key) make(each.key) = each;
    }
}

// Where followers of this context are counted. When one half is full, the other is forgotten.
NgramCache::Context& NgramCache::context(uint64_t key) {
    if (const Context* found = recent_.find(key)) return const_cast<Context&>(*found);
    const Context* before = former_.find(key);
    Context known = before ? *before : Context{};
    known.key = key;
    if (recent_.used >= half_) {
        std::swap(recent_, former_);
        recent_ = {};
    }
    return recent_.make(key) = known;
}

int64_t NgramCache::learn(const int32_t* tokens, size_t first, size_t count, uint64_t tenant) {
    if (!half_ || first >= count) return 0;
    for (size_t i = first; i < count; i++) {
        uint64_t key = beginning(tenant);
        for (size_t n = 1; n <= (size_t)kLongest && n <= i; n++) {
            key = longer(key, tokens[i - n]);
            context(key).count(tokens[i]);
        }
    }
    return (int64_t)(count - first);
}

NgramCache::Walk NgramCache::walk(uint64_t tenant) const {
    return {beginning(tenant), 0, contexts() > 0};
}

void NgramCache::lengthen(Walk& walk, int32_t token, std::vector<Usual>& usual) const {
    walk.key = longer(walk.key, token);
    const Context* found = recent_.find(walk.key);
    if (!found) found = former_.find(walk.key);
    walk.known = found;
    if (!found) return;
    double known = 0.0;
    for (const uint16_t each : found->counts) known += each ? (double)each - discount_ : 0.0;
    scale(usual, 1.0 - known / (double)found->total);
    for (int i = 0; i < kFollowers; i++) {
        if (!found->counts[i]) continue;
        add_share(usual, found->tokens[i],
                  ((double)found->counts[i] - discount_) / (double)found->total);
    }
    walk.known = ++walk.length < kLongest;
}

}  // namespace forerun
