"""Media items are encoded by encode workers while there are any, and nothing is lost whatever happens to them."""

from __future__ import annotations

import random

import pytest

from quire.shared.errors import FailedPrecondition, Internal, Unavailable
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.scheduler.placement.encode_cluster import (
    BAD_PICTURE,
    MAX_LOSSES,
    EncodeCluster,
    LanguageWorker,
    name,
    with_items,
)


def ask(language: LanguageWorker, key: int, letters: str) -> None:
    """Adds a sequence, and sends its orders."""
    language.replica.add(with_items(key, letters))
    language.replica.pump()


def failures(language: LanguageWorker) -> list[tuple[int, str]]:
    """The keys and errors of sequences that ended with one."""
    ends = [end for events in language.events for end in events.finished]
    return [(end.sequence.key, end.failure.message) for end in ends if end.failure is not None]


def jobs(cluster: EncodeCluster) -> tuple[int, int]:
    cluster.fleet.check_invariant()
    return cluster.fleet.num_encoding, cluster.fleet.num_fetching


def counted(cluster: EncodeCluster, outcome: str) -> float:
    return cluster.metrics.registry.get_sample_value("quire_scheduler_encode_jobs_total", {"outcome": outcome}) or 0


def test_an_encode_worker_encodes_once_for_all_and_the_others_fetch() -> None:
    cluster = EncodeCluster()
    encoder, first, second = cluster.add_encoder(), cluster.add_language(), cluster.add_language()
    ask(first, 1, "a")
    ask(second, 2, "a")
    assert (encoder.letters, first.letters, second.letters) == ("a", "", "")
    assert jobs(cluster) == (2, 0)
    cluster.encode(encoder)
    assert (first.letters, second.letters) == ("a", "a")
    assert jobs(cluster) == (0, 2)
    source = first.orders[0].rows
    assert (source.worker_id, source.address, source.epoch) == ("e1", "e1:1", 1)
    for language, key in ((first, 1), (second, 2)):
        cluster.prepare(language)
        assert language.run() == [key]
    assert jobs(cluster) == (0, 0)
    assert counted(cluster, "done") == 2
    third = cluster.add_language()
    ask(third, 3, "a")
    assert (encoder.letters, third.letters) == ("", "a")  # its rows are still kept


def test_without_an_encode_worker_each_worker_encodes_itself() -> None:
    cluster = EncodeCluster()
    language = cluster.add_language()
    ask(language, 1, "a")
    assert language.letters == "A"
    cluster.prepare(language)
    assert language.run() == [1]
    assert jobs(cluster) == (0, 0)


def test_items_go_to_the_worker_that_has_them_or_has_the_least_to_do() -> None:
    cluster = EncodeCluster()
    one, two, language = cluster.add_encoder(), cluster.add_encoder(), cluster.add_language()
    ask(language, 1, "ab")
    assert (one.letters, two.letters) == ("a", "b")
    other = cluster.add_language()
    ask(other, 2, "b")
    ask(other, 3, "c")
    assert (one.letters, two.letters) == ("ac", "b")


@pytest.mark.parametrize("layout", [b"", b"m" * 32])
def test_rows_of_other_weights_are_not_fetched(layout: bytes) -> None:
    cluster = EncodeCluster()
    encoder, language = cluster.add_encoder(), cluster.add_language(layout)
    ask(language, 1, "a")
    assert (encoder.letters, language.letters) == ("", "A")


def test_after_an_update_of_weights_a_worker_encodes_itself() -> None:
    cluster = EncodeCluster()
    encoder, language = cluster.add_encoder(), cluster.add_language()
    ask(language, 1, "a")
    language.change_weights(1)
    cluster.encode(encoder)
    cluster.prepare(language)  # rows of the weights before
    assert language.run() == []
    assert language.letters == "A"
    cluster.prepare(language)
    assert language.run() == [1]


