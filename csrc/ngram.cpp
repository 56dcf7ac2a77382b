#include "ngram.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace forerun {

// forerun.speculative.tree.DraftSource, and GAP of forerun/drafters/ngram.py.
constexpr int32_t kNgram = 1, kTable = 2, kPrediction = 6, kGap = -1;

// forerun.speculative.noise.gumbel_of of one token.
float gumbel(uint64_t seed, uint32_t position, uint32_t token) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    uint32_t a = token / 4, b = position, c = 0, d = 0;
    for (int turn = 0; turn < 10; turn++) {
        const uint64_t one = (uint64_t)a * 0xD2511F53u, two = (uint64_t)c * 0xCD9E8D57u;
        a = (uint32_t)(two >> 32) ^ b ^ key0;
        c = (uint32_t)(one >> 32) ^ d ^ key1;
        b = (uint32_t)two;
        d = (uint32_t)one;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    const uint32_t words[] = {a, b, c, d};
    return (float)-std::log(-std::log(((double)words[token % 4] + 0.5) * 0x1p-32));
}

// Where the last position after the run of tokens before `place` is kept.
int32_t& Chain::last(const int32_t* text, size_t place) {
    const int32_t* run = text + place - order_;
    uint64_t key = hash_secret();
    for (size_t i = 0; i < order_; i++) key = (key ^ (uint32_t)run[i]) * 0x9E3779B97F4A7C15u;
    const size_t mask = table_.size() - 1;
    for (size_t at = (key >> 32) & mask;; at = (at + 1) & mask) {
        const int32_t found = table_[at];
        if (!found || !memcmp(text + found - order_, run, order_ * sizeof(int32_t))) {
            return table_[at];
        }
    }
}

void Chain::widen(const int32_t* text) {
    std::vector<int32_t> old(std::max<size_t>(64, 2 * table_.size()));
    old.swap(table_);
    for (int32_t place : old) {
        if (place) last(text, (size_t)place) = place;
    }
}

void Chain::extend(const std::vector<int32_t>& text) {
    for (size_t end = before_.size(); end <= text.size(); end++) {
        if (end < order_) {
            before_.push_back(-1);
            continue;
        }
        if (2 * (runs_ + 1) > table_.size()) widen(text.data());
        int32_t& place = last(text.data(), end);
        before_.push_back(place ? place : -1);
        runs_ += !place;
        place = (int32_t)end;
    }
}

// Equal scores: what was found first, nearer the root first.
bool Ngrams::Candidate::operator<(const Candidate& other) const {
    if (score != other.score) return score < other.score;
    if (level != other.level) return level > other.level;
    if (number != other.number) return number > other.number;
    if (token != other.token) return token > other.token;
    return parent > other.parent;
}

Ngrams::Ngrams(const NgramRules& rules)
    : rules_(rules), table_(rules.table), cache_(rules.capacity, rules.discount), texts_((size_t)rules.slots) {}

bool Ngrams::open(int64_t slot) const {
    return 0 <= slot && slot < rules_.slots && texts_[(size_t)slot];
}

std::string Ngrams::begin(int slot, const int32_t* tokens, int count, int predicted, int prompt,
                          const NgramNoise& noise, uint64_t tenant) {
    if (slot < 0 || slot >= rules_.slots) return "there is no slot " + std::to_string(slot);
    if (predicted < 0 || predicted > count) return "more tokens are predicted than there are";
    const Chain chains[] = {Chain(rules_.orders[0]), Chain(rules_.orders[1])};
    texts_[(size_t)slot].reset(
        new Text{{tokens, tokens + count}, {chains[0], chains[1]}, count, predicted, prompt, noise,
                 tenant, 0, {}, {}, {}});
    return "";
}

std::string Ngrams::end(int slot, const int32_t* tokens, int count, int64_t& counted) {
    if (!open(slot)) return "slot " + std::to_string(slot) + " is not open";
    Text& text = *texts_[(size_t)slot];
    text.tokens.insert(text.tokens.end(), tokens, tokens + count);
    const int64_t before = text.predicted, size = (int64_t)text.tokens.size() - before;
    const int64_t first = std::max(text.begun - before, size - rules_.counted * text.asked);
    counted = cache_.learn(text.tokens.data() + before, (size_t)first, (size_t)size, text.tenant);
    texts_[(size_t)slot].reset();
    return "";
}

