/* Device functions that several kernels share: conversions, sums in a fixed order, the tensor-core step.
 *
 * The tensor-core step is mma.sync.m16n8k16 with fp32 sums. Where a weight meets rows of x, A holds 16 outputs of the
 * weight and B 8 rows of x. Lane L has g = L / 4, t = L % 4:
 *   A  registers (g, k), (g + 8, k), (g, k'), (g + 8, k') with k = 2t, 2t + 1 and k' = 2t + 8, 2t + 9
 *   B  registers k, k' of row g
 *   C  c0, c1 = output g, rows 2t, 2t + 1; c2, c3 = output g + 8
 * An element of C depends on its output's and its row's operands only, never on what the other rows hold. */
#ifndef TD_OPS_CUDA_DEVICE_H
#define TD_OPS_CUDA_DEVICE_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "base/num.h"
#include "ops/dev.h"
#include "ops/math.h"

#define TD_DEVICE __device__ __forceinline__

/* Waits for what earlier kernels wrote; only then may the next kernel be set up, so that never more than one waits.
 * Weights may be read before. What another kernel writes must not be read with __ldg(): the compiler takes such memory
 * for constant and moves the load up, before the wait. */
TD_DEVICE void td_begin()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

TD_DEVICE float td_load_bf16(const td_bf16 *p)
{
    return __uint_as_float((uint32_t)*p << 16);
}

TD_DEVICE td_bf16 td_to_bf16(float x)
{
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

/* What a store and a load make of x. */
TD_DEVICE float td_round_bf16(float x)
{
    return __uint_as_float((uint32_t)td_to_bf16(x) << 16);
}

/* Order of floats as order of integers from 1 on: +0 and -0 are one value, NaN is 0, below all. */
TD_DEVICE uint32_t td_rank_of(float x)
{
    if (x != x) return 0;
    uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

TD_DEVICE uint32_t td_pack_bf16(float low, float high)
{
    return (uint32_t)td_to_bf16(low) | (uint32_t)td_to_bf16(high) << 16;
}

TD_DEVICE float td_low_bf16(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

TD_DEVICE float td_high_bf16(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

/* (x & mask) ^ flip and (x & mask) | bits in one instruction each, which the compiler does not find for constants. */
TD_DEVICE uint32_t td_and_xor(uint32_t x, uint32_t mask, uint32_t flip)
{
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "r"(mask), "r"(flip));
    return y;
}

TD_DEVICE uint32_t td_and_or(uint32_t x, uint32_t mask, uint32_t bits)
{
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
    return y;
}

/* Sum over the warp: lane l with l ^ 16, then ^ 8, .. ^ 1; every lane has the result. */
TD_DEVICE float td_warp_sum(float x)
{
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/* v[0] of lane u becomes the sum over the lanes of v[u], u < N: the tree of td_warp_sum(), in which half of the lanes go
 * on with one half of the values. N: at most 32. */
template <int N, int STEP = 16> TD_DEVICE void td_warp_sums(float v[N])
{
    bool high = threadIdx.x & STEP;
#pragma unroll
    for (int u = 0; u < STEP; u++) {
        if (u + STEP < N) {
            float keep = high ? v[u + STEP] : v[u], give = high ? v[u] : v[u + STEP];
            v[u] = keep + __shfl_xor_sync(0xffffffffu, give, STEP);
        } else {
            v[u] += __shfl_xor_sync(0xffffffffu, v[u], STEP);
        }
    }
    if constexpr (STEP > 1) td_warp_sums<N, STEP / 2>(v);
}

TD_DEVICE float td_warp_max(float x)
{
#pragma unroll
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

/* Sum over a block of n_warps warps: warps first, then their sums ascending. scratch: [n_warps + 1]. */
TD_DEVICE float td_block_sum(float x, int n_warps, float *scratch)
{
    x = td_warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (int w = 0; w < n_warps; w++) sum += scratch[w];
    return sum;
}

/* Sum over the threads of a block before this one, of whole warps, 32 at most; *all is the sum over all of them. Two
 * 16-bit numbers may be packed. scratch: [32]. */
TD_DEVICE uint32_t td_block_before(uint32_t x, uint32_t *scratch, uint32_t *all)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t sum = x;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        uint32_t other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    uint32_t of_warp = lane < (int)blockDim.x / 32 ? scratch[lane] : 0;
    *all = __reduce_add_sync(0xffffffffu, of_warp);
    return sum - x + __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0);
}

/* Adds n arrivals of a block to a counter; true for those that make it `all`, and the counter is zero again. What the
 * blocks stored before a barrier and this call is seen, past another barrier, by the block that arrives last. */
TD_DEVICE bool td_arrives_last(uint32_t *counter, uint32_t n, uint32_t all)
{
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(n) : "memory");
    if (before + n != all) return false;
    *counter = 0;
    return true;
}

TD_DEVICE void td_mma_bf16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

TD_DEVICE void td_mma_f16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* An address in shared memory as a number, and loads from one: it takes one register, and may be exclusive-ored. */
TD_DEVICE uint32_t td_shared_at(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

TD_DEVICE uint4 td_load_shared16(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

TD_DEVICE uint2 td_load_shared8(uint32_t at)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}

/* Four 8 x 8 blocks of 16-bit values, register i of lane l: the pair l % 4 of row l / 4 of block i; lane l gives the
 * address of row l % 8 of block l / 8. */
TD_DEVICE void td_ldmatrix(uint32_t r[4], const void *shared)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(td_shared_at(shared))
                 : "memory");
}

/* 16 bytes of weights: read once, kept out of L1. */
TD_DEVICE uint4 td_load_stream(const void *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

/* 16 and 8 bytes of weights that are to be on their way before td_begin(). Not read-only loads: those may be moved, and
 * were, behind the wait and between the products that they should go ahead of. */
TD_DEVICE uint4 td_load_early16(const void *p)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

TD_DEVICE uint2 td_load_early8(const void *p)
{
    uint2 v;
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}

/* Asks for the line at p, into L2; nobody waits for it. */
TD_DEVICE void td_prefetch(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* 16 bytes from global to shared memory without registers; zeros when !valid (nothing is read then). */
TD_DEVICE void td_copy_async(void *shared, const void *global, bool valid)
{
    uint32_t n = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(td_shared_at(shared)), "l"(global), "r"(n)
                 : "memory");
}

TD_DEVICE void td_copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING> TD_DEVICE void td_copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Two bytes of e4m3 in the high halves of two 16-bit lanes -> bf16 values; the NaN code is not one here. */
TD_DEVICE uint32_t td_e4m3_pair(uint32_t lanes)
{
    uint32_t small = td_and_or(lanes, 0x80008000u, lanes >> 4 & 0x07f007f0u); /* value * 2^-120 */
    __nv_bfloat162 v = *(__nv_bfloat162 *)&small;
    __nv_bfloat162 up = __halves2bfloat162(__ushort_as_bfloat16(0x7b80), __ushort_as_bfloat16(0x7b80)); /* 2^120 */
    v = __hmul2(v, up);
    return *(uint32_t *)&v;
}

#endif