def test_an_item_that_no_encode_worker_has_room_for_is_encoded_by_its_worker() -> None:
    cluster = EncodeCluster()
    encoder, language = cluster.add_encoder(capacity=3), cluster.add_language()
    ask(language, 1, "a")
    assert (encoder.letters, language.letters) == ("", "A")


def test_items_wait_for_room_and_unused_rows_make_room() -> None:
    cluster = EncodeCluster()
    encoder, first, second = cluster.add_encoder(), cluster.add_language(), cluster.add_language()
    ask(first, 1, "ab")
    ask(second, 2, "cd")
    assert encoder.letters == "ab"
    for _ in range(2):
        cluster.encode(encoder)
    assert encoder.letters == ""
    cluster.prepare(first)
    assert encoder.letters == "c"
    cluster.prepare(first)
    assert encoder.letters == "cd"
    cluster.settle(lambda: jobs(cluster) == (0, 0))


@pytest.mark.parametrize("others", [0, 1])
def test_what_a_lost_worker_was_encoding_is_prepared_again(others: int) -> None:
    cluster = EncodeCluster()
    encoder, language = cluster.add_encoder(), cluster.add_language()
    ask(language, 1, "a")
    spares = [cluster.add_encoder() for _ in range(others)]
    cluster.lose(encoder)
    assert (language.letters, [spare.letters for spare in spares]) == (("", ["a"]) if others else ("A", []))
    cluster.settle(lambda: 1 in language.run())
    assert jobs(cluster) == (0, 0)
    assert counted(cluster, "worker_lost") == 1


@pytest.mark.parametrize("others", [0, 1])
def test_what_was_fetched_from_a_lost_worker_is_prepared_again(others: int) -> None:
    cluster = EncodeCluster()
    encoder, language = cluster.add_encoder(), cluster.add_language()
    ask(language, 1, "a")
    cluster.encode(encoder)
    spares = [cluster.add_encoder() for _ in range(others)]
    cluster.lose(encoder)
    assert jobs(cluster) == (0, 1)
    cluster.prepare(language)
    assert (language.letters, [spare.letters for spare in spares]) == (("", ["a"]) if others else ("A", []))
    cluster.settle(lambda: 1 in language.run())
    assert jobs(cluster) == (0, 0)


def test_rows_that_arrived_before_their_worker_was_lost_are_used() -> None:
    cluster = EncodeCluster()
    encoder, language = cluster.add_encoder(), cluster.add_language()
    ask(language, 1, "a")
    cluster.encode(encoder)
    cluster.lose(encoder)
    language.answer(name("a"))
    language.orders.clear()
    assert language.run() == [1]
    assert jobs(cluster) == (0, 0)


def test_rows_that_cannot_be_fetched_are_computed_and_the_link_rests() -> None:
    cluster = EncodeCluster()
    encoder, language = cluster.add_encoder(), cluster.add_language()
    ask(language, 1, "a")
    cluster.encode(encoder)
    cluster.prepare(language, Unavailable("no route to host"))
    assert language.letters == "A"
    cluster.prepare(language)
    assert language.run() == [1]
    ask(language, 2, "b")
    assert (encoder.letters, language.letters) == ("", "B")
    assert counted(cluster, "fetch_failed") == 1


def test_an_item_that_fails_at_an_encode_worker_is_tried_by_its_worker() -> None:
    cluster = EncodeCluster()
    encoder, language = cluster.add_encoder(), cluster.add_language()
    ask(language, 1, "a")
    cluster.encode(encoder, Internal("the tower failed"))
    assert language.letters == "A"
    cluster.prepare(language, BAD_PICTURE)
    language.run()
    assert failures(language) == [(1, BAD_PICTURE.message)]
    assert jobs(cluster) == (0, 0)


def test_an_item_that_ends_every_encode_worker_ends_only_its_own_requests() -> None:
    cluster = EncodeCluster()
    language = cluster.add_language()
    cluster.add_encoder()
    ask(language, 1, "a")
    for _ in range(MAX_LOSSES):
        cluster.add_encoder()
        cluster.lose(next(encoder for encoder in cluster.encoders if encoder.letters))
    language.run()
    ((key, text),) = failures(language)
    assert (key, text.partition(" in a row")[0]) == (1, f"media: {MAX_LOSSES} encode workers")
    ask(language, 2, "b")
    cluster.settle(lambda: 2 in language.run())
    assert jobs(cluster) == (0, 0)


