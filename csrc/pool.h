// A few threads that run one function together and sleep in between.
#pragma once
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace forerun {

// `run(work)` calls work(0) on the caller and work(1..threads-1) on the pool's own threads, all at
// the same time, and returns when all have returned. Inside, `barrier()` waits for everyone: it
// spins, since the wait is usually below a microsecond, and yields when it is not.
class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }
    void run(const std::function<void(int)>& work);
    void barrier();

private:
    void loop(int id);

    const int threads_;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    const std::function<void(int)>* work_ = nullptr;
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
