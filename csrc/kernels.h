// The inner loops, compiled once per instruction set and chosen when the process starts.
#pragma once
#include <cstdint>

#include "quant.h"

namespace forerun {

// Where a product's numbers go: out[row * stride + channel].
struct Target {
    float* data;
    int64_t stride;
    bool add;  // add to what is there (the residual stream) instead of replacing it
};

// What one node sees: the first `trunk` positions of its sequence's list, then its own path.
struct Sight {
    int32_t trunk;
    int32_t tail;
    const int32_t* path;  // int32[tail] places of the draft tokens on the way to the node, itself
                          // last, but for those of a block
    int32_t ahead = 0;    // how many of its block stand behind it

    FORERUN_MEMBER int length() const { return trunk + tail; }
};

// How the cache stores a head's key or value: bytes of a number. Blocks of kGroup numbers have a half
// each that multiplies them; a row's halves follow its numbers. The products are exact in float32.
enum Item { kBlocks = 1, kHalves = 2, kFloats = 4 };

static inline int blocks_of(int size) { return (size + kGroup - 1) / kGroup; }

static inline int64_t row_bytes(int item, int size) {
    return item == kBlocks ? size + (int64_t)sizeof(uint16_t) * blocks_of(size) : (int64_t)item * size;
}

// Attention of one node under one key/value head of one layer.
struct Attend {
    const uint8_t* keys;     // [places] rows of `size` numbers, as `item` says
    const uint8_t* values;   // the same; the keys themselves where `mixed` is less than `size`
    int32_t item;            // of Item
    const int32_t* trunk;    // place of every position of the sequence, prefix and known chain
    Sight sight;
    int32_t heads;         // query heads that share the key/value head
    int32_t size;          // head size, a multiple of 8
    int32_t mixed;         // numbers of a value that are mixed: the first of `size`, a multiple of 8
    const float* queries;  // [heads][size], already scaled
    float* out;            // [heads][size], of which `mixed` are written
    float* scores;         // [room][stride]
    int64_t stride;        // padded_positions(of the longest sight)
    float* totals;         // [room] sums of the weights
    int32_t room;          // heads there is room for; less than `heads` with one thread alone
    float* near;           // [near_numbers(size)] the thread's own, for keys and values as float32
    const float* sinks;    // [heads] scores that take part in the sums alone, or null
    float cap;             // scores become cap tanh(score / cap); 0: they stay
};

// What several nodes of a row see alike.
struct Alike {
    int32_t positions;  // so many, from the first on, at the same places
    int32_t longest;    // the node that sees most
    bool nested;        // what any of them sees is where the longest's list begins
};

constexpr float kExcluded = -1e30f;  // a logit that is never chosen, yet finite
constexpr int kPositions = 16;     // positions that attention takes at a time
constexpr int kNodesTogether = 8;  // nodes of a row that one thread attends to together, at most

constexpr int kNearNumbers = 2048;  // of values that are brought near at a time

// Then come scales of kPositions keys, eight times each.
static inline int64_t near_scales(int size) {
    return size * kPositions > kNearNumbers ? size * kPositions : kNearNumbers;
}

static inline int64_t near_numbers(int size) {
    return near_scales(size) + 8 * kPositions * (int64_t)blocks_of(size);
}

static inline int64_t padded_positions(int64_t length) {
    return (length + kPositions - 1) / kPositions * kPositions;
}

// Blocks [first, last) of out = W x (+ bias) for `rows` rows, four to a Group column:
// x[(row / 4) * groups + group].
using Product = void (*)(const Matrix& w, const Group* x, int rows, int first, int last,
                         Target out);

// The same for weights that are floats: x float32[rows][inputs].
using FloatProduct = void (*)(const Matrix& w, const float* x, int rows, int first, int last,
                              Target out);

// How a feed-forward's gate g and up u become one (forerun/networks/layer_spec.py, `Activation`).
enum Gate {
    kSilu = 0,     // silu(g) u
    kClamped = 1,  // gpt-oss's: g sigmoid(1.702 g) (u + 1), g at most 7 and u between -7 and 7
    kGelu = 2,     // GELU(g) u, by its tanh approximation
    kGeluErf = 3,  // GELU(g) u = g Phi(g) u, Phi the normal distribution's
    kSigmoid = 4,  // u sigmoid(g), of attention's context
    kGates = 5,
};
using Joined = void (*)(const float* gate, const float* up, int count, float* out);
using JoinedQuantised = void (*)(const float* gate, const float* up, int count, Group* out,
                                 int lane);

// kColumns of one head of one tree's states, from column `first` on (delta.h).
struct DeltaStep;
using GatedDelta = void (*)(const DeltaStep& step, int tree, int head, int first, float* scratch);

struct Kernels {
    const char* name;

