"""WorkerHello in grouped form and in the older ungrouped form."""

from __future__ import annotations

import base64

import pytest

from quire.shared.errors import FailedPrecondition
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.rpc import worker_hello

# Every field, as a worker built before the groups wrote it.
OLD = base64.b64decode(
    "CgZ3b3JrZXIQBRoGYWRkcmVzIgZ2ZXJzaW8qCQoFcGFwZXIYMjICCAQ4CkALSAxQDVgOYgZoZWxkX2JqBmhlbGRfYnIGZGV2aWNleBKAAQGIAQGi"
    "AQZsb2dwcm+oAQG4ARfAAQHIAQHSAQQKACgC0gEGEgIIQCgD2gEGaGVsZF9i4gEGbG9naXRz4gEHbG9naXRzMugBHfIBBmFkYXB0ZfIBB2FkYXB0"
    "ZTL6AQZzdHJ1Y3T6AQdzdHJ1Y3QywAIjygIGaGVsZF9w0gIGaGVsZF9w2gIGYWRhcHRl4gIGYWRhcHRl4gIHYWRhcHRlMugCKJIDBggFEgJ2NZgD"
    "AaIDBmFzbGVlcKIDB2FzbGVlcDKoAzDiAwZrdl9hZGTqAwZrdl9sYXnwAyv6AwRyb2xlgAQeiAQykgQGaGVsZF9kmgQGaGVsZF9kogQGaGVsZF9w"
    "qgQGaGVsZF9ksAQfuAQgwgQGd2VpZ2h0"
)
GROUPED = pb.WorkerHello(
    worker_id="worker",
    pid=5,
    address="addres",
    version="versio",
    model={"name": "paper", "vocab_size": 50},
    layout={"block_size": 4},
    last_epoch=14,
    device="device",
    redirected=True,
    connection_lost=True,
    role="role",
    limits={"max_num_seqs": 11, "max_num_batched_tokens": 12, "max_model_len": 13},
    kv_cache={
        "num_blocks": 10,
        "groups": [{"full": {}, "num_layers": 2}, {"window": {"length": 64}, "num_layers": 3}],
        "num_host_blocks": 35,
        "num_disk_blocks": 50,
        "num_query_vectors": 32,
    },
    held={
        "block_ids": b"held_b",
        "block_hashes": b"held_b",
        "block_groups": b"held_b",
        "host_place_ids": b"held_p",
        "host_place_hashes": b"held_p",
        "host_place_groups": b"held_p",
        "disk_place_ids": b"held_d",
        "disk_place_hashes": b"held_d",
        "disk_place_groups": b"held_d",
    },
    sampling={
        "max_logprobs": 18,
        "logprobs_mode": "logpro",
        "batch_invariant": True,
        "logits_processors": ["logits", "logits2"],
        "structured_output_backends": ["struct", "struct2"],
    },
    drafting={"constrained_only": True, "num_speculative_tokens": 23, "fixed_length": True},
    parallelism={"num_ranks": 29, "num_stages": 30, "num_contexts": 31},
    lora={"names": ["adapte", "adapte2"], "digests": b"adapte", "paths": ["adapte", "adapte2"], "max_adapters": 40},
    kv_transfer={"address": "kv_add", "layout": b"kv_lay", "block_bytes": 43},
    weights_state={
        "weights": {"update": 5, "version": "v5"},
        "stages_beside_steps": True,
        "asleep": ["asleep", "asleep2"],
        "sleep_level": 48,
        "weights_digest": b"weight",
    },
)


def test_a_hello_without_groups_is_read_whole() -> None:
    hello = pb.WorkerHello.FromString(OLD)
    worker_hello.group(hello)
    assert hello == GROUPED


def test_an_older_scheduler_finds_every_field_where_it_was() -> None:
    hello = pb.WorkerHello()
    hello.CopyFrom(GROUPED)
    worker_hello.add_ungrouped(hello)
    for group in worker_hello.GROUPS:
        hello.ClearField(group)  # type: ignore[arg-type]  # an older scheduler reads none of them
    assert sorted(hello.SerializeToString()) == sorted(OLD)
    worker_hello.group(hello)
    assert hello == GROUPED


def test_a_hello_with_groups_is_taken_from_them_alone() -> None:
    hello = pb.WorkerHello(limits={"max_num_seqs": 8})
    hello.MergeFromString(OLD)
    worker_hello.group(hello)
    assert hello.limits == pb.StepLimits(max_num_seqs=8)
    assert not hello.HasField("kv_cache")


def test_every_group_is_converted_and_no_number_is_in_two() -> None:
    fields = pb.WorkerHello.DESCRIPTOR.fields_by_name
    own = {field.number for name, field in fields.items() if name not in worker_hello.GROUPS}
    inner = [field.number for name in worker_hello.GROUPS for field in fields[name].message_type.fields]
    assert len({*inner, *own}) == len(inner) + len(own)
    assert len(fields) < 25


@pytest.mark.parametrize(
    "wrong",
    [
        b"\xd2\x01\x03\x0a\xff\xff",  # kv_groups, torn
        b"\xa2\x01\x02\xff\xfe",  # logprobs_mode, no UTF-8
        b"\xe2\x03\x01\xc3",  # kv_address, cut in the middle of a character
    ],
)
def test_fields_that_cannot_be_read_are_refused_with_the_workers_name(wrong: bytes) -> None:
    hello = pb.WorkerHello.FromString(b"\x0a\x02w0" + wrong)
    with pytest.raises(FailedPrecondition, match="hello: worker 'w0' sent fields that cannot be read"):
        worker_hello.group(hello)
