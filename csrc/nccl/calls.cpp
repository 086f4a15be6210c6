// Operations: their names, which buffers a rank needs for them, and NCCL's functions.
#include <algorithm>
#include <iterator>

#include "communicator.h"

namespace parallel_ops::nccl {
namespace {

const char* const kNames[] = {"send",      "recv",   "all_reduce", "reduce_scatter", "all_gather",
                              "broadcast", "reduce", "all_to_all", "gather",         "scatter"};

bool has_peer(Kind kind) { return kind == Kind::kSend || kind == Kind::kRecv; }

bool has_root(Kind kind) {
  return kind == Kind::kBroadcast || kind == Kind::kReduce || kind == Kind::kGather || kind == Kind::kScatter;
}

// Whether this rank reads or writes the buffer at all; where it does not, null is fine.
bool needs_input(const Call& call, int rank) {
  if (call.kind == Kind::kRecv) return false;
  return (call.kind != Kind::kBroadcast && call.kind != Kind::kScatter) || call.peer == rank;
}

bool needs_output(const Call& call, int rank) {
  if (call.kind == Kind::kSend) return false;
  return (call.kind != Kind::kReduce && call.kind != Kind::kGather) || call.peer == rank;
}

}  // namespace

Kind kind_of(const std::string& name) {
  const auto found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) throw std::invalid_argument("call: no operation is called " + name);
  return static_cast<Kind>(found - std::begin(kNames));
}

void Communicator::validate(const std::string& op, const Call& call) const {
  const std::string name = kNames[static_cast<int>(call.kind)];
  if ((has_peer(call.kind) || has_root(call.kind)) && (call.peer < 0 || call.peer >= size_)) {
    throw std::invalid_argument(who(op) + ": the " + (has_root(call.kind) ? "root" : "peer") + " of " + name +
                                " must be one of the ranks, got " + std::to_string(call.peer));
  }
  if (call.count > 0 &&
      ((needs_input(call, rank_) && call.input == nullptr) || (needs_output(call, rank_) && call.output == nullptr))) {
    throw std::invalid_argument(who(op) + ": a buffer of " + name + " is null");
  }
  if (call.kind == Kind::kAllToAll) library_->AlltoAll();
  if (call.kind == Kind::kGather) library_->Gather();
  if (call.kind == Kind::kScatter) library_->Scatter();
  if (call.type == kFloat8e4m3 || call.type == kFloat8e5m2) library_->require("a float8 tensor", version(2, 24));
}

Result Communicator::enqueue(const Call& c, Comm* comm, CudaStream* stream) const {
  const Library& nccl = *library_;
  switch (c.kind) {
    case Kind::kSend:
      return nccl.Send()(c.input, c.count, c.type, c.peer, comm, stream);
    case Kind::kRecv:
      return nccl.Recv()(c.output, c.count, c.type, c.peer, comm, stream);
    case Kind::kAllReduce:
      return nccl.AllReduce()(c.input, c.output, c.count, c.type, c.op, comm, stream);
    case Kind::kReduceScatter:
      return nccl.ReduceScatter()(c.input, c.output, c.count, c.type, c.op, comm, stream);
    case Kind::kAllGather:
      return nccl.AllGather()(c.input, c.output, c.count, c.type, comm, stream);
    case Kind::kBroadcast:
      return nccl.Broadcast()(c.input, c.output, c.count, c.type, c.peer, comm, stream);
    case Kind::kReduce:
      return nccl.Reduce()(c.input, c.output, c.count, c.type, c.op, c.peer, comm, stream);
    case Kind::kAllToAll:
      return nccl.AlltoAll()(c.input, c.output, c.count, c.type, comm, stream);
    case Kind::kGather:
      return nccl.Gather()(c.input, c.output, c.count, c.type, c.peer, comm, stream);
    case Kind::kScatter:
      return nccl.Scatter()(c.input, c.output, c.count, c.type, c.peer, comm, stream);
  }
  return kInvalidArgument;
}

}  // namespace parallel_ops::nccl
