// How both ends of a ring wait: on a futex, in slices, with a deadline, watching that the peers still live.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace weightsync {

// Why a ring was given up.
enum class RingFault : int {
    deadline = 1,   // `who` was awaited for too long
    peer_lost = 2,  // the process of `who` is gone
    peer_left = 3,  // `who` stopped reading before the end
    aborted = 4,    // the writer gave the update up
    malformed = 5   // `who` wrote what nobody may write
};

// `who` is a reader's index; without meaning where the writer is the peer.
struct RingError : std::runtime_error {
    RingFault fault;
    size_t who;
    RingError(RingFault fault_, size_t who_, const std::string& detail)
        : std::runtime_error(detail), fault(fault_), who(who_) {}
};

// What every wait of one call is bound by.
struct WaitLimits {
    double deadline = 0;     // seconds on CLOCK_MONOTONIC
    std::vector<int> peers;  // their sockets; only ever polled for a hang-up; negative: nobody's
    std::function<void()> check_signals;  // may throw; called when a slice ends without a wake-up
};

// True once the deadline has passed.
bool expired(const WaitLimits& limits);

// The first peer whose socket has been hung up.
std::optional<size_t> lost_peer(const WaitLimits& limits);

// Sleeps while `word` holds `expected`, for one slice at most. Whoever was not woken has signals handled.
void wait_slice(std::atomic<uint32_t>& word, uint32_t expected, const WaitLimits& limits);

// Changes the word, so that nobody who is about to sleep on the old value does, and wakes who sleeps.
void wake(std::atomic<uint32_t>& word);

}  // namespace weightsync
