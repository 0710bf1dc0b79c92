"""Number of files that a request runs through."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import pytest

from quire.shared import errors, sampling_params
from tools import reach
from tools.reach import CalledFunctions

MOST_FILES = {"steady_step": 45, "first_step": 70, "submission": 35}


def calls(*files: str) -> CalledFunctions:
    found = CalledFunctions()
    for number, file in enumerate(files):
        found.functions[file].add((number, "run"))
    return found


def test_files_of_the_product_count_and_others_do_not() -> None:
    assert reach.source_file(sampling_params.__file__) == "shared/sampling_params.py"
    assert reach.source_file(argparse.__file__) == ""
    assert reach.source_file(__file__) == ""
    assert reach.source_file("<string>") == ""


def test_a_function_counts_once_however_often_it_is_called() -> None:
    with reach.recorded() as seen:
        for _ in range(3):
            errors.to_proto(errors.Internal("it failed"))
    assert [*seen.functions] == ["shared/errors.py"]
    assert "to_proto" in {name for _, name in seen.functions["shared/errors.py"]}
    assert seen.num_functions == len(seen.functions["shared/errors.py"])


def test_a_request_runs_through_files_of_all_services() -> None:
    found = reach.measure()
    steady, first, submission = (found[phase] for phase in reach.PHASES)
    assert 0 < steady.num_files < first.num_files
    assert "services/scheduler/core/core.py" in steady.functions
    assert any(file.startswith("services/worker/") for file in steady.functions)
    assert any(file.startswith("services/frontend/") for file in submission.functions)
    assert "services/worker/" not in reach.listing(submission)
    assert reach.excess(found, MOST_FILES) == []


def test_limits_name_the_phases_that_exceed_them(capsys: pytest.CaptureFixture[str]) -> None:
    found: Mapping[str, CalledFunctions] = {
        "steady_step": calls("a", "b"),
        "first_step": calls("a"),
        "submission": calls("a"),
    }
    assert reach.main(["--most", "2,1,1"], lambda: found) == 0
    assert reach.main(["--most", "1,1,1"], lambda: found) == 1
    assert capsys.readouterr().err == "steady_step: 2 files, the limit is 1\n"


@pytest.mark.parametrize("text", ["45", "45,70", "45,70,x", "45,70,-1"])
def test_limits_are_three_numbers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="steady_step,first_step,submission"):
        reach.limits(text)
