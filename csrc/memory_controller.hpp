// The parameters of a simulation of T3's memory controller, and its entry point. memory_controller.cpp has the model.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace weft {

// Times are in ns; bytes are of the whole GPU. Accesses are spread evenly over the memory channels, so one queue models
// all channels. In one burst, every channel moves the bytes of one queue entry.
struct ControllerSetup {
    double read_ns = 0, store_ns = 0, update_ns = 0, burst = 0, latency_ns = 0, llc = 0;
    int queue = 0, stores = 0, high = 0, low = 0, arbitration = 0, own_writes = 0;
    std::vector<double> intensities;
    std::vector<int> thresholds;
    double starved_ns = 0, link_ns = 0, link_latency_ns = 0, link_queue = 0, dma_window = 0;
    int units = 0, slots = 0, ahead = 0, slabs = 0;
    double slab_ns = 0, a_slab = 0, b_slab = 0;
    std::vector<int> a, b;      // per tile, in order of production: its panels of operands
    std::vector<double> bytes;  // per tile: bytes of its output
    std::vector<int> chunk;     // per tile
    // Per chunk. output: how the GEMM writes the chunk. copied: nonzero if a copy forwards the chunk. expected: updates
    // per element. lands: the number of the chunk at the peer. peer: the index of the receiving run in the list of
    // setups; a run that represents all ranks is its own peer. link: the link to the peer.
    std::vector<int> output, copied, expected, lands, peer, link;
    int block = 1;          // wavefronts of a tile per copy
    bool made = false;      // true: the products already exist, and no GEMM runs
    // The number of copies of each element that a step of the ring reads. If it is above 1, a kernel reduces them.
    int copies = 1;
    int arrival = 2;        // what memory does with arriving bytes: 1 store, 2 add
    int sets = 0, ways = 0, wavefronts = 1;
    double bin_ns = 0;
};

using ControllerFound = std::pair<std::map<std::string, double>, std::vector<std::vector<double>>>;

// Runs all setups together to the end. Returns, for each setup, (totals by name, bytes per kind of access and time
// bin).
std::vector<ControllerFound> run_controllers(const std::vector<ControllerSetup> &setups);

}  // namespace weft
