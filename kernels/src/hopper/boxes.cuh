// Where boxes are loaded from and stored to, matrices behind tensor maps, by column and row: of 64
// columns of 16 bits, or 16 rows x 32 columns of f32.

#pragma once

#include "../ptx/tensor.cuh"

// One of the matrices of a map of rank 3.
struct TwPlane {
    const TwTensorMap* map;
    u32 z;

    __device__ __forceinline__ void load(void* to, u64* bar, u32 x, u32 y) const {
        tensor_load_3d(to, map, bar, (int)x, (int)y, (int)z);
    }
    __device__ __forceinline__ void multicast(void* to, u64* bar, u32 x, u32 y) const {
        tensor_load_3d_multicast(to, map, bar, (int)x, (int)y, (int)z, 3);
    }
    __device__ __forceinline__ void store(const void* from, u32 x, u32 y, u32 half) const {
        tensor_store_3d(map, from, (int)x, (int)y, (int)(z + half));
    }
};

// The rows before `end` of a ragged map (TensorMapDesc::ragged of the device crate): those of a
// group. Rows count from the first of all groups; from `end` on they read as zeros and are not
// written.
struct TwRagged {
    const TwTensorMap* map;
    u32 end;

    enum : int { LIMIT = 1 << 30 };

    __device__ __forceinline__ int row(u32 y) const {
        return LIMIT + (int)y - (int)end;
    }
    __device__ __forceinline__ void load(void* to, u64* bar, u32 x, u32 y) const {
        tensor_load_4d(to, map, bar, (int)x, row(y), (int)end, LIMIT);
    }
    __device__ __forceinline__ void multicast(void* to, u64* bar, u32 x, u32 y) const {
        tensor_load_4d_multicast(to, map, bar, (int)x, row(y), (int)end, LIMIT, 3);
    }
    __device__ __forceinline__ void store(const void* from, u32 x, u32 y, u32) const {
        tensor_store_4d(map, from, (int)x, row(y), (int)end, LIMIT);
    }
};

// Boxes of 16 rows x 32 columns of f32. The map has rank 4: columns; rows 0 and 4 of four each;
// these four; eights of rows. So row 8 a + 4 b + c of a box is row 8 a + 2 c + b in shared memory,
// and the swizzle of 128 bytes puts what a half of a warp reads at once, 32 bytes of each of four
// rows, into banks of their own. Rows of a matrix are a multiple of 16, and it begins at one of
// `eights`.
struct TwSumRows {
    const TwTensorMap* map;
    u32 eights;

    __device__ __forceinline__ void load(void* to, u64* bar, u32 x, u32 y) const {
        tensor_load_4d(to, map, bar, (int)x, 0, 0, (int)(eights + y / 8));
    }
    __device__ __forceinline__ void store(const void* from, u32 x, u32 y) const {
        tensor_store_4d(map, from, (int)x, 0, 0, (int)(eights + y / 8));
    }
    __device__ __forceinline__ void add(const void* from, u32 x, u32 y) const {
        tensor_reduce_add_4d(map, from, (int)x, 0, 0, (int)(eights + y / 8));
    }
};
