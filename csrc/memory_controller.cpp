// A simulator of T3's GPU at the level of memory bursts. It models the work-groups of a GEMM, the traffic of a ring,
// and the memory controller. weft/sim/memory_controller describes the model and checks its numbers.
#include "memory_controller.hpp"

#include "memory_controller_cache.hpp"
#include "memory_controller_queues.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <queue>

namespace weft {

namespace {

constexpr double never = std::numeric_limits<double>::infinity();

// The destination of a chunk's output. cached: the LLC; added: memory, which adds it to its contents; remote: the peer's
// memory; stored: memory, bypassing the LLC.
enum Output { cached, added, remote, stored };

struct Piece {  // a wavefront's part of a tile
    int tile, wave;
};

struct Event {
    double at;
    int64_t order;
    int what, rank;
    int64_t which;
    bool operator>(const Event &other) const { return at != other.at ? at > other.at : order > other.order; }
};
// The event queue of all ranks.
struct Clock {
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;
    int64_t order = 0;
    double now = 0;
};

enum What { served_event, computed_event, filled_event, sent_event, arrived_event };

class Run {
  public:
    Run(const ControllerSetup &s, Clock &clock, int rank)
        : s_(s), clock_(clock), rank_(rank), n_tiles_(int(s.chunk.size())), operands_(0), tiles_of_(s.output.size()),
          lines_(s.llc), queues_(s) {
        place_.resize(n_tiles_);
        for (int t = 0; t < n_tiles_; ++t) {
            place_[t] = int(tiles_of_.at(s.chunk[t]).size());
            tiles_of_[s.chunk[t]].push_back(t);
        }
        if (!s.made) {
            a_panels_ = 1 + *std::max_element(s.a.begin(), s.a.end());
            operands_ = int64_t(a_panels_ + 1 + *std::max_element(s.b.begin(), s.b.end())) * s.slabs;
            lines_.resize(size_t(operands_) + n_tiles_);
            groups_.resize(size_t(s.units) * s.slots);
            unit_busy_.assign(s.units, false);
        }
        counts_.assign(size_t(n_tiles_) * s.wavefronts, 0.0);
        read_left_.assign(counts_.size(), 0);
        for (size_t c = 0; c < tiles_of_.size(); ++c)
            if (s.output[c] != remote && s.output[c] != cached && s.output[c] != stored)
                pieces_left_ += int64_t(tiles_of_[c].size()) * s.wavefronts;
        held_.assign(std::max(1, s.sets), 0);
        taken_.assign(n_tiles_, false);
        parked_.resize(n_tiles_);
        blocks_ = (s.wavefronts + s.block - 1) / s.block;
        in_block_.assign(size_t(n_tiles_) * blocks_, 0);
        links_.resize(1 + *std::max_element(s.link.begin(), s.link.end()));
        missing_.resize(tiles_of_.size());
        for (size_t c = 0; c < tiles_of_.size(); ++c) missing_[c] = int(tiles_of_[c].size()) * s.wavefronts;
        total_.assign(kinds, 0.0);
    }

    void start() {
        if (s_.made) {
            next_ = retired_ = n_tiles_;
            for (size_t c = 0; c < tiles_of_.size(); ++c)
                for (int t : tiles_of_[c])
                    for (int w = 0; w < s_.wavefronts; ++w) count(number({t, w}), piece_bytes(t));
        } else {
            for (int slot = 0; slot < s_.slots; ++slot)
                for (int unit = 0; unit < s_.units; ++unit) idle_.push_back(unit * s_.slots + slot);
            admit();
        }
        pump();
    }

    void handle(const Event &e) {
        switch (e.what) {
            case served_event: served(); break;
            case computed_event: computed(int(e.which)); break;
            case filled_event: filled(e.which); break;
            case sent_event: sent(e.which); break;
            case arrived_event: arrived(e.which); break;
        }
        pump();
    }

