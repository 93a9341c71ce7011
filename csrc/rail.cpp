// Messages along a rail, the ranks with the same index on several hosts (weft/runtime/rails.py), and the rows that these
// messages carry (weft/runtime/rails_all_to_all.py).
//
// A rank sends one message to each other rank of its rail, and receives one from each, over TCP. The calling thread sends
// and receives, because handing a small message to another thread takes longer than to send it.
#include <errno.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;

// The outcome of a wait for the messages of an exchange.
enum class Outcome : int { done = 0, time_over = 1, failed = 2, lost = 3 };

// What precedes a message in the stream of bytes.
struct Header {
    uint64_t number, bytes;  // number: of the exchange, the same on both ends
};

class RailLink {
  public:
    // sockets: a non-blocking stream socket for each peer. They must stay open while this object exists.
    // failed: a word that becomes non-zero if the group fails.
    RailLink(nb::list sockets, uintptr_t failed)
        : sockets_(sockets), failed_(reinterpret_cast<const std::atomic<int64_t> *>(failed)) {
        for (nb::handle one : sockets) peers_.push_back(Peer{.socket = nb::cast<int>(one.attr("fileno")())});
    }

    // Begins an exchange. sent: for each peer, the address and the length of the message. The memory must stay unchanged until
    // the exchange has ended. received, room: the message of peer i is received at received + i * room, and has up to `room`
    // bytes.
    void begin(const std::vector<std::pair<uintptr_t, uint64_t>> &sent, uintptr_t received, uint64_t room) {
        if (sent.size() != peers_.size()) throw std::invalid_argument("sent: pass a message for each peer");
        ++number_;
        room_ = room;
        for (size_t i = 0; i < peers_.size(); ++i) {
            Peer &peer = peers_[i];
            peer.leaving = {number_, sent[i].second};
            peer.message = reinterpret_cast<const char *>(sent[i].first);
            peer.memory = reinterpret_cast<char *>(received) + i * room;
            peer.sent = peer.received = 0;
        }
        for (Peer &peer : peers_) send(peer);  // an error is found again in `go_on`
    }

    // Sends and receives for at most `seconds`. Returns the outcome, and for `lost` the number of the peer, else -1.
    std::pair<int, int> go_on(double seconds) {
        const Clock::time_point until = Clock::now() + std::chrono::nanoseconds(int64_t(1e9 * std::max(0.0, seconds)));
        std::vector<pollfd> waiting;
        for (;;) {
            waiting.clear();
            for (size_t i = 0; i < peers_.size(); ++i) {
                Peer &peer = peers_[i];
                if (!send(peer) || !receive(peer)) return {int(Outcome::lost), int(i)};
                const short events = short((peer.has_sent() ? 0 : POLLOUT) | (peer.has_received() ? 0 : POLLIN));
                if (events) waiting.push_back({peer.socket, events, 0});
            }
            if (waiting.empty()) return {int(Outcome::done), -1};
            if (failed_->load(std::memory_order_acquire)) return {int(Outcome::failed), -1};
            const auto left = std::chrono::duration_cast<std::chrono::microseconds>(until - Clock::now()).count();
            if (left <= 0) return {int(Outcome::time_over), -1};
            // Nothing ends the sleep if the group fails, so it must be short.
            poll(waiting.data(), waiting.size(), int(std::min<int64_t>(left / 1000 + 1, longest_sleep_ms)));
        }
    }

    const std::string &error() const { return error_; }
    int64_t bytes_sent() const { return bytes_sent_; }
    uint64_t number() const { return number_; }

  private:
    static constexpr int64_t longest_sleep_ms = 20;
    static constexpr uint64_t few_bytes = 32 << 10, most_at_once = 256 << 10;

    struct Peer {
        int socket;
        Header leaving{}, arriving{};
        const char *message = nullptr;
        char *memory = nullptr;
        uint64_t sent = 0, received = 0;  // bytes, with the header
        int wakes_at = 1;                 // the number of bytes that must have arrived before `poll` returns
        bool has_sent() const { return sent == sizeof(Header) + leaving.bytes; }
        bool has_received() const { return received >= sizeof(Header) && received == sizeof(Header) + arriving.bytes; }
    };

