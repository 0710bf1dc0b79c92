"""Admission counts samples and tokens, all or nothing, and reports when it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from quire.services.frontend.calls.admission import CallAdmission, Lease
from quire.shared.errors import QuireError, ResourceExhausted, Unavailable
from quire.shared.metrics.frontend import FrontendMetrics
from tests.waiting import loop_turns


def door(max_samples: int = 4, max_tokens: int = 100) -> tuple[CallAdmission, FrontendMetrics]:
    metrics = FrontendMetrics("m", 100)
    return CallAdmission(max_samples, max_tokens, 1500, metrics), metrics


def taken(admission: CallAdmission, num_samples: int, num_tokens: int) -> Lease:
    lease = admission.lease()
    lease.acquire(num_samples, num_tokens)
    return lease


async def test_samples_are_counted_all_or_nothing() -> None:
    admission, metrics = door()
    lease = taken(admission, 3, 10)
    with pytest.raises(ResourceExhausted) as refusal:
        taken(admission, 2, 10)
    assert refusal.value.retry_after_ms == 1500
    assert (admission.num_samples, admission.num_tokens) == (3, 10)
    assert metrics.registry.get_sample_value("quire_frontend_inflight_requests") == 3
    taken(admission, 1, 10)
    lease.release()
    taken(admission, 3, 10)
    assert (
        metrics.registry.get_sample_value(
            "vllm:admission_rejections_total", {"model_name": "m", "reason": "max_inflight_requests"}
        )
        == 1
    )


async def test_tokens_are_counted_and_corrected_after_tokenizing() -> None:
    admission, _ = door()
    lease = taken(admission, 1, 90)
    with pytest.raises(ResourceExhausted):
        taken(admission, 1, 20)
    lease.adjust_tokens(40)
    taken(admission, 1, 20)
    lease.release()
    lease.release()
    assert (admission.num_samples, admission.num_tokens) == (1, 20)


async def test_a_lease_is_given_back_however_its_with_is_left() -> None:
    admission, _ = door()

    def fails() -> None:
        with admission.lease() as lease:
            lease.acquire(2, 10)
            lease.adjust_tokens(20)
            taken(admission, 4, 10)

    with pytest.raises(ResourceExhausted):
        fails()
    assert (admission.num_samples, admission.num_tokens) == (0, 0)


async def test_a_request_alone_always_fits() -> None:
    admission, _ = door()
    taken(admission, 1000, 1_000_000).release()
    assert admission.num_samples == 0


async def test_closed_means_unavailable_and_idle_means_empty() -> None:
    admission, _ = door()
    lease = taken(admission, 1, 1)
    admission.close()
    with pytest.raises(Unavailable):
        taken(admission, 1, 1)
    waiting = asyncio.create_task(admission.wait_idle())
    await loop_turns()
    assert not waiting.done()
    lease.release()
    await waiting


async def test_full_is_when_the_smallest_request_would_be_refused() -> None:
    chance = random.Random(4)
    for _ in range(300):
        made = CallAdmission(chance.randint(1, 4), chance.randint(1, 40), 100, FrontendMetrics("m", 100))
        with made.lease() as lease:
            made.add(lease, chance.randint(0, 5), chance.randint(0, 45))
            if chance.random() < 0.1:
                made.close()
            arriving = chance.randint(0, 3)
            try:
                made.check_open(arriving)
                refused = False
            except QuireError:
                refused = True
            assert made.is_full(arriving) == refused


def shared_door(max_samples: int, max_tokens: int = 10**6) -> CallAdmission:
    return CallAdmission(max_samples, max_tokens, 1500, FrontendMetrics("m", 100), has_several_tenants=lambda: True)


def taken_by(admission: CallAdmission, tenant: str, num_samples: int, num_tokens: int = 1) -> Lease:
    lease = admission.lease()
    lease.tenant = tenant
    lease.acquire(num_samples, num_tokens)
    return lease


async def test_a_tenant_that_takes_all_leaves_the_reserve_to_others() -> None:
    admission = shared_door(1024)
    large = taken_by(admission, "large", 1024)
    with pytest.raises(
        ResourceExhausted, match="the last 128 of 1024 are reserved for tenants with few requests in flight"
    ):
        taken_by(admission, "large", 1)
    held = [taken_by(admission, "small", 1) for _ in range(64)]
    with pytest.raises(ResourceExhausted):
        taken_by(admission, "small", 1)
    held += [taken_by(admission, "third", 1) for _ in range(42)]
    with pytest.raises(ResourceExhausted):
        taken_by(admission, "third", 1)
    for lease in held:
        lease.release()
    large.release()
    assert (admission.num_samples, admission.num_tokens) == (0, 0)


async def test_what_is_larger_than_a_tenant_may_hold_is_admitted_and_counts_as_that_much() -> None:
    admission = shared_door(8, 80)
    lease = taken_by(admission, "large", 100, 1_000)
    assert (admission.num_samples, admission.num_tokens) == (7, 70)
    lease.adjust_tokens(5_000)
    assert admission.num_tokens == 70
    taken_by(admission, "small", 1, 5)
    lease.release()
    assert (admission.num_samples, admission.num_tokens) == (1, 5)


async def test_tokens_have_a_reserve_as_well() -> None:
    admission = shared_door(100, 800)
    taken_by(admission, "large", 1, 10_000)
    with pytest.raises(ResourceExhausted, match="max_queued_tokens"):
        taken_by(admission, "large", 1, 10)
    taken_by(admission, "small", 1, 50)
    with pytest.raises(ResourceExhausted, match="max_queued_tokens"):
        taken_by(admission, "small", 1, 10)


async def test_without_tenants_nothing_is_kept_back() -> None:
    admission, _ = door(max_samples=8)
    taken(admission, 8, 10)
    with pytest.raises(ResourceExhausted, match="8 in flight and 1 requested exceed the limit of 8"):
        taken(admission, 1, 1)


async def test_an_idle_tenant_is_admitted_whatever_one_other_did() -> None:
    chance = random.Random(7)
    for _ in range(300):
        admission = shared_door(chance.randint(2, 40))
        held: list[Lease] = []
        for _ in range(chance.randint(1, 60)):
            try:
                held.append(taken_by(admission, "large", chance.randint(1, 50), chance.randint(1, 10**6)))
            except ResourceExhausted:
                if held and chance.random() < 0.3:
                    held.pop(chance.randrange(len(held))).release()
        admission.check_open(0, "small")
        held.append(taken_by(admission, "small", 1))
        for lease in held:
            lease.release()
        assert (admission.num_samples, admission.num_tokens) == (0, 0)


async def test_a_large_request_is_admitted_beside_others_and_counts_as_what_is_left() -> None:
    admission = shared_door(80)
    small = taken_by(admission, "small", 5)
    large = taken_by(admission, "large", 80)
    assert admission.num_samples == 70
    with pytest.raises(ResourceExhausted):
        taken_by(admission, "third", 80)  # one at a time
    with pytest.raises(ResourceExhausted):
        taken_by(admission, "large", 1)
    large.release()
    small.release()
    assert admission.num_samples == 0


async def test_a_large_request_waits_where_less_than_half_is_left() -> None:
    admission = shared_door(80)
    taken_by(admission, "small", 31)
    with pytest.raises(ResourceExhausted):
        taken_by(admission, "large", 80)
    taken_by(admission, "large", 39)


async def test_reported_limits_are_those_of_the_tenant() -> None:
    admission = shared_door(1024)
    taken_by(admission, "large", 1024)
    told = {tenant: admission.rate_limits(tenant)[0] for tenant in ("large", "small")}
    assert [(limit.limit, limit.remaining) for limit in told.values()] == [(896, 0), (896, 64)]
    assert told["large"].reset_s > 0 == told["small"].reset_s
    held = [taken_by(admission, "small", 1) for _ in range(64)]
    assert admission.rate_limits("small")[0].remaining == 0
    with pytest.raises(ResourceExhausted):
        taken_by(admission, "small", 1)
    held[0].release()
    assert admission.rate_limits("small")[0].remaining == 1


async def test_the_reported_remaining_amount_can_be_acquired() -> None:
    chance = random.Random(6)
    for _ in range(500):
        admission = shared_door(chance.randint(2, 40))
        for _ in range(chance.randint(0, 12)):
            with contextlib.suppress(ResourceExhausted):
                taken_by(admission, chance.choice("abc"), chance.randint(1, 9))
        left = admission.rate_limits("a")[0].remaining
        for _ in range(left):
            taken_by(admission, "a", 1)
        if admission.num_samples:
            with pytest.raises(ResourceExhausted):
                taken_by(admission, "a", 1)


async def test_hundreds_of_small_tenants_share_the_reserve_and_one_large_takes_none_of_it() -> None:
    admission = shared_door(1024)
    large = taken_by(admission, "large", 1024)
    small = [taken_by(admission, f"tenant {number}", 1) for number in range(128)]
    with pytest.raises(ResourceExhausted):
        taken_by(admission, "one more", 1)
    large.release()
    more = [taken_by(admission, f"tenant {number}", 1) for number in range(896)]
    for lease in (*small, *more):
        lease.release()
    assert admission.num_samples == 0


def begun_by(admission: CallAdmission, tenant: str, num_samples: int, piece: int = 1) -> Lease:
    """Acquires one sample first and then those of the prompts, as a call does."""
    lease = admission.lease()
    lease.tenant = tenant
    lease.acquire(1, 0)
    lease.acquire(num_samples, 1, piece)
    return lease


async def test_a_large_call_beside_another_tenant_begins_with_its_part_and_is_not_refused() -> None:
    admission = shared_door(1024)
    taken_by(admission, "small", 1)
    large = begun_by(admission, "large", 1024)
    assert (large.num_samples, large.is_partial) == (448, True)
    second = begun_by(admission, "large", 1024)
    assert (second.num_samples, second.is_partial) == (1, True), (
        "the tenant has used its share, so the call is admitted in part"
    )
    held = [taken_by(admission, "small", 1) for _ in range(400)]
    for lease in (large, second, *held):
        lease.release()
    assert admission.num_samples == 1


async def test_a_large_call_alone_takes_what_a_tenant_may_have() -> None:
    admission = shared_door(1024)
    large = begun_by(admission, "large", 1024)
    assert (large.num_samples, large.is_partial) == (896, True)
    fits = begun_by(shared_door(1024), "large", 800)
    assert (fits.num_samples, fits.is_partial) == (800, False)


async def test_a_call_that_shares_with_no_tenant_takes_all_at_once() -> None:
    admission, _ = door(max_samples=4)
    lease = begun_by(admission, "", 1000)
    assert (lease.num_samples, lease.is_partial) == (1000, False)


async def test_shares_of_ended_prompts_go_to_others_until_each_tenant_has_its_part() -> None:
    admission = shared_door(80)  # 70 are shared
    large = begun_by(admission, "large", 200)
    assert large.num_samples == 70
    small = [taken_by(admission, "small", 1) for _ in range(5)]
    left = 200 - 70
    for _ in range(35):
        assert large.start_next_prompts(1, left) == 0
    assert large.num_samples == 35
    for lease in small:
        lease.release()
    begun = large.start_next_prompts(1, left)
    assert (begun, large.num_samples) == (36, 70)
    large.release()
    assert admission.num_samples == 0


async def test_pieces_never_exceed_what_is_shared_and_every_call_ends() -> None:
    chance = random.Random(9)
    for _ in range(100):
        most, piece = chance.randint(40, 100), chance.randint(1, 4)
        admission = shared_door(most)
        calls = [taken_by(admission, tenant, 1, 0) for tenant in "aab"]
        for lease in calls:
            lease.acquire(piece * 40, 1, piece)
        running = [max(1, lease.num_samples // piece) for lease in calls]
        left = [40 - count for count in running]
        while any(running):
            number = chance.choice([number for number in range(3) if running[number]])
            begun = calls[number].start_next_prompts(piece, left[number])
            running[number] += begun - 1
            left[number] -= begun
            assert running[number] or not left[number]
            assert admission.num_samples <= most + len(calls) * piece
        assert not any(left)
        for lease in calls:
            lease.release()
        assert admission.num_samples == 0
