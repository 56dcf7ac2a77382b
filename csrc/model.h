// A model and what a step of it needs.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "quant.h"
#include "region.h"

namespace forerun {

// Sizes fixed for the executor's life; the letters are those of forerun/types.py.
// The layout is shared with forerun/executors/cpu/native.py.
struct Sizes {
    int32_t layers, hidden, heads, kv_heads, head_size, ffn, vocab;
    int32_t page_size, pages, max_nodes, context, threads;
    int32_t cache_item;  // of Item: how the cache stores a key or value
    int32_t cache_bytes;  // of a position: keys and values in all layers that have their own
    // Latent attention: forerun/networks/layer_spec.py, `Latent`. rank 0: there is none; query_rank 0:
    // one product makes queries. kv_heads is 1 and head_size the rank and what is rotated.
    int32_t rank, nope, value, query_rank;
    // Recurrent layers: forerun/networks/layer_spec.py, `GatedDelta`, or `ShortConvolution`, which has
    // no heads; `recurrent` says how many there are, `states` how many texts' states are kept, and
    // `channels` how many numbers of a token pass a convolution over `convolved` tokens.
    int32_t recurrent, states, channels, convolved;
    int32_t key_heads, value_heads, key_size, value_size, tiled;
    int32_t gated;  // attention's context is multiplied by the sigmoid of a gate
    int32_t vectors;  // numbers that each token has for each layer (per_layer.cpp); 0: none
    // Layers with a window may have fewer pages (forerun/executors/window_pages.py): `window_pages`
    // hold their `window_bytes` of a position's cache_bytes, from `window` positions before a row's
    // next one on. 0 pages: they have the others' pages.
    int32_t window, window_pages, window_bytes;
    float norm_eps;
    float latent_eps;  // of the norms of the latent and of what makes queries

    // Of a delta net: numbers of all key heads and of all value heads.
    int net_keys() const { return key_heads * key_size; }
    int net_values() const { return value_heads * value_size; }
    // What a recurrent layer's last product reads.
    int net_output() const { return value_heads ? net_values() : channels; }
    // A row of what its first products make: of a delta net what is convolved, the gate of what is
    // read, beta, alpha; of a convolution what is convolved, the gate of its sums, and what the first
    // was multiplied by.
    int64_t net_width() const {
        return value_heads ? channels + net_values() + 2 * (int64_t)value_heads : 3 * (int64_t)channels;
    }
};

// How positions turn queries and keys, in as many ways as a model's layers have.
// The layout is shared with forerun/executors/cpu/native.py.
struct Ropes {
    int32_t count, pairs;
    const float* frequencies;  // [count][pairs] 0: a pair that does not turn, or that is not there
    const float* factors;      // [count] of cosines and sines of pairs that turn
};

// One step. Node arrays are int32[nodes], row arrays int32[rows] (start: rows + 1), as in
// forerun/speculative/tree.py; pages int32[rows][page_width].
struct Step {
    int32_t rows, nodes, page_width, scored;
    const int32_t *tokens, *parents, *depth;
    const int32_t *start, *known, *kv_len, *pages;
    const int32_t* adapters;       // [rows] a row's adapter, or -1; null: no row has any
    const int64_t* state_rows;     // [rows] whose state a row begins with, and its root's becomes;
    const int64_t* state_targets;  // [nodes] where a known node's state goes as well, or -1: both
                                   // null without recurrent layers
    const int32_t* scored_nodes;  // [scored] nodes whose logits may be asked for, ascending
    float* logits;                // [scored][vocab]
    const float* token_rows;      // [nodes][layers][vectors] the tokens' own; null without them
    int32_t* logits_row;          // [scored] out: the row of `logits` that is a scored node's,
                                  // -1: not computed; null: all are computed, in order

    // The last known node of a row.
    int root_of(int row) const { return start[row] + known[row] - 1; }

    // Where a node is among the scored ones.
    int index_of(int node) const;
};

// What excludes less probable tokens: forerun/speculative/sampling.py. The layout is shared with
// forerun/executors/device_choice.py.
struct CutOffs {
    double top_p;     // 1: off
    float log_min_p;  // -infinity: off
    int32_t top_k;    // 0: off

