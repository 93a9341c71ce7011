// The rows that the messages along rails carry (weft/runtime/rails_all_to_all.py), and the order of rows of experts.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace nb = nanobind;

namespace weft {
namespace {

const int64_t *numbers_at(uintptr_t address) { return reinterpret_cast<const int64_t *>(address); }
int64_t sum(const int64_t *numbers, int64_t count) { return std::accumulate(numbers, numbers + count, int64_t(0)); }

// The rows of an all-to-all in two levels. Rows are bytes here. A table has the number of rows of a rank for each expert of
// each rank, [W, experts]. A rank's memory, which the ranks of its host read, has its table, and then at `rows_at` its rows.
// The rows are ordered by the rank that receives them and then by expert, or with `by_expert` by expert and then by rank. A
// rank receives the rows of each rank in the order of experts. The message for the rank with index i on another host has the
// parts for that rank of the tables of all ranks of this host, and then at `head_bytes` their rows for that rank.
class RailRows {
  public:
    // counts: the table of this rank. received: the memory for the number of rows from each rank, [W, experts]; 0 if the caller does
    // not need them. expected, out: these numbers, if the caller knows them, and the memory for all rows, in the order of ranks;
    // otherwise 0.
    RailRows(uintptr_t counts, uintptr_t received, uintptr_t expected, uintptr_t out, int64_t world, int64_t experts, int64_t per_host,
             int64_t host, int64_t index, int64_t row_bytes, int64_t most_bytes, bool by_expert)
        : counts_(numbers_at(counts)), expected_(numbers_at(expected)), out_(reinterpret_cast<char *>(out)), world_(world), experts_(experts),
          per_host_(per_host), host_(host), index_(index), row_bytes_(row_bytes), most_bytes_(most_bytes), by_expert_(by_expert),
          own_(received ? 0 : size_t(world * experts)), received_(received ? reinterpret_cast<int64_t *>(received) : own_.data()) {}

    int64_t rows() const { return sum(counts_, world_ * experts_); }
    // Returns the number of rows for each expert index, from the table of this rank.
    std::vector<int64_t> of_experts() const {
        std::vector<int64_t> found(size_t(experts_), 0);
        for (int64_t i = 0; i < world_ * experts_; ++i) found[size_t(i % experts_)] += counts_[i];
        return found;
    }
    int64_t rows_at() const { return aligned(8 * world_ * experts_); }
    int64_t head_bytes() const { return aligned(8 * per_host_ * experts_); }

    // Writes this rank's table to `memory`. Returns the number of rows to write at `rows_at`: 0 if there are too many.
    int64_t load(uintptr_t memory) const {
        std::copy_n(counts_, world_ * experts_, reinterpret_cast<int64_t *>(memory));
        return fits(counts_) ? rows() : 0;
    }

    // Writes the messages. near: the address of the memory of each rank of this host. far: the address of the message for each
    // other host, in the order of hosts. Returns the length of each message. No rows are sent if a rank has too many.
    std::vector<int64_t> pack(const std::vector<uintptr_t> &near, const std::vector<uintptr_t> &far) {
        nb::gil_scoped_release unlocked;
        near_ = near;
        has_rows = true;
        for (uintptr_t memory : near_) has_rows &= fits(numbers_at(memory));
        std::vector<int64_t> sizes;
        for (size_t i = 0; i < far.size(); ++i) {
            const int64_t target = (int64_t(i) + (int64_t(i) >= host_)) * per_host_ + index_;
            int64_t *numbers = reinterpret_cast<int64_t *>(far[i]);
            for (uintptr_t memory : near_) numbers = std::copy_n(numbers_at(memory) + target * experts_, experts_, numbers);
            char *const to = reinterpret_cast<char *>(far[i]) + head_bytes();
            sizes.push_back(head_bytes() + (has_rows ? copy_for(target, to) : 0));
        }
        return sizes;
    }

    // Reads the numbers of rows from the ranks of this host. If the numbers were expected, copies the rows to `out`. Returns the
    // number of rows.
    int64_t go_on() {
        const int64_t first = host_ * per_host_;
        int64_t *numbers = from(first);
        for (uintptr_t memory : near_) numbers = std::copy_n(numbers_at(memory) + (first + index_) * experts_, experts_, numbers);
        if (has_rows && expected_ && is_expected(host_)) copy_near(reinterpret_cast<uintptr_t>(out_ + offset_of(host_)));
        return sum(from(first), per_host_ * experts_);
    }

    // Copies the rows from the ranks of this host to `out`. Call it after `pack`, if `has_rows`.
    void copy_near(uintptr_t out) const {
        nb::gil_scoped_release unlocked;
        copy_for(host_ * per_host_ + index_, reinterpret_cast<char *>(out));
    }

    // Reads the numbers of rows in the messages of other hosts, in the order of hosts.
    void unpack(const std::vector<uintptr_t> &messages) {
        messages_ = messages;
        for (int64_t host = 0; host < world_ / per_host_; ++host)
            if (host != host_) std::copy_n(numbers_at(message_of(host)), per_host_ * experts_, from(host * per_host_));
    }

    // Copies the rows of all messages to the `out` of the constructor. Returns the number of bytes. Throws std::invalid_argument if a
    // message has other numbers of rows than expected.
    int64_t copy_far() const {
        nb::gil_scoped_release unlocked;
        int64_t copied = 0;
        for (int64_t host = 0; host < world_ / per_host_; ++host) {
            if (host == host_) continue;
            if (!is_expected(host)) throw std::invalid_argument("a message of host " + std::to_string(host) + " has unexpected rows");
            const int64_t bytes = row_bytes_ * sum(from(host * per_host_), per_host_ * experts_);
            std::copy_n(reinterpret_cast<const char *>(message_of(host)) + head_bytes(), bytes, out_ + offset_of(host));
            copied += bytes;
        }
        return copied;
    }

