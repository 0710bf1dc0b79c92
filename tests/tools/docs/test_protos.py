"""Reference pages of the protocols."""

from __future__ import annotations

from tools.docs.reference import protos


def test_every_part_of_the_public_protocol_is_documented() -> None:
    """The last column of a table is the comment in the .proto file."""
    pages = protos.pages()
    for name in ("inference", "batch", "common", "admin", "dialects"):
        rows = [line for line in pages[name].splitlines() if line.startswith("| `")]
        assert [row for row in rows if row.endswith("|  |")] == []


def test_a_field_is_shown_with_its_type_and_its_number() -> None:
    rows = protos.pages()["inference"].splitlines()
    assert any(row.startswith("| `text` | string, one of `prompt` | 2 |") for row in rows)
    assert any(row.startswith("| `sampling` | [SamplingParams](common.md#samplingparams) |") for row in rows)
