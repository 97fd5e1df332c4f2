// What devices of one process do together, each in a call of its own: the calls by which they arrive. Compiled in others.cc.
#pragma once

#include "experts.h"
#include "phases.h"

namespace dsjax {

// What came of a meeting: the same for every device that came. `late`: one did not come in time.
enum class Outcome { met, misplaced, no_memory, late };

// A device's part in an exchange. `from` holds one block for all (a gather) or one for each device, `to` has room for a block from each;
// both stay as they are until `proceed` is called.
struct Part {
  long rank;
  const char* from;
  char* to;
  std::function<void(Outcome)> proceed;
};

// A device's part in what the experts of several compute. Everything that it points to stays as it is until `proceed` is called.
struct Guest {
  long rank;
  long held;        // experts of each device: this one has those numbered from rank * held on, `experts` behind them perhaps more
  Experts experts;  // this device's, with its own tokens: ids number the experts of all devices; one that none of them has is for none
  float* terms;     // [N, K, D]: where what the experts give is left
  float* out;       // [N, D]: the sums, in the order of each token's choices
  int32_t* counts;  // [held + 1]: tokens of each of this device's experts, and how many have any of them
  std::function<void(Outcome)> proceed;
};

// A device's arrival at an `Exchange`, and at what is done `Together`. Its part is over when `proceed` is called, perhaps before this returns.
void arrive_at_exchange(int64_t run, int64_t group, long ranks, size_t block, bool gathers, Part part, int64_t patience, const Schedule& schedule);
void arrive_together(int64_t run, int64_t group, long ranks, Guest guest, int64_t patience, int threads, const Schedule& schedule);

}  // namespace dsjax