    // Whether the others are off, and top_p is.
    bool of_all() const { return top_k <= 0 && log_min_p < -3e38f; }
    bool off() const { return of_all() && top_p >= 1.0; }
};

// How the rows of a step choose, and what they chose.
struct Walk {
    const float* temperature;   // [all_slots] 0 = greedy
    const uint64_t* seed;       // [all_slots]
    const int32_t* prompt_len;  // [all_slots] output positions count from here
    const CutOffs* cut_offs;    // [all_slots] of requests with a temperature
    const int32_t* slots;       // [rows] the row's, of all_slots
    const uint8_t* samples;     // [rows] 0: nothing is chosen here
    const int32_t* mask_row;    // [nodes] which of `masks` limits a node's choice, -1: none; null: none's
    const uint32_t* masks;      // [.][mask_words] token t is allowed where bit t % 32 of word t / 32 is
    int32_t* choice;           // [nodes] out: at nodes of the accepted path; -1 elsewhere, and in
                               // all of a row that the specification has to decide
    int32_t all_slots, mask_words;
};

// A thread's room for choices: logits where a mask allows them, by temperature, and those of candidates
// or with all others excluded; tokens that may be left, those that are, and what they are sorted by.
struct Likely {
    Floats allowed, heated, others;
    std::vector<int32_t> candidates, tokens;
    std::vector<uint64_t> keys;
};

// What one layer is: forerun/networks/layer_spec.py. Where its norms stand is said by those it has.
// The layout is shared with forerun/executors/cpu/native.py.
struct LayerKind {
    int32_t ffn;        // width of its feed-forward, or of one of its experts
    int32_t experts;    // how many there are; 0: one feed-forward, which every node visits
    int32_t top_k;      // how many of them a node visits
    int32_t shared;     // width of the expert that every node also visits; 0: there is none
    int32_t sigmoid;    // the router's scores: each one's sigmoid, or a softmax over all
    int32_t normalised; // the weights of a node's experts are divided by their sum
    int32_t groups, kept;  // groups of experts, and how many of them can be chosen from
    int32_t summed;        // greatest scores of a group by whose sum it is ranked: 2, or 1
    int32_t window;        // positions that a node sees, itself the last; 0: all
    int32_t gate;          // of Gate
    int32_t rope;          // which of the model's Ropes
    int32_t wide_norms;    // norms of queries and keys are over all heads at once
    int32_t late_norms;    // norms of query and key heads stand behind their rotation
    int32_t recurrent;     // a delta net or a convolution stands in attention's place
    int32_t kv_heads, head_size;  // its own; 0: the model's
    int32_t reads;         // 1 + the layer whose keys and values it attends to, its model's or the
                           // lender's; 0: its own
    int32_t normed_values; // each value head is normed, without a weight
    int32_t keyed_values;  // the keys' product makes the values too
    int32_t beside;        // width of a feed-forward beside the experts, with norms of its own; 0: none
    float router_scale;    // multiplies the weights of a node's experts
    float score_scale;     // multiplies q.k
    float residual;        // multiplies what attention and feed-forward add to the stream
    float softcap;         // scores become softcap tanh(score / softcap); 0: they stay
};

// down(silu(gate x) * up x), or by the layer's other `Gate`
struct FeedForward {
    Matrix gate, up, down;
};

struct Layer {
    LayerKind kind = {};
    int32_t place = 0;  // its number among the layers with states
    int32_t source = 0, division = 0;  // the layer whose keys and values it reads; of divisions_
    bool windowed = false;  // its keys and values are in window pages
    int64_t begin = 0;   // where they begin in the cache, in bytes
    Matrix query, key, value, output;  // key, in latent attention: the latent and its rotated key;
                                       // query, of a convolution: all that its first product makes
    Matrix gate;         // of attention's context, or of what a delta net read
    Matrix beta, alpha;  // of a delta net
    Matrix query_down;                 // of latent attention, whose `query` reads what it makes
    std::vector<Matrix> into, out_of;  // of it, by head: [rank][nope] and [value][rank]
    FeedForward feed;                  // or, beside experts, the one that every node visits
    Matrix vector_gate, vector_out;    // of the tokens' own vectors
    Matrix router, shared_gate;        // the second: one channel, whose sigmoid multiplies `feed`
    std::vector<FeedForward> experts;
    const float *attention_norm = nullptr, *ffn_norm = nullptr;  // before them, and behind them:
    const float *attention_end_norm = nullptr, *ffn_end_norm = nullptr;
    const float *query_norm = nullptr, *key_norm = nullptr;
    const float* correction = nullptr;  // [experts] takes part in the choice alone
    const float* sinks = nullptr;       // [heads] scores that carry no value
    const float* vector_norm = nullptr;  // [hidden] of what vectors make
    const float* scalar = nullptr;       // [1] multiplies the stream behind all else
    const float* router_norm = nullptr;  // [hidden] of what the router alone reads
    const float* expert_scale = nullptr; // [experts] multiplies their weights last
    // Of experts beside a feed-forward: behind the feed-forward, before and behind the experts.
    const float *fed_norm = nullptr, *experts_norm = nullptr, *mixed_norm = nullptr;
    const float *kernel = nullptr, *kernel_bias = nullptr;  // float32[convolved][channels], [channels]
    // Of a delta net: float32[value_heads], [value_heads], [value_size].
    const float *rate = nullptr, *step = nullptr, *net_norm = nullptr;
    bool reads_groups = false;          // some feed-forward's weights are quantised
    bool gathers_floats = false;        // some expert's are floats
};

// What an adapter adds to a matrix: up (down x), as floats; empty where it adds nothing.
struct LowRank {
    Matrix down, up;
    std::vector<std::vector<uint8_t>> tiles;  // of both
};

constexpr int kStack = 6;  // matrices that share their input, at most

// Rows of activations as products read them: quantised for quantised weights, float32[rows][width]
// for weights that are floats. What no product reads may be null.
struct Inputs {
    const Group* groups;
    const float* floats;
    const int32_t* adapters = nullptr;  // [rows] each row's, or -1; null: rows are the step's nodes
};

// Which of the two matrices read.
struct Wanted {
    bool groups = false, floats = false;
    Wanted(std::initializer_list<const Matrix*> stack) {
        for (const Matrix* w : stack) (is_float(w->format) ? floats : groups) = true;
    }
};

// All rows that one expert has in a step, and where its products read and write.
struct Visit {
    const FeedForward* feed;
    int32_t rows, width;
    Inputs x;
    float *gate, *up;  // [rows][width]
    Group* between;    // columns of what `down` reads, where that is quantised
    float* out;        // [rows][hidden]
};

// Attention of some nodes of one row under one key/value head: what a thread takes at a time.
struct Unit {
    int32_t row, first, last, head;
    Alike alike;  // the longest: counted from `first`
};

// Where a layer's keys or values of one head are: the byte of place 0, and the bytes of each place.
struct Plane {
    uint8_t* at;
    size_t bytes;
    bool windowed;  // places are those of window pages
};

// How a step's attention is divided among threads in the layers of one shape (attend.cpp).
struct Division {
    int32_t kv_heads, head_size;
    std::vector<Unit> units;
    bool together = false;     // all threads attend to each unit
    int mixed_at_a_time = 0;   // numbers of a value that a thread mixes then
    bool in_groups = false;    // threads mix whole groups of what the last product reads, and quantise them
    int32_t room = 0;          // heads of a node whose scores there is room for
};

// Times of products with the output matrix, by columns of kLanes nodes. They decide how many nodes are
// computed at once: reading the matrix is most of a small product, so nodes that a path may reach are
// cheaper in this product than in one of their own.
class HeadTimes {
public:
    // Records how long a product of `columns` columns took.
    void observe(int columns, double seconds);
    // Returns how many columns to compute, `least` to `most`, where paths of `rows` rows may go on. A
    // number of columns without a time is tried once; one that was too slow is tried again later.
    int worthwhile(int least, int most, int rows);

private:
    static constexpr int kMost = 32;
    double seconds_[kMost + 1] = {};
};

class Model {
public:
    // `shared`: threads of another model to work with, or null for threads of its own.
    Model(const Sizes& sizes, const Ropes& ropes, size_t weight_bytes, const Kernels* kernels,
          Pool* shared = nullptr);
    virtual ~Model() = default;

