#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace forerun {
namespace {

constexpr int kSpins = 4000;  // about 40 microseconds, then yield

void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Other libraries change rounding or flush subnormals on some threads and not on others; results
// must not depend on which thread computed them.
class PlainFloats {
public:
    PlainFloats() {
        fegetenv(&saved_);
        fesetenv(FE_DFL_ENV);
    }
    ~PlainFloats() { fesetenv(&saved_); }

private:
    fenv_t saved_;
};

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
    for (int id = 1; id < threads_; id++) workers_.emplace_back([this, id] { loop(id); });
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::run(const std::function<void(int)>& work) {
    PlainFloats plain;
    if (threads_ > 1) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            work_ = &work;
            turn_++;
        }
        wake_.notify_all();
    }
    work(0);
    barrier();
}

void Pool::barrier() {
    if (threads_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
        if (spins < kSpins) {
            pause_briefly();
        } else {
            std::this_thread::yield();
        }
    }
}

void Pool::loop(int id) {
    PlainFloats plain;
    uint64_t seen = 0;
    for (;;) {
        const std::function<void(int)>* work;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return stop_ || turn_ != seen; });
            if (stop_) return;
            seen = turn_;
            work = work_;
        }
        (*work)(id);
        barrier();
    }
}

}  // namespace forerun