    // Sends as many bytes as the socket takes. Returns false if the connection has ended.
    bool send(Peer &peer) {
        while (!peer.has_sent()) {
            iovec parts[2];
            int count = 0;
            if (peer.sent < sizeof(Header))
                parts[count++] = {reinterpret_cast<char *>(&peer.leaving) + peer.sent, sizeof(Header) - peer.sent};
            const uint64_t from = peer.sent > sizeof(Header) ? peer.sent - sizeof(Header) : 0;
            if (from < peer.leaving.bytes) parts[count++] = {const_cast<char *>(peer.message) + from, peer.leaving.bytes - from};
            msghdr message{};
            message.msg_iov = parts;
            message.msg_iovlen = size_t(count);
            const ssize_t done = sendmsg(peer.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (done < 0) {
                if (errno == EINTR) continue;
                if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
                error_ = std::strerror(errno);
                return false;
            }
            peer.sent += uint64_t(done);
            bytes_sent_ += done;
        }
        return true;
    }

    // Receives the bytes that have arrived. Returns false if the connection has ended, or if the message is not valid.
    bool receive(Peer &peer) {
        while (!peer.has_received()) {
            const bool in_header = peer.received < sizeof(Header);
            char *const to = in_header ? reinterpret_cast<char *>(&peer.arriving) + peer.received
                                       : peer.memory + (peer.received - sizeof(Header));
            const uint64_t most = in_header ? sizeof(Header) - peer.received : sizeof(Header) + peer.arriving.bytes - peer.received;
            const ssize_t done = recv(peer.socket, to, most, MSG_DONTWAIT);
            if (done < 0) {
                if (errno == EINTR) continue;
                if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
                error_ = std::strerror(errno);
                return false;
            }
            if (done == 0) {
                error_ = "it closed the connection";
                return false;
            }
            peer.received += uint64_t(done);
            if (in_header && peer.received == sizeof(Header)) {
                if (!is_valid(peer.arriving)) return false;
                wake_at(peer, peer.arriving.bytes);
            } else if (!in_header) {
                wake_at(peer, sizeof(Header) + peer.arriving.bytes - peer.received);
            }
        }
        return true;
    }

    // Lets `poll` return only when `bytes` have arrived, instead of once for each packet.
    static void wake_at(Peer &peer, uint64_t bytes) {
        const int wanted = bytes < few_bytes ? 1 : int(std::min(bytes, most_at_once));
        if (wanted == peer.wakes_at) return;
        peer.wakes_at = wanted;
        setsockopt(peer.socket, SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);  // without effect on some kernels
    }

    bool is_valid(const Header &header) {
        if (header.number == number_ && header.bytes <= room_) return true;
        error_ = header.number != number_
                     ? "it sent message " + std::to_string(header.number) + " where message " + std::to_string(number_) + " was expected"
                     : "it sent a message of " + std::to_string(header.bytes) + " bytes, but at most " + std::to_string(room_) +
                           " are allowed";
        return false;
    }

    nb::list sockets_;
    const std::atomic<int64_t> *failed_;
    std::vector<Peer> peers_;
    uint64_t number_ = 0, room_ = 0;
    int64_t bytes_sent_ = 0;
    std::string error_;
};

// The rows of an all-to-all in two levels. Rows are bytes here. A table has the number of rows of a rank for each expert of
// each rank, [W, experts]. A rank's memory, which the ranks of its host read, has its table, and then at `rows_at` its rows.
// The rows are ordered by the rank that receives them and then by expert, or with `by_expert` by expert and then by rank. A
// rank receives the rows of each rank in the order of experts. The message for the rank with index i on another host has the
// parts for that rank of the tables of all ranks of this host, and then at `head_bytes` their rows for that rank.
class RailRows {
  public:
    RailRows(int64_t world, int64_t experts, int64_t per_host, int64_t host, int64_t index, int64_t row_bytes, int64_t rows_at,
             int64_t head_bytes, int64_t most_bytes, bool by_expert)
        : world_(world), experts_(experts), per_host_(per_host), host_(host), index_(index), row_bytes_(row_bytes), rows_at_(rows_at),
          head_bytes_(head_bytes), most_bytes_(most_bytes), by_expert_(by_expert) {}

    // Writes the messages. near: the address of the memory of each rank of this host. far: the address of the message for each
    // other host, in the order of hosts. Returns the length of each message. No rows are sent if a rank has too many.
    std::vector<int64_t> pack(const std::vector<uintptr_t> &near, const std::vector<uintptr_t> &far) {
        nb::gil_scoped_release unlocked;
        near_.assign(near.begin(), near.end());
        has_rows = true;
        for (uintptr_t memory : near) {
            int64_t rows = 0;
            for (int64_t i = 0; i < world_ * experts_; ++i) rows += table(memory)[i];
            has_rows &= 0 <= rows && rows * row_bytes_ <= most_bytes_;
        }
        std::vector<int64_t> sizes;
        for (size_t i = 0; i < far.size(); ++i) {
            const int64_t target = (int64_t(i) + (int64_t(i) >= host_)) * per_host_ + index_;
            int64_t *numbers = reinterpret_cast<int64_t *>(far[i]);
            for (uintptr_t memory : near) numbers = std::copy_n(table(memory) + target * experts_, experts_, numbers);
            sizes.push_back(head_bytes_ + (has_rows ? copy_for(target, reinterpret_cast<char *>(far[i]) + head_bytes_) : 0));
        }
        return sizes;
    }

    // Writes the numbers of rows from the ranks of this host for this rank, [ranks of the host, experts]. Returns their sum.
    int64_t near_counts(uintptr_t counts) const {
        int64_t *numbers = reinterpret_cast<int64_t *>(counts), sum = 0;
        for (uintptr_t memory : near_) {
            const int64_t *const row = table(memory) + mine() * experts_;
            sum += std::accumulate(row, row + experts_, int64_t(0));
            numbers = std::copy_n(row, experts_, numbers);
        }
        return sum;
    }

