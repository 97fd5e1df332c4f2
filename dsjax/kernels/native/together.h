// The routed experts of several devices that share a memory: a token's row is read, and what each of its experts gives is written, where
// the token's own device has it. Nothing is sent: the last device to arrive computes for all, with other threads' help.
#pragma once

#include <cstdlib>
#include <new>

#include "experts.h"
#include "meetings.h"

namespace dsjax {

class Together : public Meeting<Guest> {
 public:
  using Meeting::Meeting;

  // Number of threads for which this process keeps working memory.
  static long desks() { return Desks::here().count(); }

  // Computes what all devices came for.
  void run(int threads, const Schedule& schedule) {
    if (outcome_ != Outcome::met) return;
    Phases::run(
        2, [&](int) { return ranks_; },
        [&](int phase, long place, int) {
          if (phase == 0) give(parts_[place], schedule);
          else if (outcome_ == Outcome::met) add(parts_[place]);
        },
        threads, schedule);
  }

 private:
  // Tokens with an expert on one device, a pair of a token and an expert after the other, and working memory for their products.
  struct Desk {
    std::vector<const float*> rows;
    std::vector<int32_t> ids;
    std::vector<float> weights;
    std::vector<float*> terms;
    std::unique_ptr<char, decltype(&std::free)> scratch{nullptr, &std::free};
    size_t bytes = 0;

    void clear() { rows.clear(), ids.clear(), weights.clear(), terms.clear(); }
    char* memory(size_t wanted) {
      if (wanted > bytes) {
        scratch.reset();
        bytes = 0;
        scratch.reset(static_cast<char*>(std::aligned_alloc(64, (wanted + 63) / 64 * 64)));
        if (!scratch) throw std::bad_alloc();
        bytes = (wanted + 63) / 64 * 64;
      }
      return scratch.get();
    }
  };

  // Desks that no thread is at. They are kept: pages that went back after each layer would be asked for, and cleared, for the next. There
  // are as many as threads have computed here at once. With one for each of XLA's threads, of which there are two for each device, a
  // process would keep the memory of many more.
  class Desks {
   public:
    static Desks& here() {
      static Desks* desks = new Desks;  // outlives every thread
      return *desks;
    }
    std::unique_ptr<Desk> take() {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (free_.empty()) return ++count_, std::make_unique<Desk>();
      std::unique_ptr<Desk> desk = std::move(free_.back());
      free_.pop_back();
      return desk;
    }
    void leave(std::unique_ptr<Desk> desk) {
      const std::lock_guard<std::mutex> lock(mutex_);
      free_.push_back(std::move(desk));
    }
    long count() {
      const std::lock_guard<std::mutex> lock(mutex_);
      return count_;
    }

   private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Desk>> free_;
    long count_ = 0;
  };

  // What one device's experts give for everybody's tokens. Without memory for it, the meeting fails.
  void give(const Guest& holder, const Schedule& schedule) {
    std::unique_ptr<Desk> desk;
    try {
      desk = Desks::here().take();
      give(holder, *desk, schedule);
    } catch (const std::bad_alloc&) {
      outcome_ = Outcome::no_memory;
    }
    if (desk) Desks::here().leave(std::move(desk));
  }

  void give(const Guest& holder, Desk& desk, const Schedule& schedule) const {
    auto& [rows, ids, weights, terms, scratch, bytes] = desk;
    const long first = holder.rank * holder.held;
    desk.clear();
    std::fill(holder.counts, holder.counts + holder.held + 1, 0);
    for (const Guest& home : parts_) {
      const Experts& tokens = home.experts;
      for (long n = 0; n < tokens.N; n++) {
        bool any = false;
        for (long pair = n * tokens.K; pair < (n + 1) * tokens.K; pair++) {
          const long id = tokens.ids[pair] - first;
          if (id < 0 || id >= holder.held) continue;
          any = true;
          holder.counts[id]++;
          rows.push_back(tokens.rows + n * tokens.row_stride);
          ids.push_back(static_cast<int32_t>(id));
          weights.push_back(tokens.weights[pair]);
          terms.push_back(home.terms + pair * tokens.D);
        }
        holder.counts[holder.held] += any;
      }
    }
    if (rows.empty()) return;
    Experts experts = holder.experts;
    experts.row_at = rows.data(), experts.ids = ids.data(), experts.weights = weights.data(), experts.out_at = terms.data();
    experts.N = static_cast<long>(rows.size()), experts.K = 1;
    run_kernel(experts, desk.memory(experts.scratch_bytes()), schedule);
  }

  // Each of a device's tokens: its terms one after the other, as `Experts` adds them where one device has all.
  void add(const Guest& home) const {
    const Experts& tokens = home.experts;
    const long K = tokens.K, D = tokens.D, held = ranks_ * home.held;
    for (long n = 0; n < tokens.N; n++) {
      const auto term = [&](long k) {
        const int32_t id = tokens.ids[n * K + k];
        return 0 <= id && id < held ? home.terms + (n * K + k) * D : nullptr;
      };
      add_in_order(K, term, D, home.out + n * D);
    }
  }
};

}  // namespace dsjax
