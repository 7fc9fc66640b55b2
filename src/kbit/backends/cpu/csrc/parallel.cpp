// torch's OpenMP runtime is used when it can be found in the process: a second pool would fight it for the
// cores. GOMP_parallel is looked up at run time, so that the extension links neither torch nor libgomp.
#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace kbit {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// libgomp's pool does not survive fork: in a child its GOMP_parallel would wait for threads that are gone.
// Registered as the extension is loaded: a parent may fork before its first product, when torch has started
// the pool already.
std::atomic<bool> in_forked_child{false};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { in_forked_child.store(true); });

GompParallel find_gomp() {
    return reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
}

struct Work {
    int64_t items;
    ParallelBody body;
    void* context;
    std::atomic<int64_t> next{0};
    std::atomic<int> slots{0};
};

void take_items(void* p) {
    Work& work = *static_cast<Work*>(p);
    const int slot = work.slots.fetch_add(1, std::memory_order_relaxed);
    for (int64_t i; (i = work.next.fetch_add(1, std::memory_order_relaxed)) < work.items;) {
        work.body(work.context, i, slot);
    }
}

struct Buffer {
    void* data = nullptr;
    size_t bytes = 0;
    ~Buffer() { release(); }
    void release() {
        std::free(data);
        data = nullptr;
        bytes = 0;
    }
};

Buffer& buffer_for(Purpose purpose) {
    static thread_local Buffer buffers[2];
    return buffers[purpose == Purpose::kActivations ? 0 : 1];
}

}  // namespace

void parallel_for(int64_t items, int threads, ParallelBody body, void* context) {
    static const GompParallel gomp = find_gomp();
    Work work{items, body, context};
    if (threads > items) {
        threads = int(items);
    }
    if (threads <= 1) {
        take_items(&work);
    } else if (gomp != nullptr && !in_forked_child.load()) {
        gomp(take_items, &work, unsigned(threads), 0);
    } else {
        std::vector<std::thread> helpers;
        helpers.reserve(size_t(threads) - 1);
        try {
            for (int i = 1; i < threads; ++i) {
                helpers.emplace_back(take_items, &work);
            }
        } catch (const std::system_error&) {
            // No more of them may be started: those there are take all items.
        }
        take_items(&work);
        for (std::thread& helper : helpers) {
            helper.join();
        }
    }
}

void* scratch(Purpose purpose, size_t bytes) {
    constexpr size_t kKeep = size_t(16) << 20;
    Buffer& buffer = buffer_for(purpose);
    if (bytes > buffer.bytes || (buffer.bytes > kKeep && bytes < buffer.bytes / 4)) {
        buffer.release();
        const size_t whole = (bytes + 4095) / 4096 * 4096;
        buffer.data = std::aligned_alloc(64, whole);
        if (buffer.data == nullptr) {
            throw std::bad_alloc();
        }
        buffer.bytes = whole;
    }
    return buffer.data;
}

void free_scratch(Purpose purpose, size_t most) {
    Buffer& buffer = buffer_for(purpose);
    if (buffer.bytes > most) {
        buffer.release();
    }
}

}  // namespace kbit
