"""Settings from a file, the environment and flags; unknown names are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ConfigDict, Field

from quire.flags.parser import CommandParser
from quire.flags.setting_flags import add_settings
from quire.shared.errors import InvalidArgument
from quire.shared.settings import SERVICES, FrontendSettings, SchedulerSettings, Settings, WorkerSettings, load


def test_flags_beat_variables_beat_the_file(tmp_path: Path) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text("worker: {model: /m, num_blocks: 1, block_size: 1, seed: 1}\nscheduler: {max_waiting: 7}\n")
    environ = {"QUIRE_CONFIG": str(path), "QUIRE_WORKER_BLOCK_SIZE": "2", "QUIRE_WORKER_SEED": "2"}
    worker = load(WorkerSettings, SERVICES, {"seed": 3}, environ)
    assert (worker.num_blocks, worker.block_size, worker.seed) == (1, 2, 3)
    assert load(SchedulerSettings, SERVICES, {}, environ).max_waiting == 7


def test_lists_are_written_with_commas() -> None:
    settings = load(FrontendSettings, SERVICES, {"model": "m"}, {"QUIRE_FRONTEND_SCHEDULERS": "a:1, b:2"})
    assert settings.schedulers == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("wrker: {}", "unknown section 'wrker'"),
        ("worker: {num_block: 3}", r"unknown setting worker.num_block; did you mean num_blocks\?"),
        ("[1]", "must map service names"),
        ("worker: {model: m, num_blocks: many}", r"worker.num_blocks: .*\(value: 'many'\)"),
        ("worker: {model: m, device: tpu}", r"worker.device: .*\(value: 'tpu'\)"),
        (": :", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_naming_key_and_value(tmp_path: Path, document: str, text: str) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text(document)
    with pytest.raises(InvalidArgument, match=text):
        load(WorkerSettings, SERVICES, {"config": str(path)}, {})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"cannot read '/no/such\.yaml'"):
        load(WorkerSettings, SERVICES, {"config": "/no/such.yaml"}, {})


def test_what_is_missing_is_named_and_a_secret_that_is_there_is_not_shown() -> None:
    with pytest.raises(InvalidArgument) as refused:
        load(FrontendSettings, SERVICES, {}, {"QUIRE_FRONTEND_API_KEY": "sesame"})
    assert refused.value.message == "frontend.model: is required and not set"
    assert refused.value.field == "model"


def test_an_unknown_variable_is_refused_for_every_service() -> None:
    with pytest.raises(
        InvalidArgument,
        match=r"unknown environment variable QUIRE_WORKER_NUMBLOCKS='3'; did you mean QUIRE_WORKER_NUM_BLOCKS\?",
    ):
        load(SchedulerSettings, SERVICES, {}, {"QUIRE_WORKER_NUMBLOCKS": "3"})


def test_every_setting_explains_itself() -> None:
    for service, model in SERVICES.items():
        for name, field in model.model_fields.items():
            assert field.description, f"{service}.{name}"


def test_a_service_has_a_name_and_an_address_for_others() -> None:
    settings = SchedulerSettings(host="0.0.0.0", advertise="scheduler.local")
    assert settings.name.startswith("scheduler-")
    assert settings.reachable(50052) == "scheduler.local:50052"


class RenamedSettings(Settings):
    """A service one of whose settings had another name before."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    max_queue_length: int = Field(
        5, description="requests that wait", json_schema_extra={"deprecated_names": ("max_queue",)}
    )


RENAMED = {"renamed": RenamedSettings}


def test_a_deprecated_name_is_accepted_everywhere_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text("renamed: {max_queue: 6}\n")
    assert load(RenamedSettings, RENAMED, {"config": str(path)}, {}).max_queue_length == 6
    assert load(RenamedSettings, RENAMED, {}, {"QUIRE_RENAMED_MAX_QUEUE": "7"}).max_queue_length == 7
    parser = CommandParser("quire")
    add_settings(parser, RenamedSettings)
    assert vars(parser.parse_args(["--max-queue=8"])) == {"max_queue_length": 8}
    assert "--max-queue is deprecated; use --max-queue-length" in capsys.readouterr().err


def test_the_current_name_wins_over_a_deprecated_one() -> None:
    environ = {"QUIRE_RENAMED_MAX_QUEUE": "7", "QUIRE_RENAMED_MAX_QUEUE_LENGTH": "9"}
    for order in (environ, dict(reversed(environ.items()))):
        assert load(RenamedSettings, RENAMED, {}, order).max_queue_length == 9
