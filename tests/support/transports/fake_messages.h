// Messages between the ranks of a communicator of fake_nccl.cpp, through memory that all of them share, and their sums.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>

#include "api.h"

using namespace parallel_ops::nccl;

namespace fake {

constexpr int kRanks = 16;
constexpr size_t kChunk = 64 << 10;

struct Channel {  // from one rank to another, a chunk at a time
  std::atomic<uint64_t> written, taken, lost;
  uint64_t bytes, total, tag;
  char data[kChunk];
};
struct Board {  // memory that all ranks of a communicator share
  std::atomic<int> joined;
  Channel channels[kRanks][kRanks];  // from, to
};

template <class Condition>
bool wait_until(const std::atomic<bool>& aborted, Condition condition) {
  for (int i = 0; !condition(); ++i) {
    if (aborted) return false;
    if (i < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

template <class T>
T* shared(int file, size_t size) {
  void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return found == MAP_FAILED ? nullptr : static_cast<T*>(found);
}

}  // namespace fake

namespace parallel_ops::nccl {
struct Comm {
  int size, rank;
  fake::Board* board;
  std::atomic<bool> aborted{false};
  std::atomic<int> running{0}, error{kSuccess};

  // What has been sent is in the hands of the peers.
  bool flushed() const {
    for (int peer = 0; peer < size; ++peer) {
      const fake::Channel& channel = board->channels[rank][peer];
      if (channel.written != channel.taken) return false;
    }
    return true;
  }
};
}  // namespace parallel_ops::nccl

namespace fake {

struct Transfer {
  Channel* channel;
  char* data;
  size_t total, left;
  uint64_t tag;
  bool sends;

  // True if something was moved.
  bool step(Comm& comm) {
    const uint64_t written = channel->written, taken = channel->taken;
    if (sends ? written != taken : written == taken || channel->lost > taken) return false;
    const size_t bytes = std::min(left, kChunk);
    if (sends) {
      channel->bytes = bytes, channel->total = total, channel->tag = tag;
      memcpy(channel->data, data, bytes);
      ++channel->written;
    } else {
      if (channel->total != total || channel->tag != tag) comm.error = kInvalidUsage;
      memcpy(data, channel->data, std::min<size_t>(bytes, channel->bytes));
      ++channel->taken;
    }
    data += bytes, left -= bytes;
    return true;
  }
};

class Group {
 public:
  Group(Comm& comm, uint64_t tag) : comm_(comm), tag_(tag) {}
  void send(const void* data, size_t bytes, int to) {
    add({&comm_.board->channels[comm_.rank][to], static_cast<char*>(const_cast<void*>(data)), bytes, bytes, tag_,
         true});
  }
  void receive(void* data, size_t bytes, int from) {
    add({&comm_.board->channels[from][comm_.rank], static_cast<char*>(data), bytes, bytes, tag_, false});
  }
  void tag(uint64_t tag) { tag_ = tag; }
  void run() {
    while (!transfers_.empty()) {
      bool moved = false;
      std::vector<Channel*> waiting;
      for (auto it = transfers_.begin(); it != transfers_.end();) {
        const bool behind = std::find(waiting.begin(), waiting.end(), it->channel) != waiting.end();
        if (!behind && it->step(comm_)) {
          moved = true;
          if (it->left == 0) {
            it = transfers_.erase(it);
            continue;
          }
        }
        waiting.push_back(it->channel);
        ++it;
      }
      if (comm_.aborted) return;
      if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

 private:
  void add(Transfer transfer) {
    if (transfer.left > 0) transfers_.push_back(transfer);
  }
  Comm& comm_;
  uint64_t tag_;
  std::vector<Transfer> transfers_;
};

inline float load(const uint16_t* bits) {
  const uint32_t wide = static_cast<uint32_t>(*bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
inline void store(uint16_t* bits, float value) {
  uint32_t wide;
  memcpy(&wide, &value, 4);
  *bits = static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

template <class T, class Sum>
void add_up(char* out, const std::vector<const char*>& parts, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    Sum sum = 0;
    for (const char* part : parts) {
      const T* at = reinterpret_cast<const T*>(part) + i;
      if constexpr (std::is_same_v<T, uint16_t>) {
        sum += load(at);
      } else {
        sum += *at;
      }
    }
    if constexpr (std::is_same_v<T, uint16_t>) {
      store(reinterpret_cast<T*>(out) + i, sum);
    } else {
      reinterpret_cast<T*>(out)[i] = static_cast<T>(sum);
    }
  }
}

inline size_t size_of(DataType type) {
  return type == kUint8 ? 1 : type == kBfloat16 || type == kFloat16 ? 2 : type == kInt64 || type == kFloat64 ? 8 : 4;
}

inline void sum(char* out, const std::vector<const char*>& parts, size_t count, DataType type) {
  switch (type) {
    case kFloat32:
      return add_up<float, double>(out, parts, count);
    case kFloat64:
      return add_up<double, double>(out, parts, count);
    case kBfloat16:
      return add_up<uint16_t, float>(out, parts, count);
    case kInt64:
      return add_up<int64_t, int64_t>(out, parts, count);
    default:
      return add_up<int32_t, int32_t>(out, parts, count);
  }
}

}  // namespace fake
