// Messages along a rail, the ranks with the same index on several hosts (weft/runtime/rails.py).
//
// A rank sends one message to each other rank of its rail, and receives one from each, over TCP. The calling thread sends
// and receives, because handing a small message to another thread takes longer than to send it.
#include <errno.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
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
        if (sent.size() != peers_.size())
            throw std::invalid_argument("sent has " + std::to_string(sent.size()) + " messages: pass one for each of the " +
                                        std::to_string(peers_.size()) + " peers");
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
}
