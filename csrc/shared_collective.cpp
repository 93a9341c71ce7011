#include "shared_collective.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "pooling.hpp"

namespace weft {

namespace {

constexpr size_t few_bytes = 256 << 10;  // of all ranks: reading them takes less time than a second round

void copy(char *dst, const char *src, size_t nbytes) {
    if (nbytes) std::memcpy(dst, src, nbytes);  // the addresses of nothing may be null
}

// Copies from `src` to `dst` the bytes that both contain. Both are parts of one long sequence of bytes.
void copy_overlap(char *dst, size_t dst_at, size_t dst_bytes, const char *src, size_t src_at, size_t src_bytes) {
    const size_t start = std::max(dst_at, src_at), end = std::min(dst_at + dst_bytes, src_at + src_bytes);
    if (start < end) std::memcpy(dst + (start - dst_at), src + (start - src_at), end - start);
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
    const auto is_negative = [](int64_t size) { return size < 0; };
    if (sent.size() != ranks || received.size() != ranks || sent[rank] != received[rank] ||
        std::any_of(sent.begin(), sent.end(), is_negative) || std::any_of(received.begin(), received.end(), is_negative))
        throw std::invalid_argument("an all-to-all needs a size for each of the " + std::to_string(ranks) + " ranks, and equal sizes for this rank");
    SharedCollective made(exchange, SharedCollective::exchange);
    made.from_ = from;
    made.to_ = to;
    made.room_ = exchange.data_bytes() - ranks * sizeof(int64_t);
    made.nbytes_ = size_t(std::accumulate(sent.begin(), sent.end(), int64_t(0)) - sent[rank]);
    made.sent_ = std::move(sent);
    made.received_ = std::move(received);
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
        const size_t head = ranks * sizeof(int64_t);
        std::memcpy(data, sent_.data(), head);
        size_t start = 0, source = 0;  // in the bytes to send, and in `from_`, which also has this rank's own bytes
        for (size_t peer = 0; peer < ranks; ++peer) {
            const size_t size = size_t(sent_[peer]);
            if (peer != rank) {
                copy_overlap(data + head, at_, room_, from_ + source, start, size);
                start += size;
            }
            source += size;
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

bool SharedCollective::take_exchange() {
    const size_t rank = exchange_->rank(), ranks = exchange_->ranks(), head = ranks * sizeof(int64_t);
    char *to = to_;
    const char *own = from_;
    for (size_t peer = 0; peer < rank; ++peer) own += sent_[peer];
    std::vector<int64_t> theirs(ranks);
    for (size_t peer = 0; peer < ranks; ++peer) {
        const size_t size = size_t(received_[peer]);
        if (peer == rank) {
            if (at_ == 0) copy(to, own, size);
        } else {
            const char *const data = exchange_->data(peer);
            std::memcpy(theirs.data(), data, head);
            size_t start = 0, total = 0;
            for (size_t target = 0; target < ranks; ++target) {
                if (target == rank) start = total;
                if (target != peer) total += size_t(theirs[target]);
            }
            if (theirs[rank] != received_[peer])
                throw std::invalid_argument("rank " + std::to_string(peer) + " sends " + std::to_string(theirs[rank]) + " bytes to rank " +
                                            std::to_string(rank) + ", which expects " + std::to_string(received_[peer]) + " bytes");
            most_ = std::max(most_, total);
            copy_overlap(to, start, size, data + head, at_, room_);
        }
        to += size;
    }
    at_ += room_;
    return at_ >= std::max(most_, nbytes_);
}

}  // namespace weft