std::string Ngrams::propose(const int32_t* message, int length, int rows, double min_prob,
                            const NgramPrices& prices, int32_t* out, int& total) {
    min_prob_ = std::max(min_prob, rules_.min_prob);
    tokens_.clear();
    parents_.clear();
    scores_.clear();
    sources_.clear();
    const int32_t* const message_end = message + length;
    for (int b = 0; b < rows; b++) {
        if (message_end - message < 4 || message[3] < 0 || message_end - message - 4 < message[3]) {
            return "the message is shorter than it says";
        }
        if (!open(message[0])) return "slot " + std::to_string(message[0]) + " is not open";
        Text& text = *texts_[(size_t)message[0]];
        const int nodes = message[1], depth = message[2];
        const int32_t* const news = message + 4;
        message = news + message[3];
        text.tokens.insert(text.tokens.end(), news, message);
        learn(text, news, (int)(message - news));
        text.asked++;
        const size_t before = tokens_.size();
        find_places(text);
        grow(text, nodes, depth);
        out[b] = (int32_t)(tokens_.size() - before);
        const size_t found = prices.most >= 0 ? tokens_.size() : before;
        text.drafted.assign(tokens_.begin() + before, tokens_.begin() + found);
        text.parents.assign(parents_.begin() + before, parents_.begin() + found);
        text.scores.assign(scores_.begin() + before, scores_.begin() + found);
    }
    if (prices.most >= 0) buy(prices, rows, out);
    total = (int)tokens_.size();
    const size_t bytes = tokens_.size() * sizeof(int32_t);
    if (!bytes) return "";
    memcpy(out + rows, tokens_.data(), bytes);
    memcpy(out + rows + total, parents_.data(), bytes);
    memcpy(out + rows + 2 * total, scores_.data(), bytes);
    memcpy(out + rows + 3 * total, sources_.data(), bytes);
    return "";
}

// ScoreCalibration.learn of forerun/control/host_drafts.py: what was drafted for this text, and what came.
void Ngrams::learn(const Text& text, const int32_t* came, int count) {
    double expected = 0.0, score = 1.0;
    int tried = 0, right = 0;
    int32_t node = -1;
    for (int i = 0; i < count; i++) {
        double together = 0.0;
        int32_t children = 0, next = -1;
        for (size_t child = (size_t)(node + 1); child < text.drafted.size(); child++) {
            if (text.parents[child] != node) continue;
            children++;
            together += (double)text.scores[child];
            if (text.drafted[child] == came[i]) next = (int32_t)child;
        }
        if (!children) break;
        tried++;
        expected += std::min(1.0, together / std::max(score, 1e-6));
        if (next < 0) break;
        right++;
        node = next;
        score = (double)text.scores[(size_t)next];
    }
    if (!tried) return;
    rules_.trust[0] = rules_.decay * rules_.trust[0] + expected;
    rules_.trust[1] = rules_.decay * rules_.trust[1] + right;
}

// Leaves of the draft tokens of all rows those that bring most beyond what `prices` asks, with scores
// as far as they are to be believed: ScoreCalibration.calibrate, HostDrafts.select_nodes and cut of
// forerun/control/host_drafts.py.
void Ngrams::buy(const NgramPrices& prices, int rows, int32_t* counts) {
    const double share = std::min(1.0, rules_.trust[1] / rules_.trust[0]);
    const size_t total = tokens_.size();
    believed_.resize(total);
    row_.resize(total);
    for (size_t b = 0, first = 0; b < (size_t)rows; first += (size_t)counts[b++]) {
        for (size_t n = first; n < first + (size_t)counts[b]; n++) {
            const bool top = parents_[n] < 0;
            const size_t above = top ? 0 : first + (size_t)parents_[n];
            const double told = top ? 1.0 : (double)scores_[above];
            const double chance = told > 0.0 ? (double)scores_[n] / told : 0.0;
            row_[n] = (int32_t)b;
            believed_[n] = (top ? 1.0 : believed_[above]) * std::min(chance * share, rules_.almost);
        }
    }
    scores_.assign(believed_.begin(), believed_.end());
    order_.resize(total);
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int32_t one, int32_t other) {
        return scores_[(size_t)one] > scores_[(size_t)other];
    });
    // By draft token, which price it belongs to: by its place among all, or in its row.
    place_.resize(total);
    ranks_.assign(prices.padded ? (size_t)rows : 1, 0);
    brought_.assign((size_t)prices.most, 0.0);
    for (const int32_t n : order_) {
        const int32_t rank = ranks_[prices.padded ? (size_t)row_[(size_t)n] : 0]++;
        place_[(size_t)n] = rank;
        if (rank < prices.most) brought_[(size_t)rank] += (double)scores_[(size_t)n];
    }
    int32_t bought = 0;
    double brought = 0.0, won = 0.0;
    for (int32_t n = 0; n < prices.most && brought_[(size_t)n] > 0.0; n++) {
        brought += brought_[(size_t)n];
        if (brought - prices.tokens[n] > won) bought = n + 1, won = brought - prices.tokens[n];
    }
    // From here on its place among what is left of its row.
    size_t left = 0;
    for (size_t b = 0, first = 0, n = 0; b < (size_t)rows; b++, first = n) {
        int32_t kept = 0;
        for (const size_t end = first + (size_t)counts[b]; n < end; n++) {
            if (place_[n] >= bought) continue;
            place_[n] = kept++;
            tokens_[left] = tokens_[n];
            parents_[left] = parents_[n] < 0 ? -1 : place_[first + (size_t)parents_[n]];
            scores_[left] = scores_[n];
            sources_[left++] = sources_[n];
        }
        counts[b] = kept;
    }
    tokens_.resize(left);
}

