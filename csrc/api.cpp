// The C interface that forerun/executors/cpu/native.py calls. Sizes are checked there.
#include <cstring>
#include <memory>
#include <new>

#include "delta.h"
#include "draft.h"
#include "model.h"
#include "ngram.h"

using namespace forerun;

namespace {

// Why the last call on this thread failed.
thread_local std::string last_error;

template <class Work>
int guarded(Work work) {
    try {
        last_error = work();
    } catch (const std::bad_alloc&) {
        last_error = "out of memory";
    } catch (const std::exception& error) {
        last_error = error.what();
    }
    return last_error.empty() ? 0 : -1;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Raised whenever the meaning of a call or structure changes; native.py asks for the same number.
int forerun_abi() { return 55; }

const char* forerun_error() { return last_error.c_str(); }

// Name of the kernels that `name` (or "" for the best) stands for on this machine, or null.
const char* forerun_kernels(const char* name) {
    const Kernels* kernels = choose_kernels(name);
    return kernels ? kernels->name : nullptr;
}

// Why AMX is not used on a processor that has it; "" where it is, or where there is none.
const char* forerun_amx_fault() { return amx_fault(); }

// The format (quant.h) that keeps what a file stores as `source`.
int forerun_own_format(int source) { return own_format((Source)source); }

int64_t forerun_packed_bytes(int format, int channels, int inputs) {
    return (int64_t)packed_bytes(format, channels, inputs);
}

// One product: `count` rows of x, float32[count][inputs], through a matrix of a file's bytes, packed
// as `format`, into out, float32[count][channels]. For tests and measurements; a model's own products
// are in a step.
int forerun_multiply(const char* name, int source, int format, const uint8_t* rows, int channels,
                     int inputs, const float* x, int count, float* out) {
    return guarded([&]() -> std::string {
        const Kernels* kernels = choose_kernels(name);
        if (!kernels) return "no such kernels";
        if (!can_pack((Source)source, format, inputs)) return "a format that this cannot become";
        Matrix w;
        w.format = format;
        w.channels = channels;
        w.inputs = inputs;
        std::vector<uint8_t> tiles(packed_bytes(format, channels, inputs));
        pack((Source)source, format, rows, channels, inputs, 0, w.blocks(), tiles.data());
        w.tiles = tiles.data();
        const Target target = {out, channels, false};
        if (is_float(format)) {
            kernels->float_product(w, x, count, 0, w.blocks(), target);
            return "";
        }
        std::vector<Group> groups((size_t)(count + kLanes - 1) / kLanes * w.groups());
        for (int row = 0; row < count; row++) {
            kernels->quantise(x + (size_t)row * inputs, inputs,
                              &groups[(size_t)(row / kLanes) * w.groups()], row % kLanes);
        }
        kernels->product(w, groups.data(), count, 0, w.blocks(), target);
        return "";
    });
}

// gate (kernels.h, `Gate`) of two rows float32[count]. For tests.
int forerun_gate(const char* name, int which, const float* gate, const float* up, int count,
                 float* out) {
    return guarded([&]() -> std::string {
        const Kernels* kernels = choose_kernels(name);
        if (!kernels) return "no such kernels";
        kernels->gates[which](gate, up, count, out);
        return "";
    });
}

// float32[count] as the cache stores a head's key in blocks (kernels.h, `Item`). For tests.
int forerun_blocks(const char* name, const float* x, int count, uint8_t* out) {
    return guarded([&]() -> std::string {
        const Kernels* kernels = choose_kernels(name);
        if (!kernels) return "no such kernels";
        kernels->to_blocks(x, count, out);
        return "";
    });
}

// States of gated delta nets (delta.h): who advances them, by kernels of that name.
Delta* forerun_delta_open(const char* name, int threads) {
    Delta* delta = nullptr;
    guarded([&]() -> std::string {
        const Kernels* kernels = choose_kernels(name);
        if (!kernels) return "no such kernels";
        delta = new Delta(kernels, threads);
        return "";
    });
    return delta;
}

void forerun_delta_close(Delta* delta) { delete delta; }

int forerun_delta_run(Delta* delta, const DeltaStep* step) {
    return guarded([&]() -> std::string {
        delta->run(*step);
        return "";
    });
}

Model* forerun_open(const Sizes* sizes, const Ropes* ropes, int64_t weight_bytes,
                    const char* kernels) {
    Model* model = nullptr;
    guarded([&]() -> std::string {
        const Kernels* chosen = choose_kernels(kernels);
        if (!chosen) return std::string("no kernels named ") + kernels + " on this machine";
        model = new Model(*sizes, *ropes, (size_t)weight_bytes, chosen);
        return "";
    });
    return model;
}

void forerun_close(Model* model) { delete model; }

// See Model::set_window_pages.
void forerun_set_window_pages(Model* model, const int32_t* pages) { model->set_window_pages(pages); }

// See Model::set_layer and Model::set_scales.
int forerun_set_layer(Model* model, int layer, const LayerKind* kind) {
    return guarded([&] { return model->set_layer(layer, *kind); });
}

void forerun_set_scales(Model* model, float embedding, float logits, float logit_cap) {
    model->set_scales(embedding, logits, logit_cap);
}

// Packs a matrix as `format`; `rows` may be freed afterwards. bias is float32[channels] or null.
int forerun_set_matrix(Model* model, int layer, int which, int source, int format,
                       const uint8_t* rows, int channels, int inputs, const float* bias) {
    return guarded([&]() -> std::string {
        Matrix* matrix = model->matrix(layer, which);
        if (!matrix) return "no such matrix";
        if (!can_pack((Source)source, format, inputs)) return "a format that this cannot become";
        if (is_float(format) && !model->takes_floats(layer, which)) {
            return "a head's weights cannot be floats";
        }
        uint8_t* tiles = model->take(packed_bytes(format, channels, inputs));
        if (!tiles) return "weights exceed the space planned for them";
        matrix->format = format;
        matrix->channels = channels;
        matrix->inputs = inputs;
        matrix->tiles = tiles;
        if (bias) {
            float* copy = (float*)model->take(sizeof(float) * channels);
            if (!copy) return "weights exceed the space planned for them";
            memcpy(copy, bias, sizeof(float) * channels);
            matrix->bias = copy;
        }
        model->note_format(layer, which, format);
        model->pool.run([&](int thread) {
            const Share share(matrix->blocks(), thread, model->pool.threads());
            pack((Source)source, format, rows, channels, inputs, share.first, share.last, tiles);
        });
        return "";
    });
}

// The output head is the embedding.
int forerun_tie_head(Model* model) {
    *model->matrix(-1, 1) = *model->matrix(-1, 0);
    return 0;
}

// The output head is another model's.
int forerun_share_head(Model* model, Model* other) {
    *model->matrix(-1, 1) = *other->matrix(-1, 1);
    return 0;
}

int forerun_set_vector(Model* model, int layer, int which, const float* values, int count) {
    return guarded([&]() -> std::string {
        const float** vector = model->vector(layer, which);
        if (!vector) return "no such vector";
        float* copy = (float*)model->take(sizeof(float) * count);
        if (!copy) return "weights exceed the space planned for them";
        memcpy(copy, values, sizeof(float) * count);
        *vector = copy;
        return "";
    });
}

// `walk` may be null; see Model::forward.
int forerun_forward(Model* model, const Step* step, const Walk* walk) {
    return guarded([&]() -> std::string { return model->forward(*step, walk); });
}

// See Model::logits_row_of; -1 where that fails.
int forerun_logits_row(Model* model, const Step* step, int node) {
    int row = -1;
    guarded([&] { return model->logits_row_of(*step, node, row); });
    return row;
}

// See Model::read_weights.
uint64_t forerun_read_weights(Model* model) { return model->read_weights(); }

int forerun_products(Model* model, int rows, float* logits) {
    return guarded([&]() -> std::string {
        if (rows < 1 || rows > model->sizes.max_nodes) return "more rows than the step may have";
        model->products(rows, logits);
        return "";
    });
}

// Decides rows of the last step, or of one that forerun_forward would take and whose logits are all
// there. See Model::accept.
int forerun_accept(Model* model, const Step* step, const Walk* walk) {
    return guarded([&] { return model->accept(*step, *walk); });
}

int forerun_commit(Model* model, const int32_t* nodes, const int32_t* slots, int count) {
    return guarded([&]() -> std::string {
        if (model->sizes.window_pages) return "layers with a window have pages of their own";
        model->commit(nodes, slots, count);
        return "";
    });
}

// The same for nodes of the last step, to where their positions lie in the step's own page table
// int32[rows][page_width].
int forerun_commit_paths(Model* model, const int32_t* pages, int page_width, const int32_t* nodes,
                         int count) {
    return guarded([&] { return model->commit_paths(pages, page_width, nodes, count); });
}

// See Model::copy_state and Model::follow.
int64_t forerun_page_bytes(Model* model, int window) { return model->page_bytes(window != 0); }

// See Model::copy_page.
int forerun_copy_page(Model* model, int page, int window, uint8_t* outside, int out) {
    return guarded([&] { return model->copy_page(page, window != 0, outside, out != 0); });
}

int forerun_copy_state(Model* model, int64_t from, int64_t to) {
    return guarded([&] { return model->copy_state(from, to); });
}

int64_t forerun_state_bytes(Model* model) { return model->state_bytes(); }

// See Model::copy_state_outside.
int forerun_copy_state_outside(Model* model, int64_t row, uint8_t* outside, int out) {
    return guarded([&] { return model->copy_state_outside(row, outside, out != 0); });
}

int forerun_follow(Model* model, const int64_t* rows, const int32_t* nodes, int count) {
    return guarded([&] { return model->follow(rows, nodes, count); });
}

// From now on the model's steps keep the hidden states named by `layers`; see
// Model::request_aux_hidden_states.
int forerun_request_aux_hidden_states(Model* model, const int32_t* layers, int count) {
    return guarded([&]() -> std::string {
        model->request_aux_hidden_states(layers, count);
        return "";
    });
}

// Copies what the last step kept of its first `count` nodes: float32[count][layers][hidden].
int forerun_aux_hidden_states(const Model* model, int count, float* out) {
    return guarded([&] { return model->copy_aux_hidden_states(count, out); });
}

// See Model::set_ring.
int forerun_set_ring(Model* model, float* ring, int tokens, int width) {
    return guarded([&] { return model->set_ring(ring, tokens, width); });
}

// See Model::copy_final_hidden_states.
int forerun_final_hidden_states(Model* model, const int32_t* nodes, int count, float* out) {
    return guarded([&] { return model->copy_final_hidden_states(nodes, count, out); });
}

// See Model::open_adapters and Model::set_adapter.
int forerun_open_adapters(Model* model, int count, int rank) {
    return guarded([&] { return model->open_adapters(count, rank); });
}

int forerun_set_adapter(Model* model, int adapter, int layer, int which, const float* down,
                        const float* up, int rank) {
    return guarded([&] { return model->set_adapter(adapter, layer, which, down, up, rank); });
}

// A draft head for `model`, which must outlive it. Its tensors are set with forerun_set_matrix and
// forerun_set_vector, its positions committed with forerun_commit, as any model's; the target's
// steps keep the hidden states named by `aux_layers` from now on.
Model* forerun_open_draft(Model* model, const Sizes* sizes, const HeadKind* kind,
                          const int32_t* aux_layers, const Ropes* ropes, int64_t weight_bytes) {
    Model* draft = nullptr;
    guarded([&]() -> std::string {
        draft = new EagleHead(*model, *sizes, *kind, *ropes, (size_t)weight_bytes);
        model->request_aux_hidden_states(aux_layers, kind->features);
        return "";
    });
    return draft;
}

// The same of a block drafter.
Model* forerun_open_block(Model* model, const Sizes* sizes, const BlockKind* kind,
                          const int32_t* aux_layers, const Ropes* ropes, int64_t weight_bytes) {
    Model* draft = nullptr;
    guarded([&]() -> std::string {
        draft = new BlockHead(*model, *sizes, *kind, *ropes, (size_t)weight_bytes);
        model->request_aux_hidden_states(aux_layers, kind->features);
        return "";
    });
    return draft;
}

// A whole model that drafts for `model`, which must outlive it. Its tensors are set as any model's;
// `sizes.max_nodes` counts a place for each of `slots` roots, the last of all places.
Model* forerun_open_decoder(Model* model, const Sizes* sizes, int slots, const Ropes* ropes,
                            int64_t weight_bytes) {
    Model* draft = nullptr;
    guarded([&]() -> std::string {
        draft = new DraftDecoder(*model, *sizes, slots, *ropes, (size_t)weight_bytes);
        return "";
    });
    return draft;
}

// An assistant of `model`, which must outlive it; the rest as forerun_open_draft.
Model* forerun_open_assistant(Model* model, const Sizes* sizes, const AssistantKind* kind,
                              const Ropes* ropes, int64_t weight_bytes) {
    Model* draft = nullptr;
    guarded([&]() -> std::string {
        draft = new Assistant(*model, *sizes, *kind, *ropes, (size_t)weight_bytes);
        const int32_t last = model->sizes.layers;
        model->request_aux_hidden_states(&last, 1);
        return "";
    });
    return draft;
}

int forerun_draft(Model* draft, const DraftStep* step) {
    return guarded([&]() -> std::string { return static_cast<Draft*>(draft)->step(*step); });
}

Ngrams* forerun_ngram_open(const NgramRules* rules) {
    Ngrams* ngrams = nullptr;
    guarded([&]() -> std::string {
        ngrams = new Ngrams(*rules);
        return "";
    });
    return ngrams;
}

void forerun_ngram_close(Ngrams* ngrams) { delete ngrams; }

int forerun_ngram_begin(Ngrams* ngrams, int slot, const int32_t* tokens, int count, int predicted,
                        int prompt, uint64_t seed, double strength, double elsewhere,
                        uint64_t tenant) {
    return guarded([&] {
        const NgramNoise noise{seed, strength, elsewhere};
        return ngrams->begin(slot, tokens, count, predicted, prompt, noise, tenant);
    });
}

// How many tokens the cache has counted, or -1.
int64_t forerun_ngram_end(Ngrams* ngrams, int slot, const int32_t* tokens, int count) {
    int64_t counted = 0;
    const int code = guarded([&] { return ngrams->end(slot, tokens, count, counted); });
    return code ? code : counted;
}

int forerun_ngram_count(Ngrams* ngrams, const int32_t* tokens, int first, int count,
                        uint64_t tenant) {
    return guarded([&]() -> std::string {
        if (first < 0 || count < first) return "there are no such tokens";
        ngrams->count(tokens, (size_t)first, (size_t)count, tenant);
        return "";
    });
}

void forerun_ngram_use(Ngrams* ngrams, const NgramTable* table) { ngrams->use(*table); }

int64_t forerun_ngram_contexts(Ngrams* ngrams) { return (int64_t)ngrams->contexts(); }

// How many draft tokens there are in `out`, or -1; see Ngrams::propose.
int forerun_ngram_propose(Ngrams* ngrams, const int32_t* message, int length, int rows,
                          int32_t* out, double min_prob, const double* prices, int most,
                          int padded) {
    int total = 0;
    const int code = guarded([&] {
        return ngrams->propose(message, length, rows, min_prob, {prices, most, padded != 0}, out,
                               total);
    });
    return code ? code : total;
}

}  // extern "C"
#pragma GCC visibility pop
