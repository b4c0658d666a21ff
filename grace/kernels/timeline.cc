// _Player of grace.planner.timeline in C++, for searches that simulate thousands of timelines. It adds in the order of
// the Python code, so results have the same bits. Names follow the Python code, which is the reference.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr double NEVER = std::numeric_limits<double>::infinity();
constexpr int DEVICE = 0, CPU = 1, INTRA = 2, INTER = 3, RESOURCES = 4;

struct Operation {
  int32_t resource;
  double seconds;
};
struct Chain {
  std::vector<Operation> operations;
  double loads[RESOURCES] = {0, 0, 0, 0};
};

struct Waiting {
  double at;
  int32_t tensor, number;
  bool operator<(const Waiting& other) const {
    if (at != other.at) return at < other.at;
    return tensor != other.tensor ? tensor < other.tensor : number < other.number;
  }
};

// Waiting operations, in order. A resource finishes operations in the order in which it started them, and the CPU pool
// nearly does, so their successors are pushed at or near the end.
struct Queue {
  std::vector<Waiting> items;
  size_t head = 0;
  bool empty() const { return head == items.size(); }
  const Waiting& front() const { return items[head]; }
  void pop() { head++; }
  void push(const Waiting& item) {
    items.push_back(item);
    for (size_t i = items.size() - 1; i > head && item < items[i - 1]; i--) std::swap(items[i], items[i - 1]);
  }
  void assign(const Queue& other) {
    items.assign(other.items.begin() + int64_t(other.head), other.items.end());
    head = 0;
  }
};

struct Moment {
  double ready = 0;
  double free[RESOURCES] = {0, 0, 0, 0};
  double idle[RESOURCES] = {0, 0, 0, 0};
  double gaps[RESOURCES] = {-NEVER, -NEVER, -NEVER, -NEVER};
  std::vector<double> pool;
  Queue after[RESOURCES + 1];  // one per resource of the previous operation, and one for the backward pass
  std::vector<Waiting> late;

  void assign(const Moment& other) {
    ready = other.ready;
    std::copy_n(other.free, RESOURCES, free);
    std::copy_n(other.idle, RESOURCES, idle);
    std::copy_n(other.gaps, RESOURCES, gaps);
    pool = other.pool;
    for (int i = 0; i <= RESOURCES; i++) after[i].assign(other.after[i]);
    late = other.late;
  }
};

struct Timeline {
  std::vector<double> backward;
  bool deferred;
  int64_t stride;
  std::vector<Chain> known;
  std::vector<int64_t> chains;  // for each tensor, an index into `known`
  std::vector<Moment> moments;
  std::vector<double> last;
  double totals[RESOURCES], gaps[RESOURCES];
  Moment now;

  void put(int64_t tensor, int64_t chain) {
    const double* before = known[chains[tensor]].loads;
    const double* after = known[chain].loads;
    for (int i = 0; i < RESOURCES; i++) totals[i] += after[i] - before[i];
    chains[tensor] = chain;
  }

  bool beaten(double best) const {
    for (const int resource : {DEVICE, INTRA, INTER}) {
      if (now.idle[resource] + totals[resource] >= best) return true;
    }
    return false;
  }

  void take(double upto, bool keep) {
    for (;;) {
      Queue* next_queue = nullptr;
      for (Queue& queue : now.after) {
        if (!queue.empty() && (!next_queue || queue.front() < next_queue->front())) next_queue = &queue;
      }
      if (!next_queue || next_queue->front().at > upto) return;
      const Waiting found = next_queue->front();
      next_queue->pop();
      const auto& chain = known[chains[found.tensor]].operations;
      const Operation operation = chain[found.number];
      double ended;
      if (operation.resource == CPU) {
        const double idle = now.pool.front();
        ended = std::max(found.at, idle) + operation.seconds;
        now.pool.erase(now.pool.begin());
        now.pool.insert(std::upper_bound(now.pool.begin(), now.pool.end(), ended), ended);
      } else {
        const double idle = now.free[operation.resource];
        const double began = std::max(found.at, idle);
        now.free[operation.resource] = ended = began + operation.seconds;
        now.idle[operation.resource] += began - idle;
        if (keep && operation.resource != DEVICE) {
          double* mine = &last[size_t(found.tensor) * RESOURCES];
          if (began > idle && mine[INTRA] == -NEVER && mine[INTER] == -NEVER) now.gaps[operation.resource] = began;
          mine[operation.resource] = began;
        }
      }
      const int32_t next = found.number + 1;
      if (next < int32_t(chain.size())) {
        if (deferred && operation.resource >= INTRA && upto < NEVER) {
          now.late.push_back({ended, found.tensor, next});
        } else {
          now.after[operation.resource].push({ended, found.tensor, next});
        }
      }
    }
  }

