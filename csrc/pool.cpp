#include "pool.h"

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cfenv>
#include <system_error>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace forerun {
namespace {

constexpr int kSpins = 4000;         // some 50 to 100 microseconds, then yield
constexpr double kWindow = 0.02;     // seconds of runs between decisions
// A thread that is off its core for a share s of the time makes a run 1 / (1 - s) times as long;
// one
// thread less makes it at most n / (n - 1) times as long. So s = 1 / n is where they meet.
constexpr double kCrowded = 0.8;     // of 1 / n: too much
constexpr double kWasted = 0.02;     // seconds beyond that before a thread less takes part,
constexpr double kTried = 0.005;     // and where the last one was only being tried
constexpr double kCalm = 0.2;        // of 1 / n: nothing
constexpr double kShortest = 0.5;    // seconds of calm before a thread more is tried, and of its trial;
constexpr double kLongest = 16.0;    // the calm is doubled when that failed, up to this

double seconds(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

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

void Crowd::observe(double wall, double lost) {
    wall_ += wall;
    lost_ += lost;
    if (wall_ < kWindow) return;
    const double share = lost_ / wall_;
    wasted_ = std::max(0.0, wasted_ + lost_ - wall_ * kCrowded / active_);
    calm_ = share < kCalm / active_ ? calm_ + wall_ : 0;
    held_ = probing_ ? held_ + wall_ : 0;
    wall_ = lost_ = 0;
    if (wasted_ > (probing_ ? kTried : kWasted) && active_ > 1) {
        patience_ = probing_ ? std::min(2 * patience_, kLongest) : kShortest;
        probing_ = false;
        wasted_ = calm_ = 0;
        active_--;
    } else if (held_ > kShortest) {
        // Not calm, perhaps, but nothing was wasted all the while: the last one was right.
        probing_ = false;
    } else if (calm_ > patience_ && active_ < most_) {
        calm_ = 0;
        probing_ = true;
        active_++;
    }
}

Pool::Pool(int most) : most_(1), process_((int)getpid()), crowd_(1), lost_(most < 1 ? 1 : most) {
    workers_.reserve(lost_.size());
    try {
        for (; most_ < most; most_++) {
            workers_.emplace_back([this, id = most_] { loop(id); });
        }
    } catch (const std::system_error&) {
        // No thread more is to be had here, by a limit or for want of memory: these must do.
    }
    crowd_ = Crowd(most_);
}

Pool::~Pool() {
    if (getpid() != process_) {
        for (std::thread& worker : workers_) worker.detach();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::work_as(int id, const std::function<void(int)>& work) {
    const double wall = seconds(CLOCK_MONOTONIC), busy = seconds(CLOCK_THREAD_CPUTIME_ID);
    work(id);
    lost_[id] = (seconds(CLOCK_MONOTONIC) - wall) - (seconds(CLOCK_THREAD_CPUTIME_ID) - busy);
    barrier();
}

void Pool::run(const std::function<void(int)>& work) {
    PlainFloats plain;
    const bool forked = getpid() != process_;
    if (forked) threads_ = 1;  // Without the mutex: a thread that is not there any more may have it.
    if (forked || most_ == 1) return work(0);
    const double begin = seconds(CLOCK_MONOTONIC);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = &work;
        threads_ = crowd_.active();
        turn_++;
    }
    if (threads_ > 1) wake_.notify_all();
    work_as(0, work);
    const double lost = *std::max_element(lost_.begin(), lost_.begin() + threads_);
    crowd_.observe(seconds(CLOCK_MONOTONIC) - begin, lost);
}

void Pool::barrier() {
    const int all = threads_;  // read before arriving: afterwards the run may be over
    if (all == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == all) {
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
            // The system's own wait: std::condition_variable::wait has a new version in GCC 12's
            // library, and a wheel that used it would not load on older systems.
            while (!stop_ && !(turn_ != seen && id < threads_)) {
                pthread_cond_wait(wake_.native_handle(), mutex_.native_handle());
            }
            if (stop_) return;
            seen = turn_;
            work = work_;
        }
        work_as(id, *work);
    }
}

}  // namespace forerun