    // Which tensor a pointer is for; -1 layers are the model's own. Null where unknown.
    virtual Matrix* matrix(int layer, int which);
    virtual const float** vector(int layer, int which);

    // Makes a layer what `kind` says, before its tensors are set: until then it is Llama's, with
    // sizes.ffn. Empty, or what was wrong with it.
    std::string set_layer(int layer, const LayerKind& kind);

    // A matrix of a layer has got this format. To be called for each.
    void note_format(int layer, int which, int format);

    // What multiplies embeddings and logits, and what these are softened by then (0: they stay).
    void set_scales(float embedding, float logits, float logit_cap) {
        embedding_scale_ = embedding;
        logit_scale_ = logits;
        logit_cap_ = logit_cap;
    }

    float embedding_scale() const { return embedding_scale_; }

    // Whether this matrix may be floats.
    virtual bool takes_floats(int, int) const { return true; }

    // Space for weights, in the order in which a step reads them. Null when it is used up.
    uint8_t* take(size_t bytes);

    // Runs the step. Where `walk` tells how rows choose and the step has `logits_row`, logits of
    // draft tokens in rows that `accept` decides are left to it, but for some that cost nothing.
    // Empty, or what was wrong (then nothing was changed).
    std::string forward(const Step& step, const Walk* walk = nullptr);

