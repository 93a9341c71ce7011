#include "shared_collective.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "pooling.hpp"

namespace weft {

namespace {

constexpr size_t few_bytes = 256 << 10;  // the bytes of all ranks together: reading so few takes less time than a second round

void copy(char *dst, const char *src, size_t nbytes) {
    if (nbytes) std::memcpy(dst, src, nbytes);  // the addresses of nothing may be null
}

// Copies from `src` to `dst` the bytes that both contain. Both are parts of one long sequence of bytes.
void copy_overlap(char *dst, size_t dst_at, size_t dst_bytes, const char *src, size_t src_at, size_t src_bytes) {
    const size_t start = std::max(dst_at, src_at), end = std::min(dst_at + dst_bytes, src_at + src_bytes);
    if (start < end) std::memcpy(dst + (start - dst_at), src + (start - src_at), end - start);
}

// Returns the first row for each rank and expert, from the number of rows of each. by_expert: rows are ordered by expert, and then
// by rank.
std::vector<size_t> first_rows(const std::vector<int64_t> &counts, size_t ranks, bool by_expert) {
    const size_t experts = counts.size() / ranks;
    std::vector<size_t> found(counts.size());
    size_t at = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
        const size_t place = by_expert ? i % ranks * experts + i / ranks : i;
        found[place] = at;
        at += size_t(counts[place]);
    }
    return found;
}

}  // namespace

SharedCollective SharedCollective::all_gather(PayloadExchange &exchange, const char *part, char *whole, size_t part_bytes) {
    SharedCollective made(exchange, gather);
    made.from_ = part;
    made.to_ = whole;
    made.part_bytes_ = part_bytes;
    made.nbytes_ = part_bytes * exchange.ranks();
    made.room_ = exchange.data_bytes();
    return made;
}

SharedCollective SharedCollective::reduce_scatter(PayloadExchange &exchange, const char *whole, char *part, size_t part_bytes,
                                                  SumDtype dtype) {
    SharedCollective made(exchange, scatter);
    made.from_ = whole;
    made.to_ = part;
    made.part_bytes_ = part_bytes;
    made.nbytes_ = part_bytes * exchange.ranks();
    made.room_ = exchange.data_bytes() / exchange.ranks() / alignment * alignment;
    made.dtype_ = dtype;
    return made;
}

SharedCollective SharedCollective::all_reduce(PayloadExchange &exchange, char *whole, size_t nbytes, SumDtype dtype) {
    const size_t ranks = exchange.ranks();
    if (ranks == 2 || nbytes * ranks <= few_bytes) {
        SharedCollective made(exchange, sum);
        made.from_ = made.to_ = whole;
        made.nbytes_ = made.part_bytes_ = nbytes;
        made.room_ = exchange.data_bytes() / alignment * alignment;
        made.dtype_ = dtype;
        return made;
    }
    const size_t part_bytes = (nbytes / ranks + alignment) / alignment * alignment;
    SharedCollective made = reduce_scatter(exchange, whole, nullptr, part_bytes, dtype);
    made.nbytes_ = nbytes;
    made.to_ = whole + made.begin_of(exchange.rank());
    made.gathers_later_ = true;
    return made;
}

SharedCollective SharedCollective::all_to_all(PayloadExchange &exchange, const char *from, char *to, std::vector<int64_t> sent,
                                              std::vector<int64_t> received) {
    const size_t ranks = exchange.ranks(), rank = exchange.rank();
    if (sent.size() != ranks || received.size() != ranks || sent[rank] != received[rank])
        throw std::invalid_argument("pass two sizes for each of the " + std::to_string(ranks) +
                                    " ranks, sent and received. A rank receives from itself what it sends to itself");
    SharedCollective made = exchange_rows(exchange, from, std::move(sent), 1, false, false);
    made.place(to, size_t(std::accumulate(received.begin(), received.end(), int64_t(0))));
    made.expected_ = std::move(received);
    return made;
}

SharedCollective SharedCollective::exchange_rows(PayloadExchange &exchange, const char *from, std::vector<int64_t> counts, size_t row_bytes,
                                                 bool from_by_expert, bool to_by_expert) {
    const size_t ranks = exchange.ranks(), experts = counts.size() / ranks;
    if (counts.empty() || counts.size() % ranks || !has_room(exchange, counts.size()) ||
        std::any_of(counts.begin(), counts.end(), [](int64_t count) { return count < 0; }))
        throw std::invalid_argument("there are " + std::to_string(counts.size()) + " numbers of rows for " + std::to_string(ranks) +
                                    " ranks: pass equally many for each rank, none negative and no more than have room");
    SharedCollective made(exchange, SharedCollective::exchange);
    made.from_ = from;
    made.row_bytes_ = row_bytes;
    made.head_bytes_ = counts.size() * sizeof(int64_t);
    made.room_ = exchange.data_bytes() - made.head_bytes_;
    made.to_by_expert_ = to_by_expert;
    made.from_at_ = first_rows(counts, ranks, from_by_expert);
    for (size_t i = 0; i < counts.size(); ++i)
        if (i / experts != exchange.rank()) made.nbytes_ += size_t(counts[i]) * row_bytes;
    made.sent_ = std::move(counts);
    return made;
}

size_t SharedCollective::size_in_round(size_t part) const {
    const size_t size = begin_of(part + 1) - begin_of(part);
    return size <= at_ ? 0 : std::min(size - at_, room_);
}

