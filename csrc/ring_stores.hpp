// How a writer stores into a ring that carries bytes: into its cache, from where the reader takes them, or
// past it. Which is faster depends on where the two run: measured on one machine, cached stores took 1.2
// passes and streaming ones 1.5 while both cores shared a cache, and 3.0 and 1.6 at times when they did
// not (a virtual machine's processors may move under it). So both are tried, and tried again.
#pragma once

#include <chrono>
#include <cstdint>

#include "kernels.hpp"

namespace weightsync {

class StoreChoice {
   public:
    // What the next chunk is written with.
    Write next(uint64_t nbytes) const {
        return trying() == kStreaming ? streaming_write(nbytes) : Write::cached;
    }

    // An update begins: the time since the last chunk says nothing.
    void begin() { done_ = 0; started_ = Clock::now(); }

    // `nbytes` were written and published, and whatever had to be waited for was waited for.
    void wrote(uint64_t nbytes) {
        done_ += nbytes;
        if (done_ < kEpochBytes) return;
        const Clock::time_point now = Clock::now();
        seconds_per_byte_[trying()] =
            std::chrono::duration<double>(now - started_).count() / static_cast<double>(done_);
        if (epoch_ >= 1) best_ = seconds_per_byte_[kStreaming] < seconds_per_byte_[kCached];
        ++epoch_;
        done_ = 0;
        started_ = now;
    }

   private:
    using Clock = std::chrono::steady_clock;
    static constexpr int kCached = 0, kStreaming = 1;
    // Several times what a ring holds, so that the reader's side of it shows.
    static constexpr uint64_t kEpochBytes = uint64_t{16} << 20;
    // Of so many epochs, one tries the other kind.
    static constexpr uint64_t kTryEvery = 16;

    // Cached first, streaming second, then whatever was faster when last tried.
    int trying() const {
        if (epoch_ < 2) return static_cast<int>(epoch_);
        return epoch_ % kTryEvery == 0 ? 1 - best_ : best_;
    }

    double seconds_per_byte_[2] = {0, 0};
    int best_ = kCached;
    uint64_t epoch_ = 0;
    uint64_t done_ = 0;
    Clock::time_point started_ = Clock::now();
};

}  // namespace weightsync