    // Keeps one path per row of the last step, or of one whose logits are all there; computes the
    // logits of the draft tokens that a path reaches. Empty, or what was wrong.
    std::string accept(const Step& step, const Walk& walk);

    // Which row of the last step's logits is that of a scored node; computes it where it is not
    // there yet. Empty, or what was wrong.
    std::string logits_row_of(const Step& step, int node, int& row);

    // Copies the keys and values of the last step's nodes to slots of the pool; in layers with window
    // pages to `window_slots`.
    void commit(const int32_t* nodes, const int32_t* slots, int count,
                const int32_t* window_slots = nullptr);

    // The same for accepted draft tokens, by the step's page table; known nodes are in their pages
    // already. Empty, or what was wrong.
    std::string commit_paths(const int32_t* pages, int page_width, const int32_t* nodes,
                             int count);

    // From now on page p has window page pages[p], or none where that is -1. Read while it changes.
    void set_window_pages(const int32_t* pages) { window_pages_ = pages; }

    // Bytes of a page, or of a window page: its keys and values in all layers that have them there.
    // copy_page copies one of them to `outside`, or from there. Empty, or what was wrong.
    int64_t page_bytes(bool window) const {
        const int32_t near = sizes.window_pages ? sizes.window_bytes : 0;
        return (int64_t)(window ? near : sizes.cache_bytes - near) * sizes.page_size;
    }
    std::string copy_page(int page, bool window, uint8_t* outside, bool out);

    // Of recurrent layers. The state of row `from`, or zeros for -1, becomes that of row `to`.
    std::string copy_state(int64_t from, int64_t to);
    // Bytes of a state, in all layers. copy_state_outside copies that of a row to `outside`, or from
    // there. Empty, or what was wrong.
    int64_t state_bytes() const;
    std::string copy_state_outside(int64_t row, uint8_t* outside, bool out);
    // Each of these rows' states goes on by one draft token of the last step. Rows differ. Both:
    // empty, or what was wrong.
    std::string follow(const int64_t* rows, const int32_t* nodes, int count);

    // From now on every step keeps what enters these layers (`layers` itself: what leaves the
    // last), for draft heads: float[node][tap][hidden], valid until the next step.
    void request_aux_hidden_states(const int32_t* layers, int count);
    const float* aux_hidden_states(int node) const {
        return &aux_hidden_states_[(size_t)node * aux_layers_.size() * sizes.hidden];
    }
    // The kept states of the last step's first `count` nodes. Empty, or what was wrong.
    std::string copy_aux_hidden_states(int count, float* out) const;

