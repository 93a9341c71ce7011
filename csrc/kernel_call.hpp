// A launch of a loaded kernel, whose arguments and grid may depend on numbers that each run passes.
//
// A run passes one list of numbers, the *bases*: addresses of memory, and sizes such as numbers of rows. So one recorded
// launch serves tensors of any address and number of rows, and a new size needs neither Python nor Triton's launcher.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda_driver.hpp"

namespace weft {

constexpr size_t most_parameters = 64;          // per kernel
constexpr size_t most_dimensions = 5;           // of a tensor map
constexpr uint64_t most_programs = 0x7fffffff;  // in one dimension of a grid

// A tensor map (the descriptor for the GPU's tensor memory accelerator) of a matrix or a higher-dimensional tensor. It is encoded
// again only if the address or the number of rows has changed since the last launch. Encoding follows Triton's launcher
// (third_party/nvidia/backend/driver.c: fillTMADescriptorTiled).
struct TensorMap {
    int64_t base, offset;  // the address; `base` -1: `offset` is the address
    int data_type, swizzle, item_bytes;
    std::vector<uint64_t> sizes, strides;  // innermost dimension first; strides in bytes, without that of the innermost dimension
    std::vector<unsigned> box;
    int64_t rows, instead;  // the base that holds the number of rows; -1: it is fixed. If it is 0, the tensor map with the number
                            // `instead` replaces this one.
    bool is_sized;          // true if the number of rows is the size of the outermost dimension
    Address address = 0;    // as encoded
    bool is_encoded = false;
    alignas(64) uint64_t words[16] = {};

    bool is_empty(const std::vector<Address> &bases) const { return rows >= 0 && bases[size_t(rows)] == 0; }
    Address place(const std::vector<Address> &bases) const {
        return (base < 0 ? 0 : bases[size_t(base)]) + uint64_t(offset);
    }
    Result encode(const Driver &driver, const std::vector<Address> &bases) {
        const Address here = place(bases);
        const uint64_t outermost = is_sized ? bases[size_t(rows)] : sizes.back();
        if (is_encoded && here == address && outermost == sizes.back()) return 0;
        if (!driver.encode_tiled) return error_invalid_value;
        sizes.back() = outermost, address = here, is_encoded = false;
        constexpr unsigned element_strides[most_dimensions] = {1, 1, 1, 1, 1};
        constexpr int interleave_none = 0, promotion_128_bytes = 2, fill_zero = 0;
        const Result result = driver.encode_tiled(words, data_type, unsigned(sizes.size()), here, sizes.data(), strides.data(),
                                                  box.data(), element_strides, interleave_none, swizzle, promotion_128_bytes, fill_zero);
        if (result != 0) return result;
        // As CUTLASS and Triton do: drivers up to CUDA 13.1 set a wrong bit for tensors below 128 KiB.
        uint64_t last = (sizes[0] - 1) * uint64_t(item_bytes);
        for (size_t i = 1; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i - 1];
        if (driver.version <= 13010 && last + 1 < 128 * 1024) words[1] &= ~(uint64_t(1) << 21);
        is_encoded = true;
        return 0;
    }
};

class KernelCall {
  public:
    enum class Source { number, base, count, map };
    struct Parameter {
        Source source;
        int64_t base = 0, number = 0;  // `number` is added to the base's value; for a map, its number among the maps
    };

    KernelCall(uint64_t function, int64_t programs, int64_t threads, int64_t shared_bytes)
        : function(reinterpret_cast<Handle>(function)), programs(programs), threads(threads), shared_bytes(shared_bytes) {
        require(function != 0, "function=0 is not a kernel");
        require(programs > 0 && threads > 0 && shared_bytes >= 0, "programs=", programs, " and threads=", threads,
                " must be positive, and shared_bytes=", shared_bytes, " not negative");
    }
    KernelCall &number(int64_t value) { return append({Source::number, 0, value}); }
    KernelCall &base(int64_t base, int64_t offset) { return append({Source::base, base, offset}); }
    KernelCall &count(int64_t base) { return append({Source::count, base, 0}); }
    KernelCall &map(TensorMap map) {
        const size_t rank = map.sizes.size();
        require(rank > 0 && rank <= most_dimensions && map.strides.size() + 1 == rank && map.box.size() == rank, "a tensor map of ", rank,
                " sizes, ", map.strides.size(), " strides and ", map.box.size(), " sizes of its box: it has 1 to ", most_dimensions,
                " dimensions, and a stride of each but the innermost");
        require(map.rows >= 0 || !map.is_sized, "rows=", map.rows, " is not the number of a base");
        require(map.rows < 0 || (map.instead >= 0 && size_t(map.instead) != maps.size()), "instead=", map.instead,
                " must be another tensor map of the call");
        append({Source::map, 0, int64_t(maps.size())});
        maps.push_back(std::move(map));
        return *this;
    }
    KernelCall &grid(int64_t x, int64_t y) {
        require(x >= 0 && y >= 0, "x=", x, " and y=", y, " are numbers of bases: they must not be negative");
        grid_x = x, grid_y = y;
        return *this;
    }
    KernelCall &row_tiles(int64_t rows, int64_t tile, int64_t more, int64_t times) {
        require(rows >= 0 && tile > 0 && more >= 0 && times > 0, "rows=", rows, ", tile=", tile, ", more=", more, ", times=", times,
                ": tile and times must be positive, and the others not negative");
        tiled_rows = rows, tile_rows = tile, more_tiles = more, times_tiles = times;
        return *this;
    }
    KernelCall &only_if(int64_t base) {
        needed.push_back(base);
        return *this;
    }

