"""Progress bars for calls with many prompts or files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from quire.outputs import RequestOutput
from quire.shared.errors import FailedPrecondition


@contextmanager
def bar(count: int, *, shown: bool) -> Iterator[Callable[[RequestOutput], None] | None]:
    """Yields a callback for each result that advances a tqdm bar; None if it is not shown. Raises FailedPrecondition
    without tqdm."""
    if not shown:
        yield None
        return
    num_tokens = 0
    with _tqdm(count, "prompts") as shown_bar:

        def advance(result: RequestOutput) -> None:
            """Advances the bar by one prompt and shows the output tokens per second so far."""
            nonlocal num_tokens
            num_tokens += sum(len(output.token_ids) for output in result.outputs)
            spent_s = shown_bar.format_dict["elapsed"] or 1e-9
            shown_bar.set_postfix_str(f"{num_tokens / spent_s:.0f} tokens/s", refresh=False)
            shown_bar.update()

        yield advance


@contextmanager
def file_bar(count: int, *, shown: bool) -> Iterator[Callable[[], object]]:
    """Yields a callback for each file that advances a tqdm bar, if it is shown. Raises FailedPrecondition without
    tqdm."""
    if not shown:
        yield lambda: None
        return
    with _tqdm(count, "files") as shown_bar:
        yield shown_bar.update


def _tqdm(count: int, name: str) -> Any:
    """Returns a bar of `count` steps. Raises FailedPrecondition without tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        raise FailedPrecondition(
            "use_tqdm: tqdm is not installed; run pip install tqdm, or pass use_tqdm=False"
        ) from None
    return tqdm(total=count, desc=name, dynamic_ncols=True)
