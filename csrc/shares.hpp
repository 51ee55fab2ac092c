// Work split into shares that run in parallel.
#pragma once

#include <system_error>
#include <thread>
#include <vector>

namespace weightsync {

// Calls run(share) for every share below `shares`, the first on the calling thread, and returns when all
// are done. `run` must not throw. A thread that cannot be started has its share done by the caller.
template <class Run>
void run_shares(unsigned shares, const Run& run) {
    std::vector<std::thread> pool;
    pool.reserve(shares - 1);
    unsigned next = 1;
    try {
        for (; next < shares; ++next) pool.emplace_back(run, next);
    } catch (const std::system_error&) {
        // No more threads to be had: slower, not wrong.
    }
    for (unsigned share = next; share < shares; ++share) run(share);
    run(0);
    for (std::thread& thread : pool) thread.join();
}

}  // namespace weightsync
