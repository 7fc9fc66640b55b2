// The threads of a launch on a CPU: they take turns, each until it waits for others. (Threads of the system,
// a thousand at times, spent most of their time in waking each other; swapcontext, in asking the system for
// masks of signals.)
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

struct Index3 {
    unsigned x, y, z;
};
// Of the thread whose turn it is.
inline Index3 threadIdx, blockIdx;
inline int block_rank;

namespace turns {

struct Place {
    Index3 thread, block;
    int rank;  // of the block in its cluster
};

struct Thread {
    static constexpr int kStackBytes = 1 << 18;
    ucontext_t beginning;
    jmp_buf here;  // where it waits
    bool begun;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};  // of which few pages are touched
    std::function<void()> run;
    Place place;
    bool done;
};
inline std::vector<std::unique_ptr<Thread>> all_threads;
inline int threads_of_launch, current, unsuccessful;
inline ucontext_t after_launch;

inline void set_place(const Place& place) {
    threadIdx = place.thread;
    blockIdx = place.block;
    block_rank = place.rank;
}
inline void enter(int next) {
    current = next;
    set_place(all_threads[next]->place);
}
[[noreturn]] inline void go_on(Thread& next) {
    if (next.begun) {
        _longjmp(next.here, 1);
    }
    next.begun = true;
    setcontext(&next.beginning);
    std::abort();
}
inline int next_thread() {
    for (int i = 1; i <= threads_of_launch; ++i) {
        if (const int next = (current + i) % threads_of_launch; !all_threads[next]->done) {
            return next;
        }
    }
    return -1;
}
// The others' turn, until `there` is true.
template <class F>
void wait_until(F there) {
    while (!there()) {
        if (++unsuccessful > 4 * threads_of_launch) {
            std::abort();  // nobody will come: bytes or arrivals are counted wrongly
        }
        const int self = current, next = next_thread();
        if (next != self) {
            enter(next);
            if (_setjmp(all_threads[self]->here) == 0) {
                go_on(*all_threads[next]);
            }
        }
    }
    unsuccessful = 0;
}
inline void begin_thread() {
    Thread& self = *all_threads[current];
    self.run();
    self.done = true;
    unsuccessful = 0;
    if (const int next = next_thread(); next >= 0) {
        enter(next);
        go_on(*all_threads[next]);
    }
    setcontext(&after_launch);
}
// Runs `run` in so many threads; place(i, to) says where the i-th is.
template <class PLACE>
void run_together(int count, PLACE place, const std::function<void()>& run) {
    threads_of_launch = count;
    unsuccessful = 0;
    for (int i = 0; i < count; ++i) {
        if (i == int(all_threads.size())) {
            all_threads.emplace_back(new Thread);
        }
        Thread& one = *all_threads[i];
        place(i, one.place);
        one.run = run;
        one.begun = one.done = false;
        getcontext(&one.beginning);
        one.beginning.uc_stack.ss_sp = one.stack.get();
        one.beginning.uc_stack.ss_size = Thread::kStackBytes;
        makecontext(&one.beginning, begin_thread, 0);
    }
    enter(0);
    all_threads[0]->begun = true;
    swapcontext(&after_launch, &all_threads[0]->beginning);
}

// Runs the i-th from start to end; it must not wait.
template <class PLACE, class RUN>
void run_alone(int i, PLACE place, RUN run) {
    Place one;
    place(i, one);
    threads_of_launch = 0;
    set_place(one);
    run();
}

// All of so many wait for the last one.
struct Meeting {
    int threads, here;
    unsigned round;

    void init(int count) {
        threads = count;
        here = 0;
    }
    void wait() {
        if (++here == threads) {
            here = 0;
            ++round;
            return;
        }
        wait_until([this, before = round] { return round != before; });
    }
};

}  // namespace turns
