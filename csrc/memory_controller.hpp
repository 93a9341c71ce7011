// The numbers of a run of T3's memory controller, and the run: memory_controller.cpp has the model.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace weft {

// Times in ns, bytes of the whole GPU. Every access is spread evenly over the channels, so one queue stands for all of them, and
// a burst is what all channels together move for one entry each.
struct ControllerSetup {
    double read_ns = 0, store_ns = 0, update_ns = 0, burst = 0, latency_ns = 0, llc = 0;
    int queue = 0, stores = 0, high = 0, low = 0, arbitration = 0, own_writes = 0;
    std::vector<double> intensities;
    std::vector<int> thresholds;
    double starved_ns = 0, link_ns = 0, link_latency_ns = 0, link_queue = 0, dma_window = 0;
    int units = 0, slots = 0, ahead = 0, slabs = 0;
    double slab_ns = 0, a_slab = 0, b_slab = 0;
    std::vector<int> a, b;      // of each tile, in the order of production: its panels of the operands
    std::vector<double> bytes;  // of each tile's output
    std::vector<int> chunk;     // of each tile
    // Each chunk has an output, copies that send it on or not, updates of each element, and a chunk of a peer where it lands.
    // peer: the run that gets it, by its place in the list; a run that stands for all ranks is its own peer. link: the link there.
    std::vector<int> output, copied, expected, lands, peer, link;
    int block = 1;          // wavefronts of a tile that a copy takes at once
    bool made = false;      // no GEMM: the products are there
    int copies = 1;         // that a step of the ring reads of each element; above 1 a kernel adds, step by step
    int arrival = 2;        // the operation of arrived bytes: 1 stores, 2 memory adds
    int sets = 0, ways = 0, wavefronts = 1;
    double bin_ns = 0;
};

using ControllerFound = std::pair<std::map<std::string, double>, std::vector<std::vector<double>>>;

// Run to the end, all together. Return for each totals by name, and the bytes of each kind of access in each bin of time.
std::vector<ControllerFound> run_controllers(const std::vector<ControllerSetup> &setups);

}  // namespace weft