    std::map<std::string, double> found() const {
        return {{"end_ns", end_ns_}, {"gemm_ns", gemm_ns_}, {"sent_ns", sent_ns_}, {"busy_ns", busy_ns_},
                {"gemm_read", total_[gemm_read]}, {"gemm_write", total_[gemm_write] + lines_.dirty_bytes()},
                {"ring_read", total_[ring_read]}, {"ring_write", total_[ring_write]}, {"link", link_total_},
                {"tracker_most", double(most_held_)}, {"tracker_stall_ns", stall_ns_}, {"threshold", double(threshold_)},
                {"intensity", intensity_}, {"waiting_most", double(queues_.most_waiting)}, {"groups", double(retired_)},
                {"pieces_left", double(pieces_left_)}};
    }
    std::vector<std::vector<double>> bins() const { return bins_; }

  private:
    struct Group {
        int tile = -1, asked = 0, computed = 0, number = 0;
        std::vector<int> missing;  // for each slab, the number of operands that have not arrived
    };

    struct Link {
        bool busy = false;
        std::deque<Piece> ready;                     // pieces that copies have read
        std::deque<std::pair<Piece, int>> remote;    // (piece that a work-group stores remotely, slot that ends with it)
    };

    void at(double when, What what, int64_t which) { at(when, what, which, rank_); }
    void at(double when, What what, int64_t which, int rank) { clock_.events.push({when, ++clock_.order, what, rank, which}); }
    int bursts_of(double bytes) const { return std::max(1, int(std::ceil(bytes / s_.burst - 1e-9))); }

    // --- work-groups: read, compute, write ---

    // Work-groups begin in order, each when the tracker has room for its entries.
    void admit() {
        while (!idle_.empty() && next_ < n_tiles_) {
            if (s_.output[s_.chunk[next_]] == added && !take(next_)) {
                if (stalled_at_ < 0) stalled_at_ = clock_.now;
                return;
            }
            if (stalled_at_ >= 0) stall_ns_ += clock_.now - stalled_at_;
            stalled_at_ = -1;
            const int slot = idle_.front();
            idle_.pop_front();
            Group &g = groups_[slot];
            g = Group{};
            g.tile = next_++;
            g.number = next_;
            g.missing.assign(s_.slabs, 2);
            for (int i = 0; i < std::min(s_.ahead, s_.slabs); ++i) ask(slot);
            work(slot / s_.slots);
            unpark(g.tile);
        }
    }

    void ask(int slot) {
        Group &g = groups_[slot];
        const int slab = g.asked++;
        need(int64_t(s_.a[g.tile]) * s_.slabs + slab, s_.a_slab, slot, slab);
        need(int64_t(a_panels_ + s_.b[g.tile]) * s_.slabs + slab, s_.b_slab, slot, slab);
    }

    void need(int64_t id, double bytes, int slot, int slab) {
        Line &line = lines_[id];
        if (line.state == Line::present) {
            lines_.use(id);
            --groups_[slot].missing[slab];
            return;
        }
        line.waiting.emplace_back(slot, slab);
        if (line.state == Line::pending) return;
        line.state = Line::pending;
        line.bytes = bytes;
        line.bursts = bursts_of(bytes);
        for (int i = 0; i < line.bursts; ++i) queues_.reads.push_back({read_op, gemm_read, bytes / line.bursts, id, -1, ++came_});
    }

    void filled(int64_t id) {
        keep(id);
        std::vector<std::pair<int, int>> waiting;
        waiting.swap(lines_[id].waiting);
        for (auto [slot, slab] : waiting) --groups_[slot].missing[slab];
        for (auto [slot, slab] : waiting) work(slot / s_.slots);
    }

    // Starts the computation of a slab on an idle unit, by its oldest work-group whose operands have arrived.
    void work(int unit) {
        if (unit_busy_[unit]) return;
        int best = -1;
        for (int slot = unit * s_.slots; slot < (unit + 1) * s_.slots; ++slot) {
            const Group &g = groups_[slot];
            if (g.tile < 0 || g.asked <= g.computed || g.missing[g.computed]) continue;
            if (best < 0 || g.number < groups_[best].number) best = slot;
        }
        if (best < 0) return;
        unit_busy_[unit] = true;
        at(clock_.now + s_.slab_ns, computed_event, best);
    }

