// What followed the same tokens in answers that were finished before: the fast twin of
// forerun/drafters/ngram_cache.py, which says why. Both count and expect the same.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace forerun {

// Random, of this process: hashes of tokens begin with it, or a client could send a text whose runs
// all lie side by side, and looking for one would take time with the length of the text.
uint64_t hash_secret();

// A token that may come next, and how likely that is.
struct Usual {
    int32_t token;
    double chance;
};

// Leaves `rest` of the chances of all tokens to them.
void scale(std::vector<Usual>& usual, double rest);

// Makes `token` more likely by `share`.
void add_share(std::vector<Usual>& usual, int32_t token, double share);

class NgramCache {
public:
    // At most `capacity` contexts, the least recently counted of which are forgotten; 0: none.
    // `discount` is taken from every follower's count.
    NgramCache(int32_t capacity, double discount)
        : half_((size_t)capacity / 2), discount_(discount) {}

    // Counts tokens[first] to tokens[count - 1] after the contexts that they follow in `tokens`,
    // for `tenant` alone. Returns how many: none without capacity.
    int64_t learn(const int32_t* tokens, size_t first, size_t count, uint64_t tenant);

    // A context that grows backwards, token by token, while `known`.
    struct Walk {
        uint64_t key;
        int length;
        bool known;
    };

    // The empty context, in texts of `tenant`. Not known where nothing was ever counted.
    Walk walk(uint64_t tenant) const;

    // Makes the context longer by `token`, which comes before it, and mixes what followed it into
    // `usual`. Not known afterwards: nothing followed it, and `usual` is as it was.
    void lengthen(Walk& walk, int32_t token, std::vector<Usual>& usual) const;

    // How many there are.
    size_t contexts() const { return recent_.used + former_.used; }

private:
    static constexpr int kLongest = 4, kFollowers = 4;

    struct Context {
        uint64_t key;  // 0: free
        int32_t tokens[kFollowers];
        uint16_t counts[kFollowers];  // 0: free
        uint32_t total;               // of all followers that ever came

        void count(int32_t token);
        void halve();
    };

    // Open addressing; at most half of the places are used.
    struct Half {
        std::vector<Context> places;
        size_t used = 0;

        const Context* find(uint64_t key) const;
        Context& make(uint64_t key);
        void widen();
    };

    Context& context(uint64_t key);

    const size_t half_;
    const double discount_;
    Half recent_, former_;
};

}  // namespace forerun
