#include <algorithm>
#include <new>
#include <string>

#include "ring.hpp"

namespace weightsync {

RingWriter::RingWriter(void* base, uint64_t nbytes, uint32_t readers, uint64_t capacity,
                       bool carries_bytes, uint64_t chunk)
    : map_(base, readers),
      readers_(readers),
      capacity_(capacity),
      carries_bytes_(carries_bytes),
      chunk_(chunk),
      kernels_(best_isa()),
      tails_(readers, 0) {
    const auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
    if (readers < 1 || readers > kMaxReaders)
        refuse("a ring has 1 to " + std::to_string(kMaxReaders) + " readers");
    if (capacity < kPageBytes || capacity % kPageBytes != 0)
        refuse("capacity must be a multiple of " + std::to_string(kPageBytes));
    if (chunk < kLineBytes || chunk % kLineBytes != 0)
        refuse("chunk must be a multiple of " + std::to_string(kLineBytes));
    // Room for the writer to work ahead of the readers, and for what is lost at the end of the ring.
    if (carries_bytes && chunk > capacity / 4) refuse("chunk must be a quarter of the capacity at most");
    if (nbytes != ring_bytes(readers, capacity)) refuse("the memory has another size than the ring");
    new (base) RingHeader{kRingMagic, kRingVersion, readers, capacity, carries_bytes ? 1u : 0u,
                          {0}, {pack_state(0, Status::finished)}, {0}, {0}, {0}};
    for (uint32_t i = 0; i < readers; ++i) new (&map_.readers[i]) ReaderLines{};
}

uint64_t RingWriter::begin(uint64_t tensors) {
    tensors_ = tensors;
    chunks_ = 0;
    stores_.begin();
    sums_.assign(shares() * tensors, Sums{});
    for (uint32_t i = 0; i < readers_; ++i) {
        tails_[i] = head_;
        map_.readers[i].wake_at.store(0);
        map_.readers[i].state.store(static_cast<uint32_t>(ReaderState::idle));
        map_.readers[i].tail.store(head_);
    }
    map_.header->space_at.store(0);
    map_.header->base.store(head_);
    map_.header->state.store(pack_state(++update_, Status::open));
    return update_;
}

void RingWriter::push(const std::vector<Span>& spans, bool digests, const WaitLimits& limits) {
    for (const Span& span : spans) {
        for (uint64_t done = 0; done < span.nbytes; done += chunk_) {
            Span part = span;
            part.source += done;
            part.start += done;
            part.nbytes = std::min(chunk_, span.nbytes - done);
            const uint32_t share = static_cast<uint32_t>(chunks_++ % shares());
            const uint64_t record = kLineBytes + (carries_bytes_ ? padded(part.nbytes) : 0);
            uint8_t* at = reserve(record, limits);
            Write write;
            if (carries_bytes_) {
                part.destination = at + kLineBytes;
                write = stores_.next(part.nbytes);
            } else {
                // The arena is too large for a cache.
                part.destination += done;
                write = streaming_write(part.nbytes);
            }
            if (digests) {
                Sums local;
                digest_span(local, part, kernels_, write);
                sums_[share * tensors_ + part.out] += local;
            } else {
                copy_span(part, write);
            }
            if (write == Write::streaming) finish_streaming();
            put_header(at, RecordKind::data, part, share);
            publish(record);
            if (carries_bytes_) stores_.wrote(part.nbytes);
        }
    }
    wake_readers(true);
}

// Where the next record of `nbytes` goes; records do not wrap.
uint8_t* RingWriter::reserve(uint64_t nbytes, const WaitLimits& limits) {
    const uint64_t to_end = capacity_ - head_ % capacity_;
    if (to_end < nbytes) {
        wait_for_space(to_end, limits);
        put_header(map_.data + head_ % capacity_, RecordKind::skip, Span{}, 0);
        publish(to_end);
    }
    wait_for_space(nbytes, limits);
    return map_.data + head_ % capacity_;
}

void RingWriter::put_header(uint8_t* at, RecordKind kind, const Span& part, uint32_t share) {
    new (at) RecordHeader{part.out, part.start, part.nbytes, share, static_cast<uint32_t>(kind), {}};
}

void RingWriter::publish(uint64_t nbytes) {
    head_ += nbytes;
    // Sequentially consistent, as all that follows: a reader stores `wake_at` and then looks at `head`;
    // the writer stores `head` and then looks at `wake_at`. One of the two sees the other.
    map_.header->head.store(head_, std::memory_order_seq_cst);
    wake_readers(false);
}

// Wakes the readers that have enough to read, or all that sleep.
void RingWriter::wake_readers(bool all) {
    for (uint32_t i = 0; i < readers_; ++i) {
        ReaderLines& reader = map_.readers[i];
        const uint64_t wake_at = reader.wake_at.load(std::memory_order_seq_cst);
        if (wake_at == 0 || (!all && head_ < wake_at)) continue;
        reader.wake_at.store(0, std::memory_order_seq_cst);
        wake(reader.wake_futex);
    }
}

size_t RingWriter::slowest_reader() {
    size_t slowest = 0;
    for (uint32_t i = 0; i < readers_; ++i) {
        const uint64_t tail = map_.readers[i].tail.load(std::memory_order_seq_cst);
        if (tail < tails_[i] || tail > head_ || tail % kLineBytes != 0)
            throw RingError(RingFault::malformed, i,
                            "it says that it has read up to byte " + std::to_string(tail) + ", but it was at " +
                                std::to_string(tails_[i]) + " and " + std::to_string(head_) +
                                " have been written");
        tails_[i] = tail;
        if (tail < tails_[slowest]) slowest = i;
    }
    return slowest;
}

void RingWriter::wait_for_space(uint64_t nbytes, const WaitLimits& limits) {
    RingHeader& header = *map_.header;
    const uint64_t needed = head_ + nbytes - std::min(head_ + nbytes, capacity_);  // tails must be here
    if (*std::min_element(tails_.begin(), tails_.end()) >= needed) return;
    while (true) {
        // Loaded before anything is looked at: whatever changes afterwards changes the word as well.
        const uint32_t seen = header.space_futex.load(std::memory_order_seq_cst);
        const size_t slowest = slowest_reader();
        if (tails_[slowest] >= needed) return;
        for (uint32_t i = 0; i < readers_; ++i)
            if (map_.readers[i].state.load() == static_cast<uint32_t>(ReaderState::left))
                throw RingError(RingFault::peer_left, i, "it stopped reading");
        if (expired(limits)) throw RingError(RingFault::deadline, slowest, "the ring is full");
        if (const auto lost = lost_peer(limits))
            throw RingError(RingFault::peer_lost, *lost, "its socket was hung up");
        // Once asleep, the writer sleeps until half the ring is free: a wake-up costs as much as copying
        // many kilobytes. A reader sleeps through a quarter of the ring at most, so that the two never
        // wait for each other.
        const uint64_t half_free = head_ - std::min(head_, capacity_ / 2);
        header.space_at.store(std::max({needed, half_free, uint64_t{1}}), std::memory_order_seq_cst);
        if (tails_[slowest_reader()] < needed) wait_slice(header.space_futex, seen, limits);
        header.space_at.store(0, std::memory_order_seq_cst);
    }
}

void RingWriter::end(Status status) {
    map_.header->state.store(pack_state(update_, status), std::memory_order_seq_cst);
    wake_readers(true);
}

}  // namespace weightsync
