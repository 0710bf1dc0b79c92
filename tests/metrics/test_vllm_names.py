"""Every metric of vLLM 0.33 is either reported under the same name or listed with a reason."""

from __future__ import annotations

import pytest

from tests.metrics.catalogue import families

REPORTED = [
    "admission_rejections_total",
    "cache_config_info",
    "e2e_request_latency_seconds",
    "engine_sleep_state",
    "generation_tokens_total",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "kv_cache_usage_perc",
    "lora_requests_info",
    "mm_cache_hits_total",
    "mm_cache_queries_total",
    "num_preemptions_total",
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "prompt_tokens_cached_total",
    "prompt_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_inference_time_seconds",
    "request_max_num_generation_tokens",
    "request_num_preemptions",
    "request_params_max_tokens",
    "request_params_n",
    "request_prefill_kv_computed_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_success_total",
    "request_time_per_output_token_seconds",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_drafts_total",
    "time_to_first_token_seconds",
    "tool_call_parser_invocations_total",
]

OWN_NAME = "the same is told under a name of Quire's own"
NO_WEBSOCKETS = "there is no endpoint over WebSockets"
NO_RESIDENCY = "blocks are counted, their times are not sampled; vLLM has it off by default"
NO_FLOPS = "work is measured by its time; vLLM has it off by default"
NOT_OFFERED = {
    "corrupted_requests_total": "logits are not searched for what is no number; vLLM has it off by default",
    "estimated_flops_per_gpu_total": NO_FLOPS,
    "estimated_read_bytes_per_gpu_total": NO_FLOPS,
    "estimated_write_bytes_per_gpu_total": NO_FLOPS,
    "external_prefix_cache_hits_total": f"{OWN_NAME}: quire_scheduler_fetched_tokens_total",
    "external_prefix_cache_queries_total": f"{OWN_NAME}: quire_scheduler_fetches_total",
    "kv_block_idle_before_evict_seconds": NO_RESIDENCY,
    "kv_block_lifetime_seconds": NO_RESIDENCY,
    "kv_block_reuse_gap_seconds": NO_RESIDENCY,
    "num_requests_kv_fetch_by_stage": f"{OWN_NAME}: quire_scheduler_fetch_seconds",
    "prompt_tokens_by_source_total": f"{OWN_NAME}: vllm:prompt_tokens_total, vllm:prompt_tokens_cached_total",
    "prompt_tokens_cached_by_source_total": f"{OWN_NAME}: quire_scheduler_fetched_tokens_total",
    "rl_weight_update_operation_duration_seconds": f"{OWN_NAME}: quire_scheduler_weight_updates_total",
    "rl_weight_update_operations_in_flight": f"{OWN_NAME}: quire_scheduler_weight_updates_total",
    "watermark_requests_total": "texts are not watermarked; vLLM has it off by default",
    "websocket_connection_duration_seconds": NO_WEBSOCKETS,
    "websocket_connections_active": NO_WEBSOCKETS,
    "websocket_connections_total": NO_WEBSOCKETS,
}
OURS = {family.name: family for family in families()}


@pytest.mark.parametrize("name", REPORTED)
def test_a_name_of_vllm_is_reported_with_its_labels(name: str) -> None:
    family = OURS[f"vllm:{name}"]
    assert "model_name" in family.labels or name == "lora_requests_info"


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_what_is_not_offered_names_metrics_that_are(name: str) -> None:
    assert f"vllm:{name}" not in OURS
    named = [word.rstrip(",") for word in NOT_OFFERED[name].split() if word.startswith(("vllm:", "quire_"))]
    assert set(named) <= OURS.keys()
    assert bool(named) == NOT_OFFERED[name].startswith(OWN_NAME)


def test_the_two_lists_have_every_name_under_vllm() -> None:
    assert {name for name in OURS if name.startswith("vllm:")} == {f"vllm:{name}" for name in REPORTED}


def test_sizes_of_the_cache_are_told_in_tokens_too() -> None:
    labels = OURS["vllm:cache_config_info"].labels
    assert {"block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"} <= set(labels)
