// Runs csrc/digest_kernel.h, the text of the CUDA kernel, on a simulated grid: every thread is a fiber, and
// blocks, and the threads between two barriers, run in random order. Loads that hardware would refuse, or
// that reach outside the memory they are allowed, are errors and not reads.
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "digest_kernel.h"

namespace {

enum Fault : int { kNone = 0, kMisaligned = 1, kOutside = 2, kStuck = 3 };

constexpr std::size_t kStackBytes = 64 * 1024;

// A barrier for a fixed number of fibers, which yield until the last one has come.
struct Meeting {
    uint32_t expected = 0, arrived = 0, generation = 0;
};

class Block {
public:
    Block(uint32_t block, uint32_t blocks, uint32_t threads, uint64_t low, uint64_t high)
        : block_(block), blocks_(blocks), threads_(threads), low_(low), high_(high) {
        slots_.resize(threads);
        shared_.resize(2 * threads / weightsync::kWarp);
        warps_.resize(threads / weightsync::kWarp);
        for (Meeting& warp : warps_) warp.expected = weightsync::kWarp;
        all_.expected = threads;
    }

    Fault run(const weightsync::Region* regions, const weightsync::Chunk* chunks, uint64_t n_chunks,
              uint64_t* out, std::mt19937_64& random);

    void wait(Meeting& meeting) {
        const uint32_t generation = meeting.generation;
        if (++meeting.arrived == meeting.expected) {
            meeting.arrived = 0;
            ++meeting.generation;
        } else {
            while (meeting.generation == generation) swapcontext(&fibers_[current_], &scheduler_);
        }
    }

    uint32_t block_, blocks_, threads_;
    uint64_t low_, high_;
    Fault fault_ = kNone;
    std::vector<uint64_t> slots_, shared_;
    std::vector<Meeting> warps_;
    Meeting all_;
    std::vector<ucontext_t> fibers_;
    ucontext_t scheduler_;
    uint32_t current_ = 0;
    std::vector<char> done_;
    struct {
        const weightsync::Region* regions;
        const weightsync::Chunk* chunks;
        uint64_t n_chunks;
        uint64_t* out;
    } arguments_;
};

struct SimulatedGrid {
    Block& home;
    uint32_t index;

    uint32_t block() const { return home.block_; }
    uint32_t blocks() const { return home.blocks_; }
    uint32_t thread() const { return index; }
    uint32_t threads() const { return home.threads_; }
    uint64_t* shared() { return home.shared_.data(); }
    void barrier() { home.wait(home.all_); }

    uint64_t shuffle_xor(uint64_t value, uint32_t mask) {
        Meeting& warp = home.warps_[index / weightsync::kWarp];
        home.slots_[index] = value;
        home.wait(warp);
        const uint64_t other = home.slots_[index ^ mask];
        home.wait(warp);  // nobody overwrites a slot before its reader has come
        return other;
    }

    template <class T>
    void load(uint64_t address, T& value) {
        value = T{};
        if (address % sizeof(T) != 0)
            home.fault_ = kMisaligned;
        else if (address < home.low_ || address + sizeof(T) > home.high_)
            home.fault_ = kOutside;
        else
            __builtin_memcpy(&value, reinterpret_cast<const void*>(address), sizeof(T));
    }

    void atomic_add(uint64_t* address, uint64_t value) { *address += value; }
};

thread_local Block* running = nullptr;

void enter() {
    Block& block = *running;
    const uint32_t thread = block.current_;
    SimulatedGrid grid{block, thread};
    const auto& a = block.arguments_;
    weightsync::digest_regions(grid, a.regions, a.chunks, a.n_chunks, a.out);
    block.done_[thread] = 1;
}

Fault Block::run(const weightsync::Region* regions, const weightsync::Chunk* chunks, uint64_t n_chunks,
                 uint64_t* out, std::mt19937_64& random) {
    arguments_ = {regions, chunks, n_chunks, out};
    fibers_.resize(threads_);
    done_.assign(threads_, 0);
    auto stacks = std::make_unique_for_overwrite<std::byte[]>(threads_ * kStackBytes);
    for (uint32_t i = 0; i < threads_; ++i) {
        getcontext(&fibers_[i]);
        fibers_[i].uc_stack.ss_sp = stacks.get() + i * kStackBytes;
        fibers_[i].uc_stack.ss_size = kStackBytes;
        fibers_[i].uc_link = &scheduler_;
        makecontext(&fibers_[i], enter, 0);
    }
    running = this;
    std::vector<uint32_t> order(threads_);
    std::iota(order.begin(), order.end(), 0u);
    // Warps stand still for a while now and then, so that others overtake them as far as barriers allow.
    std::vector<uint64_t> awake(warps_.size());
    // Every round takes warps that are awake a barrier further, unless threads wait for ever.
    const uint64_t rounds = 10000 * (1 + n_chunks);
    for (uint64_t round = 0; round < rounds; ++round) {
        std::shuffle(order.begin(), order.end(), random);
        for (uint64_t& until : awake)
            if (until <= round && random() % 16 == 0) until = round + random() % 64;
        bool left = false;
        for (uint32_t i : order) {
            if (done_[i]) continue;
            left = true;
            if (awake[i / weightsync::kWarp] > round) continue;
            current_ = i;
            swapcontext(&scheduler_, &fibers_[i]);
        }
        if (!left) return fault_;
    }
    return kStuck;
}

}  // namespace

// Adds to out, (n_out, 2). Loads are allowed in [low, high). Returns a Fault.
extern "C" int simulate(const uint64_t* regions, const uint64_t* chunks, uint64_t n_chunks, uint64_t* out,
                        uint32_t blocks, uint32_t threads, uint64_t order, uint64_t low, uint64_t high) {
    std::mt19937_64 random(order);
    std::vector<uint32_t> sequence(blocks);
    std::iota(sequence.begin(), sequence.end(), 0u);
    std::shuffle(sequence.begin(), sequence.end(), random);
    for (uint32_t block : sequence) {
        Block simulated(block, blocks, threads, low, high);
        const Fault fault = simulated.run(reinterpret_cast<const weightsync::Region*>(regions),
                                          reinterpret_cast<const weightsync::Chunk*>(chunks), n_chunks, out,
                                          random);
        if (fault != kNone) return fault;
    }
    return kNone;
}
