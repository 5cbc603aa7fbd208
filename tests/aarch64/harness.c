/* Calls the AArch64 code of the vector engines for requests on standard input, and answers on standard output.

   Each call has a stack of its own, which is searched afterwards for secrets. Its buffers begin or end at inaccessible
   pages, and the source is read-only. The vector registers are filled before a call and kept after it. */

#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { OPEN, VERIFY, SEAL, REENCRYPT, RANGES, DERIVE };
enum { PAGE = 65536, STACK = 1 << 17, SCHEDULE = 2048, BUFFER = 16448, NEEDLES = 64, ROWS = 256 };

struct request {
    uint64_t work, bits, first, count, size, source_size, target_size, at_end, wipes, needles, rows;
    uint8_t material[48];
    uint8_t needle[NEEDLES][16];
    uint64_t table[ROWS][3];
};

struct answer {
    int64_t result;
    uint64_t found;
    uint8_t registers[2][32][16];  /* after the expansion of the key, and after the run */
};

typedef int64_t (*function)(void);

#define DECLARE(name, bits) extern int64_t fastrack_##name##_##bits##_arm_16_16(void);
#define DECLARE_BOTH(name) DECLARE(name, 128) DECLARE(name, 256)
DECLARE_BOTH(expand_key)
DECLARE_BOTH(open_run)
DECLARE_BOTH(verify_run)
DECLARE_BOTH(seal_run)
DECLARE_BOTH(reencrypt_run)
DECLARE_BOTH(ranges)
extern int64_t fastrack_wipe_stack(void);
extern int64_t fastrack_derive_arm_16_16_2(void);

#define BOTH(name) {fastrack_##name##_128_arm_16_16, fastrack_##name##_256_arm_16_16}
static const function EXPAND_KEY[2] = BOTH(expand_key);
static const function RUNS[5][2] = {BOTH(open_run), BOTH(verify_run), BOTH(seal_run), BOTH(reencrypt_run), BOTH(ranges)};

/* int64_t call(function, const uint64_t arguments[10], uint8_t registers[32][16], uint8_t *end_of_stack) */
extern int64_t call(function, const uint64_t *, uint8_t (*)[16], uint8_t *);
__asm__(
    ".text\n.p2align 2\n.globl call\n.type call, %function\ncall:\n"
    "stp x29, x30, [sp, #-96]!\n mov x29, sp\n str x19, [sp, #16]\n"
    "stp d8, d9, [sp, #32]\n stp d10, d11, [sp, #48]\n stp d12, d13, [sp, #64]\n stp d14, d15, [sp, #80]\n"
    "mov x16, x0\n mov x17, x1\n mov x19, x2\n mov sp, x3\n"
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n"
    "movi v\\n\\().16b, #0xa5\n .endr\n"
    "ldp x0, x1, [x17, #64]\n str x0, [sp, #-16]!\n"
    "ldp x0, x1, [x17]\n ldp x2, x3, [x17, #16]\n ldp x4, x5, [x17, #32]\n ldp x6, x7, [x17, #48]\n blr x16\n"
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n"
    "str q\\n, [x19], #16\n .endr\n"
    "mov sp, x29\n ldp d8, d9, [sp, #32]\n ldp d10, d11, [sp, #48]\n ldp d12, d13, [sp, #64]\n ldp d14, d15, [sp, #80]\n"
    "ldr x19, [sp, #16]\n ldp x29, x30, [sp], #96\n ret\n");

static struct request request;
static struct answer answer;
static uint8_t *source, *target, *buffer;
static uint8_t schedule[SCHEDULE] __attribute__((aligned(64)));

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void read_all(void *to, size_t size) {
    if (size && fread(to, size, 1, stdin) != 1)
        exit(ferror(stdin) ? 1 : 0);
}

/* Pages that may be accessed, between two that may not. */
struct guarded {
    uint8_t *pages;
    size_t size;
};

static void protect(struct guarded memory, int access) {
    if (memory.size && mprotect(memory.pages, memory.size, access))
        fail("mprotect");
}

/* Return `size` bytes that begin or end at an inaccessible page. */
static uint8_t *guard(struct guarded *memory, size_t size) {
    if (memory->pages && munmap(memory->pages - PAGE, memory->size + 2 * PAGE))
        fail("munmap");
    memory->size = (size + PAGE - 1) / PAGE * PAGE;
    uint8_t *all = mmap(NULL, memory->size + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED)
        fail("mmap");
    memory->pages = all + PAGE;
    protect(*memory, PROT_READ | PROT_WRITE);
    return memory->pages + (request.at_end ? memory->size - size : 0);
}

static void work(uint8_t *end) {
    int long_key = request.bits == 256;
    uint64_t material = (uint64_t)request.material;
    if (request.work == DERIVE) {
        uint64_t arguments[10] = {material,      request.bits / 8, (uint64_t)source, (uint64_t)request.table,
                                  request.count, (uint64_t)target};
        answer.result = call(fastrack_derive_arm_16_16_2, arguments, answer.registers[0], end);
    } else {
        uint64_t expansion[10] = {(uint64_t)schedule, material};
        call(EXPAND_KEY[long_key], expansion, answer.registers[0], end);
        uint64_t run[10] = {(uint64_t)schedule, (uint64_t)source, (uint64_t)target, request.first,
                            request.count,      request.size,     (uint64_t)buffer};
        uint64_t ranges[10] = {(uint64_t)schedule, (uint64_t)source,        (uint64_t)target, request.first,   request.size,
                               (uint64_t)source,   (uint64_t)request.table, request.rows,     (uint64_t)buffer};
        const uint64_t *arguments = request.work == RANGES ? ranges : run;
        answer.result = call(RUNS[request.work][long_key], arguments, answer.registers[1], end);
    }
    if (request.wipes) {
        uint64_t none[10] = {0};
        uint8_t registers[32][16];
        call(fastrack_wipe_stack, none, registers, end);
    }
}

int main(void) {
    struct guarded sources = {0}, targets = {0}, buffers = {0};
    uint8_t *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED)
        fail("mmap");
    for (;;) {
        read_all(&request, sizeof request);
        source = guard(&sources, request.source_size);
        target = guard(&targets, request.target_size);
        buffer = guard(&buffers, BUFFER);
        read_all(source, request.source_size);
        protect(sources, PROT_READ);
        memset(target, 0xa5, request.target_size);
        if (request.needles)
            memset(stack, 0, STACK);
        memset(&answer, 0xa5, sizeof answer);

        work(stack + STACK);
        answer.found = 0;
        for (uint64_t needle = 0; needle < request.needles; needle++)
            answer.found += memmem(stack, STACK, request.needle[needle], 16) != NULL;
        fwrite(&answer, sizeof answer, 1, stdout);
        fwrite(target, 1, request.target_size, stdout);
        fflush(stdout);
    }
}
