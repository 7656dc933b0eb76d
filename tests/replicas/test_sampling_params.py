"""Every bound of SamplingParams is refused by name and value, and nothing valid is."""

import dataclasses

import numpy as np
import pytest

from hybridserve.replicas.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("n", 0, "0"),
        ("n", 129, "129"),
        ("n", True, "True"),
        ("n", 1.5, "1.5"),
        ("temperature", -0.1, "-0.1"),
        ("temperature", float("nan"), "nan"),
        ("temperature", float("inf"), "inf"),
        ("temperature", "hot", "'hot'"),
        ("top_p", 0, "0"),
        ("top_p", 1.5, "1.5"),
        ("top_k", -2, "-2"),
        ("min_p", 1.01, "1.01"),
        ("min_p", -0.5, "-0.5"),
        ("seed", 2**64, str(2**64)),
        ("seed", 1.0, "1.0"),
        ("max_tokens", 0, "0"),
        ("max_tokens", -5, "-5"),
        ("min_tokens", -1, "-1"),
        ("min_tokens", 17, "17"),
        ("logprobs", 65, "65"),
        ("prompt_logprobs", -1, "-1"),
        ("presence_penalty", 2.1, "2.1"),
        ("frequency_penalty", -2.1, "-2.1"),
        ("repetition_penalty", 0.0, "0"),
        ("stop", ("a",) * (MAX_STOP_STRINGS + 1), str(MAX_STOP_STRINGS + 1)),
        ("stop", ("",), "''"),
        ("stop", ("x" * 2000,), "2000"),
        ("stop", (3,), "3"),
        ("stop", 3, "3"),
        ("stop_token_ids", 3, "3"),
        ("stop_token_ids", "7", "'7'"),
        ("logit_bias", [5], "[5]"),
        ("temperature", 10**400, "1000"),
        ("logit_bias", {5: 10**400}, "1000"),
        ("ignore_eos", "no", "'no'"),
        ("skip_special_tokens", 0, "0"),
        ("stop_token_ids", (-1,), "-1"),
        ("stop_token_ids", tuple(range(2000)), "2000"),
        ("logit_bias", {5: 101.0}, "101"),
        ("logit_bias", {-5: 1.0}, "-5"),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0), str(MAX_LOGIT_BIAS + 1)),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_name(field, value, shown):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    assert field.split("[")[0] in str(error.value)
    assert shown in str(error.value)


def test_edges_are_accepted():
    SamplingParams(n=128, temperature=0, top_p=1e-9, top_k=-1, min_p=1.0, seed=-(2**63), max_tokens=None)
    SamplingParams(max_tokens=4, min_tokens=4, logprobs=0, prompt_logprobs=64, repetition_penalty=1e-3)
    SamplingParams(stop=["a"] * MAX_STOP_STRINGS, logit_bias={0: -100.0, 7: 100})


def test_numbers_of_numpy_are_taken_as_python_s_own():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(7), seed=np.uint64(2**63))
    assert (params.temperature, params.top_k, params.seed) == (0.5, 7, 2**63)
    assert all(type(x) in (int, float) for x in (params.temperature, params.top_k, params.seed))


def test_one_stop_string_and_lists_become_tuples():
    params = SamplingParams(stop="END", stop_token_ids=[3, 4])
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 4)
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None).stop == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
