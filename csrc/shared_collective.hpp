// Collectives of the ranks of a host, whose data travel with the rendezvous (exchange.hpp).
//
// A collective takes one or more rounds. In a round each rank writes its data to shared memory (`load`), publishes them, waits
// for its peers, and reads their data (`take`). The first round is the rendezvous before the collective. A round moves up to
// `PayloadExchange::data_bytes` bytes of each rank. The payload of later rounds is the text "more".
//
//     all-gather        each rank writes its part, and copies the parts of its peers
//     reduce-scatter    each rank writes the parts of its peers, and adds up its own part
//     all-reduce        few bytes or two ranks: each rank writes its whole array, and adds up all arrays.
//                       Otherwise a reduce-scatter, and then an all-gather
//     all-to-all        each rank writes the numbers and the rows for its peers, and copies those for itself
//
// Sums are computed in the order of ranks, in fp32 (fp64 for fp64), and rounded once. So all ranks get the same bits, for
// any size of a round, and with both forms of the all-reduce.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "exchange.hpp"
#include "sum.hpp"

namespace weft {

class SharedCollective {
  public:
    // exchange: the rendezvous. Its `data_bytes` must be at least `least_bytes(ranks)`.
    // part: this rank's part. whole: the result, the parts of all ranks in their order. part_bytes: the size of a part.
    static SharedCollective all_gather(PayloadExchange &exchange, const char *part, char *whole, size_t part_bytes);
    // whole: this rank's array, with a part for each rank. part: the result, this rank's part of the sum, in other memory.
    static SharedCollective reduce_scatter(PayloadExchange &exchange, const char *whole, char *part, size_t part_bytes, SumDtype dtype);
    // whole: this rank's array, which the result replaces. nbytes: its size.
    static SharedCollective all_reduce(PayloadExchange &exchange, char *whole, size_t nbytes, SumDtype dtype);
    // from: this rank's bytes for each rank, in the order of ranks. to: the result, in the order of ranks.
    // sent, received: the number of bytes to and from each rank. Throws std::invalid_argument in `take` if a peer has sent another
    // number of bytes.
    static SharedCollective all_to_all(PayloadExchange &exchange, const char *from, char *to, std::vector<int64_t> sent,
                                       std::vector<int64_t> received);

    // An all-to-all of rows for the experts of each rank. counts: the number of rows for each rank and expert, ranks x experts.
    // from: this rank's rows, ordered by rank and then by expert, or by expert and then by rank (`from_by_expert`). The result has
    // the order that `to_by_expert` says. The caller calls `place` when it knows `counts`. Throws std::invalid_argument if the
    // table of numbers is too large (`has_room`).
    static SharedCollective exchange_rows(PayloadExchange &exchange, const char *from, std::vector<int64_t> counts, size_t row_bytes,
                                          bool from_by_expert, bool to_by_expert);
    static bool has_room(const PayloadExchange &exchange, size_t numbers) { return 2 * numbers * sizeof(int64_t) <= exchange.data_bytes(); }
    // Returns the number of rows from each rank for each expert of this rank, when all ranks have begun the first round.
    const std::vector<int64_t> &counts();
    // Sets the memory of the result. nbytes: the size of all rows. `take` throws std::invalid_argument if this is not their size.
    void place(char *to, size_t nbytes) {
        to_ = to;
        to_bytes_ = nbytes;
    }

    static size_t least_bytes(size_t ranks) { return (ranks * ranks + ranks) * alignment; }

    // Writes this rank's data of the next round. Call it before the round is published.
    void load();
    // Reads the data of all ranks, which have begun the round. Returns true if the collective is complete.
    bool take();

    enum Progress : int { complete = 0, waits = 1, differs = 2 };
    // Runs the collective to its end, after `load` and the publication of a round. Returns earlier if peers take longer than
    // `patience_s` in a round or the group has failed (`waits`), or if payloads of the round differ (`differs`). The caller may then
    // handle the round, and call this method again. is_met: true if the caller has handled the current round.
    Progress run(double patience_s, const std::atomic<int64_t> *failed, bool is_met);

  private:
    enum Phase { gather, scatter, sum, exchange };
    static constexpr size_t alignment = 64;

    SharedCollective(PayloadExchange &exchange, Phase phase) : exchange_(&exchange), phase_(phase) {}
    size_t begin_of(size_t part) const { return part * part_bytes_ < nbytes_ ? part * part_bytes_ : nbytes_; }
    // Returns the number of bytes of a part in this round.
    size_t size_in_round(size_t part) const;
    bool take_exchange();

    PayloadExchange *exchange_;
    Phase phase_;
    bool gathers_later_ = false;  // an all-reduce in two phases
    const char *from_ = nullptr;
    char *to_ = nullptr;
    size_t nbytes_ = 0, part_bytes_ = 0;  // the sizes of the whole array and of a part; the last parts may be shorter
    size_t room_ = 0;                     // bytes of a part, or of the whole array, that a round moves
    size_t at_ = 0;                       // bytes that earlier rounds have moved
    size_t most_ = 0;                     // the largest number of bytes that a rank sends in an all-to-all
    SumDtype dtype_ = SumDtype::fp32;
    // Of an all-to-all: the sizes of a row and of the table of numbers; the numbers of rows to and from each rank and expert; the
    // first row of each number in `from_` and `to_`; the offset in each rank's data of the bytes for this rank.
    size_t row_bytes_ = 1, head_bytes_ = 0, to_bytes_ = 0;
    bool to_by_expert_ = false;
    std::vector<int64_t> sent_, received_, expected_;
    std::vector<size_t> from_at_, to_at_, starts_;
};

}  // namespace weft