    // Copies the rows of `message`, from another host, to `out`. counts: their numbers, [ranks of that host, experts].
    void copy_far(uintptr_t message, uintptr_t counts, uintptr_t out) const {
        const int64_t *const numbers = reinterpret_cast<const int64_t *>(counts);
        const int64_t rows = std::accumulate(numbers, numbers + per_host_ * experts_, int64_t(0));
        nb::gil_scoped_release unlocked;
        std::memcpy(reinterpret_cast<char *>(out), reinterpret_cast<const char *>(message) + head_bytes_, size_t(rows * row_bytes_));
    }

    // Copies the rows from the ranks of this host for this rank to `out`.
    void copy_near(uintptr_t out) const {
        nb::gil_scoped_release unlocked;
        copy_for(mine(), reinterpret_cast<char *>(out));
    }

    bool has_rows = false;  // true if the messages contain rows

  private:
    int64_t mine() const { return host_ * per_host_ + index_; }
    static const int64_t *table(uintptr_t memory) { return reinterpret_cast<const int64_t *>(memory); }

    // Copies the rows from the ranks of this host for the rank `target` to `out`. Returns their number of bytes.
    int64_t copy_for(int64_t target, char *out) const {
        char *to = out;
        for (uintptr_t memory : near_) {
            const int64_t *const numbers = table(memory), *const mine = numbers + target * experts_;
            const char *const rows = reinterpret_cast<const char *>(memory) + rows_at_;
            const auto copy = [&](int64_t first, int64_t count) {
                std::memcpy(to, rows + first * row_bytes_, size_t(count * row_bytes_));
                to += count * row_bytes_;
            };
            if (!by_expert_) {
                copy(std::accumulate(numbers, mine, int64_t(0)), std::accumulate(mine, mine + experts_, int64_t(0)));
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

    int64_t world_, experts_, per_host_, host_, index_, row_bytes_, rows_at_, head_bytes_, most_bytes_;
    bool by_expert_;
    std::vector<uintptr_t> near_;
};

// Copies rows that are ordered by rank, then by expert, to `out`, ordered by expert, then by rank; or with `to_ranks` in the
// opposite direction. counts: the numbers of rows, [ranks, experts]. row_bytes: the length of a row.
void reorder_rows(uintptr_t rows, uintptr_t out, uintptr_t counts, int64_t ranks, int64_t experts, int64_t row_bytes, bool to_ranks) {
    const int64_t *const numbers = reinterpret_cast<const int64_t *>(counts);
    const char *const from = reinterpret_cast<const char *>(rows);
    char *const to = reinterpret_cast<char *>(out);
    std::vector<int64_t> by_rank(size_t(ranks * experts));  // the first row of each rank and expert
    std::exclusive_scan(numbers, numbers + ranks * experts, by_rank.begin(), int64_t(0));
    int64_t by_expert = 0;
    for (int64_t e = 0; e < experts; ++e)
        for (int64_t r = 0; r < ranks; ++r) {
            const int64_t cell = r * experts + e, bytes = numbers[cell] * row_bytes;
            const int64_t at = by_rank[size_t(cell)] * row_bytes;
            std::memcpy(to + (to_ranks ? at : by_expert), from + (to_ranks ? by_expert : at), size_t(bytes));
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

void register_rail(nb::module_ &m) {
    using namespace weft;
    nb::class_<RailLink>(m, "RailLink", "Messages between the ranks of a rail, over TCP.")
        .def(nb::init<nb::list, uintptr_t>(), nb::arg("sockets"), nb::arg("failed_address"))
        .def("begin", &RailLink::begin, nb::arg("sent"), nb::arg("received"), nb::arg("room"))
        .def("go_on", &RailLink::go_on, nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("error", [](const RailLink &self) { return nb::str(self.error().c_str()); })
        .def_prop_ro("bytes_sent", &RailLink::bytes_sent)
        .def_prop_ro("number", &RailLink::number);
    nb::class_<RailRows>(m, "RailRows", "The rows of an all-to-all in two levels.")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool>(), nb::kw_only(),
             nb::arg("world_size"), nb::arg("experts"), nb::arg("per_host"), nb::arg("host"), nb::arg("index"), nb::arg("row_bytes"),
             nb::arg("rows_at"), nb::arg("head_bytes"), nb::arg("most_bytes"), nb::arg("by_expert"))
        .def("pack", &RailRows::pack, nb::arg("near"), nb::arg("far"))
        .def("near_counts", &RailRows::near_counts, nb::arg("counts"))
        .def("copy_near", &RailRows::copy_near, nb::arg("out"))
        .def("copy_far", &RailRows::copy_far, nb::arg("message"), nb::arg("counts"), nb::arg("out"))
        .def_ro("has_rows", &RailRows::has_rows);
    m.def("reorder_rows", &reorder_rows, nb::kw_only(), nb::arg("rows"), nb::arg("out"), nb::arg("counts"), nb::arg("ranks"),
          nb::arg("experts"), nb::arg("row_bytes"), nb::arg("to_ranks"), nb::call_guard<nb::gil_scoped_release>());
    m.def("weighted_sum", &weighted_sum, nb::arg("numbers"), nb::arg("weights"), nb::arg("count"));
}
