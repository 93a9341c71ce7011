// Steps of unfused calls of experts: the numbers of rows that the CPU knows, the order of rows, and the GEMMs.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "plain_steps.hpp"

namespace weft {

namespace nb = nanobind;

// Returns true if one GEMM of cuBLAS for each expert is faster than torch's grouped GEMM: if the GEMMs are few and long.
// rows: the number of rows of all experts. item_bytes: of an element. See `LibraryGroupedMatmul` in weft/schedule/kernels.py.
bool one_gemm_each(int64_t experts, double rows, int64_t k, int64_t n, int64_t item_bytes);

// Returns true if torch's grouped GEMM can read a matrix, or matrices, of bf16: rows or columns are contiguous and begin at multiples
// of 16 bytes.
bool is_aligned(const std::vector<int64_t> &shape, const std::vector<int64_t> &strides, uint64_t address, int64_t item_bytes);

// Multiplies rows, which are sorted by expert, by the experts' weights [experts, K, N], with one GEMM for each expert that has rows.
// Returns the products. Further rows are ignored.
// counts: the number of rows of each expert. came: their sum.
nb::object multiply_each(const TorchCalls &calls, nb::handle rows, nb::handle w, const std::vector<int64_t> &counts, int64_t came);

// Finds the numbers of rows of an exchange that the CPU knows (weft/runtime/unfused/sizes.py).
class KnownNumbers {
  public:
    // known: for the id of each table of received rows: (weak reference, version, (weak reference to the splits, their version,
    //     numbers)). read: a function that reads both tables, if the CPU does not know them.
    KnownNumbers(nb::dict known, nb::object read) : known_(known), read_(read) {}
    nb::object of(nb::handle received, nb::handle splits) const;

  private:
    bool is_as_known(nb::handle entry, nb::handle tensor) const;

    nb::dict known_;
    nb::object read_, version_ = interned("_version"), host_ = interned("host");
};

// Finds the permutations of the rows of an exchange on a GPU (`Orders` in weft/runtime/unfused/permutation.py). Returns None on CPU.
class ExpertOrders {
  public:
    // stream: torch's function that returns the current stream of a device. orders: a function that computes the permutations if they
    //     are not known on this stream.
    ExpertOrders(nb::object torch, nb::object stream, nb::object orders)
        : torch_(torch), calls_(*nb::cast<const TorchCalls *>(torch)), stream_(stream), orders_(orders) {}
    nb::object of(nb::handle received, nb::handle splits, nb::handle numbers) const;
    const LayoutReader &reader() const { return *calls_.reader; }

  private:
    nb::object torch_;
    const TorchCalls &calls_;
    nb::object stream_, orders_, name_ = interned("orders"), made_ = interned("made");
};

// Sorts rows on a GPU by expert, or back to the order of arrival.
class OrderedRows {
  public:
    // name: the name of the permutation in `Orders`. select: a function that is called with the rows and the permutation.
    // elsewhere: a function that sorts rows that are not on a GPU, called with the arguments of `of`.
    OrderedRows(nb::object orders, const char *name, nb::object select, nb::object elsewhere)
        : orders_object_(orders), orders_(*nb::cast<const ExpertOrders *>(orders)), name_(interned(name)), select_(select), elsewhere_(elsewhere) {}
    nb::object of(nb::handle rows, nb::handle received, nb::handle splits, nb::handle numbers) const;

  private:
    nb::object orders_object_;
    const ExpertOrders &orders_;
    nb::object name_, select_, elsewhere_;
};

// The GEMMs of all experts of this rank, in the order of experts.
class ExpertGemms {
  public:
    // grouped: torch's grouped GEMM.
    ExpertGemms(nb::object torch, nb::object orders, nb::object grouped)
        : torch_(torch), calls_(*nb::cast<const TorchCalls *>(torch)), orders_object_(orders),
          orders_(*nb::cast<const ExpertOrders *>(orders)), grouped_(grouped) {}
    nb::object of(nb::handle h, nb::handle w, nb::handle received, nb::handle splits, nb::handle numbers) const;

  private:
    nb::object torch_;
    const TorchCalls &calls_;
    nb::object orders_object_;
    const ExpertOrders &orders_;
    nb::object grouped_, host_ = interned("host"), narrow_ = interned("narrow"), zero_ = number(0), ends_ = interned("ends"), with_ends_ = nb::make_tuple("offs");
};

}  // namespace weft
