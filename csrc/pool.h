// A few threads that run one function together and sleep in between.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace forerun {

// How many threads are worth using while other processes want the same cores.
//
// Threads that meet at barriers run at the pace of the slowest: one that has lost its core to
// another process holds up all. So when some thread has been kept off its core for so much time that
// one thread less would have been faster, one thread less takes part; after a calm while, one more
// is tried, and has proved itself after half a second of runs that were no slower for it. A short
// disturbance changes nothing. Results never depend on the number.
class Crowd {
public:
    explicit Crowd(int most) : most_(most), active_(most) {}
    int active() const { return active_; }

    // A run took `wall` seconds, and the thread that fared worst was off its core for `lost`.
    void observe(double wall, double lost);

private:
    int most_;
    int active_;
    double wall_ = 0, lost_ = 0;  // of the runs since the last decision, seconds
    double wasted_ = 0;           // seconds that one thread less would have saved lately (CUSUM)
    double calm_ = 0;             // seconds of undisturbed runs since the last change
    double patience_ = 0.5;       // how many of them before one thread more is tried
    bool probing_ = false;        // the last change was one more, and may yet prove wrong
    double held_ = 0;             // seconds of runs in which it has not
};

// `run(work)` calls work(0) on the caller and work(1..threads() - 1) on the pool's own threads, all
// at the same time, and returns when all have returned. Inside, `barrier()` waits for everyone: it
// spins, since the wait is usually below a microsecond, and yields when it is not.
class Pool {
public:
    // With fewer threads than asked where the system gives no more.
    explicit Pool(int most);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int most() const { return most_; }
    int threads() const { return threads_; }  // of the current run
    void run(const std::function<void(int)>& work);
    void barrier();

private:
    void loop(int id);
    void work_as(int id, const std::function<void(int)>& work);

    int most_;
    const int process_;  // that has the threads; a forked child works alone
    Crowd crowd_;
    std::vector<std::thread> workers_;
    std::vector<double> lost_;  // [most] seconds off its core of each thread, last run
    std::mutex mutex_;
    std::condition_variable wake_;
    // Of the current run; written with the mutex held, before anyone takes part.
    const std::function<void(int)>* work_ = nullptr;
    int threads_ = 1;
    uint64_t turn_ = 0;  // how many runs have begun
    bool stop_ = false;
    // On cache lines of their own: one is written by all, the other read by all.
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
};

// The piece of [0, count) that belongs to thread `id` of `threads`.
struct Share {
    int first, last;
    Share(int count, int id, int threads)
        : first((int)((int64_t)count * id / threads)),
          last((int)((int64_t)count * (id + 1) / threads)) {}
};

}  // namespace forerun