void SharedCollective::load() {
    char *const data = exchange_->next_data();
    const size_t rank = exchange_->rank(), ranks = exchange_->ranks();
    switch (phase_) {
    case gather:
        copy(data, from_ + at_, size_in_round(rank));
        break;
    case scatter:
        for (size_t peer = 0; peer < ranks; ++peer)
            if (peer != rank) copy(data + peer * room_, from_ + begin_of(peer) + at_, size_in_round(peer));
        break;
    case sum:
        copy(data, from_ + at_, size_in_round(0));
        break;
    case exchange: {
        if (at_ == 0) std::memcpy(data, sent_.data(), head_bytes_);
        size_t start = 0;
        const size_t experts = sent_.size() / ranks;
        for (size_t i = 0; i < sent_.size(); ++i) {
            if (i / experts == rank) continue;
            const size_t size = size_t(sent_[i]) * row_bytes_;
            copy_overlap(data + head_bytes_, at_, room_, from_ + from_at_[i] * row_bytes_, start, size);
            start += size;
        }
        break;
    }
    }
}

bool SharedCollective::take() {
    if (phase_ == exchange) return take_exchange();
    const size_t rank = exchange_->rank(), ranks = exchange_->ranks();
    if (phase_ == gather) {
        for (size_t peer = 0; peer < ranks; ++peer) {
            const char *const from = peer == rank ? from_ + at_ : exchange_->data(peer);
            char *const to = to_ + begin_of(peer) + at_;
            if (from != to) copy(to, from, size_in_round(peer));
        }
    } else {
        std::vector<const char *> from(ranks);
        const size_t part = phase_ == scatter ? rank : 0, skipped = phase_ == scatter ? rank * room_ : 0;
        for (size_t peer = 0; peer < ranks; ++peer)
            from[peer] = peer == rank ? from_ + begin_of(part) + at_ : exchange_->data(peer) + skipped;
        if (const size_t size = size_in_round(part)) isas().front().sum(dtype_, from.data(), ranks, to_ + at_, size);
    }
    at_ += room_;
    if (at_ < part_bytes_) return false;
    if (!gathers_later_) return true;
    gathers_later_ = false;
    phase_ = gather;
    from_ = to_;
    to_ -= begin_of(rank);
    at_ = 0;
    room_ = exchange_->data_bytes();
    return false;
}

SharedCollective::Progress SharedCollective::run(double patience_s, const std::atomic<int64_t> *failed, bool is_met) {
    for (;; is_met = false) {
        if (!is_met) {
            if (!exchange_->wait(patience_s, failed)) return waits;
            if (!exchange_->is_equal()) return differs;
        }
        if (take()) return complete;
        load();
        exchange_->publish("more");
    }
}

const std::vector<int64_t> &SharedCollective::counts() {
    if (!received_.empty()) return received_;
    const size_t rank = exchange_->rank(), ranks = exchange_->ranks(), experts = sent_.size() / ranks;
    std::vector<int64_t> theirs(sent_.size());
    starts_.resize(ranks);
    most_ = nbytes_;
    for (size_t peer = 0; peer < ranks; ++peer) {
        if (peer == rank)
            theirs = sent_;
        else
            std::memcpy(theirs.data(), exchange_->data(peer), head_bytes_);
        size_t total = 0;
        for (size_t i = 0; i < theirs.size(); ++i) {
            if (i == rank * experts) starts_[peer] = total;
            if (i / experts != peer) total += size_t(theirs[i]) * row_bytes_;
        }
        most_ = std::max(most_, total);
        received_.insert(received_.end(), theirs.begin() + rank * experts, theirs.begin() + (rank + 1) * experts);
    }
    to_at_ = first_rows(received_, ranks, to_by_expert_);
    return received_;
}

bool SharedCollective::take_exchange() {
    const size_t rank = exchange_->rank(), ranks = exchange_->ranks(), experts = sent_.size() / ranks;
    if (at_ == 0) {
        const std::vector<int64_t> &found = counts();
        for (size_t peer = 0; peer < expected_.size(); ++peer)
            if (found[peer] != expected_[peer])
                throw std::invalid_argument("rank " + std::to_string(peer) + " sends " + std::to_string(found[peer]) + " bytes to rank " +
                                            std::to_string(rank) + ", which expects " + std::to_string(expected_[peer]) + " bytes");
        const size_t total = size_t(std::accumulate(found.begin(), found.end(), int64_t(0))) * row_bytes_;
        if (total != to_bytes_)
            throw std::invalid_argument("all ranks together send " + std::to_string(total) + " bytes to rank " + std::to_string(rank) +
                                        ", which expects " + std::to_string(to_bytes_) + " bytes");
    }
    for (size_t peer = 0; peer < ranks; ++peer) {
        size_t start = starts_[peer];
        for (size_t i = peer * experts; i < (peer + 1) * experts; ++i) {
            const size_t size = size_t(received_[i]) * row_bytes_;
            char *const to = to_ + to_at_[i] * row_bytes_;
            if (peer != rank)
                copy_overlap(to, start, size, exchange_->data(peer) + head_bytes_, at_, room_);
            else if (at_ == 0)
                copy(to, from_ + from_at_[i] * row_bytes_, size);
            start += size;
        }
    }
    at_ += room_;
    return at_ >= most_;
}

}  // namespace weft
