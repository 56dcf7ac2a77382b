// An EAGLE draft head beside its target: one layer of the target's kind, fed with features.
#pragma once
#include "model.h"

namespace forerun {

// What forerun.models.draft_config.DraftHead says, as far as the arithmetic needs it.
// The layout is shared with forerun/executors/cpu/native.py.
struct HeadKind {
    int32_t features;        // how many hidden states of the target are fused
    int32_t width;           // of one of them
    int32_t slots;           // sequences at once
    int32_t first_kind;      // EAGLE-1: the fusing matrix reads cat(embedding, hidden state)
    int32_t feature_norm;    // 0 none, 1 one norm over all, 2 one norm each
    int32_t normed_residual, normed_feedback;
};

// One pass over nodes that hang below a sequence's cached positions. Two kinds:
// true features (extend): a row's nodes are a chain; node n reads the target's node sources[n], or
// row n of `features` where that is given.
// own draft tokens: node n reads the output of draft node sources[n], or, where that is negative,
// what
// slot -1 - sources[n] kept of its last extension.
struct DraftStep {
    int32_t rows, nodes, first, extend, page_width, scored;
    const int32_t* tokens;        // [nodes] target ids
    const int32_t* sources;       // [nodes]
    const int32_t* parents;       // [nodes] draft node above, or -1; unused by extensions
    const int32_t *start, *kv_len, *pages;  // as in Step
    const int32_t* slots;         // [rows] extensions: where the last node's output is kept
    const int32_t* scored_nodes;  // [scored] among this step's nodes, from 0
    float* logits;                // [scored][vocab]
    const float* features;        // [nodes][features * width], or null
};

// Draft nodes are numbered from `first` on and live until a step begins at 0 again.
class Draft : public Model {
public:
    Draft(Model& target, const Sizes& sizes, const HeadKind& kind, const float* frequencies,
          size_t weight_bytes);

    // As Model's; of the head's own (-1): 1 = output head, 2 = fusing matrix, and the vectors
    // 0 = final norm, 1 = hidden norm, 2 = norm over all features, 3 + i = norm of feature i.
    Matrix* matrix(int layer, int which) override;
    const float** vector(int layer, int which) override;

    // Runs the step. Empty, or what was wrong with it.
    std::string step(const DraftStep& step);

private:
    std::string check(const DraftStep& step) const;
    void prepare(const DraftStep& step);
    void run(const DraftStep& step, int thread);
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
    Step nodes_{};                    // what Model's phases read of the current step
    std::vector<Group> fuse_q_, input_q_;
    std::vector<float> embedded_;     // [max_nodes][hidden]
    std::vector<float> outputs_;      // [max_nodes][hidden] what the next step receives
    std::vector<float> kept_;         // [slots][hidden]
    std::vector<int32_t> depths_, parents_, rows_;  // [max_nodes]
};

}  // namespace forerun
