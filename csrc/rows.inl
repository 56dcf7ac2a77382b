// What happens to a row between two products: norms, quantisation, gates, rotation.

namespace {

// e^x to about one unit in the last place, x limited to [-87, 88]; of NaN NaN, for it is second.
template <class V>
FORERUN_INLINE V exp_of(V x) {
    x = minw(splatw<V>(88.0f), maxw(splatw<V>(-87.0f), x));
    const V n = roundw(mulw(x, splatw<V>(1.44269504f)));
    V r = fmaw(n, splatw<V>(-0.693145752f), x);  // ln 2 in two parts, the first short
    r = fmaw(n, splatw<V>(-1.42860677e-6f), r);
    V p = splatw<V>(1.0f / 720);
    p = fmaw(p, r, splatw<V>(1.0f / 120));
    p = fmaw(p, r, splatw<V>(1.0f / 24));
    p = fmaw(p, r, splatw<V>(1.0f / 6));
    p = fmaw(p, r, splatw<V>(0.5f));
    p = fmaw(p, r, splatw<V>(1.0f));
    p = fmaw(p, r, splatw<V>(1.0f));
    return mulw(p, powerw(n));
}

// 32 numbers into one lane of a Group. Not finite: a NaN scale, so that every product with the
// row is NaN and the row is reported. Vanishing: zero.
FORERUN_INLINE void quantise_group(const float* x, Group& out, int lane) {
    const uint32_t bits = largest_bits(x);
    const float largest = forerun::float_of(bits);
    if (bits >= 0x7f800000 || largest < 1e-30f) {
        const float scale = bits >= 0x7f800000 ? forerun::float_of(0x7fc00000) : 0.0f;
        memset(out.q[lane], 0, kGroup);
        out.scale[lane] = out.sum[lane] = scale;
        out.excess[lane] = out.excess32[lane][0] = out.excess32[lane][1] = 0;
        return;
    }
    int32_t sums[2];
    round_to_bytes(x, 127.0f / largest, out.q[lane], sums);
    const int32_t sum = sums[0] + sums[1];
    out.scale[lane] = largest / 127.0f;
    out.sum[lane] = out.scale[lane] * (float)sum;
    out.excess[lane] = -128 * sum;
    for (int h = 0; h < 2; h++) out.excess32[lane][h] = -32 * sums[h];
}

// Quantises join(a, b), a vector at a time. What is missing in the last group is zero.
template <class Join>
FORERUN_INLINE void quantise_joined(const float* a, const float* b, int count, Group* out, int lane,
                                    Join join) {
    alignas(64) float values[kGroup];
    int first = 0;
    for (; first + kGroup <= count; first += kGroup, out++) {
#pragma GCC unroll 4
        for (int i = first; i < first + kGroup; i += kWide) {
            storew(values + i - first, join(loadw(a + i), loadw(b + i)));
        }
        quantise_group(values, *out, lane);
    }
    if (first == count) return;
    float rest[2][kGroup] = {{0}};
    memcpy(rest[0], a + first, sizeof(float) * (count - first));
    memcpy(rest[1], b + first, sizeof(float) * (count - first));
    for (int i = 0; i < kGroup; i += kWide) {
        storew(values + i, join(loadw(rest[0] + i), loadw(rest[1] + i)));
    }
    quantise_group(values, *out, lane);
}

static void quantise(const float* x, int count, Group* out, int lane) {
    quantise_joined(x, x, count, out, lane, [](W a, W) { return a; });
}

static float inverse_rms(const float* x, int count, float eps) {
    F8 squares[4] = {splat8(0.0f), splat8(0.0f), splat8(0.0f), splat8(0.0f)};
    int i = 0;
    for (; i + 32 <= count; i += 32) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const F8 v = load8(x + i + 8 * k);
            squares[k] = fma8(v, v, squares[k]);
        }
    }
    float total = sum8(add8(add8(squares[0], squares[1]), add8(squares[2], squares[3])));
    for (; i < count; i++) total = __builtin_fmaf(x[i], x[i], total);
    return 1.0f / __builtin_sqrtf(total / (float)count + eps);
}

static void norm_quantise(const float* x, const float* weight, float factor, int count, Group* out,
                          int lane) {
    const W all = splatw<W>(factor);
    quantise_joined(x, weight, count, out, lane, [=](W a, W w) { return mulw(mulw(a, all), w); });
}

