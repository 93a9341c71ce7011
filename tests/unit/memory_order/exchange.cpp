// Tests csrc/exchange.cpp and csrc/shared_collective.cpp in every order of their operations. Ranks that repeat an exchange must
// read each other's payload of the same exchange, and must see all of its bytes. So must ranks that repeat a collective of
// two rounds.
#include "../../../csrc/exchange.cpp"
#include "../../../csrc/shared_collective.cpp"
#include "../../../csrc/signal.cpp"

using namespace weft;
using model::Scene;

const std::vector<Isa> &weft::isas() {  // no sum runs here
    static const std::vector<Isa> none;
    return none;
}

namespace {

constexpr size_t nbytes = 8, data_bytes = 64, part_bytes = 96;

// Made again for each order.
std::vector<std::vector<Counter>> memory;

std::string payload_of(size_t rank, int64_t epoch) { return std::to_string(rank) + " " + std::to_string(epoch); }

std::function<void()> rank(size_t rank, size_t ranks, int64_t exchanges) {
    return [=] {
        std::vector<char *> addresses;
        for (auto &one : memory) addresses.push_back(reinterpret_cast<char *>(one.data()));
        PayloadExchange exchange(addresses, rank, nbytes, data_bytes);
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

std::function<void()> gathers(size_t rank, size_t ranks, int64_t collectives) {
    return [=] {
        std::vector<char *> addresses;
        for (auto &one : memory) addresses.push_back(reinterpret_cast<char *>(one.data()));
        PayloadExchange exchange(addresses, rank, nbytes, data_bytes);
        for (int64_t number = 0; number < collectives; ++number) {
            const auto part_of = [&](size_t peer) { return std::string(part_bytes, char('a' + 4 * number + peer)); };
            const std::string mine = part_of(rank);
            std::vector<char> whole(ranks * part_bytes);
            auto collective = SharedCollective::all_gather(exchange, mine.data(), whole.data(), part_bytes);
            for (bool is_complete = false; !is_complete;) {
                collective.load();
                exchange.publish("call");
                if (!exchange.wait(1e6, nullptr)) return model::fault("a wait has ended early");
                for (size_t peer = 0; peer < ranks; ++peer) model::read(exchange.data(peer), part_bytes / 3, "the data of a round");
                is_complete = collective.take();
            }
            for (size_t peer = 0; peer < ranks; ++peer)
                if (std::string(whole.data() + peer * part_bytes, part_bytes) != part_of(peer)) model::fault("a part of another collective was read");
        }
    };
}

struct Case {
    const char *name;
    size_t ranks;
    int64_t repetitions;
    int preemptions;
    std::function<void()> (*rank)(size_t, size_t, int64_t);
};

}  // namespace

int main() {
    for (const Case &c : {Case{"two ranks", 2, 3, 1, rank}, Case{"three ranks", 3, 3, 0, rank}, Case{"collectives of two ranks", 2, 2, 1, gathers}}) {
        const auto fresh = [&] {
            memory.assign(c.ranks, std::vector<Counter>(PayloadExchange::bytes_for(nbytes, data_bytes) / sizeof(Counter)));
            Scene scene;
            for (size_t one = 0; one < c.ranks; ++one) scene.threads.push_back(c.rank(one, c.ranks, c.repetitions));
            return scene;
        };
        const long orders = model::explore(fresh, c.preemptions);
        std::printf("%s: %ld orders%s%s\n", c.name, orders, model::world.wrong.empty() ? "" : ": ", model::world.wrong.c_str());
        if (!model::world.wrong.empty()) return 1;
    }
}