def test_a_leaving_worker_gets_nothing_new_and_keeps_what_is_needed() -> None:
    cluster = EncodeCluster()
    encoder, language = cluster.add_encoder(), cluster.add_language()
    ask(language, 1, "a")
    encoder.worker.leaving = True
    ask(language, 2, "b")
    assert (encoder.letters, language.letters) == ("a", "B")
    cluster.encode(encoder)
    assert encoder.worker.num_users == 1
    cluster.settle(lambda: jobs(cluster) == (0, 0))
    assert encoder.worker.num_users == 0


def test_a_lost_worker_needs_no_rows_any_more() -> None:
    cluster = EncodeCluster()
    encoder, language = cluster.add_encoder(), cluster.add_language()
    ask(language, 1, "ab")
    cluster.encode(encoder)
    cluster.fleet.on_replica_detached(language.replica)
    assert jobs(cluster) == (0, 0)
    cluster.encode(encoder)
    cluster.fleet.release_unused()
    assert (encoder.rows, encoder.worker.num_items) == (set(), 0)


def test_an_answer_that_was_not_ordered_ends_the_session() -> None:
    cluster = EncodeCluster()
    encoder = cluster.add_encoder()
    with pytest.raises(FailedPrecondition, match="awaits no media item"):
        cluster.fleet.receive_prepared(encoder.worker, pb.MediaPrepared(identifier=name("a")))


def disturb(cluster: EncodeCluster, chance: random.Random, update: int) -> None:
    """Loses, adds or changes a worker."""
    match chance.randrange(5):
        case 0 if cluster.encoders:
            cluster.lose(chance.choice(cluster.encoders), lost=chance.random() < 0.7)
        case 1 if len(cluster.encoders) < 3:
            cluster.add_encoder()
        case 2:
            cluster.fleet.release_unused()
        case 3:
            chance.choice(cluster.languages).change_weights(chance.choice([0, update]))
        case 4:
            gone = cluster.languages.pop(chance.randrange(len(cluster.languages)))
            cluster.fleet.on_replica_detached(gone.replica)
            new = cluster.add_language()
            for sequence in gone.core.evacuate(None):
                new.replica.add(sequence)
            new.events += gone.events


@pytest.mark.parametrize("seed", range(40))
def test_every_sequence_ends_whatever_happens(seed: int) -> None:
    chance, cluster = random.Random(seed), EncodeCluster()
    for _ in range(2):
        cluster.add_language()
    added: set[int] = set()
    for key in range(1, 400):
        language = chance.choice(cluster.languages)
        match chance.randrange(8):
            case 0 | 1:
                letters = "".join(chance.choices("abcdefgh", k=chance.randrange(1, 3)))
                language.replica.add(with_items(key, letters, max_tokens=chance.randrange(1, 4)))
                added.add(key)
            case 2 if added:
                language.core.cancel(chance.choice(sorted(added)))
            case 3 | 4 if language.orders:
                is_fetched = language.orders[0].HasField("rows")
                error = Unavailable("no route") if is_fetched else BAD_PICTURE
                cluster.prepare(language, error if chance.random() < 0.1 else None)
            case 5 if busy := [encoder for encoder in cluster.encoders if encoder.orders]:
                cluster.encode(chance.choice(busy), Internal("failed") if chance.random() < 0.1 else None)
            case 6:
                disturb(cluster, chance, key)
            case _:
                language.run()
        cluster.fleet.check_invariant()
    cluster.settle(lambda: not any(language.core.has_work for language in cluster.languages))
    cluster.settle(lambda: jobs(cluster) == (0, 0))
    cluster.fleet.release_unused()
    assert not any(encoder.rows for encoder in cluster.encoders)