    // From now on those of known nodes, and of those given to commit_paths, go into this ring too (null:
    // into none): float[slot][tokens][width], `width` numbers for all taps, by the slots of a step's Walk
    // and by position. Empty, or what was wrong.
    std::string set_ring(float* ring, int tokens, int width);

    // Hidden states of these nodes of the last step, after the final norm: float[count][hidden].
    // Empty, or what was wrong.
    std::string copy_final_hidden_states(const int32_t* nodes, int count, float* out);

    // Makes room for `count` adapters of ranks up to `rank`; sets what one adds to a matrix of a layer,
    // down float[rank][inputs] and up float[channels][rank], copied. Empty, or what was wrong.
    std::string open_adapters(int count, int rank);
    std::string set_adapter(int adapter, int layer, int which, const float* down, const float* up,
                            int rank);

    // Reads what the products of a step of one node read, once, and nothing else: no step takes
    // less time. The sum of its bytes, eight at a time.
    uint64_t read_weights();

    // The products of a step alone, for measurements; logits float32[rows][vocab]. Experts are
    // visited in turn.
    void products(int rows, float* logits);

    const Sizes sizes;
    const Kernels* kernels;
    std::unique_ptr<Pool> own_pool;
    Pool& pool;

protected:
    std::string check(const Step& step) const;
    static std::string check_slots(const Step& step, const Walk& walk);
    static bool decides(const Step& step, const Walk& walk, int row);
    static int64_t rows_of_logits(const Step& step);
    void plan_logits(const Step& step, const Walk* walk);
    void begin_logits(int64_t first);
    void add_logits_row(const Step& step, int index);
    void add_descendants(const Step& step, int times);
    bool add_descendant(const Step& step, int row);
    bool compute_path_ends(const Step& step, int nodes);
    void extend_paths(const Step& step, const Walk& walk);
    void extend_path(const Step& step, const Walk& walk, int row, Likely& likely);
    int32_t choose(const Walk& walk, int slot, const float* logits, const uint32_t* allowed,
                   uint32_t position, Likely& likely) const;
    int32_t choose_left(const CutOffs& cut, const float* logits, float temperature, uint64_t seed,
                        uint32_t position, Likely& likely) const;
    size_t find_candidates(const CutOffs& cut, const float* x, float most, Likely& likely) const;
    size_t cut_off(const CutOffs& cut, const float* x, float most, Likely& likely) const;
    void prepare(const Step& step);
    std::string check_adapters(const Step& step) const;
    void prepare_adapters(const Step& step);
    const LowRank* low_rank(const Matrix& w, int adapter) const;
    bool lower(std::initializer_list<const Matrix*> stack, Inputs x, int rows, int thread);
    const float* floats_of(const Matrix& w, Inputs x, int first, int last, int thread);
    void raise(const Matrix& w, int place, Inputs x, int rows, int first, int last, Target out) const;
    void list_places(const Step& step, int row);
    int first_kept(int kv_len) const;
    bool keeps_window(const int32_t* pages, int kv_len, int64_t end) const;
    int32_t window_place(const int32_t* pages, int position) const;
    void list_window(const int32_t* pages, int kv_len, int end);
    void plan_attention(const Step& step);
    int64_t plan_division(const Step& step, Division& division);

