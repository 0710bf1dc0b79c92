"""What others can read on a command line holds no secret; a mapping may be written in pieces."""

from __future__ import annotations

import argparse

import pytest

from quire.cli.flags import add_settings
from shared.settings import SERVICES
from shared.settings.base import is_secret


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
