// Floats as Q4_K, by ggml's rule of the format; the reference, which explains it, is
// tests/references/q4_k.py. The eight groups of 256 numbers are worked on side by side; every sum
// goes over a group's numbers one after the other, so that the reference and llama.cpp give the
// same bytes.
#include <cmath>
#include <cstring>

#include "half.h"
#include "quant.h"

namespace forerun {
namespace {

constexpr int kGroups = 8;
constexpr float kSteps = 15.0f, kScales = 63.0f;

// One number of each group.
typedef float Eight __attribute__((vector_size(4 * kGroups)));
typedef int32_t Mask __attribute__((vector_size(4 * kGroups)));

Eight choose(Mask mask, Eight yes, Eight no) { return mask ? yes : no; }
Eight even(float value) { return Eight{} + value; }

// Whole numbers from 0 to 15, ties to even: adding 1.5 * 2^23 leaves no bit for a fraction.
Eight steps(Eight scaled) {
    // What is not a number becomes 0, as where a scale is 0.
    const Eight least = choose(scaled > 0.0f, scaled, even(0.0f));
    const Eight within = choose(least > kSteps, even(kSteps), least);
    return (within + 12582912.0f) - 12582912.0f;
}

struct Numbers {
    Eight x[kGroup], weight[kGroup];
};

// What 32 numbers of each group become, and how far that is off.
struct Attempt {
    Eight q[kGroup], scale, low, error;

    void find(const Numbers& numbers, Eight inverse, Eight from) {
        for (int i = 0; i < kGroup; i++) q[i] = steps(inverse * (numbers.x[i] - from));
    }
    void judge(const Numbers& numbers) {
        error = Eight{};
        for (int i = 0; i < kGroup; i++) {
            const Eight off = scale * q[i] + low - numbers.x[i];
            error += numbers.weight[i] * (off * off);
        }
    }
};

// Least squares over the steps that `tried` has. Where there is no solution the mask is 0.
Mask solve(const Numbers& numbers, Eight total, Eight sum, Attempt& tried) {
    Eight one = {}, two = {}, cross = {};
    for (int i = 0; i < kGroup; i++) {
        const Eight weighted = numbers.weight[i] * tried.q[i];
        one += weighted;
        two += weighted * tried.q[i];
        cross += weighted * numbers.x[i];
    }
    const Eight whole = total * two - one * one;
    const Mask solved = whole > 0.0f;
    const Eight divisor = choose(solved, whole, even(1.0f));
    tried.scale = (total * cross - sum * one) / divisor;
    tried.low = (two * sum - one * cross) / divisor;
    const Mask above = tried.low > 0.0f;
    tried.scale = choose(above, cross / choose(solved, two, even(1.0f)), tried.scale);
    tried.low = choose(above, even(0.0f), tried.low);
    return solved;
}

// Of 22 attempts the best of each group.
Attempt best_of(const Numbers& numbers) {
    Eight low = numbers.x[0], high = numbers.x[0], total = {}, sum = {};
    for (int i = 0; i < kGroup; i++) {
        const Eight x = numbers.x[i];
        low = choose(x < low, x, low);
        high = choose(x > high, x, high);
        total += numbers.weight[i];
        sum += numbers.weight[i] * x;
    }
    low = choose(low > 0.0f, even(0.0f), low);
    const Mask flat = high == low;
    const auto span = [&](Eight from) { return choose(flat, even(1.0f), high - from); };
    Attempt best, tried;
    const Eight inverse = kSteps / span(low);
    best.scale = 1.0f / inverse;
    best.low = low;
    best.find(numbers, inverse, low);
    best.judge(numbers);
    for (int attempt = 0; attempt <= 20; attempt++) {
        const float count = (-1.0f + 0.1f * (float)attempt) + kSteps;
        tried.find(numbers, count / span(best.low), best.low);
        const Mask solved = solve(numbers, total, sum, tried);
        tried.judge(numbers);
        const Mask better = solved & (tried.error < best.error);
        best.error = choose(better, tried.error, best.error);
        best.scale = choose(better, tried.scale, best.scale);
        best.low = choose(better, tried.low, best.low);
        for (int i = 0; i < kGroup; i++) best.q[i] = choose(better, tried.q[i], best.q[i]);
    }
    best.scale = choose(flat, even(0.0f), best.scale);
    for (Eight& q : best.q) q = choose(flat, even(0.0f), q);
    return best;
}

// Eight numbers in steps of the largest's 63rd; returns that step as a half.
uint16_t sixes(Eight values, uint8_t* out) {
    float most = 0.0f;
    for (int g = 0; g < kGroups; g++) most = values[g] > most ? values[g] : most;
    const float inverse = most > 0.0f ? kScales / most : 0.0f;
    for (int g = 0; g < kGroups; g++) {
        const float six = (inverse * values[g] + 12582912.0f) - 12582912.0f;
        out[g] = (uint8_t)(six > kScales ? kScales : six);
    }
    return half_from_float(most / kScales);
}

// Of numbers that are not all finite: both steps are NaN, so that it is noticed.
bool finite(const float* values) {
    for (int i = 0; i < kGroup * kGroups; i++) {
        if (!std::isfinite(values[i])) return false;
    }
    return true;
}

}  // namespace

void make_q4_k(const float* values, uint8_t* file) {
    Numbers numbers;
    Eight squares = {}, root;
    for (int i = 0; i < kGroup; i++) {
        for (int g = 0; g < kGroups; g++) numbers.x[i][g] = values[kGroup * g + i];
        squares += numbers.x[i] * numbers.x[i];
    }
    squares = squares / (float)kGroup;
    for (int g = 0; g < kGroups; g++) root[g] = std::sqrt(squares[g]);
    for (int i = 0; i < kGroup; i++) {
        const Eight x = numbers.x[i];
        numbers.weight[i] = root + choose(x < 0.0f, -x, x);
    }
    const Attempt best = best_of(numbers);
    uint8_t s[kGroups], o[kGroups];
    uint16_t halves[2] = {sixes(best.scale, s), sixes(-best.low, o)};
    if (!finite(values)) halves[0] = halves[1] = half_from_float(NAN);
    memcpy(file, halves, 4);
    Eight step, low;
    for (int g = 0; g < kGroups; g++) {
        step[g] = float_from_half(halves[0]) * (float)s[g];
        low[g] = float_from_half(halves[1]) * (float)o[g];
    }
    for (int g = 0; g < 4; g++) {
        file[4 + g] = (uint8_t)(s[g] | s[g + 4] >> 4 << 6);
        file[8 + g] = (uint8_t)(o[g] | o[g + 4] >> 4 << 6);
        file[12 + g] = (uint8_t)((s[g + 4] & 15) | (o[g + 4] & 15) << 4);
    }
    const Mask none = step == 0.0f;
    const Eight divisor = choose(none, even(1.0f), step);
    for (int i = 0; i < kGroup; i++) {
        const Eight again = steps((numbers.x[i] + low) / divisor);
        const Eight q = choose(none, best.q[i], again);
        for (int pair = 0; pair < 4; pair++) {
            file[16 + kGroup * pair + i] = (uint8_t)((int)q[2 * pair] | (int)q[2 * pair + 1] << 4);
        }
    }
}

}  // namespace forerun
