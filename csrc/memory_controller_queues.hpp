// The queues of a memory controller, and the arbitration between the requests of the GEMM and of the ring.
#pragma once

#include "memory_controller.hpp"

#include <algorithm>
#include <cstdint>
#include <deque>

namespace weft {

enum Arbitration { round_robin, compute_first, mca };
enum OwnWrites { after_reads, alternating, watermarks, in_order };
enum Kind { gemm_read, gemm_write, ring_read, ring_write, kinds };
enum Op { read_op, store_op, update_op };

struct Burst {
    Op op;
    Kind kind;
    double bytes;
    int64_t tag;  // the number of the operand or of the piece
    int slot;     // the slot of the work-group that ends when this burst is accepted
    int64_t came;
};

class Queues {
  public:
    std::deque<Burst> reads, writes, ring_reads, ring_writes;

    explicit Queues(const ControllerSetup &s) : s_(s) {}

    // Takes the next burst from a queue. Returns false if no burst may be taken now. in_dram: the number of bursts that DRAM has
    // not served yet. threshold: the largest in_dram at which `mca` arbitration takes a burst of the ring; 0: any.
    // gemm_ended: true if no requests of the GEMM follow.
    bool take(Burst &burst, double now, int in_dram, int threshold, bool gemm_ended) {
        std::deque<Burst> *queue = pick(now, in_dram, threshold, gemm_ended);
        if (!queue) return false;
        burst = queue->front();
        queue->pop_front();
        ring_last_ = queue == &ring_reads || queue == &ring_writes;
        if (ring_last_) {
            ring_at_ = now;
            ring_wrote_ = queue == &ring_writes;
        } else {
            wrote_ = queue == &writes;
        }
        return true;
    }

    // Ends a round of `take`: if the ring has no request, none is starving.
    void note(double now) {
        if (ring_reads.empty() && ring_writes.empty()) ring_at_ = now;
        most_waiting = std::max(most_waiting, ring_reads.size() + ring_writes.size());
    }

    size_t most_waiting = 0;  // requests of the ring

  private:
    std::deque<Burst> *of_compute() {
        if (reads.empty() || writes.empty()) return !reads.empty() ? &reads : !writes.empty() ? &writes : nullptr;
        switch (s_.own_writes) {
            case alternating: return wrote_ ? &reads : &writes;
            case in_order: return reads.front().came < writes.front().came ? &reads : &writes;
            case watermarks:
                if (int(writes.size()) >= s_.high) draining_ = true;
                if (int(writes.size()) <= s_.low) draining_ = false;
                return draining_ ? &writes : &reads;
            default: return &reads;
        }
    }

    std::deque<Burst> *of_ring() {
        if (ring_reads.empty() || ring_writes.empty())
            return !ring_reads.empty() ? &ring_reads : !ring_writes.empty() ? &ring_writes : nullptr;
        return ring_wrote_ ? &ring_reads : &ring_writes;
    }

    std::deque<Burst> *pick(double now, int in_dram, int threshold, bool gemm_ended) {
        std::deque<Burst> *compute = of_compute(), *ring = of_ring();
        if (!compute || !ring) {
            if (compute || !ring || s_.arbitration != mca || gemm_ended) return compute ? compute : ring;
        } else if (s_.arbitration == round_robin) {
            return ring_last_ ? compute : ring;
        } else if (s_.arbitration == compute_first || gemm_ended) {
            return compute;
        }
        if (now - ring_at_ > s_.starved_ns) return ring;
        if (compute) return compute;
        return !threshold || in_dram < threshold ? ring : nullptr;
    }

    const ControllerSetup &s_;
    bool wrote_ = false, draining_ = false, ring_wrote_ = false, ring_last_ = false;
    double ring_at_ = 0;
};

}  // namespace weft
