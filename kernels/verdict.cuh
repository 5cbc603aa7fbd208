// The verdict on the messages of a call: which chunk was bad first, and that nothing of the call was lost.
//
// Every launch of a call has a ticket: the number of the call, then its own number in the call. The last block of a launch
// leaves that ticket here, if the launch before it has left its own. So the host, which knows the last ticket, does not
// take the verdict of another call for that of this one, nor a verdict after which a launch was lost.

constexpr u64 GOOD = ~0ull;        // no bad chunk
constexpr u64 PLAN = 1ull << 63;   // in the ticket of a launch that opens the plan of a gather, under the link's key
constexpr u32 LINK = 0xffffffffu;  // in place of a call's number, which is lower: the state of the link's key

struct Verdict {
    u64 lowest;  // name of the first bad chunk
    u64 plan;    // number of the first bad chunk of a plan
    u64 ticket;  // of the last launch that has ended
    u64 ended;   // blocks of the launch that have ended, minus one
    u64 opened;  // the ticket of the last launch that has opened a plan, which no other launch writes
};
static_assert(sizeof(Verdict) == FASTRACK_VERDICT_BYTES, "the host knows this size");

struct Report {
    Verdict* verdict;
    u64 ticket;

    __device__ __forceinline__ u32 call() const { return ticket & PLAN ? LINK : static_cast<u32>(ticket >> 32); }

    __device__ __forceinline__ void bad(u64 name) const {
        atomicMin(ticket & PLAN ? &verdict->plan : &verdict->lowest, name);
    }

    // Returns whether the launch before this one has opened its plan.
    __device__ __forceinline__ bool has_plan() const { return verdict->opened == ticket - 1 && verdict->plan == GOOD; }

    // Ends a block, behind a barrier after its last report. Returns true in one thread of the last block to end.
    __device__ __forceinline__ bool end() const {
        if (threadIdx.x != 0) return false;
        __threadfence();
        if (atomicAdd(&verdict->ended, 1) + 1 != gridDim.x - 1) return false;
        const u64 own = ticket & ~PLAN;
        verdict->ended = ~0ull;
        if (ticket & PLAN) verdict->opened = own;
        if (static_cast<u32>(own) == 0 || verdict->ticket == own - 1) verdict->ticket = own;
        __threadfence();
        return true;
    }
};
