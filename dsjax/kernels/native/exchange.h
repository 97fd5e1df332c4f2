// Rows exchanged between the devices of one process, which all see the same memory. XLA's own collectives hold a thread of each device
// until the last has come, and once more until all have copied, so that each costs a process some eighty switches between threads with
// 32 devices.
#pragma once

#include <cstring>

#include "meetings.h"

namespace dsjax {

class Exchange : public Meeting<Part> {
 public:
  Exchange(long ranks, size_t block, bool gathers) : Meeting(ranks), block_(block), gathers_(gathers) {}

  bool at_rest() const { return copied_.load(std::memory_order_acquire) == static_cast<long>(parts_.size()); }

  // Copies what passes between the device that came as number `place` and those before it. Of each pair the later one does this. True
  // if that was the last to be copied.
  bool copy(long place) {
    const Part& own = parts_[place];
    for (long other = 0; other < place; other++) copy(parts_[other], own), copy(own, parts_[other]);
    copy(own, own);
    return copied_.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks_;
  }

 private:
  void copy(const Part& source, const Part& target) const {
    if (block_ == 0 || source.rank == nowhere || target.rank == nowhere) return;
    std::memcpy(target.to + source.rank * block_, source.from + (gathers_ ? 0 : target.rank * block_), block_);
  }

  const size_t block_;
  const bool gathers_;
  std::atomic<long> copied_{0};
};

}  // namespace dsjax
