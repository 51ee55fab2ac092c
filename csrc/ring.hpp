// A ring in shared memory between one writer and several readers, each in a process of its own.
//
// It either carries bytes (streamed: what the writer copies in, every reader copies out into its own
// tensors), or is a journal (staged: the bytes lie in an arena that all map; records say which of them are
// there now, and each reader digests the records of its own share). Both sides digest what they touch.
//
// The memory is mapped by the caller and outlives the object. Errors are thrown as RingError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels.hpp"
#include "ring_layout.hpp"
#include "ring_stores.hpp"
#include "ring_wait.hpp"

namespace weightsync {

class RingWriter {
   public:
    // Formats `nbytes` of zeroed memory at `base`, which must be ring_bytes(readers, capacity).
    RingWriter(void* base, uint64_t nbytes, uint32_t readers, uint64_t capacity, bool carries_bytes,
               uint64_t chunk);

    // Starts an update of `tensors` tensors and returns its number, 1 for the first. Every reader must be
    // at rest.
    uint64_t begin(uint64_t tensors);

    // Copies (and digests) the spans chunk by chunk and publishes each chunk. A span's `out` is its tensor;
    // its destination is where it lies in the arena, unused where the ring carries bytes.
    void push(const std::vector<Span>& spans, bool digests, const WaitLimits& limits);

    void finish() { end(Status::finished); }
    void abort() { end(Status::aborted); }

    // Digests of everything pushed since begin, shares() x tensors, share by share.
    const std::vector<Sums>& sums() const { return sums_; }
    uint32_t shares() const { return carries_bytes_ ? 1 : readers_; }
    uint64_t tensors() const { return tensors_; }
    bool carries_bytes() const { return carries_bytes_; }

   private:
    uint8_t* reserve(uint64_t nbytes, const WaitLimits& limits);
    void publish(uint64_t nbytes);
    void put_header(uint8_t* at, RecordKind kind, const Span& part, uint32_t share);
    void wait_for_space(uint64_t nbytes, const WaitLimits& limits);
    size_t slowest_reader();
    void wake_readers(bool all);
    void end(Status status);

    RingMap map_;
    const uint32_t readers_;
    const uint64_t capacity_;
    const bool carries_bytes_;
    const uint64_t chunk_;
    const Kernels kernels_;
    StoreChoice stores_;
    uint64_t head_ = 0;
    uint64_t update_ = 0;
    uint64_t tensors_ = 0;
    uint64_t chunks_ = 0;          // of this update; chunk i belongs to share i % shares()
    std::vector<uint64_t> tails_;  // as last seen
    std::vector<Sums> sums_;
};

// A tensor as a reader knows it: where its bytes go (or lie, in an arena), how many, under which seed.
struct Tensor {
    uint8_t* address = nullptr;
    uint64_t nbytes = 0;
    uint64_t seed = 0;
};

class RingReader {
   public:
    // Checks the header of `nbytes` of memory at `base`. Throws RingError(malformed).
    RingReader(void* base, uint64_t nbytes, uint32_t reader);

    // Takes the records of one update until the writer has finished it, and returns one digest per tensor
    // of what was copied (or, in a journal, of what lies in the arena and belongs to this reader's share).
    std::vector<Sums> follow(uint64_t update, const std::vector<Tensor>& tensors, bool digests,
                             const WaitLimits& limits);

    bool carries_bytes() const { return carries_bytes_; }

   private:
    struct Record {
        RecordHeader header;
        uint64_t nbytes;  // in the ring, from its header to the next one
        const uint8_t* payload;
    };

    // How an update stands at this moment; throws where it has been aborted or is not the one followed.
    Status status(uint64_t update) const;
    uint64_t head() const;
    std::optional<uint64_t> wait_for_records(uint64_t update, const WaitLimits& limits);
    Record checked_record(uint64_t head, const std::vector<Tensor>& tensors) const;
    void advance(uint64_t nbytes);
    void wake_writer();

    RingMap map_;
    const uint32_t reader_;
    uint32_t readers_;
    uint64_t capacity_;
    bool carries_bytes_;
    const Kernels kernels_;
    uint64_t tail_ = 0;
};

}  // namespace weightsync