FORERUN_INLINE W silu_of(W g, W u) {
    const W one_plus = addw(splatw<W>(1.0f), exp_of(subw(splatw<W>(0.0f), g)));
    return mulw(divw(g, one_plus), u);
}

FORERUN_INLINE W sigmoid_of(W g, W u) {
    return divw(u, addw(splatw<W>(1.0f), exp_of(subw(splatw<W>(0.0f), g))));
}

FORERUN_INLINE W clamped_of(W g, W u) {
    g = minw(g, splatw<W>(7.0f));
    u = minw(maxw(u, splatw<W>(-7.0f)), splatw<W>(7.0f));
    const W one_plus = addw(splatw<W>(1.0f), exp_of(mulw(g, splatw<W>(-1.702f))));
    return mulw(divw(g, one_plus), addw(u, splatw<W>(1.0f)));
}

constexpr float kTwiceRoot = 1.59576912f;  // 2 sqrt(2 / pi)

// 0.5 g (1 + tanh(a)) = g / (1 + e^(-2a)), a = sqrt(2 / pi) (g + 0.044715 g^3).
FORERUN_INLINE W gelu_of(W g, W u) {
    const W bent = fmaw(mulw(g, g), splatw<W>(-0.044715f * kTwiceRoot), splatw<W>(-kTwiceRoot));
    const W one_plus = addw(splatw<W>(1.0f), exp_of(mulw(g, bent)));
    return mulw(divw(g, one_plus), u);
}

// g Phi(g) = max(g, 0) - |g| Phi(-|g|), Phi(-x) = e^(-x^2 / 2) t q(t), t = 1 / (1 + 0.35 x): q of
// degree 8 by the least relative error over x in [0, 13.4], 3.2e-8 (Lawson's weighted least
// squares; the form is Abramowitz and Stegun's 7.1.26). With the rounding of float32 the
// result is within 1e-6 of itself, also where it vanishes, until Phi is below 1e-37.
FORERUN_INLINE W erf_gelu_of(W g, W u) {
    constexpr float kQ[] = {0.139621615f,  0.139858365f, 0.119857475f,  0.105413675f, -0.0228929426f,
                            0.158866763f, -0.255451113f, 0.143846929f, -0.0291207675f};
    const W zero = splatw<W>(0.0f);
    const W x = maxw(g, subw(zero, g)), near = minw(x, splatw<W>(16.0f));
    const W t = divw(splatw<W>(1.0f), fmaw(x, splatw<W>(0.35f), splatw<W>(1.0f)));
    W q = splatw<W>(kQ[8]);
#pragma GCC unroll 8
    for (int i = 7; i >= 0; i--) q = fmaw(q, t, splatw<W>(kQ[i]));
    // The square in two parts: half a unit in its last place would show in e^(-x^2 / 2).
    const W square = mulw(near, near), rest = fmaw(near, near, subw(zero, square));
    W bell = exp_of(mulw(square, splatw<W>(-0.5f)));
    bell = fmaw(bell, mulw(rest, splatw<W>(-0.5f)), bell);
    // Not finite: NaN, by x t. Of a maximum with NaN second NaN comes out.
    return mulw(subw(maxw(zero, g), mulw(mulw(mulw(x, t), q), bell)), u);
}

// cap tanh(x / cap), where 1 / cap is given; NaN for what is not finite, which exp8 would hide.
FORERUN_INLINE W soften_of(W x, float cap, float inverse) {
    const W one_plus = addw(splatw<W>(1.0f), exp_of(mulw(x, splatw<W>(2.0f * inverse))));
    const W bent = fmaw(divw(splatw<W>(-2.0f), one_plus), splatw<W>(cap), splatw<W>(cap));
    return addw(bent, subw(x, x));
}

static void silu_quantise(const float* gate, const float* up, int count, Group* out, int lane) {
    quantise_joined(gate, up, count, out, lane, [](W g, W u) { return silu_of(g, u); });
}

static void sigmoid_quantise(const float* gate, const float* up, int count, Group* out, int lane) {
    quantise_joined(gate, up, count, out, lane, [](W g, W u) { return sigmoid_of(g, u); });
}

static void clamped_quantise(const float* gate, const float* up, int count, Group* out, int lane) {
    quantise_joined(gate, up, count, out, lane, [](W g, W u) { return clamped_of(g, u); });
}

static void gelu_quantise(const float* gate, const float* up, int count, Group* out, int lane) {
    quantise_joined(gate, up, count, out, lane, [](W g, W u) { return gelu_of(g, u); });
}

