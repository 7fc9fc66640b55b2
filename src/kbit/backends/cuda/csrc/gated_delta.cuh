// What the kernels of gated delta linear attention share: how its modules round and activate.
#pragma once

#include "config.h"
#include "rows.cuh"

using H = Half<Config::bf16>;

DEVICE float rounded(float value) {
    return H::widen(H::narrow(value));
}
// __expf is off by more than expf, but far less than 16 bits show, and shorter by half: of a prompt's
// channels this is what takes most of the time.
DEVICE float sigmoid(float value) {
    return __fdividef(1.0f, 1.0f + __expf(-value));
}
DEVICE float silu(float value) {
    return value * sigmoid(value);
}
DEVICE float softplus(float value) {
    return value > 20.0f ? value : log1pf(expf(value));
}
// A convolved channel's activation.
DEVICE float activated(float sum) {
    return rounded(silu(rounded(sum)));
}
// The logarithm of a head's decay: -exp(log_decay) * softplus(alpha + bias).
DEVICE float log_of_decay(float alpha, const void* log_decay, const void* bias, int head, int kind) {
    return -expf(load_widened(log_decay, head, kind)) * softplus(alpha + load_widened(bias, head, kind));
}
// A column of the gated norm, to be rounded: x of a row whose mean square is `mean`.
DEVICE float opened(float x, float mean, float eps, float weight, float gate) {
    return rounded(weight * rounded(x * rsqrtf(mean + eps))) * silu(gate);
}