    Product product;
    FloatProduct float_product;

    // One row into lane `lane` of its Group column, quantised in groups of 32:
    // x itself; x * factor * weight; or gate and up made one, by `Gate`.
    void (*quantise)(const float* x, int count, Group* out, int lane);
    void (*norm_quantise)(const float* x, const float* weight, float factor, int count, Group* out,
                          int lane);
    JoinedQuantised gates_quantise[kGates];

    // The last two as float32[count]; `out` may be `x` or `gate`.
    void (*norm)(const float* x, const float* weight, float factor, int count, float* out);
    Joined gates[kGates];

    // RMSNorm's factor of a row: 1 / sqrt(mean of squares + eps).
    float (*inverse_rms)(const float* x, int count, float eps);

    // float32[count] in place: cap tanh(x / cap); not finite: NaN.
    void (*soften)(float* x, int count, float cap);

    // One head in place: RMSNorm with `weight` where it is not null, then the rotation of the
    // pairs (i, i + half) by the angles whose cosines and sines are given, then times `scale`.
    void (*rotate)(float* x, const float* weight, float eps, const float* cosine,
                   const float* sine, int half, float scale);

    // float32[count] to halves, limited to the largest finite half, NaN left as it is; count a
    // multiple of 8.
    void (*to_halves)(const float* x, int count, uint16_t* out);

    // The same to blocks: row_bytes(kBlocks, count) of `out`. A block with a number that is not finite
    // is NaN; a scale is at most the largest finite half.
    void (*to_blocks)(const float* x, int count, uint8_t* out);

    // Nodes of one row, at most kNodesTogether: jobs that differ in sight, trunk, queries, out,
    // scores and totals alone.
    void (*attend)(const Attend* nodes, int count, Alike alike);

    // One node by several threads: scores of positions [first, last); for every head its weights, returning their sum for `totals`; numbers [first,
    // last) of all heads' output, both multiples of 8. Each needs all of what comes before it.
    // `sink` is null where the head has none, `cap` as in Attend.
    void (*score)(const Attend& job, int first, int last);
    float (*weigh)(float* scores, int length, const float* sink, float cap);
    void (*mix)(const Attend& job, int first, int last);

    // The token that forerun.speculative chooses from raw logits at one output position under a
    // plain request (temperature 0 = greedy), or -1 where some logit is not finite.
    int32_t (*choose)(const float* logits, int count, float temperature, uint64_t seed,
                      uint32_t position);

    // float32[count] with those that are not allowed (Walk's masks, of model.h) replaced by kExcluded.
    void (*exclude)(const float* logits, const uint32_t* allowed, int count, float* out);

    // What is left by cut-offs (cut_offs.cpp): numbers divided by the temperature, returning the largest;
    // the sum of e^(x - most), 1e-6 of it exact; the tokens whose numbers are `least` or more, ascending,
    // returning how many; the noise of some tokens.
    float (*heat)(const float* x, int count, float temperature, float* out);
    double (*mass)(const float* x, int count, float most);
    int (*at_least)(const float* x, int count, float least, int32_t* out);
    void (*noise)(const int32_t* tokens, int count, uint64_t seed, uint32_t position, float* out);

    GatedDelta gated_delta;
};

// What an isa_*.cpp puts into its table after the name.
#define FORERUN_KERNELS \
    product, float_product, quantise, norm_quantise,                                      \
        {silu_quantise, clamped_quantise, gelu_quantise, erf_gelu_quantise, sigmoid_quantise}, norm, \
        {silu, clamped, gelu, erf_gelu, sigmoid}, inverse_rms, soften, rotate, to_halves, to_blocks, attend, \
        attend_some_positions, weigh, attend_some_numbers, choose, exclude, heat, mass, \
        at_least, noise, gated_delta

// One table per instruction set; null where it was compiled for another kind of machine or by a
// compiler that does not know the instructions.
extern const Kernels* const kPortable;
extern const Kernels* const kAvx2;
extern const Kernels* const kNeon;
extern const Kernels* const kAvx512;

// AVX2's table with other products.
extern const Product kAvxVnniProduct;
extern const Product kAvx512VnniProduct;

// kAvx512's table with another product of many rows.
extern const Product kAmxProduct;

// Kernels by name, or null where this machine or this build has none of that name; null or ""
// asks for the best.
const Kernels* choose_kernels(const char* name);

// Why AMX is not used on a processor that has it; "" where it is, or where there is none.
const char* amx_fault();

}  // namespace forerun
