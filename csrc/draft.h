// Draft models beside their target: one layer of the target's kind that is fed with features (an
// EAGLE head, or the target's own prediction layer), layers that propose a block in one pass, a whole
// model with a cache of its own, and an assistant, whose layers read the target's cache.
#pragma once
#include "model.h"

namespace forerun {

// How a layer reads the embedding of a token beside a hidden state.
enum Fusion {
    kBeside = 0,          // EAGLE-3: both normed, one beside the other
    kFused = 1,           // EAGLE-1: fused as they are; the layer has no norm before its attention
    kEmbeddingFirst = 2,  // prediction layers: both normed, then fused, in this order
    kHiddenFirst = 3,     // or the other
};

// What forerun.drafts.eagle_config.DraftHead says, as far as the arithmetic needs it.
// The layout is shared with forerun/executors/cpu/native.py.
struct HeadKind {
    int32_t features;        // how many hidden states of the target are fused
    int32_t width;           // of one of them
    int32_t slots;           // sequences at once
    int32_t fusion;          // of Fusion
    int32_t feature_norm;    // 0 none, 1 one norm over all, 2 one norm each
    int32_t normed_residual, normed_feedback;
    int32_t begin;           // the first position whose entry others see
    int32_t zeroed;          // of prediction layers: the embedding at position 0 counts as zeros
};

// What forerun.drafts.block_config.BlockHead says, as far as the arithmetic needs it.
// The layout is shared with forerun/executors/cpu/native.py.
struct BlockKind {
    int32_t features, width, slots;  // as in HeadKind
    int32_t causal;                  // a place sees those before it; else all of its block
    int32_t own_embedding;           // else it is the target's
    int32_t group;                   // numbers that share a kernel of a convolution; 0: there is none
};

// One pass over nodes that hang below a sequence's cached positions. Two kinds:
// true features (extend): a row's nodes are a chain; node n reads the target's node sources[n], or
// row n of `features` where that is given.
// own draft tokens: node n reads the output of draft node sources[n], or, where that is negative,
// what
// slot -1 - sources[n] kept of its last extension.
// Either kind, where `hidden` is given: node n reads its row n, as it is.
// An assistant's nodes see the row's cached positions and nothing else, from the position behind them;
// its extension has one node of each row, the root.
// A whole model reads tokens alone (its own ids): no sources, no features. The last node of a row
// of its extension is the row's root, which waits in the slot's place; its draft tokens see it.
// A block drafter's extension reads features alone. Its other pass is over blocks: a row's nodes are
// the places of one, its root and masks; parents are -1, and `outputs` has a row of each scored node,
// after the final norm.
struct DraftStep {
    int32_t rows, nodes, first, extend, page_width, scored;
    const int32_t* tokens;        // [nodes] rows of the embedding
    const int32_t* sources;       // [nodes]
    const int32_t* parents;       // [nodes] draft node above, or -1; unused by extensions
    const int32_t *start, *kv_len, *pages;  // as in Step
    const int32_t* slots;         // [rows] extensions: where the last node's output is kept
    const int32_t* scored_nodes;  // [scored] among this step's nodes, from 0
    const float* token_rows;      // as in Step; of a whole model
    float* logits;                // [scored][vocab]
    const float* features;        // [nodes][features * width], or null
    const float* hidden;          // [nodes][hidden], or null
    float* outputs;               // [nodes][hidden] out: what a next step would receive; or null
    int32_t* clusters;            // [scored][top_k] out: of which tokens the logits are, one cluster
                                  // after the other; null where they are of all tokens
};

// What forerun.drafts.assistant.Assistant says, as far as the arithmetic needs it.
// The layout is shared with forerun/executors/cpu/native.py.
struct AssistantKind {
    int32_t slots;            // sequences at once
    int32_t clusters, top_k;  // of the tokens, and how many of them are scored; 0: all tokens are
};

// Draft nodes are numbered from `first` on and live until a step begins at 0 again.
class Draft : public Model {
public:
    // Runs the step. Empty, or what was wrong with it.
    std::string step(const DraftStep& step);

protected:
    // roots: every slot has a place for its root, behind those of `sizes.max_nodes - slots` nodes.
    // begin: as in HeadKind.
    Draft(Model& target, const Sizes& sizes, int slots, bool roots, const Ropes& ropes,
          size_t weight_bytes, int begin = 0);

    virtual const Matrix& embeddings() = 0;
    // Whether a node may read what its source says.
    virtual bool sound(const DraftStep& step, int source) const = 0;
    virtual void run(const DraftStep& step, int thread) = 0;
    // Where the nodes of a row are, and what they see.
    virtual void list_places(const DraftStep& step, int row);
    void list_cached(const DraftStep& step, int row, int begin);

    int32_t root_place(int slot) const { return (int32_t)(places_ - slots_ + slot); }
    int32_t scratch_place(int node) const { return (int32_t)(places_ - sizes.max_nodes + node); }

    const int slots_;
    Step nodes_{};  // what Model's phases read of the current step
    std::vector<int32_t> depths_, parents_, rows_;  // [max_nodes]

private:
    std::string check(const DraftStep& step);
    void prepare(const DraftStep& step);

    const bool roots_;
    const int most_nodes_, begin_;
};

class EagleHead : public Draft {
public:
    EagleHead(Model& target, const Sizes& sizes, const HeadKind& kind, const Ropes& ropes,
              size_t weight_bytes);