    void computed(int slot) {
        Group &g = groups_[slot];
        unit_busy_[slot / s_.slots] = false;
        ++g.computed;
        if (g.asked < s_.slabs) ask(slot);
        if (g.computed == s_.slabs) write(slot);
        work(slot / s_.slots);
    }

    void write(int slot) {
        const int tile = groups_[slot].tile, output = s_.output[s_.chunk[tile]], last = s_.wavefronts - 1;
        groups_[slot].tile = -1;
        if (output == cached) {
            lines_.make_dirty(operands_ + tile, s_.bytes[tile]);
            keep(operands_ + tile);
            retire(slot);
            return;
        }
        for (int w = 0; w <= last; ++w) {
            const Piece p{tile, w};
            if (output == remote)
                links_[s_.link[s_.chunk[tile]]].remote.emplace_back(p, w == last ? slot : -1);
            else
                put(waiting_, p, output == added ? update_op : store_op, gemm_write, w == last ? slot : -1);
        }
        if (output == remote) send(s_.link[s_.chunk[tile]]);
    }

    void retire(int slot) {
        ++retired_;
        // The first stage of work-groups has ended. No traffic of the ring has disturbed it, so it is the stage to measure.
        if (!measured_ && retired_ >= std::min(n_tiles_, s_.units * s_.slots)) {
            measured_ = true;
            intensity_ = clock_.now > 0 ? gemm_busy_ns_ / clock_.now : 1.0;
            size_t i = 0;
            while (i < s_.intensities.size() && intensity_ > s_.intensities[i]) ++i;
            threshold_ = s_.thresholds.empty() ? 0 : s_.thresholds[i];
        }
        if (retired_ == n_tiles_) gemm_ns_ = clock_.now;
        idle_.push_back(slot);
        admit();
    }

    void keep(int64_t id) {
        lines_.keep(id, [this](double bytes) {
            const int n = bursts_of(bytes);
            for (int i = 0; i < n; ++i) queues_.writes.push_back({store_op, gemm_write, bytes / n, -1, -1, ++came_});
        });
    }

    // --- pieces of tiles, and the tracker that counts their updates ---

    int64_t number(Piece p) const { return int64_t(p.tile) * s_.wavefronts + p.wave; }
    Piece piece(int64_t n) const { return {int(n / s_.wavefronts), int(n % s_.wavefronts)}; }
    double piece_bytes(int tile) const { return s_.bytes[tile] / s_.wavefronts; }

    void put(std::deque<Burst> &queue, Piece p, Op op, Kind kind, int slot) {
        const double bytes = piece_bytes(p.tile);
        const int n = bursts_of(bytes);
        for (int i = 0; i < n; ++i) queue.push_back({op, kind, bytes / n, number(p), i + 1 == n ? slot : -1, ++came_});
    }

    // Allocates entries in the tracker for a tile's wavefronts. Returns false if their set is full. A tile that has not begun
    // may allocate entries only if it is the next tile of its set. So an earlier tile never waits for a later tile.
    bool take(int tile) {
        if (!s_.sets || s_.made || taken_[tile]) return true;
        int &held = held_[tile % s_.sets];
        if (held + s_.wavefronts > s_.ways || tile - s_.sets * (s_.ways / s_.wavefronts) >= next_) return false;
        held += s_.wavefronts;
        tracked_ += s_.wavefronts;
        most_held_ = std::max(most_held_, tracked_);
        taken_[tile] = true;
        return true;
    }

    // Passes arrived pieces of a tile to the controller, once the tracker has room for their entries.
    void unpark(int tile) {
        if (tile >= n_tiles_ || parked_[tile].empty() || !take(tile)) return;
        for (int wave : parked_[tile]) put(queues_.ring_writes, {tile, wave}, Op(s_.arrival), ring_write, -1);
        parked_[tile].clear();
    }