    // Raises an error unless the call fits a kernel with parameters of these sizes in bytes, and a program with `n_bases` bases.
    // sizes: empty if the driver cannot tell.
    void require_valid(const std::vector<size_t> &sizes, size_t n_bases) const {
        const auto below = [&](const char *name, int64_t base) {
            require(0 <= base && size_t(base) < n_bases, name, "=", base, " must be at least 0 and below n_bases=", n_bases);
        };
        for (const auto &parameter : parameters)
            if (parameter.source == Source::base || parameter.source == Source::count) below("base", parameter.base);
        for (const auto &map : maps) {
            if (map.base >= 0) below("base", map.base);
            if (map.rows >= 0) {
                below("rows", map.rows);
                require(size_t(map.instead) < maps.size(), "instead=", map.instead, " must be below the number of tensor maps, ", maps.size());
            }
        }
        if (grid_x >= 0) below("x", grid_x), below("y", grid_y);
        if (tiled_rows >= 0) below("rows", tiled_rows);
        for (const int64_t base : needed) below("base", base);
        require(sizes.empty() || sizes.size() == parameters.size(), "the kernel takes ", sizes.size(), " parameters, and ",
                parameters.size(), " are given");
        require(parameters.size() <= most_parameters, "a kernel of ", parameters.size(), " parameters: at most ", most_parameters);
        for (size_t i = 0; i < sizes.size(); ++i) {
            const bool is_map = parameters[i].source == Source::map;
            require(is_map ? sizes[i] == sizeof(TensorMap::words) : sizes[i] <= sizeof(uint64_t), "parameter ", i, " of the kernel has ",
                    sizes[i], " bytes: numbers have at most 8, and tensor maps 128");
        }
    }

    // True if all addresses are multiples of `alignment`.
    bool is_aligned(const std::vector<Address> &bases, int64_t alignment) const {
        for (const auto &[source, base, number] : parameters)
            if (source == Source::base && (bases[size_t(base)] + uint64_t(number)) % uint64_t(alignment) != 0) return false;
        for (const auto &map : maps)
            if (!map.is_empty(bases) && map.place(bases) % uint64_t(alignment) != 0) return false;
        return true;
    }
    Result launch(const Driver &driver, const std::vector<Address> &bases, Handle stream) {
        for (const int64_t base : needed)
            if (bases[size_t(base)] == 0) return 0;
        for (auto &map : maps)
            if (!map.is_empty(bases))
                if (const Result result = map.encode(driver, bases); result != 0) return result;
        void *places[most_parameters];
        for (size_t i = 0; i < parameters.size(); ++i) {
            const auto &[source, base, number] = parameters[i];
            if (source == Source::map) {
                TensorMap &map = maps[size_t(number)];
                places[i] = (map.is_empty(bases) ? maps[size_t(map.instead)] : map).words;
                continue;
            }
            values[i] = uint64_t(number) + (source == Source::number ? 0 : bases[size_t(base)]);
            places[i] = &values[i];
        }
        uint64_t x = uint64_t(programs), y = 1;
        if (grid_x >= 0) x = bases[size_t(grid_x)], y = bases[size_t(grid_y)];
        if (tiled_rows >= 0) {
            const uint64_t tile = uint64_t(tile_rows), tiles = (bases[size_t(tiled_rows)] + tile - 1) / tile + uint64_t(more_tiles);
            x = std::clamp<uint64_t>(tiles * uint64_t(times_tiles), 1, x);
        }
        if (x > most_programs || y > most_programs) return error_invalid_value;
        return driver.launch_kernel(function, unsigned(x), unsigned(y), 1, unsigned(threads), 1, 1, unsigned(shared_bytes), stream,
                                    places, nullptr);
    }

    Handle function;

  private:
    KernelCall &append(const Parameter &parameter) {
        parameters.push_back(parameter);
        values.push_back(0);
        return *this;
    }

    int64_t programs, threads, shared_bytes;
    int64_t grid_x = -1, grid_y = -1;  // the bases that hold the grid of a run; -1: the grid is `programs`
    // The base that holds a number of rows; -1: the grid does not depend on rows. Otherwise it has a block for each tile of
    // `tile_rows` rows and for `more_tiles` further tiles, `times_tiles` times, but at most `programs` blocks.
    int64_t tiled_rows = -1, tile_rows = 1, more_tiles = 0, times_tiles = 1;
    std::vector<int64_t> needed;  // bases; if one of them is 0, nothing is launched
    std::vector<Parameter> parameters;
    // The driver reads as many bytes of each value as the kernel declares. On little-endian machines these are the low
    // bytes.
    std::vector<uint64_t> values;
    std::vector<TensorMap> maps;
};

}  // namespace weft