    // As Model's; of the head's own (-1): 1 = output head, 2 = fusing matrix, and the vectors
    // 0 = final norm, 1 = hidden norm, 2 = norm over all features (of a prediction layer: of the
    // embedding), 3 + i = norm of feature i.
    Matrix* matrix(int layer, int which) override;
    const float** vector(int layer, int which) override;
    // Routers alone.
    bool takes_floats(int layer, int which) const override {
        return layer >= 0 && (which == 7 || which == 8);
    }

private:
    const Matrix& embeddings() override { return *target_.matrix(-1, 0); }
    bool sound(const DraftStep& step, int source) const override;
    void run(const DraftStep& step, int thread) override;
    void fuse(const DraftStep& step, int thread);
    void read(const DraftStep& step, int thread);
    void keep(const DraftStep& step, int thread);
    void score(const DraftStep& step, int thread);
    void norm(const float* x, const float* weight, int count, float* out) const;

    Model& target_;
    const HeadKind kind_;
    Matrix fuse_;
    const float *hidden_norm_ = nullptr, *joint_norm_ = nullptr;
    std::vector<const float*> feature_norms_;
    std::vector<Group> fuse_q_, input_q_;
    std::vector<float> embedded_;     // [max_nodes][hidden]
    std::vector<float> outputs_;      // [max_nodes][hidden] what the next step receives
    std::vector<float> kept_;         // [slots][hidden]
};

// What mixes a place with the one before it in its block: what a sublayer reads (side 0) and returns
// (1). out = (base + dynamic) x + the same of the place before, by its own kernel.
struct Convolution {
    static constexpr int kSides = 2, kTaps = 2;
    Matrix projection;            // of what it reads to [sides][taps][hidden / group]
    const float* base = nullptr;  // [sides][taps][hidden]
};

// Layers whose context is made of the target's features, once, and whose input is a block: a root and
// masks behind it. One pass proposes all of a block's tokens.
class BlockHead : public Draft {
public:
    BlockHead(Model& target, const Sizes& sizes, const BlockKind& kind, const Ropes& ropes,
              size_t weight_bytes);

    // As Model's; of its own (-1): 0 = embedding, 1 = output head, 2 = fusing matrix, and the vectors
    // 0 = final norm, 1 = hidden norm, 2 = the masks' embedding. Of a layer with convolutions, 20 =
    // attention's and 21 = the feed-forward's: matrices of the dynamic kernels and base kernels.
    Matrix* matrix(int layer, int which) override;
    const float** vector(int layer, int which) override;

private:
    const Matrix& embeddings() override {
        return kind_.own_embedding ? embedding_ : *target_.matrix(-1, 0);
    }
    bool sound(const DraftStep& step, int source) const override;
    void list_places(const DraftStep& step, int row) override;
    void run(const DraftStep& step, int thread) override;
    void read_features(const DraftStep& step, int thread);
    void keep_context(const DraftStep& step, int layer, int thread);
    void read_blocks(const DraftStep& step, int thread);
    void score(const DraftStep& step, int thread);
    void convolved_layer(int layer, int thread);
    void enter(const Convolution& by, const float* norm, Wanted wanted, int thread);
    void leave(const Convolution& by, int thread);
    void convolve(const Convolution& by, int side, const float* x, int node, float* out, bool add) const;

    Model& target_;
    const BlockKind kind_;
    Matrix fuse_;
    std::vector<Convolution> convolutions_;  // [layers][2] attention's, the feed-forward's
    Floats dynamic_, convolved_;  // [max_nodes][sides][taps][groups], [max_nodes][hidden]
    const float *hidden_norm_ = nullptr, *mask_ = nullptr;
    std::vector<Group> fuse_q_;
    Floats fuse_f_;  // the same for a fusing matrix of floats
};

// All layers of a smaller model; its tensors are set as any model's.
class DraftDecoder : public Draft {
public:
    DraftDecoder(Model& target, const Sizes& sizes, int slots, const Ropes& ropes,
                 size_t weight_bytes)
        : Draft(target, sizes, slots, true, ropes, weight_bytes) {}

private:
    const Matrix& embeddings() override { return embedding_; }
    bool sound(const DraftStep&, int) const override { return true; }
    void run(const DraftStep&, int thread) override { Model::run(nodes_, thread); }
};

// Gemma 4's assistant: a token's embedding beside a hidden state, both the target's, through layers
// that read the target's keys and values; what leaves them becomes the next hidden state.
class Assistant : public Draft {
public:
    Assistant(Model& target, const Sizes& sizes, const AssistantKind& kind, const Ropes& ropes,
              size_t weight_bytes);

    // As Model's; of its own (-1): 1 = output head, whose rows are in the order of the clusters, 2 =
    // from embedding and hidden state, 3 = to the next hidden state, 4 = scores of clusters.
    Matrix* matrix(int layer, int which) override;

private:
    const Matrix& embeddings() override { return *target_.matrix(-1, 0); }
    bool sound(const DraftStep& step, int source) const override;
    void list_places(const DraftStep& step, int row) override;
    void run(const DraftStep& step, int thread) override;
    void read(const DraftStep& step, int thread);
    void put_hidden(const DraftStep& step, int node, float* out) const;
    void keep(const DraftStep& step, int thread);
    void score(const DraftStep& step, int thread);
    void score_clusters(const DraftStep& step, int thread);
    void choose_clusters(const float* scores, int32_t* chosen) const;

    Model& target_;
    const AssistantKind kind_;
    const int width_;  // of the target's hidden states
    Matrix before_, behind_, centroids_;
    Floats inputs_;                // [max_nodes][2 * width_]
    std::vector<Group> inputs_q_;
    Floats outputs_;               // [max_nodes][width_] what the next step receives
    Floats kept_;                  // [slots][width_]
    Floats cluster_scores_;        // [max_nodes][clusters]
    std::vector<Group> alone_q_;   // of each scored node, in columns of their own
};

}  // namespace forerun
