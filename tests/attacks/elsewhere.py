"""Attacks other than client calls: by peers, Redis, files or the machine, each with the tests that cover it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SCHEDULER = "tests/services/scheduler"
FRONTEND = "tests/services/frontend"
WORKER = "tests/services/worker"

# Attack -> expected effect, and the test that covers it (file::function).
ELSEWHERE: Mapping[str, tuple[str, Sequence[str]]] = {
    "a worker that joins with another model": (
        "refused by name; the cluster serves on",
        [f"{SCHEDULER}/test_service.py::test_a_mismatching_worker_is_refused_with_both_values"],
    ),
    "a worker whose hello has sizes beyond all measure": (
        "refused by field, value and limit; nothing is allocated for it",
        [
            f"{SCHEDULER}/replicas/test_result_checks.py::test_a_hello_beyond_its_limits_is_refused_by_field_value_and_limit"
        ],
    ),
    "a worker that reports wrong results": (
        "its session ends by name; its sequences continue elsewhere with the right text",
        [f"{SCHEDULER}/replicas/test_result_checks.py::test_an_invalid_result_ends_only_its_session"],
    ),
    "a frontend that proves itself and lies": (
        "its session ends; others are answered",
        [f"{SCHEDULER}/frontends/test_malformed_messages.py::test_invalid_sequence_ids_end_the_session"],
    ),
    "a peer without a proof, or with the proof of another": (
        "no session begins",
        [f"{SCHEDULER}/test_trust.py"],
    ),
    "entries of the registry and the prefix index that cannot be read": (
        "skipped and counted; the others are still read",
        ["tests/shared/prefix_index/test_malformed.py::test_a_worker_that_cannot_be_read_is_skipped"],
    ),
    "values of streams in Redis that no frontend has written, also of other types": (
        "that stream is lost; frontends and other streams continue",
        [
            f"{FRONTEND}/streams/test_foreign_values.py::test_the_stream_is_lost_and_no_other",
            f"{FRONTEND}/streams/test_foreign_values.py::test_a_reader_of_another_stream_at_the_same_look_reads_on",
        ],
    ),
    "API keys in Redis among entries that are none": (
        "skipped; keys can still be added and taken away",
        [f"{FRONTEND}/access/test_redis_keys.py::test_what_is_no_key_is_skipped_and_keys_can_be_taken_away"],
    ),
    "a Redis whose memory or disk is full": (
        "the cluster serves without it",
        [f"{SCHEDULER}/prefix_directory/test_prefix_directory.py"],
    ),
    "a hub cache without room": (
        "one line that names the model",
        ["tests/shared/models/test_model_hub.py::test_a_cache_without_room_is_one_line"],
    ),
    "a KV disk without room": (
        "blocks are dropped; answers stay the same",
        [f"{WORKER}/offload/test_disk_store.py::test_full_disk_drops_blocks"],
    ),
    "hundreds of small tenants next to a large one": (
        "the reserve is divided; the large one takes none of it",
        [
            f"{FRONTEND}/calls/test_admission.py::"
            "test_hundreds_of_small_tenants_share_the_reserve_and_one_large_takes_none_of_it"
        ],
    ),
    "the process of templates is killed while it renders, or while it waits": (
        "the conversation is rendered by another; nothing stays defunct",
        [
            f"{FRONTEND}/tokenizer/test_hostile_templates.py::test_a_process_that_is_killed_is_replaced_and_reaped",
            "tests/shared/process/test_child.py::"
            "test_one_that_is_killed_while_nothing_is_asked_is_reaped_and_started_anew",
        ],
    ),
    "a template that computes for ever or takes all memory": (
        "ends at a bound of processor time or memory; others are answered meanwhile",
        [f"{FRONTEND}/tokenizer/test_hostile_templates.py::test_it_ends_with_one_line_that_names_the_template"],
    ),
    "foreign lines on the stderr of children": (
        "written as JSON where the log is JSON",
        ["tests/quire/cluster/test_foreign_lines.py"],
    ),
    "headers of safetensors files that lie, and 500,000 tensors in one": (
        "one line that names the file",
        [
            f"{WORKER}/models/test_hostile_safetensors.py::test_a_header_that_lies_is_refused_in_one_line",
            f"{WORKER}/models/test_copies.py::"
            "test_a_file_of_half_a_million_tensors_is_refused_before_its_header_is_parsed",
        ],
    ),
    "a config.json with absurd sizes": (
        "refused by field, value and limit",
        [f"{WORKER}/models/test_hostile_configs.py::test_an_absurd_size_is_named"],
    ),
    "an adapter whose file is damaged": (
        "left out by name; the base model and other adapters stay",
        [f"{WORKER}/lora/test_adapters.py::test_a_damaged_file_takes_no_other_adapter_away"],
    ),
    "a page of another site, or a name that points to loopback": (
        "403 by Host and Origin",
        [f"{FRONTEND}/http/middleware/test_page_rules.py"],
    ),
    "calls that are reset as they are made": (
        "gRPC refuses most, the connection is closed; others are answered",
        [
            "tests/shared/rpc/test_connection_resets.py::"
            "test_other_clients_are_answered_while_one_resets_thousands_of_calls"
        ],
    ),
}
