/* A CUDA driver that notes every call and does it at once, on ordinary memory (fake_cuda.py).

   Declarations are those of the CUDA Driver API reference, by its own names: the program's must agree with them. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct {
    size_t srcXInBytes, srcY; unsigned srcMemoryType; const void *srcHost; uint64_t srcDevice; void *srcArray; size_t srcPitch;
    size_t dstXInBytes, dstY; unsigned dstMemoryType; void *dstHost; uint64_t dstDevice; void *dstArray; size_t dstPitch;
    size_t WidthInBytes, Height;
} CUDA_MEMCPY2D_v2;

struct call { const char *name; uint64_t stream, numbers[8]; } calls[256];
int n_calls, live_events, fail_at = -1, fail_with = 1, context_gone;
volatile int hold, held;
uint64_t *last_map;

static int note(const char *name, void *stream, int n, const uint64_t *numbers) {
    if (n_calls == fail_at) { fail_at = -1; return fail_with; }
    struct call *call = &calls[n_calls++ % 256];
    call->name = name, call->stream = (uint64_t)stream;
    memset(call->numbers, 0, sizeof call->numbers);
    memcpy(call->numbers, numbers, n * sizeof *numbers);
    return 0;
}
#define NOTE(name, stream, ...) do { \
    const uint64_t numbers[] = {__VA_ARGS__}; \
    const int failed = note(name, stream, sizeof numbers / 8, numbers); \
    if (failed) return failed; } while (0)

#ifndef INCOMPLETE
int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t bytes, void *stream) {
    NOTE("copy", stream, dst, src, bytes);
    memcpy((void *)dst, (void *)src, bytes);
    return 0;
}
#endif
int cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D_v2 *c, void *stream) {
    if (c->srcXInBytes || c->srcY || c->dstXInBytes || c->dstY || c->srcMemoryType != 4 || c->dstMemoryType != 4) return 1;
    NOTE("copy_2d", stream, c->dstDevice, c->dstPitch, c->srcDevice, c->srcPitch, c->WidthInBytes, c->Height);
    for (size_t row = 0; row < c->Height; ++row)
        memcpy((char *)c->dstDevice + row * c->dstPitch, (char *)c->srcDevice + row * c->srcPitch, c->WidthInBytes);
    return 0;
}
#ifdef OLD
#define cuStreamBatchMemOp_v2 cuStreamBatchMemOp
#endif
typedef union {
    int operation;
    struct {
        int operation; uint64_t address; union { uint32_t value; uint64_t value64; }; unsigned flags; uint64_t alias;
    } waitValue;
    struct {
        int operation; uint64_t address; union { uint32_t value; uint64_t value64; }; unsigned flags; uint64_t alias;
    } writeValue;
    uint64_t pad[6];
} CUstreamBatchMemOpParams;
int cuStreamBatchMemOp_v2(void *stream, unsigned count, CUstreamBatchMemOpParams *params, unsigned flags) {
    const struct timespec ms = {0, 1000000};
    if (flags) return 1;
    for (held = hold; hold && held < 20000; ++held) nanosleep(&ms, NULL);
    for (unsigned i = 0; i < count; ++i) {
        const CUstreamBatchMemOpParams *p = &params[i];
        if (p->operation == 4) {  /* CU_STREAM_MEM_OP_WAIT_VALUE_64 */
            const uint64_t address = p->waitValue.address, value = p->waitValue.value64;
            NOTE("wait", stream, address, value, p->waitValue.flags, (*(uint64_t *)address & value) != 0, count);
        } else if (p->operation == 2) {  /* CU_STREAM_MEM_OP_WRITE_VALUE_32 */
            NOTE("write", stream, p->writeValue.address, p->writeValue.value, p->writeValue.flags, 0, count);
            *(uint32_t *)p->writeValue.address = p->writeValue.value;
        } else return 1;
    }
    return 0;
}
static char events[64];
int cuEventCreate(void **event, unsigned flags) {
    NOTE("create", NULL, (uint64_t)&events[live_events], flags);
    *event = &events[live_events++];
    return 0;
}
int cuEventDestroy_v2(void *event) {
    if (context_gone) return 709;
    NOTE("destroy", NULL, (uint64_t)event);
    --live_events;
    return 0;
}
int cuEventRecord(void *event, void *stream) { NOTE("record", stream, (uint64_t)event); return 0; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    NOTE("wait_event", stream, (uint64_t)event, flags);
    return 0;
}
size_t kernels[4][9] = {{3, 8, 8, 4}, {1, 8}, {2, 8, 128}, {2, 128, 128}};  // of each: how many parameters, and their bytes
#ifndef OLD
int cuFuncGetParamInfo(size_t *kernel, size_t i, size_t *offset, size_t *bytes) {
    if (i >= kernel[0]) return 1;
    *offset = 0, *bytes = kernel[1 + i];
    return 0;
}
#endif
int cuLaunchKernel(size_t *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
    uint64_t found[4] = {0};
    if (gz * by * bz != 1 || extra) return 1;
    for (size_t i = 0; i < kernel[0]; ++i) memcpy(&found[i], parameters[i], kernel[1 + i] > 8 ? 8 : kernel[1 + i]);
    NOTE("launch", stream, (uint64_t)kernel, gx + ((uint64_t)(gy - 1) << 32), bx, shared, found[0], found[1], found[2]);
    return 0;
}
int driver_version = 12080;
int cuDriverGetVersion(int *version) { *version = driver_version; return 0; }
/* The tensor map has the address, all bits, the data type, the swizzle, and then sizes, strides and box of up to three dimensions. */
int cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                           const unsigned *box, const unsigned *element_strides, int interleave, int swizzle, int promotion, int fill) {
    for (unsigned i = 0; i < rank; ++i) if (element_strides[i] != 1) return 1;
    if (interleave || promotion != 2 || fill || rank > 3 || !address || (uint64_t)map % 64) return 1;
    NOTE("encode", NULL, (uint64_t)address, rank, sizes[0], rank > 1 ? sizes[1] : 0);
    const uint64_t start[] = {(uint64_t)address, ~0ull, type, swizzle};
    memcpy(map, start, sizeof start);
    for (unsigned i = 0; i < rank; ++i) map[4 + i] = sizes[i], map[7 + i] = i + 1 < rank ? strides[i] : 0, map[10 + i] = box[i];
    last_map = map;
    return 0;
}
int cuGetErrorName(int error, const char **name) { *name = error == 1 ? "CUDA_ERROR_INVALID_VALUE" : NULL; return error != 1; }
int cuGetErrorString(int error, const char **text) { *text = error == 1 ? "invalid argument" : NULL; return error != 1; }