  double play(int64_t begin, double best, bool keep) {
    const int64_t count = int64_t(backward.size());
    begin -= begin % stride;
    now.assign(moments[size_t(begin / stride)]);
    for (int64_t tensor = begin; tensor < count; tensor++) {
      if (keep) {
        if (tensor % stride == 0) moments[size_t(tensor / stride)].assign(now);
        std::fill_n(&last[size_t(tensor) * RESOURCES], RESOURCES, -NEVER);
      } else if (beaten(best)) {
        return NEVER;
      }
      take(now.ready, keep);
      const double idle = now.free[DEVICE];
      const double began = std::max(now.ready, idle);
      now.idle[DEVICE] += began - idle;
      now.free[DEVICE] = now.ready = began + backward[tensor];
      take(now.ready, keep);
      if (!known[chains[tensor]].operations.empty()) now.after[RESOURCES].push({now.ready, int32_t(tensor), 0});
    }
    take(now.ready, keep);
    Queue& rest_of_chains = now.after[RESOURCES];
    for (const Waiting& each : now.late) {
      rest_of_chains.items.push_back({std::max(each.at, now.ready), each.tensor, each.number});
    }
    std::sort(rest_of_chains.items.begin() + int64_t(rest_of_chains.head), rest_of_chains.items.end());
    take(NEVER, keep);
    if (keep) std::copy_n(now.gaps, RESOURCES, gaps);
    return std::max(*std::max_element(now.free, now.free + RESOURCES), now.pool.back());
  }
};

}  // namespace

// Creates a timeline without chains. backward[n]: seconds. servers: CPU threads. stride: tensors between snapshots.
API void* grace_timeline_new(const double* backward, int64_t n, int64_t servers, int64_t deferred, int64_t stride) {
  auto* line = new Timeline();
  line->backward.assign(backward, backward + n), line->deferred = deferred != 0, line->stride = stride;
  std::fill_n(line->totals, RESOURCES, 0.0);
  for (int64_t i = 0; i < n; i++) line->totals[DEVICE] += backward[i];
  line->known.emplace_back();
  line->chains.assign(size_t(n), 0);
  line->moments.resize(size_t((n + stride - 1) / stride + 1));
  line->moments[0].pool.assign(size_t(servers), 0.0);
  line->last.assign(size_t(n) * RESOURCES, -NEVER);
  return line;
}

API void grace_timeline_free(void* line) { delete static_cast<Timeline*>(line); }

// Registers a chain, and returns its number.
API int64_t grace_timeline_chain(void* line, const int32_t* resources, const double* seconds, int64_t n) {
  Chain chain;
  for (int64_t i = 0; i < n; i++) {
    chain.operations.push_back({resources[i], seconds[i]});
    chain.loads[resources[i]] += seconds[i];
  }
  auto& known = static_cast<Timeline*>(line)->known;
  known.push_back(chain);
  return int64_t(known.size()) - 1;
}

// Sets the chains of some tensors, and returns the total time.
API double grace_timeline_set(void* line, const int64_t* tensors, const int64_t* chains, int64_t n) {
  auto* it = static_cast<Timeline*>(line);
  for (int64_t i = 0; i < n; i++) it->put(tensors[i], chains[i]);
  return it->play(*std::min_element(tensors, tensors + n), NEVER, true);
}

// Returns the total time if these tensors had these chains, or infinity once a lower bound on it reaches `best`. Does
// not change the timeline. Overwrites chains[n] with the chains that these tensors have in it.
API double grace_timeline_tried(void* line, const int64_t* tensors, int64_t* chains, int64_t n, double best) {
  auto* it = static_cast<Timeline*>(line);
  double kept[RESOURCES];
  std::copy_n(it->totals, RESOURCES, kept);
  for (int64_t i = 0; i < n; i++) {
    const int64_t before = it->chains[tensors[i]];
    it->put(tensors[i], chains[i]);
    chains[i] = before;
  }
  const double seconds = it->play(*std::min_element(tensors, tensors + n), best, false);
  for (int64_t i = 0; i < n; i++) it->chains[tensors[i]] = chains[i];
  std::copy_n(kept, RESOURCES, it->totals);
  return seconds;
}

// Sets hidden[i] = 1 if tensor i sends messages, and each link that it uses has an idle gap after them, as of the last
// grace_timeline_set.
API void grace_timeline_hide(void* line, uint8_t* hidden) {
  auto* it = static_cast<Timeline*>(line);
  for (size_t tensor = 0; tensor < it->backward.size(); tensor++) {
    bool sent = false, before = true;
    for (int resource = 0; resource < RESOURCES; resource++) {
      const double began = it->last[tensor * RESOURCES + size_t(resource)];
      if (began == -NEVER) continue;
      sent = true;
      before = before && began < it->gaps[resource];
    }
    if (sent && before) hidden[tensor] = 1;
  }
}
