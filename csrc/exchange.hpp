// A small all-gather through shared memory. weft/symm/exchange.py explains why two slots for each rank are enough.
//
// Order: a rank writes its payload and its data, and then raises its counter to the number of the exchange (release). A peer
// reads them after its wait for the counter (acquire). A rank overwrites a slot only after it has seen all counters at the
// next exchange, which its peers begin when they have read the slot.
#pragma once
#include <cstddef>
#include <cstdint>
#include <atomic>
#include <string_view>
#include <utility>
#include <vector>

#include "signal.hpp"

namespace weft {

class PayloadExchange {
  public:
    // memory: each rank's memory, which must be zero at first. rank: this rank. nbytes: the length of the longest payload.
    // data_bytes: the memory for data that may travel with a payload.
    PayloadExchange(std::vector<char *> memory, size_t rank, size_t nbytes, size_t data_bytes = 0);

    // Bytes of memory for each rank: a counter on a cache line of its own, then two slots. A slot has the length of the payload,
    // the payload, and the data, which begin on a cache line.
    static size_t bytes_for(size_t nbytes, size_t data_bytes = 0) { return line + 2 * slot_for(nbytes, data_bytes); }

    // Returns this rank's memory for the data of the next exchange. Write it before `publish`.
    char *next_data() const;
    // Begins the next exchange with this rank's payload.
    void publish(std::string_view payload);
    // Waits until all ranks have begun this exchange, until `patience_s` has passed, or until the group has failed. Returns true
    // if all ranks have begun it.
    bool wait(double patience_s, const std::atomic<int64_t> *failed) const;
    // Returns true if all payloads are equal, except for bytes `begin` to `end`. Call it, and `payload`, only when all ranks have
    // begun this exchange.
    bool is_equal(size_t begin = 0, size_t end = 0) const;
    std::string_view payload(size_t rank) const;
    // Returns the data of a rank. Call it only when all ranks have begun this exchange, as `payload`.
    const char *data(size_t rank) const;
    size_t data_bytes() const { return data_bytes_; }
    size_t rank() const { return rank_; }
    size_t ranks() const { return memory_.size(); }
    int64_t epoch() const { return epoch_.load(std::memory_order_relaxed); }

  private:
    static constexpr size_t length_bytes = sizeof(int64_t), line = 64;
    static size_t in_lines(size_t nbytes) { return (nbytes + line - 1) / line * line; }
    static size_t payload_bytes(size_t nbytes) { return in_lines(length_bytes + nbytes); }
    static size_t slot_for(size_t nbytes, size_t data_bytes) { return payload_bytes(nbytes) + in_lines(data_bytes); }

    Counter *counter(size_t rank) const { return reinterpret_cast<Counter *>(memory_[rank]); }
    char *slot(size_t rank, int64_t epoch) const;

    std::vector<char *> memory_;
    size_t rank_, nbytes_, data_bytes_;
    std::atomic<int64_t> epoch_{0};  // one thread writes it; others may look at it meanwhile, and read nothing else after it
};

}  // namespace weft
