// Tests csrc/exchange.cpp in every order of its operations. Ranks that repeat an exchange must read each other's payload of the
// same exchange, and must see all of its bytes.
#include "../../../csrc/exchange.cpp"
#include "../../../csrc/signal.cpp"

using namespace weft;
using model::Scene;

namespace {

constexpr size_t nbytes = 8;

// Made again for each order.
std::vector<std::vector<Counter>> memory;

std::string payload_of(size_t rank, int64_t epoch) { return std::to_string(rank) + " " + std::to_string(epoch); }

std::function<void()> rank(size_t rank, size_t ranks, int64_t exchanges) {
    return [=] {
        std::vector<char *> addresses;
        for (auto &one : memory) addresses.push_back(reinterpret_cast<char *>(one.data()));
        PayloadExchange exchange(addresses, rank, nbytes);
        for (int64_t epoch = 1; epoch <= exchanges; ++epoch) {
            exchange.publish(payload_of(rank, epoch));
            if (!exchange.wait(1e6, nullptr)) return model::fault("a wait has ended early");
            if (exchange.is_equal()) model::fault("payloads that differ count as equal");
            for (size_t peer = 0; peer < ranks; ++peer) {
                const std::string_view found = exchange.payload(peer);
                model::read(found.data() - sizeof(int64_t), int64_t(sizeof(int64_t) + found.size()), "a payload");
                if (found != payload_of(peer, epoch)) model::fault("'" + std::string(found) + "' is not the payload of exchange " + std::to_string(epoch));
            }
        }
    };
}

struct Case {
    const char *name;
    size_t ranks;
    int64_t exchanges;
    int preemptions;
};

}  // namespace

int main() {
    for (const Case &c : {Case{"two ranks", 2, 3, 1}, Case{"three ranks", 3, 3, 0}}) {
        const auto fresh = [&] {
            memory.assign(c.ranks, std::vector<Counter>(PayloadExchange::bytes_for(nbytes) / sizeof(Counter)));
            Scene scene;
            for (size_t one = 0; one < c.ranks; ++one) scene.threads.push_back(rank(one, c.ranks, c.exchanges));
            return scene;
        };
        const long orders = model::explore(fresh, c.preemptions);
        std::printf("%s: %ld orders%s%s\n", c.name, orders, model::world.wrong.empty() ? "" : ": ", model::world.wrong.c_str());
        if (!model::world.wrong.empty()) return 1;
    }
}
