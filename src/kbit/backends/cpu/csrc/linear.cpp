// Splitting linear and grouped_linear over threads. Each output element is computed by one thread in an order
// that does not depend on the split, so results are the same for any number of threads.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include "convert.h"
#include "driver.h"
#include "parallel.h"

namespace kbit {
namespace {

constexpr int64_t kTokensPerPass = 256;  // bounds the workspace; weights are decoded again for the next pass
// Bounds prepared activations, which are as large as x or twice that; kTokensPerPass of them may be larger.
constexpr int64_t kPreparedBytes = int64_t(20) << 20;
constexpr int64_t kSerialWork = int64_t(1) << 17;  // decoded weights: below ~10 us waking threads costs more

int64_t rows_per_item(int64_t rows, int threads) {
    const int64_t even = rows / (int64_t(threads) * 8) / 32 * 32;
    return std::clamp<int64_t>(even, 32, 256);
}

int threads_for(int64_t weights, int64_t tokens, int threads) {
    return weights * (1 + tokens / 8) < kSerialWork ? 1 : threads;
}

struct Prepared {
    const LinearKernels& kernels;
    int64_t stride;  // elements
    int64_t first;   // token
    char* x;

    int64_t row_bytes() const { return stride * kernels.element_bytes; }
    char* row(int64_t token) const { return x + (token - first) * row_bytes(); }
};

Prepared unprepared(const Kernels& isa, const WeightArgs& w, const Activations& a) {
    const bool bf16 = a.dtype == DType::kBFloat16 && isa.linear_bf16 != nullptr;
    const LinearKernels& kernels = bf16 ? *isa.linear_bf16 : isa.linear;
    // Rows a power of two apart would share cache sets.
    return {kernels, kernels.padded_k(w.bits, w.k) + 64 / kernels.element_bytes, 0, nullptr};
}

void prepare(Prepared& p, const WeightArgs& w, const Activations& a, int64_t begin, int64_t end,
             int threads) {
    const int64_t x_bytes = w.k * (a.dtype == DType::kFloat32 ? 4 : 2), tokens = end - begin;
    p.first = begin;
    p.x = static_cast<char*>(scratch(Purpose::kActivations, size_t(tokens * p.row_bytes())));
    parallel_for(tokens, tokens < 8 ? 1 : threads, [&](int64_t t, int) {
        p.kernels.prepare_x(static_cast<const char*>(a.x) + (begin + t) * x_bytes, a.dtype, w.k, w.bits,
                            p.row(begin + t));
    });
}

LinearJob make_job(const Prepared& p, const WeightArgs& w, const Activations& a, int64_t expert,
                   int64_t token, int64_t tokens) {
    LinearJob job;
    job.weight = make_weight(w, expert, a.dtype);
    job.x = p.row(token);
    job.x_stride = p.stride;
    job.tokens = std::min(tokens, kTokensPerPass);
    job.bias = a.bias;
    job.out = static_cast<char*>(a.out) + token * w.n * (a.dtype == DType::kFloat32 ? 4 : 2);
    job.out_stride = w.n;
    job.dtype = a.dtype;
    return job;
}

// One weight matrix and the tokens that meet it, in passes of kTokensPerPass.
struct Task {
    std::vector<LinearJob> passes;
};

Task make_task(const Prepared& p, const WeightArgs& w, const Activations& a, int64_t expert, int64_t begin,
               int64_t end) {
    Task task;
    for (int64_t t = begin; t < end; t += kTokensPerPass) {
        task.passes.push_back(make_job(p, w, a, expert, t, end - t));
    }
    return task;
}

void run_tasks(const Prepared& p, const std::vector<Task>& tasks, int64_t n, int threads) {
    size_t workspace = 0;
    for (const Task& task : tasks) {
        for (const LinearJob& job : task.passes) {
            workspace = std::max(workspace, p.kernels.workspace_bytes(job));
        }
    }
    workspace = (workspace + 63) / 64 * 64;
    char* buffers = static_cast<char*>(scratch(Purpose::kWorkspace, workspace * size_t(threads)));
    const int64_t step = rows_per_item(n * int64_t(tasks.size()), threads), splits = (n + step - 1) / step;
    parallel_for(int64_t(tasks.size()) * splits, threads, [&](int64_t item, int slot) {
        const int64_t row = item % splits * step;
        for (const LinearJob& job : tasks[size_t(item / splits)].passes) {
            p.kernels.rows(job, row, std::min(n, row + step), buffers + size_t(slot) * workspace);
        }
    });
}

// Tokens [begin, end) that meet one expert.
struct Span {
    int64_t expert, begin, end;
};

// Multiplies spans that follow each other, as much of them at a time as kPreparedBytes hold. They are cut
// between passes, so results do not depend on it.
void run_spans(const Kernels& isa, const WeightArgs& w, const Activations& a, const std::vector<Span>& spans,
               int threads) {
    Prepared p = unprepared(isa, w, a);
    const int64_t passes = kPreparedBytes / p.row_bytes() / kTokensPerPass,
                  most = std::max<int64_t>(passes, 1) * kTokensPerPass;
    std::vector<Span> parts;
    for (const Span& span : spans) {
        for (int64_t t = span.begin; t < span.end; t += most) {
            parts.push_back({span.expert, t, std::min(span.end, t + most)});
        }
    }
    for (auto first = parts.begin(); first != parts.end();) {
        const auto last = std::find_if(first, parts.end(),
                                       [&](const Span& span) { return span.end - first->begin > most; });
        prepare(p, w, a, first->begin, std::prev(last)->end, threads);
        std::vector<Task> tasks;
        for (; first != last; ++first) {
            tasks.push_back(make_task(p, w, a, first->expert, first->begin, first->end));
        }
        run_tasks(p, tasks, w.n, threads);
    }
    free_scratch(Purpose::kActivations, size_t(kPreparedBytes));
}

}  // namespace

void linear(const Kernels& isa, const WeightArgs& w, const Activations& a, int threads) {
    threads = threads_for(w.n * w.k, a.tokens, threads);
    run_spans(isa, w, a, {{0, 0, a.tokens}}, threads);
}

void grouped_linear(const Kernels& isa, const WeightArgs& w, const Activations& a, const int32_t* offsets,
                    int threads) {
    const size_t row_bytes = size_t(w.n) * (a.dtype == DType::kFloat32 ? 4 : 2);
    char* out = static_cast<char*>(a.out);
    const int64_t first = offsets[0], last = offsets[w.experts];
    memset(out, 0, size_t(first) * row_bytes);
    memset(out + size_t(last) * row_bytes, 0, size_t(a.tokens - last) * row_bytes);
    threads = threads_for(w.n * w.k * std::min(w.experts, a.tokens), 0, threads);
    std::vector<Span> spans;
    for (int64_t e = 0; e < w.experts; ++e) {
        spans.push_back({e, offsets[e], offsets[e + 1]});
    }
    run_spans(isa, w, a, spans, threads);
}

}  // namespace kbit
