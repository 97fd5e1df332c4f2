// Devices of one process that do something together, each in a call of its own. None waits: a device that arrives leaves word how it goes
// on, and once the last has come and the work is done, all are told to, each as a task. Where a device does not come in time, those that
// have come are told so: its program may have failed.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "arrivals.h"

namespace dsjax {

typedef std::chrono::steady_clock::time_point Moment;

// What the devices of a group bring. A `Part` has `rank`, the device's place in its group, and `proceed`, which is called with what came of
// the meeting. Nothing has been done where a device had no place of its own, or did not come.
template <class Part>
class Meeting {
 public:
  explicit Meeting(long ranks) : ranks_(ranks), taken_(ranks) { parts_.reserve(ranks); }

  Moment deadline;  // at which the last device must have come

  // Notes that a device has come, and gives how many came before it. Under the lock of `Meetings`. A device whose place is none, or another
  // one's, is counted too: the others must not wait for it, and hear with it that the meeting has failed.
  long enter(Part part) {
    if (part.rank < 0 || part.rank >= ranks_ || taken_[part.rank]) {
      part.rank = nowhere, outcome_ = Outcome::misplaced;
    } else {
      taken_[part.rank] = true;
    }
    parts_.push_back(std::move(part));
    return static_cast<long>(parts_.size()) - 1;
  }
  bool complete() const { return static_cast<long>(parts_.size()) == ranks_; }

  // Has devices go on until all do. Any number of threads may call this.
  void proceed() {
    for (long place; (place = next_.fetch_add(1, std::memory_order_relaxed)) < ranks_;) parts_[place].proceed(outcome_);
  }

  // Has the devices that have come go on without what they came for. Nobody can come any more.
  void give_up() {
    for (Part& part : parts_) part.proceed(Outcome::late);
  }

  // Whether no device that has come is doing anything with what the others have brought. Under the lock of `Meetings`.
  bool at_rest() const { return true; }

 protected:
  static constexpr long nowhere = -1;

  const long ranks_;
  std::atomic<Outcome> outcome_{Outcome::met};
  std::vector<Part> parts_;  // in the order of arrival; never moved: room for all is there from the beginning

 private:
  std::vector<bool> taken_;
  std::atomic<long> next_{0};
};

// The meetings of one kind that are under way in this process.
template <class Kind>
class Meetings {
 public:
  // Which meeting it is: an execution of a program, a group of its devices, and what tells apart those of a program that are not one after
  // the other for every device. The devices of a group come to the meetings of one key one after the other, each device in the same order.
  typedef std::tuple<int64_t, int64_t, size_t, bool> Key;

  static Meetings& here() {
    static Meetings* meetings = new Meetings;  // outlives every thread
    return *meetings;
  }

  // Has a device come, and gives its meeting, and how many came before it. `make`: makes the meeting, for the first. `patience`: seconds
  // in which the last must come.
  template <class Make, class Part>
  std::pair<std::shared_ptr<Kind>, long> enter(const Key& key, Make make, Part part, int64_t patience) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<Kind>& entry = open_[key];
    if (!entry) {
      entry = make();
      entry->deadline = std::chrono::steady_clock::now() + std::chrono::seconds(patience);
      look_at(entry->deadline);
    }
    const std::shared_ptr<Kind> meeting = entry;
    const long place = meeting->enter(std::move(part));
    if (meeting->complete()) open_.erase(key);
    return {meeting, place};
  }

  // Has all devices of a meeting go on. There is a task for each, since what a device does next may wait for the others: XLA's
  // collectives do.
  static void proceed(const std::shared_ptr<Kind>& meeting, long ranks, const Schedule& schedule) {
    for (long device = 0; device < ranks; device++) schedule([meeting] { meeting->proceed(); });
  }

 private:
  // Has the thread that looks for late devices do so at this moment at the latest. Under the lock.
  void look_at(Moment moment) {
    if (moment >= next_look_) return;
    next_look_ = moment;
    if (std::exchange(looks_, true)) return changed_.notify_one();
    std::thread([this] { look(); }).detach();
  }

  // Ends meetings to which a device did not come in time.
  void look() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      // Never before the moment: meetings come and go too often to be looked at one by one.
      while (next_look_ == Moment::max()) changed_.wait(lock);
      if (std::chrono::steady_clock::now() < next_look_) {
        changed_.wait_until(lock, next_look_);
        continue;
      }
      next_look_ = Moment::max();
      const Moment now = std::chrono::steady_clock::now();
      std::vector<std::shared_ptr<Kind>> late;
      for (auto entry = open_.begin(); entry != open_.end();) {
        if (entry->second->deadline <= now && entry->second->at_rest()) {
          late.push_back(std::move(entry->second));
          entry = open_.erase(entry);
        } else {
          next_look_ = std::min(next_look_, std::max(entry->second->deadline, now + std::chrono::seconds(1)));
          ++entry;
        }
      }
      lock.unlock();
      for (const std::shared_ptr<Kind>& meeting : late) meeting->give_up();
      late.clear();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Kind>> open_;
  std::condition_variable changed_;
  Moment next_look_ = Moment::max();
  bool looks_ = false;
};

}  // namespace dsjax