// voters_ become the earlier positions whose past agrees with the end of the text: longest order
// first, then most recent first.
void Ngrams::find_places(Text& text) {
    voters_.clear();
    const std::vector<int32_t>& tokens = text.tokens;
    const int32_t end = (int32_t)tokens.size();
    for (Chain& chain : text.chains) {
        chain.extend(tokens);
        for (int32_t place = chain.before((size_t)end); place >= 0;
             place = chain.before((size_t)place)) {
            if ((int32_t)voters_.size() >= rules_.places) break;
            bool known = false;
            for (const Voter& voter : voters_) known |= voter.place == place;
            if (known) continue;
            const int most = std::min(rules_.longest, place);
            int agree = 0;
            while (agree < most && tokens[place - 1 - agree] == tokens[end - 1 - agree]) agree++;
            voters_.push_back({place, agree});
        }
    }
}

// Appends the likeliest `nodes` paths that follow voters_, at most `depth` long.
void Ngrams::grow(const Text& text, int nodes, int depth) {
    heap_.clear();
    first_ = tokens_.size();
    offer(text, {1.0, 0, 0, 0, 0, 0, (int32_t)voters_.size(), 0, 0.0, 0.0, 0.0}, -1);
    for (int count = 0; count < nodes && !heap_.empty(); count++) {
        std::pop_heap(heap_.begin(), heap_.end());
        const Candidate best = heap_.back();
        heap_.pop_back();
        tokens_.push_back(best.token);
        parents_.push_back(best.parent);
        scores_.push_back((float)best.score);
        sources_.push_back(best.source);
        if (best.level < depth) offer(text, best, count);
    }
}

// Puts what the voters of `above` vote for and what the table expects on the heap, as children of
// draft token `parent`.
void Ngrams::offer(const Text& text, const Candidate& above, int parent) {
    const int32_t* const tokens = text.tokens.data();
    hear(text, above);
    follow(text, parent);
    offers_.clear();
    const auto put = [&](int32_t token, double weight, int32_t first) {
        double usual = 0.0;
        for (const Usual& found : usual_) {
            if (found.token == token) usual = found.chance;
        }
        int agree = 0;
        for (size_t i = (size_t)first; i < voters_.size(); i++) agree = std::max(agree, voters_[i].agree);
        const double sure = agree > rules_.longest ? rules_.surest : rules_.sure;
        const double heard = sure * above.score * weight / total_;
        const double expected = above.score * rules_.doubt * usual / total_;
        const int32_t number = (int32_t)offers_.size(), count = (int32_t)voters_.size() - first;
        offers_.push_back({heard + expected, above.level + 1, number, token, parent, first, count, 0,
                           weight, heard, expected});
    };
    // Those that vote for the same token become neighbours; the token heard first comes first.
    for (size_t i = 0; i < agreeing_.size(); i++) {
        if (agreeing_[i].place < 0) continue;
        const int32_t token = tokens[agreeing_[i].place], first = (int32_t)voters_.size();
        double weight = 0.0;
        for (size_t j = i; j < agreeing_.size(); j++) {
            Voter& voter = agreeing_[j];
            if (voter.place < 0 || tokens[voter.place] != token) continue;
            voters_.push_back({voter.place + 1, voter.agree + 1});
            weight += voter.weight();
            voter.place = -1;  // Has been heard.
        }
        put(token, weight, first);
        for (Usual& found : usual_) {
            if (found.token == token) found.token = -1;  // Is on the heap.
        }
    }
    for (const Usual& found : usual_) {
        if (found.token >= 0) put(found.token, 0.0, (int32_t)voters_.size());
    }
    if (text.noise.strength > 0.0) couple(text, above);
    for (Candidate& offered : offers_) {
        if (offered.score < min_prob_) continue;
        offered.source = source(text, offered);
        heap_.push_back(offered);
        std::push_heap(heap_.begin(), heap_.end());
    }
}

