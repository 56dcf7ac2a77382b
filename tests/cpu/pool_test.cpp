// The pool under stress, and its sense of a crowd. Linked with all of csrc/*.cpp; code 1 on a fault.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#define private public  // `forked` holds the mutex.
#include "pool.h"
#undef private

using namespace forerun;

static int faults = 0;
static void expect(bool good, const char* what) {
    if (!good) printf("%s\n", what), faults++;
}

// Every thread of a run sees what all others wrote before the barrier.
static void stress(int most) {
    Pool pool(most);
    std::vector<int> written(most);
    std::atomic<int> wrong{0};
    std::set<int> sizes;
    for (int turn = 1; turn <= 3000; turn++) {
        pool.run([&](int id) {
            const int all = pool.threads();
            if (id == 0) sizes.insert(all);
            for (int phase = 0; phase < 5; phase++) {
                written[id] = turn * 10 + phase;
                pool.barrier();
                for (int other = 0; other < all; other++) {
                    if (written[other] != turn * 10 + phase) wrong++;
                }
                pool.barrier();
            }
        });
    }
    expect(wrong == 0, "a barrier let somebody through");
    expect(*sizes.begin() >= 1 && *sizes.rbegin() == most, "numbers of threads");
}

static void crowd() {
    Crowd alone(1);
    for (int i = 0; i < 100; i++) alone.observe(0.01, 0.01);
    expect(alone.active() == 1, "one thread stays");

    Crowd calm(4);
    for (int i = 0; i < 1000; i++) calm.observe(0.01, 0.0001);
    expect(calm.active() == 4, "nothing changes when nothing disturbs");

    Crowd busy(4);
    for (int i = 0; i < 1000; i++) busy.observe(0.01, 0.005);
    expect(busy.active() == 1, "half of the time lost: down to one");
    for (int i = 0; i < 1000; i++) busy.observe(0.01, 0.0);
    expect(busy.active() == 4, "and back when it is over");

    // A neighbour that takes a core for 30 of every 130 ms (somebody who asks whether the server is
    // up): two threads remain faster than one, so both remain.
    Crowd polled(2);
    int alone_for = 0;
    for (int i = 0; i < 3900; i++) {
        polled.observe(0.01, i % 13 < 3 ? 0.005 : 0.0);
        alone_for += polled.active() == 1;
    }
    expect(alone_for == 0, "a short disturbance changes nothing");

    // Each time somebody has gone for good, the next one finds the patience of the first.
    Crowd visited(2);
    for (int visit = 0; visit < 6; visit++) {
        for (int i = 0; i < 30; i++) visited.observe(0.01, 0.008);
        expect(visited.active() == 1, "one thread gives way");
        int back = 0;
        while (visited.active() == 1 && back < 10000) visited.observe(0.01, 0.0), back++;
        expect(back < 60, "and is back after half a second, whoever came before");
        for (int i = 0; i < 200; i++) visited.observe(0.01, 0.0);
    }

    // Clients take a sixth of a core all the time, which is not calm, but two threads are faster: the
    // one that was tried is no longer on trial, and a short disturbance changes nothing.
    Crowd serving(2);
    for (int i = 0; i < 30; i++) serving.observe(0.01, 0.008);
    expect(serving.active() == 1, "one thread gives way");
    for (int i = 0; i < 100; i++) serving.observe(0.01, 0.0015);
    expect(serving.active() == 2, "and is back");
    for (int i = 0; i < 100; i++) serving.observe(0.01, 0.0015);
    serving.observe(0.02, 0.018);
    expect(serving.active() == 2, "a thread that has proved itself is not given up at once");

    // Three threads run free, a fourth never does: tried again and again, but ever more rarely.
    Crowd neighbour(4);
    int tried = 0;
    for (int i = 0; i < 20000; i++) {
        const bool all = neighbour.active() == 4;
        tried += all;
        neighbour.observe(0.01, all ? 0.005 : 0.0);
    }
    expect(neighbour.active() >= 3, "three remain");
    expect(tried > 4 && tried < 60, "probes are rare");
}

// Where the system gives no more threads, those there are do the work.
static void limited() {
    rlimit before;
    getrlimit(RLIMIT_AS, &before);
    const rlimit little = {256u << 20, before.rlim_max};  // stacks of 8 MB each
    setrlimit(RLIMIT_AS, &little);
    Pool pool(500);
    setrlimit(RLIMIT_AS, &before);
    expect(pool.most() >= 1 && pool.most() < 500, "fewer threads than asked");
    std::atomic<int> ids{0};
    pool.run([&](int) {
        ids++;
        pool.barrier();
    });
    expect(ids == pool.most(), "all of them run");
}

// A process may be forked while a thread holds the mutex, which the child has no thread to release.
static void forked() {
    Pool pool(2);
    pool.mutex_.lock();
    const pid_t child = fork();
    if (child == 0) {
        alarm(10);
        int ran = 0;
        pool.run([&](int) {
            ran++;
            pool.barrier();
        });
        _exit(ran == 1 ? 0 : 1);
    }
    pool.mutex_.unlock();
    int status = 1;
    waitpid(child, &status, 0);
    expect(status == 0, "a forked child works alone");
}

int main() {
    for (int most : {1, 2, 3, 5}) stress(most);
    crowd();
    limited();
    forked();
    return faults != 0;
}
