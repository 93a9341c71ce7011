#include "exchange.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace weft {

PayloadExchange::PayloadExchange(std::vector<char *> memory, size_t rank, size_t nbytes, size_t data_bytes)
    : memory_(std::move(memory)), rank_(rank), nbytes_(nbytes), data_bytes_(data_bytes) {
    if (rank >= memory_.size())
        throw std::invalid_argument("rank=" + std::to_string(rank) + " must be less than the number of ranks, " +
                                    std::to_string(memory_.size()));
}

void PayloadExchange::publish(std::string_view payload) {
    if (payload.size() > nbytes_)
        throw std::invalid_argument("the payload has " + std::to_string(payload.size()) + " bytes: pass at most " +
                                    std::to_string(nbytes_));
    const int64_t next = epoch() + 1;
    epoch_.store(next, std::memory_order_relaxed);
    char *const own = slot(rank_, next);
    const int64_t size = int64_t(payload.size());
    std::memcpy(own, &size, length_bytes);
    std::memcpy(own + length_bytes, payload.data(), payload.size());
    signal_set(counter(rank_), next);
}

bool PayloadExchange::wait(double patience_s, const std::atomic<int64_t> *failed) const {
    for (size_t rank = 0; rank < memory_.size(); ++rank) {
        int64_t found = 0;
        if (rank != rank_ && signal_wait(counter(rank), epoch(), patience_s, failed, &found) != Wait::reached) return false;
    }
    return true;
}

bool PayloadExchange::is_equal(size_t begin, size_t end) const {
    const std::string_view own = payload(rank_);
    for (size_t rank = 0; rank < memory_.size(); ++rank) {
        const std::string_view one = payload(rank);
        if (one.size() != own.size() || one.size() < end) return false;
        if (one.substr(0, begin) != own.substr(0, begin) || one.substr(end) != own.substr(end)) return false;
    }
    return true;
}

std::string_view PayloadExchange::payload(size_t rank) const {
    const char *const from = slot(rank, epoch());
    int64_t size = 0;
    std::memcpy(&size, from, length_bytes);
    return {from + length_bytes, std::min(size_t(size), nbytes_)};
}

char *PayloadExchange::next_data() const { return slot(rank_, epoch() + 1) + payload_bytes(nbytes_); }
const char *PayloadExchange::data(size_t rank) const { return slot(rank, epoch()) + payload_bytes(nbytes_); }

char *PayloadExchange::slot(size_t rank, int64_t epoch) const {
    return memory_[rank] + line + size_t(epoch % 2) * slot_for(nbytes_, data_bytes_);
}

}  // namespace weft