// Makes offers_ below `above` likelier or less likely by the noise that they will be chosen with.
void Ngrams::couple(const Text& text, const Candidate& above) {
    const size_t own = text.tokens.size() - (size_t)(text.predicted + text.prompt);
    const uint32_t position = (uint32_t)own + (uint32_t)above.level;
    double sum = 0.0, left = above.score;
    for (Candidate& offered : offers_) {
        left -= offered.score;
        const double noise = (double)gumbel(text.noise.seed, position, (uint32_t)offered.token);
        offered.score *= std::exp(text.noise.strength * noise);
        sum += offered.score;
    }
    sum += std::max(left, 0.0) * text.noise.elsewhere;
    for (Candidate& offered : offers_) offered.score = above.score * offered.score / sum;
}

// The prediction where most of its votes come out of it, else whichever counts for more.
int32_t Ngrams::source(const Text& text, const Candidate& offered) const {
    double foretold = 0.0;
    for (int32_t i = offered.first; i < offered.first + offered.voters; i++) {
        const Voter before = {voters_[(size_t)i].place - 1, voters_[(size_t)i].agree - 1};
        if (rules_.longest <= before.place && before.place < text.predicted) {
            foretold += before.weight();
        }
    }
    if (foretold > 0.0 && foretold >= offered.weight - foretold) return kPrediction;
    return offered.heard >= offered.expected ? kNgram : kTable;
}

// agreeing_ become the voters of `above` that have a vote, total_ the weight of all.
void Ngrams::hear(const Text& text, const Candidate& above) {
    const int32_t end = (int32_t)text.tokens.size();
    agreeing_.clear();
    total_ = rules_.doubt;
    for (int i = above.first; i < above.first + above.voters; i++) {
        const int32_t place = voters_[i].place;
        if (place >= end || text.tokens[(size_t)place] == kGap) continue;
        total_ += voters_[i].weight();
        agreeing_.push_back(voters_[i]);
    }
}

// Makes a context of the table longer by `token`, which comes before it, and mixes what follows it
// into usual_. False: there is no such context, and usual_ is as it was.
bool Ngrams::lengthen(int32_t& context, int32_t token) {
    const int32_t* const begin = table_.earlier + table_.extensions[context];
    const int32_t* const end = table_.earlier + table_.extensions[context + 1];
    const int32_t* const at = std::lower_bound(begin, end, token);
    if (at == end || *at != token) return false;
    context = (int32_t)(at - table_.earlier);
    scale(usual_, (double)table_.rest[context]);
    for (int32_t i = table_.predictions[context]; i < table_.predictions[context + 1]; i++) {
        add_share(usual_, table_.tokens[i], (double)table_.shares[i]);
    }
    return true;
}

// usual_ become the tokens that table and cache expect below draft token `parent`: context by
// context, the longer over the shorter, and of one length the cache over the table.
void Ngrams::follow(const Text& text, int parent) {
    usual_.clear();
    tail_.clear();  // From the last token backwards.
    for (int draft_token = parent; draft_token >= 0; draft_token = parents_[first_ + (size_t)draft_token]) {
        tail_.push_back(tokens_[first_ + (size_t)draft_token]);
    }
    const size_t own = text.tokens.size() - (size_t)text.predicted;
    const size_t known = std::min(own, (size_t)rules_.tail);
    for (size_t i = 1; i <= known; i++) tail_.push_back(text.tokens[text.tokens.size() - i]);
    int32_t context = 0;
    bool in_table = table_.contexts;
    NgramCache::Walk walk = cache_.walk(text.tenant);
    for (const int32_t token : tail_) {
        if (!in_table && !walk.known) return;
        in_table = in_table && lengthen(context, token);
        if (walk.known) cache_.lengthen(walk, token, usual_);
    }
}

}  // namespace forerun
