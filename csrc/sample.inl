// The target's choice at a node when nothing but the temperature shapes it: what
// forerun/speculative/noise.py and accept.py define, found without computing all of the noise.

namespace {

constexpr int kTokens = 32;           // tokens considered at a time: eight counters of Philox
constexpr float kMostNoise = 23.0f;   // above the noise of any 32-bit word

// Philox-4x32-10 of eight counters (first + i, position, 0, 0), counter after counter: the words
// of 32 tokens from 4 * first on.
FORERUN_INLINE void philox(uint32_t first, uint32_t position, uint64_t seed,
                           uint32_t (&words)[kTokens]) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    U8 a = count8(first), b = words8(position), c = words8(0), d = words8(0);
    for (int turn = 0; turn < 10; turn++) {
        U8 high_a, low_a, high_c, low_c;
        multiply8(a, 0xD2511F53u, high_a, low_a);
        multiply8(c, 0xCD9E8D57u, high_c, low_c);
        a = xor8(xor8(high_c, b), words8(key0));
        c = xor8(xor8(high_a, d), words8(key1));
        b = low_c;
        d = low_a;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    store_turned(words, a, b, c, d);
}

FORERUN_INLINE float gumbel(uint32_t word) {
    return (float)-log(-log(((double)word + 0.5) * 0x1p-32));
}

// A request's noise at one position, and the best of the tokens considered so far.
struct Draw {
    float temperature;
    uint64_t seed;
    uint32_t position;
    float score;
    int32_t token;
};

// What a score has to be, before it is rounded, to be the best's once it is.
FORERUN_INLINE float least_to_tie(const Draw& draw) {
    return draw.score - __builtin_fabsf(draw.score) * 0x1p-23f;
}

FORERUN_INLINE float largest_lane(F8 a) {
    float lanes[8], most;
    store8(lanes, a);
    most = lanes[0];
    for (int i = 1; i < 8; i++) most = lanes[i] > most ? lanes[i] : most;
    return most;
}

// Considers tokens [first, first + 32). With u = (x + 1/2) / 2^32 the noise -log(-log u) is below
// -log(1 - u), so a token can win only where 2^32 (1 - u) = ~x + 1/2 is at most
// 2^32 e^(z - best): this spares both logarithms for all but a few. Both sides are halved, to fit
// signed integers; the factor and the addend are larger than any rounding but that of the scores.
static void consider(const float* logits, int count, int first, Draw& draw) {
    const int present = count - first < kTokens ? count - first : kTokens;
    float z[kTokens];
    for (int i = present; i < kTokens; i++) z[i] = logits[first];
    memcpy(z, logits + first, sizeof(float) * present);
    F8 heated[4];
    for (int k = 0; k < 4; k++) {
        heated[k] = div8(load8(z + 8 * k), splat8(draw.temperature));
        store8(z + 8 * k, heated[k]);
    }
    const F8 most = max8(max8(heated[0], heated[1]), max8(heated[2], heated[3]));
    if (!any_at_most8(splat8(least_to_tie(draw) - kMostNoise), most)) return;
    uint32_t words[kTokens];
    philox((uint32_t)first / 4, draw.position, draw.seed, words);
    for (int k = 0; k < 4; k++) {
        const F8 behind = sub8(heated[k], splat8(least_to_tie(draw)));
        const F8 bound = fma8(exp_of(behind), splat8(2.1496e9f), splat8(2.0f));
        if (!any_at_most8(half_complement8(words + 8 * k), bound)) continue;
        for (int i = 8 * k; i < 8 * k + 8 && i < present; i++) {
            const float score = z[i] + gumbel(words[i]);
            if (score > draw.score || (score == draw.score && first + i < draw.token)) {
                draw.score = score;
                draw.token = first + i;
            }
        }
    }
}

// The first token with the largest logit, or -1 where some logit is not finite.
static int32_t greedy(const float* logits, int count) {
    F8 most = splat8(logits[0]), trouble = splat8(0.0f);
    int i = 0;
    for (; i + 8 <= count; i += 8) {
        const F8 x = load8(logits + i);
        most = max8(x, most);
        trouble = add8(trouble, sub8(x, x));  // zero, or NaN for ever
    }
    float largest = largest_lane(most), rest = sum8(trouble);
    for (int k = i; k < count; k++) {
        largest = logits[k] > largest ? logits[k] : largest;
        rest += logits[k] - logits[k];
    }
    if (rest != 0.0f) return -1;
    for (i = 0; logits[i] != largest; i++) {
    }
    return i;
}

static int32_t choose(const float* logits, int count, float temperature, uint64_t seed,
                      uint32_t position) {
    const int32_t best = greedy(logits, count);
    if (best < 0 || temperature == 0.0f) return best;
    uint32_t words[kTokens];
    philox((uint32_t)best / 4, position, seed, words);
    const float score = logits[best] / temperature + gumbel(words[best % 4]);
    if (score - score != 0.0f) return -1;
    Draw draw = {temperature, seed, position, score, best};
    for (int first = 0; first < count; first += kTokens) consider(logits, count, first, draw);
    return draw.token;
}

// Noise of some tokens.
static void noise(const int32_t* tokens, int count, uint64_t seed, uint32_t position, float* out) {
    uint32_t words[kTokens];
    for (int i = 0; i < count; i++) {
        philox((uint32_t)tokens[i] / 4, position, seed, words);
        out[i] = gumbel(words[tokens[i] % 4]);
    }
}

// Numbers divided by the temperature; returns the largest.
static float heat(const float* x, int count, float temperature, float* out) {
    const F8 by = splat8(temperature);
    F8 most = splat8(x[0] / temperature);
    int i = 0;
    for (; i + 8 <= count; i += 8) {
        const F8 heated = div8(load8(x + i), by);
        most = max8(heated, most);
        store8(out + i, heated);
    }
    float largest = largest_lane(most);
    for (; i < count; i++) {
        out[i] = x[i] / temperature;
        largest = out[i] > largest ? out[i] : largest;
    }
    return largest;
}

// The sum of e^(x - most). What is far below the most counts as next to nothing.
static double mass(const float* x, int count, float most) {
    double total = 0.0;
    int i = 0;
    while (i + 8 <= count) {
        F8 some = splat8(0.0f);
        for (int end = count - i < 256 ? count : i + 256; i + 8 <= end; i += 8) {
            some = add8(some, exp_of(sub8(load8(x + i), splat8(most))));
        }
        total += sum8(some);
    }
    if (i == count) return total;
    float rest[8];
    for (int k = 0; k < 8; k++) rest[k] = i + k < count ? x[i + k] : -INFINITY;
    return total + sum8(exp_of(sub8(load8(rest), splat8(most))));
}

// Tokens whose numbers are `least` or more, ascending; returns how many.
static int at_least(const float* x, int count, float least, int32_t* out) {
    int found = 0, i = 0;
    for (; i + 8 <= count; i += 8) {
        if (!any_at_most8(splat8(least), load8(x + i))) continue;
        for (int k = i; k < i + 8; k++) {
            if (x[k] >= least) out[found++] = k;
        }
    }
    for (; i < count; i++) {
        if (x[i] >= least) out[found++] = i;
    }
    return found;
}

static void exclude(const float* logits, const uint32_t* allowed, int count, float* out) {
    for (int first = 0; first < count; first += 32) {
        const int some = count - first < 32 ? count - first : 32;
        const uint32_t word = allowed[first / 32];
        if (word == 0) {
            for (int i = 0; i < some; i++) out[first + i] = forerun::kExcluded;
        } else {
            for (int i = 0; i < some; i++) {
                out[first + i] = word >> i & 1 ? logits[first + i] : forerun::kExcluded;
            }
        }
    }
}

}  // namespace
