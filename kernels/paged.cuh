// Paged memory: the bytes of a block lie in pieces, each in an array of all blocks, as in the KV cache of a server.
//
// A block of such memory is a message: its pieces, one after the other. No copy of a block is made on the device but the
// sealed one. Like every address, pieces and blocks come as parameters. They are counted in units of 16 bytes.

struct Paged {
    // A piece of each block of a group.
    struct Piece {
        u8* base;    // that of block 0
        u32 stride;  // from one block to the next
        u32 start;   // of the piece in its block
    };

    // Chunks of a group's blocks, and the pieces that these touch.
    struct Part {
        u32 first, pieces;  // number of the first piece, and of pieces
        u32 chunk, chunks;  // number of the first chunk, and of chunks
        u32 size;           // of the whole block

        // Returns the bytes of chunk `number` of a block.
        __device__ __forceinline__ u32 length(u32 number) const {
            const u32 left = size - number * BLOCKS;
            return 16 * (left < BLOCKS ? left : BLOCKS);
        }
    };

    struct Block {
        u32 number;  // in the arrays
        u32 start;   // number of chunks in the blocks before it
        u32 place;   // of its first chunk of the launch among the sealed ones
        u32 message_and_part;

        __device__ __forceinline__ u32 message() const { return message_and_part / FASTRACK_PAGED_PARTS; }
        __device__ __forceinline__ u32 part() const { return message_and_part % FASTRACK_PAGED_PARTS; }
    };

    TableOf<Piece, FASTRACK_PAGED_PIECES> pieces;
    TableOf<Block, FASTRACK_PAGED_BLOCKS> blocks;
    Part parts[FASTRACK_PAGED_PARTS];
    u32 count;  // of blocks
};
static_assert(sizeof(Paged) == FASTRACK_PAGED_BYTES, "the host knows this size");
static_assert(sizeof(Paged) + 7 * 8 <= 4096, "as of `Table`");

// The place of a chunk.
struct InPieces {
    const Paged& table;
    const Paged::Block& block;

    // Returns where 16 bytes of the chunk lie. Lanes walk together, so that each step reads one parameter.
    __device__ __forceinline__ uint4* at(int block16, const Shared* shared, int side) const {
        const Paged::Part& part = table.parts[block.part()];
        const u32 unit = shared->chunk[side].column + static_cast<u32>(block16), end = part.first + part.pieces;
        u32 piece = shared->scales[side].first;
#pragma unroll 1
        while (piece + 1 < end && table.pieces.at[piece + 1].start <= unit) ++piece;
        const Paged::Piece& found = table.pieces.at[piece];
        return reinterpret_cast<uint4*>(found.base) + static_cast<u64>(block.number) * found.stride + (unit - found.start);
    }
};

__device__ __forceinline__ uint4 load_block(const InPieces& place, int block, u32, const Shared* shared, int side) {
    return *place.at(block, shared, side);
}

__device__ __forceinline__ void store_block(const InPieces& place, int block, uint4 text, u32, u32 good,
                                            const Shared* shared, int side) {
    *place.at(block, shared, side) = make_uint4(text.x & good, text.y & good, text.z & good, text.w & good);
}

// Returns the place of chunk `number` of a block. One thread finds its first piece; a barrier must follow.
__device__ __forceinline__ InPieces place_of(const Paged& table, const Paged::Block& block, u32 number, Shared* shared,
                                             int side) {
    if (threadIdx.x == THREADS - 1) {
        const Paged::Part& part = table.parts[block.part()];
        shared->chunk[side].column = number * BLOCKS;
        shared->scales[side].first = table.pieces.find(number * BLOCKS, part.first + part.pieces, part.first);
    }
    return {table, block};
}

// Has `work` done on each chunk that this block of threads takes, and reports those for which it returns false. `known`
// tells whether the state is that of the chunk's message.
template <int BITS, class Work>
__device__ __forceinline__ void each_chunk(const State* states, u64 mask, u64 count, const Report& report,
                                           const Paged& table, Work work) {
    Shared* shared = reinterpret_cast<Shared*>(shared_memory);
    fill_tables(shared->tables);
    u32 turn = 0, i = blockIdx.x;
    while (i < count) {
        const Paged::Block& block = table.blocks.at[table.blocks.find(i, table.count)];
        const Paged::Part& part = table.parts[block.part()];
        const State* state = states + (block.message() & mask);
        const bool known = state->is_of(report.call(), block.message());
        change_key<BITS>(shared, state, known);
        const u32 end = block.start + part.chunks;
        do {
            const int side = turn++ & 1;
            const u32 index = i - block.start, number = part.chunk + index;
            const InPieces place = place_of(table, block, number, shared, side);
            const u64 chunk = 16ull * block.place + static_cast<u64>(index) * STRIDE;
            const bool good = work(shared, state, known, place, chunk, number, part.length(number), side);
            if (!good && threadIdx.x == 0) report.bad(static_cast<u64>(block.message()) << NUMBER_BITS | number);
            i += gridDim.x;
        } while (i < end);
    }
    leave(shared);
}
