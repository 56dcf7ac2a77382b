// A pool whose threads take turns, for bench/threads.py: it stands in for csrc/pool.cpp. Only one of
// them runs at any time, so how long each works between two barriers can be measured on a machine
// that has fewer cores than threads.
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "pool.h"

namespace forerun {
namespace {

using Clock = std::chrono::steady_clock;

std::mutex mutex;
std::condition_variable changed;
int turn;                                 // the thread that may run
thread_local int self;                    // the thread that this is
thread_local Clock::time_point begun;     // when its turn began
bool measuring;
size_t phase;                             // between which barriers of the repetition it is
std::vector<std::vector<double>> least;   // [phase][thread] seconds, of all repetitions

void begin_turn() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [] { return turn == self; });
    lock.unlock();
    begun = Clock::now();
}

void end_turn(int threads) {
    const double took = std::chrono::duration<double>(Clock::now() - begun).count();
    std::lock_guard<std::mutex> lock(mutex);
    if (measuring) {
        if (least.size() == phase) least.emplace_back((size_t)threads, 1e9);
        double& so_far = least[phase][(size_t)self];
        if (took < so_far) so_far = took;
        if (self == threads - 1) phase++;
    }
    turn = (self + 1) % threads;
    changed.notify_all();
}

}  // namespace

void Crowd::observe(double, double) {}

Pool::Pool(int most) : most_(most), process_(0), crowd_(most), threads_(most) {}

Pool::~Pool() {}

void Pool::run(const std::function<void(int)>& work) {
    const auto as = [&](int id) {
        self = id;
        begin_turn();
        work(id);
        end_turn(threads_);
    };
    std::vector<std::thread> others;
    for (int id = 1; id < threads_; id++) others.emplace_back(as, id);
    as(0);
    for (std::thread& other : others) other.join();
}

void Pool::barrier() {
    end_turn(threads_);
    begin_turn();
}

}  // namespace forerun

extern "C" {

// Forgets what was measured.
__attribute__((visibility("default"))) void forerun_turns_forget() { forerun::least.clear(); }

// Between a call with 1 and one with 0 lies one repetition.
__attribute__((visibility("default"))) void forerun_turns_measure(int on) {
    forerun::measuring = on != 0;
    forerun::phase = 0;
}

// The number of phases; `seconds`, if it is not null: double[phases][threads].
__attribute__((visibility("default"))) int forerun_turns(double* seconds) {
    for (const auto& phase : forerun::least) {
        if (!seconds) break;
        memcpy(seconds, phase.data(), phase.size() * sizeof(double));
        seconds += phase.size();
    }
    return (int)forerun::least.size();
}
}
