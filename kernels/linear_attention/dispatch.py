"""TEMPORARY placeholder for the dispatch that k_attn writes."""

from hybridserve.kernels.linear_attention import cpu


def linear_attention_prefill(q, *a, **k):
    if q.is_cuda:
        from hybridserve.kernels.linear_attention import triton_prefill

        return triton_prefill.linear_attention_prefill(q, *a, **k)
    return cpu.linear_attention_prefill(q, *a, **k)


def gdn_gates(q, *a, **k):
    if q.is_cuda:
        from hybridserve.kernels.linear_attention import triton_gdn_gates

        return triton_gdn_gates.gdn_gates(q, *a, **k)
    return cpu.gdn_gates(q, *a, **k)


def gdn_decode_fused(*a, **k):
    from hybridserve.kernels.linear_attention import triton_gdn_decode

    return triton_gdn_decode.gdn_decode_fused(*a, **k)


def gdn_decode_replay(*a, **k):
    from hybridserve.kernels.linear_attention import triton_gdn_decode_replay

    return triton_gdn_decode_replay.gdn_decode_replay(*a, **k)


linear_attention_decode = cpu.linear_attention_decode
