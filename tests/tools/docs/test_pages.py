"""Generated pages contain what the code has, and written pages quote it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path

import yaml

from quire.shared import errors
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.settings import SERVICES
from quire.shared.settings.connection_limits import ConnectionLimits
from quire.shared.settings.request_limits import RequestLimits
from quire.shared.settings.stream_limits import StreamLimits
from tests.metrics.catalogue import families
from tools.docs import reference
from tools.docs.reference import benchmarks, flags, metrics, models, parsers, settings
from tools.docs.reference import errors as error_page

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PRODUCT = ("quire", "services", "shared")
CODE = {".py", ".proto", ".yml", ".yaml", ".cpp", ".h", ".toml", ".js", ".sh", ".html"}
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\]\(([^)#\s]+)[^)\n]*\)")
SPAN = re.compile(r"`([^`\n]+)`")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAME = re.compile(r"(?!us_)[a-z]\w*_\w+|[A-Z][a-z]+[A-Z]\w*|QUIRE_\w+")  # snake_case, CamelCase, variables
OF_OTHERS = set(  # names of other programs, and beginnings or placeholders of names
    WORD.findall(
        """DeprecationWarning EngineDeadError OLLAMA_HOST QUIRE_WORKER_LOG_LEVEL QUIRE_WORKER_MAX_NUM_SEQS
        ReadWriteOncePod RssAnon bash_
        memory_ text_editor_ raw_ init_custom_process_group launch_server session_params special_token
        trust_remote_code"""
    )
)


def product_text() -> str:
    names = ("git", "ls-files", *(f"{folder}/*.py" for folder in PRODUCT))
    files = subprocess.run(names, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = (ROOT / name for name in files)
    return "\n".join(path.read_text() for path in texts if path.is_file())


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 160
    assert len(README.split()) <= 1_100
    assert [line for line in README.splitlines() if len(line) > 120] == []


def test_messages_in_troubleshooting_are_those_of_the_product() -> None:
    rows = re.findall(r"^\| `(.+?)` \|", (DOCS / "getting-started" / "troubleshooting.md").read_text(), re.MULTILINE)
    text = product_text()
    assert len(rows) >= 30
    assert [row for row in rows if row not in text] == []


def test_every_setting_is_listed() -> None:
    page = settings.page()
    for model in SERVICES.values():
        assert [name for name in model.model_fields if f"| `{name}` |" not in page] == []


def test_every_metric_is_listed() -> None:
    page = metrics.page()
    own = [family.name for family in families() if family.name.startswith(("quire_", "vllm:"))]
    assert [name for name in own if f"| `{name}` |" not in page] == []


def test_every_error_code_is_listed() -> None:
    page = error_page.page()
    codes = {kind.code for kind in errors.QuireError.__subclasses__()}
    names = [finish_pb2.ErrorCode.Name(code).removeprefix("ERROR_CODE_") for code in codes]
    assert [name for name in names if f"| `{name}` |" not in page] == []


def test_models_parsers_and_commands_are_listed() -> None:
    assert "| `Qwen3ForCausalLM` | Qwen3" in models.page()
    assert "| `hermes` |" in parsers.page()
    assert "## quire up" in flags.page()
    assert "--tensor-parallel-size" in flags.page()


def test_every_stored_result_has_a_section() -> None:
    pages = benchmarks.h200() + benchmarks.cpu()
    assert [path.stem for path in benchmarks.RESULTS.glob("*.json") if f"## {path.stem}\n" not in pages] == []


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "tools" / "docs" / "mkdocs.yml").read_text()
    navigation = str(yaml.safe_load(text)["nav"])
    written = (str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.name != "README.md")
    assert [page for page in written if page not in navigation] == []


def test_every_limit_is_listed_with_its_default() -> None:
    page = (DOCS / "serving" / "limits.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `max_")]
    for field in dataclasses.fields(RequestLimits):
        row = next((row for row in rows if f"`{field.name}`" in row), "")
        assert f"{field.default:,}" in row or f"{field.default >> 20} Mi" in row, field.name


def test_limits_of_connections_and_streams_are_those_of_the_code() -> None:
    security = (DOCS / "operations" / "security.md").read_text()
    assert [f.name for f in dataclasses.fields(ConnectionLimits) if f"{f.name}={f.default}" not in security] == []
    streams = (DOCS / "serving" / "resumable-streams.md").read_text()
    assert [f.name for f in dataclasses.fields(StreamLimits) if f"`{f.name}`" not in streams] == []


def test_every_named_result_is_stored() -> None:
    texts = [README, *(page.read_text() for page in DOCS.rglob("*.md"))]
    named = {
        name for text in texts for name in re.findall(r"`(?:docs/benchmarks/results/)?((?:h200|cpu)-[\w.*-]+)`", text)
    }
    kinds = re.compile(r"\.json$|-(throughput|serve|structured|scheduler|embed|flash-attn-2)$")
    results = {name for name in named if kinds.search(name)}
    assert len(results) > 15
    missing = (name for name in results if not list(benchmarks.RESULTS.glob(f"{name.removesuffix('.json')}.json")))
    assert sorted(missing) == []


def test_names_in_pages_exist() -> None:
    """Names of code, settings, fields and metrics between backquotes occur in the repository's other files."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    code = [ROOT / name for name in tracked if Path(name).suffix in CODE and "/results/" not in name]
    known = set(WORD.findall("\n".join(path.read_text(errors="replace") for path in code)))
    known |= {Path(name).stem for name in tracked} | OF_OTHERS
    known |= {name for family in families() for name in (family.name, *family.series)}
    pages = [
        ROOT / name for name in tracked if name.endswith(".md") and name.startswith(("docs/", "services/", "kernels/"))
    ]
    spans = {(page.stem, span) for page in pages for span in SPAN.findall(FENCE.sub("", page.read_text()))}
    named = {(page, word) for page, span in spans for word in WORD.findall(span) if NAME.fullmatch(word)}
    assert sorted((page, word) for page, word in named if word not in known) == []


def test_messages_on_the_way_of_a_token_have_the_fields_of_the_protocols() -> None:
    page = (DOCS / "design" / "a-tokens-way.md").read_text()
    blocks = "\n".join(FENCE.findall(page))
    fields = set(re.findall(r"\b([a-z_]+)(?=:| \{)", blocks))
    protocol = "\n".join(path.read_text() for path in (ROOT / "protos" / "quire").rglob("*.proto"))
    assert len(fields) > 20
    assert fields - set(WORD.findall(protocol)) == set()


def test_links_of_pages_lead_to_pages() -> None:
    """A link to a file outside of docs/ works in the repository and is broken in the built documentation."""
    generated = {(DOCS / name).resolve() for name in reference.pages()}
    links = [
        (page, target)
        for page in DOCS.rglob("*.md")
        for target in LINK.findall(FENCE.sub("", page.read_text()))
        if "://" not in target
    ]
    targets = {(page.relative_to(DOCS), target): (page.parent / target).resolve() for page, target in links}
    broken = [
        f"{page}: {target}"
        for (page, target), path in targets.items()
        if path not in generated and not (path.is_file() and path.is_relative_to(DOCS))
    ]
    assert len(links) > 100
    assert sorted(broken) == []


def test_the_documentation_is_built_with_its_warnings() -> None:
    """MkDocs counts no warnings with --quiet, so that its strict mode would accept every page."""
    command = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "mkdocs build" in line)
    assert yaml.safe_load((ROOT / "tools" / "docs" / "mkdocs.yml").read_text())["strict"]
    assert not {"--quiet", "-q", "--no-strict"} & set(command.split())
