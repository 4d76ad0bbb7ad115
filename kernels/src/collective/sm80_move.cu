// Copies of many memory segments: pushes into peers' memory, and copies of received data to
// outputs.
//
// Segment i is `len[i]` bytes from src[i] to dst[i]; segments do not overlap. Any alignment;
// fastest where both addresses are multiples of 16. Launch: grid (any, number of segments), blocks
// of TW_MOVE_THREADS, no dynamic shared memory.
//
// Destinations may be on other devices: the kernel writes them by plain stores, which a kernel of
// comm/signal.cu behind this one publishes. Sources are local, because each remote load would take
// a round trip.

#include "../common/convert.cuh"

struct TwMoves {
    u64 src[64], dst[64], len[64];
};

struct __align__(16) TwPiece {
    u32 w[4];
};

template <class Piece> __device__ __forceinline__ void tw_pieces(u64 dst, u64 src, u64 from, u64 end) {
    const u64 step = (u64)gridDim.x * TW_MOVE_THREADS;
    u64 i = from + (u64)blockIdx.x * TW_MOVE_THREADS + threadIdx.x;
    const Piece* s = (const Piece*)src;
    Piece* d = (Piece*)dst;
    // Four loads are in flight.
    for (; i + 3 * step < end; i += 4 * step) {
        const Piece a = s[i], b = s[i + step], c = s[i + 2 * step], e = s[i + 3 * step];
        d[i] = a, d[i + step] = b, d[i + 2 * step] = c, d[i + 3 * step] = e;
    }
    for (; i < end; i += step) d[i] = s[i];
}

extern "C" __global__ void __launch_bounds__(TW_MOVE_THREADS) tw_move(const __grid_constant__ TwMoves m) {
    const u32 n = blockIdx.y;
    const u64 src = m.src[n], dst = m.dst[n], len = m.len[n];
    if ((src | dst) % 16 == 0) {
        tw_pieces<TwPiece>(dst, src, 0, len / 16);
        tw_pieces<u8>(dst, src, len / 16 * 16, len);
    } else if ((src | dst) % 4 == 0) {
        tw_pieces<u32>(dst, src, 0, len / 4);
        tw_pieces<u8>(dst, src, len / 4 * 4, len);
    } else {
        tw_pieces<u8>(dst, src, 0, len);
    }
}
