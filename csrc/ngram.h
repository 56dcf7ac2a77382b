// Draft tokens from the text itself: the fast twin of forerun/drafters/ngram.py, which says why.
// Both
// make the same draft tokens with the same scores.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ngram_cache.h"

namespace forerun {

// forerun.drafts.ngram_table.NgramTable, whose arrays the caller keeps alive. No contexts: no
// table.
struct NgramTable {
    int32_t contexts;
    const int32_t *extensions, *earlier, *predictions, *tokens;
    const float *rest, *shares;
};

// The constants of forerun/drafters/ngram.py and of forerun/control, by the same names; and where
// the caller keeps what is learned of scores: draft tokens that should have been right by them, and
// that were.
// The layout is shared with forerun/executors/cpu/native.py.
struct NgramRules {
    int32_t slots, orders[2], places, longest, tail, counted, capacity;
    double discount, doubt, sure, surest, min_prob, decay, almost;
    double* trust;
    NgramTable table;
};

// Coupling of forerun/drafters/ngram.py; `strength` is 0 where no noise decides what comes.
struct NgramNoise {
    uint64_t seed;
    double strength, elsewhere;
};

// Links between equal token runs of one length.
class Chain {
public:
    explicit Chain(int order) : order_((size_t)order) {}

    // Takes in what the text has got since the last time.
    void extend(const std::vector<int32_t>& text);

    // The last position before `place` that follows the same `order` tokens, or -1.
    int32_t before(size_t place) const { return before_[place]; }

private:
    int32_t& last(const int32_t* text, size_t place);
    void widen(const int32_t* text);

    const size_t order_;
    std::vector<int32_t> before_;  // [T + 1]
    std::vector<int32_t> table_;   // by hash: the last position after each run; 0 = free
    size_t runs_ = 0;              // different ones
};

// A place that agrees so far, in so many tokens; the token there is its vote.
struct Voter {
    int32_t place, agree;

    double weight() const { return (double)agree * agree; }
};

// tokens[n - 1], n up to `most`: what n draft tokens of all rows have to bring, or, padded, n of
// every row (forerun.interface.plan.NodeCosts). most < 0: nothing is bought, all come out.
struct NgramPrices {
    const double* tokens;
    int most;
    bool padded;
};

class Ngrams {
public:
    explicit Ngrams(const NgramRules& rules);

    // Empty, or what was wrong, from all that return text. The first `predicted` of the tokens are what a
    // client expects and what stands around it: see `indexed` in forerun/drafters/ngram.py; `prompt`
    // tokens after them are the prompt. What the cache counts of the sequence is for sequences of
    // the same `tenant` alone.
    std::string begin(int slot, const int32_t* tokens, int count, int predicted, int prompt,
                      const NgramNoise& noise, uint64_t tenant);

    // Closes a slot; `count` tokens are what the sequence got since the last `propose`. The cache
    // counts the last tokens of what it got since it began: rules.counted of them for every
    // `propose`. `counted`: how many.
    std::string end(int slot, const int32_t* tokens, int count, int64_t& counted);

    // Has the cache count tokens[first] to tokens[count - 1], as `end` does.
    void count(const int32_t* tokens, size_t first, size_t count, uint64_t tenant) {
        cache_.learn(tokens, first, count, tenant);
    }

    // Replaces the table of the rules, between two calls. The caller keeps its arrays alive.
    void use(const NgramTable& table) { table_ = table; }

    // Of the cache.
    size_t contexts() const { return cache_.contexts(); }

    // For each of `rows` rows, `message` (`length` numbers) says: slot, draft tokens at most, their
    // depth at most, how many tokens the sequence has got, and these tokens.
    // `out` receives int32 counts[rows], then, row after row, tokens[total], parents[total], float
    // scores[total] and sources[total] (as in forerun.speculative.tree.DraftSource). It
    // must have room for all the draft tokens that are asked for. Draft tokens with a score below
    // `min_prob`, or below the rules', are left out.
    // Only those come out that are bought, with scores as far as they are to be believed, where
    // there are prices.
    std::string propose(const int32_t* message, int length, int rows, double min_prob,
                        const NgramPrices& prices, int32_t* out, int& total);

private:
    struct Text {
        std::vector<int32_t> tokens;
        Chain chains[2];
        int32_t begun, predicted, prompt;  // Tokens: at the beginning, and of these ...
        NgramNoise noise;
        uint64_t tenant;
        int64_t asked = 0;  // How often for draft tokens.
        // What the last call proposed, selected or not, until the outcome is known.
        std::vector<int32_t> drafted, parents;
        std::vector<float> scores;
    };

    // What may become a draft token: `voters` of them from `first` on agree with it, with `weight`;
    // `heard` and `expected` are how likely votes and the table alone make it.
    struct Candidate {
        double score;
        int32_t level, number, token, parent, first, voters, source;
        double weight, heard, expected;

        bool operator<(const Candidate& other) const;  // is worse
    };

    bool open(int64_t slot) const;
    bool lengthen(int32_t& context, int32_t token);
    void learn(const Text& text, const int32_t* came, int count);
    void buy(const NgramPrices& prices, int rows, int32_t* counts);
    void find_places(Text& text);
    void grow(const Text& text, int nodes, int depth);
    void offer(const Text& text, const Candidate& above, int parent);
    void couple(const Text& text, const Candidate& above);
    int32_t source(const Text& text, const Candidate& offered) const;
    void hear(const Text& text, const Candidate& above);
    void follow(const Text& text, int parent);

    const NgramRules rules_;
    NgramTable table_;
    NgramCache cache_;
    std::vector<std::unique_ptr<Text>> texts_;  // [slots] null = not open

    // Of the current call.
    std::vector<int32_t> tokens_, parents_, sources_;
    std::vector<float> scores_;
    size_t first_ = 0;  // draft token of the row among all rows'
    double total_ = 0;  // weight of all votes
    double min_prob_ = 0;
    std::vector<Voter> voters_, agreeing_;
    std::vector<Usual> usual_;
    std::vector<int32_t> tail_;
    std::vector<Candidate> heap_, offers_;
    std::vector<double> believed_;  // by draft token
    std::vector<double> brought_;   // by price
    std::vector<int32_t> order_, row_, ranks_, place_;
};

}  // namespace forerun
