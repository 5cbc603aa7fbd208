// Keys of messages that the host has wrapped: sealed as `Row`s under the key of the link, which is on the device.
//
// So no key of a message crosses unencrypted, and none lies in a staging buffer, which may be pageable. A block that takes
// one chunk or so expands the key in its own shared memory: no other memory of the device ever has it.

#define ROWS 256  // of a chunk

struct __align__(16) Row {
    Key key;
    u32 message;
    u32 padding[3];
};
static_assert(sizeof(Row) * ROWS == CHUNK, "rows do not cross chunks");
static_assert(sizeof(Row) == FASTRACK_ROW_BYTES, "the host knows this size");

// Wrapped keys, and the key that opens them.
struct Rows {
    const State* link;
    const u8* sealed;
    u64 number;  // of their first chunk, among all that are sealed for the link
    u64 total;   // rows, and 2^32 times the row of a launch's first segment or key

    __device__ __forceinline__ u32 first() const { return static_cast<u32>(total >> 32); }
};

// The key that a block is at, behind the rest of its shared memory.
struct Own {
    State state;
    Row row;
};

struct Small {
    Shared shared;
    Own own;
};
static_assert(sizeof(Small) == FASTRACK_SMALL_SHARED_BYTES, "the host knows this size");

struct Pick {
    Plain plain;
    Own own;
};
static_assert(sizeof(Pick) == FASTRACK_PICK_SHARED_BYTES, "the host knows this size");

// The place of an opened chunk of rows, of which one is kept.
struct OneRow {
    Row* row;
    int number;
};

__device__ __forceinline__ void store_block(const OneRow& place, int block, uint4 text, u32, u32 good, const Shared*, int) {
    const int part = block - 4 * place.number;
    if (part < 0 || part >= 4) return;
    reinterpret_cast<uint4*>(place.row)[part] = make_uint4(text.x & good, text.y & good, text.z & good, text.w & good);
}

// Unwraps a row with all threads of a block, and returns whether it was as the host sealed it. If not, it is zeros.
__device__ __forceinline__ bool unwrap_row(Shared* shared, const Rows& rows, u32 number, Row* row) {
    const u32 chunk = number / ROWS, left = static_cast<u32>(rows.total) - chunk * ROWS;
    change_key<256>(shared, rows.link, rows.link->is_of(LINK, 0));
    const bool good = open_chunk<256>(shared, rows.link, rows.sealed + static_cast<u64>(chunk) * STRIDE,
                                      static_cast<u32>((left < ROWS ? left : ROWS) * sizeof(Row)),
                                      OneRow{row, static_cast<int>(number % ROWS)}, rows.number + chunk, 0);
    __syncthreads();
    return good;
}

// Unwraps a row, and expands and loads its key. Unless the row is good and that of the message, no chunk opens.
template <int BITS>
__device__ __forceinline__ bool take_key(Shared* shared, const Rows& rows, u32 number, u32 message, Own* own) {
    const bool good = unwrap_row(shared, rows, number, &own->row);
    const u32 kind = own->row.key.kind;
    if (threadIdx.x < 32) start_state<BITS>(shared->schedule, own->row.key, &own->state);
    __syncthreads();
    finish_state(&own->state, kind >> 16);
    const bool known = good && (kind & 0xffff) == BITS && own->row.message == message;
    change_key<BITS>(shared, &own->state, known);
    return known;
}

__device__ __forceinline__ void wipe(Own* own) {
    for (u32 i = threadIdx.x; i < sizeof(Own) / 4; i += THREADS) reinterpret_cast<u32*>(own)[i] = 0;
}

// Begins a block: powers that a key does not need are read, and multiplied by zero.
__device__ __forceinline__ void enter(Shared* shared, Own* own) {
    fill_tables(shared->tables);
    wipe(own);
}

// Wipes what a block has of keys.
__device__ __forceinline__ void leave(Shared* shared, Own* own) {
    leave(shared);
    wipe(own);
}
