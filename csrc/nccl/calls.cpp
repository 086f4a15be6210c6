// Operations: their names, which buffers a rank needs for them, and NCCL's functions.
#include <algorithm>
#include <iterator>

#include "communicator.h"

namespace parallel_ops::nccl {
namespace {

const char* const kNames[] = {"send", "recv", "all_reduce"};

}  // namespace

Kind kind_of(const std::string& name) {
  const auto found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) throw std::invalid_argument("call: no operation is called " + name);
  return static_cast<Kind>(found - std::begin(kNames));
}

void Communicator::validate(const std::string& op, const Call& call) const {
  const std::string name = kNames[static_cast<int>(call.kind)];
  if (call.kind != Kind::kAllReduce && (call.peer < 0 || call.peer >= size_)) {
    throw std::invalid_argument(who(op) + ": the peer of " + name + " must be one of the ranks, got " +
                                std::to_string(call.peer));
  }
  const bool no_input = call.kind != Kind::kRecv && call.input == nullptr;
  const bool no_output = call.kind != Kind::kSend && call.output == nullptr;
  if (call.count > 0 && (no_input || no_output)) {
    throw std::invalid_argument(who(op) + ": a buffer of " + name + " is null");
  }
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
  }
  return kInvalidArgument;
}

}  // namespace parallel_ops::nccl
