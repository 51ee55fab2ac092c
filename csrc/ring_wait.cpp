#include "ring_wait.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace weightsync {
namespace {

// A killed peer cannot wake anybody: it is noticed when the slice ends.
constexpr double kSliceSeconds = 0.05;

double now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// No FUTEX_PRIVATE_FLAG: the word is shared between processes.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
    static_assert(sizeof(std::atomic<uint32_t>) == 4);
    return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

}  // namespace

bool expired(const WaitLimits& limits) { return now() >= limits.deadline; }

std::optional<size_t> lost_peer(const WaitLimits& limits) {
    std::vector<pollfd> watched;
    watched.reserve(limits.peers.size());
    for (const int fd : limits.peers) watched.push_back({fd, POLLRDHUP, 0});
    if (poll(watched.data(), watched.size(), 0) <= 0) return std::nullopt;
    for (size_t i = 0; i < watched.size(); ++i)
        if ((watched[i].revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL)) != 0) return i;
    return std::nullopt;
}

void wait_slice(std::atomic<uint32_t>& word, uint32_t expected, const WaitLimits& limits) {
    const double seconds = std::clamp(limits.deadline - now(), 0.0, kSliceSeconds);
    const timespec timeout{0, static_cast<long>(seconds * 1e9)};
    // Woken, timed out, changed already or interrupted: the caller looks again in any case.
    const bool woken = futex(word, FUTEX_WAIT, expected, &timeout) == 0 || errno == EAGAIN;
    // Not after every wake-up: it takes Python's lock, which a computing engine may be slow to give.
    if (!woken && limits.check_signals) limits.check_signals();
}

void wake(std::atomic<uint32_t>& word) {
    word.fetch_add(1, std::memory_order_seq_cst);
    futex(word, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace weightsync
