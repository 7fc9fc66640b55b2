// Which kernels this CPU and operating system can run.
#pragma once

#include <vector>

#include "kernels.h"

namespace kbit {

// Usable kernels, best first. The portable ones are always there.
const std::vector<const Kernels*>& supported_kernels();

}  // namespace kbit
