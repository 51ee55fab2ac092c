#include <algorithm>
#include <string>

#include "ring.hpp"

namespace weightsync {
namespace {

// A reader that has gone to sleep is woken when so much has been published, or when the writer pauses.
constexpr uint64_t kWakeBytes = uint64_t{1} << 20;  // of a ring that carries bytes
constexpr uint64_t kWakeRecords = 16;               // of a journal
constexpr uint64_t kStreamingTotalBytes = uint64_t{8} << 20;  // tensors smaller than that stay in cache

[[noreturn]] void malformed(const std::string& detail) {
    throw RingError(RingFault::malformed, 0, detail);
}

uint64_t load(const uint64_t& field) { return __atomic_load_n(&field, __ATOMIC_RELAXED); }
uint32_t load(const uint32_t& field) { return __atomic_load_n(&field, __ATOMIC_RELAXED); }

}  // namespace

RingReader::RingReader(void* base, uint64_t nbytes, uint32_t reader)
    : map_(base, 1), reader_(reader), kernels_(best_isa()) {
    if (nbytes < ring_bytes(1, kPageBytes)) malformed("the memory is too small for a ring");
    const RingHeader& header = *map_.header;
    const uint64_t magic = load(header.magic);
    const uint32_t version = load(header.version);
    if (magic != kRingMagic || version != kRingVersion)
        malformed("the memory is no ring of version " + std::to_string(kRingVersion));
    readers_ = load(header.readers);
    capacity_ = load(header.capacity);
    carries_bytes_ = load(header.carries_bytes) != 0;
    if (readers_ < 1 || readers_ > kMaxReaders || reader >= readers_)
        malformed("reader " + std::to_string(reader) + " of " + std::to_string(readers_));
    if (capacity_ < kPageBytes || capacity_ % kPageBytes != 0 || capacity_ > nbytes ||
        ring_bytes(readers_, capacity_) != nbytes)
        malformed("a ring of " + std::to_string(readers_) + " readers and " + std::to_string(capacity_) +
                  " bytes does not fill " + std::to_string(nbytes) + " bytes of memory");
    map_ = RingMap(base, readers_);
}

std::vector<Sums> RingReader::follow(uint64_t update, const std::vector<Tensor>& tensors, bool digests,
                                     const WaitLimits& limits) {
    ReaderLines& mine = map_.readers[reader_];
    try {
        status(update);
        tail_ = map_.header->base.load(std::memory_order_seq_cst);
        if (tail_ % kLineBytes != 0) malformed("it began at byte " + std::to_string(tail_));
        mine.state.store(static_cast<uint32_t>(ReaderState::following));
        uint64_t total = 0;
        for (const Tensor& tensor : tensors) total += tensor.nbytes;
        const bool streams = total >= kStreamingTotalBytes;
        std::vector<Sums> sums(tensors.size());
        while (const auto published = wait_for_records(update, limits)) {
            while (tail_ < *published) {
                status(update);
                const Record record = checked_record(*published, tensors);
                const bool skipped = record.header.kind == static_cast<uint32_t>(RecordKind::skip);
                if (!skipped && (carries_bytes_ || record.header.share == reader_)) {
                    const Tensor& tensor = tensors[record.header.tensor];
                    uint8_t* place = tensor.address + record.header.start;
                    const Span span{carries_bytes_ ? record.payload : place,
                                    carries_bytes_ ? place : nullptr,
                                    record.header.nbytes,
                                    record.header.start,
                                    tensor.seed,
                                    record.header.tensor};
                    Write write = Write::none;
                    if (carries_bytes_) write = streams ? streaming_write(span.nbytes) : Write::cached;
                    if (digests) {
                        Sums local;
                        digest_span(local, span, kernels_, write);
                        sums[span.out] += local;
                    } else if (carries_bytes_) {
                        copy_span(span, write);
                    }
                }
                advance(record.nbytes);
            }
        }
        finish_streaming();
        mine.state.store(static_cast<uint32_t>(ReaderState::idle));
        return sums;
    } catch (...) {
        finish_streaming();
        mine.state.store(static_cast<uint32_t>(ReaderState::left), std::memory_order_seq_cst);
        map_.header->space_at.store(0, std::memory_order_seq_cst);
        wake(map_.header->space_futex);
        throw;
    }
}

Status RingReader::status(uint64_t update) const {
    const uint64_t state = map_.header->state.load(std::memory_order_seq_cst);
    if (state >> 8 != update)
        malformed("the ring is at update " + std::to_string(state >> 8) + ", not " +
                  std::to_string(update));
    switch (static_cast<Status>(state & 0xff)) {
        case Status::open: return Status::open;
        case Status::finished: return Status::finished;
        case Status::aborted: throw RingError(RingFault::aborted, 0, "the writer gave the update up");
    }
    malformed("the update is in state " + std::to_string(state & 0xff));
}

uint64_t RingReader::head() const {
    const uint64_t head = map_.header->head.load(std::memory_order_seq_cst);
    if (head < tail_ || head - tail_ > capacity_ || head % kLineBytes != 0)
        malformed("it says that it has written up to byte " + std::to_string(head) +
                  ", but this reader is at " + std::to_string(tail_) + " in a ring of " +
                  std::to_string(capacity_) + " bytes");
    return head;
}

// How far the ring may be read, always further than it has been; nothing once the update is finished.
std::optional<uint64_t> RingReader::wait_for_records(uint64_t update, const WaitLimits& limits) {
    ReaderLines& mine = map_.readers[reader_];
    const uint64_t enough = std::min(capacity_ / 4, carries_bytes_ ? kWakeBytes : kWakeRecords * kLineBytes);
    bool hung_up = false;
    while (true) {
        // Loaded before anything is looked at: whatever changes afterwards changes the word as well.
        const uint32_t seen = mine.wake_futex.load(std::memory_order_seq_cst);
        // In this order: after the end nothing is published any more.
        const Status now = status(update);
        const uint64_t published = head();
        if (now == Status::finished && published == tail_) return std::nullopt;
        // Also while there is something to read: a writer that never ends must not keep us for ever.
        if (expired(limits)) throw RingError(RingFault::deadline, 0, "the update has not ended");
        if (published > tail_) return published;
        // A writer may finish and end at once; so what it left is looked at after the hang-up was seen.
        if (hung_up) throw RingError(RingFault::peer_lost, 0, "its socket was hung up");
        hung_up = lost_peer(limits).has_value();
        if (hung_up) continue;
        mine.wake_at.store(tail_ + enough, std::memory_order_seq_cst);
        if (status(update) == Status::open && head() == tail_) wait_slice(mine.wake_futex, seen, limits);
        mine.wake_at.store(0, std::memory_order_seq_cst);
    }
}

RingReader::Record RingReader::checked_record(uint64_t head, const std::vector<Tensor>& tensors) const {
    const uint64_t offset = tail_ % capacity_;
    const auto* shared = reinterpret_cast<const RecordHeader*>(map_.data + offset);
    const uint64_t available = std::min(head - tail_, capacity_ - offset);
    Record record{{load(shared->tensor), load(shared->start), load(shared->nbytes), load(shared->share),
                   load(shared->kind), {}},
                  kLineBytes,
                  map_.data + offset + kLineBytes};
    const RecordHeader& header = record.header;
    const auto refuse = [&](const std::string& what) {
        malformed("record at byte " + std::to_string(tail_) + ": " + what);
    };
    if (header.kind == static_cast<uint32_t>(RecordKind::skip)) {
        record.nbytes = capacity_ - offset;
        if (record.nbytes > available) refuse("skips bytes that have not been written");
        return record;
    }
    if (header.kind != static_cast<uint32_t>(RecordKind::data))
        refuse("of kind " + std::to_string(header.kind));
    if (header.share >= (carries_bytes_ ? 1 : readers_))
        refuse("of share " + std::to_string(header.share));
    if (header.tensor >= tensors.size())
        refuse("of tensor " + std::to_string(header.tensor) + ", there are " +
               std::to_string(tensors.size()));
    const uint64_t size = tensors[header.tensor].nbytes;
    if (header.nbytes > size || header.start > size - header.nbytes)
        refuse(std::to_string(header.nbytes) + " bytes from byte " + std::to_string(header.start) +
               " of tensor " + std::to_string(header.tensor) + ", which has " + std::to_string(size));
    if (carries_bytes_) {
        if (header.nbytes > available - kLineBytes || padded(header.nbytes) > available - kLineBytes)
            refuse("carries " + std::to_string(header.nbytes) + " bytes, " +
                   std::to_string(available - kLineBytes) + " are there");
        record.nbytes += padded(header.nbytes);
    }
    return record;
}

void RingReader::advance(uint64_t nbytes) {
    tail_ += nbytes;
    // Sequentially consistent for the same reason as the writer's `head`; and of two readers that pass at
    // once, at least one sees both tails.
    map_.readers[reader_].tail.store(tail_, std::memory_order_seq_cst);
    wake_writer();
}

// Wakes the writer if it waits and the slowest reader has come far enough.
void RingReader::wake_writer() {
    uint64_t space_at = map_.header->space_at.load(std::memory_order_seq_cst);
    if (space_at == 0) return;
    for (uint32_t i = 0; i < readers_; ++i)
        if (map_.readers[i].tail.load(std::memory_order_seq_cst) < space_at) return;
    if (map_.header->space_at.compare_exchange_strong(space_at, 0)) wake(map_.header->space_futex);
}

}  // namespace weightsync
