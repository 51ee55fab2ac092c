// Words with keys of their own: what short runs and scattered elements of a tensor are digested through.
//
// A span's words have consecutive keys, and its kernel needs a few hundred bytes before it pays. Elements
// that lie apart in the whole tensor have neither. Their words are gathered into a small buffer beside
// their keys' counters, from however many places, and digested a full buffer at a time. An element shorter
// than a word is a word whose other bytes are zero: by linearity the sums are the same.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.hpp"

namespace weightsync {

// Words that an arithmetic progression of addresses and word indices leads to. Word k is made of `lanes`
// units; unit l of it lies at source + k * step + l * lane_step and stands `shift` bits + l units from the
// word's low end. All of them fit into the word.
struct Progression {
    const uint8_t* source = nullptr;
    int64_t step = 0;
    unsigned lanes = 1;
    int64_t lane_step = 0;
    unsigned shift = 0;
    uint64_t counter = 0;  // word index + seed of the first word
    uint64_t counter_step = 0;
};

// Elements, each inside a word but not all at the same place in it.
struct Elements {
    const uint8_t* source = nullptr;
    int64_t step = 0;         // bytes of memory from one to the next
    uint64_t start = 0;       // byte offset of the first in the whole, a multiple of its size
    uint64_t whole_step = 0;  // bytes of the whole from one to the next
    uint64_t seed = 0;
};

using KeyedKernel = void (*)(Sums&, const uint64_t* words, const uint64_t* counters, size_t count);
using PackKernel = void (*)(uint64_t* words, uint64_t* counters, const Progression&, size_t count);
using ScatterKernel = void (*)(uint64_t* words, uint64_t* counters, const Elements&, size_t count);

// The kernels of one instruction set, chosen once per table.
struct WordKernels {
    KeyedKernel digest;
    PackKernel pack[4];        // by unit: 1, 2, 4, 8 bytes
    ScatterKernel scatter[3];  // by unit: 1, 2, 4 bytes
    explicit WordKernels(Isa isa);
};

// Words on their way into one digest. What is still here is added by `flush`.
class WordBuffer {
  public:
    WordBuffer(Sums& sums, const WordKernels& kernels) : sums_(sums), kernels_(kernels) {}
    WordBuffer(const WordBuffer&) = delete;
    WordBuffer& operator=(const WordBuffer&) = delete;

    // The longest run that `add_run` takes.
    static constexpr uint64_t kLongestRun = 1024;

    // Consecutive bytes of the whole, from its byte `start`.
    void add_run(const uint8_t* source, uint64_t nbytes, uint64_t start, uint64_t seed);

    // `count` words of units of 1 << unit_log2 bytes.
    void add_progression(Progression words, unsigned unit_log2, uint64_t count);

    // `count` elements of 1 << unit_log2 bytes, shorter than a word.
    void add_elements(Elements elements, unsigned unit_log2, uint64_t count);

    void flush();

  private:
    static constexpr size_t kCapacity = 512;
    // While a full buffer is digested nothing is read: memory is kept busy by prefetching, as far ahead as
    // the lines of one buffer, a few lines at a time.
    static constexpr size_t kChunk = 128;
    static constexpr size_t kPrefetchBytes = 8192;

    void put(uint64_t word, uint64_t counter) {
        words_[count_] = word;
        counters_[count_] = counter;
        ++count_;
    }

    Sums& sums_;
    const WordKernels& kernels_;
    size_t count_ = 0;
    alignas(64) uint64_t words_[kCapacity];
    alignas(64) uint64_t counters_[kCapacity];
};

}  // namespace weightsync
