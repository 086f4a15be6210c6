// Cross-entropy of rows of logits: what the op on whole logits and those on a shard of them share.
// parallel_ops/ops/cross_entropy/cross_entropy.py has the formulas.
#pragma once

#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "../output.h"
#include "../rows.h"
#include "cross_entropy_tile.h"

namespace parallel_ops::cpu {

// The options of a loss, in the order of the schemas.
struct LossOptions {
  double label_smoothing;
  double z_loss;
  double softcap;
  int64_t ignore_index;
  bool ignore_out_of_range;
  int64_t reduction;
};

void check_rows(const char* op, const Tensor& logits, const Tensor& rows);
void check_like_loss(const char* op, const Tensor& t, ScalarType dtype);
void check_columns(const char* op, const Tensor& column);
void check_class_weight(const char* op, const std::optional<Tensor>& class_weight, const Tensor& logits);
void check_target(const char* op, const Tensor& target);

// A tensor of the dtype that losses and statistics of `like` have.
Tensor new_acc(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes);

// One call's logits and targets as the kernels read them.
template <class T>
class Logits {
 public:
  using A = acc_t<T>;

  Logits(const char* op, const Tensor& logits, const Tensor& target, const std::optional<Tensor>& class_weight,
         const LossOptions& options)
      : rows_(op, "logits", logits),
        cols_(last_dim(logits)),
        cap_(static_cast<A>(options.softcap)),
        smooth_(options.label_smoothing != 0 || class_weight.has_value()),
        ignore_index_(options.ignore_index),
        ignore_out_of_range_(options.ignore_out_of_range) {
    if (class_weight) weights_.emplace(op, "class_weight", *class_weight);
    wide_ = target.scalar_type() == ScalarType::Long;
    target_ = readable<void>(op, "target", target);
  }

  // The target of a row: a column of the shard that starts at `start`, or one of the constants.
  int64_t column(int64_t row, int64_t start, int64_t vocab) const {
    const int64_t t = wide_ ? static_cast<const int64_t*>(target_)[row] : static_cast<const int32_t*>(target_)[row];
    if (t == ignore_index_) return kIgnored;
    if (t < 0 || t >= vocab) return ignore_out_of_range_ ? kIgnored : kInvalid;
    return t >= start && t - start < cols_ ? t - start : kOnAnotherShard;
  }

  Part<A> statistics(int64_t row, int64_t first, int64_t last) const;
  A logit(int64_t row, int64_t column) const;
  A weight(int64_t column) const { return weights_ ? (*weights_)[column] : A(1); }
  const A* weights(int64_t col) const { return weights_ ? weights_->data() + col : nullptr; }
  bool weighted() const { return weights_.has_value(); }
  const Rows<T>& rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  A cap() const { return cap_; }

 private:
  Rows<T> rows_;
  int64_t cols_;
  A cap_;
  bool smooth_;
  int64_t ignore_index_;
  bool ignore_out_of_range_;
  std::optional<Values<A>> weights_;
  bool wide_ = true;
  const void* target_ = nullptr;
};

// The statistics of all rows and where their targets are.
template <class T>
void all_statistics(const Logits<T>& logits, int64_t rows, int64_t start, int64_t vocab, int64_t width, acc_t<T>* out,
                    int64_t* column);

// The loss of one row from the statistics of all shards, which lie `shard_stride` apart, and each shard's `stride`;
// what the gradient needs goes to `saved`, whose values lie `rows` apart.
template <class A>
A row_loss(const A* in, int64_t shards, int64_t shard_stride, int64_t stride, int64_t width, int64_t column,
           const LossOptions& o, A* saved, int64_t rows);

// The gradient of n logits of a row from `col` on; g is the incoming gradient, `saved` the row's, `rows` apart.
template <class T>
void row_gradient(const Logits<T>& logits, int64_t row, int64_t col, int64_t n, int64_t column, acc_t<T> g,
                  const acc_t<T>* saved, int64_t rows, const LossOptions& o, T* dx);

}  // namespace parallel_ops::cpu