    void run(const Step& step, int thread);
    void store_in_ring(int node);
    void embed(const Step& step, int thread);
    void keep_taps(const Step& step, int layer, int thread);
    void attention_layer(const Step& step, int layer, int thread);
    void mix(const Step& step, int layer, Inputs x, int thread);
    void find_context(const Step& step, int layer, Inputs x, int thread);
    void heads_products(const Layer& layer, Inputs x, int rows, int thread);
    void open_context(const Layer& layer, int nodes, int thread);
    void quantise_context(const Layer& layer, const float* context, int width, int nodes, int thread);
    void bring_out(const Layer& layer, const float* context, int nodes, int thread);
    void mix_latent(const Step& step, int layer, Inputs x, int thread);
    void latent_queries(const Layer& layer, Inputs x, int nodes, int thread);
    void latent_products(const Layer& layer, int rows, int thread);
    void keep_latent(int layer, int node);
    void reserve_heads(bool floats);
    void enter_heads(const Layer& layer, int nodes, int thread);
    void leave_heads(const Layer& layer, int nodes, int thread);
    void put_head(const Matrix& w, const float* x, int head, int node, int nodes);
    void multiply_heads(const std::vector<Matrix>& each, Target out, int apart, int nodes,
                        int thread);
    void reserve_nets();
    void prepare_nets(const Step& step);
    void recurrent_layer(const Step& step, int layer, Inputs x, int thread);
    void delta_layer(const Step& step, const Layer& layer, int thread);
    void convolution_layer(const Step& step, const Layer& layer, int thread);
    void net_products(const Layer& layer, Inputs x, int rows, int thread);
    void list_inputs(const Step& step, const Layer& layer, int node, const float** seen) const;
    void enter_net(const Step& step, const Layer& layer, int node);
    void keep_draft(const Layer& layer, int node);
    void advance_states(const Step& step, const Layer& layer, int thread);
    void keep_windows(const Step& step, const Layer& layer, int thread);
    void leave_net(const Layer& layer, int nodes, int thread);
    void leave_convolution(const Step& step, const Layer& layer, int node);
    float* state(const Layer& layer, int64_t row) const;
    float* window(const Layer& layer, int64_t row) const;
    void ffn_layer(const Step& step, int layer, int thread);
    size_t expert_rows(const LayerKind& kind) const;
    void reserve_for(const LayerKind& kind);
    void multiply_gates(const Visit& visit, int gate, int thread);
    void activate(const Visit& visit, int gate, int row, Share groups) const;
    void end_branch(const Layer& layer, const float* norm, int nodes, int thread, float scalar = 1.0f);
    void feed_all(const Layer& layer, int nodes, float* out, bool add, int thread);
    void feed_beside(const Layer& layer, int nodes, int thread);
    void make_vectors(const Step& step, int thread);
    void add_vectors(const Layer& layer, int number, int nodes, int thread);
    float scalar_of(const Layer& layer) const { return layer.scalar ? *layer.scalar : 1.0f; }
    void mixture(const Layer& layer, int nodes, int thread);
    void route_all(const Layer& layer, int nodes, int thread);
    void route(const Layer& layer, int node);
    void list_visits(const Layer& layer, int nodes);
    void visit_experts(const Layer& layer, int nodes, int thread);
    void gather(const Layer& layer, int nodes, int thread);
    void mix_experts(const Layer& layer, int nodes, int thread);
    void head(const Step& step, int thread);
    void bend_logits(float* logits, int rows, int thread);
    void put_angles(int node);
    void rotate_and_store(int layer, int node);
    int32_t place_at(int row, const Sight& sight, int position) const;
    Alike alike(int row, int first, int last) const;
    Sight seen(const Layer& layer, int node) const;
    Attend job(int layer, const Unit& unit, int node, int thread);
    void attend(int layer, int thread);
    void attend_together(int layer, int thread);
    void put_context(const Layer& layer, int node, int first, int count);
    void multiply(std::initializer_list<const Matrix*> stack, std::initializer_list<float*> outs,
                  Inputs x, int rows, int stride, bool add, int thread);
    void multiply_blocks(const Matrix& w, Inputs x, int rows, int first, int last, Target out) const;
    void put_norm(const float* x, const float* weight, float eps, int count, float* out) const;
    void quantise_norm(const float* x, const float* weight, float eps, int count, Group* out,
                       int lane) const;
    void put_normed(const int32_t* nodes, int rows, const float* weight, Wanted wanted, int thread);
    void put_part(const float* x, const float* weight, int row, int begin, int end, Wanted wanted);
    void put_wide_norms(const Layer& layer, float* x) const;
    // Whether a branch's last product adds to the stream by itself; else it leaves it in branch_.
    bool adds(const Layer& layer, const float* norm) const {
        return !norm && layer.kind.residual == 1.0f && !layer.scalar;
    }
    Inputs normed() const { return {hidden_q_.data(), hidden_f_.data()}; }

