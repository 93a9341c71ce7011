// Names of the functions that are compiled once per instruction set. WEFT_ISA is the name of the instruction set.
#pragma once
#include "embedding_update.hpp"
#include "pooling.hpp"
#include "sum.hpp"

#define WEFT_STRING_(x) #x
#define WEFT_STRING(x) WEFT_STRING_(x)
#define WEFT_JOIN_(a, b) a##b
#define WEFT_JOIN(a, b) WEFT_JOIN_(a, b)
#define WEFT_ISA_NAME(name) WEFT_JOIN(name, WEFT_ISA)

namespace weft {

UpdateRows WEFT_ISA_NAME(update_rows_)(Dtype dtype);
UpdateRuns WEFT_ISA_NAME(update_runs_)(const UpdateRule &rule, Dtype dtype, int64_t dim, bool scaled);
void WEFT_ISA_NAME(sum_)(SumDtype dtype, const char *const *from, size_t count, char *to, size_t nbytes);

}  // namespace weft