    bool has_rows = false;  // true if the messages contain rows

  private:
    static constexpr int64_t alignment = 64;
    static int64_t aligned(int64_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

    bool fits(const int64_t *table) const {
        const int64_t rows = sum(table, world_ * experts_);
        return 0 <= rows && rows * row_bytes_ <= most_bytes_;
    }
    int64_t *from(int64_t rank) const { return received_ + rank * experts_; }
    uintptr_t message_of(int64_t host) const { return messages_.at(size_t(host - (host > host_))); }
    bool is_expected(int64_t host) const {
        const int64_t at = host * per_host_ * experts_, count = per_host_ * experts_;
        return std::equal(expected_ + at, expected_ + at + count, received_ + at);
    }
    int64_t offset_of(int64_t host) const { return row_bytes_ * sum(expected_, host * per_host_ * experts_); }

    // Copies the rows from the ranks of this host for the rank `target` to `out`. Returns their number of bytes.
    int64_t copy_for(int64_t target, char *out) const {
        char *to = out;
        for (uintptr_t memory : near_) {
            const int64_t *const numbers = numbers_at(memory), *const mine = numbers + target * experts_;
            const char *const rows = reinterpret_cast<const char *>(memory) + rows_at();
            const auto copy = [&](int64_t first, int64_t count) {
                to = std::copy_n(rows + first * row_bytes_, count * row_bytes_, to);  // `to` may be null without rows
            };
            if (!by_expert_) {
                copy(sum(numbers, target * experts_), sum(mine, experts_));
                continue;
            }
            int64_t first = 0;
            for (int64_t e = 0; e < experts_; ++e)
                for (int64_t r = 0; r < world_; ++r) {
                    if (r == target) copy(first, mine[e]);
                    first += numbers[r * experts_ + e];
                }
        }
        return to - out;
    }

    const int64_t *counts_, *expected_;
    char *out_;
    int64_t world_, experts_, per_host_, host_, index_, row_bytes_, most_bytes_;
    bool by_expert_;
    std::vector<int64_t> own_;
    int64_t *received_;
    std::vector<uintptr_t> near_, messages_;
};

// Copies rows that are ordered by rank, then by expert, to `out`, ordered by expert, then by rank; or with `to_ranks` in the
// opposite direction. counts: the numbers of rows, [ranks, experts]. row_bytes: the length of a row.
void reorder_rows(uintptr_t rows, uintptr_t out, uintptr_t counts, int64_t ranks, int64_t experts, int64_t row_bytes, bool to_ranks) {
    const int64_t *const numbers = numbers_at(counts);
    const char *const from = reinterpret_cast<const char *>(rows);
    char *const to = reinterpret_cast<char *>(out);
    std::vector<int64_t> by_rank(size_t(ranks * experts));  // the first row of each rank and expert
    std::exclusive_scan(numbers, numbers + ranks * experts, by_rank.begin(), int64_t(0));
    int64_t by_expert = 0;
    for (int64_t e = 0; e < experts; ++e)
        for (int64_t r = 0; r < ranks; ++r) {
            const int64_t cell = r * experts + e, bytes = numbers[cell] * row_bytes;
            const int64_t at = by_rank[size_t(cell)] * row_bytes;
            std::copy_n(from + (to_ranks ? by_expert : at), bytes, to + (to_ranks ? at : by_expert));
            by_expert += bytes;
        }
}

// Returns the sum of numbers times weights (mod 2^64).
uint64_t weighted_sum(uintptr_t numbers, uintptr_t weights, int64_t count) {
    const uint64_t *const a = reinterpret_cast<const uint64_t *>(numbers), *const b = reinterpret_cast<const uint64_t *>(weights);
    return std::inner_product(a, a + count, b, uint64_t(0));
}

}  // namespace
}  // namespace weft

void register_rail_rows(nb::module_ &m) {
    using namespace weft;
    nb::class_<RailRows>(m, "RailRows", "The rows of an all-to-all in two levels.")
        .def(nb::init<uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool>(),
             nb::kw_only(), nb::arg("counts"), nb::arg("received"), nb::arg("expected"), nb::arg("out"), nb::arg("world_size"),
             nb::arg("experts"), nb::arg("per_host"), nb::arg("host"), nb::arg("index"), nb::arg("row_bytes"), nb::arg("most_bytes"),
             nb::arg("by_expert"))
        .def_prop_ro("rows", &RailRows::rows)
        .def_prop_ro("of_experts", &RailRows::of_experts)
        .def_prop_ro("rows_at", &RailRows::rows_at)
        .def_prop_ro("head_bytes", &RailRows::head_bytes)
        .def("load", &RailRows::load, nb::arg("memory"))
        .def("pack", &RailRows::pack, nb::arg("near"), nb::arg("far"))
        .def("go_on", &RailRows::go_on)
        .def("copy_near", &RailRows::copy_near, nb::arg("out"))
        .def("unpack", &RailRows::unpack, nb::arg("messages"))
        .def("copy_far", &RailRows::copy_far)
        .def_ro("has_rows", &RailRows::has_rows);
    m.def("reorder_rows", &reorder_rows, nb::kw_only(), nb::arg("rows"), nb::arg("out"), nb::arg("counts"), nb::arg("ranks"),
          nb::arg("experts"), nb::arg("row_bytes"), nb::arg("to_ranks"), nb::call_guard<nb::gil_scoped_release>());
    m.def("weighted_sum", &weighted_sum, nb::arg("numbers"), nb::arg("weights"), nb::arg("count"));
}