    // Counts an access to a piece, by this GPU or by a peer. The last access starts the piece's copy.
    void count(int64_t n, double bytes) {
        const Piece p = piece(n);
        const int c = s_.chunk[p.tile];
        counts_[n] += bytes;
        if (counts_[n] < piece_bytes(p.tile) * s_.expected[c] * (1 - 1e-9)) return;
        counts_[n] = -never;
        --pieces_left_;
        if (s_.sets && taken_[p.tile]) {
            --held_[p.tile % s_.sets];
            --tracked_;
            unpark(p.tile + s_.sets * (s_.ways / s_.wavefronts));
            admit();
        }
        if (s_.copies > 1) {  // then a kernel reduces whole chunks
            if (--missing_[c]) return;
            for (int t : tiles_of_[c])
                for (int w = 0; w < s_.wavefronts; ++w) copy_.push_back({t, w});
        } else if (s_.copied[c]) {
            const int begin = p.wave / s_.block * s_.block, end = std::min(begin + s_.block, s_.wavefronts);
            if (++in_block_[size_t(p.tile) * blocks_ + p.wave / s_.block] < end - begin) return;
            for (int w = begin; w < end; ++w) copy_.push_back({p.tile, w});
        }
        copy();
    }

    // --- copies, the link, and the peer ---

    double read_bytes(Piece p) const { return piece_bytes(p.tile) * (s_.expected[s_.chunk[p.tile]] > 1 ? s_.copies : 1); }

    void copy() {
        while (!copy_.empty() && (reading_ <= 0 || reading_ + read_bytes(copy_.front()) <= s_.dma_window)) {
            const Piece p = copy_.front();
            copy_.pop_front();
            const double bytes = read_bytes(p);
            reading_ += bytes;
            const int n = bursts_of(bytes);
            read_left_[number(p)] = n;
            for (int i = 0; i < n; ++i) queues_.ring_reads.push_back({read_op, ring_read, bytes / n, number(p), -1, ++came_});
        }
    }

    void copied(int64_t n) {
        const Piece p = piece(n);
        if (s_.copied[s_.chunk[p.tile]]) {
            const int link = s_.link[s_.chunk[p.tile]];
            links_[link].ready.push_back(p);
            send(link);
            return;
        }
        reading_ -= read_bytes(p);  // the last sum stays in this GPU's memory, where a kernel writes it
        put(queues_.ring_writes, p, store_op, ring_write, -1);
        copy();
    }

    void send(int number_of_link) {
        Link &link = links_[number_of_link];
        if (!link.busy && !(link.ready.empty() && link.remote.empty())) {
            Piece p;
            if (!link.ready.empty()) {
                p = link.ready.front();
                link.ready.pop_front();
                reading_ -= read_bytes(p);
                copy();
            } else {
                p = link.remote.front().first;
                if (link.remote.front().second >= 0) ended_.push_back(link.remote.front().second);
                link.remote.pop_front();
            }
            link.busy = true;
            link_total_ += piece_bytes(p.tile);
            at(clock_.now + piece_bytes(p.tile) * s_.link_ns, sent_event, number(p));
        }
        // A work-group ends when its remaining stores fit into the link's queue.
        double before = 0;
        for (auto &[p, slot] : link.remote) {
            before += piece_bytes(p.tile);
            if (before > s_.link_queue) break;
            if (slot >= 0) ended_.push_back(std::exchange(slot, -1));
        }
        while (!ended_.empty()) {
            const int slot = ended_.front();
            ended_.pop_front();
            retire(slot);
        }
    }

    void sent(int64_t n) {
        const int link = s_.link[s_.chunk[piece(n).tile]];
        links_[link].busy = false;
        sent_ns_ = clock_.now;
        const Piece p = piece(n);
        const int chunk = s_.chunk[p.tile], tile = tiles_of_.at(s_.lands[chunk]).at(place_[p.tile]);
        at(clock_.now + s_.link_latency_ns, arrived_event, number({tile, p.wave}), s_.peer[chunk]);
        send(link);
    }

    void arrived(int64_t n) {
        const Piece p = piece(n);
        parked_[p.tile].push_back(p.wave);
        unpark(p.tile);
    }

    // --- the memory controller ---

    // Moves stores from the work-groups into the write queue while it has room.
    void accept() {
        while (!waiting_.empty() && int(queues_.writes.size()) < s_.stores) {
            const int slot = waiting_.front().slot;
            queues_.writes.push_back(waiting_.front());
            waiting_.pop_front();
            if (slot >= 0) retire(slot);
        }
    }

