// A call of a sort on a GPU that another library exports. Python passes the address of the function.
#include <nanobind/nanobind.h>

#include <cstdint>

namespace nb = nanobind;

namespace {

// The parameters of at::cuda::cub::detail::radix_sort_pairs_impl<int32_t, 4> (ATen/cuda/cub.h). Values have 4 bytes.
using Sort = void (*)(const int32_t *keys, int32_t *sorted_keys, const void *values, void *sorted_values, int64_t count,
                      bool descending, int64_t begin_bit, int64_t end_bit);

// An exception of the library, for example because memory is exhausted, becomes a RuntimeError.
void sort_pairs(uint64_t function, uint64_t keys, uint64_t sorted_keys, uint64_t values, uint64_t sorted_values,
                int64_t count, int64_t bits) {
    nb::gil_scoped_release unlocked;
    reinterpret_cast<Sort>(function)(reinterpret_cast<const int32_t *>(keys), reinterpret_cast<int32_t *>(sorted_keys),
                                     reinterpret_cast<const void *>(values), reinterpret_cast<void *>(sorted_values),
                                     count, false, 0, bits);
}

}  // namespace

void register_sort_pairs(nb::module_ &m) {
    m.def("sort_pairs", &sort_pairs, nb::arg("function"), nb::arg("keys"), nb::arg("sorted_keys"), nb::arg("values"),
          nb::arg("sorted_values"), nb::kw_only(), nb::arg("count"), nb::arg("bits"),
          "Call a library's sort of pairs (see weft/_core.pyi).");
}
