// What lies in the shared memory of a ring: one header, one pair of lines per reader, then the records.
//
//     0                RingHeader
//     kReadersOffset   ReaderLines[readers]
//     data_offset()    capacity bytes of records, at position modulo capacity
//
// A position is a number of bytes since the ring was made. Positions only grow, from update to update, so
// that a reader which still follows an update long given up can be told from one that keeps pace.
//
// Every field has one writer, except where it says otherwise. Nobody trusts what the other side wrote:
// fields are read into locals once and checked before they are used.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace weightsync {

constexpr uint64_t kRingMagic = 0x31474e4952535457ULL;  // "WTSRING1"
constexpr uint32_t kRingVersion = 1;
constexpr uint32_t kMaxReaders = 1024;
constexpr uint64_t kLineBytes = 64;
constexpr uint64_t kPageBytes = 4096;

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "atomics are shared between processes");

// What the writer says of an update; `update` counts them.
enum class Status : uint8_t { open = 0, finished = 1, aborted = 2 };

constexpr uint64_t pack_state(uint64_t update, Status status) {
    return update << 8 | static_cast<uint64_t>(status);
}

struct RingHeader {
    uint64_t magic;
    uint32_t version;
    uint32_t readers;
    uint64_t capacity;
    uint64_t carries_bytes;
    // Number and status in one word: never seen apart.
    alignas(kLineBytes) std::atomic<uint64_t> head;  // bytes published
    std::atomic<uint64_t> state;                     // pack_state(update, status)
    std::atomic<uint64_t> base;                      // head when the update began
    // The writer waits here until every reader has passed `space_at`; 0 while it does not wait. Cleared
    // by the reader that wakes it.
    alignas(kLineBytes) std::atomic<uint64_t> space_at;
    std::atomic<uint32_t> space_futex;  // bumped by readers
};

enum class ReaderState : uint32_t { idle = 0, following = 1, left = 2 };

struct ReaderLines {
    // Written by the reader. The writer clears `wake_at` when it wakes the reader, and sets all of them
    // when an update begins, while readers are at rest.
    alignas(kLineBytes) std::atomic<uint64_t> tail;  // bytes passed
    std::atomic<uint64_t> wake_at;                   // wake me when head is here; 0: I am awake
    std::atomic<uint32_t> state;                     // ReaderState
    // Written by the writer.
    alignas(kLineBytes) std::atomic<uint32_t> wake_futex;
};

enum class RecordKind : uint32_t {
    data = 1,
    skip = 2  // nothing more up to the end of the ring: records do not wrap
};

// Followed, where the ring carries bytes, by `nbytes` of payload, padded to a line.
struct RecordHeader {
    uint64_t tensor;
    uint64_t start;  // offset of the first byte in the tensor
    uint64_t nbytes;
    uint32_t share;
    uint32_t kind;
    uint64_t unused[4];
};

static_assert(sizeof(RingHeader) == 3 * kLineBytes);
static_assert(sizeof(ReaderLines) == 2 * kLineBytes);
static_assert(sizeof(RecordHeader) == kLineBytes);

constexpr uint64_t kReadersOffset = sizeof(RingHeader);

constexpr uint64_t padded(uint64_t nbytes, uint64_t unit = kLineBytes) {
    return (nbytes + unit - 1) / unit * unit;
}

constexpr uint64_t data_offset(uint32_t readers) {
    return padded(kReadersOffset + readers * sizeof(ReaderLines), kPageBytes);
}

constexpr uint64_t ring_bytes(uint32_t readers, uint64_t capacity) {
    return data_offset(readers) + capacity;
}

// Both sides' view of a mapped ring. `base` must be aligned to a page.
struct RingMap {
    RingHeader* header;
    ReaderLines* readers;
    uint8_t* data;

    RingMap(void* base, uint32_t n_readers)
        : header(static_cast<RingHeader*>(base)),
          readers(reinterpret_cast<ReaderLines*>(static_cast<uint8_t*>(base) + kReadersOffset)),
          data(static_cast<uint8_t*>(base) + data_offset(n_readers)) {}
};

}  // namespace weightsync