    void pump() {
        for (;;) {
            accept();
            Burst b;
            if (int(dram_.size()) >= s_.queue || !queues_.take(b, clock_.now, int(dram_.size()), threshold_, retired_ == n_tiles_))
                break;
            total_[b.kind] += b.bytes;
            dram_.push_back(b);
            const bool last_sum = s_.copies > 1 && b.kind == ring_write && !s_.copied[s_.chunk[piece(b.tag).tile]];
            if (b.op == update_op || (b.kind == ring_write && !(last_sum && counts_[b.tag] < 0))) count(b.tag, b.bytes);
        }
        queues_.note(clock_.now);
        if (serving_ || dram_.empty()) return;
        serving_ = true;
        const Burst &b = dram_.front();
        const double full_ns[] = {s_.read_ns, s_.store_ns, s_.update_ns};
        const double cost = full_ns[b.op] * b.bytes / s_.burst;
        busy_ns_ += cost;
        if (b.kind == gemm_read || b.kind == gemm_write) gemm_busy_ns_ += cost;
        if (s_.bin_ns > 0) {
            const size_t bin = size_t(clock_.now / s_.bin_ns);
            if (bins_.size() <= bin) bins_.resize(bin + 1, std::vector<double>(kinds, 0.0));
            bins_[bin][b.kind] += b.bytes;
        }
        at(clock_.now + cost, served_event, 0);
    }

    void served() {
        const Burst b = dram_.front();
        dram_.pop_front();
        serving_ = false;
        end_ns_ = clock_.now;
        if (b.kind == gemm_read && !--lines_[b.tag].bursts) at(clock_.now + s_.latency_ns, filled_event, b.tag);
        if (b.kind == ring_read && !--read_left_[b.tag]) copied(b.tag);
    }

    const ControllerSetup &s_;
    Clock &clock_;
    const int rank_;
    const int n_tiles_;
    int a_panels_ = 0;
    int64_t operands_;  // the number of cache lines of operands; the lines of outputs follow
    std::vector<std::vector<int>> tiles_of_;
    std::vector<int> place_;  // the place of each tile in its chunk
    Cache lines_;
    std::vector<Group> groups_;
    std::vector<bool> unit_busy_, taken_;
    std::deque<int> idle_, ended_;
    int next_ = 0, retired_ = 0;
    bool measured_ = false;
    double intensity_ = 0, gemm_busy_ns_ = 0, stalled_at_ = -1, stall_ns_ = 0;
    int threshold_ = 0;
    Queues queues_;
    std::deque<Burst> waiting_, dram_;  // stores that have no room in their queue; bursts that DRAM serves in order
    bool serving_ = false;
    std::vector<double> counts_;
    std::vector<int> read_left_, held_, missing_;
    std::vector<std::vector<int>> parked_;  // for each tile, its arrived pieces that wait for the tracker
    int tracked_ = 0, most_held_ = 0;
    int64_t pieces_left_ = 0;
    std::deque<Piece> copy_;
    std::vector<Link> links_;
    int blocks_ = 1;
    std::vector<int> in_block_;  // pieces of each block of a tile that are complete
    double reading_ = 0, link_total_ = 0;
    std::vector<double> total_;
    std::vector<std::vector<double>> bins_;
    int64_t came_ = 0;
    double end_ns_ = 0, gemm_ns_ = 0, sent_ns_ = 0, busy_ns_ = 0;
};

}  // namespace

std::vector<ControllerFound> run_controllers(const std::vector<ControllerSetup> &setups) {
    Clock clock;
    std::vector<std::unique_ptr<Run>> runs;
    for (const ControllerSetup &setup : setups) runs.push_back(std::make_unique<Run>(setup, clock, int(runs.size())));
    for (auto &run : runs) run->start();
    while (!clock.events.empty()) {
        const Event e = clock.events.top();
        clock.events.pop();
        clock.now = e.at;
        runs.at(e.rank)->handle(e);
    }
    std::vector<ControllerFound> found;
    for (const auto &run : runs) found.emplace_back(run->found(), run->bins());
    return found;
}

}  // namespace weft
