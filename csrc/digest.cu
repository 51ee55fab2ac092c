// The digest on CUDA devices: the grid of digest_kernel.h as the hardware has it. Compiled at first use, on
// the machine that runs it (weightsync/device/), by a compiler that has no headers but the ones it is given.
#include "digest_kernel.h"

namespace {

struct DeviceGrid {
    uint64_t* shared_words;

    __device__ __forceinline__ uint32_t block() const { return blockIdx.x; }
    __device__ __forceinline__ uint32_t blocks() const { return gridDim.x; }
    __device__ __forceinline__ uint32_t thread() const { return threadIdx.x; }
    __device__ __forceinline__ uint32_t threads() const { return blockDim.x; }
    __device__ __forceinline__ uint64_t* shared() const { return shared_words; }
    __device__ __forceinline__ void barrier() const { __syncthreads(); }

    template <class T>
    __device__ __forceinline__ void load(uint64_t address, T& value) const {
        value = *reinterpret_cast<const T*>(address);
    }

    __device__ __forceinline__ void load(uint64_t address, weightsync::Vector& value) const {
        // As one 16-byte load, which a structure of two words is not promised to be.
        const ulonglong2 both = *reinterpret_cast<const ulonglong2*>(address);
        value.low = both.x;
        value.high = both.y;
    }

    __device__ __forceinline__ uint64_t shuffle_xor(uint64_t value, uint32_t mask) const {
        return __shfl_xor_sync(0xffffffffu, static_cast<unsigned long long>(value), static_cast<int>(mask));
    }

    __device__ __forceinline__ void atomic_add(uint64_t* address, uint64_t value) const {
        atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
    }
};

}  // namespace

// Blocks of 256 threads; 64 registers each, so that four blocks share a multiprocessor.
extern "C" __global__ void __launch_bounds__(256, 4)
    weightsync_digest_regions(const weightsync::Region* regions, const weightsync::Chunk* chunks,
                              uint64_t n_chunks, uint64_t* out) {
    __shared__ uint64_t shared_words[2 * 256 / weightsync::kWarp];
    DeviceGrid grid{shared_words};
    weightsync::digest_regions(grid, regions, chunks, n_chunks, out);
}
