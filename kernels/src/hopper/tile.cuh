// Sizes of the core for sm_90a: tile, stages, shared memory, registers (core.cuh says what they are
// for).
//
// Definitions: TW_HG_N columns of a tile (a multiple of 64 where B is MN-major), TW_HG_STAGES,
// TW_HG_F16 for f16 operands, TW_HG_A_MN and TW_HG_B_MN for operands whose rows are indices of k,
// TW_HG_OUT type of D (0 bf16, 1 f16, 2 f32), TW_HG_EPI the epilogue (epilogue.cuh).

#pragma once

#ifndef TW_HG_N
#define TW_HG_N 256
#endif
#ifndef TW_HG_STAGES
#define TW_HG_STAGES 4
#endif
#ifndef TW_HG_F16
#define TW_HG_F16 0
#endif
#ifndef TW_HG_OUT
#define TW_HG_OUT 0
#endif
#ifndef TW_HG_A_MN
#define TW_HG_A_MN 0
#endif
#ifndef TW_HG_B_MN
#define TW_HG_B_MN 0
#endif
#ifndef TW_HG_EPI
#define TW_HG_EPI 0
#endif

typedef unsigned char u8;
typedef unsigned int u32;

enum : u32 {
    TW_HG_M = 128,
    TW_HG_K = 64,
    TW_HG_THREADS = 384,
    TW_HG_A_BYTES = TW_HG_M * TW_HG_K * 2,
    TW_HG_B_BYTES = TW_HG_N * TW_HG_K * 2,
    // Tiles of 16 rows x 64 columns, or boxes of f32 for L2, through which 8 warps store D.
    TW_HG_BUFFERS = 2,
    TW_HG_BUFFER_BYTES = 16 * 64 * 2,
    TW_HG_AT_B = TW_HG_STAGES * TW_HG_A_BYTES,
    TW_HG_AT_D = TW_HG_AT_B + TW_HG_STAGES * TW_HG_B_BYTES,
    TW_HG_AT_BARRIERS = TW_HG_AT_D + 8 * TW_HG_BUFFERS * TW_HG_BUFFER_BYTES,
    // Barriers: two for each stage, and two and a word for the numbers of tiles.
    TW_HG_BYTES = TW_HG_AT_BARRIERS + 16 * TW_HG_STAGES + 32,
    // What a tile is added to, by map: boxes of 16 rows x 32 columns of f32. A stage has TW_HG_SUMS
    // for each of 8 warps. A tile has two such stages; one if its product has TW_HG_LONG or more.
    TW_HG_SUMS_BYTES = 16 * 32 * 4,
    TW_HG_SUMS = (TW_HG_A_BYTES + TW_HG_B_BYTES) / (8 * TW_HG_SUMS_BYTES),
    TW_HG_LONG = 32,
    // Steps before the end of a tile's loads at which what its epilogue reads is brought to L2.
    TW_HG_AHEAD = 8,
    // Columns of a tile whose sums are stored first: whole chunks of 64.
    TW_HG_FIRST = TW_HG_N > 256 ? 192 : TW_HG_N > 128 ? 128 : 64,
    // Stages at either end of a tile whose products are made in two passes, of these columns and of
    // the others.
    TW_HG_SEAM = TW_HG_STAGES / 2,
    // Registers of a thread that loads, and of one that multiplies: 128 of 56 and 256 of 224 are
    // what 384 threads of 168 begin with. With 40 and 232 some widths spill.
    TW_HG_LOAD_REGISTERS = 56,
    TW_HG_MULTIPLY_REGISTERS = 224,
};
static_assert(TW_HG_N % 32 == 0 && TW_HG_BYTES <= 232448, "a tile, and shared memory");

extern __shared__ __align__(1024) unsigned char tw_smem[];