static void erf_gelu_quantise(const float* gate, const float* up, int count, Group* out, int lane) {
    quantise_joined(gate, up, count, out, lane, [](W g, W u) { return erf_gelu_of(g, u); });
}

// join(a, b), a vector at a time, as float32. `out` may be `a` or `b`.
template <class Join>
FORERUN_INLINE void write_joined(const float* a, const float* b, int count, float* out, Join join) {
    int i = 0;
    for (; i + kWide <= count; i += kWide) storew(out + i, join(loadw(a + i), loadw(b + i)));
    if (i == count) return;
    float rest[2][kWide] = {{0}}, values[kWide];
    memcpy(rest[0], a + i, sizeof(float) * (count - i));
    memcpy(rest[1], b + i, sizeof(float) * (count - i));
    storew(values, join(loadw(rest[0]), loadw(rest[1])));
    memcpy(out + i, values, sizeof(float) * (count - i));
}

static void norm(const float* x, const float* weight, float factor, int count, float* out) {
    const W all = splatw<W>(factor);
    write_joined(x, weight, count, out, [=](W a, W w) { return mulw(mulw(a, all), w); });
}

static void silu(const float* gate, const float* up, int count, float* out) {
    write_joined(gate, up, count, out, [](W g, W u) { return silu_of(g, u); });
}

static void sigmoid(const float* gate, const float* up, int count, float* out) {
    write_joined(gate, up, count, out, [](W g, W u) { return sigmoid_of(g, u); });
}

static void clamped(const float* gate, const float* up, int count, float* out) {
    write_joined(gate, up, count, out, [](W g, W u) { return clamped_of(g, u); });
}

static void gelu(const float* gate, const float* up, int count, float* out) {
    write_joined(gate, up, count, out, [](W g, W u) { return gelu_of(g, u); });
}

static void erf_gelu(const float* gate, const float* up, int count, float* out) {
    write_joined(gate, up, count, out, [](W g, W u) { return erf_gelu_of(g, u); });
}

static void soften(float* x, int count, float cap) {
    const float inverse = 1.0f / cap;
    write_joined(x, x, count, x, [=](W a, W) { return soften_of(a, cap, inverse); });
}

static void rotate(float* x, const float* weight, float eps, const float* cosine, const float* sine,
                   int half, float scale) {
    if (weight) {
        const float factor = inverse_rms(x, 2 * half, eps);
        for (int i = 0; i < 2 * half; i++) x[i] = x[i] * factor * weight[i];
    }
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = (a * cosine[i] - b * sine[i]) * scale;
        x[half + i] = (b * cosine[i] + a * sine[i]) * scale;
    }
}

static void to_halves(const float* x, int count, uint16_t* out) {
    const F8 most = splat8(65504.0f), least = splat8(-65504.0f);
    for (int i = 0; i < count; i += 8) {
        store_half8(out + i, max8(least, min8(most, load8(x + i))));  // NaN stays NaN.
    }
}

// Up to kGroup numbers, a multiple of 8, and their scale.
FORERUN_INLINE void put_block(const float* x, int count, uint8_t* out, uint16_t& scale) {
    alignas(64) float values[kGroup] = {0};
    for (int i = 0; i < count; i += 8) store8(values + i, load8(x + i));
    const uint32_t bits = largest_bits(values);
    const float wanted = forerun::float_of(bits) / 127.0f;
    scale = bits >= 0x7f800000 ? 0x7e00 : forerun::half_from_float(wanted < 65504.0f ? wanted : 65504.0f);
    const float kept = forerun::float_from_half(scale);
    if (bits >= 0x7f800000 || kept == 0.0f) {
        memset(out, 0, count);
        return;
    }
    // A half that was rounded down would make more than 127 of the largest.
    const F8 most = splat8(127.0f * kept), least = splat8(-127.0f * kept);
    for (int i = 0; i < count; i += 8) {
        store8(values + i, max8(least, min8(most, load8(values + i))));
    }
    int8_t bytes[kGroup];
    int32_t sums[2];
    round_to_bytes(values, 1.0f / kept, bytes, sums);
    memcpy(out, bytes, count);
}

static void to_blocks(const float* x, int count, uint8_t* out) {
    uint8_t* scales = out + count;
    for (int first = 0; first < count; first += kGroup, scales += sizeof(uint16_t)) {
        uint16_t scale;
        put_block(x + first, count - first < kGroup ? count - first : kGroup, out + first, scale);
        memcpy(scales, &scale, sizeof scale);
    }
}

}  // namespace
