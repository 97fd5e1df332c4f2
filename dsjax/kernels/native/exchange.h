// Rows exchanged between the devices of one process, which all see the same memory. No thread waits: a device that arrives leaves word how
// it goes on, and the last one to arrive has all go on, each as a task. XLA's own collectives hold a thread of each device until the last
// has come, and once more until all have copied, so that each costs a process some eighty switches between threads with 32 devices.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "phases.h"

namespace dsjax {

// A device's part in an exchange. `from` holds one block for all (a gather) or one for each device, `to` has room for a block from each;
// both stay as they are until `proceed` is called, with whether all devices had places of their own; `to` has nothing where they had not.
struct Part {
  long rank;
  const char* from;
  char* to;
  std::function<void(bool)> proceed;
};

class Meeting {
 public:
  Meeting(long ranks, size_t block, bool gathers) : ranks_(ranks), block_(block), gathers_(gathers), taken_(ranks) { parts_.reserve(ranks); }

  // Notes that a device has come, and gives how many came before it. Under the lock of `Meetings`. A device whose place is none, or another
  // one's, is counted too: the others must not wait for it, and hear with it that the exchange has failed.
  long enter(Part part) {
    if (part.rank < 0 || part.rank >= ranks_ || taken_[part.rank]) {
      part.rank = nowhere, failed_ = true;
    } else {
      taken_[part.rank] = true;
    }
    parts_.push_back(std::move(part));
    return static_cast<long>(parts_.size()) - 1;
  }
  bool complete() const { return static_cast<long>(parts_.size()) == ranks_; }

  // Copies what passes between the device that came as number `place` and those before it. Of each pair the later one does this. True
  // if that was the last to be copied.
  bool copy(long place) {
    const Part& own = parts_[place];
    for (long other = 0; other < place; other++) copy(parts_[other], own), copy(own, parts_[other]);
    copy(own, own);
    return copied_.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks_;
  }

  // Has devices go on until all do. Any number of threads may call this.
  void proceed() {
    for (long place; (place = next_.fetch_add(1, std::memory_order_relaxed)) < ranks_;) parts_[place].proceed(!failed_);
  }

 private:
  static constexpr long nowhere = -1;

  void copy(const Part& source, const Part& target) const {
    if (source.rank == nowhere || target.rank == nowhere) return;
    std::memcpy(target.to + source.rank * block_, source.from + (gathers_ ? 0 : target.rank * block_), block_);
  }

  const long ranks_;
  const size_t block_;
  const bool gathers_;
  bool failed_ = false;
  std::vector<bool> taken_;
  std::vector<Part> parts_;  // never moved: room for all is there from the beginning
  std::atomic<long> copied_{0}, next_{0};
};

// The exchanges that are under way in this process.
class Meetings {
 public:
  // Which exchange it is: an execution of a program, a group of its devices, and what is exchanged. The devices of a group come to
  // the exchanges of one key one after the other, each device in the same order.
  typedef std::tuple<int64_t, int64_t, bool, size_t> Key;

  static Meetings& here() {
    static Meetings* meetings = new Meetings;  // outlives every thread
    return *meetings;
  }

  // A device's arrival. Its part is over when `part.proceed` is called, perhaps before this returns. There is a task for each device,
  // since what a device does next may wait for the others: XLA's collectives do.
  void arrive(int64_t run, int64_t group, long ranks, size_t block, bool gathers, Part part, const Schedule& schedule) {
    std::shared_ptr<Meeting> meeting;
    long place;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const Key key{run, group, gathers, block};
      auto& entry = open_[key];
      if (!entry) entry = std::make_shared<Meeting>(ranks, block, gathers);
      meeting = entry;
      place = meeting->enter(std::move(part));
      if (meeting->complete()) open_.erase(key);
    }
    if (!meeting->copy(place)) return;
    for (long device = 0; device < ranks; device++) schedule([meeting] { meeting->proceed(); });
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Meeting>> open_;
};

}  // namespace dsjax