    // Columns of four rows, so that no two threads write the same Group.
    static Share columns_of(int rows, int thread, int threads);
    Group* column(Group* x, int row, int width) const {
        return x + (int64_t)(row / kLanes) * ((width + kGroup - 1) / kGroup);
    }
    uint8_t* plane(int layer, int kind, int head) const;
    std::string lends(const LayerKind& kind) const;
    void keep(const float* x, uint8_t* plane, int64_t size, int64_t place) const;
    // A row of `qkv_`, and of what attention finds.
    int64_t qkv_width(const Layer& at) const;
    int mixed_width(const Layer& at) const { return sizes.heads * at.kind.head_size; }
    void shape_layer(Layer& at);
    int64_t own_bytes(const Layer& at) const;
    // The layer whose keys and values one attends to, and the places that a layer's own have.
    const Layer& source_of(const Layer& at) const {
        return (at.kind.reads ? *lender_ : *this).layers_[at.source];
    }
    int64_t places_of(const Layer& at) const {
        return places_ - (at.windowed ? missing_pages() * sizes.page_size : 0);
    }
    // Places of window pages are numbered as if they were the last of all pages, so that those of a
    // step's nodes have one number in all layers.
    int64_t missing_pages() const { return (int64_t)sizes.pages - sizes.window_pages; }
    // Bytes of one head's key or value.
    int64_t head_bytes(const Layer& at) const { return row_bytes(sizes.cache_item, at.kind.head_size); }
    std::vector<Plane> planes() const;
    // Numbers of a head that a rope is over, numbers of a value, and what is kept of a position: keys
    // and values, or keys that begin with their values.
    int rope_size() const { return sizes.head_size - sizes.rank; }
    // Where a node's cosines or sines of a layer begin.
    size_t angles(const Layer& layer, int node) const {
        return ((size_t)node * factors_.size() + layer.kind.rope) * pairs_;
    }
    int value_size(int head_size) const { return sizes.rank ? sizes.rank : head_size; }
    int kinds() const { return sizes.rank ? 1 : 2; }
    // A row of `latent_`: what the query's first product makes, what is kept, and queries.
    int64_t latent_width() const {
        return sizes.query_rank + sizes.head_size + (int64_t)sizes.heads * (sizes.nope + rope_size());
    }

    std::vector<Layer> layers_;
    const Model* lender_ = this;  // whose keys and values layers read that have none of their own
    Matrix embedding_, head_, vector_projection_;
    const float *final_norm_ = nullptr, *vector_norm_ = nullptr;
    size_t pairs_;
    std::vector<float> frequencies_, factors_;  // of Ropes
    float embedding_scale_ = 1.0f, logit_scale_ = 1.0f, logit_cap_ = 0.0f;

    Region weights_;
    size_t used_ = 0;
    int64_t places_ = 0;    // slots of the pool, then one per node of a step
    Region cache_;          // [layers][kinds()][kv_heads][places_of()][head_bytes()]: layers with keys
                            // and values of their own, in these sizes of theirs
    const int32_t* window_pages_ = nullptr;  // [pages] or -1

    std::vector<int32_t> aux_layers_;
    std::vector<float> aux_hidden_states_;
    float* ring_ = nullptr;
    int ring_tokens_ = 0;
    std::vector<int32_t> row_slots_;  // of the last step's rows; empty: nothing goes into the ring

    // Adapters (lora.cpp): how many, their padded rank, and what each adds to a matrix.
    int32_t adapters_ = 0, rank_ = 0;
    std::vector<std::vector<LowRank>> low_ranks_;  // [Matrix::adapted][adapter]
    bool adapting_ = false;            // some row of the step has one
    std::vector<int32_t> adapter_of_;  // [nodes]
    std::vector<int32_t> gathered_adapters_;  // of the rows of `gathered_q_`
    Floats lowered_;                   // [kStack][max_nodes][rank_] A x
    std::vector<Floats> widened_;      // of each thread

