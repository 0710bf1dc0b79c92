"""The steps of `make demo`, without make."""

from __future__ import annotations

from tests.preloaded import command


def test_the_demo_chats_twice_sees_a_picture_shows_the_status_and_ends_cleanly() -> None:
    done = command.run("demo")
    assert done.returncode == 0, done.stderr
    assert "quire-tiny" in done.stdout.split("gRPC>")[1]
    assert "OpenAI HTTP> What is 23 + 45?\n68" in done.stdout
    before, _, answer = done.stdout.partition("OpenAI HTTP> [picture] What is in the picture?\n")
    assert before.count("██") > 20, "the picture is shown"
    assert "yellow circle" in answer.splitlines()[0]
    for word in ("frontend-0", "scheduler-0", "worker-0", "BLOCKS", "TOK/S", "done after"):
        assert word in done.stdout
