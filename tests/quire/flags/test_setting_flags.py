"""Secrets cannot be given on the command line; mappings can be given in parts."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from quire.cli.main import COMMANDS, main
from quire.flags.setting_flags import add_settings
from quire.shared.settings import SERVICES
from quire.shared.settings.base import OTHER_VARIABLES, is_secret

ROOT = Path(__file__).parents[3]
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "k8s/*.md", "quire/**/*.md", "services/**/*.md")
    for path in ROOT.glob(pattern)
]
NO_VARIABLES = {"QUIRE_RECORDABLE"}  # a macro of the kernels


@pytest.mark.parametrize("service", SERVICES)
def test_secrets_are_refused_by_name_with_the_place_where_they_belong(
    service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SERVICES[service]
    parser = argparse.ArgumentParser(prog="quire")
    add_settings(parser, settings)
    secrets = [name for name, field in settings.model_fields.items() if is_secret(field)]
    assert service != "frontend" or "api_key" in secrets
    for name in secrets:
        with pytest.raises(SystemExit):
            parser.parse_args([f"--{name.replace('_', '-')}", "hunter2"])
        told = capsys.readouterr().err
        assert f"QUIRE_{service}_{name}".upper() in told
        assert "hunter2" not in told
        assert f"--{name.replace('_', '-')} " not in parser.format_help(), "nobody is led to it"


def test_a_mapping_given_in_pieces_is_whole() -> None:
    parser = argparse.ArgumentParser(prog="quire")
    add_settings(parser, SERVICES["worker"])
    assert parser.parse_args(["--lora", "a=X,b=Y", "--lora", "c=Z"]).lora == {"a": "X", "b": "Y", "c": "Z"}


@pytest.mark.parametrize("words", [["--lora", "a=X", "--lora", "a=Y"], ["--lora", "a=X,a=Y"]])
def test_a_name_given_twice_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="quire")
    add_settings(parser, SERVICES["worker"])
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert "argument --lora: a is given twice" in capsys.readouterr().err


def test_variables_that_commands_and_pages_name_stop_no_service(capsys: pytest.CaptureFixture[str]) -> None:
    """One shell has those of all commands, and `quire up` is started from it, too."""
    told = "".join(page.read_text() for page in PAGES)
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        told += capsys.readouterr().out
    named = set(re.findall(r"\bQUIRE_[A-Z_]+\b", told)) - NO_VARIABLES
    assert {"QUIRE_ADDRESS", "QUIRE_URL", "QUIRE_API_KEY"} <= named
    known = {f"QUIRE_{service}_{name}".upper() for service, model in SERVICES.items() for name in model.model_fields}
    assert named - known - OTHER_VARIABLES == set()
