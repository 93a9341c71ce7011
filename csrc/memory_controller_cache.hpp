// The last-level cache of the model of the memory controller. It evicts the least recently used lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace weft {

// A line of the cache: a slab of an operand, or the output of a tile. before, after: the neighbours in the LRU list; -1
// for none.
struct Line {
    enum { absent, pending, present } state = absent;
    bool dirty = false;
    double bytes = 0;
    int64_t before = -1, after = -1;
    int bursts = 0;
    std::vector<std::pair<int, int>> waiting;  // (slot, slab)
};

class Cache {
  public:
    explicit Cache(double most_bytes) : most_bytes_(most_bytes) {}

    void resize(size_t lines) { lines_.resize(lines); }
    Line &operator[](int64_t id) { return lines_[id]; }
    double dirty_bytes() const { return dirty_bytes_; }

    void use(int64_t id) {
        if (newest_ == id) return;
        take_out(id);
        put_in(id);
    }

    void make_dirty(int64_t id, double bytes) {
        lines_[id].dirty = true;
        lines_[id].bytes = bytes;
        dirty_bytes_ += bytes;
    }

    // Inserts a line. If needed, evicts the oldest lines, and calls `write_back(bytes)` for each evicted dirty line.
    template <class WriteBack>
    void keep(int64_t id, WriteBack write_back) {
        lines_[id].state = Line::present;
        bytes_ += lines_[id].bytes;
        put_in(id);
        while (bytes_ > most_bytes_ && oldest_ != id) {
            Line &line = lines_[oldest_];
            take_out(oldest_);
            bytes_ -= line.bytes;
            line.state = Line::absent;
            if (!line.dirty) continue;
            line.dirty = false;
            dirty_bytes_ -= line.bytes;
            write_back(line.bytes);
        }
    }

  private:
    void put_in(int64_t id) {
        lines_[id].before = newest_;
        lines_[id].after = -1;
        if (newest_ >= 0) lines_[newest_].after = id;
        newest_ = id;
        if (oldest_ < 0) oldest_ = id;
    }

    void take_out(int64_t id) {
        const Line &line = lines_[id];
        (line.before >= 0 ? lines_[line.before].after : oldest_) = line.after;
        (line.after >= 0 ? lines_[line.after].before : newest_) = line.before;
    }

    const double most_bytes_;
    std::vector<Line> lines_;
    int64_t oldest_ = -1, newest_ = -1;
    double bytes_ = 0, dirty_bytes_ = 0;
};

}  // namespace weft
