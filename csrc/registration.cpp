// Every op's schema, in one place. Kernels register themselves: csrc/cpu for the CPU, parallel_ops/ops for
// CUDA (Triton), autograd, autocast and shape inference, parallel_ops/tensor_parallel for ops over a process group.
#include <Python.h>

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(parallel_ops, m) {
  m.def("bias_gelu(Tensor x, Tensor? bias, bool tanh) -> Tensor");
  m.def("bias_gelu_backward(Tensor grad, Tensor x, Tensor? bias, bool tanh) -> (Tensor, Tensor)");
  m.def(
      "bias_dropout_add(Tensor x, Tensor? bias, Tensor? residual, ScalarType dtype, float p, Tensor? seed, SymInt "
      "index_offset, Tensor? row_positions) -> Tensor");
  m.def(
      "bias_dropout_add_(Tensor(a!) x, Tensor? bias, Tensor? residual, float p, Tensor? seed, SymInt index_offset, "
      "Tensor? row_positions) -> ()");
  m.def(
      "bias_dropout_add_backward(Tensor grad, ScalarType dtype, ScalarType? bias_dtype, float p, Tensor? seed, "
      "SymInt index_offset, Tensor? row_positions) -> (Tensor, Tensor)");
  m.def(
      "bias_swiglu(Tensor x, Tensor? bias, Tensor? weights, float alpha, float? limit, float up_offset, bool "
      "interleaved=False) -> Tensor");
  m.def(
      "bias_swiglu_backward(Tensor grad, Tensor x, Tensor? bias, Tensor? weights, float alpha, float? limit, float "
      "up_offset, bool interleaved=False) -> (Tensor, Tensor, Tensor)");
  m.def("silu_mul(Tensor gate, Tensor up, Tensor? weights, float alpha, float? limit, float up_offset) -> Tensor");
  m.def(
      "silu_mul_backward(Tensor grad, Tensor gate, Tensor up, Tensor? weights, float alpha, float? limit, float "
      "up_offset) -> (Tensor, Tensor, Tensor)");
  m.def("gelu_mul(Tensor gate, Tensor up, Tensor? weights, bool tanh) -> Tensor");
  m.def(
      "gelu_mul_backward(Tensor grad, Tensor gate, Tensor up, Tensor? weights, bool tanh) -> (Tensor, Tensor, Tensor)");
  m.def(
      "scaled_masked_softmax(Tensor scores, Tensor? mask, Tensor? sink, float scale) -> (Tensor y, Tensor sink_share)");
  m.def("scaled_masked_softmax_backward(Tensor grad, Tensor y, Tensor? sink_share, float scale) -> (Tensor, Tensor)");
  m.def(
      "scaled_causal_softmax(Tensor scores, Tensor? sink, float scale, int? window) -> (Tensor y, Tensor sink_share)");
  m.def(
      "scaled_causal_softmax_backward(Tensor grad, Tensor y, Tensor? sink_share, float scale, int? window) -> "
      "(Tensor, Tensor)");
#define LOSS_OPTIONS                                                                                 \
  "float label_smoothing, float z_loss, float softcap, int ignore_index, bool ignore_out_of_range, " \
  "int reduction"
  m.def("cross_entropy(Tensor logits, Tensor target, Tensor? class_weight, " LOSS_OPTIONS
        ", bool inplace_backward) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "cross_entropy_statistics(Tensor logits, Tensor target, Tensor? class_weight, int start, int vocab, " LOSS_OPTIONS
      ") -> (Tensor, Tensor)");
  m.def("cross_entropy_combine(Tensor statistics, Tensor column, " LOSS_OPTIONS ") -> (Tensor, Tensor)");
  m.def(
      "cross_entropy_backward(Tensor grad, Tensor logits, Tensor? class_weight, Tensor column, Tensor saved, "
      "Tensor? divisor, " LOSS_OPTIONS ", Tensor(a!) out) -> ()");
  m.def("vocab_parallel_cross_entropy(Tensor logits, Tensor target, Tensor? class_weight, " LOSS_OPTIONS
        ", bool inplace_backward, str group) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "vocab_parallel_linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
      "Tensor? class_weight, " LOSS_OPTIONS
      ", str? group, int parts, int chunk_bytes, bool[] needs) -> "
      "(Tensor loss, Tensor column, Tensor saved, Tensor divisor, Tensor dhidden, Tensor dweight, Tensor dbias)");
  m.def(
      "vocab_parallel_linear_cross_entropy_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor? bias, "
      "Tensor? class_weight, Tensor column, Tensor saved, " LOSS_OPTIONS
      ", str? group, int parts, int chunk_bytes, bool[] needs) -> (Tensor, Tensor, Tensor)");
#undef LOSS_OPTIONS
#define CHUNKS "str? group, int parts, int chunk_bytes, bool[] needs"
  m.def(
      "vocab_parallel_linear_log_probs(Tensor hidden, Tensor weight, Tensor? bias, Tensor tokens, float temperature, "
      "bool entropy, int ignore_index, " CHUNKS ") -> (Tensor log_probs, Tensor entropy, Tensor column, Tensor saved)");
  m.def(
      "vocab_parallel_linear_log_probs_backward(Tensor grad, Tensor? grad_entropy, Tensor hidden, Tensor weight, "
      "Tensor? bias, Tensor column, Tensor saved, float temperature, bool entropy, int ignore_index, " CHUNKS
      ") -> (Tensor, Tensor, Tensor)");
  m.def(
      "vocab_parallel_linear_kl_divergence(Tensor hidden, Tensor weight, Tensor? bias, Tensor teacher, "
      "Tensor? teacher_weight, float temperature, " CHUNKS ") -> (Tensor loss, Tensor saved)");
  m.def(
      "vocab_parallel_linear_kl_divergence_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor? bias, "
      "Tensor teacher, Tensor? teacher_weight, Tensor saved, float temperature, " CHUNKS
      ") -> (Tensor, Tensor, Tensor)");
#undef CHUNKS
  m.def(
      "all_gather_linear(Tensor x, Tensor[] weights, Tensor[] biases, str? group, SymInt[] sizes, int overlap, "
      "bool[] needs, bool exact) -> Tensor[]");
  m.def(
      "all_gather_linear_backward(Tensor x, Tensor[] grads, Tensor[] weights, str? group, SymInt[] sizes, int "
      "overlap, bool[] needs, bool exact) -> (Tensor, Tensor[], Tensor[])");
  m.def(
      "column_parallel_linear(Tensor x, Tensor[] weights, Tensor[] biases, str? group, SymInt[] sizes, int overlap, "
      "bool[] needs, bool exact) -> Tensor[]");
  m.def(
      "column_parallel_linear_backward(Tensor x, Tensor[] grads, Tensor[] weights, str? group, SymInt[] sizes, int "
      "overlap, bool[] needs, bool exact) -> (Tensor, Tensor[], Tensor[])");
  m.def(
      "linear_reduce_scatter(Tensor x, Tensor[] weights, Tensor[] biases, str? group, SymInt[] sizes, int overlap, "
      "bool[] needs, bool exact, bool partial_bias) -> Tensor[]");
  m.def(
      "linear_reduce_scatter_backward(Tensor x, Tensor[] grads, Tensor[] weights, str? group, SymInt[] sizes, int "
      "overlap, bool[] needs, bool exact, bool partial_bias) -> (Tensor, Tensor[], Tensor[])");
  m.def(
      "layer_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, bool zero_centered) -> "
      "(Tensor y, Tensor sum, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, "
      "Tensor rstd, bool zero_centered, bool needs_x=True, bool needs_parameters=True) -> (Tensor dx, Tensor "
      "narrow_dx, Tensor dweight, Tensor dbias)");
  m.def(
      "rms_norm(Tensor x, Tensor? weight, Tensor? residual, float eps, bool zero_centered) -> (Tensor y, Tensor sum, "
      "Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor rstd, bool zero_centered, "
      "bool needs_x=True, bool needs_weight=True) -> (Tensor dx, Tensor narrow_dx, Tensor dweight)");
  m.def(
      "rotary_embedding(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions, Tensor? cu_seqlens, bool "
      "interleaved, bool heads_first) -> (Tensor, Tensor)");
  m.def(
      "rotary_embedding_backward(Tensor grad_q, Tensor? grad_k, Tensor cos, Tensor sin, Tensor? positions, Tensor? "
      "cu_seqlens, bool interleaved, bool heads_first) -> (Tensor, Tensor)");
  m.def(
      "rotary_embedding_(Tensor(a!) q, Tensor(b!)? k, Tensor cos, Tensor sin, Tensor? positions, Tensor? cu_seqlens, "
      "bool interleaved) -> ()");
  m.def(
      "block_attention_(Tensor q, Tensor k, Tensor v, Tensor? spans, int? left, int? right, float scale, float "
      "softcap, float p, Tensor? seed, int[] places, Tensor(a!) out, Tensor(b!) statistics, bool merge) -> ()");
  m.def("attention_gradient_rows_(Tensor grad_out, Tensor out, Tensor statistics, Tensor(a!) rows) -> ()");
  m.def(
      "block_attention_backward_(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor rows, Tensor? spans, int? "
      "left, int? right, float scale, float softcap, float p, Tensor? seed, int[] places, Tensor(a!) dq, Tensor(b!) "
      "dk, Tensor(c!) dv, bool accumulate) -> ()");
  m.def(
      "flash_attention(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? cu_seqlens, Tensor? key_ranges, Tensor? "
      "dropout_seed, float softmax_scale, int? left, int? right, float softcap, float dropout_p, int first_head, str "
      "backend=\"auto\") -> (Tensor out, Tensor statistics)");
  m.def(
      "flash_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor statistics, Tensor? "
      "sink, Tensor? cu_seqlens, Tensor? key_ranges, Tensor? dropout_seed, float softmax_scale, int? left, int? right, "
      "float softcap, float dropout_p, int first_head, str backend=\"auto\") -> (Tensor dq, Tensor dk, Tensor dv, "
      "Tensor dsink)");
  m.def(
      "ring_attention(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? cu_seqlens, Tensor? key_ranges, Tensor? "
      "dropout_seed, float softmax_scale, int? left, int? right, float softcap, float dropout_p, int first_head, str "
      "backend, str group, SymInt length, str cp_layout, int ulysses_degree, bool all_gather, SymInt head_tokens, bool "
      "gradients) -> (Tensor out, Tensor statistics, Tensor qkv)");
  m.def(
      "ring_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor statistics, Tensor? sink, "
      "Tensor? cu_seqlens, Tensor? key_ranges, Tensor? dropout_seed, float softmax_scale, int? left, int? right, float "
      "softcap, float dropout_p, int first_head, str backend, str group, SymInt length, str cp_layout, int "
      "ulysses_degree, bool all_gather) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)");
  m.def("grouped_linear(Tensor x, Tensor weight, Tensor offs, Tensor? bias) -> Tensor");
  m.def(
      "grouped_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor offs, bool[] needs) -> (Tensor, Tensor, "
      "Tensor)");
  m.def("advise_huge_pages_(Tensor(a!) t) -> ()");
  m.def(
      "route(Tensor logits, Tensor? bias, int top_k, bool sigmoid, int groups, int top_groups, bool top_k_first, bool "
      "normalize, float scale) -> (Tensor weights, Tensor score_sums, Tensor z_sum, Tensor experts, Tensor load)");
  m.def(
      "route_backward(Tensor logits, Tensor experts, Tensor? grad_weights, Tensor? grad_score_sums, Tensor? "
      "grad_z_sum, bool sigmoid, bool top_k_first, bool normalize, float scale) -> Tensor");
  m.def(
      "sort_by_expert(Tensor experts, int num_experts, int? capacity, int multiple) -> (Tensor rows, Tensor places, "
      "Tensor offs)");
  m.def("permute(Tensor x, Tensor rows, Tensor places) -> Tensor");
  m.def("unpermute(Tensor y, Tensor rows, Tensor places, Tensor? weights) -> Tensor");
  m.def(
      "unpermute_backward(Tensor grad, Tensor? y, Tensor rows, Tensor places, Tensor? weights, bool needs_y) -> "
      "(Tensor dy, Tensor dweights)");
  m.def("sum_partials(Tensor partials, Tensor? bias, Tensor? residual) -> Tensor");
}

// `import parallel_ops._C` loads the library, which runs the registrations above; the module is empty.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
