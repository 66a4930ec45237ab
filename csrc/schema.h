// The arguments that the operators of all backends share, in the order of the tuples in
// python/boltzattn/problem.py.
#pragma once

// The namespace of the operators: another one if TORCH_EXTENSION_NAME says so, as in kernels of the
// Hugging Face hub, of which several versions may be loaded at once.
#ifdef TORCH_EXTENSION_NAME
#define BOLTZATTN_NAMESPACE TORCH_EXTENSION_NAME
#else
#define BOLTZATTN_NAMESPACE boltzattn
#endif
// In two steps, so that the name is expanded before torch's macros make a string of it.
#define BOLTZATTN_DEFINE_IN(space, m) STABLE_TORCH_LIBRARY_FRAGMENT(space, m)
#define BOLTZATTN_DEFINE(m) BOLTZATTN_DEFINE_IN(BOLTZATTN_NAMESPACE, m)
#define BOLTZATTN_IMPLEMENT_IN(space, key, m) STABLE_TORCH_LIBRARY_IMPL(space, key, m)
#define BOLTZATTN_IMPLEMENT(key, m) BOLTZATTN_IMPLEMENT_IN(BOLTZATTN_NAMESPACE, key, m)

#define BOLTZATTN_PROBLEM                                                         \
  "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? key_mask, " \
  "Tensor? slopes, Tensor? seed, float scale, float dropout_p, bool is_causal, bool is_gaussian"
#define BOLTZATTN_LAYER                                                          \
  "Tensor query, Tensor key, Tensor value, Tensor weight, Tensor? weight_bias, " \
  "Tensor? out_bias, Tensor? key_mask, Tensor? extents, float scale"
#define BOLTZATTN_SELF_ATTENTION                                                           \
  "Tensor x, Tensor w_q, Tensor w_k, Tensor w_v, Tensor? w_o, Tensor? b_in, Tensor? b_o, " \
  "Tensor? key_mask, int num_heads, float scale, bool is_causal"
#define BOLTZATTN_SAVED "Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, "

#define BOLTZATTN_FORWARD "(" BOLTZATTN_PROBLEM ") -> (Tensor, Tensor)"
#define BOLTZATTN_BACKWARD \
  "(" BOLTZATTN_SAVED BOLTZATTN_PROBLEM ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
#define BOLTZATTN_PROJECT "(Tensor x, Tensor weight, Tensor? bias) -> (Tensor, Tensor)"

// The same for the C++ functions.
#define BOLTZATTN_SAVED_PARAMETERS Tensor grad_out, OptionalTensor grad_lse, Tensor out, Tensor lse
#define BOLTZATTN_PROBLEM_PARAMETERS                                                              \
  Tensor query, Tensor key, Tensor value, OptionalTensor attn_mask, OptionalTensor key_mask,      \
      OptionalTensor slopes, OptionalTensor seed, double scale, double dropout_p, bool is_causal, \
      bool is_gaussian
#define BOLTZATTN_PROBLEM_ARGUMENTS \
  query, key, value, attn_mask, key_mask, slopes, seed, scale, dropout_p, is_causal, is_gaussian
#define BOLTZATTN_LAYER_PARAMETERS                                                   \
  Tensor query, Tensor key, Tensor value, Tensor weight, OptionalTensor weight_bias, \
      OptionalTensor out_bias, OptionalTensor key_mask, OptionalTensor extents, double scale
#define BOLTZATTN_LAYER_ARGUMENTS \
  query, key, value, weight, weight_bias, out_bias, key_mask, extents, scale
#define BOLTZATTN_SELF_ATTENTION_PARAMETERS                                              \
  Tensor x, Tensor w_q, Tensor w_k, Tensor w_v, OptionalTensor w_o, OptionalTensor b_in, \
      OptionalTensor b_o, OptionalTensor key_mask, int64_t num_heads, double scale, bool is_causal
#define BOLTZATTN_SELF_ATTENTION_ARGUMENTS \
  x, w_q, w_k, w_v, w_o, b_in, b_o, key_mask, num_heads, scale, is_causal
