"""The pages that tell the protocols are those of the files."""

from __future__ import annotations

from quire.protos import reference


def test_the_pages_are_current() -> None:
    written = {path.stem: path.read_text() for path in reference.PAGES.glob("*.md")}
    assert written == reference.pages(), "run: python -m quire.protos.generate"


def test_every_part_of_the_public_protocol_says_what_it_is() -> None:
    """A table's last column is its comment."""
    for name in ("inference", "batch", "common", "admin", "dialects"):
        rows = [line for line in reference.pages()[name].splitlines() if line.startswith("| `")]
        assert [row for row in rows if row.endswith("|  |")] == []


def test_a_field_is_told_with_its_type_and_its_number() -> None:
    rows = reference.pages()["inference"].splitlines()
    assert "| `text` | string, one of `prompt` | 2 | Text; special tokens are added as the tokenizer does. |" in rows
    assert any(row.startswith("| `sampling` | [SamplingParams](common.md#samplingparams) |") for row in rows)