    // Of the current step.
    std::vector<int32_t> trunks_;    // places of every row's positions, row after row
    std::vector<int64_t> trunk_at_;  // where a row's begin
    std::vector<int32_t> window_trunks_, window_place_of_;  // trunks_ and place_of_ in window pages
    std::vector<int32_t> paths_;     // places of the draft tokens on the way to each draft token
    std::vector<Sight> sights_;      // [nodes]
    std::vector<int32_t> position_, row_of_;  // [nodes]
    std::vector<int32_t> place_of_;  // [nodes] where a node's keys and values are written
    std::vector<Division> divisions_;
    int32_t last_nodes_ = 0;  // nodes of the last step
    std::vector<int32_t> logits_nodes_;  // nodes whose logits are computed next,
    int64_t logits_first_ = 0;           // into rows of the step's logits from this one on
    HeadTimes head_times_;
    std::vector<Likely> likely_;         // of each thread
    std::vector<int32_t> path_end_;      // [rows] the node whose logits a path waits for, or -1
    std::vector<uint8_t> below_;         // [nodes] of those computed next, or below one of them
    std::vector<int32_t> descended_;     // [rows] how far its scored nodes were looked through for it
    std::atomic<int> next_unit_{0};

    // Rows of numbers between products, [max_nodes] each.
    Floats stream_, qkv_, mixed_, gate_, up_;
    Floats cosine_, sine_;  // [max_nodes][ropes][numbers that are rotated / 2]
    std::vector<Group> hidden_q_, mixed_q_, ffn_q_;
    Floats hidden_f_;  // the others as floats are mixed_ and, when activated, gate_
    Floats branch_;    // what attention or feed-forward made, where it is not added at once
    Floats beside_;    // what a feed-forward made that has experts beside it
    Floats vectors_;   // [max_nodes][layers][vectors] the tokens' vectors

    // Of latent attention (latent.cpp).
    Floats latent_;    // [max_nodes][latent_width()]
    Floats lower_f_;   // [max_nodes][query_rank] normed
    std::vector<Group> lower_q_;
    Floats heads_f_;   // [heads][nodes][inputs of a head's matrix]
    std::vector<Group> heads_q_;   // the same in columns
    Floats values_of_; // [max_nodes][heads][value]

    // Of recurrent layers (recurrent.cpp). Tables over texts, and what the draft tokens of the last
    // step bring to each layer: [recurrent][drafts_][..].
    Region states_, windows_;  // [recurrent][states][..] [value_heads][key_size][value_size],
                               // [convolved - 1][channels]
    Floats net_;               // [max_nodes][sizes.net_width()]
    Floats net_queries_, net_keys_, net_values_, decay_, beta_, found_;  // as DeltaStep has them
    Floats kept_mixed_, kept_keys_, kept_values_, kept_decay_, kept_beta_;
    Floats ones_;
    std::vector<int32_t> draft_of_;  // [max_nodes] a draft token's number in the step, or -1
    std::vector<int64_t> nowhere_;   // [drafts_] -1
    int32_t drafts_ = 0;
    std::vector<Floats> net_scratch_;  // of each thread

    // Of the current layer of experts (experts.cpp).
    Floats scores_of_;    // [nodes][experts + 1] the last: the shared one's gate
    std::vector<int32_t> chosen_;     // [nodes][top_k] experts, best first
    Floats share_;        // [nodes][top_k] their weights
    std::vector<int32_t> row_at_;     // [nodes][top_k] rows of expert_out_
    std::vector<int32_t> rows_of_;    // [experts] rows of each, then where the next one goes
    std::vector<Visit> visits_;
    std::vector<Group> gathered_q_;   // of `expert_rows()` rows, each expert's beginning a column
    Floats gathered_f_, expert_out_;
    std::vector<Floats> scratch_;  // of attention, one per thread
    Floats scores_, totals_;       // [units][shared heads][stride], [..][..], where they work together
    int64_t stride_ = 0;
};

}  // namespace forerun
