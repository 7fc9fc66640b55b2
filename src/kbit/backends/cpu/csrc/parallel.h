// Running independent items on several threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kbit {

using ParallelBody = void (*)(void* context, int64_t item, int slot);

// Calls body(context, item, slot) for every item in [0, items), in any order. slot < threads tells concurrent
// callers apart. Bodies must not throw. Threads take items one by one, so a slow core costs one item, not a
// share.
void parallel_for(int64_t items, int threads, ParallelBody body, void* context);

template <class F>
void parallel_for(int64_t items, int threads, F&& f) {
    parallel_for(
        items, threads,
        [](void* context, int64_t item, int slot) { (*static_cast<F*>(context))(item, slot); },
        const_cast<void*>(static_cast<const void*>(&f)));
}

// Memory of the calling thread that lives until its next call with the same `purpose`: 64-byte aligned, grown
// on demand, given back once a request is far smaller.
enum class Purpose { kActivations, kWorkspace };
void* scratch(Purpose purpose, size_t bytes);

// Gives it back if it is larger than `most` bytes: the thread may not call again. What is small had better be
// kept, as getting it anew costs page faults: 0.8 ms for each MB on one machine.
void free_scratch(Purpose purpose, size_t most);

}  // namespace kbit
