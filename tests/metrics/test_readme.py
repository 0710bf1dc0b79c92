"""The page that people read names the metrics that services report."""

from tests.metrics import readme


def test_the_table_is_that_of_the_catalogues() -> None:
    _, _, found = readme.README.read_text().partition(readme.BEGIN)
    assert found == readme.table(), "run: python -m tests.metrics.readme"
